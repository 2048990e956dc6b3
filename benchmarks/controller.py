"""What the controller does of one GRPO step and of a checkpoint after it: CPU seconds by phase, memory, bytes.

    python -m benchmarks.controller                       1k samples of 1.5k tokens, dp 16
    python -m benchmarks.controller --sizes 1kx16x8k@128 100k@1024

A size is prompts x samples x tokens @ data-parallel ranks. The code of the controller is the real one, from prompts to
publish; below WorkerGroup the ranks are made up: they answer at once, with arrays of the right shapes, and what lies
with them behind handles is made when it is fetched. Calls and answers are pickled as Ray would, so their bytes are
counted; the time of the ranks is taken off. Scores are made up too, from texts that are read as rewards read them. For
the checkpoint the ranks say at once that their files, two each, are written; its list of files and its state are real.
Seconds are CPU seconds of the threads that run the step: other work on the machine does not show. Memory is the peak of
the process, less what it held before the step.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.quickstart import make_data
from megatron_rl.cluster.backend import Answer
from megatron_rl.cluster.dispatch import Call, RankGrid
from megatron_rl.cluster.worker_group import WorkerGroup
from megatron_rl.config.load import load_config
from megatron_rl.config.run import RunConfig
from megatron_rl.experience.buffer import RolloutBuffer
from megatron_rl.observe.versions import versions
from megatron_rl.rewards.base import RewardResult, RewardSample
from megatron_rl.rollout.engine import Request, Sampling
from megatron_rl.runs.checkpoints import FORMAT, Checkpoints
from megatron_rl.runs.metrics import Metrics
from megatron_rl.runs.resume import Row, config_facts, step_facts
from megatron_rl.runs.state import RunState
from megatron_rl.runs.trainer import Trainer
from megatron_rl.trainers import placement
from megatron_rl.types import EngineAnswer, FileMark, Handle, Samples, StepReport, SyncReport, Texts
from megatron_rl.workers.records import UpdateResult
from megatron_rl.workers.token_work import CreditReport, SequenceFacts

SIZES = {"1kx16x8k@16": (1024, 16, 8192, 16), "1kx16x8k@128": (1024, 16, 8192, 128), "100k@1024": (6400, 16, 512, 1024)}
SIZES |= {"8kx16x32k@1024": (8192, 16, 32768, 1024), "1k@16": (64, 16, 2048, 16)}
TEXT_BYTES = 4
"""Of a token, about as in English."""
NUM_MINI_BATCHES = 4
PROMPT = "1234567890+" * 6


@dataclass
class Traffic:
    """What the controller sent and got, and how long it was the ranks' time."""

    sent: int = 0
    received: int = 0
    fetched: int = 0
    rank_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Elsewhere:
    """A value that is with a rank. Pickled it is as small as a reference of Ray."""

    key: bytes
    make: Callable[[], Any] = field(repr=False)
    num_bytes: int
    traffic: Traffic

    def __reduce__(self) -> tuple[Any, ...]:
        KEPT[self.key] = self
        return _kept, (self.key,)

    def fetch(self) -> Any:
        """See Handle."""
        start = time.thread_time()
        value = self.make()
        self.traffic.fetched += self.num_bytes
        self.traffic.rank_s += time.thread_time() - start
        return value


KEPT: dict[bytes, Elsewhere] = {}


def _kept(key: bytes) -> Elsewhere:
    return KEPT[key]


class Ranks:
    """See cluster.backend.Backend: ranks that answer at once."""

    def __init__(self, grid: RankGrid, traffic: Traffic, max_tokens: int) -> None:
        self._grid, self.traffic, self._max_tokens = grid, traffic, max_tokens
        self._text = np.full(0, ord("7"), np.uint8)
        self._num_calls = 0

    @property
    def world(self) -> int:
        return self._grid.world

    def call(
        self, method: str, calls: Sequence[Call | None], keep: Sequence[bool], timeout_s: float
    ) -> list[Answer | None]:
        """Each distinct call and each answer goes over the wire once."""
        self._num_calls += 1
        for call in {id(call): call for call in calls}.values():
            self.traffic.sent += len(_wire(call))
        answers: list[Answer | None] = []
        for rank, (call, wanted) in enumerate(zip(calls, keep, strict=True)):
            assert call is not None
            start = time.thread_time()
            value = self._answer(method, rank, *call[0]) if wanted else None
            sent = _wire(Answer(value, 0.001))
            self.traffic.rank_s += time.thread_time() - start
            self.traffic.received += len(sent)
            answers.append(pickle.loads(sent))
        return answers

    def close(self, graceful: bool) -> None:
        """Nothing to end."""

    def _answer(self, method: str, rank: int, *args: Any) -> object:
        if method == "engine.generate":
            return self._generate(rank, *args)
        if method == "engine.publish":
            return SyncReport()
        if method == "train.step":
            return UpdateResult(StepReport(1.0, 1.0, 1e-3))
        if method == "train.batch.credit":
            facts: SequenceFacts = args[0]
            return CreditReport(facts.kept)
        # The look for numbers that are not finite, the mismatch, and what the start took.
        if method in ("train.batch.not_finite", "train.batch.compare", "train.start_seconds"):
            return {}
        if method in ("train.batch.load", "train.forward", "train.save_state"):
            return None
        if method == "train.save_done":
            return True
        if method == "train.finish_save":
            names = (f"actor/__{rank}_0.distcp", f"ranks/rank_{rank:05d}.pt")
            return {name: FileMark(1 << 30, 0xDEADBEEF - rank) for name in names}
        raise NotImplementedError(method)

    def _generate(self, rank: int, requests: Sequence[Request], sampling: Sampling) -> EngineAnswer:
        count = len(requests) * sampling.n
        lens = np.random.default_rng(rank).integers(self._max_tokens // 2, self._max_tokens + 1, count, dtype=np.int32)
        total, version = int(lens.sum()), np.zeros(count, np.int32)
        finish = (lens == self._max_tokens).astype(np.uint8)
        if len(self._text) < total * TEXT_BYTES:
            self._text = np.full(total * TEXT_BYTES, ord("7"), np.uint8)

        def samples() -> Samples:
            return Samples(np.full(total, 7, np.int32), np.zeros(total, np.float32), lens, finish, version, version)

        def texts() -> Texts:
            ends = np.cumsum(lens, dtype=np.int64) * TEXT_BYTES
            return Texts(self._text[: total * TEXT_BYTES], ends)

        def elsewhere(what: str, make: Callable[[], Any], num_bytes: int) -> Handle[Any]:
            return Elsewhere(f"{what} {self._num_calls} {rank}".encode().ljust(28), make, num_bytes, self.traffic)

        return EngineAnswer(
            lens,
            finish,
            version,
            version,
            elsewhere("samples", samples, 8 * total),
            elsewhere("texts", texts, TEXT_BYTES * total),
        )


class _Pickler(pickle.Pickler):
    """Tensors as Ray sends them: their bytes, without a format of torch's own."""

    def reducer_override(self, obj: Any) -> Any:
        return (torch.from_numpy, (obj.numpy(),)) if type(obj) is torch.Tensor else NotImplemented


def _wire(value: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


@dataclass(frozen=True)
class Report:
    """Of one step."""

    samples: int
    tokens: int
    dp: int
    seconds: dict[str, float]
    """CPU seconds of the controller: of each node, and in all."""
    checkpoint_s: float
    """CPU seconds of the controller: of a checkpoint, from its beginning to its name."""
    checkpoint_bytes: int
    """Of what the controller writes of it."""
    peak_bytes: int
    traffic: Traffic

    @property
    def total_s(self) -> float:
        return self.seconds["all"]

    @property
    def bytes_a_sample(self) -> float:
        """Through the controller, texts for rewards aside."""
        return (self.traffic.sent + self.traffic.received) / self.samples


def config(folder: Path, prompts: int, n: int, tokens: int, dp: int) -> RunConfig:
    """A run of that size on a model folder that is made here."""
    make_data.make(folder, 0)
    shape = folder / "model/config.json"
    shape.write_text(json.dumps(json.loads(shape.read_text()) | {"max_position_embeddings": 1 << 20}))
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": PROMPT, "ground_truth": "7"}).join(["", "\n"]) * prompts)
    return load_config(
        [],
        [
            f"model.path={folder}/model", "model.init=random", "model.dtype=float32", "cluster.device=cpu",
            f"data.train_files={rows}", "data.chat_template=plain", "data.max_prompt_length=100",
            f"data.max_response_length={tokens}", f"data.train_batch_size={prompts}", f"rollout.n={n}",
            f"actor.ppo_mini_batch_size={prompts // NUM_MINI_BATCHES}", "actor.use_kl_loss=true",
            f"actor.max_tokens_per_gpu={max(16384, 2 * tokens)}", "reward.function=exact_match",
            # One node: over several the reward processes would be Ray actors, which have no stand-in here.
            f"cluster.n_gpus_per_node={dp}",
            "algorithm.name=grpo", "trainer.total_training_steps=1", "rollout.share_weights=false",
        ],
    )  # fmt: skip


def measure(prompts: int, n: int, tokens: int, dp: int) -> Report:
    """One step of `prompts` prompts, n samples each of at most `tokens` tokens, on dp ranks."""
    traffic, seconds = Traffic(), dict[str, float]()

    def start_group(
        worker_cls: type, args: Sequence[object], cluster: object, grid: RankGrid, device: str, check: object
    ) -> Any:
        return WorkerGroup(worker_cls, Ranks(grid, traffic, tokens), grid, 60.0)

    def timed(name: str, fn: Callable[..., object]) -> Callable[..., object]:
        def call(**values: object) -> object:
            start, rank_s = time.thread_time(), traffic.rank_s
            try:
                return fn(**values)
            finally:
                seconds[name] = time.thread_time() - start - (traffic.rank_s - rank_s)

        return call

    def score(samples: Sequence[RewardSample]) -> list[RewardResult]:
        return [RewardResult(float(len(sample.solution_str) % 7)) for sample in samples]

    before, placement.start_group = placement.start_group, start_group
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(config(Path(folder), prompts, n, tokens, dp)).start()
    finally:
        placement.start_group = before
    try:
        assert trainer.parts.rewards._started is not None
        trainer.parts.rewards._started.score_or_stop = score  # type: ignore[method-assign]
        for one in trainer.flow.nodes:
            trainer.flow.replace(one.name, replace(one, fn=timed(one.name, one.fn)))
        traffic.__init__()
        held, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        result = trainer.publish(trainer.learn(trainer.take(1)))
        seconds["all"] = time.process_time() - start - traffic.rank_s
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        checkpoint = _checkpoint(trainer, result.metrics, traffic)
    finally:
        trainer.close()
        KEPT.clear()
    count = prompts * n
    tokens = int(result.metrics["length/response_mean"] * count)
    return Report(count, tokens, dp, seconds, *checkpoint, (peak - held) << 10, traffic)


def _checkpoint(trainer: Trainer, metrics: Metrics, traffic: Traffic) -> tuple[float, int]:
    """(CPU seconds of the controller, bytes that it wrote) of a checkpoint after step 1, as a session makes it."""
    cfg = trainer.cfg
    with tempfile.TemporaryDirectory() as folder:
        lines: list[str] = []
        checkpoints = Checkpoints(Path(folder), cfg.checkpoint, trainer, lines.append)
        start, rank_s = time.process_time(), traffic.rank_s
        state = RunState({**trainer.stateful(), "buffer": RolloutBuffer(0)})
        state.step = 1
        row = Row(1, metrics, (), False)
        facts = {"format": FORMAT, **config_facts(cfg), "versions": versions(), **step_facts(state.state(), row)}
        checkpoints.begin(1, facts, background=True)
        checkpoints.poll()
        seconds = time.process_time() - start - (traffic.rank_s - rank_s)
        assert checkpoints.last is not None, "the ranks said that they had written their files"
        return seconds, sum(file.stat().st_size for file in checkpoints.last.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["1k@16"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    for size in args.sizes:
        report = measure(*SIZES[size])
        print(f"{size}: {report.samples:,} samples, {report.tokens / 1e6:,.1f} M tokens, dp {report.dp}")
        phases = "  ".join(f"{name} {s:.2f}" for name, s in report.seconds.items() if name != "all")
        print(f"    controller {report.total_s:.2f} s of CPU: {phases}")
        print(f"    checkpoint {report.checkpoint_s:.2f} s of CPU; it writes {report.checkpoint_bytes / 1e6:,.2f} MB")
        print(
            f"    memory {report.peak_bytes / 2**30:.2f} GiB above the start; calls and answers: "
            f"{report.bytes_a_sample:,.0f} bytes a sample, {report.bytes_a_sample * report.samples / 1e6:,.1f} MB; "
            f"fetched: {report.traffic.fetched / report.samples:,.0f} bytes a sample"
        )


if __name__ == "__main__":
    main()
