"""What a run is made of. Building the parts does nothing; trainers bind their step functions to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from megatron_rl.config.run import RunConfig
from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data.preferences import preference_reader
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.render import Renderer
from megatron_rl.data.sft import load_sft
from megatron_rl.data.stream import MixedStream, Stream, open_stream, steps_per_epoch
from megatron_rl.errors import FlowError
from megatron_rl.experience.sampler import Sampler
from megatron_rl.experience.scoring import RunRewards
from megatron_rl.learning.kl_control import KlControl
from megatron_rl.learning.loss_average import LossAverage
from megatron_rl.learning.mismatch import MismatchGuard
from megatron_rl.learning.passes import Models
from megatron_rl.learning.preferences import References


class Sourced(Protocol):
    """A row of data that knows where it comes from."""

    @property
    def data_source(self) -> str: ...


Item = TypeVar("Item", bound=Sourced)
ItemOut = TypeVar("ItemOut", bound=Sourced, covariant=True)


class Counted(Protocol):
    """A data set that knows what became of its rows."""

    @property
    def num_rows(self) -> int: ...
    @property
    def num_filtered(self) -> int: ...
    @property
    def num_truncated(self) -> int: ...
    @property
    def num_cached(self) -> int: ...
    @property
    def rows_by_source(self) -> Mapping[str, int]: ...
    @property
    def notes(self) -> Sequence[str]: ...


class DataSet(Counted, Protocol[ItemOut]):
    """The usable rows of some files, and what became of the rest."""

    @property
    def items(self) -> Sequence[ItemOut]: ...


class Load(Protocol[ItemOut]):
    """Reads one kind of data set."""

    def __call__(
        self, cfg: DataConfig, files: Sequence[str], renderer: Renderer, *, validation: bool = False
    ) -> DataSet[ItemOut]: ...


class RunData(Generic[Item]):
    """A run's training and validation rows, and the order of the first."""

    def __init__(self, cfg: RunConfig, load: Load[Item]) -> None:
        self._cfg, self._load = cfg, load
        self.train: DataSet[Item] | None = None
        """None until `read`, and in an evaluation, which has no training files."""
        self.val: DataSet[Item] | None = None
        self.stream: Stream | MixedStream | None = None
        self._saved: Mapping[str, Any] | None = None
        """Where `read` goes on."""

    def read(self, renderer: Renderer) -> None:
        """Read all files, so that bad input costs seconds: before any worker starts."""
        data = self._cfg.data
        if data.train_files:
            self.train = self._load(data, data.train_files, renderer)
            sources = [item.data_source for item in self.train.items]
            self.stream = open_stream(data, sources, self._cfg.trainer.seed)
            if self._saved is not None:
                self.stream.restore(dict(self._saved))
        if data.val_files:
            self.val = self._load(data, data.val_files, renderer, validation=True)

    def next(self) -> list[Item]:
        """The next data.train_batch_size training items."""
        if self.train is None or self.stream is None:
            raise FlowError("there is no training data -- call the trainer's start() first, and give data.train_files")
        return [self.train.items[i] for i in self.stream.next()]

    @property
    def sets(self) -> dict[str, DataSet[Item]]:
        """What was read: "train", "val"."""
        read = {"train": self.train, "val": self.val}
        return {name: one for name, one in read.items() if one is not None}

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(len(self.train.items) if self.train else 0, self._cfg.data.train_batch_size)

    @property
    def total_steps(self) -> int:
        trainer = self._cfg.trainer
        return trainer.total_training_steps or self.steps_per_epoch * trainer.total_epochs

    def state(self) -> dict[str, Any]:
        """The position in the training data."""
        return {} if self.stream is None else self.stream.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Raises DataError if the order of the rows would differ; before `read`, that does."""
        self._saved = state
        if self.stream is not None:
            self.stream.restore(dict(state))


class Parts:
    """The parts of a run, by what they do. An algorithm starts those that it needs."""

    def __init__(self, cfg: RunConfig) -> None:
        self.cfg = cfg
        self.prompts = RunData(_with_prompts(cfg) if cfg.samples_prompts else cfg, load_prompts)
        self.samples = RunData(cfg, load_sft)
        """Of supervised fine-tuning."""
        self.preferences = RunData(cfg, preference_reader(cfg))
        self.sampler = Sampler(cfg)
        self.rewards = RunRewards(cfg)
        self.models = Models(cfg)
        self.references = References(self.models)
        self.kl_control = KlControl(cfg.algorithm.kl_ctrl)
        self.mismatch = MismatchGuard(cfg)
        self.loss_average = LossAverage()

    @property
    def data(self) -> RunData[Any]:
        """The rows that this run learns from."""
        if self.cfg.needs.preferences:
            return self.preferences
        return self.prompts if self.cfg.needs.rollouts else self.samples


def _with_prompts(cfg: RunConfig) -> RunConfig:
    """The config whose validation rows are the prompts that a run samples in validation alone."""
    return replace(cfg, data=replace(cfg.data, train_files=[], mix_weights={}, val_files=cfg.data.val_prompt_files))
