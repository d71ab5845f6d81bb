"""Peers of different versions: both ends say so at once, with both versions, who they are and what to do."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from ps_helpers import deadline

from kvmpi.config import Config
from kvmpi.deadline import Deadline
from kvmpi.errors import ProtocolError
from kvmpi.ps.client import PsClient
from kvmpi.ps.daemon import SchedulerDaemon, ServerDaemon
from kvmpi.trace import Recorder
from kvmpi.wire import PROTOCOL_VERSION, create_keys, decode, encode, new_context
from kvmpi.wire import messages as m
from kvmpi.wire.refusal import encode_refusal

MINE, OTHER = PROTOCOL_VERSION, PROTOCOL_VERSION + 5
#: Of a job whose calls may take a minute: what comes within this time was no time-out.
PROMPT_S = 15.0
WHAT_TO_DO = "install the same version of kvmpi on all hosts"

#: A process that speaks another version: all of it, or only what listens in it.
_SPEAK = f"""
    from kvmpi.wire import encoding, sockets

    def speak(version):
        encoding.PROTOCOL_VERSION, encoding.BEGINNING = version, b"KVM" + bytes([version])

    def as_other(method):
        def wrapped(*args):
            speak({OTHER})
            try:
                return method(*args)
            finally:
                speak({MINE})
        return wrapped

    if {{whole}}:
        speak({OTHER})
    else:
        for name in ("send", "send_all", "recv"):
            setattr(sockets.Listener, name, as_other(getattr(sockets.Listener, name)))
"""
_SERVER = """
    import sys
    from kvmpi.ps.__main__ import main
    sys.argv[1:] = ["server"]
    try:
        main("server")
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
"""
_CLIENT = """
    from kvmpi.config import Config
    from kvmpi.deadline import Deadline
    from kvmpi.ps.client import PsClient
    from kvmpi.trace import Recorder
    client = PsClient(Config.from_env(), store=1, mode="sync", client=3, num_clients=4, recorder=Recorder())
    try:
        client.connect(Deadline(60.0))
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
"""


class Process:
    """A process that runs ``program`` and speaks the other version; ``said`` is what it has written."""

    def __init__(self, program: str, config: Config, *, whole: bool, **settings: Any) -> None:
        code = "import sys\n" + textwrap.dedent(_SPEAK.format(whole=whole)) + textwrap.dedent(program)
        env = {**config.to_env(), **{f"KVMPI_{name.upper()}": str(value) for name, value in settings.items()}}
        self.said: list[str] = []
        self.popen = subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True)
        assert self.popen.stderr is not None
        self._reader = threading.Thread(target=lambda errors=self.popen.stderr: self.said.extend(errors))
        self._reader.start()

    def error(self) -> str:
        """What it says last, when it fails."""
        assert self.popen.wait(PROMPT_S) == 1, self.said
        self._reader.join()
        return self.said[-1]

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self._reader.join()
        assert self.popen.stderr is not None
        self.popen.stderr.close()


@contextmanager
def other_version(program: str, config: Config, *, whole: bool, **settings: Any) -> Iterator[Process]:
    process = Process(program, config, whole=whole, **settings)
    try:
        yield process
    finally:
        process.close()


def names(text: str, *parts: str) -> None:
    """``text`` has both versions, the roles, and what to do."""
    for part in (f"speaks version {MINE}", f"speaks version {OTHER}", WHAT_TO_DO, *parts):
        assert part in text, f"{part!r} is missing: {text}"


def wait_for(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    until = Deadline(PROMPT_S)
    while not condition():
        assert until.remaining_s() > 0, what()
        time.sleep(0.02)


def logged(lines: Callable[[], list[str]], *parts: str) -> None:
    """Somebody who listens says who it was, both versions, and what to do."""

    def found() -> bool:
        both = (f"version {MINE}", f"version {OTHER}", WHAT_TO_DO)
        return any(all(part in line for part in (*both, *parts)) for line in lines())

    wait_for(found, lambda: f"{parts} is not in the log: {lines()}")


class Ends:
    """The scheduler or a server in a thread, and what it has ended with."""

    def __init__(self, run: Callable[[], None], stop: Callable[[], None]) -> None:
        self.error: Exception | None = None
        self._run, self.stop = run, stop
        self._thread = threading.Thread(target=self._guarded, daemon=True)
        self._thread.start()

    def _guarded(self) -> None:
        try:
            self._run()
        except Exception as error:
            self.error = error

    def join(self) -> Exception | None:
        self._thread.join(PROMPT_S)
        assert not self._thread.is_alive()
        return self.error


@pytest.fixture(params=["curve", "ipc"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Config, Callable[[int], Ends]]]:
    """A scheduler in a thread: the settings of its job, and what starts a server in another thread."""
    settings: dict[str, Any] = {"num_servers": 2, "replicas": 1, "timeout_s": 60.0, "num_workers": 4}
    if request.param == "ipc":
        settings.update(scheduler=f"ipc://{tmp_path}/scheduler", job_dir=str(tmp_path))
    else:
        settings.update(keys=str(tmp_path / "keys"))
        create_keys(settings["keys"])
    context = new_context(Config(**settings))
    endpoint: list[str] = []
    scheduler = SchedulerDaemon(Config(**settings))
    ends = [Ends(lambda: scheduler.run(context, endpoint.append), scheduler.stop)]
    wait_for(lambda: bool(endpoint), lambda: f"no scheduler: {ends[0].error}")
    config = Config(**{**settings, "scheduler": endpoint[0]})

    def start_server(rank: int) -> Ends:
        server = ServerDaemon(config, rank)
        ends.append(Ends(lambda: server.run(context), server.stop))
        return ends[-1]

    yield config, start_server
    for end in ends:
        end.stop()
        end.join()
    assert ends[0].error is None, "who listens goes on"
    context.destroy(linger=0)


Job = tuple[Config, Callable[[int], Ends]]


def test_client_and_scheduler(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    config, _ = job
    with other_version(_CLIENT, config, whole=True) as process:
        error = process.error()
        assert error.startswith("ProtocolError: ")
        names(error, "client 3", "the scheduler at ")
        logged(lambda: caplog.messages, "the scheduler on ", "client 3 in store 1 on ")


def test_server_and_scheduler(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    config, _ = job
    with other_version(_SERVER, config, whole=True, rank=1) as process:
        error = process.error()
        assert error.startswith("ProtocolError: ")
        names(error, "server 1 on ", "the scheduler at ")
        logged(lambda: caplog.messages, "the scheduler on ", "server 1 on ")


def test_client_and_server(job: Job) -> None:
    config, start_server = job
    config = Config(**{**vars(config), "replicas": 0})
    start_server(0)
    client = PsClient(config, store=1, mode="sync", client=3, num_clients=4, recorder=Recorder())
    with other_version(_SERVER, config, whole=False, rank=1, replicas=0) as process:
        started_s = time.monotonic()
        with pytest.raises(ProtocolError) as raised:
            client.connect(deadline())
        assert time.monotonic() - started_s < PROMPT_S
        names(str(raised.value), "client 3 in store 1 on ", "server 1 at ")
        logged(process.said.copy, "server 1 on ", "client 3 in store 1 on ")
        assert process.popen.poll() is None, "who listens goes on"


def test_server_and_server(job: Job) -> None:
    config, start_server = job
    head = start_server(0)
    with other_version(_SERVER, config, whole=False, rank=1) as process:
        error = head.join()
        assert type(error) is ProtocolError
        names(str(error), "server 0 on ", "server 1 at ")
        logged(process.said.copy, "server 1 on ", "server 0 on ")
        assert process.popen.poll() is None, "who listens goes on"


# ---- the refusal by itself


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[zmq.Socket[Any]]:
    """A bare socket that is connected to a scheduler."""
    config = Config(num_servers=1, scheduler=f"ipc://{tmp_path}/scheduler")
    context = new_context(config)
    daemon = SchedulerDaemon(config)
    end = Ends(lambda: daemon.run(context, lambda _: None), daemon.stop)
    with context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvtimeo = 5000
        socket.connect(config.scheduler)
        yield socket
    daemon.stop()
    assert end.join() is None
    context.destroy(linger=0)


def test_a_refusal_has_no_version_of_its_own_and_is_never_answered(scheduler: zmq.Socket[Any]) -> None:
    scheduler.send(b"KVM" + bytes([OTHER]) + b"whatever this version has here")
    refusal = scheduler.recv()
    assert refusal[:5] == b"KVM\0" + bytes([MINE])
    assert refusal[5:].decode().startswith("the scheduler on ")
    refusals = (encode_refusal(OTHER, "client 1"), encode_refusal(MINE, "an echo"), b"KVM\0", b"KVM\0\xff\xff\n\xff")
    for frame in refusals:
        scheduler.send(frame)
    scheduler.send(encode(m.Leave(7)))
    assert decode(scheduler.recv()) == m.Ack(7, 0), "an answer to a refusal would have come first"


def test_the_text_of_a_refusal_cannot_write_lines_of_a_log(
    scheduler: zmq.Socket[Any], caplog: pytest.LogCaptureFixture
) -> None:
    scheduler.send(encode_refusal(OTHER, "x\n\x1b[2Jserver 0 is lost" + "y" * 9999))
    logged(lambda: caplog.messages, "x??[2Jserver 0 is lost")
    assert all(line.isprintable() and len(line) < 1000 for line in caplog.messages)


def test_a_flood_does_not_fill_the_log(scheduler: zmq.Socket[Any], caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(100):
        scheduler.send(b"KVM" + bytes([OTHER]))
    assert [scheduler.recv()[:4] for _ in range(100)] == [b"KVM\0"] * 100
    assert 1 <= sum(WHAT_TO_DO in line for line in caplog.messages) <= 10


class OldListener:
    """A listener that does not know the refusal: it answers everything in its own version."""

    def __init__(self, endpoint: str, version: int) -> None:
        self.heard: list[bytes] = []
        self._version, self._stopped = version, False
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.rcvtimeo = 50
        self._socket.bind(endpoint)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        answer = b"KVM" + bytes([self._version]) + encode(m.Failure(-1, "ProtocolError", "protocol version"))[4:]
        while not self._stopped:
            try:
                route, header = self._socket.recv_multipart()
            except zmq.Again:
                continue
            if header[:3] == b"KVM":  # not the offer of shared memory, which needs no answer
                self.heard.append(header)
            self._socket.send_multipart([route, answer])

    def close(self) -> None:
        self._stopped = True
        self._thread.join()
        self._context.destroy(linger=0)


def test_an_older_listener_that_knows_no_refusal(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/scheduler"
    old = OldListener(endpoint, MINE - 1)
    config = Config(num_servers=1, scheduler=endpoint, timeout_s=60.0)
    client = PsClient(config, store=1, mode="sync", client=0, num_clients=1, recorder=Recorder())
    started_s = time.monotonic()

    def told() -> list[bytes]:
        return [header for header in old.heard if header[:5] == b"KVM\0" + bytes([MINE])]

    try:
        with pytest.raises(ProtocolError, match=f"speaks version {MINE} .*the scheduler at .* version {MINE - 1}"):
            client.connect(deadline())
        assert time.monotonic() - started_s < PROMPT_S
        # The listener's answer to the offer of shared memory may come before the first message has left.
        wait_for(lambda: bool(told()), lambda: f"it is to be told who this is: {old.heard}")
        with pytest.raises(ProtocolError, match=WHAT_TO_DO):
            client.barrier(deadline()).wait()
    finally:
        old.close()
    assert len(told()) == 1, "it is told once"


def test_damaged_headers_of_this_version_are_no_other_version(
    scheduler: zmq.Socket[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for header in (b"", b"KV", b"KVM", b"KVX\x09", encode(m.Leave(1))[:-1]):
        scheduler.send(header)
        answer = decode(scheduler.recv())
        assert isinstance(answer, m.Failure)
        assert answer.error == "ProtocolError"
    assert not any(WHAT_TO_DO in line for line in caplog.messages)
