"""Folders with tokenizers in the forms that model authors ship: sentencepiece, tiktoken, tekken."""

from __future__ import annotations

import base64
import functools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mistral_common

MISTRAL = Path(mistral_common.__file__).parent / "data"
TEXTS = (
    "Hello, world!",
    " leads,  two   spaces\n\n\n  and\ttabs  ",
    "def f(x):\n        return {'k': 1234.5}",
    "\u4f60\u597d \u0928\u092e\u0938\u094d\u0924\u0947 \U0001f9d1\u200d\U0001f680 e\u0301",
    "I'LL don't  x" + " " * 19 + "y",
)
PATTERN = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def write_settings(folder: Path, **settings: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def sentencepiece_folder(folder: Path, **settings: Any) -> Path:
    """Mistral's first tokenizer.model (32,000 BPE pieces with byte fallback), as Llama's and Mistral's are shipped."""
    folder.mkdir(parents=True)
    shutil.copyfile(MISTRAL / "tokenizer.model.v1", folder / "tokenizer.model")
    write_settings(folder, tokenizer_class="LlamaTokenizer", **settings)
    return folder


@functools.cache
def tekken_content(words: int) -> dict[str, Any]:
    """Mistral's tekken.json, cut to its first `words` tokens of text by its own field."""
    content = json.loads((MISTRAL / "tekken_240911.json").read_text(encoding="utf-8"))
    size = words + content["config"]["default_num_special_tokens"]
    return {**content, "config": {**content["config"], "default_vocab_size": size}, "vocab": content["vocab"][:words]}


def tekken_folder(folder: Path, words: int = 3000) -> Path:
    folder.mkdir(parents=True)
    (folder / "tekken.json").write_text(json.dumps(tekken_content(words)), encoding="utf-8")
    return folder


def tiktoken_ranks(words: int) -> dict[bytes, int]:
    """Ranks of byte pairs: real ones, in the order of their merges."""
    return {
        base64.b64decode(word["token_bytes"]): rank for rank, word in enumerate(tekken_content(3000)["vocab"][:words])
    }


def tiktoken_folder(
    folder: Path, name: str = "tiktoken.model", words: int = 2000, special: Mapping[str, int] | None = None
) -> Path:
    """A file of tiktoken's, with the pattern in a Python file beside it, as Moonlight's and Kimi's are shipped."""
    folder.mkdir(parents=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in tiktoken_ranks(words).items()]
    (folder / name).write_text("\n".join(lines) + "\n")
    parts = ", ".join(f'r"""{part}"""' for part in PATTERN.split("|"))
    code = f'raise RuntimeError("is not run")\n\n\nclass TikTokenTokenizer:\n    pat_str = "|".join([{parts}])\n'
    (folder / "tokenization_moonshot.py").write_text(code)
    special = {"[BOS]": words, "[EOS]": words + 1, "<|im_end|>": words + 3} if special is None else special
    write_settings(
        folder,
        added_tokens_decoder={str(number): {"content": text, "special": True} for text, number in special.items()},
        auto_map={"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]},
        tokenizer_class="TikTokenTokenizer",
        eos_token="[EOS]",
    )
    return folder
