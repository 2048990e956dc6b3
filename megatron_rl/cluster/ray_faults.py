"""What the controller does to name a fault: it reads the ranks' Signs, looks at their nodes, and makes the error."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_rl.cluster import ray_runtime
from megatron_rl.cluster.rank_host import RankLocation
from megatron_rl.cluster.ray_wait import Outcome, unwrapped
from megatron_rl.cluster.watch import Sign
from megatron_rl.cluster.watch_lookout import Lookout
from megatron_rl.cluster.watch_probe import Probe, probe
from megatron_rl.cluster.watch_report import (
    Hang,
    Home,
    death_line,
    hang_lines,
    node_line,
    ranges,
    ranks,
)
from megatron_rl.errors import ClusterError, NodeLost, P2PError, RankDied, RankHung

PROBE_S = 20.0
"""How long other nodes may take to look at processes of theirs."""
MOST_PROBED = 16
"""Ranks whose processes, and nodes that, are looked at for one error."""
CONNECT_S = 2.0
NODE_DIED = ("its node has died", "The node died", "node was terminated")
"""Ray's words where a rank died with its node."""

Looked = tuple[int, str, str, bool]
"""(pid, log, oom_file, stacks): what `probe` takes."""


class RankWatch:
    """The ranks of one group, as the controller can see them from outside."""

    def __init__(self, group: str, hang_timeout_s: float) -> None:
        """group: an id that no other group has."""
        self._group, self._hang_timeout_s = group, hang_timeout_s
        self.places: list[RankLocation] = []
        """Of the ranks, in their order; empty until they are placed."""

    def key(self, rank: int) -> str:
        """Where the rank keeps its Sign."""
        return f"megatron_rl/{self._group}/{rank}"

    def forget(self) -> None:
        """Remove the Signs."""
        ray_runtime.forget(f"megatron_rl/{self._group}/")

    def signs(self, call: int, numbers: Sequence[int]) -> dict[int, Sign]:
        """The ranks' Signs that are of the call."""
        keys = {self.key(rank): rank for rank in numbers}
        signs = {keys[key]: Sign.from_json(text) for key, text in ray_runtime.kept(list(keys)).items()}
        return {rank: sign for rank, sign in signs.items() if sign.call == call}

    def lookout(self, call: int, quiet_s: float) -> Lookout:
        """Looks at the ranks of the call."""
        return Lookout(lambda numbers: self.signs(call, numbers), quiet_s)

    # The errors.

    def death(self, where: str, call: int, outcome: Outcome) -> ClusterError:
        """Of ranks that died: NodeLost if their node did, or else RankDied."""
        signs = self.signs(call, sorted(outcome.dead))
        lost = self._lost_nodes(outcome.dead)
        lines = self._node_lines(where, lost, outcome.dead, signs)
        on_live = [rank for rank in sorted(outcome.dead) if not any(rank in numbers for numbers in lost.values())]
        seen = self._probe(on_live, stacks=False)
        lines += [
            f"{where}: {death_line(rank, self.home(rank), outcome.dead[rank], signs.get(rank), seen.get(rank))}"
            for rank in on_live
        ]
        return (NodeLost if lost else RankDied)("\n".join([*lines, *_error_lines(where, outcome)]))

    def lost_behind(self, where: str, call: int, outcome: Outcome) -> NodeLost | None:
        """The node that is behind broken connections or a hang, if ranks without an answer are on one that takes none:
        Ray itself reports their deaths much later.
        """
        if not all(isinstance(unwrapped(error, ""), P2PError) for _, error in outcome.errors):
            return None
        reasons = dict.fromkeys(outcome.late, "its raylet takes no connections")
        lost = self._lost_nodes(reasons)
        if not lost:
            return None
        lines = self._node_lines(where, lost, reasons, self.signs(call, outcome.late))
        return NodeLost("\n".join([*lines, *_error_lines(where, outcome)]))

    def hang(self, where: str, outcome: Outcome, lookout: Lookout, last_call: str) -> RankHung:
        """Of a call whose ranks do not go on."""
        seen = self._probe(lookout.silent, stacks=True)
        homes = {rank: self.home(rank) for rank in outcome.late}
        hang = Hang(outcome.late, sorted(outcome.answers), lookout.signs, lookout.silent, seen, homes)
        head = (
            f"{where}: {ranks(outcome.late)} of {len(self.places)} gave no sign of progress for "
            f"{self._hang_timeout_s:g} s (answered: {ranges(hang.answered) or 'none'}; last call that ended: "
            f"{last_call}) -- raise cluster.hang_timeout_s if one piece of work takes that long"
        )
        return RankHung("\n".join([head, *hang_lines(hang)]))

    def late_lines(self, call: int, late: Sequence[int]) -> list[str]:
        """Where ranks are that miss a deadline."""
        signs = self.signs(call, late)
        if not self.places:
            return []
        silent = [rank for rank in late if rank not in signs or not signs[rank].stack]
        homes = {rank: self.home(rank) for rank in late}
        return hang_lines(Hang(late, (), signs, silent, self._probe(silent, stacks=True), homes))

    def home(self, rank: int) -> Home:
        """Host and process of the rank."""
        if rank >= len(self.places):
            return Home("not placed yet", 0)
        return Home(self.places[rank].host, self.places[rank].pid)

    def _node_lines(
        self, where: str, lost: Mapping[str, list[int]], reasons: Mapping[int, str], signs: Mapping[int, Sign]
    ) -> list[str]:
        lines: list[str] = []
        for numbers in lost.values():
            host = f"{self.places[numbers[0]].host} ({self.places[numbers[0]].ip})"
            lines.append(f"{where}: {node_line(host, numbers, reasons[numbers[0]], signs)}")
        return lines

    def _lost_nodes(self, reasons: Mapping[int, str]) -> dict[str, list[int]]:
        """Node id -> its ranks among those given, of nodes that are gone. reasons: rank -> Ray's words."""
        alive = ray_runtime.live_nodes()
        by_node: dict[str, list[int]] = {}
        for rank in sorted(reasons):
            if rank < len(self.places):
                by_node.setdefault(self.places[rank].node_id, []).append(rank)
        lost: dict[str, list[int]] = {}
        for node, numbers in list(by_node.items())[:MOST_PROBED]:
            said = any(words in reasons[rank] for words in NODE_DIED for rank in numbers)
            if said or (alive is not None and not (node in alive and _answers(alive[node]))):
                lost[node] = numbers
        return lost

    def _probe(self, numbers: Collection[int], stacks: bool) -> dict[int, Probe]:
        """Look at the ranks' processes, on their nodes; those whose node does not answer are left out."""
        by_node: dict[str, list[int]] = {}
        for rank in sorted(numbers)[:MOST_PROBED]:
            if rank < len(self.places):
                by_node.setdefault(self.places[rank].node_id, []).append(rank)
        here = ray_runtime.own_node()
        found: dict[int, Probe] = {}
        asked: dict[ray.ObjectRef, list[int]] = {}
        for node, members in by_node.items():
            looked: list[Looked] = [
                (place.pid, place.log, place.oom_file, stacks) for place in (self.places[rank] for rank in members)
            ]
            if node == here:
                found.update(zip(members, _probe_all(looked), strict=True))
            else:
                asked[_ask(node, looked)] = members
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=PROBE_S) if asked else ([], [])
        for ref in done:
            try:
                found.update(zip(asked[ref], ray.get(ref), strict=True))
            except RayError:
                # A node that is gone cannot be asked; its ranks are named without a probe.
                continue
        return found


def _error_lines(where: str, outcome: Outcome) -> list[str]:
    causes = [(rank, unwrapped(error, "")) for rank, error in outcome.errors]
    return [f"{where}: rank {rank} failed: {type(cause).__name__}: {cause}" for rank, cause in causes]


def _probe_all(looked: Sequence[Looked]) -> list[Probe]:
    return [probe(pid, log, oom, stacks) for pid, log, oom, stacks in looked]


def _ask(node: str, looked: Sequence[Looked]) -> ray.ObjectRef:
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(_probe_all).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    return task.remote(list(looked))


def _answers(address: tuple[str, int]) -> bool:
    """Whether a node's raylet takes connections: Ray itself needs a while to see that one does not."""
    try:
        with socket.create_connection(address, timeout=CONNECT_S):
            return True
    except OSError:
        return False
