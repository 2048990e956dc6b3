"""Losses and estimators with their settings: every way to write them, and what is wrong with the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.algos.estimators.gae import Gae
from megatron_rl.algos.estimators.grpo import Grpo
from megatron_rl.algos.losses.ppo_clip import PpoClip
from megatron_rl.algos.losses.reinforce import Reinforce
from megatron_rl.algos.losses.sapo import Sapo
from megatron_rl.config.load import dump_yaml, load_config, resolve, settings_of, to_dict, value_of
from megatron_rl.config.sections.actor import ActorConfig
from tests.helpers.config import base_settings, faults, load, only_fault, write

LOSS = "actor.loss"
ESTIMATOR = "algorithm.adv_estimator"


@pytest.mark.parametrize(
    "written",
    [
        [f"{LOSS}=sapo", f"{LOSS}.tau_pos=2"],
        [f"{LOSS}={{type: sapo, tau_pos: 2.0}}"],
        [f"{LOSS}.type=sapo", f"{LOSS}.tau_pos=2"],
        ["actor.loss_mode=sapo", "actor.tau_pos=2"],
        [f"{LOSS}=sapo", "actor.loss_mode=sapo", "actor.tau_pos=2", f"{LOSS}.tau_pos=2.0"],
        # A name replaces what stood there, as every value does.
        [f"{LOSS}={{type: gspo, clip_ratio: 0.1}}", f"{LOSS}=sapo", f"{LOSS}.tau_pos=2"],
    ],
)
def test_a_loss_is_written_in_several_ways(tmp_path: Path, written: list[str]) -> None:
    assert load(tmp_path, *written).actor.loss == Sapo(tau_pos=2.0)


def test_settings_without_a_type_are_the_defaults(tmp_path: Path) -> None:
    assert load(tmp_path).actor.loss == PpoClip()
    assert load(tmp_path, f"{LOSS}.clip_ratio_high=0.28").actor.loss == PpoClip(clip_ratio_high=0.28)
    assert load(tmp_path, f"{ESTIMATOR}.norm_by_std=false").algorithm.adv_estimator == Grpo(norm_by_std=False)
    flat = load(tmp_path, "algorithm.norm_adv_by_std_in_grpo=false")
    assert flat.algorithm.adv_estimator == Grpo(norm_by_std=False)


def test_an_estimator_takes_its_settings_from_yaml_and_flat_keys(tmp_path: Path) -> None:
    text = "algorithm: {name: ppo, adv_estimator: {type: gae, lam: 0.95}, gamma: 0.99}\ncritic: {enable: true}\n"
    path = write(tmp_path / "run.yaml", text)
    cfg = load_config([path], base_settings(tmp_path))
    assert cfg.algorithm.adv_estimator == Gae(gamma=0.99, lam=0.95) and cfg.algorithm.estimator_name == "gae"


@pytest.mark.parametrize(
    ("written", "key", "reason", "cure"),
    [
        ([f"{LOSS}=sappo"], LOSS, "none of the choices", "did you mean sapo?"),
        (["actor.loss_mode=3"], "actor.loss_mode", "none of the choices", "choices: ppo_clip, gspo"),
        ([f"{LOSS}=[sapo]"], LOSS, "none of the choices", "choices: ppo_clip, gspo"),
        ([f"{LOSS}.type=null"], f"{LOSS}.type", "none of the choices", "choices: ppo_clip"),
        (
            [f"{LOSS}=sapo", f"{LOSS}.tau_po=2"],
            f"{LOSS}.tau_po",
            "sapo has no such setting",
            "did you mean tau_pos? its",
        ),
        ([f"{LOSS}=reinforce", f"{LOSS}.x=2"], f"{LOSS}.x", "reinforce has no such setting", "its settings: none"),
        (
            [f"{LOSS}.tau_pos=2"],
            f"{LOSS}.tau_pos",
            "a setting of sapo, and actor.loss.type is ppo_clip",
            "loss.type=sapo",
        ),
        ([f"{LOSS}=sapo", f"{LOSS}.tau_pos=0"], f"{LOSS}.tau_pos", "must be above 0", "default is 1.0"),
        ([f"{LOSS}=sapo", f"{LOSS}.tau_pos=x"], f"{LOSS}.tau_pos", "is not a number", "write a number"),
        ([f"{LOSS}=sapo", f"{LOSS}.tau_pos.x=1"], f"{LOSS}.tau_pos.x", "no such setting", "its settings"),
        (["actor.tau_pos=0"], "actor.tau_pos", "must be above 0", "above 0"),
        (["actor.clip_ratio_low=1.5"], "actor.clip_ratio_low", "at most 1", "at most 1"),
        (["actor.tau_pos=2", f"{LOSS}={{type: sapo, tau_pos: 3}}"], "actor.tau_pos", "is 3", "keep one of the two"),
        (["actor.loss_mode=gspo", f"{LOSS}=sapo"], "actor.loss_mode", "same setting as actor.loss.type", "keep one"),
        ([f"{ESTIMATOR}=grpoo"], ESTIMATOR, "none of the choices", "did you mean grpo?"),
        ([f"{ESTIMATOR}.lam=0.9"], f"{ESTIMATOR}.lam", "a setting of gae", "adv_estimator.type=gae"),
        (["algorithm.lam=2"], "algorithm.lam", "must be at most 1", "at most 1"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, written: list[str], key: str, reason: str, cure: str) -> None:
    fault = only_fault(tmp_path, *written)
    assert fault.key == key
    assert reason in fault.reason and "[set on the command line]" in fault.reason
    assert cure in fault.cure


def test_a_wrong_type_says_nothing_about_its_settings_and_needs(tmp_path: Path) -> None:
    """Checks that would see the default in its place are left out, and settings cannot be told right from wrong."""
    found = faults(tmp_path, f"{LOSS}=nothing", f"{LOSS}.tau_pos=-1", "algorithm.name=ppo", f"{ESTIMATOR}=gea")
    assert [fault.key for fault in found] == [LOSS, ESTIMATOR]


def test_flat_settings_of_other_types_are_told(tmp_path: Path) -> None:
    """verl's scripts give settings of every loss; those at their defaults are not worth a word."""
    given = ["actor.loss_mode=sapo", "actor.clip_ratio_c=10", "actor.clip_ratio=0.2", "algorithm.lam=0.9"]
    resolved = resolve([], [*base_settings(tmp_path), *given])
    assert [str(one) for one in resolved.unused] == [
        "actor.clip_ratio_c = 10  (a setting of ppo_clip, and actor.loss.type is sapo)",
        "algorithm.lam = 0.9  (a setting of gae, and algorithm.adv_estimator.type is grpo)",
    ]


def test_a_written_config_reads_back(tmp_path: Path) -> None:
    cfg = load(tmp_path, f"{LOSS}={{type: sapo, tau_neg: 2.0}}", f"{ESTIMATOR}=reinforce_plus_plus_baseline")
    tree = to_dict(cfg)
    assert value_of(tree, LOSS) == {"type": "sapo", "tau_pos": 1.0, "tau_neg": 2.0}
    assert value_of(tree, ESTIMATOR) == {"type": "reinforce_plus_plus_baseline"}
    for only_changed in (True, False):
        path = write(tmp_path / "written.yaml", dump_yaml(cfg, only_changed=only_changed))
        assert load_config([path]) == cfg
    assert "tau_pos" not in dump_yaml(cfg, only_changed=True)
    told = {key.name: value for key, value in settings_of(cfg) if key.name.startswith(f"{LOSS}.")}
    assert told == {f"{LOSS}.type": "sapo", f"{LOSS}.tau_pos": 1.0, f"{LOSS}.tau_neg": 2.0}


def test_a_section_built_in_python_takes_the_record() -> None:
    assert ActorConfig(loss=Reinforce()).loss == Reinforce()
    with pytest.raises(ValueError, match="tau_pos"):
        ActorConfig(loss=Sapo(tau_pos=-1.0))


def test_hydras_removal_takes_a_choice_away(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "actor: {loss: {type: sapo, tau_pos: 2.0}, tau_neg: 3.0}\n")
    assert load_config([path], [*base_settings(tmp_path), f"~{LOSS}", "~actor.tau_neg"]).actor.loss == PpoClip()
