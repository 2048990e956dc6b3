"""The files and lines that a reader opens to follow one step on the controller, from prompts to publish.

python tests/house/walk.py CONFIG.yaml [key=value ...]
"""

from __future__ import annotations

import inspect
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

from megatron_rl.config.load import load_config
from megatron_rl.config.run import RunConfig
from megatron_rl.flow import Flow, Node
from megatron_rl.runs.trainer import Trainer
from megatron_rl.trainers import TRAINERS


def files_of_step(cfg: RunConfig) -> dict[Path, int]:
    """The file that lists the flow and those of its step functions -> lines, in the order of a reader."""
    lister = TRAINERS[cfg.algorithm.name]
    modules = [inspect.getmodule(lister), *(module_of(node) for node in ordered(Trainer(cfg).flow))]
    files = [Path(inspect.getfile(module)) for module in dict.fromkeys(modules) if module is not None]
    return {file: len(file.read_text(encoding="utf-8").splitlines()) for file in files}


def ordered(flow: Flow) -> list[Node]:
    """The nodes in the order in which they run."""
    return [node for wave in flow.waves() for node in wave]


def module_of(node: Node) -> ModuleType | None:
    """Where a step function is written, whatever is bound to it."""
    fn = node.fn
    while isinstance(fn, partial):
        fn = fn.func
    return inspect.getmodule(fn)


def main(files: list[str], overrides: list[str]) -> None:
    """Print the walk."""
    walk = files_of_step(load_config(files, overrides))
    for file, lines in walk.items():
        print(f"{lines:5d}  {file}")
    print(f"{sum(walk.values()):5d}  lines in {len(walk)} files")


if __name__ == "__main__":
    main([text for text in sys.argv[1:] if "=" not in text], [text for text in sys.argv[1:] if "=" in text])
