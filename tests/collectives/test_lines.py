"""Words between first ranks of hosts, over connections that wake: what is heard, what breaks, who agrees by them."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from collective_helpers import all_vectors, assert_is_sum, on_host, vectors
from test_shortcut import CountingComm, call_of

from kvmpi.collectives import Collectives, linking, waiting
from kvmpi.collectives.lines import WORD_BYTES, Lines
from kvmpi.collectives.memory_comm import MemoryComm, MemoryWorld
from kvmpi.collectives.shortcut import _over_lines
from kvmpi.collectives.topology import Layout
from kvmpi.deadline import Deadline
from kvmpi.errors import KVTimeoutError, OrderMismatchError, PeerLostError

RunRanks = Callable[..., list[Any]]

TIMEOUT_S = 20.0
ONE, TWO, THREE = (bytes([number]) * WORD_BYTES for number in (1, 2, 3))


class AttendedComm(MemoryComm):
    """Counts how often it is given a turn."""

    attended = 0

    def attend(self) -> None:
        self.attended += 1


def names(ranks: Sequence[int]) -> str:
    return f"nothing from {ranks}"


@pytest.fixture
def lines() -> Iterator[list[Lines]]:
    """Of rank 0, and of ranks 4 and 7."""
    comm = AttendedComm(MemoryWorld(8), 0, ())
    there = {peer: socket.socketpair() for peer in (4, 7)}
    back = {peer: socket.socketpair() for peer in (4, 7)}
    found = [
        Lines(comm, {peer: ends[0] for peer, ends in there.items()}, {peer: ends[1] for peer, ends in back.items()}),
        *(Lines(comm, {0: back[peer][0]}, {0: there[peer][1]}) for peer in (4, 7)),
    ]
    yield found
    for each in found:
        each.close()


def test_who_waits_hears_what_was_said_last_and_sleeps_meanwhile(
    lines: list[Lines], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of words that nobody has waited for only their place counts."""
    first, four, seven = lines
    naps: list[float] = []
    monkeypatch.setattr(waiting.time, "sleep", naps.append)
    for word in (ONE, TWO):
        first.expect()
        four.say(word)
    seven.say(ONE)
    assert not first.is_over()
    threading.Timer(0.1, lambda: seven.say(THREE)).start()
    assert first.hear(Deadline(TIMEOUT_S), names) == [TWO, THREE]
    for other in (four, seven):
        other.expect()
    first.say(ONE)
    assert [other.hear(Deadline(TIMEOUT_S), names) for other in (four, seven)] == [[ONE], [ONE]]
    assert naps == []


def test_a_word_may_come_in_pieces_and_before_it_is_asked_for(lines: list[Lines]) -> None:
    first, four, seven = lines
    for part in (TWO[:5], TWO[5:] + THREE[:1]):
        four._outgoing[0].send(part)
    seven.say(ONE)
    first.expect()
    assert first.hear(Deadline(TIMEOUT_S), names) == [TWO, ONE]
    first.expect()
    seven.say(ONE)
    assert not first.is_over(), "a piece of the next word is none"
    four._outgoing[0].send(THREE[1:])
    assert first.hear(Deadline(TIMEOUT_S), names) == [THREE, ONE]


def test_the_error_names_who_is_late(lines: list[Lines]) -> None:
    first, four, seven = lines
    first.expect()
    four.say(ONE)
    with pytest.raises(KVTimeoutError, match=r"nothing from \[7\]"):
        first.hear(Deadline(0.2), names)
    # It comes after all, and so does the next.
    first.expect()
    for word in (ONE, TWO):
        seven.say(word)
    four.say(THREE)
    assert first.hear(Deadline(TIMEOUT_S), names) == [THREE, TWO]


def test_what_else_is_under_way_has_its_turn_while_a_rank_waits(lines: list[Lines]) -> None:
    """MPI may have taken a message and not sent it yet, for which the others wait before they say anything."""
    first = lines[0]
    comm = first._comm
    assert isinstance(comm, AttendedComm)
    first.expect()
    with pytest.raises(KVTimeoutError):
        first.hear(Deadline(0.3), names)
    assert 5 <= comm.attended <= 100, "some times, and not as often as one can"


@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_breaks_says_nothing_more_and_is_no_error(lines: list[Lines], reset: bool) -> None:
    first, four, seven = lines
    if reset:
        first.say(ONE)  # which is never read
    four.say(ONE)
    four.close()
    first.expect()
    seven.say(ONE)
    assert first.hear(Deadline(TIMEOUT_S), names) == [ONE, ONE], "what was said before is heard"
    for _ in range(3):
        first.expect()
        assert first.hear(Deadline(TIMEOUT_S), names) is None
        assert first.is_over()
        first.say(TWO)
    seven.expect()
    assert seven.hear(Deadline(TIMEOUT_S), names) == [ONE if reset else TWO]


def agreed(lines: Lines, word: bytes) -> bool:
    """What rank 0 finds, which is alone on its host."""
    return _over_lines(lines, True, word, Deadline(TIMEOUT_S), names, lambda *_: True)


def test_an_answer_that_reaches_nobody_is_no(lines: list[Lines]) -> None:
    """The others' words came before their connections broke."""
    first, *others = lines
    for other in others:
        other.say(ONE)
    first._outgoing[4].shutdown(socket.SHUT_RDWR)
    assert not agreed(first, ONE)
    others[1].expect()
    assert others[1].hear(Deadline(TIMEOUT_S), names) == [bytes(WORD_BYTES)], "who can be reached hears that"


def test_an_answer_that_reaches_some_is_an_error_that_names_who_has_none(lines: list[Lines]) -> None:
    first, *others = lines
    for other in others:
        other.say(ONE)
    first._outgoing[7].shutdown(socket.SHUT_RDWR)
    with pytest.raises(PeerLostError, match="connection to MPI rank 7 is broken"):
        agreed(first, ONE)


def test_an_answer_that_reaches_all_is_what_they_have_said(lines: list[Lines]) -> None:
    first, *others = lines
    for said in (ONE, TWO):
        for other in others:
            other.say(said)
            other.expect()
        assert agreed(first, ONE) == (said == ONE)
        for other in others:
            assert other.hear(Deadline(TIMEOUT_S), names) == [ONE if said == ONE else bytes(WORD_BYTES)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_keeps_no_connection_open(lines: list[Lines]) -> None:
    socks = [*lines[0]._outgoing.values(), *lines[0]._incoming.values()]
    child = os.fork()
    if child == 0:
        os._exit(0 if all(sock.fileno() < 0 for sock in socks) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert all(sock.fileno() >= 0 for sock in socks), "the parent's are its own"


# ---- who agrees by them


def connected(comm: MemoryComm) -> tuple[Collectives, CountingComm]:
    """Collectives whose ranks agree over connections by now, and what they would send messages over."""
    calls = CountingComm(comm.duplicate())
    collectives = Collectives(comm, ring_transport="tcp", calls=calls)
    for step in range(3):
        own = vectors(comm.rank, 1, 50, "float32")
        collectives.allreduce(on_host(own, "float32"), own[0], "float32", Deadline(TIMEOUT_S), "test")
        assert_is_sum(own[0], all_vectors(comm.size, 1, 50, "float32"), "float32")
        collectives.agree(call_of(str(step)), Deadline(TIMEOUT_S))
    return collectives, calls


@pytest.mark.parametrize("hosts", ["ab", "abc", "aabb", "abab", "aabbbcc", "abcdefg"])
def test_no_messages_once_hosts_are_connected(run_ranks: RunRanks, hosts: str) -> None:
    def rank_main(comm: MemoryComm) -> int:
        collectives, calls = connected(comm)
        before = calls.sent
        for step in range(20):
            collectives.agree(call_of(str(step)), Deadline(TIMEOUT_S))
        sent = calls.sent - before
        collectives.close()
        return sent

    assert run_ranks(len(hosts), rank_main, hosts=hosts) == [0] * len(hosts)


@pytest.mark.parametrize("hosts", ["abc", "aabbc"])
@pytest.mark.parametrize("breaks", [0, -1])
def test_where_connections_break_messages_take_their_place(run_ranks: RunRanks, hosts: str, breaks: int) -> None:
    """Those of the first rank, or of the last: a firewall may have forgotten them while ranks computed."""
    size = len(hosts)

    def rank_main(comm: MemoryComm) -> tuple[int, str]:
        collectives, calls = connected(comm)
        lines = collectives._selection.calls
        if comm.rank == breaks % size:
            assert lines is not None
            for sock in (*lines._outgoing.values(), *lines._incoming.values()):
                sock.shutdown(socket.SHUT_RDWR)
        before = calls.sent
        for step in range(5):
            collectives.agree(call_of(str(step)), Deadline(TIMEOUT_S))
        with pytest.raises(OrderMismatchError) as caught:
            collectives.agree(call_of("odd" if comm.rank == 1 else "usual"), Deadline(TIMEOUT_S))
        collectives.agree(call_of("after that"), Deadline(TIMEOUT_S))
        return calls.sent - before, str(caught.value)

    for sent, text in run_ranks(size, rank_main, hosts=hosts):
        assert sent > 5, "messages"
        assert "MPI rank 0 has key 'usual', MPI rank 1 has key 'odd'" in text


def test_so_many_hosts_agree_as_before(run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 would have more connections than a process may; rings need two of each rank."""
    hosts = Layout(tuple((rank,) for rank in range(5)))
    assert len(linking.call_pairs(hosts)) == 8
    assert linking.call_pairs(Layout(((0, 3), (1, 2)))) == [(0, 1), (1, 0)]
    monkeypatch.setattr(linking, "_MOST_CALLERS", 3)
    assert linking.call_pairs(hosts) == []

    def rank_main(comm: MemoryComm) -> list[bool]:
        collectives, calls = connected(comm)
        before = calls.sent
        collectives.agree(call_of("last"), Deadline(TIMEOUT_S))
        selection = collectives._selection
        found = [selection.links is not None, selection.calls is not None, calls.sent > before]
        collectives.close()
        return found

    assert run_ranks(5, rank_main, hosts="abcde") == [[True, False, True]] * 5
