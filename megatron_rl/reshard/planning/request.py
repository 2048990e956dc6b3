"""The arguments of `megatron-rl plan`: a model, the parallel sizes of both sides, the machine. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_rl.config.checks.lora import adapters_of
from megatron_rl.config.run import RunConfig
from megatron_rl.errors import ConfigError, Fault
from megatron_rl.models import FAMILIES
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.models.lora import num_adapter_parameters
from megatron_rl.models.sizes import named_shape
from megatron_rl.models.stages import stage_layers
from megatron_rl.parallel.topology import Topology
from megatron_rl.reshard.bundles import Trainers
from megatron_rl.reshard.tables import ModelTable

ITEM_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""dtype -> bytes of one element in transfer"""
PLACEMENTS = ("colocated", "disaggregated")
_MOST_DP = 4096


@dataclass(frozen=True)
class Machine:
    """The hardware used in the estimate; the defaults are an H200 with NVLink and a 400 Gb/s network."""

    nvlink_gb_s: float = 450.0
    network_gb_s: float = 50.0
    memory_gb_s: float = 4800.0
    bucket_mib: float = 256.0


@dataclass(frozen=True)
class SyncRequest:
    """Checked arguments: everything that the estimate needs.

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
    trained: int | None = None
    """Numbers that train, beside weights that do not (LoRA); None: all of the model's."""

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
    "train.ep": "expert-parallel ranks of the trainer; 1",
    "train.etp": "tensor-parallel ranks of each expert; 1 if ep is above 1, else tp",
    "train.dp": "data-parallel ranks; what gpus allows, or the smallest number that fits",
    "train.num_layers_in_first_pipeline_stage": "layers of the first pipeline stage; evenly split",
    "train.num_layers_in_last_pipeline_stage": "layers of the last pipeline stage; evenly split",
    "rollout.tp": "tensor-parallel ranks of one engine; 1",
    "rollout.ep": "expert-parallel ranks of an engine: 1, or a multiple of rollout.tp; 1",
    "rollout.dp": "engines; if colocated: as many as fit on the trainer's ranks, else 1",
    "gpus": "total number of GPUs",
    "gpus_per_node": "GPUs per node; 8",
    "placement": "colocated (engines on the trainer's GPUs) or disaggregated; colocated",
    "dtype": "dtype in which weights are sent: bfloat16, float16 or float32; bfloat16",
    "ascending": "1: only orders in which the ranks of each engine ascend (torch without sort_ranks); 0",
    "trained": "numbers that train beside the model's weights (LoRA); all of the model's",
    "nvlink_gb_s": "GB/s between GPUs of a node, per GPU and direction; 450",
    "network_gb_s": "GB/s between nodes, per GPU and direction; 50",
    "memory_gb_s": "memory bandwidth of a GPU in GB/s; 4800",
    "bucket_mib": "MiB of each of the two staging buckets; 256",
}
"""Every key of the command, with its meaning and its default."""
MACHINE_KEYS = tuple(field.name for field in fields(Machine))
CONFIG_KEYS = (*MACHINE_KEYS, "placement", "ascending", "rollout.dp", "rollout.ep")
"""Keys that no run config has; they may be given together with one."""
_TEXT = {"placement": PLACEMENTS, "dtype": tuple(ITEM_SIZES)}


def parse(settings: Sequence[str]) -> dict[str, Any]:
    """{key: value} of key=value texts. Raises ConfigError for unknown keys (with the nearest one) and wrong values."""
    values: dict[str, Any] = {}
    faults: list[Fault] = []
    for text in settings:
        key, _, value = text.partition("=")
        if key not in KEYS:
            close = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.5)
            cure = f"did you mean {close[0]}?" if close else f"keys: {', '.join(KEYS)}"
            faults.append(Fault(key, value, "is not a key of `megatron-rl plan`", cure))
        elif key in _TEXT:
            if value not in _TEXT[key]:
                faults.append(Fault(key, value, "is not supported", f"use one of {', '.join(_TEXT[key])}"))
            values[key] = value
        else:
            number = _number(value, whole=key not in MACHINE_KEYS)
            if number is None or (number <= 0 and key != "ascending"):
                kind = "a number" if key in MACHINE_KEYS else "a whole number"
                faults.append(Fault(key, value, f"must be {kind} above 0", KEYS[key]))
            else:
                values[key] = number
    if faults:
        raise ConfigError(faults)
    return values


def _number(text: str, whole: bool) -> float | int | None:
    try:
        return int(text) if whole else float(text)
    except ValueError:
        return None


def table_of(model: str) -> ModelTable:
    """The tables of a model, given as a config.json, its folder, or a name of models/sizes.py. Raises ConfigError."""
    path = Path(model)
    if path.name == "config.json" and path.is_file():
        path = path.parent
    shape = read_model_shape(str(path), "model") if path.is_dir() else named_shape(model)
    return ModelTable(shape, FAMILIES[shape.architecture])


def settings_of(config: RunConfig) -> tuple[str, dict[str, Any]]:
    """(model, values of KEYS) of a run config. Raises ConfigError if the run has no engine."""
    if not config.has_engine:
        cure = "give a config whose run generates, or --model with train. and rollout. keys"
        raise ConfigError([Fault("algorithm.name", config.algorithm.name, "has no engine to send weights to", cure)])
    actor = config.actor
    dtype = config.rollout.dtype or config.model.dtype
    values: dict[str, Any] = {
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
    ends = {
        "train.num_layers_in_first_pipeline_stage": actor.num_layers_in_first_pipeline_stage,
        "train.num_layers_in_last_pipeline_stage": actor.num_layers_in_last_pipeline_stage,
    }
    values |= {key: layers for key, layers in ends.items() if layers is not None}
    if config.model.lora.rank:
        shape = read_model_shape(config.model.path, changes=config.model.override_config)
        adapters = adapters_of(config.model.lora, shape)
        assert adapters is not None
        values["trained"] = num_adapter_parameters(shape, FAMILIES[shape.architecture], adapters)
    return config.model.path, values


def request(model: str, values: Mapping[str, Any]) -> SyncRequest:
    """The checked arguments. values: of KEYS. Raises ConfigError with every fault."""
    table = table_of(model)
    colocated = values.get("placement", PLACEMENTS[0]) == PLACEMENTS[0]
    axes = {name: int(values.get(f"train.{name}", 1)) for name in ("tp", "pp", "vpp", "cp", "ep")}
    axes["etp"] = int(values.get("train.etp", 1 if axes["ep"] > 1 else axes["tp"]))
    tp, ep = int(values.get("rollout.tp", 1)), int(values.get("rollout.ep", 1))
    faults = [Fault("train", axes, reason, "change one of these sizes") for reason in _trainer_faults(table, axes)]
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
        values.get("trained"),
    )  # fmt: skip


def _trainer_faults(table: ModelTable, axes: Mapping[str, int]) -> list[str]:
    return table.trainer_faults(axes["tp"], axes["ep"], axes["etp"])


def _sizes(values: Mapping[str, Any], axes: Mapping[str, int], tp: int, group: int, colocated: bool) -> tuple[int, int]:
    """(train.dp, rollout.dp): as given, or what the number of GPUs allows, or the smallest that fits.

    group: engine ranks that must be complete: one engine, or the engines that share experts.
    """
    copy, experts = axes["tp"] * axes["pp"] * axes["cp"], axes["etp"] * axes["ep"] * axes["pp"]
    dp, replicas, gpus = values.get("train.dp"), values.get("rollout.dp"), values.get("gpus")
    engines = 0 if colocated else tp * int(replicas or group // tp)
    if dp is None and gpus is not None:
        trainer_gpus = gpus - engines
        if trainer_gpus <= 0 or trainer_gpus % copy:
            reason = f"leaves {trainer_gpus} GPUs for the trainer, not a multiple of tp * pp * cp = {copy}"
            raise ConfigError([Fault("gpus", gpus, reason, "change gpus, train.tp, train.pp or train.cp")])
        dp = trainer_gpus // copy
    if dp is None:
        fits = (n for n in range(1, _MOST_DP) if not (copy * n % experts or (colocated and copy * n % group)))
        dp = next(fits, 1)
    world = copy * dp
    faults: list[Fault] = []
    if world % experts:
        faults.append(
            Fault("train.dp", dp, f"makes {world} ranks, not a multiple of etp * ep * pp = {experts}", "change it")
        )
    if colocated:
        engines = world
        if world % group:
            faults.append(
                Fault("rollout.tp", tp, f"{world} GPUs are not a multiple of an engine's {group}", "change it")
            )
        elif replicas is not None and replicas * tp != world:
            reason = f"{world} GPUs take {world // tp} engines of {tp} GPUs"
            faults.append(Fault("rollout.dp", replicas, reason, "leave it out, or placement=disaggregated"))
    elif engines % group:
        reason = f"makes {engines} engine ranks, not a multiple of rollout.ep {group}"
        faults.append(Fault("rollout.dp", replicas, reason, "change it"))
    total = world if colocated else world + engines
    if gpus is not None and gpus != total:
        faults.append(Fault("gpus", gpus, f"the other keys make {total}", "change gpus, train.dp or rollout.dp"))
    if faults:
        raise ConfigError(faults)
    return dp, engines // tp
