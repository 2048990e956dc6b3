"""Write the quick start's model folder and data: learn to add two numbers below 100.

    python examples/quickstart/make_data.py FOLDER [--seed 0]

FOLDER then holds
    model/             config.json of a Qwen2 with 0.53 M parameters, a character-level tokenizer and
                       generation_config.json; no weights (the run draws them: model.init=random)
    sft_train.parquet  prompt "12+30=", response "42": each pair that is not held out, once
    sft_val.parquet    the held-out prompts of val.parquet, as prompt and response
    train.parquet      the pairs of sft_train.parquet in verl's RL schema (the prompt is a list of messages)
    val.parquet        NUM_VAL prompts drawn, with repeats, from the held-out pairs, in the same schema

A pair is held out when crc32 of its prompt is divisible by 10, so the split depends on nothing but the
prompt: no pair of val.parquet is in a training file, whatever the seed. Writing again gives the same files.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

LARGEST = 99
NUM_VAL = 400
VOCAB_SIZE = 128
END_TOKEN, PAD_TOKEN = "<|endoftext|>", "<|pad|>"

# Prompt and answer follow each other with nothing between; an answer ends with the end token. What
# data.chat_template=plain writes, as a template, so that chat interfaces can load the exported model too.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}" + END_TOKEN + "{% endif %}{% endfor %}"
)


def vocabulary() -> dict[str, int]:
    """VOCAB_SIZE tokens: end, pad, the printable ASCII characters, newline, and the rest in reserve.

    Characters stand in the byte map of GPT-2, where a space is written U+0120 and a newline U+010A; the other
    printable ASCII characters are themselves. A byte-level BPE without merges over them is a character
    tokenizer that every loader of Qwen2 reads: transformers picks the tokenizer class by the model's type,
    and under Qwen2's class a WordLevel tokenizer.json encodes every text to nothing.
    """
    characters = ["\u0120", *(chr(code) for code in range(ord("!"), ord("~") + 1)), "\u010a"]
    tokens = [END_TOKEN, PAD_TOKEN, *characters]
    tokens += [f"<|reserved_{number}|>" for number in range(VOCAB_SIZE - len(tokens))]
    return {token: number for number, token in enumerate(tokens)}


def tokenizer_files() -> dict[str, dict[str, Any]]:
    """File name -> content of the tokenizer's files."""
    vocab = vocabulary()
    # Reserved tokens are not special: should the model sample one, the decoded response shows it and is no
    # exact match.
    added = [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token in (END_TOKEN, PAD_TOKEN),
        }
        for token, number in vocab.items()
        if token.startswith("<|")
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": vocab,
        "merges": [],
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": END_TOKEN,
        "pad_token": PAD_TOKEN,
        "bos_token": None,
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 64,
        "chat_template": CHAT_TEMPLATE,
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}


def model_files() -> dict[str, dict[str, Any]]:
    """File name -> content of the model's files."""
    ids = {"eos_token_id": vocabulary()[END_TOKEN], "pad_token_id": vocabulary()[PAD_TOKEN]}
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        # 1 / sqrt(hidden): at 0.02 so narrow a model sits on a plateau for up to thousands of steps.
        "initializer_range": 0.08,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "vocab_size": VOCAB_SIZE,
        "torch_dtype": "float32",
        "bos_token_id": None,
        **ids,
    }
    return {"config.json": config, "generation_config.json": ids}


def is_held_out(prompt: str) -> bool:
    """Whether the prompt belongs to the validation set."""
    return zlib.crc32(prompt.encode()) % 10 == 0


def all_pairs() -> list[tuple[str, str]]:
    """(prompt, answer) of every a + b with a and b in 0..LARGEST."""
    numbers = range(LARGEST + 1)
    return [(f"{a}+{b}=", str(a + b)) for a in numbers for b in numbers]


def rl_rows(pairs: list[tuple[str, str]], split: str) -> list[dict[str, Any]]:
    """The pairs in verl's RL schema."""
    return [
        {
            "data_source": "add2",
            "prompt": [{"role": "user", "content": prompt}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": split, "index": index},
        }
        for index, (prompt, answer) in enumerate(pairs)
    ]


def sft_rows(pairs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """The pairs as prompt and response."""
    return [{"prompt": prompt, "response": answer} for prompt, answer in pairs]


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path` in one move: a reader sees the old file or the new one."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(part, path)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write `rows` to `path` in one move."""
    part = path.with_name(path.name + ".part")
    pq.write_table(pa.Table.from_pylist(rows), part)
    os.replace(part, path)


def make(folder: Path, seed: int) -> dict[str, int]:
    """Write everything under `folder`; return file name -> number of rows."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    for name, content in {**model_files(), **tokenizer_files()}.items():
        write_json(model / name, content)
    train = [pair for pair in all_pairs() if not is_held_out(pair[0])]
    held_out = [pair for pair in all_pairs() if is_held_out(pair[0])]
    val = random.Random(seed).choices(held_out, k=NUM_VAL)
    tables = {
        "sft_train.parquet": sft_rows(train),
        "sft_val.parquet": sft_rows(val),
        "train.parquet": rl_rows(train, "train"),
        "val.parquet": rl_rows(val, "val"),
    }
    for name, rows in tables.items():
        write_parquet(folder / name, rows)
    return {name: len(rows) for name, rows in tables.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the quick start's model folder and data.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="draws the validation prompts from the held-out pairs")
    arguments = parser.parse_args()
    counts = make(arguments.folder, arguments.seed)
    rows = ", ".join(f"{name} {count} rows" for name, count in counts.items())
    print(f"{arguments.folder}: model/, {rows}")


if __name__ == "__main__":
    main()
