"""Engine answers as tests compare them."""

from __future__ import annotations

from megatron_rl.types import Rollout, Samples


def by_request(samples: Samples, n: int = 1) -> list[list[Rollout]]:
    """The n samples of each request, without text."""
    rows = [samples.rollout(row, "") for row in range(len(samples))]
    return [rows[first : first + n] for first in range(0, len(rows), n)]
