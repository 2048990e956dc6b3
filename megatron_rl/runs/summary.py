"""What became of the rows of a run's data, for its first lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_rl.trainers.parts import Counted


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
