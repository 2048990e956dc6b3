"""A reward's file: its neighbours, async functions, other trainers' forms, messages that name its line and sample."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.sections.reward import RewardConfig
from megatron_rl.errors import RewardError
from megatron_rl.rewards.base import RewardSample
from megatron_rl.rewards.load import load_reward
from megatron_rl.rewards.pool import RewardPool
from megatron_rl.rewards.processes import marked
from megatron_rl.rewards.scorer import RewardScorer
from tests.helpers.config import load, only_fault

VERL = "(data_source, solution_str, ground_truth, extra_info=None)"


def sample(text: str = "9", **fields: Any) -> RewardSample:
    return RewardSample("add2", "4+5=", text, "9", where="train.jsonl row 7", **fields)


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, code in files.items():
        (folder / f"{name}.py").write_text(code)
    return folder


@pytest.mark.parametrize(
    "code",
    [
        "import rules_beside\nscore = rules_beside.rule\n",
        "from rules_beside import rule as score\n",
        "from .rules_beside import rule as score\n",
        "from . import rules_beside\nscore = rules_beside.rule\n",
        "def score(solution_str):\n    from rules_beside import rule\n    return rule(solution_str)\n",
        "def score(solution_str):\n    from .rules_beside import rule\n    return rule(solution_str)\n",
        "from package_beside.inner import rule as score\n",
        "from .package_beside.inner import rule as score\n",
    ],
)
def test_a_file_imports_its_neighbours(tmp_path: Path, code: str):
    folder = write(tmp_path, mine=code, rules_beside="from .deep import rule\n", deep="")
    (folder / "rules_beside.py").write_text("def rule(solution_str):\n    return len(solution_str)\n")
    package = write(tmp_path / "package_beside", __init__="", inner="from rules_beside import rule\n")
    assert package.is_dir()
    with RewardPool(f"{folder}/mine.py:score", num_workers=1) as pool:
        (result,) = pool.score([sample("abc")])
    assert result is not None and (result.value, result.failed) == (3.0, None)


def test_verls_layout_of_files_that_import_each_other_works(tmp_path: Path):
    folder = write(
        tmp_path / "reward_score",
        math_reward="def compute_score(solution_str, ground_truth):\n    return float(ground_truth in solution_str)\n",
        math_batch="from .math_reward import compute_score\n"
        "def compute_score_batched(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):\n"
        "    return [compute_score(s, g) for s, g in zip(solution_strs, ground_truths, strict=True)]\n",
        __init__="raise RuntimeError('the package itself is not run')\n",
    )
    (folder / "grader").mkdir()
    write(folder / "grader", __init__="from .normal import same\n", normal="same = 'same'\n")
    reward = load_reward(f"{folder}/math_batch.py:compute_score_batched")
    assert reward.takes_batch and reward([sample(), sample("8")]) == [1.0, 0.0]
    inner = folder / "grader" / "__init__.py"
    inner.write_text("from . import normal\ndef f(solution_str):\n    return float(normal.same == 'same')\n")
    assert load_reward(f"{inner}:f")(sample()) == 1.0


def test_neighbours_do_not_hide_the_standard_library_or_the_package_of_the_files_own_name(tmp_path: Path):
    folder = write(
        tmp_path,
        json="raise RuntimeError\n",
        yaml="import yaml, json\ndef f(solution_str):\n    return float(bool(yaml.safe_load('[1]') and json.dumps))\n",
    )
    assert load_reward(f"{folder}/yaml.py:f")(sample()) == 1.0


def test_two_rewards_with_neighbours_of_one_name_are_refused(tmp_path: Path):
    code = "from same_name import rule\ndef f(solution_str):\n    return rule\n"
    one = write(tmp_path / "one", mine=code, same_name="rule = 1\n")
    two = write(tmp_path / "two", mine=code, same_name="rule = 2\n")
    assert load_reward(f"{one}/mine.py:f")(sample()) == 1
    with pytest.raises(RewardError, match=r"two/same_name.py has the name of .*one/same_name.py.* -- rename one"):
        load_reward(f"{two}/mine.py:f")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def f(:\n", "is not valid Python"),
        ("import no_such_thing_here\ndef f(s):\n    return 1\n", "line 1 imports no_such_thing_here, which is not"),
        ("import os, no_such.deep\ndef f(s):\n    return 1\n", "imports no_such, which is not installed"),
        ("from no_such import x as f\n", "imports no_such, which is not installed"),
        ("from .absent import f\n", "imports .absent, which is not beside it"),
        ("from ..above import f\n", "imports from above its folder"),
        ("def g(s):\n    return 1\n", "does not define f"),
        ("def f():\n    return 1\n", "f() takes no argument"),
        ("def f(completions, **kwargs):\n    return [1.0]\n", "line 1: f(completions) has TRL's form"),
        ("def f(prompts, completions, answer):\n    return [1.0]\n", "has TRL's form"),
        ("async def f(args, sample, **kwargs):\n    return 1.0\n", "has slime's form (args, sample)"),
        ("def f(args, samples):\n    return 1.0\n", "has slime's form (args, samples)"),
        ("def f(queries, prompts, labels):\n    return 1.0\n", "has OpenRLHF's form"),
        ("def f(prompt, completion, prompt_ids, completion_ids, **data):\n    return 1.0\n", "form of another trainer"),
    ],
)
def test_check_reads_the_file_and_names_line_and_cure(tmp_path: Path, code: str, reason: str):
    fault = only_fault(tmp_path, f"reward.function={write(tmp_path, mine=code)}/mine.py:f")
    assert fault.key == "reward.function" and reason in fault.reason and fault.cure and str(tmp_path) in str(fault)


@pytest.mark.parametrize(
    "code",
    [
        f"async def f{VERL}:\n    return 1.0\n",
        "try:\n    import no_such_thing\nexcept ImportError:\n    no_such_thing = None\ndef f(sample):\n    return 1\n",
        "def f(sample):\n    import no_such_thing\n",
        "import helper_beside\nf = helper_beside.f\n",
        "from .helper_beside import f\n",
        "import numpy as np\nclass f:\n    def __call__(self, samples):\n        return np.ones(len(samples))\n",
        "def f(*args, **kwargs):\n    return 1\n",
    ],
)
def test_check_passes_files_that_may_work(tmp_path: Path, code: str):
    folder = write(tmp_path, mine=code, helper_beside="def f(sample):\n    return 1\n")
    assert load(tmp_path, f"reward.function={folder}/mine.py:f").reward.function.endswith("mine.py:f")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def f(completions, **kwargs):\n    return [1.0]\n", "TRL's form .* solution_strs, ground_truths"),
        ("def f(args, sample):\n    return 1.0\n", "slime's form .* def reward"),
        ("def f(queries, prompts, labels):\n    return 1.0\n", "OpenRLHF's form"),
        ("def f(sample):\n    yield 1.0\n", "yields, and a reward returns"),
        ("async def f(sample):\n    yield 1.0\n", "yields, and a reward returns"),
        ("import no_such_thing_here\n", r"line 1\) -- install no_such_thing_here, put its folder on PYTHONPATH"),
        ("from ..above import f\n", r"relative import.* -- a file of rewards is in a package of its folder alone"),
        ("x = 1\ny = x / 0\n", r"ZeroDivisionError: division by zero, line 2\) -- correct the file"),
    ],
)
def test_a_form_or_file_that_cannot_work_is_refused_at_load(tmp_path: Path, code: str, reason: str):
    with pytest.raises(RewardError, match=reason):
        load_reward(f"{write(tmp_path, mine=code)}/mine.py:f")


# async

ASYNC = """
import asyncio

async def single(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "hang":
        await asyncio.sleep(3600)
    if solution_str == "raise":
        raise KeyError("mine")
    if solution_str == "exit":
        raise SystemExit(3)
    if solution_str == "block":
        import time
        time.sleep(3600)
    await asyncio.sleep(0.2)
    return {"score": float(solution_str), "turns": extra_info["num_turns"]}

async def batch(solution_strs):
    return await asyncio.gather(*(one(text) for text in solution_strs))

async def one(text):
    await asyncio.sleep(0.2)
    return float(text)

class Whole:
    async def __call__(self, samples):
        return await batch([sample.solution_str for sample in samples])

class Single:
    def __init__(self):
        self.lock = None

    async def __call__(self, sample):
        self.lock = self.lock or asyncio.Lock()
        async with self.lock:
            return float(sample.solution_str)

instance = Single()

def hidden(sample):
    return one(sample.solution_str)

async def batch_hangs(solution_strs):
    await asyncio.sleep(3600)
"""


@pytest.mark.parametrize("name", ["single", "batch", "Whole", "instance", "hidden"])
def test_async_rewards_of_every_form_give_scores_in_order(tmp_path: Path, name: str):
    folder = write(tmp_path, mine=ASYNC)
    with RewardPool(f"{folder}/mine.py:{name}", num_workers=1) as pool:
        for _ in range(2):
            results = pool.score([sample(str(number)) for number in range(5)])
            assert [result and (result.value, result.failed) for result in results] == [(n, None) for n in range(5)]


def test_an_async_rewards_samples_are_awaited_at_once_and_fail_alone(tmp_path: Path):
    folder = write(tmp_path, mine=ASYNC)
    texts = ["1", "hang", "raise", "2", "exit", "hang", *["3"] * 26]
    with RewardPool(f"{folder}/mine.py:single", num_workers=1, timeout_s=2.0, failed_score=-1.0) as pool:
        pool.score([sample("1")])
        start = time.monotonic()
        results = pool.score([sample(text) for text in texts])
        seconds = time.monotonic() - start
    values = [result.value for result in results if result]
    assert values == [1.0, -1.0, -1.0, 2.0, -1.0, -1.0, *[3.0] * 26]
    reasons = [str(result.failed) for result in results if result]
    assert "no result within 2 s" in reasons[1] and "KeyError: 'mine'" in reasons[2] and "SystemExit: 3" in reasons[4]
    assert "mine.py line 8, in single" in reasons[2]
    # One after the other, 32 samples of 0.2 s and two time limits are 10 s.
    assert seconds < 8.0


def test_an_async_reward_that_blocks_or_a_batch_that_hangs_is_given_up(tmp_path: Path):
    folder = write(tmp_path, mine=ASYNC)
    with RewardPool(f"{folder}/mine.py:single", num_workers=1, timeout_s=0.5) as pool:
        results = pool.score([sample("block"), sample("2")])
        assert [result and result.failed is None for result in results] == [False, True]
    with RewardPool(f"{folder}/mine.py:batch_hangs", num_workers=1, timeout_s=0.5) as pool:
        results = pool.score([sample("1"), sample("2")])
        assert all("no result within 0.5 s" in str(result and result.failed) for result in results)
        assert marked(pool.mark)
    assert not marked(pool.mark)


def test_what_an_async_reward_returns_can_be_awaited(tmp_path: Path):
    reward = load_reward(f"{write(tmp_path, mine=ASYNC)}/mine.py:batch")
    assert reward.is_async and reward.takes_batch

    async def both() -> object:
        returned: Any = reward([sample("1"), sample("2")])
        return await returned

    assert asyncio.run(both()) == [1.0, 2.0]


# Messages


def test_a_failing_reward_names_its_line_and_the_sample(tmp_path: Path):
    folder = write(
        tmp_path,
        mine="from beside import half\n\ndef f(solution_str):\n    return half(solution_str)\n\n"
        "def g(solution_str):\n    return 1 / 0\n",
        beside="def half(text):\n    import json\n    return json.loads(text)\n",
    )
    for name, place in (("f", "mine.py line 4, in f"), ("g", "mine.py line 7, in g")):
        with RewardScorer(RewardConfig(function=f"{folder}/mine.py:{name}", num_workers=1)) as scorer:
            with pytest.raises(RewardError) as error:
                scorer.score_or_stop([sample("not json"), sample("nor this")])
            with pytest.raises(RewardError, match="fails on a first sample") as first:
                scorer.preflight([sample("not json")])
        for text in (str(error.value), str(first.value)):
            for part in (place, "train.jsonl row 7", "data source 'add2'", "'not json'", "ground truth '9'"):
                assert part in text, (part, text)


def test_verls_extra_info_has_its_newer_fields_and_the_rows_own_win(tmp_path: Path):
    folder = write(tmp_path, mine="def f(extra_info, solution_str):\n    return extra_info\n")
    reward = load_reward(f"{folder}/mine.py:f")
    assert reward(sample(extra_info={"a": 1})) == {"num_turns": 2, "rollout_reward_scores": {}, "a": 1}
    assert reward(sample(extra_info={"num_turns": 5})) == {"num_turns": 5, "rollout_reward_scores": {}}


# Rewards that fail for certain stop the run


STUCK = """
import os, time

def hang(solution_str):
    time.sleep(3600)

def crash(solution_str):
    os._exit(3)

def mostly(solution_str):
    if int(solution_str) % 10:
        time.sleep(3600)
    return 1.0

def batch(solution_strs):
    time.sleep(3600)

async def awaits(solution_str):
    import asyncio
    await asyncio.sleep(3600)

def raises(solution_str):
    raise ValueError("never")
"""


@pytest.mark.parametrize("name", ["hang", "crash", "mostly", "batch", "awaits", "raises"])
def test_a_reward_that_always_fails_stops_the_run_once_that_is_certain_and_leaves_no_process(tmp_path: Path, name: str):
    folder = write(tmp_path, mine=STUCK)
    cfg = RewardConfig(function=f"{folder}/mine.py:{name}", timeout_s=0.6, max_failed_share=0.05, num_workers=2)
    samples = [sample(str(number)) for number in range(200)]
    with RewardScorer(cfg) as scorer:
        assert isinstance(scorer._pool, RewardPool)
        start = time.monotonic()
        with pytest.raises(RewardError, match=r"of 200 samples.*more than reward.max_failed_share 0.05") as error:
            scorer.score_or_stop(samples)
        seconds, mark = time.monotonic() - start, scorer._pool.mark
    assert not marked(mark)
    assert "train.jsonl row 7" in str(error.value) and "the first (" in str(error.value)
    # 200 hanging samples one after the other are 60 s; to the end of the batch, however many at once, 20 s.
    assert seconds < 20.0


def test_a_sum_whose_part_always_fails_does_not_wait_for_the_other(tmp_path: Path):
    folder = write(tmp_path, mine=STUCK)
    part = f"{folder}/mine.py"
    cfg = RewardConfig(function=f"'{part}:raises' + '{part}:hang'", timeout_s=5.0, max_failed_share=0.0, num_workers=1)
    start = time.monotonic()
    with RewardScorer(cfg) as scorer, pytest.raises(RewardError, match=r"ValueError: never|no result within 5 s"):
        scorer.score_or_stop([sample(str(number)) for number in range(50)])
    assert time.monotonic() - start < 20.0


def test_failures_within_the_share_are_scores(tmp_path: Path):
    folder = write(tmp_path, mine="def f(solution_str):\n    return float(solution_str)\n")
    cfg = RewardConfig(function=f"{folder}/mine.py:f", max_failed_share=0.5, num_workers=1, failed_score=-1.0)
    with RewardScorer(cfg) as scorer:
        assert [result.value for result in scorer.score_or_stop([sample("x"), sample("2")])] == [-1.0, 2.0]
        with pytest.raises(RewardError, match="failed on 2 of 3 samples"):
            scorer.score_or_stop([sample("x"), sample("2"), sample("y")])


def test_hanging_samples_run_out_of_time_side_by_side(tmp_path: Path):
    folder = write(tmp_path, mine=STUCK)
    cfg = RewardConfig(function=f"{folder}/mine.py:hang", timeout_s=3.0, max_failed_share=0.1, num_workers=2)
    start = time.monotonic()
    with RewardScorer(cfg) as scorer, pytest.raises(RewardError, match=r"failed on 2[12] of 200 samples"):
        scorer.score_or_stop([sample(str(number)) for number in range(200)])
    # Two at a time, 21 samples of 3 s are 33 s; the last two may run out of time together.
    assert time.monotonic() - start < 26.0


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise RuntimeError('no')\n", r"does not import \(RuntimeError: no, line 1\)"),
        ("import sys\nsys.exit(4)\n", r"its process died while loading it \(exit status 4\)"),
        ("import os\nos.abort()\n", r"died while loading it \(signal 6"),
        ("def other(sample):\n    return 1\n", "has no 'f'"),
        (
            "class f:\n    def __init__(self):\n        raise ValueError('x')\n    def __call__(self, s): ...\n",
            "ValueError",
        ),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_one_line(tmp_path: Path, code: str, reason: str):
    folder = write(tmp_path, mine=code)
    with RewardPool(f"{folder}/mine.py:f", num_workers=2) as pool, pytest.raises(RewardError, match=reason) as error:
        pool.preflight(sample())
    assert not marked(pool.mark) and "\n" not in str(error.value) and "mine.py:f" in str(error.value)


def test_processes_that_the_system_refuses_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.executable", str(tmp_path / "no_python"))
    with pytest.raises(RewardError, match=r"reward process 1 of reward.num_workers 3 cannot be started .* -- lower"):
        RewardPool("exact_match", num_workers=3)
