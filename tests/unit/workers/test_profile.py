"""A rank's trace of a step: the file that torch's profiler writes, and the table that is made of it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch

from megatron_rl.observe.kernels import OUTSIDE
from megatron_rl.workers.phases import RankMemory
from megatron_rl.workers.profile import StepTrace


def test_a_step_is_traced_phase_by_phase(tmp_path: Path) -> None:
    """Phases are told as memory enters them; backward passes count where they run; the table is beside the trace."""
    memory, weight = RankMemory(), torch.randn(200, 200, requires_grad=True)
    memory.trace = trace = StepTrace(tmp_path / "profile", 3, 1)
    memory.enter("forward", "actor")
    out = (weight @ weight).sum()
    memory.enter("update", "actor")
    out.backward()
    lines = trace.end()
    with gzip.open(tmp_path / "profile" / "step_000003_rank_1.json.gz", "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"phase/forward", "phase/update", "aten::mm"} <= names
    assert (tmp_path / "profile" / "step_000003_rank_1.txt").read_text().splitlines() == lines
    rows = {line.split()[0]: dict(zip(lines[0].split(), line.split(), strict=True)) for line in lines[1:-1]}
    assert set(rows) - {"between", OUTSIDE} == {"forward", "update"}
    assert float(rows["forward"]["matmul"]) > 0.0 and float(rows["update"]["matmul"]) > 0.0
