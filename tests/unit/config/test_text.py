"""Names of the user's own, keys given twice, texts that grow or nest without end, `${...}`, other projects' forms."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_rl import cli
from megatron_rl.algos.losses.ppo_clip import PpoClip
from megatron_rl.config.load import dump_yaml, load_config, resolve
from megatron_rl.config.text.schema import join_key, split_key
from megatron_rl.errors import ConfigError, Fault
from tests.helpers.config import base_settings, faults, load, make_model, only_fault, write


@pytest.mark.parametrize(
    "name", ["gsm8k.train", "org/set-1.5", "a=b", "a b", 'say "x"', "back\\slash", "it's", "\u00e4.b", "."]
)
def test_a_name_of_the_users_own_stands_as_it_is(name: str, tmp_path: Path) -> None:
    quoted = join_key([name])
    assert split_key(f"data.mix_weights.{quoted}") == ["data", "mix_weights", name]
    in_yaml = "data: {mix_weights: {'" + name.replace("'", "''") + "': 3}}\n"
    from_file = load(tmp_path, paths=(write(tmp_path / "run.yaml", in_yaml),))
    by_quotes = load(tmp_path, f"data.mix_weights.{quoted}=3")
    by_mapping = load(tmp_path, "data.mix_weights={'" + name.replace("'", "''") + "': 3}")
    for cfg in (from_file, by_quotes, by_mapping):
        assert cfg.data.mix_weights == {name: 3.0}
    again = load_config([write(tmp_path / "again.yaml", dump_yaml(from_file))])
    assert again == from_file


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("data.mix_weights.gsm8k.train=3", lambda cfg: cfg.data.mix_weights == {"gsm8k.train": 3.0}),
        ("reward.by_source.org/numina-1.5=numeric", lambda cfg: cfg.reward.by_source == {"org/numina-1.5": "numeric"}),
        ("data.apply_chat_template_kwargs.a.b=1", lambda cfg: cfg.data.apply_chat_template_kwargs == {"a": {"b": 1}}),
        ('reward.kwargs."a.b"=1', lambda cfg: cfg.reward.kwargs == {"a.b": 1}),
        ('reward.kwargs."x.y"={z.w: 1}', lambda cfg: cfg.reward.kwargs == {"x.y": {"z.w": 1}}),
        (
            'data.apply_chat_template_kwargs."a.b"=true',
            lambda cfg: cfg.data.apply_chat_template_kwargs == {"a.b": True},
        ),
    ],
)  # fmt: skip
def test_the_command_line_has_a_form_for_such_names(override: str, read: Callable[[Any], bool], tmp_path: Path) -> None:
    overrides = [override] if "by_source" not in override else [override, "reward.function=numeric"]
    assert read(load(tmp_path, *overrides))
    assert cli.split_arguments([override]) == ([], [override])


def test_sources_of_several_files_merge_and_the_later_wins(tmp_path: Path) -> None:
    first = write(tmp_path / "a.yaml", "data: {mix_weights: {x.y: 1, z: 2}}\n")
    second = write(tmp_path / "b.yaml", "data: {mix_weights: {x.y: 5}}\n")
    cfg = load(tmp_path, 'data.mix_weights."q.r"=7', paths=(first, second))
    assert cfg.data.mix_weights == {"x.y": 5.0, "z": 2.0, "q.r": 7.0}


DOTTED = [
    ("actor.optim: {lr: 1.0}\n", "a key in YAML has no dots", "nest it"),
    ("data: {mix_weights: {gsm8k: {train: 3}}}\n", "but a mapping", '"gsm8k.train": ...'),
    ("reward: {by_source: {org/x: {y: numeric}}}\n", "but a mapping", '"org/x.y": ...'),
    ("data: {mix_weights: {'': 3}}\n", "a key must not be empty", "give it a name"),
    ("data: {mix_weights: {1: 3}}\n", "a key must be text", "quote it"),
    ("data: {mix_weights: {yes: 3}}\n", "a key must be text", "quote it"),
    ("rollout: {n: 2, n: 3}\n", "stands 2 times", "keep one"),
    ("data: {mix_weights: {a.b: 3, a.b: 4}}\n", "stands 2 times", "keep one"),
    ("data: {mix_weights: {a.b: 3, 'a.b': 4}}\n", "stands 2 times", "keep one"),
    ("data: {apply_chat_template_kwargs: {list: [{a: 1, a: 2}]}}\n", "stands 2 times", "keep one"),
    ("reward: {kwargs: {k: {x: 1, x: 1}}}\n", "stands 2 times", "keep one"),
]


@pytest.mark.parametrize(("text", "reason", "cure"), DOTTED, ids=[case[0].strip() for case in DOTTED])
def test_a_name_that_cannot_be_meant_is_a_fault_of_its_line(text: str, reason: str, cure: str, tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", text)
    [fault, *others] = faults(tmp_path, paths=(path,))
    assert not others and reason in fault.reason and cure in fault.cure
    assert f"{path}:1" in fault.key or f"{path}:1" in fault.reason


def test_the_cure_of_a_nested_name_works(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, "data.mix_weights={gsm8k: {train: 3}}")
    written = fault.cure.partition(": ")[2].replace("...", "3")
    assert load(tmp_path, f"data.mix_weights={{{written}}}").data.mix_weights == {"gsm8k.train": 3.0}


@pytest.mark.parametrize(
    "key", ["actor..tp", ".tp", "actor.", 'data.mix_weights."x', 'data.mix_weights.""', "data.mix_weights."]
)
def test_a_key_with_an_empty_name_or_an_open_quote_is_a_fault(key: str, tmp_path: Path) -> None:
    found = only_fault(tmp_path, f"{key}=2")
    assert ("empty" in found.reason or "quote" in found.reason or "no such key" in found.reason) and found.cure


def chain(first: str, one: str, count: int = 24) -> str:
    return first + "".join(one.format(new=f"a{i}", old=f"a{i - 1}") for i in range(1, count))


BOMBS = {
    "lists": (chain("a0: &a0 [x, x, x]\n", "{new}: &{new} [*{old}, *{old}, *{old}]\n"), "its aliases stand for"),
    "mappings": (chain("a0: &a0 {p: 1, q: 2}\n", "{new}: &{new} {{p: *{old}, q: *{old}}}\n"), "its aliases stand for"),
    "merges": (chain("a0: &a0 {p: 1}\n", "{new}: &{new} {{<<: [*{old}, *{old}], q: *{old}}}\n"), "its aliases stand"),
    "deep flow": ("a: " + "[" * 20000, "nested over 50 levels deep"),
    "deep closed": ("a: " + "[" * 2000 + "]" * 2000, "nested over 50 levels deep"),
    "deep block": ("".join("  " * i + f"k{i}:\n" for i in range(400)), "nested over 50 levels deep"),
    "itself": ("data: &a\n  x: *a\n", "the mapping holds itself"),
    "itself in a list": ("data: &a [*a]\n", "the mapping holds itself"),
    "itself by a merge": ("data: &a\n  <<: *a\n", "the mapping holds itself"),
    "each other": ("a: &a\n  b: &b\n    c: *a\n    d: *b\n", "the mapping holds itself"),
    "a long file": ("data: {prompt_key: " + "x" * 3_000_000 + "}\n", "bytes, and a config has at most"),
    "a long text": ("data: {prompt_key: " + "x" * 200_000 + "}\n", "a text of more than 100000 characters"),
    "many values": ("a: [" + ",".join("1" for _ in range(20_000)) + "]\n", "more than 10000 values"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_text_that_stands_for_too_much_is_refused_at_once(name: str, tmp_path: Path) -> None:
    text, reason = BOMBS[name]
    path = write(tmp_path / "bomb.yaml", text)
    start = time.process_time()
    with pytest.raises(ConfigError) as caught:
        resolve([path])
    assert time.process_time() - start < 1.0
    [fault] = caught.value.faults
    assert reason in fault.reason and fault.key.startswith(path) and fault.cure and len(str(fault)) < 600


def test_a_value_on_the_command_line_has_the_same_bounds(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, "data.apply_chat_template_kwargs.a=" + "[" * 3000)
    assert "nested over 50 levels" in fault.reason and len(str(fault)) < 400


VERL = "actor_rollout_ref: {rollout: {n: 4}}\nalgorithm: {adv_estimator: grpo}\n"


def verl_file(folder: Path, text: str) -> str:
    model, rows = make_model(folder / "model"), write(folder / "t.jsonl", "")
    base = (
        f"actor_rollout_ref: {{model: {{path: {model}}}, rollout: {{n: 4}}}}\nalgorithm: {{adv_estimator: grpo}}\n"
        f"data: {{train_files: {rows}, max_prompt_length: 16, max_response_length: 8, train_batch_size: 256}}\n"
    )
    return write(folder / "verl.yaml", base + text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("trainer: {project_name: p, experiment_name: '${trainer.project_name}-x'}", "p-x"),
        ("trainer: {project_name: p, experiment_name: '${.project_name}'}", "p"),
        ("trainer: {project_name: p, experiment_name: '${ trainer.project_name }'}", "p"),
        ("trainer: {experiment_name: '${oc.select:trainer.nothing,fallback}'}", "fallback"),
        ("trainer: {experiment_name: '${oc.select:trainer.nothing,${oc.select:x.y,inner}}'}", "inner"),
        ("trainer: {experiment_name: '${oc.env:MEGATRON_RL_TEST_NAME}'}", "from-env"),
        ("trainer: {experiment_name: '${oc.env:MEGATRON_RL_TEST_NONE,\"a, b\"}'}", "a, b"),
        ("trainer: {experiment_name: '${trainer.${data.prompt_key}}', project_name: q}", "q"),
        ("trainer: {experiment_name: '${trainer.logger[0]}', logger: [console]}", "console"),
    ],
)
def test_interpolations_resolve_as_omegaconf_resolves_them(
    text: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_RL_TEST_NAME", "from-env")
    cfg = resolve([verl_file(tmp_path, text)], ["data.prompt_key=project_name"]).config
    assert cfg.trainer.experiment_name == name


def test_an_interpolation_keeps_its_type_and_may_stand_for_a_section(tmp_path: Path) -> None:
    path = verl_file(
        tmp_path,
        "critic: {ppo_epochs: '${oc.select:actor_rollout_ref.actor.ppo_epochs,2}', optim: '${oc.select:mine,null}'}\n"
        "trainer: {total_epochs: '${oc.decode:\"3\"}', val_before_train: '${oc.select:a.b,false}'}\n",
    )
    cfg = resolve([path]).config
    assert (cfg.critic.ppo_epochs, cfg.trainer.total_epochs, cfg.trainer.val_before_train) == (2, 3, False)
    sections = verl_file(tmp_path, "reward: {kwargs: '${data.apply_chat_template_kwargs}'}\n")
    cfg = resolve([sections], ["data.apply_chat_template_kwargs.enable_thinking=true"]).config
    assert cfg.reward.kwargs == {"enable_thinking": True}


GROWING = "".join(f"  a{i}: ${{trainer.a{i - 1}}}${{trainer.a{i - 1}}}\n" for i in range(1, 40))
LISTS = "".join(f"  a{i}: ['${{.a{i - 1}}}', '${{.a{i - 1}}}']\n" for i in range(1, 40))
SECTIONS = "".join(f"t{i}: {{a: '${{t{i - 1}}}', b: '${{t{i - 1}}}'}}\n" for i in range(1, 40))
UNRESOLVED = [
    ("trainer: {project_name: '${trainer.nothing}'}\n", "names no key of this config"),
    ("trainer: {project_name: '${now:%Y}'}\n", "${now:...} is not read here"),
    ("trainer: {project_name: '${hydra:runtime.cwd}'}\n", "${hydra:...} is not read here"),
    ("trainer: {project_name: '${oc.env:MEGATRON_RL_TEST_NONE}'}\n", "is not set"),
    ("trainer: {project_name: '${trainer.project_name}'}\n", "leads back to itself"),
    ("trainer: {project_name: '${.experiment_name}', experiment_name: '${.project_name}'}\n", "leads back to itself"),
    ("trainer: {project_name: '${trainer.logger'}\n", "lacks its closing brace"),
    ("trainer: {project_name: 'x${data}'}\n", "cannot be a part of a text"),
    ("trainer: {project_name: '${....x}'}\n", "is no key"),
    ("trainer:\n  a0: xxxxxxxxxx\n" + GROWING, "come to more than"),
    ("trainer:\n  a0: [1, 1]\n" + LISTS, "come to more than"),
    ("t0: {a: 1, b: 2}\n" + SECTIONS, "come to more than"),
    ("trainer: {project_name: '" + "${" * 300 + "}" * 300 + "'}\n", "deep within one another"),
]


@pytest.mark.parametrize(("text", "reason"), UNRESOLVED, ids=[case[1] + case[0][:40] for case in UNRESOLVED])
def test_an_interpolation_that_stands_for_nothing_is_a_fault(text: str, reason: str, tmp_path: Path) -> None:
    path = verl_file(tmp_path, text)
    start = time.process_time()
    with pytest.raises(ConfigError) as caught:
        resolve([path])
    assert time.process_time() - start < 1.0
    fault = caught.value.faults[0]
    assert reason in fault.reason and fault.cure == "write the value out" and f"[set in {path}:" in fault.reason


def test_hydras_forms_of_an_override(tmp_path: Path) -> None:
    path = verl_file(tmp_path, "trainer: {total_epochs: 3, project_name: p}\n")
    overrides = [
        "+trainer.experiment_name=a",
        "++trainer.total_epochs=5",
        "~trainer.project_name",
        "data.val_files=[]",
        "actor_rollout_ref.actor.optim.betas=[0.9,0.95]",
        "+data.apply_chat_template_kwargs={enable_thinking: false}",
        "actor_rollout_ref.actor.clip_ratio_c=null",
        "trainer.default_local_dir='some folder/a=b'",
        "model@actor_rollout_ref.model=hf_model",
    ]
    cfg = resolve([path], overrides).config
    assert (cfg.trainer.experiment_name, cfg.trainer.total_epochs, cfg.trainer.project_name) == ("a", 5, "megatron_rl")
    assert (cfg.actor.optim.adam_beta2, cfg.actor.loss) == (0.95, PpoClip(clip_ratio_c=None))
    assert cfg.data.apply_chat_template_kwargs == {"enable_thinking": False}
    assert cfg.trainer.default_local_dir == "some folder/a=b"
    with pytest.raises(ConfigError, match="takes away a key that no file sets"):
        resolve([path], ["~trainer.projectname"])


FOREIGN = [
    (["--config-path=conf", "--config-name=my", "trainer.nnodes=1"], "flag of Hydra", "PATH/NAME.yaml"),
    (["--config-name", "ppo_megatron_trainer.yaml"], "flag of Hydra", "model_engine=megatron"),
    (["--rollout-batch-size", "32", "--n-samples-per-prompt", "8"], "slime", "--n-samples-per-prompt is rollout.n"),
    (["--hf-checkpoint", "m", "--sglang-mem-fraction-static", "0.7"], "slime", "--hf-checkpoint is model.path"),
]


@pytest.mark.parametrize(("arguments", "reason", "cure"), FOREIGN, ids=[case[0][0] for case in FOREIGN])
def test_arguments_of_other_projects_get_one_line(
    arguments: list[str], reason: str, cure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", *arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said and reason in said and cure in said


@pytest.mark.parametrize("trainer", ["grpo: {num_prompts_per_step: 32}", "sft: {max_num_epochs: 1}", "dpo: {}"])
def test_a_config_of_nemo_rl_gets_one_line(trainer: str, tmp_path: Path) -> None:
    text = f"{trainer}\npolicy: {{model_name: Qwen/Qwen3-1.7B, train_global_batch_size: 64}}\ncheckpointing: {{}}\n"
    with pytest.raises(ConfigError) as caught:
        resolve([write(tmp_path / "nemo.yaml", text)])
    [fault] = caught.value.faults
    assert "NeMo-RL" in fault.reason and "model.path" in fault.cure


def test_a_fault_of_the_text_is_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings: list[str] = base_settings(tmp_path)
    assert cli.main(["check", *settings, "data.mix_weights.=1"]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said and isinstance(Fault("a", 1, "b", "c"), Fault)
