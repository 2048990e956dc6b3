"""Run folders: names and roots that cannot be, locks, and that nothing of an earlier run or of the user's is lost."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config.checks.folders import export_faults, run_folder
from megatron_rl.config.run import RunConfig
from megatron_rl.config.sections.trainer import TrainerConfig
from megatron_rl.errors import CheckpointError, ConfigError, DataError, MissingDependency, RewardError
from megatron_rl.runs import session, verbs
from megatron_rl.runs.checkpoints import Checkpoint
from megatron_rl.runs.folder import LOCK_FILE, claim
from megatron_rl.runs.trainer import StepResult
from megatron_rl.runs.validation import Validation
from megatron_rl.types import FileMark
from tests.helpers.config import faults, load
from tests.helpers.save import write_model

NAME, ROOT = "trainer.experiment_name", "trainer.default_local_dir"


def state(folder: Path) -> dict[str, Any]:
    """Bytes and times of change of all that lies below, the folder's own included."""
    found: dict[str, Any] = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path)] = (path.lstat().st_mtime_ns, content)
    return found


# Names and roots.

BAD_NAMES = {
    "empty": ("", "is empty", "give the run a name"),
    "blank": ("   ", "is empty", "give the run a name"),
    "dot": (".", "means the folder of all runs itself", "give a plain name"),
    "dots": ("..", "the one above it", "give a plain name"),
    "up": ("../x", "holds a slash", "trainer.default_local_dir"),
    "up twice": ("../../x", "holds a slash", "trainer.default_local_dir"),
    "absolute": ("/x", "holds a slash", "trainer.default_local_dir"),
    "below": ("a/b", "holds a slash", "trainer.default_local_dir"),
    "in and out": ("a/../../b", "holds a slash", "trainer.default_local_dir"),
    "slash at the end": ("a/", "holds a slash", "trainer.default_local_dir"),
    "slash alone": ("/", "holds a slash", "trainer.default_local_dir"),
    "NUL": ("a\0b", "U+0000", "take it out"),
    "line": ("a\nb", "U+000A", "take it out"),
    "tab": ("a\tb", "U+0009", "take it out"),
    "escape": ("a\x1b[31m", "U+001B", "take it out"),
    "surrogate": ("a\udcff", "U+DCFF", "take it out"),
    "hidden space": ("a\u200bb", "U+200B", "take it out"),
    "white space before": (" a", "starts or ends with white space", "write 'a'"),
    "white space after": ("a ", "starts or ends with white space", "write 'a'"),
    "long": ("n" * 251, "has 251 bytes, and the name of a run's folder may have 250", "shorten it"),
    "very long": ("n" * 5000, "has 5000 bytes", "shorten it"),
    "long in bytes": ("\u00e4" * 130, "has 260 bytes", "shorten it"),
}


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_is_no_folder_in_the_root_is_refused(tmp_path: Path, name: str):
    text, reason, cure = BAD_NAMES[name]
    cfg = load(tmp_path, f"{ROOT}={tmp_path / 'runs'}")
    before = state(tmp_path)
    found = run_folder(with_trainer(cfg, experiment_name=text))
    assert found and all(fault.key == NAME and fault.value == text for fault in found)
    assert any(reason in fault.reason and cure in fault.cure for fault in found), found
    assert state(tmp_path) == before, "nothing is written to find out"


def with_trainer(cfg: RunConfig, **changes: Any) -> RunConfig:
    return replace(cfg, trainer=replace(cfg.trainer, **changes))


@pytest.mark.parametrize(
    "name", ["run", "a.b", "-x", "~", "1e-5", "lr=1e-6", "final", "n" * 250, "\u00e4\u00f6", "a b"]
)
def test_an_odd_name_that_can_be_is_taken(tmp_path: Path, name: str):
    assert run_folder(with_trainer(load(tmp_path), default_local_dir=str(tmp_path), experiment_name=name)) == []


def _make_roots(folder: Path) -> None:
    (folder / "file").write_text("x")
    (folder / "nowhere").symlink_to(folder / "missing")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "runs").mkdir()
    (folder / "runs" / "taken").write_text("x")
    (folder / "runs" / "link").symlink_to(folder / "missing")


BAD_ROOTS = {
    "empty": ("", "run", ROOT, "is empty", "such as runs"),
    "blank": (" ", "run", ROOT, "is empty", "such as runs"),
    "NUL": ("{}/a\0", "run", ROOT, "U+0000", "take it out"),
    "line": ("{}/a\n", "run", ROOT, "U+000A", "take it out"),
    "a file": ("{}/file", "run", ROOT, "file is a file", "name a folder"),
    "below a file": ("{}/file/a/b", "run", ROOT, "file is a file", "name a folder"),
    "a link to nowhere": ("{}/nowhere", "run", ROOT, "is a link that leads nowhere", "name a folder"),
    "below a link to nowhere": ("{}/nowhere/a", "run", ROOT, "is a link that leads nowhere", "name a folder"),
    "a link to itself": ("{}/loop/a", "run", ROOT, "is a link that leads nowhere", "name a folder"),
    "long part": ("{}/" + "r" * 256, "run", ROOT, "has 256 bytes, and a name has at most 255", "shorten it"),
    "long path": ("{}" + "/rrrrrrrrr" * 400, "run", ROOT, "leave room for the files", "nearer to the root"),
    "the name is a file": ("{}/runs", "taken", NAME, "taken is a file", "another name"),
    "the name is a link to nowhere": ("{}/runs", "link", NAME, "is a link that leads nowhere", "another name"),
}


@pytest.mark.parametrize("name", BAD_ROOTS)
def test_a_root_that_cannot_hold_the_run_is_refused(tmp_path: Path, name: str):
    root, run, key, reason, cure = BAD_ROOTS[name]
    _make_roots(tmp_path)
    cfg = with_trainer(load(tmp_path), default_local_dir=root.format(tmp_path), experiment_name=run)
    before = state(tmp_path)
    (fault,) = run_folder(cfg)
    assert fault.key == key and reason in fault.reason and cure in fault.cure, fault
    assert state(tmp_path) == before


def test_a_root_without_the_right_to_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Root may write anywhere, so the kernel's answer is given here.
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path))
    cfg = with_trainer(load(tmp_path), default_local_dir=str(tmp_path / "runs"))
    (fault,) = run_folder(cfg)
    assert fault.key == ROOT and f"{tmp_path} cannot be written" in fault.reason and "change its rights" in fault.cure


def test_check_says_name_and_root_at_once_beside_other_faults(tmp_path: Path):
    found = faults(tmp_path, f"{NAME}=../x", f"{ROOT}=''", "data.train_batch_size=0", "trainer.overwrite=maybe")
    assert {fault.key for fault in found} >= {"data.train_batch_size", "trainer.overwrite", NAME, ROOT}


BAD_OUTS = {
    "empty": ("", "is empty", "name the folder"),
    "NUL": ("{}/a\0", "U+0000", "take it out"),
    "a file": ("{}/file", "file is a file", "name a folder"),
    "below a file": ("{}/file/a", "file is a file", "name a folder"),
    "a link to nowhere": ("{}/nowhere", "is a link that leads nowhere", "name a folder"),
    "a folder with files": ("{}/runs", "the folder is not empty", "give a new one"),
    "this folder": ("{}", "the folder is not empty", "give a new one"),
    "long": ("{}/" + "o" * 240, "more than 237 bytes", "shorten it"),
    "long path": ("{}" + "/rrrrrrrrr" * 400, "bytes", "shorten it"),
}


@pytest.mark.parametrize("name", BAD_OUTS)
def test_an_export_goes_to_a_folder_of_its_own(tmp_path: Path, name: str):
    out, reason, cure = BAD_OUTS[name]
    _make_roots(tmp_path)
    cfg = load(tmp_path)
    before = state(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        verbs.export(cfg, out.format(tmp_path))
    assert str(caught.value).startswith("--out ") and reason in str(caught.value) and cure in str(caught.value)
    assert state(tmp_path) == before


@pytest.mark.parametrize("out", ["new", "deep/new", "empty", "o" * 237])
def test_a_new_or_an_empty_folder_takes_an_export(tmp_path: Path, out: str):
    (tmp_path / "empty").mkdir()
    assert export_faults(str(tmp_path / out)) == []


# Who may use a folder.


def settings(root: Path, overwrite: str = "refuse", name: str = "a") -> TrainerConfig:
    return TrainerConfig(default_local_dir=str(root), experiment_name=name, overwrite=overwrite)  # type: ignore[arg-type]


MADE = [
    "config.yaml", "run.json", "metrics.jsonl", "rollouts.jsonl", "curves.png", "wandb_id", "mlflow_id",
    "final/model.safetensors", "final/config.json", "final/vocab.txt", "critic/model.safetensors",
    "global_step_2/actor/model.safetensors", "global_step_2/critic/config.json",
    "global_step_40/actor/model-00001-of-00002.safetensors", "tensorboard/events.out.tfevents.1.host.1.0",
    "wandb/offline-run-1/x", "wandb/debug.log", ".final.0123abcd.writing/model.safetensors",
    "global_step_40/.actor.0123abcd.writing/x", "checkpoints/latest", "checkpoints/step_000040/manifest.json",
    "checkpoints/step_000050.writing/actor/x", "checkpoints/step_000030.removing/ranks/x",
]  # fmt: skip
USERS = [
    "notes.txt", "final.old/model.safetensors", "X.writing/y", "final.writing/z", "metrics.tmp", "config.yaml.bak",
    "global_step_2/notes.txt", "global_step_2.keep/actor/model.safetensors", "global_step_x/actor/w", "best/weights",
    "tensorboard/notes", "wandb/notes", "rollouts.jsonl.gz", ".hidden", "checkpoints/notes",
    "checkpoints/step_000040.keep/manifest.json", "actor/model.safetensors",
]  # fmt: skip


def fill(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


@pytest.mark.parametrize("made", [*MADE, "final", "global_step_7"])
def test_a_folder_with_anything_of_a_run_is_refused_untouched(tmp_path: Path, made: str):
    fill(tmp_path / "a", [made])
    (tmp_path / "a" / "notes.txt").write_text("x")
    before = state(tmp_path)
    with pytest.raises(ConfigError) as caught:
        claim(settings(tmp_path))
    (fault,) = caught.value.faults
    assert fault.key == NAME and f"{tmp_path / 'a'} holds a run already" in fault.reason
    assert "trainer.overwrite=replace" in fault.cure and "trainer.overwrite=number" in fault.cure
    assert state(tmp_path) == before


def test_a_folder_with_the_users_files_alone_may_be_used_and_loses_none(tmp_path: Path):
    fill(tmp_path / "a", USERS)
    before = state(tmp_path)
    with claim(settings(tmp_path)):
        pass
    assert state(tmp_path) == before, "given up before it began"
    with claim(settings(tmp_path)) as folder:
        folder.begin()
    assert {name for name in USERS if (tmp_path / "a" / name).read_text() == name} == set(USERS)


def test_replace_takes_what_a_run_writes_and_nothing_else(tmp_path: Path):
    fill(tmp_path / "a", [*MADE, *USERS])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "w").write_text("kept")
    (tmp_path / "a" / "global_step_3").symlink_to(tmp_path / "elsewhere")
    before = state(tmp_path)
    with claim(settings(tmp_path, "replace")):
        pass
    assert state(tmp_path) == before, "nothing goes before the first step"
    with claim(settings(tmp_path, "replace")) as folder:
        folder.begin()
    left = {str(path.relative_to(tmp_path / "a")) for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert left == {*USERS, LOCK_FILE}
    assert (tmp_path / "elsewhere" / "w").read_text() == "kept"


@pytest.mark.parametrize(
    "odd",
    [
        "final/notes.md",
        "final/sub/model.safetensors",
        "critic/a.py",
        "global_step_2/actor/log",
        "config.yaml/x",
        "checkpoints/step_000002/notes",
    ],
)
def test_replace_is_refused_where_it_would_take_the_users_files_along(tmp_path: Path, odd: str):
    fill(tmp_path / "a", ["metrics.jsonl", odd])
    before = state(tmp_path)
    with pytest.raises(ConfigError) as caught:
        claim(settings(tmp_path, "replace"))
    (fault,) = caught.value.faults
    assert fault.key == "trainer.overwrite" and "is no file of a run" in fault.reason and fault.cure == "move it away"
    assert state(tmp_path) == before


def test_number_takes_the_next_free_name(tmp_path: Path):
    with claim(settings(tmp_path, "number")) as folder:
        assert folder.path == tmp_path / "a", "free as it is"
    fill(tmp_path / "a", ["config.yaml"])
    fill(tmp_path / "a-2", ["final/model.safetensors"])
    fill(tmp_path / "a-4", ["config.yaml"])
    before = state(tmp_path)
    with claim(settings(tmp_path, "number")) as third, claim(settings(tmp_path, "number")) as fifth:
        assert [third.path.name, fifth.path.name] == ["a-3", "a-5"], "one that another run is about to use is not free"
    assert state(tmp_path) == before


def test_a_claim_that_is_given_up_leaves_no_folder(tmp_path: Path):
    before = state(tmp_path)
    with claim(settings(tmp_path / "deep" / "root")) as folder:
        assert (folder.path / LOCK_FILE).exists()
    assert state(tmp_path) == before
    (tmp_path / "runs").mkdir()
    with claim(settings(tmp_path / "runs")) as folder:
        (folder.path / "mine").write_text("came meanwhile")
    assert (tmp_path / "runs" / "a" / "mine").exists(), "a folder that someone else uses stays"


HOLDER = """
import sys, time
from megatron_rl.config.sections.trainer import TrainerConfig
from megatron_rl.runs.folder import claim
with claim(TrainerConfig(default_local_dir=sys.argv[1], experiment_name="a", overwrite=sys.argv[2])) as folder:
    if sys.argv[3] == "begin":
        folder.begin()
    print(folder.path.name, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has begun a run in the folder."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path), "refuse", "begin"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "a\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_two_runs_at_once_and_the_lock_of_a_dead_one(tmp_path: Path, holder: subprocess.Popen[str]):
    before = state(tmp_path)
    for overwrite in ("refuse", "replace"):
        with pytest.raises(ConfigError) as caught:
            claim(settings(tmp_path, overwrite))
        (fault,) = caught.value.faults
        assert fault.key == NAME and "another run uses the folder" in fault.reason
        assert f"(process {holder.pid})" in fault.reason and "wait for it to end" in fault.cure
    assert state(tmp_path) == before
    with claim(settings(tmp_path, "number")) as folder:
        assert folder.path.name == "a-2"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with claim(settings(tmp_path)) as folder:
        assert folder.path.name == "a" and (tmp_path / "a" / LOCK_FILE).exists()


@pytest.mark.parametrize("content", ["", "12345\n", "host:1"])
def test_a_lock_file_that_nobody_holds_is_no_obstacle_and_stays(tmp_path: Path, content: str):
    fill(tmp_path / "a", [LOCK_FILE])
    (tmp_path / "a" / LOCK_FILE).write_text(content)
    before = state(tmp_path)
    with claim(settings(tmp_path)):
        pass
    assert state(tmp_path) == before


# A run in its folder, with a trainer of three steps that can fail anywhere.


class Steps:
    total_steps, steps_per_epoch = 3, 3

    def __init__(self, cfg: RunConfig, fails: str = "") -> None:
        self.fails, self.is_closed = fails, False
        self.saving: list[tuple[Path, str]] = []

    def start(self, checkpoint: Checkpoint | None = None) -> None:
        if self.fails == "data":
            raise DataError("train.jsonl, row 1: no prompt -- add one")

    def take(self, step: int) -> int:
        return step

    def learn(self, taken: int) -> int:
        if self.fails == f"step {taken}":
            raise RewardError("reward failed")
        return taken

    def publish(self, learned: int) -> StepResult:
        return StepResult({"reward/mean": float(learned), "time/step": 0.1}, [{"prompt": "1+1=", "response": "2"}])

    def validate(self, step: int) -> Validation:
        if self.fails == f"validation {step}":
            raise RewardError("validation failed")
        return Validation({"val/accuracy": 0.5}, list)

    def tell(self, during: Any) -> None:
        self.during = during

    def stateful(self) -> dict[str, Any]:
        return {}

    def finished(self) -> bool:
        return False

    def save_state(self, folder: str, background: bool) -> None:
        (Path(folder) / "actor").mkdir()
        (Path(folder) / "actor" / "weights").write_text(self.state_text())
        self.writes = Path(folder)

    def state_text(self) -> str:
        return "state"

    def save_done(self) -> bool:
        return True

    def finish_save(self) -> dict[str, FileMark]:
        data = (self.writes / "actor" / "weights").read_bytes()
        return {"actor/weights": FileMark(len(data), zlib.crc32(data))}

    def save(self, path: str, background: bool = False) -> None:
        self.saving.append((Path(path), self.weights_text()))
        if not background:
            self.finish_models()

    def weights_text(self) -> str:
        return "weights"

    def models_done(self) -> bool:
        return True

    def finish_models(self) -> None:
        while self.saving:
            path, text = self.saving.pop(0)
            path.mkdir(exist_ok=True)
            (path / "model.safetensors").write_text(text)

    def close(self) -> None:
        self.is_closed = True

    def summary(self) -> list[str]:
        return []


def run(cfg: RunConfig, fails: str = "", **trainer: Any) -> None:
    session.run(with_trainer(cfg, **trainer), lambda cfg: Steps(cfg, fails))


@pytest.fixture
def cfg(tmp_path: Path) -> RunConfig:
    return load(tmp_path, f"{ROOT}={tmp_path / 'runs'}", f"{NAME}=a", "trainer.save_freq=2")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


WHOLE = {
    "config.yaml",
    "status.json",
    "run.json",
    "metrics.jsonl",
    "rollouts.jsonl",
    "curves.png",
    "final",
    "global_step_2",
    "checkpoints",
    LOCK_FILE,
}


def test_a_second_run_under_the_same_name(cfg: RunConfig, tmp_path: Path):
    run(cfg)
    runs = tmp_path / "runs"
    assert names(runs / "a") == WHOLE
    before = state(runs)
    with pytest.raises(
        ConfigError, match="holds a run already, that is complete: it ended at step 3 -- to go on, raise"
    ):
        run(cfg)
    assert state(runs) == before
    (runs / "a" / "final.old").mkdir()
    (runs / "a" / "global_step_90").mkdir()
    (runs / "a" / "global_step_90" / "actor").mkdir()
    run(cfg, overwrite="replace", save_freq=-1)
    assert names(runs / "a") == (WHOLE - {"global_step_2", "checkpoints"}) | {"final.old"}, (
        "no save of the first run among these"
    )
    before = state(runs / "a")
    run(cfg, overwrite="number")
    assert state(runs / "a") == before and names(runs / "a-2") == WHOLE
    assert "experiment_name: a-2" in (runs / "a-2" / "config.yaml").read_text()


@pytest.mark.parametrize("overwrite", ["refuse", "replace", "number"])
@pytest.mark.parametrize("fails", ["data", "validation 0", "logger"])
def test_what_is_found_before_the_first_step_leaves_everything_as_it_was(
    cfg: RunConfig, tmp_path: Path, fails: str, overwrite: str, monkeypatch: pytest.MonkeyPatch
):
    run(cfg)
    before = state(tmp_path / "runs")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    logger = ["console", "tensorboard"] if fails == "logger" else ["console"]
    with pytest.raises((ConfigError, DataError, RewardError, MissingDependency)):
        run(cfg, fails, overwrite=overwrite, logger=logger)
    assert state(tmp_path / "runs") == before


@pytest.mark.parametrize("fails", ["data", "validation 0"])
def test_a_refused_first_run_does_not_stand_in_the_way_of_the_next(cfg: RunConfig, tmp_path: Path, fails: str):
    with pytest.raises((DataError, RewardError)):
        run(cfg, fails)
    assert not (tmp_path / "runs").exists()
    run(cfg)
    assert names(tmp_path / "runs" / "a") == WHOLE


def test_an_error_in_the_last_validation_keeps_the_model_and_the_steps_figures(cfg: RunConfig, tmp_path: Path):
    with pytest.raises(RewardError, match="validation failed"):
        run(cfg, "validation 3")
    folder = tmp_path / "runs" / "a"
    assert (folder / "final" / "model.safetensors").read_text() == "weights"
    assert [line.split(",")[0] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [
        f'{{"step": {step}' for step in range(4)
    ]


# Saves of a model.


def model_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_a_save_that_the_disk_cannot_hold_keeps_the_earlier_one_and_the_users_files(tmp_path: Path):
    tensors = {"w": torch.arange(4096.0)}
    source, out = model_folder(tmp_path / "model"), tmp_path / "out"
    write_model(out, tensors.items(), companions_from=source)
    fill(tmp_path, ["out.writing/x", "out.old/y"])
    before = state(out), names(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"out: could not be written \(.*an earlier save there is intact"):
            write_model(out, {"w": torch.zeros(8192)}.items(), companions_from=source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert (state(out), names(tmp_path)) == before
    write_model(out, {"w": torch.zeros(8192)}.items(), companions_from=source)
    assert names(tmp_path) == before[1] and (out / "model.safetensors").stat().st_size > 8192 * 4
    assert (tmp_path / "out.writing" / "x").read_text() and (tmp_path / "out.old" / "y").read_text()
