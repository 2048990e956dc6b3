"""Sliding windows (Beltagy et al. 2020): how far back each layer sees, read from config.json. Torch-free.

A query sees `window` keys, its own among them. transformers and vLLM do not read the entries alike: vLLM slides all
layers of these families or none. Where they would compute different models, the entry is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True)
class OddEntry:
    """An entry of config.json that asks for windows which are not computed."""

    entry: str
    reason: str


Windows = Callable[[Mapping[str, Any], int], "tuple[int, ...] | OddEntry"]
"""(config.json, number of layers) -> ModelShape.windows of a family"""


FULL, SLIDING = "full_attention", "sliding_attention"
_ODD_TYPES = OddEntry("layer_types", f"layers other than {FULL} are not supported here")


def no_windows(content: Mapping[str, Any], layers: int) -> tuple[int, ...] | OddEntry:
    """Of families without windows. In Llama vLLM slides all layers where the entry is there, and transformers none."""
    if content.get("use_sliding_window"):
        return OddEntry("use_sliding_window", "sliding-window attention is not supported")
    if content.get("sliding_window") is not None:
        return OddEntry("sliding_window", "sliding-window attention is not supported in this family")
    return () if _all_full(content) else _ODD_TYPES


def windows_everywhere(content: Mapping[str, Any], layers: int, default: int | None) -> tuple[int, ...] | OddEntry:
    """Of families whose layers all have the window sliding_window. default: where the file does not say."""
    if content.get("use_sliding_window"):
        return OddEntry("use_sliding_window", "means nothing here: sliding_window alone decides")
    if content.get("layer_types") is not None:
        return OddEntry("layer_types", "makes it another model to transformers (Ministral), or to vLLM")
    window = content.get("sliding_window", default)
    if window is None:
        return ()
    return (window,) * layers if _is_count(window) else _no_count("sliding_window")


def switched_windows(content: Mapping[str, Any], layers: int, by_layer: bool = True) -> tuple[int, ...] | OddEntry:
    """Of Qwen: use_sliding_window switches windows on, in layers from max_window_layers on or as layer_types says.

    by_layer: False where all layers have the window.
    """
    switch = content.get("use_sliding_window", False)
    if not isinstance(switch, bool):
        return OddEntry("use_sliding_window", "must be true or false")
    if not switch:
        return () if _all_full(content) else _ODD_TYPES
    window, kinds = content.get("sliding_window", 4096), content.get("layer_types")
    if not _is_count(window):
        return _no_count("sliding_window")
    if kinds is not None and not by_layer:
        return OddEntry("layer_types", "vLLM would go by it and transformers by use_sliding_window")
    first = content.get("max_window_layers", 28) if by_layer else 0
    if kinds is None and not (isinstance(first, int) and not isinstance(first, bool)):
        return OddEntry("max_window_layers", "must be a whole number where use_sliding_window is true")
    sliding = sum(layer >= first for layer in range(layers)) if kinds is None else _count_sliding(kinds)
    if sliding == layers:
        return (window,) * layers
    reason = f"{sliding} of {layers} layers have a window (max_window_layers, layer_types), and vLLM slides all or none"
    return OddEntry("use_sliding_window", reason)


def windows_by_layer(content: Mapping[str, Any], layers: int, pattern: int) -> tuple[int, ...] | OddEntry:
    """Of Gemma 3: layers have the window sliding_window as layer_types says; if it does not, all but each
    sliding_window_pattern-th. pattern: where the file does not say.
    """
    window: Any = content.get("sliding_window")
    every: Any = content.get("sliding_window_pattern", pattern)
    kinds: object = content.get("layer_types")
    if not _is_count(window):
        return OddEntry("sliding_window", "must be a whole number above 0")
    if kinds is None:
        if not _is_count(every):
            return OddEntry("sliding_window_pattern", "must be a whole number above 0")
        if content.get("_sliding_window_pattern", every) != every:
            return OddEntry("_sliding_window_pattern", "is read by nobody where the file has no layer_types")
        return tuple(window if (layer + 1) % every else 0 for layer in range(layers))
    if not isinstance(kinds, list) or not all(kind in (FULL, SLIDING) for kind in cast("list[object]", kinds)):
        return OddEntry("layer_types", f"must be a list of {FULL} and {SLIDING}")
    return tuple(window if kind == SLIDING else 0 for kind in cast("list[object]", kinds))


def windows_off(content: Mapping[str, Any], layers: int) -> tuple[int, ...] | OddEntry:
    """Of families whose files have Qwen's entries, and whose windows vLLM does not compute."""
    windows = switched_windows(content, layers)
    return OddEntry("use_sliding_window", "vLLM computes no windows in this family") if windows else windows


def alternating_windows(content: Mapping[str, Any], layers: int) -> tuple[int, ...] | OddEntry:
    """Of families with the window sliding_window in the first layer and every other one after it. vLLM goes by the
    layer's number alone, transformers by layer_types.
    """
    if content.get("use_sliding_window") is not None:
        return OddEntry("use_sliding_window", "means nothing here: sliding_window alone decides")
    window, kinds = content.get("sliding_window"), content.get("layer_types")
    if not _is_count(window):
        return OddEntry("sliding_window", "must be a whole number above 0 here")
    if kinds not in (None, [SLIDING if layer % 2 == 0 else FULL for layer in range(layers)]):
        return OddEntry("layer_types", f"vLLM computes {SLIDING} in the first layer and every other one after it")
    return tuple(cast("int", window) if layer % 2 == 0 else 0 for layer in range(layers))


def _count_sliding(kinds: object) -> int:
    return cast("list[object]", kinds).count(SLIDING) if isinstance(kinds, list) else 0


def _all_full(content: Mapping[str, Any]) -> bool:
    kinds: object = content.get("layer_types")
    if not isinstance(kinds, list):
        return kinds is None
    return all(kind == FULL for kind in cast("list[object]", kinds))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _no_count(entry: str) -> OddEntry:
    return OddEntry(entry, "must be a whole number above 0, or null for no window")
