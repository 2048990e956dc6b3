"""One algorithm, one file. The verbs of the command line start here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_rl.cluster.preflight import preflight
from megatron_rl.config.folders import export_faults
from megatron_rl.config.run import RunConfig
from megatron_rl.errors import CheckpointError
from megatron_rl.observe.progress import Progress
from megatron_rl.observe.step_line import step_line
from megatron_rl.trainers import loop
from megatron_rl.trainers.grpo import GrpoTrainer
from megatron_rl.trainers.placement import start_policy
from megatron_rl.trainers.ppo import PpoTrainer
from megatron_rl.trainers.sft import SftTrainer

TRAINERS: dict[str, Callable[[RunConfig], loop.Trainer]] = {
    "grpo": GrpoTrainer,
    "ppo": PpoTrainer,
    "sft": SftTrainer,
}
"""algorithm.name -> trainer"""


def run(cfg: RunConfig) -> None:
    """`megatron-rl train`. Checks the machine first; raises before any process starts where it cannot work."""
    preflight(cfg, needs_rollout=cfg.is_rl)
    loop.run(cfg, TRAINERS[cfg.algorithm.name])


def evaluate(cfg: RunConfig) -> dict[str, float]:
    """`megatron-rl eval`: score the model in model.path on data.val_files, as training would. Prints and returns
    metrics.
    """
    preflight(cfg, needs_rollout=cfg.is_rl)
    progress = Progress()
    with progress.phase("load data, start workers"):
        trainer = TRAINERS[cfg.algorithm.name](cfg)
    try:
        metrics = trainer.validate(0)
    finally:
        trainer.close()
    progress.say(step_line(0, None, metrics))
    for name, value in metrics.items():
        progress.say(f"  {name:<28}{value:.6g}")
    return metrics


def export(cfg: RunConfig, out: str) -> None:
    """`megatron-rl export`: the model as training holds it, in Hugging Face form at `out`.

    Raises CheckpointError where `out` holds other files, or cannot be made: an export never mixes with what was there.
    """
    folder = Path(out)
    faults = export_faults(out)
    if faults:
        raise CheckpointError("; ".join(f"--out {out!r}: {reason} -- {cure}" for reason, cure in faults))
    preflight(cfg, needs_rollout=False)
    progress = Progress()
    with progress.phase("start workers"):
        policy = start_policy(cfg, total_optimizer_steps=1, with_engine=False)
    try:
        with progress.phase(f"write {out}"):
            folder.parent.mkdir(parents=True, exist_ok=True)
            policy.save_hf(out)
    finally:
        policy.close()
