"""What every rollout engine does. Token in, token out: an engine sees no text."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from megatron_rl.engines import ENGINES, PATH_FORM, Engine, engine_of
from megatron_rl.errors import Fault, RolloutError
from megatron_rl.messages import first_of
from megatron_rl.models.lora import Adapters
from megatron_rl.types import Samples


@dataclass(frozen=True)
class Sampling:
    """How to sample; the same for all requests of one call."""

    n: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    """Longest response; generation stops there with finish_reason "length"."""
    stop_token_ids: tuple[int, ...]
    """Ids that end a response; the id is kept as its last token."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, looked for in all of its text, special tokens included; the tokens that hold
    it are kept."""


@dataclass(frozen=True)
class Request:
    """One prompt. seed: of its first sample (sample i has seed + i); None leaves sampling to the engine's stream."""

    token_ids: tuple[int, ...]
    seed: int | None = None


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is built from; plain values, so that it travels to any process."""

    name: str
    model_path: str
    tokenizer_path: str
    vocab_size: int
    max_model_len: int
    dtype: str
    device: str
    gpu_memory_utilization: float
    kv_cache_gb: float | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    enforce_eager: bool
    free_cache_engine: bool
    seed: int
    needs_text: bool
    """Whether stop texts are used, which need the tokenizer inside the engine."""
    engine_kwargs: dict[str, object] = field(default_factory=dict)
    adapters: Adapters | None = None
    """Adapters (LoRA) that the engine holds beside its weights."""
    deals_experts: bool = False
    """Each of its ranks holds whole experts."""
    returns_experts: bool = False
    """Samples say which experts their tokens went to (Samples.routed)."""
    ranks: tuple[int, ...] = ()
    """Ranks of the default process group that share the engine, in tensor-parallel order; all of them build it, and get
    the same calls. Empty: this rank alone."""
    decode: Literal["auto", "scheduler", "batch"] = "auto"
    """See rollout.decode."""


@dataclass(frozen=True)
class EnginePart:
    """Which part of every parameter this rank of an engine holds. ep: ranks that whole experts are dealt to."""

    tp: int = 1
    tp_rank: int = 0
    ep: int = 1
    ep_rank: int = 0


class RolloutEngine(Protocol):
    """An engine is built without weights; an update comes first, and again after each training step.

    An update is either `update_weights` with whole tensors in Hugging Face names, or `begin_update`, writes into
    `parameters()`, `end_update`. Every parameter that is not `shared` with the trainer is written in each update: an
    engine's own memory may be gone after `sleep`.

    Memory: between `sleep` and `wake` the engine holds no KV cache, and its weights may be gone; an update may be made
    asleep (the engine wakes what it needs) and `generate` only awake.
    """

    @property
    def part(self) -> EnginePart | None:
        """This rank's part; None if the engine stores unsharded HF tensors (only full-tensor updates work)."""
        ...

    @property
    def shared(self) -> frozenset[str]:
        """Parameters whose memory is the trainer's."""
        ...

    def parameters(self) -> dict[str, torch.Tensor]:
        """The engine's own name -> tensor of this rank, plain (as checkpoints and a plan have it). Written between
        begin_update and end_update; elsewhere tensors that the engine's kernels rearrange may be missing.
        """
        ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all parameters, at any time."""
        ...

    def hold(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep tensors that no update changes (Rule.constant), float32, on the CPU, whole, in Hugging Face names: the
        engine has them after each update. Called once, before the first, if the model has any.
        """
        ...

    def begin_update(self) -> None:
        """Wake the weights and make every parameter plain and writable; values are undefined unless shared."""
        ...

    def end_update(self, version: int) -> None:
        """All parameters are written: give them to the kernels, forget cached prefixes, hold `version`."""
        ...

    @property
    def weight_version(self) -> int:
        """Version of the weights it holds; -1 before the first update."""
        ...

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Samples:
        """n samples per request, in order, each stamped with weight_version.

        RolloutError where a prompt and max_tokens pass max_model_len.
        """
        ...

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take every HF tensor, whole, on every rank of the engine; clears the prefix cache, whose entries are of the
        old weights. RolloutError where parameters are shared: they would overwrite the trainer's.
        """
        ...

    def reset_prefix_cache(self) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


def check_stop_texts(engine: Engine, stop: Sequence[str]) -> None:
    """Refuse texts (Sampling.stop) that the engine would not end a response at. Raises RolloutError."""
    if stop and not engine.stop_texts:
        able = " or ".join(name for name, other in ENGINES.items() if other.stop_texts)
        cure = f"stop at a special token, or use {able}"
        raise _refused("rollout.stop", list(stop), f"the engine {engine.name} sees no text", cure)


def check_requests(
    requests: Sequence[Request], sampling: Sampling, settings: EngineSettings, weight_version: int
) -> None:
    """Refuse what an engine would cut or answer wrongly. Raises RolloutError."""
    max_model_len, vocab_size = settings.max_model_len, settings.vocab_size
    if weight_version < 0:
        raise RolloutError("generate before the first update of weights: the engine's are not the trainer's yet")
    for i, request in enumerate(requests):
        if not request.token_ids:
            raise RolloutError(f"request {i} has an empty prompt; a model needs at least one token to go on from")
        odd = [token for token in request.token_ids if not 0 <= token < vocab_size]
        if odd:
            raise RolloutError(
                f"request {i}: id {odd[0]} is no token of the model, whose vocab_size is {vocab_size}; use the "
                "tokenizer that belongs to the model"
            )
        if len(request.token_ids) + sampling.max_tokens > max_model_len:
            raise RolloutError(
                f"request {i}: prompt of {len(request.token_ids)} tokens + {sampling.max_tokens} new ones pass the "
                f"engine's max_model_len {max_model_len}; raise rollout.max_model_len or lower data.max_response_length"
            )


def compact_experts(experts: Sequence[npt.NDArray[np.integer[Any]]]) -> list[npt.NDArray[np.uint8 | np.int16]]:
    """Of each sample [rows, layers, k], numbered from 0, -1 where none is known -> as Samples.routed has them: numbered
    from 1, 0 where none is known, in the smallest type.
    """
    most = max((int(one.max(initial=0)) for one in experts), default=0)
    dtype = np.uint8 if most < np.iinfo(np.uint8).max else np.int16
    return [(one.astype(np.int32) + 1).astype(dtype) for one in experts]


def whole_update(
    tensors: Iterable[tuple[str, torch.Tensor]], expected: Mapping[str, tuple[int, ...]], model_path: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """`tensors`, which must be those of `expected`, each once and of its shape.

    RolloutError names a tensor that is not; and, at the end, those that never came: an engine would keep noise there.
    """
    missing = dict(expected)
    for name, tensor in tensors:
        shape = missing.pop(name, None)
        if shape is None:
            reason = "came twice" if name in expected else f"is no tensor of the model of {model_path}"
            raise RolloutError(f"update_weights: {name} {reason}")
        if tuple(tensor.shape) != shape:
            raise RolloutError(f"update_weights: {name} is {list(tensor.shape)}, config.json says {list(shape)}")
        yield name, tensor
    if missing:
        names = first_of(missing, 20)
        raise RolloutError(f"update_weights: no value for {names}; copy the whole model to {model_path}")


def _refused(key: str, value: object, reason: str, cure: str) -> RolloutError:
    return RolloutError(str(Fault(key, value, reason, cure)))


def make_engine(settings: EngineSettings, shared: Mapping[str, torch.Tensor] | None = None) -> RolloutEngine:
    """Build the engine that settings.name says (megatron_rl/engines). Raises RolloutError if it cannot be built so, or
    if its class is no RolloutEngine.

    shared: engine parameter -> trainer's tensor of the same shape, dtype and device whose memory it takes
    (reshard/alias.py says which can). Their storages must stay where they are.
    """
    try:
        engine = engine_of(settings.name)
    except KeyError:
        cure = f"use {', '.join(ENGINES)}, or {PATH_FORM}"
        raise _refused("rollout.name", settings.name, "there is no such engine", cure) from None
    if len(settings.ranks) > 1 and not engine.multi_rank:
        raise _refused("rollout.tp", len(settings.ranks), f"the engine {engine.name} runs on one rank", "set it to 1")
    if shared and not engine.shares_weights:
        raise _refused("rollout.share_weights", True, f"the engine {engine.name} cannot share", "set it to false")
    build = _engine_class(engine)
    built = build(settings, shared or {}) if engine.shares_weights else build(settings)
    _refuse_incomplete(engine, _PROPERTIES - set(dir(built)))
    return built


def import_engine(engine: Engine) -> None:
    """Import what building an engine imports, so that the start's seconds say how long that takes. What is missing is
    named when the engine is built.
    """
    for module in engine.imports:
        if find_spec(module.partition(".")[0]) is not None:
            import_module(module)


_MEMBERS = {name: member for name, member in vars(RolloutEngine).items() if not name.startswith("_")}
_METHODS = {name for name, member in _MEMBERS.items() if inspect.isfunction(member)}
_PROPERTIES = _MEMBERS.keys() - _METHODS


def _engine_class(engine: Engine) -> Callable[..., RolloutEngine]:
    """The class of an engine, which has every method of RolloutEngine."""
    module, _, name = engine.implementation.partition(":")
    try:
        found: object = vars(import_module(module)).get(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        cure = "correct the path, install the package, or put its folder on PYTHONPATH"
        raise _refused("rollout.name", engine.name, f"there is no module {error.name}", cure) from error
    if not isinstance(found, type):
        raise _refused("rollout.name", engine.name, f"{module} has no class {name}", "correct the path")
    # A class may name the protocol as its base; the methods that are in it alone do nothing.
    own = {method for base in found.__mro__ if base is not RolloutEngine for method in vars(base)}
    _refuse_incomplete(engine, _METHODS - own)
    return found


def _refuse_incomplete(engine: Engine, missing: set[str]) -> None:
    if missing:
        reason = f"its class lacks {', '.join(sorted(missing))}"
        raise _refused("rollout.name", engine.name, reason, "add what rollout/engine.py, RolloutEngine, has")
