"""One device, one vLLM engine, TP 1 on both sides: sharing the trainer's memory against loading every tensor.

Run through benchmarks/reshard.py --device. The trainer is its parameters: random weights as Megatron lays them out, in
one flat buffer, as its optimizer keeps them. In order:
  shared   the engine is built on the trainer's memory; a sync copies the rest (fused queries, keys, values)
  copied   the same plan into memory of the engine's own
  loaded   vLLM's own reload of every tensor (engine.update_weights), as a full sync does after its gather
Before each sync of `shared` the trainer writes new weights in place; before each of the others the engine's own memory
is spoilt. After the last sync of each way the engine answers the same prompts greedily: all must give the same tokens,
and `loaded` knows nothing of the plan.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.config.layout import ModelShape, read_model_shape
from megatron_rl.parallel.links import Links
from megatron_rl.reshard.alias import find_sharing
from megatron_rl.reshard.execute import Transfer
from megatron_rl.reshard.plan import Shard, make_plan
from megatron_rl.reshard.publisher import ReshardPublisher
from megatron_rl.rollout.engine import EngineSettings, Request, Sampling, make_engine
from megatron_rl.types import SyncReport
from megatron_rl.weights import FAMILIES
from megatron_rl.weights.engine_spec import engine_params, live_params
from megatron_rl.weights.spec import LocalParam, hf_shapes, megatron_params

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


def engine_settings(folder: str, shape: ModelShape, device: str, dtype: str) -> EngineSettings:
    """One rank, no sleeping, no CUDA graphs: parameters are taken away from the trainer later in the same engine."""
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
        enforce_eager=True,
        free_cache_engine=False,
        seed=0,
        needs_text=False,
    )


def answers(engine: Any, vocab: int) -> list[tuple[int, ...]]:
    """Greedy tokens of fixed prompts."""
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(2, vocab, (NUM_PROMPTS, PROMPT_TOKENS), generator=generator).tolist()
    sampling = Sampling(n=1, temperature=0.0, top_p=1.0, top_k=-1, max_tokens=NEW_TOKENS, stop_token_ids=())
    found = engine.generate([Request(tuple(prompt)) for prompt in prompts], sampling)
    return [samples[0].token_ids for samples in found]


def spoil(engine: Any) -> None:
    """Give shared parameters memory of their own, and all of them wrong values.

    For this comparison alone, and only without CUDA graphs, which would still read the old addresses.
    """
    params = dict(engine._loaded.model.named_parameters())
    for name in engine.shared:
        params[name].data = torch.empty_like(params[name].data)
    for param in params.values():
        param.data.fill_(0.01)
    engine._shared = frozenset()


def run(device: str, size: str, repeats: int) -> None:
    """All three ways, one after another; prints memory, a table and whether the answers agree."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    # Nothing is to be looked up or compiled that the comparison does not need.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    with tempfile.TemporaryDirectory() as folder:
        if device == "cuda":
            torch.cuda.set_device(0)
            torch.zeros(1, device="cuda")
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        shape = write_config(folder, size)
        meter = Meter(device)
        trainer = Trainer(shape, getattr(torch, dtype), device)
        print(f"{size}: {trainer.flat.nbytes / (1 << 30):.3f} GiB of {dtype} weights on {device}")
        meter.memory("trainer")
        table = tuple(engine_params(shape, FAMILIES[shape.architecture], tp=1, tp_rank=0))
        sharing = find_sharing(table, trainer.params)
        shared = {name: trainer.tensors[source] for name, source in sharing.shared.items()}
        seconds, engine = meter.seconds(lambda: make_engine(engine_settings(folder, shape, device, dtype), shared))
        print(f"engine started in {seconds:.1f} s: {len(shared)} of {len(table)} parameters are the trainer's memory")
        meter.memory("trainer, and an engine on its memory with a KV cache of 2 GiB")
        transfer = _transfer(trainer, table, engine, getattr(torch, dtype))
        _compare(trainer, engine, transfer, meter, shape.vocab_size, repeats)
        engine.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _transfer(trainer: Trainer, table: tuple[LocalParam, ...], engine: Any, dtype: torch.dtype) -> Transfer:
    plan = make_plan([Shard(0, trainer.params)], [Shard(0, table)])
    live = live_params(table, engine.shapes())
    return Transfer(
        plan, Links(), trainer.params, live, trainer_dtype=dtype, engine_dtype=dtype, cap_bytes=256 << 20
    )  # fmt: skip


def _compare(trainer: Trainer, engine: Any, transfer: Transfer, meter: Meter, vocab: int, repeats: int) -> None:
    """The table, and whether the three ways agree."""
    publisher = ReshardPublisher(transfer, engine, lambda: trainer.tensors)
    publisher.publish(0, expect_change=False)
    version = 0

    def reshard() -> SyncReport:
        return publisher.publish(version, expect_change=bool(engine.shared))

    def load() -> SyncReport:
        engine.update_weights(trainer.export(), version)
        return SyncReport(local_bytes=trainer.flat.nbytes)

    ways = (
        ("shared", trainer.step, reshard),
        ("copied", lambda: spoil(engine), reshard),
        ("loaded", lambda: spoil(engine), load),
    )
    print("| way | seconds, each | bytes copied | bytes shared | tokens equal |")
    print("|---|---|---|---|---|")
    best: dict[str, float] = {}
    expected: list[tuple[int, ...]] | None = None
    for way, prepare, sync in ways:
        took: list[float] = []
        report = SyncReport()
        for _ in range(repeats):
            version += 1
            prepare()
            seconds, report = meter.seconds(sync)
            took.append(seconds)
        best[way] = min(took)
        tokens = answers(engine, vocab)
        expected = expected or tokens
        equal = sum(one == other for one, other in zip(tokens, expected, strict=True))
        shown = " ".join(f"{seconds:.4f}" for seconds in took)
        sizes = f"{report.local_bytes:,} | {report.aliased_bytes:,}"
        print(f"| {way} | {shown} | {sizes} | {equal} of {len(tokens)} |", flush=True)
        meter.memory(f"after {way}")
    assert len(set(expected or [])) > 1, "all answers are alike: the model says nothing"
    print(f"best shared sync against best load: {best['loaded'] / best['shared']:.0f} times faster")
