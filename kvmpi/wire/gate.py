"""The gate of a context: tells ZeroMQ which peers may enter, and keeps everyone else out.

libzmq asks for every CURVE handshake that has come to its end, by the protocol ZAP (https://rfc.zeromq.org/spec/27/),
and waits with that peer alone. Peers without the listener's public key, or with another mechanism, do not get so far.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils import z85

from kvmpi.wire.readiness import Readiness, Waker

#: Listeners name it in their questions. With a domain and ZAP_ENFORCE_DOMAIN, a gate that is gone lets nobody in.
DOMAIN = b"kvmpi"
_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"

_log = logging.getLogger(__name__)


class Gate:
    """Answers for all listeners of ``context``, in a thread of its own, so that no handshake waits for a daemon.

    Args:
        listed: the public keys (Z85) that may enter.
    """

    def __init__(self, context: zmq.Context[Any], listed: Sequence[bytes]) -> None:
        self._listed = frozenset(z85.decode(key) for key in listed)
        self._refused = 0
        self._socket = context.socket(zmq.REP)  # the thread's alone from its start on
        self._socket.linger = 0
        self._socket.bind(_ENDPOINT)
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="kvmpi-gate", daemon=True)
        self._thread.start()

    @property
    def handles(self) -> list[zmq.Socket[Any]]:
        return [self._socket]

    def close(self) -> None:
        """End the thread and its socket. From now on nobody new gets in."""
        self._waker.wake()
        self._thread.join()
        self._waker.close()

    def _run(self) -> None:
        readiness = Readiness([self, self._waker])
        with self._socket:
            while self._waker not in readiness.wait(3600.0):
                try:
                    self._socket.send_multipart(self.answer(self._socket.recv_multipart(zmq.NOBLOCK)))
                except zmq.Again:
                    pass

    def answer(self, question: Sequence[bytes]) -> list[bytes]:
        """The frames of the answer to a question's: version, number, domain, address, name, mechanism, credentials."""
        allowed = (
            len(question) == 7
            and (question[0], question[2], question[5]) == (_VERSION, DOMAIN, b"CURVE")
            and question[6] in self._listed
        )
        if not allowed:
            self._note_refusal(question)
        status = (b"200", b"OK") if allowed else (b"400", b"not listed")
        return [_VERSION, question[1] if len(question) > 1 else b"", *status, b"", b""]

    def _note_refusal(self, question: Sequence[bytes]) -> None:
        self._refused += 1
        if self._refused <= 10 or self._refused % 1000 == 0:  # a flood must not fill a disk
            address = question[3][:100].decode(errors="backslashreplace") if len(question) > 3 else "nowhere"
            _log.warning("refused a peer at %s: its key is not one of this job (%d so far)", address, self._refused)
