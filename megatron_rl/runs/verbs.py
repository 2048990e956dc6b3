"""The verbs of the command line that start workers or read data."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, count
from pathlib import Path

from megatron_rl.cluster import ray_runtime
from megatron_rl.cluster.dispatch import RankGrid
from megatron_rl.cluster.janitor import kept_clean
from megatron_rl.cluster.nodecheck_run import Idle, node_check
from megatron_rl.cluster.preflight import preflight
from megatron_rl.cluster.worker_group import start_group
from megatron_rl.config.checks.folders import export_faults
from megatron_rl.config.load import dump_yaml
from megatron_rl.config.run import RunConfig
from megatron_rl.errors import CheckpointError, ConfigError, Fault
from megatron_rl.observe.progress import Progress
from megatron_rl.observe.step_line import step_line
from megatron_rl.observe.versions import run_record
from megatron_rl.runs import session
from megatron_rl.runs.before import inspect, require_weights
from megatron_rl.runs.checkpoints import Checkpoint
from megatron_rl.runs.closing import closing
from megatron_rl.runs.files import RECORD_FILE
from megatron_rl.runs.loop import synchronous
from megatron_rl.runs.loop_async import asynchronous
from megatron_rl.runs.resume import base_faults, checkpoint_at
from megatron_rl.runs.trainer import Trainer, load_models, saved_form
from megatron_rl.trainers.placement import start_workers
from megatron_rl.workers.train import TrainWorker

__all__ = ["evaluate", "export", "inspect", "train"]


def train(cfg: RunConfig) -> None:
    """`megatron-rl train`. Checks the machine first; raises before any process starts where it cannot work."""
    preflight(cfg, needs_rollout=cfg.has_engine, trains=True)
    require_weights(cfg, needs_rewards=cfg.has_rewards)
    with kept_clean():
        session.run(cfg, Trainer, synchronous if cfg.trainer.max_staleness is None else asynchronous)


def evaluate(cfg: RunConfig, out: str | None = None, checkpoint: str | None = None) -> dict[str, float]:
    """`megatron-rl eval`: score the model in model.path on data.val_files, as training would; reads no training data.

    checkpoint: score the model of that checkpoint, or of the newest one of that run, in place of model.path's weights.

    Leaves config.yaml, run.json, metrics.json and answers.jsonl (a sample a line; SFT: a row a line) in `out`, a new
    folder: <run folder>-eval where it is not given, or the first of <run folder>-eval-2, -3 ... that is not there.
    Prints and returns the metrics. Raises CheckpointError if `out` holds files.
    """
    saved = None if checkpoint is None else _checkpoint_for(cfg, checkpoint)
    folder = _free_folder(f"{cfg.trainer.run_dir}-eval") if out is None else new_folder(out)
    cfg = replace(cfg, data=replace(cfg.data, train_files=[], mix_weights={}))
    preflight(cfg, needs_rollout=cfg.has_engine)
    require_weights(cfg, needs_rewards=cfg.has_rewards)
    progress = Progress()
    with kept_clean():
        trainer = Trainer(cfg)
        with closing("the workers", trainer.close):
            with progress.phase("load data, start workers"):
                trainer.start(saved)
            validation = trainer.validate(0)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_yaml(cfg), encoding="utf-8")
    for name, content in ((RECORD_FILE, run_record()), ("metrics.json", validation.metrics)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    with (folder / "answers.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, default=str) + "\n" for row in validation.rows())
    metrics = validation.metrics
    progress.say(step_line(0, None, metrics))
    for name, value in metrics.items():
        progress.say(f"  {name:<28}{value:.6g}")
    progress.say(f"answers and scores: {folder} (answers.jsonl, metrics.json, config.yaml, run.json)")
    return metrics


def check_nodes_alone(cfg: RunConfig, tell: Callable[[str], None]) -> None:
    """`megatron-rl check --cluster`: place the ranks of the run and look at their nodes and links, then end them. tell:
    takes what was seen. Raises ConfigError and ClusterError with every fault.
    """
    if cfg.cluster.backend == "inline":
        reason = "has no nodes: its one rank is in the controller"
        raise ConfigError([Fault("cluster.backend", "inline", reason, "leave --cluster out, or use ray")])
    preflight(cfg, needs_rollout=cfg.has_engine)
    with kept_clean(), ray_runtime.joined(cfg.cluster):
        device = ray_runtime.workers_device(cfg.cluster, cfg.cluster.device)
        check = replace(node_check(cfg, tell), links=cfg.world_size > 1 and cfg.cluster.check_links is not False)
        start_group(Idle, (), cfg.cluster, RankGrid.flat(cfg.world_size), device, check=check).close()


def new_folder(path: str) -> Path:
    """The folder that --out names. Raises CheckpointError if it holds files, or cannot be made: what a verb writes
    never mixes with what was there.
    """
    faults = export_faults(path)
    if faults:
        raise CheckpointError("; ".join(f"--out {path!r}: {reason} -- {cure}" for reason, cure in faults))
    return Path(path)


def _checkpoint_for(cfg: RunConfig, path: str) -> Checkpoint:
    """The checkpoint at a path. Raises ConfigError if it has adapters of other weights than model.path's."""
    checkpoint = checkpoint_at(path)
    if faults := base_faults(cfg, checkpoint):
        raise ConfigError(faults)
    return checkpoint


def _free_folder(path: str) -> Path:
    names = chain([path], (f"{path}-{number}" for number in count(2)))
    return next(folder for folder in map(Path, names) if not folder.exists())


def export(cfg: RunConfig, out: str, checkpoint: str | None = None, merge: bool = False) -> None:
    """`megatron-rl export`: the model as training holds it, in Hugging Face form at `out`. With LoRA, its adapter
    alone, in PEFT's form.

    checkpoint: the model of that checkpoint, or of the newest one of that run, in place of model.path's weights. merge:
    write the whole model, with its adapter merged in.
    Raises CheckpointError where `out` holds other files, or cannot be made: an export never mixes with what was there.
    """
    if merge and not cfg.model.lora.rank:
        reason = "there is no adapter to merge"
        raise ConfigError([Fault("model.lora.rank", 0, reason, "leave --merge out, or set it and model.lora.path")])
    folder = new_folder(out)
    saved = None if checkpoint is None else _checkpoint_for(cfg, checkpoint)
    preflight(cfg, needs_rollout=False)
    require_weights(cfg, needs_rewards=False)
    progress = Progress()
    with progress.phase("start workers"):
        workers = start_workers(cfg, optimizer_steps=1, with_engine=False)
    with closing("the workers", workers.close):
        if saved is not None:
            with progress.phase(f"load {saved.path}"):
                load_models(workers.train, saved)
        with progress.phase(f"write {out}"):
            folder.parent.mkdir(parents=True, exist_ok=True)
            workers.train.rank0(TrainWorker.save, "actor", out, "language_model" if merge else saved_form(cfg))
