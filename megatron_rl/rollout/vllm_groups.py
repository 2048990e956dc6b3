"""vLLM's process groups inside processes that already have a default group (the trainer's).

vLLM takes every rank of the default group for one of its own and builds the groups of all engines on all ranks. Here an
engine is built by its own ranks alone: vLLM is shown a world of that size, its rank numbers 0..t-1 stand for the
engine's ranks, and groups are made by their members without the others. So ranks that only train need no part in it,
and the number of groups a rank makes does not grow with the number of engines.

Example: ranks=(4, 5), t = 2. vLLM's tensor-parallel group [0, 1] is the group of ranks 4 and 5.
"""

from __future__ import annotations

import contextlib
import functools
import os
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from vllm.distributed import parallel_state
from vllm.v1.engine import core

from megatron_rl.errors import RolloutError
from megatron_rl.parallel.collectives import keeps_group_order

_open: list[tuple[int, ...]] = []
"""Ranks of every open engine of this process; they share vLLM's groups, which are global variables."""
_made: Counter[tuple[int, ...]] = Counter()
"""Groups that engines have made in this process, by their ranks."""


def _group_name(ranks: Sequence[int], use_hashed_name: bool) -> Any:
    """A group's name, which its members must have alike and no other group may ever have had.

    torch takes the ranks and the number of groups that the process is in: ranks of different pipeline stages are in
    different numbers of them, and after a group was destroyed the name of an older one comes again.
    """
    assert use_hashed_name
    _made[tuple(ranks)] += 1
    return f"engine-{'-'.join(map(str, ranks))}-{_made[tuple(ranks)]}"


def check_ranks(ranks: Sequence[int]) -> None:
    """Refuse ranks that vLLM cannot be given. Raises RolloutError."""
    rank = dist.get_rank()
    if rank not in ranks:
        raise RolloutError(
            f"rank {rank} is asked to start an engine of ranks {list(ranks)}, to which it does not belong"
        )
    if len(set(ranks)) != len(ranks) or (not keeps_group_order() and list(ranks) != sorted(ranks)):
        raise RolloutError(
            f"an engine's ranks {list(ranks)} must differ, and ascend with this torch, which orders a group by rank: "
            "vLLM's collectives would put the parts in another order"
        )
    if _open and _open[-1] != tuple(ranks):
        raise RolloutError(
            f"this process has an engine of ranks {list(_open[-1])} and cannot start one of ranks {list(ranks)}: "
            "vLLM's groups are global; close the first"
        )


@contextlib.contextmanager
def engine_groups(ranks: tuple[int, ...], local_rank: int) -> Iterator[None]:
    """While an engine starts: vLLM's groups span `ranks`, in order. All of them enter together.

    local_rank: index of this rank's device on its node. RolloutError where `ranks` do not fit (check_ranks).
    """
    check_ranks(ranks)
    slot, ordered = ranks.index(dist.get_rank()), keeps_group_order()
    make_group, make_world, new_group, world_size = (
        parallel_state.init_model_parallel_group,
        parallel_state.init_world_group,
        dist.new_group,
        dist.get_world_size,
    )

    def group_of_engine(group_ranks: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        return make_group([[ranks[i] for i in group] for group in group_ranks], *args, **kwargs)

    def world_of_engine(_: list[int], *args: Any, **kwargs: Any) -> Any:
        world = make_world(list(ranks), *args, **kwargs)
        # Names vLLM's shared memory on CPU: equal in an engine, and unlike any other engine's on this machine.
        name: list[Any] = [uuid.uuid4().hex]
        # Every rank of the engine comes here, because each makes vLLM's world group.
        dist.broadcast_object_list(name, src=ranks[0], group=world.cpu_group)
        os.environ["VLLM_DIST_IDENT"] = name[0]
        return world

    def size_of_engine(group: Any = None) -> int:
        return len(ranks) if group is None else world_size(group)

    @functools.wraps(new_group)
    def group_of_members(group_ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() not in group_ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        if ordered:
            kwargs["sort_ranks"] = False
        return new_group(group_ranks, *args, use_local_synchronization=True, **kwargs)

    assert hasattr(c10d, "_process_group_name"), "this torch names groups in a way that is not known here"
    naming = c10d._process_group_name
    places: dict[str, Any] = {"RANK": str(slot), "LOCAL_RANK": str(local_rank)}
    before = {name: os.environ.get(name) for name in places}
    os.environ.update(places)
    parallel_state.init_model_parallel_group, parallel_state.init_world_group = group_of_engine, world_of_engine
    dist.new_group, dist.get_world_size, c10d._process_group_name = group_of_members, size_of_engine, _group_name
    try:
        yield
    finally:
        parallel_state.init_model_parallel_group, parallel_state.init_world_group = make_group, make_world
        dist.new_group, dist.get_world_size, c10d._process_group_name = new_group, world_size, naming
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    _open.append(ranks)


@contextlib.contextmanager
def default_group_kept() -> Iterator[None]:
    """While an engine shuts down: vLLM would take the default process group with it, which is the trainer's."""
    module: Any = core
    if not hasattr(module, "cleanup_dist_env_and_memory"):
        yield
        return
    cleanup, module.cleanup_dist_env_and_memory = module.cleanup_dist_env_and_memory, lambda: None
    try:
        yield
    finally:
        module.cleanup_dist_env_and_memory = cleanup


def leave_groups() -> None:
    """After an engine was shut down; with the last one vLLM forgets its groups. The trainer's groups stay.

    torch's groups of the engine's ranks stay too, until the default group goes.
    """
    _open.pop()
    if _open:
        return
    held = {name: one for name, one in vars(parallel_state).items() if isinstance(one, parallel_state.GroupCoordinator)}
    for communicator in {one.device_communicator for one in held.values()}:
        if communicator is not None:
            communicator.destroy()
    for name in (*held, "_NODE_COUNT"):
        setattr(parallel_state, name, None)


def device_index() -> int:
    """Index of this rank's device among those the process sees; 0 on CPU."""
    return torch.cuda.current_device() if torch.cuda.is_available() else 0
