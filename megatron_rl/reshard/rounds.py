"""When each move between ranks travels: rounds of messages under a cap on staging memory. Pure integers.

A rank makes its rounds from its own moves alone. Two ranks, a lower and a higher one, cut what they send each other
into chunks, by the list of moves between them, which both have. Chunk c of the ranks r and s travels in round
(wave, c, meeting(r, s)): for one r, each s has another meeting, so a rank has one peer in a round and the whole room
for it. No rank has to know what other ranks do.

Every rank goes through its rounds in ascending order. Of all rounds that are not done, the lowest has its two ranks
waiting for nothing else: so no rank waits for one that waits for it. Two rounds are in flight (while one travels, the
next is packed), so the messages of a rank in one round, sent and received, are at most half the cap.

Example: 4 ranks, cap 16 bytes, rows of 2 bytes. Rank 0 sends six rows to rank 1, which sends it two, and one row to
rank 2. The first two share the room of 8 bytes as 6 and 2: round (0, 0, (1, 0)) has three rows one way and one the
other way, round (0, 1, (1, 0)) the others. Round (0, 0, (2, 0)) has the row for rank 2 and comes between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple

from megatron_rl.errors import ReshardError
from megatron_rl.reshard.plan import Move, RankPlan

ALIGNED_TO = 16
"""Bytes: what copies on a GPU move at a time (ops/copies.py)."""


class Piece(NamedTuple):
    """Rows of a move that travel in one message; rows are the HF tensor's."""

    move: Move
    rows: tuple[int, int]
    num_bytes: int


@dataclass(frozen=True)
class Round:
    """What a rank and a peer send each other at a time: at most a message each way, its pieces end to end.

    chunk: the round is (wave, chunk, meeting of the two).
    """

    wave: int
    chunk: int
    peer: int
    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]

    @cached_property
    def sent_bytes(self) -> int:
        """Length of the message to the peer; 0: there is none."""
        return sum(piece.num_bytes for piece in self.sends)

    @cached_property
    def received_bytes(self) -> int:
        """Length of the message from the peer; 0: there is none."""
        return sum(piece.num_bytes for piece in self.receives)

    @property
    def num_bytes(self) -> int:
        """Staging memory that the round takes."""
        return self.sent_bytes + self.received_bytes


def row_size(move: Move) -> int:
    """Elements of one row of a move."""
    return 1 if move.cols is None else move.cols[1] - move.cols[0]


def meeting(rank: int, peer: int, world: int) -> tuple[int, int]:
    """When two of `world` ranks meet, among all pairs of ranks: the same for both, and another one for each peer.

    Blocks of as many ranks as the largest power of two that divides `world`: by exclusive or within blocks, where all
    ranks are busy at any time, and by the sum of the blocks' numbers between them. Ranks that have alike to send hardly
    wait for each other then; by exclusive or alone they take twice the time on 96 ranks.
    """
    block = world & -world
    return (rank ^ peer) % block, (rank // block + peer // block) % (world // block)


def rounds_of_rank(part: RankPlan, world: int, *, element_size: Callable[[int], int], cap_bytes: int) -> list[Round]:
    """The rounds of one of `world` ranks, in order; rounds in which it has nothing to do are left out.

    element_size: bytes of an element as it travels in a wave. Raises ReshardError if half the cap does not hold one row
    of some tensor.
    """
    links: dict[tuple[int, int], tuple[list[Move], list[Move]]] = {}
    for move in part.sends:
        links.setdefault((move.wave, move.target), ([], []))[0].append(move)
    for move in part.receives:
        links.setdefault((move.wave, move.source), ([], []))[1].append(move)
    rounds: list[Round] = []
    for (wave, peer), (sends, receives) in links.items():
        size, room = element_size(wave), cap_bytes // 2
        upward = part.rank < peer
        # The lower rank's messages come first on both ranks.
        cut = _cut(sends, receives, size, room) if upward else _cut(receives, sends, size, room)
        for chunk, (first, second) in enumerate(cut):
            rounds.append(Round(wave, chunk, peer, *((first, second) if upward else (second, first))))
    return sorted(rounds, key=lambda one: (one.wave, one.chunk, meeting(part.rank, one.peer, world)))


def _cut(
    up: Sequence[Move], down: Sequence[Move], element_size: int, room: int
) -> Iterable[tuple[tuple[Piece, ...], tuple[Piece, ...]]]:
    """The chunks of two ranks: both directions at a time, each with its share of the room."""
    (up_bytes, up_row), (down_bytes, down_row) = (_sizes(moves, element_size, room) for moves in (up, down))
    share = room * up_bytes // (up_bytes + down_bytes)
    if up_row <= share and down_row <= room - share:
        return zip_longest(_chunks(up, element_size, share), _chunks(down, element_size, room - share), fillvalue=())
    # Rows are so long that a share does not hold one: one direction after the other.
    up_chunks, down_chunks = _chunks(up, element_size, room), _chunks(down, element_size, room)
    return [(pieces, ()) for pieces in up_chunks] + [((), pieces) for pieces in down_chunks]


def _sizes(moves: Iterable[Move], element_size: int, room: int) -> tuple[int, int]:
    """Bytes of moves, and of the longest row among them."""
    total = longest = 0
    for move in moves:
        row = row_size(move) * element_size
        if row > room:
            raise ReshardError(
                f"rollout.sync_bucket_mb: half of it ({room} bytes) does not hold one row of {move.hf_name} ({row} "
                "bytes); raise it"
            )
        total += row * (move.rows[1] - move.rows[0])
        longest = max(longest, row)
    return total, longest


def _chunks(moves: Iterable[Move], element_size: int, room: int) -> list[tuple[Piece, ...]]:
    """Moves one after another in chunks of at most `room` bytes. A move is cut between rows; each row fits.

    Pieces whose length is no multiple of ALIGNED_TO come last in a chunk: the others are aligned in the message then.
    """
    chunks: list[tuple[Piece, ...]] = []
    pieces: list[Piece] = []
    free = room
    for move in moves:
        size = row_size(move) * element_size
        row, end = move.rows
        while row < end:
            count = min(free // size, end - row)
            if count:
                pieces.append(Piece(move, (row, row + count), count * size))
                row, free = row + count, free - count * size
            else:
                chunks.append(_odd_last(pieces))
                pieces, free = [], room
    if pieces:
        chunks.append(_odd_last(pieces))
    return chunks


def _odd_last(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    return tuple(sorted(pieces, key=lambda piece: piece.num_bytes % ALIGNED_TO > 0))
