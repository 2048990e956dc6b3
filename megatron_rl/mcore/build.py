"""From a model's shape to a Megatron-Core model that trains. The only place that names megatron's model classes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config.sections.actor import OptimConfig, ParallelConfig
from megatron_rl.mcore import adam, wgrad
from megatron_rl.mcore.attention import use_flash
from megatron_rl.mcore.layers import expert_settings, layer_specs
from megatron_rl.mcore.logprobs import VocabShard
from megatron_rl.mcore.mlp import fuse_activations
from megatron_rl.models import FAMILIES
from megatron_rl.models.lora import Adapters
from megatron_rl.models.rules import padded_vocab
from megatron_rl.models.shape import ModelShape
from megatron_rl.ops.flash import flash_kernel
from megatron_rl.parallel.groups import tp_group
from megatron_rl.parallel.topology import is_last_chunk
from megatron_rl.weights.dtypes import DTYPES

_ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu_pytorch_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}


class ModelChunk(GPTModel):
    """A GPTModel that ends at the hidden states: the head's logits are never built whole (mcore/logprobs.py)."""

    value_head: ValueHead | None
    """What turns hidden states into values, on the last chunk of a critic."""

    def _postprocess(self, hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return hidden_states

    def head_weight(self) -> torch.Tensor:
        """[v / tp, h]: the output matrix, or the embedding it is tied to."""
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        assert weight is not None
        return weight


class ValueHead(torch.nn.Module):
    """A linear map from hidden states to a number, whole on every tensor-parallel rank of the last stage."""

    def __init__(self, hidden_size: int, biased: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size))
        self.bias = torch.nn.Parameter(torch.zeros(1)) if biased else None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, h] -> [n] float32."""
        bias = None if self.bias is None else self.bias.float()
        return torch.nn.functional.linear(rows.float(), self.weight.float(), bias).squeeze(-1)


@dataclass(frozen=True)
class Model:
    """A model on this rank, ready to run forward. chunks are what the pipeline schedule takes.

    lm_head, value_head: what follows the hidden states. An actor has the first, a critic the second, a model that is
    both has both. adapters: what trains in place of the weights (mcore/lora.py); None if there are none.
    """

    shape: ModelShape
    config: TransformerConfig
    parallel: ParallelConfig
    chunks: list[torch.nn.Module]
    lm_head: bool = True
    value_head: bool = False
    head_biased: bool = True
    """The value head has a bias: a critic's has, a reward model's has not."""
    adapters: Adapters | None = None

    def layers(self, stage: int, chunk: int) -> range:
        """Layers of a model chunk of a pipeline stage, by global number."""
        return self.parallel.stages(self.shape.num_layers)[stage][chunk]

    @property
    def bare_chunks(self) -> list[ModelChunk]:
        """The chunks without their data-parallel wrapper."""
        return [cast(ModelChunk, c.module if isinstance(c, DistributedDataParallel) else c) for c in self.chunks]

    @property
    def last_chunk(self) -> ModelChunk | None:
        """The chunk that ends in the hidden states, on ranks of the last pipeline stage."""
        return next((chunk for chunk in self.bare_chunks if chunk.post_process), None)

    def head_weight(self) -> torch.Tensor:
        """[v / tp, h]: the output matrix on a rank of the last stage, complete."""
        last, chunk = self.last_chunk, self.chunks[-1]
        assert last is not None and self.lm_head, "only the last pipeline stage has a head"
        weight = last.head_weight()
        waits = isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather
        if waits and weight.requires_grad:
            # Megatron waits for a parameter where its module runs, and the head's never does: see linear_logprobs.
            cast(DistributedDataParallel, chunk).param_to_bucket_group[weight].finish_param_sync()
        return weight

    def head_grad_sum(self) -> torch.Tensor | None:
        """[v / tp, h] float32: where gradients of the output matrix add up; None if it does not train."""
        last, chunk = self.last_chunk, self.chunks[-1]
        assert last is not None
        trains = isinstance(chunk, DistributedDataParallel) and last.head_weight().requires_grad
        return cast(Any, last.head_weight()).main_grad if trains else None

    def complete_params(self) -> None:
        """Make every parameter whole on this rank, where the last update left that to the next forward pass
        (overlap_param_gather): before anything but a forward pass reads or moves them. A collective over
        data-parallel ranks; does nothing where they are whole.
        """
        for chunk in self.chunks:
            if not isinstance(chunk, DistributedDataParallel) or not chunk.ddp_config.overlap_param_gather:
                continue
            groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
            if any(not group.param_gather_dispatched or group.param_gather_handle is not None for group in groups):
                chunk.start_param_sync(force_sync=True)

    @property
    def device(self) -> torch.device:
        return next(self.chunks[0].parameters()).device

    def vocab_shard(self) -> VocabShard:
        """This tensor-parallel rank's part of the vocabulary."""
        group = tp_group()
        rows = padded_vocab(self.shape, group.size()) // group.size()
        start = group.rank() * rows
        return VocabShard(start, max(0, min(rows, self.shape.vocab_size - start)), group)


@dataclass(frozen=True)
class Trainable:
    """A model with its optimizer and learning-rate schedule."""

    model: Model
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


def transformer_config(shape: ModelShape, parallel: ParallelConfig, dtype: str) -> TransformerConfig:
    """Megatron's config for `shape`. Fusions that need CUDA extensions stay off: they change speed, not the model."""
    half, compute = dtype == "bfloat16", FAMILIES[shape.architecture].compute
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        qk_layernorm=compute.qk_norm or shape.use_qk_norm,
        ffn_hidden_size=shape.dense_ffn_size or shape.ffn_size,
        **expert_settings(shape, parallel),
        normalization=compute.norm,
        layernorm_epsilon=shape.rms_norm_eps,
        activation_func=_ACTIVATIONS[compute.activation],
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=compute.qkv_bias or shape.attention_bias,
        softmax_scale=shape.query_pre_attn_scalar**-0.5 if shape.query_pre_attn_scalar else None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        num_layers_in_first_pipeline_stage=parallel.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=parallel.num_layers_in_last_pipeline_stage,
        context_parallel_size=parallel.cp,
        **_recompute(parallel.recompute),
        sequence_parallel=parallel.sequence_parallel,
        params_dtype=DTYPES[dtype],
        pipeline_dtype=DTYPES[dtype],
        bf16=half,
        autocast_dtype=DTYPES[dtype],
        # Weights are loaded or drawn by weights/, so megatron's own draw does nothing. It still has to run: it marks
        # the parameters that tensor parallelism splits. An unmarked one is left out of the gradient norm silently.
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=True,
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        embedding_init_method=_leave_as_is,
        # Losses arrive weighted by global counts, so gradients are plain sums over tokens and ranks.
        calculate_per_token_loss=True,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=wgrad.install(),
        persist_layer_norm=False,
        cross_entropy_loss_fusion=False,
        variable_seq_lengths=parallel.pp > 1,
        moe_token_dispatcher_type="alltoall",
        # megatron-core 0.16 drops an output's storage while gloo may still be sending it.
        deallocate_pipeline_outputs=torch.cuda.is_available() and parallel.pp > 1,
    )
    # Given to the constructor, it would be refused with etp, where Megatron's own experts add their biases wrong.
    config.add_bias_linear = compute.linear_bias
    return config


def _recompute(mode: str) -> dict[str, Any]:
    if mode == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]} if mode == "selective" else {}


def _leave_as_is(weight: torch.Tensor) -> torch.Tensor:
    return weight


def build_model(
    shape: ModelShape,
    parallel: ParallelConfig,
    dtype: str,
    device: torch.device,
    *,
    lm_head: bool = True,
    value_head: bool = False,
    head_biased: bool = True,
) -> Model:
    """An uninitialised model on this rank (fill it with convert.load_hf). Needs megatron's groups."""
    config = transformer_config(shape, parallel, dtype)
    # Dropout is off and weights come from elsewhere: the seed only makes megatron's tracker exist.
    model_parallel_cuda_manual_seed(0)
    model = Model(shape, config, parallel, [], lm_head, value_head, head_biased)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    for number in range(parallel.vpp):
        virtual = number if parallel.vpp > 1 else None
        with torch.device(device):
            chunk = ModelChunk(
                config=config,
                transformer_layer_spec=layer_specs(shape, model.layers(stage, number)),  # type: ignore[arg-type]
                vocab_size=padded_vocab(shape, parallel.tp),
                max_sequence_length=shape.max_position_embeddings,
                pre_process=stage == 0 and number == 0,
                post_process=is_last_chunk(stage, number, pp=parallel.pp, vpp=parallel.vpp),
                share_embeddings_and_output_weights=shape.tie_word_embeddings and lm_head,
                # PackedAttention applies RoPE itself.
                position_embedding_type="none",
                vp_stage=virtual,
            )
            if chunk.pre_process and FAMILIES[shape.architecture].compute.scaled_embeddings:
                factor = torch.tensor(shape.hidden_size**0.5, dtype=DTYPES[dtype]).item()
                chunk.embedding.register_forward_hook(lambda _, __, output, factor=factor: output * factor)
            fuse_activations(chunk)
            use_flash(chunk, flash_kernel(parallel.flash_attention))
            if chunk.post_process and not lm_head:
                del chunk.output_layer
            headed = chunk.post_process and value_head
            chunk.value_head = ValueHead(shape.hidden_size, head_biased) if headed else None
        model.chunks.append(chunk.to(device=device, dtype=DTYPES[dtype]))
    return model


def make_trainable(model: Model, optim: OptimConfig, total_steps: int) -> Trainable:
    """Wrap a filled model for training. Its weights must be loaded: the optimizer copies them as its masters.

    total_steps: optimizer steps of the run, for the decay of the learning rate.
    """
    half, parallel = model.config.params_dtype == torch.bfloat16, model.parallel
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        bucket_size=parallel.overlap_bucket_size,
    )
    # Chunks after the first are one bucket each: their communication hides behind the other chunks' work.
    chunks: list[torch.nn.Module] = [
        DistributedDataParallel(model.config, ddp_config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(model.chunks)
    ]
    adam.install()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            min_lr=optim.lr * optim.min_lr_ratio,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.adam_beta1,
            adam_beta2=optim.adam_beta2,
            adam_eps=optim.adam_eps,
            # 0 would also stop the norm from being computed; no norm is above infinity.
            clip_grad=optim.grad_clip or math.inf,
            bf16=half,
            params_dtype=model.config.params_dtype,
            use_distributed_optimizer=parallel.use_distributed_optimizer,
            overlap_param_gather=parallel.overlap_param_gather,
        ),
        cast(Any, chunks),
        use_gloo_process_groups=False,
    )
    # Megatron asks the config of a model how gradients are finished; the token count is already in the loss weights.
    config: Any = model.config
    config.finalize_model_grads_func = _finalize_without_token_count
    config.grad_scale_func = optimizer.scale_loss
    no_sync = [cast(Any, chunk).no_sync for chunk in chunks]
    config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return Trainable(
        replace(model, chunks=chunks),
        optimizer,
        _scheduler(optimizer, optim, total_steps),
    )


def _finalize_without_token_count(model: Any, num_tokens: Any = None, **kwargs: Any) -> None:
    finalize_model_grads(model, None, **kwargs)


def _scheduler(optimizer: MegatronOptimizer, optim: OptimConfig, total_steps: int) -> OptimizerParamScheduler:
    decay_steps = optim.lr_decay_steps or total_steps
    warmup_steps = optim.warmup_steps(total_steps)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=optim.lr * optim.min_lr_ratio,
        lr_warmup_steps=warmup_steps,
        # step.py advances the schedule before each update (update 1 has a rate above 0), and min_lr is reached one
        # step after the last, so that no update of the run is made with a rate of 0.
        lr_decay_steps=max(decay_steps, warmup_steps) + 1,
        lr_decay_style=optim.lr_scheduler,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
