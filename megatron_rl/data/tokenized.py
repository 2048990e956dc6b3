"""Rows to tokens: in several processes where that is asked for, and kept in files for later runs.

A kept file is found by a digest of everything that its content depends on: the values that rendering reads of
every row, the settings, the tokenizer's files, the libraries and this package's own code. A change of any of
them is another file name, so an old file is never read for new rows. Length limits are no part of it: they are
applied to what is kept.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data.columns import rendered_values
from megatron_rl.data.files import BadRow, DataRow
from megatron_rl.data.formats import Values
from megatron_rl.data.render import Renderer
from megatron_rl.errors import DataError, MegatronRLError, MissingDependency

_LOG = logging.getLogger(__name__)
LEAST_ROWS = 1024
"""Fewest rows for a process of their own: it takes ten seconds of a core to import transformers."""


class Rendered(NamedTuple):
    """What a row became."""

    token_ids: list[int]
    text: str = ""
    """RL: the prompt after the chat template."""
    loss_mask: list[bool] = []  # noqa: RUF012 - a NamedTuple's default is not shared state here: nothing mutates it
    """SFT: one entry a token, whether the model is trained to predict it."""
    fault: str | None = None
    """Why the row cannot be used; then the rest is empty."""


RenderFn = Callable[[DataConfig, Renderer, Values], Rendered]
"""Renders a row's values; a function of a module, since other processes import it. Raises BadRow."""


class RenderedRows(NamedTuple):
    """All rows rendered, in order."""

    rows: list[Rendered]
    num_cached: int
    """Rows that came out of data.cache_dir."""


def render_rows(cfg: DataConfig, rows: Sequence[DataRow], renderer: Renderer, render: RenderFn) -> RenderedRows:
    """Render every row, in cfg.num_workers processes; rows of a file that cfg.cache_dir holds are read from there.

    Raises DataError: a kept file that cannot be read, a process that died, what `render` raises beside BadRow.
    """
    found = _rendered_rows(cfg, rows, renderer, render)
    return found._replace(rows=[_known(rendered, renderer) for rendered in found.rows])


def _known(rendered: Rendered, renderer: Renderer) -> Rendered:
    """The row, or its fault where an id is no token of the model: no part of what is kept, which has no model."""
    limit = renderer.model_vocab_size
    odd = max(rendered.token_ids, default=-1)
    if limit is None or odd < limit:
        return rendered
    text = renderer.decode([odd], skip_special_tokens=False)
    reason = f"token {text!r} has the id {odd}, and the model knows {limit} tokens (vocab_size of its config.json)"
    return Rendered([], fault=f"{reason} -- use the model's own tokenizer, or one whose embedding holds all tokens")


def _rendered_rows(cfg: DataConfig, rows: Sequence[DataRow], renderer: Renderer, render: RenderFn) -> RenderedRows:
    fingerprint = renderer.fingerprint() if cfg.cache_dir else None
    if cfg.cache_dir is None or fingerprint is None:
        if cfg.cache_dir is not None:
            _LOG.warning("data.cache_dir is not used: the chat template writes today's date into the prompts")
        return RenderedRows(_render_all(cfg, rows, renderer, render), 0)
    files = [list(of_file) for _, of_file in groupby(rows, key=lambda row: row.file)]
    kept = [Path(cfg.cache_dir) / f"{_digest(cfg, of_file, fingerprint, render)}.parquet" for of_file in files]
    found = [_read(path) if path.is_file() else None for path in kept]
    fresh = iter(_render_all(cfg, _missing(files, found), renderer, render))
    result: list[Rendered] = []
    for of_file, path, rendered in zip(files, kept, found, strict=True):
        if rendered is None:
            rendered = [next(fresh) for _ in of_file]
            _write(path, rendered)
        if len(rendered) != len(of_file):
            raise DataError(f"{path}: holds {len(rendered)} of {len(of_file)} rows -- delete it")
        result += rendered
    return RenderedRows(result, sum(len(rendered) for rendered in found if rendered is not None))


def _missing(files: list[list[DataRow]], found: Sequence[object | None]) -> list[DataRow]:
    return [row for of_file, rendered in zip(files, found, strict=True) if rendered is None for row in of_file]


def _render_all(cfg: DataConfig, rows: Sequence[DataRow], renderer: Renderer, render: RenderFn) -> list[Rendered]:
    """What every row becomes; one that could not be read keeps its fault."""
    fresh = iter(_render_sound(cfg, [row.values for row in rows if row.fault is None], renderer, render))
    return [next(fresh) if row.fault is None else Rendered([], fault=row.fault) for row in rows]


def _render_sound(cfg: DataConfig, values: list[Values], renderer: Renderer, render: RenderFn) -> list[Rendered]:
    num_parts = min(cfg.num_workers, len(values) // LEAST_ROWS)
    if num_parts <= 1:
        return _render_part(cfg, renderer, render, values)
    bounds = [len(values) * part // num_parts for part in range(num_parts + 1)]
    parts = [values[start:end] for start, end in pairwise(bounds)]
    with ThreadPoolExecutor(num_parts) as threads:
        done = threads.map(lambda part: _render_elsewhere(cfg, renderer, render, part), parts)
        return [rendered for part in done for rendered in part]


def _render_part(cfg: DataConfig, renderer: Renderer, render: RenderFn, values: list[Values]) -> list[Rendered]:
    rendered: list[Rendered] = []
    for row in values:
        try:
            rendered.append(render(cfg, renderer, row))
        except BadRow as fault:
            rendered.append(Rendered([], fault=str(fault)))
    return rendered


def _render_elsewhere(cfg: DataConfig, renderer: Renderer, render: RenderFn, values: list[Values]) -> list[Rendered]:
    """_render_part in a fresh interpreter: a fork would copy the controller's threads in an unknown state."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from megatron_rl.data.tokenized import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps((cfg, renderer, render, values)),
        stdout=subprocess.PIPE,
        # One process a core is the caller's choice: no threads inside.
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
    )
    if done.returncode != 0:
        raise DataError(
            f"a process that tokenizes rows ended with status {done.returncode} (its output is above) "
            "-- set data.num_workers=1 to see the error here"
        )
    answer = pickle.loads(done.stdout)
    if isinstance(answer, MegatronRLError):
        raise answer
    return answer


def main() -> None:
    """What such a process runs: arguments of _render_part in on stdin, its result or error out on stdout."""
    # What libraries print must not mix with the answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        answer: object = _render_part(*pickle.load(sys.stdin.buffer))
    except MegatronRLError as error:
        answer = error
    with answers:
        pickle.dump(answer, answers)


def _digest(cfg: DataConfig, rows: Sequence[DataRow], fingerprint: str, render: RenderFn) -> str:
    digest = hashlib.sha256(fingerprint.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    digest.update(f"{render.__module__}.{render.__qualname__} {cfg.string_prompt}\n".encode())
    for row in rows:
        digest.update(repr([row.fault, *rendered_values(cfg, row.values)]).encode())
    return digest.hexdigest()


def _read(path: Path) -> list[Rendered]:
    pa, pq = _parquet()
    try:
        with pq.ParquetFile(path) as file:
            columns = file.read(columns=list(Rendered._fields)).to_pydict()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: kept rows cannot be read ({error}) -- delete the file") from error
    return [Rendered(*values) for values in zip(*columns.values(), strict=True)]


def _write(path: Path, rows: list[Rendered]) -> None:
    """In one move: a reader sees the whole file or none."""
    pa, pq = _parquet()
    types = (pa.list_(pa.int32()), pa.large_string(), pa.list_(pa.bool_()), pa.string())
    columns = [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), types, strict=True)]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    pq.write_table(pa.table(dict(zip(Rendered._fields, columns, strict=True))), part)
    os.replace(part, path)


def _parquet() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingDependency("data.cache_dir needs pyarrow -- pip install pyarrow") from error
    return pa, pq
