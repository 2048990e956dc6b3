"""A policy on N ranks, for tests: built from a folder, as workers build it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from megatron_rl.algos.token_losses import TokenLoss
from megatron_rl.config.sections.actor import ActorConfig, OptimConfig
from megatron_rl.data.batching import plan_batches
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.models.lora import Adapters
from megatron_rl.parallel.topology import topology_of
from megatron_rl.types import TrainBatch

LR = 3e-3


def make_actor(grad_clip: float = 1.0, **layout: Any) -> ActorConfig:
    """An actor config whose updates are large enough to show a wrong gradient."""
    optim = OptimConfig(lr=LR, weight_decay=0.1, adam_beta2=0.95, grad_clip=grad_clip)
    return ActorConfig(optim=optim, **layout)


def rank_device() -> torch.device:
    """Where this rank computes: the GPU that run_ranks gave it, or the CPU."""
    on_gpu = torch.distributed.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def build(
    folder: str,
    actor: ActorConfig,
    world: int,
    dtype: str = "float32",
    total_steps: int = 100,
    init_std: float | None = None,
    adapters: Adapters | None = None,
) -> Any:
    """The trainable policy of this rank; joins megatron's groups. init_std: draw weights instead of reading them.
    adapters: train these, from seed 1, and not the weights.
    """
    from megatron_rl.mcore import cpu

    cpu.install()
    from megatron_rl.mcore import build, convert, lora
    from megatron_rl.parallel import groups
    from megatron_rl.weights.peft_files import NewAdapters
    from megatron_rl.weights.safetensors import RandomSource, SafetensorsSource

    groups.init_model_parallel(topology_of(actor, world), actor.vpp)
    policy = build.build_model(read_model_shape(folder), actor, dtype, rank_device())
    convert.load_hf(policy, lambda: SafetensorsSource(folder) if init_std is None else RandomSource(1, init_std))
    if adapters is not None:
        policy = lora.attach(policy, adapters, 1)
        convert.load_hf(policy, lambda: NewAdapters(1), "adapters")
    return build.make_trainable(policy, actor.optim, total_steps)


def live_parameters(model: Any) -> dict[str, torch.Tensor]:
    """chunk{c}.{name} -> current memory of each parameter, not copies. Call Model.complete_params first."""
    from megatron_rl.mcore.shards import parameters

    return {name: param.detach() for name, param in parameters(model).items()}


def folder_logprobs(rank: int, world: int, folders: list[str], batch: TrainBatch) -> list[torch.Tensor]:
    """For run_ranks: the log-probabilities of `batch` [T] under the model of each folder, in float32, on one rank."""
    from megatron_rl.mcore import cpu

    cpu.install()
    from megatron_rl.mcore import build, convert
    from megatron_rl.parallel import groups
    from megatron_rl.weights.safetensors import SafetensorsSource

    actor = make_actor()
    groups.init_model_parallel(topology_of(actor, world), actor.vpp)
    logprobs: list[torch.Tensor] = []
    for folder in folders:
        model = build.build_model(read_model_shape(folder), actor, "float32", rank_device())
        convert.load_hf(model, partial(SafetensorsSource, folder))
        (columns,) = forward_logprobs(model, [batch], 1.0)
        logprobs.append(columns["logprobs"])
    return logprobs


def train_step(trainable: Any, micros: list[TrainBatch], token_loss: TokenLoss, temperature: float) -> Any:
    """(report, log-probabilities that the step started from) of one optimizer step on a loss of the tokens."""
    from megatron_rl.mcore.objectives import token_objective
    from megatron_rl.mcore.step import optimizer_step

    return optimizer_step(trainable, micros, token_objective(trainable.model, token_loss, temperature))


def forward_logprobs(model: Any, micros: list[TrainBatch], temperature: float) -> list[dict[str, torch.Tensor]]:
    """Log-probabilities, entropies and greedy hits of each micro-batch."""
    from megatron_rl.mcore.heads import columns_reader
    from megatron_rl.mcore.step import forward_columns

    return forward_columns(model, micros, columns_reader(model, ("logprobs", "entropy", "greedy"), temperature))


def my_micro_batches(batch: TrainBatch, actor: ActorConfig, rank: int, world: int) -> list[TrainBatch]:
    """This rank's part of `batch`, planned as the controller plans it."""
    topology = topology_of(actor, world)
    plan = plan_batches(
        batch.seq_lens,
        [0] * batch.num_sequences,
        dp=topology.dp,
        max_tokens=actor.max_tokens_per_gpu * actor.cp,
        max_seqs=actor.ppo_micro_batch_size_per_gpu,
        multiple=actor.pp if actor.vpp > 1 else 1,
        packed=actor.packing,
    )
    return [batch.select(micro) for micro in plan.minis[0][topology.coords(rank).dp]]
