"""Python's collector of cyclic garbage, kept from looking again and again at what stays."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Generator[None, None, None]:
    """No automatic collection in the block: for imports. They make a million objects, none of which is garbage, and a
    third of their time goes into collections.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def collections_of_new_objects() -> Generator[None, None, None]:
    """Collections in the block look at objects that are made in it: for building an engine, which asks for whole
    collections several times. Those from before are looked at again afterwards, unless they were left out already.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def leave_out_what_is_there() -> None:
    """Collect once; what is left stays out of later collections for good. For a process of a run once it is built."""
    gc.collect()
    gc.freeze()
