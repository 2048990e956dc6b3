"""Plans carried out by real processes: engine parameters equal the Hugging Face export bit for bit (W3 to W9).

Engines are plain tensors with the names and shapes of vLLM's; tests/e2e has vLLM itself. Models train with Megatron
where the layout is the point, and are plain tensors too where it is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.errors import P2PError, ReshardError, RolloutError
from megatron_rl.models import FAMILIES
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.models.rules import LocalParam
from megatron_rl.parallel.topology import topology_of
from megatron_rl.reshard.shards import trainer_shards
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import save_tiny
from tests.helpers.training import build, live_parameters, make_actor

CAP = 64 << 10
# Not a multiple of 64 or of tp 4: both sides pad it, each in its own way.
VOCAB = 130


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model", vocab=VOCAB, layers=8)


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("small") / "model", layers=2)


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("moe") / "model", "qwen3_moe", vocab=VOCAB, layers=2, tied=False)


class PlainEngine:
    """An engine that is its parameters. Starts as NaN, so that what no sync writes shows."""

    shared: frozenset[str] = frozenset()

    def __init__(self, params: Sequence[LocalParam], dtype: torch.dtype) -> None:
        self.params = tuple(params)
        self.tensors = {
            param.name: torch.full(param.shape, float("nan"), dtype=torch.float32 if param.float32 else dtype)
            for param in params
        }
        self.weight_version = -1
        self.calls: list[str] = []

    def parameters(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def begin_update(self) -> None:
        self.calls.append("begin")

    def end_update(self, version: int) -> None:
        self.calls.append("end")
        self.weight_version = version

    def update_weights(self, tensors: Any, version: int) -> None:
        raise AssertionError("whole tensors were sent")

    def wake(self) -> None:
        self.calls.append("wake")

    def wrong(self, export: dict[str, torch.Tensor]) -> list[str]:
        """Parameters that are not the export's slices, bit for bit, with zeros below."""
        return [
            param.name
            for param in self.params
            if not torch.equal(self.tensors[param.name], _slices(param, export).to(self.tensors[param.name].dtype))
        ]


def _slices(param: LocalParam, export: dict[str, torch.Tensor]) -> torch.Tensor:
    dtype = next(iter(export.values())).dtype
    wanted = torch.zeros(param.shape, dtype=dtype)
    rows = wanted if wanted.dim() == 1 else wanted.view(-1, wanted.shape[-1])
    top = 0
    for block in param.blocks:
        part = export[block.hf_name][slice(*block.rows)]
        rows[top : top + block.num_rows] = part if block.cols is None else part[:, slice(*block.cols)]
        top += block.num_rows
    return wanted


def _engine_shards(folder: str, engines: Sequence[Sequence[int]], ep: bool = False) -> list[Any]:
    """Of engines on the given ranks; ep: each deals its experts to its ranks."""
    from megatron_rl.models.engine import engine_params
    from megatron_rl.reshard.plan import Shard

    shape = read_model_shape(folder)
    family = FAMILIES[shape.architecture]
    shards = []
    for ranks in engines:
        for place, rank in enumerate(ranks):
            experts: dict[str, Any] = {"ep": len(ranks), "ep_rank": place} if ep else {}
            shards.append(Shard(rank, tuple(engine_params(shape, family, tp=len(ranks), tp_rank=place, **experts))))
    return shards


@dataclass(frozen=True)
class Case:
    """A trainer layout and the engines on its ranks. dtypes: (trainer's, engine's)."""

    layout: dict[str, Any]
    engine_tp: int
    dtypes: tuple[str, str] = ("float32", "float32")
    ep: bool = False
    moves: bool = True


def _sync_twice(rank: int, world: int, folder: str, cases: dict[str, Case]) -> dict[str, list[Any]]:
    return {name: _case(rank, world, folder, case) for name, case in cases.items()}


def _case(rank: int, world: int, folder: str, case: Case) -> list[Any]:
    """(wrong parameters, report) of two syncs with other weights each; and the engine's calls."""
    from megatron.core import parallel_state

    from megatron_rl.mcore import convert
    from megatron_rl.parallel.p2p import P2PGroup
    from megatron_rl.reshard.execute import Transfer
    from megatron_rl.reshard.plan import make_plan
    from megatron_rl.reshard.publisher import ReshardPublisher

    actor, tp = make_actor(**case.layout), case.engine_tp
    policy = build(folder, actor, world, case.dtypes[0]).model
    stages = actor.stages(policy.shape.num_layers)
    trainers = trainer_shards(policy.shape, FAMILIES[policy.shape.architecture], topology_of(actor, world), stages)
    engines = _engine_shards(folder, [range(first, first + tp) for first in range(0, world, tp)], case.ep)
    of_trainer, of_engine = (getattr(torch, dtype) for dtype in case.dtypes)
    engine = PlainEngine(engines[rank].params, of_engine)
    transfer = Transfer(
        make_plan(trainers, engines, dtypes=case.dtypes),
        P2PGroup(timeout_s=30),
        trainers[rank].params,
        engines[rank].params,
        trainer_dtype=of_trainer,
        engine_dtype=of_engine,
        cap_bytes=CAP,
    )
    # Without those that no update changes.
    names = [param.name for param in trainers[rank].params]
    publisher = ReshardPublisher(
        transfer, engine, lambda: {name: one for name, one in live_parameters(policy).items() if name in names}
    )
    found: list[Any] = []
    for version in (0, 1):
        report = publisher.publish(version, expect_change=version > 0)
        export = dict(convert.export_hf(policy, of_engine))
        found.append((engine.wrong(export), report))
        with torch.no_grad():
            for chunk in policy.chunks:
                for param in chunk.parameters():
                    # The same for the same value: replicas and tied copies stay equal.
                    param.mul_(-1.5)
    parallel_state.destroy_model_parallel()
    return [*found, engine.calls]


WORLDS: dict[int, dict[str, Case]] = {
    2: {
        "tp2 to tp1": Case({"tp": 2}, 1),
        "tp1 to tp2": Case({}, 2, moves=False),
        "pp2 to tp2": Case({"pp": 2}, 2, ("float32", "bfloat16")),
        "tp2 to tp2": Case({"tp": 2}, 2, ("bfloat16", "float32")),
    },
    4: {
        "tp2 pp2 to tp2": Case({"tp": 2, "pp": 2}, 2),
        "pp4 vpp2 to tp2": Case({"pp": 4, "vpp": 2, "ppo_micro_batch_size_per_gpu": 1}, 2),
    },
    8: {"tp2 pp2 dp2 to two engines of tp4": Case({"tp": 2, "pp": 2}, 4)},
}


def _assert_exact(results: list[dict[str, list[Any]]], cases: dict[str, Case]) -> None:
    for name, case in cases.items():
        for rank, result in enumerate(results):
            *syncs, calls = result[name]
            for wrong, report in syncs:
                assert wrong == [], (name, rank)
                assert report.moved_bytes == report.minimum_bytes, "W4"
                assert report.staging_bytes <= CAP, "W9"
                assert report.moved_bytes <= report.full_gather_bytes
            assert calls == ["begin", "end", "wake"] * 2, "memory phases in order"
        moved = sum(result[name][0][1].moved_bytes for result in results)
        assert (moved > 0) == case.moves, name


@pytest.mark.parametrize("world", WORLDS)
def test_engine_parameters_equal_the_export_twice_in_a_row(folder: str, world: int) -> None:
    """W3, W4, W6, W9"""
    cases = WORLDS[world]
    _assert_exact(run_ranks(world, _sync_twice, folder, cases), cases)


def test_experts_reach_engines_that_split_them_and_engines_that_deal_them(moe_folder: str) -> None:
    """W3, W6 with experts"""
    cases = {"ep2 to tp2": Case({"ep": 2}, 2), "ep2 to tp2 ep2": Case({"ep": 2}, 2, ep=True, moves=False)}
    _assert_exact(run_ranks(2, _sync_twice, moe_folder, cases), cases)


def test_a_router_that_the_engine_has_in_float32_gets_the_values_of_bfloat16(tmp_path: Path) -> None:
    """W3, W6: as copies on a rank, as messages, and forwarded from engine to engine."""
    folder = save_tiny(tmp_path / "model", "glm4_moe", vocab=VOCAB, layers=2, tied=False)
    half = ("bfloat16", "bfloat16")
    cases = {
        "ep2 to tp2": Case({"ep": 2}, 2, half),
        "pp2 to tp1": Case({"pp": 2, "ppo_micro_batch_size_per_gpu": 1}, 1, half),
    }
    _assert_exact(run_ranks(2, _sync_twice, folder, cases), cases)


# Without Megatron: trainers are plain tensors too.


class PlainTrainer:
    """Shards of a model drawn at random, by tp rank."""

    def __init__(self, folder: str, ranks: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        from megatron_rl.models.rules import hf_shapes, megatron_params
        from megatron_rl.reshard.plan import Shard
        from megatron_rl.weights.safetensors import RandomSource

        shape = read_model_shape(folder)
        family = FAMILIES[shape.architecture]
        self.sizes = hf_shapes(shape, family)
        self.source = RandomSource(3, 0.5)
        self.source.check(self.sizes)
        self.dtype = dtype
        whole = {"layers": range(shape.num_layers), "pre_process": True, "post_process": True}
        self.shards = [
            Shard(
                rank,
                tuple(
                    replace(param, name=f"chunk0.{param.name}")
                    for param in megatron_params(shape, family, tp=len(ranks), tp_rank=place, **whole)
                ),
            )
            for place, rank in enumerate(ranks)
        ]

    def tensors(self, rank: int) -> dict[str, torch.Tensor]:
        """Of one rank; none where it does not train."""
        export = self.export(self.dtype)
        return {
            param.name: _slices(param, export) for shard in self.shards if shard.rank == rank for param in shard.params
        }

    def export(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The whole model, as the trainer's dtype has it, in another."""
        from megatron_rl.models.layouts import Block

        blocks = {n: Block(n, (0, size[0]), (0, size[1]) if len(size) == 2 else None) for n, size in self.sizes.items()}
        return {name: self.source.read(block).to(self.dtype).to(dtype) for name, block in blocks.items()}


def _transfer(
    rank: int, plan: Any, sides: Sequence[Any], group: Any, dtypes: Sequence[torch.dtype], **kwargs: Any
) -> Any:
    """Of one rank; it may be a trainer, an engine or both."""
    from megatron_rl.reshard.execute import Transfer

    params = [[param for shard in side if shard.rank == rank for param in shard.params] for side in sides]
    kwargs = {"trainer_dtype": dtypes[0], "engine_dtype": dtypes[1], "cap_bytes": CAP} | kwargs
    return Transfer(plan, group, *params, **kwargs)


def _poisoned_group(**kwargs: Any) -> Any:
    """P2PGroup that overwrite what was sent once it is gone, and keep all buckets."""
    from megatron_rl.parallel.p2p import P2PGroup

    class Poisoned(P2PGroup):
        def post(self, sends: Any, receives: Any, phase: str) -> Any:
            pending = super().post(sends, receives, phase)
            wait = pending.wait

            def wait_and_poison() -> None:
                wait()
                for _, tensor in sends:
                    tensor.fill_(0xFF)

            pending.wait = wait_and_poison
            self.buckets = [*getattr(self, "buckets", []), *sends, *receives]
            return pending

    return Poisoned(**kwargs)


def _separate(rank: int, world: int, folder: str, trainers: Sequence[int], engines: Sequence[Sequence[int]]) -> Any:
    """Trainers and engines on ranks of their own: (wrong parameters, report, bytes sent) of this rank."""
    from megatron_rl.reshard.plan import make_plan
    from megatron_rl.reshard.publisher import ReshardPublisher

    trainer = PlainTrainer(folder, trainers, torch.float32)
    shards = _engine_shards(folder, engines)
    plan = make_plan(trainer.shards, shards)
    # The group is one of its own, as where trainers and engines were started apart.
    group = _poisoned_group(group=torch.distributed.new_group(list(range(world))), timeout_s=30)
    transfer = _transfer(rank, plan, (trainer.shards, shards), group, (torch.float32, torch.bfloat16))
    mine = [shard for shard in shards if shard.rank == rank]
    engine = PlainEngine(mine[0].params, torch.bfloat16) if mine else None
    live = trainer.tensors(rank)
    report = ReshardPublisher(transfer, engine, (lambda: live) if live else None).publish(0, expect_change=False)
    for _, bucket in group.buckets:
        bucket.fill_(0xFF)
    wrong = engine.wrong(trainer.export(torch.bfloat16)) if engine else []
    return wrong, report, plan.bytes_of(rank, 2), plan.num_waves


def test_engines_on_ranks_of_their_own_and_poisoned_buckets(small_folder: str) -> None:
    """W3, W4: disaggregated, tp2 to tp2. Buckets are overwritten as soon as their bytes have gone."""
    results = run_ranks(4, _separate, small_folder, [0, 1], [[2, 3]])
    assert [wrong for wrong, *_ in results] == [[]] * 4
    assert [report.moved_bytes for _, report, *_ in results] == [size.minimum for _, _, size, _ in results]
    assert all(report.moved_bytes == 0 and report.messages > 0 for _, report, *_ in results[:2])


def test_a_trainer_sends_each_byte_once_and_replicas_hand_it_on(small_folder: str) -> None:
    results = run_ranks(3, _separate, small_folder, [0], [[1], [2]])
    assert [wrong for wrong, *_ in results] == [[]] * 3
    sent = [size.sent for _, _, size, _ in results]
    assert sent[0] == results[0][2].held, "the model left the trainer once, not once for each replica"
    assert sent[1] + sent[2] == sent[0] and all(waves == 2 for *_, waves in results)
    assert all(report.staging_bytes <= CAP for _, report, *_ in results), "W9"


# Everything that must be refused, on all ranks, and never by a hang.


class Publish:
    """One rank of tp2 to one engine of tp2 (or to two engines), to be spoiled before it publishes."""

    def __init__(self, rank: int, folder: str, engine_tp: int = 2, cap_bytes: int = CAP, **options: Any) -> None:
        from megatron_rl.parallel.p2p import P2PGroup
        from megatron_rl.reshard.plan import make_plan
        from megatron_rl.reshard.publisher import ReshardPublisher

        trainer = PlainTrainer(folder, [0, 1])
        engines = _engine_shards(folder, [[0, 1]] if engine_tp == 2 else [[0], [1]])
        dtypes = (torch.float32, torch.float32)
        self.plan = make_plan(trainer.shards, engines)
        options.setdefault("timeout_s", 20)
        group = P2PGroup(**options)
        self.transfer = _transfer(rank, self.plan, (trainer.shards, engines), group, dtypes, cap_bytes=cap_bytes)
        self.engine = PlainEngine(engines[rank].params, torch.float32)
        self.live = trainer.tensors(rank)
        self.publisher = ReshardPublisher(self.transfer, self.engine, lambda: self.live)

    def refused(self, version: int = 0, expect_change: bool = False) -> str:
        """The error of a publish that has written nothing."""
        before = {name: tensor.nan_to_num(7.0) for name, tensor in self.engine.tensors.items()}
        held = self.engine.weight_version
        with pytest.raises((ReshardError, P2PError)) as caught:
            self.publisher.publish(version, expect_change=expect_change)
        assert all(torch.equal(before[name], tensor.nan_to_num(7.0)) for name, tensor in self.engine.tensors.items())
        assert self.engine.weight_version == held
        return str(caught.value)


NORM, FIRST_NORM = "model.norm.weight", "model.layers.0.input_layernorm.weight"


def _wrong_dtype(rank: int, folder: str) -> str:
    publish = Publish(rank, folder)
    if rank == 1:
        publish.engine.tensors[NORM] = publish.engine.tensors[NORM].bfloat16()
    return publish.refused()


def _missing_parameter(rank: int, folder: str) -> str:
    publish = Publish(rank, folder)
    if rank == 0:
        del publish.live["chunk0.decoder.final_layernorm.weight"]
    return publish.refused()


def _surplus_parameter(rank: int, folder: str) -> str:
    publish = Publish(rank, folder)
    publish.engine.tensors["model.visual.weight"] = torch.zeros(3)
    return publish.refused()


def _stale_plan(rank: int, folder: str) -> str:
    """The trainer's parameters became others after the plan was made, and after a publish."""
    publish = Publish(rank, folder)
    publish.publisher.publish(0, expect_change=False)
    if rank == 1:
        name = "chunk0.decoder.layers.1.mlp.linear_fc2.weight"
        publish.live[name] = publish.live[name][:, :8].contiguous()
    return publish.refused(1)


def _parted_memory(rank: int, folder: str) -> str:
    """A parameter that the engine shares was allocated anew by the trainer."""
    publish = Publish(rank, folder)
    name = "chunk0.decoder.final_layernorm.weight"
    publish.engine.shared = frozenset({NORM})
    publish.engine.tensors[NORM] = publish.live[name]
    publish.publisher.publish(0, expect_change=False)
    publish.live[name] = publish.live[name] * 2
    return publish.refused(1)


def _overlapping_memory(rank: int, folder: str) -> str:
    publish = Publish(rank, folder)
    publish.engine.tensors[FIRST_NORM] = publish.live["chunk0.decoder.layers.1.input_layernorm.weight"]
    return publish.refused()


def _unchanged_payload(rank: int, folder: str) -> str:
    publish = Publish(rank, folder)
    publish.publisher.publish(0, expect_change=False)
    if rank == 1:
        # One rank's change is enough.
        publish.live["chunk0.decoder.layers.1.mlp.linear_fc2.weight"][5, 7] += 1
    publish.publisher.publish(1, expect_change=True)
    return publish.refused(2, expect_change=True)


def _another_plan(rank: int, folder: str) -> str:
    return Publish(rank, folder, engine_tp=2 - rank).refused()


def _another_version(rank: int, folder: str) -> str:
    return Publish(rank, folder).refused(version=rank)


def _engine_that_cannot(rank: int, folder: str) -> str:
    publish = Publish(rank, folder)

    def begin_update() -> None:
        raise RolloutError("no memory for the weights")

    if rank == 1:
        publish.engine.begin_update = begin_update  # type: ignore[method-assign]
    return publish.refused()


def _small_cap(rank: int, folder: str) -> str:
    with pytest.raises(ReshardError) as caught:
        Publish(rank, folder, engine_tp=1, cap_bytes=600)
    return str(caught.value)


def _absent_rank(rank: int, folder: str) -> str:
    publish = Publish(rank, folder, group=torch.distributed.new_group([0, 1]), timeout_s=1.0)
    if rank == 1:
        time.sleep(2.5)
        return "rank 0: sync of weight version 0: 1 s"
    return publish.refused()


REFUSED: dict[str, tuple[Callable[[int, str], str], tuple[str, ...]]] = {
    "a wrong dtype": (_wrong_dtype, ("rank 1", NORM, "bfloat16", "float32")),
    "a missing parameter": (_missing_parameter, ("rank 0", "chunk0.decoder.final_layernorm.weight", "has no")),
    "a surplus parameter": (_surplus_parameter, ("rank 0", "rank 1", "model.visual.weight")),
    "a stale plan": (_stale_plan, ("rank 1", "layers.1.mlp.linear_fc2.weight", "[128, 8]", "[128, 112]")),
    "memory that the trainer left": (_parted_memory, (NORM, "allocated anew")),
    "memory that a sync would spoil": (_overlapping_memory, (FIRST_NORM, "overwrite the trainer's weights")),
    "an unchanged payload": (_unchanged_payload, ("version 2", "equal those published before")),
    "another plan": (_another_plan, ("rank 0", "rank 1", "do not agree")),
    "another version": (_another_version, ("rank 0", "rank 1", "do not agree")),
    "an engine that cannot": (_engine_that_cannot, ("rank 1", "no memory for the weights")),
    "a cap below one row": (_small_cap, ("rollout.sync_bucket_mb", "bytes", "raise it")),
    "a rank that does not come": (_absent_rank, ("rank 0", "sync of weight version 0", "1 s")),
}


def _all_refused(rank: int, world: int, folder: str) -> dict[str, str]:
    return {name: spoil(rank, folder) for name, (spoil, _) in REFUSED.items()}


@pytest.fixture(scope="module")
def refusals(small_folder: str) -> list[dict[str, str]]:
    """Rank -> case -> error."""
    return run_ranks(2, _all_refused, small_folder, timeout=90)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_all_ranks_and_named(refusals: list[dict[str, str]], name: str) -> None:
    """W5, W8, R7"""
    for error in (of_rank[name] for of_rank in refusals):
        assert all(part in error for part in REFUSED[name][1]), error


def _shares(rank: int, world: int, folder: str) -> Any:
    """One rank that trains and generates, with everything shared that can be; new weights written in place."""
    from megatron_rl.parallel.p2p import P2PGroup
    from megatron_rl.reshard.alias import find_sharing
    from megatron_rl.reshard.plan import make_plan
    from megatron_rl.reshard.publisher import ReshardPublisher

    trainer, engines = PlainTrainer(folder, [0]), _engine_shards(folder, [[0]])
    engine, live = PlainEngine(engines[0].params, torch.float32), trainer.tensors(0)
    shared = find_sharing(engine.params, trainer.shards[0].params).shared
    engine.tensors |= {name: live[source] for name, source in shared.items()}
    engine.shared = frozenset(shared)
    plan = make_plan(trainer.shards, engines)
    transfer = _transfer(0, plan, (trainer.shards, engines), P2PGroup(), (torch.float32, torch.float32))
    publisher = ReshardPublisher(transfer, engine, lambda: live)
    first = publisher.publish(0, expect_change=False)
    for tensor in live.values():
        tensor.mul_(3.0)
    second = publisher.publish(1, expect_change=True)
    export = {name: tensor * 3.0 for name, tensor in trainer.export(torch.float32).items()}
    copied = sum(tensor.nbytes for name, tensor in engine.tensors.items() if name not in shared)
    return engine.wrong(export), first, second, sum(engine.tensors[name].nbytes for name in shared), copied


def test_shared_parameters_cost_no_bytes(small_folder: str) -> None:
    wrong, first, second, aliased, copied = run_ranks(1, _shares, small_folder)[0]
    assert wrong == []
    assert first.aliased_bytes == second.aliased_bytes == aliased
    assert second.local_bytes == copied < aliased / 3, "queries, keys and values alone are copied"
    assert second.moved_bytes == second.staging_bytes == second.messages == 0
