"""Token losses. Each returns [n] losses and [n] values for metrics; sums and denominators are the caller's.

r = exp(logprobs - old_logprobs) is the new policy's probability of a sampled token over that of the policy that
sampled it, A the token's advantage, sg() a value without gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megatron_rl.algos.gae import Sums, alone
from megatron_rl.algos.kl import kl_loss

Values = dict[str, torch.Tensor]

# exp(20) is 5e8: a ratio beyond it says nothing more, and in float32 exp(89) is infinite, its gradient NaN.
_LOG_RATIO_CAP = 20.0
_LOG_SEQUENCE_RATIO_CAP = 10.0


@dataclass(frozen=True)
class PolicyInputs:
    """Tensors [n] over the trained tokens, and the scalars of the losses."""

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    clip_low: float
    clip_high: float
    clip_ratio_c: float | None = None
    """ppo_clip: where A < 0 the ratio counts as at most this; None turns it off"""
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    """sapo: temperatures of its gate where A > 0, and elsewhere"""
    sequence_means: Callable[[torch.Tensor], torch.Tensor] | None = None
    """[n] -> [n]: mean over all trained tokens of the token's sequence, wherever they are; without gradient"""

    def ratio(self) -> torch.Tensor:
        """r of each token, [n]."""
        return torch.exp((self.logprobs - self.old_logprobs).clamp(-_LOG_RATIO_CAP, _LOG_RATIO_CAP))


PolicyLoss = Callable[[PolicyInputs], tuple[torch.Tensor, Values]]
TokenLoss = Callable[[torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor]], tuple[torch.Tensor, Values]]
"""(logprobs [n], entropy [n], columns) -> (losses [n], metrics [n])"""


def ppo_clip_loss(inputs: PolicyInputs) -> tuple[torch.Tensor, Values]:
    """-min(r A, clip(r, 1 - low, 1 + high) A), and where A < 0 at most -c A.

    Schulman et al. 2017 (PPO); with high > low, Yu et al. 2025 (DAPO's clip-higher); with c = clip_ratio_c, Ye et al.
    2020 (dual clip). clip_frac counts the tokens whose clipped term is the smaller one, dual_clip_frac those that c
    stops: both get no gradient.
    """
    ratio, advantages = inputs.ratio(), inputs.advantages
    surrogate, values = _clipped(ratio, inputs)
    if inputs.clip_ratio_c is not None:
        floor = inputs.clip_ratio_c * advantages
        stopped = (advantages < 0) & (floor > surrogate)
        surrogate = torch.where(stopped, floor, surrogate)
        values["dual_clip_frac"] = stopped.float()
    return -surrogate, values


def _clipped(ratio: torch.Tensor, inputs: PolicyInputs) -> tuple[torch.Tensor, Values]:
    """min(r A, clip(r) A) of each token."""
    free = ratio * inputs.advantages
    clipped = ratio.clamp(1.0 - inputs.clip_low, 1.0 + inputs.clip_high) * inputs.advantages
    return torch.minimum(free, clipped), {"clip_frac": (clipped < free).float(), "ratio": ratio}


def gspo_loss(inputs: PolicyInputs) -> tuple[torch.Tensor, Values]:
    """-min(s A, clip(s, 1 - low, 1 + high) A), s = exp(mean over the sequence of log r).

    Zheng et al. 2025 (GSPO), in its token form: s = sg(s) p / sg(p), equal to the sequence form in value and
    gradient. The paper averages within sequences (loss_agg_mode seq-mean-token-mean) and clips at 3e-4 and 4e-4.
    log s is cut at 10 from above, as verl cuts it; a token beyond has no gradient.
    """
    assert inputs.sequence_means is not None, "gspo needs means over sequences"
    logprobs = inputs.logprobs
    mean = inputs.sequence_means((logprobs - inputs.old_logprobs).detach())
    ratio = torch.exp((mean + (logprobs - logprobs.detach())).clamp(max=_LOG_SEQUENCE_RATIO_CAP))
    surrogate, values = _clipped(ratio, inputs)
    return -surrogate, values


def cispo_loss(inputs: PolicyInputs) -> tuple[torch.Tensor, Values]:
    """-sg(clip(r, 1 - low, 1 + high)) A log p.

    MiniMax 2025 (CISPO, of MiniMax-M1): the weight is clipped, no token loses its gradient. The paper leaves the lower
    side open (clip_ratio_low 1.0). clip_frac counts the tokens whose weight was clipped.
    """
    ratio = inputs.ratio().detach()
    weight = ratio.clamp(1.0 - inputs.clip_low, 1.0 + inputs.clip_high)
    values = {"clip_frac": (weight != ratio).float(), "ratio": ratio}
    return -weight * inputs.advantages * inputs.logprobs, values


def sapo_loss(inputs: PolicyInputs) -> tuple[torch.Tensor, Values]:
    """-f(r) A, f(r) = 4 / tau sigmoid(tau (r - 1)), tau = tau_pos where A > 0 and tau_neg elsewhere.

    Gao et al. 2025 (SAPO): a soft gate in place of clipping; f has slope 1 at r = 1.
    """
    ratio = inputs.ratio()
    tau = torch.full_like(ratio, inputs.tau_neg).masked_fill(inputs.advantages > 0, inputs.tau_pos)
    return -4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * inputs.advantages, {"ratio": ratio}


def reinforce_loss(inputs: PolicyInputs) -> tuple[torch.Tensor, Values]:
    """-A log p: no ratio, no clipping; after a step's first update the samples are not the policy's own any more.

    Williams 1992 (REINFORCE).
    """
    return -inputs.advantages * inputs.logprobs, {"ratio": inputs.ratio().detach()}


def nll_loss(
    logprobs: torch.Tensor, entropy: torch.Tensor, columns: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, Values]:
    """Supervised fine-tuning: -log p of each response token."""
    return -logprobs, {"nll": -logprobs}


def sequence_means_of(columns: Mapping[str, torch.Tensor], add_up: Sums) -> Callable[[torch.Tensor], torch.Tensor]:
    """[n] token values -> [n] means over the trained tokens of each token's sequence.

    columns: segment_ids [n] int64, the sequence of each token here; sequence_lens [S] int64, trained tokens of each
    sequence over all ranks that share it. add_up: adds [S] sums up over those ranks (context parallelism).
    """
    segment_ids, lens = columns["segment_ids"], columns["sequence_lens"]

    def means(values: torch.Tensor) -> torch.Tensor:
        # In float64 the order in which tokens are added, which the layout decides, does not show.
        sums = torch.zeros(len(lens), dtype=torch.float64, device=values.device)
        sums = add_up(sums.index_add_(0, segment_ids, values.detach().double()))
        return (sums / lens.clamp(min=1)).to(values.dtype)[segment_ids]

    return means


def policy_objective(
    policy_loss: PolicyLoss,
    *,
    clip_low: float,
    clip_high: float,
    entropy_coeff: float,
    kl_loss_coef: float,
    kl_loss_type: str,
    kl_importance: bool = False,
    clip_ratio_c: float | None = None,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    add_up: Sums = alone,
) -> TokenLoss:
    """The whole token loss of a policy update: w * policy loss - entropy_coeff * H + kl_loss_coef * KL.

    The columns hold advantages, and old_logprobs unless the step is on-policy: then the policy's own log-probabilities
    stand for them (detached), and the ratio is exactly 1. ref_logprobs are there when a reference model is, and
    rollout_weights (w) when rollout correction gives weights. add_up: see sequence_means_of.
    """

    def objective(
        logprobs: torch.Tensor, entropy: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Values]:
        old_logprobs = columns["old_logprobs"] if "old_logprobs" in columns else logprobs.detach()
        inputs = PolicyInputs(
            logprobs,
            old_logprobs,
            columns["advantages"],
            clip_low,
            clip_high,
            clip_ratio_c,
            tau_pos,
            tau_neg,
            sequence_means_of(columns, add_up) if "segment_ids" in columns else None,
        )
        losses, values = policy_loss(inputs)
        values |= {"entropy": entropy, "approx_kl": old_logprobs - logprobs}
        if "rollout_weights" in columns:
            losses = losses * columns["rollout_weights"]
        if entropy_coeff:
            losses = losses - entropy_coeff * entropy
        if "ref_logprobs" in columns:
            ratio = inputs.ratio() if kl_importance else None
            kl = kl_loss(kl_loss_type, logprobs, columns["ref_logprobs"], ratio)
            values["kl_ref"] = kl
            if kl_loss_coef:
                losses = losses + kl_loss_coef * kl
        return losses, values

    return objective


LOSSES: dict[str, PolicyLoss] = {
    "ppo_clip": ppo_clip_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "reinforce": reinforce_loss,
}
"""actor.loss_mode -> function from token tensors [n] to token losses [n]"""
