"""The folder that a conversion writes into: a name of its own until all is there, and a journal of what is.

    OUT.converting/           files, each renamed to its name once it is on the disk
        .journal              a line for the job, then one for each file that is complete
    OUT/                      the folder when everything is written; conversion.json lists sizes and checksums

A conversion that was broken off goes on after the last file of the journal.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import CheckpointError
from megatron_rl.types import FileMark
from megatron_rl.weights.companions import open_to_umask
from megatron_rl.weights.marked_files import mark_of, naming, sync_folder, write_file

RECORD = "conversion.json"
_JOURNAL = ".journal"
_PARTIAL = ".partial"


def facts_of(files: Sequence[Path]) -> list[list[object]]:
    """What tells these files from others: name, bytes and time of change of each."""
    return [[str(file), (stat := file.stat()).st_size, stat.st_mtime_ns] for file in files]


class Staging:
    """See the module. Raises CheckpointError if the output is there, or if what was broken off is another job."""

    def __init__(self, out: Path, job: Mapping[str, Any]) -> None:
        """job: what the output depends on, in JSON's types."""
        self.out, self.folder = out, out.with_name(out.name + ".converting")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise CheckpointError(f"{out}: is there already -- give the name of a new folder")
        self._job: dict[str, Any] = json.loads(json.dumps(job))
        self.records: dict[str, dict[str, Any]] = {}
        """File that is complete -> what the journal says of it."""
        with naming(self.folder, "made"):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._journal = self.folder / _JOURNAL
        if not self._journal.is_file():
            self._clear()
            write_file(self._journal, (json.dumps(self._job) + "\n").encode())
        else:
            self._resume()

    def _resume(self) -> None:
        lines = self._journal.read_text(encoding="utf-8").splitlines(keepends=True)
        # A line without its end was being written when the conversion was broken off.
        entries: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("\n")]
        if not entries or entries[0] != self._job:
            before = entries[0] if entries else {}
            names = [name for name in {**before, **self._job} if before.get(name) != self._job.get(name)]
            raise CheckpointError(
                f"{self.folder}: holds a conversion that was broken off and differs from this one in "
                f"{', '.join(names)} -- remove that folder, or repeat the command that began it"
            )
        for entry in entries[1:]:
            path = self.folder / entry["name"]
            if path.is_file() and mark_of(path) == FileMark(entry["size"], entry["crc32"]):
                self.records[entry["name"]] = entry
        self._clear()

    def _clear(self) -> None:
        """Remove what is no file of the journal."""
        for path in sorted(self.folder.rglob("*"), reverse=True):
            if path.is_dir():
                if not any(path.iterdir()):
                    path.rmdir()
            elif path != self._journal and str(path.relative_to(self.folder)) not in self.records:
                path.unlink()

    def partial(self, name: str) -> Path:
        """Where a file is while it is written."""
        path = self.folder / (name + _PARTIAL)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def complete(self, name: str, mark: FileMark, **facts: object) -> None:
        """Give a file that is on the disk its name, and note it. facts: further entries of its record."""
        os.replace(self.partial(name), self.folder / name)
        sync_folder((self.folder / name).parent)
        record = {"name": name, "size": mark.size, "crc32": mark.crc32, **facts}
        self.records[name] = json.loads(json.dumps(record))
        with naming(self._journal, "written"), self._journal.open("ab") as file:
            file.write((json.dumps(record) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())

    def finish(self, facts: Mapping[str, object]) -> None:
        """Move the folder to its name, with sizes and checksums of all files in RECORD. facts: further entries."""
        with naming(self.folder, "written"):
            open_to_umask(self.folder)
            self._journal.unlink()
            paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
            marks = {str(path.relative_to(self.folder)): self._mark(path) for path in paths}
            listed = {name: {"size": mark.size, "crc32": mark.crc32} for name, mark in marks.items()}
            write_file(self.folder / RECORD, json.dumps({**facts, "files": listed}, indent=1).encode())
            for folder in (self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())):
                sync_folder(folder)
            if self.out.exists():
                self.out.rmdir()
            self.folder.rename(self.out)
            sync_folder(self.out.parent)

    def _mark(self, path: Path) -> FileMark:
        record = self.records.get(str(path.relative_to(self.folder)))
        if record is not None:
            return FileMark(record["size"], record["crc32"])
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return mark_of(path)

    def discard(self) -> None:
        """Remove everything: the model cannot be converted, and nothing of it is worth keeping."""
        shutil.rmtree(self.folder, ignore_errors=True)
