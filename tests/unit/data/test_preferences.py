"""Rows that were judged: every layout, what is refused with its row, what is cut, counted and noted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data.preferences import PreferenceSet, common_start, load_preferences
from megatron_rl.data.render import Renderer
from megatron_rl.errors import DataError
from tests.helpers.data import chat_folder, quickstart, write_jsonl, write_parquet

END = "<|endoftext|>"


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(str(quickstart() / "model"), "plain")


def load(renderer: Renderer, path: str, kind: Any = "pairs", *, margins: bool = False, **fields: Any) -> PreferenceSet:
    lengths = {"max_prompt_length": 16, "max_response_length": 8}
    cfg = DataConfig(**{"train_files": ["unused"], "chat_template": "plain", **lengths, **fields})
    return load_preferences(cfg, [path], renderer, kind=kind, margins=margins)


def shown(renderer: Renderer, found: PreferenceSet) -> list[list[tuple[str, str]]]:
    """Of each row and answer: (the prompt's text, the answer's text)."""

    def texts(ids: Any, mask: Any) -> tuple[str, str]:
        start = mask.index(True)
        assert all(mask[start:]), "an answer of one turn goes to the end"
        decode = renderer.decode
        return decode(ids[:start], skip_special_tokens=False), decode(ids[start:], skip_special_tokens=False)

    return [[texts(answer.token_ids, answer.loss_mask) for answer in row.answers] for row in found.items]


def said(*contents: str, first: str = "user") -> list[dict[str, str]]:
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[turn % 2], "content": text} for turn, text in enumerate(contents)]


@pytest.mark.parametrize("write", [write_parquet, write_jsonl])
def test_pairs_of_text_and_of_messages_with_and_without_a_prompt_are_one(
    tmp_path: Path, renderer: Renderer, write: Any
) -> None:
    wanted = [[("4+5=", f"9{END}"), ("4+5=", f"8{END}")]]
    layouts = [
        {"prompt": "4+5=", "chosen": "9", "rejected": "8"},
        {"chosen": "4+5=9", "rejected": "4+5=8"},
        {"prompt": said("4+5="), "chosen": said("9", first="assistant"), "rejected": said("8", first="assistant")},
        {"chosen": said("4+5=", "9"), "rejected": said("4+5=", "8")},
        # UltraFeedback's: the prompt as text beside whole conversations.
        {"prompt": "4+5=", "chosen": said("4+5=", "9"), "rejected": said("4+5=", "8")},
        {"prompt": said("4+5="), "chosen": "9", "rejected": "8"},
    ]
    empty = load(renderer, write_jsonl(tmp_path / "empty.jsonl", [layouts[0] | {"rejected": ""}]))
    assert shown(renderer, empty) == [[("4+5=", f"9{END}"), ("4+5=", END)]]
    for number, row in enumerate(layouts):
        path = write(tmp_path / f"{number}{'.parquet' if write is write_parquet else '.jsonl'}", [row])
        assert shown(renderer, load(renderer, path)) == wanted, row


def test_a_prompt_is_a_users_message_where_that_is_said(tmp_path: Path) -> None:
    renderer = Renderer(str(chat_folder(tmp_path / "chat")), "tokenizer")
    row = {"prompt": "4+5=", "chosen": said("9", first="assistant"), "rejected": said("8", first="assistant")}
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    limits = {"chat_template": "tokenizer", "max_prompt_length": 64, "max_response_length": 64}
    with pytest.raises(DataError, match=r"a\.jsonl row 1: 'prompt' is a string, and the answers are messages"):
        load(renderer, path, **limits)
    (row_read,) = load(renderer, path, string_prompt="user", **limits).items
    same = write_jsonl(tmp_path / "b.jsonl", [row | {"prompt": said("4+5=")}])
    assert row_read.answers == load(renderer, same, **limits).items[0].answers
    assert row_read.answers[0].loss_mask[0] is False and row_read.answers[0] != row_read.answers[1]


@pytest.mark.parametrize(
    ("first", "second", "start"),
    [
        ("The sky is blue.", "The sky is green.", 10),
        ("I see black", "I see blue", 5),
        ("4+5=9", "4+5=12", 4),
        ("4+5=19", "4+5=12", 4),
        ("same", "same", 4),
        ("", "x", 0),
    ],
)
def test_the_prompt_that_a_pair_shares_ends_between_words(first: str, second: str, start: int) -> None:
    assert common_start(first, second) == start == common_start(second, first)


def test_all_bad_rows_are_named_at_once(tmp_path: Path, renderer: Renderer) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "4+5=", "chosen": "9"},
        {"prompt": "4+5=", "chosen": "9", "rejected": said("8", first="assistant")},
        {"chosen": "1", "rejected": "2"},
        {"chosen": said("4+5=", "9"), "rejected": said("5+5=", "8")},
        {"prompt": "4+5=", "chosen": "9", "rejected": 8},
        {"prompt": "4+5=", "chosen": "9", "rejected": "[{'role': 'user', 'content': 'x'}]"},
        {"prompt": said("4+5="), "chosen": said("x"), "rejected": said("8", first="assistant")},
        {"prompt": "4+5=", "chosen": "9", "rejected": "8", "weight": 0.5},
        {"prompt": "4+5=", "chosen": "9", "rejected": "8"},
    ]
    with pytest.raises(DataError) as caught:
        load(renderer, write_jsonl(tmp_path / "a.jsonl", rows))
    head, *lines = str(caught.value).splitlines()
    assert head == "8 of 9 data.train_files rows cannot be used:"
    wanted = [
        "'rejected' is not there -- give a string or messages, or name the column in data.rejected_key",
        "one of 'chosen' and 'rejected' is text, and the other messages",
        "there is no 'prompt', and 'chosen' and 'rejected' do not begin with one",
        "share no message at their start",
        "'rejected' is a int",
        "'rejected' is text that holds chat messages",
        "an answer must begin with an assistant message",
        "'weight' = 0.5 is not used",
    ]
    for number, (line, reason) in enumerate(zip(lines, wanted, strict=True), start=1):
        assert f"a.jsonl row {number}: " in line and reason in line


def test_long_answers_are_an_error_left_out_or_cut_and_counted(tmp_path: Path, renderer: Renderer) -> None:
    rows = [
        {"prompt": "4+5=", "chosen": "9", "rejected": "8" * 30, "data_source": "a"},
        {"prompt": "1+1=", "chosen": "2", "rejected": "2", "data_source": "b", "note": "x"},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=r"1 of 2 rows hold sequences of more than .* = 24 tokens \(the longest has 35"):
        load(renderer, path)
    filtered = load(renderer, path, overlong_prompts="filter")
    assert (filtered.num_rows, filtered.num_filtered, len(filtered.items)) == (2, 1, 1)
    cut = load(renderer, path, overlong_prompts="truncate")
    assert cut.num_truncated == 1 and [len(one.token_ids) for one in cut.items[0].answers] == [6, 24]
    assert cut.rows_by_source == {"a": 1, "b": 1} and [row.index for row in cut.items] == [0, 1]
    assert cut.notes == (
        "1 of 4 answers do not end with an end token (cut, or the template)",
        "1 of 2 pairs have two equal answers, of which nothing is learned",
        "columns that are not used: note (1 rows)",
    )
    with pytest.raises(DataError, match=r"of which data\.overlong_prompts=truncate keeps 4, hold no answer"):
        load(renderer, path, overlong_prompts="truncate", max_prompt_length=2, max_response_length=2)


def test_labelled_rows_come_with_another_rows_answer(tmp_path: Path, renderer: Renderer) -> None:
    rows = [
        {"prompt": "4+5=", "completion": "9", "label": True},
        {"prompt": "4+5=", "completion": "8", "label": False},
        {"prompt": "1+1=", "completion": "2", "label": True},
    ]
    found = load(renderer, write_jsonl(tmp_path / "a.jsonl", rows), "labelled")
    assert [row.target for row in found.items] == [1.0, -1.0, 1.0]
    assert shown(renderer, found) == [
        [("4+5=", f"9{END}"), ("4+5=", f"2{END}")],
        # The row before it has the same prompt, and is passed over.
        [("4+5=", f"8{END}"), ("4+5=", f"2{END}")],
        [("1+1=", f"2{END}"), ("1+1=", f"8{END}")],
    ]
    with pytest.raises(DataError, match="all rows have one prompt"):
        load(renderer, write_jsonl(tmp_path / "b.jsonl", rows[:2]), "labelled")
    bad = [rows[0] | {"label": "good"}, rows[2] | {"label": None}]
    with pytest.raises(DataError, match=r"(?s)row 1: 'label' is 'good' -- give true .*row 2: there is no 'label'"):
        load(renderer, write_jsonl(tmp_path / "c.jsonl", bad), "labelled")


def test_margins_and_numbers_of_reward_models(tmp_path: Path, renderer: Renderer) -> None:
    pair = {"prompt": "4+5=", "chosen": "9", "rejected": "8"}
    path = write_jsonl(tmp_path / "a.jsonl", [pair | {"margin": 0.5}, pair])
    assert [row.target for row in load(renderer, path, margins=True).items] == [0.5, 0.0]
    # Other losses of pairs have no margins, and say so.
    plain = load(renderer, path)
    assert [row.target for row in plain.items] == [0.0, 0.0]
    assert plain.notes == ("columns that are not used: margin (1 rows)",)
    scored = {"prompt": "4+5=", "response": "9", "score": 3}
    path = write_jsonl(tmp_path / "b.jsonl", [scored, scored | {"score": -1.5}])
    found = load(renderer, path, "scored")
    assert [(row.target, len(row.answers)) for row in found.items] == [(3.0, 1), (-1.5, 1)]
    bad = [scored | {"score": None}, scored | {"score": True}, scored | {"score": "3"}]
    with pytest.raises(
        DataError, match=r"(?s)row 1: there is no 'score'.*row 2: 'score' is True.*row 3: 'score' is '3'"
    ):
        load(renderer, write_jsonl(tmp_path / "c.jsonl", bad), "scored")
    with pytest.raises(DataError, match="'margin' is 'much' -- give a number"):
        load(renderer, write_jsonl(tmp_path / "d.jsonl", [pair | {"margin": "much"}]), margins=True)


def test_pairs_serve_a_loss_of_labels_good_ones_first(tmp_path: Path, renderer: Renderer) -> None:
    rows = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "0"} for n in (1, 2)]
    found = load(renderer, write_jsonl(tmp_path / "a.jsonl", rows), "labelled")
    assert [(row.index, row.target) for row in found.items] == [(0, 1.0), (1, 1.0), (2, -1.0), (3, -1.0)]
    assert [own[1] for own, _ in shown(renderer, found)] == [f"2{END}", f"3{END}", f"0{END}", f"0{END}"]
    assert [other[0] for _, other in shown(renderer, found)] == ["1+1=", "2+1="] * 2
    assert found.items[3].where.endswith("a.jsonl row 2 rejected") and found.num_rows == 2
