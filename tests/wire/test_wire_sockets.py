"""Real sockets on this host: payloads arrive as they left, and a peer that sends nonsense hurts nobody else."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from kvmpi.config import Config
from kvmpi.errors import ConfigError, ProtocolError
from kvmpi.machine import interfaces, read_text
from kvmpi.wire import (
    PROTOCOL_VERSION,
    Connection,
    Context,
    Listener,
    Message,
    OtherVersionError,
    Readiness,
    Waker,
    as_array,
    create_keys,
    encode,
    new_context,
    slips,
)
from kvmpi.wire import messages as m
from kvmpi.wire.addresses import is_loopback
from kvmpi.wire.context import num_io_threads

MIB = 1 << 20
TIMEOUT_S = 20.0


@pytest.fixture(params=["curve", "off"])
def context(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Context[Any]]:
    keys = str(tmp_path / "keys")
    create_keys(keys)
    context = new_context(Config(security=request.param, keys=keys))
    yield context
    context.destroy(linger=0)


@pytest.fixture
def listener(context: Context[Any]) -> Listener:
    listener = Listener(context, 2 * MIB)
    listener.bind_tcp("127.0.0.1")
    return listener


@pytest.fixture(params=["tcp", "ipc"])
def endpoint(request: pytest.FixtureRequest, listener: Listener, tmp_path: Path) -> str:
    if request.param == "tcp":
        return listener.endpoints[0]
    return listener.bind_ipc(str(tmp_path / "s"))


def receive(source: Any) -> Any:
    """The next message of a listener or connection."""
    deadline = time.monotonic() + TIMEOUT_S
    readiness = Readiness([source])
    while (received := source.recv()) is None:
        assert time.monotonic() < deadline, "nothing came"
        readiness.wait(0.05)
    return received


def hears_from(listener: Listener, connection: Connection) -> None:
    """``connection`` still gets an answer, whatever else arrived at ``listener``."""
    connection.send(m.Bye(77))
    deadline = time.monotonic() + TIMEOUT_S
    while (answer := connection.recv()) is None:
        assert time.monotonic() < deadline, "the listener no longer serves"
        if (received := listener.recv()) is None:
            Readiness([listener, connection]).wait(0.05)
        elif isinstance(received[1], Message):
            listener.send(received[0], m.Ack(77, 0))
    assert answer == (m.Ack(77, 0), [])


def pattern(nbytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng([nbytes, seed]).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("nbytes", [0, 1, 7, 33, 4096, 64 << 10, (64 << 10) + 1, MIB])
def test_payloads_arrive_both_ways(context: Context[Any], listener: Listener, endpoint: str, nbytes: int) -> None:
    connection = Connection(context, endpoint, 2 * MIB)
    question, answers = pattern(nbytes, 0), [pattern(nbytes, 1), pattern(nbytes, 2)]
    connection.send(m.Push(1, "k", 0, 1, "none", False), [question])
    route, message, payloads = receive(listener)
    assert message == m.Push(1, "k", 0, 1, "none", False)
    assert [bytes(payload) for payload in payloads] == [question.tobytes()]
    listener.send(route, m.State(1, 0, ["a", "b"]), answers)
    message, payloads = receive(connection)
    assert message == m.State(1, 0, ["a", "b"])
    assert [bytes(payload) for payload in payloads] == [answer.tobytes() for answer in answers]


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "u2", "i1", "i2", "i4", "i8", "u1"])
@pytest.mark.parametrize("count", [0, 1, 5, 40_000])
def test_arrays_of_every_dtype_arrive(context: Context[Any], listener: Listener, dtype: str, count: int) -> None:
    connection = Connection(context, listener.endpoints[0], 2 * MIB)
    whole = pattern(8 * (count + 2), 3).view(dtype)
    sent = whole[1 : 1 + count]  # a chunk of a vector begins anywhere
    connection.send(m.Push(1, 0, 0, 1, "none", False), [sent])
    _, _, payloads = receive(listener)
    got = as_array(payloads[0], np.dtype(dtype))
    assert got.tobytes() == sent.tobytes()
    assert got.dtype == dtype
    assert got.shape == (count,)


def test_a_large_payload_is_lent_and_let_go(context: Context[Any], listener: Listener) -> None:
    import gc
    import weakref

    connection = Connection(context, listener.endpoints[0], 2 * MIB)
    whole = pattern(MIB, 4)
    view = whole[:]
    alive = weakref.ref(view)
    connection.send(m.Push(1, 0, 0, 1, "none", False), [view])
    del view
    assert bytes(receive(listener)[2][0]) == whole.tobytes()
    deadline = time.monotonic() + TIMEOUT_S
    while alive() is not None:
        assert time.monotonic() < deadline, "the socket never lets go of what it was lent"
        gc.collect()
        time.sleep(0.01)


@pytest.mark.parametrize("nbytes", [100_000, MIB])
def test_what_came_and_does_not_change_any_more_leaves_once_more(
    context: Context[Any], listener: Listener, endpoint: str, nbytes: int
) -> None:
    connections = [Connection(context, endpoint, 2 * MIB) for _ in range(2)]
    sent, routes = pattern(nbytes, 5), []
    for connection in connections:
        connection.send(m.Push(1, 0, 0, 1, "none", False), [sent])
        route, _, payloads = receive(listener)
        routes.append(route)
    came = as_array(payloads[0], np.dtype("u1"))
    came.flags.writeable = False
    for request in range(2):
        for route in routes:
            listener.send(route, m.Value(request, 1), [came[:]])
            listener.send(route, m.Value(request, 2), [came[1:]])  # no whole frame
    payloads.clear()
    del came
    for connection in connections:
        for request in range(2):
            for first in range(2):
                message, payloads = receive(connection)
                assert message == m.Value(request, 1 + first)
                assert bytes(payloads[0]) == sent[first:].tobytes()


@pytest.mark.parametrize("is_fixed", [True, False])
def test_only_what_does_not_change_any_more_is_sent_without_a_copy(
    context: Context[Any], listener: Listener, tmp_path: Path, is_fixed: bool
) -> None:
    sent = pattern(100_000, 6)
    first = Connection(context, listener.endpoints[0], 2 * MIB)
    first.send(m.Push(1, 0, 0, 1, "none", False), [sent])
    came = as_array(receive(listener)[2][0], np.dtype("u1"))
    view = came[:]
    view.flags.writeable = not is_fixed
    (tmp_path / "later").mkdir(mode=0o700)
    path = str(tmp_path / "later" / "s")
    connection = Connection(context, f"ipc://{path}", 2 * MIB)  # to nobody yet
    connection.send(m.Push(2, 0, 0, 1, "none", False), [view])
    came.fill(7)  # which nobody may do
    later = Listener(context, 2 * MIB)
    later.bind_ipc(path)
    expected = came if is_fixed else sent
    assert bytes(receive(later)[2][0]) == expected.tobytes()


def test_a_received_payload_keeps_its_memory(context: Context[Any], listener: Listener) -> None:
    connection = Connection(context, listener.endpoints[0], 2 * MIB)
    sent = [pattern(1000 + 77 * i, i) for i in range(50)]
    for i, payload in enumerate(sent):
        connection.send(m.Push(i, 0, 0, 1, "none", False), [payload])
    got = [as_array(receive(listener)[2][0], np.dtype("u1")) for _ in sent]
    for i, payload in enumerate(sent):
        np.testing.assert_array_equal(got[i], payload, err_msg=f"payload {i}")


def test_as_array_refuses_a_broken_item() -> None:
    with pytest.raises(ProtocolError, match="5 bytes"):
        as_array(memoryview(b"12345"), np.dtype("f4"))


def test_a_frame_above_the_limit_is_refused_and_others_are_served(context: Context[Any], listener: Listener) -> None:
    good = Connection(context, listener.endpoints[0], 2 * MIB)
    hears_from(listener, good)
    bad = Connection(context, listener.endpoints[0], 64 * MIB)
    bad.send(m.Push(1, "big", 0, 1, "none", False), [pattern(2 * MIB + 1, 0)])
    hears_from(listener, good)
    # It is let in again under its route once it sends what is allowed; of the frame too large, nothing is heard.
    hears_from(listener, bad)
    bad.send(m.Push(2, "fits", 0, 1, "none", False), [pattern(2 * MIB, 1)])
    message = receive(listener)[1]
    assert message == m.Push(2, "fits", 0, 1, "none", False)


def test_a_connection_keeps_its_route_when_the_listener_drops_it(context: Context[Any], listener: Listener) -> None:
    connection = Connection(context, listener.endpoints[0], 64 * MIB)
    connection.send(m.Bye(1))
    route = receive(listener)[0]
    connection.send(m.Push(1, "big", 0, 1, "none", False), [pattern(2 * MIB + 1, 0)])  # this breaks the link
    connection.send(m.Bye(2))
    again, message, _ = receive(listener)
    assert (again, message) == (route, m.Bye(2))


def test_a_connection_survives_a_frame_above_its_own_limit(
    context: Context[Any], listener: Listener, endpoint: str
) -> None:
    connection = Connection(context, endpoint, 1000)
    for i in range(3):
        connection.send(m.Bye(i))
        route, message, _ = receive(listener)
        assert message == m.Bye(i)
        listener.send(route, m.Value(i, 0), [pattern(1001, 0)])
        deadline = time.monotonic() + TIMEOUT_S
        while connection.raw.getsockopt(zmq.EVENTS) & zmq.POLLOUT:
            assert time.monotonic() < deadline, "the link was not given up: this test proves nothing"
            time.sleep(0.005)
    hears_from(listener, connection)


@pytest.mark.parametrize("slip", [slips.Unknown(), slips.Offer(1, 3, 4096, b"x" * 16, True)])
def test_a_word_about_shared_memory_needs_no_link(
    context: Context[Any], listener: Listener, tmp_path: Path, slip: slips.Slip
) -> None:
    connection = Connection(context, listener.bind_ipc(str(tmp_path / "s")), 1000)
    connection.send(m.Bye(1))
    route, message, _ = receive(listener)
    assert message == m.Bye(1)
    listener._say(route, slip)
    listener.send(route, m.Value(1, 0), [pattern(1001, 0)])
    deadline = time.monotonic() + TIMEOUT_S
    while connection.raw.getsockopt(zmq.EVENTS) & zmq.POLLOUT:
        assert time.monotonic() < deadline, "the link was not given up: this test proves nothing"
        time.sleep(0.005)
    assert connection.recv() is None
    hears_from(listener, connection)


def test_a_peer_that_comes_back_before_its_old_link_is_known_to_be_dead_is_heard(
    context: Context[Any], listener: Listener
) -> None:
    old, new = Connection(context, listener.endpoints[0], MIB), context.socket(zmq.DEALER)
    old.send(m.Bye(1))
    route = receive(listener)[0]
    context.secure_connection(new)
    new.setsockopt(zmq.ROUTING_ID, route[1:])
    new.connect(listener.endpoints[0])
    new.send(encode(m.Bye(2)))
    assert receive(listener)[:2] == (route, m.Bye(2))
    listener.send(route, m.Ack(2, 0))
    assert new.poll(TIMEOUT_S * 1000), "the answer went to the old link"


GARBAGE: dict[str, bytes] = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "zeros": bytes(100_000),
    "half a greeting": b"\xff\0\0\0\0\0\0\0\1\x7f\3",
    "greeting, then noise": b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + bytes(48) + b"\xff" * 10_000,
    "noise": np.random.default_rng(9).bytes(100_000),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_on_the_port_hurts_nobody(context: Context[Any], listener: Listener, name: str) -> None:
    good = Connection(context, listener.endpoints[0], 2 * MIB)
    port = int(listener.endpoints[0].rsplit(":", 1)[1])
    for i in range(5):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            try:
                raw.sendall(GARBAGE[name])
            except OSError:
                pass  # it hung up on us: just as well
            hears_from(listener, good)
            if i % 2:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # end with a reset
    hears_from(listener, good)


def _send_frames(frames: list[bytes]) -> Callable[[zmq.Socket[Any]], None]:
    return lambda peer: peer.send_multipart(frames)


ODD_MESSAGES: dict[str, list[bytes]] = {
    "one empty frame": [b""],
    "garbage header": [b"\x93garbage", b"payload"],
    "empty header, payload": [b"", b"abc"],
    "many frames": [encode(m.Push(1, 0, 0, 1, "none", False))] + [b"x"] * 5000,
    "header of 300 kB": [b"KVM\1" + b"\xc0" * 300_000],
}


@pytest.mark.parametrize("name", ODD_MESSAGES)
@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ, zmq.PUSH], ids=["dealer", "req", "push"])
def test_a_zmq_peer_that_speaks_nonsense_is_heard_as_an_error(
    context: Context[Any], listener: Listener, name: str, kind: int
) -> None:
    good = Connection(context, listener.endpoints[0], 2 * MIB)
    with context.socket(kind) as peer:
        peer.linger = 0
        context.secure_connection(peer)
        peer.connect(listener.endpoints[0])
        if kind != zmq.PUSH:  # a PUSH socket is not let in by a ROUTER, and would wait here
            peer.send_multipart(ODD_MESSAGES[name])
            route, message, payloads = receive(listener)
            assert isinstance(message, ProtocolError) or len(payloads) == 5000
            listener.send(route, m.Ack(1, 0))  # it may be answered; whether it listens is its own affair
        hears_from(listener, good)


def test_a_version_mismatch_is_seen_by_the_connection_which_says_who_it_is_once(
    context: Context[Any], listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    connection = Connection(context, listener.endpoints[0], 2 * MIB, "client 5")
    connection.send(m.Bye(1))
    route = receive(listener)[0]
    for _ in range(3):
        listener.handles[0].send_multipart([route[1:], b"KVM\x63..."])
        with pytest.raises(OtherVersionError, match=r"client 5 .* version 99; install the same version of kvmpi"):
            receive(connection)
    hears_from(listener, connection)
    assert sum("which calls itself client 5 on " in line for line in caplog.messages) == 1


def test_a_peer_of_another_version_is_refused_and_others_are_heard(context: Context[Any], listener: Listener) -> None:
    good = Connection(context, listener.endpoints[0], 2 * MIB)
    with context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        context.secure_connection(peer)
        peer.connect(listener.endpoints[0])
        for _ in range(3):
            peer.send_multipart([b"KVM\x63" + encode(m.Bye(1))[4:], b"payload"])
        hears_from(listener, good)
        for _ in range(3):
            while not peer.poll(10):
                assert listener.recv() is None, "what is of another version is not for who listens"
            assert peer.recv_multipart()[0][:5] == b"KVM\0" + bytes([PROTOCOL_VERSION])
    hears_from(listener, good)


def test_sending_to_a_peer_that_is_gone_is_no_error(context: Context[Any], listener: Listener) -> None:
    gone = Connection(context, listener.endpoints[0], 2 * MIB)
    gone.send(m.Bye(1))
    route = receive(listener)[0]
    gone.close()
    good = Connection(context, listener.endpoints[0], 2 * MIB)
    for i in range(20):
        listener.send(route, m.Value(i, 0), [pattern(100_000, i)])
        hears_from(listener, good)
    for route in (b"never heard of", b"t", b"tnever", b""):
        listener.send(route, m.Ack(1, 0))
    hears_from(listener, good)


def test_a_message_that_cannot_be_encoded_leaves_the_socket_usable(context: Context[Any], listener: Listener) -> None:
    connection = Connection(context, listener.endpoints[0], 2 * MIB)
    with pytest.raises(ProtocolError):
        connection.send(m.Pull(1, 1 << 70, 0, 0), [pattern(10, 0)])
    with pytest.raises(ProtocolError):
        listener.send(b"x", m.Failure(1, "KVError", "y" * MIB))
    hears_from(listener, connection)


def test_a_port_in_use_and_a_bad_endpoint_are_config_errors(context: Context[Any], listener: Listener) -> None:
    port = int(listener.endpoints[0].rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: the address is in use; .*KVMPI_SCHEDULER_PORT"):
        Listener(context, MIB).bind_tcp("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"203\.0\.113\.9:\*: [\w ]+; set KVMPI_HOST to an address of"):
        Listener(context, MIB).bind_tcp("203.0.113.9")
    with pytest.raises(ConfigError, match="cannot connect to 'nonsense'"):
        Connection(context, "nonsense", MIB)


@pytest.mark.parametrize("host", ["::1", "[::1]", "lo", "localhost"])
def test_listeners_have_addresses_of_ipv6_and_names(host: str, context: Context[Any]) -> None:
    """Names mean an address of IPv4, where they have one, for who listens and for who connects."""
    if ":" in host and not read_text("/proc/net/if_inet6"):
        pytest.skip("IPv6 is switched off here")
    with contextlib.ExitStack() as stack:
        listener = Listener(context, MIB)
        stack.callback(listener.close)
        endpoint = listener.bind_tcp(host)
        assert endpoint.startswith("tcp://[::1]:" if ":" in host else "tcp://127.0.0.1:")
        port = endpoint.rpartition(":")[2]
        connection = Connection(context, f"tcp://localhost:{port}" if host == "localhost" else endpoint, MIB)
        stack.callback(connection.close)
        hears_from(listener, connection)


def kernel_send_buffers(port: int) -> list[int]:
    """Of this process's established links of the listener at ``port``, at both of their ends; in bytes."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as end:
            if end.family != socket.AF_UNIX and port in {end.getsockname()[1], end.getpeername()[1]}:
                found.append(end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
    return found


def test_little_is_under_way_within_a_host_and_between_hosts_as_much_as_the_link_takes(context: Context[Any]) -> None:
    others = [address for name, address in interfaces().items() if not is_loopback(address)]
    for host in ["127.0.0.1", *others[:1]]:
        with contextlib.ExitStack() as stack:
            listener = Listener(context, 64 * MIB)
            stack.callback(listener.close)
            connection = Connection(context, listener.bind_tcp(host), 64 * MIB)
            stack.callback(connection.close)
            hears_from(listener, connection)
            for size in (4 << 10, 16 << 20):  # the system's own buffers grow with what is sent
                connection.send(m.Bye(78), [np.ones(size, np.uint8)])
                assert receive(listener)[2][0].nbytes == size
            ends = kernel_send_buffers(int(listener.endpoints[0].rpartition(":")[2]))
            assert len(ends) == 2
            assert (set(ends) == {2 * (512 << 10)}) == is_loopback(host)  # the kernel counts its own needs, too


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (11, 2), (12, 3), (16, 4), (128, 4)])
def test_some_of_the_cores_carry_messages(cores: int, threads: int) -> None:
    assert num_io_threads(cores) == threads


def test_connections_are_spread_over_the_threads_that_were_asked_for() -> None:
    def threads() -> list[str]:
        names = [read_text(f"/proc/self/task/{task}/comm").strip() for task in os.listdir("/proc/self/task")]
        return sorted(name for name in names if "IO" in name)

    before = threads()
    context = new_context(Config(io_threads=3, security="off"))
    with contextlib.ExitStack() as stack:
        stack.callback(context.destroy, 0)
        listener = Listener(context, MIB)
        stack.callback(listener.close)
        endpoint = listener.bind_tcp("127.0.0.1")
        connections = [Connection(context, endpoint, MIB) for _ in range(6)]
        for number, connection in enumerate(connections):
            stack.callback(connection.close)
            hears_from(listener, connection)
            connection.send(m.Bye(number), [np.full(300_007, number, np.uint8)])
            (payload,) = receive(listener)[2]
            assert (np.asarray(payload) == number).all()
        assert len(threads()) == len(before) + 3
        assert [connection._socket.affinity for connection in connections] == [1, 2, 4, 1, 2, 4]
    for threads_asked in (-1, 33):
        with pytest.raises(ConfigError, match=f"KVMPI_IO_THREADS={threads_asked}: must"):
            Config(io_threads=threads_asked)


def test_a_waker_wakes_and_does_not_fill_up() -> None:
    waker = Waker()
    readiness = Readiness([waker])
    assert not readiness.wait(0)
    for _ in range(100_000):
        waker.wake()
    assert readiness.wait(TIMEOUT_S)
    waker.clear()
    waker.clear()
    waker.wake()
    assert readiness.wait(TIMEOUT_S)
    waker.close()
    waker.wake()  # after the end: nobody is there, and nothing happens
