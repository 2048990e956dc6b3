"""On GPUs: engines with CUDA graphs on the actor's memory, of one rank and of two, follow every update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_vllm_rollout import check_seeded_samples
from tests.e2e.test_vllm_tp import FAMILIES_OF_CPU_ENGINES, _config, model_of
from tests.gpu.test_families import HEADS, LATENT
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import random_batch, save_tiny
from tests.helpers.training import build, train_step

pytestmark = pytest.mark.gpu
VERSIONS = range(3)
# Longer than two blocks of the prefix cache: stale blocks would show.
PROMPTS = ((5, 17, 9), (40,) * 20, tuple(range(2, 120)) * 2)
EAGER = ("rollout.enforce_eager=true",)
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ("rollout.tp=1", "cluster.n_gpus_per_node=1")),
    "tp2": (2, ("actor.tp=2", "actor.sequence_parallel=true")),
    "pp2": (2, ("actor.pp=2",)),
    "dp2": (2, ()),
    "tp2-pp2": (4, ("actor.tp=2", "actor.pp=2", "cluster.n_gpus_per_node=4")),
}
FAMILIES = {
    "dense": [family for family in FAMILIES_OF_CPU_ENGINES if not family.endswith(("moe", "oss", "mixtral"))],
    "experts": [family for family in FAMILIES_OF_CPU_ENGINES if family.endswith(("moe", "oss", "mixtral"))],
    "latent": LATENT,
}


def _sampled(engine: Any, temperature: float) -> list[tuple[int, ...]]:
    from megatron_rl.rollout.engine import Request, Sampling

    sampling = Sampling(n=1, temperature=temperature, top_p=1.0, top_k=-1, max_tokens=24, stop_token_ids=())
    return engine.generate([Request(prompt, seed=7) for prompt in PROMPTS], sampling).id_tuples()


def _answers(engine: Any) -> list[tuple[int, ...]]:
    """Greedy ones, and sampled ones: a small model may repeat itself greedily whatever its weights are."""
    return [*_sampled(engine, 0.0), *_sampled(engine, 1.0)]


def _families_on_rank(rank: int, world: int, folders: dict[str, str]) -> dict[str, dict[str, Any]]:
    """One family after the other: CUDA graphs would take a minute for each."""
    from megatron.core import parallel_state

    found: dict[str, dict[str, Any]] = {}
    for family, folder in folders.items():
        found[family] = _follow_on_rank(rank, world, folder, ("cluster.n_gpus_per_node=1", "rollout.tp=1", *EAGER))
        parallel_state.destroy_model_parallel()
    return found


def _follow_on_rank(rank: int, world: int, folder: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Answers after each publish, the engine asleep between them; and of a fresh engine that vLLM loads."""
    from dataclasses import replace

    from megatron_rl.algos.token_losses import nll_loss
    from megatron_rl.mcore import convert
    from megatron_rl.parallel.topology import topology_of
    from megatron_rl.rollout.engine import make_engine
    from megatron_rl.trainers.placement import engine_order
    from megatron_rl.workers.colocated import engine_layout, engine_settings, start_engine
    from megatron_rl.workers.model import TrainedModel
    from megatron_rl.workers.phases import RankMemory

    own = ("cluster.device=cuda", "model.dtype=bfloat16", "rollout.kv_cache_gb=1", "rollout.gpu_memory_utilization=0.1")
    cfg = _config(folder, *own, *overrides)
    assert cfg.rollout.free_cache_engine and cfg.rollout.enforce_eager == (EAGER[0] in overrides)
    trainable = build(folder, cfg.actor, world, "bfloat16")
    policy = trainable.model
    layout = engine_layout(cfg, engine_order(cfg, policy.shape, topology_of(cfg.actor, world)))
    engine, publisher = start_engine(cfg, TrainedModel(trainable), RankMemory(), layout, device="cuda", rank=rank)
    found: dict[str, Any] = {"shared": len(engine.shared), "reports": [], "shared engine": [], "fresh engine": []}
    exports = []
    for version in VERSIONS:
        found["reports"].append(publisher.publish(version, expect_change=version > 0))
        found["shared engine"].append(_answers(engine))
        exports.append({name: tensor.clone() for name, tensor in convert.export_hf(policy, torch.bfloat16)})
        engine.sleep()
        train_step(trainable, [random_batch(7 + version, (30, 41), 128)], nll_loss, 1.0)
    engine.close()
    fresh = make_engine(replace(engine_settings(cfg, policy.shape, "cuda", layout, rank), free_cache_engine=False))
    for version in VERSIONS:
        fresh.update_weights(exports[version].items(), version)
        found["fresh engine"].append(_answers(fresh))
    fresh.close()
    found["exports"] = [{name: tensor.cpu() for name, tensor in export.items()} for export in exports]
    return found


def _regrets(folder: str, export: dict[str, torch.Tensor], answers: list[tuple[int, ...]]) -> torch.Tensor:
    """[tokens] log-odds of transformers' own choice, in float32, against each greedy token."""
    model = model_of(folder, export).float().eval()
    found: list[torch.Tensor] = []
    for prompt, answer in zip(PROMPTS, answers[: len(PROMPTS)], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        found.append(logits.max(-1).values - logits.gather(1, torch.tensor(answer)[:, None]).squeeze(1))
    return torch.cat(found)


@pytest.mark.parametrize("name", LAYOUTS)
def test_engines_with_graphs_on_the_actors_memory_follow_it(tmp_path: Path, name: str) -> None:
    """CUDA graphs, sleep and wake, three versions: answers equal those of an engine of its own memory that vLLM loaded
    whole; ranks answer alike; bytes between ranks are the minimum.
    """
    world, overrides = LAYOUTS[name]
    folder = save_tiny(
        tmp_path / "model",
        tied=False,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    ranks = run_ranks(world, _follow_on_rank, folder, overrides, timeout=400.0, device="cuda")
    for rank in ranks:
        assert rank["shared"] > 0
        assert rank["shared engine"] == rank["fresh engine"]
        assert rank["shared engine"][0] != rank["shared engine"][-1], "the updates change the answers"
        assert all(report.moved_bytes == report.minimum_bytes for report in rank["reports"]), "W4"
    answers = [rank["shared engine"] for rank in ranks]
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("kind", FAMILIES)
def test_engines_of_every_family_on_the_actors_memory_follow_it(tmp_path: Path, kind: str) -> None:
    """Dense layers, experts, latent attention: three versions, answers equal those of an engine that vLLM loads, and
    transformers' but for choices that bfloat16 does not tell apart.
    """
    folders = {
        family: save_tiny(
            tmp_path / family,
            family,
            tied=FAMILIES_OF_CPU_ENGINES.get(family, False),
            layers=2,
            **(HEADS if family in LATENT else {}),
        )
        for family in FAMILIES[kind]
    }
    (found,) = run_ranks(1, _families_on_rank, folders, timeout=500.0, device="cuda")
    for family, one in found.items():
        assert one["shared"] > 0, family
        assert one["shared engine"] == one["fresh engine"], family
        assert one["shared engine"][0] != one["shared engine"][-1], family
        assert all(report.moved_bytes == report.minimum_bytes for report in one["reports"]), family
        for export, answers in zip(one["exports"], one["shared engine"], strict=True):
            regrets = _regrets(folders[family], export, answers)
            differing = float((regrets > 0).float().mean())
            print(f"{family}: largest regret {regrets.max():.3f}, {differing:.0%} differ")
            # bfloat16 rounds gpt-oss's experts most: the biases of this one are drawn large.
            assert regrets.max() < 0.5 and differing < 0.1, family


def test_seeded_samples_are_the_same_however_vllm_cuts_the_prompts(tmp_path: Path) -> None:
    """In float32: with less, a prompt computed in parts has log-probabilities of other roundings."""
    check_seeded_samples(save_tiny(tmp_path / "model", "qwen2", tied=True), "cuda")
