from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_rl.errors import RewardError
from megatron_rl.rewards.base import RewardSample
from megatron_rl.rewards.pool import RewardPool
from tests.unit.data_helpers import ROOT

CODE = """
    import os, re, subprocess, sys, time

    def behave(sample):
        text = sample.solution_str
        if text == "hang":
            while True:
                pass
        if text == "sleep":
            time.sleep(3600)
        if text == "regex":
            re.match(r"(a+)+$", "a" * 60 + "b")
        if text == "start":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
            time.sleep(3600)
        if text == "crash":
            os.kill(os.getpid(), 11)
        if text == "leave":
            os._exit(3)
        if text == "exit":
            sys.exit("over")
        if text == "raise":
            raise ValueError("no such digit")
        if text == "string":
            return "1.0"
        if text == "nan":
            return float("nan")
        if text == "memory":
            return len(bytearray(8 << 30))
        if text == "pid":
            return os.getpid()
        return float(text)
"""


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "behave.py"
    path.write_text(textwrap.dedent(CODE))
    return f"{path}:behave"


def samples(*texts: str) -> list[RewardSample]:
    return [RewardSample("add2", "4+5=", text, "9") for text in texts]


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_results_come_in_the_order_of_the_samples(spec: str):
    with RewardPool(spec, num_workers=3) as pool:
        for count in (0, 1, 7, 300):
            results = pool.score(samples(*map(str, range(count))))
            assert [result.value for result in results] == list(range(count))
            assert not any(result.failed for result in results)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hang", "no result within 1 s"),
        ("sleep", "no result within 1 s"),
        ("regex", "no result within 1 s"),
        ("crash", "its process died (signal 11"),
        ("leave", "its process died (exit status 3)"),
        ("exit", "SystemExit: over"),
        ("raise", "ValueError: no such digit"),
        ("string", "returned '1.0' (str)"),
        ("nan", "returned nan"),
    ],
)
def test_a_bad_sample_fails_alone(spec: str, text: str, reason: str):
    """R3"""
    with RewardPool(spec, num_workers=2, timeout_s=1.0, failed_score=-1.0) as pool:
        numbers = [str(number) for number in range(100)]
        started = time.monotonic()
        results = pool.score(samples(*numbers[:40], text, *numbers[40:]))
        assert time.monotonic() - started < 15
        bad = results.pop(40)
        assert bad.value == -1.0 and bad.failed is not None and reason in bad.failed
        assert [result.value for result in results] == list(range(100))
        assert not any(result.failed for result in results)
        # The pool is whole again.
        assert [result.value for result in pool.score(samples("1", "2", "3"))] == [1, 2, 3]


def test_many_bad_samples_in_one_chunk_each_fail_alone(spec: str):
    """R3"""
    with RewardPool(spec, num_workers=1, timeout_s=0.5) as pool:
        results = pool.score(samples("1", "hang", "crash", "2", "raise", "sleep", "3", "leave"))
    assert [result.failed is None for result in results] == [
        True,
        False,
        False,
        True,
        False,
        False,
        True,
        False,
    ]
    assert [results[number].value for number in (0, 3, 6)] == [1, 2, 3]


def test_a_sample_that_eats_memory_fails_alone(spec: str):
    """R3"""
    with RewardPool(spec, num_workers=1, memory_limit=2 << 30) as pool:
        results = pool.score(samples("1", "memory", "2"))
    assert results[1].failed is not None and "MemoryError" in results[1].failed
    assert [results[0].value, results[2].value] == [1, 2]


def test_the_time_limit_is_for_each_sample_and_not_for_a_chunk(tmp_path: Path):
    path = tmp_path / "slow.py"
    path.write_text("import time\ndef slow(sample):\n    time.sleep(0.1)\n    return 1\n")
    with RewardPool(f"{path}:slow", num_workers=1, timeout_s=0.8) as pool:
        results = pool.score(samples(*["x"] * 24))
    assert [result.value for result in results] == [1.0] * 24


def test_512_short_samples_take_less_than_a_tenth_of_a_second():
    with RewardPool("exact_match", num_workers=2) as pool:
        batch = samples(*["9", "8"] * 256)
        times = []

        def is_fast() -> bool:
            started = time.perf_counter()
            results = pool.score(batch)
            times.append(time.perf_counter() - started)
            assert sum(result.value for result in results) == 256
            return times[-1] < 0.1

        # Other jobs may hold the cores for a while; the best run is what the pool itself takes.
        assert until(is_fast), min(times)


def test_a_process_that_dies_between_calls_is_replaced(spec: str):
    with RewardPool(spec, num_workers=2) as pool:
        pid = int(pool.score(samples("pid"))[0].value)
        os.kill(pid, signal.SIGKILL)
        assert until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")
        assert [result.value for result in pool.score(samples("1", "2", "3", "4"))] == [1, 2, 3, 4]


def test_close_leaves_no_process_behind(spec: str):
    pool = RewardPool(spec, num_workers=3, timeout_s=0.5)
    pool.score(samples("1", "hang", "start"))
    assert children()
    pool.close()
    pool.close()
    assert until(lambda: not children())
    with pytest.raises(RewardError, match="closed"):
        pool.score(samples("1"))


def test_what_a_killed_reward_had_started_is_killed_with_it(spec: str):
    with RewardPool(spec, num_workers=1, timeout_s=1.0) as pool:
        assert pool.score(samples("start"))[0].failed is not None
        sleeping = [
            process
            for process in psutil.process_iter(["cmdline"])
            if "import time; time.sleep(3600)" in (process.info["cmdline"] or [])
        ]
        assert not [process for process in sleeping if process.is_running() and process.status() != "zombie"]


@pytest.mark.parametrize("text", ["sleep", "hang"])
def test_the_processes_end_when_the_controller_is_killed(spec: str, text: str):
    code = f"""
        import threading, psutil
        from megatron_rl.rewards.pool import RewardPool
        from megatron_rl.rewards.base import RewardSample
        pool = RewardPool({spec!r}, num_workers=2, timeout_s=3600)
        pool.score([RewardSample("", "", "1", "")] * 4)
        stuck = [RewardSample("", "", {text!r}, "")] * 2
        threading.Thread(target=pool.score, args=(stuck,), daemon=True).start()
        print(*[child.pid for child in psutil.Process().children()], flush=True)
        input()
    """
    controller = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert controller.stdout is not None
    pids = [int(pid) for pid in controller.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.2)
    controller.kill()
    controller.communicate()
    assert until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_an_interrupted_call_does_not_spoil_the_next(spec: str):
    with RewardPool(spec, num_workers=2) as pool:
        pool.score(samples("1"))
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        timer = threading.Timer(0.3, signal.pthread_kill, (main_thread, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            pool.score(samples("5", "6", "sleep", "sleep", "7"))
        timer.join()
        assert [result.value for result in pool.score(samples("1", "2"))] == [1, 2]


def test_preflight_returns_the_result_of_a_good_reward(spec: str):
    with RewardPool(spec) as pool:
        assert pool.preflight(samples("3")[0]).value == 3.0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise", "ValueError: no such digit"),
        ("hang", "no result within 0.5 s"),
        ("string", "returned '1.0'"),
    ],
)
def test_preflight_refuses_a_reward_that_fails(spec: str, text: str, reason: str):
    with RewardPool(spec, timeout_s=0.5) as pool, pytest.raises(RewardError) as error:
        pool.preflight(samples(text)[0])
    assert reason in str(error.value) and "ground truth '9'" in str(error.value)


def test_a_reward_that_does_not_load_is_an_error_and_not_a_score(tmp_path: Path):
    with RewardPool("exact_mach") as pool, pytest.raises(RewardError, match="did you mean 'exact_match'"):
        pool.score(samples("1"))
    path = tmp_path / "dies.py"
    path.write_text("import os\nos._exit(7)\n")
    with (
        RewardPool(f"{path}:fn") as pool,
        pytest.raises(RewardError, match=r"died while loading it \(exit status 7\)"),
    ):
        pool.score(samples("1"))
    path.write_text("import time\ntime.sleep(3600)\n")
    with (
        RewardPool(f"{path}:fn", start_timeout_s=1.0) as pool,
        pytest.raises(RewardError, match="was not loaded within 1 s"),
    ):
        pool.score(samples("1"))


def test_kwargs_reach_the_reward(tmp_path: Path):
    path = tmp_path / "scaled.py"
    path.write_text("def scaled(solution_str, scale):\n    return {'score': scale * float(solution_str), 'twice': 2}\n")
    with RewardPool(f"{path}:scaled", {"scale": 3}) as pool:
        (result,) = pool.score(samples("2"))
    assert result.value == 6.0 and result.extra == {"twice": 2.0}


def test_math_works_in_a_pool_and_stops_a_bomb():
    """R3: math-verify needs a main thread, and its own time limit is not the last word."""
    with RewardPool("math", num_workers=1, timeout_s=3.0) as pool:
        good, bomb, bad = pool.score(samples("so $\\boxed{\\frac{18}{2}}$", "$\\boxed{9^{9^{9^9}}}$", "8"))
    assert (good.value, bad.value, good.failed, bad.failed) == (1.0, 0.0, None, None)
    assert bomb.value == 0.0
