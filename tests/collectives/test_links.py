"""Connections of their own for rings between hosts: who gets them, who does not, and how messages travel."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from collective_helpers import all_vectors, assert_is_sum, on_host, vectors

from kvmpi.collectives import Collectives, linking, links, selection
from kvmpi.collectives.linking import in_order, own_addresses, pairs
from kvmpi.collectives.links import Links
from kvmpi.collectives.memory_comm import MemoryComm, MemoryWorld
from kvmpi.collectives.schedule import segment_bounds
from kvmpi.collectives.topology import Layout
from kvmpi.collectives.waiting import wait_all
from kvmpi.deadline import Deadline
from kvmpi.errors import KVTimeoutError, PeerLostError, UnsupportedError
from kvmpi.machine import read_text

RunRanks = Callable[..., list[Any]]

TIMEOUT_S = 20.0
TAG = 40


def layout_of(hosts: str) -> Layout:
    names = sorted(set(hosts), key=hosts.index)
    return Layout(tuple(tuple(i for i, host in enumerate(hosts) if host == name) for name in names))


@pytest.fixture
def linked() -> Iterator[list[Links]]:
    """Rank 0 and rank 1, with two connections from 0 to 1."""
    comms = MemoryWorld(2, "ab").comms()
    ends = [socket.socketpair() for _ in range(2)]
    made = [Links(comms[0], {1: [a for a, _ in ends]}, {}), Links(comms[1], {}, {0: [b for _, b in ends]})]
    yield made
    for end in made:
        end.close()


# ---- messages


def test_messages_of_one_tag_keep_their_order_and_those_of_another_do_not_wait_for_them(linked: list[Links]) -> None:
    sender, receiver = linked
    sizes = (1, 3_000_001, 0, 17, 700_000)
    sent = [np.random.default_rng(i).integers(0, 256, size, "u1") for i, size in enumerate(sizes)]
    got = [np.zeros(size, "u1") for size in sizes]
    sends = [sender.isend(part, 1, TAG) for part in sent]
    assert not all(send.test() for send in sends), "the system's buffers are not that large"
    other = np.zeros(5, "f4")
    receive = receiver.irecv(other, 0, TAG + 1)
    wait_all([sender.isend(np.arange(5, dtype="f4"), 1, TAG + 1), receive], Deadline(TIMEOUT_S), lambda: "")
    assert other.tolist() == [0, 1, 2, 3, 4]
    receives = [receiver.irecv(part, 0, TAG) for part in got]
    wait_all([*receives, *sends], Deadline(TIMEOUT_S), lambda: "messages stay under way")
    for before, after in zip(sent, got, strict=True):
        np.testing.assert_array_equal(before, after)


def test_who_waits_is_woken_by_a_message_and_else_at_the_end_of_its_time(linked: list[Links]) -> None:
    sender, receiver = linked
    waiter = receiver.waiter([0])
    assert waiter is not None
    assert receiver.waiter([0, 5]) is None, "messages of rank 5 wake nobody"
    got = np.zeros(1000, "u1")
    receive = receiver.irecv(got, 0, TAG)
    began_s = time.monotonic()
    waiter(0.05)
    assert 0.05 <= time.monotonic() - began_s < 5.0
    assert not receive.test()
    threading.Timer(0.05, lambda: sender.isend(np.ones(1000, "u1"), 1, TAG)).start()
    began_s = time.monotonic()
    waiter(60.0)
    assert time.monotonic() - began_s < 30.0
    assert receive.test()


def test_what_one_look_has_moved_is_not_looked_for_again(linked: list[Links]) -> None:
    """Each look is a call of the system, and a ring asks about several messages."""
    sender, receiver = linked
    got = np.zeros((2, 10), "u1")
    receives = [receiver.irecv(part, 0, TAG) for part in got]
    sender.isend(np.ones(10, "u1"), 1, TAG)
    looks = receiver.num_looks
    assert receives[0].test(), "nobody has looked since it was posted"
    assert not receives[1].test()
    assert receiver.num_looks == looks + 1
    sender.isend(np.ones(10, "u1"), 1, TAG)
    assert receives[1].test(), "whoever asks again wants a new answer"
    assert receiver.num_looks == looks + 2


def test_what_one_message_waits_for_moves_when_another_is_asked_about(linked: list[Links]) -> None:
    """As in MPI. A ring whose neighbours are on this host and on another asks about one of them only."""
    sender, receiver = linked
    sent, got = np.arange(3_000_000, dtype="u4"), np.zeros(3_000_000, "u4")
    send, receive = sender.isend(sent, 1, TAG), receiver.irecv(got, 0, TAG)
    assert not send.test()
    answer, beside = np.zeros(1), sender.irecv(np.zeros(1), 1, TAG)
    while not receive.test():
        assert not beside.test()
    np.testing.assert_array_equal(got, sent)
    back = receiver.isend(answer, 0, TAG)
    wait_all([beside, back], Deadline(TIMEOUT_S), lambda: "")
    asked = []

    class Asked:
        def test(self) -> bool:
            asked.append(1)
            return len(asked) == 2

    sender._note_beside(Asked())
    asked.clear()
    more = receiver.irecv(np.zeros(5, "u1"), 0, TAG)
    waiting = sender.isend(sent, 1, TAG + 1)
    for _ in range(3):
        assert not waiting.test()
    assert len(asked) == 2, "asked until it was done"
    assert not more.test()


def test_messages_without_a_connection_are_forgotten_when_they_are_done(linked: list[Links]) -> None:
    """Also where nobody waits for any other; else their memory would be kept."""
    sender, receiver = linked
    for _ in range(50):
        got = np.zeros(3)
        requests = [sender.irecv(got, 1, TAG), receiver.isend(np.arange(3.0), 0, TAG)]
        wait_all(requests, Deadline(TIMEOUT_S), lambda: "")
    assert len(sender._beside) == len(receiver._beside) == 1


def test_nobody_sleeps_before_having_looked_at_what_has_come(linked: list[Links]) -> None:
    """To ask about one message may have moved another."""
    sender, receiver = linked
    first, second = (receiver.irecv(np.zeros(5, "u1"), 0, tag) for tag in (TAG, TAG + 1))
    waiter = receiver.waiter([0])
    assert waiter is not None
    sender.isend(np.ones(5, "u1"), 1, TAG)
    while first.left.nbytes != 0:
        assert not second.test()
    began_s = time.monotonic()
    waiter(30.0)
    assert time.monotonic() - began_s < 15.0
    assert first.test()
    assert not second.test()
    began_s = time.monotonic()
    waiter(0.05)
    assert time.monotonic() - began_s >= 0.05, "nothing more has come"


def test_whoever_has_no_connection_is_reached_as_before(linked: list[Links]) -> None:
    sender, receiver = linked
    got = np.zeros(3, "f8")
    requests = [sender.irecv(got, 1, TAG), receiver.isend(np.arange(3.0), 0, TAG)]
    wait_all(requests, Deadline(TIMEOUT_S), lambda: "")
    assert got.tolist() == [0, 1, 2]


def test_a_peer_that_has_ended_is_an_error_that_names_it(linked: list[Links]) -> None:
    sender, receiver = linked
    receive = receiver.irecv(np.zeros(5, "u1"), 0, TAG)
    assert not receive.test()
    sender.close()
    with pytest.raises(PeerLostError, match=r"MPI rank 0 is broken \(closed\)"):
        receive.test()


def test_a_peer_that_no_longer_reads_is_an_error_that_names_it(linked: list[Links]) -> None:
    sender, receiver = linked
    receiver.close()
    with pytest.raises(PeerLostError, match="MPI rank 1 is broken"):
        sender.isend(np.zeros(1 << 20, "u1"), 1, TAG)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_keeps_no_connection_open(linked: list[Links]) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0 if all(stream.sock.fileno() < 0 for stream in linked[0]._streams.values()) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert all(stream.sock.fileno() >= 0 for stream in linked[0]._streams.values()), "the parent's are its own"


# ---- who gets one


@pytest.mark.parametrize("algorithm", ["ring", "multi_ring", "hierarchical"])
@pytest.mark.parametrize("hosts", ["ab", "abc", "aabb", "abab", "aab", "abcab", "aaabbcc", "aabbccc"])
def test_all_that_rings_send_to_other_hosts_has_a_connection(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, algorithm: str, hosts: str
) -> None:
    """Who sends to whom is looked up in what really happens, without connections."""
    size, used = len(hosts), set()
    original = MemoryComm.isend

    def noting(self: MemoryComm, buffer: Any, dest: int, tag: int) -> Any:
        if tag >= 32 and hosts[self.rank] != hosts[dest]:
            used.add((self.rank, dest))
        return original(self, buffer, dest, tag)

    monkeypatch.setattr(MemoryComm, "isend", noting)

    def rank_main(comm: MemoryComm) -> None:
        collectives, deadline = Collectives(comm, algorithm), Deadline(TIMEOUT_S)
        own, whole = np.ones(1000, "f4"), np.ones(1000, "f4")
        collectives.allreduce(on_host([own], "float32"), own, "float32", deadline, "sum")
        start, stop = segment_bounds(1000, size)[comm.rank]
        collectives.reduce_scatter(on_host([own], "float32"), own[start:stop], "float32", deadline, "scatter")
        collectives.allgather(whole[start:stop], whole, deadline, "gather")

    run_ranks(size, rank_main, hosts=hosts)
    assert used, "rings cross hosts"
    assert used <= set(pairs(layout_of(hosts)))


def test_one_host_needs_none() -> None:
    assert pairs(layout_of("aaaa")) == []
    assert pairs(layout_of("a")) == []


# ---- how they find each other


def test_addresses_are_those_of_the_networks_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [("lo", "127.0.0.1"), ("eth0", "10.1.2.3"), ("eth1", "192.168.7.9"), ("docker0", "172.17.0.1")]
    monkeypatch.setattr(linking, "addresses", lambda: found)
    monkeypatch.setattr(linking, "link_mbit", lambda name: {"eth1": 100_000}.get(name, 0))
    assert own_addresses() == [("10.1.2.3", 0), ("192.168.7.9", 100_000), ("172.17.0.1", 0)]
    assert own_addresses("eth1") == [("192.168.7.9", 100_000)]
    assert own_addresses("10.0.0.0/8, eth1") == [("10.1.2.3", 0), ("192.168.7.9", 100_000)]
    assert own_addresses("eth5") == []
    with pytest.raises(ValueError, match="does not appear to be"):
        own_addresses("nonsense/8")
    of_ipv6 = [("lo", "::1"), ("eth1", "fd00::9"), ("eth1", "2001:db8::9")]
    monkeypatch.setattr(linking, "addresses", lambda: [*found, *of_ipv6])
    assert own_addresses("eth1") == [("192.168.7.9", 100_000), ("fd00::9", 100_000), ("2001:db8::9", 100_000)]
    assert own_addresses("fd00::/64,10.0.0.0/8") == [("10.1.2.3", 0), ("fd00::9", 100_000)]
    monkeypatch.setattr(linking, "addresses", lambda: [("lo", "127.0.0.1"), ("lo", "::1"), ("eth0", "fd00::9")])
    assert own_addresses() == [("fd00::9", 0)]
    monkeypatch.setattr(linking, "addresses", lambda: [("lo", "127.0.0.1")])
    assert own_addresses() == [("127.0.0.1", 0)], "better than none: hosts may be containers on one machine"


def test_fast_links_come_first_and_then_the_nearest_network() -> None:
    candidates = [("172.17.0.1", 0), ("10.1.9.9", 0), ("10.2.0.4", 25_000), ("10.1.2.4", 0)]
    nearest = ["10.2.0.4", "10.1.2.4", "10.1.9.9", "172.17.0.1"]
    assert in_order(candidates, ["10.1.2.3"]) == nearest
    both = [("fd01::4", 0), ("fd00::4", 0), *candidates, ("fd02::4", 25_000)]
    assert in_order(both, ["10.1.2.3", "fd00::3"]) == [*nearest, "fd02::4", "fd00::4", "fd01::4"]
    assert in_order(both, ["fd00::3"])[-3:] == ["fd02::4", "fd00::4", "fd01::4"]


def test_addresses_travel_as_words() -> None:
    found = [("10.1.2.3", 0), ("255.255.255.255", 1 << 31), ("fd00::9", 25_000), ("::1", 0), ("ffff:" * 7 + "ffff", 1)]
    words = linking.in_words(found)
    assert words[:6] == [0, 0xFFFF_0A01_0203, 0, 0, 0xFFFF_FFFF_FFFF, 1 << 31]
    assert words[6:9] == [0xFD00 << 48, 9, 25_000]
    assert linking.of_words([*np.array(words, np.uint64).tolist(), *[0] * 6]) == found


@pytest.mark.parametrize("own", [["127.0.0.1"], ["127.0.0.1", "127.0.0.2"], ["::1"], ["127.0.0.1", "::1"]])
def test_a_listener_is_reached_at_each_of_its_addresses(own: list[str]) -> None:
    if "::1" in own and not read_text("/proc/net/if_inet6"):
        pytest.skip("IPv6 is switched off here")
    with linking._listen(own) as listener:
        port = listener.getsockname()[1]
        for address in own:
            with socket.create_connection((address, port), TIMEOUT_S):
                listener.accept()[0].close()
        if own == ["127.0.0.1"]:
            with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", port), TIMEOUT_S):
                pass


def test_strangers_get_no_connection_and_a_late_caller_still_does() -> None:
    token, callers_token = b"t" * 16, b"c" * 16
    listener = socket.create_server(("127.0.0.1", 0))
    found: dict[tuple[int, int], socket.socket] = {}
    arguments = (listener, token, [b"0" * 16, callers_token], {(1, 0)}, found, Deadline(TIMEOUT_S))
    answering = threading.Thread(target=linking._answer, args=arguments, daemon=True)
    answering.start()
    hellos = [b"x" * 16, token, token, token], [1, 1, 7, 1], [0, 3, 0, 0]
    answers = []
    for shown, rank, number in zip(*hellos, strict=True):
        with socket.create_connection(listener.getsockname()) as sock:
            sock.settimeout(TIMEOUT_S)
            sock.sendall(linking._HELLO.pack(shown, rank, number))
            answers.append(sock.recv(16))
    answering.join(TIMEOUT_S)
    assert answers == [b"", b"", b"", callers_token], "a wrong token, number or rank; and the one that is expected"
    assert list(found) == [(1, 0)]
    found[1, 0].close()
    listener.close()


def test_an_address_where_somebody_else_listens_is_passed_over() -> None:
    """As with bridges of containers, which have the same address on every host."""
    token = b"c" * 16
    with socket.create_server(("127.0.0.1", 0)) as right, socket.socket() as wrong:
        wrong.bind(("127.0.0.2", right.getsockname()[1]))
        wrong.listen()

        def answer(listener: socket.socket, reply: bytes) -> None:
            sock, _ = listener.accept()
            with sock:
                linking._read(sock, linking._HELLO.size)
                sock.sendall(reply)
                sock.recv(1)

        for listener, reply in ((wrong, b"?" * 16), (right, token)):
            threading.Thread(target=answer, args=(listener, reply), daemon=True).start()
        words = [0, 0xFFFF_7F00_0001, 0, 0, 0xFFFF_7F00_0002, 1000]  # 127.0.0.1, and 127.0.0.2 with a faster link
        offer = np.array([1, 0, 0, right.getsockname()[1], *words, 0, 0, 0], np.uint64)
        hello = linking._HELLO.pack(b"t" * 16, 0, 0)
        sock = linking._call(offer, hello, token, ["127.0.0.1"], Deadline(TIMEOUT_S))
        assert sock is not None
        with sock:
            assert sock.getpeername()[0] == "127.0.0.1"


# ---- collectives over them


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the times are the system's")
def test_connections_without_traffic_are_probed(run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall forgets them otherwise, and what is sent after a pause of some minutes vanishes."""
    made: list[socket.socket] = []
    monkeypatch.setattr(linking, "Links", lambda comm, outgoing, incoming: made.extend(outgoing[1 - comm.rank]))
    hosts = layout_of("ab")
    run_ranks(
        2, lambda comm: linking.link(comm, hosts, 1, Deadline(TIMEOUT_S), "", network="lo", despite_fabric=True),
        hosts="ab",
    )  # fmt: skip
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    for sock in made:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle_s, between_s, probes = (sock.getsockopt(socket.IPPROTO_TCP, option) for option in options)
        assert idle_s <= 60, "the least that a firewall of a cloud keeps a connection is four minutes"
        assert between_s * probes >= 300, "a partition that a call outlasts"
        sock.close()
    assert len(made) == 2, "each end has one"


def received_bytes(sock: socket.socket) -> int:
    """As Linux counts them, tcpi_bytes_received."""
    return int.from_bytes(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)[128:136], sys.byteorder)


@pytest.mark.parametrize("hosts", ["ab", "abc", "aabb", "abcdefg"])
def test_large_sums_travel_over_them_and_small_ones_do_not(run_ranks: RunRanks, hosts: str) -> None:
    size, counts = len(hosts), (1000, (1 << 18) + 7)
    counted = threading.Barrier(size)

    def rank_main(comm: MemoryComm) -> tuple[list[np.ndarray], list[int]]:
        collectives, deadline, found, moved = Collectives(comm, ring_transport="tcp"), Deadline(TIMEOUT_S), [], []
        for count in counts:
            out = np.empty(count, "f4")
            own = vectors(comm.rank, 2, count, "float32")
            collectives.allreduce(on_host(own, "float32"), out, "float32", deadline, "sum")
            found.append(out)
            assert collectives._selection.links is not None
            streams = [stream for ends in collectives._selection.links._incoming.values() for stream in ends]
            moved.append(sum(received_bytes(stream.sock) for stream in streams))
            counted.wait(TIMEOUT_S)  # before anybody sends more
        collectives.close()
        return found, moved

    results = run_ranks(size, rank_main, hosts=hosts)
    for i, count in enumerate(counts):
        assert_is_sum(results[0][0][i], all_vectors(size, 2, count, "float32"), "float32")
        assert len({found[i].tobytes() for found, _ in results}) == 1
    num_hosts = len(set(hosts))
    for _, moved in results:
        assert moved[0] < 200, "how they met"
        share = 2 * (num_hosts - 1) / num_hosts * 4 * counts[1] / (size // num_hosts)
        assert abs(moved[1] - moved[0] - share) < 100, "of a ring's bytes, what it is sent: every one of them"


@pytest.mark.parametrize("algorithm", ["ring", "multi_ring", "hierarchical"])
@pytest.mark.parametrize("hosts", ["aab", "aabb", "abab", "abc"])
def test_sums_are_right_where_the_system_takes_little_at_a_time(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, algorithm: str, hosts: str
) -> None:
    """Most messages leave in pieces. A rank may have one neighbour on its host and one on another."""
    size, count, partial, original = len(hosts), 150_007, [], linking._call

    def narrow(*arguments: Any) -> Any:
        sock = original(*arguments)
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return sock

    def noting(transfer: Any) -> bool:
        done = test(transfer)
        if not done and len(transfer.left) % 4096:
            partial.append(1)
        return done

    test = links._Transfer.test
    monkeypatch.setattr(links._Transfer, "test", noting)
    monkeypatch.setattr(linking, "_call", narrow)

    def rank_main(comm: MemoryComm) -> np.ndarray:
        collectives = Collectives(comm, algorithm, ring_transport="tcp", use_native=False)
        out = np.empty(count, "f4")
        for _ in range(2):
            own = vectors(comm.rank, 1, count, "float32")
            collectives.allreduce(on_host(own, "float32"), out, "float32", Deadline(TIMEOUT_S), "sum")
        collectives.close()
        return out

    for out in run_ranks(size, rank_main, hosts=hosts):
        assert_is_sum(out, all_vectors(size, 1, count, "float32"), "float32")
    assert partial, "some messages were seen half way"


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_where_a_rank_cannot_be_reached_all_use_what_they_have(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, transport: str
) -> None:
    monkeypatch.setattr(selection, "LINKED_FROM_BYTES", 1)
    monkeypatch.setattr(linking, "_ALL_S", 0.5)
    original = linking._call

    def blocked(offer: Any, hello: bytes, *arguments: Any) -> Any:
        return None if linking._HELLO.unpack(hello)[1] == 1 else original(offer, hello, *arguments)

    monkeypatch.setattr(linking, "_call", blocked)

    def rank_main(comm: MemoryComm) -> list[float]:
        collectives, out = Collectives(comm, ring_transport=transport), np.ones(100, "f4")
        common = collectives.common_empty(1 << 20, "float32", Deadline(TIMEOUT_S))
        assert (common is None) == (transport == "tcp"), "one that asks whether something is possible hears that"
        try:
            collectives.allreduce(on_host([out], "float32"), out, "float32", Deadline(TIMEOUT_S), "sum of key 3")
        finally:
            assert not collectives.broken, "nothing is under way"
        return sorted(set(out.tolist()))

    with caplog.at_level(logging.INFO, "kvmpi"):
        found = run_ranks(3, rank_main, hosts="abc", errors=True)
    if transport == "auto":
        assert found == [[3.0]] * 3
        assert "MPI rank 1 cannot reach MPI rank 2 over TCP" in caplog.text
    else:
        assert all(isinstance(error, UnsupportedError) for error in found)
        assert all("sum of key 3: KVMPI_RING_TRANSPORT=tcp: MPI rank 1" in str(error) for error in found)


@pytest.mark.parametrize(("transport", "linked"), [("auto", False), ("tcp", True), ("mpi", False)])
def test_a_fabric_is_left_to_mpi_unless_told_otherwise(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, transport: str, linked: bool
) -> None:
    monkeypatch.setattr(linking, "has_fabric", lambda: threading.current_thread().name == "rank 1")

    def rank_main(comm: MemoryComm) -> bool:
        collectives = Collectives(comm, "ring", ring_transport=transport)
        collectives.choice("allreduce", 1 << 20, "float32")
        made = collectives._selection.links is not None
        collectives.close()
        return made

    assert run_ranks(3, rank_main, hosts="abc") == [linked] * 3


@pytest.mark.parametrize("use_native", [True, False])
def test_a_rank_that_ends_in_a_sum_is_named_at_once(run_ranks: RunRanks, use_native: bool) -> None:
    def rank_main(comm: MemoryComm) -> Any:
        collectives = Collectives(comm, "ring", ring_transport="tcp", use_native=use_native)
        out = np.ones(1 << 18, "f4")
        collectives.allreduce(on_host([out], "float32"), out, "float32", Deadline(TIMEOUT_S), "first")
        if comm.rank == 1:
            collectives.close()
            return None
        began_s = time.monotonic()
        with pytest.raises((PeerLostError, KVTimeoutError)) as caught:
            collectives.allreduce(on_host([out], "float32"), out, "float32", Deadline(3.0), "second")
        assert collectives.broken
        return type(caught.value), str(caught.value), time.monotonic() - began_s

    _, _, (kind, text, took_s) = run_ranks(3, rank_main, hosts="abc")
    assert kind is PeerLostError, "rank 2 hears it from rank 1's end of the connection"
    assert "MPI rank 1" in text
    assert took_s < 2.5
