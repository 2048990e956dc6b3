"""Processes: placing workers, calling them, ending them."""

import os

from megatron_rl.cluster.environment import ZERO_COPY

# Ray reads it when it is imported, which only this package and workers do.
for name, value in ZERO_COPY.items():
    os.environ.setdefault(name, value)
