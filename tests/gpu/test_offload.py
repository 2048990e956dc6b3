"""On a GPU: what is offloaded leaves the device, in pinned memory, and comes back bit for bit."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.helpers.tiny import random_batch, save_tiny
from tests.helpers.training import make_actor, train_step

pytestmark = pytest.mark.gpu
LENGTHS = (5, 40, 9, 12)
# The allocator counts blocks of whole 512 bytes.
BLOCK = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from megatron_rl.parallel import groups
    from megatron_rl.parallel.topology import Topology

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", str(port))
        groups.init_process_group(0, 1, "cuda")
        groups.init_model_parallel(Topology(1))
        yield save_tiny(tmp_path_factory.mktemp("tiny") / "model")
        groups.destroy()


def _build(folder: str, dtype: str, distributed: bool) -> Any:
    from megatron_rl.mcore import build, convert
    from megatron_rl.models.config_json import read_model_shape
    from megatron_rl.weights.safetensors import SafetensorsSource

    actor = make_actor(use_distributed_optimizer=distributed)
    policy = build.build_model(read_model_shape(folder), actor, dtype, torch.device("cuda"))
    convert.load_hf(policy, lambda: SafetensorsSource(folder))
    return build.make_trainable(policy, actor.optim, 100)


def _step(trainable: Any, seed: int) -> tuple[float, float]:
    from megatron_rl.algos.token_losses import nll_loss

    report, _ = train_step(trainable, [random_batch(seed, LENGTHS, 128)], nll_loss, 1.0)
    return report.loss, report.grad_norm


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "plain"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_device_memory_falls_by_what_is_reported(folder: str, dtype: str, distributed: bool) -> None:
    from megatron_rl.mcore.offload import KINDS, Offload

    trainable = _build(folder, dtype, distributed)
    offload = Offload(trainable)
    _step(trainable, 0)
    tensors = sum(1 for chunk in trainable.model.chunks for _ in chunk.parameters())
    # Trainers of tests before this one go now, and not while memory is measured.
    gc.collect()
    for kind in KINDS:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        freed = offload.to_host(kind).freed[kind]
        fell = before - torch.cuda.memory_allocated()
        assert freed > 0 and freed <= fell <= freed + 3 * tensors * BLOCK, (kind, freed, fell)
        offload.to_device(kind)
        assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "plain"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_everything_comes_back_bit_for_bit_and_trains_on(folder: str, dtype: str, distributed: bool) -> None:
    """Values are compared, not losses: flash attention's backward pass adds up in no fixed order."""
    from megatron_rl.mcore.offload import Offload, _optimizer_tensors

    trainable = _build(folder, dtype, distributed)
    offload = Offload(trainable)
    losses = []
    for _ in range(4):
        losses.append(_step(trainable, 0)[0])
        params = [p for chunk in trainable.model.chunks for p in chunk.parameters()]
        held = [*params, *(p.main_grad for p in params), *_optimizer_tensors(trainable)]
        values = [tensor.detach().clone() for tensor in held]
        offload.to_host()
        assert not any(tensor.untyped_storage().nbytes() for tensor in held)
        offload.to_device()
        assert all(map(torch.equal, held, values))
    assert losses[-1] < losses[0]
