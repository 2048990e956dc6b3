"""A verl config, from YAML or from dotted overrides, read as one of ours.

A config is verl's when it has a key under actor_rollout_ref. Each of its keys is then mapped, accepted
because it changes nothing here, or refused: nothing is dropped without a word. Our keys may stand beside.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from megatron_rl.config import verl_keys as keys
from megatron_rl.config.reader import Entry, NoEffect
from megatron_rl.config.schema import Schema
from megatron_rl.config.verl_keys import ACTOR, CRITIC, REF, ROLLOUT
from megatron_rl.errors import Fault

_DEFAULT = "verl's default"


@dataclass(frozen=True)
class Mapped:
    """verl's key, and what it became. note: why, where the config does not hold the key itself."""

    verl_key: str
    key: str
    value: Any
    note: str = ""

    def __str__(self) -> str:
        return f"{self.verl_key} -> {self.key} = {self.value}" + (f"  ({self.note})" if self.note else "")


@dataclass(frozen=True)
class Translation:
    """A verl config in our keys."""

    entries: list[Entry]
    mapped: tuple[Mapped, ...]
    accepted: tuple[NoEffect, ...]
    faults: list[Fault]


def is_verl(entries: Iterable[Entry]) -> bool:
    """Some key lies under actor_rollout_ref."""
    return any(entry.key.partition(".")[0] == "actor_rollout_ref" for entry in entries)


def translate(entries: Iterable[Entry], schema: Schema) -> Translation:
    """All entries in our keys. Where two sources set the same key the later wins, whichever name it uses."""
    latest: dict[str, Entry] = {}
    for entry in entries:
        latest.pop(entry.key, None)
        latest[entry.key] = entry
    work = _Work(latest, schema)
    for combine in _COMBINED:
        combine(work)
    for entry in latest.values():
        if entry.key not in work.done:
            _one(work, entry)
    for verl_key, (key, value) in keys.DEFAULTS.items():
        if key not in work.placed:
            work.place(Entry(verl_key, value, "", -1), key, value, note=_DEFAULT)
    order = {key: place for place, key in enumerate(latest)}
    mapped = [_told(one, work.placed[one.key]) for one in work.mapped]
    return Translation(
        list(work.placed.values()),
        tuple(sorted(mapped, key=lambda one: order.get(one.verl_key, len(order)))),
        tuple(work.accepted),
        work.faults,
    )


def _told(mapped: Mapped, final: Entry) -> Mapped:
    """`mapped`, with a note where a later source set the key to something else."""
    if mapped.value == final.value:
        return mapped
    return replace(mapped, note=f"overruled: set to {final.value} {final.where}")


@dataclass
class _Work:
    """The translation under way. placed: our key -> its entry; its source decides between two that set it."""

    latest: dict[str, Entry]
    schema: Schema
    placed: dict[str, Entry] = field(default_factory=dict[str, Entry])
    mapped: list[Mapped] = field(default_factory=list[Mapped])
    accepted: list[NoEffect] = field(default_factory=list[NoEffect])
    faults: list[Fault] = field(default_factory=list[Fault])
    done: set[str] = field(default_factory=set[str])

    def value(self, verl_key: str, default: Any = None) -> Any:
        """What the config holds for a key of verl."""
        entry = self.latest.get(verl_key)
        return default if entry is None else entry.value

    def place(self, entry: Entry, key: str, value: Any, *, own: bool = False, note: str = "") -> None:
        """Set our `key`; of two verl keys that mean it, the one of the later source counts."""
        self.done.add(entry.key)
        other = self.placed.get(key)
        if other is not None and other.source == entry.source and other.value != value:
            reason = f"{key} is set to {other.value!r} {other.where}, and this key means the same"
            self.faults.append(Fault(entry.key, value, reason, "keep one of the two"))
        if not own:
            self.mapped.append(Mapped(entry.key, key, value, note))
        if other is not None and other.source > entry.source:
            return
        where = entry.where if entry.key == key else f"by {entry.key} {entry.where}"
        where = f"by {_DEFAULT} of {entry.key}" if note else where
        self.placed[key] = Entry(key, value, where, entry.source)

    def accept(self, verl_key: str, why: str) -> None:
        """Note that a key changes nothing."""
        self.done.add(verl_key)
        self.accepted.append(NoEffect(verl_key, self.latest[verl_key].value, why))

    def refuse(self, verl_key: str, reason: str, cure: str) -> None:
        """Note that a key cannot be honoured."""
        self.done.add(verl_key)
        entry = self.latest[verl_key]
        self.faults.append(Fault(verl_key, entry.value, f"{reason} [set {entry.where}]", cure))


def _one(work: _Work, entry: Entry) -> None:
    """Place, accept or refuse one key that no rule for several keys has taken."""
    key, value = entry.key, entry.value
    if key in keys.RENAMED:
        work.place(entry, keys.RENAMED[key], value)
    elif key in keys.SPECIAL:
        ours, written = keys.SPECIAL[key]
        special = [new for old, new in written.items() if old == value and not isinstance(value, bool)]
        work.place(entry, ours, special[0] if special else value)
    elif key in keys.CHOICES:
        ours, choices = keys.CHOICES[key]
        if isinstance(value, str) and value in choices:
            work.place(entry, ours, choices[value])
        else:
            work.refuse(key, "is not offered here", f"choices: {', '.join(map(str, choices))}")
    elif (free := _free(key)) is not None:
        work.place(entry, free, value)
    elif (why := _neutral(work, key, value)) is not None:
        work.accept(key, why)
    elif work.schema.key_of(key) is not None or (key in work.schema.sections and value in (None, {})):
        work.place(entry, key, value, own=True)
    else:
        work.refuse(key, *_no_counterpart(work.schema, key))


def _free(key: str) -> str | None:
    for prefix, ours in keys.FREE.items():
        if key == prefix or key.startswith(prefix + "."):
            return ours + key.removeprefix(prefix)
    return None


def _neutral(work: _Work, key: str, value: Any) -> str | None:
    """Why a key with this value changes nothing; None when it might."""
    accepts, why = keys.NEUTRAL.get(key, (None, ""))
    if accepts is not None:
        return why if accepts(value) else None
    if key.endswith("._target_"):
        return "a class name for Hydra"
    if value in (None, {}) and any(known.startswith(key + ".") for known in known_keys()):
        return "nothing in it"
    for prefix, (switch, why) in keys.NEUTRAL_WITHIN.items():
        if key.startswith(prefix):
            on = bool(switch) and bool(work.value(prefix + switch))
            return None if on else why
    return None


def known_keys() -> list[str]:
    """Every key of verl that the tables know."""
    tables: tuple[Iterable[str], ...] = (
        keys.RENAMED, keys.SPECIAL, keys.CHOICES, keys.FREE, keys.NEUTRAL, keys.CURES, _COMBINED_KEYS,
    )  # fmt: skip
    return list(dict.fromkeys(key for table in tables for key in table))


def _no_counterpart(schema: Schema, key: str) -> tuple[str, str]:
    """(reason, cure) of a key of verl that is neither mapped nor neutral."""
    if key in keys.CURES:
        return "this value of a verl key has no counterpart here", keys.CURES[key]
    if key in known_keys():
        return (
            "this value of a verl key has no counterpart here",
            "remove it, or give the value that is verl's default",
        )
    close = difflib.get_close_matches(key, [*known_keys(), *schema.keys], n=2, cutoff=0.8)
    if close:
        return (
            "this key is neither verl's, as far as known here, nor ours",
            f"did you mean {' or '.join(close)}?",
        )
    return (
        "this verl key has no counterpart here",
        "remove it, or set what you need with keys of this package",
    )


# Rules for keys that only mean something together. Each takes the keys that it understands.


def _overlong(work: _Work) -> None:
    filters, truncation = "data.filter_overlong_prompts", "data.truncation"
    given = [work.latest[key] for key in (truncation, filters) if key in work.latest]
    if not given:
        return
    if work.value(filters):
        policy = "filter"
    else:
        policy = {"error": "error", "left": "truncate"}.get(work.value(truncation, "error"))
    if policy is None:
        reason = "prompts are cut at their start here (verl's left), so that the end is kept"
        work.refuse(truncation, reason, f"write left or error, or {filters}=true")
        work.done.update(entry.key for entry in given)
        return
    for entry in given:
        work.place(entry, "data.overlong_prompts", policy)


def _gen_batch(work: _Work) -> None:
    """Dynamic sampling takes batches of data.train_batch_size here: as many of them as verl's hold."""
    key, bound = "data.gen_batch_size", "algorithm.filter_groups.max_num_gen_batches"
    train, most = work.value("data.train_batch_size", 1024), work.value(bound)
    size, batches = work.value(key) or train, most
    if isinstance(most, int) and isinstance(size, int) and isinstance(train, int) and most > 0 and train > 0:
        batches = -(-most * size // train)
    if key in work.latest:
        if size == train:
            work.accept(key, "equal to data.train_batch_size")
        elif work.value("algorithm.filter_groups.enable") and batches:
            work.accept(key, f"batches have {train} prompts here, and a step samples at most {batches} of them")
        else:
            work.refuse(key, "prompts of a step are data.train_batch_size here", "remove it")
    if bound not in work.latest:
        return
    if not batches and work.value("algorithm.filter_groups.enable"):
        work.refuse(bound, "sampling is bounded here", f"write {bound}=10, for instance")
    elif not batches:
        work.accept(bound, "filter_groups.enable is off")
    else:
        work.place(work.latest[bound], bound, batches)


_CORRECTION = "algorithm.rollout_correction."


def _correction(work: _Work) -> None:
    """verl writes a range as "low_high"; weights within a range are IcePop's, and named so here."""
    for kind in ("is", "rs"):
        mode, high = f"{_CORRECTION}rollout_{kind}", f"{_CORRECTION}rollout_{kind}_threshold"
        bounds = work.value(high)
        ranged = isinstance(bounds, str) and "_" in bounds
        if high in work.latest:
            for end, value in zip(("_lower", ""), bounds.split("_", 1) if ranged else (None, bounds), strict=True):
                if value is not None:
                    work.place(work.latest[high], high + end, value)
            if bounds is None:
                work.accept(high, "the default, as here")
        if f"{high}_lower" in work.latest and kind == "rs":
            work.place(work.latest[f"{high}_lower"], f"{high}_lower", work.value(f"{high}_lower"))
        if mode not in work.latest:
            continue
        value = work.value(mode)
        if kind == "is":
            work.place(work.latest[mode], mode, "icepop" if ranged and value == "token" else value)
        elif value is None or value in keys.REJECT:
            work.place(work.latest[mode], mode, None if value is None else keys.REJECT[value])
        else:
            work.refuse(mode, "is not offered here", f"choices: {', '.join(keys.REJECT)}")


def _betas(work: _Work) -> None:
    key = ACTOR + "optim.betas"
    if key not in work.latest:
        return
    betas, entry = work.value(key), work.latest[key]
    if isinstance(betas, list) and len(betas) == 2:  # pyright: ignore[reportUnknownArgumentType]
        work.place(entry, "actor.optim.adam_beta1", betas[0])
        work.place(entry, "actor.optim.adam_beta2", betas[1])
    else:
        work.refuse(key, "is not a list of two numbers", f"write {key}=[0.9,0.999]")


def _min_lr(work: _Work) -> None:
    key = ACTOR + "optim.min_lr"
    if key in work.latest and not work.value(key):
        work.accept(key, "the rate falls to 0, as here")


def _sequence_parallel(work: _Work) -> None:
    key = ACTOR + "megatron.sequence_parallel"
    if key not in work.latest:
        return
    if work.value(key) is True and work.value(ACTOR + "megatron.tensor_model_parallel_size", 1) == 1:
        work.accept(key, "tensor parallelism is 1: nothing to split; verl turns it off too")
    else:
        work.place(work.latest[key], "actor.sequence_parallel", work.value(key))


def _expert_split(work: _Work) -> None:
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
        work.place(work.latest.get(key, Entry(key, None, "", -1)), "actor.etp", tp, note=_DEFAULT)
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


def _layout_of_others(work: _Work) -> None:
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


def _critic(work: _Work) -> None:
    """verl's trainer is PPO where advantages come from GAE, its default; a critic is trained then unless it is told
    otherwise.
    """
    key = "algorithm.adv_estimator"
    entry = work.latest.get(key, Entry(key, "gae", "", -1))
    if entry.value != "gae":
        return
    if "algorithm.name" not in work.latest:
        work.place(entry, "algorithm.name", "ppo", note=_DEFAULT)
    if work.value("critic.enable") is None:
        work.place(entry, "critic.enable", True, note=_DEFAULT)
    work.done.difference_update({key})


def _critic_betas(work: _Work) -> None:
    key = CRITIC + "optim.betas"
    betas = work.value(key)
    if isinstance(betas, list) and len(betas) == 2:  # pyright: ignore[reportUnknownArgumentType]
        work.place(work.latest[key], "critic.optim.adam_beta1", betas[0])
        work.place(work.latest[key], "critic.optim.adam_beta2", betas[1])
    elif key in work.latest:
        work.refuse(key, "is not a list of two numbers", f"write {key}=[0.9,0.999]")


def _lengths(work: _Work) -> None:
    for key, ours in (
        ("prompt_length", "data.max_prompt_length"),
        ("response_length", "data.max_response_length"),
    ):
        if ROLLOUT + key not in work.latest:
            continue
        if work.value(ROLLOUT + key) == work.value(ours, 512):
            work.accept(ROLLOUT + key, f"equal to {ours}")
        else:
            work.refuse(ROLLOUT + key, f"differs from {ours}, which decides", "remove it")


def _greedy_validation(work: _Work) -> None:
    key, temperature = ROLLOUT + "val_kwargs.do_sample", ROLLOUT + "val_kwargs.temperature"
    if key not in work.latest:
        return
    if not work.value(key) and work.value(temperature):
        reason = f"asks for greedy validation, and {temperature} is {work.value(temperature)}"
        work.refuse(key, reason, f"set {temperature}=0, or do_sample=true")
    else:
        work.accept(key, "the temperature of validation decides: 0 is greedy")


def _reward(work: _Work) -> None:
    """verl's default picks a reward by each row's data_source, and so does the reward data_source."""
    for prefix in ("custom_reward_function.", "reward.custom_reward_function."):
        path, name = work.value(prefix + "path"), work.value(prefix + "name")
        given = [work.latest[key] for key in (prefix + "path", prefix + "name") if key in work.latest]
        if path is None:
            for entry in given:
                work.accept(entry.key, "no reward file is given")
            continue
        spec = f"{path}:{name or 'compute_score'}"
        # Operators in a path would be read as those of a composition.
        spec = f"'{spec}'" if set(spec) & set(" +|*()") else spec
        for entry in given:
            work.place(entry, "reward.function", spec)
    if "reward.function" not in work.placed and "reward.function" not in work.latest:
        chooser = Entry("custom_reward_function.path", None, "", -1)
        note = f"{_DEFAULT} goes by data_source; so does this, by the same rules"
        work.place(chooser, "reward.function", "data_source", note=note)


def _run_folder(work: _Work) -> None:
    """verl's folder is the run's own; ours holds all runs."""
    key = "trainer.default_local_dir"
    if key not in work.latest:
        return
    folder = work.value(key)
    name = work.value("trainer.experiment_name")
    if isinstance(folder, str) and isinstance(name, str) and PurePath(folder).name == name:
        folder = str(PurePath(folder).parent)
    work.place(work.latest[key], key, folder)


_COMBINED: tuple[Callable[[_Work], None], ...] = (
    _overlong,
    _gen_batch,
    _correction,
    _betas,
    _min_lr,
    _sequence_parallel,
    _expert_split,
    _layout_of_others,
    _critic,
    _critic_betas,
    _lengths,
    _greedy_validation,
    _reward,
    _run_folder,
)
_COMBINED_KEYS: tuple[str, ...] = (
    "data.filter_overlong_prompts",
    "data.truncation",
    "data.gen_batch_size",
    "algorithm.filter_groups.max_num_gen_batches",
    *(f"{_CORRECTION}rollout_{key}" for key in ("is", "is_threshold", "rs", "rs_threshold", "rs_threshold_lower")),
    ACTOR + "optim.betas",
    ACTOR + "optim.min_lr",
    ACTOR + "megatron.sequence_parallel",
    ACTOR + "megatron.expert_tensor_parallel_size",
    *(f"{REF}megatron.{name}" for name in _LAYOUT),
    REF + "megatron.sequence_parallel",
    *(f"{CRITIC}megatron.{name}" for name in _LAYOUT_OF_ACTOR_ALONE),
    CRITIC + "megatron.sequence_parallel",
    CRITIC + "optim.betas",
    ROLLOUT + "prompt_length",
    ROLLOUT + "response_length",
    ROLLOUT + "val_kwargs.do_sample",
    "custom_reward_function.path",
    "custom_reward_function.name",
    "reward.custom_reward_function.path",
    "reward.custom_reward_function.name",
    "trainer.default_local_dir",
)
