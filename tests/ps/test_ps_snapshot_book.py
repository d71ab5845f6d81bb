"""The scheduler's book of snapshots: which are announced, complete, given up and kept."""

from __future__ import annotations

from typing import Any

import pytest
from ps_helpers import STORE

from kvmpi.ps.snapshot_book import Manifest, SnapshotBook
from kvmpi.wire import messages as m


def written(number: int, *parts: int, step: int | None = None) -> m.SnapshotNews:
    made = [m.PartFile(part, 100 + part, 1000 * number + part) for part in parts]
    return m.SnapshotNews(number, "written", made, {STORE: number if step is None else step}, [STORE])


def begun(number: int, stage: str = "begun") -> m.SnapshotNews:
    return m.SnapshotNews(number, stage)


def test_a_snapshot_is_complete_with_its_last_part() -> None:
    book = SnapshotBook(3)
    assert book.hear(begun(5)) == (5, None)  # the others are told
    assert book.hear(begun(5)) == (None, None)
    assert book.hear(written(5, 2, step=5)) == (None, None)
    assert book.hear(begun(10)) == (10, None)
    assert book.hear(written(10, 2)) == (None, None)
    assert book.hear(written(5, 0, 7, step=3)) == (None, None)  # there is no part 7
    assert not book.settled
    manifest = Manifest(5, ((100, 5000), (101, 5001), (102, 5002)), {STORE: 3})
    assert book.hear(written(5, 1, step=4)) == (None, manifest)
    assert book.hear(written(5, 1)) == (None, None)  # once


@pytest.mark.parametrize(
    ("others", "complete"),
    [
        ({"steps": {STORE: 5}, "stores": [STORE]}, True),
        ({"steps": {}, "stores": [STORE, STORE + 1]}, True),  # which holds no chunk of it
        ({"steps": {}, "stores": []}, False),  # all clients have left it, as this server knows already
        ({"steps": {STORE + 1: 5}, "stores": [STORE, STORE + 1]}, False),  # one that the other server has forgotten
    ],
    ids=str,
)
def test_what_some_servers_had_forgotten_is_not_completed(others: dict[str, Any], complete: bool) -> None:
    for first_is_whole in (True, False):
        book = SnapshotBook(2)
        book.hear(begun(5))
        both = [written(5, 0), m.SnapshotNews(5, "written", [m.PartFile(1, 10, 11)], **others)]
        said = [book.hear(one)[1] for one in (both if first_is_whole else both[::-1])]
        assert said[0] is None
        assert (said[1] is not None) is complete
        assert book.settled
        assert book.hear(begun(10)) == (10, None)
        assert book.take_stale() == ([] if complete else [5])


def test_a_snapshot_of_nothing_is_not_completed() -> None:
    """It would take the place of one that has a model in it."""
    book = SnapshotBook(1, seconds=1.0)
    book.heartbeat(0, 4)
    book.tick(0.0)
    number = book.tick(1.0)
    assert number is not None
    assert book.hear(m.SnapshotNews(number, "written", [m.PartFile(0, 10, 11)])) == (None, None)
    assert book.complete == []


def test_what_one_has_dropped_is_not_completed() -> None:
    book = SnapshotBook(2)
    assert book.hear(begun(5)) == (5, None)
    assert book.hear(begun(5, "dropped")) == (None, None)
    assert book.hear(written(5, 0, 1)) == (None, None)
    assert book.hear(begun(10, "dropped")) == (None, None)  # before another server begins
    assert book.hear(begun(10)) == (None, None)
    assert book.settled
    assert book.take_stale() == []  # others may still write
    assert book.hear(begun(15)) == (15, None)
    assert book.take_stale() == [5, 10]
    assert book.take_stale() == []


def test_what_is_whole_can_do_without_who_has_dropped_it() -> None:
    """As a server that answers for nothing at the time: its word may come last."""
    book = SnapshotBook(1)
    assert book.hear(begun(5)) == (5, None)
    assert book.hear(written(5, 0))[1] is not None
    book.hear(begun(5, "dropped"))  # while the manifest is written
    book.committed(5)
    book.hear(begun(5, "dropped"))  # and when it is
    assert book.hear(begun(10)) == (10, None)
    assert book.take_stale() == []
    assert book.hear(written(10, 0))[1] is not None
    book.given_up(10)  # the manifest cannot be written: the disk is full, and its files are of no use
    assert book.hear(begun(15)) == (15, None)
    assert book.take_stale() == [10]


def test_servers_are_told_whether_anybody_has_come_to_the_number() -> None:
    """Who holds nothing of a store yet waits for what may still be made, if the scheduler has chosen it."""
    book = SnapshotBook(2)
    book.heartbeat(0, 5)
    assert book.hear(begun(5)) == (5, None)
    assert not book.ahead
    number, _ = book.hear(begun(5, "missed"))
    assert number is not None
    assert number > 5
    assert book.ahead
    assert book.hear(begun(number + 1)) == (number + 1, None)
    assert not book.ahead


def test_two_complete_ones_are_kept() -> None:
    book = SnapshotBook(1, resumed=Manifest(20, ((1, 2),), {}))
    there = [5, 10, 20, 23, 25]
    assert book.obsolete(there) == [5, 10]
    book.committed(25)
    assert book.obsolete([*there, 30]) == [5, 10, 23]  # 30 may be under way
    book.committed(30)
    assert book.obsolete([20, 25, 30]) == [20]
    assert SnapshotBook(1).obsolete(there) == []


def test_one_of_which_a_server_says_nothing_more_is_over_with_the_next() -> None:
    """As one that was started again: the end of the job need not wait for it, nor does another take its place."""
    book = SnapshotBook(2, seconds=10.0)
    book.heartbeat(0, 5)
    for number in (5, 10):
        assert book.hear(begun(number)) == (number, None)
    assert book.hear(written(5, 0)) == (None, None)
    for part in (0, 1):
        book.hear(written(10, part))
    book.committed(10)
    assert book.settled
    assert book.hear(begun(10, "dropped")) == (None, None), "it is complete"


def test_by_time_the_number_is_ahead_of_all_servers() -> None:
    book = SnapshotBook(1, seconds=10.0, resumed=Manifest(100, ((1, 2),), {}))
    assert book.tick(0.0) is None
    book.heartbeat(0, 0)  # it is still reading
    book.heartbeat(1, 100)
    assert book.tick(1.0) is None
    assert book.tick(11.5) is None  # nothing new
    book.heartbeat(0, 130)
    book.heartbeat(1, 120)
    number = book.tick(12.0)
    assert number is not None
    assert 131 < number <= 190  # two heartbeats at the pace of the last ones
    assert book.hear(begun(number)) == (None, None)
    assert book.tick(30.0) is None  # still ahead
    again, manifest = book.hear(begun(number, "dropped"))  # it was too near
    assert manifest is None
    assert again is not None
    assert again - number == 2 * (number - 130)  # twice as far ahead as before
    assert book.hear(written(again, 0))[1] is not None
    book.heartbeat(0, again + 1)
    assert book.tick(45.0) is not None
    book.close()
    book.heartbeat(0, 10_000)
    assert book.tick(99.0) is None


def test_by_time_a_job_that_slows_down_is_not_without_snapshots() -> None:
    """The number that was chosen at the pace of before may be hours ahead."""
    book, done, steps = SnapshotBook(1, seconds=60.0), 0, dict[int, list[int]]()
    for second in range(0, 400, 5):
        done += 2500 if second < 62 else 5
        book.heartbeat(0, done)
        if (number := book.tick(float(second))) is not None:
            steps[second] = [number, done]
        for number, _ in list(steps.values()):
            if number <= done and number not in book.complete and book.hear(written(number, 0))[1] is not None:
                book.committed(number)
    assert [second for second in steps if second > 60] == [120, 180, 240, 300, 360]
    assert all(0 < number - then <= 20 for second, (number, then) in steps.items() if second > 60)
    assert book.complete == [steps[second][0] for second in (300, 360)]
    assert steps[60][0] in book.take_stale(), "servers may have written a part of it"
    for stage in ("begun", "dropped", "missed"):
        assert book.hear(begun(steps[60][0], stage)) == (None, None), "what comes late"
    assert book.tick(420.0) == done + 10
