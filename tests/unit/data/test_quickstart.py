"""The quick start's generator: examples/quickstart/make_data.py."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data.files import read_rows
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.render import Renderer
from megatron_rl.data.sft import load_sft
from tests.helpers.data import MAKE_DATA, quickstart


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(str(quickstart() / "model"), "plain")


def held_out(prompt: str) -> bool:
    return zlib.crc32(prompt.encode()) % 10 == 0


def column(name: str, key: str) -> list[object]:
    return [row.values[key] for row in read_rows([str(quickstart() / name)], "files")]


def test_the_command_writes_the_same_files_again(tmp_path: Path):
    for _ in range(2):
        command = [sys.executable, str(MAKE_DATA), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert "train.parquet 8975 rows" in done.stdout
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert names == [
        "model/config.json",
        "model/generation_config.json",
        "model/tokenizer.json",
        "model/tokenizer_config.json",
        "sft_train.parquet",
        "sft_val.parquet",
        "train.parquet",
        "val.parquet",
    ]
    for name in names:
        assert (tmp_path / name).read_bytes() == (quickstart() / name).read_bytes(), name


def test_no_validation_prompt_is_in_a_training_file():
    train, val = column("sft_train.parquet", "prompt"), column("sft_val.parquet", "prompt")
    assert len(train) == len(set(train)) == 8975 and len(val) == 400
    assert all(held_out(str(prompt)) for prompt in val) and not any(held_out(str(prompt)) for prompt in train)
    messages = [[{"content": prompt, "role": "user"}] for prompt in train]
    assert column("train.parquet", "prompt") == messages


def test_answers_are_sums(renderer: Renderer):
    for name in ("sft_train.parquet", "sft_val.parquet"):
        for prompt, response in zip(column(name, "prompt"), column(name, "response"), strict=True):
            a, b = str(prompt).rstrip("=").split("+")
            assert int(str(response)) == int(a) + int(b)


def test_the_loaders_take_every_row(renderer: Renderer):
    cfg = DataConfig(train_files=["x"], max_prompt_length=6, max_response_length=8, chat_template="plain")
    prompts = load_prompts(cfg, [str(quickstart() / "val.parquet")], renderer, validation=True)
    samples = load_sft(cfg, [str(quickstart() / "sft_val.parquet")], renderer)
    assert prompts.num_rows == len(prompts.prompts) == samples.num_rows == len(samples.samples) == 400
    assert {prompt.data_source for prompt in prompts.prompts} == {"add2"}
    for prompt, sample in zip(prompts.prompts, samples.samples, strict=True):
        answer = renderer.encode(str(prompt.ground_truth))
        assert sample.token_ids == (*prompt.token_ids, *answer, *renderer.eos_token_ids)
        assert sum(sample.loss_mask) == len(answer) + 1


def test_the_template_and_plain_are_the_same(renderer: Renderer):
    messages = [{"role": "user", "content": "4+5="}]
    template = Renderer(str(quickstart() / "model"))
    assert template.prompt_ids(messages) == renderer.prompt_ids(messages)
    assert template.sft_ids(messages, "9") == renderer.sft_ids(messages, "9")


def test_the_tokenizer_has_one_token_a_character_and_fits_the_model(renderer: Renderer):
    text = "".join(map(chr, range(32, 127))) + "\n"
    assert len(renderer.encode(text)) == len(text) and renderer.decode(renderer.encode(text)) == text
    config = json.loads((quickstart() / "model" / "config.json").read_text())
    assert renderer.vocab_size == config["vocab_size"] == 128
    assert config["eos_token_id"] == renderer.eos_token_ids[0] and config["pad_token_id"] == renderer.pad_token_id
    # A token in reserve is no special token, so a response that holds one does not pass for a clean one.
    assert renderer.decode([127]) != ""


def test_transformers_reads_the_model_folder():
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(quickstart() / "model"))
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (128, 3, 4)
    assert (config.num_key_value_heads, config.head_dim, config.intermediate_size) == (2, 32, 320)
    assert config.tie_word_embeddings and config.rope_parameters["rope_theta"] == 10000.0
