"""vLLM inside the worker's process (no engine process, no copies between processes).

An engine of several ranks is several of these, one a rank, given the same calls: each schedules alike, and their
collectives meet (vLLM's external launcher).
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_rl.data.tokenizer import prepared_folder
from megatron_rl.engines.vllm import ENGINE, adapter_arguments, why_refused
from megatron_rl.errors import MissingDependency, RolloutError
from megatron_rl.models import FAMILIES
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.models.engine import engine_params, live_params
from megatron_rl.models.layouts import Block
from megatron_rl.models.rules import LocalParam, constants, hf_shapes
from megatron_rl.models.shape import ModelShape
from megatron_rl.observe.beat import beat
from megatron_rl.reshard.views import flat_rows
from megatron_rl.rollout.engine import (
    EnginePart,
    EngineSettings,
    Request,
    Sampling,
    check_requests,
    compact_experts,
    whole_update,
)
from megatron_rl.types import FINISH_REASONS, Samples

_CPU_KV_CACHE_GB = 0.25
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def _kept_rng() -> Iterator[None]:
    """vLLM draws from and seeds python's, numpy's and torch's global generators; the trainer's streams go on."""
    import numpy as np

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


def _import_vllm() -> Any:
    # The variables are read at import; an engine process of its own could not take tensors from this one.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm
    except ImportError as error:
        raise MissingDependency(
            f"rollout.name=vllm: vLLM cannot be imported ({error}); run `bash launch/install.sh` (CPU) or "
            "`pip install -e .[gpu]`"
        ) from error
    return vllm


def _keep_plain_weights() -> None:
    """Stop vLLM's CPU build from repacking linear layers.

    A repacked layer no longer holds its weight, and an output layer tied to the embedding keeps its first packing
    through every reload: the engine would go on sampling from stale logits.
    """
    import vllm._custom_ops as custom_ops

    assert hasattr(custom_ops, "_supports_onednn"), "this vLLM build repacks weights in a way that is not known here"
    custom_ops._supports_onednn = False


def _pack_experts_again() -> None:
    """Make vLLM's CPU build pack experts for its kernel on each load.

    It packs and pads them on the first load alone: after a reload the kernel would take unpacked weights as packed.
    """
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method

    method: Any = unquantized_fused_moe_method.UnquantizedFusedMoEMethod
    assert hasattr(method, "_setup_kernel"), "this vLLM build packs experts in a way that is not known here"
    setup = method._setup_kernel
    if getattr(setup, "packs_again", False):
        return

    def setup_afresh(self: Any, *args: Any, **kwargs: Any) -> None:
        self.moe_kernel = None
        setup(self, *args, **kwargs)

    setup_afresh.packs_again = True  # type: ignore[attr-defined]
    method._setup_kernel = setup_afresh


class VllmEngine:
    """One rank of a vLLM engine. Weights start as noise, or as the trainer's where they are shared: an update
    must come first.
    """

    def __init__(self, settings: EngineSettings, shared: Mapping[str, torch.Tensor]) -> None:
        """shared: see make_engine. RolloutError where ranks or keywords do not fit; ReshardError naming parameters that
        cannot be shared.
        """
        self._settings = settings
        self._version = -1
        self._asleep = False
        self._calls = 0
        self._adapter: Any = None
        self._holds_weights = False
        self._told_why = False
        vllm = _import_vllm()
        self._sampling_params = vllm.SamplingParams
        self._on_cpu = settings.device == "cpu"
        if self._on_cpu:
            _keep_plain_weights()
            _pack_experts_again()
        self._can_sleep = settings.free_cache_engine and not self._on_cpu
        self._refuse_on_cpu()
        for keyword in settings.engine_kwargs:
            refused = why_refused(keyword)
            if refused:
                raise RolloutError(f"rollout.engine_kwargs.{keyword}: {' -- '.join(refused)}")
        # vLLM's modules are imported after the environment is set.
        from megatron_rl.rollout import vllm_loader, vllm_memory, vllm_seeds

        vllm_seeds.draw_only_what_is_kept()
        if self._can_sleep:
            vllm_memory.guard_frees()
        # vLLM lowers the number of threads and turns torch.set_num_threads into a no-op.
        threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
        amplitude = read_model_shape(settings.model_path).rope.amplitude
        with (
            _kept_rng(),
            vllm_loader.loading(shared, amplitude) as self._loaded,
            self._groups() as ranks,
            self._runner_choice(),
        ):
            arguments = self._arguments(ranks) | {"load_format": vllm_loader.LOAD_FORMAT}
            self._llm = vllm.LLM(**(arguments | settings.engine_kwargs))
        set_num_threads(threads)
        self._beat_each_step()
        self._no_batches = self._why_no_batches()
        self._part = self._find_part()
        self._shared = frozenset(self._loaded.shared)
        if self._on_cpu:
            # Packed experts cannot be read back; on CPU there is memory for both forms.
            self._loaded.make_plain()

    def _refuse_on_cpu(self) -> None:
        wanted = {"rollout.ep": self._settings.deals_experts, "actor.router_replay": self._settings.returns_experts}
        for key, reason in ENGINE.cpu_lacks.items():
            if self._on_cpu and wanted[key]:
                raise RolloutError(f"{key}: {reason} -- leave it out on CPUs")

    def _runner_choice(self) -> contextlib.AbstractContextManager[None]:
        """Batches are decoded by vLLM's first model runner; what goes to its scheduler anyway gets its own choice."""
        from megatron_rl.rollout.vllm_runner import first_runner

        return contextlib.nullcontext() if self._settings_against_batches() else first_runner()

    def _settings_against_batches(self) -> str | None:
        """Why this engine's settings leave all requests to vLLM's scheduler, before it is built."""
        settings = self._settings
        reasons = {
            "rollout.decode=scheduler": settings.decode == "scheduler",
            "the engine holds an adapter": settings.adapters is not None,
            "it returns the experts that tokens went to": settings.returns_experts,
        }
        return next((reason for reason, applies in reasons.items() if applies), None)

    def _why_no_batches(self) -> str | None:
        """Why this engine leaves all requests to vLLM's scheduler; None, and a decoder, if it does not."""
        from megatron_rl.rollout import vllm_batch, vllm_runner

        reason = self._settings_against_batches() or vllm_runner.why_not(vllm_runner.runner_of(self._llm))
        if reason is None:
            self._decoder = vllm_batch.BatchDecoder(self._llm)
        return reason

    def _why_scheduled(self, sampling: Sampling) -> str | None:
        """Why vLLM's scheduler runs this call; None if it is decoded as a batch. Raises RolloutError where the key asks
        for a batch and there is a reason.
        """
        reason = self._no_batches
        if reason is None and sampling.stop:
            reason = f"stop texts {list(sampling.stop)} are looked for in text"
        if reason is None and (sampling.top_p < 1 or sampling.top_k > 0):
            reason = f"top_p {sampling.top_p} and top_k {sampling.top_k} restrict the tokens"
        if reason is not None and self._settings.decode == "batch":
            raise RolloutError(f"rollout.decode=batch: {reason} -- set rollout.decode=auto: vLLM's scheduler can")
        if not self._told_why:
            self._told_why = True
            _log.info("generation: %s", "decoded as a batch" if reason is None else f"vLLM's scheduler, since {reason}")
        return reason

    def _beat_each_step(self) -> None:
        """A long generation is no hang: each step of vLLM's engine says that it goes on."""
        engine = self._llm.llm_engine
        step = engine.step

        def step_and_beat() -> Any:
            beat("a step of the engine")
            return step()

        engine.step = step_and_beat

    @contextlib.contextmanager
    def _groups(self) -> Iterator[tuple[int, ...]]:
        """The engine's ranks, with their groups while it starts; empty where there is no process group at all."""
        self._in_groups = torch.distributed.is_initialized()
        if not self._in_groups:
            yield ()
            return
        from megatron_rl.rollout import vllm_groups

        ranks = self._settings.ranks or (torch.distributed.get_rank(),)
        with vllm_groups.engine_groups(ranks, vllm_groups.device_index()):
            yield ranks

    def _arguments(self, ranks: tuple[int, ...]) -> dict[str, Any]:
        """Keywords of vllm.LLM."""
        settings, on_cpu = self._settings, self._on_cpu
        arguments: dict[str, Any] = {
            "model": settings.model_path,
            "tokenizer": prepared_folder(settings.tokenizer_path) if settings.needs_text else settings.tokenizer_path,
            "skip_tokenizer_init": not settings.needs_text,
            "dtype": settings.dtype,
            "max_model_len": settings.max_model_len,
            "max_num_seqs": settings.max_num_seqs,
            "gpu_memory_utilization": 0.05 if on_cpu else settings.gpu_memory_utilization,
            "enforce_eager": settings.enforce_eager or on_cpu,
            # processed: of softmax(logits / temperature), which is what the trainer computes
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": self._can_sleep,
            "seed": settings.seed,
            "disable_log_stats": True,
        }
        if settings.adapters is not None:
            arguments |= adapter_arguments(settings.adapters.rank)
        if settings.deals_experts:
            arguments["enable_expert_parallel"] = True
        if settings.returns_experts:
            arguments["enable_return_routed_experts"] = True
        if ranks:
            arguments["tensor_parallel_size"] = len(ranks)
            arguments["distributed_executor_backend"] = "external_launcher"
        kv_cache_gb = settings.kv_cache_gb or (_CPU_KV_CACHE_GB if on_cpu else None)
        if kv_cache_gb is not None:
            arguments["kv_cache_memory_bytes"] = int(kv_cache_gb * (1 << 30))
        if settings.max_num_batched_tokens is not None:
            arguments["max_num_batched_tokens"] = settings.max_num_batched_tokens
        return arguments

    def _find_part(self) -> EnginePart:
        from vllm.distributed import parallel_state

        tp = parallel_state.get_tp_group()
        if not self._llm.llm_engine.vllm_config.parallel_config.enable_expert_parallel:
            return EnginePart(tp.world_size, tp.rank_in_group)
        ep = parallel_state.get_ep_group()
        return EnginePart(tp.world_size, tp.rank_in_group, ep.world_size, ep.rank_in_group)

    @property
    def part(self) -> EnginePart | None:
        return self._part

    @property
    def shared(self) -> frozenset[str]:
        return self._shared

    @property
    def weight_version(self) -> int:
        return self._version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Samples:
        """See RolloutEngine."""
        check_requests(requests, sampling, self._settings, self._version)
        if self._asleep:
            raise RolloutError("generate on a sleeping engine; call wake() after update_weights()")
        if requests and self._why_scheduled(sampling) is None:
            return self._decode_batch(requests, sampling)
        prompts = [{"prompt_token_ids": list(request.token_ids)} for request in requests]
        params = [self._params(sampling, request.seed) for request in requests]
        with self._stream():
            outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=self._adapter)
        completions = [completion for output in outputs for completion in output.outputs]
        return self._samples(completions)

    def _decode_batch(self, requests: Sequence[Request], sampling: Sampling) -> Samples:
        """See generate; without vLLM's scheduler."""
        from megatron_rl.rollout.vllm_batch import DecodeCall

        self._calls += 1
        seeds = [self._seed(f"request {i}") if one.seed is None else one.seed for i, one in enumerate(requests)]
        batch = DecodeCall(
            [request.token_ids for request in requests],
            sampling.n,
            [seed + i for seed in seeds for i in range(sampling.n)],
            sampling.temperature,
            sampling.max_tokens,
            sampling.stop_token_ids,
        )
        # Its blocks are written over.
        self.reset_prefix_cache()
        return self._decoder.generate(batch, self._version)

    @contextlib.contextmanager
    def _stream(self) -> Iterator[None]:
        """The engine's own random numbers: alike on its ranks, which sample apart, and the same in a run that is
        resumed. vLLM draws some for samples with seeds too. The trainer's are left alone.
        """
        self._calls += 1
        with _kept_rng():
            torch.manual_seed(self._seed())
            yield

    def _seed(self, what: str = "") -> int:
        """Of this call, and of a part of it."""
        key = f"{self._settings.seed} {self._version} {self._calls} {what}".strip().encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")

    def _params(self, sampling: Sampling, seed: int | None) -> Any:
        return self._sampling_params(
            n=sampling.n,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            stop=list(sampling.stop) or None,
            stop_token_ids=list(sampling.stop_token_ids),
            # All ids that end a response are among those; vLLM would add what its own tokenizer names.
            ignore_eos=True,
            # Stop texts are looked for in the text that a reader of the tokens would see.
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            seed=None if sampling.temperature == 0 else seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=self._settings.needs_text,
        )

    def _samples(self, completions: Sequence[Any]) -> Samples:
        for completion in completions:
            if completion.finish_reason not in FINISH_REASONS:
                raise RolloutError(f"vLLM ended a request with {completion.finish_reason!r}; expected stop or length")
        # One entry a token: logprobs=0 asks for the sampled one alone.
        return Samples.from_lists(
            [completion.token_ids for completion in completions],
            [completion.logprobs.logprobs for completion in completions],
            [completion.finish_reason for completion in completions],
            self._version,
            self._routed(completions),
        )

    def _routed(self, completions: Sequence[Any]) -> list[Any] | None:
        """[tokens computed, layers, k] of each, prompt first; the last token is sampled and not computed."""
        if not self._settings.returns_experts:
            return None
        if any(completion.routed_experts is None for completion in completions):
            raise RolloutError("actor.router_replay: this vLLM did not return the experts that tokens went to")
        return compact_experts([completion.routed_experts for completion in completions])

    def parameters(self) -> dict[str, torch.Tensor]:
        """See RolloutEngine. Parameters that back ends rearrange for their kernels stand here plain."""
        return self._loaded.untouched() | self._loaded.plain

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See RolloutEngine."""
        found = {name: tuple(tensor.shape) for name, tensor in self._loaded.untouched().items()}
        return found | self._loaded.plain_shapes()

    def hold(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """See RolloutEngine."""
        self._loaded.hold(tensors)

    def begin_update(self) -> None:
        """See RolloutEngine."""
        if self._asleep:
            self._llm.wake_up(tags=["weights"])
        self._loaded.make_plain()
        self._loaded.write_constants()

    def end_update(self, version: int) -> None:
        """See RolloutEngine."""
        self._loaded.repack(self._llm.llm_engine.vllm_config)
        if not self._on_cpu:
            self._loaded.plain.clear()
        self._holds_weights = True
        self._now_holds(version)

    @property
    def holds_weights(self) -> bool:
        """See reshard.adapters.AdapterReceiver."""
        return self._holds_weights

    def load_adapter(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """See reshard.adapters.AdapterReceiver. vLLM reads adapters from files: here, of memory where the machine has
        such a place.
        """
        from megatron_rl.rollout.vllm_adapters import load_adapter

        adapters = self._settings.adapters
        assert adapters is not None, "an engine without adapters"
        if self._asleep:
            self._llm.wake_up(tags=["weights"])
        self._adapter = load_adapter(self._llm.llm_engine, tensors, adapters)
        self._now_holds(version)

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See RolloutEngine. If it can, by vLLM's layer-wise reload, which knows fused and prepacked layouts."""
        if self._shared:
            raise RolloutError(
                f"update_weights: {len(self._shared)} parameters of this engine are the trainer's own memory and would "
                "be overwritten; write the others between begin_update and end_update, or build it without shared ones"
            )
        # Until all have come, what it holds is of no version.
        self._version = -1
        shape = read_model_shape(self._settings.model_path)
        table = self._table(shape)
        whole = whole_update(tensors, hf_shapes(shape, FAMILIES[shape.architecture]), self._settings.model_path)
        if FAMILIES[shape.architecture].compute.sinks:
            # vLLM's loader of gpt-oss writes past the layer-wise reload, which leaves sinks and experts as they were.
            self._write_whole(whole, table)
            self.end_update(version)
            return
        if self._asleep:
            self._llm.wake_up(tags=["weights"])
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": whole})
        # vLLM may stop reading early; the rest, and the end, say what is missing.
        for name, _ in whole:
            raise RolloutError(f"update_weights: vLLM did not take {name}")
        self._now_holds(version)

    def _table(self, shape: ModelShape) -> tuple[LocalParam, ...]:
        """The table's parameters by the engine's names; ReshardError if the engine's are others."""
        family, part = FAMILIES[shape.architecture], self._part
        params = engine_params(shape, family, tp=part.tp, tp_rank=part.tp_rank, ep=part.ep, ep_rank=part.ep_rank)
        constant = constants(shape, family)
        return live_params(params, {name: size for name, size in self.shapes().items() if name not in constant})

    @torch.no_grad()
    def _write_whole(self, tensors: Iterable[tuple[str, torch.Tensor]], table: tuple[LocalParam, ...]) -> None:
        """This rank's part of each tensor into the parameters; their padding becomes 0."""
        self.begin_update()
        held, targets = self.parameters(), dict[str, list[tuple[torch.Tensor, Block]]]()
        for param in table:
            rows, top = flat_rows(held[param.name]), 0
            for block in param.blocks:
                targets.setdefault(block.hf_name, []).append((rows[top : top + block.num_rows], block))
                top += block.num_rows
            rows[top:].zero_()
        for name, tensor in tensors:
            for target, block in targets.get(name, ()):
                part = tensor[slice(*block.rows)]
                target.copy_(part if block.cols is None else part[:, slice(*block.cols)])

    def _now_holds(self, version: int) -> None:
        self._version, self._calls = version, 0
        if not self._asleep:
            self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. RolloutError where the engine refuses (requests still run)."""
        if not self._llm.reset_prefix_cache():
            raise RolloutError("vLLM did not clear its prefix cache; its entries are of older weights")

    def sleep(self) -> None:
        """Free the KV cache and the weights (the trainer's come back with the next update; beside adapters they are
        kept on the host, since they are not sent again). No effect on CPU.
        """
        if self._can_sleep and not self._asleep:
            self.reset_prefix_cache()
            self._llm.sleep(level=2 if self._settings.adapters is None else 1)
            self._asleep = True

    def wake(self) -> None:
        """Take the KV cache's memory again, empty."""
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
            self.reset_prefix_cache()

    def close(self) -> None:
        """Drop the engine and its memory."""
        # Safe to import here: the engine exists, so that vLLM was imported with its environment set.
        from megatron_rl.rollout import vllm_groups

        with vllm_groups.default_group_kept() if self._in_groups else contextlib.nullcontext():
            self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        self._loaded.close()
        if self._in_groups:
            vllm_groups.leave_groups()
        gc.collect()
        if not self._on_cpu:
            torch.cuda.empty_cache()
