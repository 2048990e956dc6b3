"""A rank's trace of a step by torch's profiler, with the phases of the step as its ranges (`trainer.profile`)."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_rl.observe.kernels import MARK, table_lines, time_by_phase


class StepTrace:
    """One step of this rank, from `begin` to `end`. Phases are told by `mark`."""

    def __init__(self, folder: Path, step: int, rank: int) -> None:
        """The files are <folder>/step_<step>_rank_<rank>.json.gz and .txt."""
        self._path = folder / f"step_{step:06d}_rank_{rank}"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile = profile(activities=activities)
        self._range: record_function | None = None
        self._profile.start()
        self.mark("between")

    def mark(self, phase: str) -> None:
        """From now on the step is in this phase."""
        self._close_range()
        self._range = record_function(MARK + phase)
        self._range.__enter__()

    def end(self) -> list[str]:
        """Write the trace and its table; the table's lines."""
        self._close_range()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        trace = self._path.with_suffix(".json.gz")
        self._profile.export_chrome_trace(str(trace))
        with gzip.open(trace, "rt") as file:
            lines = table_lines(time_by_phase(json.load(file)["traceEvents"]))
        self._path.with_suffix(".txt").write_text("\n".join(lines) + "\n")
        return lines

    def _close_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
