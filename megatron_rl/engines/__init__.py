"""What each rollout engine can do, and the class that does it: a file for each shipped one, and engines by the path of
their class. No torch is imported.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from megatron_rl.engines.record import OPTIONAL_SETTINGS, PATH_FORM, Engine, Refusal, engine_by_path

__all__ = ["ENGINES", "OPTIONAL_SETTINGS", "PATH_FORM", "Engine", "Refusal", "engine_of"]


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


def engine_of(name: str) -> Engine:
    """The engine that rollout.name chooses: a shipped one, or the class at a path. KeyError if it is neither."""
    return engine_by_path(name) if ":" in name else ENGINES[name]
