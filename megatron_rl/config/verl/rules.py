"""Keys of verl that only mean something together: rows, sampling, rewards and what a run keeps.

Each rule takes the keys that it understands; those of the models' training are in training.py.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import PurePath
from typing import cast

from megatron_rl.config.text.reader import Entry
from megatron_rl.config.verl import keys
from megatron_rl.config.verl.keys import ROLLOUT
from megatron_rl.config.verl.work import DEFAULT, Work


def overlong(work: Work) -> None:
    filters, truncation = "data.filter_overlong_prompts", "data.truncation"
    given = [work.latest[key] for key in (truncation, filters) if key in work.latest]
    if not given:
        return
    if work.value(filters):
        policy = "filter"
    else:
        policy = {"error": "error", "None": "error", "left": "truncate"}.get(str(work.value(truncation, "error")))
    if policy is None:
        reason = "prompts are cut at their start here (verl's left), so that the end is kept"
        work.refuse(truncation, reason, f"write left or error, or {filters}=true")
        if filters in work.latest:
            work.accept(filters, "off: data.truncation decides")
        return
    for entry in given:
        work.place(entry, "data.overlong_prompts", policy)


def gen_batch(work: Work) -> None:
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


def correction(work: Work) -> None:
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
        elif value is None or (isinstance(value, str) and value in keys.REJECT):
            work.place(work.latest[mode], mode, None if value is None else keys.REJECT[value])
        else:
            work.refuse(mode, "is not offered here", f"choices: {', '.join(keys.REJECT)}")


def lengths(work: Work) -> None:
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


_TRAINERS = ("ppo_trainer", "ppo_megatron_trainer", "legacy_reward_impl", "sft_trainer", "sft_trainer_engine", "_self_")
_COMPONENTS = (
    *("actor", "critic", "ref", "data", "rollout", "model", "engine", "optim", "reward", "reward_model", "profiler"),
    *("reward_manager", "algorithm", "distillation", "transfer_queue", "npu_profile", "model_engine"),
)


def hydra_defaults(work: Work) -> None:
    """Hydra's list of defaults: verl's own files, whose values hold here too where a config is silent, or others."""
    for name in [name for name in work.latest if "@" in name]:
        group = name.partition("@")[0].strip("./").split("/")[0]
        if group in _COMPONENTS:
            work.accept(name, "verl's own file: where it differs from this package, verl's values hold")
        else:
            cure = "give the file's keys, or the file itself on the command line"
            work.refuse(name, "chooses a file of Hydra's config groups, which are not read", cure)
    key = "defaults"
    if key not in work.latest:
        return
    value = work.value(key)
    items = cast("list[object]", value) if isinstance(value, list) else [value]
    others = [str(item) for item in items if not _is_verls(item)]
    if others:
        reason = f"Hydra's list of defaults names {', '.join(others)}, which is not read"
        work.refuse(key, reason, "give these files on the command line, in their order, and remove the list")
    else:
        work.accept(key, "verl's own files: where they differ from this package, verl's values hold")


def names_a_trainer(value: object) -> bool:
    """A list of defaults that begins from one of verl's own configs."""
    return any(name in _TRAINERS[:2] for name in cast("list[object]", value)) if isinstance(value, list) else False


def _is_verls(item: object) -> bool:
    if isinstance(item, str):
        return item.lstrip("/").split("@")[0] in (*_TRAINERS, *_COMPONENTS)
    if isinstance(item, dict):
        groups = [str(group).split("@")[0] for group in cast("dict[object, object]", item)]
        bare = [group.removeprefix("optional ").removeprefix("override ").strip("./") for group in groups]
        return all(group.split("/")[0] in _COMPONENTS for group in bare)
    return item is None


def engine(work: Work) -> None:
    """The engine's name, which verl has no default for, and the ranks of one engine."""
    name, ranks = ROLLOUT + "name", ROLLOUT + "tensor_model_parallel_size"
    value = work.value(name)
    if value in (None, "???"):
        if name in work.latest:
            work.accept(name, "not given")
    elif isinstance(value, str) and value in _ENGINES_ELSEWHERE:
        work.refuse(name, f"asks for the engine {_ENGINES_ELSEWHERE[value]}, which is not offered", "write vllm, or hf")
    else:
        work.place(work.latest[name], "rollout.name", value)
    if ranks not in work.latest and "rollout.tp" not in work.latest:
        what = "each engine has one rank here unless rollout.tp says otherwise: same samples, a whole model in each"
        work.differ(ranks, what, 2)


_ENGINES_ELSEWHERE = {"sglang": "SGLang", "trtllm": "TensorRT-LLM", "vllm_omni": "vLLM-Omni"}


def validation(work: Work) -> None:
    """verl's agent loop samples validation at val_kwargs.temperature, whatever do_sample says."""
    key, temperature = ROLLOUT + "val_kwargs.do_sample", ROLLOUT + "val_kwargs.temperature"
    given = work.value(temperature)
    if given is not None:
        work.place(work.latest[temperature], "rollout.val.temperature", given)
    elif temperature in work.latest:
        work.accept(temperature, "not given")
    if key not in work.latest:
        return
    if not work.value(key) and given:
        work.differ(key, f"validation samples at temperature {given}; for greedy answers set {temperature}=0")
    elif work.value(key) and not given:
        work.differ(key, f"validation is greedy, as the temperature is 0; to sample set {temperature}")
    else:
        work.accept(key, "the temperature of validation decides: 0 is greedy")


def reward(work: Work) -> None:
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
        note = f"{DEFAULT} goes by data_source; so does this, by the same rules"
        work.place(chooser, "reward.function", "data_source", note=note)


def run_folder(work: Work) -> None:
    """verl's folder is the run's own; ours holds all runs."""
    key = "trainer.default_local_dir"
    if key not in work.latest:
        return
    folder = work.value(key)
    name = work.value("trainer.experiment_name")
    if isinstance(folder, str) and isinstance(name, str) and PurePath(folder).name == name:
        folder = str(PurePath(folder).parent)
    work.place(work.latest[key], key, folder)


_SINKS = ["console", "wandb"]
_OTHER_SINKS = ("swanlab", "vemlp_wandb", "clearml", "trackio", "rl_insight")


def logger(work: Work) -> None:
    """verl logs to wandb unless told otherwise."""
    key = "trainer.logger"
    entry = work.entry(key, _SINKS)
    if entry.value is None:
        work.accept(key, "not given")
        return
    sinks = [entry.value] if isinstance(entry.value, str) else entry.value
    if not isinstance(sinks, list):
        work.place(entry, key, sinks)
        return
    names = cast("list[object]", sinks)
    elsewhere = [name for name in names if name in _OTHER_SINKS]
    if elsewhere:
        reason = f"asks for {', '.join(elsewhere)}, which is not offered"
        work.refuse(key, reason, "choices: console, tensorboard, wandb, mlflow")
        return
    kept = [name for name in names if name != "file"]
    if len(kept) < len(names):
        work.differ(key, "metrics.jsonl in the run's folder is always written: there is no sink `file`")
    if names == _SINKS and find_spec("wandb") is None:
        # The value is verl's default, which is never refused; a sink that is asked for otherwise is.
        kept = ["console"]
        what = "wandb is verl's default and is not installed here: metrics go to metrics.jsonl (pip install wandb)"
        work.differ(key, what, names)
    note = DEFAULT if entry.source < 0 else "wandb is not installed" if kept != names else ""
    work.place(entry, key, kept, note=note)


def resume(work: Work) -> None:
    """verl goes on with a run of the same name unless told otherwise, as here."""
    key, path = "trainer.resume_mode", "trainer.resume_from_path"
    mode, where = work.value(key, "auto"), work.value(path)
    if mode == "resume_path" and isinstance(where, str) and where:
        work.accept(key, "the path decides")
        work.place(work.latest[path], key, where, note="a checkpoint or a run of megatron_rl")
        return
    if path in work.latest:
        work.accept(path, "read with resume_mode: resume_path only" if where else "not given")
    if mode == "resume_path":
        work.refuse(key, "asks for a path, and resume_from_path is not given", "give trainer.resume_from_path")
    elif key in work.latest:
        work.place(work.latest[key], key, "auto" if mode is None else mode)


def kept_saves(work: Work) -> None:
    """verl may keep the last saves only; one checkpoint holds actor and critic here, and models in final/ stay."""
    ours, critic = "checkpoint.keep_last", "trainer.max_critic_ckpt_to_keep"
    for key in ("trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep", critic):
        if key not in work.latest:
            continue
        if work.value(key) is None:
            work.accept(key, f"{ours} decides")
        elif key == critic and work.value("trainer.max_actor_ckpt_to_keep") not in (None, work.value(key)):
            work.differ(key, f"a checkpoint holds actor and critic: {ours} is max_actor_ckpt_to_keep")
        else:
            work.place(work.latest[key], ours, work.value(key))


def logged_rollouts(work: Work) -> None:
    """verl writes samples where it is told to."""
    for key in ("log_val_generations", "rollout_data_dir", "validation_data_dir"):
        name = f"trainer.{key}"
        if work.value(name):
            work.differ(name, "samples of every step are in rollouts.jsonl (trainer.num_logged_rollouts), and not here")
        elif name in work.latest:
            work.accept(name, "rollouts.jsonl is always written in the run's folder")


def critic_warmup(work: Work) -> None:
    """verl updates the actor from step critic_warmup on; here as many steps have passed without it."""
    key = "trainer.critic_warmup"
    count = work.value(key)
    if count is None:
        return
    if isinstance(count, int) and not isinstance(count, bool) and count > 0:
        note = f"verl updates the actor from step {count} on: {count - 1} steps without it"
        work.place(work.latest[key], key, count - 1, note=note)
    else:
        work.place(work.latest[key], key, count)


RULES = (
    hydra_defaults,
    overlong,
    gen_batch,
    correction,
    lengths,
    engine,
    validation,
    reward,
    run_folder,
    logger,
    resume,
    kept_saves,
    logged_rollouts,
    critic_warmup,
)
KEYS: tuple[str, ...] = (
    "defaults",
    "data.filter_overlong_prompts",
    "data.truncation",
    "data.gen_batch_size",
    "algorithm.filter_groups.max_num_gen_batches",
    *(f"{_CORRECTION}rollout_{key}" for key in ("is", "is_threshold", "rs", "rs_threshold", "rs_threshold_lower")),
    ROLLOUT + "prompt_length",
    ROLLOUT + "response_length",
    ROLLOUT + "name",
    ROLLOUT + "val_kwargs.do_sample",
    ROLLOUT + "val_kwargs.temperature",
    "custom_reward_function.path",
    "custom_reward_function.name",
    "reward.custom_reward_function.path",
    "reward.custom_reward_function.name",
    "trainer.default_local_dir",
    "trainer.logger",
    "trainer.resume_mode",
    "trainer.resume_from_path",
    "trainer.max_actor_ckpt_to_keep",
    "trainer.max_critic_ckpt_to_keep",
    "trainer.max_ckpt_to_keep",
    "trainer.log_val_generations",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "trainer.critic_warmup",
)
"""Keys that these rules take."""
