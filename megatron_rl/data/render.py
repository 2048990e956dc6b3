"""From messages and strings to token ids and back: the only user of a tokenizer.

Two ways to write messages as text (data.chat_template):
    tokenizer  the tokenizer's own chat template
    plain      the contents joined with nothing between; each assistant message is followed by the end token
A prompt that is a string is used as it is in both: no template, and no special token is added (a string that
needs a beginning-of-sequence token holds it as text).

No mask and no length is ever derived from the pad id, so a tokenizer whose pad token is its end token is as
good as another.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.config.sections.model import ModelConfig
from megatron_rl.data.columns import TemplateInputs
from megatron_rl.data.conversation import ROLES, Message, check_messages, is_empty
from megatron_rl.data.end_tokens import known_end_ids, named_end_ids
from megatron_rl.data.files import BadRow
from megatron_rl.data.formats import half_surrogates
from megatron_rl.data.template import ChatTemplate
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.errors import DataError
from megatron_rl.models.tokenizers.templates import DEFAULT, chosen_template

if TYPE_CHECKING:
    # torch is slow to import, and processes that render rows do not need it.
    from megatron_rl.types import Samples

NO_INPUTS = TemplateInputs()
CONTENT_FIELDS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Fields of messages that hold what a model wrote: a template that leaves them out changes the conversation."""
NUM_PROBES = 64
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


class Renderer:
    """A tokenizer and the way messages become text.

    Raises DataError when the folder holds no tokenizer, or one that does not give its own texts back.
    """

    def __init__(
        self,
        tokenizer_path: str,
        chat_template: Literal["tokenizer", "plain"] = "tokenizer",
        template_kwargs: dict[str, Any] | None = None,
        model_path: str | None = None,
        eos_token: str | None = None,
        model_template: str | None = None,
    ) -> None:
        """model_path: folder whose generation_config.json and config.json may name more end tokens; else
        tokenizer_path. eos_token, model_template (model.chat_template): in place of the tokenizer's.
        """
        self.tokenizer_path = tokenizer_path
        self._arguments = (tokenizer_path, chat_template, template_kwargs, model_path, eos_token, model_template)
        self._plain = chat_template == "plain"
        # Read first: transformers' own complaint about a config.json names no file.
        named = named_end_ids(Path(model_path or tokenizer_path))
        self._tokenizer = load_tokenizer(tokenizer_path)
        self._check_round_trip()
        if eos_token is not None:
            self._set_eos_token(eos_token)
        template, self._is_given = chosen_template(Path(tokenizer_path), self._tokenizer.chat_template, model_template)
        self._tokenizer.chat_template = template
        own = self._tokenizer.eos_token_id
        ends = ([] if own is None else [own]) + list(known_end_ids(named, len(self._tokenizer)))
        self._eos_token_ids = tuple(dict.fromkeys(ends))
        self._template = ChatTemplate(self._tokenizer, template_kwargs or {})
        self.model_vocab_size = _model_vocab_size(Path(model_path or tokenizer_path))
        """Tokens of the model; None if its folder does not say."""
        beyond = [token for token in self._eos_token_ids if token >= (self.model_vocab_size or token + 1)]
        if beyond:
            raise DataError(
                f"{tokenizer_path}: the end token {self.decode(beyond[:1], skip_special_tokens=False)!r} has the id "
                f"{beyond[0]}, and the model knows {self.model_vocab_size} tokens (vocab_size of its config.json) "
                "-- use the tokenizer that belongs to the model"
            )

    @classmethod
    def from_config(cls, model: ModelConfig, data: DataConfig) -> Renderer:
        """The renderer of a run."""
        return cls(
            tokenizer_path=model.tokenizer_path or model.path,
            chat_template=data.chat_template,
            template_kwargs=data.apply_chat_template_kwargs,
            model_path=model.path,
            eos_token=model.eos_token,
            model_template=model.chat_template,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as what it was made of: another process loads the tokenizer itself."""
        return Renderer, self._arguments

    def fingerprint(self) -> str | None:
        """Digest of everything here that decides which ids a text becomes: tokenizer files, template, libraries.

        None if the chat template asks for the date: the same row may be another text tomorrow.
        """
        template = self._tokenizer.chat_template
        if not self._plain and "strftime_now" in json.dumps(template):
            return None
        digest = hashlib.sha256()
        for name in ("transformers", "tokenizers", "jinja2"):
            digest.update(f"{name} {version(name)}\n".encode())
        digest.update(repr((self._arguments[1:3], template, self._eos_token_ids, self._tokenizer.eos_token)).encode())
        for path in sorted(Path(self.tokenizer_path).iterdir()):
            if path.is_file() and path.suffix not in _WEIGHTS:
                digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
        return digest.hexdigest()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a response: the tokenizer's end token first, then those of
        generation_config.json and config.json.
        """
        return self._eos_token_ids

    @property
    def template_names(self) -> frozenset[str]:
        """Variables that the chat template reads; none where messages are written without one."""
        return frozenset() if self._plain else self._template.names

    def unread_fields(self, messages: Sequence[Message]) -> list[str]:
        """Fields of messages that the chat template does not read."""
        fields = {name for message in messages for name, value in message.items() if value is not None}
        return sorted(fields - {"role", "content"} - {name for name in fields if self._reads(name)})

    @property
    def pad_token_id(self) -> int:
        """The tokenizer's pad id; the first end id, or else 0, where it has none."""
        if self._tokenizer.pad_token_id is not None:
            return self._tokenizer.pad_token_id
        return self._eos_token_ids[0] if self._eos_token_ids else 0

    def pad_id_apart(self) -> int | None:
        """The tokenizer's pad id, if no response ends with it."""
        pad = self._tokenizer.pad_token_id
        return None if pad in self._eos_token_ids else pad

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model may have more rows than this, never fewer."""
        return len(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; no special token is added, but those written in the text become their ids.

        Raises BadRow if the tokenizer fails on it.
        """
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # tokenizers raises bare Exception where it has no token for a character
            reason = (str(error) or "no reason given").splitlines()[0]
            failure = f"the tokenizer fails on the text ({type(error).__name__}: {reason})"
            broken = half_surrogates(text, "the text")
            raise BadRow(broken[0] if broken else f"{failure} -- repair the text, or leave the row out") from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`, by default without special tokens."""
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def response_text(self, ids: Sequence[int], stop_ids: Sequence[int] = ()) -> str:
        """A response as rewards and readers see it: without end and pad tokens, with every other special token.

        stop_ids: further tokens that end a response.
        """
        left_out = {*self._eos_token_ids, *stop_ids, self._tokenizer.pad_token_id}
        return self.decode([token for token in ids if token not in left_out], skip_special_tokens=False)

    def response_texts(self, samples: Samples, stop_ids: Sequence[int] = ()) -> list[str]:
        """`response_text` of each sample, by one call of the tokenizer."""
        left_out = [*self._eos_token_ids, *stop_ids, self._tokenizer.pad_token_id]
        kept = ~np.isin(samples.token_ids, [token for token in left_out if token is not None])
        counts = np.concatenate([[0], np.cumsum(kept)])
        ids = samples.token_ids[kept].tolist()
        rows = [ids[start:end] for start, end in pairwise([0, *counts[samples.ends].tolist()])]
        if not self._tokenizer.is_fast:
            return [self.decode(row, skip_special_tokens=False) for row in rows]
        # Past transformers' own decode, which looks at every id before it passes them on.
        return self._tokenizer.backend_tokenizer.decode_batch(rows, skip_special_tokens=False)

    def prompt_text(self, prompt: str | list[Message], inputs: TemplateInputs = NO_INPUTS) -> str:
        """The text that the model is given: for messages, the head of the assistant's turn included.

        Raises BadRow if the row gives the template something that it does not use.
        """
        if isinstance(prompt, str):
            if inputs.names():
                raise BadRow(
                    f"{inputs.names()[0]!r} is for the chat template, and the prompt is a string, which is used as it "
                    "is -- give messages, set data.string_prompt=user, or take it out"
                )
            return prompt
        self._check_used(prompt, inputs)
        if prompt[-1]["role"] == "assistant":
            raise BadRow("the prompt ends with an assistant message -- leave the answer out of the prompt")
        return self._write(prompt, inputs, add_generation_prompt=True)

    def prompt_ids(self, prompt: str | list[Message], inputs: TemplateInputs = NO_INPUTS) -> list[int]:
        """Token ids of a prompt, as an engine is given them.

        Raises BadRow if the text is empty or the tokenizer has no tokens for some of it.
        """
        return self._encode_whole(self.prompt_text(prompt, inputs))

    def sft_ids(
        self, prompt: str | list[Message], response: str, inputs: TemplateInputs = NO_INPUTS
    ) -> tuple[list[int], list[bool]]:
        """(token ids, loss mask) of a prompt and response, the mask True on the response and its end token.

        The ids begin with prompt_ids(prompt): the model is trained on the tokens that it is given later.
        """
        head = self.prompt_text(prompt, inputs)
        if isinstance(prompt, str):
            return self._join([(head, False), (head + response + self._end_text(), True)])
        last = {"role": "assistant", "content": response}
        return self._join([(head, False), (self._write([*prompt, last], inputs), True)])

    def conversation_ids(
        self, messages: list[Message], inputs: TemplateInputs = NO_INPUTS, num_context: int = 0
    ) -> tuple[list[int], list[bool]]:
        """(token ids, loss mask) of a conversation, the mask True on assistant messages and their end tokens.

        num_context: first messages that are not trained on. The conversation is rendered up to the start and up to
        the end of each assistant message. Where one rendering does not begin with the one before it, the template
        rewrites earlier turns, no mask would be right, and BadRow is raised.
        """
        self._check_used(messages, inputs)
        if messages[0]["role"] == "assistant":
            raise BadRow("the conversation begins with an assistant message -- begin with a user or system message")
        texts: list[tuple[str, bool]] = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant" and index >= num_context:
                texts.append((self._write(messages[:index], inputs, add_generation_prompt=True), False))
                texts.append((self._write(messages[: index + 1], inputs), True))
        if not texts:
            raise BadRow("there is no assistant message to train on -- add one, or leave the row out")
        if messages[-1]["role"] != "assistant":
            texts.append((self._write(messages, inputs), False))
        return self._join(texts)

    def turn_end(self) -> str | None:
        """The special token that ends an assistant's turn in the chat template; None if there is none."""
        if self._plain:
            return self._end_text()
        return self._template.turn_end()

    def stops(self, texts: Sequence[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """What ends a response, given rollout.stop: (ids, texts). A stop that is one special token is an id.

        Raises DataError if there is nothing.
        """
        added = self._tokenizer.added_tokens_decoder.items()
        known = {str(token): number for number, token in added if token.special}
        ids = dict.fromkeys((*self._eos_token_ids, *(known[text] for text in texts if text in known)))
        if not ids and not texts:
            raise DataError(self._no_end())
        return tuple(ids), tuple(text for text in texts if text not in known)

    def _reads(self, name: str) -> bool:
        return not self._plain and self._template.mentions(name)

    def _check_used(self, messages: list[Message], inputs: TemplateInputs) -> None:
        """Refuse messages of no known form, and what the template would leave out."""
        check_messages(messages)
        how = "data.chat_template=plain writes contents alone" if self._plain else "the chat template does not read it"
        for number, message in enumerate(messages, start=1):
            role = message["role"]
            if role not in ROLES and not (not self._plain and self._template.quotes(role)):
                raise BadRow(f"message {number} has role = {role!r} -- use one of {', '.join(ROLES)}")
            if role in ROLES and not self._plain and self._template.drops(role):
                raise BadRow(
                    f"message {number} has role = {role!r}, and the chat template drops what such messages say "
                    "-- name another in model.chat_template, or leave the message out"
                )
            for name in CONTENT_FIELDS:
                if not is_empty(message.get(name)) and not self._reads(name):
                    raise BadRow(
                        f"message {number} has {name!r}, which would be left out: {how} "
                        f"-- use a tokenizer whose chat template writes {name}, or take it out"
                    )
        for name in (*(["tools"] if inputs.tools else []), *inputs.keywords):
            if self._plain or name not in self._template.names:
                raise BadRow(
                    f"{name!r} would be without effect: {how} "
                    f"-- use a tokenizer whose chat template uses {name}, or take it out"
                )
        if inputs.tools and self._write(messages, inputs) == self._write(messages, replace(inputs, tools=None)):
            raise BadRow("'tools' would be without effect: the chat template leaves them out here -- take them out")

    def ends_with_eos(self, ids: Sequence[int], loss_mask: Sequence[bool]) -> bool:
        """Whether the last trained token is an end token. If not, the sample does not teach when to stop."""
        trained = [token for token, on in zip(ids, loss_mask, strict=True) if on]
        return bool(trained) and trained[-1] in self._eos_token_ids

    def _join(self, texts: list[tuple[str, bool]]) -> tuple[list[int], list[bool]]:
        """Ids and mask of growing texts; a text's flag says whether what it adds to the last is trained on.

        What a text adds keeps the ids of the text before it: if encoding the whole would merge characters
        across the seam (a response that starts with the newline that ends the template's head), the addition
        is encoded by itself. A tokenizer that then writes another text (one that puts a space before everything it
        encodes) cannot cut there, and BadRow is raised.
        """
        before = ""
        ids: list[int] = []
        mask: list[bool] = []
        for text, trained in texts:
            if not text.startswith(before):
                raise BadRow(
                    "the chat template rewrites earlier turns when later ones are added "
                    f"({_first_difference(before, text)}), so no loss mask would be right -- write one row "
                    "for each response (prompt and response keys), or set data.chat_template=plain"
                )
            whole = self.encode(text)
            added = whole[len(ids) :] if whole[: len(ids)] == ids else self._apart(before, text, ids, whole)
            mask += self._trained(added) if trained else [False] * len(added)
            ids += added
            before = text
        self._check_lossless(before, ids)
        return ids, mask

    def _apart(self, before: str, text: str, ids: list[int], whole: list[int]) -> list[int]:
        """Ids of what `text` adds to `before`, encoded by itself."""
        after = text[len(before) :]
        added = self.encode(after)
        if _composed(self.decode([*ids, *added])) != _composed(self.decode(whole)):
            raise BadRow(
                f"a token spans the border between {before[-10:]!r} and {after[:10]!r}, and apart the two are another "
                "text -- let the first end where a token ends (with a space or newline, say)"
            )
        return added

    def _trained(self, added: list[int]) -> list[bool]:
        """True up to the last end token; what a template writes after it is no part of the response."""
        ends = [position for position, token in enumerate(added) if token in self._eos_token_ids]
        last = ends[-1] if ends else len(added) - 1
        return [position <= last for position in range(len(added))]

    def _write(
        self, messages: list[Message], inputs: TemplateInputs = NO_INPUTS, *, add_generation_prompt: bool = False
    ) -> str:
        if self._plain:
            return "".join(
                message["content"] + (self._end_text() if message["role"] == "assistant" else "")
                for message in messages
            )
        if not self._tokenizer.chat_template:
            raise DataError(
                f"{self.tokenizer_path}: the tokenizer has no chat template to render messages with "
                "-- set data.chat_template=plain, or give a template in model.chat_template"
            )
        if isinstance(self._tokenizer.chat_template, dict) and DEFAULT not in self._tokenizer.chat_template:
            raise DataError(
                f"{self.tokenizer_path}: the tokenizer has {len(self._tokenizer.chat_template)} chat templates and "
                f"none of the name {DEFAULT} -- choose one by model.chat_template: "
                f"{', '.join(self._tokenizer.chat_template)}"
            )
        return self._template.write(messages, inputs, add_generation_prompt=add_generation_prompt)

    def saved_template(self) -> str | None:
        """The chat template that a saved model needs to render as the run does: one that writes as
        data.chat_template=plain does, or model.chat_template; None if the tokenizer's own is used.
        """
        if not self._plain:
            return self._template.source if self._is_given else None
        end = json.dumps(self._end_text(), ensure_ascii=False) if self._eos_token_ids else '""'
        return (
            "{%- for m in messages %}{{- m['content'] }}{%- if m['role'] == 'assistant' %}{{- "
            + end
            + " }}{%- endif %}{%- endfor %}"
        )

    def _end_text(self) -> str:
        if not self._eos_token_ids:
            raise DataError(self._no_end())
        return self.decode([self._eos_token_ids[0]], skip_special_tokens=False)

    def _no_end(self) -> str:
        end = None if self._plain else self._template.turn_end()
        token = f"'{end}', which ends the chat template's answers" if end else "the token that ends a response"
        return (
            f"{self.tokenizer_path}: neither the tokenizer nor generation_config.json or config.json names an end "
            f"token, so responses would never end -- set model.eos_token to {token}"
        )

    def _encode_whole(self, text: str) -> list[int]:
        ids = self.encode(text)
        self._check_lossless(text, ids)
        return ids

    def _check_lossless(self, text: str, ids: list[int]) -> None:
        """Refuse text of which a tokenizer drops characters, without a word, for want of a token."""
        if not text:
            raise BadRow("the text is empty -- leave the row out")
        decoded = self.decode(ids, skip_special_tokens=False)
        if not ids or (decoded != text and _visible(decoded) != _visible(text)):
            lost = _first_difference(_visible(text), _visible(decoded))
            raise BadRow(f"the tokenizer does not give the text back ({lost}) -- take out what it has no tokens for")

    def _check_round_trip(self) -> None:
        """Encode and decode texts of the tokenizer's own vocabulary.

        Each probe is the text of one token: joined tokens may mean nothing, since a word-level vocabulary
        needs spaces that a character-level one may lack. Spaces and compatibility forms may differ. A few
        tokens may be out of reach in a sound tokenizer; a tenth may not.
        """
        special = set(self._tokenizer.all_special_ids)
        ids = [number for number in sorted(self._tokenizer.get_vocab().values()) if number not in special]
        probes = [self.decode([number]) for number in ids[:: max(1, len(ids) // NUM_PROBES)]]
        probes = [text for text in probes if _visible(text) and "\ufffd" not in text]
        failed = [text for text in probes if _visible(self.decode(self.encode(text))) != _visible(text)]
        if not probes or len(failed) * 10 > len(probes):
            example = ""
            if failed:
                ids = self.encode(failed[0])
                example = f", for instance {failed[0]!r} becomes {ids} and then {self.decode(ids)!r}"
            raise DataError(
                f"{self.tokenizer_path}: the tokenizer does not round-trip: {len(failed)} of {len(probes)} "
                f"texts of its own vocabulary do not come back{example}. transformers loaded it as "
                f"{type(self._tokenizer).__name__}; it picks the class by model_type in config.json, "
                "whatever tokenizer.json holds -- use the tokenizer.json that belongs to that class (Qwen2: "
                "byte-level BPE), or keep the tokenizer in a folder without config.json, with "
                "tokenizer_class PreTrainedTokenizerFast, and name that folder in model.tokenizer_path"
            )

    def _set_eos_token(self, token: str) -> None:
        ids = self.encode(token)
        if len(ids) != 1 or self.decode(ids, skip_special_tokens=False) != token:
            special = [str(t) for t in self._tokenizer.added_tokens_decoder.values() if t.special]
            raise DataError(
                f"model.eos_token: {token!r} is no token of the tokenizer in {self.tokenizer_path} "
                f"-- use one of its special tokens: {', '.join(special[:20]) or 'it has none'}"
            )
        self._tokenizer.eos_token = token


def _model_vocab_size(folder: Path) -> int | None:
    path = folder / "config.json"
    try:
        size = json.loads(path.read_text(encoding="utf-8")).get("vocab_size") if path.is_file() else None
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path}: not a JSON object ({error}) -- write the file again") from error
    return size if isinstance(size, int) else None


def _visible(text: str) -> str:
    """`text` in compatibility form, without spaces and control characters: what every tokenizer keeps."""
    chars = unicodedata.normalize("NFKC", text)
    return "".join(char for char in chars if unicodedata.category(char)[0] not in "CZ")


def _composed(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def _first_difference(expected: str, found: str) -> str:
    pairs = zip(expected, found, strict=False)
    start = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
    here = slice(start, start + 20)
    return f"expected {expected[here]!r} at character {start + 1}, found {found[here]!r}"
