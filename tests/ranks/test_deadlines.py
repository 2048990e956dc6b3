"""R7: a wait between ranks ends when its own deadline says, and names rank, phase and what it waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from megatron_rl.errors import P2PError
from megatron_rl.parallel.p2p import P2PGroup
from tests.helpers.run_ranks import run_ranks

DEADLINE_S, ABSENT_S = 1.0, 6.0
WAITS: dict[str, Callable[[P2PGroup], object]] = {
    "a status": lambda group: group.agree("sync of weight version 3", "plan"),
    "a message": lambda group: group.post([], [(1, torch.empty(4))], "round 2").wait(),
}


def _wait_in_vain(rank: int, world: int) -> dict[str, tuple[str, float]]:
    """What rank 0 gets, and after how many seconds, while rank 1 is busy elsewhere."""
    groups = {name: dist.new_group([0, 1]) for name in WAITS}
    dist.barrier()
    if rank == 1:
        time.sleep(ABSENT_S)
        return {}
    found: dict[str, tuple[str, float]] = {}
    for name, wait in WAITS.items():
        group = groups[name]
        assert isinstance(group, dist.ProcessGroup)
        start = time.monotonic()
        with pytest.raises(P2PError) as caught:
            wait(P2PGroup(group, timeout_s=DEADLINE_S))
        found[name] = str(caught.value), time.monotonic() - start
    return found


@pytest.fixture(scope="module")
def waits() -> dict[str, tuple[str, float]]:
    return run_ranks(2, _wait_in_vain, timeout=90)[0]


@pytest.mark.parametrize(
    "name, said",
    [
        ("a status", "rank 0: sync of weight version 3: a status from each of 2 ranks did not finish within 1 s"),
        ("a message", "rank 0: round 2: messages to ranks [] and from ranks [1] did not finish within 1 s"),
    ],
)
def test_r7_a_rank_that_does_not_come_costs_the_deadline_and_no_more(
    waits: dict[str, tuple[str, float]], name: str, said: str
):
    text, seconds = waits[name]
    assert said in text
    assert DEADLINE_S * 0.9 <= seconds < DEADLINE_S + 1.5, "the other rank is away for longer"
