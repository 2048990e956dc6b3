"""Sinks, curves and progress."""

from __future__ import annotations

import io
import json
import math
import re
import sys
import time
from importlib import import_module
from types import SimpleNamespace

import pytest
from rich.console import Console

from megatron_rl.errors import DataError, MissingDependency
from megatron_rl.observe.curves import plot_curves
from megatron_rl.observe.progress import Progress
from megatron_rl.observe.sinks import JsonlSink, open_sinks, read_metrics


def write_steps(path, steps, first_step=0):
    sink = JsonlSink(path, first_step)
    for step in steps:
        sink.write(step, {"reward/mean": step / 10})
    sink.close()


def test_each_step_is_one_line_on_disk_at_once(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(0, {"a": 1.0, "b": math.nan})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "a": 1.0, "b": null}\n'
    sink.close()
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["a"] == 1.0 and math.isnan(row["b"])


def test_resume_cuts_the_resumed_step_and_later_ones_and_a_broken_last_line(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(5))
    with path.open("a") as file:
        file.write('{"step": 5, "rew')
    with caplog.at_level("INFO"):
        write_steps(path, [3, 4, 5], first_step=3)
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3, 4, 5]
    assert "removed 3 line(s) of an earlier run from step 3 on" in caplog.text
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_in_the_same_folder_starts_a_new_file(tmp_path):
    write_steps(tmp_path / "metrics.jsonl", range(3))
    write_steps(tmp_path / "metrics.jsonl", [0])
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0]


def test_a_line_that_is_no_row_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n[1]\n')
    with pytest.raises(DataError, match=r"metrics.jsonl, line 2: '\[1\]' -- not a row of metrics"):
        read_metrics(path)


def test_tensorboard_reads_what_was_written_and_a_resume_hides_the_old_steps(tmp_path):
    def run(steps, scale, first_step):
        sinks = open_sinks(["console", "tensorboard"], tmp_path, project="p", experiment="e", first_step=first_step)
        assert len(sinks) == 2
        for step in steps:
            for sink in sinks:
                sink.write(step, {"reward/mean": step * scale})
        for sink in sinks:
            sink.close()
        time.sleep(1.1)  # event files are told apart by whole seconds

    run(range(4), 1.0, 0)
    run([2, 3], 10.0, 2)
    module = import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert found == [(0, 0.0), (1, 1.0), (2, 20.0), (3, 30.0)]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "tensorboard"])
def test_a_service_that_is_not_installed_names_the_pip_command(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependency, match=rf"trainer\.logger: '{name}' .* pip install {name}"):
        open_sinks([name], tmp_path, project="p", experiment="e")


def png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_curves_have_a_panel_for_each_metric_that_is_there(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": s, "reward/mean": s / 9, "reward/std": 0.3} for s in range(10)]
    rows[0]["val/accuracy"], rows[9]["val/accuracy"], rows[4]["reward/mean"] = 0.1, 0.9, None
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plot_curves(path, tmp_path / "two.png", title="run")
    path.write_text('{"step": 0, "sft/loss": 1.0}\n')
    plot_curves(path, tmp_path / "one.png")
    assert png_size(tmp_path / "two.png")[0] == 2 * png_size(tmp_path / "one.png")[0]
    path.write_text('{"step": 0, "other": 1.0}\n')
    with pytest.raises(DataError, match="nothing to draw"):
        plot_curves(path, tmp_path / "none.png")


def test_progress_prints_few_plain_lines_without_a_terminal():
    out = io.StringIO()
    progress = Progress(Console(file=out, width=40))
    with progress.phase("starting [2] workers"):
        progress.say("a line that is longer than the forty columns of the console")
    with progress.bar("rows", 3, every_s=0.0) as advance:
        advance(1)
        advance(2)
    with progress.bar("steps", 3, every_s=None) as advance:
        advance(3)
    with progress.bar("fast", 3) as advance:
        advance(3)
    # How many seconds is the machine's affair.
    assert re.sub(
        r"\d+\.\d s|\d+ s", lambda found: "0.0 s" if "." in found[0] else "0 s", out.getvalue()
    ).splitlines() == [
        "starting [2] workers ...",
        "a line that is longer than the forty columns of the console",
        "starting [2] workers: 0.0 s",
        "rows: 1/3 after 0 s",
        "rows: 3/3 after 0 s",
    ]


def test_progress_shows_bars_on_a_terminal_and_takes_them_away():
    out = io.StringIO()
    progress = Progress(Console(file=out, width=100, force_terminal=True, _environ={}))
    with progress.bar("steps", 4) as advance, progress.phase("generate"):
        advance(3)
        progress.say("step 3/4  reward 0.5")
        time.sleep(0.25)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "steps" in text and "3/4" in text and "step 3/4  reward 0.5" in text
    assert re.search(r"generate: 0\.\d s", text)


def test_a_phase_that_fails_does_not_say_that_it_ended():
    out = io.StringIO()
    with pytest.raises(KeyError), Progress(Console(file=out)).phase("loading"):
        raise KeyError("x")
    assert out.getvalue() == "loading ...\n"


def test_an_mlflow_run_that_goes_on_has_no_step_twice(tmp_path, monkeypatch):
    """MLflow keeps each value that it is given; a stand-in has its calls."""
    written = []

    class Client:
        def get_metric_history(self, run_id, name):
            return [SimpleNamespace(step=step) for step, _ in written]

    def start_run(run_id=None, run_name=None):
        return SimpleNamespace(info=SimpleNamespace(run_id="r"), data=SimpleNamespace(metrics={"time/step": 1.0}))

    stand_in = SimpleNamespace(
        MlflowException=RuntimeError,
        MlflowClient=Client,
        start_run=start_run,
        set_experiment=lambda name: None,
        log_dict=lambda *args: None,
        log_metrics=lambda metrics, step: written.append((step, metrics)),
        end_run=lambda: None,
    )
    monkeypatch.setitem(sys.modules, "mlflow", stand_in)
    for first, steps in ((0, range(4)), (3, range(3, 6))):
        sink = open_sinks(["mlflow"], tmp_path, project="p", experiment="e", first_step=first)[-1]
        for step in steps:
            sink.write(step, {"time/step": 1.0})
        sink.close()
    assert [step for step, _ in written] == [0, 1, 2, 3, 4, 5]
