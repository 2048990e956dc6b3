"""status.json as it is written while a run goes on, and what it costs."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.cluster.stop import Stopped
from megatron_rl.errors import ClusterError, DataError
from megatron_rl.observe import run_status
from megatron_rl.observe.run_status import STATUS_FILE, LastCheckpoint, RunStatus, StatusWriter, read_status


def settled(folder: Path, is_there: Callable[[RunStatus], bool]) -> RunStatus:
    """The file once it says so; the thread that writes it may be late."""
    deadline = time.monotonic() + 5.0
    while not is_there(status := read_status(folder / STATUS_FILE)):
        assert time.monotonic() < deadline, status
        time.sleep(0.01)
    return status


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_status, "LEAST_S", 0.01)
    writer = StatusWriter(tmp_path)
    writer.begin(total=8, step=2)
    yield writer
    writer.close("done")


def test_the_file_is_there_at_once_and_says_starting(writer: StatusWriter, tmp_path: Path) -> None:
    status = read_status(tmp_path / STATUS_FILE)
    assert (status.phase, status.step, status.total, status.restarts) == ("starting", 2, 8, 0)
    assert status.checkpoint is None and status.seconds_a_step is None and status.trouble == []


def test_phases_that_run_beside_each_other_are_all_named(writer: StatusWriter, tmp_path: Path) -> None:
    with writer.during("reward"):
        with writer.during("old_logprobs"):
            settled(tmp_path, lambda status: status.phase == "reward + old_logprobs")
        settled(tmp_path, lambda status: status.phase == "reward")
    with writer.during("update"):
        settled(tmp_path, lambda status: status.phase == "update")


def test_an_error_ends_a_phase_too(writer: StatusWriter, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"), writer.during("reward"):
        raise ValueError("no")
    with writer.during("update"):
        settled(tmp_path, lambda status: status.phase == "update")


def test_rate_and_time_left_are_of_the_steps_since_the_loop_began(writer: StatusWriter, tmp_path: Path) -> None:
    time.sleep(0.3)  # data and workers: no part of a step
    writer.begin(total=8, step=2)
    time.sleep(0.05)
    writer.step_done(3)
    time.sleep(0.05)
    writer.step_done(4)
    status = settled(tmp_path, lambda status: status.step == 4)
    assert status.seconds_a_step is not None and 0.05 <= status.seconds_a_step < 0.15
    assert status.left_s == pytest.approx(4 * status.seconds_a_step)


def test_a_checkpoint_and_a_restart_are_told(writer: StatusWriter, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints/step_000004"
    folder.mkdir(parents=True)
    writer.checkpoint_done(LastCheckpoint.of(folder, 4))
    writer.step_done(5)
    with writer.during("update"):
        writer.restarted(1)
    status = settled(tmp_path, lambda status: status.restarts == 1)
    assert (status.phase, status.step) == ("starting", 5)
    assert status.checkpoint is not None and abs(status.checkpoint.time - time.time()) < 5
    assert (status.checkpoint.path, status.checkpoint.step) == ("checkpoints/step_000004", 4)
    writer.begin(total=8, step=4)
    assert settled(tmp_path, lambda status: status.step == 4).restarts == 1


def test_the_newest_warnings_are_kept(writer: StatusWriter, tmp_path: Path) -> None:
    logger = logging.getLogger("megatron_rl.somewhere")
    for number in range(7):
        logger.warning("trouble %d", number)
    logger.info("no trouble")
    status = settled(tmp_path, lambda status: len(status.trouble) == 5 and status.trouble[-1].endswith("6"))
    assert status.trouble[0].endswith("WARNING megatron_rl.somewhere: trouble 2")


@pytest.mark.parametrize(
    ("error", "phase", "message"),
    [
        (None, "done", None),
        (ClusterError("rank 3 died\nits log"), "failed", "ClusterError: rank 3 died"),
        (Stopped("stopped by SIGTERM after step 3"), "stopped", "stopped by SIGTERM after step 3"),
    ],
)
def test_the_end_is_told_as_it_is(
    writer: StatusWriter, tmp_path: Path, error: BaseException | None, phase: str, message: str | None
) -> None:
    with contextlib.suppress(ClusterError, Stopped), writer.told_end():
        if error is not None:
            raise error
    status = read_status(tmp_path / STATUS_FILE)
    assert (status.phase, status.message) == (phase, message)


def test_nothing_is_written_before_the_run_begins(tmp_path: Path) -> None:
    writer = StatusWriter(tmp_path)
    with writer.during("validate"):
        writer.step_done(1)
    writer.close("failed", "refused")
    writer.begin(total=3, step=0)
    assert not list(tmp_path.iterdir())


def test_the_end_is_written_and_nothing_after_it(writer: StatusWriter, tmp_path: Path) -> None:
    writer.close("failed", "ClusterError: rank 3 died")
    status = read_status(tmp_path / STATUS_FILE)
    assert (status.phase, status.message) == ("failed", "ClusterError: rank 3 died")
    with writer.during("save"):
        pass
    writer.close("done")
    assert read_status(tmp_path / STATUS_FILE) == status
    assert not [one for one in threading.enumerate() if one.name == "status"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [STATUS_FILE]


def test_a_writer_that_is_discarded_leaves_the_folder_alone(writer: StatusWriter, tmp_path: Path) -> None:
    writer.discard()
    (tmp_path / STATUS_FILE).unlink()
    with writer.during("update"):
        writer.step_done(3)
    writer.close("done")
    assert not list(tmp_path.iterdir())


def test_a_life_sign_is_written_without_any_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_status, "BEAT_S", 0.05)
    monkeypatch.setattr(run_status, "LEAST_S", 0.01)
    writer = StatusWriter(tmp_path)
    writer.begin(total=1, step=0)
    first = read_status(tmp_path / STATUS_FILE).updated
    settled(tmp_path, lambda status: status.updated > first)
    writer.close("done")


def test_many_changes_are_few_writes(tmp_path: Path) -> None:
    writer = StatusWriter(tmp_path)
    writer.begin(total=10**6, step=0)
    writes: list[float] = []
    original, writer._write = writer._write, lambda: (writes.append(time.monotonic()), original())[1]  # type: ignore[method-assign]
    start = time.monotonic()
    for step in range(1, 20_001):
        with writer.during("update"):
            pass
        writer.step_done(step)
    seconds = time.monotonic() - start
    writer.close("done")
    assert len(writes) <= seconds / run_status.LEAST_S + 3
    assert seconds / 20_000 < 1e-3, "a step's notes cost less than a millisecond"
    assert read_status(tmp_path / STATUS_FILE).step == 20_000


def test_a_folder_that_is_gone_is_one_warning_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_status, "LEAST_S", 0.01)
    folder = tmp_path / "run"
    folder.mkdir()
    writer = StatusWriter(folder)
    writer.begin(total=4, step=0)
    # One rename, because the writer's thread may be at a write: a folder emptied first may hold a file again.
    folder.rename(tmp_path / "elsewhere")
    for step in (1, 2, 3):
        writer.step_done(step)
        time.sleep(0.03)
    writer.close("done")
    assert [record.getMessage().split(" cannot")[0] for record in caplog.records] == [str(folder / STATUS_FILE)]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is no status"),
        ("[]", "is no status"),
        ('{"format": 2}', "another format than 1"),
        ('{"format": 1, "checkpoint": null}', "is no status"),
    ],
)
def test_a_file_that_is_no_status_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / STATUS_FILE).write_text(content)
    with pytest.raises(DataError, match=reason):
        read_status(tmp_path / STATUS_FILE)


def test_a_reader_never_sees_half_a_file(writer: StatusWriter, tmp_path: Path) -> None:
    for step in range(3, 60):
        writer.step_done(step)
        time.sleep(0.002)
        json.loads((tmp_path / STATUS_FILE).read_text())
