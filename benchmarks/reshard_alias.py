"""One device, one vLLM engine, TP 1 on both sides: sharing the trainer's memory against loading every tensor.

Run through benchmarks/reshard.py --device. The trainer is its parameters: random weights as Megatron lays them out, in
one flat buffer, as its optimizer keeps them. In order:
  shared   the engine is built on the trainer's memory; a sync copies the rest (fused queries, keys, values)
  copied   the same plan into memory of the engine's own
  loaded   vLLM's own reload of every tensor (engine.update_weights), as a full sync does after its gather
Before each sync of `shared` the trainer writes new weights in place; before each of the others the engine's own memory
is spoilt. After the last sync of each way the engine answers the same prompts greedily: all must give the same tokens,
and `loaded` knows nothing of the plan.

With CUDA graphs (--graphs) an engine's memory cannot be taken from it, because its graphs hold the addresses: `copied`
and `loaded` then go into an engine of another process, whose trainer has made the same steps.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.models import FAMILIES
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.models.engine import engine_params, live_params
from megatron_rl.models.rules import LocalParam, hf_shapes, megatron_params
from megatron_rl.models.shape import ModelShape
from megatron_rl.parallel.p2p import P2PGroup
from megatron_rl.reshard.alias import find_sharing
from megatron_rl.reshard.execute import Transfer
from megatron_rl.reshard.plan import Shard, make_plan
from megatron_rl.reshard.publisher import ReshardPublisher
from megatron_rl.rollout.engine import EngineSettings, Request, Sampling, make_engine
from megatron_rl.types import SyncReport

# name: (hidden, layers, heads, KV heads, inner size, vocabulary)
SIZES = {
    "7b": (3584, 28, 28, 4, 18944, 152064),
    "0.5b": (896, 24, 14, 2, 4864, 151936),
    "tiny": (128, 4, 4, 2, 256, 512),
}
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 16, 48, 32


def write_config(folder: str, size: str) -> ModelShape:
    """config.json of a model of Qwen2.5's kind (tiny: head_dim 32, which vLLM's CPU build takes)."""
    hidden, layers, heads, kv_heads, inner, vocab = SIZES[size]
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "use_sliding_window": False,
    }
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return read_model_shape(folder)


class Trainer:
    """Parameters in one flat buffer, in Megatron's layout."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: str) -> None:
        family = FAMILIES[shape.architecture]
        whole: dict[str, Any] = {"layers": range(shape.num_layers), "pre_process": True, "post_process": True}
        self.sizes = hf_shapes(shape, family)
        self.params = tuple(
            LocalParam(f"chunk0.{param.name}", param.shape, param.blocks)
            for param in megatron_params(shape, family, tp=1, tp_rank=0, **whole)
        )
        numels = [torch.Size(param.shape).numel() for param in self.params]
        self.flat = torch.empty(sum(numels), dtype=dtype, device=device)
        parts = self.flat.split(numels)
        self.tensors = {param.name: part.view(param.shape) for param, part in zip(self.params, parts, strict=True)}
        generator = torch.Generator(device).manual_seed(1)
        for name, tensor in self.tensors.items():
            tensor.normal_(1.0 if "norm" in name else 0.0, 0.02, generator=generator)

    def step(self) -> None:
        """New values in the same memory, as an optimizer writes them."""
        self.flat.mul_(1.015625)

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole HF tensors: views where they lie in one piece, put together where Megatron interleaves them."""
        pieces: dict[str, list[tuple[int, torch.Tensor]]] = {name: [] for name in self.sizes}
        for param in self.params:
            top = 0
            for block in param.blocks:
                rows = self.tensors[param.name][top : top + block.num_rows]
                pieces[block.hf_name].append((block.rows[0], rows))
                top += block.num_rows
        for name, parts in pieces.items():
            rows = [part for _, part in sorted(parts, key=lambda one: one[0])]
            yield name, rows[0] if len(rows) == 1 else torch.cat(rows)


class Meter:
    """Seconds and device memory."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._start = self.used()

    def used(self) -> int:
        """Bytes in use on the device by all of this process; 0 on CPU."""
        if not self._cuda:
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def memory(self, what: str) -> None:
        """Say what is in use since the start."""
        if self._cuda:
            print(f"memory, {what}: {(self.used() - self._start) / (1 << 30):.2f} GiB", flush=True)

    def seconds(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """Wall seconds of a call, with what it started on the device."""
        if self._cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        found = call()
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start, found


def engine_settings(folder: str, shape: ModelShape, device: str, dtype: str, graphs: bool) -> EngineSettings:
    """One rank, no sleeping."""
    on_gpu = device == "cuda"
    return EngineSettings(
        name="vllm",
        model_path=folder,
        tokenizer_path=folder,
        vocab_size=shape.vocab_size,
        max_model_len=512,
        dtype=dtype,
        device=device,
        gpu_memory_utilization=0.8,
        kv_cache_gb=2.0 if on_gpu else 0.0625,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        enforce_eager=not graphs,
        free_cache_engine=False,
        seed=0,
        needs_text=False,
    )


Answers = list[tuple[tuple[int, ...], tuple[float, ...]]]
"""Tokens and their log-probabilities of each prompt"""


def answers(engine: Any, vocab: int) -> Answers:
    """Greedy, to fixed prompts."""
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(2, vocab, (NUM_PROMPTS, PROMPT_TOKENS), generator=generator).tolist()
    sampling = Sampling(n=1, temperature=0.0, top_p=1.0, top_k=-1, max_tokens=NEW_TOKENS, stop_token_ids=())
    samples = engine.generate([Request(tuple(prompt)) for prompt in prompts], sampling)
    rollouts = [samples.rollout(row, "") for row in range(len(samples))]
    return [(rollout.token_ids, rollout.logprobs) for rollout in rollouts]


def spoil(engine: Any) -> None:
    """Give parameters that the trainer's memory holds memory of their own (without CUDA graphs, which would still read
    the old addresses), and all of them wrong values. For this comparison alone.
    """
    params = dict(engine._loaded.model.named_parameters())
    for name in engine.shared:
        params[name].data = torch.empty_like(params[name].data)
    for param in params.values():
        param.data.fill_(0.01)
    engine._shared = frozenset()


class Bench:
    """What all ways have alike: a trainer, and the table of its engine."""

    def __init__(self, folder: str, device: str, size: str, graphs: bool, repeats: int) -> None:
        dtype = "bfloat16" if device == "cuda" else "float32"
        self.shape = write_config(folder, size)
        self.meter = Meter(device)
        self.trainer = Trainer(self.shape, getattr(torch, dtype), device)
        print(f"{size}: {self.trainer.flat.nbytes / (1 << 30):.3f} GiB of {dtype} weights on {device}")
        self.meter.memory("trainer")
        self.table = tuple(engine_params(self.shape, FAMILIES[self.shape.architecture], tp=1, tp_rank=0))
        self.settings = engine_settings(folder, self.shape, device, dtype, graphs)
        self.repeats = repeats
        self.version = 0
        self.best: dict[str, float] = {}
        self.answers: dict[str, Answers] = {}

    def start(self, share: bool) -> tuple[Any, ReshardPublisher]:
        """An engine, on the trainer's memory or not, filled, and its publisher."""
        sharing = find_sharing(self.table, self.trainer.params, None if share else "not asked for")
        shared = {name: self.trainer.tensors[source] for name, source in sharing.shared.items()}
        seconds, engine = self.meter.seconds(lambda: make_engine(self.settings, shared))
        counts = f"{len(shared)} of {len(self.table)} parameters are the trainer's memory"
        print(f"engine started in {seconds:.1f} s: {counts}")
        self.meter.memory("trainer, and an engine with a KV cache of 2 GiB")
        dtype = self.trainer.flat.dtype
        transfer = Transfer(
            make_plan([Shard(0, self.trainer.params)], [Shard(0, self.table)]),
            P2PGroup(),
            self.trainer.params,
            live_params(self.table, engine.shapes()),
            trainer_dtype=dtype,
            engine_dtype=dtype,
            cap_bytes=256 << 20,
        )
        publisher = ReshardPublisher(transfer, engine, lambda: self.trainer.tensors)
        publisher.publish(0, expect_change=False)
        return engine, publisher

    def measure(self, way: str, engine: Any, prepare: Callable[[], None], sync: Callable[[int], SyncReport]) -> None:
        """One row."""
        took: list[float] = []
        report = SyncReport()
        for _ in range(self.repeats):
            self.version += 1
            prepare()
            seconds, report = self.meter.seconds(lambda: sync(self.version))
            took.append(seconds)
        self.best[way] = min(took)
        self.answers[way] = answers(engine, self.shape.vocab_size)
        seconds = " | ".join(f"{took:.5f}" for took in (min(took), sorted(took)[len(took) // 2], max(took)))
        print(f"| {way} | {seconds} | {report.local_bytes:,} | {report.aliased_bytes:,} |", flush=True)
        self.meter.memory(f"after {way}")


def measure_ways(device: str, size: str, repeats: int, graphs: bool, shared: bool, own: bool) -> Bench:
    """Rows of one engine: `shared`, and on memory of its own `copied` and `loaded`."""
    # Nothing is to be looked up or compiled that the comparison does not need.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    with tempfile.TemporaryDirectory() as folder:
        if device == "cuda":
            torch.cuda.set_device(0)
            torch.zeros(1, device="cuda")
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        bench = Bench(folder, device, size, graphs, repeats)
        trainer = bench.trainer
        engine, publisher = bench.start(share=shared)

        def reshard(version: int) -> SyncReport:
            return publisher.publish(version, expect_change=bool(engine.shared))

        def load(version: int) -> SyncReport:
            engine.update_weights(trainer.export(), version)
            return SyncReport(local_bytes=trainer.flat.nbytes)

        print("| way | seconds, best | median | worst | bytes copied | bytes shared |")
        print("|---|---|---|---|---|---|")
        if shared:
            bench.measure("shared", engine, trainer.step, reshard)
        else:
            for _ in range(repeats):
                trainer.step()
        if own:
            bench.measure("copied", engine, lambda: spoil(engine), reshard)
            bench.measure("loaded", engine, lambda: spoil(engine), load)
        engine.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    return bench


def _in_a_process(*args: Any) -> tuple[dict[str, float], dict[str, Answers]]:
    bench = measure_ways(*args)
    return bench.best, bench.answers


def compare(answered: Answers, expected: Answers) -> str:
    """Whole answers and first tokens that are equal, and how far log-probabilities lie apart while tokens agree.

    Where kernels differ (compiled code, CUDA graphs), near ties of random weights fall the other way: then the first
    tokens and the differences tell whether the weights are the same.
    """
    whole = sum(one[0] == other[0] for one, other in zip(answered, expected, strict=True))
    first = sum(one[0][0] == other[0][0] for one, other in zip(answered, expected, strict=True))
    gaps: list[float] = []
    for (tokens, logprobs), (other_tokens, other_logprobs) in zip(answered, expected, strict=True):
        for at, token in enumerate(tokens):
            if token != other_tokens[at]:
                break
            gaps.append(abs(logprobs[at] - other_logprobs[at]))
    far = f"{max(gaps):.4f} of {len(gaps)} tokens" if gaps else "nothing to compare"
    return (
        f"{whole} of {len(expected)} greedy answers equal, {first} first tokens; log-probabilities apart at most {far}"
    )


def run(device: str, size: str, repeats: int, graphs: bool) -> None:
    """All three ways; prints memory, a table and whether the answers agree."""
    best: dict[str, float] = {}
    found: dict[str, Answers] = {}
    parts = [(True, False), (False, True)] if graphs else [(True, True)]
    for shared, own in parts:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            seconds, answered = process.submit(_in_a_process, device, size, repeats, graphs, shared, own).result()
        best |= seconds
        found |= answered
    assert len({tokens for tokens, _ in found["shared"]}) > 1, "all answers are alike: the model says nothing"
    for way in ("copied", "loaded"):
        print(f"{way} against shared: {compare(found[way], found['shared'])}")
    print(f"loaded against copied: {compare(found['loaded'], found['copied'])}")
    print(f"best shared sync against best load: {best['loaded'] / best['shared']:.0f} times faster")
