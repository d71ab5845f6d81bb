"""Runs on every host while pairs of hosts are measured: listens, connects to others, says what it has seen.

``kvmpi doctor`` starts it through ssh, srun or the like, and talks to it by lines of JSON, behind a word that nothing
else on that way prints. It ends with its standard input, and after a minute in any case. Strangers that connect do not
know the token, and are hung up on. Only the standard library is used.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import select
import signal
import socket
import statistics
import struct
import sys
import threading
import time
from typing import Any

import kvmpi
from kvmpi.launchers.remote_exec import own_address
from kvmpi.machine import family_of

LIFE_S = 90
#: So many round trips are measured, or fewer if they take longer than that: the doctor waits for some seconds only.
_PINGS, _PINGS_S = 20, 1.5
_PING, _SEND = b"p", b"s"
_BLOCK = bytes(1 << 17)
_PATIENCE_S = 3.0
_RESULT = struct.Struct("<dd")


def serve(listener: socket.socket, token: bytes) -> None:
    """Answer those who know the token, until the listener is shut down; each connection has a thread."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_serve_one, args=(connection, token), daemon=True).start()


def _serve_one(connection: socket.socket, token: bytes) -> None:
    with contextlib.suppress(OSError), connection:
        connection.settimeout(_PATIENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        said = _exactly(connection, len(token))
        if not hmac.compare_digest(said, token):
            return
        while (word := _exactly(connection, 1)) != _SEND:
            connection.sendall(word)
        (seconds,) = struct.unpack("<d", _exactly(connection, 8))
        into = bytearray(1 << 20)
        start_s = late_s = time.perf_counter()
        late_bytes = total = 0
        # What counts is the second half: TCP is slow at its start, and queues on the way are empty then. If nothing
        # came from its beginning to its end, it is the whole.
        while (now_s := time.perf_counter()) - start_s < seconds:
            if late_s == start_s and now_s - start_s >= seconds / 2:
                late_s, late_bytes = now_s, total
            count = connection.recv_into(into)
            if not count:
                return
            total += count
        connection.sendall(_RESULT.pack(total - late_bytes, time.perf_counter() - late_s))
        while connection.recv_into(into):  # until the other side, which has read this, hangs up
            pass


def _exactly(connection: socket.socket, count: int) -> bytes:
    read = b""
    while len(read) < count:
        part = connection.recv(count - len(read))
        if not part:
            raise ConnectionResetError("hung up")
        read += part
    return read


def measure(address: str, port: int, token: bytes, seconds: float) -> dict[str, Any]:
    """Connect to another host's ``serve``: seconds of a round trip, and bytes per second that arrive there."""
    found: dict[str, Any] = {}
    step = "connect"
    try:
        with socket.create_connection((address, port), timeout=_PATIENCE_S) as connection:
            # What is in the buffers when the result is there must not be sent any more.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found["by"] = connection.getsockname()[0]
            step = "ping"
            connection.sendall(token)
            times_s: list[float] = []
            while len(times_s) < _PINGS and sum(times_s) < _PINGS_S:
                start_s = time.perf_counter()
                connection.sendall(_PING)
                _exactly(connection, 1)
                times_s.append(time.perf_counter() - start_s)
            found["round_trip_s"] = statistics.median(times_s)
            step = "send"
            connection.sendall(_SEND + struct.pack("<d", seconds))
            end_s = time.perf_counter() + seconds + _PATIENCE_S
            connection.setblocking(False)
            while not select.select([connection], [], [], 0)[0]:
                if time.perf_counter() > end_s:
                    raise TimeoutError("timed out")
                if select.select([connection], [connection], [], 0.1)[1]:
                    with contextlib.suppress(BlockingIOError):
                        connection.send(_BLOCK)
            connection.settimeout(_PATIENCE_S)
            count, took_s = _RESULT.unpack(_exactly(connection, _RESULT.size))
            found["bytes_per_s"] = count / took_s
    except OSError as error:
        found["failed"], found["error"] = step, error.strerror or str(error)
    return found


def main() -> int:
    """See the top of this file."""
    signal.alarm(LIFE_S)
    order = json.loads(sys.stdin.readline())
    word, token = order["word"], order["token"].encode()

    def say(answer: dict[str, Any]) -> None:
        os.write(1, f"\n{word} {json.dumps(answer)}\n".encode())  # what is before it may lack its end of line

    try:
        address = own_address(order["network"], order["towards"])
        listener = socket.create_server((address, 0), family=family_of(address))
    except (OSError, ValueError) as error:
        say({"error": str(error)})
        return 1
    threading.Thread(target=serve, args=(listener, token), daemon=True).start()
    say({"name": socket.gethostname(), "address": address, "port": listener.getsockname()[1],
         "kvmpi": kvmpi.__version__, "python": ".".join(map(str, sys.version_info[:3]))})  # fmt: skip
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        if order["do"] == "time":
            say({"time": time.time()})
        else:
            say(measure(order["address"], order["port"], token, order["seconds"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
