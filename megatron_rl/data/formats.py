"""What each kind of file holds, as plain Python values; a row that cannot be read comes with the reason.

Parquet and Arrow
    Their writers give every struct of a column the fields of all its structs, null where a row had none. Those
    nulls are taken out again at every depth, so that a row is what it was before it was written: the arguments of
    one tool call do not show those of another. A field that the user had set to null goes with them (nothing tells
    the two apart). What stays: elements of lists, values of map columns, a struct without any field left ({}), and
    JSON text, which is text here.
JSON
    A null is the user's and stays. NaN, Infinity, numbers beyond a float's range, a key that stands twice in one
    object and half a surrogate pair are faults of their row.
CSV
    All values are text; an empty field is no value. The first record names the columns.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.config.checks.data_paths import kind_of, stem_of
from megatron_rl.errors import DataError, MissingDependency
from megatron_rl.messages import first_of

Values = dict[str, Any]
"""Column -> value of one row, as its writer meant it: plain Python values of any kind"""
SURROGATE = re.compile("[\ud800-\udfff]")
SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
NO_SPACE = re.compile(r"[^ \t\n\r]")
NO_PLAIN_FORM = (ValueError, KeyError, TypeError, OverflowError, NotImplementedError)
"""What pyarrow raises for values that Python has no plain form of."""
LFS_POINTER = b"version https://git-lfs"


class Record(NamedTuple):
    """One row of a file."""

    number: int
    """From 1: the line of a JSONL file, else the row (a CSV file's header is none)."""
    values: Values
    fault: str | None = None
    """Why the row cannot be used; then there are no values."""


def read_file(path: Path) -> list[Record]:
    """All rows of a file. Raises DataError for one that is no file of its kind."""
    kind = kind_of(path)
    try:
        with path.open("rb") as file:
            head = file.read(len(LFS_POINTER))
        if head == LFS_POINTER:
            raise DataError(f"{path}: this is Git LFS's pointer to a file, not the file -- run `git lfs pull`")
        if kind == ".parquet":
            return _read_parquet(path)
        if kind == ".arrow":
            return read_arrow(path)
        text = _text(path, kind.endswith(".gz"))
    except OSError as error:
        raise DataError(
            f"{path}: not readable ({error.strerror or error}) -- check the disk and permissions"
        ) from error
    if kind.startswith(".csv"):
        return _csv(path, text)
    if kind.startswith(".json") and not kind.startswith(".jsonl"):
        return _json(path, text)
    if text.lstrip().partition("\n")[0].strip() == "[":
        cure = f"name it {stem_of(path)}.json, or write one {{...}} a line"
        raise DataError(f"{path}: holds a list over several lines -- {cure}")
    return _jsonl(text)


# Parquet and Arrow.


def _read_parquet(path: Path) -> list[Record]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingDependency(f"{path}: reading parquet needs pyarrow -- pip install pyarrow") from error
    try:
        # ParquetFile, not read_table: that one would take `name=value` folders of the path for columns.
        with pq.ParquetFile(path) as file:
            table = file.read()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not readable as parquet ({_first_line(error)}) -- write the file again") from error
    return _table_rows(path, table)


def read_arrow(path: Path) -> list[Record]:
    """All rows of a file in Arrow's stream or file format."""
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
            return _table_rows(path, table)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not readable as Arrow ({_first_line(error)}) -- write the file again") from error


def _table_rows(path: Path, table: Any) -> list[Record]:
    twice = _twice(table.schema)
    if twice:
        raise DataError(f"{path}: {_listed(twice)} twice in its columns, so one would be lost -- rename or drop one")
    unpadders = {field.name: _unpadder(field.type) for field in table.schema}

    def record(number: int, values: Values) -> Record:
        kept = {name: value for name, value in values.items() if value is not None}
        return Record(number, {name: _unpad(unpadders[name], value) for name, value in kept.items()})

    try:
        rows = table.to_pylist(maps_as_pydicts="strict")
    except NO_PLAIN_FORM:
        return [_one_by_one(table, index, record) for index in range(table.num_rows)]
    return [record(number, values) for number, values in enumerate(rows, start=1)]


def _one_by_one(table: Any, index: int, record: Callable[[int, Values], Record]) -> Record:
    """Rows of a table in which some value has no plain Python form."""
    values: Values = {}
    faults: list[str] = []
    for name in table.column_names:
        try:
            values[name] = table.column(name)[index].as_py(maps_as_pydicts="strict")
        except UnicodeDecodeError as error:
            place = len(error.object[: error.start].decode("utf-8")) + 1
            faults.append(
                f"{name!r} is not valid Unicode at character {place} -- repair the text, or leave the row out"
            )
        except NO_PLAIN_FORM as error:
            reason = str(error.args[0]) if error.args else type(error).__name__
            faults.append(f"{name!r} cannot be read: {reason} -- write the column in another type")
    return Record(index + 1, {}, "; ".join(faults)) if faults else record(index + 1, values)


Unpadder = Callable[[Any], Any]


def _unpad(unpadder: Unpadder | None, value: Any) -> Any:
    return value if unpadder is None or value is None else unpadder(value)


def _unpadder(kind: Any) -> Unpadder | None:
    """A function that removes the padding of an Arrow type's values; None if the type has no padding."""
    import pyarrow as pa
    import pyarrow.types as at

    if at.is_struct(kind):
        fields = {field.name: _unpadder(field.type) for field in kind}
        return lambda value: {name: _unpad(fields[name], part) for name, part in value.items() if part is not None}
    if at.is_map(kind):
        inner = _unpadder(kind.item_type)
        return inner and (lambda value: {key: _unpad(inner, part) for key, part in value.items()})
    if at.is_dictionary(kind) or at.is_run_end_encoded(kind):
        return _unpadder(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return _unpadder(kind.storage_type)
    if at.is_nested(kind) and hasattr(kind, "value_type"):
        inner = _unpadder(kind.value_type)
        return inner and (lambda value: [_unpad(inner, part) for part in value])
    return None


def _twice(fields: Any, prefix: str = "") -> list[str]:
    """Duplicate names among the columns, or among the fields of one struct at any depth."""
    from pyarrow.types import is_nested

    found = [prefix + name for name, count in Counter(field.name for field in fields).items() if count > 1]
    for field in fields:
        if is_nested(field.type):
            inner = [field.type.field(number) for number in range(field.type.num_fields)]
            found += _twice(inner, f"{prefix}{field.name}.")
    return found


# JSON.


class _Decoder:
    """Reads JSON values and records what a reader would otherwise silently drop or invent."""

    def __init__(self) -> None:
        self._faults: list[str] = []
        self._decoder = json.JSONDecoder(
            object_pairs_hook=self._mapping, parse_float=self._number, parse_constant=self._constant
        )

    def read(self, text: str, start: int) -> tuple[Any, int, str | None]:
        """(the value that begins at `start`, where it ends, what is wrong with it).

        Raises ValueError: no JSON value begins there.
        """
        self._faults = []
        try:
            value, end = self._decoder.raw_decode(text, start)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        if SURROGATE_ESCAPE.search(text, start, end):
            self._faults += half_surrogates(value)
        return value, end, "; ".join(dict.fromkeys(self._faults)) or None

    def _mapping(self, pairs: list[tuple[str, Any]]) -> Values:
        values = dict(pairs)
        if len(values) != len(pairs):
            twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
            self._faults.append(f"{_listed(twice)} twice in one object, so one value would be lost -- keep one")
        return values

    def _number(self, text: str) -> float:
        value = float(text)
        if math.isinf(value):
            self._faults.append(f"{text} is beyond the range of a number -- write it as text")
        return value

    def _constant(self, text: str) -> float:
        self._faults.append(f"{text} is no value of JSON -- write null, or leave the key out")
        return float(text)


def json_text(text: str) -> tuple[Any, str | None]:
    """(the value that a text holds as JSON, what is wrong with it): as strict as rows of a JSON file.

    Raises ValueError: the text is not JSON.
    """
    text = text.strip()
    value, end, fault = _Decoder().read(text, 0)
    if end < len(text):
        raise ValueError(f"text after its end at character {end + 1}")
    return value, fault


def half_surrogates(value: object, where: str = "") -> list[str]:
    """What is wrong with texts, at any depth, that hold half of a surrogate pair: they are no text in any encoding."""
    if isinstance(value, str):
        found = SURROGATE.search(value)
        if found is None:
            return []
        place = f"at character {found.start() + 1} ({found.group()!a}, half of a surrogate pair)"
        return [f"{where or 'a key'} is not valid Unicode {place} -- repair the text, or leave the row out"]
    if isinstance(value, list):
        return [fault for n, item in enumerate(value) for fault in half_surrogates(item, f"{where}[{n}]")]
    if isinstance(value, dict):
        dot = "." if where else ""
        inner = [(item, f"{where}{dot}{ascii(name)[1:-1]}") for name, item in value.items()]
        return [
            fault for item, place in [*((name, "") for name in value), *inner] for fault in half_surrogates(item, place)
        ]
    return []


def _record(number: int, value: Any, fault: str | None) -> Record:
    if not isinstance(value, dict):
        fault = f"a JSON {type(value).__name__}, not an object -- write one {{...}} for each row"
    return Record(number, {}, fault) if fault else Record(number, value)


def _jsonl(text: str) -> list[Record]:
    decoder = _Decoder()
    records: list[Record] = []
    # Split at newlines only: str.splitlines also splits at characters that JSON allows inside a string.
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.strip()
        if not line:
            continue
        try:
            value, end, fault = decoder.read(line, 0)
            if end < len(line):
                raise ValueError(f"text after the object at column {end + 1}")
        except ValueError as error:
            records.append(Record(number, {}, f"not JSON: {error} -- write one {{...}} a line"))
            continue
        records.append(_record(number, value, fault))
    return records


def _json(path: Path, text: str) -> list[Record]:
    """A list of objects, or one object a line."""
    cure = "write a list of objects [{...}, ...], or one object a line"
    if not text.lstrip().startswith("["):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return _jsonl(text)
        held = f"one object with {_shown(list(value))}" if isinstance(value, dict) else f"one {type(value).__name__}"
        raise DataError(f"{path}: holds {held}, not rows -- {cure}; a single row belongs in a .jsonl file")
    return list(_list_items(text))


def _list_items(text: str) -> Iterator[Record]:
    decoder = _Decoder()
    number = 0
    place = _next(text, text.index("[") + 1)
    mark = text[place : place + 1]
    while mark != "]":
        number += 1
        start = place
        try:
            value, end, fault = decoder.read(text, start)
            place = _next(text, end)
            mark = text[place : place + 1]
            if mark not in (",", "]"):
                raise ValueError("expected , or ] after it")
        except ValueError as error:
            yield _broken(text, start, number, str(error))
            return
        yield _record(number, value, fault)
        place = _next(text, place + 1) if mark == "," else place
    if text[place + 1 :].strip():
        yield _broken(text, place + 1, number + 1, "text after the end of the list")


def _broken(text: str, place: int, number: int, reason: str) -> Record:
    line = text.count("\n", 0, place) + 1
    return Record(number, {}, f"not JSON: {reason} (begins at line {line}) -- repair it; rows after it are not read")


def _next(text: str, place: int) -> int:
    """Index of the first character from `place` on that is not a space."""
    found = NO_SPACE.search(text, place)
    return len(text) if found is None else found.start()


# CSV, and what text is.


def _csv(path: Path, text: str) -> list[Record]:
    records = _csv_records(text)
    try:
        header = next(records, None)
    except csv.Error as error:
        raise DataError(f"{path}: not readable as CSV ({error}) -- write the file again") from error
    if header is None:
        return []
    twice = [name for name, count in Counter(header).items() if count > 1]
    if twice:
        raise DataError(
            f"{path}: {_listed(twice)} twice in its header, so one column would be lost -- rename or drop one"
        )
    other = next((mark for mark in ";\t|" if len(header) == 1 and mark in header[0]), None)
    if other is not None:
        raise DataError(f"{path}: its header {header[0]!r} has no comma but {other!r} -- separate columns by commas")
    rows: list[Record] = []
    try:
        for number, fields in enumerate(records, start=1):
            if len(fields) == len(header):
                values = {name: field for name, field in zip(header, fields, strict=True) if field}
                rows.append(Record(number, values))
            else:
                fault = f"{len(fields)} fields, where the header has {len(header)} -- quote fields that hold commas"
                rows.append(Record(number, {}, fault))
    except csv.Error as error:
        fault = f"not CSV: {error} -- repair the quotes; rows after it are not read"
        rows.append(Record(len(rows) + 1, {}, fault))
    return rows


def _csv_records(text: str) -> Iterator[list[str]]:
    """Records that are not blank; fields may be of any length."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield from filter(None, csv.reader(io.StringIO(text, newline=""), strict=True))
    finally:
        csv.field_size_limit(limit)


def _text(path: Path, packed: bool) -> str:
    content = path.read_bytes()
    if packed:
        try:
            content = gzip.decompress(content)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path}: not readable as gzip ({_first_line(error)}) -- pack it again") from error
    elif content.startswith(b"\x1f\x8b"):
        raise DataError(f"{path}: the file is packed by gzip -- name it {path.name}.gz")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}: not UTF-8 text (byte {error.start}, line {line}) -- write the file as UTF-8"
        ) from error


def _listed(names: list[str]) -> str:
    return f"{_shown(names)} stand{'s' if len(names) == 1 else ''}"


def _shown(names: list[str]) -> str:
    return first_of(map(ascii, names), 5)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
