"""Names of losses, whose module imports torch. A test holds both equal."""

from __future__ import annotations

LOSS_MODES: tuple[str, ...] = ("ppo_clip", "gspo", "cispo", "sapo", "reinforce")
"""Keys of megatron_rl.algos.losses.LOSSES."""
