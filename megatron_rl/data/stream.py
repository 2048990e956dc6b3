"""The order in which a run visits its items: endless, reshuffled each epoch, resumable from a small state."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.errors import DataError


def steps_per_epoch(num_items: int, batch_size: int) -> int:
    """Batches that cover all items: ceil(num_items / batch_size); the last may reach into the next epoch."""
    return math.ceil(num_items / batch_size)


def open_stream(cfg: DataConfig, data_sources: Sequence[str], seed: int) -> Stream | MixedStream:
    """The order of a run's training items: by cfg.mix_weights where they are given, else each once an epoch.

    data_sources: the data source of each item.
    """
    if not cfg.mix_weights:
        return Stream(num_items=len(data_sources), batch_size=cfg.train_batch_size, shuffle=cfg.shuffle, seed=seed)
    return MixedStream(data_sources, cfg.mix_weights, batch_size=cfg.train_batch_size, shuffle=cfg.shuffle, seed=seed)


def _order(num_items: int, shuffle: bool, seed: int | str, epoch: int) -> list[int]:
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

    def __init__(self, *, num_items: int, batch_size: int, shuffle: bool, seed: int | str) -> None:
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
        """Go on where the stream that gave `state` stopped. The batch size may differ; what orders the items may not.

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


class MixedStream:
    """Batches of item numbers, forever, in which each data source has a fixed share.

    The next item always comes from the source that is furthest behind its share, computed in whole numbers:
    with weights 3 : 1 each four items in a row are three and one. At every moment a source is less than one
    item ahead of its share and, of m sources, less than m - 1 behind; at every multiple of the weights' sum it
    is exactly there. Within a source the order is that of a `Stream` of its own: each row once before any again.

    Example: sources a a b, weights {a: 2, b: 1}, batch_size 3 without shuffle gives [0, 2, 1], [0, 2, 1] ...

    Raises DataError if weights and sources do not match, or a batch would take more rows of a source
    than it has.
    """

    def __init__(
        self, data_sources: Sequence[str], weights: Mapping[str, float], *, batch_size: int, shuffle: bool, seed: int
    ) -> None:
        """data_sources: the source of each item. weights: source -> weight above 0, of any sum."""
        self.num_items = len(data_sources)
        self.batch_size = batch_size
        self._items = {
            name: [i for i, source in enumerate(data_sources) if source == name] for name in dict.fromkeys(data_sources)
        }
        _refuse_mismatch(self._items, weights)
        # A weight is taken as it is written: 0.1 is one tenth, not the binary number nearest to it.
        written = {name: Fraction(str(weights[name])) for name in self._items}
        unit = Fraction(1, math.lcm(*(weight.denominator for weight in written.values())))
        self._parts = {name: int(weight / unit) for name, weight in written.items()}
        self._sum = sum(self._parts.values())
        self._refuse_repeats()
        self._streams = {
            name: Stream(num_items=len(items), batch_size=1, shuffle=shuffle, seed=f"{seed}/{name}")
            for name, items in self._items.items()
        }

    @property
    def counts(self) -> dict[str, int]:
        """Items that each source has given so far."""
        return {name: one.epoch * one.num_items + one.position for name, one in self._streams.items()}

    @property
    def shares(self) -> dict[str, float]:
        """Each source's share of the items."""
        return {name: part / self._sum for name, part in self._parts.items()}

    def next(self) -> list[int]:
        """The next batch_size item numbers."""
        counts = self.counts
        taken = sum(counts.values())
        batch: list[int] = []
        while len(batch) < self.batch_size:
            taken += 1
            # Of equals the first in the files.
            name = max(counts, key=lambda one: self._parts[one] * taken - self._sum * counts[one])
            counts[name] += 1
            batch += [self._items[name][i] for i in self._streams[name].next()]
        return batch

    def state(self) -> dict[str, Any]:
        """What `restore` needs: plain values, for a checkpoint."""
        return {
            "parts": dict(self._parts),
            "sources": {name: stream.state() for name, stream in self._streams.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """As Stream.restore. Raises DataError if the sources or their weights differ."""
        if state.get("parts") != self._parts:
            raise DataError(
                f"the checkpoint's data mix cannot go on: its parts were {state.get('parts')} and are {self._parts} "
                "-- resume with the same data.mix_weights and files"
            )
        for name, stream in self._streams.items():
            stream.restore(state["sources"][name])

    def _refuse_repeats(self) -> None:
        """No batch may have to take a row twice."""
        for name, items in self._items.items():
            most = math.ceil(Fraction(self._parts[name] * self.batch_size, self._sum))
            if most > len(items):
                raise DataError(
                    f"data.mix_weights.{name}: its share of a batch of {self.batch_size} is {most} items, and there "
                    f"are only {len(items)} usable rows of it -- lower the weight or data.train_batch_size, or add rows"
                )


def _refuse_mismatch(items: Mapping[str, Sequence[int]], weights: Mapping[str, float]) -> None:
    missing = [name for name in items if name not in weights]
    unknown = [name for name in weights if name not in items]
    faults = [f"data source {name!r} has {len(items[name])} rows and no weight" for name in missing]
    faults += [f"{name!r} has a weight and no rows" for name in unknown]
    if faults:
        raise DataError(
            f"data.mix_weights: {'; '.join(faults)} -- give one weight for each source of the training files: "
            f"{', '.join(items)}"
        )
