"""Log lines and the line of a step."""

from __future__ import annotations

import logging
import math
import subprocess
import sys

from megatron_rl.observe.log import set_step, setup_logging
from megatron_rl.observe.step_line import step_line


def test_step_line_of_rl():
    metrics = {
        "reward/mean": 0.5119,
        "reward/std": 0.3,
        "kl/ref": 0.00123,
        "policy/loss": -0.0031,
        "policy/grad_norm": 0.824,
        "policy/clip_frac": 0.012,
        "length/prompt_mean": 5.0,
        "length/response_mean": 3.44,
        "perf/tokens_per_s": 1234.4,
        "time/generate": 0.42,
        "time/update": 0.191,
        "time/step": 0.63,
    }
    assert step_line(7, 80, metrics) == (
        "step  7/80  reward 0.512 +- 0.300  kl 0.0012  loss -0.0031  grad 0.82  clip 1.2%  len 5.0+3.4  "
        "tok/s 1,234  | 0.63 s: generate 0.42  update 0.19"
    )


def test_step_line_leaves_out_what_a_step_does_not_have():
    assert step_line(3, None, {"sft/loss": 0.51234}) == "step 3  loss 0.5123"
    assert step_line(3, 3, {"time/step": 1.0, "val/accuracy": 0.25}) == "step 3/3  accuracy 0.250  | 1.00 s"
    assert "reward nan" in step_line(1, None, {"reward/mean": math.nan})


def test_log_lines_carry_role_rank_and_step(capsys):
    root = logging.getLogger()
    level = root.level
    try:
        setup_logging("policy", 1)
        setup_logging("policy", 1)
        set_step(17)
        logging.getLogger("megatron_rl.mcore.step").warning("dropped %d", 3)
        logging.getLogger("vllm.engine").info("chatter")
        set_step(None)
        logging.getLogger("megatron_rl.flow").info("up")
        lines = capsys.readouterr().err.splitlines()
    finally:
        for handler in [handler for handler in root.handlers if type(handler).__name__ == "_StderrHandler"]:
            root.removeHandler(handler)
        root.setLevel(level)
    assert [line.split(" ", 1)[1] for line in lines] == [
        "[policy 1 17] WARNING mcore.step: dropped 3",
        "[policy 1 -] INFO flow: up",
    ]


def test_observe_imports_neither_torch_nor_config_nor_plotting():
    code = (
        "import sys; from megatron_rl.observe import curves, log, progress, sinks, step_line; "
        "heavy = ('torch', 'matplotlib', 'tensorboard', 'wandb', 'megatron_rl.config'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
