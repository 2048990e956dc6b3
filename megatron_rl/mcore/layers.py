"""The layers of a model as Megatron builds them: dense ones, and those with experts."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_rl.config.sections.actor import ParallelConfig
from megatron_rl.mcore.attention import PackedAttention
from megatron_rl.mcore.experts import StackedExperts
from megatron_rl.mcore.latent import LatentAttention
from megatron_rl.mcore.norm import RMSNorm, ZeroCenteredRMSNorm
from megatron_rl.mcore.router import ExpertRouter, RoutedLayer
from megatron_rl.models import FAMILIES
from megatron_rl.models.shape import ModelShape


def expert_settings(shape: ModelShape, parallel: ParallelConfig) -> dict[str, Any]:
    """TransformerConfig's settings of layers with experts: every token reaches its experts, and nothing but the loss
    moves the router. How experts are chosen is not Megatron's to know (mcore/router.py).
    """
    if not shape.num_experts:
        return {}
    return {
        "num_moe_experts": shape.num_experts,
        "moe_ffn_hidden_size": shape.ffn_size,
        "moe_shared_expert_intermediate_size": shape.shared_ffn_size or None,
        "moe_shared_expert_gate": FAMILIES[shape.architecture].compute.shared_gate,
        "moe_layer_freq": [int(shape.has_experts(layer)) for layer in range(shape.num_layers)],
        "moe_router_topk": shape.num_experts_per_tok,
        # A single expert's softmax over itself would be 1, which Megatron refuses; nothing else reads this.
        "moe_router_pre_softmax": not shape.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": False,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.expert_tp,
    }


def layer_specs(shape: ModelShape, layers: range) -> TransformerBlockSubmodules:
    """The layers of one model chunk, by their global numbers."""
    specs = [_layer_spec(shape, layer) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=cast(Any, _norm(shape)))


def _norm(shape: ModelShape) -> type[RMSNorm]:
    return ZeroCenteredRMSNorm if FAMILIES[shape.architecture].compute.zero_centered_norms else RMSNorm


def _layer_spec(shape: ModelShape, number: int) -> ModuleSpec:
    """Megatron's local layer with this package's norm, attention, router and experts. number: the global one."""
    compute, has_experts = FAMILIES[shape.architecture].compute, shape.has_experts(number)
    num_experts = shape.num_experts if has_experts else None
    spec: ModuleSpec = get_gpt_layer_local_spec(num_experts=num_experts, normalization=compute.norm)
    layer: Any = spec.submodules
    norm = _norm(shape)
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    if compute.output_norms:
        spec.module, spec.params = SandwichLayer, {"norm": norm}
    if shape.latent is not None:
        params = {"latent": shape.latent, "rotation": shape.rotation(number)}
        layer.self_attention = ModuleSpec(module=LatentAttention, params=params)
    else:
        attention = layer.self_attention.submodules
        attention.core_attention = partial(
            PackedAttention, windows=shape.windows, rotation=shape.rotation(number), sinks=compute.sinks
        )
        if compute.qk_norm or shape.use_qk_norm:
            attention.q_layernorm = attention.k_layernorm = norm
    if has_experts:
        router = partial(ExpertRouter, router=shape.router, normed=shape.norm_topk_prob)
        spec.module = RoutedLayer
        submodules = expert_submodules(layer.mlp)
        params = {"gate": compute.clamped_gate, "bias": compute.linear_bias}
        submodules.router, submodules.experts = router, ModuleSpec(module=StackedExperts, params=params)
    return spec


class SandwichLayer(TransformerLayer):
    """A layer whose attention and MLP have norms behind them too, before their outputs are added to its input."""

    def __init__(self, config: TransformerConfig, *args: Any, norm: type[RMSNorm], **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.post_attention_layernorm, self.post_mlp_layernorm = (
            norm(config, config.hidden_size, config.layernorm_epsilon) for _ in range(2)
        )
        # Not in Megatron's slot for adding: gradients are on in there, also where a pass needs none.
        self.self_attention.register_forward_hook(partial(_normed, self.post_attention_layernorm))
        self.mlp.register_forward_hook(partial(_normed, self.post_mlp_layernorm))


def _normed(norm: RMSNorm, _: object, __: object, output: tuple[torch.Tensor, torch.Tensor | None]) -> Any:
    """A hook on a module that gives (output, bias)."""
    hidden, bias = output
    assert bias is None, "biases of outputs are not part of any family with norms behind them"
    return norm(hidden), None


def expert_submodules(mlp: Any) -> Any:
    """Megatron's MoESubmodules in the spec of a layer's experts: megatron-core 0.19 binds them to the layer's class."""
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
