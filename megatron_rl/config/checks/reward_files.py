"""Checks of a reward's file, which is read and not run: it is Python, it defines the reward in a form that is known,
and what it imports at its top is there.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config.checks.reward_forms import foreign_form
from megatron_rl.errors import Fault

KEY = "reward.function"


def reward_file(value: str, file: Path, name: str) -> list[Fault]:
    """What is wrong with the file and the function `name` in it; `value` is what the reward was called."""
    file = file.expanduser()
    if not file.is_file():
        cure = "give the path of a Python file, then : and the function"
        return [Fault(KEY, value, f"there is no file {file}", cure)]
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        line = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
        return [Fault(KEY, value, f"{file} is not valid Python: {error}{line}", "repair the file")]
    faults = [Fault(KEY, value, *found) for found in _missing_imports(tree, file)]
    names = _names_defined(tree)
    if name not in names and "*" not in names:
        close = difflib.get_close_matches(name, sorted(names), n=1)
        hint = f"did you mean {file}:{close[0]}?" if close else f"it defines {', '.join(sorted(names)) or 'nothing'}"
        return [*faults, Fault(KEY, value, f"{file} does not define {name}", hint)]
    return faults + _form_faults(tree, value, file, name)


def _form_faults(tree: ast.Module, value: str, file: Path, name: str) -> list[Fault]:
    """A function at the top of the file whose parameters are another trainer's, or that takes none."""
    faults: list[Fault] = []
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name != name or node.decorator_list:
            continue
        arguments = node.args
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        where = f"{file} line {node.lineno}: {name}({', '.join(names)})"
        foreign = foreign_form(names)
        if foreign is not None:
            reason, _, cure = foreign.partition(" -- ")
            faults.append(Fault(KEY, value, f"{where} {reason}", cure))
        elif not names and arguments.vararg is None and arguments.kwarg is None:
            cure = "give it (data_source, solution_str, ground_truth, extra_info=None), or one sample"
            faults.append(Fault(KEY, value, f"{where} takes no argument", cure))
    return faults


def _missing_imports(tree: ast.Module, file: Path) -> Iterator[tuple[str, str]]:
    """(reason, cure) of each import at the top that finds nothing. Those in functions and of `try` may be meant to;
    star imports are left to the run, which imports the file before workers start.
    """
    for node in tree.body:
        if not isinstance(node, ast.Import | ast.ImportFrom) or node.names[0].name == "*":
            continue
        where = f"{file} line {node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.level:
            head = (node.module or "").split(".")[0]
            if node.level > 1:
                reason = f"{where} imports from above its folder"
                yield reason, "name the reward as package.module:function, with the package on PYTHONPATH"
            elif head and not _is_beside(file, head):
                yield f"{where} imports .{head}, which is not beside it", f"lay {head}.py beside it"
        else:
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for head in (module.split(".")[0] for module in modules):
                if not _is_beside(file, head) and not _is_installed(head):
                    yield f"{where} imports {head}, which is not installed", f"install it, or lay {head}.py beside it"


def _is_beside(file: Path, name: str) -> bool:
    return (file.parent / f"{name}.py").is_file() or (file.parent / name).is_dir()


def _is_installed(name: str) -> bool:
    return name in sys.stdlib_module_names or name in sys.modules or importlib.util.find_spec(name) is not None


def _names_defined(tree: ast.Module) -> set[str]:
    """Names that any statement of the file binds ("*": a star import, which may bind any)."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
    return names
