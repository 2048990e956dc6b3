"""The rollout engines, one file each: what an engine can do, and the class that does it. No torch is imported."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from megatron_rl.engines.record import OPTIONAL_SETTINGS, Engine, Refusal

__all__ = ["ENGINES", "OPTIONAL_SETTINGS", "Engine", "Refusal"]


def _listed() -> dict[str, Engine]:
    """Name -> record of every file of this folder but record.py."""
    modules = [module.name for module in iter_modules(__path__, f"{__name__}.")]
    engines: dict[str, Engine] = {}
    for module in modules:
        if module == f"{__name__}.record":
            continue
        engine: Engine = import_module(module).ENGINE
        assert engine.name not in engines, f"{module}: {engines[engine.name]} has the same name"
        engines[engine.name] = engine
    return engines


ENGINES: dict[str, Engine] = _listed()
"""rollout.name -> engine, alphabetical by file."""
