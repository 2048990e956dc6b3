"""Samples of a whole batch by vLLM's model, kernels, graphs and KV cache, without its scheduler.

All requests of a call are known when it begins. So the plan of who runs when (batch_plan.py) is made every INTERVAL
steps, and in between a step is a few kernels: no Python object for a token or a request. Per sequence the device keeps
its tokens, their log-probabilities, how many there are and whether it is done; the inputs of the next step are made of
these. Results come back once, at the end.

A sequence that ends within an interval stays in its row up to the end of that; it writes nothing any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_rl.errors import RolloutError
from megatron_rl.observe.beat import beat
from megatron_rl.ops.sampling import sample
from megatron_rl.rollout.batch_plan import DecodePlan, Room, Stretch
from megatron_rl.rollout.vllm_runner import Runner, runner_of
from megatron_rl.types import FINISH_REASONS, Samples

INTERVAL = 16
"""Steps between two looks at what is done."""


@dataclass(frozen=True)
class DecodeCall:
    """What one call asks for. seeds: one for each sample, request-major."""

    prompts: Sequence[Sequence[int]]
    n: int
    seeds: Sequence[int]
    temperature: float
    max_tokens: int
    stop_token_ids: Sequence[int]


class _Sampled:
    """What was sampled so far, by sequence, on the device.

    tokens: [sequences, max_tokens + 1] int64; logprobs: the same, float32: the last column takes what counts no more.
    lens: [sequences] int64. done, stopped: [sequences] bool; stopped: at a stop token.
    """

    def __init__(self, batch: DecodeCall, device: torch.device) -> None:
        count = len(batch.prompts) * batch.n
        self.tokens = torch.zeros(count, batch.max_tokens + 1, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(count, batch.max_tokens + 1, dtype=torch.float32, device=device)
        self.lens = torch.zeros(count, dtype=torch.int64, device=device)
        self.done = torch.zeros(count, dtype=torch.bool, device=device)
        self.stopped = torch.zeros(count, dtype=torch.bool, device=device)
        prompt_lens = [len(prompt) for prompt in batch.prompts for _ in range(batch.n)]
        self.prompt_lens = torch.tensor(prompt_lens, dtype=torch.int64, device=device)
        self._seeds = torch.from_numpy(np.array([seed % 2**64 for seed in batch.seeds], np.uint64).view(np.int64))
        self._seeds = self._seeds.to(device)
        self._stops = torch.tensor(list(batch.stop_token_ids), dtype=torch.int64, device=device)
        self._temperature, self._max_tokens = batch.temperature, batch.max_tokens

    def take(self, logits: torch.Tensor, sequences: torch.Tensor) -> None:
        """Sample the next token of each of `sequences` [n] int64, which differ, from logits [n, vocab]."""
        lens, going = self.lens[sequences], ~self.done[sequences]
        tokens, logprobs = sample(logits, self._temperature, self._seeds[sequences], lens)
        column = torch.where(going, lens, self._max_tokens)
        self.tokens[sequences, column] = tokens
        self.logprobs[sequences, column] = logprobs
        lens = lens + going
        stopped = going & (tokens[:, None] == self._stops).any(dim=1)
        self.lens[sequences] = lens
        self.stopped[sequences] |= stopped
        self.done[sequences] |= stopped | (lens == self._max_tokens)

    def state(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """lens and done on the host. Waits for the device."""
        both = torch.stack((self.lens, self.done.long())).cpu().numpy()
        return both[0].astype(np.int32), both[1].astype(np.bool_)

    def samples(self, version: int) -> Samples:
        """All sequences, once they are done. RolloutError where a log-probability is not finite."""
        lens = self.lens.cpu().numpy()
        kept = np.arange(self._max_tokens)[None] < lens[:, None]
        logprobs = self.logprobs[:, :-1].cpu().numpy()[kept]
        if not np.isfinite(logprobs).all():
            rows = np.unique(np.nonzero(kept)[0][~np.isfinite(logprobs)])
            raise RolloutError(
                f"the engine computed log-probabilities that are not finite, in {len(rows)} of {len(lens)} samples, "
                f"the first is {rows[0]}: its weights or its precision (rollout.dtype) are at fault"
            )
        finish = np.where(self.stopped.cpu().numpy(), FINISH_REASONS.index("stop"), FINISH_REASONS.index("length"))
        versions = np.full(len(lens), version, np.int32)
        tokens = self.tokens[:, :-1].cpu().numpy()[kept].astype(np.int32)
        return Samples(tokens, logprobs, lens.astype(np.int32), finish.astype(np.uint8), versions, versions)


class BatchDecoder:
    """Generates with an engine's model runner. The engine has no other requests, and forgets its cached prefixes before
    each call: their blocks are overwritten.
    """

    def __init__(self, llm: Any) -> None:
        self._runner = Runner(runner_of(llm))

    @torch.inference_mode()
    def generate(self, batch: DecodeCall, version: int) -> Samples:
        """n samples for each prompt, request-major. RolloutError where one sequence does not fit the KV cache."""
        runner = self._runner
        room = Room(runner.num_blocks, runner.block_size, runner.max_rows, runner.max_tokens)
        plan = DecodePlan([len(prompt) for prompt in batch.prompts], batch.n, batch.max_tokens, room)
        sampled = _Sampled(batch, runner.positions.device)
        # Kernels may read ahead in a row, and after sleep its memory holds anything.
        runner.table.zero_()
        while plan.unfinished:
            beat("an interval of steps of the engine")
            plan.grow(INTERVAL)
            begun = plan.admit(INTERVAL)
            for pieces in plan.passes(begun):
                self._prefill(batch, plan, sampled, pieces)
            self._decode(plan, sampled, begun, min(INTERVAL, plan.most_steps(begun)))
            plan.update(*sampled.state())
        return sampled.samples(version)

    def _prefill(self, batch: DecodeCall, plan: DecodePlan, sampled: _Sampled, pieces: Sequence[Stretch]) -> None:
        """Compute pieces of sequences; sample the next token of those that are computed up to their last one."""
        runner, device = self._runner, sampled.lens.device
        tokens = np.concatenate([self._tokens(batch, plan, sampled, piece) for piece in pieces])
        positions = np.concatenate([np.arange(piece.start, piece.end) for piece in pieces])
        query_lens = np.array([piece.end - piece.start for piece in pieces], np.int32)
        ends = np.array([piece.end for piece in pieces], np.int32)
        rows = np.repeat([piece.sequence for piece in pieces], query_lens)
        blocks = plan.table[rows, positions // runner.block_size].astype(np.int64)
        runner.input_ids[: len(tokens)] = torch.from_numpy(tokens.astype(np.int32)).to(device)
        runner.positions[: len(tokens)] = torch.from_numpy(positions).to(device)
        slots = blocks * runner.block_size + positions % runner.block_size
        runner.slots[: len(tokens)] = torch.from_numpy(slots).to(device)
        table = plan.table[[piece.sequence for piece in pieces]]
        runner.table[: len(pieces), : table.shape[1]] = torch.from_numpy(table).to(device)
        runner.seq_lens[: len(pieces)] = torch.from_numpy(ends).to(device)
        hidden = runner.forward(runner.shape(query_lens), ends)
        ended = [(row, piece.sequence) for row, piece in enumerate(pieces) if plan.ends(piece)]
        if ended:
            last = torch.from_numpy(np.cumsum(query_lens)[[row for row, _ in ended]] - 1).to(device)
            sequences = torch.tensor([sequence for _, sequence in ended], device=device)
            sampled.take(runner.logits(hidden[last]), sequences)

    def _tokens(self, batch: DecodeCall, plan: DecodePlan, sampled: _Sampled, piece: Stretch) -> npt.NDArray[np.int64]:
        """The ids of a piece: of the prompt, and of what was sampled before the sequence was put off."""
        prompt = np.asarray(batch.prompts[piece.sequence // batch.n], np.int64)
        count = int(plan.lens[piece.sequence])
        if count:
            prompt = np.concatenate((prompt, sampled.tokens[piece.sequence, :count].cpu().numpy()))
        return prompt[piece.start : piece.end]

    def _decode(self, plan: DecodePlan, sampled: _Sampled, begun: Sequence[int], steps: int) -> None:
        """`steps` tokens more for each running sequence that is not done."""
        if not steps:
            return
        runner, running = self._runner, plan.running
        device, count = sampled.lens.device, len(plan.running)
        table = plan.table[running]
        runner.table[:count, : table.shape[1]] = torch.from_numpy(table).to(device)
        sequences = torch.tensor(running, dtype=torch.int64, device=device)
        shape = runner.shape(np.ones(count, np.int32))
        lens = plan.lens.copy()
        lens[list(begun)] += 1
        most = np.array([plan.prompt_len(sequence) for sequence in running], np.int32) + lens[running]
        for step in range(steps):
            self._write_inputs(sampled, sequences)
            hidden = runner.forward(shape, most + step)
            sampled.take(runner.logits(hidden), sequences)

    def _write_inputs(self, sampled: _Sampled, sequences: torch.Tensor) -> None:
        """The last token of each sequence, whose keys and values are written; not of those that are done."""
        runner, count = self._runner, len(sequences)
        lens = sampled.lens[sequences]
        positions = sampled.prompt_lens[sequences] + lens - 1
        blocks = runner.table[:count].gather(1, (positions // runner.block_size)[:, None]).squeeze(1)
        slots = blocks * runner.block_size + positions % runner.block_size
        runner.input_ids[:count] = sampled.tokens[sequences, lens - 1]
        runner.positions[:count] = positions
        runner.seq_lens[:count] = positions + 1
        runner.slots[:count] = torch.where(sampled.done[sequences], -1, slots)
