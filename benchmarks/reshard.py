"""Ways to carry trained weights into an engine's layout, on the same tensors in one run. Prints one table.

    python -m benchmarks.reshard                                  # gloo processes: other layouts on each side
    python -m benchmarks.reshard --backend nccl --hidden 4096     # the same with a GPU a rank
    python -m benchmarks.reshard --device cuda                    # one GPU, Qwen2.5-7B's shape, a vLLM engine
    python -m benchmarks.reshard --device cpu --shape tiny        # the same on the CPU, in seconds

Between processes:
  full      every HF tensor gathered whole on every rank (mcore/convert.py), each rank keeps its part: verl's way
  mcore     megatron.core.resharding's planner and executor, which goes from one Megatron layout to another
  reshard   this package's plan and executor (reshard/)
full and reshard fill vLLM's parameters, on the ranks that rank_order.py gives each engine; mcore fills a Megatron
model split as the engine is, on neighbouring ranks. Bytes are those that ranks receive from each other, messages those
that they send (a gather or broadcast counts once a rank), staging is the most temporary memory on a rank, seconds the
best of the repeats, of the slowest rank. The minimum is what engines need and their rank lacks. On one machine gloo
goes through memory, so seconds say little about a network; bytes do.

benchmarks/reshard_alias.py is the one for a GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.config.sections.actor import ActorConfig
from megatron_rl.models import FAMILIES
from megatron_rl.models.rules import LocalParam, megatron_params, num_parameters
from megatron_rl.models.shape import ModelShape
from megatron_rl.parallel.topology import topology_of
from megatron_rl.reshard.bundles import Trainers
from megatron_rl.reshard.plan import Shard, make_plan
from megatron_rl.reshard.rank_order import colocated_layout
from megatron_rl.reshard.shards import engine_shards, trainer_shards
from megatron_rl.reshard.tables import ModelTable

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A trainer layout on `world` ranks, and engines of engine_tp ranks on the same ones."""

    world: int
    layout: dict[str, Any]
    engine_tp: int

    def __str__(self) -> str:
        axes = dict(self.layout)
        axes["dp"] = self.world // (axes.get("tp", 1) * axes.get("pp", 1))
        train = " ".join(f"{name}{size}" for name, size in axes.items() if size > 1)
        return f"{train} -> tp{self.engine_tp}"


CASES = (
    Case(2, {"tp": 2}, 1),
    Case(2, {}, 2),
    Case(2, {"pp": 2}, 2),
    Case(4, {"tp": 4}, 2),
    Case(4, {"tp": 2, "pp": 2}, 2),
    Case(4, {"tp": 2, "pp": 2}, 4),
)


@dataclass(frozen=True)
class Options:
    """Alike in all cases."""

    shape: ModelShape
    repeats: int
    backend: str
    cap_bytes: int


@dataclass
class Cost:
    """Of one rank and one sync, in bytes, messages and seconds."""

    received: int = 0
    messages: int = 0
    staging: int = 0
    seconds: float = 0.0


def model_shape(hidden: int, layers: int) -> ModelShape:
    """A dense model of Qwen2's kind."""
    return ModelShape(
        architecture="Qwen2ForCausalLM",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=hidden // 64,
        num_kv_heads=4,
        head_dim=64,
        ffn_size=hidden * 4,
        vocab_size=16384,
        tie_word_embeddings=False,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=512,
        initializer_range=0.02,
    )


# The three ways. Each takes this rank's side and returns a function that syncs once.


def full_gather(policy: Any, engine: dict[str, torch.Tensor], params: list[LocalParam]) -> Callable[[], Cost]:
    """The yardstick: gather each tensor, keep a slice."""
    from megatron_rl.mcore.convert import export_hf

    def sync() -> Cost:
        cost = Cost()
        wanted: dict[str, list[tuple[torch.Tensor, Any]]] = {}
        for param in params:
            flat, top = engine[param.name], 0
            for block in param.blocks:
                wanted.setdefault(block.hf_name, []).append((flat[top : top + block.num_rows], block))
                top += block.num_rows
        with counted_collectives(cost):
            for name, tensor in export_hf(policy, DTYPE):
                for target, block in wanted[name]:
                    part = tensor[slice(*block.rows)]
                    target.copy_(part if block.cols is None else part[:, slice(*block.cols)])
        return cost

    return sync


class counted_collectives:
    """Adds what all_gather and broadcast bring to this rank to a cost, while open."""

    def __init__(self, cost: Cost) -> None:
        self._cost, self._own = cost, (dist.all_gather, dist.broadcast)

    def __enter__(self) -> None:
        cost, (all_gather, broadcast) = self._cost, self._own

        def gather(parts: list[torch.Tensor], mine: torch.Tensor, **kwargs: Any) -> Any:
            size = sum(part.nbytes for part in parts)
            cost.received += size - mine.nbytes
            cost.messages += 1
            # The parts, and the whole that they are put together in.
            cost.staging = max(cost.staging, 2 * size)
            return all_gather(parts, mine, **kwargs)

        def send_to_all(tensor: torch.Tensor, group_src: int, group: Any) -> Any:
            if dist.get_rank(group) != group_src:
                cost.received += tensor.nbytes
            cost.messages += 1
            cost.staging = max(cost.staging, tensor.nbytes)
            return broadcast(tensor, group_src=group_src, group=group)

        torch.distributed.all_gather, torch.distributed.broadcast = gather, send_to_all

    def __exit__(self, *_: object) -> None:
        torch.distributed.all_gather, torch.distributed.broadcast = self._own


def reshard(
    case: Case, rank: int, policy: Any, engine: dict[str, torch.Tensor], shards: list[Shard], cap_bytes: int
) -> tuple[Callable[[], Cost], int]:
    """This package; and the plan's minimum for this rank."""
    from megatron_rl.mcore.shards import parameters
    from megatron_rl.parallel.p2p import P2PGroup
    from megatron_rl.reshard.execute import TensorSet, Transfer

    shape, actor = policy.shape, policy.parallel
    stages = actor.stages(shape.num_layers)
    trainers = trainer_shards(shape, FAMILIES[shape.architecture], topology_of(actor, case.world), stages)
    plan = make_plan(trainers, shards)
    sides = trainers[rank].params, shards[rank].params
    transfer = Transfer(plan, P2PGroup(), *sides, trainer_dtype=DTYPE, engine_dtype=DTYPE, cap_bytes=cap_bytes)

    def sync() -> Cost:
        sources, targets = (
            TensorSet.of({name: one.detach() for name, one in parameters(policy).items()}),
            TensorSet.of(engine),
        )
        assert not transfer.faults(sources, targets)
        moved = transfer.run(sources, targets, "benchmark")
        transfer.wait(targets)
        return Cost(moved.received, moved.messages, moved.staging)

    return sync, plan.bytes_of(rank, DTYPE.itemsize).minimum


def mcore_resharding(case: Case, policy: Any, twin: torch.nn.Module) -> Callable[[], Cost]:
    """Megatron's own, into modules that hold a Megatron model's parameters split as the engine is."""
    from megatron.core.resharding.execution import execute_reshard_plan
    from megatron.core.resharding.planner import build_centralized_reshard_plan

    source = _with_groups(policy.bare_chunks[0], case.world, case.layout.get("tp", 1), case.layout.get("pp", 1))
    target = _with_groups(twin, case.world, case.engine_tp, 1)
    plan = build_centralized_reshard_plan(source, target)
    addresses = {param.untyped_storage().data_ptr() for side in (source, target) for param in side.parameters()}

    def sync() -> Cost:
        service = _counting_service(addresses)
        execute_reshard_plan(plan, source, target, service)
        return service.cost

    return sync


def _counting_service(addresses: set[int]) -> Any:
    """Megatron's service over torch's messages, which counts; `addresses` are the models' own memory. Megatron-Core
    calls submit_send_with_id (0.16), or submit_send with a task_id (0.19).
    """
    from megatron.core.resharding.copy_services.base import CopyService

    class Service(CopyService):
        def __init__(self) -> None:
            super().__init__()
            self.cost, self._sends, self._receives = Cost(), {}, {}

        def submit_send(self, src_tensor: torch.Tensor, dest_rank: int, task_id: int | None = None) -> None:
            assert task_id is not None, "Megatron's planner numbers its tasks"
            self._sends[task_id] = (src_tensor.detach(), dest_rank)

        def submit_recv(self, dest_tensor: torch.Tensor, src_rank: int, task_id: int | None = None) -> None:
            assert task_id is not None, "Megatron's planner numbers its tasks"
            self._receives[task_id] = (dest_tensor, src_rank)

        def submit_send_with_id(self, task_id: int, src_tensor: torch.Tensor, dest_rank: int) -> None:
            self.submit_send(src_tensor, dest_rank, task_id)

        def submit_recv_with_id(self, task_id: int, dest_tensor: torch.Tensor, src_rank: int) -> None:
            self.submit_recv(dest_tensor, src_rank, task_id)

        def _stages(self, tensor: torch.Tensor) -> int:
            return tensor.nbytes if tensor.untyped_storage().data_ptr() not in addresses else 0

        def run(self) -> None:
            here = dist.get_rank()
            ops = []
            # Every slice that is not a model's own memory has a buffer, and all are held until the end.
            for task_id, (tensor, peer) in self._sends.items():
                self.cost.staging += self._stages(tensor)
                if peer == here:
                    self._receives.pop(task_id)[0].copy_(tensor)
                    continue
                self.cost.messages += 1
                ops.append(dist.P2POp(dist.isend, tensor, peer))
            for tensor, peer in self._receives.values():
                self.cost.received += tensor.nbytes
                self.cost.staging += self._stages(tensor)
                ops.append(dist.P2POp(dist.irecv, tensor, peer))
            for work in dist.batch_isend_irecv(ops) if ops else []:
                work.wait()

    return Service()


def _with_groups(module: torch.nn.Module, world: int, tp: int, pp: int) -> Any:
    """The module as Megatron's planner asks for it: with the process groups of a layout."""
    dp = world // (tp * pp)
    grid = torch.arange(world).view(pp, dp, tp)

    def mine(rows: list[list[int]]) -> Any:
        groups = [dist.new_group(row) for row in rows]
        return next(group for row, group in zip(rows, groups, strict=True) if dist.get_rank() in row)

    module.pg_collection = SimpleNamespace(  # type: ignore[assignment]
        tp=mine(grid.reshape(-1, tp).tolist()),
        dp=mine(grid.transpose(1, 2).reshape(-1, dp).tolist()),
        pp=mine(grid.permute(1, 2, 0).reshape(-1, pp).tolist()),
        ep=mine([[rank] for rank in range(world)]),
    )
    return module


def _megatron_table(shape: ModelShape, tp: int, rank: int) -> list[LocalParam]:
    """What a rank of a Megatron model at pp 1 holds."""
    whole: dict[str, Any] = {"layers": range(shape.num_layers), "pre_process": True, "post_process": True}
    return list(megatron_params(shape, FAMILIES[shape.architecture], tp=tp, tp_rank=rank % tp, **whole))


def _megatron_twin(shape: ModelShape, tp: int, rank: int) -> torch.nn.Module:
    """The parameters of a Megatron model at another tp and pp 1, in modules of Megatron's names."""
    root = torch.nn.Module()
    for param in _megatron_table(shape, tp, rank):
        at, *path = root, *param.name.split(".")
        for number, part in enumerate(path[:-1]):
            if not hasattr(at, part):
                at.add_module(part, torch.nn.Module())
            at = getattr(at, part)
            if number == 2 and path[1] == "layers":
                at.layer_number = int(part) + 1
        tensor: Any = torch.nn.Parameter(torch.zeros(param.shape, dtype=DTYPE), requires_grad=False)
        cols = param.name.endswith(("linear_proj.weight", "linear_fc2.weight"))
        if "norm" not in param.name:
            tensor.tensor_model_parallel, tensor.partition_dim = True, int(cols)
            tensor.partition_stride = 2 if "linear_fc1" in param.name else 1
        at.register_parameter(path[-1], tensor)
    return root


def _engine_shards(case: Case, shape: ModelShape) -> list[Shard]:
    """What each rank of the engines needs, on the ranks that runs choose: where the trainer's shards cover most."""
    actor, family = ActorConfig(**case.layout), FAMILIES[shape.architecture]
    trainers = Trainers(topology_of(actor, case.world), actor.stages(shape.num_layers))
    layout = colocated_layout(ModelTable(shape, family), trainers, tp=case.engine_tp, gpus_per_node=case.world)
    return sorted(engine_shards(shape, family, layout), key=lambda shard: shard.rank)


# One process a rank.


def _rank_main(rank: int, case: Case, options: Options, folder: str, answers: Any) -> None:
    device = torch.device("cpu")
    if options.backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(options.backend, init_method=f"file://{folder}/store", rank=rank, world_size=case.world)
    answers.put((rank, measure(rank, case, options, device)))
    dist.barrier()
    dist.destroy_process_group()


def measure(rank: int, case: Case, options: Options, device: torch.device) -> dict[str, Any]:
    """Method -> cost on this rank, and the minimum. All methods are checked against each other."""
    from megatron_rl.mcore import cpu

    cpu.install()
    from megatron_rl.mcore import build, convert
    from megatron_rl.parallel import groups
    from megatron_rl.weights.safetensors import RandomSource

    actor, shape = ActorConfig(**case.layout), options.shape
    groups.init_model_parallel(topology_of(actor, case.world))
    policy = build.build_model(shape, actor, "bfloat16", device)
    source = RandomSource(1, 0.02)
    source.check(convert.tensor_shapes(policy))
    convert.load_hf(policy, lambda: source)
    shards = _engine_shards(case, shape)
    params = list(shards[rank].params)
    engines = [{param.name: torch.zeros(param.shape, dtype=DTYPE, device=device) for param in params} for _ in range(2)]
    ours, minimum = reshard(case, rank, policy, engines[1], shards, options.cap_bytes)
    twin = _megatron_twin(shape, case.engine_tp, rank).to(device)
    methods = {
        "full": full_gather(policy, engines[0], params),
        "mcore": mcore_resharding(case, policy, twin),
        "reshard": ours,
    }
    costs = {name: _best(sync, options.repeats) for name, sync in methods.items()}
    for name in engines[0]:
        assert torch.equal(engines[0][name], engines[1][name]), f"{case}: {name} differs between full and reshard"
    live = dict(twin.named_parameters())
    for param in _megatron_table(shape, case.engine_tp, rank):
        wanted = torch.cat([source.read(block) for block in param.blocks]).to(DTYPE).to(device)
        assert torch.equal(live[param.name], wanted), f"{case}: {param.name} differs between mcore and the model"
    return {**costs, "minimum": minimum}


def _meet() -> None:
    """All ranks, with nothing left to do on their devices."""
    dist.barrier()
    if torch.cuda.is_available() and dist.get_backend() == "nccl":
        torch.cuda.synchronize()


def _best(sync: Callable[[], Cost], repeats: int) -> Cost:
    costs = []
    for _ in range(repeats):
        _meet()
        start = time.perf_counter()
        cost = sync()
        _meet()
        cost.seconds = time.perf_counter() - start
        costs.append(cost)
    return min(costs, key=lambda cost: cost.seconds)


def run_case(case: Case, options: Options) -> list[dict[str, Any]]:
    """measure() on every rank."""
    context: Any = multiprocessing.get_context("forkserver" if options.backend == "gloo" else "spawn")
    if options.backend == "gloo":
        # Imports take longer than everything that is measured; the server pays for them once.
        preload = ["megatron_rl.mcore.build", "megatron_rl.mcore.convert", "megatron.core.resharding"]
        context.set_forkserver_preload(preload)
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        args = case, options, folder, answers
        processes = [context.Process(target=_rank_main, args=(rank, *args), daemon=True) for rank in range(case.world)]
        for process in processes:
            process.start()
        found = dict(_answers(processes, answers))
        for process in processes:
            process.join()
    return [found[rank] for rank in range(case.world)]


def _answers(processes: list[Any], answers: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    for _ in processes:
        while answers.empty():
            dead = [rank for rank, process in enumerate(processes) if process.exitcode]
            if dead:
                raise SystemExit(f"ranks {dead} failed; their errors are above")
            time.sleep(0.05)
        yield answers.get()


def table(case: Case, ranks: list[dict[str, Any]]) -> list[str]:
    """Rows of one case."""
    least = sum(rank["minimum"] for rank in ranks)
    rows = []
    for method in ("full", "mcore", "reshard"):
        costs = [rank[method] for rank in ranks]
        received = sum(cost.received for cost in costs)
        ratio = f"{received / least:.2f}" if least else ("-" if received else "1.00")
        rows.append(
            f"| {case} | {method} | {_mib(received)} | {ratio} | {sum(cost.messages for cost in costs)} "
            f"| {_mib(max(cost.staging for cost in costs))} | {max(cost.seconds for cost in costs):.3f} |"
        )
    return rows


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="compare ways into one engine on this device")
    parser.add_argument("--shape", choices=["7b", "0.5b", "tiny"], default="7b", help="model of --device")
    parser.add_argument("--graphs", action="store_true", help="engines of --device capture CUDA graphs")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo", help="nccl: a GPU a rank")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--bucket-mb", type=int, default=16, help="staging memory of reshard, a rank")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.device is not None:
        from benchmarks.reshard_alias import run

        run(args.device, args.shape, args.repeats, args.graphs)
        return
    # Megatron warns about what is not installed here, once a process.
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = Options(model_shape(args.hidden, args.layers), args.repeats, args.backend, args.bucket_mb << 20)
    size = num_parameters(options.shape, FAMILIES[options.shape.architecture]) * DTYPE.itemsize
    print(
        f"model of {_mib(size)} MiB ({DTYPE}), {args.backend}, buckets of {args.bucket_mb} MiB a rank; "
        "received MiB and messages are summed over ranks"
    )
    print("| train -> engine | method | received MiB | / minimum | messages | staging MiB | seconds |")
    print("|---|---|---|---|---|---|---|")
    ranks = torch.cuda.device_count() if args.backend == "nccl" else max(case.world for case in CASES)
    for case in CASES:
        if case.world <= ranks:
            print("\n".join(table(case, run_case(case, options))), flush=True)
        else:
            print(f"| {case} | needs {case.world} GPUs, {ranks} found | | | | | |")


if __name__ == "__main__":
    main()
