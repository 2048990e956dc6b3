r"""What a text answers: the one reading of "the final number" and "the final answer" that rewards, votes and validation
share. Pure functions of text; standard library only.

A number is digits with an optional sign, decimal part and power of ten, or a fraction of two such:

    1,234.50  -3  .5  1e3  1.5 \times 10^{6}  3/4  \frac{3}{4}  2 1/2  1{,}234  -$5  50%

A minus is a sign where nothing stands before it that could be subtracted from: "x = -3" is -3, "5-3" is 3. Commas group
thousands only: "3,4" are two numbers. A currency or per cent sign beside a number changes nothing. Exponents and
indices of letters (cm^2, x_1, m2) are no numbers.
"""

from __future__ import annotations

import re
from fractions import Fraction

MOST_DIGITS = 400
"""A number of more characters, or a power of ten beyond it, is passed over: no answer is meant by it."""

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
_PLAIN = rf"(?:{_DIGITS}|(?<![\w.])\.[0-9]+)"
_POWER = r"[eE][-+]?[0-9]+(?!\w)"
_CURRENCY = r"(?:\\?\$|\u20ac|\u00a3|\u00a5)"
# A sign next to its number, where no word, bracket or number ends before it; or a detached one after an equals sign.
_SIGN = rf"(?:(?<![\w.)\]}}%])-{_CURRENCY}?|(?<=[=:(\[])\s*-\s*{_CURRENCY}?|^\s*-\s*{_CURRENCY}?)"
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})?(?:"
    rf"\\[dt]?frac\s*\{{\s*(?P<top>-?{_DIGITS})\s*\}}\s*\{{\s*(?P<bottom>{_DIGITS})\s*\}}"
    rf"|\\[dt]?frac\s*(?P<top1>[0-9])\s*(?P<bottom1>[0-9])"
    rf"|(?:(?P<whole>[0-9]+) )?(?<![/.,\w])(?P<over>[0-9]+)\s*/\s*(?P<under>[0-9]+)(?![\w/]|[.,][0-9])"
    rf"|(?P<plain>{_PLAIN})(?P<power>{_POWER})?)",
    re.MULTILINE,
)
_MINUS = str.maketrans({"\u2212": "-", "\u2013": "-", "\uff0d": "-", "\u2044": "/", "\u00a0": " ", "\u202f": " "})
_TIMES = r"(?:\*|x|\u00d7|\\times|\\cdot)"
_EXPONENT = r"10\s*\^\s*\{?\s*([-+]?[0-9]+)\s*\}?"
# Powers of ten and thousands as LaTeX and Python write them; what stands on or between letters: exponents and indices.
_TIDY = (
    (re.compile(rf"(?<=[0-9])\s*{_TIMES}\s*{_EXPONENT}"), r"e\1"),
    (re.compile(rf"(?<![0-9.,^]){_EXPONENT}"), r"1e\1"),
    (re.compile(r"(?<=[A-Za-z])[0-9]+(?=[A-Za-z])"), ""),
    (re.compile(r"\{,\}|,\\!"), ","),
    (re.compile(r"(?<=[0-9])\\[,;](?=[0-9]{3})"), ""),
    (re.compile(r"(?<=[0-9])_(?=[0-9]{3})"), ""),
    (re.compile(r"(?<=[A-Za-z)\]}])\s*[\^_]\s*(?:\{\s*-?[0-9]+\s*\}|-?[0-9]+)"), ""),
    (re.compile(r"\b(?:[kcm]?m|in|ft|yd|mi)[23]\b"), "m"),
)
_SHORT = re.compile(r"-?[0-9]{1,18}(?:\.[0-9]{1,18})?")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def final_number(text: str) -> Fraction | None:
    """The last number in the text; None where there is none."""
    last = _last(_tidy(text))
    return None if last is None else last[1]


def only_number(text: str) -> Fraction | None:
    """The number that the text is, currency, per cent sign and white space aside; None where there is more or less."""
    if _SHORT.fullmatch(text):
        # Most ground truths, and many times faster.
        return Fraction(text)
    tidy = re.sub(rf"{_CURRENCY}|\\?%", "", _tidy(text)).strip().lstrip("+")
    found = _NUMBER.fullmatch(tidy)
    return None if found is None or _is_two(found) else _value(found)


def extract_answer(text: str) -> str:
    r"""What a response answers, for voting: the first of these that it holds.

    The last \boxed{...}; the last <answer>...</answer>; what follows the last ####; the last number, without commas;
    else the whole text. White space around it does not count.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    tagged = _TAGGED.findall(text)
    if tagged:
        return tagged[-1].strip()
    _, marked, tail = text.rpartition("####")
    if marked and tail.strip():
        return tail.strip().splitlines()[0].strip().replace(",", "")
    last = _last(_tidy(text))
    return text.strip() if last is None else last[0]


def vote(answer: str) -> str:
    """The same text for answers that are one number written in several ways ("1,234.0" and "1234")."""
    number = only_number(answer)
    return answer if number is None else str(number)


def last_boxed(text: str) -> str | None:
    r"""Content of the last \boxed{...} whose braces close; None where there is none."""
    head, found, tail = text.rpartition("\\boxed{")
    if not found:
        return None
    depth = 1
    for place, char in enumerate(tail):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if depth == 0:
            return tail[:place]
    return last_boxed(head)


def _tidy(text: str) -> str:
    tidy = text.translate(_MINUS)
    for pattern, put in _TIDY:
        tidy = pattern.sub(put, tidy)
    return tidy


def _last(tidy: str) -> tuple[str, Fraction] | None:
    """(how it is written, without commas and spaces, a fraction in its lowest terms; its value) of the last number."""
    last = None
    for found in _NUMBER.finditer(tidy):
        value = _value(found)
        if value is not None:
            last = (found, value)
    if last is None:
        return None
    found, value = last
    return re.sub(rf",|\s|{_CURRENCY}", "", found.group()) if found["plain"] else str(value), value


def _value(found: re.Match[str]) -> Fraction | None:
    """What a match of _NUMBER says; None where that is no number that anyone means."""
    if len(found.group()) > MOST_DIGITS:
        return None
    part = found.groupdict()
    sign = -1 if part["sign"] and not _is_two(found) else 1
    top = part["top"] or part["top1"] or part["over"]
    if top is not None:
        bottom = _plain(part["bottom"] or part["bottom1"] or part["under"])
        if bottom == 0:
            return None
        whole = _plain(part["whole"]) if part["whole"] and not _is_two(found) else 0
        return sign * (whole + _plain(top) / bottom)
    exponent = int(part["power"][1:]) if part["power"] else 0
    return None if abs(exponent) > MOST_DIGITS else sign * _plain(part["plain"]) * Fraction(10) ** exponent


def _is_two(found: re.Match[str]) -> bool:
    """Whether a whole number and a fraction stand side by side: "2 1/2" is a mixed number, "12 5/3" are two."""
    part = found.groupdict()
    return bool(part["whole"]) and _plain(part["over"]) >= _plain(part["under"])


def _plain(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))
