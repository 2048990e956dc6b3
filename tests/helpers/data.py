"""Files and tokenizers for the data tests."""

from __future__ import annotations

import atexit
import functools
import json
import runpy
import shutil
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MAKE_DATA = ROOT / "examples" / "quickstart" / "make_data.py"

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def quickstart() -> Path:
    """The quick start's folder (model/, train.parquet, ...), written once a process."""
    folder = Path(tempfile.mkdtemp(prefix="quickstart-"))
    atexit.register(shutil.rmtree, folder)
    runpy.run_path(str(MAKE_DATA))["make"](folder, 0)
    return folder


def model_folder(folder: Path, **settings: Any) -> Path:
    """A copy of the quick start's model folder with entries of tokenizer_config.json changed."""
    shutil.copytree(quickstart() / "model", folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return folder


def add_tokenizer(folder: str) -> None:
    """The quick start's tokenizer into a model's folder."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(quickstart() / "model" / name, folder)


def chat_folder(
    folder: Path,
    *,
    merges: tuple[str, ...] = (),
    template: str | list[dict[str, str]] | None = CHATML,
    **settings: Any,
) -> Path:
    """A model folder whose tokenizer writes ChatML, or by another template or several by name; merges: pairs of tokens
    that are one token.
    """
    model_folder(folder, chat_template=template, eos_token="<|im_end|>", pad_token="<|endoftext|>", **settings)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    rename = {"<|reserved_0|>": "<|im_start|>", "<|reserved_1|>": "<|im_end|>"}
    for token in tokenizer["added_tokens"]:
        if token["content"] in rename:
            token.update(content=rename[token["content"]], special=True)
    vocab = {rename.get(token, token): number for token, number in tokenizer["model"]["vocab"].items()}
    for pair in merges:
        vocab[pair.replace(" ", "")] = len(vocab)
    tokenizer["model"]["vocab"] = vocab
    tokenizer["model"]["merges"] = list(merges)
    path.write_text(json.dumps(tokenizer))
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": len(vocab)}))
    return folder


def write_jsonl(path: Path, rows: list[Any]) -> str:
    """One JSON value a line; a string is a line as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)
