"""Sections `actor` and `ref`: how the policy trains, and what it is compared with."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megatron_rl.algos.losses import LOSSES
from megatron_rl.algos.losses.base import PolicyLoss
from megatron_rl.config.names import LOSS_MODES
from megatron_rl.config.sections.base import OneOf, UserPath, section
from megatron_rl.models.shape import stage_layers

LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KlType = Literal["k1", "k2", "k3", "abs"]
KlLossType = Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


def offloaded_kinds(params: bool, grads: bool, optimizer: bool) -> tuple[str, ...]:
    """The names of a model's kinds of memory that may leave the device."""
    kinds = {"params": params, "grads": grads, "optimizer": optimizer}
    return tuple(kind for kind, leaves in kinds.items() if leaves)


@section
class OptimConfig:
    lr: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""
    lr_warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the rate rises linearly from 0."""
    lr_warmup_steps_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """The same as a share of the run's optimizer steps; read where lr_warmup_steps is 0."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after the warm-up, down to lr * min_lr_ratio at the run's last step (or at lr_decay_steps)."""
    lr_decay_steps: PositiveInt | None = None
    """Optimizer steps at which the decay ends; the whole run when not given."""
    min_lr_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Last rate as a share of lr."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay, on matrices only."""
    adam_beta1: Beta = 0.9
    """Decay of AdamW's mean of gradients."""
    adam_beta2: Beta = 0.999
    """Decay of AdamW's mean of squared gradients."""
    adam_eps: PositiveFloat = 1e-8
    """Added to the root of the squared mean in AdamW."""
    grad_clip: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 turns clipping off."""

    def warmup_steps(self, total_steps: int) -> int:
        """Optimizer steps of the warm-up in a run of `total_steps`."""
        return self.lr_warmup_steps or int(self.lr_warmup_steps_ratio * total_steps)


@section
class ParallelConfig:
    tp: PositiveInt = 1
    """Tensor-parallel ranks."""
    pp: PositiveInt = 1
    """Pipeline stages."""
    vpp: PositiveInt = 1
    """Model chunks per pipeline stage (interleaved schedule)."""
    num_layers_in_first_pipeline_stage: PositiveInt | None = None
    """Layers of the first stage; an even share when not given."""
    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    """Layers of the last stage; an even share when not given."""
    cp: PositiveInt = 1
    """Context-parallel ranks."""
    ep: PositiveInt = 1
    """Expert-parallel ranks: each holds 1 / ep of every layer's experts. Taken from the ranks of tp, cp and dp."""
    etp: PositiveInt | None = None
    """Ranks that share each expert's matrices; 1 when not given and ep is above 1 (tp with ep 1)."""
    sequence_parallel: bool = False
    """Split activations between tensor-parallel ranks along the sequence, outside attention and MLP."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer's state over data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Add gradients up over data-parallel ranks bucket by bucket, while the backward pass goes on."""
    overlap_param_gather: bool = False
    """Gather updated weights from data-parallel ranks bucket by bucket, while the next forward pass goes on."""
    overlap_bucket_size: PositiveInt | None = None
    """Parameters in such a bucket; 40 million, or 1 million for each data-parallel rank if more, when not given."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass instead of kept: attention's alone, or each layer's."""
    packing: bool = True
    """Sequences of a micro-batch end to end; false pads each to the longest of them, for comparison."""

    @property
    def expert_tp(self) -> int:
        """Ranks that share each expert, as in force."""
        if self.etp is not None:
            return self.etp
        return 1 if self.ep > 1 else self.tp

    def stages(self, num_layers: int) -> list[list[range]]:
        """[pp][vpp] layers of each model chunk; ValueError where they cannot be placed (layout.stage_layers)."""
        first, last = self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage
        return stage_layers(num_layers, self.pp, self.vpp, first, last)


@section
class ActorConfig(ParallelConfig):
    optim: OptimConfig = Field(default_factory=OptimConfig)
    ppo_mini_batch_size: PositiveInt | None = None
    """Prompts of one optimizer step; data.train_batch_size when not given."""
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """Most sequences in one forward pass of a rank; no such cap when not given."""
    max_tokens_per_gpu: PositiveInt = 16384
    """Most tokens in one forward pass of a rank; longer sequences are an error before the run starts."""
    ppo_epochs: PositiveInt = 1
    """Passes over the rollouts of one step."""
    param_offload: bool = False
    """Keep the weights in host memory while responses are generated."""
    grad_offload: bool = False
    """Free the gradients' memory while responses are generated (each update starts from zeroed gradients)."""
    optimizer_offload: bool = False
    """Keep the optimizer's state and the float32 master weights in host memory while responses are generated."""
    clip_ratio: PositiveFloat = 0.2
    """Clipping range of the policy ratio, used on each side that has no range of its own."""
    clip_ratio_low: PositiveFloat | None = None
    """Range below 1; clip_ratio when not given."""
    clip_ratio_high: PositiveFloat | None = None
    """Range above 1 (DAPO's clip-higher); clip_ratio when not given."""
    clip_ratio_c: Annotated[float, Field(gt=1.0)] | None = 3.0
    """Dual clip of ppo_clip: where the advantage is negative the ratio counts as at most this; null turns it off."""
    tau_pos: PositiveFloat = 1.0
    """Temperature of sapo's soft gate where the advantage is positive."""
    tau_neg: PositiveFloat = 1.05
    """Temperature of sapo's soft gate elsewhere: higher closes it faster."""
    loss_mode: Annotated[str, OneOf(LOSS_MODES)] = "ppo_clip"
    """Policy loss: a name of megatron_rl.algos.losses.LOSSES."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses become one number; always over the global mini-batch."""
    entropy_coeff: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add kl_loss_coef * KL(policy, reference) to the loss."""
    kl_loss_coef: NonNegativeFloat = 0.001
    """Weight of that KL in the loss."""
    kl_loss_type: KlLossType = "k3"
    """Estimator of that KL (Schulman 2020); abs is |log ratio|. With a +: its value, and the KL's own gradient."""
    kl_loss_importance: bool = False
    """Weight that KL by new / old policy, which keeps it unbiased after a step's first update (DeepSeek-V3.2)."""

    @property
    def offloaded(self) -> tuple[str, ...]:
        """What leaves the device while responses are generated."""
        return offloaded_kinds(self.param_offload, self.grad_offload, self.optimizer_offload)

    @property
    def loss(self) -> PolicyLoss:
        """The policy loss with its settings."""
        chosen = LOSSES[self.loss_mode]
        names = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg")
        return chosen(**{name: getattr(self, name) for name in names if name in chosen.__dataclass_fields__})


@section
class RefConfig:
    path: UserPath | None = None
    """Folder of the reference model's weights; the actor's starting weights when not given."""
