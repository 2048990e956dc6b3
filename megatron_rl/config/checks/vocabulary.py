"""Does a tokenizer reach beyond the tokens that a model knows? Read from the files as JSON: no tokenizer is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from megatron_rl.errors import Fault
from megatron_rl.models.end_tokens import FILES, end_ids
from megatron_rl.models.tokenizers.files import (
    TokenizerFile,
    json_object,
    read_source,
    tokenizer_file,
    tokens_of,
)
from megatron_rl.models.tokenizers.sentencepiece import SentencePiece


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a tokenizer's files. ordinary: any text may hold them; added: text -> id of those that stand beside."""

    ordinary: Mapping[str, int]
    added: Mapping[str, int]


def _json(path: Path) -> dict[str, object]:
    """The mapping in the file; empty where there is none: what loads the file says what is wrong with it."""
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cast("dict[str, object]", content) if isinstance(content, dict) else {}


def _ids(table: object) -> dict[str, int]:
    if isinstance(table, dict):
        found = cast("dict[object, object]", table)
        return {str(token): number for token, number in found.items() if isinstance(number, int)}
    if isinstance(table, list):
        # Unigram: [text, score] in the order of the ids.
        pieces = [
            cast("list[object]", piece) for piece in cast("list[object]", table) if isinstance(piece, list) and piece
        ]
        return {str(piece[0]): number for number, piece in enumerate(pieces)}
    return {}


def _tokens(file: TokenizerFile) -> tuple[dict[str, int], dict[str, int]]:
    """(ordinary, added) of the tokenizer's file alone."""
    if file.kind == "vocabulary":
        return _ids(_json(file.path)), {}
    if file.kind != "json":
        source = read_source(file)
        return tokens_of(source), {} if isinstance(source, SentencePiece) else dict(source.special)
    content = json_object(file.path)
    model, listed = content.get("model"), content.get("added_tokens")
    added: dict[str, int] = {}
    for token in cast("list[object]", listed) if isinstance(listed, list) else []:
        if isinstance(token, dict):
            entry = cast("dict[str, object]", token)
            added |= _ids({entry.get("content"): entry.get("id")})
    return _ids(cast("dict[str, object]", model).get("vocab")) if isinstance(model, dict) else {}, added


def read_vocabulary(folder: str) -> Vocabulary:
    """Tokens that the tokenizer's file names, and those that are added to them. Raises DataError if there is none, or
    it cannot be read.
    """
    path = Path(folder)
    ordinary, of_file = _tokens(tokenizer_file(path))
    added = _ids(_json(path / "added_tokens.json")) | of_file
    decoder: object = _json(path / "tokenizer_config.json").get("added_tokens_decoder")
    for number, token in cast("dict[str, object]", decoder).items() if isinstance(decoder, dict) else ():
        if isinstance(token, dict) and str(number).isdigit():
            added |= {str(cast("dict[str, object]", token).get("content")): int(number)}
    ordinary = {token: number for token, number in ordinary.items() if token not in added}
    return Vocabulary(ordinary, added)


def _end_ids(tokenizer: str, model: str, vocabulary: Vocabulary) -> Iterator[tuple[str, int]]:
    """(where it is named, id) of every token that ends a text."""
    settings = Path(tokenizer) / "tokenizer_config.json"
    token: object = _json(settings).get("eos_token")
    token = cast("dict[str, object]", token).get("content") if isinstance(token, dict) else token
    number = {**vocabulary.ordinary, **vocabulary.added}.get(token) if isinstance(token, str) else None
    if number is not None:
        yield f"{settings}: eos_token", number
    for path in (Path(model) / name for name in reversed(FILES)):
        try:
            named = end_ids(path)
        except (OSError, ValueError):
            # What loads the file says what is wrong with it.
            continue
        yield from ((f"{path}: eos_token_id", one) for one in named if isinstance(one, int))


def vocabulary_faults(key: str, tokenizer: str, model: str, vocab_size: int | None) -> list[Fault]:
    """Faults of a tokenizer's folder beside a model's of vocab_size tokens (None if not known); key: what named the
    tokenizer's. Raises DataError as read_vocabulary does.

    Added tokens beyond the model's are no fault by themselves: many tokenizers have some that no text uses (Gemma 3's
    one for images). A text that does is refused where it is rendered.
    """
    vocabulary = read_vocabulary(tokenizer)
    if vocab_size is None:
        return []
    beyond = [(number, token) for token, number in vocabulary.ordinary.items() if number >= vocab_size]
    faults: list[Fault] = []
    if beyond:
        last, text = max(beyond)
        reason = (
            f"{len(beyond)} of its tokens have ids that the model does not know, up to {last} ({text!r}): config.json "
            f"of {model} says vocab_size {vocab_size}"
        )
        cure = "give the tokenizer that belongs to the model, or a model whose embedding holds all of its tokens"
        faults.append(Fault(key, tokenizer, reason, cure))
    for where, number in _end_ids(tokenizer, model, vocabulary):
        if not 0 <= number < vocab_size:
            reason = f"is no token of the model, whose vocab_size is {vocab_size}: responses would never end with it"
            faults.append(Fault(where, number, reason, "name an end token that the model knows"))
    return faults
