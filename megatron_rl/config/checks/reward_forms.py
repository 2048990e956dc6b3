"""Other trainers' reward functions: recognized by their parameters, so that a message can say what to write.

Standard library only: `check` reads a reward's parameters without importing its file.
"""

from __future__ import annotations

from collections.abc import Sequence

OURS = "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return number"


def foreign_form(names: Sequence[str]) -> str | None:
    """Whose form the parameters are, and a wrapper that makes it one of ours; None where they are nobody else's."""
    known = set(names)
    if "solution_str" in known or "solution_strs" in known:
        return None
    if "completions" in known:
        return (
            "has TRL's form (completions and columns as lists) -- put a function of verl's batch form beside it: def "
            "batch(solution_strs, ground_truths): return yours(completions=solution_strs, answer=ground_truths)"
        )
    if {"queries", "prompts"} <= known or {"queries", "labels"} <= known:
        return (
            "has OpenRLHF's form (queries, prompts, labels) -- put a function of verl's batch form beside it: def "
            "batch(solution_strs, ground_truths): return yours(solution_strs, [], ground_truths)['rewards']"
        )
    if list(names[:2]) in (["args", "sample"], ["args", "samples"]):
        return (
            f"has slime's form (args, {names[1]}) -- put a function of ours beside it: def reward(sample): ..., with "
            "sample.solution_str for its response, .ground_truth for its label, .extra_info for its metadata"
        )
    if {"prompt", "completion"} <= known or "completion_ids" in known:
        return f"has the form of another trainer ({', '.join(names)}) -- write {OURS}"
    return None
