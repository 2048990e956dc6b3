"""Which beats count as signs of life."""

from __future__ import annotations

import threading

from megatron_rl.observe.beat import beat, is_unwatched, last_beat, threads_count, unwatched


def from_a_thread(what: str) -> None:
    thread = threading.Thread(target=beat, args=(what,))
    thread.start()
    thread.join()


def test_the_last_beat_is_known_with_its_number_and_time():
    before = last_beat()
    beat("micro-batch 1 of 2")
    beat("micro-batch 2 of 2")
    last = last_beat()
    assert (last.what, last.number) == ("micro-batch 2 of 2", before.number + 2) and last.at >= before.at


def test_other_threads_hide_no_hang_of_the_main_one_unless_it_waits_for_them():
    beat("the step")
    from_a_thread("a checkpoint's tensor")
    assert last_beat().what == "the step"
    with threads_count():
        from_a_thread("a checkpoint's tensor")
    assert last_beat().what == "a checkpoint's tensor"
    from_a_thread("the next one")
    assert last_beat().what == "a checkpoint's tensor"


def test_someone_elses_code_is_marked_while_it_runs():
    assert not is_unwatched()
    with unwatched("their engine"):
        assert is_unwatched() and last_beat().what == "their engine"
        with unwatched("and another"):
            pass
        assert is_unwatched()
    assert not is_unwatched() and last_beat().what == "after their engine"
