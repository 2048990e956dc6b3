"""Which flash attention is taken; the kernels themselves need a GPU (tests/gpu/test_kernels.py)."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.errors import MissingDependency
from megatron_rl.ops.flash import flash_kernel, torch_flash


def test_torchs_own_is_there_always() -> None:
    assert flash_kernel("torch") is torch_flash


@pytest.mark.skipif(torch.cuda.is_available(), reason="there may be the other one")
def test_the_fourth_generation_is_refused_where_it_does_not_run() -> None:
    """Not replaced by another one: who asks for a kernel gets it, or is told why not."""
    with pytest.raises(MissingDependency, match=r"actor\.flash_attention=fa4: there is no GPU -- pip install"):
        flash_kernel("fa4")
