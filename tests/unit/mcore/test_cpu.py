"""What makes a process able to run Megatron-Core without a GPU leaves the rest of torch as it is."""

import subprocess
import sys

import pytest
import torch

SCRIPT = """
import torch
from megatron_rl.mcore import cpu
cpu.install()
with torch.device("meta"):
    print(torch.empty(1).device, torch.tensor([]).device, torch.get_default_device())
print(torch.empty(1, device="cuda").device)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is redirected where CUDA is")
def test_a_device_as_a_context_is_heard_though_nobody_has_used_one_before() -> None:
    """transformers builds models in the context of the device meta; where it is not heard, RoPE has no frequencies."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["meta", "meta", "meta", "cpu"]
