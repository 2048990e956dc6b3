"""What of a row reaches the chat template, what is refused by file and row, what is listed: nothing is
left out silently.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from transformers import AutoTokenizer

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data.prompts import PromptSet, load_prompts
from megatron_rl.data.render import Renderer
from megatron_rl.data.sft import SftSet, load_sft
from megatron_rl.errors import DataError
from megatron_rl.runs.summary import summary_lines
from tests.helpers.data import chat_folder, write_jsonl, write_parquet

Row = dict[str, Any]
Kind = Literal["rl", "sft"]

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %} {{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>"
    "{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    "{% if effort is defined %}[{{ effort }}]{% endif %}{% endif %}"
)
"""Answers are written without the head's addition, so rows with keywords are for prompts; THINKING is for SFT."""
THINKING = TEMPLATE.replace(
    "{% if m.content %}",
    "{% if m.role == 'assistant' and enable_thinking is defined and enable_thinking is false %}<think></think>"
    "{% endif %}{% if m.content %}",
)
USER: Row = {"role": "user", "content": "weather?"}
ANSWER: Row = {"role": "assistant", "content": "cold"}
WEATHER: Row = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CLOCK: Row = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
CALL: Row = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
RL: Row = {"prompt": [USER], "answer": "cold"}
SFT: Row = {"messages": [USER, ANSWER]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("tools") / "model", template=TEMPLATE)


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Renderer:
    return Renderer(str(folder))


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(str(chat_folder(tmp_path_factory.mktemp("thinking") / "model", template=THINKING)))


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """Its template reads neither tools nor keywords."""
    return Renderer(str(chat_folder(tmp_path_factory.mktemp("chatml") / "model")))


def load(kind: Kind, renderer: Renderer, path: str, **fields: Any) -> PromptSet | SftSet:
    cfg = DataConfig(**{"train_files": [path], "max_prompt_length": 900, "max_response_length": 900, **fields})
    return (load_prompts if kind == "rl" else load_sft)(cfg, [path], renderer)


def text_of(kind: Kind, renderer: Renderer, path: str, **fields: Any) -> str:
    """What the model is given of the file's first row, and is trained on, with the trained part in brackets."""
    found = load(kind, renderer, path, **fields)
    if isinstance(found, PromptSet):
        return found.prompts[0].text
    text, on = "", False
    for token, flag in zip(found.samples[0].token_ids, found.samples[0].loss_mask, strict=True):
        text += "[" * (flag and not on) + "]" * (on and not flag)
        text += renderer.decode([token], skip_special_tokens=False)
        on = flag
    return text + "]" * on


def head(*tools: Row) -> str:
    return "<|im_start|>system\nTools:" + "".join(f" {json.dumps(tool)}" for tool in tools) + "<|im_end|>\n"


ASKED = "<|im_start|>user\nweather?<|im_end|>\n<|im_start|>assistant\n"
TOLD = ASKED + "[cold<|im_end|>]\n"


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
@pytest.mark.parametrize(
    ("extra", "tools"),
    [
        ({"tools": [WEATHER]}, [WEATHER]),
        ({"tools": [WEATHER, {**CLOCK, "strict": True}]}, [WEATHER, {**CLOCK, "strict": True}]),
        ({"tools": WEATHER}, [WEATHER]),
        ({"tools": json.dumps([WEATHER, CLOCK])}, [WEATHER, CLOCK]),
        ({"tools": json.dumps(WEATHER)}, [WEATHER]),
        ({"tools": [json.dumps(WEATHER), json.dumps(CLOCK)]}, [WEATHER, CLOCK]),
        ({"metadata": {"tools": [WEATHER]}}, [WEATHER]),
        ({"tools": []}, []),
        ({"tools": ""}, []),
        ({"tools": None}, []),
        ({"tools": "[]"}, []),
    ],
)
def test_tools_reach_the_template(tmp_path: Path, renderer: Renderer, write: Any, extra: Row, tools: list[Row]):
    path = tmp_path / ("a.parquet" if write is write_parquet else "a.jsonl")
    before = head(*tools) if tools else ""
    assert text_of("rl", renderer, write(path, [RL | extra])) == before + ASKED
    assert text_of("sft", renderer, write(path, [SFT | extra])) == before + TOLD


def test_the_tools_column_has_a_key(tmp_path: Path, renderer: Renderer):
    path = write_jsonl(tmp_path / "a.jsonl", [RL | {"info": {"functions": [WEATHER]}}])
    found = load("rl", renderer, path, tools_key="info.functions")
    assert isinstance(found, PromptSet)
    assert found.prompts[0].text == head(WEATHER) + ASKED and found.notes == ()


@pytest.mark.parametrize(
    ("row", "keywords"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"enable_thinking": True}, {"enable_thinking": True}),
        ({"enable_thinking": "False"}, {"enable_thinking": False}),
        ({"enable_thinking": 0}, {"enable_thinking": False}),
        ({"enable_thinking": None}, {}),
        ({"chat_template_kwargs": {"enable_thinking": False, "effort": "low"}},
         {"enable_thinking": False, "effort": "low"}),
        ({"chat_template_kwargs": '{"effort": "high"}'}, {"effort": "high"}),
        ({"apply_chat_template_kwargs": {"effort": 3}}, {"effort": 3}),
        ({"chat_template_kwargs": {"effort": "low"}, "enable_thinking": False},
         {"effort": "low", "enable_thinking": False}),
        ({"chat_template_kwargs": {}}, {}),
        ({"tools": [WEATHER], "enable_thinking": False}, {"tools": [WEATHER], "enable_thinking": False}),
    ],
)  # fmt: skip
def test_ids_are_those_of_apply_chat_template(
    tmp_path: Path, folder: Path, renderer: Renderer, row: Row, keywords: dict[str, Any]
):
    found = load("rl", renderer, write_jsonl(tmp_path / "a.jsonl", [RL | row]))
    assert isinstance(found, PromptSet)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = tokenizer.apply_chat_template(
        [USER], add_generation_prompt=True, tokenize=True, return_dict=False, **keywords
    )
    assert list(found.prompts[0].token_ids) == expected


def test_a_rows_keywords_come_before_the_runs(tmp_path: Path, folder: Path):
    renderer = Renderer(str(folder), template_kwargs={"effort": "low", "enable_thinking": False})
    rows = [RL, RL | {"chat_template_kwargs": {"effort": "high"}}, RL | {"enable_thinking": True}]
    found = load("rl", renderer, write_jsonl(tmp_path / "a.jsonl", rows))
    assert isinstance(found, PromptSet)
    assert [prompt.text.removeprefix(ASKED) for prompt in found.prompts] == [
        "<think></think>[low]",
        "<think></think>[high]",
        "[low]",
    ]


def test_sft_masks_are_right_with_tools_and_keywords(tmp_path: Path, thinking: Renderer):
    """N6"""
    row = {
        "messages": [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "-3"},
            ANSWER,
        ],
        "tools": [WEATHER],
        "enable_thinking": False,
    }
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    assert text_of("sft", thinking, path) == (
        head(WEATHER)
        + ASKED
        + '<think></think>[<call>weather {"city": "Oslo"}</call><|im_end|>]\n<|im_start|>tool\n-3<|im_end|>\n'
        + "<|im_start|>assistant\n<think></think>[cold<|im_end|>]\n"
    )
    found = load("sft", thinking, path)
    assert isinstance(found, SftSet)
    tokenizer = AutoTokenizer.from_pretrained(thinking.tokenizer_path)
    keywords = {"tools": [WEATHER], "enable_thinking": False, "return_dict": False}
    assert list(found.samples[0].token_ids) == tokenizer.apply_chat_template(row["messages"], **keywords)


@pytest.mark.parametrize("column", ["system", "system_prompt", "system_message"])
def test_a_system_column_becomes_a_system_message(tmp_path: Path, renderer: Renderer, column: str):
    first = "<|im_start|>system\nOne word.<|im_end|>\n"
    path = tmp_path / "a.jsonl"
    assert text_of("rl", renderer, write_jsonl(path, [RL | {column: "One word."}])) == first + ASKED
    assert text_of("sft", renderer, write_jsonl(path, [SFT | {column: "One word."}])) == first + TOLD
    pair = {"prompt": "weather?", "response": "cold", column: "One word."}
    assert text_of("sft", renderer, write_jsonl(path, [pair]), string_prompt="user") == first + TOLD
    found = load("rl", renderer, write_jsonl(path, [RL | {column: "One word."}]))
    assert isinstance(found, PromptSet) and found.prompts[0].messages is not None
    assert found.prompts[0].messages[0] == {"role": "system", "content": "One word."}
    assert text_of("rl", renderer, write_jsonl(path, [RL | {column: ""}])) == ASKED


SHAREGPT = [{"from": "human", "value": "weather?"}, {"from": "gpt", "value": "cold"}]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"conversations": SHAREGPT}, TOLD),
        ({"conversations": [{"from": "system", "value": "Brief."}, *SHAREGPT]},
         f"<|im_start|>system\nBrief.<|im_end|>\n{TOLD}"),
        ({"messages": SHAREGPT}, TOLD),
        ({"conversations": [USER, ANSWER]}, TOLD),
        ({"conversations": [
            SHAREGPT[0],
            {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
            {"from": "observation", "value": "-3"},
            SHAREGPT[1],
         ], "tools": json.dumps([WEATHER])},
         f'{head(WEATHER)}{ASKED}[<call>weather {{"city": "Oslo"}}</call><|im_end|>]\n<|im_start|>tool\n-3<|im_end|>\n'
         "<|im_start|>assistant\n[cold<|im_end|>]\n"),
        ({"prompt": [USER], "completion": [ANSWER]}, TOLD),
        ({"prompt": [USER], "completion": "cold"}, TOLD),
        ({"prompt": "4+5=", "completion": "9"}, "4+5=[9<|im_end|>]"),
        ({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}, TOLD.replace("[", "").replace("]", "") + TOLD),
        ({"prompt": [USER], "response": [ANSWER]}, TOLD),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "wea"},
                                                    {"type": "text", "text": "ther?"}]},
                       {"role": "assistant", "content": [{"type": "output_text", "text": "cold"}]}]}, TOLD),
        ({"messages": [USER, {**ANSWER, "weight": 1}]}, TOLD),
        ({"messages": [{**USER, "train": False}, {**ANSWER, "train": True}]}, TOLD),
        ({"messages": [USER, {"role": "assistant", "content": "cold", "tool_calls": None}]}, TOLD),
        ({"messages": [USER, ANSWER], "chosen": None, "images": [], "loss_mask": None}, TOLD),
    ],
)  # fmt: skip
def test_conversations_of_other_trainers_are_read(tmp_path: Path, renderer: Renderer, row: Row, text: str):
    assert text_of("sft", renderer, write_jsonl(tmp_path / "a.jsonl", [row])) == text


@pytest.mark.parametrize("row", [{"conversations": SHAREGPT[:1]}, {"prompt": SHAREGPT[:1]}])
def test_prompts_in_sharegpts_form_are_read(tmp_path: Path, renderer: Renderer, row: Row):
    assert text_of("rl", renderer, write_jsonl(tmp_path / "a.jsonl", [row])) == ASKED


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("{{ c.function.arguments | tojson }}", '{"city": "Oslo"}'),
        ("{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
         '{"city":"Oslo"}'),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "city=Oslo"),
    ],
)  # fmt: skip
def test_arguments_that_are_text_are_not_written_as_text_in_text(tmp_path: Path, written: str, arguments: str):
    template = TEMPLATE.replace("{{ c.function.arguments | tojson }}", written)
    renderer = Renderer(str(chat_folder(tmp_path / "model", template=template)))
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
    row = {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}
    assert f"<call>weather {arguments}</call>" in text_of("sft", renderer, write_jsonl(tmp_path / "a.jsonl", [row]))


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("{{ m.content }}", "assistant\n[<call>"),
        ("{{ m.content + '' }}", "assistant\n[<call>"),
        ("{% if m.content is none %}none{% else %}{{ m.content }}{% endif %}", "assistant\n[none<call>"),
    ],
)
def test_no_content_beside_tool_calls_is_never_written_as_a_word(tmp_path: Path, written: str, text: str):
    template = TEMPLATE.replace("{% if m.content %}{{ m.content }}{% endif %}", written)
    renderer = Renderer(str(chat_folder(tmp_path / "model", template=template)))
    row = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]}
    found = text_of("sft", renderer, write_jsonl(tmp_path / "a.jsonl", [row]))
    assert text in found and "None" not in found


ONE_TURN = "take it out to train on one turn"
TEXT_ALONE = "take it out if the text says all, else leave the row out"
MASK = "write one row for each response (prompt and response keys), and take it out"
PAIR = "give the answer to train on in data.response_key or the messages, and take it out"
MESSAGE_MASK = "write one row for each response (prompt and response keys), or take"
PICTURE = [{"path": "x.png"}]

REFUSED: list[tuple[Row, str, str]] = [
    ({"images": PICTURE}, "'images' = [{'path': 'x.png'}] is not used", TEXT_ALONE),
    ({"image": "x.png"}, "'image' = 'x.png' is not used", TEXT_ALONE),
    ({"videos": [{"video": "x.mp4"}]}, "'videos' = ", TEXT_ALONE),
    ({"video": "x.mp4"}, "'video' = ", TEXT_ALONE),
    ({"audio": {"path": "x.wav"}}, "'audio' = ", TEXT_ALONE),
    ({"audios": ["x.wav"]}, "'audios' = ", TEXT_ALONE),
    ({"multi_modal_data": {"image": [1]}}, "'multi_modal_data' = ", TEXT_ALONE),
    ({"agent_name": "tool_agent"}, "'agent_name' = 'tool_agent' is not used: several turns", ONE_TURN),
    ({"tools_kwargs": {"calc": {"create_kwargs": {"x": 1}}}}, "'tools_kwargs' = ", ONE_TURN),
    ({"interaction_kwargs": {"name": "gsm8k"}}, "'interaction_kwargs' = ", ONE_TURN),
    ({"need_tools_kwargs": True}, "'need_tools_kwargs' = True", ONE_TURN),
    ({"extra_info": {"need_tools_kwargs": True}}, "'extra_info.need_tools_kwargs' = True", ONE_TURN),
    ({"extra_info": {"tools_kwargs": {"calc": {"a": 1}}}}, "'extra_info.tools_kwargs' = ", ONE_TURN),
    ({"extra_info": {"interaction_kwargs": {"name": "x"}}}, "'extra_info.interaction_kwargs' = ", ONE_TURN),
    ({"extra_info": {"agent_name": "react"}}, "'extra_info.agent_name' = 'react'", ONE_TURN),
    ({"metadata": {"tools_kwargs": {"calc": 1}}}, "'metadata.tools_kwargs' = ", ONE_TURN),
    ({"loss_mask": [0, 1]}, "'loss_mask' = [0, 1] is not used: masks and weights", MASK),
    ({"completion_mask": [1, 1]}, "'completion_mask' = ", MASK),
    ({"assistant_masks": [0, 1]}, "'assistant_masks' = ", MASK),
    ({"weight": 0.5}, "'weight' = 0.5 is not used", MASK),
    ({"train": False}, "'train' = False is not used", MASK),
    ({"chosen": [ANSWER], "rejected": [ANSWER]}, "'chosen' = ", PAIR),
    ({"rejected": "warm"}, "'rejected' = 'warm' is not used: pairs of answers", PAIR),
    ({"rejected_response": "warm"}, "'rejected_response' = 'warm'", PAIR),
    ({"history": [["a", "b"]]}, "'history' = [['a', 'b']] is not used", "write them as messages"),
    ({"functions": [WEATHER]}, "'functions' = ", "name the column tools"),
    ({"effort": "low"}, "'effort' is not used, and the chat template reads", "in the column chat_template_kwargs"),
    ({"tools": "weather"}, "'tools' is text that is not JSON", "give a list or mapping, or JSON text"),
    ({"tools": 3}, "'tools' holds 3", "give a list of mappings"),
    ({"tools": ["weather"]}, "'tools' is text that is not JSON", "give a list or mapping"),
    ({"tools": [[WEATHER]]}, "'tools' holds [", "give a list of mappings"),
    ({"tools": [WEATHER, {}]}, "'tools' holds {}", "one for each tool"),
    ({"enable_thinking": "maybe"}, "enable_thinking = 'maybe'", "give true or false"),
    ({"enable_thinking": 2}, "enable_thinking = 2", "give true or false"),
    ({"chat_template_kwargs": [1]}, "'chat_template_kwargs' is [1]", "give a mapping of the chat template's keywords"),
    ({"chat_template_kwargs": "x: 1"}, "'chat_template_kwargs' is text that is not JSON", "JSON text"),
    ({"chat_template_kwargs": {"enable_thinking": "no"}}, "enable_thinking = 'no'", "give true or false"),
    ({"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False}, "True in 'chat_template_kwargs'",
     "keep one of the two"),
    ({"chat_template_kwargs": {"tools": [WEATHER]}}, "'chat_template_kwargs' holds 'tools'", "a column of their own"),
    ({"chat_template_kwargs": {"tokenize": True}}, "'chat_template_kwargs' holds 'tokenize'", "leave it out"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "holds 'chat_template'", "into the tokenizer's folder"),
    ({"chat_template_kwargs": {"colour": "red"}}, "'colour' would be without effect", "or take it out"),
    ({"system": 3}, "'system' is 3", "give a string"),
    ({"system": "a", "system_prompt": "b"}, "'system' and 'system_prompt', and they differ", "keep one of the two"),
]  # fmt: skip


def refusal(kind: Kind, renderer: Renderer, tmp_path: Path, good: Row, row: Row, **fields: Any) -> str:
    """What a file says whose second row is bad; nothing is written."""
    path = write_jsonl(tmp_path / "rows.jsonl", [good, row])
    with pytest.raises(DataError) as error:
        load(kind, renderer, path, cache_dir=None, **fields)
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]
    text = str(error.value)
    assert "1 of 2 data.train_files rows cannot be used:" in text and f"{path} row 2: " in text
    assert "row 1:" not in text
    return text


@pytest.mark.parametrize("kind", ["rl", "sft"])
@pytest.mark.parametrize(("extra", "reason", "cure"), REFUSED)
def test_columns_that_cannot_be_used_are_refused(
    tmp_path: Path, renderer: Renderer, kind: Kind, extra: Row, reason: str, cure: str
):
    good = RL if kind == "rl" else SFT
    text = refusal(kind, renderer, tmp_path, good, good | extra)
    assert reason in text and cure in text.partition(reason)[2]


@pytest.mark.parametrize(
    ("message", "reason", "cure"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "part 1 of type 'image_url'",
         "give text parts"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio", "data": "x"}]},
         "part 2 of type 'input_audio'", "give text parts"),
        ({"role": "user", "content": [{"type": "image"}]}, "part 1 of type 'image'", "give text parts"),
        ({"role": "user", "content": ["a"]}, "content part 1 = 'a'", 'parts {"type": "text", "text": ...}'),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "part 1 of type 'text'", "give text parts"),
        ({"role": "user", "content": "a", "images": ["x.png"]}, "message 1 has 'images'", TEXT_ALONE),
        ({"role": "human", "content": "a"}, "message 1 has role = 'human'", "use one of system, developer, user"),
        ({"role": "User", "content": "a"}, "message 1 has role = 'User'", "use one of system, developer, user"),
        ({"from": "narrator", "value": "a"}, "message 1 has from = 'narrator'",
         "use one of system, human, user, gpt"),
        ({"from": "human", "value": None}, "message 1 has content = None", "give a string"),
        ({"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1, "a": 2}}'},
         "JSON text of message 1: 'a' stands twice", "keep one"),
        ({"from": "function_call", "value": '{"name": "f", "arguments": {"a": NaN}}'},
         "JSON text of message 1: NaN", "write null"),
        ({"from": "function_call", "value": "weather()"}, "function_call with value = 'weather()'",
         "give JSON text of"),
        ({"role": "user", "content": None}, "message 1 has content = None", "give a string"),
        ({"role": "user", "content": "a", "loss_mask": 1}, "message 1 has loss_mask = 1", MESSAGE_MASK),
        ({"role": "user", "content": "a", "weight": 0.5}, "message 1 has weight = 0.5", MESSAGE_MASK),
        ({"role": "user", "content": "a", "step_loss_mask": 1}, "message 1 has step_loss_mask = 1", MESSAGE_MASK),
        ({"role": "user", "content": "a", "reasoning_content": "b"}, "message 1 has 'reasoning_content', which would",
         "use a tokenizer whose chat template writes reasoning_content"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_messages_that_cannot_be_used_are_refused(
    tmp_path: Path, renderer: Renderer, kind: Kind, message: Row, reason: str, cure: str
):
    good = RL if kind == "rl" else SFT
    row = RL | {"prompt": [message]} if kind == "rl" else {"messages": [message, ANSWER]}
    text = refusal(kind, renderer, tmp_path, good, row)
    assert reason in text and cure in text.partition(reason)[2]


@pytest.mark.parametrize(
    ("arguments", "reason", "cure"),
    [
        ('{"city": "Oslo", "city": "Bergen"}', "'city' stands twice", "keep one"),
        ('{"days": 1e999}', "1e999 is beyond", "write it as text"),
        ('{"days": NaN}', "NaN is no value", "write null"),
        (r'{"city": "\ud83d"}', "city is not valid Unicode", "repair"),
    ],
)
def test_arguments_that_lose_something_as_a_mapping_are_refused(
    tmp_path: Path, renderer: Renderer, arguments: str, reason: str, cure: str
):
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    row = {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, USER, ANSWER]}
    text = refusal("sft", renderer, tmp_path, SFT, row)
    assert f"JSON text of a tool call's arguments: {reason}" in text and cure in text.partition(reason)[2]


@pytest.mark.parametrize(
    ("row", "fields", "reason", "cure"),
    [
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, {}, "message 2 has weight = 0", MESSAGE_MASK),
        ({"messages": [USER, {**ANSWER, "train": False}]}, {}, "message 2 has train = False", MESSAGE_MASK),
        ({"messages": [USER, {**ANSWER, "loss_mask": [0, 1]}]}, {}, "message 2 has loss_mask = [0, 1]", MESSAGE_MASK),
        ({"messages": [USER, {**ANSWER, "loss": False}]}, {}, "message 2 has loss = False", MESSAGE_MASK),
        ({"prompt": "a", "completion": [ANSWER]}, {}, "'completion' is a list, and the prompt a string",
         "give messages"),
        ({"prompt": [USER], "completion": 3}, {}, "'completion' is a int", "give a string"),
        ({"prompt": [USER, ANSWER], "completion": [ANSWER]}, {}, "ends with an assistant message",
         "leave the answer out"),
        ({"prompt": [USER], "completion": []}, {}, "no assistant message", "add one, or leave the row out"),
        ({"instruction": "a", "input": "b", "response": "c"}, {"prompt_key": "instruction"}, "'input' is not used",
         "join the two in one column"),
        ({"messages": [{"role": "system", "content": "a"}, USER, ANSWER], "system": "b"}, {},
         "there is a system message beside the column 'system'", "keep one of the two"),
    ],
)  # fmt: skip
def test_sft_rows_whose_content_would_be_lost_are_refused(
    tmp_path: Path, renderer: Renderer, row: Row, fields: Row, reason: str, cure: str
):
    good = {"instruction": "a", "response": "c"} if fields else SFT
    text = refusal("sft", renderer, tmp_path, good, row, **fields)
    assert reason in text and cure in text.partition(reason)[2]


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ({"tools": [WEATHER]}, "tools"),
        ({"enable_thinking": False}, "enable_thinking"),
        ({"chat_template_kwargs": {"effort": "low"}}, "effort"),
    ],
)
@pytest.mark.parametrize("chat_template", ["tokenizer", "plain"])
def test_what_a_template_does_not_read_is_refused(
    tmp_path: Path, chatml: Renderer, extra: Row, name: str, chat_template: Literal["tokenizer", "plain"]
):
    renderer = chatml if chat_template == "tokenizer" else Renderer(chatml.tokenizer_path, "plain")
    text = refusal("rl", renderer, tmp_path, RL, RL | extra)
    assert f"'{name}' would be without effect" in text and f"chat template uses {name}, or take it out" in text
    call = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]}
    assert "message 2 has 'tool_calls', which would be left out" in refusal("sft", renderer, tmp_path, SFT, call)


@pytest.mark.parametrize("extra", [{"tools": [WEATHER]}, {"enable_thinking": False}, {"system": "Brief."}])
def test_a_string_prompt_takes_nothing_for_the_template(tmp_path: Path, renderer: Renderer, extra: Row):
    good = {"prompt": "4+5=", "answer": "9"}
    text = refusal("rl", renderer, tmp_path, good, good | extra)
    assert f"'{next(iter(extra))}' is for the chat template" in text and "set data.string_prompt=user" in text


HARMLESS: list[Row] = [
    {"images": None}, {"images": []}, {"agent_name": "single_turn_agent"}, {"agent_name": ""},
    {"need_tools_kwargs": False}, {"tools_kwargs": {}}, {"tools_kwargs": {"calc": {"create_kwargs": None}}},
    {"interaction_kwargs": None}, {"chosen": None, "rejected": None}, {"weight": 1.0}, {"train": True},
    {"extra_info": {"need_tools_kwargs": False, "index": 3, "split": "train"}}, {"history": []},
    {"ability": "math", "index": 4, "split": "train"},
]  # fmt: skip


@pytest.mark.parametrize("extra", HARMLESS)
def test_empty_and_harmless_columns_are_neither_refused_nor_listed(tmp_path: Path, renderer: Renderer, extra: Row):
    found = load("rl", renderer, write_jsonl(tmp_path / "a.jsonl", [RL | extra]))
    assert isinstance(found, PromptSet) and found.prompts[0].text == ASKED and found.notes == ()


def test_other_columns_are_listed_once(tmp_path: Path, renderer: Renderer):
    rows = [
        RL | {"id": 1, "level": "hard", "label": "x", "metadata": {"a": 1}, "extra_info": {"b": 2}},
        {"prompt": [{**USER, "mood": "fair"}], "answer": "cold", "id": 2, "level": None},
    ]
    found = load("rl", renderer, write_jsonl(tmp_path / "a.jsonl", rows))
    note = (
        "columns that are not used: id, label (1 rows), level (1 rows), metadata (1 rows), prompt[].mood (1 rows) "
        "-- a reward is given extra_info (data.metadata_key)"
    )
    assert found.notes == (note,)
    assert summary_lines({"train": found}, {}) == ["train: 2 rows, 0 left out and 0 cut for length", f"train: {note}"]
    sft = load("sft", renderer, write_jsonl(tmp_path / "b.jsonl", [SFT | {"prompt": "weather?", "source": "x"}]))
    assert sft.notes == ("columns that are not used: prompt, source",)


def test_every_fault_of_a_row_is_named_at_once(tmp_path: Path, renderer: Renderer):
    text = refusal("rl", renderer, tmp_path, RL, RL | {"images": ["x"], "agent_name": "a", "chosen": "b"})
    assert "'images' = " in text and "'agent_name' = " in text and "'chosen' = " in text


def test_kept_tokens_follow_the_columns_that_reach_the_template(tmp_path: Path, renderer: Renderer):
    path, kept = tmp_path / "a.jsonl", str(tmp_path / "kept")
    columns: list[Row] = [
        {},
        {"tools": [WEATHER]},
        {"enable_thinking": False},
        {"system": "a"},
        {"metadata": {"tools": WEATHER}},
    ]
    texts = [text_of("rl", renderer, write_jsonl(path, [RL | extra]), cache_dir=kept) for extra in columns]
    assert len(set(texts)) == 4 and texts[1] == texts[4]
    assert texts == [text_of("rl", renderer, write_jsonl(path, [RL | extra]), cache_dir=kept) for extra in columns]
