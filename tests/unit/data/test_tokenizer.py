"""Tokenizers in the forms that they are shipped in: the ids are those of the file's own library, here and in a save."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from megatron_rl.data.render import Renderer
from megatron_rl.data.tokenizer import PROBES, load_tokenizer
from megatron_rl.errors import DataError
from megatron_rl.weights.companions import copy_companions
from tests.helpers.data import model_folder
from tests.helpers.tokenizers import (
    PATTERN,
    TEXTS,
    sentencepiece_folder,
    tekken_folder,
    tiktoken_folder,
    tiktoken_ranks,
    write_settings,
)


def saved(folder: Path, out: Path) -> Any:
    """What transformers loads from a save, without this package."""
    from transformers import AutoTokenizer

    out.mkdir()
    copy_companions(out, folder, folder, None)
    return AutoTokenizer.from_pretrained(out, local_files_only=True)


def same_ids(tokenizers: list[Any], own: Callable[[str], list[int]], texts: tuple[str, ...] = TEXTS) -> None:
    """All of them give the ids of the file's own library, and the text back from them."""
    for text in (*texts, *PROBES):
        for tokenizer in tokenizers:
            assert tokenizer.encode(text, add_special_tokens=False) == own(text), text
            assert tokenizer.decode(own(text), clean_up_tokenization_spaces=False) == text


def test_sentencepiece(tmp_path: Path):
    folder = sentencepiece_folder(tmp_path / "model")
    own = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    renderer, again = Renderer(str(folder), "plain"), saved(folder, tmp_path / "out")
    draw = random.Random(0)
    pieces = [own.id_to_piece(number).replace("\u2581", " ") for number in range(300, own.vocab_size())]
    mixed = tuple("".join(draw.choices(pieces, k=30)) for _ in range(50))
    same_ids([again], own.encode, (*TEXTS, *mixed))
    for text in (*TEXTS, *mixed):
        assert renderer.prompt_ids(text) == own.encode(text) and renderer.decode(own.encode(text)) == text
    # Byte fallback: three bytes that no piece holds.
    assert renderer.encode("\u1681") == own.encode("\u1681") and len(own.encode("\u1681")) == 4
    # Texts of special tokens are those; what stands between two of them is encoded as it is alone.
    expected = [1, *own.encode("[INST] a"), 2, *own.encode("b")]
    assert renderer.encode("<s>[INST] a</s>b") == expected == again.encode("<s>[INST] a</s>b", add_special_tokens=False)
    assert again.encode("a") == [1, *own.encode("a")]
    assert renderer.vocab_size == len(again) == own.vocab_size() == 32000
    assert (again.bos_token_id, again.eos_token_id, again.unk_token_id, again.pad_token_id) == (1, 2, 0, None)
    assert renderer.eos_token_ids == (2,) and renderer.pad_token_id == 2


def trained_sentencepiece(folder: Path, algorithm: str, *, symbol: bool, space_first: bool) -> Path:
    """A small tokenizer.model that normalises text and takes extra spaces out."""
    folder.mkdir()
    lines = ["the quick brown fox", "jumps over the lazy dog", "12 + 30 = 42", "caf\u00e9 na\u00efve"]
    (folder / "rows.txt").write_text("\n".join(lines * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "rows.txt"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=360,
        model_type=algorithm,
        byte_fallback=True,
        user_defined_symbols=["<sep>"] if symbol else [],
        pad_id=3,
        add_dummy_prefix=space_first,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder


@pytest.mark.parametrize(
    ("algorithm", "symbol"), [("unigram", True), ("unigram", False), ("bpe", True), ("bpe", False)]
)
def test_sentencepiece_of_another_making(tmp_path: Path, algorithm: str, symbol: bool):
    folder = trained_sentencepiece(tmp_path / "model", algorithm, symbol=symbol, space_first=not symbol)
    own = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    tokenizer, again = load_tokenizer(str(folder)), saved(folder, tmp_path / "out")
    for text in ("the  fox <sep>jumps", "\uff11\uff12 caf\u00e9", "\U0001f600 dog", *PROBES):
        assert tokenizer.encode(text, add_special_tokens=False) == own.encode(text), text
        assert again.encode(text, add_special_tokens=False) == own.encode(text)
    assert tokenizer.pad_token_id == again.pad_token_id == 3


def test_tekken(tmp_path: Path):
    folder = tekken_folder(tmp_path / "model")
    # transformers would take mistral-common's tokenizer for it, which has no chat template and knows no specials.
    (folder / "config.json").write_text('{"model_type": "mistral", "vocab_size": 4000}')
    own = Tekkenizer.from_file(folder / "tekken.json")
    tokenizer, again = load_tokenizer(str(folder)), saved(folder, tmp_path / "out")
    same_ids([tokenizer, again], lambda text: own.encode(text, bos=False, eos=False))
    assert len(tokenizer) == len(again) == own.n_words == 4000
    ids = [own.get_special_token(name) for name in ("<s>", "[INST]", "[/INST]", "</s>")]
    assert tokenizer.encode("<s>[INST][/INST]</s>", add_special_tokens=False) == ids
    assert (again.bos_token, again.eos_token, again.pad_token) == ("<s>", "</s>", "<pad>")


@pytest.mark.parametrize("name", ["tiktoken.model", "qwen.tiktoken", "tokenizer.model"])
def test_tiktoken(tmp_path: Path, name: str):
    folder = tiktoken_folder(tmp_path / "model", name)
    # Of this type transformers ignores the code beside the file, and cuts texts by a pattern of its own.
    (folder / "config.json").write_text('{"model_type": "deepseek_v3", "vocab_size": 2100}')
    special = {"[BOS]": 2000, "[EOS]": 2001, "<|im_end|>": 2003}
    own = tiktoken.Encoding("own", pat_str=PATTERN, mergeable_ranks=tiktoken_ranks(2000), special_tokens=special)
    tokenizer, again = load_tokenizer(str(folder)), saved(folder, tmp_path / "out")
    same_ids([tokenizer, again], own.encode_ordinary)
    for one in (tokenizer, again):
        text = "[BOS]a<|im_end|>\u4f60b[EOS]"
        assert one.encode(text, add_special_tokens=False) == own.encode(text, allowed_special="all")
        assert one.eos_token_id == 2001 and len(one) == 2004


def broken(folder: Path, name: str, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return folder


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 493443\n"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "tekken.json", "a.tiktoken"])
def test_files_that_are_no_tokenizer(tmp_path: Path, name: str):
    for content, reason in ((POINTER, "git lfs pull"), (b"", "is empty"), (b"<html>\n", "(is no JSON|cannot be read)")):
        with pytest.raises(DataError, match=rf"{name}: .*{reason}.* -- copy it again"):
            load_tokenizer(str(broken(tmp_path / "model", name, content)))


def test_a_file_that_is_cut_short(tmp_path: Path):
    folder = sentencepiece_folder(tmp_path / "model")
    whole = (folder / "tokenizer.model").read_bytes()
    (folder / "tokenizer.model").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        DataError, match=r"tokenizer\.model: cannot be read: it .*(ends|end is missing|no sentencepiece)"
    ):
        load_tokenizer(str(folder))
    folder = tiktoken_folder(tmp_path / "other")
    lines = (folder / "tiktoken.model").read_text().splitlines()
    (folder / "tiktoken.model").write_text("\n".join(lines[:100] + lines[101:]))
    with pytest.raises(DataError, match=r"the ranks of its 1999 tokens are not 0 to 1998: lines are missing"):
        load_tokenizer(str(folder))


def test_a_pattern_that_no_file_says_is_not_guessed(tmp_path: Path):
    folder = tiktoken_folder(tmp_path / "model")
    code = folder / "tokenization_moonshot.py"
    code.write_text(code.read_text() + '    PAT_STR = r"."\n')
    with pytest.raises(DataError, match=r"no file beside it says how a text is cut into words.*TikTokenConverter"):
        load_tokenizer(str(folder))
    code.unlink()
    with pytest.raises(
        DataError, match=r"copy the model's tokenization_\*\.py into the folder, which is read and not run"
    ):
        load_tokenizer(str(folder))
    # The cure that the error names.
    from transformers.convert_slow_tokenizer import TikTokenConverter

    (tmp_path / "cured").mkdir()
    made = TikTokenConverter(str(folder / "tiktoken.model"), PATTERN, extra_special_tokens=["[BOS]", "[EOS]"])
    made.converted().save(str(tmp_path / "cured" / "tokenizer.json"))
    write_settings(tmp_path / "cured", tokenizer_class="PreTrainedTokenizerFast", eos_token="[EOS]")
    own = tiktoken.Encoding("own", pat_str=PATTERN, mergeable_ranks=tiktoken_ranks(2000), special_tokens={})
    same_ids([load_tokenizer(str(tmp_path / "cured"))], own.encode_ordinary)


def test_what_cannot_be_written_as_tokenizer_json_is_refused(tmp_path: Path):
    folder = sentencepiece_folder(tmp_path / "model", legacy=False)
    with pytest.raises(
        DataError, match=r"`legacy: false` in tokenizer_config\.json .* give a folder with tokenizer\.json"
    ):
        load_tokenizer(str(folder))
    odd = trained_sentencepiece(tmp_path / "odd", "bpe", symbol=True, space_first=True)
    with pytest.raises(DataError, match=r"it has symbols of the user's own and puts a space before a text"):
        load_tokenizer(str(odd))
    (folder / "tekken.json").write_text("{}")
    with pytest.raises(DataError, match=r"2 tokenizers and no tokenizer\.json: tokenizer\.model, tekken\.json"):
        load_tokenizer(str(folder))


def test_a_class_that_builds_a_tokenizer_of_its_own_is_refused(tmp_path: Path):
    """LlamaTokenizer takes vocabulary and merges of a tokenizer.json, and cuts texts in its own way."""
    folder = model_folder(tmp_path / "model", tokenizer_class="LlamaTokenizer")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(DataError, match=r"loads it as LlamaTokenizer, which gives other ids .* and by the file \["):
        load_tokenizer(str(folder))
