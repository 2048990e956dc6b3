"""Where metrics are written: always metrics.jsonl; TensorBoard, Weights & Biases and MLflow if configured."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from megatron_rl.errors import DataError, MissingDependency

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


class Sink(Protocol):
    """Writes the flat metrics of each step once."""

    @property
    def name(self) -> str:
        """The name in log messages."""
        ...

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """The exceptions that it raises if its disk or service fails."""
        ...

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


def require_sinks(names: Sequence[str]) -> None:
    """Import the packages of the named sinks, so that a missing or broken one is found before workers start.

    Raises MissingDependency with the pip command.
    """
    for name in names:
        if name != "console":
            _require(name, f"pip install {name}")


class Sinks:
    """Several sinks as one. A sink that fails is logged once and does not stop the run, since weights matter more."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self._missed: dict[str, int] = {}
        """name of a failing sink -> number of steps that it could not write"""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the step to every sink."""
        for sink in self._sinks:
            try:
                sink.write(step, metrics)
            except sink.errors as error:
                if sink.name not in self._missed:
                    logger.warning("%s: step %d could not be written (%s); training continues", sink.name, step, error)
                self._missed[sink.name] = self._missed.get(sink.name, 0) + 1
            else:
                self._caught_up(sink)

    def close(self) -> None:
        """Close every sink, and log how many steps each has missed."""
        for sink in self._sinks:
            try:
                sink.close()
            except sink.errors as error:
                logger.warning("%s: could not be closed (%s)", sink.name, error)
            else:
                self._caught_up(sink)
        for name, count in self._missed.items():
            logger.warning("%s: %d step(s) are missing", name, count)

    def _caught_up(self, sink: Sink) -> None:
        if isinstance(sink, JsonlSink) and self._missed.pop(sink.name, 0):
            logger.warning("%s: can be written again; no step is missing", sink.name)


def open_sinks(
    names: Sequence[str],
    run_dir: str | Path,
    *,
    project: str,
    experiment: str,
    first_step: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> list[Sink]:
    """The JSONL sink and the named ones (tensorboard, wandb, mlflow; console is ignored, since it is not a sink).

    first_step: the first step to be written; rows of an earlier run from this step on are removed. settings: the
    resolved config, for the services that show it. Raises MissingDependency with the pip command.
    """
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    sinks: list[Sink] = []
    if "tensorboard" in names:
        sinks.append(TensorBoardSink(folder / "tensorboard", first_step))
    if "wandb" in names:
        sinks.append(WandbSink(folder, project, experiment, settings or {}))
    if "mlflow" in names:
        sinks.append(MlflowSink(folder, project, experiment, settings or {}))
    return [JsonlSink(folder / METRICS_FILE, first_step), *sinks]


class JsonlSink:
    """One JSON object a step, on disk when `write` returns. Numbers that are not finite become null.

    Rows that could not be written (a full disk) are kept and written with the next ones.
    """

    name = METRICS_FILE
    errors = (OSError,)

    def __init__(self, path: str | Path, first_step: int = 0) -> None:
        """Keep the lines of steps before first_step; remove the others, and a last line that a kill cut off."""
        self._path = Path(path)
        if cut := cut_rows(self._path, first_step):
            logger.info("%s: removed %d line(s) of an earlier run from step %d on", self._path, cut, first_step)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._size = os.fstat(self._file).st_size
        self._rows: list[str] = []

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {
            "step": step,
            **{name: value if math.isfinite(value) else None for name, value in metrics.items()},
        }
        self._rows.append(json.dumps(row, allow_nan=False) + "\n")
        self._write_rows()

    def _write_rows(self) -> None:
        content = "".join(self._rows).encode()
        written = 0
        try:
            while written < len(content):
                written += os.write(self._file, content[written:])
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(content)
        self._rows.clear()

    def close(self) -> None:
        try:
            if self._rows:
                self._write_rows()
        finally:
            os.close(self._file)


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """Rows of a metrics.jsonl in file order; null is NaN. Raises DataError naming a line that is not a row."""
    rows: list[dict[str, float]] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        row = _row(line)
        if row is None:
            raise DataError(f"{path}, line {number}: {line[:80]!r} -- not a row of metrics -- delete the line")
        rows.append({name: math.nan if value is None else value for name, value in row.items()})
    return rows


def row_of(path: str | Path, step: int) -> dict[str, Any] | None:
    """The row of a step in a metrics.jsonl, whose last line a kill may have cut off; None if it is not there."""
    if not Path(path).exists():
        return None
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    rows = (row for line in reversed(lines) if line.endswith("\n") and (row := _row(line)))
    return next((row for row in rows if row["step"] == step), None)


def cut_rows(path: Path, first_step: int) -> int:
    """Remove the lines of a file of rows from a step on, and a last line that a kill cut off; how many."""
    kept, cut = _lines_before(path, first_step)
    if cut:
        fresh = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
        fresh.write_text("".join(kept), encoding="utf-8")
        fresh.replace(path)
    return cut


class TensorBoardSink:
    """Scalars in a new event file; TensorBoard hides steps of an earlier run from first_step on."""

    name = "tensorboard"
    errors = (OSError,)

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        _require("tensorboard", "pip install tensorboard")
        # Imported by name: a type checker sees no members in classes that protobuf generates.
        event_pb2 = import_module("tensorboard.compat.proto.event_pb2")
        summary_pb2 = import_module("tensorboard.compat.proto.summary_pb2")
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(folder))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=first_step, session_log=start))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A Weights & Biases run; a second start in the same folder continues the same W&B run.

    W&B takes no step twice: those that the start before has written stay as they are.
    """

    name = "wandb"

    def __init__(self, folder: Path, project: str, experiment: str, settings: Mapping[str, Any]) -> None:
        wandb = _require("wandb", "pip install wandb")
        self.errors = (OSError, wandb.Error)
        self._run = wandb.init(
            project=project,
            name=experiment,
            id=_kept_id(folder / "wandb_id"),
            resume="allow",
            dir=str(folder),
            config=dict(settings),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """An MLflow run at MLFLOW_TRACKING_URI; a second start in the same folder continues the same MLflow run.

    MLflow keeps every value that a metric was given: steps that the start before has written are not written again.
    """

    name = "mlflow"

    def __init__(self, folder: Path, project: str, experiment: str, settings: Mapping[str, Any]) -> None:
        self._mlflow = _require("mlflow", "pip install mlflow")
        self.errors = (OSError, self._mlflow.MlflowException)
        self._mlflow.set_experiment(project)
        kept = folder / "mlflow_id"
        self._written = -1
        """Newest step of the start before."""
        if kept.exists():
            run = self._mlflow.start_run(run_id=kept.read_text().strip())
            client = self._mlflow.MlflowClient()
            # Every step has this one, and a history costs a request.
            for name in {"time/step"} & run.data.metrics.keys() or run.data.metrics:
                history = client.get_metric_history(run.info.run_id, name)
                self._written = max([self._written, *(int(one.step) for one in history)])
            return
        run = self._mlflow.start_run(run_name=experiment)
        kept.write_text(run.info.run_id)
        self._mlflow.log_dict(dict(settings), "config.json")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self._written:
            self._mlflow.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def _require(package: str, command: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise MissingDependency(
            f"trainer.logger: {package!r} -- the package {package} cannot be imported ({error}) "
            f"-- {command}, or leave it out of trainer.logger"
        ) from error


def _kept_id(path: Path) -> str:
    if not path.exists():
        path.write_text(uuid4().hex[:12])
    return path.read_text().strip()


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _lines_before(path: Path, first_step: int) -> tuple[list[str], int]:
    """Lines of steps before first_step, and the number of other lines."""
    if not path.exists():
        return [], 0
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and (row := _row(line)) and row["step"] < first_step]
    return kept, len(lines) - len(kept)
