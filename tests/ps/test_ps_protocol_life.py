"""A client from docs/protocol.md alone, from Hello to Bye: what it is told, says again, and lives through."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from page_client import VERSION, Asked, PageClient
from ps_helpers import deadline, whole_numbers
from test_ps_processes import Processes

from kvmpi import optim
from kvmpi.errors import KVError
from kvmpi.ps import PsClient
from kvmpi.trace import Recorder

Chunk = tuple[int, slice]
COUNT, PIECE_BYTES = 3000, 4096
SGD = {
    "lr": 0.5, "momentum": 0.5, "nesterov": False, "weight_decay": 0.0, "rescale_grad": 1.0, "multi_precision": False,
    "staleness_aware": False,
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
        tag, (updates, names, rule), frames = life.page.about(part, "getstate", "w", i)
        assert (tag, updates, names) == ("state", life.step, ["value", "momentum"])
        assert (rule and rule[3]) == ("sgd" if i == 0 else None)
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


# ---- asynchronous, and other processes


def test_the_value_that_an_asynchronous_push_has_met_is_kept_as_the_page_says(start_job: Callable[..., Any]) -> None:
    job = start_job(1)
    page, own = PageClient(job.config.keys, job.config.scheduler, mode="async"), job.new_client(1, 2, "async")
    first, mine = whole_numbers(8, 0), whole_numbers(8, 1)
    try:
        page.join()
        own.connect(deadline())
        ((part, _),) = page.places("w", 8, 1, 4, 1 << 21)
        assert page.about(part, "init", "w", 0, 1, 8, [8], "float32", payloads=[first.tobytes()])[0] == "ack"

        def push(step: int) -> Any:
            return page.about(part, "push", "w", 0, step, "none", True, False, payloads=[mine.tobytes()])

        assert push(1)[1][0] == "UnsupportedError", "there is no rule yet"
        own.set_rule(optim.Elastic(alpha=0.5), deadline())
        for each in range(4):
            assert page.about(each, "rule", 1, "elastic", {"alpha": 0.5, "multi_precision": False})[0] == "ack"
        page.known["value"] = 3
        assert push(1) == ("value", [1, -1, True], [first.tobytes()]) == push(1), "old, until it is known to have come"
        assert page.about(part, "query", "w", 0, 1, False)[0] == "ack"
        centre = (first + mine) / 2
        assert push(1) == ("value", [1, -1, False], [centre.tobytes()])
        assert push(3)[1][0] == "ProtocolError"
        assert push(2) == ("value", [2, -1, True], [centre.tobytes()])
    finally:
        page.close()


KEYS = ("w", "b")  # one that begins every step, and one of every other


def keys_of(step: int) -> tuple[str, ...]:
    return KEYS if step % 2 else KEYS[:1]


def of_key(key: str, step: int, client: int) -> np.ndarray:
    return whole_numbers(16, KEYS.index(key), step, client)


@pytest.mark.parametrize("policy", ["wait", "shrink"])
def test_another_process_of_a_client_goes_on_as_the_page_says(start_job: Callable[..., Any], policy: str) -> None:
    job = start_job(2, on_client_loss=policy)
    own, pages = job.new_client(0, 2), [PageClient(job.config.keys, job.config.scheduler, 1)]
    out = np.empty(16, "f4")

    def push(page: PageClient, key: str, number: int, step: int, done: int) -> Asked:
        ((part, _),) = page.places(key, 16, 1, 4, 1 << 21)
        at = -step if key == "w" else step
        fields = (key, 0, number, "none", False, False, part, -1, False, at, done)
        return page.start(Asked("push", fields, (of_key(key, step, 1).tobytes(),), part=part))

    def found(page: PageClient, key: str) -> list[Any]:
        ((part, _),) = page.places(key, 16, 1, 4, 1 << 21)
        tag, fields, _ = page.about(part, "init", key, 0, 1, 16, [16], "float32")
        if tag != "found":
            return [fields[0], {}, 0]
        *lasting, by_rows = fields
        assert by_rows is False, "nobody has pushed rows"
        return lasting

    def push_own(step: int) -> list[Any]:
        return [own.push(key, of_key(key, step, 0), deadline()) for key in keys_of(step)]

    def finish(page: PageClient, asked: list[Asked], works: list[Any]) -> None:
        assert {page.answer(each)[0] for each in asked} == {"ack"}
        for work in works:
            work.wait()

    def compare(key: str, *clients: int, step: int) -> None:
        own.pull(key, out, deadline()).wait()
        np.testing.assert_array_equal(out, np.sum([of_key(key, step, client) for client in clients], axis=0))

    try:
        pages[0].join()
        own.connect(deadline())
        for key in KEYS:
            own.add_keys([(key, (16,), "float32")])
            own.init(key, of_key(key, 0, 0), deadline()).wait()
            assert found(pages[0], key) == [0, {}, 0]
        for step in range(1, 5):
            works = push_own(step)
            number = {"w": step, "b": (step + 1) // 2}
            finish(pages[0], [push(pages[0], key, number[key], step, step - 1) for key in keys_of(step)], works)
            compare("w", 0, 1, step=step)
        works = push_own(5)
        finish(pages[0], [push(pages[0], "w", 5, 5, 4)], works[:1])
        pages[0].close()  # in the middle of step 5
        pages.append(PageClient(job.config.keys, job.config.scheduler, 1, incarnation=2))
        page, left_out = pages[1], 0
        page.join()
        if policy == "shrink":
            assert [lost[:3] for lost in page.lost] == [[1, 1, 1]]
            for work in (*works, *push_own(6)):
                work.wait()
            compare("b", 0, step=5)
            left_out = max(page.about(part, "return")[1][0] for part in range(8))
            assert left_out == 6
            assert {page.about(part, "enter", left_out)[0] for part in range(8)} == {"ack"}
            assert page.ask(page.scheduler, "enter", left_out)[0] == "ack"
        there = {key: found(page, key) for key in KEYS}
        position = max(max(done for _, _, done in there.values()), min(abs(at[n]) for n, at, _ in there.values()))
        assert position == (5 if policy == "shrink" else 4)
        numbers = {"w": position, "b": there["b"][0]}
        assert numbers["b"] == (3 if policy == "shrink" else 2), "rounds that are over"
        for step in range(position + 1, 10):
            works = push_own(step) if step > max(5, left_out) else works
            numbers |= {key: numbers[key] + 1 for key in keys_of(step)}
            asked = [push(page, key, numbers[key], step, step - 1) for key in keys_of(step)]
            if step == position + 1 and policy == "wait":
                assert page.ask(page.scheduler, "enter", position)[0] == "ack"
            finish(page, asked, works)
            for key in keys_of(step):
                compare(key, *((0, 1) if step > left_out else (0,)), step=step)
        page.leave()
        own.close(deadline())
    finally:
        for page in pages:
            page.close()
