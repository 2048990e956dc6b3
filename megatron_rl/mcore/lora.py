"""Low-rank adapters on a Megatron model: what they add to its linear layers, and how they are put on and off.

The model is built and filled first. An adapter is then a module beside the weight, and a hook adds its output to that
of the layer, so that names, layouts and the loading of the weights stay as they are (the table is models/lora.py).

Sums over tensor-parallel ranks are of rank numbers a token, not of whole outputs: where the weight is split along its
rows, the compressed input is what all ranks have; where along its columns, it is what they add up.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_rl.errors import CheckpointError
from megatron_rl.mcore.build import Model
from megatron_rl.models import FAMILIES
from megatron_rl.models.lora import AdaptedLinear, Adapters, a_name, adapted_linears, adapter_shapes, bound_counts
from megatron_rl.parallel.collectives import gathered
from megatron_rl.parallel.groups import cp_group, dp_rank, pp_group, tp_group

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class Dropout:
    """How inputs of adapters are dropped: each data-parallel rank its own, and alike on tensor-parallel ranks that have
    the same input.
    """

    share: float
    seed: int

    def __call__(self, inputs: torch.Tensor, *, alike: bool) -> torch.Tensor:
        """Some of the inputs become 0, and the others larger. alike: tensor-parallel ranks have the same inputs."""
        place = f"{self.seed}/{dp_rank()}/{cp_group().rank()}/{pp_group().rank()}"
        name = "adapters" if alike else "parts of adapters"
        tracker = get_cuda_rng_tracker()
        assert tracker is not None
        if name not in tracker.get_states():
            place += "" if alike else f"/{tp_group().rank()}"
            seed = zlib.crc32(f"{name}/{place}".encode())
            # What the first layer computes again finds the states of before its first use, and begins from the seed.
            tracker.seeds_.discard(seed)
            tracker.add(name, seed)
        # States of the tracker are kept in checkpoints and set back where activations are computed again.
        with tracker.fork(name):
            return torch.nn.functional.dropout(inputs, self.share, training=True)


class Pair(torch.nn.Module):
    """A and B of one Hugging Face layer, this rank's parts."""

    def __init__(self, a: tuple[int, int], b: tuple[int, int], like: torch.Tensor) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(like.new_zeros(a))
        self.b = torch.nn.Parameter(like.new_zeros(b))

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both. Called, not read: Megatron waits for gathered parameters where their module runs."""
        return self.a, self.b


class LoraLinear(torch.nn.Module):
    """The adapters of one of Megatron's linear layers."""

    def __init__(
        self, linear: AdaptedLinear, scale: float, dropout: Dropout, like: torch.Tensor, sequence_parallel: bool
    ) -> None:
        """like: the layer's weight."""
        super().__init__()
        self.on = True
        self._linear, self._scale, self._dropout = linear, scale, dropout
        self._sequence_parallel = sequence_parallel
        for name, (a, b) in linear.names.items():
            pair = Pair(a, b, like)
            self.add_module(name.rpartition(".")[2], pair)
            set_tensor_model_parallel_attributes(pair.a, linear.split == "cols", 1, 1)
            set_tensor_model_parallel_attributes(pair.b, linear.split == "rows", 0, 1)
            if sequence_parallel:
                # Each rank has some of the tokens where these compute: Megatron adds their gradients up over the ranks.
                of_shards = {"rows": [pair.a], "cols": [pair.b], "none": [pair.a, pair.b]}
                for param in of_shards[linear.split]:
                    param.sequence_parallel = True  # type: ignore[attr-defined]

    @property
    def layers(self) -> list[str]:
        """Hugging Face's names of the layers that have an adapter here."""
        return list(self._linear.names)

    def _pairs(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return {name: self.get_submodule(name.rpartition(".")[2])() for name in self._linear.names}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[s, b, in here] -> [s, b, out here], what the adapters add to the layer's output."""
        pairs = self._pairs()
        if self.training and self._dropout.share:
            split = self._linear.split == "cols" or self._sequence_parallel
            inputs = self._dropout(inputs, alike=not split)
        compressed = torch.matmul(inputs, torch.cat([a for a, _ in pairs.values()]).t()) * self._scale
        compressed = self._shared(compressed)
        ranks = [a.shape[0] for a, _ in pairs.values()]
        outputs = {
            name: torch.matmul(part, b.t())
            for (name, (_, b)), part in zip(pairs.items(), compressed.split(ranks, dim=-1), strict=True)
        }
        if self._linear.is_plain:
            return next(iter(outputs.values()))
        rows = next(iter(outputs.values()))
        return torch.cat(
            [
                rows.new_zeros((*rows.shape[:-1], piece.end - piece.first))
                if piece.name is None
                else outputs[piece.name][..., piece.first : piece.end]
                for piece in self._linear.pieces
            ],
            dim=-1,
        )

    def _shared(self, compressed: torch.Tensor) -> torch.Tensor:
        """The compressed input as this rank's B needs it: of all tokens and of all columns that it is about."""
        if self._linear.split == "rows":
            if self._sequence_parallel:
                return gather_from_sequence_parallel_region(compressed)
            return copy_to_tensor_model_parallel_region(compressed)
        if self._linear.split == "cols":
            if self._sequence_parallel:
                return reduce_scatter_to_sequence_parallel_region(compressed)
            return reduce_from_tensor_model_parallel_region(compressed)
        return compressed

    @torch.no_grad()
    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """The layer's weight with the adapters in it, new memory of its dtype."""
        pairs, whole = self._pairs(), weight.detach().to(torch.float32, copy=True)
        at = 0
        for piece in self._linear.pieces:
            rows = piece.end - piece.first
            if piece.name is not None:
                a, b = pairs[piece.name]
                whole[at : at + rows].addmm_(b[piece.first : piece.end].float(), a.float(), alpha=self._scale)
            at += rows
        return whole.to(weight.dtype)


def attach(model: Model, adapters: Adapters, seed: int) -> Model:
    """The model with adapters, which are all that trains from now on; they are 0 until convert.load_hf fills them.
    seed: of dropout. A collective over all ranks.

    Raises CheckpointError on all ranks if what got an adapter is not what the table says.
    """
    assert not model.value_head, "a value head beside adapters is not offered"
    dropout = Dropout(adapters.dropout, seed)
    for number, chunk in enumerate(model.bare_chunks):
        for param in chunk.parameters():
            param.requires_grad_(False)
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(_begin_gradients)
        for linear in _linears(model, adapters, pp_group().rank(), number):
            layer = chunk.get_submodule(linear.module)
            lora = LoraLinear(
                linear, adapters.scale, dropout, layer.get_parameter("weight"), model.parallel.sequence_parallel
            )
            layer.add_module("lora", lora)
            layer.register_forward_hook(_add)
    _check_bound(model, adapters)
    return replace(model, adapters=adapters)


def _linears(model: Model, adapters: Adapters, stage: int, chunk: int) -> Iterator[AdaptedLinear]:
    family = FAMILIES[model.shape.architecture]
    split = {"tp": model.parallel.tp, "tp_rank": tp_group().rank()}
    yield from adapted_linears(model.shape, family, adapters, layers=model.layers(stage, chunk), **split)


def _check_bound(model: Model, adapters: Adapters) -> None:
    """Raise CheckpointError unless each layer of the table has its adapter on some rank, and no other has one."""
    expected = bound_counts(adapter_shapes(model.shape, FAMILIES[model.shape.architecture], adapters))
    everywhere = {name for of_rank in gathered(bound_layers(model)) for name in of_rank}
    found = bound_counts([a_name(name) for name in everywhere])
    if found != expected or not found:
        raise CheckpointError(f"adapters are bound to {found}, and the model's table has {expected}")


def _begin_gradients(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    # Nothing before the first adapter trains; recomputed layers pass gradients on only if their input has one.
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _add(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: Output) -> Output:
    lora = layer.get_submodule("lora")
    assert isinstance(lora, LoraLinear)
    if not lora.on:
        return output
    # Megatron's own linear layers give their bias beside the output.
    if isinstance(output, torch.Tensor):
        return output + lora(inputs[0])
    return output[0] + lora(inputs[0]), output[1]


def _modules(model: Model) -> Iterator[tuple[torch.nn.Parameter, LoraLinear]]:
    """(weight, its adapters)"""
    for chunk in model.bare_chunks:
        for module in chunk.modules():
            lora = module._modules.get("lora")
            if isinstance(lora, LoraLinear):
                yield module.get_parameter("weight"), lora


def bound_layers(model: Model) -> list[str]:
    """Hugging Face's names of the layers that have an adapter on this rank."""
    return [name for _, lora in _modules(model) for name in lora.layers]


@contextlib.contextmanager
def without_adapters(model: Model) -> Iterator[None]:
    """The model as it is without them: the reference."""
    modules = [lora for _, lora in _modules(model)]
    for lora in modules:
        lora.on = False
    try:
        yield
    finally:
        for lora in modules:
            lora.on = True


def merged_values(model: Model) -> Callable[[torch.nn.Parameter], torch.Tensor]:
    """What convert.export_hf exports of each parameter, for a model with its adapters merged in."""
    adapters: Mapping[torch.nn.Parameter, LoraLinear] = dict(_modules(model))

    def value(param: torch.nn.Parameter) -> torch.Tensor:
        lora = adapters.get(param)
        return param.detach() if lora is None else lora.merged(param)

    return value
