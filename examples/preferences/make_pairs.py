"""Write pairs of a better and a worse answer from the samples of an evaluation.

    megatron-rl eval CONFIG.yaml data.val_files=PROMPTS.parquet rollout.val.n=8 --out ANSWERS
    python examples/preferences/make_pairs.py ANSWERS/answers.jsonl OUT [--per-prompt 3] [--edits 0]

Of each prompt whose samples differ in reward, OUT gets up to --per-prompt pairs: a sample of the highest reward, and
each time another text of a lower reward. With --edits as many more: the same sample and an edit of it that no sample
may have, for what a policy that is trained against a reward model will try: another digit, a digit more or less, other
digits altogether. That is for answers that are one number, of which no other is right.

pairs_train.jsonl has the columns prompt, chosen, rejected (text) and data_source: that of the prompt, or "edits".
pairs_val.jsonl has the same of every tenth prompt by its digest (--val-every), so that no prompt is in both. Samples
that were cut at the length limit are no answers and are left out.
"""

from __future__ import annotations

import argparse
import json
import random
import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LONGEST = 7
"""Of an edit: with the end token as many tokens as the shipped configs let an answer have."""

Row = dict[str, Any]


def pairs_of(samples: Iterable[Row], per_prompt: int, edits: int = 0, seed: int = 0) -> list[Row]:
    """Pairs of each prompt that has two different rewards, in the order of the prompts."""
    by_prompt: dict[str, list[Row]] = defaultdict(list)
    for sample in samples:
        if sample["finish_reason"] == "stop" and sample["failed"] is None:
            by_prompt[sample["prompt"]].append(sample)
    draw = random.Random(seed)
    pairs: list[Row] = []
    for prompt, of_prompt in by_prompt.items():
        best = max(sample["reward"] for sample in of_prompt)
        good = [sample for sample in of_prompt if sample["reward"] == best]
        bad = sorted({sample["response"] for sample in of_prompt if sample["reward"] < best})
        for rejected in draw.sample(bad, min(per_prompt, len(bad))):
            chosen = draw.choice(good)
            texts = {"prompt": prompt, "chosen": chosen["response"], "rejected": rejected}
            pairs.append({**texts, "data_source": chosen["data_source"]})
        for _ in range(edits if bad else 0):
            chosen = draw.choice(good)["response"]
            texts = {"prompt": prompt, "chosen": chosen, "rejected": edited(chosen, draw)}
            pairs.append({**texts, "data_source": "edits"})
    return pairs


def edited(number: str, draw: random.Random) -> str:
    """Another text of digits, of 1 to LONGEST."""
    while True:
        at, digit = draw.randrange(len(number) + 1), str(draw.randrange(10))
        text = draw.choice(
            [
                number[:at] + digit + number[at + 1 :],
                number[:at] + number[at + 1 :],
                number[:at] + digit + number[at:],
                "".join(str(draw.randrange(10)) for _ in range(draw.randint(1, LONGEST))),
            ]
        )
        if text != number and 1 <= len(text) <= LONGEST:
            return text


def is_held_out(prompt: str, every: int) -> bool:
    """Whether a prompt is one of those for validation."""
    return zlib.crc32(prompt.encode()[::-1]) % every == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--per-prompt", type=int, default=3)
    parser.add_argument("--edits", type=int, default=0)
    parser.add_argument("--val-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with options.answers.open(encoding="utf-8") as file:
        pairs = pairs_of(map(json.loads, file), options.per_prompt, options.edits, options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, held_out in (("pairs_train.jsonl", False), ("pairs_val.jsonl", True)):
        rows = [pair for pair in pairs if is_held_out(pair["prompt"], options.val_every) is held_out]
        (options.out / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{options.out / name}: {len(rows):,} pairs")


if __name__ == "__main__":
    main()
