"""The end token that a saved model's files name, where model.eos_token takes the place of the tokenizer's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from megatron_rl.errors import CheckpointError
from megatron_rl.models.end_tokens import FILES, end_ids


def name_end_token(folder: Path, token: str) -> None:
    """Make the tokenizer's files name `token` as its end token, and the configs' eos_token_id begin with its id.

    Ids that the configs name already stay: they ended responses too. Raises CheckpointError if tokenizer.json does
    not know the token.
    """
    number = _token_id(folder / "tokenizer.json", token)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        settings = _read(folder / name)
        before = settings.get("eos_token")
        if name == "tokenizer_config.json" or before is not None:
            settings["eos_token"] = {**before, "content": token} if isinstance(before, dict) else token
            _write(folder / name, settings)
    named = [token_id for name in FILES if (folder / name).is_file() for token_id in end_ids(folder / name)]
    ids = list(dict.fromkeys((number, *named)))
    for name in FILES:
        _write(folder / name, _read(folder / name) | {"eos_token_id": ids if len(ids) > 1 else number})


def _token_id(path: Path, token: str) -> int:
    tokenizer = _read(path)
    for added in tokenizer.get("added_tokens", []):
        if added["content"] == token:
            return added["id"]
    vocab: object = tokenizer.get("model", {}).get("vocab", {})
    if isinstance(vocab, dict):
        ids = cast("dict[str, int]", vocab)
    else:
        # Unigram: [text, score] in the order of the ids.
        ids = {entry[0]: number for number, entry in enumerate(cast("list[tuple[str, float]]", vocab))}
    if token not in ids:
        raise CheckpointError(f"{path}: has no token {token!r} -- give model.eos_token as the tokenizer writes it")
    return ids[token]


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _write(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
