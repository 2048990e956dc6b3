"""Kernels by family, and the time of a trace by phase."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rl.observe.kernels import OUTSIDE, Spent, family_of, table_lines, time_by_phase


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NNN", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16>", "matmul"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<c10::BFloat16>", "norm"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>", "norm"),
        (
            "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>>",
            "elementwise",
        ),
        ("_rotate_kernel", "elementwise"),
        ("void at::native::reduce_kernel<128, 4, at::native::ReduceOp<c10::BFloat16>>", "elementwise"),
        ("void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>", "copies"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<OpaqueType<2u>>", "copies"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("Memset (Device)", "copies"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata>",
            "optimizer",
        ),
        ("_stats_kernel", "softmax"),
        ("aten::_log_softmax", "softmax"),
        ("aten::addmm", "matmul"),
        ("void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long>", "other"),
    ],
)
def test_a_kernel_has_a_family(name: str, family: str) -> None:
    assert family_of(name) == family


def _mark(phase: str, start: float, length: float) -> dict[str, Any]:
    return {"cat": "user_annotation", "name": f"phase/{phase}", "ts": start, "dur": length}


def test_a_kernel_counts_in_the_phase_that_launched_it() -> None:
    """Not in that in which it runs: the device comes later. One that nothing launched counts where it runs."""
    events: list[dict[str, Any]] = [
        _mark("update", 1000.0, 1000.0),
        _mark("forward", 0.0, 1000.0),
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 900.0, "dur": 5.0, "args": {"correlation": 7}},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1100.0, "dur": 5.0, "args": {"correlation": 8}},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 880.0, "dur": 30.0, "pid": 1, "tid": 1},
        {"cat": "kernel", "name": "nvjet_a", "ts": 1200.0, "dur": 300.0, "args": {"correlation": 7}},
        {"cat": "kernel", "name": "nvjet_a", "ts": 1500.0, "dur": 200.0, "args": {"correlation": 8}},
        {"cat": "kernel", "name": "flash_fwd", "ts": 1700.0, "dur": 100.0, "args": {"correlation": 8}},
        {"cat": "gpu_memset", "name": "Memset (Device)", "ts": 2500.0, "dur": 50.0, "args": {}},
        {"ph": "M", "name": "process_name"},
    ]
    table = time_by_phase(events)
    assert table == {
        ("forward", "matmul"): Spent(0.3, 1),
        ("update", "matmul"): Spent(0.2, 1),
        ("update", "attention"): Spent(0.1, 1),
        (OUTSIDE, "copies"): Spent(0.05, 1),
    }
    lines = [line.split() for line in table_lines(table)]
    assert lines[0] == ["ms", "attention", "matmul", "copies", "all"]
    assert lines[2] == ["update", "0.1", "0.2", "0.0", "0.3"]
    assert lines[-1] == ["share", "15.4", "%", "76.9", "%", "7.7", "%", "0.7", "ms"]


def test_an_operation_of_the_cpu_counts_without_what_it_calls() -> None:
    def op(name: str, start: float, length: float, thread: int = 1) -> dict[str, Any]:
        return {"cat": "cpu_op", "name": name, "ts": start, "dur": length, "pid": 1, "tid": thread}

    events = [
        _mark("update", 0.0, 10_000.0),
        op("aten::linear", 0.0, 5000.0),
        op("aten::addmm", 0.0, 4000.0),
        op("aten::copy_", 1000.0, 500.0),
        op("aten::mul", 5000.0, 1000.0),
        op("aten::mul", 200.0, 1000.0, thread=2),
    ]
    table = time_by_phase(events)
    assert table == {
        ("update", "matmul"): Spent(4.5, 2),
        ("update", "copies"): Spent(0.5, 1),
        ("update", "elementwise"): Spent(2.0, 2),
    }
    assert table_lines({}) == ["nothing was recorded"]
