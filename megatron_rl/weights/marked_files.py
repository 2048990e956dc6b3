"""Files with marks: size and checksum, by which a whole file is told from a broken one; on the disk when written."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megatron_rl.errors import CheckpointError
from megatron_rl.observe.beat import beat
from megatron_rl.types import FileMark

_PIECE = 16 << 20


@contextmanager
def naming(path: Path, action: str) -> Generator[None]:
    """Name the file in an error of the operating system, as a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be {action}: {error.strerror or error}") from error


class MarkedFile(io.FileIO):
    """A new file that knows the checksum of what was written to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w")
        self.failure: OSError | None = None
        self._crc32 = 0

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # type: ignore[override]
        """All of `data`: the system may take less at once. An error is kept as well: torch.save hides it."""
        view = memoryview(data).cast("B")
        size = len(view)
        try:
            while view:
                count = super().write(view)
                self._crc32 = zlib.crc32(view[:count], self._crc32)
                view = view[count:]
        except OSError as error:
            self.failure = error
            raise
        return size

    def finish(self) -> FileMark:
        """Have it on the disk; its size and checksum."""
        os.fsync(self.fileno())
        return FileMark(self.tell(), self._crc32)


def mark_of(path: Path) -> FileMark:
    """Size and checksum of a file as it is. Raises OSError."""
    crc32, buffer = 0, bytearray(_PIECE)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            beat(f"checksum of {path.name}")
            crc32 = zlib.crc32(memoryview(buffer)[:count], crc32)
        return FileMark(file.tell(), crc32)


def write_file(path: Path, data: bytes) -> FileMark:
    """A small file, on the disk when this returns. Raises CheckpointError."""
    with naming(path, "written"), MarkedFile(path) as file:
        file.write(data)
        return file.finish()


def sync_folder(folder: Path) -> None:
    """Have the names of a folder's files on the disk. Raises CheckpointError."""
    with naming(folder, "written"):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def file_faults(folder: Path, marks: Mapping[str, FileMark], share: tuple[int, int]) -> list[str]:
    """What is wrong with some files of a checkpoint. share: (index, count) of the parts that they are dealt to."""
    faults: list[str] = []
    for name in sorted(marks)[share[0] :: share[1]]:
        path, wanted = folder / name, marks[name]
        try:
            mark = mark_of(path)
        except OSError as error:
            faults.append(f"{path}: cannot be read: {error.strerror}")
            continue
        if mark.size != wanted.size:
            faults.append(f"{path}: has {mark.size} bytes, and {wanted.size} were written")
        elif mark != wanted:
            faults.append(f"{path}: its bytes are not those that were written (checksum)")
    return faults
