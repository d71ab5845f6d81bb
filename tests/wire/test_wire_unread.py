"""A peer that does not read is not heard while much waits for it, and nothing is kept once it has read, or gone."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from zmq.utils import garbage

from kvmpi.config import Config
from kvmpi.wire import Context, Listener, encode, new_context
from kvmpi.wire import messages as m
from kvmpi.wire import unread as counting
from kvmpi.wire.unread import Unread

LIMIT = 4 << 20
LARGE = np.zeros(1 << 20, "u1")


@pytest.fixture
def context() -> Iterator[Context[Any]]:
    context = new_context(Config())
    yield context
    context.destroy(linger=0)


def listener_at(context: Context[Any], folder: Path) -> Listener:
    folder.chmod(0o700)
    listener = Listener(context, 1 << 30)
    listener.bind_ipc(str(folder / "listener"))
    listener.hears = lambda route, unread_bytes: unread_bytes <= LIMIT
    return listener


def peer_of(context: Context[Any], listener: Listener) -> zmq.Socket[Any]:
    """One that takes nothing but what its kernel does."""
    peer = context.socket(zmq.DEALER)
    peer.rcvhwm, peer.linger = 1, 0
    peer.connect(listener.endpoints[0])
    return peer


def heard(listener: Listener, timeout_s: float = 5.0) -> bytes | None:
    """Where the next message is from; None if none comes."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        received = listener.recv()
        if received is not None:
            return received[0]
        time.sleep(0.001)
    return None


def route_of(peer: zmq.Socket[Any], listener: Listener) -> bytes:
    """Where the listener finds a peer, of which it has heard nothing so far."""
    peer.send(encode(m.Bye(1)))
    route = heard(listener)
    assert route is not None
    return route


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def heard_of_late(listener: Listener, route: bytes) -> bool:
    """Whether the kernel had room for some of it."""
    time.sleep(0.1)
    return listener.unread_bytes(route) <= LIMIT


@pytest.mark.parametrize("payload", [LARGE, np.zeros(3000, "u1"), None], ids=["lent", "copied", "header"])
def test_who_does_not_read_is_not_heard_until_it_has_read(
    context: Context[Any], tmp_path: Path, payload: np.ndarray | None
) -> None:
    listener = listener_at(context, tmp_path)
    with peer_of(context, listener) as peer, peer_of(context, listener) as other:
        route = route_of(peer, listener)
        sent = 0
        while listener.unread_bytes(route) <= LIMIT or heard_of_late(listener, route):
            listener.send(route, m.Failure(1, "KVError", "x" * 4000), [] if payload is None else [payload])
            sent += 1
            assert sent < 10_000
        peer.send(encode(m.Bye(2)))
        assert heard(listener, 0.3) is None
        other.send(encode(m.Bye(3)))
        assert heard(listener) not in (None, route), "others are heard"
        for _ in range(sent):
            peer.recv_multipart()
        until(lambda: listener.unread_bytes(route) <= 128 << 10)
        peer.send(encode(m.Bye(4)))
        assert heard(listener) == route
    listener.close()


class Late(dict[int, Any]):
    """What pyzmq's thread takes from when a frame has left: as where it hardly ever gets a core."""

    def pop(self, *key: Any) -> Any:
        time.sleep(0.03)
        return super().pop(*key)


def test_who_reads_is_heard_where_that_is_noticed_late(
    context: Context[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = listener_at(context, tmp_path)
    with peer_of(context, listener) as peer:
        route = route_of(peer, listener)
        late = Late(garbage.gc.refs)
        monkeypatch.setattr(garbage.gc, "refs", late)
        most = 0
        for i in range(60):
            peer.send(encode(m.Bye(2 + i)))
            assert heard(listener) == route, i
            listener.send(route, m.Value(1, 1), [LARGE[: 256 << 10]])
            most = max(most, listener.unread_bytes(route))
            peer.recv_multipart()
        assert most > LIMIT, "it was noticed in time"
        assert not listener._unheard
        monkeypatch.setattr(garbage.gc, "refs", dict(late))
    listener.close()


def test_nothing_is_kept_for_one_that_has_gone(context: Context[Any], tmp_path: Path) -> None:
    listener = listener_at(context, tmp_path)
    with peer_of(context, listener) as peer:
        route = route_of(peer, listener)
        for _ in range(20):
            listener.send(route, m.Value(1, 1), [LARGE])
        assert listener.unread_bytes(route) > LIMIT
    until(lambda: listener.recv() is None and listener.unread_bytes(route) == 0)
    listener.forget_gone()
    assert not listener._unread._peers
    listener.close()


def test_one_that_has_read_and_gone_is_forgotten_in_the_end(context: Context[Any], tmp_path: Path) -> None:
    listener = listener_at(context, tmp_path)
    with peer_of(context, listener) as peer:
        route = route_of(peer, listener)
        listener.send(route, m.Value(1, 1), [LARGE[: 100 << 10]])
        assert len(peer.recv_multipart()) == 2
    listener.forget_gone()
    assert listener._unread._peers, "nobody knows yet that it has read"
    for _ in range(1000):
        listener.forget_gone()
    assert not listener._unread._peers
    listener.close()


def test_who_gets_little_at_a_time_and_never_reads_is_not_forgotten(context: Context[Any], tmp_path: Path) -> None:
    listener = listener_at(context, tmp_path)
    with peer_of(context, listener) as peer:
        route = route_of(peer, listener)
        sent_bytes, piece = 0, LARGE[: 100 << 10]
        while listener.unread_bytes(route) <= LIMIT or heard_of_late(listener, route):
            listener.send(route, m.Value(1, 1), [piece])
            listener.forget_gone()
            sent_bytes += piece.nbytes
            assert sent_bytes < 5 * LIMIT, "nobody notices that it does not read"
    listener.close()


class Tracker:
    """In the place of pyzmq's."""

    def __init__(self) -> None:
        self.done, self.num_waits = False, 0

    def wait(self, timeout_s: float) -> None:
        self.num_waits += 1
        if not self.done:
            raise zmq.NotDone


@pytest.mark.parametrize("seed", range(50))
def test_what_is_unread_is_what_was_sent_after_all_that_has_left(seed: int) -> None:
    """As a list says: no more than was sent since the last frame that is known to have left, and nothing after all."""
    choose, unread = random.Random(seed), Unread()
    assert not unread.await_left(b"one"), "nothing is known of it"
    assert not unread.wants_mark(b"one")
    sent: dict[bytes, list[tuple[int, Tracker | None]]] = {b"one": [], b"other": []}
    for _ in range(100):
        route = choose.choice([*sent])
        if choose.random() < 0.6:
            nbytes, num_frames = choose.randrange(1 << 20), choose.randrange(1, 4)
            tracker = Tracker() if unread.wants_mark(route) or choose.random() < 0.2 else None
            unread.add(route, nbytes, num_frames, tracker)
            sent[route].append((nbytes + counting._FRAME_BYTES * num_frames, tracker))
        else:
            followed = [tracker for _, tracker in sent[route] if tracker is not None and not tracker.done]
            for tracker in followed[: choose.randrange(3)]:
                tracker.done = True
        for each, messages in sent.items():
            places = [i for i, (_, tracker) in enumerate(messages) if tracker is not None]
            here = [i for i in places if not messages[i][1].done]
            left = max((i + 1 for i in places if not here or i < here[0]), default=0)
            assert unread.of(each) == (sum(nbytes for nbytes, _ in messages[left:]) if here else 0)
            since = max((i + 1 for i in places), default=0)
            unmarked = sum(nbytes for nbytes, _ in messages[since:])
            assert unread.wants_mark(each) == (unmarked >= counting.MARK_EVERY_BYTES)


def test_who_does_not_read_is_waited_for_once_until_it_has_read() -> None:
    unread, trackers = Unread(), [Tracker() for _ in range(3)]
    for tracker in trackers:
        unread.add(b"one", 1000, 1, tracker)
    first, second, _ = trackers
    assert not unread.await_left(b"one")
    first.done = True
    assert not unread.await_left(b"one"), "it was waited for already, and nobody has looked since"
    assert first.num_waits == 1
    assert unread.of(b"one") == 2 * (1000 + counting._FRAME_BYTES)
    second.done = True
    assert unread.await_left(b"one"), "more has left"
    assert unread.of(b"one") == 1000 + counting._FRAME_BYTES


def test_messages_of_one_peer_stay_with_it_until_they_are_wanted(context: Context[Any], tmp_path: Path) -> None:
    listener = listener_at(context, tmp_path)
    with peer_of(context, listener) as peer:
        peer.sndhwm, peer.sndtimeo = 1, 500
        peer.disconnect(listener.endpoints[0])
        peer.connect(listener.endpoints[0])
        sent = 0
        while sent < 1000:
            try:
                peer.send_multipart([encode(m.Bye(1)), LARGE.data])
                sent += 1
            except zmq.Again:
                break
        assert 32 <= sent < 64, "and what kernels hold"
    listener.close()
