"""PPO's own arithmetic, without workers: where rewards lie, what advantages become, how the KL's weight moves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.algos.estimators.tokens import CreditTokens
from megatron_rl.algos.scan import KlPenalty
from megatron_rl.config.checks.unused import idle_settings
from megatron_rl.config.sections.algorithm import KlCtrlConfig
from megatron_rl.config.tables import batch_table
from megatron_rl.learning.batch import Batch, OnRanks
from megatron_rl.learning.credit import returns_of
from megatron_rl.learning.kl_control import KlControl
from megatron_rl.models.config_json import read_critic_shape
from megatron_rl.models.layouts import Block
from megatron_rl.rewards.base import RewardResult
from megatron_rl.trainers.parts import Parts
from megatron_rl.trainers.ppo import PpoBatch, advantages, assemble
from megatron_rl.types import Column, Prompt, Rollout, RolloutGroup, TrainBatch
from megatron_rl.weights.heads import ValueHeadSource
from megatron_rl.workers.rank_batch import RankBatch
from megatron_rl.workers.token_work import token_scores
from tests.helpers.batch_rank import start_models
from tests.helpers.config import faults, load, make_model
from tests.helpers.rollouts import rollouts_of

EOS, PAD = 1, 1
PPO = ("algorithm.name=ppo", "critic.enable=true", "algorithm.adv_estimator=gae", "rollout.n=1")
# A plain end, no end (cut), pad == eos inside a response, several ids that end, an end alone.
RESPONSES = ((8, EOS), (9, 9, 9), (PAD, 7, EOS), (5, 2), (EOS,))


def parts_of(folder: Path, *overrides: str) -> tuple[Parts, PpoBatch, list[RewardResult]]:
    """A run without data and models: one rank of this process holds the rollouts, which score 1, 2, ..."""
    groups = [
        RolloutGroup(
            Prompt(i, (5, 6), "", "s", None),
            (Rollout(ids, (-1.0,) * len(ids), "stop" if ids[-1] in (EOS, 2) else "length", ""),),
            0,
        )
        for i, ids in enumerate(RESPONSES)
    ]
    parts = Parts(load(folder, *PPO, "data.train_batch_size=5", *overrides))
    start_models(parts.models)
    return parts, assemble(parts.models, rollouts_of(groups)), [RewardResult(float(i + 1)) for i in range(len(groups))]


def column(parts: Parts, batch: Batch, name: Column) -> torch.Tensor:
    return parts.models.fetch(batch, OnRanks(name))


def trained_mask(batch: Batch) -> torch.Tensor:
    """[T] bool: all but the two tokens of each prompt."""
    return torch.cat([torch.arange(length) >= 2 for length in batch.seq_lens])


def on_one_rank(step: PpoBatch) -> RankBatch:
    """The same tokens, as a rank has them."""
    lens = step.batch.seq_lens
    mask = trained_mask(step.batch)
    return RankBatch(range(len(lens)), TrainBatch(torch.zeros(len(mask), dtype=torch.int64), lens, mask))


def test_n6_the_reward_sits_on_the_last_sampled_token_whatever_that_is(tmp_path: Path) -> None:
    """N6: with and without an end, with pad == eos, with an end alone; the ids themselves are never looked at."""
    _, step, _ = parts_of(tmp_path)
    rewards = token_scores(on_one_rank(step), torch.arange(1.0, 6.0))
    ends = torch.cumsum(torch.tensor(step.batch.seq_lens), 0) - 1
    assert rewards[ends].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0] and rewards.count_nonzero() == len(ends)
    assert bool(trained_mask(step.batch)[ends].all()), "the last token of a sequence is a sampled one"


def test_the_kl_of_the_reward_lies_on_every_sampled_token_and_nowhere_else(tmp_path: Path) -> None:
    """On the ranks as a column, on the controller as sums."""
    parts, step, _ = parts_of(tmp_path, "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.5")
    scores = torch.arange(1.0, 6.0, dtype=torch.float64)
    returns = returns_of(parts.models, parts.kl_control, step.batch, scores, -1.0, -1.2)
    kl, mask = column(parts, step.batch, "kl"), trained_mask(step.batch)
    assert torch.allclose(kl, 0.2 * mask)
    assert torch.allclose(returns.returns, scores - 0.5 * 0.2 * step.batch.response_lens)
    assert parts.kl_control.metrics() == {"kl/reward": pytest.approx(0.2), "kl/coef": 0.5}
    ranks = on_one_rank(step)
    ranks.put("kl", kl)
    of_tokens, penalty = token_scores(ranks, scores), KlPenalty(returns.kl_coef, ranks.column("kl"))
    tokens = CreditTokens(of_tokens, mask, ranks.segments, ranks.num_sequences, kl=penalty)
    assert torch.allclose(tokens.rewards, of_tokens - 0.5 * 0.2 * mask)


@pytest.mark.parametrize("whitened", [True, False])
def test_advantages_are_gae_by_hand_and_whitened_over_the_step(tmp_path: Path, whitened: bool) -> None:
    """A constant in the critic's place; gamma and lam by hand, one sequence at a time."""
    parts, step, results = parts_of(
        tmp_path, "algorithm.gamma=0.9", "algorithm.lam=0.8", f"algorithm.whiten_advantages={str(whitened).lower()}"
    )
    batch = step.batch
    found = advantages(parts, batch, step.plan, results, 0.25)
    wanted_advantages, wanted_returns = list[float](), list[float]()
    for ids, result in zip(RESPONSES, results, strict=True):
        rewards = [0.0] * (len(ids) - 1) + [result.value]
        carried, of_sequence = 0.0, []
        for t in reversed(range(len(ids))):
            after = 0.25 if t + 1 < len(ids) else 0.0
            carried = rewards[t] + 0.9 * after - 0.25 + 0.9 * 0.8 * carried
            of_sequence.insert(0, carried)
        wanted_advantages += of_sequence
        wanted_returns += [0.25 + value for value in of_sequence]
    wanted = torch.tensor(wanted_advantages)
    if whitened:
        wanted = (wanted - wanted.mean()) / (wanted.std() + 1e-8)
    mask, returns = trained_mask(batch), column(parts, batch, "returns")
    assert torch.allclose(column(parts, batch, "advantages")[mask], wanted, atol=1e-5)
    assert torch.allclose(returns[mask], torch.tensor(wanted_returns), atol=1e-5)
    assert found.critic_columns == {"old_values": "values", "returns": "returns", "loss_weights": "critic_weights"}
    assert float(column(parts, batch, "critic_weights").sum()) == pytest.approx(1.0)
    assert not column(parts, batch, "advantages")[~mask].any() and not column(parts, batch, "values")[~mask].any()
    assert found.value_metrics["critic/value_mean"] == pytest.approx(0.25)
    assert found.value_metrics["critic/return_mean"] == pytest.approx(float(returns[mask].mean()))


def test_the_critic_learns_from_truncated_responses_that_the_actor_leaves_out(tmp_path: Path) -> None:
    parts, step, results = parts_of(tmp_path, "algorithm.overlong_filtering=true")
    found = advantages(parts, step.batch, step.plan, results, 0.0)
    assert found.kept.tolist() == [True, False, True, True, True]
    cut = torch.repeat_interleave(torch.arange(5), torch.tensor(step.batch.seq_lens)) == 1
    assert not column(parts, step.batch, "loss_weights")[cut].any()
    assert int((column(parts, step.batch, "critic_weights")[cut] > 0).sum()) == 3


def test_the_adaptive_kl_weight_follows_ziegler_2019() -> None:
    """coef *= 1 + clip(KL / target - 1, -0.2, 0.2) * S / horizon, KL a mean over sequences, not over tokens."""
    control = KlControl(KlCtrlConfig(type="adaptive", kl_coef=0.2, target_kl=0.5, horizon=40))
    control.observe(torch.tensor([0.5, 0.55]))  # 5 % over the target
    assert control.metrics() == {"kl/reward": pytest.approx(0.525), "kl/coef": 0.2}
    assert control.coef == pytest.approx(0.2 * (1 + 0.05 * 2 / 40))
    coef = control.coef
    control.observe(torch.full((2,), 50.0))
    assert control.coef == pytest.approx(coef * (1 + 0.2 * 2 / 40)), "a far miss moves it by 20 % a horizon"
    coef = control.coef
    control.observe(torch.zeros(2))
    assert control.coef == pytest.approx(coef * (1 - 0.2 * 2 / 40))
    resumed = KlControl(KlCtrlConfig(type="adaptive"))
    resumed.restore(control.state())
    assert resumed.coef == control.coef


def test_a_fixed_kl_weight_stays() -> None:
    control = KlControl(KlCtrlConfig(kl_coef=0.2))
    control.observe(torch.full((2,), 50.0))
    assert control.coef == 0.2


class _Source:
    """Weights that say what they were asked for."""

    def __init__(self) -> None:
        self.expected: dict[str, tuple[int, ...]] = {}

    def check(self, expected: Any) -> None:
        self.expected = dict(expected)

    def read(self, block: Block) -> torch.Tensor:
        return torch.ones(block.num_rows, *(() if block.cols is None else (block.cols[1] - block.cols[0],)))

    def place(self, name: str) -> str:
        return "the test"


@pytest.mark.parametrize(
    ("kind", "own", "bias"), [("causal", set(), 0.0), ("sequence", {"score.weight"}, 0.0), ("token", None, 1.0)]
)
def test_a_value_head_is_read_where_the_folder_has_one_and_starts_at_zero_elsewhere(
    kind: Any, own: set[str] | None, bias: float
) -> None:
    source = _Source()
    shapes = {"model.norm.weight": (4,), "score.weight": (1, 4), "score.bias": (1,)}
    head = ValueHeadSource(source, kind, {"lm_head.weight": (9, 4)} if kind == "causal" else {})
    head.check(shapes)
    wanted = {"score.weight", "score.bias"} if own is None else own
    unused = {"lm_head.weight"} if kind == "causal" else set()
    assert source.expected.keys() == {"model.norm.weight"} | wanted | unused
    weight = head.read(Block("score.weight", (0, 1), (0, 4)))
    assert weight.shape == (1, 4) and bool((weight == (0.0 if kind == "causal" else 1.0)).all())
    assert head.read(Block("score.bias", (0, 1))).tolist() == [bias]
    assert head.read(Block("model.norm.weight", (0, 4))).tolist() == [1.0] * 4


def test_settings_of_a_critic_that_nothing_reads_are_named(tmp_path: Path) -> None:
    off = load(tmp_path, "critic.ppo_epochs=2", "critic.optim.lr=1e-3")
    assert [one.key for one in idle_settings(off)] == ["critic.optim.lr", "critic.ppo_epochs"]
    own = load(tmp_path, *PPO, "critic.ppo_epochs=2", "critic.vf_coef=0.1", "algorithm.lam=0.9")
    assert [one.key for one in idle_settings(own)] == ["critic.vf_coef"]
    shared = load(tmp_path, *PPO, "critic.share_backbone=true", "critic.optim.lr=1e-3", "critic.vf_coef=0.1")
    assert [one.key for one in idle_settings(shared)] == ["critic.optim.lr"]


def test_a_folder_says_which_head_a_critic_starts_from(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    causal, head = read_critic_shape(folder)
    assert head == "causal"
    config = Path(folder) / "config.json"
    fields = json.loads(config.read_text())
    base = causal.architecture.removesuffix("ForCausalLM")
    for ending, wanted in (("ForTokenClassification", "token"), ("ForSequenceClassification", "sequence")):
        config.write_text(json.dumps(fields | {"architectures": [base + ending]}))
        assert read_critic_shape(folder) == (causal, wanted)
    config.write_text(json.dumps(fields | {"architectures": ["BertForTokenClassification"]}))
    found = faults(tmp_path / "run", *PPO, f"critic.path={folder}")
    assert [fault.key for fault in found] == [f"{config}: architectures"]


def test_the_batch_table_shows_the_critics_own_updates(tmp_path: Path) -> None:
    rows = {row.name: row for row in batch_table(load(tmp_path, *PPO, "critic.ppo_epochs=3"))}
    assert rows["critic's updates of a step"].value == 3
    shared = batch_table(load(tmp_path, *PPO, "critic.share_backbone=true"))
    assert not [row for row in shared if "critic" in row.name]


@pytest.mark.parametrize("key", ["algorithm.drop_flat_groups", "algorithm.filter_groups.enable"])
def test_what_compares_the_samples_of_a_prompt_is_refused(tmp_path: Path, key: str) -> None:
    found = faults(tmp_path, *PPO, "rollout.n=2", f"{key}=true")
    assert key in [fault.key for fault in found], [str(fault) for fault in found]
