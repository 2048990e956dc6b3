"""How a rank says where it is, and how the controller tells a hang from long work and a crash from a kill."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.cluster.rank_errors import LESS_MEMORY, named_error
from megatron_rl.cluster.watch import Sign, Watch, Watchdog, oldest_pending, period_s
from megatron_rl.cluster.watch_lookout import Lookout
from megatron_rl.cluster.watch_probe import STATES, Probe, last_log_line, oom_file, oom_kills, probe, telling_line
from megatron_rl.cluster.watch_report import Hang, Home, death_line, hang_lines, in_collective, ranges
from megatron_rl.errors import DataError, DeviceError, OutOfMemory, P2PError
from megatron_rl.observe.beat import beat, last_beat, unwatched

WAITS = (
    "backend.py:49 in timed_call: value",
    "a.py:3 in step: loss()",
    "torch/distributed/x.py:9 in all_reduce: wait()",
)
SLEEPS = ("backend.py:49 in timed_call: value", "a.py:7 in step: time.sleep(9)")


def sign(tick: int = 1, age_s: float = 0.0, stack: tuple[str, ...] = (), beats: int = 7) -> Sign:
    return Sign(1, tick, beats, "micro-batch 2 of 4", age_s, "12:00:00 [policy 1 3] INFO x: all is well", 0, stack)


# The rank's side.


class Store:
    """Keeps what a watchdog says."""

    def __init__(self) -> None:
        self.signs: list[Sign] = []
        self.came = threading.Event()

    def __call__(self, text: str) -> None:
        self.signs.append(Sign.from_json(text))
        self.came.set()

    def next(self) -> Sign:
        assert self.came.wait(5.0)
        self.came.clear()
        return self.signs[-1]


@pytest.fixture
def store() -> Iterator[Store]:
    yield Store()


def test_a_call_without_beats_leaves_the_stacks_of_all_threads_and_one_with_beats_does_not(store: Store):
    watchdog = Watchdog(store, lambda: 3)
    done = threading.Event()
    helper = threading.Thread(target=done.wait, name="helper")
    helper.start()
    with watchdog.watching(Watch(5, quiet_s=1.0, late_s=60.0), "train.step"):
        end = time.monotonic() + 1.3
        while time.monotonic() < end:
            beat("micro-batch 1 of 2")
            time.sleep(0.05)
        assert {one.stack for one in store.signs} == {()}, "it goes on"
        assert {(one.call, one.what, one.oom_kills) for one in store.signs} == {(5, "micro-batch 1 of 2", 3)}
        time.sleep(1.5)
    hung = store.signs[-1]
    assert hung.what == "micro-batch 1 of 2" and hung.age_s >= 1.0
    assert "time.sleep(1.5)" in hung.stack[-1] and "test_watch.py" in hung.stack[-1]
    assert "thread helper" in hung.threads and "watchdog" not in hung.threads
    assert [one.tick for one in store.signs] == list(range(1, len(store.signs) + 1))
    count = len(store.signs)
    time.sleep(0.5)
    assert len(store.signs) == count, "nothing is said between calls"
    done.set()
    helper.join()


def test_near_the_deadline_a_call_leaves_its_stack_whatever_its_beats(store: Store):
    with Watchdog(store, lambda: 0).watching(Watch(1, quiet_s=60.0, late_s=0.1), "step"):
        assert store.next().stack
    assert store.signs[-1].age_s < 60.0


def test_a_short_call_costs_no_sign(store: Store):
    watchdog = Watchdog(store, lambda: 0)
    for number in range(10):
        with watchdog.watching(Watch(number, 1.0, 1.0), "step"):
            time.sleep(0.03)
    time.sleep(0.6)
    assert store.signs == []


def test_in_a_call_of_someone_elses_code_the_process_speaks_for_itself(store: Store):
    with Watchdog(store, lambda: 0).watching(Watch(1, quiet_s=1.0, late_s=60.0), "generate"), unwatched("their engine"):
        time.sleep(2.0)
    assert {one.what for one in store.signs} == {"their engine"} and {one.stack for one in store.signs} == {()}
    assert last_beat().what == "after their engine"


def test_a_sign_survives_its_text():
    one = sign(stack=WAITS)
    assert Sign.from_json(one.to_json()) == one and json.loads(one.to_json())["call"] == 1


# The controller's side.


class Ranks:
    """Signs of two ranks at a time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.read = 0
        self.signs: dict[int, Sign] = {}
        self.lookout = Lookout(self._read, 100.0, lambda: self.now)

    def _read(self, ranks) -> dict[int, Sign]:
        self.read += 1
        return {rank: self.signs[rank] for rank in ranks if rank in self.signs}

    def hangs(self, at: float, **signs: Sign) -> bool:
        self.now, self.signs = at, {int(name[1:]): one for name, one in signs.items()}
        return self.lookout.hangs([0, 1])


def test_signs_are_read_late_and_seldom():
    ranks = Ranks()
    for tenth in range(490):
        assert not ranks.hangs(tenth / 10)
    assert ranks.read == 0
    for tenth in range(500, 1000):
        ranks.hangs(tenth / 10, r0=sign(tenth), r1=sign(tenth))
    assert ranks.read == pytest.approx(50 / period_s(100.0), abs=1)


def test_a_hang_is_one_of_all_ranks():
    ranks = Ranks()
    assert not ranks.hangs(60.0, r0=sign(1, 60.0), r1=sign(1, 60.0))
    assert not ranks.hangs(101.0, r0=sign(9, 101.0, WAITS), r1=sign(9, 2.0)), "rank 1 goes on, and rank 0 waits for it"
    assert not ranks.hangs(400.0, r0=sign(60, 400.0, WAITS), r1=sign(60, 2.0))
    assert ranks.hangs(510.0, r0=sign(80, 510.0, WAITS), r1=sign(80, 105.0, SLEEPS))
    assert ranks.lookout.silent == []


def test_signs_that_stand_still_or_never_come_are_a_hang_too():
    ranks = Ranks()
    assert not ranks.hangs(50.0, r0=sign(9, 10.0))
    assert not ranks.hangs(99.0, r0=sign(9, 10.0))
    assert ranks.hangs(105.0, r0=sign(9, 10.0))
    assert ranks.lookout.silent == [0, 1]


def test_a_call_with_an_endless_limit_is_not_looked_at():
    now = [0.0]
    lookout = Lookout(lambda ranks: pytest.fail("read"), float("inf"), lambda: now[0])
    now[0] = 1e9
    assert not lookout.hangs([0])


# What is said.


def hang(signs: dict[int, Sign], silent: tuple[int, ...] = (), answered: tuple[int, ...] = (), **probes: Probe) -> str:
    pending = sorted({*signs, *silent})
    homes = {rank: Home(f"node{rank // 4}", 100 + rank) for rank in range(8)}
    seen = {int(name[1:]): one for name, one in probes.items()}
    return "\n".join(hang_lines(Hang(pending, answered, signs, silent, seen, homes)))


def test_the_rank_that_is_not_in_the_collective_is_named_first_and_equal_places_once():
    signs = {rank: sign(3, 301.0, WAITS) for rank in range(8)} | {
        5: replace(sign(3, 310.0, SLEEPS), threads="thread b")
    }
    text = hang(signs)
    assert text.startswith("the likely cause: rank 5, which is not in the collective that ranks 0-4, 6-7 wait in")
    assert "ranks 0-4, 6-7 (node0, process 100, node0, process 101" in text
    assert "for 301 s since 'micro-batch 2 of 4'" in text
    assert text.count("in all_reduce") == 1 and "rank 5 (node1, process 105): for 310 s" in text
    assert "timed_call" not in text, "frames of ours are left out"
    assert "all is well" in text and "other threads of rank 5:\nthread b" in text


def test_a_stopped_process_is_the_cause_and_its_state_is_said():
    stopped = Probe("12:01:00 last words", STATES["T"], 0, stacks="py-spy's stacks")
    text = hang({0: sign(3, 301.0, WAITS), 1: sign(2)}, silent=(1,), r1=stopped)
    assert "the likely cause: rank 1, which is not in the collective that rank 0 waits in" in text
    assert "rank 1 (node0, process 101) gives no sign: its process is stopped by a signal (SIGSTOP)" in text
    assert "it was last at 'micro-batch 2 of 4'; its last log line: 12:01:00 last words" in text
    assert "other threads of rank 1:\npy-spy's stacks" in text
    assert "its node could not be asked" in hang({0: sign(3, 301.0, WAITS)}, silent=(1,))


def test_ranks_that_left_early_or_came_least_far_are_named():
    assert "the likely cause: rank 1, done with the call while rank 0 still waits" in hang(
        {0: sign(3, 301.0, WAITS)}, answered=(1,)
    )
    signs = {0: sign(3, 301.0, WAITS), 1: sign(3, 301.0, WAITS, beats=5), 2: sign(3, 301.0, WAITS)}
    assert "all wait in collectives; rank 1 came least far" in hang(signs)
    assert "the network between them" in hang({0: sign(3, 301.0, WAITS), 1: sign(3, 301.0, WAITS)})


def test_on_a_gpu_the_pending_collective_counts():
    assert in_collective(replace(sign(stack=SLEEPS), collective="all_reduce 12")) and not in_collective(
        sign(stack=SLEEPS)
    )
    assert ", in all_reduce 12" in hang({0: replace(sign(3, 301.0, SLEEPS), collective="all_reduce 12")})


# As torch 2.11 on two H200s dumped it: one rank waits, the other never came.
WAITING = """{"comm_lib_version":"2.28.9","entries":[{"collective_seq_id":2,"input_sizes":[[4]],
"is_p2p":false,"op_id":2,"p2p_seq_id":0,"pg_id":0,"process_group":["0","default_pg"],"profiling_name":"nccl:all_reduce",
"record_id":1,"retired":false,"state":"scheduled","time_created_ns":1796047587059271238,"timeout_ms":600000}],
"pg_status":{"0":{"last_completed_collective":"1","last_enqueued_collective":"2"}},"version":"2.10"}"""
NEVER_CAME = """{"comm_lib_version":"2.28.9","pg_status":{"0":{"last_completed_collective":"1"}},"version":"2.10"}"""


def test_nccls_flight_recorder_says_what_a_rank_waits_in():
    assert (
        oldest_pending(WAITING) == "nccl:all_reduce 2 of default_pg, sizes [[4]]" and oldest_pending(NEVER_CAME) == ""
    )


RAY = (
    "The actor died. Worker unexpectedly exits with a connection error code 2. Causes: (1) the OOM killer, (2) others."
)


@pytest.mark.parametrize(
    ("reason", "kills", "said"),
    [
        (RAY, 0, "killed by a signal, or crashed; the kernel has counted no kill for memory there"),
        (RAY, 1, "killed for memory by the kernel"),
        ("Task was killed due to the node running low on memory.", 0, "killed for memory by Ray"),
        ("Worker exits with an exit code 3.", 0, "Worker exits with an exit code 3."),
    ],
)
def test_a_death_says_whose_words_speak_of_memory(reason: str, kills: int, said: str):
    line = death_line(3, Home("node0", 12), reason, sign(), Probe("Fatal Python error: x", "has ended", kills))
    assert line.startswith("rank 3 died (node0, process 12, after 'micro-batch 2 of 4'): ")
    assert said in line and line.endswith("; its last log line: Fatal Python error: x")
    assert ("for memory by" in line) == ("for memory by" in said)


def test_a_death_of_which_nothing_else_is_known():
    assert death_line(3, Home("node0", 12), "gone", None, None) == (
        "rank 3 died (node0, process 12): gone; it left no log line"
    )


def test_ranges():
    assert ranges([5, 0, 1, 2, 9, 8]) == "0-2, 5, 8-9" and ranges([]) == ""


# What the operating system says.


def test_the_state_and_the_last_line_of_a_process(tmp_path: Path):
    log = tmp_path / "worker.err"
    with log.open("w") as file:
        code = "import sys, time; print('last words', file=sys.stderr, flush=True); time.sleep(60)"
        process = subprocess.Popen([sys.executable, "-c", code], stderr=file)
    try:
        while not log.read_text():
            time.sleep(0.02)
        assert probe(process.pid, str(log), oom_file()).last_line == "last words"
        process.send_signal(signal.SIGSTOP)
        end = time.monotonic() + 5.0
        while (state := probe(process.pid, str(log), oom_file()).state) != STATES["T"] and time.monotonic() < end:
            time.sleep(0.02)
        assert state == STATES["T"]
    finally:
        process.kill()
        process.wait()
    assert probe(process.pid, "", "").state == "has ended"
    assert last_log_line(str(tmp_path / "none")) == "" and oom_kills(str(tmp_path / "none")) == 0


def test_the_line_of_a_crash_says_more_than_the_last():
    lines = [":actor_name:RankHost", "a", "Fatal Python error: Segmentation fault", "", "Extension modules: x", ""]
    assert telling_line(lines) == "Fatal Python error: Segmentation fault"
    assert telling_line([":actor_name:RankHost"]) == "" and telling_line(["a", "", "b ", ""]) == "b"


def test_kills_for_memory_are_counted_by_the_control_group(tmp_path: Path):
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 2\noom_kill 5\noom_group_kill 9\n")
    assert oom_kills(str(events)) == 5 and oom_kills(oom_file()) >= 0


# Errors of a rank under the names of their kinds.


def test_memory_that_runs_out_names_the_phase_and_what_to_lower():
    import torch

    beat("micro-batch 3 of 4")
    for error in (torch.OutOfMemoryError("CUDA out of memory"), MemoryError()):
        named = named_error(error, 2, "train.step")
        assert type(named) is OutOfMemory
        text = str(pickle.loads(pickle.dumps(named)))
        assert text.startswith(f"rank 2 ({os.uname().nodename}), train.step, after 'micro-batch 3 of 4'")
        assert text.endswith(LESS_MEMORY["step"]) and type(error).__name__ in text
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(1 << 50)
    assert "rollout.max_num_seqs" in str(named_error(caught.value, 0, "engine.generate"))


def test_what_gpus_and_links_raise_gets_a_name_and_other_errors_are_left_alone():
    import torch

    for error in (torch.AcceleratorError("CUDA error: an illegal access", 1), RuntimeError("CUDA error: ECC")):
        assert type(named_error(error, 0, "step")) is DeviceError
    for error in (
        torch.distributed.DistBackendError("NCCL error"),
        RuntimeError("[gloo/transport/tcp/pair.cc:1] reset"),
    ):
        assert type(named_error(error, 0, "step")) is P2PError
    for error in (
        ValueError("CUDA error"),
        DataError("out of memory"),
        OutOfMemory("named before"),
        RuntimeError("shapes differ"),
        KeyboardInterrupt(),
    ):
        assert named_error(error, 0, "step") is error


def test_the_settings_that_need_less_memory_are_keys():
    import re

    from megatron_rl.config.load import run_schema

    named = re.findall(r"\b(?:actor|rollout)\.\w+", " ".join(LESS_MEMORY.values()))
    assert named and all(run_schema().key_of(key) for key in named)
