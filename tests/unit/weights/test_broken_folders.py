"""Folders with something broken: the file, the reason and the cure are named, all faults at once, before any work."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.cli import main
from megatron_rl.errors import CheckpointError
from megatron_rl.models.config_json import inspect_model
from megatron_rl.models.families import FAMILIES
from megatron_rl.models.rules import hf_shapes
from megatron_rl.models.weight_files import INDEX_NAME, read_weight_files, tensor_faults
from megatron_rl.weights.safetensors import SafetensorsSource, finite_tensors
from tests.helpers.config import base_settings, faults, load, make_model

AGAIN, ONE_SAVE, ONE_MODEL = "copy it again", "all from one save", "copy config.json and"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NORM, UP, QUERY = "model.norm.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"


def whole(folder: Path) -> Path:
    """A folder of two layers in two files, with an index."""
    make_model(folder, weights=False, num_hidden_layers=2, hidden_size=32, num_attention_heads=1, num_key_value_heads=1)
    shape, _ = inspect_model(str(folder))
    assert shape is not None
    sizes = hf_shapes(shape, FAMILIES[shape.architecture])
    tensors = {name: torch.ones(size, dtype=torch.bfloat16) for name, size in sizes.items()}
    file_of = {name: A if "layers.0." in name else B for name in tensors}
    for file in (A, B):
        save_file({name: tensor for name, tensor in tensors.items() if file_of[name] == file}, folder / file)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": file_of}))
    return folder


def rewrite(folder: Path, file: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change a file's tensors, and nothing in the index."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)


def reindex(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    change(index["weight_map"])
    (folder / INDEX_NAME).write_text(json.dumps(index))


def cut(path: Path, share: float) -> None:
    os.truncate(path, int(path.stat().st_size * share))


def both(folder: Path, file: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change a file's tensors, and the index with them."""
    rewrite(folder, file, change)
    reindex(folder, lambda names: names.update(dict.fromkeys(load_file(folder / file), file)))


def renamed(folder: Path, name: Callable[[str], str]) -> None:
    for file in (A, B):
        tensors = {name(old): tensor for old, tensor in load_file(folder / file).items()}
        save_file(tensors, folder / file)
    index = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {name(old): file for old, file in index.items()}}))


def bin_only(folder: Path) -> None:
    for file in (A, B, INDEX_NAME):
        (folder / file).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")


def emptied(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


BROKEN: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "missing shard": (lambda f: (f / A).unlink(), f"1 of 2 weight files are missing: {A}", "copy them"),
    "no index": (lambda f: (f / INDEX_NAME).unlink(), f"only {A}, {B}", f"copy {INDEX_NAME} too"),
    "cut data": (lambda f: cut(f / B, 0.9), "not a complete safetensors file: it has ", AGAIN),
    "cut header": (lambda f: cut(f / B, 0.01), "within its header", AGAIN),
    "no safetensors": (
        lambda f: (f / A).write_bytes(b"<html>" * 9),
        "not a complete safetensors file",
        "copy it again",
    ),
    "pointer": (lambda f: (f / A).write_bytes(POINTER), "is a pointer of git-lfs", AGAIN),
    "empty file": (lambda f: (f / A).write_bytes(b""), f"{A}' -- is empty", AGAIN),
    "index no JSON": (lambda f: (f / INDEX_NAME).write_text("{"), "it is not valid JSON", AGAIN),
    "index a pointer": (lambda f: (f / INDEX_NAME).write_bytes(POINTER), "is a pointer of git-lfs", AGAIN),
    "index elsewhere": (
        lambda f: reindex(f, lambda n: n.update({NORM: "../x"})),
        "outside of the folder: ../x",
        "copy it",
    ),
    "index names a file that is not there": (
        lambda f: reindex(f, lambda n: n.update({NORM: "c"})),
        "missing: c",
        "copy",
    ),
    "index names the other file": (
        lambda f: reindex(f, lambda n: n.update({NORM: A})),
        f"names tensors that are not in their files: {NORM} in {A}",
        ONE_SAVE,
    ),
    "index lacks a tensor": (
        lambda f: reindex(f, lambda n: n.pop(NORM)),
        f"does not name tensors of its files: {NORM} in {B}",
        ONE_SAVE,
    ),
    "in two files": (
        lambda f: rewrite(f, A, lambda t: t.update({NORM: torch.ones(32)})),
        f"{NORM} in {A} and {B}",
        ONE_SAVE,
    ),
    "surplus": (
        lambda f: both(f, A, lambda t: t.update({"x.y": torch.ones(2)})),
        "surplus x.y",
        ONE_MODEL,
    ),
    "misshaped": (
        lambda f: rewrite(f, A, lambda t: t.update({UP: torch.ones(3, 32)})),
        f"{UP} is [3, 32], config.json says [320, 32]",
        ONE_MODEL,
    ),
    "whole numbers": (
        lambda f: rewrite(f, A, lambda t: t.update({UP: torch.ones(320, 32, dtype=torch.int8)})),
        f"{UP} is stored as I8",
        ONE_MODEL,
    ),
    "prefix missing": (lambda f: renamed(f, lambda n: n.removeprefix("model.")), "lack 'model.' at their", ONE_MODEL),
    "prefix too much": (
        lambda f: renamed(f, lambda n: f"language_model.{n}"),
        "begin with 'language_model.'",
        ONE_MODEL,
    ),
    "only .bin": (bin_only, "only PyTorch .bin files", "convert them: load with transformers"),
    "empty folder": (emptied, "the folder has no config.json", "give a folder in Hugging Face form"),
    "config a pointer": (
        lambda f: (f / "config.json").write_bytes(POINTER),
        "is a pointer of git-lfs",
        "download it again",
    ),
    "config no JSON": (lambda f: (f / "config.json").write_text("{"), "is not valid JSON", "download it again"),
    "unknown architecture": (
        lambda f: (f / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}'),
        "this architecture is not supported",
        "use a model with one of the supported",
    ),
}


def test_the_whole_folder_has_no_fault(tmp_path: Path):
    folder = whole(tmp_path / "m")
    load(tmp_path, f"model.path={folder}")
    assert len(list(SafetensorsSource(folder).tensors())) == len(read_weight_files(folder).tensors)


@pytest.mark.parametrize("kind", BROKEN)
def test_w2_each_fault_is_named_with_reason_and_cure(tmp_path: Path, kind: str):
    """W2: by the check of a config, torch-free, and by whoever reads the weights."""
    breaks, reason, cure = BROKEN[kind]
    folder = whole(tmp_path / "m")
    breaks(folder)
    (fault,) = [one for one in faults(tmp_path, f"model.path={folder}") if "tokenizer" not in one.reason]
    assert str(folder) in f"{fault.key} {fault.value}"
    assert reason in f"'{fault.value}' -- {fault.reason}" and cure in fault.cure
    shape, _ = inspect_model(str(folder))
    if shape is not None:
        with pytest.raises(CheckpointError) as error:
            SafetensorsSource(folder).check(hf_shapes(shape, FAMILIES[shape.architecture]))
        assert reason.replace("' -- ", ": ") in str(error.value)


def test_all_faults_come_at_once(tmp_path: Path):
    folder = whole(tmp_path / "m")
    cut(folder / B, 0.9)
    (folder / A).write_bytes(POINTER)
    assert [one.path.name for one in read_weight_files(folder).faults] == [A, B]
    other = whole(tmp_path / "n")
    both(other, A, lambda t: t.update({"x.y": torch.ones(2), UP: torch.ones(3)}))
    both(other, B, lambda t: t.update({"z": t.pop(QUERY)}))
    reindex(other, lambda names: names.pop(QUERY))
    shape, _ = inspect_model(str(other))
    assert shape is not None
    odd = tensor_faults(read_weight_files(other).tensors, hf_shapes(shape, FAMILIES[shape.architecture]))
    assert odd == [f"missing {QUERY}", "surplus x.y", "surplus z", f"{UP} is [3], config.json says [320, 32]"]


def test_numbers_that_are_not_finite_are_named_with_their_file(tmp_path: Path):
    folder = whole(tmp_path / "m")
    rewrite(folder, B, lambda t: t[QUERY][3, 1].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=rf"{B}: {QUERY} -- copy the folder again"):
        list(finite_tensors(SafetensorsSource(folder), torch.float32))


@pytest.mark.parametrize("verb", ["check", "train", "export"])
def test_verbs_refuse_it_before_any_worker_and_leave_nothing(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    folder = whole(tmp_path / "m")
    cut(folder / B, 0.9)
    settings = [*base_settings(tmp_path), f"model.path={folder}", "cluster.backend=inline"]
    before = sorted(tmp_path.rglob("*"))
    out = ["--out", str(tmp_path / "out")] if verb == "export" else []
    assert main([verb, *settings, *out]) != 0
    assert f"{B}' -- not a complete safetensors file" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
