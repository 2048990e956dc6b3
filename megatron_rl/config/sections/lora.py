"""Section `model.lora`: low-rank adapters (Hu et al. 2021) that are trained in place of the weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from megatron_rl.config.sections.base import OneOrMany, UserPath, section

ALL_LINEAR = "all-linear"


@section
class LoraConfig:
    rank: NonNegativeInt = 0
    """Rank of the adapters; 0: none, all weights are trained. The weights in model.path stay as they are otherwise."""
    alpha: PositiveFloat = 16.0
    """Adapters count alpha / rank times."""
    use_rslora: bool = False
    """Adapters count alpha / sqrt(rank) times (rsLoRA, Kalajdzievski 2023)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that is dropped in training."""
    target_modules: Annotated[list[str], OneOrMany] = Field(default_factory=lambda: [ALL_LINEAR])
    """Linear layers that get adapters, by their Hugging Face names (q_proj, o_proj, gate_proj ...); all-linear is all
    of them but lm_head, routers and experts."""
    exclude_modules: Annotated[list[str], OneOrMany] = Field(default_factory=list)
    """Of target_modules, those that get none."""
    path: UserPath | None = None
    """Folder of an adapter in PEFT form to begin from; rank, alpha and targets must be its own."""
    sync: Literal["merged", "adapter"] = "merged"
    """What engines get: the weights with adapters merged in; or adapters alone, beside weights that stay (vLLM)."""
    save: Literal["adapter", "merged"] = "adapter"
    """What trainer.save_freq and the end write: the adapter in PEFT form, or a whole model with it merged in."""
