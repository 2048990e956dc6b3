"""Gradients of weights added to Megatron's float32 buffers by the product that makes them.

Megatron has the place for it (gradient_accumulation_fusion) and looks for apex's extension; torch's product with a
float32 output does the same. Without it a gradient is rounded to half precision, written, read, and added.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.tensor_parallel import layers

from megatron_rl.ops.accumulate import add_product_


def install() -> bool:
    """Whether linear layers add their gradients up in this way: on GPUs. Before layers are built."""
    if not torch.cuda.is_available():
        return False
    module: Any = layers
    module._grad_accum_fusion_available = True
    module.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=_accumulate)
    return True


def _accumulate(inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """main_grad [out, in] float32 += grad_output [t, out]^T inputs [t, in]."""
    add_product_(main_grad, grad_output, inputs)
