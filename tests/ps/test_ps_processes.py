"""``python -m kvmpi.ps scheduler|server`` as processes that are killed, stopped and started wrongly."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ps_helpers import TIMEOUT_S, whole_numbers

from kvmpi import optim
from kvmpi.config import Config
from kvmpi.deadline import Deadline
from kvmpi.errors import ConfigError, KVTimeoutError, ServerLostError
from kvmpi.ps import PsClient, descriptors
from kvmpi.ps.descriptors import Shortage
from kvmpi.trace import Recorder
from kvmpi.wire import create_keys

#: Of the operations that a dead peer must end. Long enough for a heartbeat on a machine that is busy.
CALL_S = 10.0
HEARTBEATS = {"KVMPI_HEARTBEAT_S": "0.2", "KVMPI_HEARTBEAT_TIMEOUT_S": "3"}


class Processes:
    """A scheduler and servers as processes of their own, ended by their ids."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
        self.env.update(HEARTBEATS, KVMPI_KEYS=str(folder / "keys"))
        self.running: list[subprocess.Popen[str]] = []

    def start(self, role: str, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvmpi.ps", role], env={**self.env, **env}, cwd=self.folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.running.append(process)
        return process

    def job(self, num_servers: int) -> tuple[Config, subprocess.Popen[str], list[subprocess.Popen[str]]]:
        scheduler = self.start("scheduler", KVMPI_NUM_SERVERS=str(num_servers))
        assert scheduler.stdout is not None
        endpoint = scheduler.stdout.readline().strip()
        assert endpoint.startswith("tcp://127.0.0.1:"), endpoint
        shared = {
            "KVMPI_SCHEDULER": endpoint,
            "KVMPI_NUM_SERVERS": str(num_servers),
            "KVMPI_JOB_DIR": str(self.folder),
            "KVMPI_KEYS": str(self.folder / "keys"),
        }
        servers = [self.start("server", KVMPI_RANK=str(rank), **shared) for rank in range(num_servers)]
        return Config.from_env({**HEARTBEATS, **shared}), scheduler, servers

    def close(self) -> None:
        for process in self.running:
            process.kill()
            process.communicate()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    processes.close()


def ended(process: subprocess.Popen[str], timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
    """Exit status and standard error."""
    _, stderr = process.communicate(timeout=timeout_s)
    return process.returncode, stderr


def connected(config: Config, num_clients: int, rule: optim.Rule | None = None) -> list[PsClient]:
    clients = []
    for rank in range(num_clients):
        ps = PsClient(config, store=1, mode="sync", client=rank, num_clients=num_clients, recorder=Recorder())
        ps.connect(Deadline(TIMEOUT_S))
        ps.add_keys([("k", (200_000,), "float32")])
        ps.init("k", whole_numbers(200_000) if rank == 0 else None, Deadline(TIMEOUT_S)).wait()
        if rule is not None:
            ps.set_rule(rule, Deadline(TIMEOUT_S)).wait()
        clients.append(ps)
    return clients


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_server_that_dies_or_freezes_ends_the_wait_for_it(processes: Processes, how: signal.Signals) -> None:
    config, _, servers = processes.job(2)
    first, second = connected(config, 2, optim.Test(lr=-1.0))
    values = [whole_numbers(200_000, rank) for rank in range(2)]
    outs = [np.empty(200_000, "f4") for _ in range(2)]
    works = [ps.pushpull("k", value, out, Deadline(TIMEOUT_S))
             for ps, value, out in zip((first, second), values, outs, strict=True)]  # fmt: skip
    for work, out in zip(works, outs, strict=True):
        work.wait()
        np.testing.assert_array_equal(out, np.sum([whole_numbers(200_000), *values], axis=0, dtype="f8"))
    waiting = first.pushpull("k", values[0], outs[0], Deadline(CALL_S))
    os.kill(servers[1].pid, how)
    # Twice the call's own time at most. The lost server is named, though the other one waits for client 1 as well.
    with pytest.raises((ServerLostError, KVTimeoutError)) as caught:
        waiting.wait(2 * CALL_S)
    for part in ("pushpull of key 'k' on client 0 of 2 at step 2", "server 1"):
        assert part in str(caught.value)
    with pytest.raises((ServerLostError, KVTimeoutError), match="server 1"):
        second.push("k", values[1], Deadline(CALL_S)).wait(2 * CALL_S)
    for ps in (first, second):
        ps.close(Deadline(TIMEOUT_S))
    if how == signal.SIGSTOP:
        os.kill(servers[1].pid, signal.SIGCONT)
        status, stderr = ended(servers[1])
        assert status == os.EX_TEMPFAIL, "a launcher may start it again"
        assert "ServerLostError: server 1 is out of the job" in stderr


#: Of a call that a stop outlasts, and longer than heartbeats may be missing.
STOPPED_CALL_S = 4.0
#: A client that asks for something when it is told to.
ASKS = f"""
import sys
import numpy as np
from kvmpi.config import Config
from kvmpi.deadline import Deadline
from kvmpi.ps import PsClient
from kvmpi.trace import Recorder, stall
config = Config.from_env()
stall.begin(config, "worker", 0)
ps = PsClient(config, store=1, mode="async", client=0, num_clients=1, recorder=Recorder())
ps.connect(Deadline({TIMEOUT_S}))
ps.add_keys([("k", (9,), "float32")])
ps.init("k", np.arange(9, dtype="f4"), Deadline({TIMEOUT_S})).wait()
out = np.empty(9, "f4")
print("ready", flush=True)
sys.stdin.readline()
work = ps.pull("k", out, Deadline({STOPPED_CALL_S}))
print("asked", flush=True)
work.wait()
print(*map(int, out), flush=True)
ps.close(Deadline({TIMEOUT_S}))
"""


def test_a_job_that_is_stopped_as_a_whole_goes_on(processes: Processes) -> None:
    """For longer than a call may take: whoever was stopped gives the others their time again."""
    config, scheduler, servers = processes.job(1)
    env = {**processes.env, **config.to_env()}
    client = subprocess.Popen(
        [sys.executable, "-c", ASKS], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    processes.running.append(client)
    assert client.stdin is not None
    assert client.stdout is not None
    assert client.stdout.readline() == "ready\n"
    for process in (scheduler, *servers):
        os.kill(process.pid, signal.SIGSTOP)
    client.stdin.write("\n")
    client.stdin.flush()
    assert client.stdout.readline() == "asked\n"
    os.kill(client.pid, signal.SIGSTOP)
    time.sleep(1.2 * STOPPED_CALL_S)  # what is tried is that time has passed
    for process in (client, scheduler, *servers):
        os.kill(process.pid, signal.SIGCONT)
    said, _ = client.communicate(timeout=TIMEOUT_S)
    assert (client.returncode, said) == (0, "0 1 2 3 4 5 6 7 8\n")


def test_a_scheduler_that_dies_ends_barriers_but_not_exchanges(processes: Processes) -> None:
    config, scheduler, _ = processes.job(1)
    (ps,) = connected(config, 1)
    loaded = Path(f"/proc/{scheduler.pid}/maps").read_text()
    assert "zmq" in loaded
    assert "numpy" not in loaded, "every job waits until its scheduler has read it"
    scheduler.kill()
    scheduler.wait()
    with pytest.raises(KVTimeoutError, match="no answer from the scheduler"):
        ps.barrier(Deadline(0.5)).wait(2 * CALL_S)
    out = np.empty(200_000, "f4")
    ps.pushpull("k", whole_numbers(200_000, 1), out, Deadline(TIMEOUT_S)).wait()
    np.testing.assert_array_equal(out, whole_numbers(200_000, 1))
    ps.close(Deadline(TIMEOUT_S))


def test_sigterm_ends_everyone_in_good_order(processes: Processes) -> None:
    processes.env["KVMPI_JOB_ID"] = "0123456789abcdef"  # as a launcher does
    config, scheduler, servers = processes.job(2)
    (ps,) = connected(config, 1)
    for process in (scheduler, *servers):
        process.send_signal(signal.SIGINT)  # is for the launcher to judge
    ps.push("k", whole_numbers(200_000), Deadline(TIMEOUT_S)).wait()
    for process in (*servers, scheduler):
        process.send_signal(signal.SIGTERM)
    for process in (*servers, scheduler):
        assert ended(process, 5.0) == (0, "")
    ps.abort()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_nobody_has_launched_ends_before_its_scheduler_came(
    processes: Processes, how: signal.Signals
) -> None:
    server = processes.start(
        "server",
        KVMPI_SCHEDULER=f"ipc://{processes.folder}/nobody",
        KVMPI_RANK="0",
        KVMPI_JOB_DIR=str(processes.folder),
    )
    while not (processes.folder / "server-0").exists():
        assert server.poll() is None
    server.send_signal(how)
    assert ended(server, 5.0)[0] == 0


def test_a_port_in_use_is_said_clearly(processes: Processes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, stderr = ended(processes.start("scheduler", KVMPI_SCHEDULER_PORT=str(port)))
    assert status == 1
    assert f"ConfigError: cannot listen on tcp://127.0.0.1:{port}: the address is in use" in stderr
    assert "Traceback" not in stderr


WRONG_STARTS = {
    "no scheduler": ({}, "NotLaunchedError: a server needs KVMPI_SCHEDULER and KVMPI_RANK"),
    "bad setting": ({"KVMPI_TIMEOUT_S": "soon"}, "ConfigError: KVMPI_TIMEOUT_S='soon'"),
    "unknown setting": ({"KVMPI_SPEED": "11"}, "ConfigError: unknown setting KVMPI_SPEED"),
    "bad import": (
        {"KVMPI_SCHEDULER": "tcp://127.0.0.1:9", "KVMPI_RANK": "0", "KVMPI_IMPORTS": "no_such_module_at_all"},
        "ConfigError: server 0 cannot import 'no_such_module_at_all'",
    ),
    "bad endpoint": ({"KVMPI_SCHEDULER": "nonsense", "KVMPI_RANK": "0"}, "ConfigError: cannot connect to 'nonsense'"),
    "bad host": (
        {"KVMPI_SCHEDULER": "tcp://127.0.0.1:9", "KVMPI_RANK": "0", "KVMPI_HOST": "203.0.113.9"},
        "ConfigError: cannot listen on tcp://203.0.113.9",
    ),
    "no keys": ({"KVMPI_SCHEDULER": "tcp://127.0.0.1:9", "KVMPI_RANK": "0", "KVMPI_KEYS": ""}, "names no file"),
    "folder elsewhere": (
        {"KVMPI_SCHEDULER": "tcp://127.0.0.1:9", "KVMPI_RANK": "0", "KVMPI_KEYS": "/no/such/kvmpi-job/keys"},
        "ConfigError: /no/such/kvmpi-job, the job's folder with its keys, is not here; a program in a container",
    ),
    "keys missing": (
        {"KVMPI_SCHEDULER": "tcp://127.0.0.1:9", "KVMPI_RANK": "0", "KVMPI_KEYS": "nowhere"},
        "ConfigError: cannot read nowhere: No such file or directory",
    ),
}


def test_wrong_starts_end_with_status_1_and_a_sentence(processes: Processes) -> None:
    create_keys(str(processes.folder / "keys"))
    started = {name: processes.start("server", **env) for name, (env, _) in WRONG_STARTS.items()}
    for name, process in started.items():
        status, stderr = ended(process)
        assert status == 1, name
        assert WRONG_STARTS[name][1] in stderr, name
        assert "Traceback" not in stderr, name


def test_a_server_of_another_job_size_is_refused(processes: Processes) -> None:
    config, _, _ = processes.job(1)
    connected(config, 1)[0].close(Deadline(TIMEOUT_S))
    stranger = processes.start(
        "server", KVMPI_SCHEDULER=config.scheduler, KVMPI_RANK="1", KVMPI_NUM_SERVERS="2",
    )  # fmt: skip
    status, stderr = ended(stranger)
    assert status == 1
    assert "a server says there are 2 servers, the job has 1" in stderr


def test_a_rule_of_ones_own_comes_by_import(processes: Processes) -> None:
    (processes.folder / "my_rules.py").write_text(
        "import numpy as np, kvmpi.optim\n"
        "from dataclasses import dataclass\n"
        "@kvmpi.optim.register('double')\n"
        "@dataclass(frozen=True)\n"
        "class Double(kvmpi.optim.Rule):\n"
        "    factor: float = 2.0\n"
        "    def compute(self, b):\n"
        "        np.multiply(b.pushed, self.factor, out=b.out)\n"
    )
    processes.env.update(KVMPI_IMPORTS="my_rules", PYTHONPATH=str(processes.folder))
    sys.path.insert(0, str(processes.folder))
    try:
        from my_rules import Double  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(processes.folder))
    config, _, _ = processes.job(1)
    (ps,) = connected(config, 1, Double(3.0))
    out = np.empty(200_000, "f4")
    ps.pushpull("k", whole_numbers(200_000, 1), out, Deadline(TIMEOUT_S)).wait()
    np.testing.assert_array_equal(out, 3.0 * whole_numbers(200_000, 1))
    ps.close(Deadline(TIMEOUT_S))


def test_descriptors_that_are_missing_are_a_word_and_not_a_wait(caplog):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    shortage = Shortage("server 3")
    shortage.look(10.0)
    assert not caplog.messages
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        for now_s in (10.5, 11.5, 12.5):
            shortage.look(now_s)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [message[:40] for message in caplog.messages] == ["server 3: no descriptors are left for ot"]
    assert "ulimit -n" in caplog.text


@pytest.mark.parametrize(("role", "least"), [("scheduler", 36 + 2 * 1000 + 4), ("server", 36 + 1000 + 4)])
def test_a_job_with_too_few_descriptors_for_its_members_does_not_begin(monkeypatch, role, least):
    config, limits = Config(num_workers=1000, num_clients=1000, num_servers=4), (256, least)
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: raised.append(pair))
    descriptors.allow_many(config, role)
    assert raised == [(least, least)]
    limits = (256, least - 1)
    with pytest.raises(ConfigError, match=f"the {role} may have {least - 1} descriptors, and needs {least}.*ulimit -n"):
        descriptors.allow_many(config, role)
