"""When each remote move travels: rounds of buckets under a cap on staging memory. Pure integers.

All ranks make the same schedule from the same plan. In a round every rank posts all its messages at once, one to and
one from each rank it deals with. A message of round r is sent and received in round r, and every rank goes through its
rounds in order: so no rank waits for one that waits for it. Two rounds are in flight (while one travels, the next is
packed), so the buckets of a rank in one round, sent and received, are at most half the cap.

Example: cap 8 bytes, rank 0 sends rows of 2 bytes, three of them to rank 1 and one to rank 2. A round has room for two:
round 0 is 0 -> 1 (rows 0:2), round 1 is 0 -> 1 (row 2) and 0 -> 2. Staging on rank 0: 4 + 4 bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_rl.errors import ReshardError
from megatron_rl.reshard.plan import Move


@dataclass(frozen=True)
class Piece:
    """Rows of a move that travel in one bucket; rows are the HF tensor's."""

    move: Move
    rows: tuple[int, int]
    num_bytes: int


@dataclass(frozen=True)
class Bucket:
    """One message: pieces end to end."""

    peer: int
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Length of the message."""
        return sum(piece.num_bytes for piece in self.pieces)


@dataclass(frozen=True)
class Round:
    """The messages of one rank that are under way together."""

    wave: int
    sends: tuple[Bucket, ...]
    receives: tuple[Bucket, ...]

    @property
    def num_bytes(self) -> int:
        """Staging memory that the round takes."""
        return sum(bucket.num_bytes for bucket in (*self.sends, *self.receives))


def row_size(move: Move) -> int:
    """Elements of one row of a move."""
    return 1 if move.cols is None else move.cols[1] - move.cols[0]


def rounds_of_rank(
    moves: Sequence[Move], rank: int, *, element_size: Callable[[int], int], cap_bytes: int
) -> list[Round]:
    """The rounds of one rank, in order; rounds in which it has nothing to do are left out.

    moves: those between different ranks, the same sequence on all ranks. element_size: bytes of an element as it
    travels in a wave. Raises ReshardError where half the cap does not hold one row.
    """
    found: list[Round] = []
    for wave in sorted({move.wave for move in moves}):
        of_wave = [move for move in moves if move.wave == wave]
        found += _wave(of_wave, rank, wave, element_size(wave), cap_bytes // 2)
    return found


def _wave(moves: Sequence[Move], rank: int, wave: int, element_size: int, room: int) -> list[Round]:
    # used[rank][round]: bytes; start[rank]: its first round that is not full; reached[pair]: the round that the last
    # move between two ranks got to. Looking at the rounds before it again would make this moves x rounds.
    used: defaultdict[int, list[int]] = defaultdict(list)
    start: defaultdict[int, int] = defaultdict(int)
    reached: defaultdict[tuple[int, int], int] = defaultdict(int)
    mine: dict[int, dict[tuple[int, int], list[Piece]]] = {}
    for move in moves:
        size = row_size(move) * element_size
        if size > room:
            raise ReshardError(
                f"rollout.sync_bucket_mb: half of it ({room} bytes) does not hold one row of {move.hf_name} ({size} "
                "bytes); raise it"
            )
        pair = move.source, move.target
        at, (row, end) = reached[pair], move.rows
        while row < end:
            for side in (move.source, move.target):
                while start[side] < len(used[side]) and room - used[side][start[side]] < size:
                    start[side] += 1
                at = max(at, start[side])
            for side in (move.source, move.target):
                used[side].extend([0] * (at + 1 - len(used[side])))
            left = room - max(used[move.source][at], used[move.target][at])
            count = min(left // size, end - row)
            if count:
                piece = Piece(move, (row, row + count), count * size)
                used[move.source][at] += piece.num_bytes
                used[move.target][at] += piece.num_bytes
                if rank in pair:
                    mine.setdefault(at, {}).setdefault(pair, []).append(piece)
                row += count
                reached[pair] = at
            at += 1
    return [_round(wave, rank, mine[at]) for at in sorted(mine)]


def _round(wave: int, rank: int, pairs: dict[tuple[int, int], list[Piece]]) -> Round:
    sends = tuple(Bucket(target, tuple(pieces)) for (source, target), pieces in pairs.items() if source == rank)
    receives = tuple(Bucket(source, tuple(pieces)) for (source, target), pieces in pairs.items() if target == rank)
    return Round(wave, sends, receives)
