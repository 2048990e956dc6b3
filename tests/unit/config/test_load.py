"""YAML files and overrides become one run, or one error that lists all faults with their cures."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import yaml

from megatron_rl.config.load import dump_yaml, load_config, run_schema, to_dict
from megatron_rl.errors import ConfigError
from tests.helpers.config import base_settings, faults, load, make_model, only_fault, write


def test_files_are_merged_left_to_right_and_overrides_come_last(tmp_path: Path) -> None:
    first = write(tmp_path / "a.yaml", "actor:\n  tp: 1\n  optim: {lr: 1e-5, weight_decay: 0.1}\n")
    second = write(tmp_path / "b.yaml", "actor:\n  optim:\n    lr: 2e-5\n    grad_clip: 0.5\n")
    cfg = load(tmp_path, "actor.optim.grad_clip=0.25", paths=(first, second))
    assert (cfg.actor.optim.lr, cfg.actor.optim.weight_decay, cfg.actor.optim.grad_clip) == (2e-5, 0.1, 0.25)


def test_lists_replace_and_mappings_merge(tmp_path: Path) -> None:
    first = write(tmp_path / "a.yaml", "rollout: {stop: [x, y]}\nreward: {kwargs: {a: 1, b: {c: 2}}}\n")
    second = write(tmp_path / "b.yaml", "rollout: {stop: [z]}\nreward: {kwargs: {b: {d: 3}}}\n")
    cfg = load(tmp_path, "reward.kwargs.e=[1,2]", paths=(first, second))
    assert cfg.rollout.stop == ["z"]
    assert cfg.reward.kwargs == {"a": 1, "b": {"c": 2, "d": 3}, "e": [1, 2]}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-6", 1e-6), ("1E-6", 1e-6), ("+1e-6", 1e-6), (".5e-3", 5e-4), ("3", 3.0), ("1.e-3", 1e-3)],
)
def test_numbers_with_exponents_are_numbers(tmp_path: Path, text: str, value: float) -> None:
    path = write(tmp_path / "a.yaml", f"actor: {{optim: {{lr: {text}}}}}\nreward: {{kwargs: {{x: {text}}}}}\n")
    cfg = load(tmp_path, f"algorithm.kl_ctrl.kl_coef={text}", paths=(path,))
    assert cfg.actor.optim.lr == cfg.algorithm.kl_ctrl.kl_coef == value
    # Where the schema does not say "number", the reader alone decides.
    assert cfg.reward.kwargs["x"] == value and not isinstance(cfg.reward.kwargs["x"], str)


@pytest.mark.parametrize("text", ["2024-01-01", "1:30", "2024-01-01T10:00:00"])
def test_dates_and_times_are_text(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, f"trainer.experiment_name={text}").trainer.experiment_name == text


def test_true_and_false_are_read_in_their_usual_spellings(tmp_path: Path) -> None:
    for text, value in (("True", True), ("false", False), ("no", False), ("on", True)):
        assert load(tmp_path, f"data.shuffle={text}").data.shuffle is value


def test_an_override_may_hold_a_mapping_a_list_or_nothing(tmp_path: Path) -> None:
    cfg = load(tmp_path, "actor.optim={lr: 3e-4, grad_clip: 2}", "rollout.stop=['a=b', c]", "rollout.max_model_len=")
    assert (cfg.actor.optim.lr, cfg.actor.optim.grad_clip) == (3e-4, 2.0)
    assert cfg.rollout.stop == ["a=b", "c"] and cfg.rollout.max_model_len is None


def test_of_two_overrides_the_later_counts(tmp_path: Path) -> None:
    assert load(tmp_path, "rollout.n=4", "rollout.n=6").rollout.n == 6


def test_one_file_stands_for_a_list_of_files(tmp_path: Path) -> None:
    cfg = load(tmp_path, f"data.val_files={tmp_path / 'train.jsonl'}", "trainer.logger=console")
    assert cfg.data.val_files == [str(tmp_path / "train.jsonl")]
    assert cfg.trainer.logger == ["console"]


def test_a_leading_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    base_settings(tmp_path)
    short = ["data.max_prompt_length=16", "data.max_response_length=8"]
    cfg = load_config([], ["model.path=~/model", "data.train_files=~/train.jsonl", *short])
    assert cfg.model.path == str(tmp_path / "model") and cfg.data.train_files == [str(tmp_path / "train.jsonl")]


def test_relative_paths_start_at_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base_settings(tmp_path)
    (tmp_path / "configs").mkdir()
    path = write(tmp_path / "configs" / "a.yaml", "model: {path: model}\ndata: {train_files: train.jsonl}\n")
    short = ["data.max_prompt_length=16", "data.max_response_length=8"]
    monkeypatch.chdir(tmp_path)
    assert load_config([path], short).model.path == "model"


def test_empty_files_and_empty_sections_say_nothing(tmp_path: Path) -> None:
    empty = write(tmp_path / "empty.yaml", "# nothing\n")
    hollow = write(tmp_path / "hollow.yaml", "actor:\nrollout: {}\n")
    assert load(tmp_path, paths=(empty, hollow)) == load(tmp_path)


def test_yaml_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    text = "rollout:\n  val: &v {temperature: 0.5, n: 2}\nreward: {kwargs: {<<: *v, n: 3}}\n"
    cfg = load(tmp_path, paths=(write(tmp_path / "a.yaml", text),))
    assert cfg.reward.kwargs == {"temperature": 0.5, "n": 3} and cfg.rollout.val.n == 2


def test_unknown_key_is_refused_with_a_suggestion_and_its_place(tmp_path: Path) -> None:
    """R5"""
    path = write(tmp_path / "a.yaml", "rollout:\n  n: 4\n  temprature: 1.0\n")
    fault = only_fault(tmp_path, paths=(path,))
    assert fault.key == "rollout.temprature" and fault.value == 1.0
    assert f"set in {path}:3" in fault.reason
    assert fault.cure == "did you mean rollout.temperature?"


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("trainer.lr", "actor.optim.lr"),
        ("actor.lr", "actor.optim.lr"),
        ("trainer.n_gpus_per_node", "cluster.n_gpus_per_node"),
        ("rollout.max_response_length", "data.max_response_length"),
        ("data.train_batch", "data.train_batch_size"),
        ("actr.tp", "actor.tp"),
        ("datta.shuffle", "data.shuffle"),
        ("rollout.val.topp", "rollout.val.top_p"),
        ("actor.ppo_minibatch_size", "actor.ppo_mini_batch_size"),
    ],
)
def test_a_slip_is_answered_with_the_key_that_was_meant(tmp_path: Path, wrong: str, meant: str) -> None:
    assert meant in only_fault(tmp_path, f"{wrong}=1").cure


def test_a_key_like_no_other_is_answered_with_the_keys_there_are(tmp_path: Path) -> None:
    assert "keys of reward: function, kwargs" in only_fault(tmp_path, "reward.zzzzz=1").cure
    assert "sections: actor, algorithm" in only_fault(tmp_path, "zzzzz.qqqqq=1").cure


def test_a_misspelt_section_is_answered_with_the_section(tmp_path: Path) -> None:
    assert "did you mean rollout" in only_fault(tmp_path, "rolout=1").cure


def test_keys_inside_a_value_are_refused(tmp_path: Path) -> None:
    assert "single value" in only_fault(tmp_path, "rollout.n.x=1").reason
    assert "is a list" in only_fault(tmp_path, "data.val_files.0=x").reason
    assert "is a section" in only_fault(tmp_path, "actor=3").reason


def test_several_faults_are_reported_at_once(tmp_path: Path) -> None:
    """R5"""
    found = faults(
        tmp_path,
        "trainer.lr=1e-5",
        "rollout.n=eight",
        "actor.optim.lr=-1",
        "data.overlong_prompts=drop",
        "data.train_batch_size=10",
        "actor.ppo_mini_batch_size=4",
        "actor.max_tokens_per_gpu=8",
    )
    assert [fault.key for fault in found] == [
        "trainer.lr",
        "data.overlong_prompts",
        "actor.optim.lr",
        "rollout.n",
        "actor.ppo_mini_batch_size",
        "actor.max_tokens_per_gpu",
    ]
    text = str(ConfigError(found))
    assert text.startswith("6 faults in the configuration") and len(text.splitlines()) == 7


def test_a_check_whose_key_is_wrong_itself_says_nothing_more(tmp_path: Path) -> None:
    assert [fault.key for fault in faults(tmp_path, "data.train_batch_size=0", "rollout.tp=2")] == [
        "data.train_batch_size",
        "rollout.tp",
    ]


@pytest.mark.parametrize(
    ("override", "reason", "cure"),
    [
        ("rollout.n=eight", "not a whole number", "the default is 8 (Samples per prompt)"),
        ("rollout.n=2.5", "not a whole number", "whole number"),
        ("rollout.n=true", "not a whole number", "whole number"),
        ("rollout.n=[1]", "not a whole number", "whole number"),
        ("rollout.n=null", "needs a value", "the default is 8"),
        ("actor.optim.lr=fast", "not a number", "1e-06"),
        ("actor.optim.lr=true", "not a number", "1e-06"),
        ("actor.optim.lr=.inf", "not a finite number", "write a number"),
        ("data.shuffle=maybe", "neither true nor false", "write true or false"),
        ("trainer.experiment_name=3", "not text", "trainer.experiment_name='\"3\"'"),
        ("rollout.stop=7", "not a list", "[a, b]"),
        ("reward.kwargs=7", "not a mapping", "{name: value}"),
        ("model.path=null", "needs a value", "model.path="),
        ("trainer.experiment_name=${oc.env:USER}", "interpolations", "write the value out"),
        ("rollout.name=???", "must be given", "rollout.name=vllm"),
    ],
)
def test_wrong_type_names_the_value_and_what_to_write(tmp_path: Path, override: str, reason: str, cure: str) -> None:
    fault = only_fault(tmp_path, override)
    assert fault.key == override.partition("=")[0]
    assert reason in fault.reason and "set on the command line" in fault.reason
    assert cure in fault.cure


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("rollout.n=0", "must be above 0"),
        ("actor.optim.lr=-1e-5", "must be above 0"),
        ("actor.optim.adam_beta1=1", "must be below 1"),
        ("rollout.top_p=1.5", "must be at most 1"),
        ("trainer.save_freq=-2", "must be at least -1"),
    ],
)
def test_a_value_out_of_range_names_the_bound(tmp_path: Path, override: str, reason: str) -> None:
    assert reason in only_fault(tmp_path, override).reason


def test_a_choice_that_does_not_exist_lists_the_choices(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, "algorithm.name=gpro")
    assert fault.cure == "did you mean grpo? choices: dpo, grpo, ppo, reward_model, sft"
    fault = only_fault(tmp_path, "trainer.logger=[console,wandbb]")
    assert fault.key == "trainer.logger[1]" and "did you mean wandb?" in fault.cure


def test_what_is_required_and_missing_is_named_with_its_meaning() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], [])
    found = {fault.key: fault for fault in caught.value.faults}
    assert set(found) == {"model.path", "data.train_files"}
    assert "Folder of the model in Hugging Face format" in found["model.path"].cure


def test_bad_yaml_names_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "model:\n  path: x\n  dtype bfloat16\n")
    fault = only_fault(tmp_path, paths=(path,))
    assert fault.key in (f"{path}:3", f"{path}:4") and "not YAML" in fault.reason


def test_tabs_in_yaml_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "model:\n\tpath: x\n")
    fault = only_fault(tmp_path, paths=(path,))
    assert fault.key == f"{path}:2" and fault.cure == "indent with spaces, not tabs"


def test_a_file_that_cannot_be_read_hides_no_other_fault(tmp_path: Path) -> None:
    bad, good = write(tmp_path / "a.yaml", "a: [\n"), write(tmp_path / "b.yaml", "rollout: {n: 0}\n")
    with pytest.raises(ConfigError) as caught:
        load_config([bad, good], ["trainer.lr=1"])
    # The required keys may well be in the file that cannot be read: they are not called missing.
    assert [fault.key for fault in caught.value.faults] == [f"{bad}:2", "trainer.lr", "rollout.n"]


def test_missing_config_file_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "absent.yaml")
    fault = only_fault(tmp_path, paths=(path,))
    assert (fault.key, fault.reason) == (path, "there is no such file")


def test_a_folder_or_binary_file_is_no_config(tmp_path: Path) -> None:
    assert only_fault(tmp_path, paths=(str(tmp_path),)).reason == "is a folder"
    binary = tmp_path / "x.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in only_fault(tmp_path, paths=(str(binary),)).reason
    listed = write(tmp_path / "l.yaml", "- a\n- b\n")
    assert "not a mapping" in only_fault(tmp_path, paths=(listed,)).reason


def test_a_key_that_stands_twice_in_a_mapping_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "rollout:\n  n: 4\n  top_k: -1\n  n: 8\n")
    fault = only_fault(tmp_path, paths=(path,))
    assert fault.key == f"{path}:4" and fault.value == "rollout.n" and "lines 2, 4" in fault.reason


def test_keys_that_are_not_plain_text_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "reward:\n  kwargs: {1: a}\n")
    assert "a key must be text" in only_fault(tmp_path, paths=(path,)).reason
    dotted = write(tmp_path / "b.yaml", "actor.optim.lr: 1e-5\n")
    fault = only_fault(tmp_path, paths=(dotted,))
    assert "actor: {optim: {lr: ...}}" in fault.cure


def test_yaml_that_refers_to_itself_or_names_python_objects_is_refused(tmp_path: Path) -> None:
    looped = write(tmp_path / "a.yaml", "reward: {kwargs: &k {x: *k}}\n")
    assert "holds itself" in only_fault(tmp_path, paths=(looped,)).reason
    tagged = write(tmp_path / "b.yaml", "reward: {kwargs: {x: !!python/name:os.system }}\n")
    assert "not YAML" in only_fault(tmp_path, paths=(tagged,)).reason


@pytest.mark.parametrize("text", ["actor.tp", "=3"])
def test_override_without_key_or_value_is_refused(tmp_path: Path, text: str) -> None:
    fault = only_fault(tmp_path, text)
    assert fault.key == text and "write key=value" in fault.cure


def test_a_key_given_where_a_file_belongs_is_recognised(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, paths=("actor.tp",))
    assert "a setting needs a value" in fault.reason and "actor.tp=..." in fault.cure
    assert only_fault(tmp_path, paths=("actor.yaml",)).reason == "there is no such file"


def test_override_whose_value_is_not_yaml_says_to_quote_it(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, "rollout.stop=[a, b")
    assert fault.key == "rollout.stop" and "quote it" in fault.cure


def test_hydras_plus_before_a_key_is_read_over(tmp_path: Path) -> None:
    cfg = load(tmp_path, "+data.apply_chat_template_kwargs.enable_thinking=False", "++rollout.n=4")
    assert cfg.data.apply_chat_template_kwargs == {"enable_thinking": False} and cfg.rollout.n == 4


@pytest.mark.parametrize("only_changed", [False, True])
def test_a_dumped_run_loads_as_the_same_run(tmp_path: Path, only_changed: bool) -> None:
    cfg = load(tmp_path, "actor.optim.lr=3e-7", "rollout.stop=['\\n', '1e3']", "reward.kwargs.x={a: null}")
    path = write(tmp_path / "resolved.yaml", dump_yaml(cfg, only_changed=only_changed))
    assert load_config([path]) == cfg


def test_to_dict_holds_every_key(tmp_path: Path) -> None:
    tree = to_dict(load(tmp_path))
    assert list(tree) == [
        "model",
        "data",
        "actor",
        "critic",
        "ref",
        "rollout",
        "reward",
        "algorithm",
        "trainer",
        "checkpoint",
        "cluster",
    ]
    assert yaml.safe_load(yaml.safe_dump(tree)) == tree


def test_every_key_has_a_text_that_explains_it() -> None:
    assert [key.name for key in run_schema().keys.values() if not key.doc] == []


def test_config_error_survives_pickling(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "rollout.n=0")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_config_is_frozen(tmp_path: Path) -> None:
    cfg = load(tmp_path)
    with pytest.raises(AttributeError):
        cfg.actor.tp = 2  # type: ignore[misc]


def test_make_model_is_what_the_other_tests_take_it_for(tmp_path: Path) -> None:
    assert Path(make_model(tmp_path / "m"), "config.json").is_file()
