"""Files that a run writes about itself, on a disk that is full: what a reader loses, and that training goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rl.config.run import RunConfig
from megatron_rl.runs import session
from tests.helpers.config import load
from tests.unit.config.test_folders import Steps


class DiskFillsUp(Steps):
    """In the first step the files of a reader begin to refuse every byte."""

    def __init__(self, cfg: RunConfig) -> None:
        super().__init__(cfg)
        self.folder = Path(cfg.trainer.run_dir)

    def learn(self, taken: int) -> int:
        if taken == 1:
            for name in ("rollouts.jsonl", "curves.png"):
                (self.folder / name).symlink_to("/dev/full")
        return taken


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_log_lines_that_cannot_be_written_end_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    cfg = load(tmp_path, f"trainer.default_local_dir={tmp_path / 'runs'}", "trainer.experiment_name=a")
    session.run(cfg, DiskFillsUp)
    folder, said = Path(cfg.trainer.run_dir), capsys.readouterr().err
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3] and (folder / "final").is_dir()
    assert said.count("samples of step 1 are lost") == 1 and "samples of step 2" not in said
    assert "curves.png was not drawn" in said
