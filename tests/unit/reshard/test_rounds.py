"""The schedule of buckets: everything travels once, both ends agree, and staging stays below its cap (W9)."""

from __future__ import annotations

import time
from collections import Counter
from itertools import zip_longest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import ReshardError
from megatron_rl.reshard.plan import Move
from megatron_rl.reshard.rounds import Round, rounds_of_rank

RANKS = range(4)
MOVES = st.lists(
    st.builds(
        lambda tensor, row, rows, cols, ends, wave: Move(f"t{tensor}", (row, row + rows), cols, ends[0], ends[1], wave),
        st.integers(0, 9),
        st.integers(0, 3),
        st.integers(1, 40),
        st.sampled_from([None, (0, 4), (2, 7)]),
        st.permutations(RANKS).map(lambda ranks: ranks[:2]),
        st.integers(0, 1),
    ),
    max_size=30,
)


def _rounds(moves: list[Move], cap: int = 64) -> dict[int, list[Round]]:
    # Elements are smaller in wave 0, as where engines hold float32 and trainers bfloat16.
    return {rank: rounds_of_rank(moves, rank, element_size=lambda wave: 2 + 2 * wave, cap_bytes=cap) for rank in RANKS}


@settings(max_examples=200, deadline=None)
@given(MOVES)
def test_every_row_travels_once_within_the_cap_and_both_ends_agree(moves: list[Move]) -> None:
    rounds = _rounds(moves)
    posted: dict[str, Counter[object]] = {"sends": Counter(), "receives": Counter()}
    streams: dict[str, dict[tuple[int, int], list[object]]] = {"sends": {}, "receives": {}}
    for rank, of_rank in rounds.items():
        assert [one.wave for one in of_rank] == sorted(one.wave for one in of_rank), "waves in order"
        for before, after in zip_longest(of_rank, of_rank[1:]):
            assert before.num_bytes + (after.num_bytes if after else 0) <= 64, "two rounds are in flight"
            assert len({bucket.peer for bucket in before.sends}) == len(before.sends), "one message to a peer"
            for side, buckets in (("sends", before.sends), ("receives", before.receives)):
                for bucket in buckets:
                    link = (rank, bucket.peer) if side == "sends" else (bucket.peer, rank)
                    streams[side].setdefault(link, []).append(bucket.pieces)
                    posted[side].update((piece.move, row) for piece in bucket.pieces for row in range(*piece.rows))
    assert streams["sends"] == streams["receives"], "messages of a link are alike on both ends, in order"
    assert posted["sends"] == posted["receives"] == Counter((m, row) for m in moves for row in range(*m.rows))


def test_rounds_are_filled_before_new_ones_start() -> None:
    """The example of reshard/rounds.py."""
    moves = [Move("a", (0, 3), None, 0, 1, 0), Move("b", (0, 1), None, 0, 2, 0)]
    first, second = rounds_of_rank(moves, 0, element_size=lambda wave: 2, cap_bytes=8)
    assert [(bucket.peer, bucket.pieces[0].rows) for bucket in first.sends] == [(1, (0, 2))]
    assert [(bucket.peer, bucket.pieces[0].rows) for bucket in second.sends] == [(1, (2, 3)), (2, (0, 1))]


def test_a_cap_below_a_row_is_refused() -> None:
    with pytest.raises(ReshardError, match=r"sync_bucket_mb.*wide.*80 bytes"):
        rounds_of_rank([Move("wide", (0, 2), (0, 20), 0, 1, 0)], 1, element_size=lambda wave: 4, cap_bytes=159)


def test_the_schedule_takes_time_in_proportion_to_the_moves() -> None:
    """38,400 moves of 32 ranks: 0.5 s of CPU; 7 s if each move looks at all rounds that its two ranks have."""
    pairs = [(source, target) for source in range(32) for target in range(32) if source // 2 != target // 2]
    moves = [Move(f"w{n}", (0, 8), (0, 64), *pair, 0) for n in range(40) for pair in pairs]
    start = time.process_time()
    rounds = rounds_of_rank(moves, 0, element_size=lambda wave: 2, cap_bytes=16384)
    assert time.process_time() - start < 3.0
    # Each rank sends and receives 1,200 moves of 1 KiB, and a round takes 8 of them: no round is left half empty.
    assert len(rounds) == 300
