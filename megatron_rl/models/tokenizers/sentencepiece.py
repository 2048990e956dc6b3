"""SentencePiece's tokenizer.model: read without its library (a few fields of protobuf's wire format), and the same
tokenizer as tokenizer.json.

transformers 5 reads such a file as well, and orders the merges of a BPE model by id. SentencePiece goes by the score:
runs of spaces, whose scores are the lowest, then become other ids.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE = 1, 2
_SPACE = "\u2581"


@dataclass(frozen=True)
class ScoredPiece:
    """A token: its text (with U+2581 for a space), its score, and what it is (NORMAL, CONTROL, ...)."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePiece:
    """What a tokenizer.model holds. A piece's place is its id; an id of -1 stands for a token that is not there."""

    pieces: tuple[ScoredPiece, ...]
    algorithm: int
    byte_fallback: bool
    bos_id: int
    eos_id: int
    pad_id: int
    charsmap: bytes
    """Rules of normalisation, precompiled; empty for none."""
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool

    @property
    def unknown(self) -> int:
        """The id of the token that stands for what has none."""
        return next(number for number, piece in enumerate(self.pieces) if piece.kind == UNKNOWN)

    def token(self, number: int) -> str | None:
        """The text of a token; None for an id that is no token's."""
        return self.pieces[number].text if 0 <= number < len(self.pieces) else None


def read_sentencepiece(path: Path) -> SentencePiece:
    """The model in a file. Raises ValueError that says why, where it is none."""
    pieces: list[ScoredPiece] = []
    trainer, normalizer = dict[int, int | bytes](), dict[int, int | bytes]()
    for number, value in _fields(path.read_bytes()):
        if number == 1:
            pieces.append(_piece(dict(_fields(_bytes(value)))))
        elif number == 2:
            trainer = dict(_fields(_bytes(value)))
        elif number == 3:
            normalizer = dict(_fields(_bytes(value)))
    if not pieces or UNKNOWN not in {piece.kind for piece in pieces}:
        raise ValueError("it holds no sentencepiece model")
    return SentencePiece(
        pieces=tuple(pieces),
        algorithm=_int(trainer.get(3, UNIGRAM)),
        byte_fallback=bool(trainer.get(35, 0)),
        bos_id=_int(trainer.get(41, 1)),
        eos_id=_int(trainer.get(42, 2)),
        pad_id=_int(trainer.get(43, -1)),
        charsmap=_bytes(normalizer.get(2, b"")),
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
    )


def sentencepiece_json(model: SentencePiece, settings: Mapping[str, object]) -> dict[str, object]:
    """The content of a tokenizer.json that gives the same ids.

    Each stretch of a text between special tokens is encoded as SentencePiece encodes it alone, as Llama's and Mistral's
    own code does: with the space that the model puts before a text.

    settings: tokenizer_config.json. Its `add_bos_token: false` leaves the begin token out where specials are added.
    See sentencepiece_fault for what cannot be written so.
    """
    decoders: list[object] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if model.add_dummy_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            # The user's own symbols are looked for in normalised text: a space in them is U+2581, and none of the
            # spaces around them is another's.
            added_token(number, piece.text, special=piece.kind != USER_DEFINED, normalized=piece.kind == USER_DEFINED)
            for number, piece in enumerate(model.pieces)
            if piece.kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ],
        "normalizer": _normalizer(model),
        "pre_tokenizer": None,
        "post_processor": _begin(model) if settings.get("add_bos_token") is not False else None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(model) if model.algorithm == BPE else _unigram(model),
    }


def sentencepiece_fault(model: SentencePiece, settings: Mapping[str, object]) -> str | None:
    """Why sentencepiece_json cannot write the model; None if it can."""
    if settings.get("legacy") is False:
        return "`legacy: false` in tokenizer_config.json asks for other ids after special tokens than the file gives"
    if model.algorithm not in (UNIGRAM, BPE):
        return "its algorithm is neither BPE nor unigram"
    unused = sum(piece.kind == UNUSED for piece in model.pieces)
    if unused:
        return f"{unused} of its pieces are marked as unused, which tokenizer.json has no form for"
    if model.add_dummy_prefix and any(piece.kind == USER_DEFINED for piece in model.pieces):
        return "it has symbols of the user's own and puts a space before a text, which tokenizer.json has no form for"
    return None


def added_token(number: int, text: str, *, special: bool, normalized: bool = False) -> dict[str, object]:
    """An entry of added_tokens in a tokenizer.json: found in a text, or in its normalised form, before other tokens."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": normalized, "special": special}
    return {"id": number, "content": text, **flags}


def _bpe(model: SentencePiece) -> dict[str, object]:
    vocab = {piece.text: number for number, piece in enumerate(model.pieces)}
    # Pieces of other kinds are not made of characters: <0x0A> stands for a byte.
    merged = {piece.text: piece.score for piece in model.pieces if piece.kind in (NORMAL, USER_DEFINED)}
    merges = [
        (score, text[:at], text[at:])
        for text, score in merged.items()
        for at in range(1, len(text))
        if text[:at] in merged and text[at:] in merged
    ]
    merges.sort(key=lambda merge: (-merge[0], -len(merge[1]), -len(merge[2])))
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": model.token(model.unknown),
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": [[first, second] for _, first, second in merges],
    }


def _unigram(model: SentencePiece) -> dict[str, object]:
    vocab = [[piece.text, piece.score] for piece in model.pieces]
    return {"type": "Unigram", "unk_id": model.unknown, "vocab": vocab, "byte_fallback": model.byte_fallback}


def _normalizer(model: SentencePiece) -> dict[str, object]:
    steps: list[object] = []
    if model.charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode()})
    if model.remove_extra_whitespaces:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if model.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": _SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    return {"type": "Sequence", "normalizers": steps}


def _begin(model: SentencePiece) -> dict[str, object] | None:
    token = model.token(model.bos_id)
    if token is None:
        return None
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [special, first],
        "pair": [special, first, special, second],
        "special_tokens": {token: {"id": token, "ids": [model.bos_id], "tokens": [token]}},
    }


def _piece(fields: Mapping[int, int | bytes]) -> ScoredPiece:
    score = _bytes(fields.get(2, b"\0\0\0\0"))
    if len(score) != 4:
        raise ValueError("a score in it is no number of 32 bits")
    (value,) = struct.unpack("<f", score)
    return ScoredPiece(_bytes(fields.get(1, b"")).decode("utf-8"), value, _int(fields.get(3, NORMAL)))


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return value
    raise ValueError("a number stands in it where a text must be")


def _int(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("a text stands in it where a number must be")
    return value - (1 << 64) if value >> 63 else value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field of a protobuf message; numbers as they are, the rest as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError("it is no protobuf message")
        if at + size > len(data):
            raise ValueError(f"it ends after {len(data)} bytes, in the middle of an entry")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("it is no protobuf message, or its end is missing")
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
