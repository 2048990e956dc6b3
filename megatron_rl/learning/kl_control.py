"""The weight of the KL in the reward: fixed, or steered towards a target (Ziegler et al. 2019, section 2.2)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_rl.config.sections.algorithm import KlCtrlConfig


class KlControl:
    """coef is this step's coefficient. An adaptive controller updates it after observing the step's KL:

    coef *= 1 + clip(KL / target_kl - 1, -0.2, 0.2) * S / horizon,   S sequences of the step

    KL is the mean over sequences of their mean per trained token, as the field's configs mean target_kl.
    """

    def __init__(self, config: KlCtrlConfig) -> None:
        self._config = config
        self.coef = config.kl_coef
        self._last: dict[str, float] = {}

    def observe(self, kl: torch.Tensor) -> None:
        """kl: [S] float64, of each sample of the step the mean of its estimates over its trained tokens."""
        mean = float(kl.mean())
        self._last = {"kl/reward": mean, "kl/coef": self.coef}
        if self._config.type == "adaptive":
            error = min(max(mean / self._config.target_kl - 1.0, -0.2), 0.2)
            self.coef *= 1.0 + error * len(kl) / self._config.horizon

    def metrics(self) -> dict[str, float]:
        """kl/reward, the last step's KL, and kl/coef, the weight it had; empty where no KL is in the reward."""
        return self._last

    def state(self) -> dict[str, float]:
        """What a resumed run needs."""
        return {"coef": self.coef}

    def restore(self, state: Mapping[str, float]) -> None:
        """The inverse of `state`."""
        self.coef = state["coef"]
