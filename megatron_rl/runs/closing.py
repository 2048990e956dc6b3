"""Closing what a block has used, without hiding the block's own error and without ending a run that was good."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def closing(what: str, close: Callable[[], object]) -> Generator[None, None, None]:
    """Close after the block. An error of `close` is a note on the block's own error, or a warning if it has none."""
    try:
        yield
    except BaseException as error:
        failure = failure_of(close)
        if failure is not None:
            error.add_note(f"{what} could not be closed either: {type(failure).__name__}: {failure}")
        raise
    failure = failure_of(close)
    if failure is not None:
        logger.warning(
            "%s could not be closed (%s: %s); what was done before stands", what, type(failure).__name__, failure
        )


def failure_of(work: Callable[[], object]) -> Exception | None:
    """What the work raises; None if it does not."""
    try:
        work()
    except Exception as error:
        return error
    return None
