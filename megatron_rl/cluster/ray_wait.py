"""Waiting for calls on several actors: who answered, who failed, who died, who is late."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

POLL_S = 0.5
"""Longest sleep between looks at whether the wait is called off."""
GATHER_S = 0.02
"""After a first answer, how long others may arrive before the wait looks at them together. Short, so that errors keep
their order: the first is usually the cause of those that follow."""
GRACE_S = 5.0
"""After a first failure, how long the other ranks may still answer: a rank's death often arrives after the
errors that it causes on others, and ranks that wait for it in a collective never answer."""


@dataclass
class Outcome:
    """The results and errors of one call."""

    answers: dict[int, Any] = field(default_factory=dict)
    errors: list[tuple[int, RayTaskError]] = field(default_factory=list)
    """(rank, error) in the order of arrival; of those that are looked at together, the first and then by rank."""
    dead: dict[int, str] = field(default_factory=dict)
    """rank -> Ray's account of its end."""
    late: list[int] = field(default_factory=list)
    """Ranks without an answer when the wait ended, in order."""
    hung: bool = False
    """The wait ended since `hangs` said so of all of `late`."""


def never(pending: Sequence[int]) -> bool:
    """No rank hangs."""
    return False


def wait_for_ranks(
    refs: Mapping[ray.ObjectRef, int],
    timeout_s: float,
    called_off: Callable[[], bool],
    hangs: Callable[[Sequence[int]], bool] = never,
) -> Outcome:
    """Wait until every rank answered, timeout_s passed, GRACE_S passed after a failure, the wait is called off, or the
    ranks that are waited for hang.

    Each question to Ray goes over all pending ranks, so there are few: after a first answer, the others have a short
    while to arrive as well, twice as long after each look (up to POLL_S).
    """
    outcome = Outcome()
    pending = dict(refs)
    end = time.monotonic() + timeout_s
    gather_s = GATHER_S
    while pending and not called_off():
        left_s = end - time.monotonic()
        done = {ref: pending.pop(ref) for ref in _ready(pending, 1, min(left_s, POLL_S))}
        if not done and left_s <= 0:
            break
        if done and pending:
            others = _ready(pending, len(pending), min(end - time.monotonic(), gather_s))
            done |= {ref: pending.pop(ref) for ref in others}
            gather_s = min(2 * gather_s, POLL_S)
        _take(done, outcome)
        if done and (outcome.errors or outcome.dead):
            end = min(end, time.monotonic() + GRACE_S)
        if pending and hangs(sorted(pending.values())):
            outcome.hung = True
            break
    outcome.late = sorted(pending.values())
    return outcome


def _ready(pending: Mapping[ray.ObjectRef, int], count: int, timeout_s: float) -> list[ray.ObjectRef]:
    """At most `count` of the calls that have ended, once there are so many or the time is over."""
    done, _ = ray.wait(list(pending), num_returns=count, timeout=max(0.0, timeout_s))
    return done


def unwrapped(error: RayTaskError, note: str) -> BaseException:
    """The worker's own exception, with the note and its traceback on the worker; the Ray error where it has none."""
    cause = error.cause if isinstance(error.cause, BaseException) else error
    if note:
        cause.add_note(note)
        cause.add_note(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip())
    return cause


def _take(done: Mapping[ray.ObjectRef, int], outcome: Outcome) -> None:
    """Add the results and errors of calls that have ended."""
    try:
        # One question for all of them; it fails as a whole if any call did.
        outcome.answers.update(zip(done.values(), ray.get(list(done)), strict=True))
        return
    except RayError:
        pass
    for ref, rank in done.items():
        try:
            outcome.answers[rank] = ray.get(ref)
        except RayTaskError as error:
            outcome.errors.append((rank, error))
        except RayError as error:
            # Ray's text: a headline, an indented table of ids, then the reason.
            lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\t")]
            outcome.dead[rank] = " ".join(lines)
