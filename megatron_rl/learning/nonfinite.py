"""What becomes of a run whose loss, gradient or advantages are not finite: it stops, or passes over the mini-batch.

Ranks leave weights, moments and learning-rate schedule as they were (mcore/step.py); here the data rows are named,
and trainer.on_nonfinite decides.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from megatron_rl.config.sections.trainer import TrainerConfig
from megatron_rl.data.batching import MicroBatches
from megatron_rl.errors import NonFiniteError
from megatron_rl.messages import first_of
from megatron_rl.types import BadMicroBatch, StepReport

_log = logging.getLogger(__name__)
_SHOWN = 10
_CURE = (
    "look at these rows and their rewards; lower the learning rate; or set trainer.on_nonfinite=skip, which passes "
    "over such mini-batches"
)


class NonFiniteGuard:
    """Looks at every optimizer step of a run and counts what was passed over. May be called from several threads."""

    def __init__(self, cfg: TrainerConfig) -> None:
        self._cfg = cfg
        self._lock = threading.Lock()
        self.step = 0
        self.skips = 0
        """Optimizer steps that were passed over, since the run began."""

    def state(self) -> dict[str, int]:
        """What a resumed run needs."""
        return {"skips": self.skips}

    def restore(self, state: Mapping[str, int]) -> None:
        """The inverse of `state`."""
        self.skips = state["skips"]

    @property
    def stops(self) -> bool:
        """A number that is not finite ends the run."""
        return self._cfg.on_nonfinite == "stop"

    def look(
        self,
        report: StepReport,
        model: str,
        mini: int,
        ranks: Sequence[MicroBatches],
        names: Callable[[], Sequence[str]],
    ) -> None:
        """Raise NonFiniteError where the report's step was not made and the run stops at that, or has made no step too
        often. model: whose step it was. mini: number of the mini-batch, from 1. ranks: [dp][j] sequence numbers. names:
        what each sequence is called, asked for if a step was not made.
        """
        if report.updated:
            return
        what = (
            f"step {self.step}, mini-batch {mini}: the {model}'s loss {report.loss:g} and gradient norm "
            f"{report.grad_norm:g} are not both finite, and its weights were left as they are "
            f"-- {_places(report.bad, ranks, names())}"
        )
        if self.stops:
            raise NonFiniteError(f"{what} -- {_CURE}")
        with self._lock:
            self.skips += 1
            skips, limit = self.skips, self._cfg.max_nonfinite_skips
        if skips > limit:
            raise NonFiniteError(
                f"{what} -- {limit} mini-batches were passed over before, which is trainer.max_nonfinite_skips "
                "-- lower the learning rate, take out the rows named above and in the warnings before, or raise "
                "trainer.max_nonfinite_skips"
            )
        _log.warning("%s -- passed over (%d of at most %d)", what, skips, limit)

    def refuse_columns(self, bad: Mapping[str, Sequence[int]], model: str, names: Callable[[], Sequence[str]]) -> None:
        """Raise NonFiniteError if a column of the loss is not finite. bad: column -> numbers of the sequences where it
        is not. names: what each sequence is called.
        """
        for column, numbers in bad.items():
            rows = names()
            raise NonFiniteError(
                f"step {self.step}: {column.replace('_', ' ')} of the {model}'s loss are not finite -- "
                f"{len(numbers)} sequences: {_listed([rows[s] for s in sorted(numbers)])} -- {_CURE}"
            )

    def metrics(self, reports: Mapping[str, Sequence[StepReport]]) -> dict[str, float]:
        """<model>/nonfinite_skips of this step, and trainer/nonfinite_skips of the run; nothing in a run that stops."""
        if self.stops:
            return {}
        found = {
            f"{model}/nonfinite_skips": float(sum(not report.updated for report in of_model))
            for model, of_model in reports.items()
        }
        return found | {"trainer/nonfinite_skips": float(self.skips)}


def _places(bad: Sequence[BadMicroBatch], ranks: Sequence[MicroBatches], rows: Sequence[str]) -> str:
    """Ranks, micro-batches and rows."""
    if not bad:
        numbers = sorted({s for of_rank in ranks for micro in of_rank for s in micro})
        return (
            "each micro-batch is finite by itself, and their sum is not; the mini-batch's rows: "
            f"{_listed([rows[s] for s in numbers])}"
        )
    by_micro: dict[tuple[int, int, str], list[BadMicroBatch]] = {}
    for one in bad:
        by_micro.setdefault((one.dp, one.micro, one.what), []).append(one)
    parts: list[str] = []
    for (dp, micro, what), found in sorted(by_micro.items()):
        members = ranks[dp][micro]
        some = sorted({s for one in found for s in one.sequences or ()})
        whose = [members[s] for s in some] if some else list(members)
        seen_by = sorted({one.rank for one in found})
        parts.append(
            f"{what} of micro-batch {micro + 1} of data-parallel rank {dp}, on rank{'s' if len(seen_by) > 1 else ''} "
            f"{', '.join(map(str, seen_by))}: {_listed([rows[s] for s in whose]) or 'no rows'}"
        )
    return "; ".join(parts)


def _listed(rows: Sequence[str]) -> str:
    return first_of(dict.fromkeys(rows), _SHOWN)
