"""A parameter server of plain TCP sockets, which only adds up what workers push: what is left to any other to gain.

    python -m kvmpi.benchmarks.ps_sockets WORKERS SERVERS PROGRAM [ARG...]

starts servers and workers on this host, and ends with the workers, each of which is PROGRAM, run by Python.
"""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.benchmarks.ps_worker import ends, spoiled
from kvmpi.launchers import processes

Array = npt.NDArray[Any]

_PORTS = "KVMPI_BENCH_PORTS"
_HEADER = struct.Struct("=BQ")  # what is asked for, and the bytes of a push
_PUSH, _PULL, _BOTH = 1, 2, 3


class Channel:
    """A connection that is written and read at once, straight from and into the memory of arrays."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # What the system takes for itself is more than the caches hold, and slower.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 512 << 10)
        connection.setblocking(False)
        self.socket = connection
        self._out: collections.deque[memoryview] = collections.deque()
        self._into: collections.deque[memoryview] = collections.deque()

    def send(self, *buffers: Any) -> None:
        self._out += (view for buffer in buffers if (view := memoryview(buffer).cast("B")).nbytes)

    def receive(self, *buffers: Any) -> None:
        self._into += (view for buffer in buffers if (view := memoryview(buffer).cast("B")).nbytes)

    @property
    def receiving(self) -> bool:
        return bool(self._into)

    @property
    def events(self) -> int:
        """What it waits for."""
        return (selectors.EVENT_READ if self._into else 0) | (selectors.EVENT_WRITE if self._out else 0)

    def move(self) -> None:
        """Write what the kernel takes, and read what it has.

        Raises:
            EOFError: the other end is closed.
        """
        with contextlib.suppress(BlockingIOError):
            while self._out:
                self._advance(self._out, self.socket.send(self._out[0]))
        with contextlib.suppress(BlockingIOError):
            while self._into:
                if not (count := self.socket.recv_into(self._into[0])):
                    raise EOFError
                self._advance(self._into, count)

    @staticmethod
    def _advance(queue: collections.deque[memoryview], count: int) -> None:
        queue[0] = queue[0][count:]
        if not queue[0].nbytes:
            queue.popleft()


class Poller:
    """Waits for channels, and tells the kernel only what has changed of what they wait for."""

    def __init__(self, channels: Iterable[Channel]) -> None:
        self._selector, self._events = selectors.DefaultSelector(), dict.fromkeys(channels, 0)

    def wait(self) -> list[Channel]:
        """Those that can go on."""
        for channel, before in self._events.items():
            if (events := channel.events) == before:
                continue
            if before:
                self._selector.unregister(channel.socket)
            if events:
                self._selector.register(channel.socket, events, channel)
            self._events[channel] = events
        return [key.data for key, _ in self._selector.select()]


class Server:
    """Answers workers with the sum of a round when all of them have pushed to it."""

    def __init__(self, connections: Iterable[socket.socket]) -> None:
        self._talks = {channel: self._talk(channel) for channel in map(Channel, connections)}
        self._arrived: list[Array] = []
        self._rounds, self._total = 0, np.empty(0, np.float32)

    def _talk(self, channel: Channel) -> Iterator[bool]:
        """What one worker wants, again and again; yields where it waits: whether for other workers."""
        pushed, pushes = np.empty(0, np.float32), 0
        while True:
            header = bytearray(_HEADER.size)
            channel.receive(header)
            yield False
            wish, nbytes = _HEADER.unpack(header)
            if wish != _PULL:
                if pushed.nbytes != nbytes:
                    pushed = np.empty(nbytes // pushed.itemsize, pushed.dtype)
                channel.receive(pushed)
                yield False
                pushes += 1
                self._arrived.append(pushed)
            if wish != _PUSH:
                while self._rounds < pushes:
                    yield True
                channel.send(b"\0", self._total)

    def serve(self) -> None:
        """Return when a worker is gone."""
        poller, ready = Poller(self._talks), list(self._talks)
        for talk in self._talks.values():
            next(talk)
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                for channel in ready:
                    self._go_on(channel)
                ready = self._close_round() or poller.wait()

    def _go_on(self, channel: Channel) -> None:
        channel.move()
        while not channel.receiving and not next(self._talks[channel]):
            channel.move()

    def _close_round(self) -> list[Channel]:
        """Add up what has arrived, if that is all; then everybody goes on. The sum of the last round is not needed:
        workers push when they have got it."""
        if len(self._arrived) < len(self._talks):
            return []
        first, *rest = self._arrived
        if not rest:
            self._total = first
        elif self._total.size != first.size:
            self._total = np.empty_like(first)
        for number, other in enumerate(rest):
            np.add(self._total if number else first, other, out=self._total)
        self._arrived.clear()
        self._rounds += 1
        return list(self._talks)


class Sockets:
    """What a worker does: as ``ps_worker.Kvmpi``, on one connection to each server."""

    lasts = True

    def __init__(self, mode: str, compress: str, *, grouped: bool) -> None:
        ports = map(int, os.environ[_PORTS].split())
        self._channels = [Channel(socket.create_connection(("127.0.0.1", port))) for port in ports]
        self._poller = Poller(self._channels)
        self._byte = bytearray(1)

    @staticmethod
    def about() -> dict[str, Any]:
        return {}

    def open(self, values: Sequence[Array], outs: Sequence[Array]) -> None:
        """Each server has an equal part of every array."""
        count = len(self._channels)
        self._values, self._outs = (
            [*zip(*(np.array_split(array, count) for array in arrays), strict=True)] for arrays in (values, outs)
        )
        self._ends = ends([*outs])

    def push(self) -> None:
        self._exchange(_PUSH)

    def pull(self) -> None:
        self._exchange(_PULL)

    def pushpull(self) -> None:
        self._exchange(_BOTH)

    def _exchange(self, wish: int) -> None:
        for channel, values, outs in zip(self._channels, self._values, self._outs, strict=True):
            nbytes = sum(value.nbytes for value in values)
            channel.send(_HEADER.pack(wish, nbytes), *(values if wish != _PULL else ()))
            if wish != _PUSH:
                channel.receive(self._byte, *outs)
        self._finish()

    def _finish(self) -> None:
        ready = self._channels
        while True:
            for channel in ready:
                channel.move()
            if not any(channel.events for channel in self._channels):
                return
            ready = self._poller.wait()

    def load(self) -> None:
        """``values`` and ``outs`` were changed."""

    restore = read = load

    def glance(self) -> list[float]:
        """The first and the last element that were pulled; a later call does not find them again."""
        return spoiled(self._ends)

    def settle(self) -> None:
        """Collective: a round without values."""
        self._channels[0].send(_HEADER.pack(_BOTH, 0))
        self._channels[0].receive(self._byte)
        self._finish()

    def imbalance(self) -> float | None:
        return None

    def close(self) -> None:
        """The servers are there for the whole job."""


def _serve(listener: int, num_workers: int) -> None:
    with socket.socket(fileno=listener) as found:
        Server([found.accept()[0] for _ in range(num_workers)]).serve()


def main(argv: Sequence[str]) -> int:
    """See the top of this file; the exit status. What is still running then is killed with this process."""
    if argv[0] == "serve":
        _serve(int(argv[1]), int(argv[2]))
        return 0
    num_workers, num_servers, *program = argv
    ports, workers = [], set[int]()
    for _ in range(int(num_servers)):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ports.append(str(listener.getsockname()[1]))
            command = [sys.executable, "-m", __spec__.name, "serve", str(listener.fileno()), num_workers]
            processes.start(command, os.environ, stdout=1, stderr=2, pass_fds=[listener.fileno()])
    for rank in range(int(num_workers)):
        env = {**os.environ, _PORTS: " ".join(ports), "KVMPI_RANK": str(rank)}
        workers.add(processes.start([sys.executable, *program], env, stdout=1, stderr=2).pid)
    while workers:
        pid, status = os.wait()
        if code := os.waitstatus_to_exitcode(status):
            print(f"a process of plain sockets {processes.describe_end(code)}", file=sys.stderr)
            return 1
        workers.discard(pid)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
