"""One line of text for a step."""

from __future__ import annotations

from collections.abc import Mapping


def step_line(step: int, total: int | None, metrics: Mapping[str, float]) -> str:
    """The main metrics of a step in one line; those that the step lacks are left out.

    Example: step  12/80  reward 0.512 +- 0.301  failed 2  kl 0.0012  loss -0.0031  grad 0.82  clip 1.2%
    mismatch 0.0041  len 5.0+3.4  cut 6.2%  tok/s 1,234  mem 3.1 GiB  left 0:00:42  | 0.61 s: generate 0.42  update 0.19
    """
    width = len(str(total)) if total else 1
    parts = [f"step {step:>{width}}" + (f"/{total}" if total else "")]
    parts += [text for text in (_reward(metrics), *_figures(metrics), _lengths(metrics), *_costs(metrics)) if text]
    times = {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}
    line = "  ".join(parts)
    if not times:
        return line
    whole = times.pop("step", None)
    head = "" if whole is None else f"{whole:.2f} s: "
    phases = "  ".join(f"{name} {seconds:.2f}" for name, seconds in times.items())
    return f"{line}  | {head}{phases}".rstrip(": ")


def _reward(metrics: Mapping[str, float]) -> str:
    if "reward/mean" not in metrics:
        return ""
    text = f"reward {metrics['reward/mean']:.3f}"
    return text + (f" +- {metrics['reward/std']:.3f}" if "reward/std" in metrics else "")


_FIGURES = (
    ("reward/failed", "failed {:.0f}"),
    ("val/accuracy", "accuracy {:.3f}"),
    ("val/loss", "val loss {:.4f}"),
    ("val/reward", "val reward {:.3f}"),
    ("kl/ref", "kl {:.4f}"),
    ("sft/loss", "loss {:.4f}"),
    ("preference/loss", "loss {:.4f}"),
    ("preference/accuracy", "accuracy {:.3f}"),
    ("preference/margin", "margin {:+.3f}"),
    ("policy/loss", "loss {:+.4f}"),
    ("policy/grad_norm", "grad {:.2f}"),
    ("policy/clip_frac", "clip {:.1%}"),
    ("policy/entropy", "entropy {:.3f}"),
    ("policy/lr", "lr {:.2e}"),
    ("mismatch/abs_mean", "mismatch {:.2g}"),
)


def _figures(metrics: Mapping[str, float]) -> list[str]:
    figures = [form.format(metrics[name]) for name, form in _FIGURES if name in metrics]
    skips = metrics.get("trainer/nonfinite_skips", 0.0)
    return figures + ([f"skipped {skips:.0f} mini-batches so far"] if skips else [])


def _lengths(metrics: Mapping[str, float]) -> str:
    """Mean tokens: prompt + response; share of responses that reached the length limit."""
    lengths = [metrics[name] for name in ("length/prompt_mean", "length/response_mean") if name in metrics]
    if not lengths:
        return ""
    cut = f"  cut {metrics['length/cut_share']:.1%}" if "length/cut_share" in metrics else ""
    return f"len {'+'.join(f'{length:.1f}' for length in lengths)}{cut}"


def _costs(metrics: Mapping[str, float]) -> list[str]:
    """Tokens a second, peak memory of the fullest rank, and the estimated time left."""
    costs = [f"tok/s {metrics['perf/tokens_per_s']:,.0f}"] if "perf/tokens_per_s" in metrics else []
    if "perf/mfu" in metrics:
        costs.append(f"mfu {metrics['perf/mfu']:.1%}")
    if "memory/peak_gib" in metrics:
        costs.append(f"mem {metrics['memory/peak_gib']:.1f} GiB")
    if "perf/left_s" in metrics:
        minutes, seconds = divmod(round(metrics["perf/left_s"]), 60)
        costs.append(f"left {minutes // 60}:{minutes % 60:02d}:{seconds:02d}")
    return costs
