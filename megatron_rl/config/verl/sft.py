"""verl's SFT configs, of its older trainer (model.partial_pretrain) and of its newer one (engine.*, optim.*).

Their keys are renamed to those of verl's RL trainer, of which the other tables speak; what has a meaning of its own
in SFT is mapped here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from megatron_rl.config.text.reader import Entry
from megatron_rl.config.verl import lora, rules, training
from megatron_rl.config.verl.keys import ACTOR, MODEL
from megatron_rl.config.verl.work import DEFAULT, Work

_SIGNS = (
    *("model.partial_pretrain", "model.strategy", "model.fsdp_config.", "model.use_remove_padding", "model.use_liger"),
    *("model.enable_gradient_checkpointing", "model.lora_rank", "model.trust_remote_code", "model.target_modules"),
    *("engine", "optim", "data.micro_batch_size", "data.max_length", "data.max_token_len_per_gpu", "data.pad_mode"),
    *("data.use_dynamic_bsz", "data.multiturn.", "data.prompt_dict_keys", "data.response_dict_keys"),
    *("data.balance_dp_token", "data.tools_key", "data.enable_thinking_key", "data.truncation"),
    *("trainer.n_gpus_per_node", "trainer.nnodes", "checkpoint.", "use_remove_padding"),
    "ulysses_sequence_parallel_size",
)
_OURS = ("actor.", "rollout.", "reward.", "critic.", "ref.", "cluster.")


def is_sft(names: Sequence[str]) -> bool:
    """The keys are those of verl's SFT trainer: two signs of it, and no key of an RL run, verl's or ours."""
    signs = {sign for sign in _SIGNS for name in names if name == sign or name.startswith(sign.rstrip(".") + ".")}
    signs |= {name for name in names if name.startswith(("data.micro_batch_size", "engine.", "optim."))}
    others = [name for name in names if name.startswith((*_OURS, "actor_rollout_ref.", "algorithm."))]
    return len(signs) > 1 and not [name for name in others if name != "algorithm.name"]


_NAMES: dict[str, str] = {
    "model.partial_pretrain": MODEL + "path",
    "optim.warmup_steps_ratio": ACTOR + "optim.lr_warmup_steps_ratio",
    "optim.warmup_steps": ACTOR + "optim.lr_warmup_steps",
    "ulysses_sequence_parallel_size": ACTOR + "ulysses_sequence_parallel_size",
    "trainer.resume_path": "trainer.resume_from_path",
}
_OF_MEGATRON = (
    *("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "use_mbridge"),
    *("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "context_parallel_size"),
    *("sequence_parallel", "use_distributed_optimizer", "vanilla_mbridge"),
)


def renamed(latest: dict[str, Entry]) -> tuple[dict[str, Entry], dict[str, str]]:
    """(entries by verl's RL names, RL name -> the name that the config has)."""
    megatron = _engine(latest) == "megatron"
    found: dict[str, Entry] = {}
    names: dict[str, str] = {}
    for key, entry in latest.items():
        new = _rl_name(key, megatron)
        found[new] = Entry(new, entry.value, entry.where, entry.source)
        if new != key:
            names[new] = key
    return found, names or {"": ""}


def _engine(latest: dict[str, Entry]) -> str:
    for key in ("engine", "engine.strategy"):
        value = latest[key].value if key in latest else None
        if isinstance(value, str):
            return value
    return "megatron" if any(f"engine.{name}" in latest for name in _OF_MEGATRON) else "fsdp"


_OWN = ("init", "dtype", "eos_token", *(f"lora.{name}" for name in ("path", "sync", "save", "use_rslora")))
"""Keys of our section `model` that verl's does not have."""


def _rl_name(key: str, megatron: bool) -> str:
    if key in _NAMES:
        return _NAMES[key]
    section, _, rest = key.partition(".")
    if not rest or (section == "model" and rest in _OWN):
        return key
    engine = ACTOR + ("megatron." if megatron else "fsdp_config.")
    return {"engine": engine, "optim": ACTOR + "optim.", "model": MODEL}.get(section, section + ".") + rest


def _trainer(work: Work) -> None:
    """The algorithm, and which of Hydra's groups are chosen (engine=megatron)."""
    if "algorithm.name" not in work.latest:
        work.place(Entry("verl's SFT trainer", "sft", "", -1), "algorithm.name", "sft", note="a config of verl's SFT")
    for key in ("engine", "optim", "model", "model@model", "engine@engine", "optim@optim"):
        if key not in work.latest:
            continue
        value = work.value(key)
        if value in ("megatron", "hf_model") or value is None:
            work.accept(key, "training runs through Megatron-Core")
        elif value in ("fsdp", "veomni", "torchtitan", "automodel"):
            work.differ(key, "training runs through Megatron-Core: the same losses and updates")
        else:
            work.refuse(key, "asks for another training backend, which is not offered", "write megatron, or remove it")


def _older_schedule(work: Work) -> None:
    """The older trainer's name of the schedule; beside it the newer one's default means nothing."""
    key, newer = ACTOR + "optim.lr_scheduler", ACTOR + "optim.lr_scheduler_type"
    if work.value(key) is None:
        return
    work.place(work.latest[key], "actor.optim.lr_scheduler", work.value(key))
    if newer in work.latest:
        work.accept(newer, "optim.lr_scheduler decides")


def _batch(work: Work) -> None:
    key, tokens = "data.micro_batch_size_per_gpu", "data.max_token_len_per_gpu"
    by_tokens = work.value("data.use_dynamic_bsz", tokens in work.latest)
    if key in work.latest and by_tokens:
        work.accept(key, "micro-batches are filled by tokens: same numbers")
    elif work.value(key) is not None:
        work.place(work.latest[key], "actor.ppo_micro_batch_size_per_gpu", work.value(key))
    if work.value(tokens) is not None:
        work.place(work.latest[tokens], "actor.max_tokens_per_gpu", work.value(tokens))
    if work.waits("data.num_workers"):
        work.accept("data.num_workers", "speed only")


def _length(work: Work) -> None:
    key, cut = "data.max_length", "data.truncation"
    length = work.value(key)
    if isinstance(length, int) and not isinstance(length, bool) and length > 1:
        note = "rows may have max_prompt_length + max_response_length tokens: half each"
        work.place(work.latest[key], "data.max_prompt_length", length // 2, note=note)
        work.place(work.latest[key], "data.max_response_length", length - length // 2, note=note)
    elif key in work.latest:
        work.refuse(key, "is no number of tokens", "give a whole number above 1")
    policy = {"error": "error", "right": "truncate", "None": "error"}.get(str(work.value(cut, "error")))
    if cut in work.latest and policy is None:
        work.refuse(cut, "long rows are cut at their end here (verl's right)", "write right or error")
    elif cut in work.latest:
        work.place(work.latest[cut], "data.overlong_prompts", policy)


def _columns(work: Work) -> None:
    """Where a row has its messages, or its prompt and response."""
    turns = bool(work.value("data.multiturn.enable"))
    for key in ("data.messages_key", "data.multiturn.messages_key"):
        if work.value(key) is not None and (key == "data.messages_key" or turns):
            work.place(work.latest[key], "data.messages_key", work.value(key))
    if "data.multiturn.enable" in work.latest:
        work.accept("data.multiturn.enable", "rows of messages are recognised by their column")
    for kind in ("tools", "enable_thinking"):
        for key in (f"data.{kind}_key", f"data.multiturn.{kind}_key"):
            if work.value(key) is None or (key.startswith("data.multiturn.") and not turns):
                continue
            work.place(work.latest[key], f"data.{kind}_key", work.value(key))
    key = "data.enable_thinking_default"
    if key in work.latest and work.value(key) in (None, "none"):
        work.accept(key, "not given")
    elif key in work.latest:
        value = str(work.value(key)).lower() == "true"
        work.place(work.latest[key], "data.apply_chat_template_kwargs.enable_thinking", value)
    if "data.chat_template" in work.latest and work.value("data.chat_template") is None:
        work.accept("data.chat_template", "the tokenizer's own")
    for kind in ("prompt", "response"):
        _column(work, f"data.{kind}_key", f"data.{kind}_dict_keys", turns)


def _column(work: Work, key: str, inner: str, turns: bool) -> None:
    within = work.value(inner)
    names = cast("list[object]", within) if isinstance(within, list) else [] if within is None else [within]
    if turns:
        for one in (key, inner):
            if one in work.latest:
                work.accept(one, "rows have messages (data.multiturn.enable)")
        return
    if len(names) > 1:
        work.refuse(inner, "asks for text joined from several fields", "name one field, or join them in the file")
        return
    column = work.value(key)
    if inner in work.latest and (not names or column is None or column == names[0]):
        # Where the field has the column's own name, verl's default says the same twice.
        work.accept(inner, "the column itself")
        names = []
    if column is None:
        return
    work.place(work.latest[key], key, ".".join([str(column), *map(str, names)]))
    if names:
        work.place(work.latest[inner], key, f"{column}.{names[0]}")
    if key == "data.prompt_key" and "data.string_prompt" not in work.latest:
        note = "verl's SFT puts a prompt into the chat template as a user's message"
        work.place(Entry(key, None, "", -1), "data.string_prompt", "user", note=note)


def _save(work: Work) -> None:
    """verl's SFT saves and validates at its last step whatever the frequencies are."""
    for name in ("save_freq", "test_freq"):
        key = f"trainer.{name}"
        value = work.value(key)
        if key in work.latest and value == "after_each_epoch" and name == "save_freq":
            work.refuse(key, "asks for a save after each epoch", "give a number of steps, or -1: at the end")
        elif key in work.latest:
            # -1 validates after each epoch here.
            work.place(work.latest[key], key, -1 if value in (None, 0, "after_each_epoch") else value)
    if "trainer.n_gpus_per_node" not in work.latest:
        what = "cluster.n_gpus_per_node is the number of ranks here; verl's SFT takes what torchrun started"
        work.differ("trainer.n_gpus_per_node", what, 1)


def _defaults(work: Work) -> None:
    """Defaults of verl's SFT that change the training and are not ours; its two trainers have different ones."""
    older = "model.partial_pretrain" in work.names.values() or "data.multiturn.enable" in work.latest
    chosen: dict[str, object] = {"lr": 1e-3}
    if older:
        chosen = {"lr": 1e-5, "adam_beta2": 0.95, "lr_scheduler": "cosine", "lr_warmup_steps_ratio": 0.1}
    for name, value in chosen.items():
        key = f"actor.optim.{name}"
        if key not in work.placed and work.value(f"{ACTOR}optim.{name}") is None and key not in work.latest:
            work.place(Entry(f"optim.{name}", value, "", -1), key, value, note=DEFAULT)


DEFAULTS: dict[str, tuple[str, object]] = {
    "data.train_batch_size": ("data.train_batch_size", 256),
    "trainer.total_epochs": ("trainer.total_epochs", 4),
    "trainer.seed": ("trainer.seed", 1),
}
"""verl's defaults that decide what is trained and are not ours: they hold where a verl config is silent."""
RULES = (
    rules.hydra_defaults,
    _trainer,
    _older_schedule,
    _batch,
    _length,
    _columns,
    _save,
    training.schedule,
    training.betas,
    training.offload,
    training.recompute,
    training.sequence_parallel,
    training.context_parallel,
    training.expert_split,
    lora.lora,
    _defaults,
    rules.run_folder,
    rules.logger,
    rules.resume,
    rules.kept_saves,
)
