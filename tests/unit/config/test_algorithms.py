"""Checks of estimators, losses, filters and rollout correction (R5), and what of them a run does not read."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.algos.estimators import ESTIMATORS
from megatron_rl.algos.losses import LOSSES
from megatron_rl.config.checks.unused import idle_settings
from megatron_rl.config.load import resolve
from megatron_rl.config.text.reader import NoEffect
from tests.helpers.config import base_settings, faults, load, only_fault


def unused(folder: Path, *overrides: str) -> tuple[NoEffect, ...]:
    """Flat settings of losses and estimators that were not chosen."""
    return resolve([], [*base_settings(folder), *overrides]).unused


CORRECTION = "algorithm.rollout_correction."


@pytest.mark.parametrize("name", [name for name, estimator in ESTIMATORS.items() if not estimator.needs_values])
def test_estimators_that_compare_need_two_samples(tmp_path: Path, name: str) -> None:
    one = (f"algorithm.adv_estimator={name}", "rollout.n=1")
    if ESTIMATORS[name].compares_samples:
        fault = only_fault(tmp_path, *one)
        assert fault.key == "rollout.n" and f"adv_estimator {name} compares" in fault.reason
    else:
        assert load(tmp_path, *one).rollout.n == 1
        assert (
            "filter_groups.enable compares" in only_fault(tmp_path, *one, "algorithm.filter_groups.enable=true").reason
        )


@pytest.mark.parametrize("key", ["algorithm.drop_flat_groups", "algorithm.filter_groups.enable"])
def test_groups_are_not_filtered_under_a_critic(tmp_path: Path, key: str) -> None:
    ppo = ("algorithm.name=ppo", "critic.enable=true", "algorithm.adv_estimator=gae")
    fault = only_fault(tmp_path, *ppo, f"{key}=true")
    assert fault.key == key and "a critic's advantages" in fault.reason


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        (("actor.clip_ratio_low=1.5",), "actor.clip_ratio_low", "must be at most 1"),
        (("actor.clip_ratio=2",), "actor.clip_ratio", "ends at a ratio of 0"),
        (("algorithm.overlong_buffer.enable=true",), "algorithm.overlong_buffer.len", "every response"),
        ((f"{CORRECTION}bypass_mode=true", f"{CORRECTION}rollout_is=token"), f"{CORRECTION}bypass_mode", "no ratio"),
        (
            (f"{CORRECTION}rollout_is=icepop", f"{CORRECTION}rollout_is_threshold=0.5"),
            f"{CORRECTION}rollout_is_threshold_lower",
            "not below rollout_is_threshold 0.5",
        ),
        (
            (f"{CORRECTION}rollout_rs=token", f"{CORRECTION}rollout_rs_threshold=0.5"),
            f"{CORRECTION}rollout_rs_threshold",
            "from 2 to 0.5",
        ),
        (
            (f"{CORRECTION}rollout_token_veto_threshold=1.5",),
            f"{CORRECTION}rollout_token_veto_threshold",
            "nearly every sequence",
        ),
    ],
)
def test_settings_that_leave_nothing_are_refused(
    tmp_path: Path, overrides: tuple[str, ...], key: str, reason: str
) -> None:
    fault = only_fault(tmp_path, *overrides)
    assert fault.key == key and reason in fault.reason


def test_sft_ignores_all_of_it(tmp_path: Path) -> None:
    assert load(tmp_path, "algorithm.name=sft", f"{CORRECTION}rollout_token_veto_threshold=1.5", "actor.clip_ratio=2")
    found = faults(tmp_path, f"{CORRECTION}rollout_token_veto_threshold=1.5", "actor.clip_ratio=2")
    assert len(found) == 2


@pytest.mark.parametrize("loss", LOSSES)
def test_keys_of_other_losses_are_named(tmp_path: Path, loss: str) -> None:
    given = ("actor.clip_ratio_c=5", "actor.tau_pos=2", "actor.clip_ratio=0.1")
    idle = {one.key for one in unused(tmp_path, f"actor.loss_mode={loss}", *given)}
    assert ("actor.clip_ratio_c" in idle) == (loss != "ppo_clip")
    assert ("actor.tau_pos" in idle) == (loss != "sapo")
    assert ("actor.clip_ratio" in idle) == (loss in ("sapo", "reinforce"))


def test_settings_of_filters_and_correction_that_are_off_are_named(tmp_path: Path) -> None:
    given = (
        "algorithm.gamma=0.9",
        "algorithm.overlong_buffer.len=4",
        "algorithm.filter_groups.metric=acc",
        f"{CORRECTION}rollout_is_threshold=5",
        f"{CORRECTION}rollout_rs_threshold=5",
        "actor.kl_loss_importance=true",
    )
    idle = {one.key for one in (*idle_settings(load(tmp_path, *given)), *unused(tmp_path, *given))}
    assert idle == {override.partition("=")[0] for override in given}
