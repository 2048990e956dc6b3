"""GGUF, the file of llama.cpp: weights that are dequantized, sizes, and a tokenizer (gguf_tokenizer.py).

llama.cpp computes RoPE over neighbours in a head for the architecture llama, so its converter has permuted the rows of
queries and keys there; they are put back. Where a file says something that is not known here it is refused by name:
llama.cpp would compute it, and what is written would be another model.
"""

# gguf leaves its types open.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_rl.convert.gguf_tokenizer import GgufVocabulary, read_vocabulary, write_tokenizer
from megatron_rl.convert.source import Conversion
from megatron_rl.errors import CheckpointError, MissingDependency
from megatron_rl.messages import first_of
from megatron_rl.models import FAMILIES
from megatron_rl.models.config_json import inspect_fields
from megatron_rl.models.layouts import Block
from megatron_rl.models.rules import hf_shapes
from megatron_rl.weights.companions import TOKENIZER_FILES, copy_companions

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

try:
    import gguf
except ImportError as error:
    raise MissingDependency("GGUF files need gguf -- pip install gguf") from error


@dataclass(frozen=True)
class _Architecture:
    """One of llama.cpp's architectures, and the family that it is."""

    family: str
    permuted: bool = False
    """Rows of queries and keys are in llama.cpp's order."""
    experts: bool = False


_ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", permuted=True),
    "qwen2": _Architecture("Qwen2ForCausalLM"),
    "qwen3": _Architecture("Qwen3ForCausalLM"),
    "qwen3moe": _Architecture("Qwen3MoeForCausalLM", experts=True),
}
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
}
_FLOATS = {"rope.freq_base": "rope_theta", "attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_KNOWN = {
    *(*_SIZES, *_FLOATS, "attention.head_count_kv", "feed_forward_length", "vocab_size", "rope.dimension_count"),
    *("attention.key_length", "attention.value_length", "rope.scaling.type"),
    *("expert_count", "expert_used_count", "expert_feed_forward_length"),
}
_ROPE_FREQS = "rope_freqs.weight"
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 8192}


def from_gguf(path: Path, tokenizer: Path | None = None) -> Conversion:
    """The model of a GGUF file. tokenizer: a folder whose tokenizer takes the place of the file's.

    Raises CheckpointError with every fault: no GGUF, an architecture, an entry, a tensor or a tokenizer that is not
    known, and tensors that are missing or of another shape.
    """
    reader = _opened(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = _ARCHITECTURES.get(name := str(fields.get("general.architecture")))
    if architecture is None:
        raise CheckpointError(
            f"{path}: the architecture {name!r} is not converted, only {', '.join(_ARCHITECTURES)} -- use a model in "
            "Hugging Face form"
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    faults: list[str] = []
    config = _config(name, architecture, fields, tensors, faults)
    vocabulary: GgufVocabulary | None = None
    if tokenizer is None:
        vocabulary = read_vocabulary(fields, faults)
        config |= vocabulary.ids if vocabulary is not None else {}
    shape, config_faults = inspect_fields(config, str(path))
    faults += [str(fault) for fault in config_faults]
    if shape is None:
        raise CheckpointError(f"{path}: " + "\n".join(faults))
    weights = GgufSource(path, tensors, architecture, config)
    shapes = hf_shapes(shape, FAMILIES[shape.architecture])
    try:
        weights.check(shapes)
    except CheckpointError as error:
        faults.append(str(error))
    if faults:
        raise CheckpointError(f"{path}: " + "\n".join(faults))

    def companions(out: Path) -> None:
        if tokenizer is not None:
            copy_companions(out, out, tokenizer, None)
        else:
            assert vocabulary is not None
            write_tokenizer(vocabulary, out)

    files = [path, *(tokenizer / file for file in TOKENIZER_FILES if tokenizer and (tokenizer / file).is_file())]
    kinds = sorted({tensor.tensor_type.name for tensor in tensors.values()})
    notes = (f"weights were stored as {', '.join(kinds)}; the output has the numbers that these stand for",)
    return Conversion(f"GGUF file {path}", weights, shape, shapes, config, companions, files, notes, torch.bfloat16)


def _opened(path: Path) -> GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"{path}: is no complete GGUF file ({error}); copy it again") from error


def _config(
    name: str,
    architecture: _Architecture,
    fields: Mapping[str, Any],
    tensors: Mapping[str, ReaderTensor],
    faults: list[str],
) -> dict[str, Any]:
    """The config.json; `faults` grows by what is missing or unknown."""
    own = {key.removeprefix(f"{name}."): value for key, value in fields.items() if key.startswith(f"{name}.")}
    family = FAMILIES[architecture.family]
    unknown = [key for key in own if key not in _KNOWN]
    if unknown:
        faults.append(f"{', '.join(f'{name}.{key}' for key in unknown)}: what this changes in the model is not known")
    needed = [key for key in (*_SIZES, *_FLOATS, "feed_forward_length") if key not in own]
    faults += [f"{name}.{key} is missing" for key in needed]
    config: dict[str, Any] = {"architectures": [architecture.family], "model_type": family.fields.model_type}
    config |= {entry: int(own[key]) for key, entry in _SIZES.items() if key in own}
    config |= {entry: _short(own[key]) for key, entry in _FLOATS.items() if key in own}
    heads = config.get("num_attention_heads", 1)
    config["num_key_value_heads"] = int(own.get("attention.head_count_kv", heads))
    if "embedding_length" in own:
        config["head_dim"] = int(own.get("attention.key_length", own["embedding_length"] // heads))
    config["intermediate_size"] = int(own.get("feed_forward_length", 0))
    if architecture.experts:
        config |= {
            "moe_intermediate_size": int(own.get("expert_feed_forward_length", 0)),
            "num_experts": int(own.get("expert_count", 0)),
            "num_experts_per_tok": int(own.get("expert_used_count", 0)),
            "norm_topk_prob": True,
        }
    elif own.get("expert_count", 0):
        faults.append(f"{name}.expert_count: experts are not converted in the architecture {name}")
    embedding = tensors.get("token_embd.weight")
    config["vocab_size"] = int(embedding.shape[1]) if embedding is not None else 0
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config |= {"hidden_act": "silu", "initializer_range": 0.02}
    config |= _rope(own, config, tensors, faults)
    return config


def _short(value: float) -> float:
    """The shortest number that has the value in float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope(
    own: Mapping[str, Any], config: Mapping[str, Any], tensors: Mapping[str, ReaderTensor], faults: list[str]
) -> dict[str, Any]:
    kind, head_dim = own.get("rope.scaling.type", "none"), config.get("head_dim", 0)
    if kind != "none":
        faults.append(f"rope.scaling.type {kind!r}: only plain RoPE and Llama 3's frequencies are converted")
    if own.get("rope.dimension_count", head_dim) != head_dim:
        faults.append(f"rope.dimension_count {own['rope.dimension_count']}: RoPE over a part of the head")
    if own.get("attention.value_length", head_dim) != head_dim:
        faults.append(f"attention.value_length {own['attention.value_length']}: is not the key's {head_dim}")
    if _ROPE_FREQS not in tensors:
        return {}
    stored = torch.from_numpy(np.array(tensors[_ROPE_FREQS].data, dtype=np.float64))
    for factor in (8.0, 32.0):
        scaling = {**_LLAMA3, "factor": factor}
        wanted = llama3_divisors(config["rope_theta"], head_dim, scaling)
        if stored.shape == wanted.shape and torch.allclose(stored, wanted, rtol=1e-4):
            return {"rope_scaling": scaling}
    faults.append(f"{_ROPE_FREQS}: are not the frequencies of Llama 3.1, 3.2 or 3.3, and no others are known")
    return {}


def llama3_divisors(theta: float, head_dim: int, scaling: Mapping[str, Any]) -> torch.Tensor:
    """[head_dim / 2] float64: what Llama 3's scaling divides each of RoPE's frequencies by."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    divisors: list[float] = []
    for pair in range(head_dim // 2):
        turns = context / (2 * math.pi * theta ** (2 * pair / head_dim))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return torch.tensor(divisors, dtype=torch.float64)


class GgufSource:
    """The weights of a GGUF file in Hugging Face's names and order, dequantized."""

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, ReaderTensor],
        architecture: _Architecture,
        config: Mapping[str, Any],
    ) -> None:
        self._path, self._tensors = path, tensors
        name = next(name for name, one in _ARCHITECTURES.items() if one is architecture)
        arch = next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == name)
        self._names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
        self._heads: dict[str, int] = {}
        if architecture.permuted:
            self._heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

    def _place(self, name: str) -> tuple[str, int | None]:
        """(GGUF's tensor, the expert's number in it)."""
        expert: int | None = None
        head, _, tail = name.partition(".mlp.experts.")
        if tail:
            number, _, tail = tail.partition(".")
            expert, name = int(number), f"{head}.mlp.experts.{tail}"
        found = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        return found or name, expert

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """See WeightSource."""
        used = {_ROPE_FREQS}
        faults: list[str] = []
        for name, shape in expected.items():
            stored, expert = self._place(name)
            used.add(stored)
            if stored not in self._tensors:
                faults.append(f"missing {stored} ({name})")
                continue
            sizes = tuple(int(size) for size in reversed(self._tensors[stored].shape))
            if (sizes if expert is None else sizes[1:]) != shape:
                faults.append(f"{stored} is {list(sizes)}, {name} has the shape {list(shape)}")
        faults += [f"surplus {name}" for name in sorted(self._tensors) if name not in used]
        if faults:
            raise CheckpointError(f"weights do not fit the sizes: {first_of(faults, 20, '; ')}")

    def dtype(self, name: str) -> torch.dtype:
        """See ModelSource: dequantized numbers are float32."""
        return torch.float32

    def read(self, block: Block) -> torch.Tensor:
        """See WeightSource."""
        stored, expert = self._place(block.hf_name)
        tensor = self._tensors[stored]
        data = tensor.data if expert is None else tensor.data[expert]
        rows = np.arange(*block.rows)
        heads = self._heads.get(block.hf_name.split(".")[-2])
        if heads is not None:
            rows = halves_from_neighbours(len(data), heads)[block.rows[0] : block.rows[1]]
        values = torch.from_numpy(gguf.quants.dequantize(np.ascontiguousarray(data[rows]), tensor.tensor_type))
        return values if block.cols is None else values[:, slice(*block.cols)]

    def place(self, name: str) -> str:
        """See WeightSource."""
        return str(self._path)


def halves_from_neighbours(rows: int, heads: int) -> np.ndarray:
    """[rows]: for each row of a projection in Hugging Face's order, its number in llama.cpp's.

    Hugging Face's RoPE turns row i of a head with row i + head_dim / 2; llama.cpp's turns rows 2 i and 2 i + 1.
    Example: 4 rows, 1 head -> [0, 2, 1, 3]
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)
