"""A reward's file as a module: it may import its neighbours, by name (import rules) or relatively (from .rules ...).

The folder becomes a package of its own name in sys.modules, without running its __init__.py, and its modules are found
before installed ones; the standard library, and the file's own name, stay what they are. So a file math_verify.py may
still import the package math_verify.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from megatron_rl.errors import RewardError


class _Neighbours(importlib.abc.MetaPathFinder):
    """Finds the modules beside one reward file."""

    def __init__(self, folder: Path, own: str) -> None:
        self.folder, self._own = folder, own

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if path is not None or fullname == self._own or fullname in sys.stdlib_module_names:
            return None
        return importlib.machinery.PathFinder.find_spec(fullname, [str(self.folder)])


def import_file(spec: str, source: str) -> ModuleType:
    """The module of a reward's file; `spec` is what the reward was called.

    Raises RewardError where the file is not there, does not import, or has a neighbour of the same name
    as another reward's.
    """
    path = Path(source).expanduser().resolve()
    if not path.is_file():
        raise RewardError(f"reward.function: {spec!r} -- there is no file {path} -- give a path that exists")
    package = _package(path.parent)
    name = f"{package}.{path.stem.replace('.', '_')}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise RewardError(f"reward.function: {spec!r} -- {path} is no Python file -- give a file that ends with .py")
    _refuse_twins(spec, path.parent)
    if not any(isinstance(finder, _Neighbours) and finder.folder == path.parent for finder in sys.meta_path):
        sys.meta_path.insert(0, _Neighbours(path.parent, path.stem))
    module = importlib.util.module_from_spec(module_spec)
    # Dataclasses and pickling look a class's module up by name.
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:  # importing runs code of the user's: whatever it raises is the reason
        del sys.modules[name]
        raise RewardError(
            f"reward.function: {spec!r} -- {path} does not import ({type(error).__name__}: {error}"
            f"{_line(error, path)}) -- {_cure(error)}"
        ) from error
    return module


def _package(folder: Path) -> str:
    """The name of the package that a folder of rewards is, which relative imports start from."""
    name = f"megatron_rl_reward_{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return name


def _refuse_twins(spec: str, folder: Path) -> None:
    """Two reward folders with modules of one name: the second would be given the first's in silence."""
    others = [finder.folder for finder in sys.meta_path if isinstance(finder, _Neighbours) and finder.folder != folder]
    for file in folder.glob("*.py"):
        loaded = getattr(sys.modules.get(file.stem), "__file__", None)
        if loaded is not None and Path(loaded).parent in others:
            raise RewardError(
                f"reward.function: {spec!r} -- {file} has the name of {loaded}, which another reward imports "
                f"-- rename one of the two, or import it relatively (from .{file.stem} import ...)"
            )


def _line(error: Exception, path: Path) -> str:
    """Where in the reward's own file the import failed."""
    if isinstance(error, SyntaxError):
        # Its text names file and line.
        return ""
    line, traceback = None, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == str(path):
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return "" if line is None else f", line {line}"


def _cure(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"install {error.name}, put its folder on PYTHONPATH, or lay its file beside the reward's"
    if isinstance(error, ImportError) and "relative import" in str(error):
        return "a file of rewards is in a package of its folder alone: name it as package.module:function"
    return "correct the file"
