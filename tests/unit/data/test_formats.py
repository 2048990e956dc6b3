"""Rows arrive as they were written, from every kind of file; bad ones are named by file, row, reason and cure."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl.config.checks.data_paths import data_files, stem_of
from megatron_rl.data.files import read_rows
from megatron_rl.errors import DataError
from tests.helpers.data import write_jsonl
from tests.unit.data.test_files import save_dataset

WHAT = "data.train_files"

CALLS = [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}]
ROWS: list[dict[str, Any]] = [
    {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": CALLS}],
        "tools": [{"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}],
        "extra_info": {"index": 1, "hints": [{"text": "x"}, {"link": "y"}]},
        "reward_model": {"ground_truth": {"city": "Oslo"}},
    },
    {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "image", "path": "c"}]}],
        "tools": [{"name": "book", "parameters": {"properties": {"guests": {"enum": [1, 2], "deep": {"a": {}}}}}}],
        "reward_model": {"ground_truth": {"guests": 2}},
        "metadata": {"level": "hard"},
    },
]
ROWS[1]["messages"][0]["content"] = "b"


def write_arrow(path: Path, rows: list[dict[str, Any]]) -> str:
    table = pa.Table.from_pylist(rows, schema=union(rows))
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    return str(path)


def union(rows: list[dict[str, Any]]) -> pa.Schema:
    """The schema of all rows, whichever has a column first."""
    return pa.unify_schemas([pa.Table.from_pylist([row]).schema for row in rows], promote_options="permissive")


@pytest.mark.parametrize("kind", ["parquet", "arrow", "folder"])
def test_padding_is_taken_out_at_every_depth(tmp_path: Path, kind: str):
    """The same rows are the same from JSONL, parquet, Arrow and a saved data set."""
    rows = [json.loads(json.dumps(row)) for row in ROWS]
    rows[1]["tools"][0]["parameters"]["properties"]["guests"].pop("deep")  # parquet has no struct without fields
    if kind == "parquet":
        path = tmp_path / "a.parquet"
        pq.write_table(pa.Table.from_pylist(rows, schema=union(rows)), path)
    elif kind == "arrow":
        path = Path(write_arrow(tmp_path / "a.arrow", rows))
    else:
        path = save_dataset(tmp_path / "saved", [*rows, *rows])
        rows = [*rows, *rows]
        # from_pylist takes the columns of the first row, as save_to_disk does with the features.
        for row in rows:
            row.pop("metadata", None)
    assert [row.values for row in read_rows([str(path)], WHAT)] == rows
    assert [row.values for row in read_rows([write_jsonl(tmp_path / "a.jsonl", rows)], WHAT)] == rows


@pytest.mark.parametrize(
    ("kind", "written", "read"),
    [
        pytest.param(pa.struct([("a", pa.int64()), ("b", pa.int64())]), {"a": 1, "b": None}, {"a": 1}, id="struct"),
        pytest.param(pa.struct([("a", pa.int64())]), {"a": None}, {}, id="struct-that-becomes-empty"),
        pytest.param(pa.struct([("a", pa.struct([("b", pa.int8())]))]), {"a": None}, {}, id="null-struct"),
        pytest.param(pa.struct([("a", pa.struct([("b", pa.int8())]))]), {"a": {}}, {"a": {}}, id="empty-struct"),
        pytest.param(pa.list_(pa.int64()), [1, None], [1, None], id="list-element-stays"),
        pytest.param(
            pa.list_(pa.struct([("a", pa.int8()), ("b", pa.int8())])), [{"a": 1}, None], [{"a": 1}, None], id="structs"
        ),
        pytest.param(
            pa.large_list(pa.list_(pa.struct([("a", pa.int8())]), 1)), [[{"a": None}]], [[{}]], id="fixed-size-list"
        ),
        pytest.param(pa.map_(pa.string(), pa.int8()), {"k": None}, {"k": None}, id="map-value-stays"),
        pytest.param(
            pa.map_(pa.string(), pa.struct([("a", pa.int8()), ("b", pa.int8())])),
            {"k": {"a": 1}, "l": None},
            {"k": {"a": 1}, "l": None},
            id="struct-in-map",
        ),
        pytest.param(pa.string(), '{"a": null}', '{"a": null}', id="json-text-stays"),
        pytest.param(pa.struct([("a", pa.null()), ("b", pa.bool_())]), {"b": False}, {"b": False}, id="null-type"),
        pytest.param(
            pa.struct([("a", pa.string()), ("b", pa.int8())]), {"a": "", "b": 0}, {"a": "", "b": 0}, id="falsy"
        ),
    ],
)
def test_what_goes_and_what_stays(tmp_path: Path, kind: pa.DataType, written: Any, read: Any):
    given = list(written.items()) if pa.types.is_map(kind) else written
    path = tmp_path / "a.arrow"
    table = pa.table({"x": pa.array([given], kind), "none": pa.array([None], pa.string())})
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)
    (row,) = read_rows([str(path)], WHAT)
    assert (row.values, row.fault) == ({"x": read}, None)


def test_a_null_of_json_is_the_users(tmp_path: Path):
    row = {"messages": [{"role": "user", "content": "a", "name": None, "calls": [{"x": {"y": None}}, None]}], "z": None}
    for name, text in (("a.jsonl", json.dumps(row)), ("a.json", json.dumps([row], indent=1))):
        (tmp_path / name).write_text(text)
        assert [found.values for found in read_rows([str(tmp_path / name)], WHAT)] == [row]


GOOD = '{"prompt": "say hi", "answer": "hi"}'

BAD_JSON = [
    (
        "half-pair",
        r'{"prompt": "cut \ud83d"}',
        r"prompt is not valid Unicode at character 5 ('\ud83d', half",
        "repair the",
    ),
    ("low-half", r'{"prompt": "\ude00"}', r"prompt is not valid Unicode at character 1 ('\ude00'", "repair the text"),
    ("upper-case", r'{"prompt": "ab\uDBFF!"}', "prompt is not valid Unicode at character 3", "repair the text"),
    ("two-highs", r'{"prompt": "\ud83d\ud83d\ude00"}', "prompt is not valid Unicode at character 1", "repair the text"),
    ("message", r'{"prompt": [{"role": "user", "content": "\ud83d"}]}', "prompt[0].content is not valid", "repair"),
    ("tools", r'{"tools": [{"a": {"b": ["x", "\ud83d"]}}]}', "tools[0].a.b[1] is not valid Unicode", "repair the text"),
    ("truth", r'{"reward_model": {"ground_truth": "\ud800"}}', "reward_model.ground_truth is not valid", "repair"),
    ("extra", r'{"extra_info": {"a": "\udfff"}}', "extra_info.a is not valid Unicode", "repair the text"),
    ("key", r'{"extra_info": {"a\ud83d": 1}}', "a key is not valid Unicode at character 2", "repair the text"),
    ("twice", '{"prompt": "a", "prompt": "b"}', "'prompt' stands twice in one object", "keep one"),
    ("twice-same", '{"answer": 1, "answer": 1}', "'answer' stands twice in one object", "keep one"),
    ("twice-deep", '{"a": [{"b": {"c": 1, "c": 2}}]}', "'c' stands twice in one object", "keep one"),
    ("twice-escaped", r'{"a": 1, "\u0061": 2}', "'a' stands twice in one object", "keep one"),
    ("nan", '{"answer": NaN}', "NaN is no value of JSON", "write null, or leave the key out"),
    ("infinity", '{"a": {"b": [Infinity]}}', "Infinity is no value of JSON", "write null"),
    ("minus", '{"a": -Infinity}', "-Infinity is no value of JSON", "write null"),
    ("huge", '{"answer": 1e999}', "1e999 is beyond the range of a number", "write it as text"),
    ("list", '[{"prompt": "a"}]', "a JSON list, not an object", "write one {...} for each row"),
    ("null", "null", "a JSON NoneType, not an object", "write one {...} for each row"),
    ("deep", "[" * 100_000, "nested too deeply", ""),
]


def where_and_why(path: str) -> list[str]:
    return [f"{row.where}: {row.fault}" for row in read_rows([path], WHAT) if row.fault is not None]


@pytest.mark.parametrize(("bad", "reason", "cure"), [case[1:] for case in BAD_JSON], ids=[case[0] for case in BAD_JSON])
@pytest.mark.parametrize("kind", ["jsonl", "json", "jsonl.gz"])
def test_a_bad_json_row_is_named(tmp_path: Path, kind: str, bad: str, reason: str, cure: str):
    rows = [GOOD, bad, GOOD]
    text = "[" + ",\n".join(rows) + "]" if kind == "json" else "\n".join(rows)
    path = tmp_path / f"a.{kind}"
    path.write_bytes(gzip.compress(text.encode()) if kind.endswith("gz") else text.encode())
    (said,) = where_and_why(str(path))
    assert said.startswith(f"{path} row 2: ")
    assert reason in said and cure in said
    assert said.isascii()


def test_all_faults_of_a_row_are_said(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [r'{"a": NaN, "a": "\ud83d", "b": "\ud83d"}'])
    (said,) = where_and_why(path)
    assert all(part in said for part in ("NaN is no", "'a' stands twice", "a is not valid", "b is not valid"))


def test_whole_pairs_and_escaped_backslashes_are_text(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [r'{"a": "\ud83d\ude00", "b": "\\ud83d"}'])
    assert read_rows([path], WHAT)[0].values == {"a": "\U0001f600", "b": r"\ud83d"}


def text_file(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(text.encode())


def columns(*names: str) -> Callable[[Path], object]:
    return lambda path: pq.write_table(pa.table([pa.array(["a"])] * len(names), names=list(names)), path)


def struct_twice(path: Path) -> None:
    inner = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["c", "c"])
    table = pa.table({"a": pa.ListArray.from_arrays(pa.array([0, 1]), inner)})
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)


BAD_FILES: list[tuple[str, Callable[[Path], object], str, str]] = [
    ("a.parquet", columns("prompt", "answer", "prompt"), "'prompt' stands twice in its columns", "rename or drop one"),
    ("b.parquet", columns("x", "x", "y", "y"), "'x', 'y' stand twice in its columns", "rename or drop one"),
    ("a.arrow", struct_twice, "'a.item.c' stands twice in its columns", "rename or drop one"),
    ("a.csv", text_file("prompt,answer,prompt\n1,2,3\n"), "'prompt' stands twice in its header", "rename or drop one"),
    ("semicolon.csv", text_file("prompt;answer\na;b\n"), "has no comma but ';'", "separate columns by commas"),
    ("only-header.csv", text_file("prompt,answer\n"), "the file holds no rows", "write rows to it"),
    ("empty.csv", text_file(""), "the file holds no rows", "write rows to it"),
    ("empty.json", text_file("[]"), "the file holds no rows", "write rows to it"),
    (
        "wrapped.json",
        text_file('{"data": [{"prompt": "a"}]}'),
        "holds one object with 'data'",
        "write a list of objects",
    ),
    (
        "columns.json",
        text_file('{"prompt": ["a"], "answer": ["b"]}'),
        "one object with 'prompt', 'answer'",
        "write a list",
    ),
    ("one.json", text_file('{\n "prompt": "a"\n}'), "holds one object with 'prompt'", "belongs in a .jsonl file"),
    ("text.json", text_file('"abc"'), "holds one str, not rows", "write a list of objects"),
    ("list.jsonl", text_file('[\n {"a": 1},\n {"a": 2}\n]'), "holds a list over several lines", "name it list.json"),
    (
        "cut.jsonl.gz",
        lambda path: path.write_bytes(gzip.compress(b'{"a": 1}' * 99)[:-20]),
        "not readable as gzip",
        "pack it",
    ),
    ("plain.json.gz", text_file("[]"), "not readable as gzip", "pack it again"),
    ("packed.jsonl", lambda path: path.write_bytes(gzip.compress(b'{"a": 1}')), "is packed by gzip", "packed.jsonl.gz"),
    ("lfs.parquet", text_file("version https://git-lfs.github.com/spec/v1\n"), "Git LFS's pointer", "git lfs pull"),
    ("latin.csv", lambda path: path.write_bytes(b"a,b\n1,\xe9\n"), "not UTF-8 text (byte 6, line 2)", "as UTF-8"),
    ("wide.jsonl", lambda path: path.write_bytes('{"a": 1}'.encode("utf-16")), "not UTF-8 text (byte 0", "as UTF-8"),
    ("a.tsv", text_file("a\tb\n"), "files of kind .tsv are not read", "write it with commas, as .csv"),
    ("a.jsonl.zst", text_file("x"), "files of kind .zst are not read", "pack it as .gz"),
    ("a.parquet.gz", text_file("x"), "files of kind .parquet.gz are not read", "give a .parquet, .arrow, .jsonl"),
    ("a.txt", text_file("x"), "files of kind .txt are not read", "give a .parquet, .arrow, .jsonl"),
    ("noending", text_file("x"), "files without a suffix are not read", "give a .parquet, .arrow, .jsonl"),
    ("parts.parquet", lambda path: (path.mkdir(), columns("x")(path / "0.parquet")), "no state.json", "/*.parquet"),
]


@pytest.mark.parametrize(("name", "write", "reason", "cure"), BAD_FILES, ids=[case[0] for case in BAD_FILES])
def test_a_bad_file_is_named(tmp_path: Path, name: str, write: Callable[[Path], object], reason: str, cure: str):
    write(tmp_path / name)
    with pytest.raises(DataError) as error:
        read_rows([str(tmp_path / name), write_jsonl(tmp_path / "good.jsonl", [{"a": 1}])], WHAT)
    head, *lines = str(error.value).splitlines()
    assert head == f"{WHAT}: 1 of 2 files cannot be read:"
    assert len(lines) == 1 and lines[0].startswith(f"{tmp_path / name}: ")
    assert reason in lines[0] and cure in lines[0].partition(" -- ")[2]


@pytest.mark.parametrize(
    ("name", "content", "number", "reason", "cure"),
    [
        ("a.csv", b'prompt,answer\na,b\n"c, d",e,f\n', 2, "3 fields, where the header has 2", "quote fields that hold"),
        ("a.csv", b"prompt,answer\na,b\n\nc\n", 2, "1 fields, where the header has 2", "quote fields"),
        ("a.csv", b'prompt,answer\na,b\n"c,d\n', 2, "not CSV: unexpected end of data", "repair the quotes"),
        ("a.csv", b'prompt,answer\na,b\n"c"x,d\n', 2, "not CSV: ',' expected after '\"'", "repair the quotes"),
        (
            "a.json",
            b'[{"a": 1},\n {"a": 2}\n {"a": 3}]',
            2,
            "not JSON: expected , or ] after it (begins at line 2)",
            "repair",
        ),
        ("a.json", b'[{"a": 1}, {"a": 2},]', 3, "not JSON: Expecting value", "repair it; rows after it are not read"),
        ("a.json", b'[{"a": 1}, {"a": ', 2, "not JSON", "repair it"),
        ("a.json", b'[{"a": 1}] [{"a": 2}]', 2, "text after the end of the list", "repair it"),
        ("a.json", b'{"a": 1}\n{"a": 2', 2, "not JSON", "write one {...} a line"),
        (
            "a.jsonl",
            b'{"a": 1}\r\n{"a": 2} {"a": 3}\r\n',
            2,
            "text after the object at column 9",
            "write one {...} a line",
        ),
    ],
)
def test_a_row_that_breaks_the_format_is_named(
    tmp_path: Path, name: str, content: bytes, number: int, reason: str, cure: str
):
    path = tmp_path / name
    path.write_bytes(content)
    (said,) = where_and_why(str(path))
    assert said.startswith(f"{path} row {number}: ") and reason in said and cure in said.partition(" -- ")[2]


def test_text_that_is_no_unicode_in_a_parquet_file_is_named_with_its_row(tmp_path: Path):
    column = pa.array([b"fine", b"caf\xc3\xa9 \xed\xa0\xbd", None, b"\xff"]).view(pa.string())
    keys = pa.array([[("k", 1)], [("k", 1)], [("k", 1), ("k", 2)], None], pa.map_(pa.string(), pa.int8()))
    pq.write_table(pa.table({"prompt": column, "extra_info": keys}), tmp_path / "a.parquet")
    said = where_and_why(str(tmp_path / "a.parquet"))
    assert [line.partition(".parquet ")[2].partition(" -- ")[0] for line in said] == [
        "row 2: 'prompt' is not valid Unicode at character 6",
        "row 3: 'extra_info' cannot be read: Converting to Python dictionary is not supported in strict mode when "
        "duplicate keys are present (duplicate key was 'k').",
        "row 4: 'prompt' is not valid Unicode at character 1",
    ]
    assert read_rows([str(tmp_path / "a.parquet")], WHAT)[0].values == {"prompt": "fine", "extra_info": {"k": 1}}


def test_csv_values_are_text_and_an_empty_field_is_none(tmp_path: Path):
    path = tmp_path / "a.csv"
    long = "x" * 200_000
    path.write_bytes(f'\ufeffprompt,answer,n\r\n"a ""b"",\r\nc",007,\r\n\r\n{long},NA,1.50\r\n'.encode())
    rows = read_rows([str(path)], WHAT)
    assert [row.values for row in rows] == [
        {"prompt": 'a "b",\r\nc', "answer": "007"},
        {"prompt": long, "answer": "NA", "n": "1.50"},
    ]
    assert [row.number for row in rows] == [1, 2]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_text_files_are_read_packed_or_not(tmp_path: Path, kind: str, packed: bool, bom: bytes, newline: str):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "h\u00e9", "answer": "3"}]
    lines = {
        "jsonl": [json.dumps(row, ensure_ascii=False) for row in rows],
        "json": json.dumps(rows, indent=2, ensure_ascii=False).splitlines(),
        "csv": ["prompt,answer", *(",".join(row.values()) for row in rows)],
    }[kind]
    content = bom + (newline.join(lines) + newline).encode()
    path = tmp_path / (f"SUMS.v1.{kind.upper()}" + (".gz" if packed else ""))
    path.write_bytes(gzip.compress(content) if packed else content)
    found = read_rows([str(path)], WHAT)
    assert [row.values for row in found] == rows and [row.number for row in found] == [1, 2]
    assert stem_of(path) == "SUMS.v1"


def test_a_json_file_may_hold_one_object_a_line(tmp_path: Path):
    (tmp_path / "a.json").write_text('{"a": 1}\n\n{"a": 2}\n')
    assert [(row.number, row.values) for row in read_rows([str(tmp_path / "a.json")], WHAT)] == [
        (1, {"a": 1}),
        (3, {"a": 2}),
    ]


# Names: patterns, folders, files named twice.


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for number, path in enumerate(["b.jsonl", "a.jsonl", "sub/c.jsonl", "sub/deep/d.jsonl", "x[1].jsonl", "n.txt"]):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(tmp_path / path, [{"x": number}])
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    (tmp_path / "gone.jsonl").symlink_to("nowhere.jsonl")
    save_dataset(tmp_path / "saved", [{"x": 10}], [{"x": 11}])
    return tmp_path


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (["[ab].jsonl"], ["a.jsonl", "b.jsonl"]),
        (["sub/**/*.jsonl"], ["sub/c.jsonl", "sub/deep/d.jsonl"]),
        (["x[1].jsonl"], ["x[1].jsonl"]),
        (["~/sub/*.jsonl", "b.json?"], ["~/sub/c.jsonl", "b.jsonl"]),
        (["save*"], ["saved"]),
    ],
)
def test_patterns_stand_for_their_matches_in_order(names: Path, paths: list[str], found: list[str]):
    files, faults = data_files(WHAT, paths)
    assert ([str(path) for path in files], faults) == ([path.replace("~", str(names)) for path in found], [])


BAD_NAMES = [
    (["no*.jsonl"], "no*.jsonl", "the pattern matches no file", "relative paths start at the working directory"),
    (["[c-z].jsonl"], "[c-z].jsonl", "the pattern matches no file", "give a .parquet"),
    (["absent.parquet"], "absent.parquet", "there is no such file", "relative paths start at"),
    ([""], "", "there is no such file", "give a .parquet"),
    (["gone.jsonl"], "gone.jsonl", "it is a link to nowhere.jsonl, which is not there", "give a .parquet"),
    (["hdfs://host/a.parquet"], "hdfs://host/a.parquet", "only local files are read", "download it"),
    (["n*"], "n.txt", "files of kind .txt are not read (found by n*)", "give a .parquet"),
    (["sub"], "sub", "this folder has no state.json", "or a pattern: sub/*.jsonl"),
    (["/dev/null"], "/dev/null", "files without a suffix are not read", "give a .parquet"),
    (["a.jsonl", "a.jsonl"], "a.jsonl", "read twice: a.jsonl is a.jsonl of data.train_files[0]", "name each file once"),
    (["a.jsonl", "[ab].jsonl"], "[ab].jsonl", "twice: a.jsonl is a.jsonl of data.train_files[0]", "data.mix_weights"),
    (["a.jsonl", "./sub/../a.jsonl"], "./sub/../a.jsonl", "read twice", "name each file once"),
    (
        ["link.jsonl", "a.jsonl"],
        "a.jsonl",
        "twice: a.jsonl is link.jsonl of data.train_files[0]",
        "name each file once",
    ),
    (
        ["saved", "saved/*.arrow"],
        "saved/*.arrow",
        "twice: saved/data-00000-of-00002.arrow is saved of",
        "name each file",
    ),
]


@pytest.mark.parametrize(("paths", "value", "reason", "cure"), BAD_NAMES)
def test_check_and_the_loader_say_the_same_of_names(names: Path, paths: list[str], value: str, reason: str, cure: str):
    before = sorted(names.rglob("*"))
    (fault,) = data_files(WHAT, paths)[1]
    assert fault.key == (WHAT if len(paths) == 1 else f"{WHAT}[1]") and fault.value == value
    assert reason in fault.reason and cure in fault.cure
    with pytest.raises(DataError) as error:
        read_rows(paths, WHAT)
    assert str(error.value).splitlines()[1:] == [f"{value}: {fault.reason} -- {fault.cure}"]
    assert sorted(names.rglob("*")) == before


def test_rows_of_a_saved_data_set_are_named_over_its_shards(tmp_path: Path):
    folder = save_dataset(tmp_path / "saved.v2", [{"x": "a"}] * 2, [{"x": "b"}])
    bad = pa.table({"x": pa.array([b"ok", b"\xff"]).view(pa.string())})
    with pa.OSFile(str(folder / "data-00001-of-00002.arrow"), "wb") as file, pa.ipc.new_stream(file, bad.schema) as out:
        out.write_table(bad)
    rows = read_rows([str(folder)], WHAT)
    assert [row.where for row in rows if row.fault] == [f"{folder} row 4"] and stem_of(rows[0].file) == "saved.v2"
