"""Reading a folder's safetensors: how much of its files stays in memory."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.models.layouts import Block
from megatron_rl.weights import safetensors
from megatron_rl.weights.safetensors import SafetensorsSource

MIB = 1 << 20


def _pages_of_files() -> int:
    """Bytes of this process that are pages of files."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("RssFile"))
    return int(line.split()[1]) << 10


def test_what_was_read_of_a_file_does_not_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors, "_MAPPED_BYTES", 8 * MIB)
    rows = torch.arange(96, dtype=torch.float32)[:, None].expand(96, MIB // 4).contiguous()
    save_file({"weight": rows}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    before, most = _pages_of_files(), 0
    for row in range(96):
        # No slice stays in use: it would keep its pages.
        assert float(source.read(Block("weight", (row, row + 1), None)).mean()) == row
        most = max(most, _pages_of_files() - before)
    assert most < 32 * MIB, most / MIB
