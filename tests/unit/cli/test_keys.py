"""`megatron-rl keys`, `--version`, options that are really settings, and readers that go away."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl import __version__
from megatron_rl.cli import PIPE_CLOSED, main
from megatron_rl.config.load import run_schema
from megatron_rl.config.text.keys import as_markdown, find_keys, kind_text

ROOT = Path(__file__).resolve().parents[3]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_docs_config_md_is_what_the_code_says() -> None:
    page = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    assert page == as_markdown(run_schema()), "run: megatron-rl keys --write docs/config.md"


def test_keys_lists_every_key_with_kind_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "keys")
    assert code == 0
    for key in run_schema().keys.values():
        assert f"{key.name}   " in out and " ".join(key.doc.split()) in out
    assert "model.path   required   (text)" in out
    assert "actor.loss.type   default ppo_clip   (ppo_clip | gspo | cispo" in out
    assert "rollout.top_p   default 1.0   (number, above 0, at most 1)" in out


@pytest.mark.parametrize(
    ("words", "first", "number"),
    [
        (["rollout.val"], "rollout.val.n", 5),
        (["trainer.seed"], "trainer.seed", 1),
        (["LOSS_agg"], "actor.loss_agg_mode", 2),
        (["optimizer", "offload"], "actor.optimizer_offload", 1),
    ],
)
def test_keys_of_a_section_or_with_words(words: list[str], first: str, number: int) -> None:
    names = [key.name for key in find_keys(run_schema(), words)]
    assert names[0] == first and len(names) >= number


@pytest.mark.parametrize(("word", "hint"), [("actro", "did you mean actor"), ("zzzz", "sections: actor")])
def test_keys_answers_a_word_that_nothing_has(word: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "keys", word)
    assert (code, out) == (2, "") and word in err and hint in err


def test_every_annotation_of_a_key_has_words() -> None:
    assert all(kind_text(key.annotation) for key in run_schema().keys.values())


def test_keys_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "keys", "--write", str(tmp_path / "config.md"))
    assert code == 0 and str(tmp_path / "config.md") in out
    assert (tmp_path / "config.md").read_text(encoding="utf-8") == as_markdown(run_schema())


def test_version_names_the_package_and_the_stack(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--version")
    assert code == 0 and out.startswith(f"megatron-rl {__version__} (") and "torch " in out and "ray " in out


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["--actor.tp=2"], "actor.tp=2"),
        (["--actor.tp", "2"], "actor.tp=..."),
        (["--trainer.experiment-name=x"], "trainer.experiment_name=x"),
        (["--rollout.engine_kwargs.block_size=32"], "rollout.engine_kwargs.block_size=32"),
        (["--experiment_name=x"], "trainer.experiment_name=x"),
    ],
)
@pytest.mark.parametrize("verb", ["check", "train", "eval"])
def test_a_setting_with_dashes_gets_a_hint(
    verb: str, arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, verb, "run.yaml", *arguments)
    assert (code, out) == (2, "")
    reason = "there is no such option -- settings are written without dashes"
    assert err == f"megatron-rl {verb}: {arguments[0]}: {reason}: {meant}\n"


@pytest.mark.parametrize("verb", ["keys", "--help", "--version"])
def test_a_listing_ends_quietly_when_its_reader_is_gone(verb: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_rl", verb], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    code = process.wait(timeout=60)
    assert (code, process.stderr.read()) == (PIPE_CLOSED, b"")
