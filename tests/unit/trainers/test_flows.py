"""Every algorithm's flow is built, described and changed without a worker, without Ray and without an engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.config.algorithms import ALGORITHMS
from megatron_rl.errors import FlowError
from megatron_rl.flow import constant
from megatron_rl.runs.trainer import Trainer
from megatron_rl.types import Rollouts
from tests.helpers.config import load

REPO = Path(__file__).resolve().parents[3]
GAE = ["critic.enable=true", "algorithm.adv_estimator=gae", "rollout.n=1"]
SETTINGS: dict[str, list[str]] = {
    "grpo": ["algorithm.use_kl_in_reward=true"],
    "grpo dynamic": ["algorithm.filter_groups.enable=true"],
    "grpo remax": ["algorithm.adv_estimator=remax", "rollout.n=1"],
    "ppo": GAE,
    "ppo shared": [*GAE, "critic.share_backbone=true"],
    "sft": [],
    "dpo": [],
    "reward_model": [],
    "dpo kto": ["algorithm.loss=kto"],
    "dpo orpo": ["algorithm.loss=orpo"],
}
NODES = {
    "grpo": "generate reward assemble old_logprobs ref_logprobs advantages update publish",
    "grpo dynamic": "generate assemble advantages update publish",
    "grpo remax": "generate reward greedy assemble baselines advantages update publish",
    "ppo": "generate reward assemble values advantages update_critic update publish",
    "ppo shared": "generate reward assemble both_heads values advantages update publish",
    "sft": "assemble update watch_loss",
    "dpo": "assemble ref_sums update",
    "reward_model": "assemble update",
    "dpo kto": "assemble ref_sums estimate_kl update",
    "dpo orpo": "assemble update",
}
SCRIPT = """
import ast, sys
from pathlib import Path
from megatron_rl.runs.trainer import Trainer
from tests.helpers.config import load
for line in sys.argv[1:]:
    folder, *settings = ast.literal_eval(line)
    print(Trainer(load(Path(folder), *settings)).flow.describe())
started = {"ray", "megatron", "vllm"} & sys.modules.keys()
assert not started, started
"""


def trainer_of(folder: Path, name: str) -> Trainer:
    algorithm = name.partition(" ")[0]
    return Trainer(load(folder, f"algorithm.name={algorithm}", *SETTINGS[name]))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_flow_is_described_before_anything_starts(tmp_path: Path, name: str) -> None:
    flow = trainer_of(tmp_path, name).flow
    assert {node.name for node in flow.nodes} == set(NODES[name].split())
    described = {line.split()[1] for line in flow.describe().splitlines()[2:]}
    assert described == set(NODES[name].split())


def test_every_algorithm_has_a_flow_here() -> None:
    assert {name.partition(" ")[0] for name in SETTINGS} == set(ALGORITHMS)


def test_building_a_trainer_imports_no_ray_no_megatron_and_no_engine(tmp_path: Path) -> None:
    lines = [str([str(tmp_path), f"algorithm.name={name.partition(' ')[0]}", *SETTINGS[name]]) for name in SETTINGS]
    command = [sys.executable, "-c", SCRIPT, *lines]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=REPO)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(sources)") == len(SETTINGS)


def test_edits_are_checked_against_what_the_metrics_read(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "ppo")
    trainer.flow.replace("values", constant(0.0))
    trainer.flow.insert_after("generate", lambda rollouts: rollouts)
    before = trainer.flow.describe()

    def other(rollouts: Rollouts, bonus: float) -> list[float]:
        return [bonus] * rollouts.num_sequences

    with pytest.raises(FlowError, match=r"node 'reward', value 'bonus': no node makes it"):
        trainer.flow.replace("reward", other)
    assert trainer.flow.describe() == before


@pytest.mark.parametrize("name", ["grpo", "sft"])
def test_a_verb_before_the_start_says_so(tmp_path: Path, name: str) -> None:
    with pytest.raises(FlowError, match=r"call the trainer's start\(\) first"):
        trainer_of(tmp_path, name).take(1)
