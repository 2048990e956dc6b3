"""Configs and arguments of other projects that are not read: one clear line in place of many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_rl.config.text.reader import Entry
from megatron_rl.errors import Fault

_HYDRA = (
    "--config-path",
    "--config-name",
    "--config-dir",
    "--cfg",
    "--multirun",
    "--package",
    "--resolve",
    "-cn",
    "-cp",
)

_SLIME: dict[str, str] = {
    "--rollout-batch-size": "data.train_batch_size",
    "--n-samples-per-prompt": "rollout.n",
    "--global-batch-size": "actor.ppo_mini_batch_size (in prompts)",
    "--hf-checkpoint": "model.path",
    "--load": "model.path",
    "--ref-load": "ref.path",
    "--prompt-data": "data.train_files",
    "--eval-prompt-data": "data.val_files",
    "--input-key": "data.prompt_key",
    "--label-key": "data.label_key",
    "--rm-type": "reward.function",
    "--custom-rm-path": "reward.function",
    "--num-rollout": "trainer.total_training_steps",
    "--num-epoch": "trainer.total_epochs",
    "--rollout-max-response-len": "data.max_response_length",
    "--rollout-temperature": "rollout.temperature",
    "--rollout-num-gpus-per-engine": "rollout.tp",
    "--advantage-estimator": "algorithm.adv_estimator",
    "--eps-clip": "actor.clip_ratio_low",
    "--eps-clip-high": "actor.clip_ratio_high",
    "--kl-loss-coef": "actor.kl_loss_coef",
    "--entropy-coef": "actor.entropy_coeff",
    "--actor-num-nodes": "cluster.nnodes",
    "--actor-num-gpus-per-node": "cluster.n_gpus_per_node",
    "--tensor-model-parallel-size": "actor.tp",
    "--pipeline-model-parallel-size": "actor.pp",
    "--context-parallel-size": "actor.cp",
    "--expert-model-parallel-size": "actor.ep",
    "--max-tokens-per-gpu": "actor.max_tokens_per_gpu",
    "--recompute-granularity": "actor.recompute",
    "--lr": "actor.optim.lr",
    "--save-interval": "trainer.save_freq",
    "--eval-interval": "trainer.test_freq",
    "--colocate": "nothing: engines share the ranks",
}
"""slime's arguments, most of them Megatron-LM's, and the keys that mean the same."""
_SURE_SIGNS = ("--rollout-", "--n-samples-per-prompt", "--hf-checkpoint", "--ref-load", "--sglang-", "--actor-num-")

_NEMO = {"grpo", "sft", "dpo", "ppo", "rm", "distillation", "loss_fn", "checkpointing", "env", "master_config"}


def foreign_arguments(arguments: Sequence[str]) -> str:
    """What to say of a command line in the form of Hydra's flags or of slime; "" where it is neither."""
    names = [argument.partition("=")[0] for argument in arguments]
    hydra = [name for name in names if name in _HYDRA]
    if hydra:
        return (
            f"{hydra[0]} is a flag of Hydra, which is not read -- give the YAML file itself (PATH/NAME.yaml); of "
            "verl's own files the defaults hold anyway: for ppo_trainer give nothing, for ppo_megatron_trainer "
            "model_engine=megatron"
        )
    if not any(name.startswith(_SURE_SIGNS) for name in names):
        return ""
    given = [name for name in dict.fromkeys(names) if name in _SLIME]
    same = f" ({', '.join(f'{name} is {_SLIME[name]}' for name in given)})" if given else ""
    first = next(name for name in names if name.startswith(_SURE_SIGNS))
    return (
        f"{first} is an argument of slime, whose form is not read -- write key=value with keys of this "
        f"package{same}; `megatron-rl keys` lists them"
    )


def foreign_config(entries: Iterable[Entry]) -> Fault | None:
    """The fault of a config in NeMo-RL's form; None where it is not."""
    firsts: dict[str, Entry] = {}
    for entry in entries:
        firsts.setdefault(entry.key.partition(".")[0], entry)
    if "policy" not in firsts or not _NEMO & firsts.keys():
        return None
    sections = ", ".join(name for name in firsts if name in _NEMO or name == "policy")
    cure = (
        "write keys of this package: policy.model_name is model.path, grpo.num_prompts_per_step data.train_batch_size, "
        "grpo.num_generations_per_prompt rollout.n, policy.megatron_cfg.tensor_model_parallel_size actor.tp; "
        "`megatron-rl keys` lists them"
    )
    reason = f"this is a config of NeMo-RL (sections {sections}), whose form is not read [set {firsts['policy'].where}]"
    return Fault("policy", "*", reason, cure)
