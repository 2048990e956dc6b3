"""House rules that no ready-made tool checks: pure functions from a file's name and text to complaints."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80

CODE_SUFFIXES = {".py", ".pyi", ".sh", ".sbatch", ".cpp", ".cc", ".cu", ".cuh", ".h", ".hpp"}
TEXT_SUFFIXES = CODE_SUFFIXES | {".yaml", ".yml", ".toml", ".cfg", ".ini", ".md", ".txt", ".json", ".jinja"}
SCRIPT_NAMES = {"run", "Dockerfile", "LICENSE", ".gitignore", ".dockerignore"}

_BROAD = {"Exception", "BaseException"}

# Folders that exist on one machine only; a path inside a container image (/opt, /workspace) is none of them.
_MACHINE_PATH = re.compile(r"(?<![\w./])/(?:root|work|home|Users|mnt|tmp/w|opt/(?:wheels|pypi))\b")
# Registries come from the user's own settings. PyTorch's index is the one that pip must be told of.
_REGISTRY = re.compile(
    r"\b(?:pypi\.org|pythonhosted\.org|npmjs\.(?:org|com)|deb\.debian\.org|archive\.ubuntu\.com"
    r"|crates\.io|proxy\.golang\.org|nvcr\.io|ghcr\.io|quay\.io|docker\.io|hub\.docker\.com)\b"
)


def project_files(root: Path) -> list[Path]:
    """Files that belong to the project: what git tracks, and what it would add."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
        timeout=60,
    )
    names = sorted({name for name in listing.stdout.decode().split("\0") if name})
    return [root / name for name in names if (root / name).is_file()]


def is_code(path: Path) -> bool:
    return path.suffix in CODE_SUFFIXES or (path.suffix == "" and path.name in SCRIPT_NAMES - {"LICENSE"})


def is_text(path: Path) -> bool:
    return path.suffix in TEXT_SUFFIXES or path.name in SCRIPT_NAMES


def long_file(name: str, text: str) -> Iterator[str]:
    lines = len(text.splitlines())
    if lines > MAX_FILE_LINES:
        yield f"{name}: {lines} lines, more than {MAX_FILE_LINES}"


def long_functions(name: str, text: str) -> Iterator[str]:
    """Counted from the first decorator to the last line, docstring and comments included."""
    for node in ast.walk(ast.parse(text, name)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            lines = (node.end_lineno or node.lineno) - first + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {lines} lines, more than {MAX_FUNCTION_LINES}"


def non_ascii(name: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        odd = sorted({char for char in line if ord(char) > 127})
        if odd:
            yield f"{name}:{number}: not ASCII: {', '.join(f'U+{ord(char):04X}' for char in odd)}"


def machine_paths(name: str, text: str) -> Iterator[str]:
    """Paths and hosts that make a file true on one machine only."""
    for number, line in enumerate(text.splitlines(), start=1):
        for found in [*_MACHINE_PATH.finditer(line), *_REGISTRY.finditer(line)]:
            yield f"{name}:{number}: names a machine's path or a registry: {found.group()}"


def broad_excepts(name: str, text: str) -> Iterator[str]:
    """Handlers of everything that drop the error and go on, and suppress(Exception).

    One that ends in `raise` may clean up first; one whose last line returns what it caught hands it on.
    """
    for node in ast.walk(ast.parse(text, name)):
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and not _passes_on(node):
            yield f"{name}:{node.lineno}: catches every exception and goes on"
        elif isinstance(node, ast.Call) and _last_name(node.func) == "suppress" and _is_broad_any(node.args):
            yield f"{name}:{node.lineno}: suppresses every exception"


def _is_broad_any(caught: list[ast.expr]) -> bool:
    return any(map(_is_broad, caught))


def _is_broad(caught: ast.expr | None) -> bool:
    if isinstance(caught, ast.Tuple):
        return _is_broad_any(caught.elts)
    return caught is None or _last_name(caught) in _BROAD


def _last_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _passes_on(handler: ast.ExceptHandler) -> bool:
    """The error is raised again, or is part of the function's result: a failure of a user's code is a value."""
    last = handler.body[-1]
    as_result = isinstance(last, ast.Return) and last.value is not None
    return _always_raises(handler) or (as_result and bool(_names(last) & _made_from_error(handler)))


def _made_from_error(handler: ast.ExceptHandler) -> set[str]:
    """The caught error's name, and those of the variables that the handler makes from it."""
    found = {handler.name} if handler.name else set[str]()
    for node in _own_nodes(handler):
        if isinstance(node, ast.Assign) and _names(node.value) & found:
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _always_raises(handler: ast.ExceptHandler) -> bool:
    leaves = any(isinstance(node, ast.Return | ast.Continue | ast.Break) for node in _own_nodes(handler))
    return isinstance(handler.body[-1], ast.Raise) and not leaves


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes below `node` that run with it: not the bodies of functions defined in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _own_nodes(child)
