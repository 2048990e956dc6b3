"""Faults of a checkpoint's files."""

from __future__ import annotations

import zlib
from pathlib import Path

from megatron_rl.types import FileMark
from megatron_rl.weights.marked_files import file_faults

CONTENTS = {"actor/a": b"12345", "actor/b": b"", "ranks/c": b"9" * 100}
MARKS = {name: FileMark(len(data), zlib.crc32(data)) for name, data in CONTENTS.items()}


def _write(folder: Path) -> None:
    for name, data in CONTENTS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


def test_each_file_is_checked_by_one_rank(tmp_path: Path):
    _write(tmp_path)
    assert [file_faults(tmp_path, MARKS, (rank, 2)) for rank in range(2)] == [[], []]
    for name in CONTENTS:
        (tmp_path / name).write_bytes(b"other")
    faults = [file_faults(tmp_path, MARKS, (rank, 2)) for rank in range(2)]
    assert sorted(fault.split(":")[0] for of_rank in faults for fault in of_rank) == [
        str(tmp_path / name) for name in CONTENTS
    ]
    assert [len(of_rank) for of_rank in faults] == [2, 1]


def test_a_fault_says_what_it_is(tmp_path: Path):
    _write(tmp_path)
    (tmp_path / "actor/a").write_bytes(b"12346")
    (tmp_path / "actor/b").unlink()
    (tmp_path / "ranks/c").write_bytes(b"9" * 99)
    assert file_faults(tmp_path, MARKS, (0, 1)) == [
        f"{tmp_path}/actor/a: its bytes are not those that were written (checksum)",
        f"{tmp_path}/actor/b: cannot be read: No such file or directory",
        f"{tmp_path}/ranks/c: has 99 bytes, and 100 were written",
    ]
