r"""verl's rules that compare expressions: prime_math (the numina sources) and geo3k.

Both ask first whether two answers are one text once written plainly, then whether sympy takes their difference to 0,
part by part of a tuple; prime_math then asks for numbers within 1 in 10,000 of each other, per cent or not.

Differences from verl: LaTeX becomes text by the table `SIGNS` (verl takes the package pylatexenc, whose table is
longer); texts that would run code of their own when sympy reads them are not read, and so are not equal; sympy's own
reader of LaTeX is not used, as in a verl without antlr4 4.11. This module imports sympy, which takes a second.
"""

from __future__ import annotations

import contextlib
import math
import re
import tokenize
from typing import Any

import sympy
from sympy.parsing import sympy_parser
from sympy.polys.polyerrors import BasePolynomialError

from megatron_rl.rewards.answers import last_boxed
from megatron_rl.rewards.verl.texts import plain_latex

TOLERANCE = 1e-4
LONGEST = 1000
"""Characters of an answer that are compared as expressions."""
SIGNS: dict[str, str] = {
    "pi": "pi", "infty": "inf", "cup": "U", "cdot": "*", "times": "*", "div": "\u00f7", "pm": "\u00b1", "mp": "\u2213",
    "le": "\u2264", "leq": "\u2264", "ge": "\u2265", "geq": "\u2265", "ne": "\u2260", "neq": "\u2260", "cap": "\u2229",
    "in": "\u2208", "circ": "\u2218", "degree": "\u00b0", "alpha": "\u03b1", "beta": "\u03b2", "gamma": "\u03b3",
    "delta": "\u03b4", "theta": "\u03b8", "lambda": "\u03bb", "mu": "\u03bc", "phi": "\u03d5", "omega": "\u03c9",
    "sin": "sin", "cos": "cos", "tan": "tan", "sec": "sec", "csc": "csc", "cot": "cot", "arcsin": "arcsin",
    "arccos": "arccos", "arctan": "arctan", "ln": "ln", "log": "log", "exp": "exp", "min": "min", "max": "max",
    "gcd": "gcd", "ldots": "\u2026", "dots": "\u2026", "cdots": "\u22ef", "sqrt": "sqrt", "%": "%", "$": "$", "{": "{",
    "}": "}", ",": " ", ";": " ", ":": " ", " ": " ", "quad": "  ", "qquad": "    ",
}  # fmt: skip
"""Macro -> the text that stands for it. Others vanish, and leave their argument."""
_UNITS = (
    "degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week", "month", "year", "foot",
    "feet", "inch", "yard",
)  # fmt: skip
UNREADABLE = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, SyntaxError, TypeError),
    *(ValueError, tokenize.TokenError, BasePolynomialError),
)
"""What sympy raises on a text that it cannot read or simplify; such a text is not equal to another."""
_UNREAD = re.compile(r"__|['\"`\\@:;=]|lambda|import|(?<![0-9])\.|\.(?![0-9])")
"""What a text must not hold for sympy to read it: reading is running."""


def prime_math(solution_str: str, ground_truth: Any) -> float:
    """1 where the response's answer, found by its words or box, is the ground truth, else 0."""
    truth, answer = str(ground_truth), find_answer(solution_str)
    if grade(answer, truth, (*_UNITS, "liter"), keeps_spaces=True):
        return 1.0
    if "\\pi" not in answer and "\\pi" not in truth:
        return float(nearly_equal(answer, truth))
    return float(any(nearly_equal(_with_pi(answer, pi), _with_pi(truth, pi)) for pi in (math.pi, 3.14)))


def geo3k(solution_str: str, ground_truth: Any) -> dict[str, float]:
    r"""score: 0.9 where the content of the last \boxed{...} is the ground truth, and 0.1 where the response is
    <think>...</think> with a box after it.
    """
    # As verl: an unclosed last box hides those before it.
    start = solution_str.rfind("\\boxed{")
    answer = None if start < 0 else last_boxed(solution_str[start:])
    correct = grade("None" if answer is None else answer.strip(), str(ground_truth), _UNITS, keeps_spaces=False)
    is_formed = re.fullmatch(r"<think>.*</think>.*\\boxed\{.*\}.*", solution_str, re.DOTALL) is not None
    return {"score": 0.9 * correct + 0.1 * is_formed, "acc": float(correct), "format": float(is_formed)}


def grade(answer: str, truth: str, units: tuple[str, ...], *, keeps_spaces: bool) -> bool:
    """Whether two answers are one text written plainly, or sympy takes the difference of each of their parts to 0."""
    if _first_form(answer) == _first_form(truth):
        return True
    ours, theirs = (_second_form(text, units, keeps_spaces=keeps_spaces) for text in (answer, truth))
    if ours == theirs:
        return True
    if not ours:
        return False
    given, wanted = _parts(ours), _parts(theirs)
    if len(given) != len(wanted) or (len(wanted) > 1 and (ours[0], ours[-1]) != (theirs[0], theirs[-1])):
        return False
    return all(_same_part(*pair) for pair in zip(given, wanted, strict=True))


def _same_part(given: str, wanted: str) -> bool:
    if _is_fraction(given) and _is_fraction(wanted):
        # A fraction counts in its lowest terms alone.
        return given == wanted
    # A whole number has one way to be written.
    return _is_whole(given) == _is_whole(wanted) and _differ_by_zero(given, wanted)


def _differ_by_zero(given: str, wanted: str) -> bool:
    expression = f"({wanted})-({given})"
    letters = {char for char in expression.replace("sqrt", "").replace("frac", "") if char.isalpha()}
    is_risky = re.search(r"\^[{(]|\^[0-9]+\^|\^[0-9][0-9]+", expression) is not None
    if len(letters) > 2 or is_risky or _UNREAD.search(expression):
        return False
    rules = (*sympy_parser.standard_transformations, sympy_parser.implicit_multiplication_application)
    try:
        return sympy.simplify(sympy_parser.parse_expr(expression.replace("^", "**"), transformations=rules)) == 0
    except UNREADABLE:
        return False


# How answers are written plainly.


def _first_form(text: str) -> str:
    text = text.strip()
    inside = re.search(r"^\\text\{(.+?)\}$", text)
    text = inside[1].strip() if inside else text
    try:
        return plain_latex(text)
    except ValueError:
        return text


def _second_form(text: str, units: tuple[str, ...], *, keeps_spaces: bool) -> str:
    inside = re.search(r"^\\text\{(.+?)\}$", text)
    text = inside[1] if inside else text
    for before, after in (
        *(("\\%", "%"), ("\\$", "$"), ("$", ""), ("%", ""), (" or ", " , "), (" and ", " , ")),
        *(("million", "*10^6"), ("billion", "*10^9"), ("trillion", "*10^12")),
    ):
        text = text.replace(before, after)
    for unit in units:
        text = re.sub(rf"{unit}(es)?(s)? *(\^[0-9]+)?", "", text)
    text = re.sub(r"\^ *\\circ", "", text)
    if text[:1] == "{" and text[-1:] == "}":
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    number = _as_float(text)
    if number is not None and _near_whole(number):
        text = str(round(number))
    if "\\" in text:
        text = latex_to_text(text)
    text = re.sub(r"- *", "-", text)
    text = re.sub(r"([0-9]) +([0-9])", r"\1+\2", text)
    if not keeps_spaces:
        text = text.replace(" ", "").replace("{", "").replace("}", "")
    text = text.lower()
    return str(int(float(text.replace(",", "")))) if _is_whole(text) else text


def latex_to_text(text: str) -> str:
    r"""LaTeX as a line that sympy reads: \frac{a}{b} is a/b, \sqrt{x} is sqrt(x), \pi is pi; braces vanish."""
    text = text.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac").replace("\\frac", " \\frac")
    return _Latex(text).read().strip()


class _Latex:
    """A reader of LaTeX from left to right."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def read(self, until: str = "") -> str:
        out = ""
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == until:
                self._at += 1
                return out
            out += self._one()
        return out

    def _one(self) -> str:
        """One character, group or macro."""
        char = self._text[self._at]
        self._at += 1
        if char == "{":
            return self.read("}")
        if char in "}$":
            return ""
        if char != "\\":
            return {"\u221a": "sqrt", "\u03c0": "pi", "\u221e": "inf", "\u00b7": "*", "\u00d7": "*"}.get(char, char)
        name = re.compile(r"[A-Za-z]+\s*|.|$", re.DOTALL).match(self._text, self._at)
        assert name is not None
        self._at = name.end()
        macro = name[0].strip() or name[0]
        if macro in ("frac", "nicefrac"):
            return f"{self._argument()}/{self._argument()}"
        if macro == "sqrt":
            degree = re.compile(r"\[[^\]]*\]").match(self._text, self._at)
            self._at = degree.end() if degree else self._at
            return f"sqrt({self._argument()})"
        return SIGNS.get(macro, "")

    def _argument(self) -> str:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        return self._one() if self._at < len(self._text) else ""


def _parts(text: str) -> list[str]:
    """The elements of a tuple or an interval; a text that is none is its only element."""
    text = _without_thousands(text)
    if not text:
        return []
    is_tuple = len(text) > 2 and text[0] in "()[]" and text[-1] in "()[]" and not re.search(r"[()\[\]]", text[1:-1])
    return [part.strip() for part in text[1:-1].split(",")] if is_tuple else [text]


def _without_thousands(text: str) -> str:
    while True:
        shorter = re.sub(r"(\d)(,)(\d\d\d)($|\D)", r"\1\3\4", text)
        if shorter == text:
            return text
        text = shorter


def _as_float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _near_whole(number: float) -> bool:
    return math.isfinite(number) and abs(number - round(number)) <= 1e-7


def _is_whole(text: str) -> bool:
    number = _as_float(_without_thousands(text))
    return number is not None and _near_whole(number)


def _is_fraction(text: str) -> bool:
    return re.search(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$", text) is not None


# prime_math: where the answer stands in a response, and numbers that are nearly equal.


def find_answer(response: str) -> str:
    """What stands after "answer is", before "is the answer", in the last box, after the last "=", and so on in turn."""
    response = _cut(response, ("answer:", "answer is", "answers are"), after=True)
    response = _cut(response, ("is answer", "is the answer", "are answers", "are the answers"), after=False)
    response = _last_braces(response) or response
    if ". " in response:
        response = response[: response.rfind(". ")].strip()
    marks = ("be ", "is ", "are ", "=", ": ", "get ", "be\n", "is\n", "are\n", ":\n", "get\n")
    return _cut(response, marks, after=True)


def _cut(text: str, marks: tuple[str, ...], *, after: bool) -> str:
    for mark in marks:
        at = text.lower().rfind(mark)
        if at != -1:
            text = (text[at + len(mark) :] if after else text[:at]).strip()
    return text


def _last_braces(text: str) -> str | None:
    r"""Content of the first braces after the last \boxed, or \fbox; None where they do not close."""
    start = text.rfind("\\boxed")
    start = text.rfind("\\fbox") if start < 0 else start
    opened, depth = None, 0
    for place in range(max(start, 0), len(text) if start >= 0 else 0):
        if text[place] == "{":
            depth += 1
            opened = place if opened is None else opened
        elif text[place] == "}":
            depth -= 1
            if depth == 0:
                return None if opened is None else text[opened + 1 : place].strip()
    return None


def _with_pi(text: str, pi: float) -> str:
    """The value of a product with pi, where the text is arithmetic and nothing else; else the text, pi as a number."""
    written = re.sub(r"([0-9])?\\pi", lambda found: f"{found[1]}*{pi}" if found[1] else f"1*{pi}", text)
    if written != text and re.fullmatch(r"[-+*/(). 0-9]+", written) and "**" not in written:
        with contextlib.suppress(ArithmeticError, SyntaxError, TypeError, ValueError):
            return str(float(sympy.Float(sympy_parser.parse_expr(written))))
    return written


def nearly_equal(answer: str, truth: str) -> bool:
    """Whether two answers are one text, numbers within TOLERANCE (or 100 times that of each other), or expressions
    whose values are that near; brackets, intervals and lists part by part.
    """
    answer, truth = _bare_number(answer)[:LONGEST], _bare_number(truth)
    if answer.strip().lower() == truth.strip().lower() or answer.replace(" ", "") == truth.replace(" ", ""):
        return True
    given, wanted = (_as_float(text.replace("{,}" if "{,}" in text else ",", "")) for text in (answer, truth))
    if given is not None and wanted is not None:
        return any(math.isclose(item, given, rel_tol=TOLERANCE) for item in (wanted / 100, wanted, wanted * 100))
    answer, truth = answer.strip(), truth.strip()
    if not answer or not truth:
        return False
    return _same_brackets(answer, truth) or _near_expressions(answer, truth)


def _bare_number(text: str) -> str:
    """Without a dollar before a number, a per cent sign after it, or the base under it."""
    if re.match(r"\$\d+(\.\d+)?", text):
        return text[1:]
    if re.fullmatch(r"\d+(\.\d+)?\\?%", text):
        return text.rstrip("%").rstrip("\\")
    based = _as_float(text.split("_")[0]) if "_" in text else None
    return text if based is None or not math.isfinite(based) else str(int(based))


def _same_brackets(answer: str, truth: str) -> bool:
    ours, theirs = answer, truth
    if (answer[0] + answer[-1] == "[]" and truth[0] != "(") or (answer[0] + answer[-1] == "()" and truth[0] != "["):
        ours, theirs = ours.strip("[]()"), theirs.strip("[]()")
    if re.sub(r"[{}()]", "", ours) == re.sub(r"[{}()]", "", theirs):
        return True
    is_pair = answer[0] in "([" and answer[-1] in ")]" and (answer[0], answer[-1]) == (truth[0], truth[-1])
    if is_pair and _all_near(answer[1:-1].split(","), truth[1:-1].split(",")):
        return True
    return "," in answer and "," in truth and _all_near(answer.split(","), truth.split(","))


def _all_near(ours: list[str], theirs: list[str]) -> bool:
    return len(ours) == len(theirs) and all(
        nearly_equal(one.strip(), other.strip()) for one, other in zip(ours, theirs, strict=True)
    )


def _near_expressions(answer: str, truth: str) -> bool:
    if _UNREAD.search(answer) or _UNREAD.search(truth):
        return False
    try:
        ours, theirs = sympy_parser.parse_expr(answer), sympy_parser.parse_expr(truth)
        if sympy.simplify(ours - theirs) == 0:
            return True
        return math.isclose(float(sympy.N(ours)), float(sympy.N(theirs)), rel_tol=TOLERANCE)
    except UNREADABLE:
        return False
