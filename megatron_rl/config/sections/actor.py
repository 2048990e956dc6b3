"""Sections `actor` and `ref`: how the policy trains, and what it is compared with."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megatron_rl.algos.losses import LOSSES
from megatron_rl.algos.losses.base import PolicyLoss
from megatron_rl.algos.losses.ppo_clip import PpoClip
from megatron_rl.config.sections.base import Choice, UserPath, section
from megatron_rl.models.stages import stage_layers

LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KlType = Literal["k1", "k2", "k3", "abs"]
KlLossType = Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"]
_LOSS_SHORT = {
    "loss_mode": "type",
    **{
        name: name for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg")
    },
}
"""actor.<key> that is short for actor.loss.<setting>"""
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


def _off_of_yaml(value: object) -> object:
    """YAML reads the word off as false."""
    return "off" if value is False else value


def offloaded_kinds(params: bool, grads: bool, optimizer: bool) -> tuple[str, ...]:
    """The names of a model's kinds of memory that may leave the device."""
    kinds = {"params": params, "grads": grads, "optimizer": optimizer}
    return tuple(kind for kind, leaves in kinds.items() if leaves)


@section
class OptimConfig:
    lr: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""
    lr_warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up from 0."""
    lr_warmup_steps_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Warm-up as a fraction of the run's optimizer steps; used if lr_warmup_steps is 0."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate decay after the warm-up, to lr * min_lr_ratio at the last step (or at lr_decay_steps)."""
    lr_decay_steps: PositiveInt | None = None
    """Optimizer step at which the decay ends; the last step of the run if unset."""
    min_lr_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Final learning rate as a fraction of lr."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay; applied to matrices only, not to biases and norms."""
    adam_beta1: Beta = 0.9
    """AdamW's beta1: decay rate of the first moment."""
    adam_beta2: Beta = 0.999
    """AdamW's beta2: decay rate of the second moment."""
    adam_eps: PositiveFloat = 1e-8
    """AdamW's epsilon, added to the denominator."""
    grad_clip: NonNegativeFloat = 1.0
    """Maximum global gradient norm; 0 disables clipping."""

    def warmup_steps(self, total_steps: int) -> int:
        """Optimizer steps of the warm-up in a run of `total_steps`."""
        return self.lr_warmup_steps or int(self.lr_warmup_steps_ratio * total_steps)


@section
class ParallelConfig:
    tp: PositiveInt = 1
    """Tensor parallelism (TP) size."""
    pp: PositiveInt = 1
    """Pipeline parallelism (PP) size: number of stages."""
    vpp: PositiveInt = 1
    """Model chunks per pipeline stage (interleaved schedule, virtual pipeline)."""
    num_layers_in_first_pipeline_stage: PositiveInt | None = None
    """Number of layers in the first pipeline stage; an equal share if unset."""
    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    """Number of layers in the last pipeline stage; an equal share if unset."""
    cp: PositiveInt = 1
    """Context parallelism (CP) size: ranks that split each sequence."""
    ep: PositiveInt = 1
    """Expert parallelism (EP) size: a rank holds 1 / ep of the experts of a layer. Uses the ranks of tp, cp, dp."""
    etp: PositiveInt | None = None
    """Tensor parallelism size of the experts; if unset, 1 with ep above 1, else tp."""
    sequence_parallel: bool = False
    """Sequence parallelism: TP ranks split activations along the sequence outside attention and MLP."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer state over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over the data-parallel ranks bucket by bucket, overlapped with the backward pass."""
    overlap_param_gather: bool = False
    """Gather updated parameters bucket by bucket, overlapped with the next forward pass."""
    overlap_bucket_size: PositiveInt | None = None
    """Parameters per bucket; if unset, the larger of 40 million and 1 million per data-parallel rank."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation in the backward pass: none, attention only (selective), or each layer (full)."""
    flash_attention: Literal["torch", "fa4"] = "torch"
    """Flash attention on a GPU: torch's own, or that of the package flash-attn-4 (fa4), which is faster on long
    sequences and wants a GPU of compute capability 9 or 10."""
    keep_logits_gib: NonNegativeFloat | None = None
    """Memory for logits that the forward pass keeps for the backward pass, which computes the rest again; if unset,
    half of what is free on the GPU as they are computed, and 0 on a CPU."""
    packing: bool = True
    """Pack the sequences of a micro-batch end to end; false pads each to the longest one, for comparison."""

    @property
    def expert_tp(self) -> int:
        """Tensor parallelism size of the experts, with its default filled in."""
        if self.etp is not None:
            return self.etp
        return 1 if self.ep > 1 else self.tp

    def stages(self, num_layers: int) -> list[list[range]]:
        """[pp][vpp] layers of each model chunk; ValueError where they cannot be placed (stages.stage_layers)."""
        first, last = self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage
        return stage_layers(num_layers, self.pp, self.vpp, first, last)


@section
class ActorConfig(ParallelConfig):
    optim: OptimConfig = Field(default_factory=OptimConfig)
    ppo_mini_batch_size: PositiveInt | None = None
    """Prompts per optimizer step; data.train_batch_size if unset."""
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """Maximum sequences per forward pass and rank; unlimited if unset."""
    max_tokens_per_gpu: PositiveInt = 16384
    """Maximum tokens per forward pass and rank; a sequence that could be longer is refused before the run starts."""
    ppo_epochs: PositiveInt = 1
    """Optimizer epochs over the rollouts of a step."""
    param_offload: bool = False
    """Offload the parameters to host memory during generation."""
    grad_offload: bool = False
    """Free the gradient buffers during generation (each update starts from zero gradients)."""
    optimizer_offload: bool = False
    """Offload the optimizer state and the float32 master parameters to host memory during generation."""
    loss: Annotated[PolicyLoss, Choice(LOSSES, "ppo_clip", _LOSS_SHORT)] = Field(default_factory=PpoClip)
    """Policy loss: a name of megatron_rl.algos.losses.LOSSES, or the name as `type` beside its settings."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses are averaged into one loss, always over the global mini-batch."""
    entropy_coeff: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus."""
    use_kl_loss: bool = False
    """Add kl_loss_coef * KL(policy, reference) to the loss."""
    kl_loss_coef: NonNegativeFloat = 0.001
    """Coefficient of the KL loss."""
    kl_loss_type: KlLossType = "k3"
    """KL estimator of the KL loss (Schulman 2020); abs is |log ratio|. With a +: same value, the KL's own gradient."""
    kl_loss_importance: bool = False
    """Multiply the KL loss by the ratio of new to old policy: unbiased after a step's first update (DeepSeek-V3.2)."""
    router_replay: Annotated[Literal["off", "old", "rollout"], BeforeValidator(_off_of_yaml)] = "off"
    """Have routers choose the experts of an earlier pass, weighted by their own logits: old, of the pass for the old
    log-probabilities, in the update; rollout, of the engine, in both (R3, Ma et al. 2025)."""
    router_aux_loss_coef: NonNegativeFloat = 0.0
    """Coefficient of a balancing loss over the experts of each layer, over the whole mini-batch (Qiu et al. 2025). It
    costs a forward pass more an update, which counts the tokens of each expert."""

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Kinds of memory that are offloaded during generation."""
        return offloaded_kinds(self.param_offload, self.grad_offload, self.optimizer_offload)


@section
class RefConfig:
    path: UserPath | None = None
    """Folder with the weights of the reference model; the initial weights of the actor if unset."""
