"""Contracts N2 and N3 of preferences: N ranks update on judged rows as one rank does, whatever holds which tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.algos.preference import PREFERENCE_LOSSES
from megatron_rl.data.preferences import AnswerTokens, PreferenceRow
from tests.helpers.run_ranks import run_ranks
from tests.helpers.spmd import start_here

STEPS = 2
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "dp2, small micro-batches": (2, ["actor.ppo_micro_batch_size_per_gpu=3"]),
    "cp2": (2, ["actor.cp=2"]),
    "tp2-sp": (2, ["actor.tp=2", "actor.sequence_parallel=true"]),
    "pp2": (2, ["actor.pp=2", "actor.num_layers_in_first_pipeline_stage=2", "actor.ppo_micro_batch_size_per_gpu=4"]),
}

LONG = ("tp2-sp", "pp2")


def rows_of(kind: str, count: int = 7) -> list[PreferenceRow]:
    """Rows of random tokens and several lengths: pairs; or labelled rows with another's answer beside their own."""
    generator = np.random.default_rng(1)

    def answer(prompt: list[int]) -> AnswerTokens:
        ids = generator.integers(1, 128, generator.integers(1, 17)).tolist()
        return AnswerTokens((*prompt, *ids), (False,) * len(prompt) + (True,) * len(ids))

    rows = []
    for index in range(count):
        prompt = generator.integers(1, 128, generator.integers(2, 7)).tolist()
        chosen, rejected = answer(prompt), answer(prompt)
        if kind == "pairs":
            rows.append(PreferenceRow(index, (chosen, rejected), 0.0, f"s{index % 2}"))
        else:
            # The model has been pushed towards the others' answers, so that KTO's KL is above 0.
            rows.append(PreferenceRow(index, (rejected, chosen), 1.0 - 2.0 * (index % 3 == 0), f"s{index % 2}"))
    return rows


def updates_on_rank(rank: int, world: int, folder: str, overrides: list[str]) -> dict[str, list[dict[str, Any]]]:
    """What each loss measures over its steps, one after the other on one model."""
    from megatron_rl.algos.preference.metrics import figure_means, row_figures
    from megatron_rl.learning.passes import Models
    from megatron_rl.learning.preferences import References
    from megatron_rl.trainers import placement
    from megatron_rl.trainers.dpo import assemble, estimate_kl, update
    from tests.helpers.config import load

    start_here(rank, world)
    own = ["algorithm.name=dpo", "model.init=random", "model.dtype=float32", f"cluster.n_gpus_per_node={world}"]
    own += ["data.train_batch_size=8", "actor.optim.lr=3e-3", "cluster.device=cpu"]
    cfg = load(Path(folder), *own, *overrides)
    models = Models(cfg)
    models.start(placement.start_workers(cfg, optimizer_steps=100, with_engine=False).train)
    found: dict[str, list[dict[str, Any]]] = {}
    # Losses without a reference first, so that the policy has left it when the others come.
    for name in sorted(PREFERENCE_LOSSES, key=lambda name: PREFERENCE_LOSSES[name].needs_reference):
        loss = PREFERENCE_LOSSES[name]()
        models.cfg = replace(cfg, algorithm=replace(cfg.algorithm, loss=loss))
        rows, references = rows_of(loss.rows), References(models)
        found[name] = []
        for _ in range(STEPS):
            loaded = assemble(models, rows)
            ref = references.sums(loaded, rows, "train") if loss.needs_reference else None
            kl = estimate_kl(models, loaded, ref) if loss.mismatched and ref is not None else None
            judged = update(models, loaded, rows, ref, kl)
            report = judged.updates[0].report
            means = figure_means(row_figures(loss, judged.answers), loaded.sources)
            found[name].append({"kl": kl or 0.0, "loss": report.loss, "grad_norm": report.grad_norm, "means": means})
    return found


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return run_ranks(1, updates_on_rank, str(tmp_path_factory.mktemp("one")), [])[0]


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in LAYOUTS]
)
def test_n2_n3_preferences_train_like_one_rank(
    tmp_path: Path, one_rank: dict[str, list[dict[str, Any]]], layout: str
) -> None:
    """N2, N3: losses, gradients, KTO's KL and metrics of every loss over two steps, on every rank alike."""
    world, overrides = LAYOUTS[layout]
    for of_rank in run_ranks(world, updates_on_rank, str(tmp_path), overrides):
        for name, steps in one_rank.items():
            for here, there in zip(of_rank[name], steps, strict=True):
                assert here["means"] == pytest.approx(there["means"], rel=2e-4, abs=2e-5), name
                for one in ("kl", "loss", "grad_norm"):
                    assert here[one] == pytest.approx(there[one], rel=2e-4, abs=2e-5), (name, one)


def test_the_losses_learn_and_differ(one_rank: dict[str, list[dict[str, Any]]]) -> None:
    """A layout cannot pass because nothing happens: each loss has a gradient of its own, and KTO a KL above 0."""
    norms = [steps[-1]["grad_norm"] for steps in one_rank.values()]
    assert len({round(norm, 4) for norm in norms}) == len(PREFERENCE_LOSSES) and min(norms) > 1e-3
    assert one_rank["kto"][-1]["kl"] > 0.01
    for name, (first, last) in one_rank.items():
        # KTO's is compared with a KL that no gradient goes through, and that moves with the policy.
        assert name == "kto" or last["loss"] < first["loss"], name
        # All rows are in one micro-batch here, and the loss of answers is the mean over them.
        if not PREFERENCE_LOSSES[name].adds_nll:
            assert first["loss"] == pytest.approx(first["means"]["loss"], rel=1e-5), name
