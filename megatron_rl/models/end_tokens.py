"""The end tokens that the files of a model folder name. No tokenizer here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

FILES = ("generation_config.json", "config.json")
"""The files of a model folder that may have an entry eos_token_id."""


def end_ids(path: Path) -> list[object]:
    """The entry eos_token_id of a JSON file as a list, as written: absent or null is none, a single value is one.

    Raises ValueError if the file holds no JSON object.
    """
    content: object = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}")
    named: object = cast("dict[str, Any]", content).get("eos_token_id")
    if named is None:
        return []
    return cast("list[object]", named) if isinstance(named, list) else [named]
