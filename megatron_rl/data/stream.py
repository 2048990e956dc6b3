"""The order in which a run visits its items: endless, reshuffled each epoch, resumable from a few numbers."""

from __future__ import annotations

import math
import random
from typing import Any

from megatron_rl.errors import DataError


def steps_per_epoch(num_items: int, batch_size: int) -> int:
    """Batches that cover all items: ceil(num_items / batch_size); the last may reach into the next epoch."""
    return math.ceil(num_items / batch_size)


def _order(num_items: int, shuffle: bool, seed: int, epoch: int) -> list[int]:
    if not shuffle:
        return list(range(num_items))
    # Sorting by random() keeps the order the same in every Python version: the sequence of random() is part
    # of the language's promise, the algorithm of shuffle() is not.
    generator = random.Random(f"{seed}/{epoch}")
    keys = [generator.random() for _ in range(num_items)]
    return sorted(range(num_items), key=keys.__getitem__)


class Stream:
    """Batches of item numbers, forever.

    Each epoch visits each item exactly once, in an order drawn from (seed, epoch) alone. Every batch is full:
    where batch_size does not divide num_items, the last batch of an epoch is completed from the start of the
    next epoch, so no item is dropped and none is visited twice in an epoch. Such a batch may hold the same
    item twice (last of one epoch, first of the next).

    Example: Stream(num_items=3, batch_size=2, shuffle=False, seed=0) gives [0, 1], [2, 0], [1, 2], [0, 1] ...

    Raises DataError when there are fewer items than one batch takes.
    """

    def __init__(self, *, num_items: int, batch_size: int, shuffle: bool, seed: int) -> None:
        if num_items < batch_size:
            raise DataError(
                f"data.train_batch_size: {batch_size} -- the training set has only {num_items} usable rows "
                f"-- give at most {num_items}, or more data"
            )
        self.num_items = num_items
        self.batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._seek(0, 0)

    @property
    def epoch(self) -> int:
        """Epoch of the next item, from 0: the number of epochs completed."""
        return self._epoch

    @property
    def position(self) -> int:
        """Items of the current epoch already handed out: 0 <= position < num_items."""
        return self._position

    def next(self) -> list[int]:
        """The next batch_size item numbers."""
        batch: list[int] = []
        while len(batch) < self.batch_size:
            taken = self._current[self._position : self._position + self.batch_size - len(batch)]
            batch += taken
            if self._position + len(taken) == self.num_items:
                self._seek(self._epoch + 1, 0)
            else:
                self._position += len(taken)
        return batch

    def state(self) -> dict[str, Any]:
        """What `restore` needs: plain values, for a checkpoint."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "num_items": self.num_items,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where the stream that gave `state` stopped. The batch size may differ; what orders the items
        may not.

        Raises DataError naming each setting that differs.
        """
        here = self.state()
        differing = [name for name in ("num_items", "shuffle", "seed") if state[name] != here[name]]
        if differing:
            listed = ", ".join(f"{name} was {state[name]!r} and is {here[name]!r}" for name in differing)
            raise DataError(f"the checkpoint's data order cannot go on: {listed} -- resume with the same data and seed")
        self._seek(state["epoch"], state["position"])

    def _seek(self, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._position = position
        self._current = _order(self.num_items, self._shuffle, self._seed, epoch)
