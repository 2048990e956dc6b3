"""One rank of a colocated policy: the actor's shard, the reference's shard, and a rollout engine."""

from __future__ import annotations

import functools
import os
import re
import resource
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_rl.algos.token_losses import KlTerm, TokenLoss, UpdateLoss, nll_loss
from megatron_rl.cluster.dispatch import Collect, Split, dispatch
from megatron_rl.config.run import RunConfig
from megatron_rl.config.sections.actor import ActorConfig
from megatron_rl.errors import MegatronRLError
from megatron_rl.mcore import cpu
from megatron_rl.models.shape import ModelShape
from megatron_rl.observe.log import setup_logging
from megatron_rl.parallel.collectives import adder
from megatron_rl.parallel.topology import topology_of
from megatron_rl.rollout.engine import Request, RolloutEngine, Sampling
from megatron_rl.types import OffloadReport, Samples, StepReport, SyncReport, TrainBatch

if TYPE_CHECKING:
    from megatron_rl.mcore.build import Model


@dataclass(frozen=True)
class PolicyPlan:
    """What a worker must know beside the config; made on the controller, so that all ranks agree."""

    shape: ModelShape
    device: str
    total_optimizer_steps: int
    with_engine: bool
    engine_order: tuple[int, ...] = ()
    """The rank of each engine slot: slot s is tensor-parallel rank s % tp of engine s // tp."""


def peak_memory() -> int:
    """Most bytes that this process has held: of its device, or of the machine's memory where it computes on the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer step. logprobs: per micro-batch [T] float32 of the policy before the update, 0 off the mask.
    offload: what this rank moved since the update before. memory_bytes: see peak_memory, of this rank.
    """

    report: StepReport
    logprobs: tuple[torch.Tensor, ...]
    offload: OffloadReport = field(default_factory=OffloadReport)
    memory_bytes: int = field(default_factory=peak_memory)


_NOISE = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
    "`torch.distributed.",
    "You are using a Python version",
)


def _quiet_libraries() -> None:
    """Drop warnings of megatron and torch about themselves; those of the run are not among them."""
    for start in _NOISE:
        warnings.filterwarnings("ignore", message=re.escape(start))


def actor_objective(actor: ActorConfig) -> TokenLoss:
    """The token loss of a policy update, as configured. Called on a rank whose groups exist."""
    from megatron_rl.parallel.groups import cp_group

    kl = KlTerm(actor.kl_loss_coef if actor.use_kl_loss else 0.0, actor.kl_loss_type, actor.kl_loss_importance)
    # Context parallelism spreads the tokens of a sequence over ranks.
    return UpdateLoss(actor.loss, actor.entropy_coeff, kl, add_up=adder(cp_group()))


class PolicyWorker:
    """Methods are called on all ranks at once (cluster/dispatch.py says how arguments are split)."""

    def __init__(self, rank: int, world: int, cfg: RunConfig, plan: PolicyPlan) -> None:
        setup_logging("policy", rank)
        _quiet_libraries()
        self._rank, self._cfg, self._plan = rank, cfg, plan
        if plan.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        cpu.install()
        # Megatron's modules are imported after the shim and after the environment is set.
        from megatron_rl.mcore import build, convert
        from megatron_rl.mcore.offload import Offload
        from megatron_rl.parallel import groups

        actor = cfg.actor
        self.topology = topology_of(actor, world)
        groups.init_process_group(rank, world, plan.device, cfg.cluster.step_timeout_s)
        groups.init_model_parallel(self.topology, actor.vpp)
        device = (
            torch.device(plan.device, torch.cuda.current_device()) if plan.device == "cuda" else torch.device("cpu")
        )
        policy = self._build_actor(device)
        self._reference = None
        if cfg.needs_reference:
            self._reference = build.build_model(plan.shape, actor, cfg.model.dtype, device)
            convert.load_hf(self._reference, self._source(cfg.ref.path or cfg.model.path, cfg.ref.path is not None))
        self._trainable = build.make_trainable(policy, actor, plan.total_optimizer_steps)
        self._export = functools.partial(convert.export_hf, self._trainable.model)
        self._build_others(device)
        self._engine: RolloutEngine | None = None
        # Every update zeroes the gradients first, so their values need not be kept.
        self._offload = Offload(self._trainable, actor.offloaded if plan.with_engine else (), keep_grads=False)
        if plan.with_engine:
            # The engine plans its memory by what is free when it starts.
            self._offload.to_host()
            self._start_engine()

    def _build_actor(self, device: torch.device) -> Model:
        from megatron_rl.mcore import build, convert

        policy = build.build_model(self._plan.shape, self._cfg.actor, self._cfg.model.dtype, device)
        convert.load_hf(policy, self._source(self._cfg.model.path))
        return policy

    def _build_others(self, device: torch.device) -> None:
        """Models beside actor and reference; made before the engine looks how much memory is free."""

    def _source(self, path: str, pretrained: bool = False):
        from megatron_rl.weights.safetensors import RandomSource, SafetensorsSource

        if self._cfg.model.init == "random" and not pretrained:
            return RandomSource(self._cfg.trainer.seed, self._plan.shape.initializer_range)
        return SafetensorsSource(path)

    def _start_engine(self) -> None:
        from megatron_rl.workers.colocated import Lending, engine_layout, start_engine

        def fetch() -> None:
            self._offload.to_device("params")

        def lent_back() -> None:
            # The actor's weights leave the device before the engine takes its KV cache.
            self._offload.to_host("params")

        self._engine, self._publisher = start_engine(
            self._cfg,
            self._trainable.model,
            engine_layout(self._cfg, self._plan.engine_order),
            device=self._plan.device,
            rank=self._rank,
            # A critic's worker puts an export of its own in place of this one.
            lending=Lending(fetch, lent_back, lambda dtype: self._export(dtype)),
        )

    @dispatch(split=Split.SPLIT_ENGINE)
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Samples:
        """Samples of this engine's requests."""
        assert self._engine is not None, "this worker was started without an engine"
        self._offload.to_host()
        return self._engine.generate(requests, sampling)

    @dispatch(split=Split.ALL)
    def publish(self, version: int, expect_change: bool) -> SyncReport:
        """The actor's weights into every engine; what each rank did. Weights that are not finite, or that the
        engine's precision cannot hold, reach none: NonFiniteError on all ranks.
        """
        from megatron_rl.mcore.build import DTYPES
        from megatron_rl.mcore.finite import refuse_bad_weights

        self._offload.to_host("grads", "optimizer")
        if expect_change or version == 0:
            self._offload.to_device("params")
            dtype = DTYPES[self._cfg.rollout.dtype or self._cfg.model.dtype]
            consequence = "engines keep the weights that they have"
            refuse_bad_weights(
                self._trainable.model,
                what="the actor's weights",
                consequence=consequence,
                limit=torch.finfo(dtype).max,
            )
        return self._publisher.publish(version, expect_change=expect_change)

    @dispatch(split=Split.SPLIT_DP)
    def logprobs(self, micro_batches: Sequence[TrainBatch], temperature: float) -> list[dict[str, torch.Tensor]]:
        """Log-probabilities and entropies of the actor, per micro-batch (mcore.step.forward_logprobs)."""
        from megatron_rl.mcore.step import forward_logprobs

        self._free_engine()
        self._offload.to_device("params")
        return forward_logprobs(self._trainable.model, micro_batches, temperature)

    @dispatch(split=Split.SPLIT_DP)
    def ref_logprobs(self, micro_batches: Sequence[TrainBatch], temperature: float) -> list[torch.Tensor]:
        """Log-probabilities of the reference model, per micro-batch."""
        from megatron_rl.mcore.step import forward_logprobs

        assert self._reference is not None, "the run has no reference model"
        self._free_engine()
        return [found["logprobs"] for found in forward_logprobs(self._reference, micro_batches, temperature)]

    @dispatch(split=Split.SPLIT_DP)
    def update(self, micro_batches: Sequence[TrainBatch], temperature: float) -> UpdateResult:
        """One optimizer step on the policy objective over all ranks' micro-batches."""
        return self._step(micro_batches, actor_objective(self._cfg.actor), temperature)

    @dispatch(split=Split.SPLIT_DP)
    def update_sft(self, micro_batches: Sequence[TrainBatch]) -> UpdateResult:
        """One optimizer step on the negative log-likelihood."""
        return self._step(micro_batches, nll_loss, 1.0)

    def _step(self, micro_batches, token_loss, temperature: float) -> UpdateResult:
        from megatron_rl.mcore.step import train_step

        self._free_engine()
        self._offload.to_device()
        report, logprobs = train_step(self._trainable, micro_batches, token_loss, temperature)
        return UpdateResult(report, tuple(logprobs), self._offload.take())

    def _free_engine(self) -> None:
        # The next publish wakes it.
        if self._engine is not None:
            self._engine.sleep()

    @dispatch(split=Split.ALL, collect=Collect.RANK0)
    def save_hf(self, path: str) -> str:
        """The actor as a Hugging Face folder at `path`, written by rank 0 from tensors of all ranks. Weights that are
        not finite are not saved: NonFiniteError on all ranks, and an earlier save stays as it is.
        """
        from megatron_rl.mcore.finite import refuse_bad_weights

        self._offload.to_device("params")
        consequence = f"{path} is not written; an earlier save there is intact"
        refuse_bad_weights(self._trainable.model, what="the actor's weights", consequence=consequence)
        return self._write_hf(path, self._export(), self._cfg.model.path)

    def _write_hf(
        self,
        path: str,
        tensors: Iterator[tuple[str, torch.Tensor]],
        companions_from: str,
        config_changes: Mapping[str, Any] | None = None,
    ) -> str:
        """Rank 0 writes a folder from an export that all ranks take part in."""
        from megatron_rl.mcore.build import DTYPES
        from megatron_rl.weights.safetensors import write_model
        from megatron_rl.workers.saved import check_saved, run_renderer

        failure: MegatronRLError | None = None
        if self._rank == 0:
            model = self._cfg.model
            try:
                renderer = run_renderer(self._cfg, companions_from)
                write_model(
                    Path(path),
                    tensors,
                    companions_from=companions_from,
                    tokenizer_from=model.tokenizer_path or model.path,
                    dtype=DTYPES[model.dtype],
                    config_changes=config_changes,
                    eos_token=model.eos_token,
                    chat_template=renderer.saved_template(),
                    verify=lambda folder: check_saved(folder, renderer, self._cfg),
                )
            except MegatronRLError as error:
                failure = error
        # The export is a collective: every rank walks through all of it, also when rank 0's disk is full.
        for _ in tensors:
            pass
        if failure is not None:
            raise failure
        return path

    def close(self) -> None:
        """Leave the process groups and drop the engine."""
        from megatron_rl.parallel import groups

        if self._engine is not None:
            self._engine.close()
        groups.destroy()
