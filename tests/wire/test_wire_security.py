"""Who gets past a listener on TCP: members of its job, and nobody else, whatever they know or have recorded."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from zmq.utils import z85

from kvmpi.config import MOST_SECONDS, Config
from kvmpi.errors import AuthenticationError, ConfigError
from kvmpi.wire import Connection, Context, Listener, Readiness, encode, handshake, new_context
from kvmpi.wire import messages as m
from kvmpi.wire.gate import DOMAIN, Gate
from kvmpi.wire.keys import new_keys

LIMIT = 1 << 20
TIMEOUT_S = 60.0
GREETING_BYTES, HELLO_BYTES, WELCOME_BYTES = 64, 2 + 200, 2 + 168

NewContext = Callable[..., Context[Any]]


@pytest.fixture
def context(member: NewContext) -> Context[Any]:
    return member("A", handshake_s=1.0)


@pytest.fixture
def listener(context: Context[Any]) -> Listener:
    listener = Listener(context, LIMIT)
    listener.bind_tcp("127.0.0.1")
    return listener


def port_of(listener: Listener) -> int:
    return int(listener.endpoints[0].rsplit(":", 1)[1])


def within(what: Callable[[], Any], *sources: Any, timeout_s: float = TIMEOUT_S) -> Any:
    """The first result of ``what`` that is not None."""
    deadline, readiness = time.monotonic() + timeout_s, Readiness(sources)
    while (result := what()) is None:
        assert time.monotonic() < deadline, "it did not happen"
        readiness.wait(0.05)
    return result


def is_served(listener: Listener, connection: Connection) -> None:
    """``connection`` gets an answer, and ``listener`` hears nobody else meanwhile."""
    connection.send(m.Bye(77))
    route, message, _ = within(listener.recv, listener)
    assert message == m.Bye(77)
    listener.send(route, m.Ack(77, 0))
    assert within(connection.recv, connection) == (m.Ack(77, 0), [])


def stranger_keys(context: Context[Any], tmp_path: Path) -> Path:
    """A file whose holder knows the listeners' public key, but has a member's key that is not listed."""
    content = json.loads(Path(context.config.keys).read_text())
    other = new_keys().member
    content["member"] = {"public": other.public.decode(), "secret": other.secret.decode()}
    path = tmp_path / "keys-stranger"
    path.touch(0o600)
    path.write_text(json.dumps(content))
    return path


# ---- members


def test_a_member_is_served_and_what_it_says_cannot_be_read_on_the_way(
    context: Context[Any], listener: Listener
) -> None:
    with recorded(port_of(listener)) as (port, heard):
        connection = Connection(context, f"tcp://127.0.0.1:{port}", LIMIT)
        payload = np.arange(10_000, dtype="f4")
        connection.send(m.Push(1, "a key to be seen", 0, 1, "none", False), [payload])
        route, _, payloads = within(listener.recv, listener)
        assert bytes(payloads[0]) == payload.tobytes()
        listener.send(route, m.Value(1, 0), [payload])
        assert bytes(within(connection.recv, connection)[1][0]) == payload.tobytes()
        assert len(heard) > 2 * payload.nbytes
        for secret in (b"a key to be seen", payload.tobytes()[4000:4016]):
            assert secret not in heard


def test_tcp_without_keys_is_refused_with_the_way_out(tmp_path: Path) -> None:
    context = new_context()
    listener = Listener(context, LIMIT)
    for _ in range(2):  # the second time just as well
        with pytest.raises(ConfigError, match=r"KVMPI_KEYS names no file; .*kvmpi run.*KVMPI_SECURITY=off"):
            listener.bind_tcp("127.0.0.1")
        with pytest.raises(ConfigError, match="KVMPI_KEYS names no file"):
            Connection(context, "tcp://127.0.0.1:1", LIMIT)
    assert listener.endpoints == []
    listener.bind_ipc(str(tmp_path / "s"))
    is_served(listener, Connection(context, listener.endpoints[0], LIMIT))
    context.destroy(linger=0)


def test_security_that_is_off_is_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    context = new_context(Config(security="off"))
    for _ in range(3):
        listener = Listener(context, LIMIT)
        listener.bind_tcp("127.0.0.1")
    is_served(listener, Connection(context, listener.endpoints[0], LIMIT))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "KVMPI_SECURITY=off" in caplog.text
    context.destroy(linger=0)


def test_peers_of_both_sockets_are_heard_in_turn_and_answered_apart(
    context: Context[Any], listener: Listener, tmp_path: Path
) -> None:
    listener.bind_ipc(str(tmp_path / "s"))
    peers = []
    for endpoint in listener.endpoints:
        peer = context.socket(zmq.DEALER)
        peer.linger = 0
        if endpoint.startswith("tcp"):
            context.secure_connection(peer)
        peer.setsockopt(zmq.ROUTING_ID, b"the same name")
        peer.connect(endpoint)
        peers.append(peer)
    for number in range(200):
        for kind, peer in enumerate(peers):
            peer.send(encode(m.Pull(number, kind, 0, 0)))
    for peer in peers:  # all 200 have come in when the last one is answered
        peer.send(encode(m.Bye(0)))
    time_of, routes = {0: [], 1: []}, {}
    for turn in range(402):
        route, message, _ = within(listener.recv, listener)
        kind = message.key if isinstance(message, m.Pull) else None
        if kind is not None:
            assert isinstance(message, m.Pull)
            assert message.request == len(time_of[kind])
            time_of[kind].append(turn)
            routes[kind] = route
    assert routes[0] != routes[1]
    for kind, route in routes.items():
        listener.send(route, m.Ack(kind, 0))
    for kind, peer in enumerate(peers):
        assert peer.poll(TIMEOUT_S * 1000)
        assert peer.recv() == encode(m.Ack(kind, 0))
        assert not peer.poll(0)


def test_neither_of_two_full_sockets_waits_for_the_other(
    context: Context[Any], listener: Listener, tmp_path: Path
) -> None:
    listener.bind_ipc(str(tmp_path / "s"))
    connections = [Connection(context, endpoint, LIMIT) for endpoint in listener.endpoints]

    def are_heard_in_turn() -> bool:
        for kind, connection in enumerate(connections):
            for number in range(100):
                connection.send(m.Pull(number, kind, 0, 0))
        order = [within(listener.recv, listener)[1].key for _ in range(200)]
        return {0, 1} <= set(order[:20]) and 20 <= sum(order[:60]) <= 40

    # When all have come in, which cannot be seen; on a busy machine one may have nothing to be heard for a moment.
    assert any(are_heard_in_turn() for _ in range(30))


# ---- strangers


def test_another_jobs_member_learns_soon_that_this_is_not_its_job(
    member: NewContext, listener: Listener, context: Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "_PATIENCE_S", 0.3)
    connection = Connection(member("B"), listener.endpoints[0], LIMIT)
    connection.send(m.Bye(1))
    with pytest.raises(AuthenticationError, match=rf"{listener.endpoints[0]} hangs up .* other keys.*KVMPI_KEYS"):
        within(connection.recv, connection)
    is_served(listener, Connection(context, listener.endpoints[0], LIMIT))


def test_an_unlisted_key_is_refused_and_its_holder_learns_it(
    member: NewContext, listener: Listener, context: Context[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = member("B", keys=str(stranger_keys(context, tmp_path)))
    for _ in range(30):
        connection = Connection(stranger, listener.endpoints[0], LIMIT)
        connection.send(m.Bye(1))
        with pytest.raises(AuthenticationError, match="refused this process's key"):
            within(connection.recv, connection)
    refusals = [record for record in caplog.records if "its key is not one of this job" in record.getMessage()]
    assert len(refusals) == 10, "each is in the log, or only some; but a flood must not be"
    assert "127.0.0.1" in refusals[0].getMessage()
    is_served(listener, Connection(context, listener.endpoints[0], LIMIT))


def test_no_two_handshakes_are_followed_under_one_name(
    listener: Listener, context: Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a descriptor, as pyzmq names them, a socket could have the name of one that is about to be closed."""
    names, original = list[str | None](), zmq.Socket.get_monitor_socket

    def note(self: Any, events: int | None = None, addr: str | None = None) -> Any:
        names.append(addr)
        return original(self, events, addr)

    monkeypatch.setattr(zmq.Socket, "get_monitor_socket", note)
    connections = [Connection(context, listener.endpoints[0], LIMIT) for _ in range(3)]
    assert len(set(names)) == 3
    assert all(names)
    is_served(listener, connections[2])


@pytest.mark.parametrize("listening", ["curve", "off"])
def test_processes_with_and_without_security_do_not_talk(member: NewContext, listening: str) -> None:
    connecting = "off" if listening == "curve" else "curve"
    listener = Listener(member("A", security=listening), LIMIT)
    listener.bind_tcp("127.0.0.1")
    connection = Connection(member("A", security=connecting), listener.endpoints[0], LIMIT)
    connection.send(m.Bye(1))
    # Both sides hang up at once; whether this one has read the other's greeting before is a matter of luck.
    with pytest.raises(AuthenticationError, match=r"(has another KVMPI_SECURITY|hangs up at every handshake)"):
        within(connection.recv, connection)
    assert listener.recv() is None


def test_a_listener_that_is_not_there_yet_is_waited_for(member: NewContext, context: Context[Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    connection = Connection(context, f"tcp://127.0.0.1:{port}", LIMIT)
    connection.send(m.Bye(77))
    for _ in range(10):
        Readiness([connection]).wait(0.05)
        assert connection.recv() is None
    listener = Listener(context, LIMIT)
    listener.bind_tcp("127.0.0.1", port)
    assert within(listener.recv, listener)[1] == m.Bye(77)


def test_a_relay_may_hang_up_until_its_listener_is_there(context: Context[Any], listener: Listener) -> None:
    with socket.create_server(("127.0.0.1", 0)) as relay:
        relay.settimeout(TIMEOUT_S)
        connection = Connection(context, f"tcp://127.0.0.1:{relay.getsockname()[1]}", LIMIT)
        connection.send(m.Bye(77))
        for _ in range(5):
            relay.accept()[0].close()
            assert connection.recv() is None
        incoming = relay.accept()[0]
        with socket.create_connection(("127.0.0.1", port_of(listener))) as outgoing:
            for source, target in ((incoming, outgoing), (outgoing, incoming)):
                threading.Thread(target=pump, args=(source, target, bytearray()), daemon=True).start()
            assert within(listener.recv, listener)[1] == m.Bye(77)
            incoming.close()


def test_a_listener_that_is_too_busy_for_handshakes_is_waited_for(
    context: Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(handshake.time, "monotonic", lambda: now_s)
    connection = Connection(context, "tcp://127.0.0.1:1", LIMIT)
    watch = connection._handshake
    assert watch is not None
    for _ in range(20):
        now_s += context.config.handshake_s + 0.1
        watch._note_hang_up()
    for _ in range(14):
        now_s += 0.2
        watch._note_hang_up()
    now_s += 0.3
    with pytest.raises(AuthenticationError):
        watch._note_hang_up()


def test_a_peer_that_was_let_in_once_waits_when_somebody_else_takes_the_port(
    member: NewContext, context: Context[Any], listener: Listener
) -> None:
    """A lost peer is for heartbeats and timeouts to judge: an answer on its port proves nothing."""
    connection = Connection(context, listener.endpoints[0], LIMIT)
    is_served(listener, connection)
    port = port_of(listener)
    listener.close()
    other = Listener(member("B"), LIMIT)
    deadline = time.monotonic() + TIMEOUT_S
    while not other.endpoints:
        try:
            other.bind_tcp("127.0.0.1", port)
        except ConfigError:
            assert time.monotonic() < deadline
            Readiness([connection]).wait(0.01)
    for _ in range(20):
        connection.send(m.Bye(2))
        Readiness([connection]).wait(0.02)
        assert connection.recv() is None
    assert other.recv() is None


def test_without_its_gate_a_listener_lets_nobody_in(context: Context[Any], listener: Listener) -> None:
    inside = Connection(context, listener.endpoints[0], LIMIT)
    is_served(listener, inside)
    context._close_gate()
    late = Connection(context, listener.endpoints[0], LIMIT)
    late.send(m.Bye(5))
    for _ in range(10):
        Readiness([late]).wait(0.05)
        assert listener.recv() is None
    is_served(listener, inside)


LISTED = new_keys().member
QUESTION = [b"1.0", b"7", DOMAIN, b"192.0.2.1", b"name", b"CURVE", z85.decode(LISTED.public)]


def test_the_gate_opens_for_listed_keys_only(context: Context[Any]) -> None:
    gate = Gate(context, [LISTED.public])
    try:
        assert gate.answer(QUESTION) == [b"1.0", b"7", b"200", b"OK", b"", b""]
        other = z85.decode(new_keys().member.public)
        changes = {0: b"2.0", 2: b"", 5: b"NULL", 6: other}
        wrong = [[change if i == at else frame for i, frame in enumerate(QUESTION)] for at, change in changes.items()]
        wrong += [QUESTION[:count] for count in range(7)]
        wrong += [[*QUESTION, b"more"], [*QUESTION[:6], LISTED.public], [*QUESTION[:6], QUESTION[6][:-1]]]
        wrong += [[*QUESTION[:5], b"PLAIN", b"user", b"password"], [b"\xff"] * 7, [b""] * 100]
        for question in wrong:
            assert gate.answer(question)[2] == b"400", question
    finally:
        gate.close()


def test_a_flood_of_refusals_does_not_fill_the_log(context: Context[Any], caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(context, [])
    with caplog.at_level(logging.DEBUG):
        for _ in range(3000):
            gate.answer(QUESTION)
    gate.close()
    assert len(caplog.records) == 10 + 3


# ---- bytes


def pump(source: socket.socket, target: socket.socket, heard: bytearray) -> None:
    try:
        while data := source.recv(1 << 16):
            heard += data
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


@contextmanager
def recorded(port: int) -> Iterator[tuple[int, bytearray]]:
    """A relay to ``port`` for one connection: its own port, and what has gone through it from either side."""
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(("127.0.0.1", port)) as behind:

        def serve() -> None:
            front = server.accept()[0]
            threading.Thread(target=pump, args=(behind, front, heard), daemon=True).start()
            pump(front, behind, heard)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1], heard


def answer_to(port: int, said: bytes, then: bytes = b"", expected: int = 0) -> bytes:
    """All that a listener says to a peer that says ``said``, ``then`` after so many bytes, and waits for the end."""
    answer = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as raw:
        try:
            raw.sendall(said)
            while len(answer) < expected and (data := raw.recv(expected - len(answer))):
                answer += data
            raw.sendall(then)
            while data := raw.recv(1 << 16):
                answer += data
        except ConnectionError:
            pass  # it has hung up
    return bytes(answer)


SIGNATURE = b"\xff" + bytes(7) + b"\1\x7f"
GREETINGS: dict[str, bytes] = {
    "nothing": b"",
    "ZMTP 1.0": b"\1\0\3\0hi",
    "ZMTP 2.0": SIGNATURE + b"\1\5\0\0\2\0hi",
    "half": SIGNATURE + b"\3\0CUR",
    "NULL": SIGNATURE + b"\3\0NULL" + bytes(48) + b"\4\x19\5READY\x0bSocket-Type\0\0\0\6DEALER\0\2hi",
    "PLAIN": SIGNATURE + b"\3\0PLAIN" + bytes(47) + b"\4\x0a\5HELLO\1a\1b",
    "CURVE, no HELLO": SIGNATURE + b"\3\0CURVE" + bytes(47) + b"\4\x19\5READY\x0bSocket-Type\0\0\0\6DEALER",
    "CURVE, empty HELLO": SIGNATURE + b"\3\0CURVE" + bytes(47) + b"\4\xc8\5HELLO" + bytes(194),
    "CURVE, a message": SIGNATURE + b"\3\0CURVE" + bytes(47) + b"\0\2hi" * 50,
    "CURVE, a large frame": SIGNATURE + b"\3\0CURVE" + bytes(47) + b"\2" + (1 << 40).to_bytes(8, "big"),
    "noise": np.random.default_rng(3).bytes(5000),
}


def test_times_may_be_as_long_as_settings_allow(member: NewContext) -> None:
    """libzmq counts milliseconds in 32 bits."""
    context = member("A", handshake_s=MOST_SECONDS)
    listener = Listener(context, LIMIT)
    listener.bind_tcp("127.0.0.1")
    is_served(listener, Connection(context, listener.endpoints[0], LIMIT, silence_s=MOST_SECONDS))


@pytest.mark.parametrize("name", GREETINGS)
def test_whoever_does_not_finish_the_handshake_is_hung_up_on(
    context: Context[Any], listener: Listener, name: str
) -> None:
    started_s = time.monotonic()
    assert len(answer_to(port_of(listener), GREETINGS[name])) <= GREETING_BYTES
    assert time.monotonic() - started_s < 5 * context.config.handshake_s
    assert listener.recv() is None
    is_served(listener, Connection(context, listener.endpoints[0], LIMIT))


def test_a_recorded_conversation_cannot_be_said_again(context: Context[Any], listener: Listener) -> None:
    said = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = Connection(context, f"tcp://127.0.0.1:{server.getsockname()[1]}", LIMIT)
        connection.send(m.Bye(1))
        front = server.accept()[0]
        with socket.create_connection(("127.0.0.1", port_of(listener))) as behind:
            threading.Thread(target=pump, args=(behind, front, bytearray()), daemon=True).start()
            threading.Thread(target=pump, args=(front, behind, said), daemon=True).start()
            is_heard = within(listener.recv, listener)
            assert is_heard[1] == m.Bye(1)
            front.close()
    connection.close()
    hello, rest = bytes(said[: GREETING_BYTES + HELLO_BYTES]), bytes(said[GREETING_BYTES + HELLO_BYTES :])
    assert len(rest) > 300, "the rest of the handshake, and a message"
    welcome = GREETING_BYTES + WELCOME_BYTES  # the listener's short-term key, in a box: anew for everyone
    for then in (rest, rest[:-1], b""):
        assert len(answer_to(port_of(listener), hello, then, welcome)) == welcome
        assert listener.recv() is None
    is_served(listener, Connection(context, listener.endpoints[0], LIMIT))
