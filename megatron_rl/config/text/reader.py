"""From YAML files and `key=value` texts to a flat list of entries, each with the place that set it.

YAML as people mean it: 1e-6 is a number, 2024-01-01 and 1:30 are text (PyYAML: text, a date and 90), and a
key that stands twice in a mapping is an error (PyYAML keeps the last without a word). Below a mapping whose keys
are the user's own, names stand as they are, dots included.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from yaml.composer import ComposerError

from megatron_rl.config.text import yaml_limits
from megatron_rl.config.text.schema import Names, join_key, split_setting
from megatron_rl.errors import Fault
from megatron_rl.messages import cut

_TAG = "tag:yaml.org,2002:"
_FLOAT = re.compile(
    r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
# Python turns no text of more than 4300 digits into a number; one of 400 is text here, and refused as such.
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]{0,399}|0x[0-9a-fA-F]{1,300})$")


@dataclass(frozen=True)
class Entry:
    """One leaf of a source. value is a scalar, a list, or an empty mapping. key: as schema.join_key writes it.

    Example: Entry("actor.optim.lr", 1e-6, "in run.yaml:12", 0)
    """

    key: str
    value: object
    where: str
    """Completes "set ...": "in run.yaml:12", "on the command line"."""
    source: int
    """Place of the source in the order of merging; a later one wins."""


@dataclass(frozen=True)
class NoEffect:
    """A setting that changes nothing in this run, and why."""

    key: str
    value: object
    why: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value}  ({self.why})"


_ON_COMMAND_LINE = "on the command line"


class _Loader(yaml_limits.Bounded, yaml.SafeLoader):
    """SafeLoader with the numbers of YAML 1.2, without its dates, and with bounds on what a text may ask for."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in rules if tag.removeprefix(_TAG) not in ("int", "float", "timestamp")]
    for first, rules in cast("dict[str, list[tuple[str, Any]]]", yaml.SafeLoader.yaml_implicit_resolvers).items()
}


def resolve_numbers(yaml_class: Any) -> None:
    """Teach a loader, or a dumper that must quote what the loader would take for a number, these numbers."""
    for name, regexp in (("float", _FLOAT), ("int", _INT)):
        yaml_class.add_implicit_resolver(_TAG + name, regexp, list("-+.0123456789"))


resolve_numbers(_Loader)


def read_file(path: str, source: int, names: Names) -> tuple[list[Entry], list[Fault]]:
    """Entries of a YAML file, and what is wrong with it. An empty file has no entries.

    names: which mappings have keys of the user's own.
    """
    try:
        size = Path(path).stat().st_size
        if size > yaml_limits.MAX_BYTES:
            cure = "give the config; data files go to data.train_files"
            reason = f"has {size} bytes, and a config has at most {yaml_limits.MAX_BYTES}"
            return [], [Fault(path, path, reason, cure)]
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return [], [Fault(path, path, "there is no such file", "give the path of a YAML file, or key=value")]
    except IsADirectoryError:
        return [], [Fault(path, path, "is a folder", "give the path of a YAML file in it")]
    except PermissionError:
        return [], [Fault(path, path, "may not be read", "make it readable for you (chmod u+r)")]
    except UnicodeDecodeError as error:
        return [], [Fault(path, path, f"is not UTF-8 text: {error.reason} at byte {error.start}", "save it as UTF-8")]
    return _read_text(text, path, source, names)


def _read_text(text: str, path: str, source: int, names: Names) -> tuple[list[Entry], list[Fault]]:
    loader: Any = _Loader(text)
    try:
        root: yaml.Node | None = loader.get_single_node()
        if root is None:
            return [], []
        if not isinstance(root, yaml.MappingNode):
            cure = "write sections and keys, for instance `model:` and below it `  path: models/my-model`"
            return [], [Fault(f"{path}:1", _short(text), "is not a mapping", cure)]
        walk = _Walk(loader, path, source, names)
        walk.document(root, "")
        return walk.entries, walk.faults
    except yaml.YAMLError as error:
        return [], [_yaml_fault(error, text, path)]
    finally:
        loader.dispose()


class _Walk:
    """Collects the leaves of a document's mappings."""

    def __init__(self, loader: Any, path: str | None, source: int, names: Names) -> None:
        self.loader, self.path, self.source, self.names = loader, path, source, names
        self.entries: list[Entry] = []
        self.faults: list[Fault] = []

    def document(self, root: yaml.MappingNode, prefix: str) -> None:
        """Add the leaves of a whole text; nothing of one that holds itself, or far more than its length."""
        problem = yaml_limits.expansion(root)
        if problem:
            line, reason, cure = problem
            self.faults.append(Fault(self._at(line), "*", reason, cure))
            return
        self._twice_at_any_depth(root, prefix)
        self.mapping(root, prefix)

    def mapping(self, node: yaml.MappingNode, prefix: str) -> None:
        """Add the leaves under `node`. prefix: dotted key of the node, with a dot at its end."""
        for name, (line, value) in self._pairs(node, prefix).items():
            key = prefix + join_key([name])
            if isinstance(value, yaml.MappingNode) and value.value:
                self.mapping(value, key + ".")
            else:
                built: object = self.loader.construct_object(value, deep=True)
                where = _ON_COMMAND_LINE if self.path is None else f"in {self.path}:{line}"
                self.entries.append(Entry(key, built, where, self.source))

    def _at(self, line: int) -> str:
        return f"{self.path or 'the command line'}:{line}"

    def _pairs(self, node: yaml.MappingNode, prefix: str) -> dict[str, tuple[int, yaml.Node]]:
        """Key -> (line, value). Explicit keys win over merged (<<) ones, as YAML says."""
        self.loader.flatten_mapping(node)
        pairs: dict[str, tuple[int, yaml.Node]] = {}
        free = bool(prefix) and self.names.free(prefix[:-1])
        for key_node, value in _pairs_of(node):
            line = key_node.start_mark.line + 1
            text: object = key_node.value
            if not isinstance(text, str) or key_node.tag != f"{_TAG}str":
                self.faults.append(
                    Fault(self._at(line), text, f"a key must be text, and this reads as {_kind(key_node)}", "quote it")
                )
            elif not text:
                self.faults.append(Fault(self._at(line), prefix, "a key must not be empty", "give it a name"))
            elif "." in text and not free:
                nested = ": {".join(text.split(".")) + ": ..." + "}" * text.count(".")
                cure = f"nest it: `{nested}`; the dotted form is for the command line"
                self.faults.append(Fault(self._at(line), prefix + text, "a key in YAML has no dots", cure))
            else:
                pairs[text] = (line, value)
        return pairs

    def _twice_at_any_depth(self, root: yaml.Node, prefix: str) -> None:
        """Keys that a mapping has twice: also in mappings within lists, which become values as they are."""
        seen: set[int] = set()
        waiting: list[tuple[yaml.Node, str]] = [(root, prefix)]
        while waiting:
            node, above = waiting.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, yaml.SequenceNode):
                waiting += [(one, f"{above[:-1]}[{place}].") for place, one in enumerate(node.value)]
            elif isinstance(node, yaml.MappingNode):
                explicit = [pair for pair in _pairs_of(node) if pair[0].tag != f"{_TAG}merge"]
                self._twice([key for key, _ in explicit], above)
                waiting += [(value, f"{above}{key.value}.") for key, value in _pairs_of(node)]

    def _twice(self, keys: list[yaml.Node], prefix: str) -> None:
        lines: dict[tuple[str, str], list[int]] = {}
        for key in keys:
            if isinstance(key, yaml.ScalarNode):
                lines.setdefault((key.tag, cast(str, key.value)), []).append(key.start_mark.line + 1)
        for (_, name), at in lines.items():
            if len(at) > 1:
                reason = f"the key stands {len(at)} times in one mapping (lines {', '.join(map(str, at))})"
                self.faults.append(Fault(self._at(at[-1]), prefix + name, reason, "keep one of them"))


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
    if isinstance(error, ComposerError) and not error.context and "alias" not in problem:
        cure = "write the few values that the run needs; data files go to data.train_files"
        return Fault(f"{path}:{mark.line + 1}", _short(line), problem, cure)
    return Fault(f"{path}:{mark.line + 1}", _short(line), f"is not YAML: {problem}", cure)


def read_overrides(texts: list[str], source: int, names: Names) -> tuple[list[Entry], list[Fault]]:
    """Entries of `key=value` texts in their order; values are read as YAML. A later text for a key wins.

    Names with dots or other signs stand in quotes: `data.mix_weights."org/set-1.5"=2`.
    """
    entries: dict[str, Entry] = {}
    faults: list[Fault] = []
    for text in texts:
        found, wrong = _read_override(text, source, names)
        faults += wrong
        for entry in found:
            entries.pop(entry.key, None)
            entries[entry.key] = entry
    return list(entries.values()), faults


def _read_override(text: str, source: int, names: Names) -> tuple[list[Entry], list[Fault]]:
    parts, value, problem = split_setting(text, names)
    if problem:
        return [], [problem]
    key = join_key(parts)
    loader: Any = _Loader(value)
    try:
        node: yaml.Node | None = loader.get_single_node()
        if isinstance(node, yaml.MappingNode) and node.value:
            walk = _Walk(loader, None, source, names)
            walk.document(node, key + ".")
            return walk.entries, walk.faults
        too_much = None if node is None else yaml_limits.expansion(node)
        if too_much:
            return [], [Fault(key, "*", *too_much[1:])]
        built: object = None if node is None else loader.construct_object(node, deep=True)
        return [Entry(key, built, _ON_COMMAND_LINE, source)], []
    except yaml.YAMLError as error:
        problem_text = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
        cure = f"quote it for YAML and the shell: {key}=\"'...'\""
        return [], [Fault(key, _short(value), f"the value is not YAML: {problem_text}", cure)]
    finally:
        loader.dispose()


def parse_value(text: str) -> tuple[object, str]:
    """(value, "") of a YAML text, or (None, what is wrong with it)."""
    loader: Any = _Loader(text)
    try:
        node: yaml.Node | None = loader.get_single_node()
        if node is None:
            return None, ""
        too_much = yaml_limits.expansion(node)
        return (None, too_much[1]) if too_much else (loader.construct_object(node, deep=True), "")
    except yaml.YAMLError as error:
        return None, str(error.problem if isinstance(error, yaml.MarkedYAMLError) else error)
    finally:
        loader.dispose()


def _short(text: str) -> str:
    first = text.strip().splitlines()[0] if text.strip() else ""
    return cut(first)
