"""Files that are not what their names say."""

from __future__ import annotations

from pathlib import Path

LFS_HEAD = b"version https://git-lfs.github.com/spec/"


def broken_reason(path: Path, otherwise: str) -> str:
    """Why a file cannot be read: it is empty, or git-lfs has not fetched it; `otherwise` in every other case."""
    with path.open("rb") as file:
        start = file.read(len(LFS_HEAD))
    if start == LFS_HEAD:
        return "is a pointer of git-lfs, not the file itself (`git lfs pull` fetches it)"
    return otherwise if start else "is empty"
