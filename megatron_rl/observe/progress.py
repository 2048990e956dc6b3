"""Progress of long work: bars on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

logger = logging.getLogger(__name__)

Advance = Callable[[int], None]
"""advance(n): n more items are done."""


class Progress:
    """Phases without a length (`phase`) and work of known length (`bar`), from any thread.

    On a terminal, open phases and bars are shown below the printed lines. Elsewhere a phase prints its start and
    its seconds, and a bar prints a line at most every `every_s` seconds.
    """

    def __init__(self, console: Console | None = None) -> None:
        """console: where to print; standard output if not given."""
        self._console = console or _Console(highlight=False, soft_wrap=True)
        self._lock = threading.Lock()
        self._open = 0
        self._live: RichProgress | None = None

    def say(self, line: str) -> None:
        """Print a line (above the bars)."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show that a phase runs, and its seconds once it ended without an error."""
        start = time.perf_counter()
        if self._console.is_terminal:
            with self._task(name, None):
                yield
        else:
            self.say(f"{name} ...")
            yield
        self.say(f"{name}: {time.perf_counter() - start:.1f} s")

    @contextmanager
    def bar(self, name: str, total: int, every_s: float | None = 10.0) -> Iterator[Advance]:
        """Show the progress of a task; yields the function that advances it.

        every_s: minimum seconds between two lines if there is no terminal; None prints none.
        """
        if self._console.is_terminal:
            with self._task(name, total) as (live, task):
                yield lambda items: live.advance(task, items)
            return
        start = last = time.perf_counter()
        done = 0

        def advance(items: int) -> None:
            nonlocal done, last
            with self._lock:
                done += items
                now = time.perf_counter()
                due = every_s is not None and now - last >= every_s
                last = now if due else last
                line = f"{name}: {done}/{total} after {now - start:.0f} s"
            if due:
                self.say(line)

        yield advance

    @contextmanager
    def _task(self, name: str, total: int | None) -> Iterator[tuple[RichProgress, TaskID]]:
        """A bar in the shared live display, which is open while any bar is."""
        with self._lock:
            if self._live is None:
                self._live = self._display()
                self._live.start()
            live = self._live
            self._open += 1
            task = live.add_task(name, total=total)
        try:
            yield live, task
        finally:
            with self._lock:
                live.remove_task(task)
                self._open -= 1
                if self._open == 0:
                    live.stop()
                    self._live = None

    def _display(self) -> RichProgress:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            _Count(),
            TimeElapsedColumn(),
        )
        return RichProgress(*columns, console=self._console, transient=True)


class _Console(Console):
    """Standard output that may fail (`| head` ends, the disk is full): the run continues without it."""

    def on_broken_pipe(self) -> None:
        self._go_silent("its reader has ended")

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except (OSError, ValueError) as error:
            # ValueError: the stream was closed in this process.
            self._go_silent(str(error))

    def _go_silent(self, reason: str) -> None:
        del self._buffer[:]
        if self.quiet:
            return
        self.quiet = True
        logger.warning("standard output cannot be written (%s): the run continues without it", reason)
        with contextlib.suppress(OSError, ValueError):
            # The interpreter flushes the stream once more at exit, and would report the error again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Count(MofNCompleteColumn):
    """done/total, and nothing for work of unknown length."""

    def render(self, task):  # type: ignore[no-untyped-def]
        return super().render(task) if task.total is not None else TextColumn("").render(task)
