"""Errors of a rank that a reader must not have to look up: memory that did not suffice, a GPU or a link that failed.

Known by names, so that nothing is imported: torch is loaded where its errors come from.
"""

from __future__ import annotations

import os

from megatron_rl.errors import DeviceError, MegatronRLError, OutOfMemory, P2PError
from megatron_rl.observe.beat import last_beat
from megatron_rl.observe.log import last_line

LESS_MEMORY = {
    "step": "lower actor.max_tokens_per_gpu or actor.ppo_micro_batch_size_per_gpu (critic.* for a critic), set "
    "actor.optimizer_offload=true, or split the model more (actor.tp, actor.pp)",
    "forward": "lower actor.max_tokens_per_gpu or actor.ppo_micro_batch_size_per_gpu (critic.* for a critic), or split "
    "the model more (actor.tp, actor.pp)",
    "generate": "lower rollout.gpu_memory_utilization (or rollout.kv_cache_gb) or rollout.max_num_seqs",
    "publish": "lower rollout.sync_bucket_mb or rollout.gpu_memory_utilization (or rollout.kv_cache_gb)",
    "__init__": "lower rollout.gpu_memory_utilization (or rollout.kv_cache_gb), set actor.optimizer_offload=true, or "
    "split the model more (actor.tp, actor.pp)",
}
"""Method of a worker -> which settings make it need less."""
ANY = "lower what the phase holds at once, or use more or larger devices"
OUT_OF_MEMORY = ("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError", "builtins.MemoryError")
LINKS = ("torch.distributed.DistBackendError", "torch.distributed.DistNetworkError", "torch.distributed.DistStoreError")


def named_error(error: BaseException, rank: int, method: str) -> BaseException:
    """The error as an OutOfMemory, DeviceError or P2PError that says rank, host, phase and last log line. An error of
    another kind is returned as it is.

    method: of the worker, a path such as "train.step".
    """
    if isinstance(error, MegatronRLError):
        return error
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    line, text = last_line(), f"{type(error).__name__}: {error}"
    where = f"rank {rank} ({os.uname().nodename}), {method}, after {last_beat().what!r}"
    where += f", last log line {line!r}" if line else ""
    if kinds & set(OUT_OF_MEMORY) or "can't allocate memory" in text:
        cure = LESS_MEMORY.get(method.rpartition(".")[2], ANY)
        return OutOfMemory(f"{where}: out of memory: {text} -- {cure}")
    if "torch.AcceleratorError" in kinds or ("builtins.RuntimeError" in kinds and "CUDA error" in text):
        return DeviceError(
            f"{where}: the GPU failed: {text} -- look for Xid and ECC errors of this GPU on its host (dmesg, "
            "nvidia-smi -q); a kernel's fault shows its place with CUDA_LAUNCH_BLOCKING=1"
        )
    if kinds & set(LINKS) or ("builtins.RuntimeError" in kinds and "gloo/transport" in text):
        return P2PError(f"{where}: a connection between ranks broke or timed out: {text}")
    return error
