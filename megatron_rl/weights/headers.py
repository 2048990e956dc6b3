"""Tensors in weight files that are not weights, or whose dtype cannot be loaded."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_rl.models.config_json import inspect_critic

_FLOATS = ("F64", "F32", "F16", "BF16")
_DERIVED = (".rotary_emb.inv_freq", ".rotary_emb.original_inv_freq")


def is_derived(name: str) -> bool:
    """Whether a tensor is a buffer derived from config.json: older writers saved RoPE's frequencies."""
    return name.endswith(_DERIVED)


def dtype_fault(name: str, dtype: str) -> str | None:
    """Why a tensor of safetensors' `dtype` cannot be loaded; None if it can."""
    if dtype in _FLOATS:
        return None
    return f"{name} is stored as {dtype}, which means nothing without its scales (give the weights in 16 or 32 bits)"


def derived_fault(name: str, values: torch.Tensor, folder: Path) -> str | None:
    """Why a derived buffer is not that of config.json in `folder`; None if it is."""
    shape, _, _ = inspect_critic(str(folder))
    if shape is None:
        return f"surplus {name}"
    exponents = torch.arange(0, shape.rotary_dim, 2, dtype=torch.float64) / shape.rotary_dim
    frequencies = shape.rope.scaled([float(one) for one in shape.rope_theta**-exponents], shape.rope_theta)
    wanted = torch.tensor(frequencies, dtype=torch.float64)
    if values.is_floating_point() and values.shape == wanted.shape:
        # Half precision rounds the low frequencies.
        half = values.dtype in (torch.float16, torch.bfloat16)
        if torch.allclose(values.double(), wanted, rtol=1e-2 if half else 1e-4, atol=1e-7 if half else 0.0):
            return None
    return f"{name} is not that of rope_theta {shape.rope_theta:g} and head_dim {shape.head_dim}"
