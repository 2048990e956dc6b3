"""Contract W7 and the rollout's log-probabilities, with real vLLM and a real Megatron actor in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.errors import MegatronRLError, ReshardError, RolloutError
from tests.helpers.rollouts import by_request
from tests.helpers.run_ranks import run_ranks
from tests.helpers.stack import needs_cpu_engine
from tests.helpers.tiny import load_hf_model, random_batch, save_tiny
from tests.helpers.training import build, forward_logprobs, make_actor, train_step

NEW_TOKENS = 24
LONG_PROMPT = 300
"""Longer than two blocks of the prefix cache: a stale block would show."""


def _settings(folder: str, name: str = "vllm", **changes: Any) -> Any:
    from megatron_rl.rollout.engine import EngineSettings

    values: dict[str, Any] = {
        "name": name,
        "model_path": folder,
        "tokenizer_path": folder,
        "vocab_size": 128,
        "max_model_len": 512,
        "dtype": "float32",
        "device": "cpu",
        "gpu_memory_utilization": 0.5,
        "kv_cache_gb": None,
        "max_num_seqs": 32,
        "max_num_batched_tokens": None,
        "enforce_eager": True,
        "free_cache_engine": True,
        "seed": 0,
        "needs_text": False,
    }
    return EngineSettings(**(values | changes))


def _gaps(engine: Any, trainable: Any, temperature: float) -> float:
    """Largest difference between the engine's log-probabilities and the trainer's over samples of short
    and long prompts.
    """
    from megatron_rl.rollout.engine import Request, Sampling
    from megatron_rl.workers.rank_batch import end_to_end

    generator = torch.Generator().manual_seed(0)
    prompts = [tuple(torch.randint(2, 128, (n,), generator=generator).tolist()) for n in (5, 17, 140, LONG_PROMPT)]
    sampling = Sampling(n=2, temperature=temperature, top_p=1.0, top_k=-1, max_tokens=NEW_TOKENS, stop_token_ids=(1,))
    samples = engine.generate([Request(p, seed=7 * i) for i, p in enumerate(prompts)], sampling)
    assert set(samples.oldest_version) == set(samples.newest_version) == {engine.weight_version}
    spans = [samples.span(row) for row in range(len(samples))]
    batch = end_to_end(
        [np.array(prompt, np.int32) for prompt in prompts],
        [row // 2 for row in range(len(samples))],
        [samples.token_ids[span] for span in spans],
        [samples.logprobs[span] for span in spans],
    )
    (found,) = forward_logprobs(trainable.model, [batch], temperature)
    return float((found["logprobs"] - batch.columns["rollout_logprobs"])[batch.loss_mask].abs().max())


def _updates_on_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    from megatron_rl.algos.token_losses import nll_loss
    from megatron_rl.mcore import convert
    from megatron_rl.reshard.publisher import FullPublisher
    from megatron_rl.rollout.engine import Request, Sampling, make_engine

    trainable = build(folder, make_actor(), world)
    rng = torch.get_rng_state()
    engine = make_engine(_settings(folder))
    kept_rng = torch.equal(rng, torch.get_rng_state())
    greedy = Sampling(n=1, temperature=0.0, top_p=1.0, top_k=-1, max_tokens=8, stop_token_ids=())
    refused = ""
    try:
        engine.generate([Request((5,))], greedy)
    except RolloutError as error:
        refused = str(error)
    publisher = FullPublisher(engine, lambda: convert.export_hf(trainable.model))
    publisher.publish(0, expect_change=False)
    gaps = [_gaps(engine, trainable, temperature) for temperature in (1.0, 0.7)]
    for version in (1, 2, 3):
        train_step(trainable, [random_batch(version, (30, 41), 128)], nll_loss, 1.0)
        publisher.publish(version, expect_change=True)
        gaps.append(_gaps(engine, trainable, 1.0))
    long = tuple(range(2, 120)) * 3
    samples = engine.generate([Request(long[:LONG_PROMPT])], greedy)
    exported = {name: tensor.clone() for name, tensor in convert.export_hf(trainable.model)}
    unchanged = ""
    try:
        publisher.publish(4, expect_change=True)
    except ReshardError as error:
        unchanged = str(error)
    version = engine.weight_version
    engine.close()
    return {
        "gaps": gaps,
        "greedy": samples.id_tuples()[0],
        "prompt": long[:LONG_PROMPT],
        "weights": exported,
        "refused": refused,
        "unchanged": unchanged,
        "version": version,
        "kept_rng": kept_rng,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With YaRN, on texts that are longer than its first context."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
    return save_tiny(tmp_path_factory.mktemp("vllm") / "model", "qwen2", tied=True, rope_parameters=rope)


@needs_cpu_engine
def test_w7_w8_engine_follows_the_trainer_through_three_updates(folder: str) -> None:
    """W7, W8: within 1e-4 before and after each of three updates, prefix caching on, prompts of up to 300 tokens."""
    (result,) = run_ranks(1, _updates_on_rank, folder, timeout=240.0)
    assert max(result["gaps"]) < 1e-4, result["gaps"]
    model = load_hf_model(folder)
    model.load_state_dict(result["weights"], strict=False)
    ids = torch.tensor([result["prompt"]])
    wanted = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert tuple(wanted[0, ids.shape[1] :].tolist()) == result["greedy"], "greedy text equals transformers'"
    assert "before the first update" in result["refused"]
    assert "equal those published before" in result["unchanged"]
    assert result["kept_rng"], "starting the engine leaves the trainer's random numbers alone"


def _experts_on_rank(rank: int, world: int, folder: str) -> list[float]:
    from megatron_rl.algos.token_losses import nll_loss
    from megatron_rl.mcore import convert
    from megatron_rl.reshard.publisher import FullPublisher
    from megatron_rl.rollout.engine import make_engine

    trainable = build(folder, make_actor(ep=world), world)
    engine = make_engine(_settings(folder))
    publisher = FullPublisher(engine, lambda: convert.export_hf(trainable.model))
    publisher.publish(0, expect_change=False)
    gaps = [_gaps(engine, trainable, 0.7)]
    for version in (1, 2):
        train_step(trainable, [random_batch(2 * version + rank, (30, 41), 128)], nll_loss, 1.0)
        publisher.publish(version, expect_change=True)
        gaps.append(_gaps(engine, trainable, 1.0))
    engine.close()
    return gaps


@needs_cpu_engine
@pytest.mark.parametrize(("family", "ep"), [("qwen3_moe", 2), pytest.param("mixtral", 1, marks=pytest.mark.slow)])
def test_w7_engines_of_expert_parallel_ranks_hold_all_experts(tmp_path: Path, family: str, ep: int) -> None:
    """W7 with experts: each rank trains its part of them, and each engine samples from all of them.

    vLLM's CPU kernel pads the inner size of Qwen3-MoE here (48), not Mixtral's (64).
    """
    folder = save_tiny(tmp_path / "model", family, tied=False)
    for gaps in run_ranks(ep, _experts_on_rank, folder, timeout=240.0):
        assert max(gaps) < 1e-4, gaps


CUT = {
    "whole": {"kv_cache_gb": 0.25},
    # vLLM computes no more than this many tokens of prompts in a step.
    "parts": {"kv_cache_gb": 0.25, "max_num_batched_tokens": 48},
    # Six blocks of the cache: responses that grow into a further one put others off, which are computed again later.
    "put off": {"max_num_batched_tokens": 48, "kv_cache_gb": 0.0015},
}


def _seeded_on_rank(rank: int, world: int, folder: str, device: str) -> dict[str, Any]:
    from megatron_rl.rollout.engine import Request, Sampling, make_engine

    generator = torch.Generator().manual_seed(0)
    prompts = [
        tuple(torch.randint(2, 128, (n,), generator=generator).tolist()) for n in (5, 120, 250, 110, 48, 122, 49)
    ]
    requests = [Request(prompt, seed=1000 * i) for i, prompt in enumerate(prompts)]
    sampling = Sampling(n=3, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=NEW_TOKENS, stop_token_ids=(1,))
    found: dict[str, Any] = {}
    for name, changes in CUT.items():
        # A process has one engine that gives its memory back, and these follow each other.
        own = {"device": device, "gpu_memory_utilization": 0.1, "free_cache_engine": False, "decode": "scheduler"}
        engine = make_engine(_settings(folder, **own, **changes))
        engine.update_weights(load_file(f"{folder}/model.safetensors").items(), 0)
        rng = torch.get_rng_state()
        answers = by_request(engine.generate(requests, sampling), sampling.n)
        found[name] = [[sample.token_ids for sample in samples] for samples in answers]
        backwards = by_request(engine.generate(requests[::-1], sampling), sampling.n)[::-1]
        found[f"{name}, backwards"] = [[sample.token_ids for sample in samples] for samples in backwards]
        assert torch.equal(rng, torch.get_rng_state()), "the trainer's random numbers are left alone"
        engine.close()
    return found


def check_seeded_samples(folder: str, device: str) -> None:
    """Prompts beyond max_num_batched_tokens, in any order, and requests that lose their place in the KV cache."""
    (found,) = run_ranks(1, _seeded_on_rank, folder, device, timeout=240.0, device=device)
    whole = found.pop("whole")
    assert len({sample for samples in whole for sample in samples}) == 21
    for name, samples in found.items():
        assert samples == whole, name


@needs_cpu_engine
@pytest.mark.slow
def test_seeded_samples_are_the_same_however_vllm_cuts_the_prompts(folder: str) -> None:
    check_seeded_samples(folder, "cpu")


@needs_cpu_engine
def test_max_model_len_is_an_error_and_never_a_cut(tmp_path: Path) -> None:
    from megatron_rl.rollout.engine import Request, Sampling, make_engine

    engine = make_engine(_settings("unused", "fake", max_model_len=10))
    engine.update_weights([], 0)
    sampling = Sampling(n=1, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=6, stop_token_ids=())
    assert len(engine.generate([Request((1, 2, 3, 4))], sampling)) == 1
    with pytest.raises(RolloutError, match="prompt of 5 tokens \\+ 6 new ones pass the engine's max_model_len 10"):
        engine.generate([Request((1, 2, 3, 4, 5))], sampling)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "mixtral", "gpt_oss"])
def test_hf_engine_agrees_with_its_own_model(tmp_path: Path, family: str) -> None:
    """The yardstick engine: log-probabilities of transformers' forward pass, stop ids kept, seeds per sample."""
    from megatron_rl.rollout.engine import Request, Sampling, make_engine
    from megatron_rl.weights.safetensors import SafetensorsSource

    folder = save_tiny(tmp_path / "model", family, tied=family != "gpt_oss")
    model = load_hf_model(folder)
    engine = make_engine(_settings(folder, "hf"))
    engine.update_weights(SafetensorsSource(folder).tensors(), 0)
    sampling = Sampling(n=3, temperature=0.8, top_p=1.0, top_k=-1, max_tokens=6, stop_token_ids=(7,))
    requests = [Request((5, 6, 9), seed=3), Request((4, 2), seed=50)]
    answers = by_request(engine.generate(requests, sampling), sampling.n)
    backwards = by_request(engine.generate(requests[::-1], sampling), sampling.n)[::-1]
    assert backwards == answers, "samples depend on seeds, not on the order"
    for request, samples in zip(requests, answers, strict=True):
        for sample in samples:
            ids = torch.tensor([[*request.token_ids, *sample.token_ids]])
            logp = torch.log_softmax(model(ids).logits[0].float() / 0.8, -1)[len(request.token_ids) - 1 : -1]
            wanted = logp.gather(1, torch.tensor(sample.token_ids)[:, None]).squeeze(1)
            assert torch.allclose(torch.tensor(sample.logprobs), wanted, atol=1e-4)
            assert (sample.finish_reason == "stop") == (sample.token_ids[-1] == 7)


def _incomplete_on_rank(rank: int, world: int, folder: str, extra: str) -> dict[str, str]:
    from megatron_rl.rollout.engine import Request, Sampling, make_engine
    from megatron_rl.weights.safetensors import SafetensorsSource

    engine = make_engine(_settings(folder))
    whole = dict(SafetensorsSource(folder).tensors())
    lost = "model.layers.1.mlp.down_proj.weight"
    updates: dict[str, dict[str, Any]] = {
        "missing": {name: tensor for name, tensor in whole.items() if name != lost},
        "layer": {name: tensor for name, tensor in whole.items() if ".layers.1." not in name},
        "unknown": whole | {extra: torch.zeros(4)},
        "misshaped": whole | {lost: whole[lost][:, :-1]},
    }
    said: dict[str, str] = {}
    engine.update_weights(iter(whole.items()), 0)
    for name, tensors in updates.items():
        try:
            engine.update_weights(iter(tensors.items()), 1)
        except MegatronRLError as error:
            said[name] = f"{type(error).__name__} {error}"
        said[f"{name} version"] = str(engine.weight_version)
        try:
            engine.generate([Request((5,))], Sampling(1, 0.0, 1.0, -1, 4, ()))
        except RolloutError as error:
            said[f"{name} generate"] = str(error)
    engine.update_weights(iter(whole.items()), 2)
    said["whole"] = str(engine.weight_version)
    engine.close()
    return said


@needs_cpu_engine
def test_w2_vllm_refuses_an_update_that_is_not_whole(folder: str) -> None:
    """By name; and it holds no version until a whole one has come, so that nothing is sampled from what it has."""
    extra = "model.layers.0.self_attn.q_norm.weight"
    (said,) = run_ranks(1, _incomplete_on_rank, folder, extra, timeout=240)
    assert "no value for model.layers.1.mlp.down_proj.weight;" in said["missing"]
    assert "no value for model.layers.1.input_layernorm.weight, " in said["layer"]
    assert f"{extra} is no tensor of the model" in said["unknown"]
    assert "down_proj.weight is [128, 223], config.json says [128, 224]" in said["misshaped"]
    for name in ("missing", "layer", "unknown", "misshaped"):
        assert said[f"{name} version"] == "-1" and "before the first update" in said[f"{name} generate"]
    assert said["whole"] == "2"
