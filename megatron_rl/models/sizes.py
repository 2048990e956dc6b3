"""Shapes of well-known models by name, for planning without a download: `megatron-rl plan --model qwen2.5/7b`."""

from __future__ import annotations

import difflib

from megatron_rl.errors import ConfigError, Fault
from megatron_rl.models.families import FAMILIES
from megatron_rl.models.shape import ModelShape

KNOWN_SHAPES: dict[str, ModelShape] = {
    name: shape for family in FAMILIES.values() for name, shape in family.known.items()
}
"""Name -> shape, of all families."""


def named_shape(name: str, key: str = "model") -> ModelShape:
    """The shape of a model of KNOWN_SHAPES, in any case.

    Raises ConfigError with the nearest names where there is no such one.
    """
    name = name.lower()
    if name not in KNOWN_SHAPES:
        close = difflib.get_close_matches(name, KNOWN_SHAPES, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        cure = f"{hint}known: {', '.join(KNOWN_SHAPES)}; or give a folder with a config.json"
        raise ConfigError([Fault(key, name, "is no folder, no config.json and no known model", cure)])
    return KNOWN_SHAPES[name]
