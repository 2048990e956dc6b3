"""Runs a function on N ranks, each a process of its own in one process group, and brings their results together.

Processes are forked from one server that has torch, Megatron-Core and transformers loaded: the first call of
a test session pays for those imports (about ten seconds), each later one takes a fraction of a second. Ranks
have the environment variables that the server started with. What a rank writes to its standard error (a crash of
the C++ runtime, say) is in the report when it fails.

RANKS_DEVICE=cuda gives each rank a GPU and an NCCL group; calls with more ranks than there are GPUs are skipped.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

PRELOAD = [
    "torch",
    "torch.distributed",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.parallel_state",
    "megatron.core.pipeline_parallel",
    "megatron.core.tensor_parallel",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "pytest",
    "megatron_rl.algos.token_losses",
    "megatron_rl.config.sections.actor",
    "megatron_rl.data.batching",
    "megatron_rl.mcore.build",
    "megatron_rl.mcore.convert",
    "megatron_rl.mcore.cpu",
    "megatron_rl.mcore.offload",
    "megatron_rl.mcore.step",
    "megatron_rl.weights.safetensors",
]

# After one rank failed, the others have this long: their errors belong in the report, their hangs do not.
GRACE_S = 2.0


# What the C++ runtime says when one of gloo's own threads throws, which no code of ours can catch (pytorch/gloo#514: a
# connection that a peer has closed by the time it is accepted). Such a call is made once more, with a warning.
GLOO_THREAD_DIED = ("terminate called", "gloo")


class RankFailed(RuntimeError):
    """A rank that died without an exception, or whose exception cannot be pickled."""


class _GlooThreadDied(RankFailed):
    """A rank that died by GLOO_THREAD_DIED."""


class RanksTimedOut(RuntimeError):
    """Ranks that did not answer in time; the message names them and shows where each one stood."""


def run_ranks(
    n: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, device: str | None = None
) -> list[Any]:
    """Calls fn(rank, n, *args) on ranks 0..n-1 under a process group; results come in rank order.

    `fn` is a module's top-level function, so that another process finds it; arguments and results are pickled
    (tensors by value, on the CPU). The seconds of `timeout` run from when all processes have started. device: cpu
    (gloo) or cuda (nccl); RANKS_DEVICE where not given.

    Raises the exception of the first rank that failed, with rank and traceback of every failed rank as notes;
    RankFailed when that rank died instead; RanksTimedOut at the deadline. No process outlives the call.
    """
    try:
        payload = pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"run_ranks: {fn!r} and its arguments must be picklable ({error})") from error
    device = device or os.environ.get("RANKS_DEVICE", "cpu")
    if device == "cuda":
        require_gpus(n)
    try:
        return _attempt(n, payload, timeout, device)
    except _GlooThreadDied as error:
        warnings.warn(f"{fn.__name__} on {n} ranks runs once more: {error}", stacklevel=2)
        return _attempt(n, payload, timeout, device)


def _attempt(n: int, payload: bytes, timeout: float, device: str) -> list[Any]:
    context = _fork_server()
    processes: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        try:
            connections: dict[Connection, int] = {}
            for rank in range(n):
                receive, send = context.Pipe(duplex=False)
                of_rank = (rank, n, folder, timeout, device, send, payload)
                process = context.Process(target=_rank_main, args=of_rank, name=f"rank{rank}", daemon=True)
                process.start()
                send.close()
                processes.append(process)
                connections[receive] = rank
            results = _collect(connections, processes, Path(folder), timeout)
            for process in processes:
                process.join(GRACE_S)
            return results
        finally:
            for process in processes:
                process.kill()
                process.join()


def require_gpus(n: int) -> None:
    """Skip the test where there are fewer."""
    if _num_gpus() < n:
        pytest.skip(f"needs {n} GPUs, there are {_num_gpus()}")


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _fork_server() -> Any:
    # The server reads both at its start: what it loads, and how many threads torch takes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if _num_gpus() == 0:
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # What the server loads asks whether there is a GPU; the answer without this leaves forks unable to use one.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if sys.platform == "linux":
        # gloo looks the machine's name up otherwise, which not every machine resolves.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _rank_main(
    rank: int, world: int, folder: str, timeout: float, device: str, send: Connection, payload: bytes
) -> None:
    stack = open(Path(folder) / f"stack{rank}", "w")  # noqa: SIM115  open as long as the process: a signal writes it
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    with open(Path(folder) / f"stderr{rank}", "wb") as errors:
        os.dup2(errors.fileno(), 2)
    faulthandler.enable(all_threads=True)
    try:
        import torch
        import torch.distributed as dist
        from torch.utils._pytree import tree_map_only

        torch.set_num_threads(1)
        if device == "cuda":
            torch.cuda.set_device(rank)
        fn, args = pickle.loads(payload)
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )
        result = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), fn(rank, world, *args))
        send.send_bytes(pickle.dumps((True, result)))
    except BaseException as error:
        send.send_bytes(pickle.dumps((False, _portable(error), traceback.format_exc())))
        raise
    if dist.is_initialized():
        # A rank that leaves early closes connections that slower ranks still read from.
        dist.barrier()
        dist.destroy_process_group()


def _portable(error: BaseException) -> BaseException | None:
    """The exception itself where it survives a round trip through pickle."""
    try:
        return pickle.loads(pickle.dumps(error))
    except (pickle.PicklingError, AttributeError, TypeError, ValueError):
        return None


def _collect(connections: dict[Connection, int], processes: list[Any], folder: Path, timeout: float) -> list[Any]:
    world = len(processes)
    results: dict[int, Any] = {}
    failures: dict[int, tuple[BaseException, str]] = {}
    deadline = time.monotonic() + timeout
    while connections:
        ready = wait(list(connections), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = connections.pop(connection)
            try:
                message = pickle.loads(connection.recv_bytes())
            except EOFError:
                processes[rank].join(GRACE_S)
                died = f"died with exit code {processes[rank].exitcode} and no exception\n"
                message = (False, None, died + _standard_error(folder, rank))
            if message[0]:
                results[rank] = message[1]
                continue
            _, error, text = message
            kind = _GlooThreadDied if all(words in text for words in GLOO_THREAD_DIED) else RankFailed
            failures[rank] = (error or kind(f"rank {rank} of {world}: {text}"), text)
            deadline = min(deadline, time.monotonic() + GRACE_S)
    if failures:
        first, _ = next(iter(failures.values()))
        # The death of a rank explains the connection errors of the others.
        first = next((error for error, _ in failures.values() if isinstance(error, _GlooThreadDied)), first)
        for rank, (_, text) in failures.items():
            first.add_note(f"--- rank {rank} of {world} ---\n{text}")
        raise first
    if connections:
        raise RanksTimedOut(_describe_hang(sorted(connections.values()), processes, folder, timeout))
    return [results[rank] for rank in range(world)]


def _standard_error(folder: Path, rank: int) -> str:
    """The end of what the rank wrote there."""
    file = folder / f"stderr{rank}"
    return file.read_text(errors="replace")[-4000:] if file.exists() else ""


def _describe_hang(ranks: list[int], processes: list[Any], folder: Path, timeout: float) -> str:
    lines = [f"ranks {ranks} of {len(processes)} did not finish within {timeout:g} s"]
    for rank in ranks:
        if processes[rank].is_alive():
            os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(0.3)
    for rank in ranks:
        stack = folder / f"stack{rank}"
        lines.append(f"--- rank {rank} stood at ---\n{stack.read_text() if stack.exists() else '(not started)'}")
        lines.append(_standard_error(folder, rank))
    return "\n".join(lines)
