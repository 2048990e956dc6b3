"""Keys of verl that only mean something together: how actor and critic train."""

from __future__ import annotations

from typing import cast

from megatron_rl.config.text.reader import Entry
from megatron_rl.config.verl import neutral
from megatron_rl.config.verl.keys import ACTOR, CRITIC, MODEL, REF
from megatron_rl.config.verl.work import DEFAULT, Work

_MEGATRON = ACTOR + "megatron."


def on_megatron(work: Work) -> bool:
    """The config is of verl's Megatron trainer; its default is FSDP."""
    named = work.value(ACTOR + "strategy") or work.value("model_engine")
    if named is not None:
        return named == "megatron"
    if any(key.startswith(_MEGATRON) for key in work.latest):
        return True
    chosen = [str(entry.value) for key, entry in work.latest.items() if key == "defaults" or "@" in key]
    return any("megatron" in value for value in chosen)


def backend(work: Work) -> None:
    """Training runs through Megatron-Core whatever verl would take; said once."""
    for key in (ACTOR + "strategy", CRITIC + "strategy", REF + "strategy"):
        if key not in work.latest:
            continue
        value = work.value(key)
        if neutral.BACKEND.accepts(value):
            work.accept(key, neutral.BACKEND.why)
        elif not neutral.OTHER_BACKEND.accepts(value):
            work.refuse(key, f"asks for {neutral.BACKEND.lacks}, which is not offered", neutral.BACKEND.cure)
        elif key == ACTOR + "strategy" or ACTOR + "strategy" not in work.latest:
            work.differ(key, neutral.OTHER_BACKEND.why)
        else:
            work.accept(key, "as the actor's")


def updates_per_step(work: Work, part: str) -> int:
    """Optimizer steps of one training step; 1 where the config does not say it in whole numbers."""
    train = work.value("data.train_batch_size", work.value("data.train_batch_size", 1024))
    mini = work.value(ACTOR + "ppo_mini_batch_size", work.value("actor.ppo_mini_batch_size", 256))
    epochs = work.value(ACTOR + "ppo_epochs", 1)
    if part == CRITIC:
        mini, epochs = work.value(CRITIC + "ppo_mini_batch_size", mini), work.value(CRITIC + "ppo_epochs", epochs)
    if work.names:
        return 1
    if not all(isinstance(one, int) and one > 0 for one in (train, mini, epochs)) or train % mini:
        return 1
    return train // mini * epochs


def schedule(work: Work) -> None:
    """verl moves the learning rate once a training step, here it moves with every optimizer step."""
    for part, ours in ((ACTOR, "actor"), (CRITIC, "critic")):
        _decay(work, part + "optim.", f"{ours}.optim.")
        updates = updates_per_step(work, part)
        note = f"verl counts training steps, of {updates} optimizer steps each" if updates > 1 else ""
        for name in ("lr_warmup_steps", "lr_decay_steps"):
            key = f"{part}optim.{name}"
            count = work.value(key)
            if name == "lr_warmup_steps" and key in work.latest and count in (None, -1):
                work.place(work.latest[key], f"{ours}.optim.{name}", 0)
            elif count is None:
                if key in work.latest:
                    work.accept(key, "not given")
            elif isinstance(count, int) and not isinstance(count, bool):
                work.place(work.latest[key], f"{ours}.optim.{name}", count * updates, note=note if count else "")
            else:
                work.place(work.latest[key], f"{ours}.optim.{name}", count)
        key, steps = f"{part}optim.lr_warmup_steps_ratio", work.value(f"{part}optim.lr_warmup_steps")
        if key in work.latest and isinstance(steps, int) and steps > 0:
            work.accept(key, "lr_warmup_steps decides")
        elif key in work.latest:
            work.place(work.latest[key], f"{ours}.optim.lr_warmup_steps_ratio", work.value(key) or 0.0)


def _decay(work: Work, optim: str, ours: str) -> None:
    """The schedule's name, of which verl has three keys, and its last rate, of which verl has two."""
    for name in ("lr_decay_style", "lr_scheduler_type", "warmup_style"):
        key = optim + name
        if key in work.latest and work.value(key) is None:
            work.accept(key, "not given")
        elif work.waits(key):
            work.place(work.latest[key], ours + "lr_scheduler", work.value(key))
    key, share = optim + "min_lr", optim + "min_lr_ratio"
    if share in work.latest and work.value(share) is None:
        work.accept(share, "not given")
    elif share in work.latest:
        work.place(work.latest[share], ours + "min_lr_ratio", work.value(share))
    if key not in work.latest:
        return
    lowest, rate = work.value(key), work.value(optim + "lr", work.value(ours + "lr", _LR[optim]))
    if not lowest:
        work.accept(key, "the rate falls to 0, as here" if not work.value(share) else "min_lr_ratio decides")
    elif all(isinstance(one, float | int) and one > 0 for one in (lowest, rate)):
        work.place(work.latest[key], ours + "min_lr_ratio", lowest / rate, note=f"as a share of lr {rate}")
    else:
        work.refuse(key, "is no share of the learning rate", f"give {share}, the last rate as a share of lr")


_LR = {ACTOR + "optim.": 1e-6, CRITIC + "optim.": 1e-5}


def betas(work: Work) -> None:
    """verl gives AdamW's two decays as a list."""
    for part, ours in ((ACTOR, "actor"), (CRITIC, "critic")):
        key = part + "optim.betas"
        given = work.value(key)
        pair = cast("list[object]", given) if isinstance(given, list) else []
        if len(pair) == 2:
            work.place(work.latest[key], f"{ours}.optim.adam_beta1", pair[0])
            work.place(work.latest[key], f"{ours}.optim.adam_beta2", pair[1])
        elif key in work.latest:
            work.refuse(key, "is not a list of two numbers", f"write {key}=[0.9,0.999]")


def offload(work: Work) -> None:
    """verl's newer name of what leaves the device while responses are generated."""
    for part, ours in ((ACTOR, "actor"), (CRITIC, "critic")):
        for what in ("param", "grad", "optimizer"):
            key = f"{part}megatron.offload.{what}.target"
            if work.value(key) == "cpu":
                work.place(work.latest[key], f"{ours}.{what}_offload", True)


_T = "megatron.override_transformer_config."


def recompute(work: Work) -> None:
    """Activations are computed again: by gradient checkpointing with FSDP, by recompute_granularity with Megatron."""
    megatron = on_megatron(work)
    for part, ours, model in ((ACTOR, "actor", MODEL), (CRITIC, "critic", CRITIC + "model.")):
        checkpointing, granularity = model + "enable_gradient_checkpointing", part + _T + "recompute_granularity"
        if checkpointing in work.latest and megatron:
            work.accept(checkpointing, "verl's FSDP alone reads it; with Megatron recompute_granularity decides")
        elif work.value(checkpointing) is not None or (part == ACTOR and not megatron):
            entry = work.entry(checkpointing, True)
            note = "speed and memory only" if entry.source >= 0 else f"{DEFAULT}; speed and memory only"
            if f"{ours}.recompute" not in work.latest or entry.source >= 0:
                work.place(entry, f"{ours}.recompute", "full" if entry.value else "none", note=note)
        if work.value(granularity) is not None:
            work.place(work.latest[granularity], f"{ours}.recompute", work.value(granularity))
        elif granularity in work.latest:
            work.accept(granularity, "activations are kept, as here")
        if checkpointing in work.latest and checkpointing not in work.done:
            work.accept(checkpointing, "not given")
    for key in (REF + _T + "recompute_granularity", REF + "model.enable_gradient_checkpointing"):
        if key in work.latest:
            work.accept(key, "the reference keeps no activations")


def sequence_parallel(work: Work) -> None:
    """verl's Megatron trainer splits activations along the sequence where it has tensor-parallel ranks."""
    key = _MEGATRON + "sequence_parallel"
    tp = work.value(_MEGATRON + "tensor_model_parallel_size", work.value("actor.tp")) or 1
    if key in work.latest and work.value(key) is None:
        work.accept(key, "not given")
    elif key in work.latest and (work.value(key) is not True or tp != 1):
        work.place(work.latest[key], "actor.sequence_parallel", work.value(key))
    elif key in work.latest:
        work.accept(key, "tensor parallelism is 1: nothing to split; verl turns it off too")
    elif tp != 1 and "actor.sequence_parallel" not in work.latest:
        work.place(work.entry(key), "actor.sequence_parallel", True, note=DEFAULT)


def context_parallel(work: Work) -> None:
    """Megatron's context parallelism, or Ulysses': both split a sequence over ranks."""
    ulysses = (ACTOR + "ulysses_sequence_parallel_size", ACTOR + "fsdp_config.ulysses_sequence_parallel_size")
    for key in (*ulysses, _MEGATRON + "context_parallel_size"):
        if key not in work.latest:
            continue
        value = work.value(key)
        if value is None or (key in ulysses and value == 1):
            work.accept(key, "sequences are not split over ranks")
        else:
            note = "sequences are split by context parallelism: same numbers" if key in ulysses else ""
            work.place(work.latest[key], "actor.cp", value, note=note)
    for key in ("ulysses_sequence_parallel_size", "fsdp.ulysses_sequence_parallel_size"):
        if CRITIC + key in work.latest:
            work.accept(CRITIC + key, "the critic has the actor's layout; same numbers")


def expert_split(work: Work) -> None:
    """verl splits each expert over tp ranks unless told otherwise; ours over none where ep is above 1."""
    key, layout = ACTOR + "megatron.expert_tensor_parallel_size", ACTOR + "megatron."
    value = work.value(key)
    if (work.value(layout + "expert_model_parallel_size") or 1) == 1:
        if key in work.latest and value in (None, 1):
            work.accept(key, "with one expert-parallel rank everything is split over tp ranks")
        elif key in work.latest:
            work.place(work.latest[key], "actor.etp", value)
        return
    tp = work.value(layout + "tensor_model_parallel_size") or 1
    if value is not None:
        work.place(work.latest[key], "actor.etp", value)
    elif "actor.etp" not in work.latest:
        work.place(work.latest.get(key, Entry(key, None, "", -1)), "actor.etp", tp, note=DEFAULT)
    elif key in work.latest:
        work.accept(key, "actor.etp decides")


_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
_LAYOUT_OF_ACTOR_ALONE = (_LAYOUT[2], *_LAYOUT[4:])


def layout_of_others(work: Work) -> None:
    """Reference and critic have the actor's layout (the critic's tp, pp and cp are keys of ours, checked as such)."""
    for prefix, who, names in ((REF, "reference", _LAYOUT), (CRITIC, "critic", _LAYOUT_OF_ACTOR_ALONE)):
        for name in names:
            key, actors = f"{prefix}megatron.{name}", f"{ACTOR}megatron.{name}"
            if key not in work.latest:
                continue
            actor = work.value(actors)
            if (work.value(key) or 1) == (actor or 1):
                work.accept(key, "equal to the actor's, as it must be here")
            else:
                reason = f"the {who} has the actor's layout here, and {actors} is {actor or 1}"
                work.refuse(key, reason, "give both the same value")
        key = f"{prefix}megatron.sequence_parallel"
        if key in work.latest:
            work.accept(key, f"the {who} has the actor's layout; same numbers")


_ALWAYS_BY_SEQUENCE = {"gspo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean"}


def losses(work: Work) -> None:
    """How verl's losses become one number, and their clipping ranges, which have defaults of their own."""
    mode, key = work.value(ACTOR + "policy_loss.loss_mode", "vanilla"), ACTOR + "loss_agg_mode"
    fixed = _ALWAYS_BY_SEQUENCE.get(mode) if isinstance(mode, str) else None
    if fixed is not None and "actor.loss_agg_mode" not in work.latest:
        same = work.value(key) == fixed
        note = "" if same else f"verl aggregates {mode} so, whatever loss_agg_mode says"
        work.place(work.entry(key), "actor.loss_agg_mode", fixed, note=note)
    elif work.value(key) is not None:
        work.place(work.latest[key], "actor.loss_agg_mode", work.value(key))
    elif key in work.latest:
        work.accept(key, "not given")
    critics = "critic.loss_agg_mode"
    if key in work.latest and critics not in work.latest and work.value("algorithm.adv_estimator", "gae") == "gae":
        work.place(Entry(critics, None, "", -1), critics, work.value(key), note=f"{DEFAULT}: the actor's")
    _clipping(work, mode)


def _clipping(work: Work, mode: str) -> None:
    plain, low = work.value(ACTOR + "clip_ratio"), ACTOR + "clip_ratio_low"
    for name in ("low", "high"):
        key, ours = f"{ACTOR}clip_ratio_{name}", f"actor.clip_ratio_{name}"
        value = work.value(key)
        if key == low and mode == "cispo" and isinstance(value, float | int) and value > 1:
            work.place(work.latest[key], ours, 1.0, note=f"no lower clip: a range of {value} reaches below 0")
        elif value is not None:
            work.place(work.latest[key], ours, value)
        elif key in work.latest:
            work.accept(key, "clip_ratio decides")
        elif plain not in (None, 0.2) and ours not in work.latest:
            # verl's losses read clip_ratio only where the two are null, and they are 0.2 unless given.
            work.place(Entry(key, 0.2, "", -1), ours, 0.2, note=f"{DEFAULT}, which counts more than clip_ratio")


def critic(work: Work) -> None:
    """verl's trainer is PPO where advantages come from GAE, its default; a critic is trained then unless it
    is told otherwise.
    """
    key, enable = "algorithm.adv_estimator", "critic.enable"
    entry = work.entry(key, "gae")
    given = work.value(enable)
    if given is not None:
        work.place(work.latest[enable], enable, given)
    elif enable in work.latest and entry.value != "gae":
        work.place(work.latest[enable], enable, False)
    elif enable in work.latest:
        work.accept(enable, "algorithm.adv_estimator decides")
    if entry.value != "gae":
        return
    if "algorithm.name" not in work.latest:
        work.place(entry, "algorithm.name", "ppo", note=DEFAULT)
    if given is None:
        work.place(entry, enable, True, note=DEFAULT)
    work.done.difference_update({key})


RULES = (
    backend,
    schedule,
    betas,
    offload,
    recompute,
    sequence_parallel,
    context_parallel,
    expert_split,
    layout_of_others,
    losses,
    critic,
)
_OPTIM = ("betas", "min_lr", "min_lr_ratio", "lr_warmup_steps", "lr_warmup_steps_ratio", "lr_decay_steps")
_STYLES = ("lr_decay_style", "lr_scheduler_type", "warmup_style")
KEYS: tuple[str, ...] = (
    *(f"{part}strategy" for part in (ACTOR, CRITIC, REF)),
    *(f"{part}optim.{name}" for part in (ACTOR, CRITIC) for name in (*_OPTIM, *_STYLES)),
    *(f"{part}enable_gradient_checkpointing" for part in (MODEL, CRITIC + "model.", REF + "model.")),
    *(f"{part}{_T}recompute_granularity" for part in (ACTOR, CRITIC, REF)),
    _MEGATRON + "sequence_parallel",
    _MEGATRON + "context_parallel_size",
    _MEGATRON + "expert_tensor_parallel_size",
    ACTOR + "ulysses_sequence_parallel_size",
    CRITIC + "ulysses_sequence_parallel_size",
    *(f"{REF}megatron.{name}" for name in _LAYOUT),
    REF + "megatron.sequence_parallel",
    *(f"{CRITIC}megatron.{name}" for name in _LAYOUT_OF_ACTOR_ALONE),
    CRITIC + "megatron.sequence_parallel",
    ACTOR + "loss_agg_mode",
    ACTOR + "clip_ratio_low",
    ACTOR + "clip_ratio_high",
    "critic.enable",
)
"""Keys that these rules take."""
