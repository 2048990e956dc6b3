"""Ground truths that a reward of ours could never score by: found in all rows before the run, named by file and row.

A check says what is wrong with a sample's ground truth, and the cure; None where nothing is. It runs once for each
different truth, in the caller's process, and imports nothing but the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from megatron_rl.config.checks.reward_terms import First, Reward, Sum, Term
from megatron_rl.errors import DataError
from megatron_rl.messages import first_lines, short
from megatron_rl.rewards.answers import only_number
from megatron_rl.rewards.base import RewardSample
from megatron_rl.rewards.verl import known_sources, rule_of
from megatron_rl.rewards.verl.choose import CURE, NO_RULE
from megatron_rl.rewards.verl.programs import truth_fault
from megatron_rl.rewards.verl.texts import TRUTHS

NUM_SHOWN = 10
MISSING = "there is no ground truth -- add reward_model.ground_truth, or name its column in data.label_key"


def answers(reward: Reward, sample: RewardSample) -> bool:
    """Whether the reward gives this sample a score, so that `a | b` never comes to what stands behind it."""
    return reward.spec != "data_source" or sample.has_source


def _asked(term: Term, sample: RewardSample) -> tuple[list[Reward], bool]:
    """(rewards asked, whether the composition surely goes on to what stands behind it)."""
    if isinstance(term, Reward):
        return ([term], False) if answers(term, sample) else ([], True)
    if isinstance(term, First):
        for part in term.terms:
            found, goes_on = _asked(part, sample)
            if not goes_on:
                return found, False
        return [], True
    if isinstance(term, Sum):
        parts = [_asked(part, sample) for _, part in term.parts]
        return [reward for found, _ in parts for reward in found], any(goes_on for _, goes_on in parts)
    return [], False


def truth_faults(term: Term, samples: Sequence[RewardSample]) -> dict[int, str]:
    """Number of a sample -> what is wrong with its ground truth for a reward that the composition surely asks."""
    known: dict[tuple[str, tuple[str, bool], str], str | None] = {}
    faults: dict[int, str] = {}
    for number, sample in enumerate(samples):
        for reward in _asked(term, sample)[0]:
            check = CHECKS.get(reward.spec)
            if check is None:
                continue
            # Many rows have the same truth, and some truths are long tests.
            what = repr((type(sample.ground_truth).__name__, sample.ground_truth))
            key = (
                reward.spec,
                (sample.data_source, sample.has_source),
                what if reward.spec != "reasoning_gym" else f"{what} {number}",
            )
            if key not in known:
                known[key] = check(sample)
            fault = known[key]
            if fault is not None:
                faults[number] = fault
                break
    return faults


def refuse_unscorable(
    default: Term, by_source: Mapping[str, Term], samples: Sequence[RewardSample], default_text: str
) -> None:
    """Raise a DataError that lists data sources without a reward, and rows whose ground truth their reward cannot use:
    all of them counted, the first by file and row.
    """
    groups: dict[str | None, list[int]] = {}
    for number, sample in enumerate(samples):
        groups.setdefault(sample.data_source if sample.data_source in by_source else None, []).append(number)
    sources: list[str] = []
    bad: dict[int, str] = {}
    for source, members in groups.items():
        key = f"reward.function {default_text!r}" if source is None else f"reward.by_source.{source}"
        term = default if source is None else by_source[source]
        group = [samples[number] for number in members]
        sources += source_faults(term, key, group)
        bad |= {members[place]: fault for place, fault in truth_faults(term, group).items()}
    lines = list(sources)
    if bad:
        lines.append(f"{len(bad)} of {len(samples)} rows cannot be scored by their reward:")
        rows = (f"{samples[number].where or f'row {number}'}: {bad[number]}" for number in sorted(bad))
        lines += first_lines(rows, NUM_SHOWN)
    if lines:
        raise DataError("\n".join(lines))


def source_notes(default: Term, by_source: Mapping[str, Term], samples: Sequence[RewardSample]) -> list[str]:
    """A line for each data source that is scored by a rule which reward.function does not name, in order of rows."""
    notes: dict[str, None] = {}
    for sample in samples:
        asked = _asked(by_source.get(sample.data_source, default), sample)[0]
        chosen = [reward for reward in asked if reward.spec in ("data_source", "default")]
        if chosen and sample.has_source:
            notes[f"{sample.data_source} is scored by verl's rule for it ({rule_of(sample.data_source)})"] = None
        elif chosen:
            notes[f"rows of {sample.data_source} name no data_source, and are scored by exact_match"] = None
    return list(notes)


def source_faults(term: Term, key: str, samples: Sequence[RewardSample]) -> list[str]:
    """Data sources that the composition scores by verl's rules, and that verl has none for; rows without a source that
    nothing else scores. `key`: where the composition stands.
    """
    unknown: dict[str, list[RewardSample]] = {}
    undeclared: list[RewardSample] = []
    for sample in samples:
        found, goes_on = _asked(term, sample)
        asks = sample.has_source and any(reward.spec in ("data_source", "default") for reward in found)
        if asks and rule_of(sample.data_source) is None:
            unknown.setdefault(sample.data_source, []).append(sample)
        if goes_on and not found and not sample.has_source:
            undeclared.append(sample)
    faults = [
        f"{key}: {NO_RULE.format(source=source)} ({_rows(rows)}) -- {CURE.format(sources=known_sources())}"
        for source, rows in unknown.items()
    ]
    if undeclared:
        reason = f"{_rows(undeclared)} name no data_source, and the reward goes by it"
        cure = "add the column data_source, name it in data.data_source_key, or name a reward in reward.function"
        faults.append(f"{key}: {reason} -- {cure}")
    return faults


def _rows(samples: Sequence[RewardSample]) -> str:
    count = f"{len(samples)} row{'s' if len(samples) > 1 else ''}"
    return f"{count}, the first is {samples[0].where}" if samples[0].where else count


# Checks, one for each reward that compares with a ground truth.


def _exact_match(sample: RewardSample) -> str | None:
    truth = sample.ground_truth
    if truth is None:
        return MISSING
    if isinstance(truth, dict | list | tuple):
        return f"the ground truth is a {type(truth).__name__}, and no response is equal to one -- give a text"
    return None


def _numeric(sample: RewardSample) -> str | None:
    truth = sample.ground_truth
    if truth is None:
        return MISSING
    if isinstance(truth, bool) or only_number(str(truth)) is None:
        return f"the ground truth {short(truth)} is no number -- use the reward exact_match or math, or correct it"
    return None


def _math(sample: RewardSample) -> str | None:
    truth = sample.ground_truth
    if truth is None:
        return MISSING
    text = str(truth)
    if isinstance(truth, dict | list | tuple | bool):
        reason = f"is a {type(truth).__name__}"
    elif not any(char.isalnum() for char in text):
        reason = "holds no letter and no digit"
    elif not _is_closed(text):
        reason = "has braces that do not close"
    else:
        return None
    return f"the ground truth {short(truth)} {reason}, and so is no expression -- correct it, or use exact_match"


def _is_closed(text: str) -> bool:
    depth = 0
    for char in text.replace("\\{", "").replace("\\}", ""):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if depth < 0:
            return False
    return depth == 0


def _gym(sample: RewardSample) -> str | None:
    if sample.ground_truth is None:
        return MISSING
    metadata = sample.extra_info.get("metadata", sample.extra_info)
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError as error:
            return f"extra_info.metadata is no JSON ({error}) -- write the entry's metadata as JSON"
    if not isinstance(metadata, dict):
        return f"extra_info.metadata is a {type(metadata).__name__} -- give the entry's metadata, a mapping"
    return None


def _code(sample: RewardSample) -> str | None:
    from megatron_rl.rewards.code import read_cases

    try:
        cases = read_cases(sample.ground_truth)
        for case in cases:
            if not case.is_value and case.epilogue:
                compile(case.epilogue, "the tests", "exec")
    except SyntaxError as error:
        reason = f"the ground truth {short(sample.ground_truth)} holds tests that are no Python ({error.msg}"
        return f"{reason}, line {error.lineno}) -- correct them"
    except ValueError as error:
        return str(error)
    return None


def _by_source(sample: RewardSample) -> str | None:
    rule, truth = rule_of(sample.data_source), sample.ground_truth
    if rule is None:
        return None  # told once for the whole source
    if truth is None:
        return MISSING
    fault = (truth_fault if rule == "code" else TRUTHS[rule])(truth)
    if fault is None:
        return None
    cure = f"correct it, or name another reward in reward.by_source: {{{sample.data_source}: ...}}"
    return f"the ground truth {short(truth)} {fault} (verl's rule for {sample.data_source!r}) -- {cure}"


CHECKS: dict[str, Callable[[RewardSample], str | None]] = {
    "code": _code,
    "data_source": _by_source,
    "default": lambda sample: _by_source(sample) if sample.has_source else _exact_match(sample),
    "exact_match": _exact_match,
    "math": _math,
    "reasoning_gym": _gym,
    "numeric": _numeric,
}
