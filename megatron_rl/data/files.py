"""Rows of the files that a config names, and one report of all rows that cannot be used, by file and number.

A folder that Hugging Face `datasets` wrote with save_to_disk is read as one file; that package is not needed.
No torch and no tokenizer here: `megatron-rl check` may look at the files on a login node.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.config.checks.data_paths import GIVE, data_files, dataset_shards
from megatron_rl.data.formats import read_arrow, read_file
from megatron_rl.errors import DataError
from megatron_rl.messages import first_lines

NUM_SHOWN = 10


class DataRow(NamedTuple):
    """One row: plain Python values, and where they stand."""

    file: str
    number: int
    """From 1: the line of a JSONL file, else the row (of all shards of a folder; a CSV file's header is none)."""
    values: dict[str, Any]
    fault: str | None = None
    """Why the row cannot be used; then there are no values."""

    @property
    def where(self) -> str:
        return f"{self.file} row {self.number}"


class BadRow(DataError):
    """What is wrong with one row. Loaders collect these in one DataError that names the files and rows."""


def refuse_bad_rows(bad: Sequence[tuple[DataRow, str]], num_rows: int, what: str) -> None:
    """Raise a DataError that counts the bad (row, reason) and shows the first NUM_SHOWN, if there are any."""
    if not bad:
        return
    head = f"{len(bad)} of {num_rows} {what} rows cannot be used:"
    lines = first_lines((f"{row.where}: {reason}" for row, reason in bad), NUM_SHOWN)
    raise DataError("\n".join([head, *lines]))


def read_rows(paths: Sequence[str], what: str) -> list[DataRow]:
    """All rows of the files, one file after the other. `what` names the set in errors ("data.train_files").

    Paths may be patterns (checks/data_paths.py); formats.py says what each kind of file holds. A row that cannot be
    read comes with its fault, so that loaders can name it together with rows that are bad for other reasons.

    Raises DataError: a file that is missing, unreadable, empty, of another kind or named twice (all such files at
    once), or no file at all.
    """
    if not paths:
        raise DataError(f"{what}: no file is given -- {GIVE}")
    files, faults = data_files(what, paths)
    rows: list[DataRow] = []
    reasons = [f"{fault.value}: {fault.reason} -- {fault.cure}" for fault in faults]
    for path in files:
        try:
            found = _read(path)
            if not found:
                raise DataError(f"{path}: the file holds no rows -- write rows to it, or take it out of {what}")
            rows += found
        except DataError as fault:
            reasons.append(str(fault))
    if reasons:
        head = f"{what}: {len(reasons)} of {len(files) + len(faults)} files cannot be read:"
        raise DataError("\n".join([head, *reasons]))
    return rows


def find_value(values: dict[str, Any], key: str) -> Any:
    """The column `key`; else, where the key has dots, what they lead to through mappings; else None."""
    if values.get(key) is not None:
        return values[key]
    head, dot, rest = key.partition(".")
    inner = values.get(head)
    return find_value(inner, rest) if dot and isinstance(inner, dict) else None


def _read(path: Path) -> list[DataRow]:
    if not path.is_dir():
        return [DataRow(str(path), *record) for record in read_file(path)]
    shards, reason, cure = dataset_shards(path)
    if reason:
        raise DataError(f"{path}: {reason} -- {cure}")
    records = [record for shard in shards for record in read_arrow(shard)]
    return [DataRow(str(path), number, record.values, record.fault) for number, record in enumerate(records, start=1)]
