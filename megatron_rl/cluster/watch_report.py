"""What is said of ranks that died, that hang, or whose node is lost. Pure: from what was seen to the text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.cluster.watch import Sign
from megatron_rl.cluster.watch_probe import Probe

SHOWN_FRAMES = 10
"""Innermost frames of a place where ranks hang."""
LOOKED_AT_FRAMES = 8
COLLECTIVES = ("torch/distributed/", "pipeline_parallel/p2p_communication.py", "megatron_rl/parallel/p2p.py")
"""Files whose frames mean that a thread waits for other ranks."""
RAYS_OWN_KILL = "running low on memory"
"""Ray's words where it has ended a process itself, so that its node does not run out of memory."""
RAYS_GUESSES = "connection error code"
"""In what Ray says of a process that is gone, with a list of common causes."""
WORK_BEGINS = " in timed_call: "
"""In the last frame of a stack that is not the worker's own."""


@dataclass(frozen=True)
class Home:
    """Where a rank runs."""

    host: str
    pid: int

    def __str__(self) -> str:
        return f"{self.host}, process {self.pid}"


def ranges(numbers: Collection[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def ranks(numbers: Collection[int]) -> str:
    """ "rank 3", "ranks 0-2, 5"."""
    return f"rank{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"


def in_collective(sign: Sign) -> bool:
    """Whether the rank waits for others."""
    innermost = sign.stack[-LOOKED_AT_FRAMES:]
    return bool(sign.collective) or any(file in frame.split(" in ")[0] for frame in innermost for file in COLLECTIVES)


# A death.


def killed_for_memory(reason: str, sign: Sign | None, seen: Probe | None) -> str:
    """Whose words say that memory was the reason of a death; "" if none do."""
    if RAYS_OWN_KILL in reason:
        return "killed for memory by Ray, since its node ran low"
    if sign is not None and seen is not None and seen.oom_kills > sign.oom_kills:
        return "killed for memory by the kernel, which has just counted such a kill on its node"
    return ""


def why_it_died(reason: str, sign: Sign | None, seen: Probe | None) -> str:
    """Ray's reason, in short where it is a list of what may have been, and what the kernel counts."""
    memory = killed_for_memory(reason, sign, seen)
    if RAYS_GUESSES not in reason:
        return f"{memory}. {reason}" if memory else reason
    if memory:
        return memory
    counted = "; the kernel has counted no kill for memory there" if sign is not None and seen is not None else ""
    return f"its process ended without a word to Ray: killed by a signal, or crashed{counted}"


def death_line(rank: int, home: Home, reason: str, sign: Sign | None, seen: Probe | None) -> str:
    """rank, host, what it was at, why, its last log line."""
    what = f", after {sign.what!r}" if sign is not None else ""
    line = (seen.last_line if seen is not None else "") or (sign.line if sign is not None else "")
    return f"rank {rank} died ({home}{what}): {why_it_died(reason, sign, seen)}{last_line(line)}"


def last_line(line: str) -> str:
    """The end of a sentence on a rank."""
    return f"; its last log line: {line}" if line else "; it left no log line"


def node_line(host: str, numbers: Collection[int], reason: str, signs: Mapping[int, Sign]) -> str:
    """A node that is gone with its ranks."""
    lines = [f"node {host} is lost, with {ranks(numbers)}: {reason}"]
    lines += [
        f"rank {rank} was last at {signs[rank].what!r}{last_line(signs[rank].line)}"
        for rank in numbers
        if rank in signs
    ]
    return "\n".join(lines)


# A hang.


@dataclass(frozen=True)
class Hang:
    """What was seen of a call whose ranks do not go on."""

    pending: Sequence[int]
    answered: Sequence[int]
    signs: Mapping[int, Sign]
    silent: Collection[int]
    """Ranks that give no signs any more."""
    probes: Mapping[int, Probe]
    homes: Mapping[int, Home]


def hang_lines(hang: Hang) -> list[str]:
    """The likely cause first; then the ranks by the place where they are; then all threads of the cause."""
    waiting = [rank for rank in hang.pending if rank not in hang.silent and _waits(hang, rank)]
    causes = [rank for rank in hang.pending if rank not in waiting]
    lines = [_cause(hang, waiting, causes)]
    for rank in hang.pending:
        if rank in hang.silent:
            lines.append(_silent_line(hang, rank))
    for where, members in _by_place(hang).items():
        lines.append(_place_line(hang, where, members))
    for rank in causes[:2]:
        threads = _threads(hang, rank)
        lines += [f"other threads of rank {rank}:\n{threads}"] if threads else []
    return lines


def _waits(hang: Hang, rank: int) -> bool:
    return rank in hang.signs and in_collective(hang.signs[rank])


def _cause(hang: Hang, waiting: Sequence[int], causes: Sequence[int]) -> str:
    if waiting and causes:
        verb = "is" if len(causes) == 1 else "are"
        return (
            f"the likely cause: {ranks(causes)}, which {verb} not in the collective that {ranks(waiting)} "
            f"wait{'s' if len(waiting) == 1 else ''} in"
        )
    if waiting and hang.answered:
        still = f"{ranks(waiting)} still wait{'s' if len(waiting) == 1 else ''} in a collective"
        return f"the likely cause: {ranks(hang.answered)}, done with the call while {still}"
    if waiting:
        behind = min(hang.signs[rank].beats for rank in waiting)
        last = [rank for rank in waiting if hang.signs[rank].beats == behind]
        if len(last) < len(waiting):
            return f"all wait in collectives; {ranks(last)} came least far: look there first"
        return "all wait in collectives: different ones, or the network between them is broken"
    return f"the likely cause: {ranks(causes)}"


def _silent_line(hang: Hang, rank: int) -> str:
    sign, seen = hang.signs.get(rank), hang.probes.get(rank)
    state = f"its process {seen.state}" if seen is not None else "its node could not be asked"
    what = f"; it was last at {sign.what!r}" if sign is not None else ""
    line = (seen.last_line if seen is not None else "") or (sign.line if sign is not None else "")
    return f"rank {rank} ({hang.homes[rank]}) gives no sign: {state}{what}{last_line(line)}"


def _by_place(hang: Hang) -> dict[tuple[str, ...], list[int]]:
    places: dict[tuple[str, ...], list[int]] = {}
    for rank in hang.pending:
        if rank in hang.signs and rank not in hang.silent:
            places.setdefault(hang.signs[rank].stack, []).append(rank)
    return places


def _place_line(hang: Hang, stack: tuple[str, ...], members: Sequence[int]) -> str:
    first = hang.signs[members[0]]
    longest = max(hang.signs[rank].age_s for rank in members)
    homes = ", ".join(f"{hang.homes[rank]}" for rank in members[:4]) + (", ..." if len(members) > 4 else "")
    ends = sorted({hang.signs[rank].collective for rank in members} - {""})
    own = next((number + 1 for number, frame in enumerate(stack) if WORK_BEGINS in frame), 0)
    frames = "\n".join(f"  {frame}" for frame in stack[own:][-SHOWN_FRAMES:]) or "  (no frames)"
    return (
        f"{ranks(members)} ({homes}): for {longest:.0f} s since {first.what!r}"
        + (f", in {'; '.join(ends)}" if ends else "")
        + f"{last_line(first.line)}; at\n{frames}"
    )


def _threads(hang: Hang, rank: int) -> str:
    if rank in hang.silent:
        return hang.probes[rank].stacks if rank in hang.probes else ""
    return hang.signs[rank].threads if rank in hang.signs else ""
