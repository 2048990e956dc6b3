"""R1: a run of which any process is killed at any moment goes on with the same command to the same end, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.killing import ALGORITHMS, Cold, Warm, killed_and_begun_again, outcome, settings, unlike

INLINE = "cluster.backend=inline"
DTYPES = ("float32", "bfloat16")
MOMENTS = 20
QUICK = (("sft", 1), ("grpo", 0), ("ppo", 3))
"""(algorithm, number of the moment): the number's parity is the precision's."""


class Unbroken:
    """What whole runs have made, by algorithm and precision; each runs once, when it is first asked for."""

    def __init__(self, data: Path, folder: Path, warm: Warm) -> None:
        self._data, self._folder, self._warm = data, folder, warm
        self._made: dict[tuple[str, str], dict[str, Any]] = {}

    def of(self, algorithm: str, dtype: str) -> dict[str, Any]:
        if (algorithm, dtype) not in self._made:
            folder = self._folder / f"{algorithm}-{dtype}"
            folder.mkdir()
            arguments = command(self._data, folder, algorithm, dtype, INLINE)
            run = self._warm.start(arguments, folder / "log")
            assert run.end() == 0, (folder / "log").read_text()[-3000:]
            self._made[algorithm, dtype] = outcome(folder / "run")
        return self._made[algorithm, dtype]


@pytest.fixture(scope="module")
def unbroken(data: Path, tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Unbroken:
    return Unbroken(data, tmp_path_factory.mktemp("unbroken"), warm)


def command(data: Path, runs: Path, algorithm: str, dtype: str, *more: str) -> list[str]:
    return settings(data, runs, algorithm, f"model.dtype={dtype}", "trainer.experiment_name=run", *more)


def check(
    starter: Warm | Cold, unbroken: Unbroken, arguments: list[str], folder: Path, case: tuple[str, str, int]
) -> None:
    algorithm, dtype, number = case
    killed = killed_and_begun_again(starter, arguments, folder, f"{algorithm}/{number}")
    print(f"{algorithm} {dtype} {number}: killed the {killed.victim} {killed.moment}, exit codes {killed.codes}")
    logs = "\n".join(log.read_text()[-2000:] for log in sorted(folder.glob("start-*.log")))
    assert killed.codes[-1] == 0, logs
    whole, made = unbroken.of(algorithm, dtype), outcome(folder / "run")
    failed = [row["step"] for row in made["rows"] if row.get("reward/failed")]
    if killed.victim == "reward process" and killed.codes == [0] and failed:
        # The run outlived it (R3): the sample that it was scoring has failed and is counted; steps differ from there.
        assert [row for row in made["rows"] if row["step"] < failed[0]] == whole["rows"][: failed[0]], logs
        return
    assert unlike(whole, made) == [], logs


@pytest.mark.parametrize(
    ("algorithm", "number"),
    [
        pytest.param(algorithm, number, marks=() if (algorithm, number) in QUICK else pytest.mark.slow)
        for algorithm in ALGORITHMS
        for number in range(MOMENTS)
    ],
)
def test_r1_a_run_in_one_process_that_is_killed_ends_as_the_unbroken_one(
    data: Path, tmp_path: Path, warm: Warm, unbroken: Unbroken, algorithm: str, number: int
) -> None:
    """The victim is the run's process, or one that scores its rewards."""
    dtype = DTYPES[number % 2]
    arguments = command(data, tmp_path, algorithm, dtype, INLINE)
    check(warm, unbroken, arguments, tmp_path, (algorithm, dtype, number))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(MOMENTS))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_r1_a_run_on_ray_of_which_any_process_is_killed_ends_as_the_unbroken_one(
    data: Path, tmp_path: Path, unbroken: Unbroken, algorithm: str, number: int
) -> None:
    """The victim is the driver, a rank, a reward process, or Ray's own: raylet, GCS."""
    dtype = DTYPES[number % 2]
    arguments = command(data, tmp_path, algorithm, dtype)
    check(Cold(), unbroken, arguments, tmp_path, (algorithm, dtype, number))
