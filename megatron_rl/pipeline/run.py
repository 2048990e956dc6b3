"""Runs the stages of a pipeline one after the other, each in its own process, and remembers which are done.

FOLDER/pipeline.json has for each stage what its result follows from: settings that differ from their defaults, digests
of files that no stage makes, and the stages that it reads. A stage of which all that is the same is not run again.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TypedDict, cast

from megatron_rl.cluster import stop
from megatron_rl.config.checks.data_paths import data_files, dataset_shards
from megatron_rl.config.checks.reward import plan_rewards
from megatron_rl.config.load import settings_of
from megatron_rl.config.run import RunConfig
from megatron_rl.errors import ConfigError, Fault
from megatron_rl.observe.run_status import DONE, STATUS_FILE
from megatron_rl.pipeline.check import StageRun, resolve_runs, verb_of
from megatron_rl.pipeline.results import table, wide_table, write_rows, write_whole
from megatron_rl.pipeline.spec import ARTEFACTS, MODEL, ROWS, Pipeline, Stage

STATE_FILE, LOCK_FILE, TABLE_FILE = "pipeline.json", ".pipeline.lock", "evaluations.csv"
WHOLE_BYTES = 64 << 20
"""A file up to this size is known by its content, a larger one by its size and time of change."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


VerbCall = Callable[[str, Stage, list[str]], int]


class StageState(TypedDict):
    """A stage in pipeline.json."""

    facts: dict[str, str]
    """What its result follows from."""
    begun: int
    """Times that it was begun afresh."""
    done: bool


def run_pipeline(pipeline: Pipeline, say: Callable[[str], None], call: VerbCall | None = None) -> int:
    """Run what is not done yet; the exit code. Raises ConfigError if another process runs the pipeline, and Stopped
    after a signal, which the stage's process hears too.

    call: runs a verb with a stage's arguments and returns its exit code; in a process of its own if None.
    """
    with _locked(pipeline.folder):
        file = pipeline.folder / STATE_FILE
        state = cast("dict[str, StageState]", json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}
        for number, stage in enumerate(pipeline.stages, start=1):
            head = f"stage {number} of {len(pipeline.stages)}, {stage.name}"
            runs = resolve_runs(pipeline, stage)
            facts = stage_facts(pipeline, stage, runs, state)
            before = state.get(stage.name)
            is_there = all((pipeline.folder / stage.name / name).exists() for name in results_of(stage))
            why = why_afresh(before, facts, is_there)
            if before is not None and not why and before["done"]:
                say(f"{head}: is done")
                continue
            if before is None or why:
                say(f"{head}: begins{why}")
                _move_aside(pipeline.folder / stage.name, say)
                state[stage.name] = {"facts": facts, "begun": before["begun"] + 1 if before else 1, "done": False}
                write_whole(file, json.dumps(state, indent=2) + "\n")
            else:
                say(f"{head}: goes on")
            code = _run_stage(pipeline, stage, runs, say, call or call_verb)
            if code:
                say(f"{head}: ended with exit code {code}; the same command goes on from here")
                return code
            state[stage.name]["done"] = True
            write_whole(file, json.dumps(state, indent=2) + "\n")
            _write_evaluations(pipeline, state)
        _write_evaluations(pipeline, state)
    return 0


def results_of(stage: Stage) -> tuple[str, ...]:
    """What is in the folder of a stage that is done."""
    return tuple(ARTEFACTS[stage.kind].values()) or ("table.md", "table.json")


def why_afresh(before: StageState | None, facts: Mapping[str, str], is_there: bool) -> str:
    """Why a stage that was begun before is begun afresh, to stand behind "begins"; "" if it is not."""
    if before is None:
        return ""
    old = before["facts"]
    if old == facts:
        return " again: its results are gone" if before["done"] and not is_there else ""
    names = dict.fromkeys([*old, *facts])
    changed = [f"{key} {old.get(key, '-')} -> {facts.get(key, '-')}" for key in names if old.get(key) != facts.get(key)]
    return f" again: {'; '.join(changed)}"


def stage_facts(
    pipeline: Pipeline, stage: Stage, runs: Iterable[StageRun], state: Mapping[str, StageState]
) -> dict[str, str]:
    """What the result of a stage follows from, as pairs of texts."""
    facts = {"kind": stage.kind}
    if stage.kind == "sample":
        facts |= {"keep": stage.keep, "least": str(stage.least)}
    for run in runs:
        above = f"{run.name}: " if stage.kind == "eval" else ""
        for key, value in settings_of(run.config):
            if key.required or value != key.default:
                facts[above + key.name] = json.dumps(value, sort_keys=True, default=str)
        own = pipeline.folder.resolve()
        for file in sorted(set(files_of(run.config))):
            if own not in file.resolve().parents:
                facts[f"file {file}"] = fingerprint(file)
    for name in dict.fromkeys(text.partition(".")[0] for text in stage.references()):
        made = json.dumps([state[name]["facts"], state[name]["begun"]], sort_keys=True)
        facts[f"stage {name}"] = hashlib.sha256(made.encode()).hexdigest()[:16]
    return facts


def files_of(cfg: RunConfig) -> Iterator[Path]:
    """The files that a run reads: data, rewards, and those of models."""
    for files in (cfg.data.train_files, cfg.data.val_files, cfg.data.val_prompt_files):
        for path in data_files("data", files)[0]:
            yield from dataset_shards(path)[0] if path.is_dir() else [path]
    plan = plan_rewards(cfg.reward)[0] if cfg.has_rewards else None
    for reward in plan.rewards() if plan is not None else ():
        module = Path(reward.spec.rpartition(":")[0]).expanduser()
        if module.suffix == ".py":
            yield module
    models = (cfg.model.path, cfg.model.tokenizer_path, cfg.model.lora.path, cfg.ref.path, cfg.critic.path)
    for folder in (*models, cfg.reward.model.path, cfg.reward.judge.path):
        if folder is not None:
            yield from (file for file in Path(folder).iterdir() if file.is_file())


def fingerprint(file: Path) -> str:
    """A text that differs if the file does (WHOLE_BYTES)."""
    stat = file.stat()
    if stat.st_size > WHOLE_BYTES:
        return f"{stat.st_size} bytes of {stat.st_mtime_ns}"
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _run_stage(
    pipeline: Pipeline, stage: Stage, runs: list[StageRun], say: Callable[[str], None], call: VerbCall
) -> int:
    """Run what the stage still lacks; the exit code of the first process that fails."""
    folder = pipeline.folder / stage.name
    if verb_of(stage) == "train":
        return 0 if _is_over(folder) else call("train", stage, runs[0].overrides)
    for run in runs:
        out = folder / ("answers" if stage.kind == "sample" else run.name)
        if not out.exists():
            half = folder / f".{out.name}.writing"
            shutil.rmtree(half, ignore_errors=True)
            code = call("eval", stage, [*run.overrides, "--out", str(half)])
            if code:
                return code
            os.rename(half, out)
            say(f"{half} is {out} now")
    if stage.kind == "sample":
        least = runs[0].config.rollout.val.pass_score if stage.least is None and stage.keep == "right" else stage.least
        rows = pipeline.path_of(stage.name, ROWS)
        say(f"{rows}: {write_rows(folder / 'answers' / 'answers.jsonl', rows, stage.keep, least)}")
        return 0
    metrics = {
        model: {name: json.loads((folder / f"{model}-{name}" / "metrics.json").read_text()) for name in stage.data}
        for model in stage.models
    }
    write_whole(folder / "table.json", json.dumps(metrics, indent=2) + "\n")
    write_whole(folder / "table.md", table(metrics))
    say(f"{folder / 'table.md'}:\n{table(metrics)}")
    return 0


def _write_evaluations(pipeline: Pipeline, state: Mapping[str, StageState]) -> None:
    """One table of all evaluations that are done, beside the stages' folders."""
    done = [one.name for one in pipeline.stages if one.kind == "eval" and one.name in state and state[one.name]["done"]]
    tables = {name: json.loads((pipeline.folder / name / "table.json").read_text(encoding="utf-8")) for name in done}
    if tables:
        write_whole(pipeline.folder / TABLE_FILE, wide_table(tables))


def _is_over(folder: Path) -> bool:
    """Whether a run has ended by itself, with its model."""
    status = folder / STATUS_FILE
    if not status.exists() or not (folder / ARTEFACTS["sft"][MODEL]).is_dir():
        return False
    return json.loads(status.read_text(encoding="utf-8"))["phase"] == DONE


def call_verb(verb: str, stage: Stage, arguments: list[str]) -> int:
    """Run a verb in a process of its own, which ends with this one; its exit code."""
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_rl", verb, *stage.config, *arguments],
        preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(stop.received() or signal.SIGINT)
        process.wait()
        raise stop.Stopped(f"stopped in stage {stage.name}; the same command goes on from here", True) from None


def _move_aside(folder: Path, say: Callable[[str], None]) -> None:
    """Keep what an earlier start with other settings has left."""
    if folder.exists():
        aside = next(path for path in (folder.with_name(f"{folder.name}.{n}") for n in count(1)) if not path.exists())
        os.rename(folder, aside)
        say(f"{folder}: its earlier results are in {aside} now")


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            cure = "wait for it to end, or name another folder"
            raise ConfigError([Fault("folder", str(folder), "another process runs this pipeline now", cure)]) from None
        yield
