"""Compiled parts against those in Python: the same bits and messages, so that ranks of both kinds work together."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from building import built
from collective_helpers import Contribution, all_vectors, assert_is_sum, on_host, vectors
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvmpi.arrays import DTYPES, address_of
from kvmpi.collectives import Collectives, native, ring, rings, selection, shared
from kvmpi.collectives.comm import Channel
from kvmpi.collectives.cross_memory import Source
from kvmpi.collectives.host_group import SLOT_BYTES, SlotMemory
from kvmpi.collectives.links import Links
from kvmpi.collectives.memory_comm import MemoryComm, MemoryWorld
from kvmpi.collectives.native import NativeRings, SlotSum
from kvmpi.collectives.ring import Machine, Ring, drive
from kvmpi.collectives.schedule import even_schedules, segment_bounds
from kvmpi.collectives.terms import HostTerms
from kvmpi.collectives.waiting import wait_all
from kvmpi.deadline import Deadline
from kvmpi.errors import KVTimeoutError, PeerLostError
from kvmpi.kernels import host

RunRanks = Callable[..., list[Any]]

TIMEOUT_S = 20.0


@built
def test_it_has_been_built_where_there_is_a_compiler() -> None:
    assert native._native is not None


def fast_links(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sums of any size take connections; returns who moved rings, by kind, while this lasts."""
    monkeypatch.setattr(selection, "LINKED_FROM_BYTES", 1)
    seen, compiled, other = list[str](), NativeRings.advance, Ring.advance

    def noting(kind: str, original: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def advance(self: Any) -> bool:
            seen.append(kind)
            return original(self)

        return advance

    monkeypatch.setattr(NativeRings, "advance", noting("compiled", compiled))
    monkeypatch.setattr(Ring, "advance", noting("python", other))
    return seen


@built
@pytest.mark.parametrize("most_ms", [0, 100])
def test_ranks_of_both_kinds_sum_together_to_the_bit(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, most_ms: int
) -> None:
    """Any sizes, dtypes, vectors and hosts, with chunks of either kind's own; all ranks compiled, some, or none.

    Several tensors are summed as one would be, some in one piece, with others or not, and some vector by vector.

    Ranks of one host read each other's vectors, in memory that is mapped or not, and copy results as they come.
    """
    seen, bits, ways = fast_links(monkeypatch), dict[Any, set[bytes]](), set[Any]()
    monkeypatch.setattr(native, "_MOST_MS", most_ms)
    monkeypatch.setattr(native, "_BLOCK_COUNT", 1000)
    monkeypatch.setattr(rings, "PACKED_BYTES", 600)

    middling: Any = {
        "attach": True, "common": False, "count": 5000, "num_vectors": 2, "in_place": False, "num_rings": 2,
        "num_chunks": 3, "scale": 1.0, "dtype": "float32", "cuts": [7, 3000],
    }  # fmt: skip

    @settings(max_examples=24 if most_ms else 8, deadline=None)
    @given(
        hosts=st.sampled_from(["ab", "abc", "abcd", "abcdefg", "aab", "aabb", "abab", "aabbbcc"]),
        attach=st.booleans(), common=st.booleans(), count=st.one_of(st.integers(0, 40), st.integers(1000, 20_000)),
        num_vectors=st.integers(1, 4), in_place=st.booleans(), num_rings=st.integers(1, 8),
        num_chunks=st.integers(1, 9), scale=st.sampled_from([1.0, 0.37]), dtype=st.sampled_from(list(DTYPES)),
        cuts=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 20_000)), max_size=30),
    )  # fmt: skip
    @example(**middling, hosts="abc")
    @example(**middling, hosts="aabb")
    def check(
        hosts: str, attach: bool, common: bool, count: int, num_vectors: int, in_place: bool, num_rings: int,
        num_chunks: int, scale: float, dtype: str, cuts: list[int],
    ) -> None:  # fmt: skip
        size, algorithm = len(hosts), "multi_ring" if len(set(hosts)) == len(hosts) else "hierarchical"
        by = scale if dtype.startswith(("float", "bfloat")) else 1.0
        chunk_bytes = max(8, count * DTYPES[dtype].itemsize // (size * num_rings * num_chunks))

        def rank_main(compiled: Sequence[int], comm: MemoryComm) -> list[np.ndarray]:
            options: Any = {"num_rings": num_rings, "ring_transport": "tcp", "use_native": comm.rank in compiled}
            collectives = Collectives(comm, algorithm, chunk_bytes, attach=attach, **options)
            own, deadline = vectors(comm.rank, num_vectors, count, dtype), Deadline(TIMEOUT_S)
            if common:  # the last one; the others are private
                place = collectives.empty(count, dtype)
                np.copyto(place, own[-1])
                own[-1] = place
            out = own[0] if in_place else np.empty_like(own[0])
            bounds = [0, *sorted(min(cut, count) for cut in cuts), count]
            tensors = []
            for first, last in pairwise(bounds):
                # Apart from each other, but for the last vector.
                apart = [vector[first:last].copy() for vector in own[:-1]] + [own[-1][first:last]]
                target = apart[0] if in_place else np.empty_like(apart[0])
                tensors.append((on_host(apart, dtype), target, (out[first:last],)))
            collectives.allreduce_many(tensors, dtype, deadline, "sum", scale=by)
            start, stop = segment_bounds(count, size)[comm.rank]
            own = vectors(comm.rank, num_vectors, count, dtype)
            part = own[0][start:stop] if in_place else np.empty_like(own[0][start:stop])
            collectives.reduce_scatter(on_host(own, dtype), part, dtype, deadline, "scatter", scale=by)
            whole = np.empty_like(out)
            collectives.allgather(part, whole, deadline, "gather")
            collectives.close()
            return [out, whole]

        found = set()
        for compiled in (range(size), range(0, size, 2), ()):
            results = run_ranks(size, partial(rank_main, compiled), hosts=hosts)
            for out, whole in results:
                found.add((out.tobytes(), whole.tobytes()))
            if by == 1.0:
                assert_is_sum(results[0][0], all_vectors(size, num_vectors, count, dtype), dtype)
                assert_is_sum(results[0][1], all_vectors(size, num_vectors, count, dtype), dtype)
        assert len(found) == 1
        bits.setdefault((dtype, by), set()).update(found.pop())
        ways.update((algorithm, kind) for kind in seen)
        seen.clear()

    check()
    assert len(ways) == 4, "rings and hierarchical, compiled and in Python"
    assert len(bits) > 3


@pytest.fixture
def linked() -> Iterator[list[Links]]:
    """Rank 0 and rank 1, with two connections each way."""
    comms = MemoryWorld(2, "ab").comms()
    there, back = ([socket.socketpair() for _ in range(2)] for _ in range(2))
    made = [
        Links(comms[0], {1: [a for a, _ in there]}, {1: [b for _, b in back]}),
        Links(comms[1], {0: [a for a, _ in back]}, {0: [b for _, b in there]}),
    ]
    yield made
    for end in made:
        end.close()


def rings_of(
    links: Links, vector: np.ndarray, out: np.ndarray, num_rings: int = 2, dtype: str = "float32", scale: float = 1.0
) -> NativeRings:
    """Of two ranks."""
    channels = [links.channel(1 - links.rank, 1 - links.rank, ring.TAG_RING + number) for number in range(num_rings)]
    assert all(channels)
    schedules = even_schedules(vector.size, 2, links.rank, num_rings, 1 << 14)
    return NativeRings(channels, schedules, 1 << 13, [out], [HostTerms([vector], dtype, scale)])  # type: ignore[arg-type]


@built
@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("dtype", sorted(host.HALF))
def test_all_values_of_half_types_are_summed_as_by_the_kernels(
    linked: list[Links], monkeypatch: pytest.MonkeyPatch, dtype: str, scale: float
) -> None:
    """Infinities, subnormal numbers and NaNs among them, in blocks that end anywhere."""
    monkeypatch.setattr(native, "_BLOCK_COUNT", 1000)
    values = np.arange(1 << 16, dtype="u2")
    ones = [values.view(DTYPES[dtype]), np.random.default_rng(5).permutation(values).view(DTYPES[dtype])]
    outs, expected = [np.empty_like(ones[0]) for _ in linked], np.empty_like(ones[0])
    machines = [rings_of(*each, dtype=dtype, scale=scale) for each in zip(linked, ones, outs, strict=True)]
    drive(machines, Deadline(TIMEOUT_S), lambda: "summing")
    host.sum_vectors(expected, ones, dtype, scale)
    assert {out.tobytes() for out in outs} == {expected.tobytes()}


@built
@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("most_vectors", [1, 2])
def test_tensors_anywhere_in_memory_travel_in_bits_that_end_anywhere(
    monkeypatch: pytest.MonkeyPatch, most_vectors: int, dtype: str
) -> None:
    """More pieces than one call of the system takes, and what comes ends in the middle of elements."""
    monkeypatch.setattr(native, "_IDLE_MS", 0)
    counts = [0, 1, 700, *np.random.default_rng(3).integers(1, 1200, 157).tolist(), 90_000, 0]
    total = sum(counts)
    with contextlib.ExitStack() as stack:
        there, back = relayed_pair(stack), relayed_pair(stack)
        channels = [
            Channel(1, back[1].fileno(), 1, there[0].fileno()),
            Channel(0, there[1].fileno(), 0, back[0].fileno()),
        ]
        machines, outs, given = list[Machine](), list[list[np.ndarray]](), list[list[list[np.ndarray]]]()
        for rank, channel in enumerate(channels):
            whole = vectors(rank, most_vectors, total, dtype)
            starts = np.cumsum([0, *counts])
            given.append([
                [vector[start : start + count].copy() for vector in whole[: 1 + number % most_vectors]]
                for number, (start, count) in enumerate(zip(starts, counts, strict=False))
            ])  # fmt: skip
            outs.append([np.empty(count, DTYPES[dtype]) for count in counts])
            terms = [HostTerms(each, dtype) for each in given[-1]]
            schedules = even_schedules(total, 2, rank, 1, 1 << 14)
            machines.append(NativeRings([channel], schedules, 1 << 13, outs[-1], terms))
        drive(machines, Deadline(TIMEOUT_S), lambda: "summing")
    for number, pair in enumerate(zip(*outs, strict=True)):
        for out in pair:
            assert_is_sum(out, [vector for of_rank in given for vector in of_rank[number]], dtype)
        assert pair[0].tobytes() == pair[1].tobytes()


def relayed_pair(stack: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection that brings up to 1001 bytes at a time."""
    (one, entry), (exit_, other) = socket.socketpair(), socket.socketpair()

    def relay() -> None:
        while data := entry.recv(1001):
            exit_.sendall(data)

    thread = threading.Thread(target=relay)
    thread.start()
    for sock in (entry, exit_, other):
        stack.enter_context(sock)
    stack.callback(thread.join)
    stack.enter_context(one)
    return one, other


@built
def test_messages_travel_over_the_same_connections_before_and_after(linked: list[Links]) -> None:
    def exchange(text: bytes) -> None:
        got = np.zeros(len(text), "u1")
        receive = linked[1].irecv(got, 0, ring.TAG_RING)
        send = linked[0].isend(np.frombuffer(text, "u1"), 1, ring.TAG_RING)
        wait_all([send, receive], Deadline(TIMEOUT_S), lambda: "nothing came")
        assert got.tobytes() == text

    exchange(b"before")
    ones, outs = [np.full(100_003, rank + 1, "f4") for rank in (0, 1)], [np.empty(100_003, "f4") for _ in (0, 1)]
    machines = [rings_of(links, one, out) for links, one, out in zip(linked, ones, outs, strict=True)]
    drive(machines, Deadline(TIMEOUT_S), lambda: "summing")
    assert all((out == 3).all() for out in outs)
    exchange(b"after")


@built
def test_connections_with_messages_under_way_are_not_lent(linked: list[Links]) -> None:
    sender = linked[0]
    assert sender.channel(1, 1, ring.TAG_RING) is not None
    assert sender.channel(1, 5, ring.TAG_RING) is None
    assert sender.channel(5, 1, ring.TAG_RING) is None
    sender.irecv(np.zeros(5, "u1"), 1, ring.TAG_RING)
    assert sender.channel(1, 1, ring.TAG_RING) is None
    assert sender.channel(1, 1, ring.TAG_RING + 1) is not None


@built
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_broken_connection_is_an_error_that_names_the_peer(linked: list[Links], after: int) -> None:
    vector = np.ones(3_000_000, "f4")
    mine, theirs = (rings_of(links, vector, np.empty_like(vector)) for links in linked)
    for _ in range(after):
        mine.advance()
        theirs.advance()
    linked[1].close()
    with pytest.raises(PeerLostError, match=r"the connection to MPI rank 1 is broken \(\w+.*\): it has probably ended"):
        drive([mine], Deadline(TIMEOUT_S), lambda: "summing")


@built
def test_a_silent_peer_is_an_error_at_the_deadline_and_waiting_takes_no_processor(linked: list[Links]) -> None:
    vector = np.ones(3_000_000, "f4")
    machine = rings_of(linked[0], vector, np.empty_like(vector))
    began_s, cpu_s = time.monotonic(), time.thread_time()
    with pytest.raises(KVTimeoutError, match=r"sum of key 3: no data from MPI rank 1, step 1 of 2 within 1\.0 s"):
        drive([machine], Deadline(1.0), lambda: "sum of key 3")
    assert 1.0 <= time.monotonic() - began_s < 2.0
    assert time.thread_time() - cpu_s < 0.3


@built
def test_other_threads_run_while_rings_wait(linked: list[Links], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_IDLE_MS", 3000)
    vector = np.ones(3_000_000, "f4")
    machine = rings_of(linked[0], vector, np.empty_like(vector))
    waiting = threading.Thread(target=machine.advance)
    waiting.start()
    time.sleep(0.1)
    assert waiting.is_alive(), "this thread went on before the other one had waited for its time"
    waiting.join()


class Neighbours:
    """A rank of a ring whose neighbours are two sockets in a test's hands.

    ``incoming``: what is to come from the left, transfer by transfer, and ``outgoing``, what then goes to the right.
    """

    def __init__(self, size: int, place: int, count: int, max_chunk_count: int) -> None:
        self.vector, self.out = vectors(place, 1, count, "float32")[0], np.zeros(count, "f4")
        self.left, in_end = socket.socketpair()
        out_end, self.right = socket.socketpair()
        self._ends = in_end, out_end
        out_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        (schedule,) = even_schedules(count, size, place, 1, max_chunk_count)
        values, self.incoming, self.outgoing, self.expected = list[np.ndarray](), b"", b"", self.out.copy()
        for number, (start, stop, _) in enumerate(schedule.receives):
            came = np.random.default_rng(number).random(stop - start, "f4")
            self.incoming += came.tobytes()
            values.append(came + self.vector[start:stop] if number < schedule.num_summed else came)
            if number >= schedule.num_kept:
                self.expected[start:stop] = values[-1]
        for number, (start, stop, _) in enumerate(schedule.sends):
            first = number < schedule.num_chunks
            self.outgoing += (self.vector[start:stop] if first else values[number - schedule.num_chunks]).tobytes()
        channel = Channel((place - 1) % size, in_end.fileno(), (place + 1) % size, out_end.fileno())
        terms = HostTerms([self.vector], "float32")
        self.rings = NativeRings([channel], [schedule], 512, [self.out], [terms])

    def close(self) -> None:
        for sock in (self.left, self.right, *self._ends):
            sock.close()


@built
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reads from other processes")
def test_memory_of_a_process_that_has_ended_is_an_error(linked: list[Links]) -> None:
    vector, ended = np.ones(1000, "f4"), subprocess.Popen(["true"])
    ended.wait()
    terms = Contribution([Source(address_of(vector)), Source(address_of(vector), ended.pid)])
    channel, schedules = linked[0].channel(1, 1, ring.TAG_RING), even_schedules(vector.size, 2, 0, 1, 100)
    assert channel is not None
    rings = NativeRings([channel], schedules, 512, [np.empty_like(vector)], [terms])
    with pytest.raises(PeerLostError, match=f"cannot read from process {ended.pid}: No such process; it has probably"):
        rings.advance()


@built
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_nothing_is_overwritten_that_the_right_neighbour_has_not_taken(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes nothing for a while, and then little at a time, while the left one sends as much as it can."""
    monkeypatch.setattr(native, "_IDLE_MS", 1)
    at, got = Neighbours(size, size // 2, 40_011, 1500), b""
    feeding = threading.Thread(target=at.left.sendall, args=(at.incoming,), daemon=True)
    feeding.start()
    for _ in range(50):
        at.rings.advance()
    assert not at.rings.done, "the right neighbour has its part in it"
    at.right.setblocking(False)
    while len(got) < len(at.outgoing):
        at.rings.advance()
        with contextlib.suppress(BlockingIOError):
            got += at.right.recv(3000)
    feeding.join(TIMEOUT_S)
    assert at.rings.done
    assert got == at.outgoing
    np.testing.assert_array_equal(at.out, at.expected)
    at.close()


@built
def test_what_has_come_of_a_chunk_is_sent_on_at_once() -> None:
    at = Neighbours(3, 1, 3 * 512, 512)
    at.left.sendall(at.incoming[:1001])
    for _ in range(4):
        at.rings.advance()
    assert at.right.recv(1 << 16) == at.outgoing[: 2048 + 1000], "its own segment, and all whole elements"
    at.close()


@built
def test_the_end_of_the_left_neighbour_is_noticed_when_there_is_nothing_to_send() -> None:
    at = Neighbours(3, 1, 30, 10)
    at.rings.advance()
    assert at.right.recv(100) == at.outgoing[:40]
    at.left.close()
    with pytest.raises(PeerLostError, match=r"the connection to MPI rank 0 is broken \(closed\)"):
        at.rings.advance()
    at.close()


@built
def test_a_right_neighbour_that_has_ended_is_named() -> None:
    at = Neighbours(3, 1, 30, 10)
    at.right.close()
    with pytest.raises(PeerLostError, match=r"the connection to MPI rank 2 is broken \(Broken pipe\)"):
        at.rings.advance()
    at.close()


def test_without_a_compiler_the_same_is_done_in_python(run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = fast_links(monkeypatch)
    monkeypatch.setattr(native, "_native", None)

    def rank_main(comm: MemoryComm) -> np.ndarray:
        collectives, out = Collectives(comm, "ring", ring_transport="tcp"), np.ones(1001, "f4")
        collectives.allreduce(on_host([out], "float32"), out, "float32", Deadline(TIMEOUT_S), "sum")
        collectives.close()
        return out

    assert all((out == 3).all() for out in run_ranks(3, rank_main, hosts="abc"))
    assert set(seen) == {"python"}


# ---- sums in slots


def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What compiled sums of groups that are made from now on have come to."""
    assert native._native is not None
    found, original = list[int](), native._native.sum_slots

    def noting(*arguments: Any) -> int:
        found.append(original(*arguments))
        return found[-1]

    monkeypatch.setattr(native._native, "sum_slots", noting)
    return found


@built
@pytest.mark.parametrize("is_crowded", [False, True], ids=["own core", "crowded"])
@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_ranks_of_both_kinds_sum_in_slots_to_the_bit(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, size: int, in_parts: bool, is_crowded: bool
) -> None:
    """Every dtype and many lengths, in and out of place, and into memory that all ranks have in common; whole slots
    on every rank, and a part of them on each."""
    found = runs(monkeypatch)
    monkeypatch.setattr(native, "looks", lambda: (1, is_crowded))
    monkeypatch.setattr(shared, "PARTS_FROM_BYTES", 0 if in_parts else size * SLOT_BYTES)
    cases = [
        (dtype, count)
        for dtype in DTYPES if dtype not in host.HALF
        for count in (1, 3, 513, 4096, SLOT_BYTES // DTYPES[dtype].itemsize)
    ]  # fmt: skip

    def rank_main(compiled: Sequence[int], comm: MemoryComm) -> list[bytes]:
        collectives, deadline = Collectives(comm, "shared", use_native=comm.rank in compiled), Deadline(TIMEOUT_S)
        common, results = collectives.shared_empty(SLOT_BYTES, "uint8", deadline), list[bytes]()
        for turn, (dtype, count) in enumerate(cases):
            own = vectors(comm.rank, 1, count, dtype)[0]
            places = [own, np.empty_like(own), common.view(own.dtype)[:count]]
            out = places[turn % 3]
            collectives.allreduce(on_host([own], dtype), out, dtype, deadline, "sum")
            results.append(out.tobytes())
            if out is places[2]:  # nobody writes there again before all have read it
                collectives.allreduce(
                    on_host([np.ones(1, "f4")], "float32"), np.empty(1, "f4"), "float32", deadline, ""
                )
        return results

    kinds = [run_ranks(size, partial(rank_main, compiled)) for compiled in (range(size), range(0, size, 2), ())]
    assert all(results == kinds[0][0] for ranks in kinds for results in ranks)
    for (dtype, count), result in zip(cases, kinds[0][0], strict=True):
        assert_is_sum(np.frombuffer(result, DTYPES[dtype]), all_vectors(size, 1, count, dtype), dtype)
    assert found.count(native.SUMMED) > 0
    # Who looks once, with the interpreter's lock, does not see others' parts; whoever lets them run mostly does.
    assert in_parts or native.OWN_SUMMED not in found
    assert is_crowded or not in_parts or native.OWN_SUMMED in found


@built
def test_who_comes_early_waits_and_who_is_late_is_waited_for(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a broadcast, of which a rank need not know that all have begun it, and after a sum, of which it does."""
    found = runs(monkeypatch)

    def rank_main(comm: MemoryComm) -> list[float]:
        collectives, deadline, results = Collectives(comm, "shared"), Deadline(TIMEOUT_S), list[float]()
        one = np.full(5, comm.rank + 1.0)
        collectives.allreduce(on_host([one], "float64"), np.empty(5), "float64", deadline, "first")
        for op, seen in ((None, native.OFFERED), ("broadcast", native.NOT_BEGUN)):
            while comm.rank == 2 and seen not in found and not deadline.expired():
                time.sleep(1e-3)
            if op is not None:
                collectives.broadcast(np.zeros(5), 0, deadline, "cast")
            out = np.empty(5)
            collectives.allreduce(on_host([one], "float64"), out, "float64", deadline, "sum")
            results += set(out.tolist())
        return results

    assert run_ranks(3, rank_main) == [[6.0, 6.0]] * 3
    assert {native.OFFERED, native.NOT_BEGUN, native.SUMMED} <= set(found)


@built
def test_a_rank_that_does_not_come_is_named(run_ranks: RunRanks) -> None:
    def rank_main(comm: MemoryComm) -> str:
        collectives, one = Collectives(comm, "shared"), np.ones(5)
        collectives.allreduce(on_host([one], "float64"), np.empty(5), "float64", Deadline(TIMEOUT_S), "first")
        if comm.rank == 1:
            return ""
        with pytest.raises(KVTimeoutError) as caught:
            collectives.allreduce(on_host([one], "float64"), np.empty(5), "float64", Deadline(0.3), "sum of key 3")
        return str(caught.value)

    for text in run_ranks(3, rank_main)[::2]:
        assert "sum of key 3: shared allreduce" in text
        assert "MPI rank 1 did not start within 0.3 s" in text


@pytest.fixture(params=[(3, False), (3, True)], ids=["own core", "crowded"])
def looks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with a core each, and more ranks than cores, which let each other run."""
    monkeypatch.setattr(native, "looks", lambda: request.param)


@built
@pytest.mark.usefixtures("looks")
def test_each_rank_says_what_it_has_offered_and_that_it_is_through() -> None:
    """Memory that others may still read is given back by what its page says."""
    pages, slots = [np.zeros(64, "u8") for _ in range(2)], [np.zeros(3) for _ in range(2)]
    sums, outs = [SlotSum(SlotMemory(pages, slots, rank, 5, 20, 40)) for rank in (0, 1)], np.zeros((2, 3))
    assert sums[0].run(1, np.ones(3), outs[0], native.NOT_BEGUN) == native.OFFERED
    assert [page[[5, 40]].tolist() for page in pages] == [[1, 0], [0, 0]]
    assert sums[1].run(1, np.full(3, 2.0), outs[1], native.NOT_BEGUN) == native.SUMMED
    assert [page[[5, 40]].tolist() for page in pages] == [[1, 0], [1, 1]]
    assert sums[0].run(1, np.ones(3), outs[0], native.OFFERED) == native.SUMMED
    assert [page[[5, 40]].tolist() for page in pages] == [[1, 1], [1, 1]]
    assert (outs == 3).all()
    assert sums[1].run(3, np.ones(3), outs[1], native.NOT_BEGUN) == native.NOT_BEGUN, "rank 0 has not begun call 2"


@built
@pytest.mark.usefixtures("looks")
def test_each_rank_says_that_it_has_summed_its_part() -> None:
    pages, slots = [np.zeros(64, "u8") for _ in range(2)], [np.zeros(3) for _ in range(2)]
    sums = [SlotSum(SlotMemory(pages, slots, rank, 5, 20, 40), part=2) for rank in (0, 1)]
    given, outs = [np.array([1.0, 2, 3]), np.array([10.0, 20, 30])], np.zeros((2, 3))
    assert sums[0].run(1, given[0], outs[0], native.NOT_BEGUN) == native.OFFERED
    assert sums[1].run(1, given[1], outs[1], native.NOT_BEGUN) == native.OWN_SUMMED
    assert [page[[5, 20, 40]].tolist() for page in pages] == [[1, 0, 0], [1, 1, 0]]
    assert (outs == 0).all()
    assert sums[0].run(1, given[0], outs[0], native.OFFERED) == native.SUMMED
    assert sums[1].run(1, given[1], outs[1], native.OWN_SUMMED) == native.SUMMED
    assert [page[[5, 20, 40]].tolist() for page in pages] == [[1, 1, 1], [1, 1, 1]]
    assert outs.tolist() == [[11, 22, 33]] * 2
    assert [slot.tolist() for slot in slots] == [[11, 22, 3], [10, 20, 33]], "each adds its part over its own numbers"


@built
def test_ranks_that_are_let_run_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a single core, where whoever is second finds the other's data at once, and the first one only if it waits: it
    has the interpreter's lock while it looks."""
    monkeypatch.setattr(native, "looks", lambda: (1, True))
    calls, count, deadline = 200, 1000, Deadline(TIMEOUT_S)
    core = min(os.sched_getaffinity(0))

    def rank_main(rank: int) -> int:
        os.sched_setaffinity(0, {core})
        sums = [SlotSum(SlotMemory(pages, list(of_call), rank, 5, 20, 40)) for of_call in slots]
        out, at_once = np.zeros(count), 0
        for call in range(1, calls + 1):
            own, found, looked = np.full(count, float(rank * calls + call)), native.NOT_BEGUN, 0
            while found != native.SUMMED:
                found = sums[call % 2].run(call, own, out, found)
                looked += 1
                assert not deadline.expired(), f"{at_once} of {call} calls ended at once"
            at_once += looked == 1
            assert (out == calls + 2 * call).all()
        return at_once

    at_once = 0
    while at_once <= calls:  # who has met others that compute on this core does not wait for a while
        pages, slots = [np.zeros(64, "u8") for _ in range(2)], np.zeros((2, 2, count))
        with ThreadPoolExecutor(2) as pool:
            at_once = sum(pool.map(rank_main, (0, 1)))


@built
def test_vectors_of_other_lengths_and_read_only_results_are_refused() -> None:
    memory = SlotMemory([np.zeros(64, "u8")] * 2, [np.zeros(3)] * 2, 0, 0, 16, 32)
    short, read_only = np.zeros(2), np.zeros(3)
    read_only.flags.writeable = False
    for vector, out in ((np.zeros(3), np.zeros(4)), (short, np.zeros(3)), (short, short)):
        with pytest.raises(ValueError, match="vectors of other lengths than these slots are for"):
            SlotSum(memory).run(1, vector, out, native.NOT_BEGUN)
    for vector in (np.zeros(3), read_only):
        with pytest.raises(ValueError, match="read-only"):
            SlotSum(memory).run(1, vector, read_only, native.NOT_BEGUN)
    assert not memory.pages[0].any()


@built
def test_memory_that_is_not_of_rings_is_refused() -> None:
    assert native._native is not None
    for memory, terms in (
        (np.zeros(3, "u1"), np.zeros(1, native.TERMS)),
        (np.zeros(65, native.RING), np.zeros(1, native.TERMS)),
        (np.zeros(1, native.RING), np.zeros(5, "u1")),
    ):
        with pytest.raises(ValueError, match=r"not the memory of native\.RING"):
            native._native.move_rings(memory, terms, 0, 0)
