"""Ids that are no tokens of the model are refused: in files before a run, in rows, in micro-batches, at engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config.checks.vocabulary import read_vocabulary, vocabulary_faults
from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.render import Renderer
from megatron_rl.data.sft import load_sft
from megatron_rl.errors import DataError, RolloutError
from megatron_rl.mcore.packing import pack
from megatron_rl.models.rope import Rope, Rotation
from megatron_rl.rollout.engine import EngineSettings, Request, Sampling, check_requests
from megatron_rl.types import TrainBatch
from tests.helpers.config import base_settings, faults, load
from tests.helpers.data import model_folder, write_jsonl

WORDS = {"a": 0, "b": 1, "c": 2, "zz": 127}
UNIGRAM = [["<unk>", 0.0], ["a", -1.0], ["b", -2.0]]


def _tokenizer(folder: Path, files: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return str(folder)


BEYOND: list[tuple[str, dict[str, Any], int, str]] = [
    ("words", {"tokenizer.json": {"model": {"type": "WordLevel", "vocab": WORDS}}}, 20, "up to 127 ('zz')"),
    ("one", {"tokenizer.json": {"model": {"type": "BPE", "vocab": WORDS}}}, 127, "1 of its tokens"),
    ("all", {"tokenizer.json": {"model": {"type": "WordPiece", "vocab": WORDS}}}, 1, "3 of its tokens"),
    ("unigram", {"tokenizer.json": {"model": {"type": "Unigram", "vocab": UNIGRAM}}}, 2, "up to 2 ('b')"),
    ("slow", {"vocab.json": WORDS}, 100, "up to 127"),
]


@pytest.mark.parametrize(("files", "size", "reason"), [row[1:] for row in BEYOND], ids=[row[0] for row in BEYOND])
def test_a_tokenizer_of_more_tokens_than_the_model(
    tmp_path: Path, files: dict[str, Any], size: int, reason: str
) -> None:
    (fault,) = vocabulary_faults("model.path", _tokenizer(tmp_path, files), "models/m", size)
    assert (fault.key, fault.value) == ("model.path", str(tmp_path))
    assert reason in fault.reason and f"config.json of models/m says vocab_size {size}" in fault.reason
    assert "the tokenizer that belongs to the model" in fault.cure


WORD_LEVEL = {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<e>"}]}
FITTING: list[tuple[str, dict[str, Any]]] = [
    ("no end token", {"tokenizer.json": {"model": {"vocab": {"a": 0}}}, "added_tokens.json": {"None": 9}}),
    ("smaller", {"tokenizer.json": {"model": {"vocab": {"a": 0}}}}),
    ("equal", {"tokenizer.json": {"model": {"vocab": {"a": 0, "b": 1}}}}),
    ("an added token that no text uses", {"tokenizer.json": WORD_LEVEL}),
    ("the same in the older file", {"tokenizer.json": {"model": {"vocab": {"a": 0}}}, "added_tokens.json": {"<p>": 9}}),
    ("odd pieces", {"tokenizer.json": {"model": {"vocab": [1, [], ["a", 0.0]]}}}),
]


@pytest.mark.parametrize("files", [row[1] for row in FITTING], ids=[row[0] for row in FITTING])
def test_a_tokenizer_within_the_model_passes(tmp_path: Path, files: dict[str, Any]) -> None:
    assert vocabulary_faults("model.path", _tokenizer(tmp_path, files), "models/m", 2) == []


ENDS: list[tuple[str, dict[str, Any], str]] = [
    ("a text", {"tokenizer_config.json": {"eos_token": "<e>"}}, "tokenizer_config.json: eos_token"),
    ("a mapping", {"tokenizer_config.json": {"eos_token": {"content": "<e>"}}}, "tokenizer_config.json: eos_token"),
    ("config", {"config.json": {"eos_token_id": 2}}, "/config.json: eos_token_id"),
    ("generation", {"generation_config.json": {"eos_token_id": 7}}, "generation_config.json: eos_token_id"),
    ("a list", {"generation_config.json": {"eos_token_id": [1, 2]}}, "generation_config.json: eos_token_id"),
    ("below 0", {"generation_config.json": {"eos_token_id": -1}}, "generation_config.json: eos_token_id"),
]


@pytest.mark.parametrize(("files", "where"), [row[1:] for row in ENDS], ids=[row[0] for row in ENDS])
def test_an_end_token_that_the_model_lacks(tmp_path: Path, files: dict[str, Any], where: str) -> None:
    folder = _tokenizer(tmp_path, {"tokenizer.json": WORD_LEVEL} | files)
    (fault,) = vocabulary_faults("model.path", folder, folder, 2)
    assert fault.key.endswith(where) and fault.value in (2, 7, -1)
    assert "vocab_size is 2" in fault.reason and "an end token that the model knows" in fault.cure


def test_added_tokens_are_found_in_all_their_places(tmp_path: Path) -> None:
    files = {
        "tokenizer.json": WORD_LEVEL,
        "added_tokens.json": {"<old>": 3},
        "tokenizer_config.json": {"added_tokens_decoder": {"4": {"content": "<decoder>"}}},
    }
    found = read_vocabulary(_tokenizer(tmp_path, files))
    assert (found.ordinary, found.added) == ({"a": 0, "b": 1}, {"<e>": 2, "<old>": 3, "<decoder>": 4})


def test_check_compares_the_sizes(tmp_path: Path) -> None:
    """`check` names the key of the folder that holds the tokenizer."""
    base_settings(tmp_path)
    other = _tokenizer(tmp_path / "other", {"tokenizer.json": {"model": {"vocab": {"a": 0, "far": 128}}}})
    (fault,) = faults(tmp_path, f"model.tokenizer_path={other}")
    assert fault.key == "model.tokenizer_path" and "128 ('far')" in fault.reason
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "near": 127}}}))
    assert load(tmp_path, f"model.tokenizer_path={other}").model.tokenizer_path == other


def _of_size(folder: Path, size: int) -> Path:
    path = model_folder(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": size}))
    return folder


def _row_of(renderer: Renderer, least: int) -> tuple[str, str]:
    """Two texts of one token: of an id below `least`, and of one at least that."""
    texts = {renderer.encode(text)[0]: text for text in "0123456789abcdefghijklmnopqrstuvwxyz"}
    return texts[min(texts)], texts[max(texts)]


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_a_row_with_an_id_beyond_the_model_is_named(tmp_path: Path, kind: str) -> None:
    whole = Renderer(str(model_folder(tmp_path / "whole")), "plain")
    near, far = _row_of(whole, 0)
    limit = whole.encode(far)[0]
    folder = _of_size(tmp_path / "small", limit)
    rows = [{"prompt": text, "answer": near, "response": near} for text in (near, far)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    cfg = DataConfig(train_files=[path], max_prompt_length=8, max_response_length=8, chat_template="plain")
    with pytest.raises(DataError) as caught:
        (load_prompts if kind == "rl" else load_sft)(cfg, [path], Renderer(str(folder), "plain"))
    text = str(caught.value)
    assert path in text and "row 2" in text and "row 1" not in text
    assert f"token {far!r} has the id {limit}, and the model knows {limit} tokens" in text
    assert "use the model's own tokenizer" in text


def test_an_end_token_beyond_the_model_stops_before_any_row(tmp_path: Path) -> None:
    last = Renderer(str(model_folder(tmp_path / "whole")), "plain").encode("9")[0]
    folder = _of_size(tmp_path / "small", last)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "9"}))
    with pytest.raises(DataError, match=r"the end token .* has the id \d+, and the model knows \d+ tokens .* -- use"):
        Renderer(str(folder), "plain")


@pytest.mark.parametrize("odd", [100, 101, -1, 2**40])
def test_a_micro_batch_with_an_id_beyond_the_model_is_refused(odd: int) -> None:
    """Whatever the layout: with tensor parallelism such a target would get the logit of the most likely token."""
    mask = torch.tensor([False, True, True])
    batch = TrainBatch(torch.tensor([1, odd, 99]), (3,), mask, {})
    with pytest.raises(DataError, match=rf"no tokens of the model: {odd}; config.json says vocab_size 100 -- use"):
        pack(batch, rotary_dim=8, rotations=[Rotation(1e4, Rope())], vocab_size=100, device=torch.device("cpu"))
    fits = TrainBatch(torch.tensor([1, 0, 99]), (3,), mask, {})
    packed = pack(fits, rotary_dim=8, rotations=[Rotation(1e4, Rope())], vocab_size=100, device=torch.device("cpu"))
    assert packed.num_tokens == 3


@pytest.mark.parametrize("odd", [100, -1])
def test_an_engine_refuses_ids_beyond_the_model(odd: int) -> None:
    settings = EngineSettings(
        name="hf", model_path="", tokenizer_path="", vocab_size=100, max_model_len=64, dtype="float32", device="cpu",
        gpu_memory_utilization=0.5, kv_cache_gb=None, max_num_seqs=1, max_num_batched_tokens=None, enforce_eager=True,
        free_cache_engine=False, seed=0, needs_text=False,
    )  # fmt: skip
    sampling = Sampling(n=1, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=4, stop_token_ids=())
    with pytest.raises(RolloutError, match=rf"request 1: id {odd} is no token of the model, .* 100; use"):
        check_requests([Request((1, 99)), Request((1, odd))], sampling, settings, 0)
    check_requests([Request((1, 99))], sampling, settings, 0)
