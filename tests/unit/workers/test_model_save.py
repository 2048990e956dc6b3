"""The thread that writes a rank's files: what waits for it is bounded, and nothing waits for a disk that fails."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.errors import CheckpointError
from megatron_rl.weights.shard_files import TensorEntry
from megatron_rl.workers.model_save import ShardThread

TENSORS = {TensorEntry(f"t{number}", (16,), torch.float32): torch.full((16,), float(number)) for number in range(6)}
FILES = {f"file-{number}": tuple(TENSORS)[2 * number : 2 * number + 2] for number in range(3)}
FILE_BYTES = 2 * 16 * 4


def _put(folder: Path, max_bytes: int | None) -> tuple[ShardThread, list[str], threading.Thread]:
    """Puts all tensors in a thread of its own: (who writes, names of those that are put so far, who puts)."""
    writer, names = ShardThread(folder, FILES, max_bytes), list[str]()

    def put() -> None:
        for entry, tensor in TENSORS.items():
            writer.put(entry, tensor)
            names.append(entry.name)
        writer.seal()

    thread = threading.Thread(target=put)
    thread.start()
    return writer, names, thread


@pytest.mark.parametrize(("max_bytes", "count"), [(FILE_BYTES, 2), (None, 6)])
def test_no_more_waits_in_memory_than_is_allowed(tmp_path: Path, max_bytes: int | None, count: int) -> None:
    """The first file is a pipe, which nobody reads: its writer waits, and fails once somebody does."""
    os.mkfifo(tmp_path / "file-0")
    writer, names, thread = _put(tmp_path, max_bytes)
    thread.join(0.5)
    assert len(names) == count and thread.is_alive() == (count < 6) and not writer.written.done()
    reader = os.open(tmp_path / "file-0", os.O_RDONLY)
    thread.join(5.0)
    assert not thread.is_alive(), "an error of the disk lets the rank go on"
    with pytest.raises(CheckpointError, match="file-0: cannot be written: Illegal seek"):
        writer.written.result(5.0)
    os.close(reader)


def test_files_are_written_in_order_from_few_bytes(tmp_path: Path) -> None:
    writer, _, thread = _put(tmp_path, FILE_BYTES)
    writer.written.result(5.0)
    thread.join(5.0)
    stored = {name: tensor for file in FILES for name, tensor in load_file(tmp_path / file).items()}
    assert len(stored) == 6 and all(torch.equal(stored[entry.name], tensor) for entry, tensor in TENSORS.items())


def test_a_tensor_that_does_not_come_is_named(tmp_path: Path) -> None:
    writer = ShardThread(tmp_path, FILES)
    writer.put(*next(iter(TENSORS.items())))
    writer.seal()
    with pytest.raises(CheckpointError, match="t1 did not come"):
        writer.written.result(5.0)
