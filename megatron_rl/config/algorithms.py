"""What each algorithm needs of a run: every branch that depends on the algorithm reads this table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AlgorithmName = Literal["dpo", "grpo", "ppo", "reward_model", "sft"]


@dataclass(frozen=True)
class Needs:
    """What a run of one algorithm needs, and how it counts its steps."""

    rollouts: bool = False
    """Engines that sample responses to prompts, and a policy loss over them."""
    rewards: bool = False
    """Reward functions or reward models that score the responses."""
    critic: bool = False
    """A value model (section `critic`)."""
    preferences: bool = False
    """Data rows that were judged: pairs of a better and a worse answer, or answers with a label or a number."""
    reward_head: bool = False
    """The model that trains is a reward model: a score of a sequence in place of next tokens."""
    validates: Literal["steps", "epochs"] = "steps"
    """When a negative trainer.test_freq validates: only after the last step, or at the end of every epoch too."""
    samples_to_validate: bool = False
    """data.val_prompt_files are sampled by an engine and scored at each validation, though training has no rollouts."""
    stops_at_loss: bool = False
    """trainer.target_loss ends the run."""
    prints_every: int = 1
    """Steps from one printed line to the next; metrics.jsonl has all of them."""


ALGORITHMS: dict[AlgorithmName, Needs] = {
    "dpo": Needs(preferences=True, validates="epochs", prints_every=10),
    "grpo": Needs(rollouts=True, rewards=True),
    "ppo": Needs(rollouts=True, rewards=True, critic=True),
    "reward_model": Needs(preferences=True, reward_head=True, validates="epochs", prints_every=10),
    "sft": Needs(validates="epochs", samples_to_validate=True, stops_at_loss=True, prints_every=10),
}
"""algorithm.name -> what it needs; megatron_rl.trainers.TRAINERS has the same names."""
