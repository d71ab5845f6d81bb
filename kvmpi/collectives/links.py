"""A communicator whose ranks on different hosts exchange a ring's messages over TCP connections of their own.

MPI moves what travels over TCP only inside its calls, so a rank that waits must poll, and pays for every look. Here the
system's network stack moves bytes by itself and wakes the rank when there is enough to do: summing 20 MB between four
hosts takes six tenths of the processor time, at the same speed.

A connection carries messages in one direction. They have no headers: both ends know from the schedule of the collective
which message comes next and how long it is, and every call is agreed upon before.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from kvmpi.collectives.comm import Bytes, Channel, Comm, Request, Waiter
from kvmpi.errors import PeerLostError

#: A receiver is woken when so much of a message is there, or all of it.
_WAKE_BYTES = 128 << 10


class _Transfer:
    """One message; ``left`` is what has not been moved yet."""

    __slots__ = ("_links", "_looks", "left")

    def __init__(self, links: Links, buffer: Bytes) -> None:
        self._links, self._looks = links, links.num_looks
        self.left = (buffer if buffer.ndim == 1 else buffer.reshape(-1)).view("u1").data

    def test(self) -> bool:
        if self.left:
            # Somebody else may have moved what can be moved since the last time.
            if self._looks == self._links.num_looks:
                self._links.move()
                self._links.ask_beside()
            self._looks = self._links.num_looks
        return not self.left


class _Beside:
    """A message that has no connection to travel over."""

    __slots__ = ("_links", "_request")

    def __init__(self, links: Links, request: Request) -> None:
        self._links, self._request = links, request

    def test(self) -> bool:
        self._links.move()  # whoever waits for this may have sent what the other side waits for
        return self._request.test()


class _Stream(ABC):
    """One end of a connection, and the messages that it is to carry, the next one first."""

    events: int

    def __init__(self, sock: socket.socket, peer: int) -> None:
        self.sock, self.fd, self.peer = sock, sock.fileno(), peer
        self.queue: deque[_Transfer] = deque()
        sock.setblocking(False)

    @abstractmethod
    def begin(self) -> None:
        """A message is the next one. Raises as ``move`` does."""

    @abstractmethod
    def move(self) -> None:
        """Move of the first messages what can be moved now.

        Raises:
            PeerLostError: the other end is closed.
        """


def lost(peer: int, error: object) -> PeerLostError:
    """For whoever finds the connection to ``peer`` broken."""
    return PeerLostError(f"the connection to MPI rank {peer} is broken ({error}): it has probably ended")


class _Outgoing(_Stream):
    events = select.POLLOUT

    def begin(self) -> None:
        self.move()

    def move(self) -> None:
        while self.queue:
            first = self.queue[0]
            try:
                count = self.sock.send(first.left)
            except BlockingIOError:
                return
            except OSError as error:
                raise lost(self.peer, error) from None
            first.left = first.left[count:]
            if first.left:
                return  # the system's buffer is full
            self.queue.popleft()


class _Incoming(_Stream):
    events = select.POLLIN

    def __init__(self, sock: socket.socket, peer: int) -> None:
        super().__init__(sock, peer)
        self.wake_bytes = 1  # as the system was told

    def begin(self) -> None:
        """Let the system wake this rank when much of the first message is there."""
        wake_bytes = min(len(self.queue[0].left), _WAKE_BYTES)
        if wake_bytes != self.wake_bytes and sys.platform == "linux":
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)
            self.wake_bytes = wake_bytes

    def move(self) -> None:
        # Once: whether there is more, the next look tells, for less than an exception costs.
        first = self.queue[0]
        try:
            count = self.sock.recv_into(first.left)
        except BlockingIOError:
            return
        except OSError as error:
            raise lost(self.peer, error) from None
        if count == 0:
            raise lost(self.peer, "closed")
        first.left = first.left[count:]
        if not first.left:
            self.queue.popleft()
        if self.queue:
            self.begin()


class Links:
    """``comm``, with connections between some of its ranks; for one thread at a time.

    Whatever has no connection travels over ``comm``.

    Args:
        outgoing: sockets to other ranks, as many to each; messages with tags that differ by less than that number
            travel independently of each other.
        incoming: sockets from other ranks, likewise.
    """

    def __init__(
        self, comm: Comm, outgoing: Mapping[int, Sequence[socket.socket]],
        incoming: Mapping[int, Sequence[socket.socket]],
    ) -> None:  # fmt: skip
        self._comm = comm
        self.rank, self.size, self.host = comm.rank, comm.size, comm.host
        self.has_collectives = comm.has_collectives
        self.iallreduce, self.ireduce_scatter = comm.iallreduce, comm.ireduce_scatter
        self.iallgather, self.ibroadcast = comm.iallgather, comm.ibroadcast
        self._outgoing = {peer: [_Outgoing(sock, peer) for sock in socks] for peer, socks in outgoing.items()}
        self._incoming = {peer: [_Incoming(sock, peer) for sock in socks] for peer, socks in incoming.items()}
        self._streams = dict[int, _Stream]()
        for outs in self._outgoing.values():
            self._streams.update((stream.fd, stream) for stream in outs)
        for ins in self._incoming.values():
            self._streams.update((stream.fd, stream) for stream in ins)
        self._busy = select.poll()  # streams with messages under way
        self._moved = False  # something, since ``wait`` was called
        #: So often has been looked what can be moved.
        self.num_looks = 0
        self._beside: deque[Request] = deque()
        close_in_child(self)

    def isend(self, buffer: Bytes, dest: int, tag: int) -> Request:
        streams = self._outgoing.get(dest)
        if streams is None:
            return self._note_beside(self._comm.isend(buffer, dest, tag))
        return self._post(buffer, streams[tag % len(streams)])

    def irecv(self, buffer: Bytes, source: int, tag: int) -> Request:
        streams = self._incoming.get(source)
        if streams is None:
            return self._note_beside(self._comm.irecv(buffer, source, tag))
        return self._post(buffer, streams[tag % len(streams)])

    def _post(self, buffer: Bytes, stream: _Stream) -> Request:
        transfer = _Transfer(self, buffer)
        if transfer.left:
            stream.queue.append(transfer)
            if len(stream.queue) == 1:
                stream.begin()
                if stream.queue:
                    self._busy.register(stream.fd, stream.events)
        return transfer

    def _note_beside(self, request: Request) -> Request:
        self.ask_beside()  # else those that are done would be kept, with their memory
        self._beside.append(request)
        return _Beside(self, request)

    def ask_beside(self) -> None:
        """Let messages without a connection make progress: each test is also one for all others, as in MPI."""
        while self._beside and self._beside[0].test():
            self._beside.popleft()

    def move(self, timeout_s: float = 0.0) -> None:
        """Move what can be moved; when that is nothing, wait until something can be, at most so long.

        Raises:
            PeerLostError: a rank that a message goes to or comes from has ended.
        """
        self.num_looks += 1
        for fd, _ in self._busy.poll(timeout_s * 1e3):
            self._moved = True
            stream = self._streams[fd]
            stream.move()
            if not stream.queue:
                self._busy.unregister(fd)

    def wait(self, timeout_s: float) -> None:
        """Return when something has been moved since the last call; at most after so long.

        To test one message moves others, too: those who wait for them have to look before anybody sleeps.
        """
        if not self._moved:
            self.move(timeout_s)
        self._moved = False

    def waiter(self, peers: Collection[int]) -> Waiter | None:
        return self.wait if all(peer in self._outgoing or peer in self._incoming for peer in peers) else None

    def channel(self, source: int, dest: int, tag: int) -> Channel | None:
        """See ``Comm``."""
        if source not in self._incoming or dest not in self._outgoing:
            return None
        ins, outs = self._incoming[source], self._outgoing[dest]
        incoming, outgoing = ins[tag % len(ins)], outs[tag % len(outs)]
        if incoming.queue or outgoing.queue:
            return None
        incoming.wake_bytes = 0  # nobody knows what it is after that
        return Channel(source, incoming.fd, dest, outgoing.fd)

    def attend(self) -> None:
        self._comm.attend()

    def duplicate(self) -> Comm:
        return self._comm.duplicate()

    def close(self) -> None:
        """End the connections; the communicator that they belong to stays."""
        for stream in self._streams.values():
            stream.sock.close()

    def free(self) -> None:
        self.close()
        self._comm.free()


class _Closable(Protocol):
    def close(self) -> None: ...


_all: weakref.WeakSet[_Closable] = weakref.WeakSet()


def close_in_child(connections: _Closable) -> None:
    """A forked child has no part in what its parent exchanges, and must not keep connections open that that closes."""
    _all.add(connections)


def _forked() -> None:
    for connections in list(_all):
        connections.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
