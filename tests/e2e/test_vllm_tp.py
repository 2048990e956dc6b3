"""Real vLLM engines, of one rank and of two, on a Megatron actor's ranks: shared memory, plans, and what they say."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.errors import ReshardError, RolloutError
from megatron_rl.models import FAMILIES
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.models.engine import engine_params, live_params
from megatron_rl.models.rules import LocalParam, megatron_params
from megatron_rl.weights.safetensors import SafetensorsSource
from megatron_rl.weights.stacks import stacked
from tests.e2e.test_vllm_rollout import _gaps, _settings
from tests.helpers.rollouts import by_request
from tests.helpers.run_ranks import run_ranks
from tests.helpers.stack import needs_cpu_engine
from tests.helpers.tiny import load_hf_model, random_batch, save_tiny
from tests.helpers.training import build, live_parameters, train_step

PROMPTS = ((5, 17, 9), (40,) * 20, tuple(range(2, 120)) * 2)
NEW_TOKENS = 8
LAYOUTS = {
    "dp2": (),
    "pp2": ("actor.pp=2",),
    # The prompts pass what a step may compute: they are computed in parts.
    "tp2": ("actor.tp=2", "actor.use_distributed_optimizer=true", "rollout.max_num_batched_tokens=64"),
}
FAMILIES_OF_CPU_ENGINES = {
    "gemma3_text": True,
    "gemma": True,
    "glm4_moe": False,
    "gpt_oss": False,
    "llama": False,
    "mistral": False,
    "mixtral": False,
    "qwen2_moe": False,
    "qwen3": True,
    "qwen3_moe": False,
}
"""family -> whether its head is its embedding. vLLM's CPU build does not run MLA: DeepSeek's are in tests/gpu."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tp") / "model", "qwen2", tied=True, layers=2)


def _sampling(n: int, temperature: float) -> Any:
    from megatron_rl.rollout.engine import Sampling

    return Sampling(n=n, temperature=temperature, top_p=1.0, top_k=-1, max_tokens=NEW_TOKENS, stop_token_ids=())


def _tokens(engine: Any, n: int = 1, temperature: float = 0.0, seed: int | None = None) -> list[list[tuple[int, ...]]]:
    from megatron_rl.rollout.engine import Request

    requests = [Request(prompt, None if seed is None else seed + 10 * i) for i, prompt in enumerate(PROMPTS)]
    answers = by_request(engine.generate(requests, _sampling(n, temperature)), n)
    return [[sample.token_ids for sample in samples] for samples in answers]


def _config(folder: str, *overrides: str) -> Any:
    from megatron_rl.config.load import load_config

    data = Path(folder) / "train.jsonl"
    data.touch()
    # All ranks are here at once: none may read a file that another has just emptied.
    own = Path(folder) / f"tokenizer-{os.getpid()}.json"
    own.write_text("{}")
    own.replace(Path(folder) / "tokenizer.json")
    return load_config(
        [],
        [
            f"model.path={folder}",
            "model.dtype=float32",
            f"data.train_files={data}",
            "data.max_prompt_length=400",
            "data.max_response_length=100",
            "actor.optim.lr=3e-3",
            "actor.optim.lr_warmup_steps=0",
            "cluster.n_gpus_per_node=2",
            "rollout.tp=2",
            "rollout.max_num_seqs=32",
            *overrides,
        ],
    )


def _layouts_on_rank(
    rank: int, world: int, folder: str, layouts: dict[str, tuple[str, ...]]
) -> dict[str, dict[str, Any]]:
    return {name: _layout_on_rank(rank, world, folder, overrides) for name, overrides in layouts.items()}


def _layout_on_rank(rank: int, world: int, folder: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """An actor and its part of an engine of two ranks, before and after one update."""
    from megatron.core import parallel_state

    from megatron_rl.algos.token_losses import nll_loss
    from megatron_rl.mcore import convert
    from megatron_rl.parallel.topology import topology_of
    from megatron_rl.trainers.placement import engine_order
    from megatron_rl.workers.colocated import engine_layout, start_engine
    from megatron_rl.workers.model import TrainedModel
    from megatron_rl.workers.phases import RankMemory

    cfg = _config(folder, *overrides)
    trainable = build(folder, cfg.actor, world)
    policy = trainable.model
    order = engine_order(cfg, policy.shape, topology_of(cfg.actor, world))
    layout = engine_layout(cfg, order)
    engine, publisher = start_engine(cfg, TrainedModel(trainable), RankMemory(), layout, device="cpu", rank=rank)
    found: dict[str, Any] = {"order": order, "part": engine.part, "shared": sorted(engine.shared)}
    addresses = {name: tensor.data_ptr() for name, tensor in live_parameters(policy).items()}
    for version in (0, 1):
        found[f"sync {version}"] = publisher.publish(version, expect_change=version > 0)
        found[f"export {version}"] = {name: tensor.clone() for name, tensor in convert.export_hf(policy)}
        found[f"greedy {version}"] = _tokens(engine)
        found[f"seeded {version}"] = _tokens(engine, n=2, temperature=1.0, seed=11)
        # The trainer's own random numbers differ between its ranks.
        torch.manual_seed(rank)
        found[f"unseeded {version}"] = [_tokens(engine, n=2, temperature=1.0) for _ in range(2)]
        last_stage = parallel_state.is_pipeline_last_stage()
        gap = _gaps(engine, trainable, 1.0) if cfg.actor.pp == 1 else 0.0
        found[f"gap {version}"] = gap if last_stage else 0.0
        if version == 0:
            train_step(trainable, [random_batch(7, (30, 41), 128)], nll_loss, 1.0)
    found["stay"] = addresses == {name: one.data_ptr() for name, one in live_parameters(policy).items()}
    found["refused"] = ""
    if engine.shared:
        with pytest.raises(RolloutError, match="are the trainer's own memory"):
            engine.update_weights([], 2)
    engine.close()
    parallel_state.destroy_model_parallel()
    return found


def model_of(folder: str, weights: dict[str, torch.Tensor]) -> Any:
    """transformers' model of the folder's config with these weights, all of them."""
    from transformers import AutoModelForCausalLM

    with TemporaryDirectory() as other:
        shutil.copy(Path(folder) / "config.json", other)
        files = {name: tensor.contiguous() for name, tensor in stacked(weights.items())}
        save_file(files, Path(other) / "model.safetensors", metadata={"format": "pt"})
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            other, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    model, said = loaded
    assert not said["missing_keys"] and not said["unexpected_keys"], said
    return model


def _assert_followed(folder: str, ranks: list[dict[str, dict[str, Any]]]) -> None:
    """Greedy outputs equal transformers', before and after an update, and both ranks sample alike, with
    seeds and without.
    """
    for name in ranks[0]:
        here, other = (rank[name] for rank in ranks)
        assert [here["part"].tp_rank, other["part"].tp_rank] == [here["order"].index(rank) for rank in (0, 1)]
        assert here["stay"] and other["stay"], "an update leaves the trainer's weights in place"
        for version in (0, 1):
            for what in ("greedy", "seeded", "unseeded"):
                assert here[f"{what} {version}"] == other[f"{what} {version}"], (name, what, version)
            first, second = here[f"unseeded {version}"]
            assert first != second, "samples without seeds differ from call to call"
            model = model_of(folder, here[f"export {version}"])
            assert here[f"greedy {version}"] == [[_greedy(model, prompt)] for prompt in PROMPTS], (name, version)
            assert max(here[f"gap {version}"], other[f"gap {version}"]) < 1e-4
            for report in (here[f"sync {version}"], other[f"sync {version}"]):
                assert name == "full" or report.moved_bytes == report.minimum_bytes, "W4"
        assert here["seeded 0"] != here["seeded 1"]
        assert here["seeded 0"] == ranks[0]["dp2"]["seeded 0"], "samples with seeds do not depend on the layout"


@needs_cpu_engine
def test_engines_of_two_ranks_follow_every_layout_of_the_actor(folder: str) -> None:
    """With TP 2 on both sides and one KV head a rank, all of the engine is the trainer's memory, and nothing moves."""
    ranks = run_ranks(2, _layouts_on_rank, folder, LAYOUTS, timeout=400.0)
    _assert_followed(folder, ranks)
    for rank in ranks:
        assert {name.split(".")[-2] for name in rank["dp2"]["shared"]} == {
            "input_layernorm",
            "post_attention_layernorm",
            "norm",
        }
        report = rank["tp2"]["sync 1"]
        assert (report.local_bytes, report.moved_bytes) == (0, 0) and report.aliased_bytes > 0


@needs_cpu_engine
@pytest.mark.slow
@pytest.mark.parametrize(("family", "tied"), FAMILIES_OF_CPU_ENGINES.items())
def test_engines_of_further_families_follow_every_layout_of_the_actor(tmp_path: Path, family: str, tied: bool) -> None:
    """Resharded, shared, and told whole weights."""
    folder = save_tiny(tmp_path / "model", family, tied=tied, layers=2)
    tp2 = (*LAYOUTS["tp2"], "actor.sequence_parallel=true")
    layouts = LAYOUTS | {"tp2": tp2, "full": ("rollout.weight_sync=full",)}
    ranks = run_ranks(2, _layouts_on_rank, folder, layouts, timeout=550.0)
    _assert_followed(folder, ranks)
    assert all(rank["tp2"]["sync 1"].aliased_bytes > 0 for rank in ranks)
    assert all(rank["full"]["sync 1"].aliased_bytes == 0 for rank in ranks)


def _experts_on_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    """An actor and its engine, with everything shared that can be; log-probabilities before and after an update."""
    from megatron_rl.algos.token_losses import nll_loss
    from megatron_rl.workers.colocated import engine_layout, start_engine
    from megatron_rl.workers.model import TrainedModel
    from megatron_rl.workers.phases import RankMemory

    cfg = _config(folder, "cluster.n_gpus_per_node=1", "rollout.tp=1", "data.train_batch_size=8")
    trainable = build(folder, cfg.actor, world)
    layout = engine_layout(cfg, (0,))
    engine, publisher = start_engine(cfg, TrainedModel(trainable), RankMemory(), layout, device="cpu", rank=rank)
    gaps, reports = [], []
    for version in (0, 1):
        reports.append(publisher.publish(version, expect_change=version > 0))
        gaps.append(_gaps(engine, trainable, 1.0))
        if version == 0:
            train_step(trainable, [random_batch(7, (30, 41), 128)], nll_loss, 1.0)
    storage = {one.untyped_storage().data_ptr() for one in live_parameters(trainable.model).values()}
    engine.begin_update()
    inside = {name for name, one in engine.parameters().items() if one.untyped_storage().data_ptr() in storage}
    shared = engine.shared
    engine.close()
    return {"gaps": gaps, "reports": reports, "shared": shared, "inside": inside}


WEIGHTS = {"w13_weight", "w2_weight"}


@needs_cpu_engine
@pytest.mark.parametrize(
    ("family", "stacks"),
    [
        ("qwen3_moe", WEIGHTS),
        pytest.param("glm4_moe", WEIGHTS, marks=pytest.mark.slow),
        pytest.param("gpt_oss", WEIGHTS | {"w13_bias", "w2_bias"}, marks=pytest.mark.slow),
    ],
)
def test_experts_of_the_engine_are_the_memory_of_the_trainer(tmp_path: Path, family: str, stacks: set[str]) -> None:
    """W6, W7: also where the engine's kernel needs another form, which is made from that memory at each sync."""
    folder = save_tiny(tmp_path / "model", family, tied=False, layers=2)
    (found,) = run_ranks(1, _experts_on_rank, folder, timeout=240.0)
    assert max(found["gaps"]) < 1e-4, found["gaps"]
    assert found["inside"] == found["shared"]
    experts = {name.rpartition(".")[2] for name in found["shared"] if ".experts." in name}
    assert experts == stacks
    assert all(one.aliased_bytes > 2 * one.local_bytes > 0 == one.moved_bytes for one in found["reports"])


def _routers_on_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Routers of an engine of bfloat16 and of its trainer, before and after an update."""
    from megatron_rl.algos.token_losses import nll_loss
    from megatron_rl.mcore import convert
    from megatron_rl.workers.colocated import engine_layout, start_engine
    from megatron_rl.workers.model import TrainedModel
    from megatron_rl.workers.phases import RankMemory

    single = ("cluster.n_gpus_per_node=1", "rollout.tp=1", "data.train_batch_size=8", "model.dtype=bfloat16")
    found: dict[str, Any] = {}
    for sync in ("reshard", "full"):
        cfg = _config(folder, *single, f"rollout.weight_sync={sync}")
        trainable = build(folder, cfg.actor, world, "bfloat16")
        layout = engine_layout(cfg, (0,))
        engine, publisher = start_engine(cfg, TrainedModel(trainable), RankMemory(), layout, device="cpu", rank=rank)
        for version in (0, 1):
            publisher.publish(version, expect_change=version > 0)
            export = dict(convert.export_hf(trainable.model))
            live = {name: one for name, one in engine.parameters().items() if name.endswith("mlp.gate.weight")}
            found[f"{sync} {version}"] = [(export[name].clone(), one.clone()) for name, one in live.items()]
            if version == 0:
                train_step(trainable, [random_batch(7, (30, 41), 128)], nll_loss, 1.0)
        found[f"{sync} shared"] = engine.shared
        engine.close()
    return found


@needs_cpu_engine
@pytest.mark.slow
def test_routers_that_vllm_has_in_float32_follow_a_trainer_of_bfloat16(tmp_path: Path) -> None:
    """W7: they have the trainer's values, which are bfloat16 ones, after every update in both ways."""
    folder = save_tiny(tmp_path / "model", "glm4_moe", tied=False, layers=2)
    (found,) = run_ranks(1, _routers_on_rank, folder, timeout=240.0)
    for case in ("reshard 0", "reshard 1", "full 0", "full 1"):
        ((trained, live),) = found[case]
        assert (trained.dtype, live.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(trained.float(), live), case
    assert not torch.equal(found["reshard 0"][0][1], found["reshard 1"][0][1])
    assert any(name.endswith("w13_weight") for name in found["reshard shared"])
    assert not any(name.endswith("gate.weight") for name in found["reshard shared"])


def _greedy(model: Any, prompt: tuple[int, ...]) -> tuple[int, ...]:
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return tuple(out[0, len(prompt) :].tolist())


def _slices(param: LocalParam, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a parameter holds of a checkpoint."""
    found = torch.zeros(param.shape)
    rows, top = found.view(-1, *found.shape[-1:]) if found.dim() > 1 else found, 0
    for block in param.blocks:
        part = tensors[block.hf_name][slice(*block.rows)]
        rows[top : top + block.num_rows] = part if block.cols is None else part[:, slice(*block.cols)]
        top += block.num_rows
    return found


def _families_on_rank(rank: int, world: int, folders: dict[str, str]) -> dict[str, Any]:
    """Each family's engine filled in both ways."""
    from megatron_rl.rollout.engine import make_engine

    found: dict[str, Any] = {}
    for family, folder in folders.items():
        engine = make_engine(_settings(folder, ranks=tuple(range(world))))
        shape = read_model_shape(folder)
        table = list(engine_params(shape, FAMILIES[shape.architecture], tp=world, tp_rank=rank))
        tensors = dict(SafetensorsSource(folder).tensors())
        live = live_params(table, engine.shapes())
        with pytest.raises(ReshardError, match=r"the engine lacks model\.norm\.extra"):
            live_params([*table, type(table[0])("model.norm.extra", (1,), ())], engine.shapes())
        with pytest.raises(ReshardError, match=r"the engine's model\.norm\.weight is in no table"):
            live_params([param for param in table if param.name != "model.norm.weight"], engine.shapes())
        engine.update_weights(tensors.items(), 0)
        whole = _tokens(engine)
        engine.begin_update()
        held = engine.parameters()
        scaled = {name: one * 1.25 if one.dim() > 1 else one for name, one in tensors.items()}
        for param in live:
            held[param.name].copy_(_slices(param, scaled))
        engine.end_update(1)
        changed = _tokens(engine)
        engine.update_weights(scaled.items(), 2)
        found[family] = {"whole": whole, "parts": changed, "scaled": _tokens(engine), "dtypes": held}
        found[family]["dtypes"] = {str(tensor.dtype) for tensor in held.values()}
        engine.close()
    return found


@needs_cpu_engine
@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_tables_of_all_families_are_those_of_live_engines(tmp_path: Path, tp: int) -> None:
    """Names, shapes and dtypes agree with the table; writing a table's parts equals giving whole tensors, in layers
    with experts too, whose kernels want them packed. Greedy answers are transformers'. A surplus or a lack is an error
    that names it.
    """
    with_experts = ("qwen3_moe", "gpt_oss")
    families = (
        ("qwen2", "llama", "qwen3", "mixtral", "gemma3_text", "glm4_moe", *with_experts) if tp == 1 else with_experts
    )
    folders = {name: save_tiny(tmp_path / name, name, tied=False, layers=2) for name in families}
    models = {family: load_hf_model(folder) for family, folder in folders.items()}
    for rank in run_ranks(tp, _families_on_rank, folders, timeout=400.0):
        for family, found in rank.items():
            assert found["whole"] == [[_greedy(models[family], prompt)] for prompt in PROMPTS], family
            assert found["parts"] == found["scaled"] != found["whole"], family
            assert found["dtypes"] == {"torch.float32"}


def _apart_on_rank(rank: int, world: int, folder: str) -> list[Any]:
    """Rank 1 has the weights, ranks 2 and 0 are an engine: greedy tokens after each of two syncs."""
    from megatron_rl.parallel.p2p import P2PGroup
    from megatron_rl.reshard.execute import Transfer
    from megatron_rl.reshard.plan import Shard, make_plan
    from megatron_rl.reshard.publisher import ReshardPublisher
    from megatron_rl.rollout.engine import make_engine

    shape = read_model_shape(folder)
    family, ranks = FAMILIES[shape.architecture], (2, 0)
    layers = range(shape.num_layers)
    trained = list(megatron_params(shape, family, tp=1, tp_rank=0, layers=layers, pre_process=True, post_process=True))
    engine, live = None, ()
    if rank in ranks:
        with pytest.raises(RolloutError, match="does not belong"):
            make_engine(_settings(folder, ranks=(1,)))
        engine = make_engine(_settings(folder, ranks=ranks))
        assert engine.part is not None and engine.part.tp_rank == ranks.index(rank)
        table = engine_params(shape, family, tp=2, tp_rank=engine.part.tp_rank)
        live = live_params(table, engine.shapes())
    needed = [Shard(r, tuple(engine_params(shape, family, tp=2, tp_rank=i))) for i, r in enumerate(ranks)]
    sources = {param.name: _slices(param, load_file(f"{folder}/model.safetensors")) for param in trained}
    transfer = Transfer(
        make_plan([Shard(1, tuple(trained))], needed),
        P2PGroup(timeout_s=200.0),
        trained if rank == 1 else [],
        live,
        trainer_dtype=torch.float32,
        engine_dtype=torch.float32,
        cap_bytes=1 << 20,
    )
    publisher = ReshardPublisher(transfer, engine, (lambda: sources) if rank == 1 else None)
    found: list[Any] = []
    for version in (0, 1):
        publisher.publish(version, expect_change=version > 0)
        found += [_tokens(engine)] if engine is not None else []
        for tensor in sources.values():
            tensor.mul_(1.25)
    if engine is not None:
        engine.close()
    return found


@needs_cpu_engine
@pytest.mark.slow
def test_an_engine_on_other_ranks_than_the_trainer_takes_any_of_them_in_any_order(folder: str) -> None:
    """Ranks 2 and 0 of three, in this order; rank 1, which trains, has no part in building it."""
    last, none, first = run_ranks(3, _apart_on_rank, folder, timeout=400.0)
    model = load_hf_model(folder)
    assert none == [] and first == last and first[0] != first[1]
    assert first[0] == [[_greedy(model, prompt)] for prompt in PROMPTS]
