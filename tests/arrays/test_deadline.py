"""One duration becomes one point in time."""

from __future__ import annotations

import math
import time

import pytest

from kvmpi.deadline import Deadline


def test_none_is_never() -> None:
    deadline = Deadline(None)
    assert deadline.remaining_s() == math.inf
    assert deadline.timeout_s == math.inf
    assert not deadline.expired()


@pytest.mark.parametrize("timeout_s", [0, -1.0])
def test_what_has_passed_leaves_nothing(timeout_s: float) -> None:
    deadline = Deadline(timeout_s)
    assert deadline.expired()
    assert deadline.remaining_s() == 0.0


def test_the_rest_shrinks_and_the_whole_stays() -> None:
    deadline = Deadline(0.05)
    first = deadline.remaining_s()
    assert 0 < first <= 0.05
    while not deadline.expired():
        time.sleep(0.005)
    assert deadline.remaining_s() == 0.0
    assert deadline.timeout_s == 0.05
