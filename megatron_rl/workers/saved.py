"""A saved folder is loaded again: it must render as the run does, or it is another model to whoever loads it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from megatron_rl.config.run import RunConfig
from megatron_rl.data.files import BadRow
from megatron_rl.data.render import Renderer
from megatron_rl.errors import CheckpointError, DataError, MegatronRLError
from megatron_rl.weights.companions import copy_companions, set_chat_template
from megatron_rl.weights.end_token import name_end_token

_ASKED = [{"role": "user", "content": "7"}]
_ANSWERED = [*_ASKED, {"role": "assistant", "content": "7"}, {"role": "user", "content": "7"}]
_TOKENS = 64


def run_renderer(cfg: RunConfig, model_folder: str) -> Renderer:
    """As the run renders, with the end ids that the folder's configs name."""
    return Renderer(
        cfg.model.tokenizer_path or cfg.model.path,
        cfg.data.chat_template,
        cfg.data.apply_chat_template_kwargs,
        model_folder,
        cfg.model.eos_token,
        cfg.model.chat_template,
    )


def is_rewritten(cfg: RunConfig) -> bool:
    """Whether a save has other files than model.path's: of two folders, a template or a tokenizer.json made here."""
    model = cfg.model
    own = model.tokenizer_path is None and model.chat_template is None and cfg.data.chat_template == "tokenizer"
    return not (own and (Path(model.path) / "tokenizer.json").is_file())


def check_saved(folder: Path, renderer: Renderer, cfg: RunConfig) -> None:
    """Load the tokenizer of a written folder. Raises CheckpointError that names what differs from `renderer`."""
    try:
        saved = Renderer(str(folder), "tokenizer", cfg.data.apply_chat_template_kwargs, str(folder))
    except MegatronRLError as error:
        raise CheckpointError(f"{folder}: the saved tokenizer cannot be loaded again ({error})") from error
    size = renderer.vocab_size
    texts = [renderer.decode([token], skip_special_tokens=False) for token in range(0, size, max(1, size // _TOKENS))]
    facts: dict[str, Callable[[Renderer], object]] = {
        "number of tokens": lambda of: of.vocab_size,
        "end ids": lambda of: sorted(of.eos_token_ids),
        "ids of texts": lambda of: [of.encode(text) for text in texts],
        "a question": lambda of: of.prompt_text(_ASKED),
        "a conversation": lambda of: of.prompt_text(_ANSWERED),
    }
    odd = [
        f"{name}: the run has {wanted!r}, the saved folder {found!r}"
        for name, wanted, found in ((name, _outcome(f, renderer), _outcome(f, saved)) for name, f in facts.items())
        if wanted != found
    ]
    if odd:
        raise CheckpointError(
            f"{folder}: the saved tokenizer does not render as the run does: {'; '.join(odd)} -- with another "
            "config.json beside it transformers takes another class for it: name a tokenizer that is read alike in "
            "model.path's folder and in its own"
        )


def _outcome(fact: Callable[[Renderer], object], renderer: Renderer) -> object:
    try:
        return fact(renderer)
    except (BadRow, DataError) as error:
        return type(error).__name__


def rehearse(cfg: RunConfig) -> None:
    """Check before the run that its save will render as it does. Raises CheckpointError, as check_saved."""
    model, renderer = Path(cfg.model.path), run_renderer(cfg, cfg.model.path)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_companions(folder, model, Path(renderer.tokenizer_path), cfg.model.override_config)
        template = renderer.saved_template()
        if template is not None:
            set_chat_template(folder, template)
        if cfg.model.eos_token is not None:
            name_end_token(folder, cfg.model.eos_token)
        check_saved(folder, renderer, cfg)
