"""Thin wrappers of ZeroMQ sockets that carry messages; nothing else in the tree imports zmq."""

from __future__ import annotations

import ctypes
import socket
import sys
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

from kvmpi.errors import ConfigError, ProtocolError
from kvmpi.wire.messages import Message, decode, encode

Payload = npt.NDArray[Any]
Context = zmq.Context
#: Below this size a copy into the message is cheaper than the bookkeeping of lending the buffer.
_LEND_FROM_BYTES = 64 << 10
_LINGER_MS = 1000
# Plain ints: joining pyzmq's enumerations anew for every frame takes longer than sending a small one.
_MORE = int(zmq.SNDMORE | zmq.NOBLOCK)
_LAST = int(zmq.NOBLOCK)
#: Kernel buffers that hold a few chunks, so that a sender is not woken for every few hundred kilobytes.
_KERNEL_BUFFER_BYTES = 1 << 20


def new_context() -> zmq.Context[Any]:
    """A context with one I/O thread; its owner ends it with ``destroy()``."""
    return zmq.Context(io_threads=1)


class _Socket:
    def __init__(self, context: zmq.Context[Any], kind: int, max_message_bytes: int) -> None:
        self._socket: zmq.Socket[Any] = context.socket(kind)
        self._socket.linger = _LINGER_MS
        self._socket.maxmsgsize = max_message_bytes
        # The window of the session bounds what is in flight; a second limit here could only drop or block.
        self._socket.sndhwm = 0
        self._socket.rcvhwm = 0
        self._socket.sndbuf = _KERNEL_BUFFER_BYTES
        self._socket.rcvbuf = _KERNEL_BUFFER_BYTES

    @property
    def raw(self) -> zmq.Socket[Any]:
        return self._socket

    def close(self) -> None:
        self._socket.close()

    def _send(self, frames: list[bytes], payloads: Sequence[Payload]) -> None:
        send, last = self._socket.send, len(frames) + len(payloads) - 1
        for i, frame in enumerate(frames):
            send(frame, _LAST if i == last else _MORE)
        for i, payload in enumerate(payloads, len(frames)):
            # An array of length 0 has no memory to lend.
            lend = payload.nbytes >= _LEND_FROM_BYTES
            send(payload.data if payload.nbytes else b"", _LAST if i == last else _MORE, copy=not lend)

    def _recv(self) -> list[zmq.Frame] | None:
        receive = self._socket.recv
        try:
            frames = [receive(_LAST, copy=False)]
        except zmq.Again:
            return None
        while frames[-1].more:
            frames.append(receive(_LAST, copy=False))
        return frames


def _payloads(frames: list[zmq.Frame]) -> list[memoryview]:
    return [memoryview(frame.buffer) for frame in frames]


class Listener(_Socket):
    """A ROUTER socket: hears many peers, and answers each by its route."""

    def __init__(self, context: zmq.Context[Any], max_message_bytes: int) -> None:
        super().__init__(context, zmq.ROUTER, max_message_bytes)
        # A peer whose link broke comes back under the same name, maybe before this side has noticed.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.endpoints: list[str] = []

    def bind_tcp(self, host: str, port: int = 0) -> str:
        """Listen on ``tcp://host:port``; port 0 lets the system choose. Returns the endpoint.

        Raises:
            ConfigError: the address cannot be had, for example because the port is in use.
        """
        return self._bind(f"tcp://{host}:{port or '*'}")

    def bind_ipc(self, path: str) -> str:
        """Listen on the Unix socket ``path``, which must lie in a private folder. Returns the endpoint."""
        return self._bind(f"ipc://{path}")

    def _bind(self, endpoint: str) -> str:
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            reason = "the address is in use" if error.errno == zmq.EADDRINUSE else error.strerror
            raise ConfigError(f"cannot listen on {endpoint}: {reason}; choose another host or port") from None
        bound = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self.endpoints.append(bound)
        return bound

    def send(self, route: bytes, message: Message, payloads: Sequence[Payload] = ()) -> None:
        """Send to the peer at ``route``; a peer that is gone is no error. Large payloads are lent, not copied.

        Raises:
            ProtocolError: the message cannot be encoded; nothing was sent.
        """
        self._send([route, encode(message)], payloads)

    def recv(self) -> tuple[bytes, Message | ProtocolError, list[memoryview]] | None:
        """The next message and where it came from, or None. What is no message comes as a ``ProtocolError``."""
        frames = self._recv()
        if frames is None:
            return None
        route = frames[0].bytes
        if len(frames) < 2:
            return route, ProtocolError("message without a header frame"), []
        try:
            return route, decode(frames[1].bytes), _payloads(frames[2:])
        except ProtocolError as error:
            return route, error, []


class Connection(_Socket):
    """A DEALER socket: one connection to one listener, under the same route there when it breaks and is made anew."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, max_message_bytes: int) -> None:
        super().__init__(context, zmq.DEALER, max_message_bytes)
        self.endpoint = endpoint
        # Without a name, a second link would be a stranger to the listener. Nobody can guess this one and take it over.
        self._socket.setsockopt(zmq.ROUTING_ID, b"k" + uuid.uuid4().bytes)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot connect to {endpoint!r}: {error.strerror}") from None

    def send(self, message: Message, payloads: Sequence[Payload] = ()) -> None:
        """Send to the listener. A payload of 64 KiB or more is lent: leave it unchanged until it is answered.

        Raises:
            ProtocolError: the message cannot be encoded; nothing was sent.
        """
        frames = [encode(message)]
        try:
            self._send(frames, payloads)
        except zmq.Again:
            # There is no limit to queues here, so it means that there is no link: libzmq gives one up for good when the
            # peer violates the protocol, as by a frame above our limit. Make another; connecting twice does nothing.
            try:
                self._socket.disconnect(self.endpoint)
            except zmq.ZMQError:
                pass  # forgotten already
            self._socket.connect(self.endpoint)
            self._send(frames, payloads)

    def recv(self) -> tuple[Message, list[memoryview]] | None:
        """The next message with its payloads, or None.

        Raises:
            ProtocolError: what came is no message.
        """
        frames = self._recv()
        if frames is None:
            return None
        return decode(frames[0].bytes), _payloads(frames[1:])


class Waker:
    """Wakes a thread that sleeps in ``wait_readable``; ``wake`` may be called from any thread."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        return self._read.fileno()

    def wake(self) -> None:
        try:
            self._write.send(b"\0")
        except (BlockingIOError, OSError):
            pass  # full: a wake-up is pending already; closed: nobody sleeps any more

    def clear(self) -> None:
        try:
            while len(self._read.recv(4096)) == 4096:
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        self._read.close()
        self._write.close()


class Readiness:
    """A fixed set of sockets and wakers to wait on."""

    def __init__(self, sources: Sequence[_Socket | Waker]) -> None:
        self._poller = zmq.Poller()
        self._sources = {source.raw if isinstance(source, _Socket) else source.fileno(): source for source in sources}
        for handle in self._sources:
            self._poller.register(handle, zmq.POLLIN)

    def wait(self, timeout_s: float) -> list[_Socket | Waker]:
        """Sleep until something can be read, at most ``timeout_s``; which of the sources can."""
        ready = self._poller.poll(max(0, int(timeout_s * 1000 + 0.999)))
        return [self._sources[handle] for handle, _ in ready]


def as_array(payload: memoryview, dtype: np.dtype[Any]) -> Payload:
    """A payload frame as an array that keeps the frame alive; nothing else refers to its memory.

    Raises:
        ProtocolError: the frame's length is no multiple of the item size.
    """
    if payload.nbytes % dtype.itemsize:
        raise ProtocolError(f"payload of {payload.nbytes} bytes is no whole number of {dtype} items")
    return np.frombuffer(payload, dtype=dtype)


def keep_large_buffers(largest_bytes: int) -> None:
    """Let malloc keep and reuse buffers of up to ``largest_bytes`` instead of mapping each one anew (glibc only).

    ZeroMQ allocates every received message; without this, page faults cost more than the transfer.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # musl has no mallopt, and no such threshold
    m_trim_threshold, m_top_pad, m_mmap_threshold = -1, -2, -3
    mallopt(m_mmap_threshold, min(largest_bytes, 32 << 20))
    mallopt(m_trim_threshold, 32 << 20)
    mallopt(m_top_pad, 4 << 20)
