"""A tokenizer's chat template: writing messages with it, and what can be known about it beforehand."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from megatron_rl.data.columns import TemplateInputs
from megatron_rl.data.conversation import Message
from megatron_rl.data.files import BadRow
from megatron_rl.data.formats import json_text
from megatron_rl.models.tokenizers.templates import variables_of

_QUESTION: Message = {"role": "user", "content": "a"}
_NONE = TemplateInputs()
_ANSWER: Message = {"role": "assistant", "content": "b"}
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"k": "v"}}}
_CALLING: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_AROUND: dict[str, tuple[list[Message], list[Message]]] = {
    "system": ([], [_QUESTION]),
    "user": ([], []),
    "assistant": ([_QUESTION], [_QUESTION]),
    "tool": ([_QUESTION, _CALLING], []),
}
"""Messages before and after one of each role, in a conversation that a template may be asked to write."""


class ChatTemplate:
    """The template of a tokenizer, with the run's own keywords; a row's come first."""

    def __init__(self, tokenizer: Any, keywords: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._keywords = dict(keywords)
        self._dropped = dict[str, bool]()

    @cached_property
    def source(self) -> str:
        """The template's text; all of them where a tokenizer has several by name (default, tool_use)."""
        template = self._tokenizer.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else template or ""

    @cached_property
    def names(self) -> frozenset[str]:
        """Variables that the template reads from what it is given."""
        return variables_of(self.source)

    def mentions(self, name: str) -> bool:
        """Whether the word stands anywhere in the template: as a field of messages, say."""
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    def quotes(self, word: str) -> bool:
        """Whether the word stands in the template as a text of its own: as a role, say."""
        return f"'{word}'" in self.source or f'"{word}"' in self.source

    def write(self, messages: list[Message], inputs: TemplateInputs, *, add_generation_prompt: bool) -> str:
        """The text of the messages. Raises BadRow if the template refuses them."""
        return self._write([self._for_template(message) for message in messages], inputs, add_generation_prompt)

    def _write(self, messages: list[Message], inputs: TemplateInputs, add_generation_prompt: bool = False) -> str:
        keywords = {**self._keywords, **inputs.keywords}
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=inputs.tools, tokenize=False, add_generation_prompt=add_generation_prompt, **keywords
            )
        except Exception as error:  # whatever an expression of the template raises: 1 // 0, say
            reason = (str(error) or "no reason given").splitlines()[0]
            raise BadRow(
                f"the chat template refuses the messages: {reason} ({type(error).__name__}) "
                "-- give what it asks for, or leave the row out"
            ) from error
        assert isinstance(text, str)
        return text

    def turn_end(self) -> str | None:
        """The special token that ends an answer; None if there is none, or the template refuses a plain one."""
        try:
            head = self.write([_QUESTION], TemplateInputs(), add_generation_prompt=True)
            text = self.write([_QUESTION, _ANSWER], TemplateInputs(), add_generation_prompt=False)
        except BadRow:
            return None
        special = {str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        after = text.rpartition("b")[2] if not text.startswith(head) else text[len(head) :].partition("b")[2]
        found = [(after.find(token), token) for token in special if token in after]
        return min(found)[1] if found else None

    def drops(self, role: str) -> bool:
        """Whether the text is the same whatever a message of this role says; False where it cannot be asked."""
        if role in _AROUND and role not in self._dropped:
            before, after = _AROUND[role]
            message: Message = {"role": role, "name": "f", "tool_call_id": "abcdefghi"}
            try:
                texts = {self._write([*before, message | {"content": text}, *after], _NONE) for text in ("x1", "y2")}
            except BadRow:
                texts = set[str]()
            self._dropped[role] = len(texts) == 1
        return self._dropped.get(role, False)

    def _for_template(self, message: Message) -> Message:
        """tool_calls in the form that this template takes: content None or "", arguments as a mapping or as text."""
        if not message.get("tool_calls"):
            return message
        message = copy.deepcopy(message)
        if message.get("content") is None:
            message["content"] = self._no_content
        if self._wants_mappings:
            for call in message["tool_calls"]:
                function = call.get("function") if isinstance(call, dict) else None
                if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                    function["arguments"] = _mapping_of(function["arguments"])
        return message

    @cached_property
    def _no_content(self) -> str | None:
        """None, unless the template would write it as the word None, or fail on it."""
        return None if self._try(None, {"k": "v"}, "None") is False else ""

    @cached_property
    def _wants_mappings(self) -> bool:
        """Whether arguments that are JSON text would be written as a JSON string in quotes, or not at all."""
        return self._try("", '{"k": "v"}', '{"k": "v"}') is not True

    def _try(self, content: str | None, arguments: object, expected: str) -> bool | None:
        """Whether `expected` is in the text of a call without, and with, content; None if it cannot be written."""
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [_QUESTION, {"role": "assistant", "content": content, "tool_calls": [call]}]
        try:
            return expected in self._write(messages, TemplateInputs())
        except BadRow:
            return None


def _mapping_of(text: str) -> object:
    try:
        value, fault = json_text(text)
    except ValueError:
        return text
    if fault is not None:
        raise BadRow(f"in the JSON text of a tool call's arguments: {fault}")
    return value if isinstance(value, dict) else text
