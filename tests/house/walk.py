"""The files and lines that a reader opens to follow one step on the controller, from prompts to publish.

python tests/house/walk.py CONFIG.yaml [key=value ...]
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

from megatron_rl.config.load import load_config
from megatron_rl.config.run import RunConfig
from megatron_rl.flow import Flow, Node
from megatron_rl.runs.trainer import Trainer
from megatron_rl.trainers import TRAINERS

ROOMS = ("megatron_rl.experience", "megatron_rl.learning")


def files_of_step(cfg: RunConfig) -> dict[Path, int]:
    """File -> lines, in the order of a reader: the file that lists the flow, those of its step functions, and those of
    the functions of experience/ and learning/ that step functions in the first file call. Branches that the config
    switches off are left out.
    """
    lister = TRAINERS[cfg.algorithm.name]
    home = inspect.getmodule(lister)
    steps = [function_of(node) for node in ordered(Trainer(cfg).flow)]
    modules: list[ModuleType | None] = [home]
    for step in steps:
        modules.append(inspect.getmodule(step))
        if modules[-1] is home:
            modules += called_modules(step, cfg)
    files = [Path(inspect.getfile(module)) for module in dict.fromkeys(modules) if module is not None]
    return {file: len(file.read_text(encoding="utf-8").splitlines()) for file in files}


def called_modules(step: Callable[..., object], cfg: RunConfig) -> list[ModuleType | None]:
    """Modules of experience/ and learning/ whose functions a step function names."""
    [tree] = ast.parse(inspect.getsource(step)).body
    names = {
        node.id for node in _switched_on(tree, {"cfg": cfg, "algorithm": cfg.algorithm}) if isinstance(node, ast.Name)
    }
    globals_ = inspect.getmodule(step).__dict__
    values = [globals_[name] for name in sorted(names & globals_.keys())]
    modules = [
        value if inspect.ismodule(value) else inspect.getmodule(value)
        for value in values
        if callable(value) or inspect.ismodule(value)
    ]
    return [module for module in modules if module is not None and module.__name__.startswith(ROOMS)]


def _switched_on(tree: ast.AST, known: dict[str, object]) -> Iterator[ast.AST]:
    """Nodes of a function's body, less branches whose test is false by the config alone, and less annotations."""
    yield tree
    for name, value in ast.iter_fields(tree):
        if name in ("args", "returns", "annotation", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.If) and not _holds(child.test, known):
                continue
            if isinstance(child, ast.AST):
                yield from _switched_on(child, known)


def _holds(test: ast.expr, known: dict[str, object]) -> bool:
    """Whether a test may hold: one that asks for more than the config may."""
    if {node.id for node in ast.walk(test) if isinstance(node, ast.Name)} <= known.keys():
        return bool(eval(compile(ast.Expression(test), "walk", "eval"), {}, dict(known)))
    return True


def ordered(flow: Flow) -> list[Node]:
    """The nodes in the order in which they run."""
    return [node for wave in flow.waves() for node in wave]


def function_of(node: Node) -> Callable[..., object]:
    """A step function, whatever is bound to it."""
    fn = node.fn
    while isinstance(fn, partial):
        fn = fn.func
    return fn


def main(files: list[str], overrides: list[str]) -> None:
    """Print the walk."""
    walk = files_of_step(load_config(files, overrides))
    for file, lines in walk.items():
        print(f"{lines:5d}  {file}")
    print(f"{sum(walk.values()):5d}  lines in {len(walk)} files")


if __name__ == "__main__":
    main([text for text in sys.argv[1:] if "=" not in text], [text for text in sys.argv[1:] if "=" in text])
