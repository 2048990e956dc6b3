"""Contract N1 on a GPU: vLLM's CUDA build samples from what transformers computes from the same file.

The trainer computes that as well: tests/ranks/test_odd_configs.py. The CPU build: tests/e2e/test_vllm_odd_configs.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_vllm_rollout import _settings
from tests.helpers.odd_configs import FIRST
from tests.helpers.rollouts import by_request
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import save_odd, save_tiny

pytestmark = pytest.mark.gpu
NEW_TOKENS = 12
LENGTHS = (5, 40)
SMALL = {"kv_cache_gb": 0.25, "max_model_len": 64, "max_num_seqs": 8, "device": "cuda", "free_cache_engine": False}
LATENT = ("deepseek_v2", "deepseek_v3", "moonlight")
# vLLM's kernels for latent attention on GPUs take these sizes.
HEADS = {"qk_nope_head_dim": 128, "v_head_dim": 128}


def _gaps_on_rank(rank: int, world: int, folders: list[str], dtype: str) -> list[tuple[float, float]]:
    """Mean and largest difference between vLLM's log-probabilities and transformers', for each folder."""
    from transformers import AutoModelForCausalLM

    from megatron_rl.rollout.engine import Request, Sampling, make_engine
    from megatron_rl.weights.dtypes import DTYPES
    from megatron_rl.weights.safetensors import SafetensorsSource

    generator = torch.Generator().manual_seed(0)
    prompts = [tuple(torch.randint(2, 128, (length,), generator=generator).tolist()) for length in LENGTHS]
    sampling = Sampling(n=4, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=NEW_TOKENS, stop_token_ids=())
    gaps: list[tuple[float, float]] = []
    for folder in folders:
        engine = make_engine(_settings(folder, dtype=dtype, gpu_memory_utilization=0.1, **SMALL))
        engine.update_weights(SafetensorsSource(folder).tensors(), 0)
        requests = [Request(prompt, seed=7 * i) for i, prompt in enumerate(prompts)]
        answers = by_request(engine.generate(requests, sampling), sampling.n)
        engine.close()
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])
        model.to("cuda").eval()
        found: list[torch.Tensor] = []
        for prompt, samples in zip(prompts, answers, strict=True):
            for sample in samples:
                ids = torch.tensor([[*prompt, *sample.token_ids]], device="cuda")
                with torch.no_grad():
                    logp = torch.log_softmax(model(ids).logits[0].float(), -1)[len(prompt) - 1 : -1].cpu()
                wanted = logp.gather(1, torch.tensor(sample.token_ids)[:, None]).squeeze(1)
                found.append((wanted - torch.tensor(sample.logprobs)).abs())
        gap = torch.cat(found)
        gaps.append((float(gap.mean()), float(gap.max())))
    return gaps


def _check(folders: list[str], dtype: str, mean: float) -> None:
    (gaps,) = run_ranks(1, _gaps_on_rank, folders, dtype, timeout=500.0, device="cuda")
    assert len(gaps) == len(folders)
    lines = [f"{dtype} mean {gap[0]:.2e}, max {gap[1]:.2e} {folder}" for folder, gap in zip(folders, gaps, strict=True)]
    print(*lines, sep="\n")
    assert all(gap[0] < mean for gap in gaps), lines


def test_n1_vllm_computes_what_transformers_does(tmp_path: Path) -> None:
    """In float32, of which vLLM's kernels for attention keep TF32's digits."""
    dense = [
        variant
        for variant in (*FIRST, ("gemma", {"tie_word_embeddings": True}))
        if not variant[0].startswith("deepseek")
    ]
    folders = [save_odd(tmp_path / f"{number}-{family}", family, own) for number, (family, own) in enumerate(dense)]
    _check(folders, "float32", 1e-3)


def test_n1_latent_attention(tmp_path: Path) -> None:
    """In bfloat16: vLLM's kernels for it take no float32."""
    folders = [save_tiny(tmp_path / family, family, tied=False, layers=2, **HEADS) for family in LATENT]
    _check(folders, "bfloat16", 2e-2)
