"""Changes to a model's config.json: the key model.override_config. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from megatron_rl.errors import Fault

OVERRIDE = "model.override_config"
"""The key whose entries are the changes"""
ROPE_ENTRIES = ("rope_scaling", "rope_parameters")
"""The entries that describe RoPE: older files have the first, newer ones the second, and the first stands before it"""
_THETA = "rope_theta"

_TOKENS = "belongs to the tokenizer and to the sampling of answers"
_SIZE = "is a size of the weights"
_KEPT: dict[str, str] = {
    **dict.fromkeys(("architectures", "model_type"), "says which model the weights are"),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _TOKENS),
    **dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"), _SIZE),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "intermediate_size", "tie_word_embeddings"), _SIZE),
    **dict.fromkeys(("dtype", "torch_dtype"), "is set by model.dtype"),
}
"""Entries that must stay as the file has them, and why."""


def laid_over(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the changes in place of its entries.

    RoPE has one entry afterwards if the changes have one: the other would stand before it. The base rope_theta stays
    that of the file unless the changes name one, wherever either of them has it.
    """
    merged = {**content, **changes}
    entries = [name for name in ROPE_ENTRIES if name in changes]
    if not entries and _THETA not in changes:
        return merged
    theta = changes.get(_THETA, _theta(content))
    if entries:
        merged = {name: value for name, value in merged.items() if name not in ROPE_ENTRIES or name in entries}
    for name in ROPE_ENTRIES:
        entry: object = merged.get(name)
        if isinstance(entry, dict) and theta is not None:
            rope = cast("dict[str, Any]", entry)
            # Entries for each layer type have bases of their own; one at the top, from the changes, is refused there.
            by_type = any(isinstance(one, dict) for one in rope.values()) and _THETA not in changes
            stays = (name in entries and _THETA in rope) or by_type
            merged[name] = rope if stays else rope | {_THETA: theta}
    if theta is not None and not any(merged.get(name) for name in ROPE_ENTRIES):
        merged[_THETA] = theta
    return merged


def _theta(content: Mapping[str, Any]) -> object:
    for name in ROPE_ENTRIES:
        entry: object = content.get(name)
        if entry:
            inner = cast("dict[str, Any]", entry).get(_THETA) if isinstance(entry, dict) else None
            return content.get(_THETA) if inner is None else inner
    return content.get(_THETA)


def change_faults(changes: Mapping[str, Any]) -> list[Fault]:
    """Faults of changes that other readers of the file would not see, or that the weights do not allow."""
    cure = "remove it; a model with other weights or tokens has a folder of its own"
    return [Fault(f"{OVERRIDE}.{name}", changes[name], _KEPT[name], cure) for name in changes if name in _KEPT]


def describe_changes(content: Mapping[str, Any], changes: Mapping[str, Any]) -> list[str]:
    """One line for each entry that differs from the file's."""
    lines: list[str] = []
    merged = laid_over(content, changes)
    for name in sorted({*merged, *content}):
        before, after = content.get(name, "absent"), merged.get(name, "absent")
        if before != after:
            lines.append(f"{name}: {after} (config.json: {before})")
    return lines
