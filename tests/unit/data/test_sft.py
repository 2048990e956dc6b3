from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data.render import Renderer
from megatron_rl.data.sft import SftSample, SftSet, load_sft
from megatron_rl.errors import DataError
from tests.helpers.data import chat_folder, quickstart, write_jsonl, write_parquet


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(str(quickstart() / "model"), "plain")


def load(renderer: Renderer, path: str, *, validation: bool = False, **fields: Any) -> SftSet:
    lengths = {"max_prompt_length": 6, "max_response_length": 4}
    cfg = DataConfig(**{"train_files": ["unused"], "chat_template": "plain", **lengths, **fields})
    return load_sft(cfg, [path], renderer, validation=validation)


def shown(renderer: Renderer, sample: SftSample) -> tuple[str, str]:
    """(text that is not trained on, text that is)"""
    pairs = list(zip(sample.token_ids, sample.loss_mask, strict=True))
    texts = [
        renderer.decode([token for token, on in pairs if on is flag], skip_special_tokens=False)
        for flag in (False, True)
    ]
    return texts[0], texts[1]


def conversation(*contents: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if turn % 2 else "user", "content": text} for turn, text in enumerate(contents)]


@pytest.mark.parametrize("write", [write_parquet, write_jsonl])
def test_rows_of_messages_and_of_prompt_and_response(tmp_path: Path, renderer: Renderer, write: Any):
    rows = [
        {"prompt": "4+5=", "response": "9", "messages": None},
        {"prompt": None, "response": None, "messages": conversation("1+1=", "2")},
    ]
    found = load(renderer, write(tmp_path / ("a.parquet" if write is write_parquet else "a.jsonl"), rows))
    assert [sample.index for sample in found.samples] == [0, 1]
    assert [shown(renderer, sample) for sample in found.samples] == [
        ("4+5=", "9<|endoftext|>"),
        ("1+1=", "2<|endoftext|>"),
    ]
    assert (found.num_rows, found.num_filtered, found.num_truncated, found.num_without_end) == (2, 0, 0, 0)


def test_the_example_of_the_docstring(tmp_path: Path, renderer: Renderer):
    (sample,) = load(renderer, write_jsonl(tmp_path / "a.jsonl", [{"prompt": "4+5=", "response": "9"}])).samples
    assert sample.token_ids == (22, 13, 23, 31, 27, 0)
    assert sample.loss_mask == (False, False, False, False, True, True)


def test_a_prompt_of_messages_and_keys_of_ones_own(tmp_path: Path, renderer: Renderer):
    rows = [
        {"question": conversation("4+5="), "solution": "9"},
        {"chat": conversation("1+1=", "2", "1+2=", "3")},
    ]
    keys = {
        "prompt_key": "question",
        "response_key": "solution",
        "messages_key": "chat",
        "max_prompt_length": 10,
    }
    found = load(renderer, write_jsonl(tmp_path / "a.jsonl", rows), **keys)
    assert shown(renderer, found.samples[0]) == ("4+5=", "9<|endoftext|>")
    assert shown(renderer, found.samples[1]) == ("1+1=1+2=", "2<|endoftext|>3<|endoftext|>")


def test_every_bad_row_is_named(tmp_path: Path, renderer: Renderer):
    """R4"""
    rows: list[Any] = [
        {"prompt": "4+5=", "response": "9"},
        {"text": "4+5=9"},
        {"prompt": "4+5="},
        {"response": "9"},
        {"prompt": "4+5=", "response": 9},
        {"messages": "4+5=9"},
        {"messages": []},
        {"messages": conversation("4+5=")},
        {"prompt": "4+5=", "response": "\u4e5d"},
        {"messages": conversation("4+5=", "9")[1:]},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError) as error:
        load(renderer, path)
    lines = str(error.value).splitlines()
    reasons = [
        "there is neither 'messages' nor 'prompt' and 'response'",
        "'response' is not there",
        "there is no 'prompt'",
        "'response' is a int",
        "'messages' is a str",
        "expected a list of messages",
        "there is no assistant message",
        "the tokenizer does not give the text back",
        "begins with an assistant message",
    ]
    assert lines[0] == "9 of 10 data.train_files rows cannot be used:"
    for number, (line, reason) in enumerate(zip(lines[1:], reasons, strict=True), start=2):
        assert line.startswith(f"  {path} row {number}: ") and reason in line
    with pytest.raises(DataError, match=r"data\.val_files rows"):
        load(renderer, path, validation=True)


def test_a_row_whose_template_rewrites_turns_is_refused_by_row(tmp_path: Path):
    template = "{% for m in messages %}{{ messages | length }}{{ m.content }}{% endfor %}"
    renderer = Renderer(str(chat_folder(tmp_path / "model", template=template)))
    rows = [{"messages": conversation("4+5=", "9")}]
    with pytest.raises(DataError, match=r"a\.jsonl row 1: the chat template rewrites earlier turns"):
        load(renderer, write_jsonl(tmp_path / "a.jsonl", rows), chat_template="tokenizer")


LONG = [
    {"prompt": "4+5=", "response": "9"},
    {"prompt": "12+34=", "response": "46 is it"},
    {"prompt": "1+1=", "response": "2"},
]


def test_overlong_rows_are_an_error_with_count_rows_and_cure(tmp_path: Path, renderer: Renderer):
    path = write_jsonl(tmp_path / "a.jsonl", LONG)
    with pytest.raises(DataError) as error:
        load(renderer, path)
    text = str(error.value)
    assert "1 of 3 rows hold sequences of more than data.max_prompt_length + data.max_response_length = 10" in text
    assert f"{path} row 2: 15 tokens" in text and "filter or truncate" in text


def test_overlong_rows_are_filtered_and_counted(tmp_path: Path, renderer: Renderer):
    """R6"""
    found = load(renderer, write_jsonl(tmp_path / "a.jsonl", LONG), overlong_prompts="filter")
    assert [sample.index for sample in found.samples] == [0, 2]
    assert (found.num_rows, found.num_filtered, found.num_truncated, found.num_without_end) == (3, 1, 0, 0)


def test_overlong_rows_are_cut_at_their_end_and_counted(tmp_path: Path, renderer: Renderer):
    """R6"""
    found = load(renderer, write_jsonl(tmp_path / "a.jsonl", LONG), overlong_prompts="truncate")
    assert shown(renderer, found.samples[1]) == ("12+34=", "46 i")
    assert (found.num_rows, found.num_filtered, found.num_truncated, found.num_without_end) == (3, 0, 1, 1)


def test_a_cut_that_leaves_no_response_is_an_error_with_the_row(tmp_path: Path, renderer: Renderer):
    rows = [{"prompt": "4+5=", "response": "9"}, {"prompt": "1234+5678=", "response": "6912"}]
    with pytest.raises(DataError, match=r"row 2: the first 10 of its 15 tokens, .* hold no response"):
        load(renderer, write_jsonl(tmp_path / "a.jsonl", rows), overlong_prompts="truncate")


def test_a_filter_that_leaves_nothing_is_an_error(tmp_path: Path, renderer: Renderer):
    with pytest.raises(DataError, match="none of the 1 rows is within 10 tokens"):
        load(renderer, write_jsonl(tmp_path / "a.jsonl", LONG[1:2]), overlong_prompts="filter")


def test_an_empty_response_trains_its_end(tmp_path: Path, renderer: Renderer):
    (sample,) = load(renderer, write_jsonl(tmp_path / "a.jsonl", [{"prompt": "4+5=", "response": ""}])).samples
    assert shown(renderer, sample) == ("4+5=", "<|endoftext|>")
