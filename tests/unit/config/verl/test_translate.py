"""A verl config is read as ours: each key mapped, accepted as without effect, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rl.config.load import Resolved, resolve, run_schema
from megatron_rl.config.verl import keys as verl_keys
from megatron_rl.config.verl import known_keys, neutral, rules
from megatron_rl.errors import ConfigError, Fault
from tests.helpers.config import make_model, write

ROLLOUT, ACTOR, MODEL = verl_keys.ROLLOUT, verl_keys.ACTOR, verl_keys.MODEL

# The shape of the field's GSM8K GRPO tutorials, with a model and lengths that fit this machine.
GSM8K = """
algorithm:
  adv_estimator: grpo
  use_kl_in_reward: False
  kl_ctrl:
    kl_coef: 0.001
data:
  train_files: FOLDER/train.parquet
  val_files: FOLDER/test.parquet
  train_batch_size: 1024
  max_prompt_length: 96
  max_response_length: 160
  filter_overlong_prompts: True
  truncation: error
  return_raw_chat: True
actor_rollout_ref:
  model:
    path: FOLDER/model
    use_remove_padding: True
    enable_gradient_checkpointing: True
  actor:
    optim:
      lr: 1e-6
    ppo_mini_batch_size: 256
    ppo_micro_batch_size_per_gpu: 32
    use_dynamic_bsz: True
    ppo_max_token_len_per_gpu: 24000
    use_kl_loss: True
    kl_loss_coef: 0.001
    kl_loss_type: low_var_kl
    entropy_coeff: 0
    strategy: megatron
    megatron:
      tensor_model_parallel_size: 2
      pipeline_model_parallel_size: 1
  rollout:
    name: vllm
    mode: async
    n: 5
    tensor_model_parallel_size: 1
    gpu_memory_utilization: 0.6
    log_prob_micro_batch_size_per_gpu: 32
    enable_chunked_prefill: True
    val_kwargs:
      temperature: 0
      do_sample: False
  ref:
    log_prob_micro_batch_size_per_gpu: 32
    fsdp_config:
      param_offload: True
    megatron:
      tensor_model_parallel_size: 2
trainer:
  critic_warmup: 0
  logger: [console, wandb]
  project_name: verl_grpo_example_gsm8k
  experiment_name: qwen_function_rm
  val_before_train: False
  n_gpus_per_node: 8
  nnodes: 1
  save_freq: -1
  test_freq: 5
  total_epochs: 15
  resume_mode: disable
"""

ACCEPTED = {
    "data.return_raw_chat",
    "actor_rollout_ref.model.use_remove_padding",
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    "actor_rollout_ref.actor.use_dynamic_bsz",
    "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.rollout.mode",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.enable_chunked_prefill",
    "actor_rollout_ref.rollout.val_kwargs.do_sample",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.fsdp_config.param_offload",
    "actor_rollout_ref.ref.megatron.tensor_model_parallel_size",
}


@pytest.fixture(autouse=True)
def _wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables' answer depends on whether wandb is installed; here it is, on every machine."""
    monkeypatch.setattr(rules, "find_spec", lambda name: object())


def tutorial(folder: Path) -> str:
    make_model(folder / "model")
    for name in ("train.parquet", "test.parquet"):
        write(folder / name, "")
    return write(folder / "verl.yaml", GSM8K.replace("FOLDER", str(folder)))


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def read(folder: Path, *overrides: str) -> Resolved:
    return resolve([tutorial(folder)], list(overrides))


def mapped(resolved: Resolved) -> dict[str, Any]:
    return {one.key: one.value for one in resolved.mapped}


def refused(folder: Path, *overrides: str) -> Fault:
    with pytest.raises(ConfigError) as caught:
        read(folder, *overrides)
    assert len(caught.value.faults) == 1, str(caught.value)
    return caught.value.faults[0]


def check_tutorial(resolved: Resolved, folder: Path) -> None:
    cfg = resolved.config
    assert cfg.model.path == f"{folder}/model"
    assert cfg.data.train_files == [f"{folder}/train.parquet"] and cfg.data.val_files == [f"{folder}/test.parquet"]
    assert (cfg.data.train_batch_size, cfg.data.max_prompt_length, cfg.data.max_response_length) == (
        1024,
        96,
        160,
    )
    assert cfg.data.overlong_prompts == "filter"
    actor = cfg.actor
    assert (actor.optim.lr, actor.ppo_mini_batch_size, actor.max_tokens_per_gpu) == (1e-6, 256, 24000)
    assert (actor.ppo_micro_batch_size_per_gpu, actor.tp, actor.entropy_coeff) == (32, 2, 0.0)
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (True, 0.001, "k3")
    assert (cfg.rollout.name, cfg.rollout.n, cfg.rollout.gpu_memory_utilization) == ("vllm", 5, 0.6)
    assert (cfg.algorithm.name, cfg.algorithm.estimator_name, cfg.algorithm.kl_ctrl.kl_coef) == ("grpo", "grpo", 0.001)
    assert (cfg.trainer.logger, cfg.trainer.total_epochs) == (["console", "wandb"], 15)
    # verl's save_freq -1 saves nothing; here that is 0.
    assert (cfg.trainer.save_freq, cfg.trainer.test_freq) == (0, 5)
    assert (cfg.world_size, cfg.dp_size) == (8, 4)
    assert {one.key for one in resolved.accepted} == ACCEPTED
    every = leaves(yaml.safe_load(GSM8K))
    mapped_keys = {one.verl_key for one in resolved.mapped if not one.note}
    assert mapped_keys | {one.key for one in resolved.accepted} == set(every)


def test_the_gsm8k_tutorial_maps_fully_from_yaml(tmp_path: Path) -> None:
    check_tutorial(read(tmp_path), tmp_path)


def test_the_gsm8k_tutorial_maps_fully_from_the_command_line(tmp_path: Path) -> None:
    tree = yaml.safe_load(Path(tutorial(tmp_path)).read_text())
    overrides = [f"{key}={value}" for key, value in leaves(tree).items()]
    assert "actor_rollout_ref.rollout.val_kwargs.do_sample=False" in overrides
    check_tutorial(resolve([], overrides), tmp_path)


def test_file_and_overrides_may_both_use_verls_names_and_ours(tmp_path: Path) -> None:
    cfg = read(
        tmp_path,
        f"{ACTOR}optim.lr=2e-6",
        "rollout.n=7",
        "cluster.num_cpus_per_rank=2",
        "data.chat_template=plain",
    ).config
    assert (cfg.actor.optim.lr, cfg.rollout.n, cfg.cluster.num_cpus_per_rank) == (2e-6, 7, 2.0)
    assert cfg.data.chat_template == "plain"
    # The later source counts, whichever name it uses.
    overruled = read(tmp_path, "actor.optim.lr=3e-6")
    assert overruled.config.actor.optim.lr == 3e-6
    assert [one.note for one in overruled.mapped if one.key == "actor.optim.lr"] == [
        "overruled: set to 3e-06 on the command line"
    ]


def test_two_names_of_one_key_in_one_source_are_refused(tmp_path: Path) -> None:
    fault = refused(tmp_path, f"{ACTOR}optim.lr=2e-6", "actor.optim.lr=3e-6")
    assert fault.cure == "keep one of the two" and "actor.optim.lr is set to" in fault.reason


def test_verls_defaults_hold_where_it_is_silent_and_are_shown(tmp_path: Path) -> None:
    tutorial(tmp_path)
    overrides = [
        f"data.train_files={tmp_path}/train.parquet",
        f"actor_rollout_ref.model.path={tmp_path}/model",
        "data.max_prompt_length=96",
        "data.max_response_length=96",
        f"{ROLLOUT}n=2",
        "algorithm.adv_estimator=grpo",
    ]
    resolved = resolve([], overrides)
    cfg = resolved.config
    assert (cfg.data.train_batch_size, cfg.actor.ppo_mini_batch_size, cfg.trainer.total_epochs) == (
        1024,
        256,
        30,
    )
    assert (cfg.cluster.n_gpus_per_node, cfg.trainer.save_freq, cfg.reward.function) == (8, 0, "data_source")
    noted = {one.key for one in resolved.mapped if one.note}
    assert noted == {
        "data.train_batch_size",
        "actor.ppo_mini_batch_size",
        "trainer.total_epochs",
        "cluster.n_gpus_per_node",
        "trainer.save_freq",
        "trainer.test_freq",
        "reward.function",
        # verl's default trainer is FSDP, with gradient checkpointing.
        "actor.recompute",
        "cluster.nnodes",
        "trainer.logger",
    }


def test_a_verl_run_that_is_silent_about_its_estimator_is_ppo_with_a_critic(tmp_path: Path) -> None:
    path = write(tmp_path / "ppo.yaml", Path(tutorial(tmp_path)).read_text().replace("  adv_estimator: grpo\n", ""))
    cfg = resolve([path]).config
    assert (cfg.algorithm.name, cfg.algorithm.estimator_name, cfg.critic.enable) == ("ppo", "gae", True)
    with pytest.raises(ConfigError) as caught:
        resolve([path], ["critic.enable=false"])
    [fault] = caught.value.faults
    assert fault.key == "critic.enable" and "no critic is trained" in fault.reason


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        (f"{ACTOR}kl_loss_type=kl", "actor.kl_loss_type", "k1"),
        (f"{ACTOR}kl_loss_type=mse", "actor.kl_loss_type", "k2"),
        (f"{ACTOR}kl_loss_type=k3", "actor.kl_loss_type", "k3"),
        (f"{ACTOR}kl_loss_type=abs", "actor.kl_loss_type", "abs"),
        ("algorithm.kl_penalty=low_var_kl", "algorithm.kl_penalty", "k3"),
        (f"{ACTOR}policy_loss.loss_mode=vanilla", "actor.loss_mode", "ppo_clip"),
        (f"{ACTOR}policy_loss.loss_mode=gspo", "actor.loss_mode", "gspo"),
        (f"{ACTOR}kl_loss_type=low_var_kl+", "actor.kl_loss_type", "k3+"),
        (f"{ACTOR}clip_ratio_c=10.0", "actor.clip_ratio_c", 10.0),
        ("algorithm.adv_estimator=rloo_vectorized", "algorithm.adv_estimator", "rloo"),
        ("algorithm.filter_groups.metric=acc", "algorithm.filter_groups.metric", "acc"),
        ("algorithm.filter_groups.max_num_gen_batches=4", "algorithm.filter_groups.max_num_gen_batches", 4),
        ("reward_model.overlong_buffer.len=64", "algorithm.overlong_buffer.len", 64),
        ("algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is", "token"),
        ("algorithm.rollout_correction.rollout_rs=seq_mean_k1", "algorithm.rollout_correction.rollout_rs", "geometric"),
        (f"{ACTOR}optim.lr_warmup_steps=-1", "actor.optim.lr_warmup_steps", 0),
        # verl's schedule moves once a training step, which has 1024 / 256 = 4 optimizer steps.
        (f"{ACTOR}optim.lr_warmup_steps=5", "actor.optim.lr_warmup_steps", 20),
        (f"{ACTOR}optim.lr_decay_steps=50", "actor.optim.lr_decay_steps", 200),
        (f"{ACTOR}optim.lr_warmup_steps_ratio=0.1", "actor.optim.lr_warmup_steps_ratio", 0.1),
        (f"{ACTOR}optim.min_lr=1e-7", "actor.optim.min_lr_ratio", 0.1),
        (f"{ACTOR}ulysses_sequence_parallel_size=2", "actor.cp", 2),
        (f"{ACTOR}optim.betas=[0.9,0.95]", "actor.optim.adam_beta2", 0.95),
        (f"{ACTOR}optim.lr_decay_style=cosine", "actor.optim.lr_scheduler", "cosine"),
        (f"{ACTOR}optim.warmup_style=constant", "actor.optim.lr_scheduler", "constant"),
        (f"{ACTOR}grad_clip=0.5", "actor.optim.grad_clip", 0.5),
        (f"{ACTOR}clip_ratio_high=0.28", "actor.clip_ratio_high", 0.28),
        (f"{ACTOR}loss_agg_mode=seq-mean-token-sum", "actor.loss_agg_mode", "seq-mean-token-sum"),
        (f"{ACTOR}megatron.virtual_pipeline_model_parallel_size=null", "actor.vpp", 1),
        (f"{ACTOR}megatron.sequence_parallel=True", "actor.sequence_parallel", True),
        (f"{ACTOR}megatron.optimizer_offload=True", "actor.optimizer_offload", True),
        (f"{ACTOR}megatron.grad_offload=True", "actor.grad_offload", True),
        (f"{ACTOR}fsdp_config.param_offload=True", "actor.param_offload", True),
        (f"{ROLLOUT}val_kwargs.n=1", "rollout.val.n", 1),
        (f"{ROLLOUT}val_kwargs.temperature=0.6", "rollout.val.temperature", 0.6),
        (f"{ROLLOUT}top_k=0", "rollout.top_k", -1),
        (f"+{MODEL}override_config.max_position_embeddings=640", "model.override_config.max_position_embeddings", 640),
        (f"+{MODEL}override_config.model_config.rms_norm_eps=0.1", "model.override_config.rms_norm_eps", 0.1),
        (f"{ROLLOUT}engine_kwargs.vllm.block_size=32", "rollout.engine_kwargs.block_size", 32),
        ("+data.apply_chat_template_kwargs.x=False", "data.apply_chat_template_kwargs.x", False),
        ("data.seed=3", "trainer.seed", 3),
        ("algorithm.norm_adv_by_std_in_grpo=False", "algorithm.norm_adv_by_std_in_grpo", False),
        ("trainer.total_training_steps=10", "trainer.total_training_steps", 10),
        ("trainer.test_freq=-1", "trainer.test_freq", 0),
        ("trainer.device=cpu", "cluster.device", "cpu"),
        ("critic.enable=null", "critic.enable", False),
        ("critic.optim.lr=3e-6", "critic.optim.lr", 3e-6),
        ("critic.model.path=/m", "critic.path", "/m"),
        ("critic.cliprange_value=0.2", "critic.cliprange_value", 0.2),
        ("critic.megatron.tensor_model_parallel_size=2", "critic.tp", 2),
        ("critic.megatron.param_offload=True", "critic.param_offload", True),
        ("algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.type", "adaptive"),
        ("algorithm.kl_ctrl.horizon=100", "algorithm.kl_ctrl.horizon", 100),
        ("trainer.critic_warmup=3", "trainer.critic_warmup", 2),
    ],
)  # fmt: skip
def test_a_key_of_verl_becomes_ours(tmp_path: Path, override: str, key: str, value: Any) -> None:
    found = mapped(read(tmp_path, override))[key]
    assert found == value and isinstance(found, bool) == isinstance(value, bool)


@pytest.mark.parametrize(
    ("truncation", "filters", "policy"),
    [
        ("error", False, "error"),
        ("left", False, "truncate"),
        ("right", True, "filter"),
        ("error", True, "filter"),
    ],
)
def test_overlong_prompts(tmp_path: Path, truncation: str, filters: bool, policy: str) -> None:
    """R6"""
    overrides = (f"data.truncation={truncation}", f"data.filter_overlong_prompts={filters}")
    assert read(tmp_path, *overrides).config.data.overlong_prompts == policy


def test_truncation_that_is_done_otherwise_here_is_refused(tmp_path: Path) -> None:
    fault = refused(tmp_path, "data.truncation=right", "data.filter_overlong_prompts=False")
    assert fault.key == "data.truncation" and "verl's left" in fault.reason


def test_a_reward_file_and_its_function(tmp_path: Path) -> None:
    file = write(tmp_path / "reward.py", "def compute_score(solution_str): ...\ndef other(solution_str): ...\n")
    given = f"custom_reward_function.path={file}"
    assert read(tmp_path, given).config.reward.function == f"{file}:compute_score"
    assert read(tmp_path, given, "custom_reward_function.name=other").config.reward.function == f"{file}:other"
    newer = (f"reward.custom_reward_function.path={file}", "reward.custom_reward_function.name=other")
    assert read(tmp_path, *newer).config.reward.function == f"{file}:other"
    assert read(tmp_path, "reward.function=numeric").config.reward.function == "numeric"
    none = read(tmp_path, "custom_reward_function.path=null", "custom_reward_function.name=compute_score")
    assert none.config.reward.function == "data_source"


@pytest.mark.parametrize(
    "override",
    [
        f"{ACTOR}ppo_micro_batch_size=null",
        f"{ACTOR}optim.total_training_steps=-1",
        f"{ACTOR}megatron._target_=verl.workers.config.McoreEngineConfig",
        f"{ACTOR}profiler.tool=nsys",
        f"{ROLLOUT}load_format=dummy_megatron",
        f"{ROLLOUT}response_length=160",
        f"{ROLLOUT}multi_turn.format=hermes",
        f"{ROLLOUT}ignore_eos=False",
        "data.gen_batch_size=1024",
        "data.custom_cls=null",
        "critic.strategy=megatron",
        "critic.forward_max_token_len_per_gpu=32768",
        "reward_model.enable=False",
        "reward_model.reward_manager=naive",
        "trainer.balance_batch=True",
        "ray_init.num_cpus=null",
    ],
)
def test_keys_that_change_nothing_here_are_accepted_and_listed(tmp_path: Path, override: str) -> None:
    plain, resolved = read(tmp_path), read(tmp_path, override)
    assert resolved.config == plain.config
    accepted = {one.key: one.why for one in resolved.accepted}
    assert accepted[override.partition("=")[0]]


def test_sequence_parallelism_over_one_rank_is_off_in_verl_too(tmp_path: Path) -> None:
    layout = (
        f"{ACTOR}megatron.tensor_model_parallel_size=1",
        f"{verl_keys.REF}megatron.tensor_model_parallel_size=1",
    )
    resolved = read(tmp_path, *layout, f"{ACTOR}megatron.sequence_parallel=True")
    assert not resolved.config.actor.sequence_parallel
    assert f"{ACTOR}megatron.sequence_parallel" in {one.key for one in resolved.accepted}


def test_experts_are_split_as_verl_splits_them(tmp_path: Path) -> None:
    """verl's default for single experts is tp, ours is 1 where experts are dealt out."""
    fields = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    folder = make_model(tmp_path / "experts", **fields, num_local_experts=4, num_experts_per_tok=2)
    model = (f"{verl_keys.MODEL}path={folder}", f"{ACTOR}megatron.sequence_parallel=true")
    key = f"{ACTOR}megatron.expert_tensor_parallel_size"
    assert read(tmp_path, *model, f"{key}=1").config.actor.etp is None
    ep2 = (*model, f"{ACTOR}megatron.expert_model_parallel_size=2")
    assert read(tmp_path, *ep2).config.actor.etp == 2
    assert read(tmp_path, *ep2, f"{key}=null").config.actor.etp == 2
    assert read(tmp_path, *ep2, f"{key}=1").config.actor.etp == 1
    assert read(tmp_path, *ep2, "actor.etp=1").config.actor.etp == 1
    # R3 needs an engine that returns its experts.
    replay = (f"{ACTOR}router_replay.mode=R3", f"{ROLLOUT}enable_rollout_routing_replay=True", "rollout.name=hf")
    loss = f"+{ACTOR}megatron.override_transformer_config.moe_aux_loss_coeff=0.01"
    actor = read(tmp_path, *model, *replay, loss).config.actor
    assert (actor.router_replay, actor.router_aux_loss_coef) == ("rollout", 0.01)
    assert read(tmp_path, *model, f"{ACTOR}megatron.router_replay.mode=R2").config.actor.router_replay == "old"
    dealt = (f"{ROLLOUT}expert_parallel_size=2", f"{ROLLOUT}tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2")
    assert read(tmp_path, *model, *dealt).config.rollout.ep == 2


@pytest.mark.parametrize(
    ("override", "cure"),
    [
        (f"{ACTOR}ppo_micro_batch_size=128", "ppo_micro_batch_size_per_gpu"),
        (f"{ACTOR}optim.betas=0.9", "[0.9,0.999]"),
        (f"{ACTOR}kl_loss_type=full", "choices: kl, k1"),
        (f"{ACTOR}policy_loss.loss_mode=clip_cov", "choices: vanilla"),
        ("algorithm.rollout_correction.rollout_rs=seq_max_k2", "choices: token"),
        (f"{verl_keys.REF}megatron.tensor_model_parallel_size=4", "same value"),
        ("critic.model.lora_rank=32", "only the actor has adapters"),
        (f"{ROLLOUT}multi_turn.enable=True", "turn it off"),
        (f"{ROLLOUT}response_length=100", "remove it"),
        (f"{ROLLOUT}data_parallel_size=2", "remove it"),
        ("data.gen_batch_size=2048", "remove it"),
        ("critic.megatron.virtual_pipeline_model_parallel_size=2", "same value"),
        ("reward_model.enable=True", "reward.function"),
        ("reward_model.reward_manager=prime", "naive, dapo or batch"),
        ("trainer.val_only=True", "megatron-rl eval"),
        ("actor_rollout_ref.actor.ppo_minibatch_size=4", f"did you mean {ACTOR}ppo_mini_batch_size"),
        ("actor_rollout_ref.whatever.zzz=4", "remove it"),
        ("defaults=[a]", "command line"),
        (f"{ACTOR}strategy=deepspeed", "Megatron-Core"),
        ("trainer.resume_mode=resume_path", "give trainer.resume_from_path"),
    ],
)
def test_what_has_no_counterpart_is_an_error_with_a_cure(tmp_path: Path, override: str, cure: str) -> None:
    """R5"""
    fault = refused(tmp_path, override)
    assert cure in fault.cure
    assert fault.key == override.partition("=")[0] or "do_sample" in fault.key
    assert "[set " in fault.reason or "choices" in fault.cure


def test_a_wrong_value_is_reported_with_the_name_that_the_user_wrote(tmp_path: Path) -> None:
    assert read(tmp_path, f"{ROLLOUT}tensor_model_parallel_size=2").config.rollout.tp == 2
    fault = refused(tmp_path, f"{ROLLOUT}tensor_model_parallel_size=3")
    assert fault.key == "rollout.tp"
    assert f"set by {ROLLOUT}tensor_model_parallel_size on the command line" in fault.reason
    assert f"set by {ACTOR}optim.lr" in refused(tmp_path, f"{ACTOR}optim.lr=fast").reason


def test_all_faults_of_a_verl_config_come_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(
            tmp_path,
            f"{ACTOR}strategy=deepspeed",
            f"{ROLLOUT}n=0",
            "trainer.lr=1",
            f"{ACTOR}ppo_mini_batch_size=100",
        )
    assert len(caught.value.faults) == 4


def test_the_runs_folder_is_kept(tmp_path: Path) -> None:
    own = read(tmp_path, "trainer.default_local_dir=checkpoints/qwen_function_rm").config.trainer
    assert own.run_dir == "checkpoints/qwen_function_rm"
    assert read(tmp_path, "trainer.default_local_dir=out").config.trainer.run_dir == "out/qwen_function_rm"


def test_a_config_of_ours_is_not_taken_for_verls(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    data = write(tmp_path / "train.jsonl", "")
    short = ["data.max_prompt_length=16", "data.max_response_length=8"]
    resolved = resolve([], [f"model.path={model}", f"data.train_files={data}", "trainer.save_freq=-1", *short])
    assert resolved.mapped == resolved.accepted == ()
    assert resolved.config.trainer.save_freq == -1 and resolved.config.data.train_batch_size == 64


def test_tables_point_at_keys_that_exist_and_do_not_contradict_each_other() -> None:
    schema = run_schema()
    targets = [*verl_keys.RENAMED.values(), *verl_keys.FREE.values()]
    targets += [ours for ours, _ in (*verl_keys.CHOICES.values(), *verl_keys.SPECIAL.values())]
    targets += [ours for ours, _ in verl_keys.DEFAULTS.values()]
    assert set(targets) <= {*schema.keys, *schema.short}
    tables = (verl_keys.RENAMED, verl_keys.SPECIAL, verl_keys.CHOICES, verl_keys.FREE)
    keys = [key for table in tables for key in table]
    assert len(keys) == len(set(keys)) and not set(keys) & set(neutral.NEUTRAL)
    assert len(known_keys()) == len(set(known_keys()))
    assert not [key for key in neutral.NEUTRAL if schema.key_of(key)]


def test_dapos_keys_become_ours_together(tmp_path: Path) -> None:
    """The field's DAPO scripts: batches of generation that are larger than those of training are as many more here."""
    dapo = (
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.max_num_gen_batches=10",
        "algorithm.filter_groups.metric=acc",
        "data.gen_batch_size=1536",
        "data.train_batch_size=512",
        "reward_model.reward_manager=dapo",
        "reward_model.overlong_buffer.enable=True",
        "reward_model.overlong_buffer.len=64",
        "reward_model.overlong_buffer.penalty_factor=1.0",
    )
    algorithm = read(tmp_path, *dapo).config.algorithm
    assert algorithm.filter_groups.enable and algorithm.filter_groups.max_num_gen_batches == 30
    assert algorithm.overlong_buffer.enable and algorithm.overlong_buffer.len == 64
    unbounded = refused(
        tmp_path, "algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=0"
    )
    assert "bounded" in unbounded.reason


def test_a_range_of_weights_is_icepop(tmp_path: Path) -> None:
    section = "algorithm.rollout_correction."
    icepop = (f"{section}rollout_is=token", f"{section}rollout_is_threshold=0.5_5.0")
    found = read(tmp_path, *icepop).config.algorithm.rollout_correction
    assert (found.rollout_is, found.rollout_is_threshold_lower, found.rollout_is_threshold) == ("icepop", 0.5, 5.0)
    older = (f"{section}rollout_rs=geometric", f"{section}rollout_rs_threshold=1.01")
    found = read(tmp_path, *older, f"{section}rollout_rs_threshold_lower=0.99").config.algorithm.rollout_correction
    assert (found.rollout_rs, found.rejects_below, found.rollout_rs_threshold) == ("geometric", 0.99, 1.01)
