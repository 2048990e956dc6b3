"""Write customer-service dialogues in verl's RL schema, for a reward made of rules. Needs no network.

    python examples/customer_service/make_data.py FOLDER [--num-train 2000] [--num-val 200] [--seed 0]

FOLDER then holds train.parquet and val.parquet. Each prompt is a dialogue: the shop's policy as system message, what
customer and agent have said so far, and the customer's last message, which the model answers. The facts that a good
answer states are drawn for each row and stand in its policy:
    reward_model.ground_truth   the facts in words, for a reader
    extra_info.facts            a regular expression for each fact, to be searched in the answer without regard to case
    extra_info.topic            what the dialogue is about
No dialogue of val.parquet is in train.parquet, and none stands twice; what that leaves out is counted. The same
arguments give the same files.
"""

from __future__ import annotations

import argparse
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SYSTEM = (
    "You are a customer-service agent of a web shop. Be friendly and brief. State the facts of the policy that answer "
    "the customer, and promise nothing beyond it.\nPolicy: "
)


@dataclass(frozen=True)
class Topic:
    """One kind of request. {days}, {hours}, {fee} and {code} in its texts are drawn for each dialogue."""

    name: str
    policy: str
    asks: tuple[str, ...]
    """Ways to ask; one is drawn."""
    facts: dict[str, str]
    """What the answer must state, in words -> the regular expression that finds it."""


TOPICS = (
    Topic(
        "refund",
        "A refund arrives within {days} business days after the parcel is back. Return code: {code}.",
        (
            "My blender came broken and I want my money back. How long will that take?",
            "I sent the shoes back yesterday. When do I get my refund?",
            "This jacket does not fit. How do I return it, and when am I paid back?",
        ),
        {"{days} business days": r"\b{days}\s+(business|working)\s+days\b", "return code {code}": r"\b{code}\b"},
    ),
    Topic(
        "delivery",
        "Standard delivery takes {days} days; express delivery takes {hours} hours and costs {fee} euros.",
        (
            "I need the gift this week. What are my options?",
            "How long does delivery take, and can I pay for something faster?",
        ),
        {
            "standard: {days} days": r"\b{days}\s+days\b",
            "express: {hours} hours": r"\b{hours}\s+hours\b",
            "express costs {fee} euros": r"(\b{fee}\s*(euros?|eur)\b|\u20ac\s*{fee}\b)",
        },
    ),
    Topic(
        "cancellation",
        "An order can be cancelled free of charge within {hours} hours; after that a fee of {fee} euros applies.",
        (
            "I ordered the wrong size an hour ago. Can I still cancel?",
            "Please cancel my order. Does that cost anything?",
        ),
        {
            "free within {hours} hours": r"\b{hours}\s+hours\b",
            "then {fee} euros": r"(\b{fee}\s*(euros?|eur)\b|\u20ac\s*{fee}\b)",
        },
    ),
    Topic(
        "account",
        "A locked account opens again after {hours} hours, or at once with the unlock code {code}.",
        (
            "I typed my password wrong three times and now I am locked out!",
            "Your site says that my account is locked. What can I do?",
        ),
        {"after {hours} hours": r"\b{hours}\s+hours\b", "unlock code {code}": r"\b{code}\b"},
    ),
)

OPENINGS = (
    (),
    (("user", "Hello?"), ("assistant", "Good day! How can I help you?")),
    (
        ("user", "Is anybody there? I have been waiting for ages."),
        ("assistant", "I am sorry for the wait. What can I do for you?"),
    ),
)
"""What was said before the customer's request."""


def dialogue(draw: random.Random, split: str, index: int) -> dict[str, Any]:
    """One row in verl's schema."""
    topic = draw.choice(TOPICS)
    values = {
        "days": str(draw.randint(2, 14)),
        "hours": str(draw.choice((2, 12, 24, 36, 48))),
        "fee": str(draw.randint(3, 19)),
        "code": f"{draw.choice('ABCDEFGH')}{draw.randint(100, 999)}",
    }

    def filled(text: str) -> str:
        for name, value in values.items():
            text = text.replace("{" + name + "}", value)
        return text

    said = [("system", SYSTEM + filled(topic.policy)), *draw.choice(OPENINGS), ("user", draw.choice(topic.asks))]
    return {
        "data_source": "customer_service",
        "prompt": [{"role": role, "content": content} for role, content in said],
        "ability": "dialogue",
        "reward_model": {"style": "rule", "ground_truth": "; ".join(filled(fact) for fact in topic.facts)},
        "extra_info": {
            "split": split,
            "index": index,
            "topic": topic.name,
            "facts": [filled(pattern) for pattern in topic.facts.values()],
        },
    }


def dialogues(count: int, split: str, seed: int, taken: set[str]) -> list[dict[str, Any]]:
    """`count` drawn rows, without those whose dialogue is in `taken`; adds theirs to it."""
    draw = random.Random(f"{seed}/{split}")
    rows: list[dict[str, Any]] = []
    for index in range(count):
        row = dialogue(draw, split, index)
        text = repr(row["prompt"])
        if text not in taken:
            taken.add(text)
            rows.append(row)
    return rows


def make(folder: Path, num_train: int, num_val: int, seed: int) -> dict[str, int]:
    """Write both files under `folder`; return file name -> number of rows."""
    folder.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    val = dialogues(num_val, "val", seed, taken)
    tables = {"train.parquet": dialogues(num_train, "train", seed, taken), "val.parquet": val}
    for name, rows in tables.items():
        part = folder / (name + ".part")
        pq.write_table(pa.Table.from_pylist(rows), part)
        os.replace(part, folder / name)
    return {name: len(rows) for name, rows in tables.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write customer-service dialogues in verl's RL schema.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num-train", type=int, default=2000, help="dialogues drawn for training")
    parser.add_argument("--num-val", type=int, default=200, help="dialogues drawn for validation")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    counts = make(chosen.folder, chosen.num_train, chosen.num_val, chosen.seed)
    repeats = chosen.num_train + chosen.num_val - sum(counts.values())
    rows = ", ".join(f"{name} {count} rows" for name, count in counts.items())
    print(f"{chosen.folder}: {rows}; {repeats} repeated dialogues left out")


if __name__ == "__main__":
    main()
