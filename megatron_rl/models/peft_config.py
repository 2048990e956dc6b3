"""adapter_config.json: what PEFT writes beside an adapter. Torch-free.

What an adapter asks for and this package does not compute is refused here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from megatron_rl.errors import Fault
from megatron_rl.models.lora import Adapters

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_OFF: Mapping[str, tuple[object, ...]] = {
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "layers_pattern": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None, []),
}
"""PEFT's settings that change what is computed -> the values that change nothing."""


def adapter_config(adapters: Adapters, base: str) -> dict[str, object]:
    """What PEFT reads beside the tensors. base: the folder of the model that the adapter belongs to."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": int(adapters.alpha) if adapters.alpha == int(adapters.alpha) else adapters.alpha,
        "lora_dropout": adapters.dropout,
        "use_rslora": adapters.use_rslora,
        "target_modules": sorted(adapters.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def adapter_faults(folder: str, adapters: Adapters, key: str) -> list[Fault]:
    """Why the adapter of a folder is not one of `adapters`; empty if it is."""
    file = Path(folder) / CONFIG_NAME
    if not file.is_file():
        cure = "give the folder of an adapter as PEFT writes it"
        return [Fault(key, folder, f"there is no {CONFIG_NAME}", cure)]
    try:
        content: object = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        return [Fault(key, folder, f"{CONFIG_NAME} is not valid JSON: {error}", "write the adapter again")]
    if not isinstance(content, dict):
        return [Fault(key, folder, f"{CONFIG_NAME} is no mapping", "write the adapter again")]
    settings = cast("dict[str, object]", content)
    if settings.get("peft_type") != "LORA":
        reason = f"is an adapter of the type {settings.get('peft_type')!r}"
        return [Fault(key, folder, reason, "only LoRA is offered")]
    faults: list[Fault] = []
    for name, values in _OFF.items():
        if settings.get(name) not in values:
            reason = f"{CONFIG_NAME} asks for {name} {settings[name]!r}, which is not computed here"
            faults.append(Fault(key, folder, reason, "use an adapter without it"))
    section = key.rpartition(".")[0]
    ours = {"r": ("rank", adapters.rank), "lora_alpha": ("alpha", adapters.alpha)}
    for name, (own, value) in {**ours, "use_rslora": ("use_rslora", adapters.use_rslora)}.items():
        theirs = settings.get(name, False)
        if theirs != value:
            reason = f"the adapter has {name} {theirs!r}, and {section}.{own} is {value!r}"
            faults.append(Fault(key, folder, reason, f"set {section}.{own}={theirs}"))
    targets = settings.get("target_modules")
    if isinstance(targets, list) and frozenset(cast("list[str]", targets)) != adapters.targets:
        names = ",".join(sorted(cast("list[str]", targets)))
        reason = f"the adapter's targets are {names}, the run's {','.join(sorted(adapters.targets))}"
        faults.append(Fault(key, folder, reason, f"set {section}.target_modules=[{names}]"))
    if not (Path(folder) / WEIGHTS_NAME).is_file():
        reason = f"there is no {WEIGHTS_NAME}"
        faults.append(Fault(key, folder, reason, "save it as safetensors (PEFT's save_pretrained does)"))
    return faults
