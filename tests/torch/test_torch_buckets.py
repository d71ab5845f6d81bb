"""Plans and passes of ``DistributedOptimizer``, in all orders of arrival, without any gradient."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmpi.engine import Work
from kvmpi.errors import KVError
from kvmpi.torch.buckets import Progress, complete_order, plan, schedule
from kvmpi.torch.learning import Learner

SIZES = st.lists(st.integers(0, 50), max_size=30)


@given(SIZES, st.randoms(use_true_random=False), st.integers(1, 100), st.integers(1, 100))
def test_a_plan_cuts_the_order_and_keeps_to_its_limits(nbytes, random, bucket_bytes, edge_bytes):
    order = random.sample(range(len(nbytes)), len(nbytes))
    found = plan(order, nbytes, bucket_bytes, edge_bytes)
    assert [index for bucket in found for index in bucket] == order
    edge = min(edge_bytes, bucket_bytes)
    for number, bucket in enumerate(found):
        limit = edge if number in (0, len(found) - 1) else bucket_bytes
        assert bucket
        assert len(bucket) == 1 or sum(nbytes[i] for i in bucket) <= limit
    for number in range(1, len(found) - 2):  # no bucket in the middle could have taken what the next begins with
        assert sum(nbytes[i] for i in found[number]) + nbytes[found[number + 1][0]] > bucket_bytes


def test_a_plan_by_hand():
    assert plan([4, 3, 2, 1, 0], [5, 5, 9, 20, 3], bucket_bytes=20, edge_bytes=10) == [(4,), (3,), (2,), (1, 0)]
    assert plan([2, 1, 0], [1, 1, 1], 20, 10) == [(2, 1, 0)]
    assert plan([0, 1], [99, 99], 20, 10) == [(0,), (1,)]
    assert plan([], []) == []


@given(st.lists(st.integers(-3, 12)), st.integers(0, 10))
def test_an_order_is_completed_from_behind(seen, count):
    found = complete_order(seen, count)
    assert sorted(found) == list(range(count))
    known = list(dict.fromkeys(i for i in seen if 0 <= i < count))
    assert found[: len(known)] == known
    assert found[len(known) :] == sorted(found[len(known) :], reverse=True)


@given(SIZES, st.randoms(use_true_random=False), st.booleans(), st.data())
def test_buckets_leave_in_order_once_and_full(nbytes, random, shuffled, data):
    count = len(nbytes)
    buckets = plan(random.sample(range(count), count), nbytes, 40, 20)
    arriving = random.sample(range(count), data.draw(st.integers(0, count)))
    order = random.sample(range(len(buckets)), len(buckets)) if shuffled else list(range(len(buckets)))
    progress, here, left = Progress(buckets, order if shuffled else None), set(), []
    for index in arriving:
        if data.draw(st.booleans()):
            leaving = progress.arrive(index)
        else:  # as hooks do it, which ask only when there is nothing left
            progress.missing[index].remove(index)
            leaving = progress.leaving() if not progress.missing[index] else []
        here.add(index)
        left += leaving
        for number, bucket in enumerate(buckets):
            # Those have left that are full, and all before them.
            full = all(set(buckets[other]) <= here for other in order[: order.index(number) + 1])
            assert (number in left) == full
            assert progress.absent(number) == [i for i in bucket if i not in here]
    left += progress.finish()
    assert left == order
    assert not progress.finish()


def test_a_schedule_by_hand():
    assert schedule([1, 2, 3], [0.5, 0.5, 0.5]) == [0, 1, 2]  # nothing ever waits
    assert schedule([1, 2, 3], [2.5, 9, 9]) == [0, 2, 1]  # when the first is back, both others are full
    assert schedule([1, 2, 3, 4, 5], [9, 1, 1, 1, 1]) == [0, 4, 3, 2, 1]
    assert schedule([3, 1, 2], [1, 1, 1]) == [1, 2, 0]
    assert schedule([], []) == []


TIMES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=12)


@given(TIMES)
def test_a_schedule_keeps_the_way_busy_and_takes_what_is_needed_first(times):
    ready_s, cost_s = [ready for ready, _ in times], [cost for _, cost in times]
    order = schedule(ready_s, cost_s)
    assert sorted(order) == list(range(len(times)))
    now = 0
    for place, number in enumerate(order):
        waiting = order[place:]
        begins = max(now, ready_s[number])
        assert begins == max(now, min(ready_s[other] for other in waiting)), "the way was free, and a bucket was full"
        assert number == max(other for other in waiting if ready_s[other] <= begins)
        now = begins + cost_s[number]
    in_turn = 0
    for ready, cost in sorted(times):
        in_turn = max(in_turn, ready) + cost
    assert now == in_turn, "as soon done as in any other order"


def test_a_gradient_cannot_arrive_twice():
    progress = Progress([(0, 1)])
    progress.arrive(1)
    with pytest.raises(KVError, match="twice"):
        progress.arrive(1)


def test_passes_teach_in_which_order_gradients_come_and_buckets_leave() -> None:
    learner = Learner(None, 3, times=True)
    before = learner.order
    learner.begin(2)
    assert not learner.is_timing, "the first pass is slow"
    for index in (1, 2, 0):
        learner.arrived(index, 0)
    assert learner.end(2), "buckets are to be planned anew"
    assert learner.order == [1, 2, 0]
    assert before != [1, 2, 0]
    learner.begin(2)
    assert learner.is_timing
    works = [Work("0"), Work("1")]
    for number, work in enumerate(works):
        learner.arrived(number, number)
        learner.sent(number, [work, None])
        work.finish()
    assert not learner.end(2)
    learner.begin(2)
    assert not learner.is_timing, "until the next plan"
    assert learner.leaving is None
    assert not learner.end(2)
    assert sorted(learner.leaving or ()) == [0, 1]
    learner.forget()
    assert learner.leaving is None
    assert not learner.knows_all
