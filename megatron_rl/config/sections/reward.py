"""Section `reward`: what scores a response."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megatron_rl.config.sections.base import OneOf, UserPath, section
from megatron_rl.engines import ENGINES

JUDGE_ENGINES = tuple(name for name, engine in ENGINES.items() if engine.runs_model)

DEFAULT_JUDGE_TEMPLATE = """You are a strict grader. Read a question and an answer to it.

Question:
{prompt}

Answer:
{response}

Say in one sentence what is right or wrong with the answer. Then write `Score:` and a whole number from 0 (useless) to \
10 (perfect)."""


@section
class RewardWorkerConfig:
    """How a reward model or a judge runs; its workers are separate processes."""

    path: UserPath | None = None
    """Folder of the model in Hugging Face format; required if a reward names it."""
    tokenizer_path: UserPath | None = None
    """Folder with its tokenizer.json; the folder of the model if unset."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto is that of the policy (cluster.device)."""
    own_gpu: bool = False
    """Reserve one GPU per worker; if false, worker i shares GPU i with a policy rank, and its memory must hold both."""
    num_workers: PositiveInt = 1
    """Replicas of the model; each scores a part of the batch."""
    num_cpus: PositiveFloat = 1.0
    """CPU cores that Ray reserves per worker."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of its parameters."""
    chat_template: Literal["tokenizer", "plain"] = "tokenizer"
    """How messages become its input: by its tokenizer's chat template, or as their concatenated contents."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra keywords for its chat template."""
    max_length: PositiveInt | None = None
    """Maximum tokens of one input (judge: with its answer); max_position_embeddings of the model if unset."""


@section
class RewardModelConfig(RewardWorkerConfig):
    """A sequence classifier with one label: the reward `model`."""

    activation: Literal["raw", "sigmoid"] = "raw"
    """raw uses the classifier's logit as the score; sigmoid maps it to 0 ... 1."""
    batch_size: PositiveInt = 16
    """Sequences per forward pass."""
    overlong: Literal["fail", "truncate"] = "fail"
    """A sequence of more than max_length tokens fails (reward.failed_score), or is scored by its last max_length
    tokens; both are counted (reward/failed, reward/model_truncated)."""


@section
class JudgeConfig(RewardWorkerConfig):
    """A language model that writes a score: the reward `judge`."""

    engine: Annotated[str, OneOf(JUDGE_ENGINES)] = "vllm"
    """Engine that runs it: vllm, or hf (transformers: slow)."""
    template: str = DEFAULT_JUDGE_TEMPLATE
    """User message for the judge; {prompt}, {response} and {ground_truth} are filled in."""
    score_pattern: str = r"(?i)score\W*(-?\d+(?:\.\d+)?)"
    """Regular expression with one group, the score; the last match in the judge's answer counts."""
    lowest: float = 0.0
    """Number of the judge that is mapped to score 0."""
    highest: float = 10.0
    """Number of the judge that is mapped to score 1; a sample with a number outside the range fails."""
    max_tokens: PositiveInt = 256
    """Maximum length of the judge's answer, in tokens."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of the judge; 0 is greedy."""
    max_num_seqs: PositiveInt = 64
    """Maximum sequences that its engine runs concurrently."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.3
    """Fraction of GPU memory that its engine may use (vLLM)."""
    kv_cache_gb: PositiveFloat | None = None
    """Size of its KV cache in GiB; if unset, 0.25 on CPU, what gpu_memory_utilization leaves on GPU."""


@section
class RewardConfig:
    function: UserPath = "default"
    """A name of megatron_rl.config.rewards.REWARDS or of reward.parts, `model`, `judge`, `package.module:function`,
    `path/to/file.py:function`; or a composition: `a | b` is the first that answers, `a + 0.5 * b` the weighted sum.
    default: verl's rule for the data_source that a row names; for rows that name none, exact_match."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function; with several rewards, give them in reward.parts."""
    parts: dict[str, Any] = Field(default_factory=dict)
    """Named rewards for use in reward.function: {name: {function: ..., kwargs: {...}}}."""
    by_source: dict[str, str] = Field(default_factory=dict)
    """Rewards of single data sources, {data_source: as reward.function}; the others use reward.function."""
    num_workers: PositiveInt = 2
    """Number of reward processes; with several nodes, shared evenly between them."""
    timeout_s: PositiveFloat = 10.0
    """Timeout per sample, in seconds (batch reward: per batch); a process that exceeds it is killed and replaced."""
    memory_limit_gb: PositiveFloat | None = 8.0
    """Maximum address space of a reward process, in GiB; a sample that exceeds it fails, and the process is replaced.
    null: no limit."""
    failed_score: float = 0.0
    """Score of a sample whose reward raised an error, crashed or timed out; such samples are counted."""
    max_failed_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """The run stops if more than this fraction of the samples of a step fail."""
    model: RewardModelConfig = Field(default_factory=RewardModelConfig)
    """The reward model, used if a reward names `model`."""
    judge: JudgeConfig = Field(default_factory=JudgeConfig)
    """The generative judge, used if a reward names `judge`."""
