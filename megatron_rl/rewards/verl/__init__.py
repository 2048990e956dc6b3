"""verl's rules of scoring, one for each of its data sources: the same verdicts, in code of our own.

verl picks a rule by the row's data_source (its default_compute_score). `rule_of` is that choice; rewards/verl/choose.py
is the reward `data_source`, which scores by it.
"""

from __future__ import annotations

RULES: dict[str, str] = {
    "gsm8k": "megatron_rl.rewards.verl.texts:gsm8k",
    "math": "megatron_rl.rewards.verl.texts:boxed_math",
    "dapo": "megatron_rl.rewards.verl.texts:dapo",
    "search": "megatron_rl.rewards.verl.texts:search",
    "prime_math": "megatron_rl.rewards.verl.grader:prime_math",
    "geo3k": "megatron_rl.rewards.verl.grader:geo3k",
    "code": "megatron_rl.rewards.verl.programs:tests_passed",
}
"""Rule -> module:function. A rule is called with (solution_str, ground_truth)."""

SOURCES: dict[str, str] = {
    "openai/gsm8k": "gsm8k",
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), "math"),
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning"), "dapo"),
    **{
        f"numina_{name}": "prime_math"
        for name in ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
    },
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), "code"),
    "hiyouga/geometry3k": "geo3k",
    **{
        f"searchR1_{name}": "search"
        for name in ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
    },
}
"""verl's data sources -> rule."""
PREFIXES: dict[str, str] = {"aime": "dapo"}
"""What a source's name starts with -> rule."""


def rule_of(data_source: str) -> str | None:
    """The name of verl's rule for a data source; None where verl has none."""
    if data_source in SOURCES:
        return SOURCES[data_source]
    return next((rule for prefix, rule in PREFIXES.items() if data_source.startswith(prefix)), None)


def known_sources() -> str:
    """verl's sources in words, for a message."""
    return ", ".join([*SOURCES, *(f"{prefix}*" for prefix in PREFIXES)])
