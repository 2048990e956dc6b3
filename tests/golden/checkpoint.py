"""A checkpoint of format 1, which every later version of the code loads.

    python -m tests.golden.checkpoint

records it anew (the folder checkpoint_1 and checkpoint_1.json, beside this file). There is no reason to: a new format
gets a record of its own, and this one stays.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

from megatron_rl.algos.reduce import loss_weights
from megatron_rl.algos.token_losses import nll_loss
from megatron_rl.workers.records import Role
from tests.helpers.checkpoints import read_all
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import random_batch, save_tiny
from tests.helpers.training import build, make_actor, my_micro_batches, train_step

FOLDER = Path(__file__).with_name("checkpoint_1")
RECORD = FOLDER.with_suffix(".json")
STEPS = 3
LENGTHS = (5, 9, 12, 6)
VOCAB = 24
SHAPE: dict[str, Any] = {
    "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 2, "layers": 1,
}  # fmt: skip


def model(folder: Path) -> str:
    """The folder of the model whose state was saved."""
    return save_tiny(folder, "llama", vocab=VOCAB, tied=True, **SHAPE)


def checksums(folder: Path) -> dict[str, int]:
    """Name -> crc32 of the bytes of each saved tensor, whole."""
    return {name: zlib.crc32(tensor.contiguous().numpy().tobytes()) for name, tensor in read_all(folder).items()}


def go_on(rank: int, world: int, folder: str, layout: dict[str, Any], load: str, save: str) -> list[list[float]]:
    """[loss, gradient norm, learning rate] of steps 4 to 6, after the first three or a load of them; saved before."""
    actor = make_actor(**layout)
    trainable = build(folder, actor, world, init_std=0.3)
    from megatron_rl.mcore.checkpoint import SavedState
    from megatron_rl.mcore.offload import Offload
    from megatron_rl.workers.checkpoint import StateFiles

    files = StateFiles(rank, world, actor)
    states: dict[Role, SavedState] = {"actor": SavedState(trainable, Offload(trainable, ()))}

    def steps(first: int) -> list[list[float]]:
        values: list[list[float]] = []
        for number in range(first, first + STEPS):
            batch = random_batch(number, LENGTHS, VOCAB)
            weights = loss_weights("token-mean", batch.loss_mask, batch.segments, batch.num_sequences, norm_length=1)
            micros = my_micro_batches(batch.with_(loss_weights=weights), actor, rank, world)
            report, _ = train_step(trainable, micros, nll_loss, 1.0)
            values.append([report.loss, report.grad_norm, report.lr])
        return values

    if load:
        files.load(Path(load), states, lambda role: None)
    else:
        steps(0)
    files.begin(Path(save), states, background=False)
    files.finish()
    return steps(STEPS)


def record() -> None:
    """Write folder and record."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        steps = run_ranks(2, go_on, model(Path(folder)), {}, "", str(FOLDER))[0]
    RECORD.write_text(json.dumps({"steps": steps, "tensors": checksums(FOLDER / "actor")}, indent=1) + "\n")


if __name__ == "__main__":
    record()
