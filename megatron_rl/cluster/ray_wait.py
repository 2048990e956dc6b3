"""Waiting for calls on several actors: who answered, who failed, who died, who is late."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

POLL_S = 0.5
"""Longest sleep between looks at whether the wait is called off."""
GRACE_S = 5.0
"""After a first failure, how long the other ranks may still answer: a rank's death often arrives after the
errors that it causes on others, and ranks that wait for it in a collective never answer."""


@dataclass
class Outcome:
    """What came of one call."""

    answers: dict[int, Any] = field(default_factory=dict)
    errors: list[tuple[int, RayTaskError]] = field(default_factory=list)
    """(rank, error) in the order of arrival."""
    dead: dict[int, str] = field(default_factory=dict)
    """rank -> Ray's account of its end."""
    late: list[int] = field(default_factory=list)
    """Ranks without an answer when the wait ended, in order."""


def wait_for_ranks(refs: Mapping[ray.ObjectRef, int], timeout_s: float, called_off: Callable[[], bool]) -> Outcome:
    """Wait until every rank answered, timeout_s passed, GRACE_S passed after a failure, or the wait is called off."""
    outcome = Outcome()
    pending = dict(refs)
    end = time.monotonic() + timeout_s
    while pending and not called_off():
        left_s = end - time.monotonic()
        done, _ = ray.wait(list(pending), num_returns=1, timeout=max(0.0, min(left_s, POLL_S)))
        if not done and left_s <= 0:
            break
        for ref in done:
            _take(ref, pending.pop(ref), outcome)
        if done and (outcome.errors or outcome.dead):
            end = min(end, time.monotonic() + GRACE_S)
    outcome.late = sorted(pending.values())
    return outcome


def unwrapped(error: RayTaskError, note: str) -> BaseException:
    """The worker's own exception, with the note and its traceback on the worker; the Ray error where it has none."""
    cause = error.cause if isinstance(error.cause, BaseException) else error
    if note:
        cause.add_note(note)
        cause.add_note(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip())
    return cause


def _take(ref: ray.ObjectRef, rank: int, outcome: Outcome) -> None:
    try:
        outcome.answers[rank] = ray.get(ref)
    except RayTaskError as error:
        outcome.errors.append((rank, error))
    except RayError as error:
        # Ray's text: a headline, an indented table of ids, then the reason.
        lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\t")]
        outcome.dead[rank] = " ".join(lines)
