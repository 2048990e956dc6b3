"""transformers as a rollout engine: slow, plain, and the yardstick for the fast one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.errors import RolloutError
from megatron_rl.models import FAMILIES
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.models.rules import Family, constants
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.stacks import member_of
from megatron_rl.observe.beat import beat
from megatron_rl.rollout.engine import EnginePart, EngineSettings, Request, Sampling, check_requests, compact_experts
from megatron_rl.types import Samples
from megatron_rl.weights.dtypes import DTYPES
from megatron_rl.weights.stacks import member_views

_Row = tuple[list[int], list[float], bool, "npt.NDArray[np.integer[Any]] | None"]
"""Ids and log-probabilities of a sample, whether it ended by itself, and its tokens' experts."""


def checkpoint_views(tensors: Mapping[str, torch.Tensor], shape: ModelShape, family: Family) -> dict[str, torch.Tensor]:
    """A model's tensors, or gradients, by the names that its checkpoints have; views, not copies.

    Names differ where a rule of the family has a `live` one: transformers holds the experts of a layer as one tensor
    [experts, rows, cols], their projections end to end, or as files have it (models/stacks.py).
    """
    views = dict(tensors)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        for rule in family.layer(shape, layer):
            if not rule.live:
                continue
            tensor = views.pop(prefix + rule.live)
            if rule.expert and member_of(prefix + rule.of_expert(0).hf[0]) is not None:
                views |= member_views(prefix + rule.live, tensor)
                continue
            rules = [rule.of_expert(number) for number in range(shape.num_experts)] if rule.expert else [rule]
            for one, values in zip(rules, tensor if rule.expert else [tensor], strict=True):
                parts = values.chunk(len(one.hf))
                views.update({prefix + name: part for name, part in zip(one.hf, parts, strict=True)})
    return views


class _Routers:
    """Notes which experts each token went to."""

    def __init__(self, model: torch.nn.Module, layers: int, path: str) -> None:
        """RolloutError if the model has no routers that say so. path: of the model, for messages."""
        routers = {name: one for name, one in model.named_modules() if name.endswith(("mlp.gate", "mlp.router"))}
        self._layers = layers
        self._seen: dict[int, list[torch.Tensor]] = {}
        self._path = path
        if not routers:
            raise RolloutError(f"actor.router_replay: transformers' model of {path} has no routers")
        for name, router in routers.items():
            router.register_forward_hook(partial(self._note, int(name.split(".")[-3])))

    def _note(self, layer: int, module: torch.nn.Module, inputs: object, output: object) -> None:
        chosen = output[-1] if isinstance(output, tuple) else None
        if not isinstance(chosen, torch.Tensor) or chosen.dtype != torch.int64:
            raise RolloutError(
                f"actor.router_replay: transformers' routers of {self._path} do not say what they choose"
            )
        self._seen.setdefault(layer, []).append(chosen)

    def take(self, rows: int) -> npt.NDArray[np.integer[Any]]:
        """[rows, tokens, layers, k] of all that was computed since the last call; -1 in layers without a router."""
        steps = {
            layer: torch.cat([one.view(rows, -1, one.shape[-1]) for one in several], 1).cpu().numpy()
            for layer, several in self._seen.items()
        }
        self._seen.clear()
        tokens, topk = next(iter(steps.values())).shape[1:]
        whole = np.full((rows, tokens, self._layers, topk), -1, np.int32)
        for layer, chosen in steps.items():
            whole[:, :, layer] = chosen
        return whole


class HfEngine:
    """A causal LM of transformers with a KV cache, sampled token by token."""

    def __init__(self, settings: EngineSettings) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self._settings = settings
        self._version = -1
        self._shape = read_model_shape(settings.model_path)
        config = AutoConfig.from_pretrained(settings.model_path)
        dtype = DTYPES[settings.dtype]
        # transformers' other kinds of attention leave sinks out.
        attention = "eager" if FAMILIES[self._shape.architecture].compute.sinks else "sdpa"
        self._model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()
        self._model.to(settings.device)
        self._routers = (
            _Routers(self._model, self._shape.num_layers, settings.model_path) if settings.returns_experts else None
        )
        self._tokenizer = load_tokenizer(settings.tokenizer_path) if settings.needs_text else None

    @property
    def weight_version(self) -> int:
        return self._version

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Samples:
        """See RolloutEngine. Prompts of one length at a time, so that no padding enters the model."""
        check_requests(requests, sampling, self._settings, self._version)
        by_length: dict[int, list[int]] = {}
        for i, request in enumerate(requests):
            by_length.setdefault(len(request.token_ids), []).append(i)
        rows: dict[int, list[_Row]] = {}
        for members in by_length.values():
            made = self._generate([requests[i] for i in members], sampling)
            for k, i in enumerate(members):
                rows[i] = made[k * sampling.n : (k + 1) * sampling.n]
        ordered = [row for i in range(len(requests)) for row in rows[i]]
        ids, logprobs, stopped, routed = [list(column) for column in zip(*ordered, strict=True)] or ([], [], [], [])
        finish = ["stop" if one else "length" for one in stopped]
        experts = compact_experts(routed) if self._routers is not None else None
        return Samples.from_lists(ids, logprobs, finish, self._version, experts)

    def _generate(self, requests: Sequence[Request], sampling: Sampling) -> list[_Row]:
        device = self._model.device
        ids = torch.tensor([r.token_ids for r in requests for _ in range(sampling.n)], device=device)
        seeds = [None if r.seed is None else r.seed + i for r in requests for i in range(sampling.n)]
        generators = [None if seed is None else torch.Generator(device).manual_seed(seed) for seed in seeds]
        stops = torch.tensor(sampling.stop_token_ids, device=device)
        done = torch.zeros(len(seeds), dtype=torch.bool, device=device)
        tokens, logprobs, live = [], [], []
        cache = None
        for number in range(sampling.max_tokens):
            beat(f"token {number + 1} of {len(seeds)} samples")
            out = self._model(ids, past_key_values=cache, use_cache=True)
            ids, cache = self._pick(out.logits[:, -1].float(), sampling, generators), out.past_key_values
            scaled = out.logits[:, -1].float() / (sampling.temperature or 1.0)
            tokens.append(ids.squeeze(1))
            logprobs.append(torch.log_softmax(scaled, -1).gather(1, ids).squeeze(1))
            live.append(~done)
            done = done | torch.isin(ids.squeeze(1), stops)
            if sampling.stop:
                done = done | self._has_stop_text(tokens, sampling.stop)
            if bool(done.all()):
                break
        columns = zip(*(torch.stack(x, 1).tolist() for x in (tokens, logprobs, live)), done.tolist(), strict=True)
        experts = None if self._routers is None else self._routers.take(len(seeds))
        # A sample's last token is not computed.
        known = len(requests[0].token_ids) - 1
        return [
            (
                row[: sum(alive)],
                probs[: sum(alive)],
                stopped,
                None if experts is None else experts[i, : known + sum(alive)],
            )
            for i, (row, probs, alive, stopped) in enumerate(columns)
        ]

    def _has_stop_text(self, tokens: Sequence[torch.Tensor], stop: Sequence[str]) -> torch.Tensor:
        """[b] bool: whether the text of a row's tokens, given as [b] a step, has a stop text in it."""
        assert self._tokenizer is not None, "settings.needs_text is not set"
        texts = [
            self._tokenizer.decode(row, skip_special_tokens=False) for row in torch.stack(list(tokens), 1).tolist()
        ]
        return torch.tensor([any(one in text for one in stop) for text in texts], device=self._model.device)

    @staticmethod
    def _pick(logits: torch.Tensor, sampling: Sampling, generators: Sequence[torch.Generator | None]) -> torch.Tensor:
        """[b, v] logits -> [b, 1] sampled ids."""
        if sampling.temperature == 0:
            return logits.argmax(-1, keepdim=True)
        logits = logits / sampling.temperature
        if sampling.top_k > 0:
            floor = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < floor, float("-inf"))
        if sampling.top_p < 1.0:
            ordered, order = logits.softmax(-1).sort(descending=True)
            beyond = ordered.cumsum(-1) - ordered > sampling.top_p
            logits = logits.masked_fill(torch.zeros_like(beyond).scatter(1, order, beyond), float("-inf"))
        probs = logits.softmax(-1)
        return torch.stack([torch.multinomial(p, 1, generator=g) for p, g in zip(probs, generators, strict=True)])

    @property
    def part(self) -> EnginePart | None:
        return None

    @property
    def shared(self) -> frozenset[str]:
        return frozenset()

    def parameters(self) -> dict[str, torch.Tensor]:
        """By the names that checkpoints have."""
        params = {name: param.data for name, param in self._model.named_parameters()}
        return checkpoint_views(params, self._shape, FAMILIES[self._shape.architecture])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See RolloutEngine."""
        return {name: tuple(tensor.shape) for name, tensor in self.parameters().items()}

    def _constants(self) -> dict[str, torch.Tensor]:
        """What no update changes: buffers, in float32 whatever the model's precision is."""
        buffers = dict(self._model.named_buffers())
        names = constants(self._shape, FAMILIES[self._shape.architecture])
        for name in names:
            buffers[name].data = buffers[name].data.float()
        return {name: buffers[name] for name in names}

    def hold(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """See RolloutEngine."""
        for name, buffer in self._constants().items():
            buffer.copy_(tensors[name])

    def begin_update(self) -> None:
        """Nothing to do: parameters are always plain."""

    def end_update(self, version: int) -> None:
        """See RolloutEngine."""
        self._version = version

    @torch.no_grad()
    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See RolloutEngine. RolloutError naming each tensor that the model lacks or did not get."""
        held = self.parameters() | self._constants()
        left = set(held)
        for name, tensor in tensors:
            if name not in held:
                raise RolloutError(f"update_weights: the model of {self._settings.model_path} has no {name}")
            held[name].copy_(tensor)
            left.remove(name)
        if left:
            raise RolloutError(f"update_weights: no value for {', '.join(sorted(left))}")
        self._version = version

    def reset_prefix_cache(self) -> None:
        """Nothing to do: no cache outlives a call."""

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None:
        del self._model
