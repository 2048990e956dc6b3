"""What ends a response: found in every file that names it, the same for training, sampling and the saved model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoTokenizer

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.config.sections.model import ModelConfig
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.render import Renderer
from megatron_rl.data.sft import SftSet, load_sft
from megatron_rl.engines import ENGINES
from megatron_rl.errors import CheckpointError, DataError, RolloutError
from megatron_rl.rollout.engine import EngineSettings, Request, Sampling, check_stop_texts
from megatron_rl.rollout.fake import FakeEngine
from megatron_rl.runs.summary import summary_lines
from megatron_rl.types import Samples
from tests.helpers.config import only_fault
from tests.helpers.data import CHATML, chat_folder, write_jsonl
from tests.helpers.save import write_model

Messages = list[dict[str, str]]
USER = {"role": "user", "content": "4+5="}
ROWS = [{"messages": [USER, {"role": "assistant", "content": str(n)}]} for n in range(8)]


def base_folder(folder: Path, *, named: Any = None, template: str = CHATML, **settings: Any) -> Path:
    """A ChatML template on a tokenizer whose end token is another, as base models have it.

    named: eos_token_id of generation_config.json and config.json.
    """
    chat_folder(folder, template=template)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "<|endoftext|>"} | settings))
    for name in ("generation_config.json", "config.json"):
        config = json.loads((folder / name).read_text()) | {"eos_token_id": named}
        (folder / name).write_text(json.dumps(config))
    return folder


def load(renderer: Renderer, path: str, **fields: Any) -> SftSet:
    cfg = DataConfig(**{"train_files": [path], "max_prompt_length": 90, "max_response_length": 10, **fields})
    return load_sft(cfg, [path], renderer)


def token_id(renderer: Renderer, token: str) -> int:
    (number,) = renderer.encode(token)
    return number


@pytest.mark.parametrize(
    ("tokenizer", "generation", "config", "expected"),
    [
        ("<|endoftext|>", None, None, [0]),
        ("<|endoftext|>", 3, None, [0, 3]),
        ("<|endoftext|>", None, 3, [0, 3]),
        ("<|endoftext|>", [3, 0], [4], [0, 3, 4]),
        (None, None, [4, 5], [4, 5]),
        (None, 5, 4, [5, 4]),
    ],
)
def test_end_ids_come_from_all_files(
    tmp_path: Path, tokenizer: str | None, generation: Any, config: Any, expected: list[int]
):
    """N6"""
    folder = base_folder(tmp_path / "model", tokenizer_class="PreTrainedTokenizerFast", eos_token=tokenizer)
    for name, named in (("generation_config.json", generation), ("config.json", config)):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | {"eos_token_id": named}))
    if tokenizer is None:
        (folder / "config.json").rename(tmp_path / "config.json")
        model = tmp_path / "weights"
        model.mkdir()
        (tmp_path / "config.json").rename(model / "config.json")
        (folder / "generation_config.json").rename(model / "generation_config.json")
        found = Renderer(str(folder), model_path=str(model))
    else:
        found = Renderer(str(folder))
    assert list(found.eos_token_ids) == expected


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("named", [100_000, -1, "<|endoftext|>", 1.5, True, [0, 100_000]])
def test_an_end_id_that_is_no_token_is_refused(tmp_path: Path, name: str, named: Any):
    folder = base_folder(tmp_path / "model")
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | {"eos_token_id": named}))
    with pytest.raises(DataError) as error:
        Renderer(str(folder))
    text = str(error.value)
    assert f"{folder / name}: eos_token_id " in text and "is no token of the tokenizer" in text
    assert "-- write the end token's id there, or take the entry out" in text


def test_rows_that_all_lack_an_end_are_refused_and_the_cure_works(tmp_path: Path):
    folder = base_folder(tmp_path / "model")
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(DataError) as error:
        load(Renderer(str(folder)), path)
    assert str(error.value) == (
        "data.train_files: none of the 8 rows ends with an end token ('<|endoftext|>'), so the model would not learn "
        "when to stop -- the chat template ends answers with <|im_end|>: set model.eos_token='<|im_end|>'"
    )
    data = DataConfig(train_files=[path], max_prompt_length=90)
    renderer = Renderer.from_config(ModelConfig(path=str(folder), eos_token="<|im_end|>"), data)
    found = load(renderer, path)
    assert found.num_without_end == 0 and found.notes == ()
    for sample in found.samples:
        last = [token for token, on in zip(sample.token_ids, sample.loss_mask, strict=True) if on][-1]
        assert last == renderer.eos_token_ids[0] == token_id(renderer, "<|im_end|>")


def test_a_template_without_any_end_is_refused_with_another_cure(tmp_path: Path):
    folder = base_folder(tmp_path / "model", template=CHATML.replace("<|im_end|>", ""))
    with pytest.raises(DataError, match="use a chat template that writes an end token after each answer, or data"):
        load(Renderer(str(folder)), write_jsonl(tmp_path / "a.jsonl", ROWS))
    assert load(Renderer(str(folder), "plain"), str(tmp_path / "a.jsonl")).num_without_end == 0


def test_rows_without_an_end_are_counted_in_the_first_lines(tmp_path: Path):
    """R6"""
    folder = chat_folder(tmp_path / "model")
    rows = [*ROWS[:2], {"messages": [USER, {"role": "assistant", "content": "9" * 90}]}]
    found = load(Renderer(str(folder)), write_jsonl(tmp_path / "a.jsonl", rows), overlong_prompts="truncate")
    assert found.num_without_end == 1
    note = "train: 1 of 3 rows do not teach when to stop: their last trained token is no end token"
    assert summary_lines({"train": found}, {})[1].startswith(note)


def test_a_template_that_ends_otherwise_is_said_in_rl(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": [USER], "answer": "9"}])
    cfg = DataConfig(train_files=[path])
    folder = base_folder(tmp_path / "model")
    assert load_prompts(cfg, [path], Renderer(str(folder))).notes == (
        "the chat template ends answers with <|im_end|>, which ends no response here "
        "-- model.eos_token='<|im_end|>' makes it one",
    )
    assert load_prompts(cfg, [path], Renderer(str(folder), eos_token="<|im_end|>")).notes == ()


@pytest.mark.parametrize("chat_template", ["tokenizer", "plain"])
def test_rl_without_an_end_token_is_refused(tmp_path: Path, chat_template: Literal["tokenizer", "plain"]):
    folder = base_folder(tmp_path / "model", tokenizer_class="PreTrainedTokenizerFast", eos_token=None)
    (folder / "config.json").unlink()
    renderer = Renderer(str(folder), chat_template)
    assert renderer.eos_token_ids == ()
    with pytest.raises(DataError) as error:
        renderer.stops([])
    assert str(error.value).startswith(f"{folder}: neither the tokenizer nor generation_config.json or config.json")
    cure = "'<|im_end|>', which ends the chat template's" if chat_template == "tokenizer" else "the token that ends"
    assert f"-- set model.eos_token to {cure}" in str(error.value)
    assert renderer.stops(["\n"]) == ((), ("\n",))
    cured = Renderer(str(folder), chat_template, eos_token="<|im_end|>")
    assert cured.stops([]) == ((token_id(cured, "<|im_end|>"),), ())


@pytest.mark.parametrize("token", ["<|end|>", "", "12", "<|im_end|><|im_end|>"])
def test_an_eos_token_that_is_no_token_is_refused(tmp_path: Path, token: str):
    folder = base_folder(tmp_path / "model")
    with pytest.raises(DataError) as error:
        Renderer(str(folder), eos_token=token)
    text = str(error.value)
    assert f"model.eos_token: {token!r} is no token of the tokenizer in {folder}" in text
    assert "-- use one of its special tokens: " in text and "<|im_end|>" in text


@pytest.mark.parametrize(
    ("setting", "key", "reason", "cure"),
    [
        ("rollout.stop=['a','']", "rollout.stop", "holds an empty text", "take it out"),
        ("data.apply_chat_template_kwargs={tokenize: 1}", "data.apply_chat_template_kwargs.tokenize", "is no keyword",
         "leave it out"),
        ("data.apply_chat_template_kwargs={tools: [1]}", "data.apply_chat_template_kwargs.tools", "is no keyword",
         "which data.tools_key names"),
        ("data.apply_chat_template_kwargs={add_generation_prompt: false}",
         "data.apply_chat_template_kwargs.add_generation_prompt", "is no keyword", "leave it out"),
        ("reward.judge.apply_chat_template_kwargs={chat_template: x}",
         "reward.judge.apply_chat_template_kwargs.chat_template", "is no keyword", "into the tokenizer's folder"),
    ],
)  # fmt: skip
def test_settings_that_could_have_no_effect_are_refused(tmp_path: Path, setting: str, key: str, reason: str, cure: str):
    fault = only_fault(tmp_path, setting)
    assert fault.key == key and reason in fault.reason and cure in fault.cure


def test_stops_that_are_special_tokens_are_ids_and_others_texts(tmp_path: Path):
    renderer = Renderer(str(base_folder(tmp_path / "model")))
    end = token_id(renderer, "<|im_end|>")
    stops = ["<|im_end|>", "9", "=<|im_end|>", "<|im_end|><|im_end|>"]
    assert renderer.stops(stops) == ((0, end), ("9", "=<|im_end|>", "<|im_end|><|im_end|>"))


def test_rewards_see_special_tokens_other_than_end_and_pad(tmp_path: Path):
    renderer = Renderer(str(base_folder(tmp_path / "model")))
    ids = renderer.encode("<|im_start|>4<|im_end|>5<|endoftext|>")
    assert renderer.response_text(ids) == "<|im_start|>4<|im_end|>5"
    assert renderer.response_text(ids, [token_id(renderer, "<|im_end|>")]) == "<|im_start|>45"
    assert renderer.response_text([*renderer.encode("9"), renderer.pad_token_id]) == "9"


def test_an_engines_answer_is_decoded_in_one_call_as_sample_by_sample(tmp_path: Path):
    renderer = Renderer(str(base_folder(tmp_path / "model")))
    end = token_id(renderer, "<|im_end|>")
    rows = [renderer.encode(text) for text in ("", "<|im_start|>4<|im_end|>5<|endoftext|>", "12 + 30 = 42", "", "9")]
    rows += [[end], [renderer.pad_token_id, *renderer.encode("x y"), end], []]
    samples = Samples.from_lists(rows, [[0.0] * len(row) for row in rows], ["stop"] * len(rows), 0)
    for stop_ids in ((), (end,)):
        assert renderer.response_texts(samples, stop_ids) == [renderer.response_text(row, stop_ids) for row in rows]
    assert renderer.response_texts(Samples.from_lists([], [], [], 0)) == []


def save(tmp_path: Path, folder: Path, eos_token: str | None) -> Path:
    out = tmp_path / "final"
    write_model(out, {"weight": torch.zeros(2)}.items(), companions_from=folder, eos_token=eos_token)
    return out


@pytest.mark.parametrize(("named", "expected"), [(None, None), (0, [0]), ([0, 3], [0, 3])])
def test_a_saved_model_names_the_end_token(tmp_path: Path, named: Any, expected: list[int] | None):
    folder = base_folder(tmp_path / "model", named=named)
    end = token_id(Renderer(str(folder)), "<|im_end|>")
    out = save(tmp_path, folder, "<|im_end|>")
    for name in ("generation_config.json", "config.json"):
        assert json.loads((out / name).read_text())["eos_token_id"] == ([end, *expected] if expected else end)
    assert AutoTokenizer.from_pretrained(out).eos_token_id == end
    # The saved model needs no key: it ends where the run did.
    assert Renderer(str(out)).eos_token_ids == Renderer(str(folder), eos_token="<|im_end|>").eos_token_ids[:1] + tuple(
        expected or ()
    )
    assert load(Renderer(str(out)), write_jsonl(tmp_path / "a.jsonl", ROWS)).num_without_end == 0


def test_a_saved_model_is_otherwise_what_it_was(tmp_path: Path):
    folder = base_folder(tmp_path / "model", named=0)
    out = save(tmp_path, folder, None)
    for name in ("tokenizer_config.json", "tokenizer.json", "generation_config.json", "config.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    with pytest.raises(CheckpointError, match=r"has no token '<\|end\|>' -- give model\.eos_token"):
        write_model(tmp_path / "other", {"weight": torch.zeros(2)}.items(), companions_from=folder, eos_token="<|end|>")
    assert not (tmp_path / "other").exists()


def test_an_added_token_as_eos_keeps_its_form(tmp_path: Path):
    folder = base_folder(tmp_path / "model", eos_token={"content": "<|endoftext|>", "lstrip": False})
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    out = save(tmp_path, folder, "<|im_end|>")
    written = json.loads((out / "tokenizer_config.json").read_text())["eos_token"]
    assert written == {"content": "<|im_end|>", "lstrip": False}
    assert json.loads((out / "special_tokens_map.json").read_text()) == {"eos_token": "<|im_end|>"}


def engine_settings(folder: Path, name: str, *, needs_text: bool) -> EngineSettings:
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    return EngineSettings(
        name=name, model_path=str(folder), tokenizer_path=str(folder), vocab_size=vocab_size, max_model_len=64,
        dtype="float32", device="cpu", gpu_memory_utilization=0.5, kv_cache_gb=None, max_num_seqs=8,
        max_num_batched_tokens=None, enforce_eager=True, free_cache_engine=False, seed=0, needs_text=needs_text,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("stop", "count", "reason"),
    [
        (["<|im_end|>"], 1, "stop"),
        (["<|im_end|><|im_end|>"], 2, "stop"),
        (["x<|im_end|>", "<|im_end|><|im_end|><|im_end|>"], 3, "stop"),
        (["x"], 6, "length"),
        ([], 6, "length"),
    ],
)
def test_the_hf_engine_stops_at_special_tokens(tmp_path: Path, stop: list[str], count: int, reason: str):
    from megatron_rl.rollout.hf_engine import HfEngine

    folder = base_folder(tmp_path / "model")
    renderer = Renderer(str(folder))
    end = token_id(renderer, "<|im_end|>")
    engine = HfEngine(engine_settings(folder, "hf", needs_text=bool(stop)))
    zeros = {name: torch.zeros_like(tensor) for name, tensor in engine.parameters().items()}
    engine.update_weights(always(zeros, end).items(), 0)
    ids, texts = renderer.stops(stop)
    sampling = Sampling(2, 0.0, 1.0, -1, 6, ids, texts)
    samples = engine.generate([Request((20,)), Request((20, 21))], sampling)
    for row in range(len(samples)):
        sample = samples.rollout(row, "")
        assert sample.token_ids == (end,) * count and sample.finish_reason == reason


def always(tensors: dict[str, torch.Tensor], token: int) -> dict[str, torch.Tensor]:
    """Weights, from zeros, of a model that writes one token."""
    for name, tensor in tensors.items():
        if name.endswith("embed_tokens.weight"):
            tensor.fill_(0.01)
            tensor[token] = 1.0
        elif "norm" in name:
            tensor.fill_(1.0)
        elif name == "lm_head.weight":
            tensor[token] = 1.0
    return tensors


def test_the_fake_engine_refuses_what_it_cannot_see(tmp_path: Path):
    engine = FakeEngine(engine_settings(base_folder(tmp_path / "model"), "fake", needs_text=True))
    engine.update_weights({}.items(), 0)
    assert len(engine.generate([Request((1,))], Sampling(1, 1.0, 1.0, -1, 4, (0,)))) == 1
    check_stop_texts(ENGINES["fake"], ())
    with pytest.raises(RolloutError, match="the engine fake sees no text -- stop at a special token, or use hf"):
        check_stop_texts(ENGINES["fake"], ("9",))


def test_the_tokenizers_own_end_token_is_replaced_in_templates_too(tmp_path: Path):
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    folder = base_folder(tmp_path / "model", template=template)
    renderer = Renderer(str(folder), eos_token="<|im_end|>")
    assert renderer.prompt_text([USER]) == "4+5=<|im_end|>"
    assert Renderer(str(save(tmp_path, folder, "<|im_end|>"))).prompt_text([USER]) == "4+5=<|im_end|>"
    plain = Renderer(str(folder), "plain", eos_token="<|im_end|>")
    assert plain.sft_ids("1", "2")[0][-1] == token_id(plain, "<|im_end|>")
