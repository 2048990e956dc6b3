"""The file of a pipeline: stages in order, their settings, and references to what earlier stages make.

A reference is `${STAGE.ARTEFACT}` within a value. What a stage makes is in ARTEFACTS; it lies in FOLDER/STAGE.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from megatron_rl.config import verl
from megatron_rl.config.load import run_schema
from megatron_rl.config.text.reader import read_file
from megatron_rl.errors import ConfigError, Fault

MODEL, ROWS = "model", "rows"
ARTEFACTS: dict[str, dict[str, str]] = {
    **{kind: {MODEL: "final"} for kind in ("sft", "reward_model", "dpo", "grpo", "ppo")},
    "sample": {ROWS: "rows.jsonl"},
    "eval": {},
}
"""Kind of a stage -> what it makes and where that lies in its folder. A kind that makes a model trains it."""
OWN = {
    "trainer.default_local_dir": "the stages' folders lie in the pipeline's `folder`",
    "trainer.experiment_name": "a stage's folder has the stage's name",
    "trainer.resume_mode": "a stage goes on from its own checkpoints",
    "trainer.overwrite": "results of other settings are moved aside",
}
"""Keys that the pipeline sets in each stage, and why."""
REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_NAME, _FOLDER = re.compile(r"[A-Za-z][\w-]*"), re.compile(r"[\w./+@-]+")
_EVERY = {"name", "kind", "config", "set"}
_MORE = {"sample": {"keep", "least"}, "eval": {"models", "data"}}


@dataclass(frozen=True)
class Stage:
    """One stage as the file has it; references are not filled in."""

    name: str
    kind: str
    config: tuple[str, ...]
    settings: tuple[str, ...]
    """key=value texts, those of the whole pipeline first."""
    keep: str = "right"
    """sample: right keeps the different samples whose reward is `least` or more; best keeps one of each prompt."""
    least: float | None = None
    """sample: the lowest reward that is kept; rollout.val.pass_score if unset, with keep best no bound."""
    models: Mapping[str, str] = field(default_factory=dict[str, str])
    """eval: name in the table -> folder of a model."""
    data: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """eval: name in the table -> files."""

    def runs(self, filled: Callable[[str], str]) -> Iterator[tuple[str, list[str]]]:
        """(name, overrides) of each process that the stage needs. filled: fills in the references of a text."""
        settings = [filled(text) for text in self.settings]
        if self.kind != "eval":
            yield self.name, settings
        for model, folder in self.models.items():
            for name, files in self.data.items():
                own = [f"model.path={filled(folder)}", f"data.val_files={json.dumps([filled(file) for file in files])}"]
                yield f"{model}-{name}", settings + own

    def references(self) -> list[str]:
        """What stands in the braces of each reference, once each."""
        files = [file for files in self.data.values() for file in files]
        return list(dict.fromkeys(REFERENCE.findall("\n".join([*self.settings, *self.models.values(), *files]))))


@dataclass(frozen=True)
class Pipeline:
    """The stages of a file, in order."""

    folder: Path
    stages: tuple[Stage, ...]

    def fill(self, place: Callable[[str, str], Path]) -> Callable[[str], str]:
        """A function that fills in references. place: (stage, artefact) -> its path."""
        return lambda text: REFERENCE.sub(lambda found: str(place(*_parts(found[1]))), text)

    def describe(self) -> Iterator[str]:
        """A line a stage, for a reader: what it reads of others and where its result lies."""
        for stage in self.stages:
            reads = f" from {', '.join(stage.references())}" if stage.references() else ""
            yield f"{stage.name}: {stage.kind}, {' + '.join(stage.config)}{reads} -> {self.folder / stage.name}"

    def path_of(self, stage: str, artefact: str) -> Path:
        """Where an artefact lies."""
        kind = next(one.kind for one in self.stages if one.name == stage)
        return self.folder / stage / ARTEFACTS[kind][artefact]


def is_pipeline(path: str) -> bool:
    """Whether a file has stages: a config has none."""
    entries, _ = read_file(path, 0, verl.VerlNames(run_schema()))
    return any(entry.key == "stages" for entry in entries)


def read_pipeline(path: str, overrides: Sequence[str] = ()) -> tuple[Pipeline, list[Fault]]:
    """The pipeline, and every fault of its form; what is faulty is left out. ConfigError if there are no stages.

    overrides: folder=PATH, STAGE.key=value for one stage, key=value for all.
    """
    entries, faults = read_file(path, 0, verl.VerlNames(run_schema()))
    values = {entry.key: entry.value for entry in entries}
    given = [text.partition("=")[2] for text in overrides if text.startswith("folder=")]
    overrides = [text for text in overrides if not text.startswith("folder=")]
    values |= {"folder": given[-1]} if given else {}
    folder: object = values.pop("folder", None)
    listed: object = values.pop("stages", None)
    common = [f"{key[4:]}={json.dumps(values.pop(key))}" for key in list(values) if key.startswith("set.")]
    faults += [Fault(key, value, "is no key of a pipeline", "use folder, set, stages") for key, value in values.items()]
    if not isinstance(folder, str) or not _FOLDER.fullmatch(folder):
        faults.append(Fault("folder", folder, "is no path of letters, digits and . _ / + @ -", "name a folder"))
    contents = cast("list[object]", listed) if isinstance(listed, list) else []
    if not contents:
        raise ConfigError(
            [*faults, Fault("stages", cast(object, listed), "is no list of stages", "list at least one stage")]
        )
    stages: list[Stage] = []
    for number, content in enumerate(contents):
        stage, wrong = _read_stage(f"stages[{number}]", content)
        faults += wrong
        stages += [] if stage is None else [stage]
    names = [stage.name for stage in stages]
    twice = sorted({name for name in names if names.count(name) > 1})
    faults += [Fault(name, names.count(name), "stages have this name", "give each its own") for name in twice]
    of_stage = {name: [text.partition(".")[2] for text in overrides if text.split(".")[0] == name] for name in names}
    of_all = [text for text in overrides if text.split(".")[0] not in names]
    stages = [replace(one, settings=(*common, *one.settings, *of_all, *of_stage[one.name])) for one in stages]
    return Pipeline(Path(str(folder)), tuple(stages)), faults + reference_faults(stages)


def reference_faults(stages: Sequence[Stage]) -> list[Fault]:
    """References to stages that do not come before, and to what those do not make; keys that are the pipeline's."""
    faults: list[Fault] = []
    before: dict[str, str] = {}
    names = {stage.name for stage in stages}
    for stage in stages:
        for text in stage.references():
            name, artefact = _parts(text)
            key, value = stage.name, "${" + text + "}"
            if name not in before:
                reason = "does not come before this stage" if name in names else "is no stage"
                cure = f"name one of {', '.join(before)}" if before else "give a path: no stage comes before it"
                faults.append(Fault(key, value, f"{name or 'it'} {reason}", cure))
            elif artefact not in ARTEFACTS[before[name]]:
                made = ", ".join(ARTEFACTS[before[name]]) or "nothing that a stage could read"
                faults.append(Fault(key, value, f"{name} is of kind {before[name]}, which makes {made}", "correct it"))
        set_here = {text.partition("=")[0].lstrip("+~") for text in stage.settings}
        faults += [Fault(f"{stage.name}: {key}", "set", OWN[key], "leave it out") for key in OWN if key in set_here]
        before.setdefault(stage.name, stage.kind)
    return faults


def _parts(reference: str) -> tuple[str, str]:
    name, _, artefact = reference.partition(".")
    return name, artefact


def _read_stage(place: str, content: object) -> tuple[Stage | None, list[Fault]]:
    if not isinstance(content, dict):
        return None, [Fault(place, content, "is no mapping", "give it a name, a kind and a config")]
    given = {str(key): value for key, value in cast("dict[object, object]", content).items()}
    name, kind = given.get("name"), given.get("kind")
    faults: list[Fault] = []
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in run_schema().sections:
        cure = "give it a name of letters, digits, _ and - that is no section of a config"
        faults.append(Fault(f"{place}.name", name, "is no name of a stage", cure))
    if not isinstance(kind, str) or kind not in ARTEFACTS:
        faults.append(Fault(f"{place}.kind", kind, "is no kind of stage", f"use one of {', '.join(ARTEFACTS)}"))
    place = str(name) if isinstance(name, str) else place
    known = _EVERY | _MORE.get(str(kind), set())
    for key in given.keys() - known if kind in ARTEFACTS else ():
        cure = f"use {', '.join(sorted(known))}; keys of the config belong below set"
        faults.append(Fault(f"{place}: {key}", given[key], f"is no key of a stage of kind {kind}", cure))
    config = _texts(given.get("config"))
    if not config:
        faults.append(Fault(f"{place}: config", given.get("config"), "names no config file", "give one, or a list"))
    try:
        settings = tuple(_settings(given.get("set")))
    except ValueError as error:
        settings = ()
        faults.append(Fault(f"{place}: set", given.get("set"), str(error), "write a mapping, or a list of key=value"))
    keep, least = given.get("keep", "right"), given.get("least")
    models, data = _named(given.get("models")), _named(given.get("data"))
    faults += _own_faults(place, kind, given, models, data)
    if not isinstance(name, str) or not isinstance(kind, str) or kind not in ARTEFACTS:
        return None, faults
    bound = float(least) if isinstance(least, int | float) else None
    folders = {name: folders[0] for name, folders in models.items()}
    return Stage(name, kind, config, settings, str(keep), bound, folders, data), faults


def _own_faults(
    place: str,
    kind: object,
    given: Mapping[str, object],
    models: Mapping[str, tuple[str, ...]],
    data: Mapping[str, tuple[str, ...]],
) -> Iterator[Fault]:
    """Faults of the keys that one kind of stage has."""
    keep, least = given.get("keep", "right"), given.get("least")
    if keep not in ("right", "best"):
        yield Fault(f"{place}: keep", keep, "is neither right nor best", "use one of the two")
    if least is not None and (isinstance(least, bool) or not isinstance(least, int | float)):
        yield Fault(f"{place}: least", least, "is no number", "give a reward")
    for key, value in (("models", models), ("data", data)) if kind == "eval" else ():
        if not value:
            cure = "write names and paths, for instance {first: a/path}"
            yield Fault(f"{place}: {key}", given.get(key), "is no mapping of names to paths", cure)
    for name, folders in models.items():
        if len(folders) != 1:
            yield Fault(f"{place}: models", name, "has several folders", "give each a name of its own")


def _texts(value: object) -> tuple[str, ...]:
    """A text, or a list of texts, as a tuple; empty if it is neither."""
    values = cast("list[object]", value) if isinstance(value, list) else [value]
    return tuple(map(str, values)) if all(isinstance(one, str) and one for one in values) else ()


def _named(value: object) -> dict[str, tuple[str, ...]]:
    """A mapping of names to a text or a list of texts; empty if it is none, or a name cannot be a folder's."""
    if not isinstance(value, dict):
        return {}
    named = {str(name): _texts(texts) for name, texts in cast("dict[object, object]", value).items()}
    return named if all(_NAME.fullmatch(name) and texts for name, texts in named.items()) else {}


def _settings(value: object, above: str = "") -> Iterator[str]:
    """key=value texts of a mapping, nested or with dotted keys, or of a list of such texts. ValueError if neither."""
    if isinstance(value, list) and not above:
        for text in cast("list[object]", value):
            if not isinstance(text, str) or not ("=" in text or text.startswith("~")):
                raise ValueError(f"{text!r} is not key=value")
            yield text
    elif isinstance(value, dict):
        for key, inner in cast("dict[object, object]", value).items():
            if isinstance(inner, dict) and inner:
                yield from _settings(cast(object, inner), f"{above}{key}.")
            else:
                yield f"{above}{key}={json.dumps(inner)}"
    elif value is not None:
        raise ValueError("is neither a mapping nor a list")
