"""Chat messages that a program wrote into a text: what a list of messages becomes on its way through CSV or str().

Such a text is never meant as the prompt itself; taken as it stands, the model would be trained on its brackets.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable

_STARTS = re.compile(r"""array\(|[\[{("']""")
_ARRAY = re.compile(r"array\((.*?)(,\s*dtype=\w+)?\)", re.DOTALL)
_BETWEEN = re.compile(r"\}\s+\{")
CURE = "write it as a list, not as text: json.loads it first, and keep the rows in JSONL or parquet"


def is_chat_text(text: str) -> bool:
    """Whether a text is a list of messages (or one message) as JSON, Python or numpy print it, white space around
    it or not.
    """
    text = text.strip().removeprefix("\ufeff")
    if not _STARTS.match(text) or not any(word in text for word in ("role", "from")):
        return False
    return any(_is_chat(_read(reader, text)) for reader in (json.loads, _python, _numpy))


def _is_chat(value: object) -> bool:
    if isinstance(value, str):
        # Text that was written twice over.
        return is_chat_text(value)
    if isinstance(value, dict) and len(value) == 1:
        # {"messages": [...]}
        (value,) = value.values()
    if isinstance(value, dict):
        return _is_message(value)
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_message, value))


def _is_message(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    return ("role" in value and ("content" in value or "tool_calls" in value)) or {"from", "value"} <= value.keys()


def _read(reader: Callable[[str], object], text: str) -> object:
    try:
        return reader(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _python(text: str) -> object:
    with warnings.catch_warnings():
        # A text with odd backslashes is a text with odd backslashes.
        warnings.simplefilter("ignore")
        return ast.literal_eval(text)


def _numpy(text: str) -> object:
    """numpy prints array([...], dtype=object), and no commas between the elements of str(array)."""
    whole = _ARRAY.fullmatch(text)
    return _python(_BETWEEN.sub("}, {", whole.group(1) if whole else text))
