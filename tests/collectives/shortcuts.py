"""Agreement in shared memory for ranks that are threads, from the first call on."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from kvmpi.collectives import agreement, arena, tensor, words
from kvmpi.collectives.agreement import Shortcut
from kvmpi.collectives.forming import _page
from kvmpi.collectives.host_group import HostGroup, Peer
from kvmpi.collectives.memory_comm import MemoryComm, MemoryWorld

_lock = threading.Lock()


class Shortcuts:
    """Of every communicator, one for each rank. ``taken`` counts the agreements that needed no messages."""

    def __init__(self, wakes: bool) -> None:
        self._wakes = wakes
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
                group = HostGroup(range(comm.size), comm.rank, of_world[comm._context])
                group.wakes = self._wakes
                found = self._made[comm] = Shortcut(lambda: group)
                found.take()
        return found


@pytest.fixture(params=["messages", "shared memory", "shared memory that wakes"], autouse=True)
def shortcuts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shortcuts | None]:
    """Every test with agreement by messages, and once more in shared memory; None is by messages."""
    if request.param == "messages":
        yield None
        return
    wakes = request.param != "shared memory"
    if wakes and not words.wakes():
        pytest.skip("no compiled code here that wakes")
    made, plain, leave, all_state = Shortcuts(wakes), agreement.verdict, agreement.leave, HostGroup.all_state

    def verdict(comm: MemoryComm, call: Any, deadline: Any, settings: str = "", shortcut: Any = None) -> Any:
        return plain(comm, call, deadline, settings, made.of(comm))

    def leave_shared(comm: MemoryComm, deadline: Any, shortcut: Any = None) -> bool:
        return leave(comm, deadline, made.of(comm))

    def counting(group: HostGroup, *arguments: Any) -> bool:
        found = all_state(group, *arguments)
        with _lock:
            made.taken += found
        return found

    monkeypatch.setattr(HostGroup, "all_state", counting)
    for module in (agreement, tensor, request.module):
        if hasattr(module, "verdict"):
            monkeypatch.setattr(module, "verdict", verdict)
    monkeypatch.setattr(tensor, "leave", leave_shared)
    yield made
