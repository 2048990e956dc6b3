"""Byte-level BPE by ranks: files of tiktoken (Qwen 1, Moonlight, Kimi) and Mistral's tekken.json, as tokenizer.json.

A file of tiktoken holds ranks alone. The pattern that cuts a text into words is in the code beside it; it is read from
there, and nothing of that code is run. transformers takes a pattern of its own for such a file, and with it other ids.
"""

from __future__ import annotations

import ast
import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from megatron_rl.models.tokenizers.sentencepiece import added_token

_TEKKEN_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Special tokens of files that do not list them (tekken before version 7), in the order of their ids."""


@dataclass(frozen=True)
class ByteBpe:
    """ranks: bytes of a token -> rank, the lowest merged first. A token's id is first_id + rank. special: text -> id.

    pattern: what cuts a text into words; None where no file says it.
    """

    ranks: Mapping[bytes, int]
    pattern: str | None
    first_id: int
    special: Mapping[str, int]


def read_tiktoken(path: Path, settings: Mapping[str, object]) -> ByteBpe:
    """The ranks of a file of tiktoken, the pattern in the Python files beside it, special tokens of settings
    (tokenizer_config.json: added_tokens_decoder). Raises ValueError that says why, where it is no such file.
    """
    ranks = dict[bytes, int]()
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        token, _, rank = line.partition(b" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(f"line {number} is no token in base64 and its rank") from error
    if not ranks:
        raise ValueError("it holds no tokens")
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"the ranks of its {len(ranks)} tokens are not 0 to {len(ranks) - 1}: lines are missing")
    return ByteBpe(ranks, _pattern_beside(path), 0, _listed_tokens(settings))


def read_tekken(path: Path) -> ByteBpe:
    """What a tekken.json holds. Raises ValueError that says why, where it is none."""
    content: object = json.loads(path.read_text(encoding="utf-8"))
    try:
        fields = cast("dict[str, list[dict[str, str | int]]]", content)
        config = cast("dict[str, str | int]", fields["config"])
        size, num_special = int(config["default_vocab_size"]), int(config["default_num_special_tokens"])
        words = fields["vocab"][: size - num_special]
        ranks = {base64.b64decode(str(word["token_bytes"])): rank for rank, word in enumerate(words)}
        listed = fields.get("special_tokens")
        names = dict(enumerate(_TEKKEN_TOKENS))
        if listed is not None:
            names = {int(token["rank"]): str(token["token_str"]) for token in listed}
        pattern = str(config["pattern"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it holds no tokenizer of Mistral's ({type(error).__name__}: {error})") from error
    if len(ranks) != size - num_special:
        raise ValueError(f"it holds {len(ranks)} tokens of text, and says {size - num_special}")
    special = {names.get(number, f"<SPECIAL_{number}>"): number for number in range(num_special)}
    return ByteBpe(ranks, pattern, num_special, special)


def byte_bpe_json(model: ByteBpe) -> dict[str, object]:
    """The content of a tokenizer.json that gives the same ids. The pattern must be known."""
    assert model.pattern is not None, "files.readable has refused the file"
    letters = str.maketrans(dict(enumerate(_letters())))
    written = {token: token.decode("latin-1").translate(letters) for token in model.ranks}
    # By ids, and no id is left out: the tokenizers library numbers added tokens itself.
    texts = {number: text for text, number in model.special.items()}
    last = max((*texts, model.first_id + len(model.ranks) - 1))
    after = range(model.first_id + len(model.ranks), last + 1)
    texts |= {number: f"<|reserved_token_{number}|>" for number in after if number not in texts}
    vocab = {text: number for number, text in texts.items() if number < model.first_id}
    vocab |= {written[token]: model.first_id + rank for token, rank in model.ranks.items()}
    return bpe_json(
        added=[added_token(number, texts[number], special=True) for number in sorted(texts)],
        steps=split_words(model.pattern),
        processor={**byte_level(), "trim_offsets": False},
        decoder=byte_level(),
        vocab=vocab,
        merges=[[written[first], written[second]] for first, second in _merges(model.ranks)],
        ignore_merges=True,
    )


def byte_level(*, use_regex: bool = False) -> dict[str, object]:
    """The step of a tokenizer.json that writes bytes as characters. use_regex: it cuts texts as GPT-2 does before."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def split_words(pattern: str) -> list[dict[str, object]]:
    """The steps that cut a text into words by a regular expression, and write their bytes as characters."""
    return [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}, byte_level()]


def bpe_json(
    *,
    added: Sequence[Mapping[str, object]],
    steps: Sequence[Mapping[str, object]],
    processor: Mapping[str, object],
    decoder: Mapping[str, object],
    vocab: Mapping[str, int],
    merges: Sequence[Sequence[str]],
    ignore_merges: bool,
    nfc: bool = False,
) -> dict[str, object]:
    """The content of a tokenizer.json with byte-level BPE. steps: how texts are cut before the merges."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added),
        "normalizer": {"type": "NFC"} if nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(steps)},
        "post_processor": processor,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": vocab,
            "merges": list(merges),
        },
    }


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Pairs of tokens that make a token, by its rank."""
    for token in sorted(ranks, key=lambda token: ranks[token]):
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _letters() -> list[str]:
    """The character that stands for each byte in a byte-level tokenizer.json (GPT-2's table)."""
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in visible]
    table = {byte: chr(byte) for byte in visible} | {byte: chr(256 + place) for place, byte in enumerate(rest)}
    return [table[byte] for byte in range(256)]


def _listed_tokens(settings: Mapping[str, object]) -> dict[str, int]:
    listed = settings.get("added_tokens_decoder")
    entries = cast("dict[str, object]", listed).items() if isinstance(listed, dict) else ()
    return {
        str(cast("dict[str, object]", token).get("content")): int(number)
        for number, token in entries
        if isinstance(token, dict) and number.isdigit()
    }


def _pattern_beside(path: Path) -> str | None:
    """The value of PAT_STR or pat_str in tokenization_*.py; None unless exactly one is written there."""
    patterns: set[str] = set()
    for code in sorted(path.parent.glob("tokenization_*.py")):
        try:
            tree = ast.parse(code.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"{code.name} beside it is no Python ({error})") from error
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(one, ast.Name) and one.id.lower() == "pat_str" for one in targets):
                    text = _text(node.value)
                    patterns |= set() if text is None else {text}
    return patterns.pop() if len(patterns) == 1 else None


def _text(node: ast.expr) -> str | None:
    """The text of a literal, or of "|".join([literals]); None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str() as between), attr="join"),
            args=[ast.List(elts=parts) | ast.Tuple(elts=parts)],
        ):
            texts = [_text(part) for part in parts]
            known = [text for text in texts if text is not None]
            return between.join(known) if len(known) == len(texts) else None
        case _:
            return None
