"""Ranks of one host agree in shared memory once all of them can, and those that wait there are woken."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from collective_helpers import all_vectors, assert_is_sum, on_host, vectors

from kvmpi.arrays import address_of
from kvmpi.collectives import Call, Collectives, Entry, words
from kvmpi.collectives.agreement import verdict
from kvmpi.collectives.forming import form
from kvmpi.collectives.host_group import HostGroup
from kvmpi.collectives.memory_comm import MemoryComm
from kvmpi.collectives.shortcut import Route, Shortcut
from kvmpi.deadline import Deadline
from kvmpi.errors import KVError, KVTimeoutError, OrderMismatchError, PeerLostError

RunRanks = Callable[..., list[Any]]

TIMEOUT_S = 20.0


def call_of(name: str) -> Call:
    return Call("push", (Entry(name, (2, 3), "float32"),))


def after_some_calls(comm: MemoryComm) -> Collectives:
    """Collectives whose ranks take the shortcut by now."""
    collectives = Collectives(comm)
    for step in range(3):
        own = vectors(comm.rank, 1, 50, "float32")
        collectives.allreduce(on_host(own, "float32"), own[0], "float32", Deadline(TIMEOUT_S), "test")
        collectives.agree(call_of(str(step)), Deadline(TIMEOUT_S))
    return collectives


class CountingComm(MemoryComm):
    """Counts the messages that its rank sends."""

    def __init__(self, comm: MemoryComm) -> None:
        super().__init__(comm._world, comm.rank, comm._context)
        self.sent = 0

    def isend(self, buffer: Any, dest: int, tag: int) -> Any:
        self.sent += 1
        return super().isend(buffer, dest, tag)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("wake", [True, False])
def test_no_messages_once_a_sum_has_brought_the_ranks_together(run_ranks: RunRanks, size: int, wake: bool) -> None:
    def rank_main(comm: MemoryComm) -> list[int]:
        counting = CountingComm(comm)
        collectives, sent = Collectives(counting, use_native=wake), []
        for step in range(6):
            before = counting.sent
            collectives.agree(call_of(str(step)), Deadline(TIMEOUT_S))
            sent.append(counting.sent - before)
            own = vectors(comm.rank, 1, 50, "float32")
            collectives.allreduce(on_host(own, "float32"), own[0], "float32", Deadline(TIMEOUT_S), "test")
            assert_is_sum(own[0], all_vectors(comm.size, 1, 50, "float32"), "float32")
        return sent

    for rank, sent in enumerate(run_ranks(size, rank_main)):
        one = 1 if rank else size - 1
        assert sent == [one, one, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("hosts", "messages"), [("aabbbcc", [2, 0, 1, 0, 0, 1, 0]), ("abb", [1, 1, 0]), ("abc", [2, 1, 1])]
)
def test_one_rank_of_each_host_sends_a_message(run_ranks: RunRanks, hosts: str, messages: list[int]) -> None:
    def rank_main(comm: MemoryComm) -> list[int]:
        counting = CountingComm(comm)
        collectives, sent = Collectives(counting), []
        for step in range(4):
            own = vectors(comm.rank, 1, 50, "float32")
            collectives.allreduce(on_host(own, "float32"), own[0], "float32", Deadline(TIMEOUT_S), "test")
            before = counting.sent
            collectives.agree(call_of(str(step)), Deadline(TIMEOUT_S))
            sent.append(counting.sent - before)
        return sent[1:]

    size = len(hosts)
    assert run_ranks(size, rank_main, hosts=hosts) == [[count] * 3 for count in messages]


@pytest.mark.parametrize(("missing", "late"), [(3, 2), (1, 2), (2, 1)])
def test_who_comes_late_on_another_host_is_not_taken_for_missing(run_ranks: RunRanks, missing: int, late: int) -> None:
    """When rank 0 gives up, a rank that came later would have waited for longer: it has to say at once that it came."""
    timeout_s = 1.0

    def rank_main(comm: MemoryComm) -> str:
        collectives = after_some_calls(comm)
        if comm.rank == missing:
            return ""
        time.sleep(0.6 * timeout_s if comm.rank == late else 0.0)
        with pytest.raises(KVTimeoutError) as caught:
            collectives.agree(call_of("last"), Deadline(timeout_s))
        return str(caught.value)

    for rank, text in enumerate(run_ranks(4, rank_main, hosts="aabb")):
        assert rank == missing or f"MPI rank {missing} of this client did not make the call" in text, f"{rank}: {text}"


@pytest.mark.parametrize("without", [0, 1, 2])
def test_all_take_the_shortcut_or_none_does(run_ranks: RunRanks, without: int) -> None:
    """One rank learns of the group later than the others do."""

    def rank_main(comm: MemoryComm) -> list[bool]:
        group = form(comm, range(comm.size), Deadline(TIMEOUT_S))
        assert isinstance(group, HostGroup)
        steps, found = [0], []
        shortcut = Shortcut(
            lambda: None if comm.rank == without and steps[0] < 3 else Route(group, (tuple(range(comm.size)),))
        )
        for step in range(6):
            steps[0] = step
            assert verdict(comm, call_of(str(step)), Deadline(TIMEOUT_S), "", shortcut).error is None
            found.append(shortcut.is_taken)
        return found

    assert run_ranks(3, rank_main) == [[False] * 3 + [True] * 3] * 3


def test_calls_that_differ_now_and_then_are_errors_on_all_ranks(run_ranks: RunRanks) -> None:
    """Three hundred calls, ranks late by chance; of some of them one rank makes another, or cannot make it."""
    choose = random.Random(5)
    odd = [choose.randrange(-6, 3) for _ in range(300)]

    def rank_main(comm: MemoryComm) -> list[str]:
        group = form(comm, range(comm.size), Deadline(TIMEOUT_S))
        assert isinstance(group, HostGroup)
        shortcut, own, found = Shortcut(lambda: Route(group, (tuple(range(comm.size)),))), random.Random(comm.rank), []
        for step, rank in enumerate(odd):
            if not own.randrange(10):
                time.sleep(own.random() * 2e-3)
            call = call_of(f"{step} of {comm.rank}" if rank == comm.rank else str(step))
            if rank == comm.rank and step % 2:
                call = Call("push", (), KVError(f"cannot do {step}"))
            error = verdict(comm, call, Deadline(TIMEOUT_S), "", shortcut).error
            found.append("" if error is None else type(error).__name__)
        return found

    expected = ["" if rank < 0 else "KVError" if step % 2 else "OrderMismatchError" for step, rank in enumerate(odd)]
    assert expected.count("") > 100
    assert expected.count("KVError") > 20
    assert expected.count(OrderMismatchError.__name__) > 20
    assert run_ranks(3, rank_main) == [expected] * 3


@pytest.mark.parametrize("late", [0, 1])
def test_who_comes_when_the_others_have_given_up_is_told_at_once(run_ranks: RunRanks, late: int) -> None:
    gone = threading.Barrier(3)

    def rank_main(comm: MemoryComm) -> tuple[BaseException, float]:
        collectives = after_some_calls(comm)
        if comm.rank == late:
            gone.wait(TIMEOUT_S)
        began_s = time.monotonic()
        with pytest.raises(KVError) as caught:
            collectives.agree(call_of("last"), Deadline(TIMEOUT_S if comm.rank == late else 0.5))
        waited_s = time.monotonic() - began_s
        if comm.rank != late:
            gone.wait(TIMEOUT_S)
        return caught.value, waited_s

    for rank, (error, waited_s) in enumerate(run_ranks(3, rank_main)):
        if rank == late:
            assert isinstance(error, PeerLostError)
            assert f"push('last') on MPI rank {late} of 3: MPI rank" in str(error)
            assert "has given up" in str(error)
            assert waited_s < TIMEOUT_S / 2
        else:
            assert isinstance(error, KVTimeoutError)
            assert f"MPI rank {late} of this client did not make the call within 0.5 s" in str(error)


needs_wakes = pytest.mark.skipif(not words.wakes(), reason="no compiled code here that wakes")


@needs_wakes
def test_no_wake_up_is_lost() -> None:
    """Two threads that hand a number to and fro, each asleep until the other has written."""
    page, rounds, longest_s = np.zeros(64, np.int64), 20_000, 10.0
    addresses = [address_of(page), address_of(page) + 8 * 32]
    slept: list[float] = []

    def play(own: int, other: int, first: int) -> None:
        for number in range(1, rounds + 1):
            if first:
                words.write(own, number)
            while page[(other - addresses[0]) // 8] < number:
                began_s = time.monotonic()
                words.sleep_until(other, number, longest_s)
                slept.append(time.monotonic() - began_s)
            if not first:
                words.write(own, number)

    threads = [
        threading.Thread(target=play, args=(addresses[i], addresses[1 - i], i), daemon=True) for i in (0, 1)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    assert page[0] == page[32] == rounds
    assert max(slept) < longest_s


@needs_wakes
def test_a_sleep_ends_with_its_time_and_not_before_without_a_reason() -> None:
    page = np.zeros(2, np.int64)
    began_s = time.monotonic()
    words.sleep_until(address_of(page), 1, 0.1)
    assert 0.1 <= time.monotonic() - began_s < 10.0
    assert page[1], "who writes is to know that somebody sleeps"
    words.write(address_of(page), 7)
    assert page.tolist() == [7, 0]
    words.sleep_until(address_of(page), 7, 60.0)  # it is so large already
