"""`check --data`: data, tokenizer, template, rewards and headers of weights are read; every fault is told at once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from examples.quickstart.make_data import make
from megatron_rl.cli import main
from megatron_rl.data.render import Renderer
from megatron_rl.models import FAMILIES
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.models.rules import hf_shapes
from megatron_rl.runs.before import MOST_TOKENS_SHOWN, row_lines

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart")
    make(folder, seed=0)
    shape = read_model_shape(str(folder / "model"))
    tensors = {
        name: np.zeros(size, np.float32) for name, size in hf_shapes(shape, FAMILIES[shape.architecture]).items()
    }
    save_file(tensors, folder / "model" / "model.safetensors")
    return folder


def settings(data: Path, algorithm: str, **others: object) -> list[str]:
    sft = "sft_" if algorithm == "sft" else ""
    keys = {
        "model.path": data / "model",
        "data.train_files": data / f"{sft}train.parquet",
        "data.val_files": data / f"{sft}val.parquet",
        "data.chat_template": "plain",
        "data.max_prompt_length": 12,
        "data.max_response_length": 8,
        "algorithm.name": algorithm,
        "rollout.name": "fake",
        "reward.function": "exact_match",
        "cluster.backend": "inline",
        "cluster.device": "cpu",
        "trainer.default_local_dir": data.parent / "runs",
    }
    return [f"{key}={value}" for key, value in (keys | {k.replace("__", "."): v for k, v in others.items()}).items()]


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["check", "--data", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_a_row_of_sft_with_its_ids_and_what_is_trained_on(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = check(capsys, *settings(data, "sft"))
    assert (code, err) == (0, "")
    assert "train: 8,975 rows, 0 left out" in out and "first row: 6 tokens, 2 trained on" in out
    assert "text  0+1=[[1<|endoftext|>]]" in out and "ids   18 13 19 31 [[19 0]]" in out
    assert not (data.parent / "runs").exists()


def test_a_prompt_of_rl(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = check(capsys, *settings(data, "grpo"))
    assert code == 0 and "first prompt: 4 tokens" in out and "text  0+1=\n" in out and "[[" not in out


def test_weights_that_do_not_fit_are_faults_of_the_config(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their headers are read with it, before any data."""
    model = tmp_path / "model"
    model.mkdir()
    for file in (data / "model").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["surplus.weight"] = np.zeros(3, np.float32)
    tensors["model.embed_tokens.weight"] = np.zeros((7, 4), np.float32)
    save_file(tensors, model / "model.safetensors")
    code, _, err = check(capsys, *settings(data, "grpo", model__path=model))
    assert code == 2
    for part in (
        "model.path: ", "missing model.norm.weight", "surplus surplus.weight", "model.embed_tokens.weight is [7, 4]",
    ):  # fmt: skip
        assert part in err, part


def test_faults_of_data_and_rewards_come_together(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": 3, "answer": "1"}\n{"prompt": "1+1=", "answer": "2"}\n{"answer": "4"}\n')
    reward = tmp_path / "reward.py"
    reward.write_text("def score(sample):\n    raise OSError('no such service')\n")
    others = {"data__val_files": bad, "trainer__logger": "mlflow"}
    code, out, err = check(capsys, *settings(data, "grpo", **others, reward__function=f"{reward}:score"))
    assert code == 2
    for part in (
        "trainer.logger: 'mlflow' -- needs the package mlflow",
        "2 of 3 data.val_files rows", f"{bad} row 1", f"{bad} row 3",
    ):  # fmt: skip
        assert part in err, part
    assert "train: 8,975 rows" in out and "first prompt" in out
    others["data__val_files"] = data / "val.parquet"
    code, _, err = check(capsys, *settings(data, "grpo", **others, reward__function=f"{reward}:score"))
    assert code == 2 and "no such service" in err
    assert not (data.parent / "runs").exists()


def test_json_holds_what_was_seen(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = check(capsys, "--json", *settings(data, "sft"))
    content = json.loads(out)
    assert code == 0 and content["ok"] and any("first row" in line for line in content["data"])
    empty = data.parent / "empty.jsonl"
    empty.write_text("")
    code, out, _ = check(capsys, "--json", *settings(data, "sft", data__train_files=empty))
    content = json.loads(out)
    assert code == 2 and not content["ok"] and "holds no rows" in content["data_faults"][0]


def test_a_long_row_is_cut_and_says_so_and_colour_marks_what_is_trained_on(data: Path) -> None:
    renderer = Renderer(str(data / "model"), "plain")
    ids = renderer.encode("1") * (MOST_TOKENS_SHOWN + 3)
    head, _, _, more = row_lines("row", ids, [False] * len(ids), renderer, color=False)
    assert head == f"row: {len(ids)} tokens" and more == "  ... and 3 more tokens"
    _, text, _ = row_lines("row", ids[:3], [False, True, False], renderer, color=True)
    assert text == "  text  1\033[32m1\033[0m1"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_a_shipped_config_without_its_files_says_how_to_come_by_them(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(["check", str(path)])
    err = capsys.readouterr().err
    assert code == 2 and f"{path} says:" in err
    head = err.partition(f"{path} says:")[2]
    assert ("Data" in head and "make_data.py runs" in head) or "make_data.py RAW" in head
    assert "Model: " in head or "Data and model: " in head
    for command in ("hf download ", "megatron-rl train configs/", "examples/quickstart/make_data.py"):
        if command in head:
            break
    else:
        raise AssertionError(f"no command for the model: {head}")
