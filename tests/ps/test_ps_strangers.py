"""Peers that do not belong to a job that works: nonsense without security, and a thousand connections with it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zmq
from ps_helpers import TIMEOUT_S, deadline, initialise, whole_numbers

from kvmpi import optim
from kvmpi.errors import KVError, ProtocolError
from kvmpi.ps import daemon
from kvmpi.wire import Connection, encode
from kvmpi.wire import messages as m

#: Strangers share the interpreter with the job: without a pause they would starve it of time.
_PAUSE_S = 0.005


def _plain_garbage(port: int, stop: threading.Event, sent: list[int]) -> None:
    rng = np.random.default_rng(4)
    while not stop.wait(_PAUSE_S):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5.0) as raw:
                raw.sendall(rng.bytes(int(rng.integers(1, 3000))))
                sent[0] += 1
        except OSError:
            pass


def _zmq_garbage(port: int, stop: threading.Event, sent: list[int]) -> None:
    rng = np.random.default_rng(5)
    header = encode(m.Push(1, "k", 0, 1, "none", False))
    with zmq.Context() as context:
        while not stop.wait(_PAUSE_S):
            with context.socket(zmq.DEALER) as peer:
                peer.linger = 0
                peer.connect(f"tcp://127.0.0.1:{port}")
                for frames in ([b""], [rng.bytes(50)], [header], [header, rng.bytes(64)], [header] * 200,
                               [encode(m.Hello(1, 1, "sync", 0, 1 << 40, 1))],
                               [encode(m.View(9, 0, [], [], [m.Lost(0, 1, 9, "x")]))],
                               [encode(m.Register(1, "server", 0, -1, 2, 1 << 62, "h", ["tcp://1.2.3.4:5"] * 5000))],
                               [encode(m.Leave(1))], [encode(m.Barrier(1, 1))]):  # fmt: skip
                    peer.send_multipart(frames)
                if peer.poll(2000):
                    sent[0] += 1


@pytest.mark.parametrize("stranger", [_plain_garbage, _zmq_garbage])
def test_strangers_at_the_ports_do_not_disturb_a_job(start_job: Callable[..., Any], stranger: Any) -> None:
    job = start_job(2, chunk_bytes=20_000, security="off")
    (ps,) = job.connect(1, transport="tcp")
    initialise([ps], {"k": 50_000}, optim.Test(lr=-1.0))
    stop, sent = threading.Event(), [0]
    ports = [int(job.config.scheduler.rsplit(":", 1)[1])]
    ports += [int(connection.endpoint.rsplit(":", 1)[1]) for connection in ps._link._connections.values()]
    threads = [threading.Thread(target=stranger, args=(port, stop, sent), daemon=True) for port in set(ports)]
    assert len(threads) == 3
    for thread in threads:
        thread.start()
    out = np.empty(50_000, "f4")
    rounds = 0
    while sent[0] < 30 or rounds < 10:
        rounds += 1
        ps.pushpull("k", np.ones(50_000, "f4"), out, deadline()).wait()
        np.testing.assert_array_equal(out, whole_numbers(50_000) + rounds)
        ps.barrier(deadline()).wait()
    stop.set()
    for thread in threads:
        thread.join(TIMEOUT_S)


def test_nonsense_from_another_server_or_the_scheduler_ends_no_server(
    start_job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of all that they say every third message cannot be read."""
    heard = {"the scheduler": 0, "server": 0}

    class Garbling(Connection):
        def recv(self) -> Any:
            received = super().recv()
            if received is not None:
                kind = self._peer.rstrip(" 0123456789")
                heard[kind] += 1
                if heard[kind] % 3 == 0:
                    raise ProtocolError("malformed header: garbled on its way")
            return received

    monkeypatch.setattr(daemon, "Connection", Garbling)
    job = start_job(2, replicas=1, heartbeat_s=0.05, retry_s=1.0)
    clients = job.connect(2)
    initialise(clients, {"k": 100}, optim.Test(lr=-1.0))
    steps = 0
    while steps < 3 or min(heard.values()) < 6:
        steps += 1
        outs = [np.empty(100, "f4") for _ in clients]
        works = [ps.pushpull("k", np.ones(100, "f4"), out, deadline()) for ps, out in zip(clients, outs, strict=True)]
        for work, out in zip(works, outs, strict=True):
            work.wait(TIMEOUT_S)
            np.testing.assert_array_equal(out, whole_numbers(100) + 2 * steps)
    assert all(thread.is_alive() for thread in job.threads)
    assert "cannot read a message from" in caplog.text


@pytest.mark.parametrize("endpoints", [[], ["tcp://no such host"], ["ipc://relative"]])
def test_a_server_that_comes_without_an_address_ends_no_client(
    start_job: Callable[..., Any], endpoints: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    job = start_job(2)
    (ps,) = job.connect(1)
    initialise([ps], {"k": 10}, optim.Test(lr=-1.0))
    before, until = ps._link._epoch, deadline()
    peer = Connection(job.context, job.config.scheduler, 1 << 20)
    try:
        peer.send(m.Register(1, "server", 2, -1, 2, 5, "h", endpoints))
        while ps._link._epoch == before and ps._link.is_open:
            assert until.remaining_s() > 0
            threading.Event().wait(0.01)
        out = np.empty(10, "f4")
        ps.pushpull("k", np.ones(10, "f4"), out, deadline()).wait()
        np.testing.assert_array_equal(out, whole_numbers(10) + 1)
        assert "cannot connect to server 2 on h" in caplog.text
        late = job.new_client(0, 1, store=2)
        with pytest.raises(KVError, match=r"server 2|no such host|relative"):  # it says so at once
            late.connect(deadline())
    finally:
        peer.close()
