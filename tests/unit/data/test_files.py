from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl.data.files import BadRow, DataRow, read_rows, refuse_bad_rows
from megatron_rl.errors import DataError
from tests.helpers.data import ROOT, write_jsonl, write_parquet

WHAT = "data.train_files"


def test_rows_of_all_files_come_in_order_with_file_and_row(tmp_path: Path):
    first = write_parquet(tmp_path / "a.parquet", [{"x": 1}, {"x": 2}])
    second = write_jsonl(tmp_path / "b.jsonl", [{"x": 3}, "", {"x": 4}])
    rows = read_rows([first, second], WHAT)
    assert [row.values["x"] for row in rows] == [1, 2, 3, 4]
    assert [row.where for row in rows] == [
        f"{first} row 1",
        f"{first} row 2",
        f"{second} row 1",
        f"{second} row 3",
    ]


def test_nested_parquet_values_are_plain_python(tmp_path: Path):
    row = {"prompt": [{"role": "user", "content": "4+5="}], "extra_info": {"index": 7, "tags": ["a"]}}
    (read,) = read_rows([write_parquet(tmp_path / "a.parquet", [row])], WHAT)
    assert read.values == row
    assert type(read.values["prompt"]) is list and type(read.values["extra_info"]) is dict


def test_a_parquet_map_column_is_a_dict(tmp_path: Path):
    column = pa.array([[("k", 1)]], type=pa.map_(pa.string(), pa.int64()))
    pq.write_table(pa.table({"extra_info": column}), tmp_path / "a.parquet")
    (row,) = read_rows([str(tmp_path / "a.parquet")], WHAT)
    assert row.values == {"extra_info": {"k": 1}}


def test_a_folder_of_the_path_is_no_column(tmp_path: Path):
    (tmp_path / "split=train").mkdir()
    (row,) = read_rows([write_parquet(tmp_path / "split=train" / "a.parquet", [{"x": 1}])], WHAT)
    assert row.values == {"x": 1}


def test_jsonl_keeps_line_separators_inside_strings_and_skips_a_byte_order_mark(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + '{"x": "a\u2028b"}\r\n{"x": "c"}'.encode())
    assert [row.values["x"] for row in read_rows([str(path)], WHAT)] == ["a\u2028b", "c"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("empty.jsonl", b"", "holds no rows"),
        ("blank.jsonl", b"\n\n", "holds no rows"),
        ("a.tsv", b"x\n1\n", "kind .tsv are not read"),
        ("noending", b"{}", "files without a suffix are not read"),
        ("a.parquet", b"PAR1 this is not parquet", "not readable as parquet"),
        ("a.jsonl", b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_with_its_name(tmp_path: Path, name: str, content: bytes, reason: str):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read_rows([str(path)], WHAT)
    assert str(path) in str(error.value) and reason in str(error.value) and WHAT in str(error.value)


def save_dataset(folder: Path, *shards: list[dict[str, Any]], **state: Any) -> Path:
    """A folder as datasets.Dataset.save_to_disk lays it out (of datasets 5.2): shards in Arrow's stream format."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(shards):05d}.arrow" for number in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_fingerprint": "1", "_split": None, **state}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_saved_dataset_is_read_over_all_its_shards_without_the_package(tmp_path: Path):
    rows = [{"prompt": [{"role": "user", "content": f"{i}+1="}], "extra_info": {"i": i}} for i in range(7)]
    folder = save_dataset(tmp_path / "sums", rows[:3], rows[3:])
    found = read_rows([str(folder)], WHAT)
    assert [row.values for row in found] == rows
    assert (found[3].where, Path(found[3].file).stem) == (f"{folder} row 4", "sums")


def test_an_arrow_file_is_read_in_both_formats(tmp_path: Path):
    table = pa.table({"x": [1, 2]})
    for name, new in (("stream", pa.ipc.new_stream), ("file", pa.ipc.new_file)):
        path = tmp_path / f"{name}.arrow"
        with new(str(path), table.schema) as writer:
            writer.write_table(table)
        assert [row.values["x"] for row in read_rows([str(path)], WHAT)] == [1, 2]


def test_folders_that_are_no_data_set_say_what_to_give(tmp_path: Path):
    splits = tmp_path / "splits"
    save_dataset(splits / "train", [{"x": 1}])
    (splits / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    lacking = save_dataset(tmp_path / "lacking", [{"x": 1}], [{"x": 2}])
    (lacking / "data-00001-of-00002.arrow").unlink()
    picked = save_dataset(tmp_path / "picked", [{"x": 1}], _indices_data_files=[{"filename": "indices.arrow"}])
    broken = save_dataset(tmp_path / "broken", [{"x": 1}])
    (broken / "state.json").write_text("{")
    bad = save_dataset(tmp_path / "bad", [{"x": 1}])
    (bad / "data-00000-of-00001.arrow").write_bytes(b"nothing")
    with pytest.raises(DataError) as error:
        read_rows([str(path) for path in (splits, lacking, picked, broken, bad)], WHAT)
    lines = str(error.value).splitlines()
    reasons = [
        f"give one of {splits}/train, {splits}/test",
        "1 of its 2 files are missing: data-00001-of-00002.arrow",
        "flatten_indices",
        "save the data set again",
        "not readable as Arrow",
    ]
    assert lines[0].endswith("5 of 5 files cannot be read:")
    assert all(reason in line for reason, line in zip(reasons, lines[1:], strict=True))


def test_an_empty_parquet_is_an_error(tmp_path: Path):
    pq.write_table(pa.table({"prompt": pa.array([], type=pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: the file holds no rows"):
        read_rows([str(tmp_path / "a.parquet")], WHAT)


def test_all_missing_files_are_named_at_once(tmp_path: Path):
    (tmp_path / "folder.jsonl").mkdir()
    names = ["no.jsonl", "no.parquet", "folder.jsonl"]
    with pytest.raises(DataError) as error:
        read_rows([str(tmp_path / name) for name in names], WHAT)
    assert "3 of 3 files" in str(error.value)
    assert all(name in str(error.value) for name in names)
    assert "there is no such file" in str(error.value) and "this folder has no state.json" in str(error.value)


def test_no_file_at_all_is_an_error():
    with pytest.raises(DataError, match=r"data\.train_files: no file is given"):
        read_rows([], WHAT)


def test_bad_jsonl_lines_are_all_counted_with_their_line(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"x": 1}, "{broken", "", "[1, 2]", '"text"'])
    rows = read_rows([path], WHAT)
    with pytest.raises(DataError) as error:
        refuse_bad_rows([(row, row.fault) for row in rows if row.fault], len(rows), WHAT)
    text = str(error.value)
    assert "3 of 4" in text
    assert "row 2: not JSON" in text and "row 4: a JSON list" in text and "row 5: a JSON str" in text


def test_ten_bad_rows_are_shown_and_the_rest_counted():
    bad = [(DataRow("a.jsonl", number, {}), "no prompt") for number in range(1, 24)]
    with pytest.raises(DataError) as error:
        refuse_bad_rows(bad, 100, WHAT)
    text = str(error.value)
    assert "23 of 100" in text and "row 10: no prompt" in text and "row 11" not in text and "and 13 more" in text
    refuse_bad_rows([], 100, WHAT)


def test_a_bad_row_is_a_data_error():
    assert issubclass(BadRow, DataError)


def test_reading_files_imports_no_torch_and_no_transformers():
    heavy = ("torch", "transformers")
    code = f"import sys, megatron_rl.data.files; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
