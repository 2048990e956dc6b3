"""Objectives and reads travel to the ranks as frozen records."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace

import pytest

from megatron_rl.config.sections.actor import ActorConfig
from megatron_rl.workers.objectives import (
    NllObjective,
    Objective,
    PolicyObjective,
    PolicyValueObjective,
    ValueObjective,
)
from megatron_rl.workers.records import Read

POLICY, VALUE = PolicyObjective(ActorConfig(entropy_coeff=0.5), 0.7), ValueObjective(0.5)
RECORDS: tuple[Objective, ...] = (POLICY, NllObjective(), VALUE, PolicyValueObjective(POLICY, VALUE, 0.25))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_every_objective_is_a_record_that_travels(record: Objective):
    assert pickle.loads(pickle.dumps(record)) == record
    with pytest.raises(FrozenInstanceError):
        record.temperature = 2.0  # type: ignore[attr-defined]


def test_a_read_names_its_columns():
    read = Read(("logprobs", "values"), 0.7)
    assert pickle.loads(pickle.dumps(read)) == read != replace(read, temperature=1.0)
