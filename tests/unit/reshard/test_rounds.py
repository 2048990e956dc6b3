"""The rounds of messages: everything travels once, both ends agree, no rank waits in a circle, and staging stays below
its cap (W9). Every rank makes its rounds from its own moves.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import ReshardError
from megatron_rl.reshard.plan import Move, RankPlan
from megatron_rl.reshard.rounds import Round, meeting, rounds_of_rank

RANKS = range(6)
CAP = 64
MOVES = st.lists(
    st.builds(
        lambda tensor, row, rows, cols, ends, wave: Move(f"t{tensor}", (row, row + rows), cols, ends[0], ends[1], wave),
        st.integers(0, 9),
        st.integers(0, 3),
        st.integers(1, 40),
        st.sampled_from([None, (0, 4), (2, 7), (0, 8)]),
        st.permutations(RANKS).map(lambda ranks: ranks[:2]),
        st.integers(0, 1),
    ),
    max_size=20,
)


def _part(moves: list[Move], rank: int) -> RankPlan:
    """What a plan gives one rank: its own moves, by wave."""
    mine = sorted((move for move in moves if rank in (move.source, move.target)), key=lambda move: move.wave)
    sends = tuple(move for move in mine if move.source == rank)
    return RankPlan(rank, (), sends, tuple(move for move in mine if move.target == rank))


def _rounds(moves: list[Move], cap: int = CAP) -> dict[int, list[Round]]:
    # Elements are smaller in wave 0, as where engines hold float32 and trainers bfloat16.
    return {
        rank: rounds_of_rank(_part(moves, rank), len(RANKS), element_size=lambda wave: 2 + 2 * wave, cap_bytes=cap)
        for rank in RANKS
    }


@settings(max_examples=80, deadline=None)
@given(MOVES)
def test_every_row_travels_once_within_the_cap_and_both_ends_agree(moves: list[Move]) -> None:
    rounds = _rounds(moves)
    posted: Counter[object] = Counter()
    messages: dict[str, dict[tuple[int, int], list[object]]] = {"sends": {}, "receives": {}}
    for rank, of_rank in rounds.items():
        keys = [(one.wave, one.chunk, meeting(rank, one.peer, len(RANKS))) for one in of_rank]
        assert keys == sorted(set(keys)), "the rounds ascend, and a round has one peer"
        assert all(one.num_bytes <= CAP // 2 for one in of_rank)
        assert all(one.num_bytes + other.num_bytes <= CAP for one, other in pairwise(of_rank)), "two are in flight"
        for key, one in zip(keys, of_rank, strict=True):
            if one.sends:
                messages["sends"].setdefault((rank, one.peer), []).append((key, one.sends))
                posted.update((piece.move, row) for piece in one.sends for row in range(*piece.rows))
            if one.receives:
                messages["receives"].setdefault((one.peer, rank), []).append((key, one.receives))
    assert messages["sends"] == messages["receives"], "both ends have the same messages in the same rounds"
    assert posted == Counter((move, row) for move in moves for row in range(*move.rows))


@settings(max_examples=80, deadline=None)
@given(MOVES, st.randoms(use_true_random=False))
def test_no_rank_waits_in_a_circle_whatever_order_ranks_run_in(moves: list[Move], random: object) -> None:
    """Ranks post a round, then wait for the one before, as execute.py does; a message arrives once both have posted."""
    rounds = _rounds(moves)
    posted = dict.fromkeys(RANKS, 0)  # rounds that a rank has posted
    numbers = {
        (rank, one.wave, one.chunk, one.peer): number
        for rank, of_rank in rounds.items()
        for number, one in enumerate(of_rank)
    }

    def done(rank: int, number: int) -> bool:
        """Whether the peer has posted the same round."""
        one = rounds[rank][number]
        return posted[one.peer] > numbers[one.peer, one.wave, one.chunk, rank]

    def can_post(rank: int) -> bool:
        number = posted[rank]
        if number == len(rounds[rank]):
            return False
        in_flight = 0 if number and rounds[rank][number - 1].wave != rounds[rank][number].wave else 1
        return number - in_flight <= 0 or done(rank, number - in_flight - 1)

    while True:
        able = [rank for rank in RANKS if can_post(rank)]
        if not able:
            break
        posted[random.choice(able)] += 1  # type: ignore[attr-defined]
    assert posted == {rank: len(rounds[rank]) for rank in RANKS}
    assert all(done(rank, number) for rank in RANKS for number in range(posted[rank]))


@pytest.mark.parametrize("world", [1, 2, 3, 6, 8, 24, 40])
def test_a_rank_meets_each_other_rank_at_a_time_of_its_own(world: int) -> None:
    """And all at once, where they can: no rank is idle while 2 ** n ranks meet each other."""
    for rank in range(world):
        times = [meeting(rank, peer, world) for peer in range(world) if peer != rank]
        assert len(set(times)) == len(times)
        assert times == [meeting(peer, rank, world) for peer in range(world) if peer != rank]
    everyone = {meeting(rank, peer, world) for rank in range(world) for peer in range(world) if peer != rank}
    assert len(everyone) <= (world - 1 if world & (world - 1) == 0 else world)


def test_both_directions_of_a_link_share_the_room() -> None:
    """The example of reshard/rounds.py."""
    moves = [Move("a", (0, 6), None, 0, 1, 0), Move("b", (0, 2), None, 1, 0, 0), Move("c", (0, 1), None, 0, 2, 0)]
    rounds = rounds_of_rank(_part(moves, 0), 8, element_size=lambda wave: 2, cap_bytes=16)
    found = [
        (one.chunk, one.peer, [piece.rows for piece in one.sends], [piece.rows for piece in one.receives])
        for one in rounds
    ]
    assert found == [(0, 1, [(0, 3)], [(0, 1)]), (0, 2, [(0, 1)], []), (1, 1, [(3, 6)], [(1, 2)])]


def test_rows_longer_than_a_share_of_the_room_travel_one_direction_after_the_other() -> None:
    moves = [Move("a", (0, 2), (0, 14), 0, 1, 0), Move("b", (0, 2), (0, 14), 1, 0, 0)]
    rounds = rounds_of_rank(_part(moves, 1), 8, element_size=lambda wave: 2, cap_bytes=64)
    assert [(one.sent_bytes, one.received_bytes) for one in rounds] == [(0, 28), (0, 28), (28, 0), (28, 0)]


def test_a_cap_below_a_row_is_refused() -> None:
    with pytest.raises(ReshardError, match=r"sync_bucket_mb.*wide.*80 bytes"):
        rounds_of_rank(
            _part([Move("wide", (0, 2), (0, 20), 0, 1, 0)], 1), 2, element_size=lambda wave: 4, cap_bytes=159
        )


def test_no_round_of_an_exchange_is_left_half_empty() -> None:
    """Each of 8 ranks sends and receives 1,400 moves of 1 KiB; a round takes 8 of them."""
    pairs = [(source, target) for source in range(8) for target in range(8) if source != target]
    moves = [Move(f"w{n}", (0, 8), (0, 64), *pair, 0) for n in range(200) for pair in pairs]
    rounds = rounds_of_rank(_part(moves, 3), 8, element_size=lambda wave: 2, cap_bytes=16384)
    assert len(rounds) == 2 * 1400 / 8
    assert all(one.sent_bytes == one.received_bytes == 4096 for one in rounds)


def test_pieces_that_would_spoil_the_alignment_of_others_come_last() -> None:
    moves = [Move("odd", (0, 3), None, 0, 1, 0), Move("even", (0, 2), (0, 8), 0, 1, 0)]
    for rank in (0, 1):
        (one,) = rounds_of_rank(_part(moves, rank), len(RANKS), element_size=lambda wave: 2, cap_bytes=1024)
        assert [piece.move.hf_name for piece in one.sends or one.receives] == ["even", "odd"]
