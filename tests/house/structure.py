"""House rules on the whole package: import cycles, names with two meanings, and how much of it is untyped."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

Modules = Mapping[str, ast.Module]
"""dotted module name -> its syntax tree"""

# Where a library gives no types: the stand-ins for Megatron's CUDA calls, and vLLM's internals.
UNTYPED = ("megatron_rl.mcore.cpu", "megatron_rl.rollout.vllm_")


def read_package(folder: Path) -> dict[str, str]:
    """dotted module name -> source text, of every module of the package in `folder`."""
    sources: dict[str, str] = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [folder.name, *path.relative_to(folder).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path.read_text(encoding="utf-8")
    return sources


def parse(sources: Mapping[str, str]) -> dict[str, ast.Module]:
    """The syntax tree of each module."""
    return {name: ast.parse(text, name) for name, text in sources.items()}


def imports_of(name: str, modules: Modules) -> set[str]:
    """Modules of the same package that a module imports anywhere, inside functions and for types alone too."""
    imported: set[str] = set()
    for node in ast.walk(modules[name]):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                imported.add(full if full in modules else node.module)
    return (imported & modules.keys()) - {name}


def import_cycles(modules: Modules) -> list[list[str]]:
    """Groups of modules each of which imports, directly or not, all others of its group; by name."""
    reached = {name: _reachable(name, modules) for name in modules}
    groups = {tuple(sorted(other for other in reached[name] if name in reached[other])) for name in modules}
    return sorted(list(group) for group in groups if len(group) > 1)


def _reachable(start: str, modules: Modules) -> set[str]:
    seen, queue = {start}, [start]
    while queue:
        for name in imports_of(queue.pop(), modules) - seen:
            seen.add(name)
            queue.append(name)
    return seen


def types_of(module: ast.Module) -> Iterator[str]:
    """Types and aliases of types that a module defines: public names in capitals and small letters, imports apart."""
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign) and not _is_type_variable(node.value):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        else:
            names = []
        yield from (name for name in names if name[0].isupper() and not name.isupper())


def _is_type_variable(value: ast.expr) -> bool:
    called = value.func if isinstance(value, ast.Call) else None
    return isinstance(called, ast.Name) and called.id in ("TypeVar", "ParamSpec")


def doubled_types(modules: Modules) -> list[str]:
    """Names of types that two modules define, each with its modules."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for module, tree in modules.items():
        for name in set(types_of(tree)):
            places[name].append(module)
    return [f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1]


def count_any(tree: ast.Module) -> int:
    """How often a module says `Any`."""
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree))


def count_attribute_calls(tree: ast.Module) -> int:
    """Calls of getattr and hasattr: fields that no type declares."""
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return sum(isinstance(func, ast.Name) and func.id in ("getattr", "hasattr") for func in calls)


def per_thousand_lines(count: Callable[[ast.Module], int], sources: Mapping[str, str]) -> float:
    """`count` of the modules whose libraries have types, a thousand lines of them."""
    typed = {name: text for name, text in sources.items() if not name.startswith(UNTYPED)}
    lines = sum(len(text.splitlines()) for text in typed.values())
    return 1000 * sum(count(ast.parse(text)) for text in typed.values()) / lines
