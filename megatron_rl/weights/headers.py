"""Tensors in weight files that are not weights, but derived from config.json."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_rl.models.config_json import inspect_critic


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
