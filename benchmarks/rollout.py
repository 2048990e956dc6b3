"""Tokens a second of vllm.LLM.generate and of batches that are decoded without its scheduler. Prints one table.

    python -m benchmarks.rollout                                    # a small model on the CPU, float32
    python -m benchmarks.rollout --device cuda                      # Qwen2 0.5B's and 7B's shape, bfloat16
    python -m benchmarks.rollout --device cuda --only 0.5b --profile

One process, one set of random weights. Both return the tokens and the log-probability of each; no response ends early.

    vllm.LLM     an engine as vLLM starts it, llm.generate with logprobs=0, n samples a prompt, no seeds, no text
    scheduler    the same engine through this package (rollout.decode=scheduler): seeds, samples as arrays
    batch        rollout.decode=batch

Medians of --repeats calls, after one that warms up; times is over vllm.LLM. Then greedy answers of batch and of
scheduler are compared: in float32 on the CPU they are equal. In bfloat16 the two compute prompts in other cuts, and
roundings decide between logits that are nearly equal: `another order` is each against itself with the prompts
reversed. The largest |difference| of log-probabilities counts tokens up to the first one that is another.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.rollout.engine import EngineSettings, Request, Sampling, make_engine
from megatron_rl.types import Samples


@dataclass(frozen=True)
class Case:
    """A shape, and what is asked of it."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    tied: bool
    prompts: int
    n: int
    prompt_len: int
    new_tokens: int
    kv_cache_gb: float


CASES = {
    "cpu": {"tiny": Case(128, 2, 4, 2, 256, 512, True, 8, 4, 32, 32, 0.25)},
    "cuda": {
        "0.5b": Case(896, 24, 14, 2, 4864, 151936, True, 64, 8, 128, 512, 16.0),
        "7b": Case(3584, 28, 28, 4, 18944, 152064, False, 32, 8, 128, 512, 24.0),
    },
}


def settings(folder: str, case: Case, device: str) -> EngineSettings:
    """One rank that does not sleep, with config.json of Qwen2 in `folder`."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": case.hidden,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.kv_heads,
        "intermediate_size": case.inner,
        "vocab_size": case.vocab,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": case.tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": dtype,
    }
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return EngineSettings(
        name="vllm",
        model_path=folder,
        tokenizer_path=folder,
        vocab_size=case.vocab,
        max_model_len=case.prompt_len + case.new_tokens,
        dtype=dtype,
        device=device,
        gpu_memory_utilization=0.5,
        kv_cache_gb=case.kv_cache_gb,
        max_num_seqs=case.prompts * case.n,
        max_num_batched_tokens=None,
        enforce_eager=False,
        free_cache_engine=False,
        seed=0,
        needs_text=False,
    )


def started(own: EngineSettings) -> Any:
    """An engine with the same random weights each time."""
    start = time.perf_counter()
    engine: Any = make_engine(own)
    generator = torch.Generator(own.device).manual_seed(0)
    engine.begin_update()
    for name, tensor in sorted(engine.parameters().items()):
        if tensor.ndim == 1:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            tensor.normal_(0.0, 0.02, generator=generator)
    engine.end_update(0)
    print(f"  engine ({own.decode}) started in {time.perf_counter() - start:.1f} s")
    return engine


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Median of a call's time, after one that warms up."""
    taken: list[float] = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def plain(engine: Any, requests: list[Request], sampling: Sampling) -> Callable[[], object]:
    """vllm.LLM.generate, as its own users would call it for tokens and their log-probabilities."""
    import vllm

    params = vllm.SamplingParams(
        n=sampling.n, temperature=1.0, max_tokens=sampling.max_tokens, ignore_eos=True, logprobs=0, detokenize=False
    )
    prompts: list[Any] = [{"prompt_token_ids": list(request.token_ids)} for request in requests]

    def call() -> object:
        engine.reset_prefix_cache()
        return engine._llm.generate(prompts, params, use_tqdm=False)

    return call


def compared(one: Samples, other: Samples) -> str:
    """How many answers are equal, and how far the log-probabilities of equal beginnings are apart."""
    equal, gap, common = 0, 0.0, 0
    for row in range(len(one)):
        a, b = one.span(row), other.span(row)
        same = one.token_ids[a] == other.token_ids[b]
        first = len(same) if same.all() else int(np.argmin(same))
        equal, common = equal + int(first == len(same)), common + first
        gaps = np.abs(one.logprobs[a] - other.logprobs[b])[:first]
        gap = max(gap, float(gaps.max(initial=0.0)))
    shared = 100 * common / len(one.token_ids)
    return f"{equal} of {len(one)} answers equal, {shared:.1f} % of tokens before a difference, |dlogp| <= {gap:.1e}"


def measure(name: str, case: Case, args: argparse.Namespace) -> None:
    """The rows of one shape."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, case.vocab, (case.prompts, case.prompt_len), generator=generator).tolist()
    requests = [Request(tuple(prompt), seed=1000 * i) for i, prompt in enumerate(ids)]
    sampling = Sampling(case.n, 1.0, 1.0, -1, case.new_tokens, ())
    greedy = replace(sampling, n=1, temperature=0.0)
    tokens = case.prompts * case.n * case.new_tokens
    print(f"{name}: {case.prompts} prompts x {case.n} samples x ({case.prompt_len} + {case.new_tokens}) tokens")
    taken: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        own = settings(folder, case, args.device)
        engine = started(replace(own, decode="auto" if args.one_engine else "scheduler"))
        why, engine._no_batches = engine._no_batches, "the benchmark compares"
        taken["vllm.LLM"] = seconds(plain(engine, requests, sampling), args.repeats)
        if not args.one_engine:
            taken["scheduler"] = seconds(lambda: engine.generate(requests, sampling), args.repeats)
        scheduled = engine.generate(requests, greedy)
        engine.reset_prefix_cache()
        reversed_order = engine.generate(requests[::-1], greedy)
        engine._no_batches = why
        if not args.one_engine:
            engine.close()
            engine = started(replace(own, decode="batch"))
        taken["batch"] = seconds(lambda: engine.generate(requests, sampling), args.repeats)
        batch = engine.generate(requests, greedy)
        backwards = engine.generate(requests[::-1], greedy)
        if args.profile:
            profiled(lambda: engine.generate(requests, replace(sampling, max_tokens=64)))
        engine.close()
    for way, each in taken.items():
        print(f"  {way:<10}{each:>9.3f} s{tokens / each:>10,.0f} tokens/s{taken['vllm.LLM'] / each:>7.2f} times")
    print(f"  greedy, batch against scheduler: {compared(scheduled, batch)}")
    for who, one, other in (("scheduler", scheduled, reversed_order), ("batch", batch, backwards)):
        print(f"  greedy, {who} in another order: {compared(one, in_reverse(other))}")


def in_reverse(samples: Samples) -> Samples:
    """The samples of one a prompt, last one first."""
    rows = range(len(samples) - 1, -1, -1)
    spans = [samples.span(row) for row in rows]
    return Samples.from_lists(
        [samples.token_ids[span].tolist() for span in spans],
        [samples.logprobs[span].tolist() for span in spans],
        ["length"] * len(samples),
        0,
    )


def profiled(call: Callable[[], object]) -> None:
    """What the time went to."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        call()
    for order in ("self_cuda_time_total", "self_cpu_time_total"):
        print(trace.key_averages().table(sort_by=order, row_limit=28, max_name_column_width=80))


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", action="append", help="names of cases")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one-engine", action="store_true", help="one start: vllm.LLM with its first model runner")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    for name, case in CASES[args.device].items():
        if not args.only or name in args.only:
            measure(name, case, args)


if __name__ == "__main__":
    main()
