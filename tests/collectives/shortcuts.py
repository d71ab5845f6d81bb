"""Agreement in shared memory, and over connections, for ranks that are threads, from the first call on."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from kvmpi.collectives import agreement, arena, tensor, words
from kvmpi.collectives.forming import _page
from kvmpi.collectives.host_group import HostGroup, Peer
from kvmpi.collectives.lines import Lines
from kvmpi.collectives.memory_comm import MemoryComm, MemoryWorld
from kvmpi.collectives.shortcut import Route, Shortcut

_lock = threading.Lock()


class Shortcuts:
    """Of every communicator, one for each rank. ``taken`` counts agreements that ended there.

    Args:
        per_host: so many ranks are on each host; 0: all are on one.
        linked: whether there are connections between first ranks of hosts.
    """

    def __init__(self, wakes: bool, per_host: int = 0, *, linked: bool = False) -> None:
        self._wakes, self.per_host, self._linked = wakes, per_host, linked
        self._socks: weakref.WeakKeyDictionary[MemoryWorld, Any] = weakref.WeakKeyDictionary()
        self._ends: list[socket.socket] = []
        self._peers: weakref.WeakKeyDictionary[MemoryWorld, dict[Any, list[Peer]]] = weakref.WeakKeyDictionary()
        self._made: weakref.WeakKeyDictionary[MemoryComm, Shortcut] = weakref.WeakKeyDictionary()
        self.taken = 0

    def of(self, comm: MemoryComm) -> Shortcut:
        with _lock:
            found = self._made.get(comm)
            if found is None:
                of_world = self._peers.setdefault(comm._world, {})
                if comm._context not in of_world:
                    of_world[comm._context] = [Peer(*_page(), arena.own().bytes, None) for _ in range(comm.size)]
                step = self.per_host or comm.size
                hosts = tuple(tuple(range(comm.size))[first : first + step] for first in range(0, comm.size, step))
                members = hosts[comm.rank // step]
                peers = [of_world[comm._context][rank] for rank in members]
                group = HostGroup(members, members.index(comm.rank), peers)
                group.wakes = self._wakes
                lines = self._lines(comm, [ranks[0] for ranks in hosts]) if self._linked else None
                found = self._made[comm] = Shortcut(lambda: Route(group, hosts, lines))
                found.take()
        return found

    def close(self) -> None:
        for end in self._ends:
            end.close()

    def _lines(self, comm: MemoryComm, firsts: list[int]) -> Lines | None:
        """Of a first rank, those to and from rank 0."""
        if len(firsts) == 1 or comm.rank not in firsts:
            return None
        pairs = [pair for first in firsts[1:] for pair in ((0, first), (first, 0))]
        of_world = self._socks.setdefault(comm._world, {})
        if comm._context not in of_world:
            of_world[comm._context] = {pair: socket.socketpair() for pair in pairs}
            self._ends += [end for both in of_world[comm._context].values() for end in both]
        ends = of_world[comm._context]
        outgoing = {to: ends[at, to][0] for at, to in pairs if at == comm.rank}
        incoming = {at: ends[at, to][1] for at, to in pairs if to == comm.rank}
        return Lines(comm, outgoing, incoming)


WAYS = [
    "messages", "shared memory", "shared memory that wakes", "shared memory of several hosts",
    "connections between hosts of several", "connections between hosts of one",
]  # fmt: skip


@pytest.fixture(params=WAYS, autouse=True)
def shortcuts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shortcuts | None]:
    """Every test with agreement by messages, and once more in shared memory; None is by messages."""
    if request.param == "messages":
        yield None
        return
    wakes, linked = request.param != "shared memory", request.param.startswith("connections")
    per_host = 1 if request.param == WAYS[-1] else 2 if "several" in request.param else 0
    if wakes and not words.wakes():
        pytest.skip("no compiled code here that wakes")
    made = Shortcuts(wakes, per_host, linked=linked)
    plain, leave, settle = agreement.verdict, agreement.leave, Shortcut.settle

    def verdict(comm: MemoryComm, call: Any, deadline: Any, settings: str = "", shortcut: Any = None) -> Any:
        return plain(comm, call, deadline, settings, made.of(comm))

    def leave_shared(comm: MemoryComm, deadline: Any, shortcut: Any = None) -> bool:
        return leave(comm, deadline, made.of(comm))

    def counting(shortcut: Shortcut, *arguments: Any, **options: Any) -> bool:
        found = settle(shortcut, *arguments, **options)
        with _lock:
            made.taken += found
        return found

    monkeypatch.setattr(Shortcut, "settle", counting)
    for module in (agreement, tensor, request.module):
        if hasattr(module, "verdict"):
            monkeypatch.setattr(module, "verdict", verdict)
    monkeypatch.setattr(tensor, "leave", leave_shared)
    yield made
    made.close()
