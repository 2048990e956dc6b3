"""Rows that would train on something else than they say: refused by file, row, reason and cure, all at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data import tokenized
from megatron_rl.data.chat_text import is_chat_text
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.render import Renderer
from megatron_rl.data.sft import load_sft
from megatron_rl.errors import DataError
from tests.helpers.data import CHATML, chat_folder, quickstart, write_jsonl

USER = {"role": "user", "content": "hi"}
CHAT = [{"role": "system", "content": "be 'brief'"}, {"role": "user", "content": 'what is "1" + 1?'}]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(str(chat_folder(tmp_path_factory.mktemp("rows") / "model")))


def config(**fields: Any) -> DataConfig:
    return DataConfig(**{"train_files": ["unused"], "max_prompt_length": 300, "max_response_length": 300, **fields})


def refusal(renderer: Renderer, path: str, kind: str, **fields: Any) -> list[str]:
    """Lines of the error with which rows are refused; nothing is written meanwhile."""
    before = sorted(Path(path).parent.rglob("*"))
    with pytest.raises(DataError) as error:
        (load_sft if kind == "sft" else load_prompts)(config(**fields), [path], renderer)
    assert sorted(Path(path).parent.rglob("*")) == before
    return str(error.value).splitlines()


# Messages as text.

NUMPY = "[{'role': 'system', 'content': 'a'}\n {'role': 'user', 'content': \"it's {b}\"}]"
CHAT_TEXTS = {
    "json": json.dumps(CHAT),
    "indented": json.dumps(CHAT, indent=2),
    "spaces": f" \n\t{json.dumps(CHAT)}\n ",
    "mark": "\ufeff" + json.dumps(CHAT),
    "repr": repr(CHAT),
    "tuple": repr(tuple(CHAT)),
    "numpy": NUMPY,
    "numpy-repr": f"array({NUMPY}, dtype=object)",
    "one-message": json.dumps(CHAT[1]),
    "twice": json.dumps(json.dumps(CHAT)),
    "wrapped": json.dumps({"messages": CHAT}),
    "sharegpt": json.dumps([{"from": "human", "value": "hi"}]),
    "tool-calls": repr([USER, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]),
    "escapes": json.dumps([{"role": "user", "content": "\u00e9\\d"}]),
}


@pytest.mark.parametrize("text", CHAT_TEXTS.values(), ids=CHAT_TEXTS.keys())
@pytest.mark.parametrize("fields", [{}, {"string_prompt": "user"}])
def test_a_prompt_that_is_messages_as_text_is_refused(
    tmp_path: Path, renderer: Renderer, text: str, fields: dict[str, Any]
):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "hi"}, {"prompt": text}, {"prompt": text}])
    head, *lines = refusal(renderer, path, "rl", **fields)
    assert head == "2 of 3 data.train_files rows cannot be used:"
    for number, line in enumerate(lines, start=2):
        assert line.startswith(f"  {path} row {number}: 'prompt' is text that holds chat messages -- ")
        assert line.endswith("json.loads it first, and keep the rows in JSONL or parquet")


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"prompt": json.dumps(CHAT), "response": "2"}, "prompt"),
        ({"prompt": "1+1=", "response": json.dumps([{"role": "assistant", "content": "2"}])}, "response"),
        ({"prompt": "1+1=", "response": repr({"role": "assistant", "content": "2"})}, "response"),
        ({"messages": json.dumps([USER, {"role": "assistant", "content": "2"}])}, "messages"),
        ({"messages": repr([USER, {"role": "assistant", "content": "2"}])}, "messages"),
    ],
)
def test_sft_columns_that_are_messages_as_text_are_refused(
    tmp_path: Path, renderer: Renderer, row: dict[str, Any], key: str
):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1+1=", "response": "2"}, row])
    _, line = refusal(renderer, path, "sft")
    assert line.startswith(f"  {path} row 2: {key!r} is text that holds chat messages -- ")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hi",
        "[1, 2, 3] what is the role of 2?",
        '[{"from": "Oslo", "to": "Bergen"}]',
        '[{"role": "user"}]',
        "{'role': 'king'}",
        "[]",
        '[{"role": "user", "content": "hi"}] What is wrong with this call?',
        'The role is [{"role": "user", "content": "hi"}]',
        "(" * 500 + "role",
        "[" * 100_000 + "role",
        '"role"',
        "{role} [content]",
    ],
)
def test_other_texts_are_prompts(text: str):
    assert not is_chat_text(text)


def test_prompts_from_csv_are_refused_with_a_cure_that_works(tmp_path: Path, renderer: Renderer):
    text = json.dumps([USER]).replace('"', '""')
    (tmp_path / "a.csv").write_text(f'prompt,answer\n"{text}",1\nhi,2\n')
    _, line = refusal(renderer, str(tmp_path / "a.csv"), "rl")
    assert "a.csv row 1: 'prompt' is text that holds chat messages" in line
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": json.loads(json.dumps([USER])), "answer": "1"}])
    assert load_prompts(config(), [path], renderer).prompts[0].messages == (USER,)


# Half surrogates, and the tokenizer's and the template's own failures.

HALF = "\ud83d"
SURROGATES = [
    ("rl", {"prompt": f"hi {HALF}"}, "prompt is not valid Unicode at character 4"),
    ("rl", {"prompt": [{"role": "user", "content": HALF}]}, "prompt[0].content is not valid Unicode at character 1"),
    ("rl", {"prompt": [{"role": "user", "content": "a", "name": HALF}]}, "prompt[0].name is not valid Unicode"),
    ("rl", {"prompt": "hi", "answer": HALF}, "answer is not valid Unicode"),
    ("rl", {"prompt": "hi", "reward_model": {"ground_truth": [HALF]}}, "reward_model.ground_truth[0] is not valid"),
    ("rl", {"prompt": "hi", "extra_info": {"a": {"b": HALF}}}, "extra_info.a.b is not valid Unicode"),
    ("rl", {"prompt": "hi", "tools": [{"name": HALF}]}, "tools[0].name is not valid Unicode"),
    ("sft", {"prompt": "hi", "response": f"a{HALF}"}, "response is not valid Unicode at character 2"),
    ("sft", {"prompt": f"hi{HALF}", "response": "a"}, "prompt is not valid Unicode at character 3"),
    ("sft", {"messages": [USER, {"role": "assistant", "content": HALF}]}, "messages[1].content is not valid Unicode"),
]


@pytest.mark.parametrize(("kind", "row", "reason"), SURROGATES)
@pytest.mark.parametrize("kept", [False, True])
def test_half_a_surrogate_pair_is_named_with_all_other_bad_rows(
    tmp_path: Path, renderer: Renderer, kind: str, row: dict[str, Any], reason: str, kept: bool
):
    good = {"prompt": "hi", "answer": "a", "response": "b"}
    (tmp_path / "rows").mkdir()
    path = write_jsonl(tmp_path / "rows" / "a.jsonl", [good, row, good, "{broken", {"prompt": 3}, '{"prompt": NaN}'])
    fields = {"cache_dir": str(tmp_path / "kept"), "chat_template": "plain"} if kept else {}
    said = [refusal(renderer, path, kind, **fields) for _ in range(2)]
    assert said[0] == said[1]
    head, *lines = said[0]
    assert head == "4 of 6 data.train_files rows cannot be used:"
    reasons = [reason, "not JSON: ", "'prompt' is a int", "NaN is no"]
    for line, number, expected in zip(lines, (2, 4, 5, 6), reasons, strict=True):
        assert line.startswith(f"  {path} row {number}: ") and expected in line and " -- " in line
    assert "repair the text, or leave the row out" in lines[0]


def test_half_a_pair_in_the_json_text_of_a_call_is_named(tmp_path: Path):
    """The arguments of a call are JSON text, so the file itself holds no half pair."""
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}"
    template = "{% for m in messages %}{{ m.content }}" + calls + "{% endfor %}"
    renderer = Renderer(str(chat_folder(tmp_path / "model", template=template)))
    call = {"function": {"name": "f", "arguments": r'{"a": "\ud83d"}'}}
    rows = [{"prompt": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, USER]}, {"prompt": [USER]}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    _, line = refusal(renderer, path, "rl")
    assert line.startswith(f"  {path} row 1: in the JSON text of a tool call's arg")
    assert "a is not valid Unicode at character 1 (" in line and "repair the text" in line


def test_half_a_pair_that_a_template_writes_is_named(tmp_path: Path):
    template = "{% for m in messages %}{{ m.content }}" + r"""{{ "\ud83d" if m.role == "system" }}""" + "{% endfor %}"
    renderer = Renderer(str(chat_folder(tmp_path / "model", template=template)))
    rows = [{"prompt": [{"role": "system", "content": "ab"}, USER]}, {"prompt": [USER]}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    _, line = refusal(renderer, path, "rl")
    assert line.startswith(f"  {path} row 1: the text is not valid Unicode at character 3 (")
    assert "repair the text" in line


def test_a_kept_fault_is_not_that_of_another_row(tmp_path: Path, renderer: Renderer):
    fields = {"cache_dir": str(tmp_path / "kept"), "chat_template": "plain"}
    (tmp_path / "rows").mkdir()
    said = [
        refusal(renderer, write_jsonl(tmp_path / "rows" / "a.jsonl", [row]), "rl", **fields)[1].partition("row 1: ")[2][
            :9
        ]
        for row in ("{broken", '{"prompt": NaN}', {})
    ]
    assert said == ["not JSON:", "NaN is no", "there is "]


def test_rows_that_could_not_be_read_keep_their_place_among_processes(
    tmp_path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
):
    """The parts that processes get hold the sound rows alone."""
    monkeypatch.setattr(tokenized, "LEAST_ROWS", 2)
    seen: list[int] = []

    def elsewhere(cfg: Any, renderer: Any, render: Any, values: list[Any]) -> list[Any]:
        seen.append(len(values))
        return tokenized._render_part(cfg, renderer, render, values)

    monkeypatch.setattr(tokenized, "_render_elsewhere", elsewhere)
    rows = [{"prompt": str(n)} if n % 3 else {"prompt": HALF} for n in range(9)]
    path = write_jsonl(tmp_path / "a.jsonl", [*rows, {"prompt": ""}])
    lines = refusal(renderer, path, "rl", num_workers=3)
    assert seen == [2, 2, 3]
    assert [line.partition(": ")[0].split()[-1] for line in lines[1:]] == ["1", "4", "7", "10"]


def tokenizer_folder(folder: Path, model: dict[str, Any], **parts: Any) -> Path:
    """A folder with a tokenizer of another kind than the quick start's."""
    folder.mkdir()
    content: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [
            {"id": 0, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True},
        ],
        **dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")),
        "model": model,
        **parts,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_whatever_a_tokenizer_raises_is_named_with_the_row(tmp_path: Path):
    vocab = {"</s>": 0, "a": 1, "b": 2}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    folder = tokenizer_folder(tmp_path / "model", model, pre_tokenizer={"type": "WhitespaceSplit"})
    renderer = Renderer(str(folder))
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a b"}, {"prompt": "a c"}, {"prompt": "b"}, {"prompt": "d"}])
    head, *lines = refusal(renderer, path, "rl")
    assert head.startswith("2 of 4")
    for line, number in zip(lines, (2, 4), strict=True):
        assert line.startswith(f"  {path} row {number}: the tokenizer fails on the text (Exception: WordLevel error")
        assert line.endswith("-- repair the text, or leave the row out")


TEMPLATES = {
    "raise_exception": "{{ raise_exception('no system role') }}",
    "undefined": "{{ m.no.such }}",
    "type": "{{ 1 + 'a' }}",
    "zero": "{{ 1 // 0 }}",
    "index": "{{ [].pop() }}",
    "key": "{{ {}.pop('a') }}",
    "attribute": "{{ ''.join(1) }}",
    "value": "{{ 'abc'.index('x') }}",
    "overflow": "{{ (2.0 ** 1000) ** 2.0 }}",
}


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """A template that evaluates the expression which a message names."""
    cases = "".join(f"{{% if m.content == '{name}' %}}{text}{{% endif %}}" for name, text in TEMPLATES.items())
    template = "{% for m in messages %}" + cases + "{{ m.content }}{% endfor %}"
    return Renderer(str(chat_folder(tmp_path_factory.mktemp("failing") / "model", template=template)))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_whatever_a_template_raises_is_named_with_the_row(tmp_path: Path, failing: Renderer, name: str, kind: str):
    rows = [{"prompt": [{"role": "user", "content": text}], "response": "a"} for text in ("1", name, "2", name)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    head, *lines = refusal(failing, path, kind)
    assert head.startswith("2 of 4")
    for line, number in zip(lines, (2, 4), strict=True):
        assert line.startswith(f"  {path} row {number}: the chat template refuses the messages: ")
        assert line.endswith("-- give what it asks for, or leave the row out")


# A token over the border of prompt and response.

METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
BPE = {
    "type": "BPE",
    "vocab": {"</s>": 0, "\u2581": 1, "a": 2, "b": 3, "c": 4, "ab": 5, "\n": 6},
    "merges": [["a", "b"]],
}


def test_a_border_that_a_tokenizer_cannot_cut_at_is_named(tmp_path: Path):
    """Encoded apart, "b" becomes " b" with a tokenizer that puts a space first."""
    folder = tokenizer_folder(tmp_path / "model", BPE, pre_tokenizer=METASPACE, decoder=METASPACE)
    renderer = Renderer(str(folder))
    rows = [{"prompt": "a", "response": "c"}, {"prompt": "a", "response": "b"}, {"prompt": "c", "response": "ab"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    head, line = refusal(renderer, path, "sft")
    assert head.startswith("1 of 3")
    assert line.startswith(f"  {path} row 2: a token spans the border between 'a' and 'b</s>'")
    assert "-- let the first end where a token ends" in line


@pytest.mark.parametrize(("prompt", "response"), [("4+", "5"), ("4+5=", "9"), ("1", "2"), ("\n", "\n")])
def test_a_token_over_the_border_is_cut_where_it_can_be(tmp_path: Path, prompt: str, response: str):
    merges = ("+ 5", "= 9", "1 2", "\u010a \u010a")
    folder = chat_folder(tmp_path / "model", merges=merges, tokenizer_class="PreTrainedTokenizerFast")
    # Qwen2's class would cut between digits and signs, and merge none of these.
    (folder / "config.json").unlink()
    renderer = Renderer(str(folder), "plain")
    assert len(renderer.encode(prompt + response)) < len(prompt + response)
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt, "response": response}])
    (sample,) = load_sft(config(chat_template="plain"), [path], renderer).samples
    trained = [token for token, on in zip(sample.token_ids, sample.loss_mask, strict=True) if on]
    assert renderer.decode(trained) == response and trained[-1] == renderer.eos_token_ids[0]
    assert list(sample.token_ids[: -len(trained)]) == renderer.encode(prompt)


# Columns by dotted names, ground truths that compare with nothing, sources.


def test_all_names_of_columns_may_lead_into_mappings(tmp_path: Path, renderer: Renderer):
    chat = [USER, {"role": "assistant", "content": "a"}]
    row = {"extra_info": {"question": "4+5=", "chat": chat, "sol": {"text": "9"}}, "answer": "9"}
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    plain = {"chat_template": "plain"}
    (prompt,) = load_prompts(config(prompt_key="extra_info.question", **plain), [path], renderer).prompts
    assert prompt.text == "4+5="
    keys: dict[str, Any] = {"prompt_key": "extra_info.question", "response_key": "extra_info.sol.text"}
    (pair,) = load_sft(config(**keys, **plain), [path], renderer).samples
    assert renderer.decode(pair.token_ids) == "4+5=9"
    (talk,) = load_sft(config(messages_key="extra_info.chat"), [path], renderer).samples
    assert "hi" in renderer.decode(talk.token_ids)
    with pytest.raises(DataError, match=r"row 1: there is no 'extra_info\.none' -- add it, or name"):
        load_prompts(config(prompt_key="extra_info.none"), [path], renderer)


def test_kept_rows_are_found_by_what_dotted_names_lead_to(tmp_path: Path, renderer: Renderer):
    cfg = config(prompt_key="a.b", cache_dir=str(tmp_path / "kept"), chat_template="plain")
    path = tmp_path / "a.jsonl"
    texts: list[tuple[int, str]] = []
    for text in ("1", "1", "2"):
        found = load_prompts(
            cfg, [write_jsonl(path, [{"a": {"b": text}}])], Renderer(str(quickstart() / "model"), "plain")
        )
        texts.append((found.num_cached, found.prompts[0].text))
    assert texts == [(0, "1"), (1, "1"), (0, "2")]


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.array([1.0, float("nan")]), "'answer' holds nan"),
        (pa.array([float("inf"), 1.0]), "'answer' holds inf"),
        (pa.array([b"9", None]), "'answer' holds b'9'"),
        (pa.array([{"low": 1.0, "high": float("nan")}, None]), "'answer' holds nan"),
        (pa.array([[1.0, float("-inf")], None]), "'answer' holds -inf"),
    ],
)
def test_a_ground_truth_that_no_response_equals_is_refused(
    tmp_path: Path, renderer: Renderer, column: pa.Array, said: str
):
    pq.write_table(pa.table({"prompt": ["1", "2"], "answer": column}), tmp_path / "a.parquet")
    head, line = refusal(renderer, str(tmp_path / "a.parquet"), "rl")
    assert head.startswith("1 of 2") and said in line and " row " in line
    assert "-- give text or a number" in line and "leave the row out" in line


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"reward_model": '{"style": "rule", "ground_truth": "2"}', "answer": "3"},
            "'reward_model' is text that holds",
        ),
        ({"reward_model": "{'ground_truth': 2}"}, "'reward_model' is text that holds a mapping"),
        ({"answer": "2", "extra_info": '{"index": 1}'}, "'extra_info' is a str"),
        ({"answer": "2", "metadata": ["index"]}, "'metadata' is a list"),
    ],
)
def test_mappings_as_text_are_refused(tmp_path: Path, renderer: Renderer, row: dict[str, Any], reason: str):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+1=", **row}])
    _, line = refusal(renderer, path, "rl")
    assert line.startswith(f"  {path} row 2: {reason}") and "mapping" in line.partition(" -- ")[2]


@pytest.mark.parametrize(
    ("text", "reason", "cure"),
    [
        ('[{"name": "f", "name": "g"}]', "'name' stands twice in one object", "keep one"),
        (r'[{"name": "\ud83d"}]', "[0].name is not valid Unicode at character 1", "repair the text"),
        ('[{"name": "f", "n": NaN}]', "NaN is no value of JSON", "write null, or leave the key out"),
    ],
)
@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_json_text_in_a_column_is_read_as_strictly_as_a_file(
    tmp_path: Path, renderer: Renderer, kind: str, text: str, reason: str, cure: str
):
    row = {"prompt": [USER], "response": "a"}
    path = write_jsonl(tmp_path / "a.jsonl", [row, {**row, "tools": text}])
    _, line = refusal(renderer, path, kind)
    assert (
        line.startswith(f"  {path} row 2: in the JSON text of 'tools': {reason}") and cure in line.partition(" -- ")[2]
    )
