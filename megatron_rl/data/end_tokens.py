"""Which tokens end a response, as the files of a model folder say. No torch and no tokenizer here."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_rl.errors import DataError

FILES = ("generation_config.json", "config.json")


def end_ids_of_folder(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """eos_token_id of generation_config.json, then of config.json; each a number, a list or not there.

    Raises DataError: a file that is no JSON object, ids that are no token ids (0 to vocab_size - 1).
    """
    found: list[int] = []
    for name in FILES:
        path = folder / name
        if path.is_file():
            found += _end_ids(path, vocab_size)
    return tuple(dict.fromkeys(found))


def _end_ids(path: Path, vocab_size: int) -> list[int]:
    try:
        named = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path}: not a JSON object ({error}) -- write the file again") from error
    ids = [] if named is None else named if isinstance(named, list) else [named]
    for number in ids:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < vocab_size:
            raise DataError(
                f"{path}: eos_token_id {number!r} is no token of the tokenizer, which has {vocab_size} "
                "-- write the end token's id there, or take the entry out"
            )
    return ids
