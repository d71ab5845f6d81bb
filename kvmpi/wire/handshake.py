"""Notices that a listener does not let this process in, which libzmq would only try again without a word."""

from __future__ import annotations

import errno
import itertools
import math
import struct
import time
from typing import Any

import zmq

from kvmpi.errors import AuthenticationError

#: A listener with another key hangs up, and one with another mechanism may do so before its greeting is read. So does a
#: relay whose listener is not there yet: that is given some time.
_PATIENCE_S = 3.0
#: libzmq tries again at once. A longer time between two hang-ups is one in which the listener was busy, or stopped.
_GAP_S = 1.0
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
#: The number of an event, and what came with it. What pyzmq has for this loads asyncio in every process.
_EVENT = struct.Struct("=hi")
_numbers = itertools.count()


class Handshake:
    """Follows the handshakes of a socket that is about to connect to ``endpoint``, up to the first that succeeds."""

    def __init__(self, socket: zmq.Socket[Any], endpoint: str) -> None:
        self._socket, self._endpoint = socket, endpoint
        # pyzmq names it by a descriptor, which the next socket may have before libzmq has given up the name.
        self.events: zmq.Socket[Any] = socket.get_monitor_socket(_EVENTS, f"inproc://handshake-{next(_numbers)}")
        self.done = False
        self._hung_up_since_s = self._last_hang_up_s = -math.inf

    def check(self) -> None:
        """Take note of what has happened.

        Raises:
            AuthenticationError: the listener has refused this process, or cannot be talked to.
        """
        if self.done:
            self.events.getsockopt(zmq.EVENTS)  # takes the notice that it has come to its end; else that stays for ever
            return
        while (event := self._next()) is not None:
            kind, value = event
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._end()
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._refuse("refused this process's key")
            elif value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                self._refuse("has another KVMPI_SECURITY than this process")
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._refuse(f"broke off the handshake (protocol error {value:#x})")
            elif value in (errno.EPIPE, errno.ECONNRESET):
                self._note_hang_up()

    def close(self) -> None:
        self._socket.disable_monitor()
        self.events.close(linger=0)

    def _next(self) -> tuple[int, int] | None:
        try:
            event, _ = self.events.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        kind, value = _EVENT.unpack(event)
        return kind, value

    def _end(self) -> None:
        """It is a peer of this job: what happens to the connection later is no question of keys."""
        self._socket.disable_monitor()
        self.done = True

    def _note_hang_up(self) -> None:
        now_s = time.monotonic()
        if now_s - self._last_hang_up_s > _GAP_S:
            self._hung_up_since_s = now_s
        self._last_hang_up_s = now_s
        if now_s - self._hung_up_since_s >= _PATIENCE_S:
            self._refuse("hangs up at every handshake, as one with other keys does")

    def _refuse(self, what: str) -> None:
        if not self.done:
            raise AuthenticationError(
                f"the listener at {self._endpoint} {what}; is it of the same job, and do KVMPI_KEYS and KVMPI_SECURITY "
                "have the values that the launcher gave?"
            )
