"""Files of a model folder beside its weights: copied, each kind from one folder alone."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.models.changes import laid_over
from megatron_rl.models.tokenizers.files import made_tokenizer_json, other_tokenizers, tokenizer_file

MODEL_FILES = ("config.json", "generation_config.json")
# Every file that a tokenizer of transformers is read from; a template in one of them hides that of another.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "merges.txt", "vocab.txt"),
    *("chat_template.jinja", "chat_template.json"),
)
TEMPLATE_FOLDERS = ("additional_chat_templates", "chat_templates")


def copy_companions(folder: Path, model: Path, tokenizer: Path, changes: Mapping[str, Any] | None) -> None:
    """Copy config.json and generation_config.json from `model`, every tokenizer file from `tokenizer`.

    A tokenizer without tokenizer.json gets one, with the same ids: transformers reads other files by guesses.
    changes: entries of config.json that differ (models/changes.py). Raises DataError if the tokenizer cannot be read.
    """
    for source, names in ((model, MODEL_FILES), (tokenizer, TOKENIZER_FILES)):
        for name in names:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
    for name in TEMPLATE_FOLDERS:
        if (tokenizer / name).is_dir():
            shutil.copytree(tokenizer / name, folder / name, copy_function=shutil.copyfile)
    if not (folder / "tokenizer.json").is_file() and other_tokenizers(tokenizer):
        content, settings = made_tokenizer_json(tokenizer_file(tokenizer))
        (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
        write_json(folder / "tokenizer_config.json", settings)
    path = folder / "config.json"
    further = "num_nextn_predict_layers"
    if path.is_file() and json.loads(path.read_text(encoding="utf-8")).get(further):
        # Their weights are not written: whoever opens the folder must not look for them.
        changes = {**(changes or {}), further: 0}
    if changes:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "dtype" in changes:
            config.pop("torch_dtype", None)
        merged = laid_over(config, changes)
        (folder / "config.json").write_text(json.dumps(merged, indent=2) + "\n", encoding="utf-8")


def model_folder(path: str, changes: Mapping[str, Any]) -> str:
    """A folder whose config.json has the changes: `path` itself, or one without weights that lives as long as this
    process does. An engine reads it before its weights come.
    """
    if not changes:
        return path
    folder = Path(tempfile.mkdtemp(prefix="megatron-rl-config-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy_companions(folder, Path(path), Path(path), changes)
    return str(folder)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a file of settings, for people to read."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def set_chat_template(folder: Path, template: str) -> None:
    """Make `template` the only one of the tokenizer in `folder`."""
    for name in TEMPLATE_FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "chat_template.json").unlink(missing_ok=True)
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        fields = json.loads(settings.read_text(encoding="utf-8"))
        if fields.pop("chat_template", None) is not None:
            write_json(settings, fields)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def open_to_umask(folder: Path) -> None:
    """Give every file of `folder` the default mode of a new file: safetensors writes them for the owner alone."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)
