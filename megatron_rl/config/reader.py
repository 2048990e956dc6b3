"""From YAML files and `key=value` texts to a flat list of entries, each with the place that set it.

YAML as people mean it: 1e-6 is a number, 2024-01-01 and 1:30 are text (PyYAML: text, a date and 90), and a
key that stands twice in a mapping is an error (PyYAML keeps the last without a word).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from megatron_rl.errors import Fault

_TAG = "tag:yaml.org,2002:"
_FLOAT = re.compile(
    r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$")


@dataclass(frozen=True)
class Entry:
    """One leaf of a source. value is a scalar, a list, or an empty mapping.

    Example: Entry("actor.optim.lr", 1e-6, "in run.yaml:12", 0)
    """

    key: str
    value: Any
    where: str
    """Completes "set ...": "in run.yaml:12", "on the command line"."""
    source: int
    """Place of the source in the order of merging; a later one wins."""


@dataclass(frozen=True)
class NoEffect:
    """A setting that changes nothing in this run, and why."""

    key: str
    value: Any
    why: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value}  ({self.why})"


_ON_COMMAND_LINE = "on the command line"


class _Loader(yaml.SafeLoader):
    """SafeLoader with the numbers of YAML 1.2 and without its dates."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in rules if tag.removeprefix(_TAG) not in ("int", "float", "timestamp")]
    for first, rules in cast("dict[str, list[tuple[str, Any]]]", yaml.SafeLoader.yaml_implicit_resolvers).items()
}


def resolve_numbers(yaml_class: Any) -> None:
    """Teach a loader, or a dumper that must quote what the loader would take for a number, these numbers."""
    for name, regexp in (("float", _FLOAT), ("int", _INT)):
        yaml_class.add_implicit_resolver(_TAG + name, regexp, list("-+.0123456789"))


resolve_numbers(_Loader)


def read_file(path: str, source: int) -> tuple[list[Entry], list[Fault]]:
    """Entries of a YAML file, and what is wrong with it. An empty file has no entries."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return [], [Fault(path, path, "there is no such file", "give the path of a YAML file, or key=value")]
    except IsADirectoryError:
        return [], [Fault(path, path, "is a folder", "give the path of a YAML file in it")]
    except PermissionError:
        return [], [Fault(path, path, "may not be read", "make it readable for you (chmod u+r)")]
    except UnicodeDecodeError as error:
        return [], [Fault(path, path, f"is not UTF-8 text: {error.reason} at byte {error.start}", "save it as UTF-8")]
    return _read_text(text, path, source)


def _read_text(text: str, path: str, source: int) -> tuple[list[Entry], list[Fault]]:
    loader: Any = _Loader(text)
    try:
        root: yaml.Node | None = loader.get_single_node()
        if root is None:
            return [], []
        if not isinstance(root, yaml.MappingNode):
            cure = "write sections and keys, for instance `model:` and below it `  path: models/my-model`"
            return [], [Fault(f"{path}:1", _short(text), "is not a mapping", cure)]
        walk = _Walk(loader, path, source)
        walk.mapping(root, "", ())
        return walk.entries, walk.faults
    except yaml.YAMLError as error:
        return [], [_yaml_fault(error, text, path)]
    finally:
        loader.dispose()


class _Walk:
    """Collects the leaves of a document's mappings."""

    def __init__(self, loader: Any, path: str | None, source: int) -> None:
        self.loader, self.path, self.source = loader, path, source
        self.entries: list[Entry] = []
        self.faults: list[Fault] = []

    def mapping(self, node: yaml.MappingNode, prefix: str, above: tuple[int, ...]) -> None:
        """Add the leaves under `node`. prefix: dotted key of the node, with a dot at its end."""
        for name, (line, value) in self._pairs(node, prefix).items():
            key = prefix + name
            if id(value) in above:
                self.faults.append(
                    Fault(key, "*", "the mapping holds itself", "write the value out in place of the alias")
                )
            elif isinstance(value, yaml.MappingNode) and value.value:
                self.mapping(value, key + ".", (*above, id(node), id(value)))
            else:
                built: Any = self.loader.construct_object(value, deep=True)
                where = _ON_COMMAND_LINE if self.path is None else f"in {self.path}:{line}"
                self.entries.append(Entry(key, built, where, self.source))

    def _pairs(self, node: yaml.MappingNode, prefix: str) -> dict[str, tuple[int, yaml.Node]]:
        """Key -> (line, value). Explicit keys win over merged (<<) ones, as YAML says."""
        explicit = [pair for pair in _pairs_of(node) if pair[0].tag != f"{_TAG}merge"]
        self._twice([key for key, _ in explicit], prefix)
        self.loader.flatten_mapping(node)
        pairs: dict[str, tuple[int, yaml.Node]] = {}
        for key_node, value in _pairs_of(node):
            line = key_node.start_mark.line + 1
            text: object = key_node.value
            where = f"{self.path or 'the command line'}:{line}"
            if not isinstance(text, str) or key_node.tag != f"{_TAG}str":
                self.faults.append(
                    Fault(where, text, f"a key must be text, and this reads as {_kind(key_node)}", "quote it")
                )
            elif "." in text:
                nested = ": {".join(text.split(".")) + ": ..." + "}" * text.count(".")
                cure = f"nest it: `{nested}`; the dotted form is for the command line"
                self.faults.append(Fault(where, prefix + text, "a key in YAML has no dots", cure))
            else:
                pairs[text] = (line, value)
        return pairs

    def _twice(self, keys: list[yaml.Node], prefix: str) -> None:
        lines: dict[str, list[int]] = {}
        for key in keys:
            if isinstance(key, yaml.ScalarNode):
                lines.setdefault(cast(str, key.value), []).append(key.start_mark.line + 1)
        for name, at in lines.items():
            if len(at) > 1:
                where = f"{self.path or 'the command line'}:{at[-1]}"
                reason = f"the key stands {len(at)} times in one mapping (lines {', '.join(map(str, at))})"
                self.faults.append(Fault(where, prefix + name, reason, "keep one of them"))


def _pairs_of(node: yaml.MappingNode) -> Iterator[tuple[yaml.Node, yaml.Node]]:
    return iter(cast("list[tuple[yaml.Node, yaml.Node]]", node.value))


def _kind(node: yaml.Node) -> str:
    kinds = {"bool": "true or false", "int": "a number", "float": "a number", "null": "nothing"}
    return kinds.get(node.tag.removeprefix(_TAG), "a list or a mapping")


def _yaml_fault(error: yaml.YAMLError, text: str, path: str) -> Fault:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    if mark is None:
        return Fault(path, _short(text), f"is not YAML: {' '.join(str(error).split())}", "repair the file")
    assert isinstance(error, yaml.MarkedYAMLError)
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    problem = " ".join(part for part in (error.problem, error.context) if part)
    cure = "correct it or the line above: space after colons, equal indentation, closed quotes and brackets"
    if "\t" in line:
        cure = "indent with spaces, not tabs"
    elif "single document" in (error.context or ""):
        cure = "keep one document a file (no second ---)"
    return Fault(f"{path}:{mark.line + 1}", line.strip(), f"is not YAML: {problem}", cure)


def read_overrides(texts: list[str], source: int) -> tuple[list[Entry], list[Fault]]:
    """Entries of `key=value` texts in their order; values are read as YAML. A later text for a key wins."""
    entries: dict[str, Entry] = {}
    faults: list[Fault] = []
    for text in texts:
        found, wrong = _read_override(text, source)
        faults += wrong
        for entry in found:
            entries.pop(entry.key, None)
            entries[entry.key] = entry
    return list(entries.values()), faults


def _read_override(text: str, source: int) -> tuple[list[Entry], list[Fault]]:
    key, equals, value = text.partition("=")
    # Hydra writes +key=value for a key that its own files lack; here every key is known.
    key = key.strip().lstrip("+")
    if not equals or not key:
        cure = f"write key=value, for instance {key or 'actor.tp'}=..."
        return [], [Fault(text, None, "is no setting: it has no key or no '='", cure)]
    loader: Any = _Loader(value)
    try:
        node: yaml.Node | None = loader.get_single_node()
        if isinstance(node, yaml.MappingNode) and node.value:
            walk = _Walk(loader, None, source)
            walk.mapping(node, key + ".", ())
            return walk.entries, walk.faults
        built: Any = None if node is None else loader.construct_object(node, deep=True)
        return [Entry(key, built, _ON_COMMAND_LINE, source)], []
    except yaml.YAMLError as error:
        problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
        return [], [
            Fault(
                key,
                value,
                f"the value is not YAML: {problem}",
                f"quote it for YAML and the shell: {key}=\"'...'\"",
            )
        ]
    finally:
        loader.dispose()


def _short(text: str) -> str:
    first = text.strip().splitlines()[0] if text.strip() else ""
    return first if len(first) <= 60 else first[:57] + "..."
