"""The one place where a tokenizer is loaded: with transformers, and compared with what its own file says.

transformers picks a class by model_type and tokenizer_class, and a class may build a tokenizer of its own from the
vocabulary of the file. Where the ids of some texts differ from the file's, the folder is refused.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megatron_rl.errors import DataError, MissingDependency
from megatron_rl.models.broken import broken_reason
from megatron_rl.models.tokenizers.byte_bpe import ByteBpe
from megatron_rl.models.tokenizers.files import (
    TokenizerFile,
    json_object,
    read_source,
    tokenizer_file,
)
from megatron_rl.models.tokenizers.sentencepiece import SentencePiece
from megatron_rl.weights.companions import copy_companions

PROBES = (
    "Hello, world! It's 12,345.67 kg.",
    " two  spaces   and    more",
    "   lead and trail   ",
    "def f(x):\n    return {'a': [1, 2]}\n\n\tend\n",
    "DON'T don't WE'LL we'll HTTPServer camelCase snake_case",
    "x=3+4*(5-6)/7 <= 8 && y != z; // #9 http://a.b/c?d=e&f=%20",
    "na\u00efve caf\u00e9 \u00dcber stra\u00dfe a\u0301 \u00a0x \U0001f600\U0001f680",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002123\u4e2d\u6587abc \u3053\u3093\u306b\u3061\u306f \ud55c\uad6d\uc5b4",
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440 \u0645\u0631\u062d\u0628\u0627",
    "a" * 40 + "\n\n\n\n" + "=" * 40,
)
"""Texts whose ids are compared: words, digits, runs of spaces, code, accents, scripts, emoji."""


def load_tokenizer(path: str) -> Any:
    """transformers' tokenizer of a folder.

    A folder without tokenizer.json is read from tokenizer.model, tiktoken's or tekken.json (models/tokenizers).
    Raises DataError: there is none, it cannot be read, or transformers gives other ids than the file.
    """
    if not Path(path).is_dir():
        raise DataError(f"{path}: there is no such folder -- name a local one with a tokenizer in model.tokenizer_path")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingDependency("tokenizers need transformers -- pip install transformers") from error
    file = tokenizer_file(Path(path))
    expected = _own_ids(file)
    # With tekken.json beside tokenizer.json, transformers takes mistral-common's, which has no chat template.
    options = {"mistral_format": False} if (Path(path) / "tekken.json").is_file() else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(prepared_folder(path), local_files_only=True, **options)
    except Exception as error:  # tokenizers raises bare Exception for a tokenizer.json that it cannot read
        raise DataError(_unreadable(file, error)) from error
    if expected is not None:
        _compare(tokenizer, file, expected)
    return tokenizer


def prepared_folder(path: str) -> str:
    """A folder from which transformers and engines load the tokenizer of `path`: itself where they can, else one
    with a tokenizer.json that is made here.
    """
    return path if tokenizer_file(Path(path)).kind in ("json", "vocabulary") else _with_tokenizer_json(path)


@cache
def _with_tokenizer_json(path: str) -> str:
    folder = Path(tempfile.mkdtemp(prefix="tokenizer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy_companions(folder, Path(path), Path(path), None)
    return str(folder)


def _unreadable(file: TokenizerFile, error: Exception) -> str:
    reason = (str(error) or type(error).__name__).strip().splitlines()[0]
    reason = broken_reason(file.path, f"no tokenizer can be loaded ({type(error).__name__}: {reason})")
    return f"{file.path}: {reason} -- copy the tokenizer's files again, tokenizer_config.json too"


def _own_ids(file: TokenizerFile) -> Callable[[str], list[int]] | None:
    """What the file says that texts become; None for a list of tokens, which says nothing about it."""
    if file.kind == "vocabulary":
        return None
    return _ids_of_json(file) if file.kind == "json" else _ids_of_source(file, read_source(file))


def _ids_of_json(file: TokenizerFile) -> Callable[[str], list[int]]:
    """What the tokenizers library gives for a tokenizer.json, before any class of transformers has its way."""
    from tokenizers import Tokenizer

    json_object(file.path)
    try:
        own = Tokenizer.from_file(str(file.path))
    except Exception as error:  # the library raises bare Exception
        raise DataError(_unreadable(file, error)) from error
    return lambda text: own.encode(text, add_special_tokens=False).ids


def _ids_of_source(file: TokenizerFile, source: SentencePiece | ByteBpe) -> Callable[[str], list[int]]:
    """What the file's own library gives: sentencepiece, or tiktoken."""
    name = "sentencepiece" if isinstance(source, SentencePiece) else "tiktoken"
    try:
        if isinstance(source, SentencePiece):
            import sentencepiece

            return sentencepiece.SentencePieceProcessor(model_file=str(file.path)).encode
        import tiktoken
    except ImportError as error:
        raise MissingDependency(f"{file.path}: is compared with {name} -- pip install {name}") from error
    assert source.pattern is not None, "read_source has refused the file"
    ranks: Mapping[bytes, int] = source.ranks
    own = tiktoken.Encoding(file.path.name, pat_str=source.pattern, mergeable_ranks=dict(ranks), special_tokens={})
    return lambda text: [source.first_id + rank for rank in own.encode_ordinary(text)]


def _compare(tokenizer: Any, file: TokenizerFile, expected: Callable[[str], list[int]]) -> None:
    """Raises DataError for texts that become other ids than the file's own."""
    for text in PROBES:
        wanted = _outcome(expected, text)
        given = _outcome(lambda text: tokenizer.encode(text, add_special_tokens=False, verbose=False), text)
        if wanted != given:
            raise DataError(
                f"{file.path}: transformers loads it as {type(tokenizer).__name__}, which gives other ids than the "
                f"file itself: {text[:24]!r} becomes {_shown(given, wanted)}, and by the file {_shown(wanted, given)}. "
                "The class is picked by model_type in config.json and tokenizer_class in tokenizer_config.json -- if "
                "the file is right, keep the tokenizer in a folder without config.json, with tokenizer_class "
                "PreTrainedTokenizerFast, and name that folder in model.tokenizer_path; if transformers is right, save "
                "what it loads (save_pretrained) and name that folder"
            )


def _outcome(encode: Callable[[str], list[int]], text: str) -> list[int] | None:
    """The ids; None where there are none to have: a vocabulary without the characters of a text."""
    try:
        return _encoded(encode, text)
    except DataError:
        return None


def _encoded(encode: Callable[[str], list[int]], text: str) -> list[int]:
    try:
        return list(encode(text))
    except Exception as error:  # tokenizers raises bare Exception where it has no token for a character
        raise DataError(f"the tokenizer fails on {text!r} ({error})") from error


def _shown(ids: list[int] | None, others: list[int] | None) -> str:
    """The ids from just before the place where they differ from the others."""
    if ids is None:
        return "an error"
    pairs = zip(ids, others or (), strict=False)
    first = next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(ids), len(others or ())))
    start, end = max(first - 2, 0), first + 4
    return f"[{'... ' * (start > 0)}{', '.join(map(str, ids[start:end]))}{', ...' * (end < len(ids))}]"
