"""What of a batch the update trains on, and that all of what it does not is counted (R6)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from megatron_rl.data.batching import from_rollouts
from megatron_rl.experience.scoring import length_penalties
from megatron_rl.learning.credit import loss_old_logprobs, response_lens, select_tokens
from megatron_rl.types import Prompt, Rollout, RolloutGroup
from tests.helpers.config import load

NO_PENALTIES = torch.zeros(4, dtype=torch.float64)
CORRECTION = "algorithm.rollout_correction."


def _groups(*reasons: Literal["stop", "length"]) -> list[RolloutGroup]:
    """Groups of two; response k has k + 1 tokens, each of log-probability -1 by the engine."""
    rollouts = [Rollout((7,) * (k + 1), (-1.0,) * (k + 1), reason, "") for k, reason in enumerate(reasons)]
    return [
        RolloutGroup(Prompt(g, (5, 6), "", "", None), tuple(rollouts[2 * g : 2 * g + 2]), 0)
        for g in range(len(rollouts) // 2)
    ]


def test_nothing_is_left_out_by_default(tmp_path: Path) -> None:
    groups = _groups("stop", "length", "stop", "stop")
    batch, _ = from_rollouts(groups)
    found = select_tokens(load(tmp_path), batch, groups, torch.zeros(4, dtype=torch.bool), NO_PENALTIES, None)
    assert bool(found.kept.all()) and torch.equal(found.mask, batch.loss_mask)
    assert found.columns == {} and found.counts == {"groups/dropped": 0.0}


def test_r6_cut_responses_and_flat_groups_leave_the_loss_and_are_counted_apart(tmp_path: Path) -> None:
    groups = _groups("stop", "length", "length", "stop")
    batch, _ = from_rollouts(groups)
    cfg = load(tmp_path, "algorithm.overlong_filtering=true")
    found = select_tokens(cfg, batch, groups, torch.tensor([False, False, True, True]), NO_PENALTIES, None)
    assert found.kept.tolist() == [True, False, False, False]
    assert int(found.mask.sum()) == 1
    assert found.counts == {"groups/dropped": 1.0, "samples/overlong_left_out": 1.0}


def test_rejected_tokens_leave_the_mask_and_empty_sequences_the_update(tmp_path: Path) -> None:
    groups = _groups("stop", "stop")
    batch, _ = from_rollouts(groups)
    cfg = load(tmp_path, f"{CORRECTION}rollout_rs=token", f"{CORRECTION}rollout_is=token")
    # Sequence 0 has one response token, which is off by a factor of e; of the two of sequence 1 one is.
    old = torch.where(batch.loss_mask, -1.0, 0.0)
    old[[2, 6]] = 0.0
    found = select_tokens(cfg, batch, groups, torch.zeros(2, dtype=torch.bool), NO_PENALTIES, old)
    assert found.mask.nonzero().squeeze(1).tolist() == [5] and found.kept.tolist() == [False, True]
    assert found.counts["correction/masked_share"] == 2 / 3 and found.counts["correction/weight_mean"] == 1.0
    assert found.columns.keys() == {"rollout_weights"}


def test_the_old_policy_of_the_loss(tmp_path: Path) -> None:
    """None on-policy; the trainer's where there are several updates; the engine's where the trainer's are bypassed."""
    batch, _ = from_rollouts(_groups("stop", "stop"))
    trainers = torch.full((batch.num_tokens,), -2.0)
    cfg = load(tmp_path)
    assert loss_old_logprobs(cfg, batch, trainers) == {}
    assert loss_old_logprobs(load(tmp_path, "actor.ppo_epochs=2"), batch, trainers) == {"old_logprobs": trainers}
    bypassed = loss_old_logprobs(load(tmp_path, f"{CORRECTION}bypass_mode=true"), batch, None)
    assert torch.equal(bypassed["old_logprobs"], batch.columns["rollout_logprobs"])


def test_length_penalties_are_of_sampled_tokens(tmp_path: Path) -> None:
    batch, _ = from_rollouts(_groups("stop", "stop", "stop", "stop", "stop", "stop", "stop", "length"))
    lens = response_lens(batch)
    assert lens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert length_penalties(load(tmp_path), lens).tolist() == [0.0] * 8
    buffer = ("algorithm.overlong_buffer.enable=true", "algorithm.overlong_buffer.len=4")
    assert length_penalties(load(tmp_path, *buffer), lens).tolist() == [0, 0, 0, 0, -0.25, -0.5, -0.75, -1.0]
