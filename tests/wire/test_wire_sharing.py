"""Payloads in shared memory, over real Unix sockets: they arrive as they left, and their memory is used again."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmpi.config import Config
from kvmpi.errors import ProtocolError
from kvmpi.wire import Connection, Context, Listener, Readiness, new_context, partner, shared_memory, slips
from kvmpi.wire import messages as m

MIB = 1 << 20
LIMIT = 4 * MIB
TIMEOUT_S = 20.0
#: Of an arena, by default.
ARENA_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MINIMUM = partner.SHARE_FROM_BYTES


class Pair:
    """A listener and a connection to it that have become acquainted."""

    def __init__(self, there: Context[Any], here: Context[Any], path: str, *, shares: bool = True) -> None:
        self.listener = Listener(there, 2 * MIB)
        self.connection = Connection(here, self.listener.bind_ipc(path), 2 * MIB)
        self.there, self.here = there, here
        self.route = b""
        self.number = 0
        deadline = time.monotonic() + TIMEOUT_S
        self.ask([])
        while shares and not (self.connection.shares and self.listener._partners[self.route].shares):
            assert time.monotonic() < deadline, "they do not become acquainted"
            self.ask([])
            self.answer([])

    def ask(self, payloads: list[np.ndarray]) -> list[memoryview]:
        """What arrives at the listener."""
        self.number += 1
        self.connection.send(m.Bye(self.number), payloads)
        self.route, message, arrived = receive(self.listener)
        assert message == m.Bye(self.number)
        return arrived

    def answer(self, payloads: list[np.ndarray]) -> list[memoryview]:
        """What arrives at the connection."""
        self.listener.send(self.route, m.Ack(self.number, 0), payloads)
        message, arrived = receive(self.connection)
        assert message == m.Ack(self.number, 0)
        return arrived

    @property
    def lent_bytes(self) -> tuple[int, int]:
        """What the listener has of the connection's memory, and the other way round."""
        assert self.connection._partner is not None
        return self.connection._partner.lent_bytes, self.listener._partners[self.route].lent_bytes


def receive(source: Any) -> Any:
    """The next message of a listener or connection."""
    deadline = time.monotonic() + TIMEOUT_S
    readiness = Readiness([source])
    while (received := source.recv()) is None:
        assert time.monotonic() < deadline, "nothing came"
        readiness.wait(0.05)
    return received


def pattern(nbytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng([nbytes, seed]).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    """``start(here={...}, there={...})`` makes a pair; settings of one side and the other."""
    contexts: list[Context[Any]] = []

    def make(here: dict[str, Any] | None = None, there: dict[str, Any] | None = None, **options: Any) -> Pair:
        both = [new_context(Config(**{"shared_bytes": LIMIT, **(given or {})})) for given in (there, here)]
        contexts.extend(both)
        return Pair(*both, str(tmp_path / f"s{len(contexts)}"), **options)

    yield make
    for context in contexts:
        context.destroy(linger=0)


def _is_shared(payload: memoryview) -> bool:
    return payload.readonly and isinstance(payload.obj, np.ndarray)


@pytest.mark.parametrize("nbytes", [0, 1, 7, MINIMUM - 1, MINIMUM, MINIMUM + 1, MIB + 13, 2 * MIB])
def test_payloads_arrive_both_ways_and_come_back(start: Callable[..., Pair], nbytes: int) -> None:
    room = {"shared_bytes": 16 * MIB}
    pair = start(room, room)
    for seed in range(6):
        sent = [pattern(nbytes, seed), pattern(100, seed), pattern(nbytes, seed + 100)]
        asked = pair.ask(sent)
        answered = pair.answer(sent[::-1])
        assert [bytes(payload) for payload in asked] == [payload.tobytes() for payload in sent]
        assert [bytes(payload) for payload in answered] == [payload.tobytes() for payload in sent[::-1]]
        assert [_is_shared(payload) for payload in asked] == [nbytes >= MINIMUM, False, nbytes >= MINIMUM]
        del asked, answered
    pair.ask([])
    pair.answer([])
    pair.ask([])
    assert pair.lent_bytes == (0, 0)
    for context in (pair.here, pair.there):
        arena = context.arena()
        assert arena is not None
        assert arena.num_blocks == 0, "memory that came back is free"


def test_what_is_held_never_changes_and_a_full_pool_is_no_obstacle(start: Callable[..., Pair]) -> None:
    pair, rng = start(), np.random.default_rng(4)
    held: list[tuple[memoryview, bytes]] = []
    kinds = set()
    for seed in range(120):
        sent = pattern(int(rng.integers(MINIMUM, MIB)), seed)
        for arrived in (*pair.ask([sent]), *pair.answer([sent])):
            held.append((arrived, sent.tobytes()))
            kinds.add(_is_shared(arrived))
        assert max(pair.lent_bytes) <= LIMIT
        rng.shuffle(held)  # type: ignore[arg-type]
        del held[24:]
        assert all(arrived == then for arrived, then in held)
    assert kinds == {True, False}, "the pool was never full, or always"


def test_an_array_that_others_can_read_is_sent_where_it_lies_and_kept_until_it_is_read(
    start: Callable[..., Pair],
) -> None:
    pair = start()
    value = pair.there.empty(3 * LIMIT // 4, np.dtype("f4"))  # three times as large as what may be copied
    value[:] = np.arange(value.size)
    half = value[: 2 * MIB // 4]
    arrived = [pair.answer([half]) for _ in range(8)]
    assert all(_is_shared(payload) for payloads in arrived for payload in payloads)
    assert all(bytes(payloads[0]) == half.tobytes() for payloads in arrived)
    arena = pair.there.arena()
    assert arena is not None
    del value, half
    gc.collect()
    assert arena.num_blocks == 1, "it is still read"
    del arrived
    pair.ask([])
    assert arena.num_blocks == 0


def acquainted(arena_bytes: int, limit_bytes: int) -> tuple[partner.Partner, partner.Partner, shared_memory.Arena]:
    """Two ends, and the arena of the first."""
    arena = shared_memory.Arena(arena_bytes)
    here = partner.Partner(arena, limit_bytes, 2 * MIB)
    there = partner.Partner(shared_memory.Arena(MIB), 2 * MIB, 2 * MIB)
    answer = there.meet(here.offer(answer=True))
    assert isinstance(answer, slips.Offer)
    proof = here.meet(answer)
    assert proof is not None
    there.meet(proof)
    assert here.shares
    return here, there, arena


def sent(here: partner.Partner, there: partner.Partner, payloads: list[np.ndarray]) -> tuple[int, list[memoryview]]:
    """How many payloads were frames, and what arrives."""
    header, frames = here.pack(b"header", payloads)
    slip, rest = slips.decode(header)
    assert isinstance(slip, slips.Parcel)
    assert rest == b"header"
    return len(frames), there.unpack(slip, [memoryview(frame.tobytes()) for frame in frames])


def test_a_peer_keeps_a_quarter_of_an_arena_in_place_at_most() -> None:
    here, there, arena = acquainted(2 * MIB, 0)
    value = arena.empty(MIB, np.dtype("u1"))
    assert value is not None
    value[:] = pattern(MIB, 1)
    held = []
    for expected in (0, 0, 0, 0, 1, 1):
        num_frames, arrived = sent(here, there, [value[: MIB // 8]])
        assert num_frames == expected
        assert arrived == [value[: MIB // 8].tobytes()]
        held.append(arrived)
    assert here.lent_bytes == MIB // 2
    held.clear()
    del arrived
    parcel = there.overdue()
    assert parcel is not None
    here.unpack(parcel, [])
    assert here.lent_bytes == 0
    assert sent(here, there, [value[: MIB // 8]])[0] == 0


def test_what_does_not_lie_in_one_piece_arrives_as_it_is() -> None:
    here, there, arena = acquainted(MIB, MIB)
    value = arena.empty(8 * MINIMUM, np.dtype("u1"))
    assert value is not None
    value[:] = pattern(8 * MINIMUM, 1)
    for payload in (value[::2], pattern(8 * MINIMUM, 2)[::4], value.reshape(8, -1).T):
        assert sent(here, there, [payload])[1] == [payload.tobytes()]


def test_whose_memory_is_out_of_sight_has_nothing_announced_in_it() -> None:
    here, there, _ = acquainted(MIB, MIB)
    announced, _ = slips.decode(here.pack(b"", [pattern(MINIMUM, 1)])[0])
    assert isinstance(announced, slips.Parcel)
    assert there.meet(slips.Offer(0, -1, 0, b"", False)) is None, "there is nothing to prove"
    with pytest.raises(ProtocolError, match="memory that this process does not see"):
        there.unpack(announced, [])
    assert not there.gone()


@pytest.mark.parametrize("num_blocks", [256, 257])
def test_a_slip_stays_small(num_blocks: int) -> None:
    here, _, arena = acquainted(64 * MIB, MIB)
    value = arena.empty(MINIMUM, np.dtype("u1"))
    assert value is not None
    header, frames = here.pack(b"header", [value] * num_blocks)
    assert len(header) < slips.MAX_SLIP_BYTES
    assert len(frames) == (0 if num_blocks == 256 else 257)
    if frames:
        assert header == b"header"


def test_no_slip_is_longer_than_it_may_be() -> None:
    overhead = len(slips.encode(slips.Proof(bytes(60_000)))) - 8 - 60_000
    for more in (0, 1):
        slip = slips.Proof(bytes(slips.MAX_SLIP_BYTES - overhead + more))
        frame = slips.encode(slip, b"header")
        assert len(frame) == 8 + slips.MAX_SLIP_BYTES + more + len(b"header")
        if not more:
            assert slips.decode(frame) == (slip, b"header")
            continue
        with pytest.raises(ProtocolError, match=f"slip of {slips.MAX_SLIP_BYTES + 1} bytes"):
            slips.decode(frame)
    with pytest.raises(ProtocolError, match="slip of 12 bytes in a frame of 19"):
        slips.decode(slips.encode(slips.Unknown(), b"header")[:4] + (12).to_bytes(4, "little") + bytes(11))


@pytest.mark.parametrize("side", ["here", "there"])
def test_one_side_that_does_not_want_to_gets_frames(start: Callable[..., Pair], side: str) -> None:
    pair = start(**{side: {"shared_payloads": "off"}}, shares=False)
    for seed in range(3):
        sent = pattern(MIB, seed)
        for arrived in (*pair.ask([sent]), *pair.answer([sent])):
            assert not _is_shared(arrived)
            assert arrived == sent.tobytes()
    assert not pair.connection.shares


def test_without_memory_to_share_payloads_are_frames(
    start: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError("no such memory")

    monkeypatch.setattr(os, "memfd_create", refuse)
    pair = start(shares=False)
    for seed in range(3):
        sent = pattern(MIB, seed)
        assert pair.ask([sent]) == [sent.tobytes()]
        assert pair.answer([sent]) == [sent.tobytes()]
    assert not pair.connection.shares


def test_a_peer_that_maps_something_else_is_sent_frames(
    start: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in another container, where the PID and the descriptor are another process's arena."""
    other = shared_memory.Arena(MIB)
    real = shared_memory.View
    fired = []

    def view(pid: int, fd: int, size_bytes: int) -> shared_memory.View:
        fired.append(fd)
        return real(other.pid, other.fd, other.size_bytes)

    monkeypatch.setattr(partner, "View", view)
    pair = start(shares=False)
    sent = pattern(MIB, 1)
    for _ in range(3):
        assert pair.ask([sent]) == [sent.tobytes()]
        assert pair.answer([sent]) == [sent.tobytes()]
    assert fired
    assert not pair.connection.shares


@pytest.mark.parametrize("number", [0, 1])
def test_what_is_no_arena_is_not_opened(number: int, tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        file.truncate(MIB)
        for pid, fd, size in [
            (os.getpid(), file.fileno(), MIB), (os.getpid(), number, MIB), (0, 0, MIB), (-1, 0, MIB), (1 << 60, 0, MIB),
            (os.getpid(), -1, MIB), (os.getpid(), file.fileno(), 1 << 62), (os.getpid(), 1 << 60, MIB),
        ]:  # fmt: skip
            with pytest.raises(OSError):
                shared_memory.View(pid, fd, size)
    arena = shared_memory.Arena(MIB)
    with pytest.raises(OSError, match="not as it should be"):
        shared_memory.View(arena.pid, arena.fd, 2 * MIB)
    with pytest.raises(OSError):
        os.ftruncate(arena.fd, 4096)  # who could shrink it could kill those who read it


Block = tuple[int, int, int]
GARBAGE: dict[str, list[Block | None]] = {
    "beyond the end": [(100, 1 << 50, MIB)],
    "across the end": [(100, ARENA_BYTES - 64, MIB)],
    "negative offset": [(100, -MIB, MIB)],
    "negative length": [(100, MIB, -5)],
    "nothing": [(100, MIB, 0)],
    "not aligned": [(100, MIB + 4, MIB)],
    "the token": [(100, 0, MIB)],
    "too large": [(100, MIB, 3 * MIB)],
    "ticket of before": [(0, MIB, MIB)],
    "ticket after which there is none": [((1 << 64) - 1, MIB, MIB)],
    "a frame that is missing": [(100, MIB, 64), None],
}


@pytest.mark.parametrize("name", GARBAGE)
def test_blocks_that_cannot_be_are_an_error_and_nothing_else(start: Callable[..., Pair], name: str) -> None:
    pair = start()
    sent = pattern(MIB, 1)
    pair.ask([sent])
    header = m.Bye(9)
    for to_listener in (True, False):
        frame = slips.encode(slips.Parcel(0, [], GARBAGE[name]), partner_header(header))
        if to_listener:
            pair.connection.raw.send(frame)
            assert isinstance(receive(pair.listener)[1], ProtocolError)
        elif name != "ticket of before":  # nothing was sent in this direction yet
            pair.listener.handles[0].send_multipart([pair.route[1:], frame])
            with pytest.raises(ProtocolError):
                receive(pair.connection)
    gc.collect()
    assert pair.answer([sent]) == [sent.tobytes()]


def partner_header(message: m.Message) -> bytes:
    from kvmpi.wire import encode

    return encode(message)


@pytest.mark.parametrize("frame", [
    b"KVS", b"KVS\2", b"KVS\1", b"KVS\1\xff\xff\xff\xff", b"KVS\1\1\0\0\0", b"KVS\1\1\0\0\0\xc1", b"KVS\1\0\0\0\0rest",
    slips.encode(slips.Parcel(1 << 40, [])), slips.encode(slips.Parcel(0, [])) + b"x",
    b"KVS\1\7\0\0\0" + msgspec.msgpack.encode(["offer"]),
])  # fmt: skip
def test_slips_that_cannot_be_are_an_error_and_nothing_else(start: Callable[..., Pair], frame: bytes) -> None:
    pair = start()
    pair.connection.raw.send(frame)
    assert isinstance(receive(pair.listener)[1], ProtocolError)
    sent = pattern(MIB, 1)
    assert pair.ask([sent]) == [sent.tobytes()]
    assert pair.answer([sent]) == [sent.tobytes()]


def test_tickets_that_are_lost_on_the_way_come_back(start: Callable[..., Pair]) -> None:
    """A link that breaks takes messages with it: their blocks, and what they gave back, are no loss."""
    pair = start()
    mine = pair.connection._partner
    assert mine is not None
    for seed in range(8):
        mine.pack(b"lost", [pattern(MIB // 4, seed)])
        arrived = pair.ask([pattern(MIB // 4, seed)])
        del arrived
        pair.listener._partners[pair.route].pack(b"lost", [])
    assert pair.lent_bytes[0] == LIMIT
    assert not _is_shared(pair.ask([pattern(MIB // 4, 1)])[0])
    pair.answer([])
    assert pair.lent_bytes[0] == 0


def test_another_listener_in_the_place_of_one_is_told_again(start: Callable[..., Pair], tmp_path: Path) -> None:
    pair = start()
    sent = pattern(MIB, 1)
    kept = [*pair.ask([sent]), *pair.answer([sent])]
    path = pair.listener.endpoints[0].removeprefix("ipc://")
    pair.listener.close()
    pair.listener = Listener(pair.there, 2 * MIB)
    pair.listener.bind_ipc(path)
    deadline = time.monotonic() + TIMEOUT_S
    while (heard := pair.listener.recv()) is None:  # what is sent before the end of the old link is known is lost
        assert time.monotonic() < deadline
        pair.connection.send(m.Bye(1), [sent])
        Readiness([pair.listener]).wait(0.2)
    assert isinstance(heard[1], ProtocolError), "it was sent to the one before"
    while pair.connection.shares:
        assert time.monotonic() < deadline
        pair.connection.recv()
    pair.connection.send(m.Bye(0))
    while receive(pair.listener)[1] != m.Bye(0):
        assert time.monotonic() < deadline
    while True:
        arrived = pair.ask([sent])
        assert arrived == [sent.tobytes()]
        answered = pair.answer([sent])
        assert answered == [sent.tobytes()]
        if _is_shared(arrived[0]) and _is_shared(answered[0]):
            break
        assert time.monotonic() < deadline
    assert kept == [sent.tobytes()] * 2, "what the one before had was used again"


def _serve(path: str) -> None:
    context = new_context(Config(shared_bytes=LIMIT))
    listener, held = Listener(context, 2 * MIB), []
    listener.bind_ipc(path)
    while True:
        route, _, payloads = receive(listener)
        held.append(payloads)
        listener.send(route, m.Ack(1, 0), [np.frombuffer(payload, np.uint8) for payload in payloads])


def test_a_peer_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    context = new_context(Config(shared_bytes=LIMIT))
    arena = context.arena()
    assert arena is not None
    for round_ in range(2):
        path = str(tmp_path / f"s{round_}")
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(path,), daemon=True)
        process.start()
        connection = Connection(context, f"ipc://{path}", 2 * MIB)
        sent, deadline = pattern(MIB, round_), time.monotonic() + TIMEOUT_S
        arrived: list[memoryview] = []
        while not arrived or not _is_shared(arrived[0]):
            assert time.monotonic() < deadline
            connection.send(m.Bye(1), [sent])
            arrived = receive(connection)[1]
        connection.send(m.Bye(1), [sent])
        assert receive(connection)[1] == [sent.tobytes()]
        assert arena.num_blocks >= 1
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert arrived == [sent.tobytes()], "memory of a process that has died"
        connection.close()
        assert arena.num_blocks == 0
    context.destroy(linger=0)


def test_memory_of_arrays_goes_back_to_the_system_with_the_last_of_them() -> None:
    arena = shared_memory.Arena(64 * MIB)
    first, second = (arena.empty(8 * MIB, np.dtype("u1")) for _ in range(2))
    assert first is not None
    assert second is not None
    first[:] = 1
    second[:] = 2
    assert os.fstat(arena.fd).st_blocks * 512 >= 16 * MIB
    del first
    assert arena.num_blocks == 1
    assert (second == 2).all()
    del second
    assert arena.num_blocks == 0
    assert os.fstat(arena.fd).st_blocks * 512 <= MIB


_INTEGERS = st.integers(-(1 << 63), (1 << 64) - 1) | st.integers(-5, 2 * MIB)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    floor=_INTEGERS,
    done=st.lists(_INTEGERS, max_size=5),
    blocks=st.lists(st.none() | st.tuples(_INTEGERS, _INTEGERS, _INTEGERS), max_size=4),
    num_frames=st.integers(0, 3),
)
def test_whatever_a_peer_says_it_is_read_in_its_arena_or_refused(
    floor: int, done: list[int], blocks: list[Block | None], num_frames: int
) -> None:
    here, there = (partner.Partner(shared_memory.Arena(MIB), LIMIT, 2 * MIB) for _ in range(2))
    offer = here.offer(answer=True)
    answer = there.meet(offer)
    assert isinstance(answer, slips.Offer)
    here.meet(answer)
    here.pack(b"", [pattern(MINIMUM, 1)])
    slip, _ = slips.decode(slips.encode(slips.Parcel(floor, done, blocks)))
    assert isinstance(slip, slips.Parcel)
    for one in (here, there):
        try:
            payloads = one.unpack(slip, [memoryview(b"frame")] * num_frames)
        except ProtocolError:
            continue
        assert len(payloads) == (len(blocks) or num_frames)
        for payload in payloads:
            bytes(payload)
    assert 0 <= here.lent_bytes <= MINIMUM
