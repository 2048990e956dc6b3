"""Checkpoints as Megatron-Core itself writes and reads them, of its own GPTModel: torch_dist, and mp_rank folders.

For run_ranks. Only settings and the norm are this package's.
"""

from __future__ import annotations

import multiprocessing
from argparse import Namespace
from pathlib import Path
from typing import Any, cast

import torch

from megatron_rl.config.sections.actor import ActorConfig
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.models.rules import padded_vocab
from megatron_rl.parallel.topology import is_last_chunk, topology_of


def chunks(folder: str, actor: ActorConfig, world: int, dtype: str) -> list[Any]:
    """Megatron's model chunks of this rank, their numbers undefined; joins megatron's groups."""
    from megatron_rl.mcore import cpu

    cpu.install()
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from megatron_rl.mcore.build import transformer_config
    from megatron_rl.mcore.norm import RMSNorm
    from megatron_rl.parallel import groups

    groups.init_model_parallel(topology_of(actor, world), actor.vpp)
    model_parallel_cuda_manual_seed(0)
    shape = read_model_shape(folder)
    config = transformer_config(shape, actor, dtype)
    # A list would give each layer keys of its own, also where all are alike.
    config.moe_layer_freq = 1
    stage = parallel_state.get_pipeline_model_parallel_rank()
    models: list[Any] = []
    for number in range(actor.vpp):
        spec: Any = get_gpt_layer_local_spec(
            num_experts=shape.num_experts or None, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
        )
        # Megatron's own norm, torch's, knows no sequence parallelism.
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
        if config.qk_layernorm:
            attention = spec.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = RMSNorm
        layers = actor.stages(shape.num_layers)[stage][number]
        block: Any = TransformerBlockSubmodules(layer_specs=[spec] * len(layers), layer_norm=cast("Any", RMSNorm))
        models.append(
            GPTModel(
                config=config,
                transformer_layer_spec=block,
                vocab_size=padded_vocab(shape, actor.tp),
                max_sequence_length=shape.max_position_embeddings,
                pre_process=stage == 0 and number == 0,
                post_process=is_last_chunk(stage, number, pp=actor.pp, vpp=actor.vpp),
                share_embeddings_and_output_weights=shape.tie_word_embeddings,
                position_embedding_type="rope",
                vp_stage=number if actor.vpp > 1 else None,
            )
        )
    return models


def sharded(models: list[Any], metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    """The sharded state dict of a rank, as Megatron-LM's training saves it."""
    if len(models) == 1:
        return {"model": models[0].sharded_state_dict(metadata=metadata)}
    return {f"model{number}": model.sharded_state_dict(metadata=metadata) for number, model in enumerate(models)}


def save_torch_dist(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint with Megatron's own strategy for torch_dist."""
    from megatron.core import dist_checkpointing

    path.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    # Its writer has a process for its queue, which multiprocessing refuses in ranks: they end with the test's process.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    common = {"args": Namespace(hidden_size=1), "iteration": 7, "checkpoint_version": 3.0}
    dist_checkpointing.save({**state, **common}, str(path))


def load_torch_dist(models: list[Any], path: Path) -> None:
    """Fill the models from a checkpoint, by Megatron's own reader."""
    from megatron.core import dist_checkpointing

    state: Any = dist_checkpointing.load(sharded(models), str(path))
    names = ["model"] if len(models) == 1 else [f"model{number}" for number in range(len(models))]
    for name, model in zip(names, models, strict=True):
        model.load_state_dict(state[name], strict=True)


def save_mp_rank(models: list[Any], path: Path, actor: ActorConfig) -> None:
    """Write this rank's folder as Megatron-LM does with --ckpt-format torch; of data-parallel ranks the first."""
    from megatron.core import parallel_state

    tp = parallel_state.get_tensor_model_parallel_rank()
    stage, ep = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_expert_model_parallel_rank()
    if parallel_state.get_expert_data_parallel_rank():
        return
    name = f"mp_rank_{tp:02d}" + (f"_{stage:03d}" if actor.pp > 1 else "") + (f"_{ep:03d}" if actor.ep > 1 else "")
    args = Namespace(pipeline_model_parallel_size=actor.pp, expert_tensor_parallel_size=actor.expert_tp)
    states = [model.state_dict() for model in models]
    names = ["model"] if len(states) == 1 else [f"model{number}" for number in range(len(states))]
    (path / name).mkdir(parents=True, exist_ok=True)
    content = {"args": args, "checkpoint_version": 3.0, **dict(zip(names, states, strict=True))}
    torch.save(content, path / name / "model_optim_rng.pt")
