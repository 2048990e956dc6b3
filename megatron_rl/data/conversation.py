"""Chat messages in one form, whatever form a row has them in: {"role": ..., "content": text, ...}.

Read:
    role/content           OpenAI's and transformers' form; further fields are handed to the chat template
    from/value             ShareGPT's; function_call becomes an assistant message with tool_calls
    content as a list      parts {"type": "text", "text": ...}, joined with nothing between
    content null           beside tool_calls
Refused, by message and with the cure: other roles, parts that are no text, pictures, and marks that say which
messages to train on, unless they say what happens anyway. No torch and no tokenizer here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_rl.data.files import BadRow
from megatron_rl.data.formats import json_text
from megatron_rl.messages import short

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
"""Roles that are known; a chat template may name others."""
SYSTEM_ROLES = ("system", "developer")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
"""ShareGPT's `from` -> role."""
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts that hold text."""
MEDIA = ("images", "image", "image_url", "videos", "video", "audios", "audio", "multi_modal_data", "multi_modal_inputs")
"""Columns and fields of pictures, video and sound."""
MASKS = (
    "loss_mask", "step_loss_mask", "mask", "weight", "loss_weight", "loss_scale", "loss", "train", "train_on_turn",
    "trainable", "training", "train_detail",
)  # fmt: skip
"""Fields of messages that say what to train on, and how much, in other trainers."""


def is_empty(value: object) -> bool:
    """Whether a value is empty: null, "", or a list or mapping of only such values (as parquet pads columns)."""
    if isinstance(value, dict):
        return all(is_empty(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return all(is_empty(inner) for inner in value)
    return value is None or value == ""


def normal_messages(messages: Sequence[object], *, trained: bool) -> list[Message]:
    """The messages in role/content form. trained: whether the answers among them are trained on.

    Raises BadRow naming the first message that cannot be used.
    """
    return [_normal(message, f"message {number}", trained) for number, message in enumerate(messages, start=1)]


def with_system(messages: Sequence[Message], system: str, column: str) -> list[Message]:
    """The messages after a system message. Raises BadRow if they have one of their own."""
    if any(message.get("role") in SYSTEM_ROLES for message in messages):
        raise BadRow(f"there is a system message beside the column {column!r} -- keep one of the two")
    return [{"role": "system", "content": system}, *messages]


def check_messages(messages: object) -> None:
    """Raise BadRow unless `messages` is a list, not empty, of {"role": str, "content": str, ...}.

    content may be None, or not be there, beside tool_calls.
    """
    if not isinstance(messages, list) or not messages:
        raise BadRow(f"expected a list of messages, found {short(messages)} -- give [{{role, content}}, ...]")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise BadRow(f"message {number} is {short(message)} -- give {{role, content}}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str) and not (key == "content" and _calls(message)):
                raise BadRow(f"message {number} has {key} = {short(message.get(key))} -- give a string")


def mask_says(value: object) -> bool | None:
    """What a mark says of a whole message: True or False; None if it says neither (a share, a list)."""
    return bool(value) if isinstance(value, bool | int | float) and value in (0, 1) else None


def _calls(message: Message) -> bool:
    return message.get("content") is None and not is_empty([message.get("tool_calls"), message.get("function_call")])


def _normal(message: object, where: str, trained: bool) -> Message:
    if not isinstance(message, dict):
        raise BadRow(f"{where} is {short(message)} -- give {{role, content}}")
    found = dict(message)
    if found.get("role") is None and found.get("from") is not None:
        found = _from_sharegpt(found, where)
    content = found.get("content")
    if isinstance(content, list):
        found["content"] = _joined(content, where)
    elif content is None and _calls(found):
        found["content"] = None
    for name in MEDIA:
        if not is_empty(found.get(name)):
            raise BadRow(f"{where} has {name!r}, and models here read text alone -- {TEXT_ALONE}")
    _check_masks(found, where, trained and found.get("role") == "assistant")
    return found


TEXT_ALONE = "take it out if the text says all, else leave the row out"


def _from_sharegpt(message: Message, where: str) -> Message:
    speaker, value = message["from"], message.get("value")
    role = SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise BadRow(f"{where} has from = {short(speaker)} -- use one of {', '.join(SHAREGPT_ROLES)}")
    rest = {name: field for name, field in message.items() if name not in ("from", "value", "role")}
    if speaker == "function_call":
        return {"role": role, "content": None, "tool_calls": _function_calls(value, where), **rest}
    return {"role": role, "content": value, **rest}


def _function_calls(value: object, where: str) -> list[Message]:
    """tool_calls of ShareGPT's function_call: JSON text of {"name", "arguments"}, or of a list of them."""
    try:
        calls, fault = json_text(value) if isinstance(value, str) else (value, None)
    except ValueError:
        calls, fault = None, None
    if fault is not None:
        raise BadRow(f"in the JSON text of {where}: {fault}")
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list) or not calls or not all(_is_call(call) for call in calls):
        raise BadRow(
            f"{where} is a function_call with value = {short(value)} "
            '-- give JSON text of {"name": ..., "arguments": {...}}, or of a list of them'
        )
    return [{"type": "function", "function": call} for call in calls]


def _is_call(call: object) -> bool:
    return isinstance(call, dict) and isinstance(call.get("name"), str) and "arguments" in call


def _joined(parts: list[object], where: str) -> str:
    texts: list[str] = []
    for number, part in enumerate(parts, start=1):
        if not isinstance(part, dict):
            raise BadRow(
                f"{where} has content part {number} = {short(part)} "
                '-- give a string as content, or parts {"type": "text", "text": ...}'
            )
        kind, text = part.get("type"), part.get("text")
        others = [name for name, value in part.items() if name not in ("type", "text") and not is_empty(value)]
        if kind not in TEXT_PARTS or not isinstance(text, str) or any(name in MEDIA for name in others):
            raise BadRow(f"{where} has content part {number} of type {kind!r}, which is not read -- give text parts")
        texts.append(text)
    return "".join(texts)


def _check_masks(message: Message, where: str, trained: bool) -> None:
    for name in MASKS:
        value = message.get(name)
        if is_empty(value) or mask_says(value) is trained:
            continue
        happens = "is trained on" if trained else "is not trained on"
        raise BadRow(
            f"{where} has {name} = {short(value)}, which is not used: a message of role {message.get('role')!r} "
            f"{happens} here -- write one row for each response (prompt and response keys), or take {name!r} out"
        )
