"""One line of text for a step."""

from __future__ import annotations

from collections.abc import Mapping


def step_line(step: int, total: int | None, metrics: Mapping[str, float]) -> str:
    """What happened in a step; figures that the step does not have are left out.

    Example: step  12/80  reward 0.512 +- 0.301  kl 0.0012  loss -0.0031  grad 0.82  clip 1.2%  len 5.0+3.4
    tok/s 1,234  | 0.61 s: generate 0.42  update 0.19
    """
    width = len(str(total)) if total else 1
    parts = [f"step {step:>{width}}" + (f"/{total}" if total else "")]
    parts += [text for text in (_reward(metrics), *_figures(metrics), _lengths(metrics), _speed(metrics)) if text]
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
    ("val/accuracy", "accuracy {:.3f}"),
    ("val/loss", "val loss {:.4f}"),
    ("kl/ref", "kl {:.4f}"),
    ("sft/loss", "loss {:.4f}"),
    ("policy/loss", "loss {:+.4f}"),
    ("policy/grad_norm", "grad {:.2f}"),
    ("policy/clip_frac", "clip {:.1%}"),
    ("policy/entropy", "entropy {:.3f}"),
    ("policy/lr", "lr {:.2e}"),
)


def _figures(metrics: Mapping[str, float]) -> list[str]:
    return [form.format(metrics[name]) for name, form in _FIGURES if name in metrics]


def _lengths(metrics: Mapping[str, float]) -> str:
    """Mean tokens: prompt + response."""
    lengths = [metrics[name] for name in ("length/prompt_mean", "length/response_mean") if name in metrics]
    return f"len {'+'.join(f'{length:.1f}' for length in lengths)}" if lengths else ""


def _speed(metrics: Mapping[str, float]) -> str:
    return f"tok/s {metrics['perf/tokens_per_s']:,.0f}" if "perf/tokens_per_s" in metrics else ""
