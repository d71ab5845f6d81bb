"""Messages over real connections of each rank to each other, with ranks as threads."""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from rank_threads import RunRanks

from kvmpi.arrays import Vector
from kvmpi.collectives import Collectives, mesh, torchrun
from kvmpi.collectives.mesh import EAGER_BYTES, Mesh, MeshComm
from kvmpi.deadline import Deadline
from kvmpi.errors import ConfigError, KVTimeoutError, PeerLostError, ShapeMismatchError

TIMEOUT_S = 30.0
SIZES = (0, 1, 3, EAGER_BYTES - 1, EAGER_BYTES, EAGER_BYTES + 1, 3_000_001)


def comms(size: int) -> list[MeshComm]:
    """Of one mesh; its connections go over loopback."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for high in range(size):
        for low in range(high):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                ends[high][low] = socket.create_connection(listener.getsockname())
                ends[low][high] = listener.accept()[0]
    names = {rank: f"rank {rank}" for rank in range(size)}
    return [MeshComm(Mesh(rank, ends[rank], names), range(size), "test") for rank in range(size)]


def run(size: int, do: Callable[[MeshComm], Any]) -> list[Any]:
    """What ``do`` returns for each rank, all at once."""
    found: list[Any] = [None] * size

    def main(comm: MeshComm) -> None:
        try:
            found[comm.rank] = do(comm)
        except BaseException as error:
            found[comm.rank] = error

    ranks = comms(size)  # which are there until all are done
    threads = [threading.Thread(target=main, args=(comm,), daemon=True) for comm in ranks]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "a rank still waits"
    finally:
        for comm in ranks:
            comm._mesh.close()
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


def finish(*requests: Any) -> None:
    deadline = Deadline(TIMEOUT_S)
    while not all(request.test() for request in requests):
        assert not deadline.expired(), "a message is not there"
        time.sleep(1e-4)


def content(source: int, dest: int, tag: int, count: int) -> Any:
    return np.random.default_rng([source, dest, tag, count]).integers(0, 256, count, np.uint8)


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("wanted_first", [True, False])
def test_messages_of_all_sizes_keep_their_order_and_stay_apart(size: int, wanted_first: bool) -> None:
    def do(comm: MeshComm) -> None:
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        twin = comm.duplicate()

        def post() -> list[tuple[Any, Any, Any]]:
            found = []
            for tag in (1, 0):
                for of, shift in ((twin, 2), (comm, 0)):
                    for rank in others:
                        for count in SIZES:
                            into = np.full(count, 77, np.uint8)
                            right = content(rank, comm.rank, tag + shift, count)
                            found.append((of.irecv(into, rank, tag), into, right))
            return found

        posted = post() if wanted_first else []
        sends = [
            of.isend(content(comm.rank, rank, tag + shift, count), rank, tag)
            for of, shift in ((comm, 0), (twin, 2))
            for rank in others
            for count in SIZES
            for tag in (0, 1)
        ]
        posted = posted or post()
        finish(*sends, *(request for request, _, _ in posted))
        for _, into, right in posted:
            np.testing.assert_array_equal(into, right)

    run(size, do)


def test_from_any_rank_and_how_much_it_was() -> None:
    def do(comm: MeshComm) -> list[tuple[int, int]]:
        if comm.rank:
            finish(comm.isend(content(comm.rank, 0, 0, 10 * comm.rank), 0, 5))
            finish(comm.isend(content(comm.rank, 0, 0, 2 * EAGER_BYTES), 0, 6))
            return []
        found = []
        for tag in (5, 6, 5, 6):
            into = np.empty(2 * EAGER_BYTES, np.uint8)
            finish(request := comm.irecv_message(into, None, tag))
            np.testing.assert_array_equal(into[: request.nbytes], content(request.source, 0, 0, request.nbytes))
            found.append((request.source, request.nbytes))
        return found

    found = run(3, do)[0]
    assert sorted(found) == [(1, 10), (1, 2 * EAGER_BYTES), (2, 20), (2, 2 * EAGER_BYTES)]


@pytest.mark.parametrize("nbytes", [9, 2 * EAGER_BYTES])
@pytest.mark.parametrize("late", [True, False])
def test_what_is_too_long_is_an_error_and_the_next_is_in_order(nbytes: int, late: bool) -> None:
    def do(comm: MeshComm) -> None:
        if comm.rank:
            finish(comm.isend(np.ones(nbytes, np.uint8), 0, 0), comm.isend(np.full(8, 2, np.uint8), 0, 0))
            finish(comm.isend(np.full(8, 3, np.uint8), 0, 0))
            return
        time.sleep(0.1 if late else 0.0)
        into, then = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
        request, following = comm.irecv(into, 1, 0), comm.irecv(then, 1, 0)
        with pytest.raises(ShapeMismatchError, match="longer than the memory"):
            finish(request)
        finish(following)
        assert not into.any()
        assert (then == 2).all()
        finish(comm.irecv(then, 1, 0))
        assert (then == 3).all()

    run(2, do)


def test_a_rank_that_has_ended_is_named_and_what_it_has_sent_arrives() -> None:
    def do(comm: MeshComm) -> None:
        if comm.rank == 2:
            finish(comm.isend(np.full(5, 3, np.uint8), 0, 0), comm.isend(np.full(EAGER_BYTES, 4, np.uint8), 0, 1))
            comm.free()
            return
        if comm.rank == 1:
            return
        time.sleep(0.1)
        into, more = np.zeros(5, np.uint8), np.zeros(EAGER_BYTES, np.uint8)
        finish(comm.irecv(more, 2, 1), comm.irecv(into, 2, 0))
        assert (into == 3).all()
        assert (more == 4).all()
        for lost in (
            lambda: comm.irecv(into, 2, 0), lambda: comm.irecv_message(into, None, 0), lambda: comm.isend(into, 2, 0),
            lambda: comm.isend(np.zeros(2 * EAGER_BYTES, np.uint8), 2, 0),
        ):  # fmt: skip
            with pytest.raises(PeerLostError, match="rank 2 is lost: it has ended"):
                finish(lost())
        finish(comm.isend(into, 1, 0))  # the other is there

    run(3, do)


def with_a_socket() -> tuple[MeshComm, socket.socket]:
    """Rank 0 of two, and the other end of its connection, at which a test says what it likes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        end = socket.create_connection(listener.getsockname())
        return MeshComm(Mesh(0, {1: listener.accept()[0]}, {1: "rank 1"}), range(2), "test"), end


@pytest.mark.parametrize("kind", [mesh._BODY, mesh._WANTED, mesh._DROPPED, 9])
def test_who_answers_what_nobody_has_said_is_lost(kind: int) -> None:
    comm, end = with_a_socket()
    with end:
        end.sendall(mesh._HEADER.pack(kind, 0, comm._context, 7, 0))
        for _ in range(2):
            with pytest.raises(PeerLostError, match="rank 1 is lost: it answers what nobody has said"):
                finish(comm.irecv(np.zeros(8, np.uint8), 1, 0))
    comm.free()


def test_who_ends_before_its_offer_is_answered_is_lost() -> None:
    comm, end = with_a_socket()
    request = comm.irecv(np.zeros(2 * EAGER_BYTES, np.uint8), 1, 0)
    end.sendall(mesh._HEADER.pack(mesh._OFFER, 0, comm._context, 0, 2 * EAGER_BYTES))
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # nothing is answered any more
    end.close()
    for _ in range(2):
        with pytest.raises(PeerLostError, match="rank 1 is lost: its connection broke"):
            finish(request)
    comm.free()


def test_nobody_waits_once_this_process_has_closed_its_connections() -> None:
    comm, end = with_a_socket()
    requests = [comm.irecv(np.zeros(8, np.uint8), 1, 0), comm.isend(np.zeros(2 * EAGER_BYTES, np.uint8), 1, 0)]
    comm.free()
    for request in requests:
        with pytest.raises(PeerLostError, match="this process has closed its connections"):
            finish(request)
    end.close()


def test_a_receive_that_was_given_up_takes_nothing() -> None:
    def do(comm: MeshComm) -> None:
        if comm.rank:
            finish(comm.irecv(np.empty(1, np.uint8), 0, 9))
            finish(comm.isend(np.ones(4, np.uint8), 0, 0))
            return
        given_up, into = np.zeros(4, np.uint8), np.zeros(4, np.uint8)
        comm.irecv_message(given_up, 1, 0).cancel()
        request = comm.irecv(into, 1, 0)
        finish(comm.isend(np.ones(1, np.uint8), 1, 9), request)
        assert not given_up.any()
        assert into.all()

    run(2, do)


def test_threads_of_one_process_do_not_disturb_each_other() -> None:
    def do(comm: MeshComm) -> None:
        other, errors = 1 - comm.rank, []

        def talk(of: MeshComm, number: int) -> None:
            try:
                for count in (*SIZES, *SIZES):
                    into = np.empty(count, np.uint8)
                    sent = of.isend(content(comm.rank, other, number, count), other, 0)
                    finish(sent, of.irecv(into, other, 0))
                    np.testing.assert_array_equal(into, content(other, comm.rank, number, count))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=talk, args=(comm.duplicate(), number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert not errors, errors

    run(2, do)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("algorithm", ["naive", "multi_ring", "auto"])
def test_sums_over_a_mesh(size: int, algorithm: str) -> None:
    counts = (0, 1, 1001, 300_007)

    def do(comm: MeshComm) -> None:
        collectives = Collectives(comm, algorithm=algorithm)
        for count in counts:
            terms = [np.random.default_rng([rank, count]).standard_normal(count) for rank in range(size)]
            out = np.empty(count, np.float32)
            mine = terms[comm.rank].astype(np.float32)
            collectives.allreduce([Vector(mine, "float32", "cpu", True)], out, "float32", Deadline(TIMEOUT_S), "sum")
            right = np.sum([term.astype(np.float32).astype(np.float64) for term in terms], axis=0)
            np.testing.assert_allclose(out, right, rtol=1e-5, atol=1e-5)

    run(size, do)


# ---- where processes meet


class Words:
    """What is used of torch's stores, for ranks that are threads. ``extended``: it can tell of many keys at once."""

    def __init__(self, extended: bool) -> None:
        self.extended, self.kept, self.changed = extended, dict[str, Any](), threading.Condition()

    def has_extended_api(self) -> bool:
        return self.extended

    def set(self, key: str, words: bytes) -> None:
        with self.changed:
            self.kept[key] = words
            self.changed.notify_all()

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.kept for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.check(keys), timeout.total_seconds()):
                raise RuntimeError("a key is not there")

    def get(self, key: str) -> bytes:
        with self.changed:
            return self.kept[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        assert self.extended
        return [self.get(key) for key in keys]

    def add(self, key: str, number: int) -> int:
        with self.changed:
            self.kept[key] = self.kept.get(key, 0) + number
            return self.kept[key]

    def delete_key(self, key: str) -> None:
        with self.changed:
            del self.kept[key]


@pytest.mark.parametrize("extended", [True, False])
@pytest.mark.parametrize("hosts", ["aa", "aab", "abbb"])
def test_ranks_meet_in_a_store_and_leave_nothing_there(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, hosts: str, extended: bool
) -> None:
    store, size, here = Words(extended), len(hosts), threading.local()
    asked, watched, cores = list[str](), list[bool](), list[int]()
    monkeypatch.setattr(torchrun, "host_name", lambda: here.host)
    monkeypatch.setattr(torchrun, "own_addresses", lambda network: asked.append(network) or [("127.0.0.1", 0)])
    monkeypatch.setattr(torchrun, "watch", lambda: watched.append(True))
    monkeypatch.setattr(torchrun, "expect_cores", cores.append)

    def meet(rank: int) -> None:
        here.host = hosts[rank]
        comm = torchrun.connect(store, rank, size, Deadline(TIMEOUT_S), "here", "eth7")
        assert (comm.rank, comm.size) == (rank, size)
        others, into = [other for other in range(size) if other != rank], np.empty((size, 9), np.uint8)
        finish(
            *(comm.isend(content(rank, other, 0, 9), other, 0) for other in others),
            *(comm.irecv(into[other], other, 0) for other in others),
        )
        for other in others:
            np.testing.assert_array_equal(into[other], content(other, rank, 0, 9))
        comm.free()

    for _ in range(2):  # a group of the same name may be made again
        run_ranks(size, lambda comm: meet(comm.rank))
        assert not store.kept
    several = len(set(hosts)) > 1
    assert asked == 2 * size * several * ["eth7"], "who is alone on a host listens to nobody else"
    assert watched == 2 * size * several * [True]
    assert sorted(cores) == sorted(2 * [hosts.count(host) for host in hosts])


def test_who_does_not_come_to_a_store_is_named(run_ranks: RunRanks) -> None:
    store = Words(extended=True)
    for rank in (0, 2):  # else one of them may be late, too
        store.set(f"kvmpi/ranks/{rank}", b"")
    said = run_ranks(
        5, lambda comm: torchrun.leave(store, comm.rank, 5, b"", Deadline(0.3), "group 'g'"), absent=(1, 3, 4),
        errors=True,
    )  # fmt: skip
    for rank in (0, 2):
        assert isinstance(said[rank], KVTimeoutError)
        assert f"group 'g', on rank {rank} of it: its rank 1, 3, 4 did not come within 0.3 s" in str(said[rank])


@pytest.mark.parametrize(
    ("change", "started"),
    [
        ({}, True), ({"WORLD_SIZE": "1"}, False), ({"RANK": "first"}, False), ({"WORLD_SIZE": ""}, False),
        *(({name: None}, False) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
    ],
)  # fmt: skip
def test_who_is_told_all_that_torchrun_tells_is_one_of_several(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str | None], started: bool
) -> None:
    told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in {**told, **change}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert torchrun.started() == started


def test_torchrun_without_torch_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "_world", None)
    monkeypatch.setattr(torchrun.mpi_comm, "take_place", lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(ConfigError, match="and torch, in whose store they meet, is not here"):
        torchrun.world(1.0)
