"""Contract N1: whatever config.json passes, vLLM samples from what transformers computes from the same file.

The trainer computes that as well: tests/ranks/test_odd_configs.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.test_vllm_rollout import _settings
from tests.helpers.odd_configs import FIRST, PASSING, Variant
from tests.helpers.rollouts import by_request
from tests.helpers.run_ranks import run_ranks
from tests.helpers.stack import needs_cpu_engine
from tests.helpers.tiny import load_hf_model, save_odd

NEW_TOKENS = 12
SMALL = {"kv_cache_gb": 0.05, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
LENGTHS = (5, 40)
"""Of prompts; longer than the windows that the table says are not used."""


def _gaps_on_rank(rank: int, world: int, folders: list[str]) -> list[float]:
    """Largest difference between vLLM's log-probabilities and transformers', for each folder."""
    from megatron_rl.rollout.engine import Request, Sampling, make_engine
    from megatron_rl.weights.safetensors import SafetensorsSource

    generator = torch.Generator().manual_seed(0)
    prompts = [tuple(torch.randint(2, 128, (length,), generator=generator).tolist()) for length in LENGTHS]
    sampling = Sampling(n=2, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=NEW_TOKENS, stop_token_ids=())
    gaps: list[float] = []
    for folder in folders:
        # A process has one engine that gives its memory back, and these follow each other.
        engine = make_engine(_settings(folder, free_cache_engine=False, **SMALL))
        engine.update_weights(SafetensorsSource(folder).tensors(), 0)
        answers = by_request(
            engine.generate([Request(prompt, seed=7 * i) for i, prompt in enumerate(prompts)], sampling), sampling.n
        )
        engine.close()
        model = load_hf_model(folder)
        gap = 0.0
        for prompt, samples in zip(prompts, answers, strict=True):
            for sample in samples:
                assert len(sample.token_ids) == NEW_TOKENS
                ids = torch.tensor([[*prompt, *sample.token_ids]])
                with torch.no_grad():
                    logp = torch.log_softmax(model(ids).logits[0].float(), -1)[len(prompt) - 1 : -1]
                wanted = logp.gather(1, torch.tensor(sample.token_ids)[:, None]).squeeze(1)
                gap = max(gap, float((wanted - torch.tensor(sample.logprobs)).abs().max()))
        gaps.append(gap)
    return gaps


def _check(folder: Path, variants: list[Variant]) -> None:
    folders = [save_odd(folder / str(number), *variant) for number, variant in enumerate(variants)]
    (gaps,) = run_ranks(1, _gaps_on_rank, folders, timeout=400.0)
    assert len(gaps) == len(variants)
    odd = [(*variant, gap) for variant, gap in zip(variants, gaps, strict=True) if not gap < 1e-4]
    assert not odd, odd


@needs_cpu_engine
def test_n1_vllm_computes_what_transformers_does(tmp_path: Path) -> None:
    """One variant of each family."""
    _check(tmp_path, FIRST)


@needs_cpu_engine
@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({family for family, _ in PASSING}))
def test_n1_vllm_computes_what_transformers_does_of_every_variant(tmp_path: Path, family: str) -> None:
    _check(tmp_path, [(of, changes) for of, changes in PASSING if of == family])
