r"""verl's rules that compare texts: GSM8K's "#### answer", MATH's \boxed{answer}, DAPO's "Answer: ...", search-R1's
<answer>. Verdicts are verl's, odd ones too; each rule says what it looks at. Standard library only.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence
from typing import Any, cast

TAIL_CHARS = 300
"""Of a response, what GSM8K's and DAPO's rules look at: its last characters."""
_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_LOOSE = re.compile(r"-?[0-9.,]+")


def gsm8k(solution_str: str, ground_truth: object, method: str = "strict") -> float:
    """1 where the number after the last "#### " is the ground truth's text, without commas; 0 without such a number.

    method: strict, or flexible: the last number of the response, marked or not.
    """
    tail = solution_str[-TAIL_CHARS:]
    if method == "strict":
        found = [answer.replace(",", "") for answer in _MARKED.findall(tail)]
    else:
        found = [answer for answer in _LOOSE.findall(tail) if answer != "."]
    return float(bool(found) and found[-1] == str(ground_truth).strip())


# MATH


def boxed_math(solution_str: str, ground_truth: object) -> float:
    r"""1 where the content of the last \boxed{...} equals the ground truth after `plain_latex` of both, else 0."""
    answer = last_box(solution_str)
    return float(answer is not None and same_latex(answer, str(ground_truth)))


def same_latex(one: str, other: str) -> bool:
    """Whether two answers are the same text once both are written plainly; as they stand where one cannot be."""
    try:
        return plain_latex(one) == plain_latex(other)
    except ValueError:
        return one == other


def last_box(text: str) -> str | None:
    r"""Content of the last \boxed{...}; where "\boxed " stands anywhere, what follows the last of those up to a $."""
    _, spaced, rest = text.rpartition("\\boxed ")
    if spaced:
        return rest.split("$")[0]
    start = text.rfind("\\boxed")
    if start < 0 or not text.startswith("\\boxed{", start):
        return None
    depth = 0
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if text[place] == "}" and depth == 0:
            return text[start + len("\\boxed{") : place]
    return None


_DROPPED = ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")
_WHOLE = r"(?:0|-?[1-9][0-9]*)"


def plain_latex(text: str) -> str:
    """An answer without layout, units on the right, degrees and per cent signs, its fractions and roots in braces.

    Raises ValueError where a fraction, a root or a unit is cut short.
    """
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    for dropped in _DROPPED:
        text = text.replace(dropped, "")
    head, *units = text.split("\\text{ ")
    if len(units) > 1:
        raise ValueError("several units")
    text = head.replace("\\\\%", "").replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    if text[0] == ".":
        text = "0" + text
    sides = text.split("=")
    # "x = 5" is 5: one or two characters before the only equals sign are a name.
    if len(sides) == 2 and len(sides[0]) <= 2:
        text = sides[1]
    text = _braced_fractions(_braced_roots(text).replace(" ", ""))
    if text == "0.5":
        text = "\\frac{1}{2}"
    slashed = re.fullmatch(rf"({_WHOLE})/({_WHOLE})", text)
    return f"\\frac{{{slashed[1]}}}{{{slashed[2]}}}" if slashed else text


def _braced_roots(text: str) -> str:
    head, *rest = text.split("\\sqrt")
    if not all(rest):
        raise ValueError("a root of nothing")
    return head + "".join(f"\\sqrt{part}" if part[0] == "{" else f"\\sqrt{{{part[0]}}}{part[1:]}" for part in rest)


def _braced_fractions(text: str) -> str:
    head, *rest = text.split("\\frac")
    out = head
    for part in rest:
        if not part:
            raise ValueError("a fraction of nothing")
        if part[0] == "{":
            out += f"\\frac{part}"
        elif len(part) < 2:
            return text
        elif part[1] == "{":
            out += f"\\frac{{{part[0]}}}{part[1:]}"
        else:
            out += f"\\frac{{{part[0]}}}{{{part[1]}}}{part[2:]}"
    return out


# DAPO


def dapo(solution_str: str, ground_truth: object) -> dict[str, float]:
    """score: 1 where what follows the last "Answer:" on its line is the ground truth after `plain_answer` of both,
    else -1; acc: 1 or 0. Looks at the last 300 characters.
    """
    found = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", solution_str[-TAIL_CHARS:])
    correct = plain_answer(found[-1] if found else "[INVALID]") == plain_answer(str(ground_truth))
    return {"score": 1.0 if correct else -1.0, "acc": float(correct)}


_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}",
    "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
_UNWRAPPED = (
    (re.compile(r"(.*?)(\$)(.*?)(\$)(.*)"), r"$\3$"),
    *((re.compile(rf"(\\{name}\{{)(.*?)(\}})"), r"\2") for name in ("text", "textbf", "overline")),
    (re.compile(r"(\\boxed\{)(.*)(\})"), r"\2"),
    (re.compile(r"(frac)([^{])(.)"), r"frac{\2}{\3}"),
    (re.compile(r"(sqrt)([^{])"), r"sqrt{\2}"),
)


def plain_answer(text: str) -> str:
    """An answer as Minerva's rule writes it: after the last equals sign, without words of units, layout, dollars."""
    text = text.split("=")[-1]
    for before, after in _REPLACED:
        text = text.replace(before, after)
    for removed in _REMOVED:
        text = text.replace(removed, "")
    for pattern, kept in _UNWRAPPED:
        text = pattern.sub(kept, text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


# search-R1

MOST_TAGS = 10
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def search(solution_str: str, ground_truth: object) -> float:
    """1 where what stands in the last <answer>...</answer> is one of the target's answers, letter case, punctuation and
    articles aside; a quarter of it where the response holds more than 10 opening or closing tags; else 0.
    """
    tagged = _TAGGED.findall(solution_str)
    if not tagged or plain_words(tagged[-1]) not in [plain_words(answer) for answer in targets(ground_truth)]:
        return 0.0
    many = max(solution_str.count("<answer>"), solution_str.count("</answer>")) > MOST_TAGS
    return 0.25 if many else 1.0


def targets(ground_truth: object) -> list[str]:
    """The right answers of a search-R1 row: {"target": text or texts}. Raises ValueError where it has none."""
    target = ground_truth.get("target") if isinstance(ground_truth, dict) else None
    answers = [target] if isinstance(target, str) else target
    if not isinstance(answers, Sequence) or not answers or not all(isinstance(one, str) for one in answers):
        raise ValueError("the ground truth is no {'target': answer or list of answers} of texts")
    return list(cast("Sequence[str]", answers))


def plain_words(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces."""
    text = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


# Ground truths: why a rule could never be passed with one.


def gsm8k_truth(truth: object) -> str | None:
    """The number of "#### number" has digits, dots and no comma once it is read."""
    text = _text_or_number(truth)
    if text is None:
        return "is no text"
    return None if re.fullmatch(r"-?[0-9.]+", text) else "is no number of digits alone, as GSM8K's answers are"


def latex_truth(truth: object) -> str | None:
    """An answer in LaTeX is a text that is not empty."""
    return None if _text_or_number(truth) else "is no text, or an empty one"


def search_truth(truth: object) -> str | None:
    """A search-R1 row has a target."""
    try:
        targets(truth)
    except ValueError:
        return "is no {'target': answer or list of answers} of texts"
    return None


def _text_or_number(truth: object) -> str | None:
    is_plain = isinstance(truth, str | int | float) and not isinstance(truth, bool)
    return str(truth).strip() if is_plain else None


TRUTHS: dict[str, Callable[[Any], str | None]] = {
    "gsm8k": gsm8k_truth,
    "math": latex_truth,
    "dapo": latex_truth,
    "prime_math": latex_truth,
    "geo3k": latex_truth,
    "search": search_truth,
}
"""Rule -> what is wrong with a ground truth, None where nothing is."""
