"""What the messages of several checks say alike."""

from __future__ import annotations

import difflib

from megatron_rl.config.run import RunConfig
from megatron_rl.errors import Fault


def divisors(number: int) -> list[int]:
    """Whole numbers that divide `number`, ascending."""
    return [part for part in range(1, number + 1) if number % part == 0]


def listed(values: list[int]) -> str:
    """[1, 2, 4] as "1, 2 or 4"."""
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


def ranks(cfg: RunConfig) -> str:
    """The ranks of the run, with the keys that say so."""
    nnodes, per_node = cfg.cluster.nnodes, cfg.cluster.n_gpus_per_node
    return f"{nnodes * per_node} ranks (cluster.nnodes {nnodes} * cluster.n_gpus_per_node {per_node})"


def longest_sequence(cfg: RunConfig) -> str:
    """Tokens of the longest sequence, with the keys that say so."""
    data = cfg.data
    return f"{cfg.max_sequence_length} (data.max_prompt_length {data.max_prompt_length} + " + (
        f"data.max_response_length {data.max_response_length})"
    )


def unknown_name(key: str, value: str, names: tuple[str, ...]) -> Fault:
    """The fault of a name that is none of `names`."""
    close = difflib.get_close_matches(value, names, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return Fault(key, value, "there is no such name", f"{hint}known: {', '.join(names)}")
