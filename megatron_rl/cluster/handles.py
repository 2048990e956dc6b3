"""Values handed from process to process by reference: a worker keeps the value, and what travels is a few bytes.

With Ray the value lies in the object store of the node that handed it over, owned by the process that did. It stays
there as long as a handle to it exists anywhere, the controller's and those in a call's arguments included, and is freed
with the last. Whoever fetches it on that node reads the same memory; another node gets one copy for all its processes.
Without Ray a handle holds the value itself.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from megatron_rl.errors import RankDied
from megatron_rl.types import Handle

if TYPE_CHECKING:
    from ray import ObjectRef

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class InProcess(Generic[T]):
    """A value of this process."""

    value: T

    def fetch(self) -> T:
        """See Handle."""
        return self.value


@dataclass(frozen=True, eq=False)
class InStore(Generic[T]):
    """A value in Ray's object store. It travels in calls of Ray alone: those count the references."""

    ref: ObjectRef[T]

    def fetch(self) -> T:
        """See Handle. Raises RankDied if the rank that handed it over has died, or its node."""
        import ray
        from ray.exceptions import RayError

        try:
            return ray.get(self.ref)
        except RayError as error:
            # Nothing else fails here: what was put is a value and no task.
            reason = " ".join(str(error).split())
            raise RankDied(f"a value that a rank handed over is gone with the rank or its node: {reason}") from error


def hand_over(value: T) -> Handle[T]:
    """A handle to a value that nobody changes any more."""
    # Not imported here: a run without Ray does not load it.
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return InProcess(value)
    return InStore(ray.put(value))
