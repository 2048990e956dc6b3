"""Objectives and reads travel to the ranks as frozen records."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace

import pytest

from megatron_rl.config.sections.actor import ActorConfig
from megatron_rl.workers.objectives import (
    OBJECTIVES,
    NllObjective,
    Objective,
    PolicyObjective,
    PolicyValueObjective,
    ValueObjective,
)
from megatron_rl.workers.records import Read

POLICY, VALUE = PolicyObjective(ActorConfig(entropy_coeff=0.5), 0.7), ValueObjective(0.5)
RECORDS: dict[str, Objective] = {
    "policy": POLICY,
    "nll": NllObjective(),
    "value": VALUE,
    "policy+value": PolicyValueObjective(POLICY, VALUE, 0.25),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_is_a_record_that_travels(name: str):
    record = RECORDS[name]
    assert type(record) is OBJECTIVES[name]
    assert pickle.loads(pickle.dumps(record)) == record
    with pytest.raises(FrozenInstanceError):
        record.temperature = 2.0  # type: ignore[attr-defined]


def test_a_read_names_its_columns():
    read = Read(("logprobs", "values"), 0.7)
    assert pickle.loads(pickle.dumps(read)) == read != replace(read, temperature=1.0)
