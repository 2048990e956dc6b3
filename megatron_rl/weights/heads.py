"""The value head in Hugging Face coordinates: transformers' token classifier with one label.

score.weight [1, hidden], score.bias [1]; a sequence classifier (a reward model) has the weight alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_rl.models.config_json import HeadKind
from megatron_rl.models.layouts import Block
from megatron_rl.models.rules import LocalParam
from megatron_rl.models.shape import ModelShape
from megatron_rl.weights.safetensors import WeightSource

VALUE_HEAD = WEIGHT, BIAS = "score.weight", "score.bias"


def value_head_shapes(shape: ModelShape, biased: bool = True) -> dict[str, tuple[int, ...]]:
    """HF name -> shape of the head's tensors."""
    return {WEIGHT: (1, shape.hidden_size)} | ({BIAS: (1,)} if biased else {})


def value_head_params(shape: ModelShape, biased: bool = True) -> list[LocalParam]:
    """The head's Megatron parameters; every tensor-parallel rank holds them whole."""
    weight = LocalParam("value_head.weight", (1, shape.hidden_size), (Block(WEIGHT, (0, 1), (0, shape.hidden_size)),))
    return [weight, *([LocalParam("value_head.bias", (1,), (Block(BIAS, (0, 1)),))] if biased else [])]


def token_classifier_config(shape: ModelShape) -> dict[str, Any]:
    """Entries of config.json that make a critic a token classifier with one label, without dropout."""
    return {
        "architectures": [shape.architecture.replace("ForCausalLM", "ForTokenClassification")],
        "id2label": {"0": "value"},
        "label2id": {"value": 0},
        "classifier_dropout": 0.0,
    }


def sequence_classifier_config(shape: ModelShape, pad_token: int | None) -> dict[str, Any]:
    """Entries of config.json that make a reward model a sequence classifier with one label. pad_token: what batches are
    padded with, which transformers looks for to find the last token; None: it refuses batches.
    """
    return {
        "architectures": [shape.architecture.replace("ForCausalLM", "ForSequenceClassification")],
        "id2label": {"0": "reward"},
        "label2id": {"reward": 0},
        "pad_token_id": pad_token,
    }


class ValueHeadSource:
    """A model's weights with a value head: the folder's own, or a new one of zeros (values start at 0)."""

    def __init__(self, source: WeightSource, kind: HeadKind, unused: Mapping[str, tuple[int, ...]]) -> None:
        """kind: what the folder's model is; a causal one has no value head. unused: tensors that the folder holds and
        the critic does not (a causal model's output matrix).
        """
        self._source, self._unused = source, dict(unused)
        self._own = {"causal": (), "sequence": (WEIGHT,), "token": VALUE_HEAD}[kind]

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """See WeightSource."""
        held = {n: s for n, s in expected.items() if n not in VALUE_HEAD or n in self._own}
        self._source.check(held | self._unused)

    def read(self, block: Block) -> torch.Tensor:
        """See WeightSource."""
        if block.hf_name in VALUE_HEAD and block.hf_name not in self._own:
            rows = (block.num_rows,)
            return torch.zeros(rows if block.cols is None else (*rows, block.cols[1] - block.cols[0]))
        return self._source.read(block)

    def place(self, name: str) -> str:
        """See WeightSource."""
        return self._source.place(name)
