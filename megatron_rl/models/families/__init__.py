"""The model families, one a file. A file put here is found by itself: each Family in it is one more architecture."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from megatron_rl.models.rules import Family


def _families() -> dict[str, Family]:
    families: dict[str, Family] = {}
    for name in sorted(module.name for module in iter_modules(__path__)):
        for value in vars(import_module(f"{__name__}.{name}")).values():
            if isinstance(value, Family) and families.setdefault(value.architecture, value) is not value:
                raise TypeError(f"models/families/{name}.py: {value.architecture} has two tables; remove one")
    return families


FAMILIES: dict[str, Family] = _families()
"""HF architecture -> its family."""
