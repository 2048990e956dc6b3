"""Recorded trajectories, one a class of runs that must train alike: every layout and batch split of a class gives these
numbers, on every machine, and so must every later version of the code.

    python -m tests.golden.trajectories

records them anew (trajectories.json, beside this file). Do that only where a change of the numbers is meant, and say in
the commit why they change. Weights are this package's own random ones: no other package's initialisation matters.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from megatron_rl.algos.losses.ppo_clip import PpoClip
from megatron_rl.algos.reduce import loss_weights
from megatron_rl.algos.token_losses import KlTerm, UpdateLoss, nll_loss
from megatron_rl.types import TrainBatch
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import random_batch, save_tiny
from tests.helpers.training import build, make_actor, my_micro_batches, train_step

RECORD = Path(__file__).with_name("trajectories.json")
STEPS = 8
LENGTHS = (5, 40, 9, 12, 33, 7, 7, 21)
VOCAB = 128
INIT_STD = 0.06

CLASSES: dict[str, dict[str, Any]] = {
    "sft, qwen2 tied, token-mean": {"family": "qwen2", "tied": True, "objective": "sft", "agg": "token-mean"},
    "sft, llama untied, seq-mean-token-mean": {
        "family": "llama", "tied": False, "objective": "sft", "agg": "seq-mean-token-mean",
    },
    "grpo, qwen2 untied, seq-mean-token-sum-norm": {
        "family": "qwen2", "tied": False, "objective": "grpo", "agg": "seq-mean-token-sum-norm",
    },
}  # fmt: skip
"""Name -> what the class's runs have in common. All are float32."""


def train(rank: int, world: int, folder: str, objective: str, agg: str, layout: dict[str, Any]) -> list[list[float]]:
    """[loss, grad_norm] of each step."""

    actor = make_actor(**layout)
    trainable = build(folder, actor, world, init_std=INIT_STD)
    loss = nll_loss
    if objective == "grpo":
        clip = PpoClip(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=None)
        loss = UpdateLoss(clip, entropy_coeff=0.01, kl=KlTerm(0.05, "k3"))
    trajectory = []
    for number in range(STEPS):
        batch = _batch(number % 2, agg)
        report, _ = train_step(trainable, my_micro_batches(batch, actor, rank, world), loss, 0.9)
        trajectory.append([report.loss, report.grad_norm])
    return trajectory


def _batch(seed: int, agg: str) -> TrainBatch:
    """Random tokens; each sequence has one advantage, alternating in sign; the reference is uniform."""
    batch = random_batch(seed, LENGTHS, VOCAB)
    segments, mask = batch.segments, batch.loss_mask
    weights = loss_weights(agg, mask, segments, batch.num_sequences, norm_length=64)
    advantages = ((-1.0) ** segments * (1.0 + segments / 4.0)).float() * mask
    uniform = -mask.float() * 4.852  # log 128
    return batch.with_(loss_weights=weights, advantages=advantages, old_logprobs=uniform, ref_logprobs=uniform)


def run(name: str, layout: dict[str, Any] | None = None, world: int = 1) -> list[list[float]]:
    """The trajectory of a class under a layout, as rank 0 sees it."""
    chosen = CLASSES[name]
    with tempfile.TemporaryDirectory() as folder:
        path = save_tiny(Path(folder) / "model", chosen["family"], tied=chosen["tied"], vocab=VOCAB)
        return run_ranks(world, train, path, chosen["objective"], chosen["agg"], layout or {})[0]


def main() -> None:
    """Record every class."""
    found = {name: run(name) for name in CLASSES}
    lines = []
    for name, trajectory in found.items():
        rows = ",\n".join(f"    {json.dumps(row)}" for row in trajectory)
        lines.append(f"  {json.dumps(name)}: [\n{rows}\n  ]")
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{RECORD}: {len(found)} classes, {STEPS} steps of [loss, grad_norm] each")


if __name__ == "__main__":
    main()
