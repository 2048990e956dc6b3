"""Which tokens end a response, as the files of a model folder say. No torch and no tokenizer here."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.errors import DataError
from megatron_rl.models.end_tokens import FILES, end_ids


def named_end_ids(folder: Path) -> dict[Path, list[int]]:
    """eos_token_id of generation_config.json and config.json, by file; each a number, a list or not there.

    Raises DataError: a file that is no JSON object, ids that are no numbers from 0.
    """
    paths = [folder / name for name in FILES if (folder / name).is_file()]
    return {path: _end_ids(path) for path in paths}


def known_end_ids(named: dict[Path, list[int]], vocab_size: int) -> tuple[int, ...]:
    """Those ids, each once. Raises DataError if one is no token of a tokenizer of vocab_size tokens."""
    for path, ids in named.items():
        for number in ids:
            if number >= vocab_size:
                raise DataError(_no_token(path, number, f"the tokenizer, which has {vocab_size}"))
    return tuple(dict.fromkeys(number for ids in named.values() for number in ids))


def _end_ids(path: Path) -> list[int]:
    try:
        named = end_ids(path)
    except ValueError as error:
        raise DataError(f"{path}: not a JSON object ({error}) -- write the file again") from error
    ids: list[int] = []
    for number in named:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise DataError(_no_token(path, number, "the tokenizer"))
        ids.append(number)
    return ids


def _no_token(path: Path, number: object, tokenizer: str) -> str:
    return (
        f"{path}: eos_token_id {number!r} is no token of {tokenizer} "
        "-- write the end token's id there, or take the entry out"
    )
