"""Checks of this machine before Ray starts: packages, GPUs, disk, port. All faults are reported at once."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.cluster.addresses import ray_address
from megatron_rl.cluster.environment import port_in_use
from megatron_rl.cluster.surroundings import surroundings_faults
from megatron_rl.config.checks.checkpoint import CHECKPOINT, CHECKPOINTS
from megatron_rl.config.checks.folders import nearest_folder, run_folder
from megatron_rl.config.checks.lora import adapters_of
from megatron_rl.errors import ConfigError, Fault
from megatron_rl.models import FAMILIES
from megatron_rl.models.config_json import Changes, inspect_critic, inspect_model
from megatron_rl.models.lora import num_adapter_parameters
from megatron_rl.models.rules import num_parameters

if TYPE_CHECKING:
    from megatron_rl.config.run import RunConfig

CPU_CURE = "run `bash launch/install.sh`, or `pip install -e .[cpu]`"
GPU_CURE = "run `pip install -e .[gpu]`"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def preflight(cfg: RunConfig, needs_rollout: bool, trains: bool = False) -> None:
    """Raise ConfigError with every reason why the run cannot start on this machine.

    needs_rollout: whether the algorithm generates (SFT does not), and so needs rollout.name's package. trains: whether
    checkpoints may be written.
    """
    faults = package_faults(cfg, needs_rollout)
    if find_spec("torch") is not None:
        faults += device_faults(cfg)
    faults += (
        node_faults(cfg) + core_faults(cfg) + folder_faults(cfg, trains) + port_faults(cfg) + surroundings_faults(cfg)
    )
    if faults:
        raise ConfigError(faults)


def package_faults(cfg: RunConfig, needs_rollout: bool) -> list[Fault]:
    """Packages that the run needs and that cannot be imported. Nothing is imported to find out."""
    needed = [("model.path", cfg.model.path, package) for package in ("torch", "megatron.core", "transformers")]
    if cfg.cluster.backend == "ray":
        needed.append(("cluster.backend", "ray", "ray"))
    if needs_rollout and cfg.engine.package is not None:
        needed.append(("rollout.name", cfg.rollout.name, cfg.engine.package))
    cures = dict.fromkeys(needed, _install_cure(cfg.cluster.device))
    for name in cfg.trainer.logger:
        if name != "console":
            cures["trainer.logger", name, name] = f"run `pip install {name}`, or leave it out"
    return [
        Fault(key, value, f"needs the package {package}, which is not installed", cure)
        for (key, value, package), cure in cures.items()
        if not installed(package)
    ]


def installed(package: str) -> bool:
    """Whether a package (or sub-package, dotted) can be found, without importing it; parents of a dotted one are."""
    parent, _, _ = package.rpartition(".")
    if parent and not installed(parent):
        return False
    return find_spec(package) is not None


def device_faults(cfg: RunConfig) -> list[Fault]:
    """GPUs that the config asks for and this machine lacks. Where a running Ray is joined, the GPUs of its nodes count:
    resources.device_of_nodes looks at them once it is.
    """
    if cfg.cluster.device == "cpu" or ray_address(cfg.cluster) is not None:
        return []
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found == 0:
        if cfg.cluster.device == "auto":
            return []
        return [
            Fault(
                "cluster.device",
                "cuda",
                "torch sees no GPU here",
                "write cluster.device=cpu, or use a GPU machine",
            )
        ]
    wanted = cfg.cluster.n_gpus_per_node
    if wanted <= found:
        return []
    return [
        Fault(
            "cluster.n_gpus_per_node",
            wanted,
            f"this node has {found} GPUs",
            f"write {found} or less, or use more nodes",
        )
    ]


def node_faults(cfg: RunConfig) -> list[Fault]:
    """Nodes that a Ray of this run's own cannot have."""
    if cfg.cluster.nnodes == 1 or ray_address(cfg.cluster) is not None:
        return []
    cure = (
        "start the cluster first (launch/slurm.sbatch, launch/ray_cluster.sh) and run inside it, where RAY_ADDRESS "
        "names it, or set cluster.ray_address"
    )
    return [Fault("cluster.nnodes", cfg.cluster.nnodes, "a Ray that this run starts has one node", cure)]


def core_faults(cfg: RunConfig) -> list[Fault]:
    """CPU cores that a local Ray would be asked for and does not have."""
    if cfg.cluster.backend != "ray" or ray_address(cfg.cluster) is not None:
        return []
    cores, ranks, share = os.cpu_count() or 1, cfg.cluster.n_gpus_per_node, cfg.cluster.num_cpus_per_rank
    if ranks * share <= cores:
        return []
    reason = f"{ranks} ranks ask for {ranks * share:g} CPUs, but this node has {cores}"
    return [Fault("cluster.num_cpus_per_rank", share, reason, f"write {_floor(cores / ranks):g} or less")]


def folder_faults(cfg: RunConfig, trains: bool = False) -> list[Fault]:
    """A run folder that cannot be made, or whose disk is too small for a save and, if the run trains, checkpoints."""
    faults = run_folder(cfg)
    if faults:
        return faults
    parent = nearest_folder(Path(cfg.trainer.run_dir))
    size = 0 if cfg.trainer.model_freq == 0 else _saved_bytes(cfg)
    # The old save stays until the new one is complete.
    need = 2 * size if cfg.trainer.model_freq > 0 else size
    free = shutil.disk_usage(parent).free
    count = checkpoints_to_come(cfg) if trains else 0
    all_checkpoints = count * checkpoint_bytes(cfg)
    if free >= need + all_checkpoints:
        return []
    reason = f"{parent} has {free / 2**30:.2f} GiB free, and saving the model takes about {need / 2**30:.2f} GiB"
    cure = "name a folder on a larger disk, or free some space"
    if all_checkpoints:
        reason += f", {count} checkpoint{'s' if count > 1 else ''} with the optimizer {all_checkpoints / 2**30:.2f} GiB"
        cure += "; checkpoint.keep_last keeps fewer, checkpoint.freq=0 writes none"
    return [Fault("trainer.default_local_dir", cfg.trainer.default_local_dir, reason, cure)]


def checkpoints_to_come(cfg: RunConfig) -> int:
    """Checkpoints that the run's folder will have at once, beside those that are there already; at least 1.

    One more than are kept, since an old one stays until the new one is complete. 0 if none are written.
    """
    checkpoint = cfg.checkpoint
    if checkpoint.freq == 0:
        return 0
    most = 1
    if cfg.checkpoint_freq:
        most = 1 + (checkpoint.keep_last or 1) + (checkpoint.keep_best is not None)
    folder = Path(cfg.trainer.run_dir) / CHECKPOINTS
    there = sum(bool(CHECKPOINT.fullmatch(path.name)) for path in folder.iterdir()) if folder.is_dir() else 0
    return max(most - there, 1)


def checkpoint_bytes(cfg: RunConfig) -> int:
    """Bytes of one checkpoint: float32 weights and AdamW's two means of each trained model. 0 as for save_bytes."""
    changes, trained = cfg.model.override_config, trained_numbers(cfg)
    number_bytes = (
        save_bytes(cfg.model.path, "float32", changes) if trained is None else trained * DTYPE_BYTES["float32"]
    )
    size = 3 * number_bytes
    if cfg.critic.enable and not cfg.critic.share_backbone:
        size += 3 * save_bytes(cfg.critic.path or cfg.model.path, "float32", {} if cfg.critic.path else changes)
    return size


def trained_numbers(cfg: RunConfig) -> int | None:
    """Numbers of the adapters that the actor trains; None without LoRA, or if the model's folder cannot be read."""
    shape, _ = inspect_model(cfg.model.path, changes=cfg.model.override_config)
    adapters = None if shape is None else adapters_of(cfg.model.lora, shape)
    if shape is None or adapters is None:
        return None
    return num_adapter_parameters(shape, FAMILIES[shape.architecture], adapters)


def _saved_bytes(cfg: RunConfig) -> int:
    """Bytes of what trainer.save_freq writes of the actor."""
    trained = trained_numbers(cfg)
    if trained is None or cfg.model.lora.save == "merged":
        return save_bytes(cfg.model.path, cfg.model.dtype, cfg.model.override_config)
    return trained * DTYPE_BYTES[cfg.model.dtype]


def save_bytes(model_dir: str, dtype: str, changes: Changes | None = None) -> int:
    """Bytes of the weights as safetensors, by the folder's config.json.

    0 if that cannot be read: what is wrong with a model folder is said by the checks of the config.
    """
    # A classifier, which a reward model starts from, differs by its head alone.
    shape, _, _ = inspect_critic(model_dir, changes=changes)
    return 0 if shape is None else num_parameters(shape, FAMILIES[shape.architecture]) * DTYPE_BYTES[dtype]


def port_faults(cfg: RunConfig) -> list[Fault]:
    """The local Ray's port, if another process has it."""
    port = cfg.cluster.ray_port
    if cfg.cluster.backend != "ray" or cfg.cluster.ray_address is not None or not port or not port_in_use(port):
        return []
    cure = f"name a free port, leave the key out, or join that Ray with cluster.ray_address=127.0.0.1:{port}"
    return [Fault("cluster.ray_port", port, "something on this machine already listens there", cure)]


def _install_cure(device: str) -> str:
    if device == "auto":
        device = "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
    return GPU_CURE if device == "cuda" else CPU_CURE


def _floor(share: float) -> float:
    """Rounded down to hundredths."""
    return int(share * 100) / 100
