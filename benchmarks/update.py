"""Tokens a second, model FLOP utilisation and memory of the trainer's update. Prints one table.

    python -m benchmarks.update                                    # a small model on the CPU, float32
    python -m benchmarks.update --device cuda                      # a GRPO step's tokens, and SFT at 8k and 16k
    python -m benchmarks.update --device cuda --only grpo --profile

grpo: Qwen2 0.5B's shape, 512 sequences of 128 + 512 tokens, the responses trained on. sft: Qwen3 0.6B's shape, packed
sequences of the length named, all tokens trained on. 7b: Qwen2.5 7B's shape with 12 of its 28 layers, whose weights,
gradients and optimizer state (18 bytes a parameter) fit one GPU. bfloat16, random weights, no recomputation, AdamW
with float32 masters. A step is forward, backward and the optimizer; the median of --repeats after two that warm up.

MFU: what megatron_rl/models/flops.py counts, over the dense bfloat16 peak of the device.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from benchmarks.packing import SHAPES
from megatron_rl.config.sections.actor import ActorConfig
from megatron_rl.models import FAMILIES
from megatron_rl.models.flops import peak_of, training_flops
from megatron_rl.models.shape import ModelShape
from megatron_rl.ops.flash import FlashChoice
from megatron_rl.types import TrainBatch

_QWEN2 = {
    "architecture": "Qwen2ForCausalLM", "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "max_position_embeddings": 32768, "initializer_range": 0.02, "head_dim": 64,
}  # fmt: skip
_QWEN2_7B = _QWEN2 | {
    "tie_word_embeddings": False, "head_dim": 128, "num_layers": 28, "hidden_size": 3584, "num_heads": 28,
    "num_kv_heads": 4, "ffn_size": 18944, "vocab_size": 152064,
}  # fmt: skip
_QWEN3 = _QWEN2 | {
    "architecture": "Qwen3ForCausalLM", "head_dim": 128, "num_layers": 28, "hidden_size": 1024, "num_heads": 16,
    "num_kv_heads": 8, "ffn_size": 3072, "vocab_size": 151936,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Sequences of one length, and how many tokens a micro-batch has at most."""

    shape: Mapping[str, object]
    sequences: int
    prompt: int
    length: int
    max_tokens: int


CASES = {
    "cpu": {"grpo": Case(_QWEN2 | SHAPES["cpu"], 8, 16, 80, 320)},
    "cuda": {
        "grpo": Case(_QWEN2 | SHAPES["cuda"], 512, 128, 640, 32768),
        "sft-8k": Case(_QWEN3, 8, 1, 8192, 32768),
        "sft-16k": Case(_QWEN3, 4, 1, 16384, 32768),
        "7b": Case(_QWEN2_7B | {"num_layers": 12}, 16, 512, 2048, 16384),
    },
}


def batches(case: Case, vocab: int) -> list[TrainBatch]:
    """Micro-batches of whole sequences."""
    each = max(1, case.max_tokens // case.length)
    generator = torch.Generator().manual_seed(0)
    found: list[TrainBatch] = []
    for start in range(0, case.sequences, each):
        count = min(each, case.sequences - start)
        mask = (torch.arange(case.length) >= case.prompt).repeat(count)
        tokens = torch.randint(0, vocab, (count * case.length,), generator=generator)
        weights = mask.float() / (case.sequences * (case.length - case.prompt))
        found.append(TrainBatch(tokens, (case.length,) * count, mask, {"loss_weights": weights}))
    return found


@torch.no_grad()
def fill(chunk: torch.nn.Module, std: float) -> None:
    """Random matrices, norms of 1, biases of 0: drawn where they are, which is quicker than a source of weights."""
    torch.manual_seed(1)
    for name, param in chunk.named_parameters():
        if param.dim() > 1:
            param.normal_(0.0, std)
        else:
            param.fill_(0.0 if name.endswith("bias") else 1.0)


def measure(name: str, case: Case, device: str, repeats: int, profiled: bool, flash: FlashChoice) -> None:
    """One row of the table; with `profiled`, what the GPU's time went to."""
    from megatron_rl.algos.token_losses import nll_loss
    from megatron_rl.mcore import build
    from megatron_rl.mcore.objectives import token_objective
    from megatron_rl.mcore.step import optimizer_step

    shape = ModelShape(**case.shape)  # type: ignore[arg-type]
    actor = ActorConfig(flash_attention=flash)
    model = build.build_model(shape, actor, "bfloat16" if device == "cuda" else "float32", torch.device(device))
    fill(model.chunks[0], shape.initializer_range)
    trainable = build.make_trainable(model, actor.optim, 100)
    objective = token_objective(model, nll_loss, 1.0)
    micros = batches(case, shape.vocab_size)
    times: list[float] = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        optimizer_step(trainable, micros, objective)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    taken, tokens = statistics.median(times[2:]), case.sequences * case.length
    predicted = case.sequences * (case.length - case.prompt)
    work = training_flops(shape, FAMILIES[shape.architecture], [case.length] * case.sequences, predicted)
    peak = peak_of(torch.cuda.get_device_name()) if device == "cuda" else None
    used = f"{100 * work / taken / peak:.1f} %" if peak else "-"
    memory = f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if device == "cuda" else "-"
    first, second = times[:2]
    print(
        f"{name:<10}{tokens:>10,}{taken:>9.3f}{tokens / taken:>11,.0f}{used:>9}{memory:>11}{first:>9.2f}{second:>8.2f}"
    )
    if profiled:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            optimizer_step(trainable, micros, objective)
        print(trace.key_averages().table(sort_by="self_cuda_time_total", row_limit=22, max_name_column_width=70))


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", action="append", help="names of cases")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--flash", choices=("torch", "fa4"), default="torch", help="actor.flash_attention")
    args = parser.parse_args()
    from megatron_rl.mcore import cpu

    cpu.install()
    from megatron_rl.parallel import groups
    from megatron_rl.parallel.topology import Topology

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29572")
    groups.init_process_group(0, 1, args.device)
    groups.init_model_parallel(Topology(1))
    print(f"{'':<10}{'tokens':>10}{'s a step':>9}{'tokens/s':>11}{'MFU':>9}{'memory':>11}{'step 1':>9}{'step 2':>8}")
    for name, case in CASES[args.device].items():
        if not args.only or name in args.only:
            measure(name, case, args.device, args.repeats, args.profile, args.flash)
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    groups.destroy()


if __name__ == "__main__":
    main()
