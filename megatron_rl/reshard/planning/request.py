"""What `megatron-rl plan` is asked: a model, both sides' axes, the machine. All faults at once; no torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from megatron_rl.config.run import RunConfig
from megatron_rl.errors import ConfigError, Fault
from megatron_rl.models import FAMILIES
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.models.sizes import named_shape
from megatron_rl.models.stages import stage_layers
from megatron_rl.parallel.topology import Topology
from megatron_rl.reshard.planning.cost import Trainers
from megatron_rl.reshard.planning.tables import ModelTable

ITEM_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""dtype -> bytes of one number as it travels"""
PLACEMENTS = ("colocated", "disaggregated")
_MOST_DP = 4096


@dataclass(frozen=True)
class Machine:
    """What times and memory are reckoned with. The defaults are an H200 with NVLink and a 400 Gb/s network."""

    nvlink_gb_s: float = 450.0
    network_gb_s: float = 50.0
    memory_gb_s: float = 4800.0
    bucket_mib: float = 256.0


@dataclass(frozen=True)
class SyncRequest:
    """A checked question: everything that the accounting needs.

    axes: sizes of train.tp, pp, vpp, cp, ep, etp and dp. tp, ep, replicas: of the engines (shards.EngineLayout).
    """

    model: str
    table: ModelTable
    trainers: Trainers
    axes: Mapping[str, int]
    tp: int
    ep: int
    replicas: int
    colocated: bool
    gpus_per_node: int
    dtype: str
    machine: Machine
    ascending: bool

    @property
    def world(self) -> int:
        """Processes of both sides, one a GPU."""
        engines = self.replicas * self.tp
        return self.trainers.topology.world + (0 if self.colocated else engines)


KEYS: dict[str, str] = {
    "train.tp": "tensor-parallel ranks of the trainer; 1",
    "train.pp": "pipeline stages; 1",
    "train.vpp": "model chunks of a stage; 1",
    "train.cp": "context-parallel ranks; 1",
    "train.ep": "ranks that experts are dealt to; 1",
    "train.etp": "ranks that share an expert; 1 with ep above 1, else tp",
    "train.dp": "data-parallel ranks; as many as gpus leaves, or the least that fits",
    "train.num_layers_in_first_pipeline_stage": "layers of the first stage; an even share",
    "train.num_layers_in_last_pipeline_stage": "layers of the last stage; an even share",
    "rollout.tp": "tensor-parallel ranks of one engine; 1",
    "rollout.ep": "ranks that an engine deals experts to: 1, or a multiple of rollout.tp; 1",
    "rollout.dp": "engines; colocated: as many as the trainer's ranks hold, else 1",
    "gpus": "GPUs in all",
    "gpus_per_node": "GPUs of a node; 8",
    "placement": "colocated (engines on the trainer's GPUs) or disaggregated; colocated",
    "dtype": "number format in which weights travel: bfloat16, float16 or float32; bfloat16",
    "ascending": "1: only orders in which each engine's processes ascend (torch without sort_ranks); 0",
    "nvlink_gb_s": "GB/s of a GPU to others of its node, each way; 450",
    "network_gb_s": "GB/s of a GPU to other nodes, each way; 50",
    "memory_gb_s": "GB/s of a GPU's memory; 4800",
    "bucket_mib": "MiB of a staging bucket, of which there are two; 256",
}
"""Every key of the command, with its meaning and its default."""
MACHINE_KEYS = tuple(field.name for field in fields(Machine))
CONFIG_KEYS = (*MACHINE_KEYS, "placement", "ascending", "rollout.dp", "rollout.ep")
"""Keys that a run config lacks, and that may stand beside one."""
_TEXT = {"placement": PLACEMENTS, "dtype": tuple(ITEM_SIZES)}


def parse(settings: Sequence[str]) -> dict[str, Any]:
    """key=value texts as values. Raises ConfigError for unknown keys (with the nearest) and values of another type."""
    found: dict[str, Any] = {}
    faults: list[Fault] = []
    for text in settings:
        key, _, value = text.partition("=")
        if key not in KEYS:
            close = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.5)
            cure = f"did you mean {close[0]}?" if close else f"keys: {', '.join(KEYS)}"
            faults.append(Fault(key, value, "is no key of `megatron-rl plan`", cure))
        elif key in _TEXT:
            if value not in _TEXT[key]:
                faults.append(Fault(key, value, "is not known", f"one of {', '.join(_TEXT[key])}"))
            found[key] = value
        else:
            number = _number(value, whole=key not in MACHINE_KEYS)
            if number is None or (number <= 0 and key != "ascending"):
                kind = "a number" if key in MACHINE_KEYS else "a whole number"
                faults.append(Fault(key, value, f"must be {kind} above 0", KEYS[key]))
            else:
                found[key] = number
    if faults:
        raise ConfigError(faults)
    return found


def _number(text: str, whole: bool) -> float | int | None:
    try:
        return int(text) if whole else float(text)
    except ValueError:
        return None


def table_of(model: str) -> ModelTable:
    """The tables of a model: a config.json, a folder with one, or a name of models/sizes.py. Raises ConfigError."""
    path = Path(model)
    if path.name == "config.json" and path.is_file():
        path = path.parent
    shape = read_model_shape(str(path), "model") if path.is_dir() else named_shape(model)
    return ModelTable(shape, FAMILIES[shape.architecture])


def settings_of(config: RunConfig) -> tuple[str, dict[str, Any]]:
    """(model, values of KEYS) that a run config stands for. Raises ConfigError for a run without an engine."""
    if not config.needs.rollouts:
        cure = "give a run that generates, or --model with train. and rollout. keys"
        raise ConfigError([Fault("algorithm.name", config.algorithm.name, "has no engine to bring weights to", cure)])
    actor = config.actor
    dtype = config.rollout.dtype or config.model.dtype
    found: dict[str, Any] = {
        "train.tp": actor.tp,
        "train.pp": actor.pp,
        "train.vpp": actor.vpp,
        "train.cp": actor.cp,
        "train.ep": actor.ep,
        "train.etp": actor.expert_tp,
        "rollout.tp": config.rollout.tp,
        "gpus": config.world_size,
        "gpus_per_node": config.cluster.n_gpus_per_node,
        "dtype": dtype,
    }
    for end in ("first", "last"):
        name = f"num_layers_in_{end}_pipeline_stage"
        layers = cast("int | None", getattr(actor, name))
        if layers is not None:
            found[f"train.{name}"] = layers
    return config.model.path, found


def request(model: str, values: Mapping[str, Any]) -> SyncRequest:
    """The question that a model and values of KEYS ask. Raises ConfigError with every fault."""
    table = table_of(model)
    colocated = values.get("placement", PLACEMENTS[0]) == PLACEMENTS[0]
    axes = {name: int(values.get(f"train.{name}", 1)) for name in ("tp", "pp", "vpp", "cp", "ep")}
    axes["etp"] = int(values.get("train.etp", 1 if axes["ep"] > 1 else axes["tp"]))
    tp, ep = int(values.get("rollout.tp", 1)), int(values.get("rollout.ep", 1))
    faults = [Fault("train", axes, reason, "change an axis") for reason in _trainer_faults(table, axes)]
    faults += [
        Fault("rollout.tp", tp, reason, "change rollout.tp or rollout.ep") for reason in table.engine_faults(tp, ep)
    ]
    if ep != 1 and ep % tp:
        faults.append(Fault("rollout.ep", ep, f"is neither 1 nor a multiple of rollout.tp {tp}", KEYS["rollout.ep"]))
    stages: list[list[range]] = []
    try:
        first, last = (values.get(f"train.num_layers_in_{end}_pipeline_stage") for end in ("first", "last"))
        stages = stage_layers(table.num_layers, axes["pp"], axes["vpp"], first, last)
    except ValueError as error:
        cure = "change it, or set train.num_layers_in_first_pipeline_stage or _last_"
        faults.append(Fault("train.pp", axes["pp"], str(error), cure))
    if faults:
        raise ConfigError(faults)
    dp, replicas = _sizes(values, axes, tp, max(tp, ep), colocated)
    topology = Topology(
        axes["tp"] * axes["pp"] * axes["cp"] * dp,
        tp=axes["tp"], cp=axes["cp"], pp=axes["pp"], ep=axes["ep"], etp=axes["etp"],
    )  # fmt: skip
    machine = replace(Machine(), **{key: float(values[key]) for key in MACHINE_KEYS if key in values})
    return SyncRequest(
        model, table, Trainers(topology, stages), {**axes, "dp": dp}, tp, ep, replicas, colocated,
        int(values.get("gpus_per_node", 8)), values.get("dtype", "bfloat16"), machine, bool(values.get("ascending", 0)),
    )  # fmt: skip


def _trainer_faults(table: ModelTable, axes: Mapping[str, int]) -> list[str]:
    return table.trainer_faults(axes["tp"], axes["ep"], axes["etp"])


def _sizes(values: Mapping[str, Any], axes: Mapping[str, int], tp: int, group: int, colocated: bool) -> tuple[int, int]:
    """(train.dp, rollout.dp): as given, or what the number of GPUs leaves, or the least that fits.

    group: engine processes that belong together.
    """
    copy, experts = axes["tp"] * axes["pp"] * axes["cp"], axes["etp"] * axes["ep"] * axes["pp"]
    dp, replicas, gpus = values.get("train.dp"), values.get("rollout.dp"), values.get("gpus")
    engines = 0 if colocated else tp * int(replicas or group // tp)
    if dp is None and gpus is not None:
        left = gpus - engines
        if left <= 0 or left % copy:
            reason = f"{left} GPUs are left for the trainer, no multiple of tp * pp * cp = {copy}"
            raise ConfigError([Fault("gpus", gpus, reason, "change gpus or an axis")])
        dp = left // copy
    if dp is None:
        fits = (n for n in range(1, _MOST_DP) if not (copy * n % experts or (colocated and copy * n % group)))
        dp = next(fits, 1)
    world = copy * dp
    faults: list[Fault] = []
    if world % experts:
        faults.append(Fault("train.dp", dp, f"{world} ranks are no multiple of etp * ep * pp = {experts}", "change it"))
    if colocated:
        engines = world
        if world % group:
            faults.append(Fault("rollout.tp", tp, f"{world} GPUs are no multiple of an engine's {group}", "change it"))
        elif replicas is not None and replicas * tp != world:
            reason = f"engines of {tp} on {world} GPUs are {world // tp}"
            faults.append(Fault("rollout.dp", replicas, reason, "leave it out, or placement=disaggregated"))
    elif engines % group:
        reason = f"{engines} engine processes are no multiple of rollout.ep {group}"
        faults.append(Fault("rollout.dp", replicas, reason, "change it"))
    total = world if colocated else world + engines
    if gpus is not None and gpus != total:
        faults.append(Fault("gpus", gpus, f"the axes make {total}", "change gpus, train.dp or rollout.dp"))
    if faults:
        raise ConfigError(faults)
    return dp, engines // tp
