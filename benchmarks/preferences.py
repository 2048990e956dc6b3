"""DPO's tokens a second and memory, and those of TRL's DPOTrainer if it can be imported. Prints one table.

    python -m benchmarks.preferences                       # a small model on the CPU, float32
    python -m benchmarks.preferences --device cuda         # Qwen2 0.5B's shape

One step is one optimizer step over all pairs: random tokens, prompts of one length, answers of log-normal lengths.
Tokens are real ones, without padding. The reference's log-probabilities are computed before the steps that are timed,
in both. A row's time is the median of --repeats steps after two that warm up; memory is the most that torch had
allocated, above what stood before, from the model's building on.

ours    the flow of trainers/dpo.py with its controller, in this process: packed, bfloat16, AdamW with float32 masters
TRL     DPOTrainer, of which a micro-batch has as many pairs as hold --max-tokens with padding, pairs of like length
        together. sdpa, or flash_attention_2 if it is installed; adamw_torch_fused, no gradient checkpointing. Once with
        float32 weights under bfloat16 autocast, which keeps what ours keeps, and once with bfloat16 weights alone
"""

# TRL and what it needs are installed apart.
# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import gc
import importlib.util
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.packing import SHAPES
from megatron_rl.data.preferences import AnswerTokens, PreferenceRow

if TYPE_CHECKING:
    from datasets import Dataset

WARM_UP = 2


@dataclass(frozen=True)
class Case:
    """Pairs of a step, and the lengths of their parts in tokens."""

    pairs: int
    prompt: int
    median: int
    longest: int
    max_tokens: int


CASES = {"cpu": Case(8, 16, 16, 32, 192), "cuda": Case(256, 128, 192, 384, 16384)}


@dataclass(frozen=True)
class Pair:
    """Token ids."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]

    @property
    def num_tokens(self) -> int:
        return 2 * len(self.prompt) + len(self.chosen) + len(self.rejected)

    def row(self, index: int) -> PreferenceRow:
        """As training reads it."""
        answers = tuple(
            AnswerTokens((*self.prompt, *ids), (False,) * len(self.prompt) + (True,) * len(ids))
            for ids in (self.chosen, self.rejected)
        )
        return PreferenceRow(index, answers, where=f"pair {index}")


def draw_pairs(case: Case, vocab: int) -> list[Pair]:
    """Random ids; the first three are kept for the tokenizer."""
    draw = random.Random(0)

    def ids(count: int) -> list[int]:
        return [draw.randrange(3, vocab) for _ in range(count)]

    def answer() -> list[int]:
        return ids(max(case.longest // 16, min(case.longest, int(case.median * draw.lognormvariate(0.0, 0.6)))))

    return [Pair(ids(case.prompt), answer(), answer()) for _ in range(case.pairs)]


def write_model(folder: Path, device: str) -> str:
    """config.json of the shape, and a tokenizer that TRL asks for its end and padding."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config

    shape = SHAPES[device]
    config = Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        num_hidden_layers=shape["num_layers"],
        hidden_size=shape["hidden_size"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        intermediate_size=shape["ffn_size"],
        vocab_size=shape["vocab_size"],
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    config.save_pretrained(folder)
    (folder / "rows.jsonl").write_text("{}\n")
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1, "<unk>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    ).save_pretrained(folder)
    return str(folder)


@dataclass(frozen=True)
class Measured:
    """Seconds of each step, the first loss, and bytes."""

    seconds: list[float]
    loss: float
    memory: int

    def line(self, name: str, tokens: int, ours: Measured) -> str:
        """A row of the table."""
        taken, of_ours = (statistics.median(one.seconds[WARM_UP:]) for one in (self, ours))
        memory = f"{self.memory / 2**30:.1f} GiB" if self.memory else "-"
        return f"{name:<26}{taken:>9.3f}{tokens / taken:>11,.0f}{taken / of_ours:>8.2f}{memory:>11}{self.loss:>9.5f}"


def in_fresh_memory(measure: Callable[[], tuple[list[float], float]], device: str) -> Measured:
    """Run a part, with its peak counted above what others have left behind."""
    gc.collect()
    if device == "cpu":
        return Measured(*measure(), 0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds, loss = measure()
    return Measured(seconds, loss, torch.cuda.max_memory_allocated() - before)


def measure_ours(
    pairs: Sequence[Pair], model: str, device: str, max_tokens: int, steps: int
) -> tuple[list[float], float]:
    """The flow's own functions, step after step, as a run calls them."""
    from megatron_rl.config.load import load_config
    from megatron_rl.trainers import placement
    from megatron_rl.trainers.dpo import assemble, ref_sums, update
    from megatron_rl.trainers.parts import Parts

    settings = {
        "algorithm.name": "dpo",
        "model.path": model,
        "model.init": "random",
        "model.dtype": "bfloat16" if device == "cuda" else "float32",
        # Checked to be there, and not read: the rows are at hand.
        "data.train_files": f"{model}/rows.jsonl",
        "data.train_batch_size": len(pairs),
        "data.max_prompt_length": len(pairs[0].prompt),
        "data.max_response_length": max(len(ids) for pair in pairs for ids in (pair.chosen, pair.rejected)),
        "actor.max_tokens_per_gpu": max_tokens,
        "actor.optim.lr": 1e-6,
        "cluster.device": device,
        "cluster.backend": "inline",
    }
    cfg = load_config([], [f"{key}={value}" for key, value in settings.items()])
    parts, rows = Parts(cfg), [pair.row(index) for index, pair in enumerate(pairs)]
    with placement.start_workers(cfg, steps, with_engine=False).train as group:
        parts.models.start(group)
        ref_sums(parts, assemble(parts.models, rows), rows)
        seconds, losses = list[float](), list[float]()
        for _ in range(steps):
            begun = time.perf_counter()
            loaded = assemble(parts.models, rows)
            judged = update(parts.models, loaded, rows, ref_sums(parts, loaded, rows))
            seconds.append(time.perf_counter() - begun)
            losses.append(judged.updates[0].report.loss)
    return seconds, losses[0]


def measure_trl(
    pairs: Sequence[Pair], model: str, device: str, max_tokens: int, steps: int, dtype: torch.dtype
) -> tuple[list[float], float]:
    """DPOTrainer.train, timed from the beginning to the end of each optimizer step."""
    from accelerate.state import AcceleratorState
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    class Tokenized(DPOTrainer):
        """The rows have token ids already."""

        def _prepare_dataset(self, dataset: Dataset, *args: Any, **kwargs: Any) -> Dataset:
            return dataset

    class Clock(TrainerCallback):
        """Seconds of each step, read when the device has done its work."""

        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self._begun = _now(device)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.seconds.append(_now(device) - self._begun)

    AcceleratorState._reset_state(True)
    # Pairs of like length share a micro-batch, and the longest come first: the least padding there can be.
    by_length = sorted(pairs, key=lambda one: -max(len(one.chosen), len(one.rejected)))
    rows = [{"prompt_ids": one.prompt, "chosen_ids": one.chosen, "rejected_ids": one.rejected} for one in by_length]
    longest = len(by_length[0].prompt) + max(len(by_length[0].chosen), len(by_length[0].rejected))
    at_once = max(
        size
        for size in range(1, len(pairs) + 1)
        if len(pairs) % size == 0 and (size == 1 or 2 * size * longest <= max_tokens)
    )
    flash = device == "cuda" and importlib.util.find_spec("flash_attn") is not None
    attention = "flash_attention_2" if flash else "sdpa"
    # On the device: a CPU would draw the numbers for longer than the steps take.
    with torch.device(device):
        policy = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(model), dtype=dtype, attn_implementation=attention
        )
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = DPOConfig(
            output_dir=folder,
            per_device_train_batch_size=at_once,
            gradient_accumulation_steps=len(pairs) // at_once,
            max_steps=steps,
            num_train_epochs=steps,
            train_sampling_strategy="sequential",
            learning_rate=1e-6,
            optim="adamw_torch_fused",
            gradient_checkpointing=False,
            precompute_ref_log_probs=True,
            max_length=None,
            bf16=device == "cuda",
            use_cpu=device == "cpu",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(model)
        run = Tokenized(
            model=policy,
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        run.remove_callback(PrinterCallback)
        run.train()
    losses = [float(entry["loss"]) for entry in run.state.log_history if "loss" in entry]
    print(f"TRL: {at_once} pairs a micro-batch, {attention}")
    return clock.seconds, losses[0]


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(CASES), default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, help="of a micro-batch")
    args = parser.parse_args()
    case, device, steps = CASES[args.device], args.device, args.repeats + WARM_UP
    max_tokens = args.max_tokens or case.max_tokens
    pairs = draw_pairs(case, SHAPES[device]["vocab_size"])
    tokens = sum(pair.num_tokens for pair in pairs)
    print(f"{len(pairs)} pairs, {tokens:,} tokens a step, at most {max_tokens:,} a micro-batch")
    print(f"{'':<26}{'s a step':>9}{'tokens/s':>11}{'times':>8}{'memory':>11}{'loss':>9}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), device)
        ours = in_fresh_memory(lambda: measure_ours(pairs, model, device, max_tokens, steps), device)
        print(ours.line("ours", tokens, ours), flush=True)
        if importlib.util.find_spec("trl") is None:
            print("TRL cannot be imported: ours alone")
            return
        kinds = {"TRL, float32 weights": torch.float32}
        if device == "cuda":
            kinds["TRL, bfloat16 weights"] = torch.bfloat16
        for name, dtype in kinds.items():
            one = in_fresh_memory(
                lambda dtype=dtype: measure_trl(pairs, model, device, max_tokens, steps, dtype), device
            )
            print(one.line(name, tokens, ours), flush=True)


if __name__ == "__main__":
    main()
