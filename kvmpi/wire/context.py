"""The context of a process's sockets, which carries what they have to prove to their peers."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import zmq

from kvmpi.config import Config
from kvmpi.errors import ConfigError
from kvmpi.machine import num_cores
from kvmpi.wire.gate import DOMAIN, Gate
from kvmpi.wire.keys import JobKeys, KeyPair, read_keys
from kvmpi.wire.partner import SHARE_FROM_BYTES, Partner
from kvmpi.wire.shared_memory import Arena

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_log = logging.getLogger(__name__)

#: What CURVE adds to a frame: the command's name, a nonce, a flag byte and the authenticator.
_CURVE_BYTES = 8 + 8 + 1 + 16

#: So many windows of a session fit into what a peer may keep in shared memory, if nothing else is said.
_SHARED_WINDOWS = 4

#: Others compute on these, and serve.
_CORES_PER_IO_THREAD, _MOST_IO_THREADS = 4, 4

_S_co = TypeVar("_S_co", bound=zmq.Socket[Any], covariant=True)


class Context(zmq.Context[_S_co]):
    """ZeroMQ's context, with what its sockets share: keys of the job, a gate for TCP, memory that peers can read."""

    config: Config = Config()
    #: So long the end of a context waits for what its sockets had still to send when they were closed.
    linger_ms = 1000
    _keys: JobKeys | None = None
    _gate: Gate | None = None
    _arena: Arena | None = None
    _tried_arena = False
    num_threads = 1
    _num_connections = 0
    _warned = False
    _lock = threading.Lock()  # listeners of several threads may share a context

    def secure_listener(self, socket: zmq.Socket[Any]) -> None:
        """Let only members of the job into ``socket``, which is about to listen on TCP.

        Raises:
            ConfigError: there are no keys, and security is not off.
        """
        keys = self._job_keys()
        with self._lock:
            if keys is None:
                if not self._warned:
                    _log.warning(
                        "KVMPI_SECURITY=off: whoever reaches a port of this process can read and change values"
                    )
                self._warned = True
                return
            if self._gate is None:
                self._gate = Gate(self, [keys.member.public])
        self._encrypt(socket, keys.listener)
        socket.curve_server = True
        socket.zap_domain = DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def secure_connection(self, socket: zmq.Socket[Any]) -> None:
        """Let ``socket``, which is about to connect over TCP, prove that it is a member, and demand the same.

        Raises:
            ConfigError: there are no keys, and security is not off.
        """
        keys = self._job_keys()
        if keys is not None:
            self._encrypt(socket, keys.member)
            socket.curve_serverkey = keys.listener.public

    @staticmethod
    def _encrypt(socket: zmq.Socket[Any], pair: KeyPair) -> None:
        socket.curve_publickey, socket.curve_secretkey = pair.public, pair.secret
        limit = socket.getsockopt(zmq.MAXMSGSIZE)
        if isinstance(limit, int) and limit >= 0:  # -1 is no limit
            socket.maxmsgsize = limit + _CURVE_BYTES

    def _job_keys(self) -> JobKeys | None:
        """None when security is off. Read when TCP is first used: a process with ipc alone needs no keys."""
        if self.config.security == "off":
            return None
        if self._keys is None:
            if not self.config.keys:
                raise ConfigError(
                    "TCP needs the keys of the job, and KVMPI_KEYS names no file; start the job with 'kvmpi run', or "
                    "give all its processes one KVMPI_KEYS, a file that the scheduler then makes; KVMPI_SECURITY=off "
                    "opens the ports to everyone"
                )
            folder = os.path.dirname(self.config.keys)
            if folder and not os.path.exists(folder):
                raise ConfigError(
                    f"{folder}, the job's folder with its keys, is not here; a program in a container of its own must "
                    "see it: docker -v, apptainer --bind, or a TMPDIR that both have"
                )
            self._keys = read_keys(self.config.keys)
        return self._keys

    def new_partner(self, max_payload_bytes: int) -> Partner | None:
        """For a peer on this host, to hand payloads over in shared memory; None if that is turned off."""
        if self.config.shared_payloads == "off":
            return None
        return Partner(self.arena(), self.shared_limit_bytes, max_payload_bytes)

    @property
    def shared_limit_bytes(self) -> int:
        """So many bytes of copies in shared memory one peer may keep."""
        return self.config.shared_bytes or _SHARED_WINDOWS * self.config.window_bytes

    def arena(self) -> Arena | None:
        """The memory of this context that peers can read, made at first use; None if the system has no such memory."""
        with self._lock:
            if not self._tried_arena:
                self._tried_arena = True
                try:
                    self._arena = Arena()
                except OSError as error:
                    _log.info("payloads go through sockets: %s", error)
            return self._arena

    def empty(self, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Uninitialised memory, from which peers on this host can read payloads without a copy if that is possible."""
        import numpy as np  # a scheduler, which has no payloads, starts without

        shared = count * dtype.itemsize >= SHARE_FROM_BYTES and self.config.shared_payloads != "off"
        arena = self.arena() if shared else None
        array = None if arena is None else arena.empty(count, dtype)
        return np.empty(count, dtype) if array is None else array

    def give_back(self) -> None:
        """Let the system have memory that peers can read and nobody uses."""
        with self._lock:
            arena = self._arena
        if arena is not None:
            arena.give_back()

    def next_thread(self) -> int:
        """Which I/O thread the next connection is for, as libzmq is told; left to itself, it gives those that are made
        together to one."""
        with self._lock:
            number, self._num_connections = self._num_connections, self._num_connections + 1
            return 1 << number % self.num_threads

    def term(self) -> None:
        self._arena = None  # once nobody refers to it, peers see that nothing of theirs is read here any more
        self._close_gate()
        super().term()

    def destroy(self, linger: int | None = None) -> None:
        self._arena = None
        self._close_gate()
        super().destroy(linger)

    def _close_gate(self) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.close()


def new_context(config: Config | None = None) -> Context[Any]:
    """A context; its owner ends it with ``destroy()``.

    Args:
        config: its ``security``, ``keys``, ``handshake_s`` and ``io_threads`` count. Without it there are no keys, and
            so no TCP.
    """
    config = config or Config()
    num_threads = config.io_threads or num_io_threads(num_cores())
    context: Context[Any] = Context(io_threads=num_threads)
    context.config, context.num_threads = config, num_threads
    return context


def num_io_threads(cores: int) -> int:
    """How many a process has. One connection is one thread's, who encrypts half a gigabyte a second."""
    return min(max(2, cores // _CORES_PER_IO_THREAD), _MOST_IO_THREADS, cores)
