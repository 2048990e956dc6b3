"""Stop texts that are, or hold, special tokens: vLLM stops where the yardstick engine does."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from megatron_rl.data.render import Renderer
from tests.e2e.test_vllm_rollout import _settings
from tests.helpers.data import chat_folder
from tests.helpers.rollouts import by_request
from tests.helpers.run_ranks import run_ranks
from tests.helpers.stack import needs_cpu_engine

STOPS = (["<|im_end|>"], ["<|im_end|><|im_end|>"], ["x", "<|im_end|><|im_end|><|im_end|>"], ["x"], [])
NEW_TOKENS = 6
Found = list[tuple[tuple[int, ...], str]]


def _stops_on_rank(rank: int, world: int, folder: str) -> dict[str, Found]:
    """What each engine answers for each of STOPS, with a model that writes <|im_end|> alone; another token ends."""
    from megatron_rl.rollout.engine import Request, Sampling, make_engine
    from megatron_rl.rollout.hf_engine import HfEngine

    renderer = Renderer(folder)
    (end,) = renderer.encode("<|im_end|>")
    yardstick = HfEngine(_settings(folder, "hf", max_model_len=64, needs_text=True))
    weights = {name: torch.zeros_like(tensor) for name, tensor in yardstick.parameters().items()}
    for name, tensor in weights.items():
        if "norm" in name:
            tensor.fill_(1.0)
        elif "embed_tokens" in name or "lm_head" in name:
            # Token 20 is the prompt; its embedding and that of `end` both lead to `end`.
            tensor[end] = 1.0
            tensor[20] = 0.5 if "embed_tokens" in name else 0.0
    found: dict[str, Found] = {}
    for name in ("hf", "vllm"):
        engine = yardstick if name == "hf" else make_engine(_settings(folder, max_model_len=64, needs_text=True))
        engine.update_weights(weights.items(), 0)
        found[name] = []
        for stop in STOPS:
            sampling = Sampling(1, 0.0, 1.0, -1, NEW_TOKENS, *renderer.stops(stop))
            ((sample,),) = by_request(engine.generate([Request((20,))], sampling))
            assert set(sample.token_ids) == {end}
            found[name].append((sample.token_ids, sample.finish_reason))
        engine.close()
    return found


@needs_cpu_engine
def test_vllm_stops_at_special_tokens_as_transformers_does(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "model")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "<|endoftext|>"}))
    (found,) = run_ranks(1, _stops_on_rank, str(folder), timeout=240.0)
    assert [(len(ids), reason) for ids, reason in found["hf"]] == [
        (1, "stop"),
        (2, "stop"),
        (3, "stop"),
        (NEW_TOKENS, "length"),
        (NEW_TOKENS, "length"),
    ]
    assert found["vllm"] == found["hf"]
