"""Messages between processes over one TCP connection for each two of them, for ranks that no MPI has started.

A short message leaves at once, and waits at its receiver until that wants it. A long one is offered first: its bytes
leave when there is memory for them, into which they are read. Bytes move inside calls, as MPI's do over TCP.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Collection, Mapping
from hashlib import blake2b
from itertools import islice

import numpy as np

from kvmpi.collectives.comm import Bytes
from kvmpi.collectives.links import close_in_child
from kvmpi.collectives.mailbox import Box, Mailbox, Message, Receive, settle
from kvmpi.collectives.probing import options
from kvmpi.errors import PeerLostError, ShapeMismatchError
from kvmpi.machine import host_name

#: What a message, an offer, and the bytes of what was offered begin with, and the words that they are wanted, or not:
#: which of these it is, tag, communicator, the sender's number for what it offers, length in bytes.
_HEADER = struct.Struct("<BIQQQ")
_SHORT, _OFFER, _BODY, _WANTED, _DROPPED = range(5)
#: Messages up to this size are not offered first: what is not wanted yet is kept, and copied.
EAGER_BYTES = 64 << 10
#: Reads from one peer before others get their turn.
_TURN = 64


class _Sending:
    """See ``Request``."""

    __slots__ = ("_mesh", "data", "done", "peer")

    def __init__(self, mesh: Mesh, peer: _Peer, data: memoryview) -> None:
        self._mesh, self.peer, self.data, self.done = mesh, peer, data, False

    def test(self) -> bool:
        if not self.done:
            self._mesh.move()
            if not self.done and self.peer.lost:
                raise PeerLostError(self.peer.lost)
        return self.done


class _Receiving:
    """See ``Request``; and what has come."""

    __slots__ = ("_box", "_mesh", "_ranks", "receive")

    def __init__(self, mesh: Mesh, box: Box, ranks: Mapping[int, int], receive: Receive) -> None:
        self._mesh, self._box, self._ranks, self.receive = mesh, box, ranks, receive

    def test(self) -> bool:
        receive = self.receive
        if not receive.done:
            self._mesh.move()
            if not receive.done:
                self._mesh.check(self._ranks if receive.source is None else (receive.source,))
        if receive.done and receive.too_long:
            raise ShapeMismatchError("a message is longer than the memory that is to receive it")
        return receive.done

    @property
    def source(self) -> int:
        """Whose message it is."""
        assert self.receive.source is not None
        return self._ranks[self.receive.source]

    @property
    def nbytes(self) -> int:
        """How long it is."""
        return self.receive.nbytes

    def cancel(self) -> None:
        """No message is wanted any more; one may have come just now."""
        self._mesh.cancel(self._box, self.receive)


class _Peer:
    """One connection: what is still to be written, and what is being read.

    Attributes:
        lost: why nothing comes from there any more; empty while something may.
    """

    def __init__(self, number: int, sock: socket.socket) -> None:
        self.number, self.sock, self.fd, self.lost = number, sock, sock.fileno(), ""
        self.out: deque[tuple[memoryview, _Sending | None]] = deque()
        self.header = memoryview(bytearray(_HEADER.size))
        self.left = self.header  # of what is being read
        self.message: Message | None = None  # whose bytes that is; None: it is a header
        self.wanted: dict[int, Message] = {}  # by the sender's number


class Mesh:
    """The connections of one process to all others. Any thread may call this.

    Args:
        peers: by number, one each; they belong to this from now on.
        names: how errors call them.
    """

    def __init__(self, number: int, peers: Mapping[int, socket.socket], names: Mapping[int, str]) -> None:
        self.number, self._names = number, names
        self._lock = threading.RLock()  # guards everything below
        self._mailbox = Mailbox()
        self._peers = {peer: _Peer(peer, sock) for peer, sock in peers.items()}
        self._by_fd = {peer.fd: peer for peer in self._peers.values()}
        self._poll = select.poll()
        self._num_comms = 0
        self._offers: dict[int, _Sending] = {}
        self._next_offer = 0
        for peer in self._peers.values():
            peer.sock.setblocking(False)
            peer.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for option in options():
                peer.sock.setsockopt(*option)
            self._poll.register(peer.fd, select.POLLIN)
        close_in_child(self)

    # ---- messages

    def send(self, data: memoryview, to: int, context: int, tag: int) -> _Sending:
        with self._lock:
            peer = self._peers[to]
            sending = _Sending(self, peer, data)
            if data.nbytes <= EAGER_BYTES:
                peer.out.append((memoryview(_HEADER.pack(_SHORT, tag, context, 0, data.nbytes)), None))
                peer.out.append((data, sending))
            else:
                number, self._next_offer = self._next_offer, self._next_offer + 1
                self._offers[number] = sending
                peer.out.append((memoryview(_HEADER.pack(_OFFER, tag, context, number, data.nbytes)), None))
            self._write(peer)
            return sending

    def receive(
        self, target: memoryview, source: int | None, context: int, tag: int, ranks: Mapping[int, int]
    ) -> _Receiving:
        """``ranks``: of the communicator, by peer."""
        box, receive = (context, tag), Receive(target, source)
        with self._lock:
            message = self._mailbox.post(box, receive)
            if message is not None and message.number >= 0:
                self._answer(message)
        return _Receiving(self, box, ranks, receive)

    def cancel(self, box: Box, receive: Receive) -> None:
        with self._lock:
            self._mailbox.cancel(box, receive)

    def begin(self) -> None:
        """There is one more communicator."""
        with self._lock:
            self._num_comms += 1

    def end(self, context: int) -> None:
        """There is one less. Without any, others lose this process."""
        with self._lock:
            self._mailbox.forget(context)
            self._num_comms -= 1
            if not self._num_comms:
                self.close()

    def check(self, peers: Collection[int]) -> None:
        """Raises PeerLostError: one of them is lost, and nothing comes from it any more."""
        for peer in peers:
            if peer != self.number and (lost := self._peers[peer].lost):
                raise PeerLostError(lost)

    # ---- bytes

    def move(self) -> None:
        """Read and write what can be read and written."""
        with self._lock:
            for fd, events in self._poll.poll(0):
                peer = self._by_fd[fd]
                if events & ~select.POLLOUT and not peer.lost:
                    self._read(peer)
                if events & select.POLLOUT and not peer.lost:
                    self._write(peer)

    def _write(self, peer: _Peer) -> None:
        if peer.lost:
            return
        try:
            while peer.out:
                # A header and what follows it are one packet, if they are short.
                left = peer.sock.sendmsg([data for data, _ in islice(peer.out, 2)])
                while peer.out and left >= peer.out[0][0].nbytes:
                    data, sending = peer.out.popleft()
                    left -= data.nbytes
                    if sending is not None:
                        sending.done = True
                if peer.out and left:
                    data, sending = peer.out[0]
                    peer.out[0] = data[left:], sending
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(peer, f"its connection broke: {error.strerror}")
            return
        self._poll.modify(peer.fd, select.POLLIN | select.POLLOUT if peer.out else select.POLLIN)

    def _read(self, peer: _Peer) -> None:
        try:
            for _ in range(_TURN):
                while peer.left.nbytes:
                    if not (count := peer.sock.recv_into(peer.left)):
                        self._lose(peer, "it has ended")
                        return
                    peer.left = peer.left[count:]
                self._advance(peer)
                if peer.lost:
                    return
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(peer, f"its connection broke: {error.strerror}")
        except KeyError:
            self._lose(peer, "it answers what nobody has said")

    def _advance(self, peer: _Peer) -> None:
        """A header is here, or all bytes that belong to the one before."""
        message, peer.message, peer.left = peer.message, None, peer.header
        if message is not None:
            message.arrived = True
            settle(message)
            return
        kind, tag, context, number, nbytes = _HEADER.unpack(peer.header)
        if kind in (_SHORT, _OFFER):
            message = Message(peer.number, nbytes, number if kind == _OFFER else -1)
            if self._mailbox.arrive((context, tag), message) and kind == _OFFER:
                self._answer(message)
            elif kind == _SHORT:
                self._begin(peer, message)
        elif kind == _BODY:
            self._begin(peer, peer.wanted.pop(number))
        else:
            sending = self._offers.pop(number)
            if kind == _DROPPED:
                sending.done = True
            else:
                peer.out.append((memoryview(_HEADER.pack(_BODY, 0, 0, number, sending.data.nbytes)), None))
                peer.out.append((sending.data, sending))
                self._write(peer)

    @staticmethod
    def _begin(peer: _Peer, message: Message) -> None:
        """Read the bytes of a message into the memory of who wants it, or that of its own."""
        receive = message.receive
        if receive is not None and not receive.too_long:
            target = receive.target[: message.nbytes]
        else:
            target = message.data = memoryview(bytearray(message.nbytes))
        peer.message, peer.left = message, target
        if not message.nbytes:
            peer.message, peer.left, message.arrived = None, peer.header, True
            settle(message)

    def _answer(self, message: Message) -> None:
        """Say whether there is memory for what was offered."""
        peer, receive = self._peers[message.source], message.receive
        assert receive is not None
        if receive.too_long:
            receive.done = True
        else:
            peer.wanted[message.number] = message
        kind = _DROPPED if receive.too_long else _WANTED
        peer.out.append((memoryview(_HEADER.pack(kind, 0, 0, message.number, 0)), None))
        self._write(peer)

    def _lose(self, peer: _Peer, why: str) -> None:
        peer.lost = f"{self._names[peer.number]} is lost: {why}"
        peer.out.clear()
        for number in [number for number, sending in self._offers.items() if sending.peer is peer]:
            del self._offers[number]
        self._poll.unregister(peer.fd)
        peer.sock.close()

    def close(self) -> None:
        """End the connections, of a forked child too."""
        self._poll = select.poll()
        for peer in self._peers.values():
            peer.lost = peer.lost or "this process has closed its connections"
            peer.sock.close()


class MeshComm:
    """One rank of a communicator over a mesh; see ``Comm``.

    Args:
        ranks: who they are in the mesh, the same on all of them.
        name: of which there is no other with these ranks, the same on all of them.
    """

    has_collectives = False
    largest_tag = (1 << 31) - 1

    def __init__(self, mesh: Mesh, ranks: Collection[int], name: str) -> None:
        self._mesh, self._ranks, self._name = mesh, list(ranks), name
        self.rank, self.size, self.host = self._ranks.index(mesh.number), len(self._ranks), host_name()
        self._by_peer = {peer: rank for rank, peer in enumerate(self._ranks)}
        self._context = int.from_bytes(blake2b(f"{self._ranks} {name}".encode(), digest_size=8).digest(), "little")
        self._duplicates = 0
        mesh.begin()

    def isend(self, buffer: Bytes, dest: int, tag: int) -> _Sending:
        return self._mesh.send(_octets(buffer), self._ranks[dest], self._context, tag)

    def irecv(self, buffer: Bytes, source: int, tag: int) -> _Receiving:
        return self.irecv_message(buffer, source, tag)

    def irecv_message(self, buffer: Bytes, source: int | None, tag: int) -> _Receiving:
        """``irecv`` that tells who sent how much; from any rank if ``source`` is None."""
        of = None if source is None else self._ranks[source]
        return self._mesh.receive(_octets(buffer), of, self._context, tag, self._by_peer)

    def iallreduce(self, *_: object) -> _Sending:
        raise AssertionError("a mesh has no collectives of its own")

    ireduce_scatter = iallgather = ibroadcast = iallreduce

    def waiter(self, peers: Collection[int]) -> None:
        """Messages move when somebody asks for one."""

    def attend(self) -> None:
        self._mesh.move()

    def channel(self, source: int, dest: int, tag: int) -> None:
        """The connections are everybody's."""

    def duplicate(self) -> MeshComm:
        self._duplicates += 1
        return MeshComm(self._mesh, self._ranks, f"{self._name}.{self._duplicates}")

    def of(self, ranks: Collection[int], name: str) -> MeshComm:
        """A communicator of some of these ranks, made by each of them. ``name``: as of the constructor."""
        return MeshComm(self._mesh, [self._ranks[rank] for rank in ranks], f"{self._name}/{name}")

    def free(self) -> None:
        self._mesh.end(self._context)


def _octets(buffer: Bytes) -> memoryview:
    return buffer.reshape(-1).view(np.uint8).data
