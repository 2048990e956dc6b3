"""GRPO in one file: a Hugging Face model on CPU, no Ray, no Megatron, no vLLM.

    python examples/teach/grpo_loop.py MODEL DATA.parquet [--steps 20] [--seed 0]

What the trainer spreads over processes stands here in the order in which it happens: sample, score, compare within
each group, update. The mathematics is the trainer's own (megatron_rl/algos), so a step here is a step there.

Letters: P prompts, G samples of each, S = P G sequences, T tokens of all sequences end to end.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq
import torch

from megatron_rl.algos.estimators.base import ScoredSequences
from megatron_rl.algos.estimators.grpo import Grpo
from megatron_rl.algos.groups import spread
from megatron_rl.algos.losses.base import LossTokens
from megatron_rl.algos.losses.ppo_clip import PpoClip
from megatron_rl.algos.reduce import loss_weights

TEMPERATURE = 1.0


@dataclass(frozen=True)
class Question:
    """A prompt and the answer that scores 1."""

    text: str
    answer: str


def read_questions(path: str) -> list[Question]:
    """Rows in verl's RL schema: prompt is a list of messages, reward_model.ground_truth the answer."""
    rows = pq.read_table(path).to_pylist()
    return [Question(row["prompt"][0]["content"], row["reward_model"]["ground_truth"]) for row in rows]


def forever(questions: Sequence[Question], count: int, seed: int) -> Iterator[list[Question]]:
    """Batches of `count` questions, shuffled anew in each epoch."""
    shuffle = random.Random(seed)
    while True:
        order = shuffle.sample(range(len(questions)), len(questions))
        for start in range(0, len(order) - count + 1, count):
            yield [questions[i] for i in order[start : start + count]]


def sample(model: Any, tokenizer: Any, prompts: list[list[int]], n: int, max_tokens: int) -> list[list[list[int]]]:
    """n responses to each prompt [P][G], each up to and with the end token, or of max_tokens."""
    padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    out = model.generate(
        **padded, do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, num_return_sequences=n,
        max_new_tokens=max_tokens, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    rows = out[:, padded["input_ids"].shape[1] :].tolist()
    ends = [row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row) for row in rows]
    cut = [row[:end] for row, end in zip(rows, ends, strict=True)]
    return [cut[i : i + n] for i in range(0, len(cut), n)]


def score(question: Question, response: str) -> float:
    """The reward, a rule: 1 for exactly the answer."""
    return float(response == question.answer)


def logprobs_of(model: Any, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """[T] log p(token | tokens before it), 0 at first tokens. Right padding: causal attention never sees it."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(sequence) for sequence in sequences], batch_first=True)
    log_p = torch.log_softmax(model(ids).logits[:, :-1].float() / TEMPERATURE, dim=-1)
    chosen = log_p.gather(-1, ids[:, 1:, None]).squeeze(-1)
    padded = torch.nn.functional.pad(chosen, (1, 0))
    return torch.cat([row[: len(sequence)] for row, sequence in zip(padded, sequences, strict=True)])


def grpo_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    prompts: Sequence[list[int]],
    responses: Sequence[Sequence[list[int]]],
    rewards: Sequence[Sequence[float]],
) -> tuple[float, float]:
    """One update from P prompts, their responses [P][G] and rewards [P][G]; returns the loss and the gradient's norm.

    Each response is compared with the others to its prompt: its advantage is (reward - mean) / deviation of the group.
    """
    pairs = [(prompt, one) for prompt, group in zip(prompts, responses, strict=True) for one in group]
    lens = torch.tensor([len(prompt) + len(response) for prompt, response in pairs])
    segment_ids = torch.repeat_interleave(torch.arange(len(pairs)), lens)  # [T] the sequence of each token
    # [T] True where the model chose the token
    loss_mask = torch.cat([torch.arange(len(p) + len(r)) >= len(p) for p, r in pairs])
    group_ids = torch.arange(len(prompts)).repeat_interleave(len(responses[0]))  # [S] the prompt of each sequence
    returns = torch.tensor([value for group in rewards for value in group], dtype=torch.float64)
    response_lens = torch.tensor([len(response) for _, response in pairs])
    advantages = spread(Grpo()(ScoredSequences(returns, group_ids, response_lens)), loss_mask, segment_ids)
    weights = loss_weights("token-mean", loss_mask, segment_ids, len(pairs), norm_length=1)

    # One update a step: the policy that is updated is the one that sampled, so the ratio of the two is 1.
    logprobs = logprobs_of(model, [prompt + response for prompt, response in pairs])[loss_mask]
    losses, _ = PpoClip()(LossTokens(logprobs, logprobs.detach(), advantages[loss_mask]))
    loss = (weights[loss_mask] * losses).sum()
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    return loss.item(), norm.item()


def main() -> None:
    """Train and print a line a step."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description="GRPO in one file.")
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("data", help="parquet in verl's RL schema")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.0)
    batches = forever(read_questions(arguments.data), count=16, seed=arguments.seed)
    for step in range(1, arguments.steps + 1):
        start, questions = time.monotonic(), next(batches)
        prompts = [tokenizer.encode(question.text) for question in questions]
        responses = sample(model, tokenizer, prompts, n=8, max_tokens=8)
        texts = [tokenizer.batch_decode(group, skip_special_tokens=True) for group in responses]
        rewards = [[score(question, text) for text in group] for question, group in zip(questions, texts, strict=True)]
        loss, norm = grpo_step(model, optimizer, prompts, responses, rewards)
        mean, seconds = torch.tensor(rewards).mean(), time.monotonic() - start
        print(f"step {step:>3}  reward {mean:.3f}  loss {loss:+.4f}  grad {norm:.2f}  | {seconds:.2f} s", flush=True)


if __name__ == "__main__":
    main()
