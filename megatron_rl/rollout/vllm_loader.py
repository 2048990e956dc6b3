"""A vLLM loader that reads no checkpoint: parameters alias the trainer's tensors, or hold noise until the first sync.

Registered with vLLM as a load format of its own. Sharing happens before CUDA graphs are captured, so that graphs hold
the shared addresses; a step of the trainer's optimizer, which writes in place, is then seen by the engine at once.

Some back ends rearrange experts for their kernels after loading (vLLM's CPU build, some CUDA kernels). Such a layer's
parameters are not what a plan of plain weights describes; they are told by their values after loading, and written
through plain tensors beside them, from which `repack` makes the kernels' form again. Where such a parameter is shared,
the trainer's tensor is the plain one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from megatron_rl.errors import ReshardError
from megatron_rl.models.engine import live_name
from megatron_rl.models.shape import Latent

LOAD_FORMAT = "megatron_rl"
_SAMPLES = 512
_LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")


@dataclass(frozen=True)
class _Mark:
    """A parameter as it was before vLLM's work after loading: shape, dtype and some of its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    values: torch.Tensor

    @staticmethod
    def of(tensor: torch.Tensor) -> _Mark:
        flat = tensor.detach().reshape(-1)
        # An odd step: kernels' forms move blocks of powers of two, whose first numbers may stay where they are.
        values = flat[:: max(1, flat.numel() // _SAMPLES) | 1].clone()
        return _Mark(tensor.shape, tensor.dtype, tensor.device, values)

    def fits(self, tensor: torch.Tensor) -> bool:
        return tensor.shape == self.shape and torch.equal(_Mark.of(tensor).values, self.values)


@dataclass
class LoadedModel:
    """What the loader leaves for the engine."""

    model: nn.Module | None = None
    packed: dict[str, dict[str, _Mark]] = field(default_factory=dict)
    """Modules that the back end rearranged -> their parameters as they were before."""
    plain: dict[str, torch.Tensor] = field(default_factory=dict)
    """Plain tensors of rearranged parameters, by full name; see make_plain."""
    shared: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters of this model that are the trainer's tensors, by full name."""
    derived: list[str] = field(default_factory=list)
    """Modules that have made further tensors of their parameters, such as latent attention's"""
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    """Values on the CPU of parameters that no update writes, by full name; see hold."""
    loaded_names: frozenset[str] = frozenset()
    """Parameters of the model before anything was made of them, by full name"""
    _found: list[tuple[str, dict[str, Any], str]] | None = None

    def close(self) -> None:
        """Let go of the model and of everything beside it."""
        self.model, self._found = None, None
        self.plain.clear()
        self.shared.clear()
        self.constants.clear()

    def hold(self, constants: Mapping[str, torch.Tensor]) -> None:
        """Parameters that no update writes; sleeping memory loses them, so that each update begins with them.

        Raises ReshardError naming those that the model lacks or has in another shape or precision.
        """
        assert self.model is not None
        params = dict(self.model.named_parameters())
        faults = [
            f"{name} is {'lacking' if name not in params else list(params[name].shape)}, {list(tensor.shape)} is given"
            for name, tensor in constants.items()
            if name not in params or params[name].shape != tensor.shape or params[name].dtype != tensor.dtype
        ]
        if faults:
            raise ReshardError("the engine's parameters that no update changes: " + "; ".join(faults))
        self.constants = {name: tensor.clone() for name, tensor in constants.items()}
        self._found = None
        self.write_constants()

    @torch.no_grad()
    def write_constants(self) -> None:
        """Give the parameters that no update writes their values."""
        assert self.model is not None
        params = dict(self.model.named_parameters()) if self.constants else {}
        for name, tensor in self.constants.items():
            params[name].copy_(tensor)

    def make_plain(self) -> None:
        """Plain tensors for the rearranged parameters, where there are none: their values are undefined, but for those
        that are the trainer's.
        """
        for module, marks in self.packed.items():
            for name, mark in marks.items():
                key = f"{module}.{name}"
                if key in self.shared:
                    self.plain[key] = self.shared[key]
                elif key not in self.plain:
                    self.plain[key] = torch.empty(mark.shape, dtype=mark.dtype, device=mark.device)

    def plain_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the rearranged parameters, as they were."""
        return {
            f"{place}.{name}": tuple(mark.shape) for place, marks in self.packed.items() for name, mark in marks.items()
        }

    def untouched(self) -> dict[str, torch.Tensor]:
        """The parameters that are as the loader left them."""
        # vLLM's kinds of parameters would answer each access in Python.
        with torch._C.DisableTorchFunctionSubclass():
            return {name: held[local].data for name, held, local in self._places()}

    def _places(self) -> list[tuple[str, dict[str, Any], str]]:
        """(full name, its module's parameters, name in these); a module stays, while its parameters may be replaced."""
        if self._found is None:
            assert self.model is not None
            rearranged = self.plain_shapes()
            held = {name: vars(module)["_parameters"] for name, module in self.model.named_modules()}
            names = [name for name, _ in self.model.named_parameters() if _plain_name(name) in self.loaded_names]
            odd = rearranged.keys() | self.constants
            self._found = [
                (_plain_name(name), held[name.rpartition(".")[0]], name.rpartition(".")[2])
                for name in names
                if _plain_name(name) not in odd
            ]
        return self._found

    @torch.no_grad()
    def repack(self, vllm_config: Any) -> None:
        """Make the kernels' form of every rearranged parameter from its plain tensor, in the memory it has."""
        if not self.packed and not self.derived:
            return
        assert self.model is not None
        # A layer comes after what is wrapped around it, and so is the one of the two that stays.
        modules: dict[str, Any] = {_plain_name(name): module for name, module in self.model.named_modules()}
        with set_current_vllm_config(vllm_config):
            for place, marks in self.packed.items():
                _repack(modules[place], {name: self.plain[f"{place}.{name}"] for name in marks})
            for place in self.derived:
                # In place, from parameters of other modules: CUDA graphs hold the addresses.
                modules[place].process_weights_after_loading(vllm_config.model_config.dtype)


def _plain_name(name: str) -> str:
    """A name as it was before vLLM wrapped layers for adapters."""
    return name.replace(".base_layer", "")


def _repack(module: nn.Module, plain: Mapping[str, torch.Tensor]) -> None:
    held = {name: getattr(module, name) for name in plain}
    for name, tensor in plain.items():
        # A copy, because some back ends rearrange in place.
        param = nn.Parameter(tensor.clone(), requires_grad=False)
        for key, value in vars(held[name]).items():
            setattr(param, key, value)
        module.register_parameter(name, param)
    # vLLM marks a module that it has worked on, and does nothing the second time.
    vars(module).pop("_already_called_process_weights_after_loading", None)
    method: Any = module.quant_method
    method.process_weights_after_loading(module)
    for name, param in held.items():
        # CUDA graphs hold the address of the first parameter.
        param.data.copy_(getattr(module, name))
        module.register_parameter(name, param)


_shared: Mapping[str, torch.Tensor] = {}
_amplitude = 1.0
_result = LoadedModel()


@contextlib.contextmanager
def loading(shared: Mapping[str, torch.Tensor], amplitude: float) -> Iterator[LoadedModel]:
    """While an engine starts: its parameters named in `shared` become views of these tensors, and cosines and sines of
    YaRN are as large as the trainer's (Rope.amplitude).

    vLLM builds the loader from its own config, so that what it needs is handed over here.
    """
    global _shared, _amplitude, _result
    _shared, _amplitude, _result = shared, amplitude, LoadedModel()
    try:
        yield _result
    finally:
        _shared, _amplitude, _result = {}, 1.0, LoadedModel()


def _scale_yarn(module: YaRNScalingRotaryEmbedding, amplitude: float) -> None:
    """vLLM 0.26 leaves attention_factor, mscale and mscale_all_dim of YaRN out; later versions do not."""
    if module.mscale != amplitude:
        module.mscale = amplitude
        # In place: CUDA graphs, captured later, hold the address.
        module.cos_sin_cache.copy_(module._compute_cos_sin_cache())


@register_model_loader(LOAD_FORMAT)
class TrainerLoader(DummyModelLoader):
    """Fills with noise; afterwards notes what was rearranged, and shares."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        super().load_weights(model, model_config)
        # A parameter that several modules have, such as a router's bias, counts where it comes first.
        first = {name for name, _ in model.named_parameters()}
        self._marks = {
            place: {
                name: _Mark.of(param)
                for name, param in module.named_parameters(recurse=False)
                if f"{place}.{name}".lstrip(".") in first
            }
            for place, module in model.named_modules()
        }

    def load_model(self, *args: Any, **kwargs: Any) -> nn.Module:
        model = super().load_model(*args, **kwargs)
        _result.model = model
        for place, module in model.named_modules():
            marks = self._marks[place]
            if place.endswith(_LATENT_NORMS):
                # vLLM gives them the model's other norms' epsilon.
                vars(module)["variance_epsilon"] = Latent.norm_eps
            if isinstance(module, YaRNScalingRotaryEmbedding):
                _scale_yarn(module, _amplitude)
            live = dict(module.named_parameters(recurse=False))
            if any(name not in live or not mark.fits(live[name]) for name, mark in marks.items()):
                _result.packed[place] = marks
            elif isinstance(module, MLAAttention):
                _result.derived.append(place)
        _result.loaded_names = frozenset(
            f"{place}.{name}".lstrip(".") for place, marks in self._marks.items() for name in marks
        )
        _refuse_copied_sinks(model)
        _result.shared = share(model, _shared, _result.packed)
        return model


def _refuse_copied_sinks(model: nn.Module) -> None:
    """Raise ReshardError if attention reads its sinks from a copy, which no update would reach: some kernels take them
    in float32 alone.
    """
    own = {param.data_ptr() for param in model.parameters()}
    for place, module in model.named_modules():
        sinks = vars(module.impl).get("sinks") if isinstance(module, Attention) else None
        if not isinstance(sinks, torch.Tensor):
            continue
        # The CPU build copies those of float16 in its first pass.
        if sinks.data_ptr() not in own or (sinks.device.type == "cpu" and sinks.dtype == torch.float16):
            raise ReshardError(
                f"vLLM's kernel reads the sinks of {place} from a copy, which no update changes -- choose another "
                "rollout.engine_kwargs.attention_backend (FLASH_ATTN or TRITON_ATTN), or rollout.dtype=bfloat16"
            )


def share(
    model: nn.Module, shared: Mapping[str, torch.Tensor], packed: Mapping[str, Mapping[str, _Mark]]
) -> dict[str, torch.Tensor]:
    """Make parameters views of the given tensors; their own memory is freed. Those of layers whose kernels need another
    form (packed) keep theirs. Returns the tensors by the model's own names.

    Raises ReshardError, naming every parameter that the model lacks, or whose tensor has another shape, dtype, device
    or memory order.
    """
    params = dict(model.named_parameters())
    named = {live_name(name, params): tensor.detach() for name, tensor in shared.items()}
    faults: list[str] = []
    for name, tensor in named.items():
        place, _, local = name.rpartition(".")
        # As it was before the kernels' form was made.
        param = packed.get(place, {}).get(local, params.get(name))
        if param is None:
            faults.append(f"{name}: the engine has no such parameter")
            continue
        here = (tuple(param.shape), param.dtype, param.device)
        there = (tuple(tensor.shape), tensor.dtype, tensor.device)
        if here != there:
            faults.append(f"{name}: the engine's is {here}, the trainer's {there}")
        elif not tensor.is_contiguous() or (isinstance(param, torch.Tensor) and not param.is_contiguous()):
            faults.append(f"{name}: its memory is not contiguous")
    if faults:
        raise ReshardError("parameters that cannot be shared with the trainer: " + "; ".join(faults))
    for name, tensor in named.items():
        if name.rpartition(".")[0] not in packed:
            params[name].data = tensor
    return named
