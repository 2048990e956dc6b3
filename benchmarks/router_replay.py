"""How far log-probabilities of rollout and trainer are apart, with and without replayed experts. Prints one table.

    python -m benchmarks.router_replay                                    # tiny, transformers' engine on the CPU
    python -m benchmarks.router_replay --device cuda --engine vllm        # layers of Qwen3-30B-A3B, one GPU

An engine in bfloat16 with random weights samples, and says which experts its tokens went to. The trainer's model, with
the same weights, then computes the log-probabilities of what was sampled: with its own choice of experts, and with the
engine's (actor.router_replay=rollout). Aim: the mean |difference| falls at least 2x.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from megatron_rl.config.sections.actor import ActorConfig
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.parallel.topology import topology_of
from megatron_rl.rollout.engine import EngineSettings, Request, Sampling, make_engine
from megatron_rl.types import Samples, TrainBatch
from megatron_rl.workers.rank_batch import end_to_end, routed_of

# name: (hidden, layers, heads, KV heads, head size, inner size, experts, k, vocabulary)
SIZES = {
    "tiny": (64, 8, 4, 2, 32, 128, 64, 4, 256),
    "30b-a3b": (2048, 12, 32, 4, 128, 768, 128, 8, 151936),
}


def write_config(folder: str, size: str) -> None:
    """config.json of Qwen3-MoE."""
    hidden, layers, heads, kv_heads, head_dim, inner, experts, topk, vocab = SIZES[size]
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": 4 * inner,
        "moe_intermediate_size": inner,
        "num_experts": experts,
        "num_experts_per_tok": topk,
        "norm_topk_prob": True,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    (Path(folder) / "config.json").write_text(json.dumps(config))


def settings(folder: str, vocab: int, args: argparse.Namespace) -> EngineSettings:
    """One rank, no sleeping, in bfloat16."""
    return EngineSettings(
        name=args.engine,
        model_path=folder,
        tokenizer_path=folder,
        vocab_size=vocab,
        max_model_len=2048,
        dtype="bfloat16",
        device=args.device,
        gpu_memory_utilization=0.5,
        kv_cache_gb=8.0 if args.device == "cuda" else 0.25,
        max_num_seqs=64,
        max_num_batched_tokens=None,
        enforce_eager=True,
        free_cache_engine=False,
        seed=0,
        needs_text=False,
        returns_experts=True,
    )


def batch_of(prompts: list[tuple[int, ...]], samples: Samples) -> TrainBatch:
    """Prompts and what was sampled after them, with the experts of the engine."""

    class Here:
        """The samples, in this process."""

        def fetch(self) -> Samples:
            """See types.Handle."""
            return samples

    from megatron_rl.types import SequenceRefs

    count = len(prompts)
    rows = np.arange(count, dtype=np.int32)
    ids = tuple(np.array(prompt, np.int32) for prompt in prompts)
    refs = SequenceRefs(tuple(range(count)), ids, rows, (Here(),), np.zeros(count, np.int32), rows)
    batch = end_to_end(refs.prompts, refs.prompt_of.tolist(), *refs.fetch())
    return replace(batch, routed=routed_of(refs, batch.starts))


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf")
    parser.add_argument("--size", choices=tuple(SIZES))
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()
    from megatron_rl.mcore import cpu

    cpu.install()
    from megatron_rl.mcore import build, convert
    from megatron_rl.mcore.heads import columns_reader
    from megatron_rl.mcore.step import forward
    from megatron_rl.parallel import groups
    from megatron_rl.weights.safetensors import RandomSource

    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)
    actor = ActorConfig()
    groups.init_process_group(0, 1, args.device, 600.0)
    groups.init_model_parallel(topology_of(actor, 1), 1)
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, args.size or ("30b-a3b" if args.device == "cuda" else "tiny"))
        shape = read_model_shape(folder)
        model = build.build_model(shape, actor, "bfloat16", device)
        convert.load_hf(model, lambda: RandomSource(1, 0.05))
        engine = make_engine(settings(folder, shape.vocab_size, args))
        engine.update_weights(convert.export_hf(model), 0)
        generator = torch.Generator().manual_seed(2)
        drawn = torch.randint(3, shape.vocab_size, (args.prompts, 32), generator=generator).tolist()
        prompts = [tuple(prompt) for prompt in drawn]
        sampling = Sampling(1, 1.0, 1.0, -1, args.new_tokens, ())
        samples = engine.generate([Request(prompt, seed=i) for i, prompt in enumerate(prompts)], sampling)
        batch = batch_of(prompts, samples)
        wanted, mask = batch.columns["rollout_logprobs"], batch.loss_mask
        means: dict[str, float] = {}
        reader = columns_reader(model, ("logprobs",), 1.0)
        for name, routed in (("own experts", None), ("replayed", batch.routed)):
            (columns,) = forward(model, [replace(batch, routed=routed)], reader).columns
            gap = (columns["logprobs"] - wanted)[mask].abs()
            means[name] = float(gap.mean())
            print(f"{name:12} |dlogp| mean {gap.mean():.5f}, 99% {gap.quantile(0.99):.5f}, max {gap.max():.5f}")
        (routed,) = forward(model, [replace(batch, routed=None)], reader, records=True).routed
        assert batch.routed is not None
        known = batch.routed[..., 0] > 0
        same = (routed[known].sort(-1).values == batch.routed[known].sort(-1).values).all(-1)
        print(f"tokens and layers with other experts: {1 - same.float().mean():.4f}")
        print(f"replay brings |dlogp| down {means['own experts'] / means['replayed']:.2f} times")
        engine.close()
    groups.destroy()


if __name__ == "__main__":
    main()
