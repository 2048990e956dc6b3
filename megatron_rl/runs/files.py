"""What a run writes about itself: config.yaml, run.json, and the rows of metrics.jsonl and rollouts.jsonl."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config.load import dump_yaml, to_dict
from megatron_rl.config.run import RunConfig
from megatron_rl.observe.sinks import Sinks, cut_rows, open_sinks

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
ROLLOUTS_FILE = "rollouts.jsonl"
RECORD_FILE = "run.json"
"""Versions, commit, command line and time of the newest start, and the same of all starts."""


class RunFiles:
    """The files of one run folder. Nothing is written before `begin`."""

    def __init__(self, folder: Path, cfg: RunConfig) -> None:
        self._folder, self._cfg = folder, cfg
        self._sinks = Sinks([])
        self._samples_fail = False

    def begin(self, record: Mapping[str, object], first_step: int, goes_on: bool) -> None:
        """Open the files for rows from first_step on. record: of this start.

        goes_on: rows of earlier steps stay, later ones go; so does a last line that a kill has cut off.
        """
        cfg, path = self._cfg, self._folder / RECORD_FILE
        earlier = _starts(path) if goes_on else []
        _write(self._folder / CONFIG_FILE, dump_yaml(cfg))
        _write(path, json.dumps({**record, "starts": [*earlier, record]}, indent=2) + "\n")
        if goes_on:
            cut_rows(self._folder / ROLLOUTS_FILE, first_step)
        self._sinks = Sinks(
            open_sinks(
                cfg.trainer.logger,
                self._folder,
                project=cfg.trainer.project_name,
                experiment=cfg.trainer.experiment_name,
                first_step=first_step,
                settings=to_dict(cfg),
            )
        )

    def write_row(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's metrics, to every logger."""
        self._sinks.write(step, metrics)

    def write_samples(self, step: int, lines: Sequence[str]) -> None:
        """Lines of rollouts.jsonl. A disk that is full costs these samples, and not the run."""
        if not lines:
            return
        file = self._folder / ROLLOUTS_FILE
        try:
            with file.open("a", encoding="utf-8") as handle:
                handle.writelines(lines)
        except OSError as error:
            if not self._samples_fail:
                logger.warning("%s: samples of step %d are lost (%s); training goes on", file, step, error)
            self._samples_fail = True

    def close(self) -> None:
        """Close the loggers."""
        self._sinks.close()


def sample_lines(step: int, samples: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Rollouts of a step as lines of rollouts.jsonl."""
    return tuple(json.dumps({"step": step, **sample}, default=str) + "\n" for sample in samples)


def _starts(path: Path) -> list[Mapping[str, object]]:
    """The starts that a run.json has; none where a kill has left no whole file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["starts"]
    except (FileNotFoundError, ValueError, KeyError):
        return []


def _write(file: Path, content: str) -> None:
    """As a whole or not at all."""
    fresh = file.with_name(f".{file.name}.writing")
    try:
        fresh.write_text(content, encoding="utf-8")
        os.replace(fresh, file)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
