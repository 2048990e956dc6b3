"""What a model family is: its shape, its parameters and their layouts. No torch."""

from __future__ import annotations

from megatron_rl.models.families import FAMILIES

__all__ = ["FAMILIES"]
