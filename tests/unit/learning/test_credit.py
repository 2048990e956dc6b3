"""What of a batch the update trains on, and that all of what it does not is counted (R6)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from megatron_rl.config.run import RunConfig
from megatron_rl.errors import FlowError
from megatron_rl.experience.scoring import length_penalties
from megatron_rl.learning.batch import Batch, OnRanks
from megatron_rl.learning.credit import assign_credit, loss_columns, returns_of
from megatron_rl.learning.kl_control import KlControl
from megatron_rl.learning.passes import Made, Models
from megatron_rl.types import Column, Prompt, Rollout, RolloutGroup
from megatron_rl.workers.token_work import CreditReport
from tests.helpers.batch_rank import loaded
from tests.helpers.config import load

CORRECTION = "algorithm.rollout_correction."


def _groups(*reasons: Literal["stop", "length"]) -> list[RolloutGroup]:
    """Groups of two; response k has k + 1 tokens, each of log-probability -1 by the engine."""
    rollouts = [Rollout((7,) * (k + 1), (-1.0,) * (k + 1), reason, "") for k, reason in enumerate(reasons)]
    return [
        RolloutGroup(Prompt(g, (5, 6), "", "", None), tuple(rollouts[2 * g : 2 * g + 2]), 0)
        for g in range(len(rollouts) // 2)
    ]


def _column(models: Models, batch: Batch, name: Column) -> torch.Tensor:
    return models.fetch(batch, OnRanks(name))


def _assigned(
    cfg: RunConfig, groups: list[RolloutGroup], dropped: torch.Tensor | None = None, old: Made | None = None
) -> tuple[CreditReport, dict[str, float], Models, Batch]:
    """Credit for scores 0, 1, 0, 1, ... without penalties."""
    models, batch, _ = loaded(cfg, groups)
    scores = torch.arange(batch.num_sequences, dtype=torch.float64) % 2
    returns = returns_of(models, KlControl(cfg.algorithm.kl_ctrl), batch, scores, old, None)
    report, counts = assign_credit(models, batch, returns, torch.zeros(batch.num_sequences), dropped)
    return report, counts, models, batch


def test_nothing_is_left_out_by_default(tmp_path: Path) -> None:
    report, counts, models, batch = _assigned(load(tmp_path, "rollout.n=2"), _groups("stop", "length", "stop", "stop"))
    assert bool(report.kept.all()) and counts == {"groups/dropped": 0.0}
    assert int((_column(models, batch, "loss_weights") > 0).sum()) == int(batch.response_lens.sum())


def test_r6_cut_responses_and_flat_groups_leave_the_loss_and_are_counted_apart(tmp_path: Path) -> None:
    cfg = load(tmp_path, "algorithm.overlong_filtering=true", "rollout.n=2")
    dropped = torch.tensor([False, False, True, True])
    report, counts, models, batch = _assigned(cfg, _groups("stop", "length", "length", "stop"), dropped)
    assert report.kept.tolist() == [True, False, False, False]
    assert int((_column(models, batch, "loss_weights") > 0).sum()) == 1
    assert counts == {"groups/dropped": 1.0, "samples/overlong_left_out": 1.0}


def test_rejected_tokens_leave_the_mask_and_empty_sequences_the_update(tmp_path: Path) -> None:
    cfg = load(tmp_path, f"{CORRECTION}rollout_rs=token", f"{CORRECTION}rollout_is=token", "rollout.n=2")
    # Sequence 0 has one response token, which is off by a factor of e; of the two of sequence 1 one is.
    old = torch.full((7,), -1.0)
    old[[2, 6]] = 0.0
    report, counts, models, batch = _assigned(cfg, _groups("stop", "stop"), old=old)
    assert _column(models, batch, "loss_weights").nonzero().squeeze(1).tolist() == [5]
    assert report.kept.tolist() == [False, True]
    assert counts["correction/masked_share"] == 2 / 3 and counts["correction/weight_mean"] == 1.0
    assert loss_columns(cfg)["rollout_weights"] == "rollout_weights"
    assert len(_column(models, batch, "rollout_weights")) == 7


def test_the_old_policy_of_the_loss(tmp_path: Path) -> None:
    """None on-policy; the trainer's if there are several updates; the engine's if the trainer's are bypassed."""
    assert "old_logprobs" not in loss_columns(load(tmp_path))
    assert loss_columns(load(tmp_path, "actor.ppo_epochs=2"))["old_logprobs"] == "old_logprobs"
    assert loss_columns(load(tmp_path, f"{CORRECTION}bypass_mode=true"))["old_logprobs"] == "rollout_logprobs"


def test_length_penalties_are_of_sampled_tokens(tmp_path: Path) -> None:
    groups = _groups("stop", "stop", "stop", "stop", "stop", "stop", "stop", "length")
    _, batch, _ = loaded(load(tmp_path, "rollout.n=2"), groups)
    assert batch.response_lens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert length_penalties(load(tmp_path), batch.response_lens).tolist() == [0.0] * 8
    buffer = ("algorithm.overlong_buffer.enable=true", "algorithm.overlong_buffer.len=4")
    penalties = length_penalties(load(tmp_path, *buffer), batch.response_lens)
    assert penalties.tolist() == [0, 0, 0, 0, -0.25, -0.5, -0.75, -1.0]


def test_a_column_in_another_ones_place_is_refused(tmp_path: Path) -> None:
    """A node of one's own may give numbers or values, and no name of another column."""
    models, batch, _ = loaded(load(tmp_path, "rollout.n=2"), _groups("stop", "stop"))
    models.put(batch, "values", 0.5)
    assert _column(models, batch, "values").tolist() == [0, 0, 0.5, 0, 0, 0.5, 0.5]
    with pytest.raises(FlowError, match="column 'values' stands where 'ref_logprobs' belongs"):
        models.put(batch, "ref_logprobs", OnRanks("values"))
