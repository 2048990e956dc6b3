"""Checkpoints of a model of 100 million parameters: seconds, bytes, balance, and what a save in the background costs.

    python -m benchmarks.checkpoint                                  # 1 and 2 ranks on the CPU, all cores busy
    python -m benchmarks.checkpoint --layers 1 --tokens 128 --rounds 1 --most 2        # does it run
    python -m benchmarks.checkpoint --ranks 2 --device cuda --tokens 16384

first   seconds of the first copy to host memory, which is made then
copied  seconds that training waits for a save in the background: the copy, later
written seconds of a save that training waits for, until it is on the disk
beside  seconds from the beginning to the end of a save in the background
load    seconds to read it again, the files in the page cache
GB      of all files. largest, smallest: of the ranks' files of tensors, by their mean
step    median seconds of a step with no save; during: of one beside a save in the background. Rounds of steps with
        and without take turns, so that a machine that changes its pace weighs on both.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_rl.algos.token_losses import nll_loss
from megatron_rl.config.sections.actor import ActorConfig, OptimConfig
from megatron_rl.models import FAMILIES
from megatron_rl.models.rules import num_parameters
from megatron_rl.models.shape import ModelShape
from megatron_rl.parallel.topology import topology_of
from megatron_rl.types import TrainBatch
from megatron_rl.workers.records import Role

SHAPE = ModelShape(
    architecture="Qwen2ForCausalLM", num_layers=11, hidden_size=768, num_heads=12, num_kv_heads=12, head_dim=64,
    ffn_size=2048, vocab_size=32768, tie_word_embeddings=True, rms_norm_eps=1e-6, rope_theta=1e6,
    max_position_embeddings=32768, initializer_range=0.02,
)  # fmt: skip
STEPS = 4
"""Steps of a round without a save."""
SEQUENCE = 128


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class _Trainer:
    """A model in training on this rank."""

    def __init__(self, rank: int, world: int, args: argparse.Namespace) -> None:
        from megatron_rl.mcore import cpu

        cpu.install()
        from megatron_rl.mcore import build, convert
        from megatron_rl.mcore.checkpoint import SavedState
        from megatron_rl.mcore.objectives import token_objective
        from megatron_rl.mcore.offload import Offload
        from megatron_rl.mcore.step import optimizer_step
        from megatron_rl.parallel import groups
        from megatron_rl.weights.safetensors import RandomSource
        from megatron_rl.workers.checkpoint import StateFiles

        actor = ActorConfig(optim=OptimConfig(lr=1e-5))
        groups.init_process_group(rank, world, args.device)
        groups.init_model_parallel(topology_of(actor, world))
        device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
        dtype = "bfloat16" if args.device == "cuda" else "float32"
        model = build.build_model(replace(SHAPE, num_layers=args.layers), actor, dtype, device)
        convert.load_hf(model, lambda: RandomSource(1, 0.02))
        trainable = build.make_trainable(model, actor.optim, 1000)
        self.states: dict[Role, SavedState] = {"actor": SavedState(trainable, Offload(trainable, ()))}
        self.files = StateFiles(rank, world, actor)
        lens = (SEQUENCE,) * (args.tokens // SEQUENCE)
        total = sum(lens)
        batch = TrainBatch(torch.randint(0, SHAPE.vocab_size, (total,)), lens, torch.arange(total) % SEQUENCE != 0)
        batch = batch.with_(loss_weights=batch.loss_mask.float() / total)
        objective = token_objective(trainable.model, nll_loss, 1.0)
        self.step: Callable[[], object] = lambda: optimizer_step(trainable, [batch], objective)

    def save(self, folder: Path, background: bool) -> float:
        """Seconds until training may go on."""
        shutil.rmtree(folder, ignore_errors=True)
        torch.distributed.barrier()
        return _timed(lambda: self.files.begin(folder, self.states, background))


def _measure(rank: int, world: int, args: argparse.Namespace, folder: str, send: Any) -> None:
    from megatron_rl.parallel.collectives import any_rank

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    if args.device == "cuda":
        torch.cuda.set_device(rank)
    trainer, path = _Trainer(rank, world, args), Path(folder) / "saved"
    trainer.step()
    first = _timed(trainer.states["actor"].snapshot)
    free: list[float] = []
    busy: list[float] = []
    copied: list[float] = []
    beside: list[float] = []
    for _ in range(args.rounds):
        free += [_timed(trainer.step) for _ in range(STEPS)]
        start = time.perf_counter()
        copied.append(trainer.save(path, background=True))
        # All ranks make the same number of steps: as long as any writes.
        for _ in range(args.most):
            if not any_rank(not trainer.files.is_done):
                break
            busy.append(_timed(trainer.step))
        trainer.files.finish()
        beside.append(time.perf_counter() - start)
    torch.distributed.barrier()
    start = time.perf_counter()
    trainer.save(path, background=False)
    marks = trainer.files.finish()
    written = time.perf_counter() - start
    load = _timed(lambda: trainer.files.load(path, trainer.states, lambda role: None))
    send.send(
        {
            "first": first,
            "copied": statistics.median(copied),
            "written": written,
            "beside": statistics.median(beside),
            "load": load,
            "bytes": {name: mark.size for name, mark in marks.items()},
            "free": free,
            "busy": busy,
        }
    )
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _run(world: int, args: argparse.Namespace) -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=args.folder) as folder:
        connections, processes = [], []
        for rank in range(world):
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=_measure, args=(rank, world, args, folder, send))
            process.start()
            send.close()
            connections.append(receive)
            processes.append(process)
        results = [connection.recv() for connection in connections]
        for process in processes:
            process.join()
    sizes = {name: size for of_rank in results for name, size in of_rank["bytes"].items()}
    shares = [size for name, size in sizes.items() if name.endswith(".distcp")]
    mean = sum(shares) / len(shares)
    free, busy = (statistics.median(results[0][kind]) for kind in ("free", "busy"))
    slowest = {
        name: max(of_rank[name] for of_rank in results) for name in ("first", "copied", "written", "beside", "load")
    }
    print(
        f"{world:>5}  {slowest['first']:>5.2f}  {slowest['copied']:>6.2f}  {slowest['written']:>7.2f}"
        f"  {slowest['beside']:>6.2f}"
        f"  {slowest['load']:>5.2f}  {sum(sizes.values()) / 1e9:>6.3f}  {max(shares) / mean:>7.4f}"
        f"  {min(shares) / mean:>8.4f}  {free:>8.3f}  {busy:>8.3f}  {busy / free:>5.3f}"
        f"  {len(results[0]['free'])} and {len(results[0]['busy'])}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tokens", type=int, default=512, help="of a rank and step")
    parser.add_argument("--layers", type=int, default=SHAPE.num_layers)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=int, default=12, help="steps beside one save; then training waits for it")
    parser.add_argument("--folder", help="on the disk to be measured")
    args = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    count = num_parameters(replace(SHAPE, num_layers=args.layers), FAMILIES[SHAPE.architecture])
    print(f"{count / 1e6:.1f} million parameters, {args.tokens} tokens a rank and step, {os.cpu_count()} cores")
    columns = "ranks  first  copied  written  beside   load      GB  largest  smallest      step    during  ratio"
    print(f"{columns}  steps counted")
    for world in args.ranks:
        os.environ["MASTER_PORT"] = str(29500 + os.getpid() % 1000 + world)
        _run(world, args)


if __name__ == "__main__":
    main()
