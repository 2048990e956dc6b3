"""On a GPU: flash attention against plain attention, and the whole GRPO path with vLLM's CUDA build."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from examples.quickstart.make_data import make
from megatron_rl import trainers
from megatron_rl.config.load import load_config
from megatron_rl.types import TrainBatch

pytestmark = pytest.mark.gpu
REPO = Path(__file__).resolve().parents[2]


def test_varlen_attention_equals_grouped_attention() -> None:
    """Forward and backward, grouped-query heads, lengths from 1 to 700, bfloat16."""
    from megatron_rl.mcore.attention import grouped_attention, varlen_attention
    from megatron_rl.mcore.packing import pack

    lens = (1, 700, 33, 64, 5, 300)
    total = sum(lens)
    batch = TrainBatch(torch.zeros(total, dtype=torch.int64), lens, torch.zeros(total, dtype=torch.bool))
    packed = pack(batch, head_dim=64, rope_theta=1e4, device=torch.device("cuda")).packed
    generator = torch.Generator("cuda").manual_seed(0)
    found = []
    for attend in (grouped_attention, varlen_attention):
        generator.manual_seed(0)
        q, k, v = (
            torch.randn(total, heads, 64, generator=generator, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for heads in (8, 2, 2)
        )
        out = attend(q, k, v, packed, 64**-0.5)
        (out.float() * torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out)).sum().backward()
        found.append([out, q.grad, k.grad, v.grad])
    for plain, flash in zip(*found, strict=True):
        assert plain is not None and flash is not None
        assert (plain.float() - flash.float()).norm() / plain.float().norm() < 1e-2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grpo_learns_on_one_gpu(tmp_path: Path, dtype: str) -> None:
    """SFT, then GRPO through Ray, Megatron-Core and vLLM on CUDA: sleep, publish, wake each step; N8 within bounds."""
    data = tmp_path / "data"
    make(data, seed=0)
    own = ["cluster.device=cuda", f"model.dtype={dtype}", f"trainer.default_local_dir={tmp_path}"]
    files = {"sft": ("sft_train", "sft_val"), "grpo": ("train", "val")}
    rows = {}
    for name, settings in {
        "sft": [f"model.path={data / 'model'}", "trainer.total_training_steps=300", "trainer.target_loss=null"],
        "grpo": [
            f"model.path={tmp_path / 'sft' / 'final'}",
            "trainer.total_training_steps=8",
            "rollout.gpu_memory_utilization=0.2",
            "rollout.enforce_eager=true",
            "actor.optim.lr_warmup_steps=0",
        ],
    }.items():
        train, val = files[name]
        paths = [f"data.train_files={data / train}.parquet", f"data.val_files={data / val}.parquet"]
        trainers.run(load_config([str(REPO / "configs" / f"{name}-add2-1n1g.yaml")], [*own, *paths, *settings]))
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows[name] = [json.loads(line) for line in lines]
    steps = [row for row in rows["grpo"] if "reward/mean" in row]
    assert len(steps) == 8 and all(row["policy/grad_norm"] > 0 for row in steps)
    # vLLM's float32 attention on CUDA multiplies in TF32, so it is no closer to the trainer than 1e-3 on average.
    limit = 5e-3 if dtype == "float32" else 5e-2
    assert max(row["mismatch/abs_mean"] for row in steps) < limit, [row["mismatch/abs_mean"] for row in steps]
