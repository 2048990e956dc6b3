"""AdamW with the interface of the fused GPU optimizers, for machines without them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core import optimizer
from megatron.core.optimizer import distrib_optimizer
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT


def install() -> None:
    """Have Megatron build its optimizers with FusedInterfaceAdam if this machine has no fused one: no GPU, or neither
    Transformer Engine nor Apex, where Megatron would take torch.optim.AdamW, which keeps a step for each parameter.
    """
    if torch.cuda.is_available() and not optimizer.USING_PYTORCH_OPTIMIZER:
        return
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = FusedInterfaceAdam, False
    distrib_optimizer.Adam = FusedInterfaceAdam
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


class FusedInterfaceAdam(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) over torch's own kernels.

    Like the fused optimizers it keeps `step` in the parameter group and only exp_avg and exp_avg_sq per parameter: the
    layout that Megatron's distributed optimizer saves and loads.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        **_: object,
    ) -> None:
        self.adam_w_mode = 1 if adam_w_mode else 0
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": True}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        assert closure is None, "no closure: gradients come from the pipeline schedule"
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)
            # The fused kernel, which wants its steps on the device, and adds 1 to each.
            fused = bool(params) and params[0].is_cuda
            device = params[0].device if fused else "cpu"
            adamw(
                params,
                [param.grad for param in params],
                [self.state[param]["exp_avg"] for param in params],
                [self.state[param]["exp_avg_sq"] for param in params],
                [],
                list(torch.full((len(params),), float(group["step"] - 1), device=device).unbind()),
                foreach=not fused,
                fused=fused,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
