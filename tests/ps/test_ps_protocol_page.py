"""docs/protocol.md is enough: a client written from the page alone works beside kvmpi's own."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from ps_helpers import deadline, whole_numbers

from kvmpi.kernels.rows import Rows
from kvmpi.ps import PsClient

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


class PageClient:
    """Client 0 of two in a synchronous store, with ZeroMQ and msgpack and nothing of kvmpi."""

    def __init__(self, keys: str, scheduler: str, version: int) -> None:
        self.keys = json.loads(Path(keys).read_text())
        self.context: zmq.Context[Any] = zmq.Context()
        self.version, self.requests = version, 0
        self.scheduler = self.connect(scheduler)
        self.servers: dict[int, zmq.Socket[Any]] = {}
        self.chains: list[Any] = []

    def connect(self, endpoint: str) -> zmq.Socket[Any]:
        peer = self.context.socket(zmq.DEALER)
        peer.linger, peer.rcvtimeo = 1000, 10_000
        peer.routing_id = b"k" + os.urandom(16)
        if endpoint.startswith("tcp://"):
            peer.curve_publickey = self.keys["member"]["public"].encode()
            peer.curve_secretkey = self.keys["member"]["secret"].encode()
            peer.curve_serverkey = self.keys["listener"]["public"].encode()
        peer.connect(endpoint)
        return peer

    def ask(self, peer: zmq.Socket[Any], tag: str, *fields: Any, payloads: tuple[bytes, ...] = ()) -> Any:
        """The answer to a request: its tag, its fields after the number, and its payloads."""
        self.requests += 1
        header = b"KVM" + bytes([self.version]) + msgspec.msgpack.encode([tag, self.requests, *fields])
        peer.send_multipart([header, *payloads])
        while True:
            header, *frames = peer.recv_multipart()
            assert header[:4] == b"KVM" + bytes([self.version]), header
            answer, *got = msgspec.msgpack.decode(header[4:])
            number = got.pop(5 if answer == "view" else 0)
            if number == self.requests and answer not in ("accepted", "waiting"):
                assert answer != "failure", got
                return answer, got[: {"ack": 1, "value": 2}.get(answer)], frames  # what it does not know it ignores

    def join(self, num_servers: int) -> None:
        tag, view, _ = self.ask(self.scheduler, "register", "client", 0, 1, 2, 1, "elsewhere", [])
        _epoch, _replicas, self.chains, servers, lost = view[:5]
        assert (tag, len(self.chains), lost) == ("view", 4 * num_servers, [])
        for rank, _incarnation, _host, endpoints in servers:
            self.servers[rank] = self.connect(next(at for at in endpoints if at.startswith("tcp://")))
            assert self.ask(self.servers[rank], "hello", 1, "sync", 0, 2, 1)[:2] == ("ack", [0])

    def places(self, key: int | str, rows: int, width: int, itemsize: int, chunk_bytes: int) -> list[tuple[int, slice]]:
        """The part and the elements of each chunk."""
        num_servers = len(self.chains) // 4
        digest = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")
        num_ranges = min(num_servers, max(1, rows * width * itemsize // 262144))
        grain, count = 64 // itemsize, rows * width
        whole_rows = math.lcm(width, grain)
        ranges = near_equal(0, count, num_ranges, whole_rows if count >= 8 * num_ranges * whole_rows else grain)
        chunks = []
        for i, (start, stop) in enumerate(ranges):
            longest = max(1, chunk_bytes // itemsize)
            if width <= longest and start % width == stop % width == 0:
                piece = whole_rows if whole_rows <= longest else width
            else:
                piece = grain if grain <= longest else 1
            longest = longest // piece * piece
            for bounds in near_equal(start, stop, max(1, -(-(stop - start) // longest)), piece):
                chunks.append(((digest + i) % num_servers, slice(*bounds)))
        return [(home * 4 + (digest + i) % 4, where) for i, (home, where) in enumerate(chunks)]

    def about(
        self, part: int, tag: str, *fields: Any, rows: tuple[int, ...] = (), payloads: tuple[bytes, ...] = ()
    ) -> Any:
        _version, members, _joiner, draining, _why = self.chains[part]
        assert not draining
        return self.ask(self.servers[members[0]], tag, *fields, part, *rows, payloads=payloads)

    def leave(self) -> None:
        for server in self.servers.values():
            assert self.ask(server, "bye")[:2] == ("ack", [0])
        assert self.ask(self.scheduler, "leave")[:2] == ("ack", [0])

    def close(self) -> None:
        self.context.destroy(linger=0)


def near_equal(start: int, stop: int, pieces: int, grain: int) -> list[tuple[int, int]]:
    base, extra = divmod(-(-(stop - start) // grain), pieces)
    lengths = [grain * (base + (i < extra)) for i in range(pieces)]
    return [(start + sum(lengths[:i]), min(stop, start + sum(lengths[: i + 1]))) for i in range(pieces)]


CHUNK_BYTES = 100_000


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_client_written_from_the_page(start_job: Callable[..., Any], replicas: int) -> None:
    job = start_job(2, chunk_bytes=CHUNK_BYTES, replicas=replicas)
    version = re.search(r"The version is \*\*(\d+)\*\*", PAGE)
    assert version
    page = PageClient(job.config.keys, job.config.scheduler, int(version[1]))
    own = job.new_client(1, 2)
    try:
        page.join(2)
        own.connect(deadline())
        shapes = {"w": [5], 7: [1], "layer.0": [200_001], "empty": [0], "wide": [15, 10_000], "rows": [2000, 3, 35]}
        for key, shape in shapes.items():  # the rows last
            count, width = int(np.prod(shape)), int(np.prod(shape[1:]))
            first, mine, theirs = (whole_numbers(count, i) for i in range(3))
            places = page.places(key, shape[0], width, 4, CHUNK_BYTES)
            assert (len({part // 4 for part, _ in places}) == 2) == (count * 4 >= 2 * 262144), "it is on both servers"
            for i, (part, where) in enumerate(places):
                layout = (key, i, len(places), where.stop - where.start, shape, "float32")
                assert page.about(part, "init", *layout, payloads=(first[where].tobytes(),))[:2] == ("ack", [0])
                assert page.about(part, "pull", key, i, 0) == ("value", [0, -1], [first[where].tobytes()])
            # It would wait for a value that client 0 had put somewhere else.
            own.add_keys([(key, tuple(shape), "float32")])
            own.init(key, None, deadline()).wait()
            push = own.push(key, theirs, deadline())
            for i, (part, where) in enumerate(places):
                pushed = page.about(part, "push", key, i, 1, "none", False, False, payloads=(mine[where].tobytes(),))
                assert pushed[0] == "ack"
            push.wait()
            for i, (part, where) in enumerate(places):
                assert page.about(part, "pull", key, i, 1) == ("value", [1, -1], [(mine + theirs)[where].tobytes()])
            out = np.empty(count, "f4")
            own.pull(key, out, deadline()).wait()
            np.testing.assert_array_equal(out, mine + theirs)
        rows_from_the_page(page, own, first.reshape(2000, 105), places)
        page.leave()
    finally:
        page.close()


def rows_from_the_page(page: PageClient, own: PsClient, values: np.ndarray, places: list[tuple[int, slice]]) -> None:
    """The second step of the key "rows": the page's client pushes three rows, the other two of them and one more."""
    push = own.push_rows("rows", Rows(np.array([5, 700, 1999]), values[[0, 2, 1]]), deadline())
    mine = {5: values[3], 700: values[4], 701: values[5]}
    for i, (part, where) in enumerate(places):
        start, stop = where.start // 105, where.stop // 105
        ids = [r for r in mine if start <= r < stop]
        numbers, rows = np.array([r - start for r in ids], "<u4"), [mine[r] for r in ids]
        payloads = (numbers.tobytes(), np.array(rows, "<f4").tobytes())
        pushed = page.about(part, "push", "rows", i, 2, "none", False, False, rows=(len(ids),), payloads=payloads)
        assert pushed[0] == "ack"
    push.wait()
    expected = {5: values[0] + values[3], 700: values[2] + values[4], 701: values[5], 1999: values[1]}
    for i, (part, where) in enumerate(places):
        start, stop = where.start // 105, where.stop // 105
        ids = [r for r in expected if start <= r < stop]
        numbers = np.array([r - start for r in ids], "<u4").tobytes()
        rows = page.about(part, "pull", "rows", i, 2, rows=(len(ids),), payloads=(numbers,))
        assert rows == ("value", [2, len(ids)], [b"".join(expected[r].tobytes() for r in ids)])


def test_the_example_bytes_are_what_is_sent() -> None:
    """Decoded by hand: what the page says about msgpack arrays."""
    line = re.search(r"^    (4b 56 4d  [0-9a-f ]+)$", PAGE, re.MULTILINE)
    assert line
    header = bytes.fromhex(line[1])
    assert header[:3] == b"KVM"
    assert msgspec.msgpack.decode(header[4:]) == ["pull", 7, "w", 0, 1, 2, -1]
    assert header[4] == 0x97, "an array of seven"
    assert header[5:10] == b"\xa4pull"
