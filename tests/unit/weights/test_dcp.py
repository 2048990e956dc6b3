"""Rectangles of tensors in files: what is written is read, by us and by torch; what is broken is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from megatron_rl.errors import CheckpointError
from megatron_rl.types import FileMark
from megatron_rl.weights.dcp import (
    METADATA,
    Chunk,
    SavedTensors,
    WrittenChunk,
    metadata_of,
    tensor_differences,
    write_chunks,
)
from megatron_rl.weights.marked_files import mark_of, write_file

WHOLE = torch.arange(12.0).view(4, 3)
TENSORS = {"w": ((4, 3), torch.float32), "steps": ((), torch.int64)}


def _chunks() -> list[list[Chunk]]:
    """Two ranks' shares."""
    one = [Chunk("w", (0, 0), WHOLE[:2]), Chunk("w", (2, 0), WHOLE[2:3, :1]), Chunk("steps", (), torch.tensor(7))]
    return [one, [Chunk("w", (2, 1), WHOLE[2:3, 1:]), Chunk("w", (3, 0), WHOLE[3:])]]


def _save(folder: Path) -> list[FileMark]:
    written: list[WrittenChunk] = []
    marks: list[FileMark] = []
    for rank, chunks in enumerate(_chunks()):
        of_rank, mark = write_chunks(folder / f"rank_{rank}.distcp", chunks)
        written += of_rank
        marks.append(mark)
    return [*marks, write_file(folder / METADATA, metadata_of(TENSORS, written))]


def test_any_rectangle_is_read_from_the_files_of_all_ranks(tmp_path: Path):
    marks = _save(tmp_path)
    assert marks == [mark_of(tmp_path / name) for name in ("rank_0.distcp", "rank_1.distcp", METADATA)]
    saved = SavedTensors(tmp_path)
    assert saved.shapes == {"w": (4, 3), "steps": ()}
    # A view whose rows lie apart, as a rectangle of a parameter may.
    memory, steps = torch.zeros(3, 5), torch.zeros((), dtype=torch.int64)
    saved.read([Chunk("w", (1, 1), memory[:, 2:4]), Chunk("steps", (), steps)])
    assert torch.equal(memory[:, 2:4], WHOLE[1:, 1:])
    assert not memory[:, :2].any() and not memory[:, 4:].any()
    assert int(steps) == 7


def test_torch_reads_it(tmp_path: Path):
    _save(tmp_path)
    state = {"w": torch.zeros(4, 3), "steps": torch.tensor(0)}
    load(state, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(state["w"], WHOLE) and int(state["steps"]) == 7


def test_only_files_with_wanted_rectangles_are_opened(tmp_path: Path):
    _save(tmp_path)
    (tmp_path / "rank_1.distcp").unlink()
    rows = torch.zeros(2, 3)
    SavedTensors(tmp_path).read([Chunk("w", (0, 0), rows)])
    assert torch.equal(rows, WHOLE[:2])
    with pytest.raises(CheckpointError, match=r"rank_1\.distcp: cannot be read: No such file"):
        SavedTensors(tmp_path).read([Chunk("w", (1, 0), torch.zeros(3, 3))])


def test_no_folder_depends_on_where_it_was_written(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert _save(tmp_path / "a") == _save(tmp_path / "b")


def test_numbers_that_no_rank_has_written_are_named(tmp_path: Path):
    written, _ = write_chunks(tmp_path / "rank_0.distcp", _chunks()[0])
    with pytest.raises(CheckpointError, match=r"not written each number once: w: 7 of 12 numbers"):
        metadata_of(TENSORS, written)
    with pytest.raises(CheckpointError, match=r"w: 14 of 12 numbers; steps: 2 of 1 numbers"):
        metadata_of(TENSORS, [*written, *written])


def test_broken_files_are_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"\.metadata: cannot be read: No such file"):
        SavedTensors(tmp_path)
    (tmp_path / METADATA).write_bytes(b"not a pickle")
    with pytest.raises(CheckpointError, match=r"\.metadata: is no metadata of a checkpoint"):
        SavedTensors(tmp_path)
    _save(tmp_path)
    data = (tmp_path / "rank_0.distcp").read_bytes()
    (tmp_path / "rank_0.distcp").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"rank_0\.distcp: (w|steps) cannot be read"):
        SavedTensors(tmp_path).read([Chunk("w", (0, 0), torch.zeros(4, 3)), Chunk("steps", (), torch.tensor(0))])


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"absent/a: cannot be written: No such file"):
        write_file(tmp_path / "absent/a", b"")
    with pytest.raises(CheckpointError, match=r"/dev/full: cannot be written: No space left"):
        write_chunks(Path("/dev/full"), _chunks()[0])


def test_differences_are_said_once_of_a_weight_and_its_moments():
    names = [f"{kind}/{name}" for kind in ("param", "exp_avg") for name in ("a", "b", "c")]
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = dict.fromkeys(names, ((2, 3), torch.float32))
    saved = {name: shape for name, (shape, _) in wanted.items()}
    assert tensor_differences(saved, wanted, "param") == []
    del saved["param/a"], saved["exp_avg/a"], saved["exp_avg/b"]
    saved |= {"param/c": (3, 2), "exp_avg/c": (3, 2), "param/d": (1,), "exp_avg/d": (1,)}
    wanted["steps"] = ((), torch.int64)
    assert tensor_differences(saved, wanted, "param") == [
        "a is not in the checkpoint",
        "exp_avg/b is not in the checkpoint",
        "steps is not in the checkpoint",
        "d is not in the model",
        "c is [3, 2] in the checkpoint, [2, 3] in the model",
    ]
