"""Batches that are decoded without vLLM's scheduler: the same greedy answers, log-probabilities of the model, samples
that depend on their seeds alone, and what they do not cover goes to the scheduler or is refused.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.errors import RolloutError
from megatron_rl.types import Samples
from tests.e2e.test_vllm_rollout import _settings
from tests.helpers.rollouts import by_request
from tests.helpers.run_ranks import run_ranks
from tests.helpers.stack import needs_cpu_engine
from tests.helpers.tiny import load_hf_model, save_tiny

LENGTHS = (5, 120, 250, 33, 64, 122, 1)
STOPS = (1, 7, 9)
TEMPERATURE = 0.8
WAYS: dict[str, dict[str, Any]] = {
    "scheduler": {"decode": "scheduler"},
    "batch": {"decode": "batch"},
    # Prompts in parts, few rows, and so few blocks that sequences are put off, and computed again when they go on.
    "small": {
        "decode": "batch",
        "max_num_seqs": 6,
        "max_num_batched_tokens": 48,
        "kv_cache_gb": 0.0012,
        "engine_kwargs": {"block_size": 32},
    },
}


def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(2, 128, (n,), generator=generator).tolist()) for n in LENGTHS]


def _answers_on_rank(rank: int, world: int, folder: str, device: str) -> dict[str, Any]:
    """Greedy answers and seeded samples in all ways; first tokens of many samples; what an engine refuses."""
    from megatron_rl.rollout.engine import Request, Sampling, make_engine

    requests = [Request(prompt, seed=1000 * i) for i, prompt in enumerate(prompts())]
    greedy = Sampling(n=1, temperature=0.0, top_p=1.0, top_k=-1, max_tokens=32, stop_token_ids=STOPS)
    sampling = replace(greedy, n=3, temperature=TEMPERATURE)
    found: dict[str, Any] = {}
    for name, changes in WAYS.items():
        ranks = tuple(range(world)) if world > 1 else ()
        own = {"device": device, "gpu_memory_utilization": 0.1, "free_cache_engine": False, "ranks": ranks}
        engine = make_engine(_settings(folder, **own, **changes))
        engine.update_weights(load_file(f"{folder}/model.safetensors").items(), 3)
        found[name] = {"greedy": engine.generate(requests, greedy)}
        if name == "scheduler":
            engine.close()
            continue
        found[name]["sampled"] = engine.generate(requests, sampling)
        backwards = by_request(engine.generate(requests[::-1], sampling), sampling.n)[::-1]
        found[name]["backwards"] = [[sample.token_ids for sample in samples] for samples in backwards]
        if name == "batch":
            found["first"] = engine.generate(requests[:1], replace(sampling, n=1500, max_tokens=1)).token_ids
            unseeded = [replace(request, seed=None) for request in requests]
            found["unseeded"] = [engine.generate(unseeded, sampling) for _ in range(2)]
            for key, changed in (("top_p", {"top_p": 0.9}), ("stop", {"stop": ("a",)})):
                with pytest.raises(RolloutError) as refused:
                    engine.generate(requests, replace(sampling, **changed))
                found[key] = str(refused.value)
        engine.close()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("batch") / "model", "qwen2", tied=True)


def check_answers(folder: str, device: str, world: int = 1) -> dict[str, Any]:
    """Of all ways; ranks of one engine answer alike."""
    found, *others = run_ranks(world, _answers_on_rank, folder, device, timeout=240.0, device=device)
    for other in others:
        assert np.array_equal(other["batch"]["sampled"].token_ids, found["batch"]["sampled"].token_ids)
    wanted, batch = found["scheduler"]["greedy"], found["batch"]["sampled"]
    assert 0 < (wanted.finish == 0).sum() < len(wanted), "some answers end at a stop token, and some are cut"
    for name in WAYS:
        one: Samples = found[name]["greedy"]
        _equal(one, wanted)
        assert set(one.oldest_version) == set(one.newest_version) == {3}
        if name == "scheduler":
            continue
        _equal(found[name]["sampled"], batch)
        tokens = [[sample.token_ids for sample in each] for each in by_request(found[name]["sampled"], 3)]
        assert found[name]["backwards"] == tokens, f"{name}: samples depend on seeds, not on the order"
    return found


def _equal(one: Samples, other: Samples) -> None:
    assert np.array_equal(one.lens, other.lens) and np.array_equal(one.token_ids, other.token_ids)
    assert np.array_equal(one.finish, other.finish)
    assert np.abs(one.logprobs - other.logprobs).max() < 2e-5


@needs_cpu_engine
def test_a_batch_answers_as_the_scheduler_and_as_the_model(folder: str) -> None:
    found = check_answers(folder, "cpu")
    model = load_hf_model(folder)
    samples: Samples = found["batch"]["sampled"]
    assert len(set(samples.id_tuples())) > 18, "samples of a prompt differ"
    for row in range(len(samples)):
        span, prompt = samples.span(row), prompts()[row // 3]
        ids = torch.tensor([[*prompt, *samples.token_ids[span].tolist()]])
        logp = torch.log_softmax(model(ids).logits[0].float() / TEMPERATURE, -1)[len(prompt) - 1 : -1]
        wanted = logp.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
        assert torch.allclose(torch.from_numpy(samples.logprobs[span]), wanted, atol=1e-4)
        ended = samples.token_ids[span][-1] in STOPS
        assert samples.finish[row] == (0 if ended else 1) and (ended or samples.lens[row] == 32)
        assert not np.isin(samples.token_ids[span][:-1], STOPS).any()
    logits = model(torch.tensor([prompts()[0]])).logits[0, -1].detach().float()
    expected = 1500 * torch.softmax(logits / TEMPERATURE, 0).numpy()
    counts = np.bincount(found["first"], minlength=128)
    assert (np.abs(counts - expected) < 4.5 * np.sqrt(expected) + 1.5).all(), "first tokens follow the model"
    first, second = found["unseeded"]
    assert first.id_tuples() != second.id_tuples(), "without seeds, calls differ"
    assert "top_p 0.9 and top_k -1 restrict the tokens -- set rollout.decode=auto" in found["top_p"]
    assert "stop texts ['a'] are looked for in text" in found["stop"]


@needs_cpu_engine
@pytest.mark.slow
def test_ranks_of_one_engine_decode_alike(folder: str) -> None:
    check_answers(folder, "cpu", 2)


def _windows_on_rank(rank: int, world: int, folder: str) -> list[str]:
    """What an engine says of a model whose attention has a window."""
    from megatron_rl.rollout.engine import Request, Sampling, make_engine

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("megatron_rl.rollout.vllm_engine")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    engine = make_engine(_settings(folder))
    engine.update_weights(load_file(f"{folder}/model.safetensors").items(), 0)
    sampling = Sampling(n=1, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=4, stop_token_ids=())
    for _ in range(2):
        assert len(engine.generate([Request((5, 6))], sampling)) == 1
    engine.close()
    return said


@needs_cpu_engine
@pytest.mark.slow
def test_what_a_batch_cannot_decode_goes_to_the_scheduler_which_is_said_once(tmp_path: Path) -> None:
    (said,) = run_ranks(1, _windows_on_rank, save_tiny(tmp_path / "model", "mistral", tied=False), timeout=240.0)
    assert said == ["generation: vLLM's scheduler, since its attention has a window"] or said == [
        "generation: vLLM's scheduler, since its layers have several kinds of attention, or another one than full "
        "attention"
    ]
