"""Which entries of a config.json this package computes: of every family, and how a family differs. Torch-free.

An entry is read (sizes, RoPE, epsilon), says nothing about what the model computes (token ids, the writer's version),
or has the one value that this package computes. Every other entry is refused by name: transformers or the engine may
honour it, and the trainer would train another model. No list of bad entries could be complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from megatron_rl.errors import Fault
from megatron_rl.models.changes import ROPE_ENTRIES
from megatron_rl.models.layer_types import ByLayerType
from megatron_rl.models.rope import Rope, is_share, read_rope
from megatron_rl.models.windows import OddEntry, Windows, no_windows

Computed = Callable[[Any], bool]


@dataclass(frozen=True)
class ClampedGate:
    """The gated MLP of gpt-oss (OpenAI 2025): with the gate g at most `limit` and the up projection u within +-limit,
    g * sigmoid(gain g) * (u + 1). Rows of g and of u are side by side.
    """

    gain: float
    limit: float


@dataclass(frozen=True)
class Compute:
    """What the layers of a family compute, beside their sizes. Megatron's settings follow from it (mcore/build.py)."""

    norm: Literal["RMSNorm"] = "RMSNorm"
    zero_centered_norms: bool = False
    """Norms multiply by 1 + weight, and in float32"""
    output_norms: bool = False
    """The outputs of attention and MLP pass norms too, before they are added to the layer's input"""
    scaled_embeddings: bool = False
    """Embeddings are multiplied by the root of hidden_size, which is rounded to the model's precision"""
    activation: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    """Of the gated MLP; as config.json's hidden_act names it"""
    qkv_bias: bool = False
    """Attention adds a bias to queries, keys and values, in every model of the family"""
    qk_norm: bool = False
    """Each head's query and key passes an RMSNorm before RoPE, in every model of the family"""
    linear_bias: bool = False
    """Attention's output projection, routers and experts add biases"""
    sinks: bool = False
    """The softmax of each head's attention has one more logit, a parameter, that belongs to no key"""
    shared_gate: bool = False
    """The MLP that all tokens pass beside their experts is weighted by a sigmoid for each token"""
    clamped_gate: ClampedGate | None = None
    """What experts compute in place of activation(gate) * up"""


def _nothing(content: Mapping[str, Any]) -> dict[Any, Any]:
    """A family of which no more is read, or checked, than of every one."""
    return {}


@dataclass(frozen=True)
class Fields:
    """How a family's config.json is read."""

    model_type: str
    required: tuple[str, ...] = ()
    """Entries that transformers fills with numbers of its own where they are absent"""
    ffn_size: str = "intermediate_size"
    """Entry with the inner size of an MLP, or of one expert"""
    experts: bool = False
    """Layers have a mixture of experts"""
    norm_topk_prob: bool | None = None
    """Weights of a token's experts sum to 1; None: the entry norm_topk_prob says"""
    null_head_dim: bool = True
    """transformers reads head_dim null as if the entry were not there"""
    windows: Windows = no_windows
    """How the entries about sliding windows are read"""
    rope_theta: float = 10000.0
    """RoPE's base where the file gives none"""
    rms_norm_eps: float = 1e-6
    """RMSNorm's epsilon where the file gives none"""
    tied: bool = False
    """The output matrix is the embedding where the file does not say"""
    by_layer_type: ByLayerType | None = None
    """How RoPE is read if it differs between layers with a window and others; None: it does not"""
    ropes: tuple[type[Rope], ...] = (Rope,)
    """Kinds of RoPE that the family computes"""
    rotary_factor: float | None = None
    """Share of a head that RoPE turns where the file gives none; None: the whole head in any case"""
    values: Mapping[str, tuple[Computed, str]] = field(default_factory=dict[str, tuple[Computed, str]])
    """Further entries of this family: the values that it computes, and why others are refused"""
    needed: Mapping[str, tuple[Computed, str]] = field(default_factory=dict[str, tuple[Computed, str]])
    """As values, and the file must have them: transformers and the engine fill in different ones"""
    notes: frozenset[str] = frozenset()
    """Further entries of this family that say nothing about what the model computes"""
    odd: Callable[[Mapping[str, Any]], Iterable[tuple[str, str]]] = _nothing
    """Entries that do not fit each other, and why: of any file"""
    experts_entries: tuple[str, ...] = ("num_experts", "num_local_experts")
    """Entries that may hold the number of experts; the first one that is there does"""
    sizes: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _nothing
    """Entries of a file without faults -> further fields of ModelShape, or other values of them"""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_READ = _words(
    "architectures model_type num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim "
    "intermediate_size vocab_size max_position_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters "
    "tie_word_embeddings initializer_range use_sliding_window sliding_window max_window_layers layer_types"
)
"""Entries that config_json.py reads, of every family."""

# What a writer notes, tokens, outputs that are asked for, training of other programs, and defaults of generation, which
# a request to the engine always gives itself.
_INERT = _words(
    "transformers_version torch_dtype dtype _name_or_path name_or_path _commit_hash auto_map tokenizer_class "
    "id2label label2id num_labels problem_type finetuning_task task_specific_params classifier_dropout prefix "
    "bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id cls_token_id mask_token_id "
    "decoder_start_token_id use_cache is_decoder return_dict output_hidden_states output_attentions torchscript "
    "use_bfloat16 tf_legacy_loss use_return_dict attn_implementation _attn_implementation "
    "_attn_implementation_autoset _attn_implementation_internal _experts_implementation "
    "_experts_implementation_internal _flash_attn_2_enabled _from_model_config tie_last_hidden_states pretraining_tp "
    "max_sequence_length model_max_length tokenizer_model_max_length tokenizer_padding_side "
    "original_max_position_embeddings initializer_cutoff_factor is_llama_config unsloth_fixed unsloth_version "
    "transformers.js_config gradient_checkpointing "
    "assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens diversity_penalty "
    "do_sample early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff "
    "exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length "
    "max_new_tokens no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups "
    "num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty return_dict_in_generate "
    "suppress_tokens target_lookbehind temperature top_k top_p typical_p"
)
_INERT_OF_EXPERTS = _words(
    "num_experts num_local_experts num_experts_per_tok norm_topk_prob moe_intermediate_size router_aux_loss_coef "
    "output_router_logits"
)


def _off(value: object) -> bool:
    """Null, false, 0 or empty."""
    return not value


def is_count(value: object) -> bool:
    """A whole number above 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def one_of(*values: object) -> Computed:
    """One of the values, of the same type: 1 is not true."""

    def same(value: object) -> bool:
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)

    return same


_DROPOUT = "dropout is not supported: log-probabilities must be the same each time"
_SHARED_EXPERT = "an expert that all tokens share is not supported"
_SOME_PLAIN = "layers without experts among layers with experts are not supported"
_ROUTER = "only a router of a softmax over all experts is computed"
_SCALE = "a factor on activations or logits is not supported"

_VALUES: dict[str, tuple[Computed, str]] = {
    "attention_bias": (_off, "a bias in the attention projections is not supported"),
    "mlp_bias": (_off, "a bias in the MLP is not supported"),
    "bias": (_off, "a bias in the projections is not supported"),
    "is_causal": (one_of(True), "only causal attention is computed"),
    "partial_rotary_factor": (one_of(None, 1), "RoPE over a part of the head is not supported"),
    "rotary_pct": (one_of(None, 1), "RoPE over a part of the head is not supported"),
    "rope_interleaved": (_off, "RoPE over neighbours is not supported, only over halves of the head"),
    "rope_interleave": (_off, "RoPE over neighbours is not supported, only over halves of the head"),
    "use_mrope": (_off, "RoPE over several axes is not supported"),
    "quantization_config": (_off, "quantized weights cannot be trained; docs/convert.md says which are converted"),
    "logit_scale": (one_of(1), _SCALE),
    "logits_scaling": (one_of(1), _SCALE),
    "embedding_multiplier": (one_of(1), _SCALE),
    "residual_multiplier": (one_of(1), _SCALE),
    "scale_emb": (one_of(1), _SCALE),
    "attn_logit_softcapping": (_off, "a bound on logits is not supported"),
    "final_logit_softcapping": (_off, "a bound on logits is not supported"),
    "clip_qkv": (_off, "a bound on queries, keys and values is not supported"),
    "is_encoder_decoder": (_off, "only decoders are supported"),
    "tie_encoder_decoder": (_off, "only decoders are supported"),
    "add_cross_attention": (_off, "only decoders are supported"),
    "cross_attention_hidden_size": (_off, "only decoders are supported"),
    "pruned_heads": (_off, "pruned heads are not supported"),
    "chunk_size_feed_forward": (lambda value: value in (None, 0), "an MLP in chunks is not supported"),
    "per_layer_config": (_off, "layers that differ from each other are not supported"),
    "num_nextn_predict_layers": (_off, "layers that predict further tokens are not supported"),
    **dict.fromkeys(
        (
            *("attention_dropout", "hidden_dropout", "residual_dropout", "resid_dropout", "embedding_dropout"),
            *("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout"),
        ),
        (_off, _DROPOUT),
    ),
    **dict.fromkeys(
        ("shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts"), (_off, _SHARED_EXPERT)
    ),
    "mlp_only_layers": (_off, _SOME_PLAIN),
    "decoder_sparse_step": (one_of(None, 1), _SOME_PLAIN),
    "router_jitter_noise": (_off, "noise on the router's input is not supported: routes must be the same each time"),
    "scoring_func": (one_of("softmax"), _ROUTER),
    "routed_scaling_factor": (one_of(None, 1), _SCALE),
}
"""Entry -> (the values that this package computes, why others are refused); of every family."""


def _values_of(family: Fields, compute: Compute) -> dict[str, tuple[Computed, str]]:
    """_VALUES with what holds for one family alone."""
    bias, norm = compute.qkv_bias, compute.qk_norm
    values = _VALUES | {
        "hidden_act": (one_of(compute.activation), f"only the gated MLP with {compute.activation} is computed"),
        "qkv_bias": (one_of(bias), f"attention is computed {'with' if bias else 'without'} a bias here"),
        "qk_norm": (one_of(norm), f"heads are computed {'with' if norm else 'without'} norms here"),
        "use_qk_norm": (one_of(norm), f"heads are computed {'with' if norm else 'without'} norms here"),
    }
    if family.rotary_factor is not None:
        values["partial_rotary_factor"] = (is_share, "must be above 0 and at most 1")
    if not family.experts:
        reason = f"an MLP of experts is not part of {family.model_type}"
        values |= dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), (_off, reason))
    elif family.norm_topk_prob is not None:
        reason = "weights of a token's experts are scaled to sum to 1 here"
        values["norm_topk_prob"] = (one_of(family.norm_topk_prob), reason)
    return values | dict(family.values) | dict(family.needed)


def unsupported(name: str, family: Fields, compute: Compute, content: Mapping[str, Any], where: str) -> list[Fault]:
    """Faults of entries that ask for what is not computed, and of entries that are not known at all.

    name: the architecture; content: of config.json; where: that file, for messages.
    """
    values = _values_of(family, compute)
    inert = (
        _READ
        | _INERT
        | family.notes
        | (_INERT_OF_EXPERTS | frozenset(family.experts_entries) if family.experts else frozenset[str]())
    )
    cure = "use a model without it; removing the field from config.json would compute another model"
    faults: list[Fault] = []
    for entry, value in content.items():
        if entry in values:
            computed, reason = values[entry]
            if not computed(value):
                faults.append(Fault(f"{where}: {entry}", value, reason, cure))
        elif entry not in inert and value is not None:
            reason = f"is no field that is known of {name}: what it changes in the model would be left out"
            help_ = "if it is a note that changes nothing, remove it from config.json; if not, use another model"
            faults.append(Fault(f"{where}: {entry}", value, reason, help_))
    for entry, reason in family.odd(content):
        faults.append(Fault(f"{where}: {entry}", content.get(entry), reason, cure))
    for entry in family.needed:
        if entry not in content:
            reason = "is missing: transformers and the engine would fill in values of their own"
            faults.append(
                Fault(f"{where}: {entry}", None, reason, "copy the config.json that belongs to these weights")
            )
    faults += [
        Fault(f"{where}: {entry}", content.get(entry), reason, cure) for entry, reason in _odd_ropes(family, content)
    ]
    layers: object = content.get("num_hidden_layers")
    windows = family.windows(content, layers if isinstance(layers, int) else 0)
    if isinstance(windows, OddEntry):
        faults.append(Fault(f"{where}: {windows.entry}", content.get(windows.entry), windows.reason, cure))
    if "head_dim" in content and content["head_dim"] is None and not family.null_head_dim:
        help_ = "remove the entry: hidden_size / num_attention_heads is computed then"
        faults.append(Fault(f"{where}: head_dim", None, "transformers cannot read null here", help_))
    return [*faults, *_odd_switches(content, where)]


def _odd_ropes(family: Fields, content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Entries about RoPE that ask for what is not computed, and why."""
    if family.by_layer_type is None:
        of_types: tuple[Mapping[str, Any], ...] = (content,)
    else:
        read = family.by_layer_type(content)
        if isinstance(read, OddEntry):
            yield read.entry, read.reason
            return
        of_types = (read.full, read.sliding)
    for of_type in of_types:
        for entry, rope in rope_entries(of_type).items():
            reason = read_rope(family.ropes, rope, of_type, family.rotary_factor is not None)
            if isinstance(reason, str):
                yield entry if entry in content else next(iter(rope_entries(content))), reason


def rope_entries(content: Mapping[str, Any]) -> dict[str, object]:
    """The entries that describe RoPE: older files have the first, newer ones the second, the first stands before it.
    One of them is None where the file has none.
    """
    given = {name: content[name] for name in ROPE_ENTRIES if content.get(name) not in (None, {})}
    return given or {ROPE_ENTRIES[1]: None}


def rotary_factor(family: Fields, content: Mapping[str, Any]) -> float:
    """ModelShape.rotary_factor: of the entry that describes RoPE, of the top of the file, or the family's."""
    rope = next(iter(rope_entries(content).values()))
    shares: list[Any] = [cast("dict[str, Any]", rope).get("partial_rotary_factor")] if isinstance(rope, dict) else []
    shares += [content.get("partial_rotary_factor"), family.rotary_factor, 1.0]
    return float(next(share for share in shares if share is not None))


def _odd_switches(content: Mapping[str, Any], where: str) -> list[Fault]:
    """Values of another type: "false" would be read as true."""
    cure = "copy the config.json that belongs to these weights"
    faults = [
        Fault(f"{where}: {entry}", content[entry], "must be true or false", cure)
        for entry in ("tie_word_embeddings", "norm_topk_prob")
        if entry in content and not isinstance(content[entry], bool)
    ]
    layers: object = content.get("num_hidden_layers")
    kinds: Any = content.get("layer_types")
    if isinstance(kinds, list) and len(cast("list[Any]", kinds)) != layers:
        reason = f"has {len(cast('list[Any]', kinds))} entries, and num_hidden_layers is {layers}"
        faults.append(Fault(f"{where}: layer_types", cast("list[Any]", kinds), reason, cure))
    return faults
