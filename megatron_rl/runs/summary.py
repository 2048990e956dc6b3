"""What became of the rows of a run's data, for its first lines."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from megatron_rl.config.checks.lora import adapters_of
from megatron_rl.config.run import RunConfig
from megatron_rl.models import FAMILIES
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.models.lora import a_name, adapter_shapes, bound_counts, num_adapter_parameters
from megatron_rl.models.rules import num_parameters
from megatron_rl.trainers.parts import Counted


def adapter_lines(cfg: RunConfig, bound: Collection[str]) -> list[str]:
    """What trains with LoRA, and what that saves. bound: layers that have an adapter, by Hugging Face's names."""
    lora = cfg.model.lora
    shape = read_model_shape(cfg.model.path, changes=cfg.model.override_config)
    family, adapters = FAMILIES[shape.architecture], adapters_of(lora, shape)
    assert adapters is not None
    expected = bound_counts(adapter_shapes(shape, family, adapters))
    counts = bound_counts([a_name(name) for name in bound])
    each = ", ".join(f"{name} {count}" for name, count in counts.items())
    trained, whole = num_adapter_parameters(shape, family, adapters), num_parameters(shape, family)
    # AdamW's two means, and masters where the weights are of half precision.
    size = 8 if cfg.model.dtype == "float32" else 12
    lines = [
        f"LoRA of rank {lora.rank}, scale {adapters.scale:g}: {len(bound)} of {sum(expected.values())} layers have an "
        f"adapter ({each})",
        f"LoRA: {trained:,} numbers train beside {whole:,}; optimizer state {trained * size / 2**20:,.1f} MiB over all "
        f"ranks in place of {whole * size / 2**20:,.1f}",
    ]
    if lora.path is not None and cfg.needs_reference and cfg.ref.path is None:
        lines.append(
            "LoRA: the reference is the model without adapters, and not what training begins with (model.lora.path); "
            "for that, export --merge and begin from the merged model"
        )
    return lines


def summary_lines(
    sets: Mapping[str, Counted],
    mix_weights: Mapping[str, float],
    more_notes: Mapping[str, Sequence[str]] | None = None,
) -> list[str]:
    """Rows read, left out, cut and taken from a cache, by set; used rows and shares by source; notes (contract R6).

    more_notes: of each set, beside its own.
    """
    lines: list[str] = []
    for name, data in sets.items():
        cached = f"; tokens of {data.num_cached:,} rows were kept from an earlier run" if data.num_cached else ""
        lines.append(
            f"{name}: {data.num_rows:,} rows, {data.num_filtered:,} left out and {data.num_truncated:,} cut for "
            f"length{cached}"
        )
        mix = mix_weights if name == "train" else dict[str, float]()
        if len(data.rows_by_source) > 1 or mix:
            parts = [
                f"{source} {count:,} rows"
                + (f" for {mix[source] / sum(mix.values()):.1%} of the samples" if mix else "")
                for source, count in data.rows_by_source.items()
            ]
            lines.append(f"{name}: {', '.join(parts)}")
        lines += [f"{name}: {note}" for note in (*data.notes, *(more_notes or {}).get(name, ()))]
    return lines
