"""What Megatron-Core needs to train on CPU and gloo. Does nothing where CUDA is.

Megatron-Core writes `device="cuda"` and torch.cuda calls in places that no setting reaches. `install()` maps them to
the CPU, in this module only; the training arithmetic is untouched. Each block says which call it answers. It serves
megatron-core 0.16 to 0.19 and may run before or after `import megatron.core`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

_FACTORIES = (
    "tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint", "eye", "linspace",
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "as_tensor",
)  # fmt: skip
_installed = False


def install() -> None:
    """Make this process able to run Megatron-Core without a GPU. Safe to call twice; returns at once where CUDA is."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    _redirect_devices()
    _stub_streams()
    _map_rng()
    _take_uneven_parts()
    _patch_megatron()


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _redirect_devices() -> None:
    # optimizer, clip_grads, schedules, transformer.utils and moe build tensors with a literal device="cuda".
    def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def build(*args: Any, **kwargs: Any) -> Any:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return factory(*args, **kwargs)

        return build

    # torch notes which functions make tensors when a device is a context for the first time. It must note its own ones:
    # else `with torch.device("meta")` moves nothing, and transformers leaves RoPE's frequencies of a model unset.
    with torch.device("cpu"):
        torch.empty(0)
    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    # param_and_grad_buffer, mappings, layers, p2p and the router use it as a device.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    plain_to, plain_type = torch.Tensor.to, torch.Tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple("cpu" if _is_cuda(arg) else arg for arg in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return plain_to(self, *args, **kwargs)

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # distrib_optimizer, optimizer and clip_grads compare type() with "torch.cuda.FloatTensor".
        if args or kwargs:
            return plain_type(self, *args, **kwargs)
        return plain_type(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.to = to  # type: ignore[method-assign, assignment]
    torch.Tensor.type = type_name  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign, assignment]
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign, assignment]


class _NoStream:
    """Stands for a CUDA stream or event: everything on a CPU is already in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    def record_event(self, event: object = None) -> _NoStream:
        return self

    wait_stream = wait_event = synchronize = record = wait = _nothing


def _stub_streams() -> None:
    # p2p communication, start_grad_sync (0.19) and the moe dispatcher order their work on streams.
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = cuda.ExternalStream = _NoStream
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _NoStream()

    @contextlib.contextmanager
    def stream(_: object) -> Iterator[None]:
        yield

    cuda.stream = stream
    for name in ("synchronize", "set_device", "empty_cache"):
        setattr(cuda, name, lambda *args, **kwargs: None)


def _map_rng() -> None:
    # The RNG tracker and activation recompute keep "CUDA" generator states: here, the CPU generator's.
    cuda: Any = torch.cuda
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)


def _take_uneven_parts() -> None:
    # gloo gathers and scatters parts of one size only; ranks that share experts (etp) hold different numbers of tokens.
    dist: Any = torch.distributed
    even_gather, even_scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(parts: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, **kwargs: Any) -> Any:
        if all(part.shape == parts[0].shape for part in parts):
            return even_gather(parts, tensor, group=group, **kwargs)
        padded = tensor.new_zeros((max(part.shape[0] for part in parts), *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        gathered = [torch.empty_like(padded) for _ in parts]
        even_gather(gathered, padded, group=group)
        for part, found in zip(parts, gathered, strict=True):
            part.copy_(found[: part.shape[0]])
        return None

    def reduce_scatter(output: torch.Tensor, parts: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if all(part.shape == parts[0].shape for part in parts):
            return even_scatter(output, parts, *args, **kwargs)
        group = kwargs["group"]
        for rank, part in enumerate(parts):
            total = part.clone()
            if total.numel():
                dist.reduce(total, group_dst=rank, group=group)
            if rank == dist.get_rank(group):
                output.copy_(total)
        return None

    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter


def _patch_megatron() -> None:
    import megatron.core.tensor_parallel.random as tp_random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random: Any = tp_random
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    if not hasattr(random, "FP8GlobalStateManager"):
        # CheckpointWithoutOutput asks it even with fp8 off; without Transformer Engine it does not exist.
        random.FP8GlobalStateManager = type(
            "NoFP8", (), {"is_fp8_enabled": staticmethod(lambda: False), "IS_FIRST_FP8_MODULE": False}
        )
        random.activation_recompute_forward = lambda **kwargs: contextlib.nullcontext()
        random.fp8_autocast = lambda **kwargs: contextlib.nullcontext()
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]

    def to_numpy(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
        # The original converts only CUDA tensors, and gloo's all-to-all refuses tensors as split sizes.
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_numpy  # type: ignore[assignment]
