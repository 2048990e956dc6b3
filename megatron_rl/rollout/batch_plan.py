"""When each sequence of a batch runs, and in which blocks of the KV cache, if all requests are known at the start.

Sequence s is sample s % n of request s // n. A sequence waits, runs, and is done. The loop (vllm_batch.py) alternates:

    grow     each running sequence gets blocks for the next interval of steps. If there are too few, those that began
             last wait again: their blocks are free, and their tokens so far are computed anew when they go on.
    admit    waiting sequences get blocks, in order, as long as there are rows and blocks.
    passes   what has to be computed of those before they can take part in steps.
    update   what is done frees its blocks.

The samples of a request share the blocks that its prompt fills, but for the last token's: these are computed once. No
tensors here, and no randomness: every rank of an engine plans alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megatron_rl.errors import RolloutError


@dataclass(frozen=True)
class Room:
    """What the engine has room for. num_blocks: blocks 1..num_blocks of block_size tokens each; block 0 is never given
    out. rows: sequences that run at once. tokens: most tokens of one pass.
    """

    num_blocks: int
    block_size: int
    rows: int
    tokens: int


@dataclass(frozen=True)
class Stretch:
    """Tokens start..end-1 of a sequence, computed in one row of a pass."""

    sequence: int
    start: int
    end: int


@dataclass
class _Shared:
    """Blocks of a prompt that its running samples share."""

    blocks: list[int]
    users: int = 0
    computed: bool = False


@dataclass
class DecodePlan:
    """The state of a plan. table: [sequences, blocks of the longest] int32, block numbers, 0 beyond a sequence's."""

    prompt_lens: Sequence[int]
    n: int
    max_tokens: int
    room: Room
    table: npt.NDArray[np.int32] = field(init=False)
    lens: npt.NDArray[np.int32] = field(init=False)
    running: list[int] = field(init=False, default_factory=list[int])
    """In the order in which they began."""
    free: list[int] = field(init=False)
    """Blocks that nobody has."""

    def __post_init__(self) -> None:
        count = len(self.prompt_lens) * self.n
        longest = max(self.prompt_lens, default=0) + self.max_tokens
        if self._blocks(longest) > self.room.num_blocks:
            raise RolloutError(
                f"a sequence of {longest} tokens needs {self._blocks(longest)} blocks of the KV cache, which has "
                f"{self.room.num_blocks} of {self.room.block_size} tokens; raise rollout.kv_cache_gb or "
                "rollout.gpu_memory_utilization, or lower the lengths"
            )
        self.table = np.zeros((count, self._blocks(longest)), np.int32)
        self.lens = np.zeros(count, np.int32)
        self._num_blocks = [0] * count
        self._waiting = deque(range(count))
        self.free = list(range(self.room.num_blocks, 0, -1))
        self._shared: dict[int, _Shared] = {}

    @property
    def unfinished(self) -> bool:
        return bool(self.running or self._waiting)

    def prompt_len(self, sequence: int) -> int:
        return self.prompt_lens[sequence // self.n]

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.room.block_size)

    def _shared_blocks(self, sequence: int) -> int:
        """Blocks that the samples of its request share. The last token of a prompt is each sample's own: it is computed
        for the first sampled one.
        """
        return (self.prompt_len(sequence) - 1) // self.room.block_size if self.n > 1 else 0

    def _wanted(self, sequence: int, steps: int) -> int:
        """Blocks that a sequence needs to take part in `steps` more steps."""
        prompt = self.prompt_len(sequence)
        return self._blocks(min(prompt + int(self.lens[sequence]) + steps, prompt + self.max_tokens))

    def grow(self, steps: int) -> None:
        """Blocks for `steps` more tokens of each running sequence; the last ones wait again if there are too few."""
        for sequence in list(self.running):
            if sequence not in self.running:
                break
            missing = self._wanted(sequence, steps) - self._num_blocks[sequence]
            while missing > len(self.free) and self.running[-1] != sequence:
                self._put_off(self.running[-1])
            if missing > len(self.free):
                self._put_off(sequence)
                break
            self._give(sequence, missing)

    def _put_off(self, sequence: int) -> None:
        self._release(sequence)
        self.running.remove(sequence)
        self._waiting.appendleft(sequence)

    def _give(self, sequence: int, count: int) -> None:
        have = self._num_blocks[sequence]
        for place in range(have, have + count):
            self.table[sequence, place] = self.free.pop()
        self._num_blocks[sequence] = have + count

    def admit(self, steps: int) -> list[int]:
        """Begin waiting sequences, with blocks for what they have and `steps` more tokens; those that began."""
        begun: list[int] = []
        while self._waiting and len(self.running) < self.room.rows:
            sequence = self._waiting[0]
            group, shared = sequence // self.n, self._shared_blocks(sequence)
            wanted = self._wanted(sequence, steps)
            needed = wanted - (shared if group in self._shared else 0)
            # A block for each running one: the next growth should put nobody off again.
            if needed + len(self.running) > len(self.free) and (self.running or needed > len(self.free)):
                break
            self._waiting.popleft()
            if shared:
                kept = self._shared.setdefault(group, _Shared([]))
                if not kept.blocks:
                    kept.blocks = [self.free.pop() for _ in range(shared)]
                kept.users += 1
                self.table[sequence, :shared] = kept.blocks
            self._num_blocks[sequence] = shared
            self._give(sequence, wanted - shared)
            self.running.append(sequence)
            begun.append(sequence)
        assert self.running or not self._waiting, "a sequence that alone does not fit"
        return begun

    def _release(self, sequence: int) -> None:
        group, shared = sequence // self.n, self._shared_blocks(sequence)
        own = self.table[sequence, shared : self._num_blocks[sequence]]
        self.free.extend(own[::-1].tolist())
        if shared:
            kept = self._shared[group]
            kept.users -= 1
            if not kept.users:
                self.free.extend(kept.blocks[::-1])
                del self._shared[group]
        self.table[sequence] = 0
        self._num_blocks[sequence] = 0

    def passes(self, begun: Sequence[int]) -> list[list[Stretch]]:
        """What is computed of sequences that begin, pass after pass: shared blocks first, each once; then the rest of
        each sequence, whose last token gives the logits of the next one.
        """
        first: list[Stretch] = []
        rest: list[Stretch] = []
        for sequence in begun:
            shared = self._shared_blocks(sequence)
            if shared and not self._shared[sequence // self.n].computed:
                self._shared[sequence // self.n].computed = True
                first.append(Stretch(sequence, 0, shared * self.room.block_size))
            end = self.prompt_len(sequence) + int(self.lens[sequence])
            rest.append(Stretch(sequence, shared * self.room.block_size, end))
        return self._cut(first) + self._cut(rest)

    def _cut(self, pieces: Sequence[Stretch]) -> list[list[Stretch]]:
        """Pieces into passes of at most room.tokens tokens and room.rows rows; the next pass goes on with a piece that
        does not fit.
        """
        passes: list[list[Stretch]] = []
        space = 0
        for piece in pieces:
            start = piece.start
            while start < piece.end:
                if not passes or not space or len(passes[-1]) == self.room.rows:
                    passes.append([])
                    space = self.room.tokens
                end = min(piece.end, start + space)
                passes[-1].append(Stretch(piece.sequence, start, end))
                space -= end - start
                start = end
        return passes

    def ends(self, piece: Stretch) -> bool:
        """The piece's last token is the last that the sequence has: the next one is sampled from its logits."""
        return piece.end == self.prompt_len(piece.sequence) + int(self.lens[piece.sequence])

    def most_steps(self, begun: Sequence[int]) -> int:
        """Steps until every running sequence has all the tokens that it may have; those that begin get one before."""
        if not self.running:
            return 0
        lens = self.lens.copy()
        lens[list(begun)] += 1
        return self.max_tokens - int(lens[self.running].min())

    def update(self, lens: npt.NDArray[np.int32], done: npt.NDArray[np.bool_]) -> None:
        """lens [sequences]: tokens sampled so far. done [sequences]: that was the last; its blocks are free."""
        self.lens = lens
        for sequence in [one for one in self.running if done[one]]:
            self._release(sequence)
        self.running = [one for one in self.running if not done[one]]
