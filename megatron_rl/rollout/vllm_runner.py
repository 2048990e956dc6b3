"""vLLM's model runner without its scheduler: inputs are written into the runner's own buffers, which its CUDA graphs
read, and the model runs with the runner's attention metadata, padding and graphs.

Private parts of vLLM that this relies on stand here alone, read in 0.26 (GPU) and 0.32 (CPU). Both have them by the
same names. What differs: 0.26 can cut a block of the KV cache into smaller ones for its kernels (use_hybrid_blocks),
which is refused; and it runs dense models by a second model runner (v1/worker/gpu), unless first_runner tells it not
to do so.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_RUNNER_CHOICE = "VLLM_USE_V2_MODEL_RUNNER"


@contextlib.contextmanager
def first_runner() -> Iterator[None]:
    """While an engine starts: it gets vLLM's first model runner, unless the environment says which."""
    if _RUNNER_CHOICE in os.environ:
        yield
        return
    os.environ[_RUNNER_CHOICE] = "0"
    try:
        yield
    finally:
        del os.environ[_RUNNER_CHOICE]


def runner_of(llm: Any) -> Any:
    """The model runner of an engine in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def why_not(runner: Any) -> str | None:
    """Why a runner cannot be driven from here; None if it can."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not isinstance(runner, GPUModelRunner):
        return "the engine has vLLM's second model runner"
    groups = runner.kv_cache_config.kv_cache_groups
    # Latent attention has a class of its own.
    if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
        return "its layers have several kinds of attention, or another one than full attention"
    spec = groups[0].kv_cache_spec
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        return "its attention has a window"
    if vars(runner.input_batch.block_table[0]).get("use_hybrid_blocks", False):
        return "vLLM cuts blocks of the KV cache for this attention kernel"
    parallel = runner.vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1 or parallel.enable_expert_parallel:
        return "its ranks are more than tensor-parallel"
    if runner.speculative_config is not None or runner.uses_mrope or runner.lora_config is not None:
        return "it drafts tokens, has several positions a token, or has adapters"
    return None


@dataclass(frozen=True)
class Pass:
    """Shape of a pass: how vLLM pads it, and by which graph it runs. longest: most tokens of a row."""

    num_tokens: int
    num_rows: int
    longest: int
    mode: Any
    descriptor: Any


class Runner:
    """Tensors of the next pass, and the pass.

    input_ids, positions, slots: [most tokens]. seq_lens: [most rows], tokens that each row's last token sees, itself
    included. table: [most rows, most blocks]. A slot of -1 keeps a token out of the KV cache.
    """

    def __init__(self, runner: Any) -> None:
        """runner: one for which why_not is None."""
        self._runner = runner
        blocks = runner.input_batch.block_table[0]
        self.input_ids: torch.Tensor = runner.input_ids.gpu
        self.positions: torch.Tensor = runner.positions
        self.seq_lens: torch.Tensor = runner.seq_lens
        self.slots: torch.Tensor = blocks.slot_mapping.gpu
        self.table: torch.Tensor = blocks.block_table.gpu
        self.block_size: int = blocks.block_size
        # vLLM keeps block 0 for padding.
        self.num_blocks: int = runner.kv_cache_config.num_blocks - 1
        self.max_rows: int = runner.max_num_reqs
        self.max_tokens: int = runner.max_num_tokens

    def shape(self, query_lens: npt.NDArray[np.int32]) -> Pass:
        """A pass of rows with so many tokens each, [rows]; its rows begin one after the other in input_ids."""
        runner, rows, tokens = self._runner, len(query_lens), int(query_lens.sum())
        longest = int(query_lens.max())
        mode, descriptor, *_ = runner._determine_batch_execution_and_padding(
            num_tokens=tokens,
            num_reqs=rows,
            num_scheduled_tokens_np=query_lens,
            max_num_scheduled_tokens=longest,
            use_cascade_attn=False,
        )
        starts = runner.query_start_loc
        starts.np[0] = 0
        starts.np[1 : rows + 1] = np.cumsum(query_lens)
        starts.np[rows + 1 :] = tokens
        # From memory that is not pinned, so that the copy is over before the array changes again.
        starts.gpu.copy_(torch.from_numpy(starts.np.copy()))
        self.seq_lens[rows:].zero_()
        return Pass(tokens, rows, longest, mode, descriptor)

    def forward(self, shape: Pass, most_seq_lens: npt.NDArray[np.int32]) -> torch.Tensor:
        """Hidden states [tokens, hidden] of the tokens in the buffers; valid until the next pass. most_seq_lens:
        [rows], at least seq_lens, as known without asking the device.
        """
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import set_forward_context

        runner, descriptor = self._runner, shape.descriptor
        whole = shape.mode == CUDAGraphMode.FULL
        padded_rows = descriptor.num_reqs or shape.num_rows
        runner.optimistic_seq_lens_cpu.numpy()[: shape.num_rows] = most_seq_lens
        runner.optimistic_seq_lens_cpu.numpy()[shape.num_rows :] = 0
        by_group, by_layer = runner._get_slot_mappings(
            num_tokens_padded=descriptor.num_tokens,
            num_reqs_padded=padded_rows,
            num_tokens_unpadded=shape.num_tokens,
        )
        metadata, _ = runner._build_attention_metadata(
            num_tokens=shape.num_tokens,
            num_tokens_padded=descriptor.num_tokens if whole else None,
            num_reqs=shape.num_rows,
            num_reqs_padded=padded_rows if whole else None,
            max_query_len=shape.longest,
            slot_mappings=by_group,
        )
        with set_forward_context(
            metadata,
            runner.vllm_config,
            num_tokens=descriptor.num_tokens,
            cudagraph_runtime_mode=shape.mode,
            batch_descriptor=descriptor,
            slot_mapping=by_layer,
        ):
            hidden = runner._model_forward(
                input_ids=self.input_ids[: descriptor.num_tokens],
                positions=self.positions[: descriptor.num_tokens],
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        return hidden[: shape.num_tokens]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab], whole on every rank of the engine."""
        return self._runner.model.compute_logits(hidden)
