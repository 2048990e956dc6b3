"""Which parameters of an engine can be the trainer's own memory. Pure: tables in, names and reasons out.

A parameter can be shared where one of this process's trained parameters is all of it: the same blocks of the same HF
tensors in the same order, in the same shape and dtype. Sharing needs no sync: an optimizer step is seen at once.

Example, train tp 2 and engine tp 2: gate_up_proj, down_proj, o_proj, norms and the embedding are shared. qkv_proj is
copied, because Megatron keeps the queries, key and value of a KV group together, unless a rank has one such group: then
nothing at all is left to move.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.engines import Engine
from megatron_rl.models.layouts import Block
from megatron_rl.models.rules import LocalParam


@dataclass(frozen=True)
class Sharing:
    """shared: engine parameter -> trained parameter whose memory it takes. copied: the other ones -> why not."""

    shared: Mapping[str, str]
    copied: Mapping[str, str]


def sharing_off(
    *, wanted: bool, engine: Engine, dtypes: tuple[str, str], params_leave: bool, replaces_storage: bool = False
) -> str | None:
    """Why nothing at all is shared; None where parameters may be.

    wanted: rollout.share_weights. engine: its record. dtypes: the trainer's and the engine's. params_leave: the
    trainer's weights leave the device while the engine generates. replaces_storage: the trainer does not keep its
    weights in the memory that they have at the start.
    """
    if not wanted:
        return "rollout.share_weights is off"
    if not engine.shares_weights:
        return f"the engine {engine.name} keeps weights of its own"
    if dtypes[0] != dtypes[1]:
        return f"the trainer's weights are {dtypes[0]}, the engine's {dtypes[1]}"
    if params_leave:
        return "the trainer's weights leave the device while the engine generates (actor.param_offload)"
    if replaces_storage:
        return "the trainer's weights do not stay in one place"
    return None


def find_sharing(
    engine: Sequence[LocalParam],
    trainer: Sequence[LocalParam],
    off: str | None = None,
    merged: Collection[str] = (),
    half: bool = False,
) -> Sharing:
    """What one process's engine can share with its trainer. off: a reason to share nothing (sharing_off). merged: HF
    tensors that the engine has otherwise than the trainer, with adapters in them. half: the trainer's are bfloat16.

    Of trained parameters that hold the same (a tied output matrix beside the embedding), the first is taken. A trained
    parameter is the memory of at most one engine parameter.
    """
    if off is not None:
        return Sharing({}, {param.name: off for param in engine})
    by_content: dict[object, str] = {}
    holders: dict[str, list[LocalParam]] = {}
    for param in trainer:
        by_content.setdefault(_content(param), param.name)
        for block in _filled(param):
            holders.setdefault(block.hf_name, []).append(param)
    shared: dict[str, str] = {}
    copied: dict[str, str] = {}
    for param in engine:
        if any(block.hf_name in merged for block in param.blocks):
            copied[param.name] = "has adapters merged in, which the trainer keeps apart"
            continue
        if param.float32 and half:
            copied[param.name] = "is float32 in the engine, whatever its precision is"
            continue
        source = by_content.pop(_content(param), None)
        if source is not None:
            shared[param.name] = source
        else:
            copied[param.name] = _why_not(param, holders)
    return Sharing(shared, copied)


def _filled(param: LocalParam) -> tuple[Block, ...]:
    """Blocks with rows: a rank past the end of a padded vocabulary has one without."""
    return tuple(block for block in param.blocks if block.num_rows)


def _content(param: LocalParam) -> object:
    return param.shape, _filled(param)


def _why_not(param: LocalParam, holders: Mapping[str, Sequence[LocalParam]]) -> str:
    """For people who read a plan: why this parameter is copied."""
    blocks = _filled(param)
    if not all(holders.get(block.hf_name) for block in blocks):
        return "some of its values are on other ranks"
    held = {id(one): one for block in blocks for one in holders[block.hf_name]}
    for one in held.values():
        if _filled(one) == blocks:
            return f"has {param.num_rows} rows with padding, the trainer's {one.name} {one.num_rows}"
    if any(_rows(_filled(one)) == _rows(blocks) for one in held.values()):
        return "has the trainer's rows in another order"
    return "is not one trained parameter of this rank"


def _rows(blocks: Sequence[Block]) -> dict[tuple[str, tuple[int, int] | None], list[tuple[int, int]]]:
    """Row intervals of each HF tensor, adjoining ones merged."""
    found: dict[tuple[str, tuple[int, int] | None], list[tuple[int, int]]] = {}
    for block in sorted(blocks, key=lambda one: (one.hf_name, one.rows)):
        rows = found.setdefault((block.hf_name, block.cols), [])
        if rows and rows[-1][1] == block.rows[0]:
            rows[-1] = (rows[-1][0], block.rows[1])
        else:
            rows.append(block.rows)
    return found
