from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.config.sections.model import ModelConfig
from megatron_rl.data.files import BadRow
from megatron_rl.data.render import Renderer
from megatron_rl.errors import DataError
from tests.helpers.data import CHATML, chat_folder, model_folder, quickstart

Messages = list[dict[str, str]]
USER: Messages = [{"role": "user", "content": "4+5="}]
CONVERSATION: Messages = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "4+5="},
    {"role": "assistant", "content": "9"},
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
]
# Qwen3's template does this to thinking: an assistant message is shorter once another turn follows it.
REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content[-1:] }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def plain() -> Renderer:
    return Renderer(str(quickstart() / "model"), "plain")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(str(chat_folder(tmp_path_factory.mktemp("chat") / "model")))


def trained(renderer: Renderer, ids: list[int], mask: list[bool]) -> str:
    """Text of the trained tokens, each run of them in brackets."""
    assert len(ids) == len(mask)
    text, on = "", False
    for token, flag in zip(ids, mask, strict=True):
        text += "[" * (flag and not on) + "]" * (on and not flag)
        text += renderer.decode([token], skip_special_tokens=False)
        on = flag
    return text + "]" * on


def test_strings_are_used_as_they_are_in_both_ways(plain: Renderer, chat: Renderer):
    for renderer in (plain, chat):
        assert renderer.prompt_text("4+5=") == "4+5="
        ids = renderer.prompt_ids("4+5=")
        assert len(ids) == 4 and renderer.decode(ids) == "4+5="


def test_plain_joins_contents_and_ends_assistant_messages(plain: Renderer):
    assert plain.prompt_text(USER) == "4+5="
    assert plain.prompt_text(CONVERSATION[:4]) == "Add.4+5=9<|endoftext|>1+1="


def test_the_chat_template_writes_the_head_of_the_answer(chat: Renderer):
    text = "<|im_start|>user\n4+5=<|im_end|>\n<|im_start|>assistant\n"
    assert chat.prompt_text(USER) == text
    assert chat.decode(chat.prompt_ids(USER), skip_special_tokens=False) == text


def test_template_kwargs_reach_the_template(tmp_path: Path):
    folder = chat_folder(tmp_path / "model", template="{{ start }}{% for m in messages %}{{ m.content }}{% endfor %}")
    renderer = Renderer(str(folder), template_kwargs={"start": "Think. "})
    assert renderer.prompt_text(USER) == "Think. 4+5="


def test_decode_leaves_special_tokens_out(plain: Renderer):
    ids = [*plain.encode("9"), *plain.eos_token_ids, plain.pad_token_id]
    assert plain.decode(ids) == "9"
    assert plain.decode(ids, skip_special_tokens=False) == "9<|endoftext|><|pad|>"


def test_sft_trains_on_the_response_and_its_end_alone(plain: Renderer, chat: Renderer):
    """N6"""
    assert trained(plain, *plain.sft_ids("4+5=", "9")) == "4+5=[9<|endoftext|>]"
    assert trained(plain, *plain.sft_ids(USER, "9")) == "4+5=[9<|endoftext|>]"
    assert trained(chat, *chat.sft_ids("4+5=", "9")) == "4+5=[9<|im_end|>]"
    head = "<|im_start|>user\n4+5=<|im_end|>\n<|im_start|>assistant\n"
    assert trained(chat, *chat.sft_ids(USER, "9")) == f"{head}[9<|im_end|>]\n"


def test_sft_ids_begin_with_the_ids_of_the_prompt(plain: Renderer, chat: Renderer):
    for renderer in (plain, chat):
        for prompt in ("4+5=", USER, CONVERSATION[:4]):
            ids = renderer.prompt_ids(prompt)
            assert renderer.sft_ids(prompt, "9")[0][: len(ids)] == ids


def test_sft_of_a_prompt_trains_on_the_last_answer_alone(chat: Renderer):
    text = trained(chat, *chat.sft_ids(CONVERSATION[:4], "2"))
    assert text.count("[") == 1 and text.endswith("[2<|im_end|>]\n")


def test_a_conversation_trains_on_every_answer(plain: Renderer, chat: Renderer):
    """N6"""
    assert trained(plain, *plain.conversation_ids(CONVERSATION)) == "Add.4+5=[9<|endoftext|>]1+1=[2<|endoftext|>]"
    text = trained(chat, *chat.conversation_ids(CONVERSATION))
    assert text.replace("[", "").replace("]", "") == "".join(
        f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in CONVERSATION
    )
    assert text.count("assistant\n[9<|im_end|>]\n") == 1 and text.count("assistant\n[2<|im_end|>]\n") == 1
    assert text.count("[") == 2


def test_what_follows_the_last_answer_is_kept_and_not_trained(chat: Renderer):
    text = trained(chat, *chat.conversation_ids([*CONVERSATION[:4]]))
    assert text.endswith("[9<|im_end|>]\n<|im_start|>user\n1+1=<|im_end|>\n")


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path):
    renderer = Renderer(str(chat_folder(tmp_path / "model", template=REWRITING)))
    conversation = [dict(message) for message in CONVERSATION]
    conversation[2]["content"] = "think: 9"
    with pytest.raises(BadRow, match="rewrites earlier turns") as error:
        renderer.conversation_ids(conversation)
    assert "'think: 9<|im_end|>" in str(error.value) and "data.chat_template=plain" in str(error.value)
    # One answer a row leaves nothing to rewrite.
    assert trained(renderer, *renderer.conversation_ids(conversation[:3])).endswith("[think: 9<|im_end|>]\n")


def test_characters_that_merge_across_the_seam_do_not_change_the_prompt(tmp_path: Path):
    newline = chr(0x10A)
    renderer = Renderer(str(chat_folder(tmp_path / "model", merges=(f"{newline} {newline}",))))
    prompt = renderer.prompt_ids(USER)
    merged = renderer.encode(renderer.prompt_text(USER) + "\n9")
    assert merged[: len(prompt)] != prompt
    ids, mask = renderer.sft_ids(USER, "\n9")
    assert ids[: len(prompt)] == prompt and mask[: len(prompt)] == [False] * len(prompt)
    assert trained(renderer, ids, mask).endswith("assistant\n[\n9<|im_end|>]\n")


def test_pad_equal_to_eos_changes_nothing(tmp_path: Path):
    """N6"""
    apart = Renderer(str(quickstart() / "model"), "plain")
    same = Renderer(str(model_folder(tmp_path / "model", pad_token="<|endoftext|>")), "plain")
    assert apart.pad_token_id != apart.eos_token_ids[0]
    assert same.pad_token_id == same.eos_token_ids[0] == apart.eos_token_ids[0]
    assert same.sft_ids("4+5=", "9") == apart.sft_ids("4+5=", "9")
    assert same.conversation_ids(CONVERSATION) == apart.conversation_ids(CONVERSATION)
    assert same.sft_ids("4+5=", "9")[1][-1] is True


def test_a_tokenizer_without_pad_token_pads_with_eos(tmp_path: Path):
    # Under Qwen2's class a pad token that is not named is the end token.
    renderer = Renderer(str(model_folder(tmp_path / "model", pad_token=None)), "plain")
    assert renderer.pad_token_id == renderer.eos_token_ids[0]


def test_generation_config_adds_end_tokens(tmp_path: Path):
    """N6"""
    folder = chat_folder(tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 99]}')
    end = Renderer(str(folder)).eos_token_ids[0]
    assert Renderer(str(folder)).eos_token_ids == tuple(dict.fromkeys((end, 0, 99)))
    # The model's folder counts where the tokenizer has a folder of its own.
    other = model_folder(tmp_path / "other")
    (other / "generation_config.json").unlink()
    assert Renderer(str(other)).eos_token_ids == (0,)
    assert Renderer(str(other), model_path=str(folder)).eos_token_ids == (0, 99)
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(DataError, match=r"generation_config\.json: not a JSON object"):
        Renderer(str(folder))


def test_a_template_without_end_token_trains_the_whole_answer_and_is_noticed(tmp_path: Path):
    template = CHATML.replace("<|im_end|>", "")
    renderer = Renderer(str(chat_folder(tmp_path / "model", template=template)))
    ids, mask = renderer.sft_ids(USER, "9")
    assert trained(renderer, ids, mask).endswith("assistant\n[9\n]")
    assert not renderer.ends_with_eos(ids, mask)


def test_end_of_a_sample_is_told(plain: Renderer):
    assert plain.ends_with_eos(*plain.sft_ids("4+5=", "9"))
    assert not plain.ends_with_eos(plain.encode("4+5=9"), [False] * 4 + [True])
    assert not plain.ends_with_eos(plain.encode("4+5=9"), [False] * 5)


def test_messages_without_a_chat_template_are_refused_with_the_cure(tmp_path: Path):
    folder = model_folder(tmp_path / "model", chat_template=None)
    with pytest.raises(DataError, match=r"has no chat template .* data\.chat_template=plain") as error:
        Renderer(str(folder)).prompt_ids(USER)
    assert not isinstance(error.value, BadRow)
    assert Renderer(str(folder), "plain").prompt_ids(USER) == Renderer(str(folder)).prompt_ids("4+5=")


def test_a_template_that_refuses_the_messages_makes_a_bad_row(tmp_path: Path):
    template = "{{ raise_exception('roles must alternate') }}"
    renderer = Renderer(str(chat_folder(tmp_path / "model", template=template)))
    with pytest.raises(BadRow, match="the chat template refuses the messages: roles must alternate"):
        renderer.prompt_ids(USER)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([], "expected a list of messages"),
        ([{"role": "user"}], "message 1 has content = None"),
        ([{"role": "user", "content": ["part"]}], "message 1 has content = ['part']"),
        ([*USER, "text"], "message 2 is 'text'"),
        ([{"content": "4+5="}], "message 1 has role = None"),
        ([*USER, {"role": "assistant", "content": "9"}], "ends with an assistant message"),
        ("", "the text is empty"),
        ("4\u00e9+5=", "the tokenizer does not give the text back"),
        ("\u4e2d", "the tokenizer does not give the text back"),
    ],
)
def test_prompts_that_cannot_be_rendered_are_bad_rows(plain: Renderer, prompt: str | Messages, reason: str):
    with pytest.raises(BadRow) as error:
        plain.prompt_ids(prompt)
    assert reason in str(error.value)


def test_conversations_that_cannot_be_masked_are_bad_rows(chat: Renderer):
    with pytest.raises(BadRow, match="no assistant message"):
        chat.conversation_ids(USER)
    with pytest.raises(BadRow, match="begins with an assistant message"):
        chat.conversation_ids([{"role": "assistant", "content": "Hi"}])


def word_level(folder: Path, words: list[str], *, with_config: bool) -> Path:
    """A word-level tokenizer, in a folder whose config.json (if any) says qwen2."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {token: number for number, token in enumerate(["<eos>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if with_config:
        shutil.copy(quickstart() / "model" / "config.json", folder)
    return folder


def test_a_tokenizer_of_the_wrong_class_is_refused(tmp_path: Path):
    words = ["one", "two", "three", "plus", "equals"]
    with pytest.raises(DataError) as error:
        Renderer(str(word_level(tmp_path / "wrong", words, with_config=True)), "plain")
    text = str(error.value)
    assert "tokenizer.json: transformers loads it as Qwen2Tokenizer, which gives other ids than the file" in text
    assert "becomes [], and by the file [1, 1, " in text and "model.tokenizer_path" in text
    # The cure that the error names.
    right = Renderer(str(word_level(tmp_path / "right", words, with_config=False)), "plain")
    assert right.decode(right.prompt_ids("one plus two equals")) == "one plus two equals"
    with pytest.raises(BadRow, match="does not give the text back"):
        right.prompt_ids("one plus four")


def test_a_vocabulary_without_spaces_round_trips(tmp_path: Path):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: number for number, token in enumerate(["<eos>", "<unk>", *"0123456789+="])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    folder = word_level(tmp_path / "model", ["x"], with_config=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    renderer = Renderer(str(folder), "plain")
    assert renderer.decode(renderer.prompt_ids("12+30=")) == "12+30="


def test_a_folder_without_a_usable_tokenizer_is_an_error(tmp_path: Path):
    with pytest.raises(DataError, match="there is no such folder"):
        Renderer(str(tmp_path / "none"))
    folder = model_folder(tmp_path / "model")
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": 3}')
    with pytest.raises(DataError, match="no tokenizer can be loaded"):
        Renderer(str(folder))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: has no tokenizer -- give a folder with one of tokenizer\.json, "):
        Renderer(str(tmp_path / "empty"))


def test_the_renderer_of_a_run_takes_its_settings_from_the_config(tmp_path: Path):
    model = ModelConfig(path=str(quickstart() / "model"))
    data = DataConfig(train_files=["x"], chat_template="plain")
    assert Renderer.from_config(model, data).prompt_text(USER) == "4+5="
    folder = chat_folder(tmp_path / "model")
    model = ModelConfig(path=str(quickstart() / "model"), tokenizer_path=str(folder))
    renderer = Renderer.from_config(model, DataConfig(train_files=["x"]))
    assert renderer.prompt_text(USER).startswith("<|im_start|>user")
    assert renderer.tokenizer_path == str(folder) and len(renderer.eos_token_ids) == 2
