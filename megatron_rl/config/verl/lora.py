"""verl's keys of LoRA: with FSDP they lie in the section model, with Megatron in a section of their own."""

from __future__ import annotations

from typing import cast

from megatron_rl.config.text.reader import Entry
from megatron_rl.config.verl.keys import MODEL
from megatron_rl.config.verl.work import DEFAULT, Work

_SECTION = MODEL + "lora."
_OURS = "model.lora."
_OF_FSDP = {
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "target_modules": "target_modules",
    "exclude_modules": "exclude_modules",
    "lora_adapter_path": "path",
}
_OF_MEGATRON = {"rank": "rank", "alpha": "alpha", "dropout": "dropout", "adapter_path": "path"}
_FUSED = {
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_q": ["q_proj"],
    "linear_k": ["k_proj"],
    "linear_v": ["v_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc1_gate": ["gate_proj"],
    "linear_fc1_up": ["up_proj"],
    "linear_fc2": ["down_proj"],
}
"""Megatron's linear layers -> those of Hugging Face."""


_FROZEN = "text only here, and the weights themselves are never trained with LoRA"
_SAME = {
    "dtype": "adapters have the precision of model.dtype, and float32 masters",
    "a2a_experimental": "speed only: same numbers",
    **{f"freeze_{part}": _FROZEN for part in ("language_model", "vision_model", "vision_projection")},
}


def lora(work: Work) -> None:
    """Adapters of the actor. Where there are none, the tables accept what stands beside."""
    if work.value(MODEL + "lora_rank") or work.value(MODEL + "lora_adapter_path"):
        for name, ours in _OF_FSDP.items():
            _place(work, MODEL + name, _OURS + ours)
        key = MODEL + "target_parameters"
        if work.value(key):
            work.refuse(key, "asks for adapters of parameters that are no linear layers", "remove it")
        elif key in work.latest:
            work.accept(key, "not given")
    if work.value(_SECTION + "rank") or work.value(_SECTION + "adapter_path"):
        _of_megatron(work)


def _place(work: Work, key: str, ours: str) -> None:
    if work.value(key) is not None:
        work.place(work.latest[key], ours, work.value(key))
    elif key in work.latest:
        work.accept(key, "not given")


def _of_megatron(work: Work) -> None:
    for name, ours in _OF_MEGATRON.items():
        _place(work, _SECTION + name, _OURS + ours)
    if _SECTION + "alpha" not in work.latest:
        work.place(Entry(_SECTION + "alpha", 32, "", -1), _OURS + "alpha", 32, note=DEFAULT)
    for name in ("target_modules", "exclude_modules"):
        _layers(work, _SECTION + name, _OURS + name)
    key = _SECTION + "merge"
    if work.value(key) is not None:
        work.place(work.latest[key], _OURS + "sync", "merged" if work.value(key) else "adapter")
    _kind(work)
    for name, same in (("dropout_position", "pre"), ("lora_B_init_method", "zero")):
        key = _SECTION + name
        if work.value(key) in (None, same) and key in work.latest:
            work.accept(key, "as here")
        elif key in work.latest:
            work.refuse(key, "is not offered", f"write {same}")
    key = _SECTION + "lora_A_init_method"
    if key in work.latest:
        work.differ(key, "A begins as in PEFT: uniform, within 1 / sqrt(inputs)")
    for name, why in _SAME.items():
        if _SECTION + name in work.latest:
            work.accept(_SECTION + name, why)


def _kind(work: Work) -> None:
    kind = work.entry(_SECTION + "type", "lora")
    if kind.value == "lora":
        what = "q_proj, k_proj and v_proj have an A each, as in PEFT; verl's fused layers share one"
        work.differ(kind.key, what, "lora")
    elif kind.value == "canonical_lora":
        work.accept(kind.key, "each layer has an A of its own, as here")
    elif kind.value is not None:
        work.refuse(kind.key, "asks for another kind of adapter", "write lora")


def _layers(work: Work, key: str, ours: str) -> None:
    """Megatron's names of layers, as Hugging Face's."""
    value = work.value(key)
    if value is None:
        if key in work.latest:
            work.accept(key, "not given")
        return
    names = cast("list[object]", value) if isinstance(value, list) else [value]
    written: list[object] = []
    for name in names:
        written += _FUSED.get(name, [name]) if isinstance(name, str) else [name]
    work.place(work.latest[key], ours, written)


KEYS: tuple[str, ...] = (
    *(MODEL + name for name in (*_OF_FSDP, "target_parameters")),
    *(_SECTION + name for name in (*_OF_MEGATRON, "target_modules", "exclude_modules", "merge", "type")),
)
"""Keys that this rule takes."""
