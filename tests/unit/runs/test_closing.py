"""Closing hides no error and ends no good run."""

from __future__ import annotations

import pytest

from megatron_rl.errors import ClusterError, DataError
from megatron_rl.runs.closing import closing


def broken() -> None:
    raise ClusterError("processes do not end")


def test_the_first_error_is_raised_and_that_of_closing_is_a_note():
    with pytest.raises(DataError, match="row 3") as caught, closing("the workers", broken):
        raise DataError("row 3")
    assert caught.value.__notes__ == ["the workers could not be closed either: ClusterError: processes do not end"]


def test_after_a_good_block_an_error_of_closing_is_a_warning(caplog: pytest.LogCaptureFixture):
    with closing("the workers", broken):
        done = True
    assert done and "the workers could not be closed (ClusterError: processes do not end)" in caplog.text


def test_what_closes_well_is_closed_once_whatever_happens():
    closed = list[int]()
    with closing("x", lambda: closed.append(1)):
        pass
    with pytest.raises(KeyboardInterrupt) as caught, closing("x", lambda: closed.append(2)):
        raise KeyboardInterrupt
    assert closed == [1, 2] and not getattr(caught.value, "__notes__", [])
