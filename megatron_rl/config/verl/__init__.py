"""verl's configs: their keys, what they are here, and what of them is otherwise here (docs/from-verl.md)."""

from megatron_rl.config.verl.translate import VerlNames, is_verl, known_keys, translate
from megatron_rl.config.verl.work import Mapped, Translation

__all__ = ["Mapped", "Translation", "VerlNames", "is_verl", "known_keys", "translate"]
