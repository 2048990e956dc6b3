"""A run that was killed, stopped or broken goes on as if nothing had been: with a policy of one number."""

from __future__ import annotations

import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cluster import stop
from megatron_rl.config.run import RunConfig
from megatron_rl.data.stream import Stream
from megatron_rl.errors import BrokenCheckpoint, CheckpointError, ConfigError, RewardError
from megatron_rl.observe.sinks import read_metrics
from megatron_rl.runs import session
from megatron_rl.runs.checkpoints import Checkpoint, checkpoint_folders, newest, read_checkpoint, step_of
from megatron_rl.runs.loop import Loop
from megatron_rl.runs.trainer import StepResult
from megatron_rl.runs.validation import Validation
from tests.helpers.config import load, write
from tests.unit.runs.test_loops import LOOPS, Weights

STEPS = 6


class Trained(Weights):
    """Weights, with data whose order is a part of the run's state, and a validation that the weights decide."""

    total_steps, steps_per_epoch = STEPS, 3

    def __init__(self, cfg: RunConfig, at: Callable[[str], None] = lambda place: None) -> None:
        super().__init__(cfg)
        self.at, self.total_steps = at, cfg.trainer.total_training_steps or STEPS
        self.data = Stream(num_items=7, batch_size=2, shuffle=True, seed=cfg.trainer.seed)

    def stateful(self) -> dict[str, Any]:
        return {"data": self.data}

    def take(self, step: int) -> Any:
        rows = self.data.next()
        self.at(f"take {step}")
        return (step, self.published * 31 + sum(rows) + rows[0])

    def learn(self, taken: Any) -> Any:
        stop.commit()
        return super().learn(taken)

    def publish(self, learned: int) -> StepResult:
        result = super().publish(learned)
        return StepResult(result.metrics, [{"prompt": "1+1=", "weight": self.weight}])

    def validate(self, step: int) -> Validation:
        self.at(f"validate {step}")
        return Validation({"val/accuracy": float(self.published % 7)}, list)

    def save_state(self, folder: str, background: bool) -> None:
        self.at("save_state")
        super().save_state(folder, background)

    def finish_save(self) -> Any:
        self.at("finish_save")
        return super().finish_save()

    def models_done(self) -> bool:
        # Models take longer to write than checkpoints.
        return False

    def finish_models(self) -> None:
        self.at("finish_models")
        super().finish_models()


def config(folder: Path, *more: str) -> RunConfig:
    own = [f"trainer.default_local_dir={folder / 'runs'}", "trainer.experiment_name=a", "trainer.save_freq=2"]
    own.append(f"data.val_files={write(folder / 'val.jsonl', '')}")
    return load(folder, *own, f"trainer.total_training_steps={STEPS}", "trainer.test_freq=2", *more)


def train(cfg: RunConfig, loop: str = "synchronous", at: Callable[[str], None] = lambda place: None) -> Trained:
    made: list[Trained] = []

    def make(cfg: RunConfig) -> Trained:
        made.append(Trained(cfg, at))
        return made[-1]

    chosen: Loop[Any] = LOOPS[loop]
    session.run(cfg, make, chosen)
    return made[-1]


def outcome(folder: Path) -> dict[str, Any]:
    """What a run has made: rows without their times, samples, weights."""
    rows = [
        {name: value for name, value in row.items() if not name.startswith(("time/", "perf/"))}
        for row in read_metrics(folder / "metrics.jsonl")
    ]
    saves = {path.parent.name: path.read_text() for path in folder.rglob("model.safetensors")}
    return {"rows": rows, "samples": (folder / "rollouts.jsonl").read_text(), "saves": saves}


def killed(work: Callable[[], object]) -> int:
    """The exit status of the work in a copy of this process."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            for number in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at_event(folder: Path, number: int) -> None:
    """This process ends as if killed, at its number-th opening, renaming, making or removing below the folder."""
    seen = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        changes = event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")
        if changes and args and str(args[0]).startswith(str(folder)):
            seen += 1
            if seen == number:
                os._exit(9)

    sys.addaudithook(hook)


@pytest.fixture(scope="module", autouse=True)
def no_curves() -> Iterator[None]:
    """Drawing them takes longer than these runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "plot_curves", lambda *args: None)
        yield


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("unbroken")
    train(config(folder))
    return outcome(folder / "runs" / "a")


@pytest.mark.parametrize("save", ["checkpoint.async_save=true", "checkpoint.async_save=false"])
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_killed_at_any_change_of_its_folder_goes_on_to_the_same_end(
    tmp_path: Path, unbroken: dict[str, Any], every: int, save: str
) -> None:
    number, ended = 3, 9
    while ended == 9:
        folder = tmp_path / str(number)
        folder.mkdir()
        # A run that is killed before its first checkpoint is whole has nothing to go on from.
        cfg = config(folder, save, "trainer.overwrite=replace")

        def killed_there(cfg: RunConfig = cfg, folder: Path = folder, number: int = number) -> None:
            kill_at_event(folder / "runs", number)
            train(cfg)

        ended = killed(killed_there)
        if ended == 9:
            assert killed(lambda cfg=cfg: train(cfg)) == 0, number
            assert outcome(folder / "runs" / "a") == unbroken, number
            assert not list((folder / "runs").rglob("*.writing")), number
        number += every
    assert ended == 0 and number > 60


def test_a_model_that_cannot_be_written_ends_the_run_and_no_checkpoint_says_that_it_was(
    tmp_path: Path, unbroken: dict[str, Any]
) -> None:
    """It is written beside step 5; the error comes when step 6 wants to save."""
    cfg, places = config(tmp_path), list[str]()

    def fails(there: str) -> None:
        places.append(there)
        if there == "finish_models" and places.count(there) == 2:
            raise CheckpointError("model: could not be written (rank 1: disk full); an earlier save there is intact")

    with pytest.raises(CheckpointError, match="rank 1: disk full"):
        train(cfg, at=fails)
    assert places[-2:] == ["take 6", "finish_models"], "training went on beside the save"
    folder = tmp_path / "runs" / "a"
    assert [path.name for path in checkpoint_folders(folder)] == ["step_000002"]
    assert {path.name for path in folder.glob("global_step_*")} == {"global_step_2", "global_step_4"}
    assert not list((folder / "global_step_4").iterdir())
    train(cfg)
    assert outcome(folder) == unbroken


@pytest.mark.parametrize("freq", [1, 2])
@pytest.mark.parametrize("place", ["take 4", "take 6"])
def test_a_checkpoint_is_whole_no_sooner_than_the_models_before_it(
    tmp_path: Path, unbroken: dict[str, Any], place: str, freq: int
) -> None:
    """The model of step 2 is still being written in step 3, and so is the checkpoint of step 2 then."""

    def die(there: str) -> None:
        if there == place:
            os._exit(9)

    cfg = config(tmp_path, f"checkpoint.freq={freq}", "trainer.overwrite=replace")
    assert killed(lambda: train(cfg, at=die)) == 9
    saved = {step_of(path) for path in checkpoint_folders(tmp_path / "runs" / "a")}
    assert all(
        (tmp_path / f"runs/a/global_step_{step}/actor/model.safetensors").exists() for step in saved if step % 2 == 0
    )
    train(cfg)
    assert outcome(tmp_path / "runs" / "a") == unbroken


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("place", ["take 4", "take 5", "validate 4", "validate 6"])
def test_a_run_goes_on_from_any_place_in_a_step(
    tmp_path: Path, unbroken: dict[str, Any], place: str, loop: str
) -> None:
    def die(there: str) -> None:
        if there == place:
            os._exit(9)

    cfg = config(tmp_path, "checkpoint.freq=1", "checkpoint.async_save=false")
    assert killed(lambda: train(cfg, loop, die)) == 9
    last = train(cfg, loop)
    assert outcome(tmp_path / "runs" / "a") == unbroken
    assert (
        last.log == []
        if place == "validate 6"
        else last.log[0] == f"learn {5 if place[-1] == '4' and place[0] == 'v' else place[-1]}"
    )
    record = json.loads((tmp_path / "runs" / "a" / "run.json").read_text())
    assert len(record["starts"]) == 2


def test_an_error_in_a_step_leaves_the_checkpoint_before_it(tmp_path: Path, unbroken: dict[str, Any]) -> None:
    def fail(place: str) -> None:
        if place == "take 5":
            raise RewardError("reward failed")

    cfg = config(tmp_path)
    with pytest.raises(RewardError):
        train(cfg, at=fail)
    train(cfg)
    assert outcome(tmp_path / "runs" / "a") == unbroken


# What is complete, and what is not gone on from.


def faults(cfg: RunConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        train(cfg)
    return str(caught.value)


def test_a_complete_run_is_refused_and_a_longer_one_goes_on(tmp_path: Path) -> None:
    train(config(tmp_path))
    assert "that is complete: it ended at step 6 -- to go on, raise trainer.total" in faults(config(tmp_path))
    longer = train(config(tmp_path, "trainer.total_training_steps=8"))
    assert longer.log == ["learn 7", "publish 7", "learn 8", "publish 8"]
    assert [row["step"] for row in read_metrics(tmp_path / "runs" / "a" / "metrics.jsonl")] == list(range(9))
    whole = tmp_path / "whole"
    whole.mkdir()
    assert train(config(whole, "trainer.total_training_steps=8")).weight == longer.weight


def test_a_run_without_a_checkpoint_is_refused_as_before_with_the_reason(tmp_path: Path) -> None:
    train(config(tmp_path, "checkpoint.freq=0"))
    text = faults(config(tmp_path, "trainer.total_training_steps=8"))
    assert "holds a run already, without a complete checkpoint to go on from (it has none)" in text


def test_disable_starts_afresh_and_keeps_to_the_rules_of_folders(tmp_path: Path) -> None:
    train(config(tmp_path))
    longer = ("trainer.total_training_steps=8", "trainer.resume_mode=disable")
    assert "holds a run already --" in faults(config(tmp_path, *longer))
    assert len(train(config(tmp_path, *longer, "trainer.overwrite=replace")).log) == 16


def test_what_differs_is_refused_all_at_once_unless_it_is_named(tmp_path: Path) -> None:
    train(config(tmp_path))
    more = ["trainer.total_training_steps=8", "trainer.test_freq=4", "actor.optim.lr=0.5", "data.train_batch_size=32"]
    text = faults(config(tmp_path, *more))
    assert text.startswith("2 faults") and "trainer.test_freq" not in text
    assert "actor.optim.lr: 0.5 -- was 1e-06 when" in text and "add actor.optim.lr to trainer.resume_changes" in text
    assert "data.train_batch_size: 32 -- was 64" in text
    allowed = "trainer.resume_changes=[actor.optim.lr,data.train_batch_size]"
    assert len(train(config(tmp_path, *more, allowed)).log) == 4


def test_a_numbered_run_goes_on_in_its_own_folder(tmp_path: Path) -> None:
    cfg = config(tmp_path, "trainer.overwrite=number", "checkpoint.freq=1", "checkpoint.async_save=false")
    train(cfg)

    def die(place: str) -> None:
        if place == "take 4":
            os._exit(9)

    assert killed(lambda: train(cfg, at=die)) == 9
    assert train(cfg).log[0] == "learn 4"
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"a", "a-2"}


def test_a_path_is_gone_on_from_in_a_new_folder_and_then_from_there(tmp_path: Path, unbroken: dict[str, Any]) -> None:
    train(config(tmp_path, "checkpoint.keep_last=5"))
    from_path = (f"trainer.resume_mode={tmp_path}/runs/a/checkpoints/step_000002", "trainer.experiment_name=b")

    def die(place: str) -> None:
        if place == "take 6":
            os._exit(9)

    cfg = config(tmp_path, *from_path, "checkpoint.freq=1")
    assert killed(lambda: train(cfg, at=die)) == 9
    assert train(cfg).log == ["learn 6", "publish 6"]
    rows = outcome(tmp_path / "runs" / "b")["rows"]
    assert rows == [row for row in unbroken["rows"] if row["step"] > 2]


def test_a_run_goes_back_to_an_older_checkpoint_of_its_own(tmp_path: Path, unbroken: dict[str, Any]) -> None:
    train(config(tmp_path, "checkpoint.keep_last=5"))
    back = f"trainer.resume_mode={tmp_path}/runs/a/checkpoints/step_000002"
    again = train(config(tmp_path, back))
    assert again.log[0] == "learn 3" and outcome(tmp_path / "runs" / "a") == unbroken
    assert sorted(map(step_of, checkpoint_folders(tmp_path / "runs" / "a"))) == [4, 6]


# Broken checkpoints.


def damage(path: Path, how: str) -> str:
    """Break one checkpoint; what is said about it."""
    file = path / "actor" / "weights"
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
        return "weights has"
    if how == "missing":
        file.unlink()
        return "weights is missing"
    if how == "no manifest":
        (path / "manifest.json").unlink()
        return "manifest.json is missing"
    if how == "manifest":
        (path / "manifest.json").write_text('{"a": 1}')
        return "manifest.json is no list of files"
    state = bytearray((path / "state.json").read_bytes())
    state[len(state) // 2] ^= 1
    (path / "state.json").write_bytes(state)
    return "state.json has another checksum"


@pytest.mark.parametrize("how", ["truncated", "missing", "no manifest", "manifest", "flipped"])
def test_a_broken_checkpoint_is_named_and_passed_over(
    tmp_path: Path, unbroken: dict[str, Any], how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config(tmp_path, "checkpoint.async_save=false", "checkpoint.freq=1")

    def die(place: str) -> None:
        if place == "take 6":
            os._exit(9)

    assert killed(lambda: train(cfg, at=die)) == 9
    said = damage(tmp_path / "runs" / "a" / "checkpoints" / "step_000005", how)
    assert train(cfg).log[0] == "learn 5"
    out = capsys.readouterr().out
    assert "passed over a broken checkpoint" in out and said in out
    assert outcome(tmp_path / "runs" / "a") == unbroken


def test_a_checkpoint_whose_bytes_the_ranks_find_wrong_is_passed_over(
    tmp_path: Path, unbroken: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    class Checks(Trained):
        def start(self, checkpoint: Checkpoint | None = None) -> None:
            if checkpoint and zlib.crc32((checkpoint.path / "actor/weights").read_bytes()) != (
                checkpoint.marks["actor/weights"].crc32
            ):
                raise BrokenCheckpoint(f"{checkpoint.path}: actor/weights is not as it was written")
            super().start(checkpoint)

    cfg = config(tmp_path, "trainer.total_training_steps=4")
    session.run(cfg, Checks)
    file = tmp_path / "runs" / "a" / "checkpoints" / "step_000004" / "actor" / "weights"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1, *file.read_bytes()[1:]]))
    cfg = config(tmp_path)
    session.run(cfg, Checks)
    assert "step_000004: actor/weights is not as it was written" in capsys.readouterr().out
    found = outcome(tmp_path / "runs" / "a")
    assert found["rows"][-1] == unbroken["rows"][-1] and found["saves"] == unbroken["saves"]


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    train(config(tmp_path))
    path = tmp_path / "runs" / "a" / "checkpoints" / "step_000006"
    text = (path / "state.json").read_text().replace('"format": 1', '"format": 2')
    (path / "state.json").write_text(text)
    marks = json.loads((path / "manifest.json").read_text())
    marks["state.json"] = {"size": len(text), "crc32": zlib.crc32(text.encode())}
    (path / "manifest.json").write_text(json.dumps(marks))
    with pytest.raises(CheckpointError, match="has format 2, and this version reads 1"):
        read_checkpoint(path)


# Which are kept, and disks that are full.


def test_the_newest_and_the_best_are_kept(tmp_path: Path, unbroken: dict[str, Any]) -> None:
    best = ["checkpoint.keep_best=reward/mean", "checkpoint.freq=1", "checkpoint.keep_last=1"]
    train(config(tmp_path, *best))
    means = {row["step"]: row["reward/mean"] for row in unbroken["rows"] if row["step"]}
    kept = sorted(map(step_of, checkpoint_folders(tmp_path / "runs" / "a")))
    top = max(means, key=lambda step: means[step])
    assert kept == sorted({top, STEPS}) and (tmp_path / "runs/a/checkpoints/latest").read_text() == "step_000006\n"


def test_a_checkpoint_that_cannot_be_written_is_said_counted_and_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tries = 0

    def fail(place: str) -> None:
        nonlocal tries
        if place == "finish_save":
            tries += 1
            if tries == 2:
                raise CheckpointError("rank 0: no space left on device")

    train(config(tmp_path, "checkpoint.async_save=false"), at=fail)
    assert sorted(map(step_of, checkpoint_folders(tmp_path / "runs" / "a"))) == [2, 6]
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "step_000004 COULD NOT BE WRITTEN (rank 0: no space left" in said and "1 failed" in said
    rows = read_metrics(tmp_path / "runs" / "a" / "metrics.jsonl")
    assert [row.get("checkpoint/failures", 0.0) for row in rows] == [0.0] * 5 + [1.0] * 2


def test_newest_of_a_folder_without_any(tmp_path: Path) -> None:
    assert newest(tmp_path).checkpoint is None and newest(tmp_path).passed_over == ()


# The best step, and the end of a run that no longer improves.

EARLY = ["trainer.early_stop.metric=val/accuracy", "trainer.test_freq=1", "trainer.total_training_steps=30"]


def accuracies(folder: Path) -> dict[int, float]:
    rows = read_metrics(folder / "metrics.jsonl")
    return {int(row["step"]): row["val/accuracy"] for row in rows if "val/accuracy" in row and row["step"]}


def last_step(values: dict[int, float], patience: int, min_delta: float = 0.0) -> tuple[int, int]:
    """(step that ends the run, best step), said once more by hand."""
    best_step, best = 0, -float("inf")
    for step, value in values.items():
        if value > best + min_delta:
            best_step, best = step, value
        if sum(best_step < other <= step for other in values) == patience:
            return step, best_step
    return max(values), best_step


@pytest.mark.parametrize(("patience", "min_delta"), [(2, 0.0), (3, 0.0), (3, 2.5)])
def test_a_run_ends_once_validation_no_longer_improves(
    tmp_path: Path, patience: int, min_delta: float, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [*EARLY, f"trainer.early_stop.patience={patience}", f"trainer.early_stop.min_delta={min_delta}"]
    folder = tmp_path / "runs" / "a"
    cfg = config(tmp_path, *more, "checkpoint.freq=5", "checkpoint.keep_best=val/accuracy", "checkpoint.keep_last=1")
    train(cfg)
    values = accuracies(folder)
    ended, best = last_step(values, patience, min_delta)
    assert max(values) == ended < 30 and (folder / "final").is_dir()
    there = newest(folder).checkpoint
    assert there is not None and there.step == ended
    top = max(values, key=lambda step: (values[step], step))
    assert {top, ended} <= set(map(step_of, checkpoint_folders(folder)))
    status = json.loads((folder / "status.json").read_text())
    assert f"was best at step {best}" in status["message"] and f"at step {top}, in {folder}" in status["message"]
    assert f"ended after step {ended}: val/accuracy was best at step {best}" in capsys.readouterr().out
    assert "that is complete" in faults(cfg), "the run is over"
    train(config(tmp_path, *more, f"trainer.early_stop.patience={patience + 2}"))
    longer = accuracies(folder)
    assert max(longer) == last_step(longer, patience + 2, min_delta)[0] > ended, "more patience goes on"


@pytest.mark.parametrize("more", [["checkpoint.freq=2"], ["checkpoint.freq=2", "checkpoint.keep_best=val/accuracy"]])
@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.slow)])
def test_r1_a_run_that_ends_early_and_is_killed_ends_at_the_same_step(
    tmp_path: Path, more: list[str], every: int
) -> None:
    more = [*EARLY, *more, "trainer.early_stop.patience=2", "trainer.overwrite=replace", "trainer.save_freq=-1"]
    (tmp_path / "whole").mkdir()
    train(config(tmp_path / "whole", *more))
    unbroken, number, ended = outcome(tmp_path / "whole" / "runs" / "a"), 5, 9
    while ended == 9:
        folder = tmp_path / str(number)
        folder.mkdir()
        cfg = config(folder, *more)

        def killed_there(cfg: RunConfig = cfg, folder: Path = folder, number: int = number) -> None:
            kill_at_event(folder / "runs", number)
            train(cfg)

        ended = killed(killed_there)
        if ended == 9:
            killed(lambda cfg=cfg: train(cfg))
            assert outcome(folder / "runs" / "a") == unbroken, number
        number += every
    assert ended == 0 and number > 40


def test_a_run_that_was_killed_before_its_last_save_makes_it_and_more_patience_goes_on(tmp_path: Path) -> None:
    more, folder = [*EARLY, "checkpoint.freq=20", "trainer.save_freq=-1"], tmp_path / "runs" / "a"
    cfg = config(tmp_path, *more, "trainer.early_stop.patience=2")
    train(cfg)
    values, whole = accuracies(folder), outcome(folder)
    there = newest(folder).checkpoint
    assert there is not None and there.step == max(values) and there.state["is_last"]
    shutil.rmtree(folder / "final")
    train(cfg)
    assert outcome(folder) == whole and "final" in whole["saves"]
    train(config(tmp_path, *more, "trainer.early_stop.patience=4"))
    longer = accuracies(folder)
    assert max(longer) == last_step(longer, 4)[0] > max(values)


def test_counts_go_on_in_another_folder(tmp_path: Path) -> None:
    more = [*EARLY, "trainer.early_stop.patience=2", "checkpoint.freq=1"]
    train(config(tmp_path, *more))
    values = accuracies(tmp_path / "runs" / "a")
    ended = max(values)
    path = tmp_path / "runs" / "a" / "checkpoints" / f"step_{ended - 1:06d}"
    train(config(tmp_path, *more, f"trainer.resume_mode={path}", "trainer.experiment_name=b"))
    assert accuracies(tmp_path / "runs" / "b") == {ended: values[ended]}


def test_a_metric_that_the_run_does_not_measure_ends_it_at_once_with_the_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keep_best: .reward/men. -- .* use one of reward/mean") as caught:
        train(config(tmp_path, "checkpoint.keep_best=reward/men", "checkpoint.best_mode=max"))
    assert len(caught.value.faults) == 1
    other = tmp_path / "other"
    other.mkdir()
    cfg = config(other, "trainer.early_stop.metric=val/accuracy/nobody")
    with pytest.raises(ConfigError, match=r"early_stop.metric: .val/accuracy/nobody. -- .* use one of val/accuracy"):
        train(cfg)
    assert not (other / "runs" / "a" / "metrics.jsonl").exists(), "refused before work starts"
