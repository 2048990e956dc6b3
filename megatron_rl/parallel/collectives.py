"""Small collectives that several layers need."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_rl.types import Metric


def reduce_metrics(metrics: Mapping[str, Metric], group: torch.distributed.ProcessGroup | None) -> dict[str, Metric]:
    """Sums and counts added over `group`, in float64. All ranks must hold the same names."""
    if not metrics:
        return {}
    names = sorted(metrics)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    flat = torch.tensor([[metrics[n].total, metrics[n].count] for n in names], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(flat, group=group)
    return {name: Metric(total, count) for name, (total, count) in zip(names, flat.tolist(), strict=True)}
