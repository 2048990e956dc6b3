"""Which file of a folder holds its tokenizer, what tokens are in it, and a tokenizer.json where it has none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, cast

from megatron_rl.errors import DataError
from megatron_rl.models.broken import broken_reason
from megatron_rl.models.tokenizers.byte_bpe import ByteBpe, byte_bpe_json, read_tekken, read_tiktoken
from megatron_rl.models.tokenizers.sentencepiece import (
    SentencePiece,
    read_sentencepiece,
    sentencepiece_fault,
    sentencepiece_json,
)

TokenizerKind = Literal["json", "sentencepiece", "tiktoken", "tekken", "vocabulary"]
KINDS = "tokenizer.json, tokenizer.model (sentencepiece or tiktoken), *.tiktoken, tiktoken.model, tekken.json"


@dataclass(frozen=True)
class TokenizerFile:
    """The file that says which ids a text becomes, and its form. vocabulary: a list of tokens, and transformers' class
    says the rest.
    """

    path: Path
    kind: TokenizerKind


def tokenizer_file(folder: Path) -> TokenizerFile:
    """The tokenizer of a folder; tokenizer.json comes first. Raises DataError where there is none, or more than one."""
    if (folder / "tokenizer.json").is_file():
        return TokenizerFile(folder / "tokenizer.json", "json")
    names = other_tokenizers(folder)
    if len(names) > 1:
        raise DataError(
            f"{folder}: has {len(names)} tokenizers and no tokenizer.json: {', '.join(names)} -- keep the one that "
            "belongs to the model"
        )
    if names:
        return TokenizerFile(folder / names[0], _kind(folder / names[0]))
    for name in ("vocab.json", "vocab.txt"):
        if (folder / name).is_file():
            return TokenizerFile(folder / name, "vocabulary")
    raise DataError(f"{folder}: has no tokenizer -- give a folder with one of {KINDS}")


def other_tokenizers(folder: Path) -> list[str]:
    """Names of the files of a folder that hold a tokenizer in another form than tokenizer.json."""
    names = sorted(path.name for path in folder.glob("*.tiktoken"))
    return names + [name for name in ("tokenizer.model", "tiktoken.model", "tekken.json") if (folder / name).is_file()]


def _kind(path: Path) -> TokenizerKind:
    if path.suffix != ".model":
        return "tekken" if path.suffix == ".json" else "tiktoken"
    with path.open("rb") as file:
        start = file.read(64)
    # Llama 3's tokenizer.model is one of tiktoken's: its first line is a token in base64 and its rank.
    words = start.partition(b"\n")[0].split(b" ")
    return "tiktoken" if len(words) == 2 and words[1].strip().isdigit() else "sentencepiece"


def read_settings(folder: Path) -> dict[str, object]:
    """tokenizer_config.json; empty where there is none. Raises DataError if it holds no JSON object."""
    path = folder / "tokenizer_config.json"
    return json_object(path) if path.is_file() else {}


def json_object(path: Path) -> dict[str, object]:
    """The mapping in a JSON file. Raises DataError if it holds none."""
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: {broken_reason(path, f'is no JSON ({error})')} -- copy it again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: holds no JSON object -- copy it again")
    return cast("dict[str, object]", content)


def read_source(file: TokenizerFile) -> SentencePiece | ByteBpe:
    """What a file of another kind than tokenizer.json holds.

    Raises DataError that says why, where it cannot be read, or not be written as a tokenizer.json.
    """
    path, settings = file.path, read_settings(file.path.parent)
    try:
        if file.kind == "sentencepiece":
            source = _sentencepiece(path, path.stat().st_mtime_ns)
        else:
            source = read_tekken(path) if file.kind == "tekken" else read_tiktoken(path, settings)
    except ValueError as error:
        raise DataError(f"{path}: {broken_reason(path, f'cannot be read: {error}')} -- copy it again") from error
    cure = "give a folder with tokenizer.json (the model's own code writes one)"
    if isinstance(source, SentencePiece):
        fault = sentencepiece_fault(source, settings)
    else:
        fault = None if source.pattern is not None else "no file beside it says how a text is cut into words"
        cure = (
            "copy the model's tokenization_*.py into the folder, which is read and not run; or write a tokenizer.json "
            "with the right pattern (transformers.convert_slow_tokenizer.TikTokenConverter)"
        )
    if fault is not None:
        raise DataError(f"{path}: cannot be used as it is: {fault} -- {cure}")
    return source


@lru_cache(maxsize=1)
def _sentencepiece(path: Path, changed_ns: int) -> SentencePiece:
    """Read once for its tokens, its ids and its tokenizer.json."""
    return read_sentencepiece(path)


def tokens_of(source: SentencePiece | ByteBpe) -> dict[str, int]:
    """Text -> id of the tokens; bytes that are no text as U+FFFD and their number, which no text holds."""
    if isinstance(source, SentencePiece):
        return {piece.text: number for number, piece in enumerate(source.pieces)}
    texts = {number: token.decode("utf-8", "replace") for token, number in source.ranks.items()}
    ordinary = {f"{text} {rank}" if "\ufffd" in text else text: rank for rank, text in texts.items()}
    return {text: source.first_id + rank for text, rank in ordinary.items()} | dict(source.special)


def made_tokenizer_json(file: TokenizerFile) -> tuple[dict[str, object], dict[str, object]]:
    """(tokenizer.json, tokenizer_config.json) for a folder that has no tokenizer.json: the same ids, in every library.

    Raises DataError as read_source does.
    """
    source, settings = read_source(file), read_settings(file.path.parent)
    if isinstance(source, SentencePiece):
        content, named = sentencepiece_json(source, settings), _sentencepiece_tokens(source)
    else:
        content, named = byte_bpe_json(source), _tekken_tokens(source)
    # The classes that the settings name build a tokenizer of their own, whatever tokenizer.json says.
    kept = {name: value for name, value in settings.items() if name != "auto_map"}
    return content, {**named, **kept, "tokenizer_class": "PreTrainedTokenizerFast"}


def _sentencepiece_tokens(source: SentencePiece) -> Mapping[str, str]:
    ids = {"bos_token": source.bos_id, "eos_token": source.eos_id, "pad_token": source.pad_id}
    ids["unk_token"] = source.unknown
    tokens = {name: source.token(number) for name, number in ids.items()}
    return {name: token for name, token in tokens.items() if token is not None}


def _tekken_tokens(source: ByteBpe) -> Mapping[str, str]:
    # No file of tiktoken's has these; of its special tokens tokenizer_config.json says what they are.
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return {name: token for name, token in names.items() if token in source.special}
