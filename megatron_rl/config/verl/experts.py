"""verl's keys of models with experts: what routers repeat, what balances them, and how engines deal them out."""

from __future__ import annotations

from megatron_rl.config.verl.keys import ACTOR, ROLLOUT
from megatron_rl.config.verl.work import Work

_MODES = {"R2": "old", "R3": "rollout"}
_REPLAY = (ACTOR + "router_replay.mode", ACTOR + "megatron.router_replay.mode")
_OF_ENGINE = ROLLOUT + "enable_rollout_routing_replay"
_BALANCE = ACTOR + "megatron.override_transformer_config.moe_aux_loss_coeff"
_EP = ROLLOUT + "expert_parallel_size"


def experts(work: Work) -> None:
    """What a config asks for beyond verl's defaults; the tables accept these."""
    for key in _REPLAY:
        mode = work.value(key)
        if isinstance(mode, str) and mode in _MODES:
            work.place(work.latest[key], "actor.router_replay", _MODES[mode])
    if work.value(_OF_ENGINE) is True and any(work.value(key) == "R3" for key in _REPLAY):
        work.accept(_OF_ENGINE, "router_replay.mode R3 has the engine return its experts")
    if work.value(_BALANCE):
        note = "over the whole mini-batch; verl's is of each micro-batch"
        work.place(work.latest[_BALANCE], "actor.router_aux_loss_coef", work.value(_BALANCE), note=note)
    if work.value(_EP) not in (None, 1):
        work.place(work.latest[_EP], "rollout.ep", work.value(_EP))


KEYS: tuple[str, ...] = (*_REPLAY, _OF_ENGINE, _BALANCE, _EP)
"""Keys that this rule takes."""
