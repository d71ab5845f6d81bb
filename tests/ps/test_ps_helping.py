"""Callers that wait read the answers themselves, and leave the link as they have found it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ps_helpers import TIMEOUT_S, deadline, initialise

from kvmpi.engine import Work
from kvmpi.errors import KVError
from kvmpi.ps import PsClient, link

StartJob = Callable[..., Any]
COUNT = 3000


@pytest.fixture
def pair(start_job: StartJob) -> tuple[Any, Any]:
    clients = start_job(2, chunk_bytes=4096).connect(2)
    initialise(clients, {"k": COUNT, "other": COUNT})
    return clients[0], clients[1]


def exchange(client: PsClient, key: str, value: float) -> tuple[Work, np.ndarray]:
    out = np.full(COUNT, np.nan, "f4")
    return client.pushpull(key, np.full(COUNT, value, "f4"), out, deadline()), out


def test_the_caller_reads_its_answers(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[int] = []
    receive = pair[0]._link._session.receive
    monkeypatch.setattr(
        pair[0]._link._session, "receive", lambda *message: readers.append(threading.get_ident()) or receive(*message)
    )
    for step in range(1, 30):
        theirs, _ = exchange(pair[1], "k", 10 * step)
        mine, out = exchange(pair[0], "k", step)
        pair[0].help(mine)
        assert mine.done()
        np.testing.assert_array_equal(out, np.full(COUNT, 11 * step))
        theirs.wait(TIMEOUT_S)
    assert readers.count(threading.get_ident()) > len(readers) / 2


def test_news_after_it_are_the_threads(pair: tuple[Any, Any]) -> None:
    for step in range(1, 30):
        theirs, _ = exchange(pair[1], "k", 1)
        mine, _ = exchange(pair[0], "k", 1)
        pair[0].help(mine)
        late, out = exchange(pair[0], "other", step)  # nobody helps with this one
        exchange(pair[1], "other", step)[0].wait(TIMEOUT_S)
        late.wait(TIMEOUT_S)
        np.testing.assert_array_equal(out, np.full(COUNT, 2 * step))
        theirs.wait(TIMEOUT_S)


def test_it_ends_with_what_another_thread_finishes(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_AWAKE_S", 10 * TIMEOUT_S)  # nothing else ends it in time
    for delay_s in (0.0, 0.05):
        work = Work("something else")
        helper = threading.Thread(target=pair[0].help, args=(work,), daemon=True)
        helper.start()
        time.sleep(delay_s)
        work.finish()
        helper.join(TIMEOUT_S)
        assert not helper.is_alive()


def test_of_many_callers_one_helps_and_all_get_theirs(pair: tuple[Any, Any]) -> None:
    def run(client: PsClient, key: str, failures: list[BaseException]) -> None:
        try:
            for step in range(1, 40):
                work, out = exchange(client, key, step)
                client.help(work)
                work.wait(TIMEOUT_S)
                np.testing.assert_array_equal(out, np.full(COUNT, 2 * step))
        except BaseException as error:
            failures.append(error)

    failures: list[BaseException] = []
    threads = [threading.Thread(target=run, args=(client, key, failures)) for client in pair for key in ("k", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    assert not failures


class Greedy:
    """The turn of a link, whose own thread does not get it while ``starves`` is set."""

    def __init__(self, link: Any) -> None:
        self._turn, self._thread, self.starves = link._turn, link._thread, threading.Event()

    def acquire(self, blocking: bool = True) -> bool:
        while threading.current_thread() is self._thread and self.starves.is_set():
            time.sleep(0.01)
        return bool(self._turn.acquire(blocking))

    def release(self) -> None:
        self._turn.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def test_a_client_whose_thread_does_not_get_its_turn_gives_signs_of_life(start_job: StartJob) -> None:
    """Callers with very many small requests leave it none on a machine that is busy."""
    client = start_job(1, heartbeat_s=0.1, heartbeat_timeout_s=1.0).connect(1)[0]
    initialise([client], {"k": COUNT})
    turn = client._link._turn = Greedy(client._link)
    turn.starves.set()
    ends_s, step = time.monotonic() + 2.5, 0
    while time.monotonic() < ends_s:
        work, out = exchange(client, "k", step := step + 1)
        client.help(work)
        assert work.done(), "it is done by the caller"
        work.wait(TIMEOUT_S)
        np.testing.assert_array_equal(out, np.full(COUNT, step))
    turn.starves.clear()
    client.barrier(deadline()).wait(TIMEOUT_S)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError])  # as of a handler of SIGALRM
def test_an_interruption_in_the_middle_of_a_message_ends_the_link(
    pair: tuple[Any, Any], kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, caller = pair[0]._link._session, threading.get_ident()
    receive = session.receive
    interrupted: list[bool] = []

    def interrupt(*message: Any) -> None:
        if threading.get_ident() == caller:
            interrupted.append(True)
            raise kind
        receive(*message)

    monkeypatch.setattr(session, "receive", interrupt)

    def exchange_until_interrupted() -> None:
        for step in range(1, 30):
            theirs, _ = exchange(pair[1], "k", step)
            mine, _ = exchange(pair[0], "k", step)
            pair[0].help(mine)
            theirs.wait(TIMEOUT_S)

    with pytest.raises(kind):
        exchange_until_interrupted()
    assert interrupted
    with pytest.raises(KVError, match=rf"client 0.*interrupted by {kind.__name__}"):
        exchange(pair[0], "other", 1)[0].wait(TIMEOUT_S)


def test_an_interruption_at_the_end_of_an_operation_leaves_nobody_waiting(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, add = threading.get_ident(), pair[0]._recorder.add

    def interrupt(*arguments: Any, **options: Any) -> None:
        if threading.get_ident() == caller:
            raise TimeoutError
        add(*arguments, **options)

    monkeypatch.setattr(pair[0]._recorder, "add", interrupt)
    for step in range(1, 30):
        theirs, _ = exchange(pair[1], "k", step)
        mine, _ = exchange(pair[0], "k", step)
        try:
            pair[0].help(mine)
        except TimeoutError:
            break
        theirs.wait(TIMEOUT_S)
    assert mine.done()
    with pytest.raises(KVError, match="TimeoutError"):
        mine.wait(TIMEOUT_S)


def test_an_interruption_just_after_the_turn_was_taken_leaves_it_to_others(pair: tuple[Any, Any]) -> None:
    turn = pair[0]._link._turn

    def interrupt(_: Any, event: str, called: Any) -> None:
        if event == "c_return" and getattr(called, "__self__", None) is turn and called.__name__ == "acquire":
            raise TimeoutError  # as a signal's handler would, before the next line

    for step in range(1, 10):
        sys.setprofile(interrupt)
        try:
            mine, _ = exchange(pair[0], "k", step)
        except TimeoutError:
            break
        finally:
            sys.setprofile(None)
        exchange(pair[1], "k", step)[0].wait(TIMEOUT_S)
        mine.wait(TIMEOUT_S)
    assert turn.acquire(timeout=TIMEOUT_S)
    turn.release()


def test_it_returns_at_once_when_the_link_is_closed(pair: tuple[Any, Any]) -> None:
    pair[0].abort()
    pair[0].help(Work("never"))
