from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data.prompts import PromptSet, load_prompts
from megatron_rl.data.render import Renderer
from megatron_rl.errors import DataError
from megatron_rl.types import Prompt
from tests.helpers.data import chat_folder, quickstart, write_jsonl, write_parquet


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(str(quickstart() / "model"), "plain")


def config(**fields: Any) -> DataConfig:
    return DataConfig(**{"train_files": ["unused"], "max_prompt_length": 8, "chat_template": "plain", **fields})


def load(renderer: Renderer, path: str, *, validation: bool = False, **fields: Any) -> PromptSet:
    return load_prompts(config(**fields), [path], renderer, validation=validation)


def verl_row(prompt: str = "4+5=", truth: Any = "9", **fields: Any) -> dict[str, Any]:
    return {
        "data_source": "add2",
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": 3},
        **fields,
    }


@pytest.mark.parametrize("write", [write_parquet, write_jsonl])
def test_verls_schema_is_read_from_parquet_and_jsonl(tmp_path: Path, renderer: Renderer, write: Any):
    path = write(tmp_path / ("a.parquet" if write is write_parquet else "a.jsonl"), [verl_row(), verl_row("1+1=", "2")])
    found = load(renderer, path)
    assert (found.num_rows, found.num_filtered, found.num_truncated) == (2, 0, 0)
    assert found.prompts == (
        Prompt(
            index=0,
            token_ids=tuple(renderer.encode("4+5=")),
            text="4+5=",
            data_source="add2",
            ground_truth="9",
            extra_info={"split": "train", "index": 3},
            messages=({"role": "user", "content": "4+5="},),
        ),
        Prompt(
            index=1,
            token_ids=tuple(renderer.encode("1+1=")),
            text="1+1=",
            data_source="add2",
            ground_truth="2",
            extra_info={"split": "train", "index": 3},
            messages=({"role": "user", "content": "1+1="},),
        ),
    )


@pytest.mark.parametrize(
    ("row", "truth", "extra"),
    [
        ({"prompt": "4+5=", "ground_truth": "9"}, "9", {}),
        ({"prompt": "4+5=", "answer": 9}, 9, {}),
        ({"prompt": "4+5=", "label": "9", "metadata": {"level": 1}}, "9", {"level": 1}),
        ({"prompt": "4+5=", "answer": 0, "label": "no"}, 0, {}),
        ({"prompt": "4+5=", "reward_model": {"ground_truth": ""}, "answer": "no"}, "", {}),
        ({"prompt": "4+5=", "reward_model": {"style": "rule"}, "answer": "9"}, "9", {}),
        (
            {"prompt": "4+5=", "extra_info": None, "metadata": {"level": 2}, "answer": ["9", "nine"]},
            ["9", "nine"],
            {"level": 2},
        ),
        ({"prompt": "4+5="}, None, {}),
    ],
)
def test_simple_rows_and_slimes_rows_are_read(
    tmp_path: Path, renderer: Renderer, row: dict[str, Any], truth: object, extra: dict[str, Any]
):
    (prompt,) = load(renderer, write_jsonl(tmp_path / "sums.jsonl", [row])).prompts
    assert (prompt.ground_truth, prompt.extra_info, prompt.data_source) == (truth, extra, "sums")


def test_rows_are_numbered_over_all_files(tmp_path: Path, renderer: Renderer):
    files = [
        write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1+1="}, {"prompt": "1+2="}]),
        write_parquet(tmp_path / "b.parquet", [{"prompt": "1+3="}]),
    ]
    prompts = load_prompts(config(), files, renderer).prompts
    assert [(prompt.index, prompt.text) for prompt in prompts] == [(0, "1+1="), (1, "1+2="), (2, "1+3=")]


def test_the_prompt_key_is_the_configs(tmp_path: Path, renderer: Renderer):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "4+5=", "answer": "9"}])
    assert load(renderer, path, prompt_key="question").prompts[0].text == "4+5="
    with pytest.raises(
        DataError, match=r"row 1: there is no 'prompt' -- add it, or name the column in data\.prompt_key"
    ):
        load(renderer, path)


def test_a_field_that_another_message_has_is_not_shown_to_the_template(tmp_path: Path):
    template = "{% for m in messages %}{{ 'N' if m.name is defined else '' }}{{ m.content }}{% endfor %}"
    renderer = Renderer(str(chat_folder(tmp_path / "model", template=template)))
    messages = [{"role": "user", "content": "a", "name": "x"}, {"role": "user", "content": "b", "name": None}]
    path = write_parquet(tmp_path / "a.parquet", [{"prompt": messages}])
    assert load(renderer, path, chat_template="tokenizer").prompts[0].text == "Nab"


def test_every_bad_row_is_counted_and_the_first_are_shown(tmp_path: Path, renderer: Renderer):
    """R4"""
    bad: list[Any] = [
        {"answer": "9"},
        {"prompt": 3},
        {"prompt": []},
        {"prompt": [{"role": "user"}]},
        {"prompt": ""},
        {"prompt": "4\u00e9="},
        {"prompt": "4+5=", "extra_info": "text"},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "4+5="}, *bad, {"prompt": "4+5="}, *[{}] * 8])
    with pytest.raises(DataError) as error:
        load(renderer, path)
    lines = str(error.value).splitlines()
    assert lines[0] == "15 of 17 data.train_files rows cannot be used:"
    reasons = [
        "there is no 'prompt'",
        "'prompt' is a int",
        "expected a list of messages",
        "message 1 has content = None",
        "the text is empty",
        "the tokenizer does not give the text back",
        "'extra_info' is a str",
        "there is no 'prompt'",
    ]
    numbers = [2, 3, 4, 5, 6, 7, 8, 10]
    for line, number, reason in zip(lines[1:], numbers, reasons, strict=False):
        assert line.startswith(f"  {path} row {number}: ") and reason in line
    assert len(lines) == 12 and lines[-1] == "  ... and 5 more"


def test_a_validation_row_needs_a_ground_truth(tmp_path: Path, renderer: Renderer):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "4+5=", "answer": "9"}, {"prompt": "1+1="}])
    assert len(load(renderer, path).prompts) == 2
    with pytest.raises(DataError, match=r"1 of 2 data\.val_files rows .*\n.*row 2: there is no ground truth"):
        load(renderer, path, validation=True)


LENGTHS = ["4+5=", "1234+5678=", "1+1=", "12345+6789="]


def test_overlong_prompts_are_an_error_with_count_rows_and_cure(tmp_path: Path, renderer: Renderer):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": text} for text in LENGTHS])
    with pytest.raises(DataError) as error:
        load(renderer, path)
    text = str(error.value)
    assert "2 of 4 rows hold prompts of more than data.max_prompt_length = 8 tokens" in text
    assert "raise data.max_prompt_length to 11, or set data.overlong_prompts to filter or truncate" in text
    assert f"{path} row 2: 10 tokens" in text and f"{path} row 4: 11 tokens" in text


def test_overlong_prompts_are_filtered_and_counted(tmp_path: Path, renderer: Renderer):
    """R6"""
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": text} for text in LENGTHS])
    found = load(renderer, path, overlong_prompts="filter")
    assert [(prompt.index, prompt.text) for prompt in found.prompts] == [(0, "4+5="), (2, "1+1=")]
    assert (found.num_rows, found.num_filtered, found.num_truncated) == (4, 2, 0)


def test_overlong_prompts_keep_their_last_tokens_and_are_counted(tmp_path: Path, renderer: Renderer):
    """R6"""
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": text, "answer": "x"} for text in LENGTHS])
    found = load(renderer, path, overlong_prompts="truncate")
    assert [prompt.text for prompt in found.prompts] == ["4+5=", "34+5678=", "1+1=", "45+6789="]
    assert all(tuple(renderer.encode(prompt.text)) == prompt.token_ids for prompt in found.prompts)
    assert {prompt.ground_truth for prompt in found.prompts} == {"x"}
    assert (found.num_rows, found.num_filtered, found.num_truncated) == (4, 0, 2)


def test_a_filter_that_leaves_nothing_is_an_error(tmp_path: Path, renderer: Renderer):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1234+5678="}])
    with pytest.raises(DataError, match=r"none of the 1 rows is within 8 tokens"):
        load(renderer, path, overlong_prompts="filter")


def test_a_prompt_of_exactly_the_limit_is_kept(tmp_path: Path, renderer: Renderer):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "123+456="}])
    assert load(renderer, path).prompts[0].text == "123+456="


def test_slimes_keys_are_named_by_the_config(tmp_path: Path, renderer: Renderer):
    row = {"input": "4+5=", "target": "9", "metadata": {"source_name": "sums", "rm_type": "math", "label": {"x": 1}}}
    path = write_jsonl(tmp_path / "a.jsonl", [row, {**row, "metadata": None}])
    keys: dict[str, Any] = {"prompt_key": "input", "label_key": "target", "data_source_key": "metadata.source_name"}
    named, other = load(renderer, path, **keys).prompts
    assert (named.text, named.ground_truth, named.data_source) == ("4+5=", "9", "sums")
    assert (named.extra_info, named.messages) == (row["metadata"], None)
    assert (other.extra_info, other.data_source) == ({}, "a")
    keys |= {"label_key": "input", "metadata_key": "metadata.label"}
    nested = load(renderer, path, **keys).prompts
    assert (nested[0].extra_info, nested[0].ground_truth, nested[1].extra_info) == ({"x": 1}, "4+5=", {})


def test_a_column_whose_name_has_a_dot_goes_before_a_mapping(tmp_path: Path, renderer: Renderer):
    row = {"prompt": "4+5=", "a.b": "column", "a": {"b": "inner", "c": "only"}}
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    assert load(renderer, path, label_key="a.b").prompts[0].ground_truth == "column"
    assert load(renderer, path, label_key="a.c").prompts[0].ground_truth == "only"


def test_a_row_without_the_named_label_is_an_error(tmp_path: Path, renderer: Renderer):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "4+5=", "answer": "9"}])
    with pytest.raises(DataError, match=r"row 1: there is no 'gold', which data\.label_key names"):
        load(renderer, path, label_key="gold")


def test_a_string_prompt_is_verbatim_or_a_user_message(tmp_path: Path):
    renderer = Renderer(str(chat_folder(tmp_path / "model")))
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "4+5=", "answer": "9"}])
    keys = {"prompt_key": "question", "chat_template": "tokenizer", "max_prompt_length": 60}
    (verbatim,) = load(renderer, path, **keys).prompts
    (message,) = load(renderer, path, **keys, string_prompt="user").prompts
    assert (verbatim.text, verbatim.messages) == ("4+5=", None)
    assert message.text == "<|im_start|>user\n4+5=<|im_end|>\n<|im_start|>assistant\n"
    assert message.messages == ({"role": "user", "content": "4+5="},)


def test_usable_rows_are_counted_by_source(tmp_path: Path, renderer: Renderer):
    """R6"""
    rows = [verl_row(), verl_row("1234+5678="), verl_row("1+1=", "2", data_source="easy"), verl_row("1+2=")]
    found = load(renderer, write_jsonl(tmp_path / "a.jsonl", rows), overlong_prompts="filter")
    assert found.rows_by_source == {"add2": 2, "easy": 1}
