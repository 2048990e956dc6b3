"""Hugging Face weights into a Megatron model and out again, block by block (the table is models/rules.py).

A model is a grid of chunks: pipeline stage x virtual chunk. Each chunk holds some layers, split over
tensor-parallel ranks; experts are split over expert-parallel ranks instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch

from megatron_rl.errors import CheckpointError
from megatron_rl.mcore.build import Model
from megatron_rl.models import FAMILIES
from megatron_rl.models.lora import adapter_params, adapter_shapes
from megatron_rl.models.rules import LocalParam, hf_shapes, megatron_params
from megatron_rl.models.shape import ModelShape
from megatron_rl.observe.beat import beat
from megatron_rl.parallel.collectives import gathered
from megatron_rl.parallel.groups import dp_cp_group, expert_dp_group, expert_group, pp_group, tp_group
from megatron_rl.parallel.topology import is_last_chunk
from megatron_rl.reshard.views import flat_rows
from megatron_rl.weights.heads import value_head_params, value_head_shapes
from megatron_rl.weights.safetensors import WeightSource, largest, refuse_nonfinite

Part = Literal["weights", "adapters"]
"""What of a model: its own weights, or the adapters beside them."""


def trained_part(model: Model) -> Part:
    """What of it trains."""
    return "weights" if model.adapters is None else "adapters"


def chunk_params(
    model: Model, stage: int, chunk: int, tp_rank: int, expert_rank: int, part: Part = "weights"
) -> list[LocalParam]:
    """The parameters of one model chunk on one rank: tp_rank in tp_group, expert_rank in expert_group."""
    parallel, shape = model.parallel, model.shape
    if part == "adapters":
        layout = {"tp": parallel.tp, "tp_rank": tp_rank}
        family, layers = FAMILIES[shape.architecture], model.layers(stage, chunk)
        return (
            []
            if model.adapters is None
            else list(adapter_params(shape, family, model.adapters, layers=layers, **layout))
        )
    ep_rank, etp_rank = divmod(expert_rank, parallel.expert_tp)
    post_process = is_last_chunk(stage, chunk, pp=parallel.pp, vpp=parallel.vpp)
    params = list(
        megatron_params(
            shape,
            FAMILIES[shape.architecture],
            tp=parallel.tp,
            tp_rank=tp_rank,
            layers=model.layers(stage, chunk),
            pre_process=stage == 0 and chunk == 0,
            post_process=post_process,
            ep=parallel.ep,
            ep_rank=ep_rank,
            etp=parallel.expert_tp,
            etp_rank=etp_rank,
        )
    )
    if not model.lm_head:
        output = FAMILIES[shape.architecture].output.megatron
        params = [param for param in params if param.name != output]
    return params + (value_head_params(shape, model.head_biased) if model.value_head and post_process else [])


def lm_head_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """HF name -> shape of the output matrix; empty if it is the embedding."""
    name = FAMILIES[shape.architecture].output.hf[0]
    return {} if shape.tie_word_embeddings else {name: (shape.vocab_size, shape.hidden_size)}


def tensor_shapes(model: Model, part: Part = "weights") -> dict[str, tuple[int, ...]]:
    """HF name -> shape of every tensor of the model with the heads that it has, in export order."""
    if part == "adapters":
        assert model.adapters is not None
        return adapter_shapes(model.shape, FAMILIES[model.shape.architecture], model.adapters)
    shapes = hf_shapes(model.shape, FAMILIES[model.shape.architecture])
    if not model.lm_head:
        shapes = {name: size for name, size in shapes.items() if name not in lm_head_shapes(model.shape)}
    return shapes | (value_head_shapes(model.shape, model.head_biased) if model.value_head else {})


def shards_of(model: Model, stage: int, chunk: int, part: Part = "weights") -> Iterator[tuple[LocalParam, ...]]:
    """Each parameter of one model chunk as the ranks that share it hold it, in the order of their group."""
    by_tp = [chunk_params(model, stage, chunk, rank, 0, part) for rank in range(model.parallel.tp)]
    experts = model.parallel.ep * model.parallel.expert_tp if model.shape.num_experts else 1
    by_expert = [chunk_params(model, stage, chunk, 0, rank, part) for rank in range(experts)]
    for of_tp, of_expert in zip(zip(*by_tp, strict=True), zip(*by_expert, strict=True), strict=True):
        yield of_expert if of_expert[0].expert else of_tp


def own_params(model: Model, chunk: int, part: Part) -> list[LocalParam]:
    """The parameters of one of this rank's chunks."""
    return chunk_params(model, pp_group().rank(), chunk, tp_group().rank(), expert_group().rank(), part)


def checked_parameters(model: Model, chunk: int) -> dict[str, torch.nn.Parameter]:
    """The chunk's parameters by name, compared with the table. Raises CheckpointError naming each difference."""
    held = dict(model.bare_chunks[chunk].named_parameters())
    parts: tuple[Part, ...] = ("weights", "adapters")
    expected = {param.name: param.shape for part in parts for param in own_params(model, chunk, part)}
    faults = [f"{name} is not in the table" for name in held if name not in expected]
    faults += [f"{name} is not in the model" for name in expected if name not in held]
    faults += [
        f"{name} is {list(held[name].shape)} in the model, {list(expected[name])} in the table"
        for name in expected.keys() & held.keys()
        if tuple(held[name].shape) != expected[name]
    ]
    if faults:
        raise CheckpointError(
            f"{model.shape.architecture}: model and weight table differ: " + "; ".join(sorted(faults))
        )
    return held


@torch.no_grad()
def load_hf(model: Model, open_source: Callable[[], WeightSource], part: Part = "weights") -> None:
    """Fill this rank's shard with the blocks that it holds. Padding rows become 0. A collective over all ranks.

    Weights are read once: of the ranks that hold the same parameter, the first one reads it, into its place, and sends
    it to the others. open_source is called on ranks that read something, and nowhere else.

    Raises CheckpointError, on all ranks, if a source cannot be opened or read or does not hold exactly the model's
    tensors, and if tensors hold numbers that are not finite in the model's precision, naming them.
    """
    copies = {False: dp_cp_group(), True: expert_dp_group()}
    reads = any(group.rank() == 0 for group in copies.values())
    reader = _Reader(open_source, tensor_shapes(model, part)) if reads else None
    _refuse_faults(reader)
    for chunk in range(model.parallel.vpp):
        held = checked_parameters(model, chunk)
        for param in own_params(model, chunk, part):
            beat(f"load of {param.name}")
            target, group = held[param.name].detach(), copies[param.expert]
            if reader is not None and group.rank() == 0:
                reader.fill(param, target)
            if group.size() > 1:
                # All that hold the parameter come, in the order of the table: one that could not read it as well.
                torch.distributed.broadcast(target, group_src=0, group=group)
    _refuse_faults(reader)
    _refuse_bad(reader)


class _Reader:
    """Reads parameters from a source. A fault is kept until all ranks can be told; nothing is read after it.

    sizes: HF tensor -> the largest absolute values of the parts that were read.
    """

    def __init__(self, open_source: Callable[[], WeightSource], expected: Mapping[str, tuple[int, ...]]) -> None:
        self.fault = ""
        self.sizes: dict[str, list[torch.Tensor]] = {}
        try:
            self.source = open_source()
            self.source.check(expected)
        except (CheckpointError, OSError) as error:
            self.fault = str(error)

    def fill(self, param: LocalParam, target: torch.Tensor) -> None:
        """Write all of a parameter, unless there is a fault."""
        if self.fault:
            return
        at, target = 0, flat_rows(target)
        try:
            for block in param.blocks:
                rows = target[at : at + block.num_rows].copy_(self.source.read(block))
                self.sizes.setdefault(block.hf_name, []).append(largest(rows))
                at += block.num_rows
        except (CheckpointError, OSError) as error:
            self.fault = str(error)
        target[at:].zero_()


def _refuse_faults(reader: _Reader | None) -> None:
    """Raise CheckpointError on all ranks if one could not read."""
    faults = gathered([reader.fault] if reader is not None and reader.fault else [])
    texts = sorted({fault for of_rank in faults for fault in of_rank})
    if texts:
        raise CheckpointError(" | ".join(texts))


def _refuse_bad(reader: _Reader | None) -> None:
    """Raise CheckpointError on all ranks that names what one has read and is not finite. The device is read once."""
    bad: dict[str, str] = {}
    if reader is not None and reader.sizes:
        names = [name for name, parts in reader.sizes.items() for _ in parts]
        finite = torch.stack([size for parts in reader.sizes.values() for size in parts]).isfinite().tolist()
        bad = {name: reader.source.place(name) for name, well in zip(names, finite, strict=True) if not well}
    # Ranks with good weights come too, so that all of them refuse the folder.
    pairs = {pair for of_rank in gathered(list(bad.items())) for pair in of_rank}
    refuse_nonfinite(dict(sorted(pairs)))


@torch.no_grad()
def export_hf(
    model: Model,
    dtype: torch.dtype | None = None,
    of: Callable[[torch.nn.Parameter], torch.Tensor] = torch.Tensor.detach,
    part: Part = "weights",
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every HF tensor whole, chunk after chunk, on every rank: a collective over tensor-, expert-
    and pipeline-parallel ranks.

    dtype: of the exported tensors but constant ones (models/rules.py); their own when not given. of: what of each
    parameter is exported, its value by default (its main_grad, say, gives gradients in HF coordinates; with pipeline
    stages, say their dtype too). Each tensor is new memory, never reused.
    """
    model.complete_params()
    shapes = tensor_shapes(model, part)
    stages, parallel = pp_group(), model.parallel
    done: set[str] = set()
    for chunk in range(parallel.vpp):
        for stage in range(parallel.pp):
            held = None
            if stages.rank() == stage:
                held = checked_parameters(model, chunk)
            for shards in shards_of(model, stage, chunk, part):
                # The last stage of a tied model holds a copy of the embedding, which was exported with the first stage.
                if done.issuperset(_names(shards)):
                    continue
                done.update(_names(shards))
                whole = None if held is None else of(held[shards[0].name])
                wanted = torch.float32 if shards[0].constant else dtype
                empty = torch.empty(0, dtype=wanted or model.config.params_dtype, device=model.device)
                # An expert of each rank at a time: a layer's experts together may be larger than the rest of the model.
                for number, pieces in enumerate(zip(*(shard.experts() for shard in shards), strict=True)):
                    names = _names(pieces)
                    beat(f"export of {next(iter(names))}")
                    tensors: dict[str, torch.Tensor] = {}
                    if whole is not None:
                        local = whole[number : number + 1] if pieces[0].expert else whole
                        tensors = _gathered(pieces, local if wanted is None else local.to(wanted), shapes)
                    yield from _from_stage(stage, list(names), tensors, shapes, empty)


def constant_values(model: Model) -> dict[str, torch.Tensor]:
    """HF name -> values on the CPU of the tensors that no update changes. A collective over all ranks."""
    mine: list[tuple[str, torch.Tensor]] = []
    for chunk in range(model.parallel.vpp):
        params = chunk_params(model, pp_group().rank(), chunk, tp_group().rank(), expert_group().rank())
        held = dict(model.bare_chunks[chunk].named_parameters())
        # Such a tensor is whole on every rank that has its layer.
        mine += [(one.blocks[0].hf_name, held[one.name].detach().cpu()) for one in params if one.constant]
    # Ranks of stages without such tensors come too.
    return {name: values for of_rank in gathered(mine) for name, values in of_rank}


def _names(shards: tuple[LocalParam, ...]) -> dict[str, None]:
    """The HF tensors that a parameter's shards are made of, in order."""
    return dict.fromkeys(block.hf_name for shard in shards for block in shard.blocks)


def _gathered(
    shards: tuple[LocalParam, ...], local: torch.Tensor, shapes: dict[str, tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """The HF tensors of one Megatron parameter, or of an expert of each rank, from all ranks that share it.

    local: this rank's shard.
    """
    group = expert_group() if shards[0].expert else tp_group()
    split = any(shard.blocks != shards[0].blocks for shard in shards)
    parts = [local] if not split else [torch.empty_like(local) for _ in shards]
    if split:
        # Every rank of the stage comes: `split` follows from the table of all shards, not from this rank's own.
        torch.distributed.all_gather(parts, local.contiguous(), group=group)
    whole = {name: local.new_empty(shapes[name]) for name in _names(shards)}
    for shard, part in zip(shards[: len(parts)], parts, strict=True):
        lay(shard, part, whole)
    return whole


def lay(shard: LocalParam, values: torch.Tensor, whole: Mapping[str, torch.Tensor]) -> None:
    """A shard's numbers into the HF tensors that it is a part of; those of tensors not in `whole` are left out."""
    at, rows = 0, flat_rows(values)
    for block in shard.blocks:
        if block.hf_name in whole:
            target = whole[block.hf_name][slice(*block.rows)]
            target = target if block.cols is None else target[:, slice(*block.cols)]
            target.copy_(rows[at : at + block.num_rows])
        at += block.num_rows


def _from_stage(
    stage: int,
    names: list[str],
    tensors: dict[str, torch.Tensor],
    shapes: dict[str, tuple[int, ...]],
    like: torch.Tensor,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The stage's tensors on the ranks of all stages."""
    group = pp_group()
    for name in names:
        tensor = tensors.get(name)
        if group.size() > 1:
            if tensor is None:
                tensor = like.new_empty(shapes[name])
            # Every stage comes, in the order of `names`, whether it has the tensor or receives it.
            torch.distributed.broadcast(tensor, group_src=stage, group=group)
        assert tensor is not None
        yield name, tensor
