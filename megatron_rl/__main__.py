"""python -m megatron_rl: the same as the megatron-rl command."""

from __future__ import annotations

import sys

from megatron_rl.cli import main

if __name__ == "__main__":
    sys.exit(main())
