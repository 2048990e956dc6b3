"""A Hugging Face folder as a torch_dist checkpoint of Megatron-Core (0.16 and 0.19).

    python tools/convert/hf_to_mcore.py SOURCE OUT [--dtype bfloat16] [--verify] [--dry-run]

docs/convert.md has commands that were run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_rl.convert import command


def main(argv: Sequence[str] | None = None) -> int:
    """Convert; the exit code is 2 if the source is refused."""
    options = command.parser("A Hugging Face folder as a torch_dist checkpoint of Megatron-Core (0.16 and 0.19).")
    command.add_layout(options)
    return command.run(command.hf_to_mcore, options, argv)


if __name__ == "__main__":
    sys.exit(main())
