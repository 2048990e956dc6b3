"""One rank of a policy with a critic: a value model of its own, or a value head on the actor's transformer."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megatron_rl.algos.values import value_loss
from megatron_rl.cluster.dispatch import Collect, Split, dispatch
from megatron_rl.config.run import RunConfig
from megatron_rl.models.shape import HeadKind, ModelShape
from megatron_rl.types import TrainBatch
from megatron_rl.weights.heads import VALUE_HEAD, ValueHeadSource, token_classifier_config
from megatron_rl.workers.policy import PolicyPlan, PolicyWorker, UpdateResult, actor_objective

if TYPE_CHECKING:
    from megatron_rl.mcore.build import Model


@dataclass(frozen=True)
class CriticPlan:
    """What a worker must know of its critic beside the config. head: what the folder it starts from has."""

    shape: ModelShape
    head: HeadKind
    total_optimizer_steps: int


def value_objective(cliprange: float) -> Any:
    """(values [n], columns with old_values and returns [n]) -> losses [n] and metrics; 0 does not clip."""

    def objective(values: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> Any:
        losses, metrics = value_loss(values, columns["old_values"], columns["returns"], clip_range=cliprange or None)
        return losses, metrics | {"vf_loss": losses}

    return objective


class CriticWorker(PolicyWorker):
    """Actor, reference and engine (PolicyWorker), and the critic on the same ranks, in the same groups."""

    def __init__(self, rank: int, world: int, cfg: RunConfig, plan: PolicyPlan, critic: CriticPlan) -> None:
        self._critic_plan = critic
        super().__init__(rank, world, cfg, plan)
        # What goes to engines and into the actor's folder is the language model alone.
        self._export = functools.partial(_without, self._export, frozenset(VALUE_HEAD))

    def _build_actor(self, device: torch.device) -> Model:
        cfg, plan = self._cfg, self._plan
        if not cfg.critic.share_backbone:
            return super()._build_actor(device)
        from megatron_rl.mcore import build, convert

        policy = build.build_model(plan.shape, cfg.actor, cfg.model.dtype, device, value_head=True)
        convert.load_hf(policy, ValueHeadSource(self._source(cfg.model.path), "causal", {}))
        return policy

    def _build_others(self, device: torch.device) -> None:
        from megatron_rl.mcore import build, convert
        from megatron_rl.mcore.offload import Offload

        cfg, plan, part = self._cfg, self._critic_plan, self._cfg.critic_training
        self._value_loss = value_objective(cfg.critic.cliprange_value)
        self._critic, self._critic_offload = self._trainable, None
        if cfg.critic.share_backbone:
            return
        critic = build.build_model(plan.shape, part, cfg.model.dtype, device, lm_head=False, value_head=True)
        unused = convert.lm_head_shapes(plan.shape) if plan.head == "causal" else {}
        source = self._source(cfg.critic.path or cfg.model.path, pretrained=cfg.critic.path is not None)
        convert.load_hf(critic, ValueHeadSource(source, plan.head, unused))
        self._critic = build.make_trainable(critic, part, plan.total_optimizer_steps)
        self._critic_offload = Offload(self._critic, part.offloaded, keep_grads=False)
        self._critic_offload.to_host()

    @dispatch(split=Split.SPLIT_DP)
    def values(self, micro_batches: Sequence[TrainBatch]) -> list[torch.Tensor]:
        """The critic's values, per micro-batch [T] (mcore/value.py)."""
        from megatron_rl.mcore.value import forward_values

        self._free_engine()
        offload = self._critic_offload or self._offload
        offload.to_device("params")
        found = forward_values(self._critic.model, micro_batches)
        if self._critic_offload is not None:
            self._critic_offload.to_host()
        return found

    @dispatch(split=Split.SPLIT_DP)
    def logprobs_and_values(
        self, micro_batches: Sequence[TrainBatch], temperature: float
    ) -> list[dict[str, torch.Tensor]]:
        """share_backbone: {"logprobs", "values"} of each micro-batch from one forward pass."""
        from megatron_rl.mcore.value import forward_both

        self._free_engine()
        self._offload.to_device("params")
        return forward_both(self._trainable.model, micro_batches, temperature)

    @dispatch(split=Split.SPLIT_DP)
    def update_critic(self, micro_batches: Sequence[TrainBatch]) -> UpdateResult:
        """One optimizer step of a critic of its own; the result's column holds the values it started from."""
        from megatron_rl.mcore.value import train_values

        assert self._critic_offload is not None, "a shared transformer is updated by update_both"
        self._free_engine()
        self._critic_offload.to_device()
        report, values = train_values(self._critic, micro_batches, self._value_loss)
        self._critic_offload.to_host()
        return UpdateResult(report, tuple(values), self._critic_offload.take())

    @dispatch(split=Split.SPLIT_DP)
    def update_both(self, micro_batches: Sequence[TrainBatch], temperature: float) -> UpdateResult:
        """share_backbone: one optimizer step on policy loss + vf_coef * value loss."""
        from megatron_rl.mcore.value import train_both

        cfg = self._cfg
        self._free_engine()
        self._offload.to_device()
        report, logprobs = train_both(
            self._trainable,
            micro_batches,
            actor_objective(cfg.actor),
            self._value_loss,
            cfg.critic.vf_coef,
            temperature,
        )
        return UpdateResult(report, tuple(logprobs), self._offload.take())

    @dispatch(split=Split.ALL, collect=Collect.RANK0)
    def save_critic_hf(self, path: str) -> str:
        """The critic as a Hugging Face token classifier with one label, written by rank 0."""
        from megatron_rl.mcore import convert
        from megatron_rl.mcore.finite import refuse_bad_weights

        offload = self._critic_offload or self._offload
        offload.to_device("params")
        policy, cfg = self._critic.model, self._cfg
        consequence = f"{path} is not written; an earlier save there is intact"
        refuse_bad_weights(policy, what="the critic's weights", consequence=consequence)
        tensors = _without(
            functools.partial(convert.export_hf, policy), frozenset(convert.lm_head_shapes(policy.shape))
        )
        self._write_hf(path, tensors, cfg.critic.path or cfg.model.path, token_classifier_config(policy.shape))
        if self._critic_offload is not None:
            self._critic_offload.to_host()
        return path


def _without(
    export: Any, names: frozenset[str], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of `export` but those of `names`."""
    return ((name, tensor) for name, tensor in export(dtype) if name not in names)
