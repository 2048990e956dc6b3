"""A GGUF file of llama.cpp as a Hugging Face folder that transformers and vLLM open.

    python tools/convert/gguf_to_hf.py SOURCE OUT [--dtype bfloat16] [--verify] [--dry-run]

docs/convert.md has commands that were run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.convert import command


def main(argv: Sequence[str] | None = None) -> int:
    """Convert; the exit code is 2 if the source is refused."""
    options = command.parser("A GGUF file of llama.cpp as a Hugging Face folder that transformers and vLLM open.")
    options.add_argument("--tokenizer", type=Path, help="folder whose tokenizer takes the place of the file's")
    return command.run(command.gguf_to_hf, options, argv)


if __name__ == "__main__":
    sys.exit(main())
