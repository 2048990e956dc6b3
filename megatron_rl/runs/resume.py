"""How a run begins: afresh, or from a checkpoint; what differs from the checkpoint's config is shown or refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.config.changes import Difference, differences, refused
from megatron_rl.config.checks.checkpoint import MODE_KEY, is_checkpoint
from megatron_rl.config.load import to_dict
from megatron_rl.config.run import RunConfig
from megatron_rl.errors import BrokenCheckpoint, CheckpointError, ConfigError, Fault
from megatron_rl.observe.sinks import METRICS_FILE, row_of
from megatron_rl.runs.checkpoints import Checkpoint, Newest, newest, read_checkpoint
from megatron_rl.runs.early_stop import EarlyStop
from megatron_rl.runs.folder import holds_run, numbered
from megatron_rl.weights.base_digest import weights_digest

BASE = "base"
"""What state.json calls the digest of the weights beside adapters."""
PATIENCE = "early_stop"
"""What state.json calls the counts of trainer.early_stop."""
VALIDATED = "time/validate"
"""The metric that a row has once its validation is over."""


@dataclass(frozen=True)
class Row:
    """What is written of a step. A checkpoint has it, since it is written before validation and its row are."""

    step: int
    metrics: Mapping[str, float]
    """Without those of validation."""
    samples: tuple[str, ...]
    """Lines for rollouts.jsonl."""
    validates: bool
    """Whether validation is due after the step."""

    def to_json(self) -> dict[str, Any]:
        """Plain values for state.json."""
        return {"metrics": dict(self.metrics), "samples": list(self.samples), "validates": self.validates}

    @staticmethod
    def of(checkpoint: Checkpoint) -> Row:
        """The row that a checkpoint has."""
        row = checkpoint.state["row"]
        return Row(checkpoint.step, row["metrics"], tuple(row["samples"]), row["validates"])

    def is_in(self, file: Path) -> bool:
        """Whether a metrics.jsonl has it whole."""
        row = row_of(file, self.step)
        return row is not None and (VALIDATED in row or not self.validates)


@dataclass(frozen=True)
class Start:
    """How a run begins."""

    cfg: RunConfig
    """The run's, with the name of the folder that it goes on in."""
    checkpoint: Checkpoint | None = None
    in_place: bool = False
    """It goes on in the checkpoint's own folder."""
    lines: tuple[str, ...] = ()
    """For a reader."""
    why_not: str = ""
    """Why it does not go on from what the folder holds, if that holds a run."""


def config_facts(cfg: RunConfig) -> dict[str, Any]:
    """What state.json says about the config."""
    tree, actor = to_dict(cfg), cfg.actor
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
    layout = {"world": cfg.world_size, "tp": actor.tp, "pp": actor.pp, "cp": actor.cp, "ep": actor.ep}
    facts = {"config": tree, "config_sha256": digest, "layout": layout}
    # A checkpoint with LoRA holds adapters alone.
    return facts | ({BASE: weights_digest(cfg.model.path)} if cfg.model.lora.rank else {})


def base_faults(cfg: RunConfig, checkpoint: Checkpoint) -> list[Fault]:
    """A fault if the checkpoint's adapters were trained beside other weights than those of model.path now."""
    before = checkpoint.state.get(BASE)
    if before is None or before == weights_digest(cfg.model.path) or "model.path" in cfg.trainer.resume_changes:
        return []
    reason = f"the adapters of {checkpoint.path} were trained beside other weights than the folder holds now"
    cure = "put those back, or add model.path to trainer.resume_changes"
    return [Fault("model.path", cfg.model.path, reason, cure)]


def step_facts(run_state: Mapping[str, Any], row: Row) -> dict[str, Any]:
    """What state.json says about the step."""
    return {"step": row.step, "run": run_state, "row": row.to_json()}


def look(cfg: RunConfig, broken: Mapping[Path, str] | None = None) -> Start:
    """How the run begins, by trainer.resume_mode and what its folder holds. Nothing is changed.

    broken: checkpoints that are known to be broken -> why. Raises ConfigError with all differences from the
    checkpoint's config that change what is learned, and if a path that was given has nothing to go on from.
    """
    mode = cfg.trainer.resume_mode
    if mode == "disable":
        return Start(cfg)
    own = _in_own_folder(cfg, broken)
    if mode == "auto":
        return own
    path = Path(mode)
    if own.checkpoint is not None and _same(own.checkpoint.state.get("origin"), path):
        return own
    return _from_path(cfg, path, broken)


def look_again(cfg: RunConfig, broken: Mapping[Path, str]) -> Start:
    """How a run goes on after its workers were lost, in the folder that it holds: from the newest checkpoint there, or
    as it began. cfg: with the name of that folder.
    """
    there = newest(Path(cfg.trainer.run_dir), broken)
    if there.checkpoint is not None:
        return Start(cfg, there.checkpoint, in_place=True, lines=_lines(there, []))
    if cfg.trainer.resume_mode in ("auto", "disable"):
        return Start(cfg, lines=(*_passed_over(there), "beginning again from step 1: there is no checkpoint yet"))
    return _from_path(cfg, Path(cfg.trainer.resume_mode), broken)


def _in_own_folder(cfg: RunConfig, broken: Mapping[Path, str] | None) -> Start:
    """Going on in the run's folder (trainer.overwrite=number: in the last numbered one)."""
    folder = Path(cfg.trainer.run_dir)
    if cfg.trainer.overwrite == "number":
        for path in numbered(folder):
            if not holds_run(path):
                break
            folder = path
    there = newest(folder, broken)
    if there.checkpoint is None:
        reasons = "; ".join(there.passed_over) or "it has none"
        return Start(
            cfg, why_not=f"without a complete checkpoint to go on from ({reasons})" if holds_run(folder) else ""
        )
    checkpoint = there.checkpoint
    if _is_over(cfg, checkpoint, folder):
        total = _total(cfg, checkpoint)
        ended = f"that is complete: it ended at step {checkpoint.step}"
        more = f"that has {checkpoint.step} steps, and {total} are asked for"
        return Start(cfg, why_not=ended if checkpoint.state["is_last"] else more)
    cfg = replace(cfg, trainer=replace(cfg.trainer, experiment_name=folder.name))
    return Start(cfg, checkpoint, in_place=True, lines=_lines(there, _compared(cfg, checkpoint)))


def _from_path(cfg: RunConfig, path: Path, broken: Mapping[Path, str] | None) -> Start:
    there = _newest_at(path, broken or {})
    if there.checkpoint is None:
        reason = f"has no complete checkpoint: {'; '.join(there.passed_over) or 'none at all'}"
        raise ConfigError([Fault(MODE_KEY, str(path), reason, "give another checkpoint or run")])
    in_place = _same(str(there.checkpoint.path.parent.parent), Path(cfg.trainer.run_dir))
    return Start(cfg, there.checkpoint, in_place, _lines(there, _compared(cfg, there.checkpoint)))


def validation_after(checkpoint: Checkpoint) -> dict[str, float]:
    """The row of a checkpoint's step in its own run's metrics.jsonl, if its validation was over; else nothing."""
    row = row_of(checkpoint.path.parent.parent / METRICS_FILE, checkpoint.step) or {}
    return dict(row) if VALIDATED in row else {}


def checkpoint_at(path: str) -> Checkpoint:
    """The checkpoint at a path, or the newest one of the run there. Raises CheckpointError if there is none."""
    there = _newest_at(Path(path), {})
    if there.checkpoint is None:
        reason = "; ".join(there.passed_over) or "it is neither a checkpoint nor a run with one"
        raise CheckpointError(
            f"--checkpoint {path!r}: {reason} -- give RUN/checkpoints/step_... or the folder of a run"
        )
    return there.checkpoint


def _newest_at(path: Path, broken: Mapping[Path, str]) -> Newest:
    """The checkpoint that the path is, or the newest one of the run that it is."""
    if not is_checkpoint(path):
        return newest(path, broken)
    try:
        if path in broken:
            return Newest(None, (broken[path],))
        return Newest(read_checkpoint(path), ())
    except BrokenCheckpoint as error:
        return Newest(None, (str(error),))


def _compared(cfg: RunConfig, checkpoint: Checkpoint) -> list[Difference]:
    """What differs from the checkpoint's config. ConfigError if something may not."""
    unlike = differences(checkpoint.state["config"], cfg)
    faults = [*refused(unlike, cfg.trainer.resume_changes), *base_faults(cfg, checkpoint)]
    if faults:
        where = f"{checkpoint.path} would be gone on from (trainer.resume_mode=disable does not)"
        first = replace(faults[0], reason=f"{faults[0].reason}; {where}")
        raise ConfigError([first, *faults[1:]])
    return unlike


def _passed_over(there: Newest) -> tuple[str, ...]:
    return tuple(f"passed over a broken checkpoint: {reason}" for reason in there.passed_over)


def _lines(there: Newest, unlike: list[Difference]) -> tuple[str, ...]:
    assert there.checkpoint is not None
    broken = _passed_over(there)
    changed = tuple(f"  {one}" + ("" if one.is_free else " (trainer.resume_changes)") for one in unlike)
    return (*broken, f"going on after step {there.checkpoint.step}, from {there.checkpoint.path}", *changed)


def _is_over(cfg: RunConfig, checkpoint: Checkpoint, folder: Path) -> bool:
    """The run has nothing left to do: its last step is done, and its row is written."""
    goes_on = checkpoint.step < _total(cfg, checkpoint)
    early_stop = EarlyStop(cfg.trainer.early_stop, checkpoint.state.get(PATIENCE))
    early_stop.note(checkpoint.step, validation_after(checkpoint))
    if early_stop.ends:
        goes_on = False
    elif not checkpoint.state["is_last"]:
        return not goes_on
    elif checkpoint.step < checkpoint.state["total_steps"]:
        # trainer.target_loss or trainer.early_stop ended it.
        changed = {one.key for one in differences(checkpoint.state["config"], cfg)}
        goes_on = goes_on and any(key.startswith(("trainer.target_loss", "trainer.early_stop.")) for key in changed)
    is_saved = cfg.trainer.model_freq == 0 or (folder / "final").is_dir()
    return not goes_on and is_saved and Row.of(checkpoint).is_in(folder / METRICS_FILE)


def _total(cfg: RunConfig, checkpoint: Checkpoint) -> int:
    """Steps of the run, as far as that is known before its data is read."""
    return cfg.trainer.total_training_steps or cfg.trainer.total_epochs * checkpoint.state["steps_per_epoch"]


def _same(one: object, other: Path) -> bool:
    return isinstance(one, str) and Path(one).resolve() == other.resolve()
