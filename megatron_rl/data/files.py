"""Read rows from parquet, JSONL and Arrow files, and report bad rows by file and number.

A folder that Hugging Face `datasets` wrote with save_to_disk is read as one file; that package is not needed.
No torch and no tokenizer here: `megatron-rl check` may look at the files on a login node.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.config.files import dataset_shards
from megatron_rl.errors import DataError, MissingDependency

SUFFIXES = (".parquet", ".jsonl", ".arrow")
NUM_SHOWN = 10


class Row(NamedTuple):
    """One row: plain Python values, and where they stand."""

    file: str
    number: int
    """Row of a parquet or Arrow file (of all shards of a folder), or line of a JSONL file, from 1."""
    values: dict[str, Any]

    @property
    def where(self) -> str:
        return f"{self.file} row {self.number}"


class BadRow(DataError):
    """What is wrong with one row. Loaders collect these in one DataError that names the files and rows."""


def refuse_bad_rows(bad: Sequence[tuple[Row, str]], num_rows: int, what: str) -> None:
    """Raise a DataError that counts the bad (row, reason) and shows the first NUM_SHOWN, if there are any."""
    if not bad:
        return
    head = f"{len(bad)} of {num_rows} {what} rows cannot be used:"
    lines = [f"  {row.where}: {reason}" for row, reason in bad[:NUM_SHOWN]]
    if len(bad) > NUM_SHOWN:
        lines.append(f"  ... and {len(bad) - NUM_SHOWN} more")
    raise DataError("\n".join([head, *lines]))


def read_rows(paths: Sequence[str], what: str) -> list[Row]:
    """All rows of the files, one file after the other. `what` names the set in errors ("data.train_files").

    Parquet and Arrow values arrive as plain Python values. Blank lines of a JSONL file are no rows.

    Raises DataError: a file that is missing, unreadable, empty or of another kind (all such files at once),
    no file at all, or lines that are not JSON objects.
    """
    if not paths:
        raise DataError(f"{what}: no file is given -- name at least one {' or '.join(SUFFIXES)} file")
    rows: list[Row] = []
    faults: list[str] = []
    for path in paths:
        try:
            found = _read_file(Path(path).expanduser())
            if not found:
                raise DataError(f"{path}: the file holds no rows -- write rows to it, or take it out of {what}")
            rows += found
        except DataError as fault:
            faults.append(str(fault))
    if faults:
        raise DataError("\n".join([f"{what}: {len(faults)} of {len(paths)} files cannot be read:", *faults]))
    return rows


def _read_file(path: Path) -> list[Row]:
    if path.is_dir():
        shards, reason, cure = dataset_shards(path)
        if reason:
            raise DataError(f"{path}: {reason} -- {cure}")
        values = [row for shard in shards for row in _read_arrow(shard)]
        return [Row(str(path), number, row) for number, row in enumerate(values, start=1)]
    if path.suffix not in SUFFIXES:
        kind = f"files of kind {path.suffix}" if path.suffix else "files without a suffix"
        raise DataError(f"{path}: {kind} are not read -- give a {' or '.join(SUFFIXES)} file")
    if not path.is_file():
        raise DataError(f"{path}: there is no such file -- give the path of a {path.suffix} file")
    if path.suffix == ".jsonl":
        return _read_jsonl(path)
    values = _read_parquet(path) if path.suffix == ".parquet" else _read_arrow(path)
    return [Row(str(path), number, row) for number, row in enumerate(values, start=1)]


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingDependency(f"{path}: reading parquet needs pyarrow -- pip install pyarrow") from error
    try:
        # ParquetFile, not read_table: that one would take `name=value` folders of the path for columns.
        with pq.ParquetFile(path) as file:
            return file.read().to_pylist(maps_as_pydicts="strict")
    except (pa.ArrowException, OSError) as error:
        reason = _first_line(error)
        raise DataError(f"{path}: not readable as parquet ({reason}) -- write the file again") from error


def _read_arrow(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise MissingDependency(f"{path}: reading Arrow files needs pyarrow -- pip install pyarrow") from error
    try:
        with pa.memory_map(str(path)) as source:
            # `datasets` writes the streaming format, other programs the one with a magic number at its head.
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            table = (pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)).read_all()
            return table.to_pylist(maps_as_pydicts="strict")
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not readable as Arrow ({_first_line(error)}) -- write the file again") from error


def _read_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    bad: list[tuple[Row, str]] = []
    try:
        # Split at newlines only: str.splitlines also splits at characters that JSON allows inside a string.
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start}) -- write the file as UTF-8") from error
    except OSError as error:
        raise DataError(f"{path}: not readable ({error.strerror}) -- check its permissions") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = Row(str(path), number, {})
        try:
            values = json.loads(line)
        except ValueError as error:
            bad.append((row, f"not JSON: {error}"))
            continue
        if not isinstance(values, dict):
            bad.append((row, f"a JSON {type(values).__name__}, not an object -- write one {{...}} a line"))
            continue
        rows.append(row._replace(values=values))
    refuse_bad_rows(bad, len(bad) + len(rows), path.name)
    return rows


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
