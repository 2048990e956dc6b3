"""Losses of preferences and their gradients equal TRL's on the same rows (preferences.py records them)."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from megatron_rl.algos.preference import PREFERENCE_LOSSES
from tests.golden.preferences import RECORD, SETTINGS, digest, trl_digests, write_inputs
from tests.helpers.run_ranks import run_ranks
from tests.helpers.spmd import start_here


def our_digests(rank: int, world: int, inputs: tuple[str, str, str]) -> dict[str, dict[str, Any]]:
    """The same as TRL's, from the files to the gradients of one optimizer step."""
    from megatron_rl.config.load import load_config
    from megatron_rl.data.preferences import load_preferences
    from megatron_rl.data.render import Renderer
    from megatron_rl.learning.passes import Models
    from megatron_rl.learning.preferences import References
    from megatron_rl.mcore import convert
    from megatron_rl.trainers import placement
    from megatron_rl.trainers.dpo import assemble, estimate_kl, update

    policy, reference, rows_file = inputs
    own = ["algorithm.name=dpo", f"model.path={policy}", f"ref.path={reference}", "model.dtype=float32"]
    own += [f"data.train_files={rows_file}", "data.max_prompt_length=16", "data.max_response_length=24"]
    # The weights stay as they are, and the gradient whole on the rank.
    own += ["data.train_batch_size=8", "actor.optim.lr=1e-30", "actor.optim.grad_clip=0", "cluster.device=cpu"]
    own += ["actor.use_distributed_optimizer=false", "data.chat_template=plain"]
    cfg = load_config([], own)
    workers = start_here(rank, world)
    models = Models(cfg)
    models.start(placement.start_workers(cfg, optimizer_steps=100, with_engine=False).train)
    renderer = Renderer.from_config(cfg.model, cfg.data)
    found = {}
    for name, settings in SETTINGS.items():
        loss = PREFERENCE_LOSSES[name](**settings)
        models.cfg = replace(cfg, algorithm=replace(cfg.algorithm, loss=loss))
        rows = list(load_preferences(cfg.data, cfg.data.train_files, renderer, kind=loss.rows).items)
        loaded = assemble(models, rows)
        ref = References(models).sums(loaded, rows, "train") if loss.needs_reference else None
        kl = estimate_kl(models, loaded, ref) if loss.mismatched and ref is not None else None
        report = update(models, loaded, rows, ref, kl).updates[0].report
        model = workers[0].trained["actor"].model
        grads = dict(convert.export_hf(model, of=lambda p: p.main_grad))  # type: ignore[attr-defined]
        found[name] = digest(report.loss, {name: grad.clone() for name, grad in grads.items()})
    return found


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for loss, of_loss in wanted.items():
        assert found[loss]["loss"] == pytest.approx(of_loss["loss"], rel=1e-5), loss
        largest = max(norm for norm, _ in of_loss["grads"].values())
        for name, numbers in of_loss["grads"].items():
            assert found[loss]["grads"][name] == pytest.approx(numbers, rel=1e-5, abs=1e-5 * largest), (loss, name)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    return write_inputs(tmp_path_factory.mktemp("rows"))


def test_losses_and_gradients_equal_those_recorded_of_trl(inputs: tuple[str, str, str]) -> None:
    """N1: six losses to 1e-5 in float32, and the gradient of every tensor."""
    assert SETTINGS.keys() == PREFERENCE_LOSSES.keys()
    assert_equal(run_ranks(1, our_digests, inputs)[0], json.loads(RECORD.read_text()))


@pytest.mark.slow
def test_trl_gives_what_was_recorded(inputs: tuple[str, str, str]) -> None:
    pytest.importorskip("trl", reason="an oracle that is installed apart (preferences.py)")
    assert_equal(trl_digests(*inputs[:2]), json.loads(RECORD.read_text()))


@pytest.mark.slow
def test_the_benchmark_measures_ours_and_trl_if_it_is_there() -> None:
    command = [sys.executable, "-m", "benchmarks.preferences", "--repeats", "1"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert printed.returncode == 0, printed.stderr
    ours, *others = [line.split() for line in printed.stdout.splitlines() if line.endswith("0.69315")]
    assert ours[0] == "ours"
    if importlib.util.find_spec("trl") is None:
        assert not others and "TRL cannot be imported" in printed.stdout
    else:
        assert [row[0] for row in others] == ["TRL,"]
