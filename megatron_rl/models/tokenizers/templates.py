"""Chat templates: as a config gives them, and as the files of a tokenizer's folder hold them. Text, nothing is run."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_rl.errors import DataError
from megatron_rl.messages import short
from megatron_rl.models.broken import broken_reason
from megatron_rl.models.tokenizers.files import json_object

DEFAULT = "default"
"""The name of a tokenizer's own template, where it has more than one."""


def given_template(value: str) -> str | None:
    """The text of model.chat_template: a template itself, or a file's (.json: its entry chat_template); None for the
    name of one that the tokenizer has. Raises DataError for a file that is not there, or holds no template.
    """
    if "{{" in value or "{%" in value:
        return value
    path = Path(value).expanduser()
    if path.is_file():
        return template_in(path)
    if "/" in value or path.suffix in (".jinja", ".json", ".txt"):
        raise DataError(f"{value}: there is no such file -- give the file of a chat template, or its text")
    return None


def template_in(path: Path) -> str:
    """The template that a file holds. Raises DataError if it holds none."""
    if path.suffix == ".json":
        template = json_object(path).get("chat_template")
        if not isinstance(template, str):
            raise DataError(
                f"{path}: its entry chat_template is {short(template)} -- write the template there, as text"
            )
        return template
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is no text in UTF-8 ({error}) -- write it again") from error
    if "{{" not in text and "{%" not in text:
        why = broken_reason(path, "holds no chat template: there is no {{ and no {% in it")
        raise DataError(f"{path}: {why} -- give a file with a Jinja template")
    return text


def variables_of(template: str) -> frozenset[str]:
    """Variables that a template reads from what it is given. Raises DataError that says where it is not valid."""
    import jinja2
    from jinja2 import meta

    # transformers' own tag, which no other Jinja knows; it marks answers and reads nothing.
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(plain)))
    except jinja2.TemplateSyntaxError as error:
        raise DataError(
            f"the chat template is not valid: {error} (line {error.lineno}) -- mend it, or name another in "
            "model.chat_template"
        ) from error


def chosen_template(
    folder: Path, own: str | dict[str, str] | None, given: str | None
) -> tuple[str | dict[str, str] | None, bool]:
    """(the template of a run, whether it differs from what transformers loads).

    own: what transformers has loaded: a text, several by name, or None. given: model.chat_template.
    Raises DataError as given_template does, and for a name that the tokenizer has no template of.
    """
    if given is not None:
        text = given_template(given)
        named = own if isinstance(own, dict) else {DEFAULT: own} if own is not None else {}
        if text is None and given not in named:
            names = ", ".join(named) or "none"
            raise DataError(
                f"model.chat_template: {given!r} is no file, no template, and no name of one that the tokenizer in "
                f"{folder} has (it has {names}) -- give the path of a .jinja or .json file, the text, or such a name"
            )
        template = named[given] if text is None else text
        variables_of(template)
        return template, True
    if own is None and (folder / "chat_template.json").is_file():
        # transformers reads this file for processors alone.
        return template_in(folder / "chat_template.json"), True
    return own, False
