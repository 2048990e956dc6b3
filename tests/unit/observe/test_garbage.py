from __future__ import annotations

import gc
import weakref

from megatron_rl.observe.garbage import collections_of_new_objects, no_collections


class Ring:
    def __init__(self) -> None:
        self.me = self


def test_imports_are_made_without_collections_and_they_go_on_after() -> None:
    assert gc.isenabled()
    with no_collections():
        with no_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collection_looks_at_new_objects_and_garbage_from_before_is_not_kept_for_good() -> None:
    gc.collect()
    assert gc.get_freeze_count() == 0
    old = weakref.ref(Ring())
    with collections_of_new_objects():
        new = weakref.ref(Ring())
        gc.collect()
        assert new() is None and old() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert old() is None
