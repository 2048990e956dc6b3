"""verl's example data, written as verl's own scripts write it, and the GSM8K converter of examples/: unchanged."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl.cli import main
from megatron_rl.config.load import load_config
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.render import Renderer
from tests.helpers.config import make_model
from tests.helpers.data import ROOT, chat_folder, write_jsonl

GSM8K = str(ROOT / "examples" / "gsm8k" / "make_data.py")
QUESTION = "Ann has 5 apples and gets 7,000 more. How many has she?"
ANSWER = "She has 5 + 7000 = <<5+7000=7005>>7005 apples.\n#### 7,005"


def verls_table() -> pa.Table:
    """Two rows as examples/data_preprocess/gsm8k.py makes them, with the metadata that Dataset.to_parquet adds."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [
                {
                    "role": "user",
                    "content": QUESTION + " " + 'Let\'s think step by step and output the final answer after "####".',
                }
            ],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "7005"},
            "extra_info": {"split": "train", "index": index, "answer": ANSWER, "question": QUESTION},
        }
        for index in range(2)
    ]
    table = pa.Table.from_pylist(rows)
    features = {name: {"dtype": "string", "_type": "Value"} for name in ("data_source", "ability")}
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose tokenizer has a chat template, with room for a question of GSM8K."""
    folder = chat_folder(tmp_path_factory.mktemp("verl") / "model")
    tokenizer = (folder / "tokenizer.json").read_bytes()
    make_model(folder, max_position_embeddings=1024)
    (folder / "tokenizer.json").write_bytes(tokenizer)
    return folder


def test_verls_own_file_passes_check_and_loads_unchanged(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "gsm8k" / "train.parquet"
    file.parent.mkdir()
    pq.write_table(verls_table(), file)
    settings = [
        f"model.path={model}",
        f"data.train_files={file}",
        f"data.val_files={file}",
        "data.max_prompt_length=300",
        "data.train_batch_size=2",
    ]
    assert main(["check", *settings]) == 0
    assert str(file) in capsys.readouterr().out
    cfg = load_config([], settings)
    found = load_prompts(cfg.data, cfg.data.val_files, Renderer.from_config(cfg.model, cfg.data), validation=True)
    prompt = found.prompts[1]
    assert (found.num_rows, prompt.data_source, prompt.ground_truth) == (2, "openai/gsm8k", "7005")
    assert prompt.extra_info == {"split": "train", "index": 1, "answer": ANSWER, "question": QUESTION}
    assert prompt.text.startswith(f"<|im_start|>user\n{QUESTION} Let's think")
    assert prompt.text.endswith('"####".<|im_end|>\n<|im_start|>assistant\n')


def test_the_gsm8k_converter_writes_verls_rows(tmp_path: Path):
    raw = tmp_path / "raw.parquet"
    pq.write_table(pa.table({"question": [QUESTION] * 2, "answer": [ANSWER] * 2}), raw)
    assert runpy.run_path(GSM8K)["convert"](raw, "train", tmp_path / "out" / "train.parquet") == 2
    written = pq.read_table(tmp_path / "out" / "train.parquet")
    assert written.to_pylist() == verls_table().to_pylist()
    assert written.schema.equals(verls_table().schema)


@pytest.mark.parametrize(
    ("row", "reason"),
    [({"question": "q", "answer": "no number"}, "no number after ####"), ({"prompt": "q"}, "no question and answer")],
)
def test_the_gsm8k_converter_names_the_row_it_cannot_use(tmp_path: Path, row: dict[str, Any], reason: str):
    raw = tmp_path / "raw.parquet"
    pq.write_table(pa.Table.from_pylist([row]), raw)
    with pytest.raises(SystemExit, match=f"row 1: {reason}"):
        runpy.run_path(GSM8K)["convert"](raw, "train", tmp_path / "train.parquet")


@pytest.mark.parametrize(
    ("answer", "number"), [("#### 1,234", "1234"), ("x #### -3.5", "-3.5"), ("####7", None), ("7", None)]
)
def test_final_answers_are_verls(answer: str, number: str | None):
    assert runpy.run_path(GSM8K)["final_answer"](answer) == number


def test_verls_keys_of_the_data_section_are_in_force(tmp_path: Path, model: Path):
    row = {"prompt": [{"role": "user", "content": "4+5="}], "set": "sums", "reward_model": {"ground_truth": "9"}}
    file = write_jsonl(tmp_path / "a.jsonl", [row])
    settings = [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={file}",
        "data.reward_fn_key=set",
        "data.val_batch_size=3",
        "data.filter_overlong_prompts_workers=2",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        "trainer.n_gpus_per_node=1",
    ]
    data = load_config([], settings).data
    assert (data.data_source_key, data.val_batch_size, data.num_workers) == ("set", 3, 2)
    assert load_prompts(data, data.train_files, Renderer(str(model))).prompts[0].data_source == "sums"
