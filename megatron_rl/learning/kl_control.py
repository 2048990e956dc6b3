"""The weight of the KL in the reward: fixed, or steered towards a target (Ziegler et al. 2019, section 2.2)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_rl.algos.groups import sequence_sums
from megatron_rl.config.sections.algorithm import KlCtrlConfig
from megatron_rl.types import TrainBatch


class KlControl:
    """coef is this step's coefficient. An adaptive controller updates it after observing the step's KL:

    coef *= 1 + clip(KL / target_kl - 1, -0.2, 0.2) * S / horizon,   S sequences of the step

    KL is the mean over sequences of their mean per trained token, as the field's configs mean target_kl.
    """

    def __init__(self, config: KlCtrlConfig) -> None:
        self._config = config
        self.coef = config.kl_coef
        self._last: dict[str, float] = {}

    def observe(self, kl: torch.Tensor, batch: TrainBatch) -> None:
        """kl: [T] estimates of the step's samples."""
        segments, mask, count = batch.segments, batch.loss_mask, batch.num_sequences
        lengths = sequence_sums(mask, segments, count)
        mean = float((sequence_sums(kl * mask, segments, count) / lengths.clamp(min=1)).mean())
        self._last = {"kl/reward": mean, "kl/coef": self.coef}
        if self._config.type == "adaptive":
            error = min(max(mean / self._config.target_kl - 1.0, -0.2), 0.2)
            self.coef *= 1.0 + error * count / self._config.horizon

    def metrics(self) -> dict[str, float]:
        """kl/reward, the last step's KL, and kl/coef, the weight it had; empty where no KL is in the reward."""
        return self._last

    def state(self) -> dict[str, float]:
        """What a resumed run needs."""
        return {"coef": self.coef}

    def restore(self, state: Mapping[str, float]) -> None:
        """The inverse of `state`."""
        self.coef = state["coef"]
