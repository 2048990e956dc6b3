"""Every stage's config, checked before anything starts.

What no stage has made yet is stood in for: a model by the config.json and tokenizer of the model that its stage starts
from, with headers of weights and no numbers; rows by an empty file. Each check of a config then sees what it would see.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_rl.config import verl
from megatron_rl.config.checks.model import read_actor_shape
from megatron_rl.config.checks.table import Verb
from megatron_rl.config.load import resolve, run_schema
from megatron_rl.config.run import RunConfig
from megatron_rl.config.text.reader import read_file, read_overrides
from megatron_rl.errors import ConfigError, Fault
from megatron_rl.models.changes import laid_over
from megatron_rl.models.config_json import inspect_critic, read_config
from megatron_rl.models.families import FAMILIES
from megatron_rl.models.rules import hf_shapes
from megatron_rl.models.weight_files import SINGLE_NAME
from megatron_rl.pipeline.spec import ARTEFACTS, MODEL, Pipeline, Stage, read_pipeline

_OF_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pth", ".gguf")


@dataclass(frozen=True)
class StageRun:
    """One process of a stage: its name, its config files and overrides."""

    name: str
    overrides: list[str]
    config: RunConfig


def load_pipeline(path: str, overrides: list[str]) -> Pipeline:
    """The pipeline of a file. Raises ConfigError with every fault of its form and of all stages' configs."""
    pipeline, faults = read_pipeline(path, overrides)
    if not faults:
        faults = stage_faults(pipeline)
    if faults:
        raise ConfigError(faults)
    return pipeline


def stage_faults(pipeline: Pipeline) -> list[Fault]:
    """Faults of all stages' configs; `key` begins with the stage's name. Writes to a temporary folder alone."""
    faults: list[Fault] = []
    with tempfile.TemporaryDirectory(prefix="megatron-rl-check-") as scratch:
        stand_ins = replace(pipeline, folder=Path(scratch))
        missing: list[str] = []
        """Models whose source cannot be read, which its own stage says: what reads them would only say it again."""
        for stage in pipeline.stages:
            of_stage: list[Fault] = []
            for _, overrides in stage.runs(stand_ins.fill(stand_ins.path_of)):
                overrides += own_settings(pipeline, stage)
                config, wrong = None, list[Fault]()
                try:
                    config = resolve(stage.config, overrides, verb_of(stage)).config
                except ConfigError as error:
                    wrong = [one for one in error.faults if not any(at in str(one) for at in missing)]
                else:
                    wrong = _kind_faults(pipeline, stage, config)
                of_stage += wrong
                missing += _stand_in(stage, config, overrides, stand_ins)
            faults += dict.fromkeys(_named(fault, stage.name, stand_ins) for fault in of_stage)
    return faults


def resolve_runs(pipeline: Pipeline, stage: Stage) -> list[StageRun]:
    """The processes of a stage, all before it being done. Raises ConfigError with every fault."""
    runs: list[StageRun] = []
    for name, overrides in stage.runs(pipeline.fill(pipeline.path_of)):
        overrides += own_settings(pipeline, stage)
        runs.append(StageRun(name, overrides, resolve(stage.config, overrides, verb_of(stage)).config))
    return runs


def verb_of(stage: Stage) -> Verb:
    """What a stage's processes run."""
    return "train" if MODEL in ARTEFACTS[stage.kind] else "eval"


def own_settings(pipeline: Pipeline, stage: Stage) -> list[str]:
    """What the pipeline sets in each stage (spec.OWN)."""
    own = [f"trainer.default_local_dir={pipeline.folder}", f"trainer.experiment_name={json.dumps(stage.name)}"]
    return [*own, "trainer.resume_mode=auto", "trainer.overwrite=replace"]


def _kind_faults(pipeline: Pipeline, stage: Stage, config: RunConfig) -> list[Fault]:
    """The config is of the stage's kind, and makes what later stages read."""
    faults: list[Fault] = []
    name = config.algorithm.name
    if verb_of(stage) == "train" and name != stage.kind:
        cure = f"set algorithm.name={stage.kind} with a config of that kind, or make the stage's kind {name}"
        faults.append(Fault("algorithm.name", name, f"the stage is of kind {stage.kind}", cure))
    if stage.kind == "sample" and not config.needs.rollouts:
        cure = "use the config of a run with rollouts, such as GRPO's"
        faults.append(Fault("algorithm.name", name, "a stage that samples needs prompts, an engine and a reward", cure))
    if not any(f"{stage.name}.{MODEL}" in later.references() for later in pipeline.stages):
        return faults
    if config.trainer.model_freq == 0:
        reason, cure = "a later stage reads the model, and none is saved", "set trainer.save_freq=-1 and save_hf=true"
        faults.append(Fault("trainer.save_freq", config.trainer.save_freq, reason, cure))
    if config.model.lora.rank and config.model.lora.save == "adapter" and not config.needs.reward_head:
        reason, cure = "a later stage reads the model, and its adapter alone is saved", "set model.lora.save=merged"
        faults.append(Fault("model.lora.save", "adapter", reason, cure))
    return faults


def _stand_in(stage: Stage, config: RunConfig | None, overrides: Sequence[str], stand_ins: Pipeline) -> list[str]:
    """Write what stands for the artefacts of a stage; the path of a model for which nothing can."""
    for artefact in ARTEFACTS[stage.kind]:
        target = stand_ins.path_of(stage.name, artefact)
        target.parent.mkdir()
        if artefact != MODEL:
            target.touch()
            continue
        source = Path(_source(stage, overrides) if config is None else config.model.path)
        shape = inspect_critic(str(source))[0] if config is None else read_actor_shape(config)
        fields = read_config(str(source))[0]
        if shape is None or fields is None:
            return [str(target)]
        tensors = hf_shapes(shape, FAMILIES[shape.architecture])
        fields = laid_over(fields, {} if config is None else config.model.override_config)
        fields |= {"architectures": [shape.architecture]}
        if stage.kind == "reward_model":
            tensors = {name: size for name, size in tensors.items() if not name.startswith("lm_head.")}
            tensors["score.weight"] = (1, shape.hidden_size)
            name = shape.architecture.replace("ForCausalLM", "ForSequenceClassification")
            fields |= {"architectures": [name], "num_labels": 1, "id2label": {"0": "reward"}}
        target.mkdir()
        for file in source.iterdir():
            if file.is_file() and file.name != "config.json" and not file.name.endswith(_OF_WEIGHTS):
                (target / file.name).symlink_to(file.resolve())
        (target / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        _write_headers(target / SINGLE_NAME, tensors)
    return []


def _source(stage: Stage, overrides: Sequence[str]) -> str:
    """The model.path of a stage whose config has faults."""
    names = verl.VerlNames(run_schema())
    entries = [entry for file in stage.config for entry in read_file(file, 0, names)[0]]
    entries += read_overrides([text for text in overrides if text.startswith("model.path=")], 1, names)[0]
    return next((str(entry.value) for entry in reversed(entries) if entry.key == "model.path"), "")


def _write_headers(file: Path, tensors: Mapping[str, tuple[int, ...]]) -> None:
    """A safetensors file that says which tensors there are; their numbers are a hole in the file."""
    header, end = dict[str, object](), 0
    for name, size in tensors.items():
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [end, end + 2 * math.prod(size)]}
        end += 2 * math.prod(size)
    content = json.dumps(header).encode()
    with file.open("wb") as handle:
        handle.write(len(content).to_bytes(8, "little") + content)
        handle.truncate(8 + len(content) + end)


def _named(fault: Fault, stage: str, stand_ins: Pipeline) -> Fault:
    """The fault with its stage, and references in place of what stood in for them."""
    made = [(one.name, artefact) for one in stand_ins.stages for artefact in ARTEFACTS[one.kind]]

    def named(text: str) -> str:
        for name, artefact in made:
            text = text.replace(str(stand_ins.path_of(name, artefact)), f"${{{name}.{artefact}}}")
        return text.replace("[set on the command line]", "[set by the pipeline]")

    value = named(fault.value) if isinstance(fault.value, str) else fault.value
    return replace(fault, key=f"{stage}: {named(fault.key)}", value=value, reason=named(fault.reason))
