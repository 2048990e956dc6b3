"""Where a chat template comes from, what is refused about one, and that a save has the one that was used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.run import RunConfig
from megatron_rl.data.files import BadRow
from megatron_rl.data.render import Renderer
from megatron_rl.errors import CheckpointError, DataError
from megatron_rl.weights.companions import copy_companions, set_chat_template
from megatron_rl.workers.saved import check_saved, is_rewritten, rehearse, run_renderer
from tests.helpers.config import faults, load
from tests.helpers.data import CHATML, chat_folder, write_jsonl
from tests.helpers.tokenizers import sentencepiece_folder, tekken_folder

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "12"}]
OWN = "{% for m in messages %}({{ m.role }}){{ m.content }}{% endfor %}"


def text_of(folder: Path, template: str | None) -> str:
    return Renderer(str(folder), model_template=template).prompt_text(ASKED)


def test_a_template_is_a_file_a_text_or_a_name(tmp_path: Path):
    folder = chat_folder(tmp_path / "model")
    (tmp_path / "a.jinja").write_text(OWN)
    (tmp_path / "a.json").write_text(json.dumps({"chat_template": OWN}))
    for given in (str(tmp_path / "a.jinja"), str(tmp_path / "a.json"), OWN):
        assert text_of(folder, given) == "(user)12"
    assert text_of(folder, None).startswith("<|im_start|>user")
    assert text_of(folder, "default").startswith("<|im_start|>user")
    (folder / "chat_template.jinja").write_text(CHATML)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "short.jinja").write_text("{{ messages[0].content }}!")
    assert text_of(folder, "short") == "12!"
    with pytest.raises(DataError, match=r"'long' is no file, no template, and no name .* \(it has default, short\)"):
        text_of(folder, "long")


def test_templates_in_the_tokenizers_folder(tmp_path: Path):
    folder = chat_folder(tmp_path / "model", template=None)
    with pytest.raises(DataError, match=r"has no chat template .* give a template in model\.chat_template"):
        text_of(folder, None)
    # transformers reads this file for processors alone.
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": OWN}))
    assert text_of(folder, None) == "(user)12"
    (folder / "chat_template.jinja").write_text(CHATML)
    assert text_of(folder, None).startswith("<|im_start|>user")
    named = chat_folder(
        tmp_path / "named", template=[{"name": "a", "template": OWN}, {"name": "b", "template": CHATML}]
    )
    assert text_of(named, "a") == "(user)12"
    with pytest.raises(DataError, match=r"has 2 chat templates and none of the name default -- choose one .*: a, b"):
        text_of(named, None)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jinja", "", "is empty"),
        ("a.jinja", "hello", "there is no {{ and no {% in it"),
        ("a.jinja", "version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        ("a.jinja", "{% for m in messages %}{{ m.role }}", "is not valid: Unexpected end of template"),
        ("a.json", "{", "is no JSON"),
        ("a.json", '{"chat_template": 3}', "its entry chat_template is 3"),
    ],
)
def test_files_that_hold_no_template_are_faults_of_the_config(tmp_path: Path, name: str, content: str, reason: str):
    (tmp_path / name).write_text(content)
    (fault,) = faults(tmp_path, f"model.chat_template={tmp_path / name}")
    assert fault.key == "model.chat_template" and reason in fault.reason and fault.cure
    with pytest.raises(DataError) as error:
        text_of(chat_folder(tmp_path / "tok"), str(tmp_path / name))
    assert reason in str(error.value)


def test_a_template_that_is_not_there_or_not_used(tmp_path: Path):
    (fault,) = faults(tmp_path, "model.chat_template=no/such.jinja")
    assert "there is no such file" in fault.reason
    (fault,) = faults(tmp_path, f"model.chat_template={OWN!r}", "data.chat_template=plain")
    assert "would be without effect: data.chat_template=plain" in fault.reason


def test_a_template_that_drops_a_role(tmp_path: Path):
    silent = "{% for m in messages if m.role != 'system' %}({{ m.role }}){{ m.content }}{% endfor %}"
    folder = chat_folder(tmp_path / "model", template=silent)
    system: dict[str, Any] = {"role": "system", "content": "Add."}
    assert text_of(folder, None) == "(user)12"
    with pytest.raises(
        BadRow, match=r"message 1 has role = 'system', and the chat template drops what such messages say"
    ):
        Renderer(str(folder)).prompt_text([system, *ASKED])
    # One that refuses the role says so itself, and one that writes it into the user's message keeps it.
    merging = "{% if messages[0].role == 'system' %}{{ messages[0].content }} {% endif %}{{ messages[-1].content }}"
    assert Renderer(str(folder), model_template=merging).prompt_text([system, *ASKED]) == "Add. 12"
    refusing = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0].content }}"
    )
    with pytest.raises(BadRow, match="refuses the messages: no system"):
        Renderer(str(folder), model_template=refusing).prompt_text([system, *ASKED])


def run_of(tmp_path: Path, tokenizer: Path, *settings: str) -> RunConfig:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": ASKED, "answer": "1"}])
    model = chat_folder(tmp_path / "weights")
    config = json.loads((model / "config.json").read_text())
    kind = (
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} if (tokenizer / "tekken.json").is_file() else {}
    )
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 40000, "eos_token_id": 2} | kind))
    paths = [f"model.path={model}", f"model.tokenizer_path={tokenizer}", f"data.train_files={rows}"]
    return load(tmp_path, *paths, "model.init=random", *settings)


@pytest.mark.parametrize("form", ["given", "json", "tekken"])
def test_a_save_renders_as_the_run_does(tmp_path: Path, form: str):
    """Into every export go the template and the tokenizer that were used, whatever file they came from."""
    settings = [f"model.chat_template={OWN!r}"] if form != "json" else []
    if form == "tekken":
        tokenizer = tekken_folder(tmp_path / "tok", words=1000)
    else:
        tokenizer = chat_folder(tmp_path / "tok", template=None if form == "json" else CHATML)
    if form == "json":
        (tokenizer / "chat_template.json").write_text(json.dumps({"chat_template": OWN}))
    cfg = run_of(tmp_path, tokenizer, *settings)
    assert is_rewritten(cfg)
    rehearse(cfg)
    out = tmp_path / "out"
    out.mkdir()
    renderer = run_renderer(cfg, cfg.model.path)
    template = renderer.saved_template()
    assert template == OWN
    copy_companions(out, Path(cfg.model.path), tokenizer, None)
    if form != "json":
        with pytest.raises(CheckpointError, match=r"does not render as the run does: a question"):
            check_saved(out, renderer, cfg)
    set_chat_template(out, template)
    check_saved(out, renderer, cfg)
    from transformers import AutoTokenizer

    again = AutoTokenizer.from_pretrained(out, local_files_only=True)
    assert again.apply_chat_template(ASKED, tokenize=False) == "(user)12" == renderer.prompt_text(ASKED)


def test_check_reads_tokenizers_without_their_libraries(tmp_path: Path):
    """Ids of a tokenizer.model beyond the model's vocabulary are refused with numbers."""
    tokenizer = sentencepiece_folder(tmp_path / "tok")
    (fault,) = faults(tmp_path, f"model.tokenizer_path={tokenizer}")
    assert (
        fault.key == "model.tokenizer_path"
        and "of its tokens have ids that the model does not know, up to 31999" in (fault.reason)
    )
    tokenizer = tekken_folder(tmp_path / "tekken", words=1000)
    (fault, *_) = faults(tmp_path, f"model.tokenizer_path={tokenizer}")
    assert "1000 of its tokens" in fault.reason and "up to 1999" in fault.reason
