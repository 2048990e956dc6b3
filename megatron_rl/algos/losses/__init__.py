"""Policy losses. A new one is one file, its test, and one line in LOSSES."""

from __future__ import annotations

from megatron_rl.algos.losses.base import PolicyLoss
from megatron_rl.algos.losses.cispo import Cispo
from megatron_rl.algos.losses.gspo import Gspo
from megatron_rl.algos.losses.ppo_clip import PpoClip
from megatron_rl.algos.losses.reinforce import Reinforce
from megatron_rl.algos.losses.sapo import Sapo

LOSSES: dict[str, type[PolicyLoss]] = {
    "ppo_clip": PpoClip,
    "gspo": Gspo,
    "cispo": Cispo,
    "sapo": Sapo,
    "reinforce": Reinforce,
}
"""actor.loss.type -> its class"""
