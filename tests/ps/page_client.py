"""A client written from docs/protocol.md alone: ZeroMQ, msgpack, and nothing of kvmpi."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
_VERSION = re.search(r"The version is \*\*(\d+)\*\*", PAGE)
assert _VERSION
VERSION = int(_VERSION[1])
_HEARTBEAT_S, _MOVED_S, _PAUSE_S, _TIMEOUT_S = 0.2, 0.05, 1.0, 20.0

Socket = zmq.Socket[Any]
Answer = tuple[str, list[Any], list[bytes]]


@dataclass
class Asked:
    """A request until it is answered: to one peer, or to whoever is the head of a part."""

    tag: str
    fields: tuple[Any, ...]
    payloads: tuple[bytes, ...]
    peer: Socket | None = None
    part: int = -1
    query: tuple[Any, ...] = ()  # what is said in place of a push that is in its round
    sent_to: Socket | None = None
    sent_s: float = 0.0
    said: list[str] = field(default_factory=list)  # what was heard before the answer
    waits_for: list[int] = field(default_factory=list)
    answer: Answer | None = None


class PageClient:
    """One client of a store of two. It does something only while it is asked for an answer."""

    def __init__(self, keys: str, scheduler: str, rank: int = 0, *, mode: str = "sync", incarnation: int = 1) -> None:
        self.rank, self.mode, self.incarnation = rank, mode, incarnation
        self._keys = json.loads(Path(keys).read_text())
        self._context: zmq.Context[Any] = zmq.Context()
        self._poller = zmq.Poller()
        self.scheduler = self.connect(scheduler)
        self._servers: dict[tuple[int, int], Socket] = {}  # by rank and incarnation
        self.found: dict[int, tuple[int, list[str]]] = {}
        self._asked: dict[int, Asked] = {}
        self._requests, self._next_beat_s, self.epoch = 0, math.inf, -1
        self.replicas, self.chains, self.lost = 0, list[Any](), list[Any]()
        #: Fields of an answer after its number that this client knows; it ignores what comes after them.
        self.known = {"ack": 1, "value": 2}
        self.heard, self.complaints = list[int](), list[Any]()

    def connect(self, endpoint: str) -> Socket:
        peer = self._context.socket(zmq.DEALER)
        peer.linger, peer.rcvtimeo = 1000, int(1000 * _TIMEOUT_S)
        peer.routing_id = b"k" + os.urandom(16)
        if endpoint.startswith("tcp://"):
            peer.curve_publickey = self._keys["member"]["public"].encode()
            peer.curve_secretkey = self._keys["member"]["secret"].encode()
            peer.curve_serverkey = self._keys["listener"]["public"].encode()
        peer.connect(endpoint)
        self._poller.register(peer, zmq.POLLIN)
        return peer

    # ---- asking

    def ask(self, peer: Socket, tag: str, *fields: Any) -> Answer:
        return self.answer(self.start(Asked(tag, fields, (), peer)))

    def about(self, part: int, tag: str, *fields: Any, rows: tuple[int, ...] = (), payloads: Any = ()) -> Answer:
        return self.answer(self.start_about(part, tag, *fields, rows=rows, payloads=payloads))

    def start_about(self, part: int, tag: str, *fields: Any, rows: tuple[int, ...] = (), payloads: Any = ()) -> Asked:
        asked = Asked(tag, (*fields, part, *rows), tuple(payloads), part=part)
        if tag == "push":
            key, chunk, step, _codec, fused = fields[:5]
            asked.query = (key, chunk, step, fused, part)
        return self.start(asked)

    def start(self, asked: Asked) -> Asked:
        self._requests += 1
        self._asked[self._requests] = asked
        self._look_after(self._requests, asked)
        return asked

    def answer(self, asked: Asked) -> Answer:
        self.listen_until(lambda: asked.answer is not None, f"{asked.tag} {asked.fields} {asked.said}")
        assert asked.answer is not None
        return asked.answer

    def listen_until(self, done: Any, what: str) -> None:
        limit_s = time.monotonic() + _TIMEOUT_S
        while not done():
            assert time.monotonic() < limit_s, what
            assert not self.complaints, "something that was sent could not be read"
            self._listen()

    def _listen(self) -> None:
        if time.monotonic() >= self._next_beat_s:
            self.send(self.scheduler, ["heartbeat", 0, self.epoch, time.time_ns() // 1000])
            self._next_beat_s = time.monotonic() + _HEARTBEAT_S
        for peer, _ in self._poller.poll(20):
            self._hear(*peer.recv_multipart())
        for number, asked in list(self._asked.items()):
            self._look_after(number, asked)

    def send(self, peer: Socket, body: list[Any], payloads: tuple[bytes, ...] = (), version: int = VERSION) -> None:
        peer.send_multipart([b"KVM" + bytes([version]) + msgspec.msgpack.encode(body), *payloads])

    def _look_after(self, number: int, asked: Asked) -> None:
        """Send what has not left, has got Moved, is for another head now, or has waited for long."""
        peer = asked.peer if asked.part < 0 else self._head(asked.part)
        waited_s = time.monotonic() - asked.sent_s
        moved = asked.said[-1:] == ["moved"]
        if asked.answer is not None or peer is None:
            self._asked.pop(number, None) if asked.answer is not None else None
        elif peer is not asked.sent_to or waited_s > (_MOVED_S if moved else _PAUSE_S):
            in_round = "accepted" in asked.said and not moved and (peer is asked.sent_to or not self.replicas)
            body = ["query", number, *asked.query] if in_round else [asked.tag, number, *asked.fields]
            self.send(peer, body, () if in_round else asked.payloads)
            asked.sent_to, asked.sent_s = peer, time.monotonic()

    def _hear(self, header: bytes, *frames: bytes) -> None:
        assert header[:4] == b"KVM" + bytes([VERSION]), header
        tag, *got = msgspec.msgpack.decode(header[4:])
        if tag == "heard":
            self.heard.append(got[0])
            return
        number = got.pop(5 if tag == "view" else 0)
        if tag == "view" and got[0] > self.epoch:
            self.epoch, self.replicas, self.chains, servers, self.lost = got[:5]
            self.found = {rank: (incarnation, endpoints) for rank, incarnation, _host, endpoints in servers}
        asked = self._asked.get(number)
        if asked is None:
            self.complaints += [got] if tag == "failure" else []
        elif tag in ("accepted", "moved", "waiting"):
            asked.said.append(tag)
            asked.waits_for = got[0] if tag == "waiting" else []
        else:
            asked.answer = tag, got[: self.known.get(tag)], list(frames)

    # ---- servers

    def join(self) -> None:
        """Register, and say Hello to every server; from then on heartbeats."""
        view = self.ask(self.scheduler, "register", "client", self.rank, 1, 2, self.incarnation, "elsewhere", [])
        assert view[0] == "view"
        self._next_beat_s = 0.0
        self.greet()

    def greet(self) -> None:
        for server in self.found:
            self._server(server)
        self.listen_until(lambda: all(asked.tag != "hello" for asked in self._asked.values()), "Hello")

    def _head(self, part: int) -> Socket | None:
        _version, members, _joiner, draining, _why = self.chains[part]
        return self._server(members[0]) if members and not draining else None

    def _server(self, rank: int) -> Socket | None:
        if rank not in self.found:
            return None
        incarnation, endpoints = self.found[rank]
        if (rank, incarnation) not in self._servers:
            peer = self.connect(next(at for at in endpoints if at.startswith("tcp://")))
            self._servers[rank, incarnation] = peer
            self.start(Asked("hello", (1, self.mode, self.rank, 2, self.incarnation), (), peer))
        return self._servers[rank, incarnation]

    def hang_up(self) -> None:
        """All links to servers are gone; the next ones have other routing ids."""
        for peer in self._servers.values():
            self._poller.unregister(peer)
            peer.close(linger=0)
        self._servers.clear()

    def leave(self) -> None:
        for server in list(self.found):
            peer = self._server(server)
            assert peer is not None
            assert self.ask(peer, "bye")[:2] == ("ack", [0])
        self._next_beat_s = math.inf
        assert self.ask(self.scheduler, "leave")[:2] == ("ack", [0])

    def close(self) -> None:
        self._context.destroy(linger=0)

    # ---- where a chunk lives

    def places(self, key: int | str, rows: int, width: int, itemsize: int, chunk_bytes: int) -> list[tuple[int, slice]]:
        """The part and the elements of each chunk."""
        num_servers = len(self.chains) // 4
        digest = int.from_bytes(hashlib.blake2b(text_of(key).encode(), digest_size=8).digest(), "little")
        num_ranges = min(num_servers, max(1, rows * width * itemsize // 262144))
        grain, count = 64 // itemsize, rows * width
        whole_rows = math.lcm(width, grain)
        ranges = _near_equal(0, count, num_ranges, whole_rows if count >= 8 * num_ranges * whole_rows else grain)
        chunks = []
        for i, (start, stop) in enumerate(ranges):
            limit = chunk_bytes or min(8388608, max(2097152, (stop - start) * itemsize // 16))
            longest = max(1, limit // itemsize)
            if width <= longest and start % width == stop % width == 0:
                piece = whole_rows if whole_rows <= longest else width
            else:
                piece = grain if grain <= longest else 1
            longest = longest // piece * piece
            for bounds in _near_equal(start, stop, max(1, -(-(stop - start) // longest)), piece):
                chunks.append(((digest + i) % num_servers, slice(*bounds)))
        return [(home * 4 + (digest + i) % 4, where) for i, (home, where) in enumerate(chunks)]


def _near_equal(start: int, stop: int, pieces: int, grain: int) -> list[tuple[int, int]]:
    base, extra = divmod(-(-(stop - start) // grain), pieces)
    lengths = [grain * (base + (i < extra)) for i in range(pieces)]
    return [(start + sum(lengths[:i]), min(stop, start + sum(lengths[: i + 1]))) for i in range(pieces)]


def text_of(key: int | str) -> str:
    """What a digest is made of."""
    if isinstance(key, int):
        return str(key)
    quote = '"' if "'" in key and '"' not in key else "'"
    return quote + "".join("\\" + sign if sign == quote else _escaped(sign) for sign in key) + quote


def _escaped(sign: str) -> str:
    if short := {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}.get(sign):
        return short
    if sign == " " or unicodedata.category(sign)[0] not in "CZ":
        return sign
    number = ord(sign)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}" if number < 1 << 16 else f"\\U{number:08x}"
