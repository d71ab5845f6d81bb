"""A thousand connections of strangers to the ports of a job of real processes: nobody is answered, nothing changes."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq
from jobs import run_job
from ps_helpers import TIMEOUT_S, deadline, initialise, whole_numbers
from test_ps_processes import Processes, ended

from kvmpi import optim
from kvmpi.config import Config
from kvmpi.errors import AuthenticationError, ConfigError
from kvmpi.ps import PsClient
from kvmpi.ps.daemon import ServerDaemon
from kvmpi.trace import Recorder
from kvmpi.wire import Connection, Context, Readiness, create_keys, encode, handshake, new_context
from kvmpi.wire import messages as m
from kvmpi.wire.keys import new_keys, read_keys

COUNT = 50_000
GREETING_BYTES, HELLO_BYTES, WELCOME_BYTES = 64, 2 + 200, 2 + 168
CURVE_GREETING = b"\xff" + bytes(7) + b"\1\x7f\3\0CURVE" + bytes(47)
ORDERS = [
    [encode(m.Hello(1, 1, "sync", 0, 1, 1 << 62))],
    [encode(m.Push(1, "k", 0, 1, "none", True)), bytes(4 * COUNT)],
    [encode(m.Register(1, "server", 0, -1, 2, 1 << 62, "h", ["tcp://127.0.0.1:5"]))],
    [encode(m.View(1 << 62, 0, [], [], [m.Lost(0, 1, 1 << 62, "x")]))],
    [b"noise", b"\0" * 1000],
]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    processes.close()


@pytest.fixture(autouse=True)
def _many_descriptors() -> Iterator[None]:
    """This process holds the other end of every connection."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 4096:
        pytest.skip(f"this process may open {limits[1]} descriptors only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 4096), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# ---- strangers: each kind opens ``count`` connections to ``port``; the result says how many bytes or messages came


def plain(words: bytes) -> Callable[[int, int], int]:
    """Connections that say ``words`` and stay; the most that one is told in answer is a greeting."""

    def attack(port: int, count: int) -> int:
        sockets, told = [], 0
        for _ in range(count):
            raw = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
            sockets.append(raw)
            try:
                raw.sendall(words)
            except OSError:
                pass  # it has hung up already
        for raw in sockets:
            told += max(0, _read_to_the_end(raw) - GREETING_BYTES)
            raw.close()
        return told

    return attack


def _read_to_the_end(raw: socket.socket) -> int:
    read = 0
    try:
        while data := raw.recv(1 << 16):
            read += len(data)
    except ConnectionError:
        pass
    return read


def zmq_peers(secure: Callable[[zmq.Socket[Any]], None]) -> Callable[[int, int], int]:
    """ZeroMQ peers that give orders; how many get an answer."""

    def attack(port: int, count: int) -> int:
        with zmq.Context() as context:
            peers = []
            for i in range(count):
                peer = context.socket(zmq.DEALER)
                peer.linger = 0
                secure(peer)
                peer.connect(f"tcp://127.0.0.1:{port}")
                try:
                    peer.send_multipart(ORDERS[i % len(ORDERS)], zmq.NOBLOCK)
                except zmq.Again:
                    pass  # it was refused before it could give its order
                peers.append(peer)
            answered = int(bool(peers[-1].poll(500))) + sum(bool(peer.poll(0)) for peer in peers[:-1])
            for peer in peers:
                peer.close()
            return answered

    return attack


def curve(listener_public: bytes) -> Callable[[zmq.Socket[Any]], None]:
    def secure(peer: zmq.Socket[Any]) -> None:
        own = new_keys().member
        peer.curve_serverkey = listener_public
        peer.curve_publickey, peer.curve_secretkey = own.public, own.secret

    return secure


def replayed(said: bytes) -> Callable[[int, int], int]:
    """What a member has said, byte for byte; how many bytes come after the listener's answer to its first words."""
    hello, rest = said[: GREETING_BYTES + HELLO_BYTES], said[GREETING_BYTES + HELLO_BYTES :]

    def attack(port: int, count: int) -> int:
        told = 0
        for _ in range(count):
            with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as raw:
                raw.sendall(hello)
                left = GREETING_BYTES + WELCOME_BYTES
                while left and (data := raw.recv(left)):
                    left -= len(data)
                assert left == 0, "a recording of something else"
                try:
                    raw.sendall(rest)
                except OSError:
                    pass
                told += _read_to_the_end(raw)
        return told

    return attack


def record(context: Context[Any], port: int, message: m.Message) -> bytes:
    """What a member says that asks ``message`` and is answered."""
    said = bytearray()

    def pump(source: socket.socket, target: socket.socket, heard: bytearray) -> None:
        try:
            while data := source.recv(1 << 16):
                heard += data
                target.sendall(data)
        except OSError:
            pass

    with socket.create_server(("127.0.0.1", 0)) as relay, socket.create_connection(("127.0.0.1", port)) as behind:
        connection = Connection(context, f"tcp://127.0.0.1:{relay.getsockname()[1]}", 1 << 20)
        connection.send(message)
        with relay.accept()[0] as front:
            threading.Thread(target=pump, args=(behind, front, bytearray()), daemon=True).start()
            threading.Thread(target=pump, args=(front, behind, said), daemon=True).start()
            readiness = Readiness([connection])
            while connection.recv() is None:
                assert readiness.wait(TIMEOUT_S)
        connection.close()
    return bytes(said)


# ---- the job


class Trainer:
    """A client whose rounds go on in a thread, each with a value that is known."""

    def __init__(self, config: Config) -> None:
        self.ps = PsClient(config, store=1, mode="sync", client=0, num_clients=1, recorder=Recorder())
        self.ps.connect(deadline())
        initialise([self.ps], {"k": COUNT}, optim.Test(lr=-1.0))
        self.rounds = 0
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        out = np.empty(COUNT, "f4")
        try:
            while not self._stop.wait(0.002):
                self.ps.pushpull("k", np.ones(COUNT, "f4"), out, deadline()).wait()
                self.rounds += 1
                np.testing.assert_array_equal(out, whole_numbers(COUNT) + self.rounds)
                self.ps.barrier(deadline()).wait()
        except BaseException as error:
            self._error = error

    def rounds_go_on(self) -> None:
        target = self.rounds + 3
        while self.rounds < target:
            self._thread.join(0.01)
            assert self._thread.is_alive(), self._error

    def close(self) -> None:
        self._stop.set()
        self._thread.join(TIMEOUT_S)
        assert self._error is None, self._error
        self.ps.close(deadline())


def test_a_thousand_strangers_change_nothing(processes: Processes) -> None:
    processes.env["KVMPI_HANDSHAKE_S"] = "2"
    config, scheduler, servers = processes.job(2)
    trainer = Trainer(Config.from_env({**config.to_env(), "KVMPI_TRANSPORT": "tcp"}))
    trainer.rounds_go_on()
    listening = [int(config.scheduler.rsplit(":", 1)[1])]
    listening += [int(link.endpoint.rsplit(":", 1)[1]) for link in trainer.ps._link._connections.values()][1:]
    assert len(set(listening)) == 3
    context = new_context(config)
    attacks = {
        "noise": plain(np.random.default_rng(1).bytes(3000)),
        "silence": plain(b""),
        "half a greeting": plain(CURVE_GREETING[:30]),
        "a greeting": plain(CURVE_GREETING),
        "a false hello": plain(CURVE_GREETING + b"\4\xc8\5HELLO" + bytes(194)),
        "NULL": zmq_peers(lambda peer: None),
        "another listener's key": zmq_peers(curve(new_keys().listener.public)),
        "an unlisted key": zmq_peers(curve(read_keys(config.keys).listener.public)),
    }
    recordings = {port: record(context, port, m.Bye(1) if port != listening[0] else m.Leave(1)) for port in listening}
    watched = [psutil.Process(process.pid) for process in (scheduler, *servers)]
    trainer.rounds_go_on()
    before = [(process.num_fds(), process.memory_info().rss) for process in watched]

    told: dict[tuple[str, int], int] = {}
    threads = [
        threading.Thread(target=lambda name=name, port=port: told.update({(name, port): attacks[name](port, 42)}))
        for name in attacks
        for port in listening
    ]
    threads += [
        threading.Thread(target=lambda port=port: told.update({("replay", port): replayed(recordings[port])(port, 10)}))
        for port in listening
    ]
    for thread in threads:
        thread.start()
    trainer.rounds_go_on()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert told == {(name, port): 0 for name in [*attacks, "replay"] for port in listening}
    trainer.rounds_go_on()

    for process, (num_fds, rss) in zip(watched, before, strict=True):
        for _ in range(500):  # the last ones are being hung up on
            if process.num_fds() <= num_fds:
                break
            trainer.rounds_go_on()
        assert process.num_fds() <= num_fds
        assert process.memory_info().rss - rss < 32 << 20
    trainer.close()
    context.destroy(linger=0)
    for process in (*servers, scheduler):
        process.terminate()
        status, stderr = ended(process)
        assert status == 0
        lines = stderr.splitlines()
        assert 0 < len(lines) < 20
        assert all("its key is not one of this job" in line for line in lines), stderr


def test_a_member_finds_a_place_among_silent_strangers(processes: Processes) -> None:
    """More connections than the shell would let a server have, all of them waiting."""
    processes.env["KVMPI_HANDSHAKE_S"] = "300"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = max(256, len(os.listdir("/proc/self/fd")) + 64)  # this process starts them, and may have many itself
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
    try:
        config, _, _ = processes.job(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    port = int(config.scheduler.rsplit(":", 1)[1])
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(few + 144)]
    Trainer(config).close()
    for raw in strangers:
        raw.close()


@pytest.mark.parametrize("changes", [{"keys": "other"}, {"security": "off"}], ids=str)
def test_a_process_that_is_no_member_learns_it_soon(
    start_job: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str]
) -> None:
    monkeypatch.setattr(handshake, "_PATIENCE_S", 0.3)
    if "keys" in changes:
        changes = {"keys": str(tmp_path / changes["keys"])}
        create_keys(changes["keys"])
    job = start_job(1)
    with pytest.raises(AuthenticationError, match=f"listener at {job.config.scheduler}"):
        job.new_client(0, 1, **changes).connect(deadline())
    config = replace(job.config, **changes)
    context = new_context(config)
    with pytest.raises(AuthenticationError, match=f"listener at {job.config.scheduler}"):
        ServerDaemon(config, 1).run(context)
    context.destroy(linger=0)
    job.connect(1)[0].close(deadline())


def test_without_keys_a_client_says_what_is_missing(start_job: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="KVMPI_KEYS names no file"):
        start_job(1).new_client(0, 1, keys="").connect(deadline())


def test_the_launcher_keeps_the_keys_to_the_members(tmp_path: Path) -> None:
    """No secret in anybody's environment or command line; one private file, which goes with the job."""
    program = tmp_path / "look.py"
    program.write_text(
        "import json, os, sys, psutil\n"
        "import numpy as np, kvmpi\n"
        "kv = kvmpi.create('dist_sync', transport='tcp')\n"
        "kv.init('k', np.zeros(3, 'f4'))\n"
        "launcher = psutil.Process().parent()\n"
        "family = [launcher, *launcher.children(recursive=True)]\n"
        "seen = [[process.cmdline(), process.environ()] for process in family]\n"
        "path = os.environ['KVMPI_KEYS']\n"
        "status = os.stat(path)\n"
        "print('SEEN', json.dumps([status.st_mode, path, open(path).read(), seen]))\n"
        "kv.close()\n"
    )
    done = run_job("-n 1 -s 2", program)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "SEEN" in line]
    mode, path, content, seen = json.loads(line.split("SEEN ", 1)[1])
    assert len(seen) >= 5  # launcher, scheduler, two servers, worker
    assert mode & 0o777 == 0o600
    assert not Path(path).exists()
    keys = json.loads(content)
    for name in ("listener", "member"):
        assert keys[name]["secret"] not in json.dumps(seen)
        assert keys[name]["secret"] not in done.stdout.replace(line, "") + done.stderr
