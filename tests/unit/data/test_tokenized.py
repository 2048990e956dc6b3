"""Rows tokenized in several processes, and kept in files for later runs."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data import tokenized
from megatron_rl.data.files import DataRow
from megatron_rl.data.prompts import PromptSet, load_prompts, render_prompt
from megatron_rl.data.render import Renderer
from megatron_rl.data.sft import load_sft
from megatron_rl.data.tokenized import render_rows
from megatron_rl.errors import DataError
from tests.helpers.data import chat_folder, model_folder, quickstart, write_jsonl, write_parquet


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(str(quickstart() / "model"), "plain")


def config(**fields: Any) -> DataConfig:
    return DataConfig(**{"train_files": ["unused"], "max_prompt_length": 8, "chat_template": "plain", **fields})


def sums(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}+1=", "answer": str(i + 1), "response": str(i + 1)} for i in range(first, first + count)]


def test_several_processes_give_what_one_gives(renderer: Renderer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenized, "LEAST_ROWS", 10)
    values = [*sums(29), {"prompt": 3}, {"prompt": "4\u00e9="}, *sums(10)]
    rows = [DataRow("a.jsonl", number, row) for number, row in enumerate(values, start=1)]
    found = render_rows(config(num_workers=2), rows, renderer, render_prompt)
    assert found == render_rows(config(), rows, renderer, render_prompt)
    assert [row.fault is None for row in found.rows] == [True] * 29 + [False] * 2 + [True] * 10


@pytest.mark.slow  # Two processes import transformers: 20 seconds of a core.
def test_an_error_of_a_process_is_the_error_of_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenized, "LEAST_ROWS", 10)
    renderer = Renderer(str(model_folder(tmp_path / "model", chat_template=None)))
    rows = [{"prompt": [{"role": "user", "content": "1+1="}]}] * 20
    with pytest.raises(DataError, match="has no chat template"):
        load_prompts(config(num_workers=2), [write_jsonl(tmp_path / "a.jsonl", rows)], renderer)


def test_kept_rows_are_the_same_and_counted(tmp_path: Path, renderer: Renderer):
    """R6"""
    cfg = config(cache_dir=str(tmp_path / "kept"), overlong_prompts="filter")
    files = [
        write_jsonl(tmp_path / "a.jsonl", [*sums(5), {"prompt": "1234567+1="}]),
        write_parquet(tmp_path / "b.parquet", sums(3)),
    ]
    first, again = load_prompts(cfg, files, renderer), load_prompts(cfg, files, renderer)
    assert (first.num_cached, again.num_cached) == (0, 9)
    assert (first.prompts, first.num_filtered) == (again.prompts, again.num_filtered) and again.num_filtered == 1
    # The limit is no part of what is kept; nor are columns that rendering does not read.
    assert load_prompts(config(cache_dir=cfg.cache_dir, max_prompt_length=20), files, renderer).num_cached == 9
    write_jsonl(tmp_path / "a.jsonl", [{**row, "answer": "x"} for row in [*sums(5), {"prompt": "1234567+1="}]])
    changed = load_prompts(cfg, files, renderer)
    assert changed.num_cached == 9 and changed.prompts[0].ground_truth == "x"
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_sft_rows_are_kept_with_their_masks_and_apart_from_prompts(tmp_path: Path, renderer: Renderer):
    cfg = config(cache_dir=str(tmp_path / "kept"))
    path = write_jsonl(tmp_path / "a.jsonl", sums(4))
    load_prompts(cfg, [path], renderer)
    first, again = load_sft(cfg, [path], renderer), load_sft(cfg, [path], renderer)
    assert (first.num_cached, again.num_cached) == (0, 4)
    assert first.samples == again.samples and any(again.samples[0].loss_mask)


def test_rows_that_cannot_be_used_are_refused_from_kept_files_too(tmp_path: Path, renderer: Renderer):
    cfg = config(cache_dir=str(tmp_path / "kept"))
    path = write_jsonl(tmp_path / "a.jsonl", [*sums(2), {"prompt": ""}])
    said: list[str] = []
    for _ in range(2):
        with pytest.raises(DataError) as error:
            load_prompts(cfg, [path], renderer)
        said.append(str(error.value))
    assert said[0] == said[1] and "row 3: the text is empty" in said[0]


def test_a_stale_file_is_never_read(tmp_path: Path):
    """Other rows, another order, template, keyword, key or tokenizer: rendered again."""
    folder, kept = chat_folder(tmp_path / "model"), str(tmp_path / "kept")
    path = tmp_path / "a.jsonl"

    def load(renderer: Renderer | None = None, **fields: Any) -> PromptSet:
        renderer = renderer or Renderer(str(folder))
        cfg = config(cache_dir=kept, max_prompt_length=200, chat_template="tokenizer", **fields)
        return load_prompts(cfg, [str(path)], renderer)

    write_jsonl(path, sums(3))
    assert (load().num_cached, load().num_cached) == (0, 3)
    assert load(string_prompt="user").num_cached == 0
    assert load(prompt_key="response").num_cached == 0
    assert load(Renderer(str(folder), "plain")).num_cached == 0
    assert load(Renderer(str(folder), template_kwargs={"enable_thinking": False})).num_cached == 0
    write_jsonl(path, sums(3)[::-1])
    assert load().num_cached == 0
    write_jsonl(path, [*sums(2), {"prompt": "2+2="}])
    changed = load()
    assert changed.num_cached == 0 and changed.prompts[2].text == "2+2="
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "model_max_length": 65}))
    assert load().num_cached == 0


def test_a_template_that_writes_the_date_is_never_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    template = "{{ strftime_now('%d') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    renderer = Renderer(str(chat_folder(tmp_path / "model", template=template)))
    assert renderer.fingerprint() is None
    cfg = config(cache_dir=str(tmp_path / "kept"), chat_template="tokenizer", max_prompt_length=30)
    load_prompts(cfg, [write_jsonl(tmp_path / "a.jsonl", sums(2))], renderer)
    assert not (tmp_path / "kept").exists() and "data.cache_dir is not used" in caplog.text


def test_a_kept_file_that_is_broken_is_an_error_with_its_name(tmp_path: Path, renderer: Renderer):
    cfg = config(cache_dir=str(tmp_path / "kept"))
    path = write_jsonl(tmp_path / "a.jsonl", sums(2))
    load_prompts(cfg, [path], renderer)
    (kept,) = (tmp_path / "kept").iterdir()
    kept.write_bytes(b"PAR1 cut off")
    with pytest.raises(DataError, match=rf"{kept.name}: kept rows cannot be read .*delete the file"):
        load_prompts(cfg, [path], renderer)


def test_a_renderer_is_pickled_as_what_it_was_made_of(renderer: Renderer):
    other = pickle.loads(pickle.dumps(renderer))
    assert other.encode("4+5=") == renderer.encode("4+5=") and other.fingerprint() == renderer.fingerprint()
