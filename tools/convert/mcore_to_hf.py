"""A checkpoint of Megatron's side as a Hugging Face folder that transformers and vLLM open.

    python tools/convert/mcore_to_hf.py SOURCE OUT [--dtype bfloat16] [--verify] [--dry-run]

docs/convert.md has commands that were run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.convert import command


def main(argv: Sequence[str] | None = None) -> int:
    """Convert; the exit code is 2 if the source is refused."""
    options = command.parser(
        "A checkpoint of Megatron's side as a Hugging Face folder that transformers and vLLM open."
    )
    options.add_argument("--hf", type=Path, help="Hugging Face folder with the config and tokenizer of the model")
    return command.run(command.mcore_to_hf, options, argv)


if __name__ == "__main__":
    sys.exit(main())
