"""The tokenizer of a GGUF file as a tokenizer.json: byte-level BPE with the split of texts that the file names.

The file holds tokens and merges, and only the name of the regular expression that cuts texts into words. transformers'
own reader takes one expression for all of a family's files; here each name has its own, as llama.cpp has it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.models.tokenizers.byte_bpe import bpe_json, byte_level, split_words
from megatron_rl.models.tokenizers.sentencepiece import added_token

_GPT2 = "gpt2"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class _Cut:
    """How a kind of tokenizer cuts texts before the merges."""

    steps: tuple[dict[str, Any], ...]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False
    """Where the file does not say."""


_WORDS = _Cut((byte_level(use_regex=True),))
_DIGITS = _Cut(({"type": "Digits", "individual_digits": True}, byte_level(use_regex=True)))
_CUTS = {
    "gpt-2": _WORDS,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "llama-bpe": _Cut(tuple(split_words(_LLAMA3)), ignore_merges=True, adds_bos=True),
    "qwen2": _Cut(tuple(split_words(_QWEN2)), nfc=True),
}
"""tokenizer.ggml.pre -> the cut."""
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


@dataclass(frozen=True)
class GgufVocabulary:
    """What a GGUF file says of its tokenizer."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    cut: _Cut
    special: Mapping[str, int]
    """bos, eos, unk, pad -> the token's number"""
    end_ids: list[int]
    adds_bos: bool
    chat_template: str | None

    @property
    def ids(self) -> dict[str, Any]:
        """Entries of config.json and generation_config.json."""
        ids: dict[str, Any] = {
            f"{name}_token_id": self.special[name] for name in ("bos", "pad") if name in self.special
        }
        if self.end_ids:
            ids["eos_token_id"] = self.end_ids if len(self.end_ids) > 1 else self.end_ids[0]
        return ids


def read_vocabulary(fields: Mapping[str, Any], faults: list[str]) -> GgufVocabulary | None:
    """The tokenizer of a file; None, and `faults` grows, if it is none that is known."""
    of = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items()}
    cure = "give a folder with the model's tokenizer files (--tokenizer)"
    kind, cut = of.get("model"), _CUTS.get(str(of.get("pre")))
    if kind != _GPT2 or cut is None or "tokens" not in of or "merges" not in of:
        known = ", ".join(_CUTS)
        shown = f"tokenizer.ggml.model {kind!r}, tokenizer.ggml.pre {of.get('pre')!r}"
        faults.append(f"{shown}: only byte-level BPE ({_GPT2!r}) with {known} is converted -- {cure}")
        return None
    if of.get("add_space_prefix") or of.get("add_eos_token"):
        faults.append(f"tokenizer.ggml.add_space_prefix or add_eos_token is set, which is not converted -- {cure}")
        return None
    tokens = [str(token) for token in of["tokens"]]
    special = {name: int(of[f"{key}_token_id"]) for name, key in _IDS.items() if f"{key}_token_id" in of}
    ends = [int(of[name]) for name in ("eos_token_id", "eot_token_id", "eom_token_id") if name in of]
    wrong = [number for number in (*special.values(), *ends) if not 0 <= number < len(tokens)]
    if wrong:
        faults.append(f"tokenizer.ggml names the token {wrong[0]}, and there are {len(tokens)} -- {cure}")
        return None
    adds_bos = bool(of.get("add_bos_token", cut.adds_bos)) and "bos" in special
    types = [int(one) for one in of.get("token_type", [1] * len(tokens))]
    template = fields.get("tokenizer.chat_template")
    return GgufVocabulary(
        tokens, types, list(of["merges"]), cut, special, list(dict.fromkeys(ends)), adds_bos, template
    )


def write_tokenizer(vocabulary: GgufVocabulary, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json."""
    names = {f"{name}_token": vocabulary.tokens[number] for name, number in vocabulary.special.items()}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": vocabulary.adds_bos,
        **names,
    }
    generation = {"_from_model_config": True, **vocabulary.ids}
    contents = {
        "tokenizer.json": tokenizer_json(vocabulary),
        "tokenizer_config.json": settings,
        "generation_config.json": generation,
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if vocabulary.chat_template is not None:
        (folder / "chat_template.jinja").write_text(vocabulary.chat_template, encoding="utf-8")


def tokenizer_json(vocabulary: GgufVocabulary) -> dict[str, Any]:
    """The tokenizer in the form of the library `tokenizers`."""
    tokens, cut = vocabulary.tokens, vocabulary.cut
    added = [
        added_token(number, tokens[number], special=kind == _CONTROL)
        for number, kind in enumerate(vocabulary.types)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    processor: dict[str, Any] = byte_level(use_regex=True)
    if vocabulary.adds_bos:
        number = vocabulary.special["bos"]
        token, text = tokens[number], {"Sequence": {"id": "A", "type_id": 0}}
        start = {"SpecialToken": {"id": token, "type_id": 0}}
        second = [{"SpecialToken": {"id": token, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
        processor = {
            "type": "TemplateProcessing",
            "single": [start, text],
            "pair": [start, text, *second],
            "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
        }
    return bpe_json(
        added=added,
        steps=cut.steps,
        processor=processor,
        decoder=byte_level(use_regex=True),
        vocab={token: number for number, token in enumerate(tokens) if vocabulary.types[number] != _UNUSED},
        merges=[merge.split(" ", 1) for merge in vocabulary.merges],
        ignore_merges=cut.ignore_merges,
        nfc=cut.nfc,
    )
