"""docs/protocol.md is enough: a client written from the page alone works beside kvmpi's own."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from page_client import PAGE, VERSION, Asked, PageClient, text_of
from ps_helpers import deadline, whole_numbers
from test_ps_processes import Processes

from kvmpi import optim
from kvmpi.errors import KVError
from kvmpi.kernels.rows import Rows
from kvmpi.ps import PsClient
from kvmpi.trace import Recorder

CHUNK_BYTES = 100_000


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_client_written_from_the_page(start_job: Callable[..., Any], replicas: int) -> None:
    job = start_job(2, chunk_bytes=CHUNK_BYTES, replicas=replicas)
    page = PageClient(job.config.keys, job.config.scheduler)
    own = job.new_client(1, 2)
    try:
        page.join()
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


# ---- a whole life


Chunk = tuple[int, slice]
COUNT, PIECE_BYTES = 3000, 4096
SGD = {
    "lr": 0.5, "momentum": 0.5, "nesterov": False, "weight_decay": 0.0, "rescale_grad": 1.0, "multi_precision": False,
}  # fmt: skip


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    processes.env.update(KVMPI_REPLICAS="1", KVMPI_CHUNK_BYTES=str(PIECE_BYTES))
    yield processes
    processes.close()


def of_step(step: int, client: int) -> np.ndarray:
    return whole_numbers(COUNT, step, client)


class Life:
    """Client 0 from the page and client 1 from kvmpi, and what momentum makes of their pushes, in float64."""

    def __init__(self, page: PageClient, own: PsClient) -> None:
        self.page, self.own = page, own
        self.places: list[Chunk] = []
        self.step, self.lr = 0, 0.5
        self.value, self.momentum = of_step(0, 0).astype("f8"), np.zeros(COUNT)
        self.out = np.empty(COUNT, "f4")

    def init(self) -> None:
        self.places = self.page.places("w", COUNT, 1, 4, PIECE_BYTES)
        assert len(self.places) == 3
        for i, (part, where) in enumerate(self.places):
            layout = ("w", i, len(self.places), where.stop - where.start, [COUNT], "float32")
            assert self.page.about(part, "init", *layout, payloads=[of_step(0, 0)[where].tobytes()])[0] == "ack"
        self.own.add_keys([("w", (COUNT,), "float32")])
        self.own.init("w", None, deadline()).wait()

    def everywhere(self, tag: str, *fields: Any) -> None:
        for part in range(len(self.page.chains)):
            assert self.page.about(part, tag, *fields)[:2] == ("ack", [1])

    def push(self, encode: Callable[[np.ndarray], bytes] = np.ndarray.tobytes, codec: str = "none") -> list[Asked]:
        """The page's client pushes its share of the next step, fused."""
        self.step += 1
        mine = of_step(self.step, 0)
        return [
            self.page.start_about(
                part, "push", "w", i, self.step, codec, True, False, payloads=[encode(mine[where])]
            )
            for i, (part, where) in enumerate(self.places)
        ]  # fmt: skip

    def finish(self, pushes: list[Asked], mine: np.ndarray | None = None) -> None:
        """The other one pushes its share; both get the new value."""
        work = self.own.pushpull("w", of_step(self.step, 1), self.out, deadline())
        self.momentum = self.momentum / 2 + (of_step(self.step, 0) if mine is None else mine) + of_step(self.step, 1)
        self.value = self.value - self.lr * self.momentum
        self.compare(self.page.answer(asked) for asked in pushes)
        work.wait()
        np.testing.assert_array_equal(self.out, self.value)

    def compare(self, answers: Any) -> None:
        for (tag, fields, frames), (_, where) in zip(answers, self.places, strict=True):
            assert (tag, fields) == ("value", [self.step, -1])
            np.testing.assert_array_equal(np.frombuffer(b"".join(frames), "f4"), self.value[where])


def test_a_whole_life_as_the_page_describes_it(processes: Processes) -> None:
    config, _, servers = processes.job(3)
    config = replace(config, chunk_bytes=PIECE_BYTES)
    page = PageClient(config.keys, config.scheduler)
    own = PsClient(config, store=1, mode="sync", client=1, num_clients=2, recorder=Recorder())
    try:
        page.join()
        own.connect(deadline())
        life = Life(page, own)
        life.init()
        another_version_is_refused(page, config.scheduler)
        a_rule(life)
        what_is_sent_again_counts_once(life)
        fewer_bits(life)
        state_there_and_back(life)
        barriers(life)
        mistakes_are_said(life)
        a_head_that_is_killed(life, servers)
        links_that_are_made_anew(life)
        the_end(life)
    finally:
        page.close()
        own.abort()


def another_version_is_refused(page: PageClient, scheduler: str) -> None:
    stranger = page.connect(scheduler)
    page.send(stranger, ["querydead", 1, 1.0], version=VERSION + 1)
    (refusal,) = stranger.recv_multipart()
    assert refusal[:5] == b"KVM" + bytes([0, VERSION])
    assert b"scheduler" in refusal
    page.listen_until(lambda: len(page.heard) > 1, "the scheduler hears heartbeats after that")


def a_rule(life: Life) -> None:
    life.own.set_rule(optim.SGD(lr=0.5, momentum=0.5), deadline())
    life.everywhere("rule", 1, "sgd", SGD)
    life.finish(life.push())
    life.own.set_hyperparams({"lr": 0.25}, deadline())
    life.everywhere("hyper", 1, {"lr": 0.25}, 0)
    life.lr = 0.25
    life.finish(life.push())


def what_is_sent_again_counts_once(life: Life) -> None:
    page, pushes = life.page, life.push()
    page.listen_until(lambda: all("waiting" in asked.said for asked in pushes), "Accepted, then an answer to a Query")
    assert all(asked.said[0] == "accepted" and asked.waits_for == [1] for asked in pushes)
    life.step -= 1
    life.finish([*life.push()])  # under another number, while the first is in its round
    life.step -= 1
    life.compare(map(page.answer, life.push()))  # and when it is over


def fewer_bits(life: Life) -> None:
    life.finish(life.push(lambda mine: mine.astype("<f2").tobytes(), "fp16"))

    def two_bits(mine: np.ndarray) -> bytes:
        codes = np.where(mine >= 0.5, 3, np.where(mine <= -0.5, 2, 0))
        bits = np.stack([codes >> 1, codes & 1], axis=1).astype("u1")
        return np.packbits(bits.reshape(-1)).tobytes()  # padded with zeros

    pushes = life.push(two_bits, "2bit:0.5")
    life.finish(pushes, np.sign(of_step(life.step, 0)) / 2)


def state_there_and_back(life: Life) -> None:
    for i, (part, where) in enumerate(life.places):
        tag, (updates, names), frames = life.page.about(part, "getstate", "w", i)
        assert (tag, updates, names) == ("state", life.step, ["value", "momentum"])
        for found, kept in zip(frames, (life.value, life.momentum), strict=True):
            np.testing.assert_array_equal(np.frombuffer(found, "f4"), kept[where])
        twice = [(2 * np.frombuffer(frame, "f4")).tobytes() for frame in frames]
        assert life.page.about(part, "putstate", "w", i, updates, names, payloads=twice)[0] == "ack"
    life.value, life.momentum = 2 * life.value, 2 * life.momentum
    life.finish(life.push())


def barriers(life: Life) -> None:
    page, work = life.page, life.own.barrier(deadline())
    assert page.ask(page.scheduler, "barrier", 1, life.step)[:2] == ("ack", [1])
    work.wait()
    work = life.own.barrier(deadline())
    assert page.ask(page.scheduler, "barrier", 2, life.step, "ConfigError", "no such file")[:2] == ("ack", [2])
    with pytest.raises(KVError, match="client 0: no such file"):
        work.wait()
    assert page.ask(page.scheduler, "barrier", 1, life.step)[:2] == ("ack", [2]), "it is over, and so is another one"
    assert page.ask(page.scheduler, "querydead", 30.0)[:2] == ("dead", [[]])


def mistakes_are_said(life: Life) -> None:
    part, where = life.places[0]
    first = of_step(0, 0)[where].tobytes()

    def error(tag: str, *fields: Any, part: int = part, payloads: tuple[bytes, ...] = (first,)) -> str:
        answer, said, _ = life.page.about(part, tag, *fields, payloads=payloads)
        assert answer == "failure"
        return str(said[0])

    push = ("none", False, False)
    assert error("push", "nobody", 0, 1, *push) == "KeyNotInitializedError"
    assert error("push", "w", 3, 1, *push) == "KeyNotInitializedError"
    assert error("push", "w", 0, 0, *push) == "ProtocolError"
    assert error("push", "w", 0, life.step + 2, *push) == "ProtocolError"
    assert error("push", "w", 0, life.step + 1, *push, payloads=(first[4:],)) == "ProtocolError"
    assert error("push", "w", 0, life.step + 1, "zip", False, False) == "UnsupportedError"
    assert error("rule", 3, "sgd", SGD, payloads=()) == "ProtocolError"
    assert error("rule", 2, "sgd", {"momentum": 0.5}, payloads=()) == "ConfigError"
    assert error("getstate", "w", 0) == "ProtocolError"
    assert life.page.ask(life.page.scheduler, "barrier", 9, 0)[1][0] == "ProtocolError"
    life.finish(life.push())


def a_head_that_is_killed(life: Life, servers: list[subprocess.Popen[str]]) -> None:
    page, pushes = life.page, life.push()
    page.listen_until(lambda: all("accepted" in asked.said for asked in pushes), "Accepted")
    part = life.places[0][0]
    (version, (head, next_one), *_), epoch = page.chains[part], page.epoch
    servers[head].kill()
    page.listen_until(lambda: page.epoch > epoch, "a View without the server")
    assert page.chains[part][0] > version
    assert page.chains[part][1][0] == next_one
    life.finish(pushes)
    life.finish(life.push())


def links_that_are_made_anew(life: Life) -> None:
    pushes = life.push()
    life.page.hang_up()
    life.page.greet()
    life.finish(pushes)


def the_end(life: Life) -> None:
    page = life.page
    for part in range(len(page.chains)):
        assert page.about(part, "finish")[:2] == ("ack", [0])
    assert page.ask(page.scheduler, "finish")[:2] == ("ack", [0])
    life.own.pushpull("w", of_step(99, 1), life.out, deadline()).wait()
    life.own.barrier(deadline()).wait()
    for i, (part, where) in enumerate(life.places):
        assert page.about(part, "pull", "w", i, 0) == ("value", [life.step + 1, -1], [life.out[where].tobytes()])
    page.leave()
    assert not page.complaints
    life.own.close(deadline())


# ---- payloads in shared memory


def slip(*fields: Any) -> bytes:
    body = msgspec.msgpack.encode(fields)
    return b"KVS\1" + len(body).to_bytes(4, "little") + body


def parted(frame: bytes) -> tuple[list[Any], list[Any]]:
    """The slip in a frame, and the header behind it."""
    assert frame[:4] == b"KVS\1"
    stop = 8 + int.from_bytes(frame[4:8], "little")
    return msgspec.msgpack.decode(frame[8:stop]), msgspec.msgpack.decode(frame[stop + 4 :]) if frame[stop:] else []


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd on this system")
def test_payloads_in_shared_memory_as_the_page_says(start_job: Callable[..., Any]) -> None:
    job = start_job(1)
    page, own = PageClient(job.config.keys, job.config.scheduler), job.new_client(1, 2)
    size, count, token = 1 << 20, 10_000, os.urandom(16)
    fd = os.memfd_create("kvmpi-payloads", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        arena = mmap.mmap(fd, size)
        arena[:16] = token
        page.join()
        own.connect(deadline())
        peer = page.connect(next(at for at in page.found[0][1] if at.startswith("ipc://")))

        def ask(slip_: bytes, *body: Any) -> list[bytes]:
            peer.send(slip_ + b"KVM" + bytes([VERSION]) + msgspec.msgpack.encode(body))
            return peer.recv_multipart()

        peer.send(slip("offer", os.getpid(), fd, size, b"", True))
        (tag, pid, number, size_there, returned, answer), _ = parted(peer.recv())
        assert (tag, returned, answer) == ("offer", token, False)
        with open(f"/proc/{pid}/fd/{number}", "rb") as file:
            there = mmap.mmap(file.fileno(), size_there, prot=mmap.PROT_READ)
        peer.send(slip("proof", there[:16]))
        assert msgspec.msgpack.decode(ask(b"", "hello", 1001, 1, "sync", 0, 2, 1)[0][4:])[:2] == ["ack", 1001]
        ((part, _),) = page.places("w", count, 1, 4, 1 << 21)
        arena[64 : 64 + 4 * count] = whole_numbers(count, 0).tobytes()
        layout = ("w", 0, 1, count, [count], "float32", part)
        first = ask(slip("parcel", 0, [], [[0, 64, 4 * count]]), "init", 1002, *layout)
        assert first[0].endswith(msgspec.msgpack.encode(["ack", 1002, 0, "", "", 0, False]))
        own.add_keys([("w", (count,), "float32")])
        own.init("w", None, deadline()).wait()
        (frame,) = ask(b"", "pull", 1003, "w", 0, 0, part)
        (tag, _floor, _done, [(ticket, offset, nbytes)]), (answer, number, *_) = parted(frame)
        assert (tag, ticket, nbytes, answer, number) == ("parcel", 0, 4 * count, "value", 1003)
        assert there[offset : offset + nbytes] == whole_numbers(count, 0).tobytes()
        (frame,) = ask(slip("parcel", 1, [], [[0, 64, 4 * count]]), "pull", 1004, "w", 0, 0, part)
        assert msgspec.msgpack.decode(frame[4:])[:3] == ["failure", -1, "ProtocolError"], "the ticket was announced"
    finally:
        os.close(fd)
        page.close()


def test_the_example_bytes_are_what_is_sent() -> None:
    """Decoded by hand: what the page says about msgpack arrays."""
    line = re.search(r"^    (4b 56 4d  [0-9a-f ]+)$", PAGE, re.MULTILINE)
    assert line
    header = bytes.fromhex(line[1])
    assert header[:3] == b"KVM"
    assert msgspec.msgpack.decode(header[4:]) == ["pull", 7, "w", 0, 1, 2, -1]
    assert header[4] == 0x97, "an array of seven"
    assert header[5:10] == b"\xa4pull"


def test_the_text_of_a_key_is_what_the_page_says() -> None:
    keys = [chr(code) for code in (*range(0x3100), *range(0xE000, 0x10000), *range(0x1F000, 0x1FFFF))]
    assert [key for key in keys if text_of(key) != repr(key)] == []
    for key in ("w", "it's", 'say "x"', "both ' and \"", 7, -7, ""):
        assert text_of(key) == repr(key)
