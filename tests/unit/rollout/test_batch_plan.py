"""Plans of batches: every sequence is computed whole and in order, in blocks of its own, whatever there is room for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import RolloutError
from megatron_rl.rollout.batch_plan import DecodePlan, Room, Stretch


class _Play:
    """A plan that is carried out by sequences which end after `responses` tokens.

    The cache is played too: which token of which sequence a slot holds. What a next token sees must be there.
    """

    def __init__(self, plan: DecodePlan, responses: list[int], interval: int) -> None:
        self.plan, self.responses, self.interval = plan, responses, interval
        self.lens, self.done = np.zeros(len(responses), np.int32), np.zeros(len(responses), np.bool_)
        self.cache: dict[tuple[int, int], tuple[int, int]] = {}
        self.put_off = 0

    def slot(self, sequence: int, position: int) -> tuple[int, int]:
        size = self.plan.room.block_size
        block = int(self.plan.table[sequence, position // size])
        assert 1 <= block <= self.plan.room.num_blocks
        return block, position % size

    def owner(self, sequence: int, position: int) -> int:
        """Tokens of a prompt are the same for all its samples."""
        return -1 - sequence // self.plan.n if position < self.plan.prompt_len(sequence) else sequence

    def write(self, sequence: int, positions: range) -> None:
        for position in positions:
            self.cache[self.slot(sequence, position)] = (self.owner(sequence, position), position)

    def check(self, sequence: int, length: int) -> None:
        for position in range(length):
            assert self.cache[self.slot(sequence, position)] == (self.owner(sequence, position), position)

    def take(self, sequence: int) -> None:
        self.lens[sequence] += 1
        self.done[sequence] = self.lens[sequence] == self.responses[sequence]

    def one_pass(self, pieces: list[Stretch]) -> None:
        room = self.plan.room
        assert sum(piece.end - piece.start for piece in pieces) <= room.tokens and len(pieces) <= room.rows
        for piece in pieces:
            self.write(piece.sequence, range(piece.start, piece.end))
        for piece in pieces:
            self.check(piece.sequence, piece.end)
            if self.plan.ends(piece):
                self.take(piece.sequence)

    def step(self) -> None:
        going = [sequence for sequence in self.plan.running if not self.done[sequence]]
        lengths = [self.plan.prompt_len(sequence) + int(self.lens[sequence]) for sequence in going]
        for sequence, length in zip(going, lengths, strict=True):
            self.write(sequence, range(length - 1, length))
        for sequence, length in zip(going, lengths, strict=True):
            self.check(sequence, length)
            self.take(sequence)

    def one_interval(self) -> None:
        before = len(self.plan.running)
        self.plan.grow(self.interval)
        self.put_off += before - len(self.plan.running)
        begun = self.plan.admit(self.interval)
        assert len(self.plan.running) <= self.plan.room.rows
        for pieces in self.plan.passes(begun):
            self.one_pass(pieces)
        for _ in range(min(self.interval, self.plan.most_steps(begun))):
            self.step()
        self.plan.update(self.lens.copy(), self.done)


def _run(prompt_lens: list[int], n: int, responses: list[int], max_tokens: int, room: Room, interval: int) -> int:
    """Play a plan to its end; how often a sequence was put off."""
    play = _Play(DecodePlan(prompt_lens, n, max_tokens, room), responses, interval)
    for _ in range(10_000):
        if not play.plan.unfinished:
            break
        play.one_interval()
    assert not play.plan.unfinished and play.lens.tolist() == responses
    assert sorted(play.plan.free) == list(range(1, room.num_blocks + 1)), "all blocks came back"
    return play.put_off


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_sequence_is_computed_whole_with_blocks_of_its_own(data: st.DataObject) -> None:
    draw = data.draw
    max_tokens, n = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    prompt_lens = draw(st.lists(st.integers(1, 20), min_size=1, max_size=6))
    responses = [draw(st.integers(1, max_tokens)) for _ in range(len(prompt_lens) * n)]
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    smallest = -(-(max(prompt_lens) + max_tokens) // block_size)
    room = Room(
        num_blocks=smallest + draw(st.integers(0, 20)),
        block_size=block_size,
        rows=draw(st.integers(1, 8)),
        tokens=draw(st.integers(1, 30)),
    )
    _run(prompt_lens, n, responses, max_tokens, room, draw(st.sampled_from([1, 3, 16])))


def test_sequences_that_outgrow_the_cache_are_put_off_and_go_on() -> None:
    assert _run([4, 4, 4, 4], 1, [20] * 4, 20, Room(num_blocks=8, block_size=4, rows=4, tokens=64), 4) > 0


def test_samples_of_a_prompt_share_the_blocks_that_it_fills() -> None:
    plan = DecodePlan([10], 3, 4, Room(num_blocks=40, block_size=4, rows=8, tokens=64))
    begun = plan.admit(4)
    assert begun == [0, 1, 2]
    assert plan.passes(begun) == [[Stretch(0, 0, 8)], [Stretch(0, 8, 10), Stretch(1, 8, 10), Stretch(2, 8, 10)]]
    assert (plan.table[:, :2] == plan.table[0, :2]).all() and len(set(plan.table[:, 2].tolist())) == 3
    # A prompt that fills its blocks: the last token's block is each sample's own.
    whole = DecodePlan([8], 2, 4, Room(num_blocks=40, block_size=4, rows=8, tokens=5))
    assert whole.passes(whole.admit(4)) == [
        [Stretch(0, 0, 4)],
        [Stretch(0, 4, 8), Stretch(1, 4, 5)],
        [Stretch(1, 5, 8)],
    ]


def test_a_sequence_that_the_cache_cannot_hold_is_refused() -> None:
    with pytest.raises(RolloutError, match="a sequence of 15 tokens needs 4 blocks of the KV cache, which has 3"):
        DecodePlan([5], 1, 10, Room(num_blocks=3, block_size=4, rows=1, tokens=8))
