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
    """What a model that scores runs on; its workers are processes of their own."""

    path: UserPath | None = None
    """Folder of the model in Hugging Face form; needed where a reward names it."""
    tokenizer_path: UserPath | None = None
    """Folder with its tokenizer.json; the model's own folder when not given."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is the device of the policy (cluster.device)."""
    own_gpu: bool = False
    """Reserve a GPU of its own for each worker; off: worker i shares GPU i with a policy rank, whose memory
    must hold both."""
    num_workers: PositiveInt = 1
    """Copies of the model; each scores a part of the batch."""
    num_cpus: PositiveFloat = 1.0
    """CPU cores that Ray reserves for each worker."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of its weights."""
    chat_template: Literal["tokenizer", "plain"] = "tokenizer"
    """How messages become its text: its tokenizer's chat template, or the contents with nothing between."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra keywords for that template."""
    max_length: PositiveInt | None = None
    """Most tokens it is given at once (a judge: its answer included); all its positions when not given."""


@section
class RewardModelConfig(RewardWorkerConfig):
    """A sequence classifier with one label: the reward `model`."""

    activation: Literal["raw", "sigmoid"] = "raw"
    """raw takes the classifier's logit as the score; sigmoid puts it between 0 and 1."""
    batch_size: PositiveInt = 16
    """Sequences of one forward pass."""
    overlong: Literal["fail", "truncate"] = "fail"
    """A sequence of more than max_length tokens fails (reward.failed_score), or is scored by its last max_length
    tokens; both are counted (reward/failed, reward/model_truncated)."""


@section
class JudgeConfig(RewardWorkerConfig):
    """A language model that writes a score: the reward `judge`."""

    engine: Annotated[str, OneOf(JUDGE_ENGINES)] = "vllm"
    """Engine that runs it: vllm, or hf (transformers: slow)."""
    template: str = DEFAULT_JUDGE_TEMPLATE
    """What the judge is asked, as a user message; {prompt}, {response} and {ground_truth} are filled in."""
    score_pattern: str = r"(?i)score\W*(-?\d+(?:\.\d+)?)"
    """Regular expression with one group, the score; its last match in the judge's answer counts."""
    lowest: float = 0.0
    """The judge's number that becomes 0."""
    highest: float = 10.0
    """The judge's number that becomes 1; a number outside the two is a failed sample."""
    max_tokens: PositiveInt = 256
    """Longest answer of the judge."""
    temperature: NonNegativeFloat = 0.0
    """Of its sampling; 0 is greedy."""
    max_num_seqs: PositiveInt = 64
    """Most answers that it writes at once."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.3
    """Share of the GPU's memory that its engine may use (vLLM)."""
    kv_cache_gb: PositiveFloat | None = None
    """Exact size of its KV cache in GiB; on CPU 0.25 when not given."""


@section
class RewardConfig:
    function: UserPath = "default"
    """A name of megatron_rl.config.rewards.REWARDS or of reward.parts, `model`, `judge`, `package.module:function`,
    `path/to/file.py:function`; or a composition: `a | b` is the first that answers, `a + 0.5 * b` the weighted sum.
    default: verl's rule for the data_source that a row names; for rows that name none, exact_match."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keywords passed to the function with every sample; where there are several rewards, reward.parts has them."""
    parts: dict[str, Any] = Field(default_factory=dict)
    """Rewards with a name of their own: {name: {function: ..., kwargs: {...}}}."""
    by_source: dict[str, str] = Field(default_factory=dict)
    """Rewards of single data sources: {data_source: as reward.function}; the other sources have reward.function."""
    num_workers: PositiveInt = 2
    """Reward processes."""
    timeout_s: PositiveFloat = 10.0
    """Seconds that one sample may take (a batch reward: its batch); a process over it is killed and replaced."""
    memory_limit_gb: PositiveFloat | None = 8.0
    """GiB of address space of a reward process; a sample that passes it fails, and the process is replaced.
    null: no limit."""
    failed_score: float = 0.0
    """Score of a sample whose reward raised, crashed or ran out of time; such are counted and shown."""
    max_failed_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """The run stops when more than this share of a step's samples fail."""
    model: RewardModelConfig = Field(default_factory=RewardModelConfig)
    """The reward model, in force where a reward names `model`."""
    judge: JudgeConfig = Field(default_factory=JudgeConfig)
    """The generative judge, in force where a reward names `judge`."""
