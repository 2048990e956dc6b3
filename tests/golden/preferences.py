"""Losses and gradients of TRL's trainers on eight rows of text, which the losses here must give on the same rows.

    PYTHONPATH=FOLDER_WITH_TRL:. python -m tests.golden.preferences

records them anew (preferences.json, beside this file) with TRL 1.16: pip install --target FOLDER_WITH_TRL trl==1.16.0
and what it needs. Models are transformers' own, drawn from a seed.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false
from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from examples.quickstart.make_data import make
from tests.helpers.tiny import save_tiny

RECORD = Path(__file__).with_name("preferences.json")
PAIRS = [
    ("12+30=", "42", "402"), ("7+8=", "15", "16."), ("1+1=", "2", "eleven"), ("40+2=", "42", "41 or so"),
    ("99+1=", "100", "1"), ("5+5=", "10", "55"), ("a,b,", "c", "a,b,c"), ("x=", "y, I think", "z"),
]  # fmt: skip
SETTINGS: dict[str, dict[str, float]] = {
    "dpo": {"beta": 0.2},
    "cdpo": {"beta": 0.2, "label_smoothing": 0.15},
    "ipo": {"beta": 0.3},
    "kto": {"beta": 0.25, "desirable_weight": 1.2, "undesirable_weight": 0.8},
    "simpo": {"beta": 2.0, "gamma": 0.6},
    "orpo": {"beta": 0.4},
}


def write_inputs(folder: Path) -> tuple[str, str, str]:
    """(model, reference, rows of pairs) in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    policy = Path(save_tiny(folder / "policy", layers=2, **sizes))
    made = folder / "quickstart"
    make(made, seed=0)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(made / "model" / name, policy / name)
    config = json.loads((policy / "config.json").read_text())
    ours = json.loads((made / "model" / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(config | {"eos_token_id": ours["eos_token_id"]}))
    reference = folder / "reference"
    shutil.copytree(policy, reference)
    move_away(reference)
    rows = folder / "pairs.jsonl"
    names = ("prompt", "chosen", "rejected")
    rows.write_text("".join(json.dumps(dict(zip(names, pair, strict=True))) + "\n" for pair in PAIRS))
    return str(policy), str(reference), str(rows)


def move_away(folder: Path) -> None:
    """Change a model's weights a little, so that it is another one."""
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(2)
    tensors = load_file(folder / "model.safetensors")
    changed = {name: one + 0.03 * torch.randn(one.shape, generator=generator) for name, one in tensors.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})


def digest(loss: float, grads: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A loss, and of the gradient by each tensor its norm and its product with a fixed vector of like size."""
    found: dict[str, list[float]] = {}
    for name, grad in sorted(grads.items()):
        flat = grad.double().flatten()
        found[name] = [float(flat.norm()), float(flat @ torch.arange(len(flat), dtype=torch.float64).cos())]
    return {"loss": loss, "grads": found}


def trl_digests(policy: str, reference: str) -> dict[str, dict[str, Any]]:
    """What TRL's trainers compute, in float32, of all rows in one batch."""
    return {name: digest(*_trl(name, policy, reference)) for name in SETTINGS}


def _trl(name: str, policy: str, reference: str) -> tuple[float, dict[str, torch.Tensor]]:
    settings = dict(SETTINGS[name])
    if name != "cdpo":
        return _trl_step(name, settings, PAIRS, policy, reference)
    # TRL has DPO's smoothed form no more: of each label a share of DPO's loss, of the flipped one the rest.
    eps = settings.pop("label_smoothing")
    flipped = [(prompt, rejected, chosen) for prompt, chosen, rejected in PAIRS]
    right, wrong = (_trl_step("dpo", settings, pairs, policy, reference) for pairs in (PAIRS, flipped))
    grads = {one: (1 - eps) * right[1][one] + eps * wrong[1][one] for one in right[1]}
    return (1 - eps) * right[0] + eps * wrong[0], grads


def _trl_step(
    name: str, settings: dict[str, float], pairs: list[tuple[str, str, str]], policy: str, reference: str
) -> tuple[float, dict[str, torch.Tensor]]:
    # Installed apart: no part of the project's environment.
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    def load(folder: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    rows = [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in pairs]
    config: Any
    trainer: Any
    options: dict[str, Any] = {**settings}
    if name == "kto":
        rows = [
            {"prompt": row["prompt"], "completion": row[which], "label": which == "chosen"}
            for which in ("chosen", "rejected")
            for row in rows
        ]
        config, trainer = KTOConfig, KTOTrainer
    elif name == "simpo":
        config, trainer = CPOConfig, CPOTrainer
        options = {"beta": settings["beta"], "simpo_gamma": settings["gamma"], "loss_type": "simpo", "cpo_alpha": 0.0}
    elif name == "orpo":
        config, trainer = ORPOConfig, ORPOTrainer
    else:
        config, trainer = DPOConfig, DPOTrainer
        options = settings | {"loss_type": ["sigmoid" if name == "dpo" else name]}
    with tempfile.TemporaryDirectory() as folder:
        args = config(
            output_dir=folder,
            per_device_train_batch_size=len(rows),
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            **options,
        )
        models = {} if name in ("simpo", "orpo") else {"ref_model": load(reference)}
        model = load(policy)
        tokenizer = AutoTokenizer.from_pretrained(policy)
        run = trainer(
            model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, **models
        )
        (batch,) = run.get_train_dataloader()
        loss = run.compute_loss(run.model, batch)
    loss.backward()
    grads = {name: one.grad for name, one in run.model.named_parameters() if one.grad is not None}
    return float(loss), grads


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        inputs = write_inputs(Path(made))
        RECORD.write_text(json.dumps(trl_digests(*inputs[:2]), indent=1) + "\n")
