"""Clients in threads, servers in threads, real sockets between them."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import wait_for
from ps_helpers import TIMEOUT_S, deadline, initialise, random_floats, whole_numbers

from kvmpi import optim
from kvmpi.config import Config
from kvmpi.deadline import Deadline
from kvmpi.engine import Work
from kvmpi.errors import (
    ClientLostError,
    ConfigError,
    KeyNotInitializedError,
    KVError,
    KVTimeoutError,
    ProtocolError,
    ServerLostError,
    ShapeMismatchError,
)
from kvmpi.ps import PsClient, codec, scheduler_file
from kvmpi.ps.scheduler_file import SavedScheduler
from kvmpi.ps.slot import Slot
from kvmpi.trace import Recorder
from kvmpi.wire import Watch
from kvmpi.wire import messages as m

StartJob = Callable[..., Any]  # see conftest.ThreadJob
InThreads = Callable[..., list[Any]]
COUNTS = {"empty": 0, "one": 1, "odd": 4097, "large": 5 * (1 << 18) // 4 + 3}


@pytest.mark.parametrize("transport", ["tcp", "auto"])
@pytest.mark.parametrize("placement", ["uniform", "lpt"])
def test_rounds_of_every_size_over_two_servers(
    start_job: StartJob, in_threads: InThreads, transport: str, placement: str
) -> None:
    clients = start_job(2, placement=placement, chunk_bytes=75_000).connect(3, transport=transport)
    initialise(clients, COUNTS, optim.Test(lr=-1.0))

    def work(rank: int) -> None:
        ps = clients[rank]
        outs = {key: np.full(count, np.nan, "f4") for key, count in COUNTS.items()}
        expected = {key: whole_numbers(count).astype("f8") for key, count in COUNTS.items()}
        for step in range(1, 4):
            values = {key: whole_numbers(count, rank, step) for key, count in COUNTS.items()}
            if (step + rank) % 2:
                works = [ps.pushpull(key, values[key], outs[key], deadline()) for key in COUNTS]
            elif rank == 2:  # in place: what is pushed is overwritten with the answer
                outs = values
                works = [ps.pushpull(key, values[key], values[key], deadline()) for key in COUNTS]
            else:
                for push in [ps.push(key, values[key], deadline(), priority=-i) for i, key in enumerate(COUNTS)]:
                    push.wait()
                works = [ps.pull(key, outs[key], deadline()) for key in COUNTS]
            for done in works:
                done.wait()
            for key, count in COUNTS.items():
                total = sum(whole_numbers(count, client, step).astype("f8") for client in range(3))
                expected[key] = expected[key] + total
                np.testing.assert_array_equal(outs[key], expected[key], err_msg=f"{key}, client {rank}, step {step}")

    in_threads(work, range(3))


def test_async_clients_at_their_own_pace(start_job: StartJob, in_threads: InThreads) -> None:
    clients = start_job(2, chunk_bytes=1000).connect(3, "async")
    counts = {"k": 4097, 5: 3}
    initialise(clients, counts, optim.Test(lr=-1.0))

    def work(rank: int) -> None:
        for step in range(10 + 5 * rank):
            works = [clients[rank].push(key, whole_numbers(n, rank, step), deadline()) for key, n in counts.items()]
            for done in works:
                done.wait()
        clients[rank].barrier(deadline()).wait()

    in_threads(work, range(3))
    for key, count in counts.items():
        out = np.empty(count, "f4")
        clients[1].pull(key, out, deadline()).wait()
        pushes = [whole_numbers(count, rank, step) for rank in range(3) for step in range(10 + 5 * rank)]
        np.testing.assert_array_equal(out, np.sum([whole_numbers(count), *pushes], axis=0, dtype="f8"))


def test_a_push_may_follow_the_end_of_the_last_at_once(start_job: StartJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is counted before the waiter wakes: otherwise the next push would pass for a copy, and be dropped."""
    (ps,) = start_job(1).connect(1)
    initialise([ps], {"k": 2}, optim.Test(lr=-1.0))
    one, out = np.ones(2, "f4"), np.empty(2, "f4")
    steps = []

    class WatchedWork(Work):
        def finish(self, error: BaseException | None = None) -> None:
            steps.append(ps._layouts["k"].steps)
            super().finish(error)

    with monkeypatch.context() as patch:
        patch.setattr("kvmpi.ps.participant.Work", WatchedWork)
        for _ in range(400):
            ps.push("k", one, deadline()).wait()
    assert steps == list(range(1, 401))
    ps.pull("k", out, deadline()).wait()
    np.testing.assert_array_equal(out, whole_numbers(2) + 400)


def test_compression_halves_the_bytes_of_pushes_only(start_job: StartJob) -> None:
    (ps,) = start_job(2).connect(1)
    initialise([ps], {"k": 200_000})
    ps.set_codec(codec.of({"type": "fp16"}))
    out, value = np.empty(200_000, "f4"), random_floats(200_000)
    ps.pushpull("k", value, out, deadline()).wait()
    np.testing.assert_array_equal(out, value.astype("f2").astype("f4"))


def test_a_server_does_not_copy_a_small_value_that_has_left(
    start_job: StartJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody holds the last answer when the next push comes, so that the value is written in place."""
    (ps,) = start_job(1).connect(1)
    initialise([ps], {"k": 1000})
    copied, copy = [], Slot._copy
    monkeypatch.setattr(Slot, "_copy", lambda slot, value: copied.append(slot.rounds) or copy(slot, value))
    out = np.empty(1000, "f4")
    for step in range(1, 6):
        value = whole_numbers(1000, step).astype("f4")
        ps.pushpull("k", value, out, deadline()).wait()
        np.testing.assert_array_equal(out, value)
    assert not copied


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_chunks_of_a_large_key_are_larger_and_two_of_them_are_under_way(start_job: StartJob, transport: str) -> None:
    count = 40 << 18  # of which a sixteenth is 2.5 MiB
    (ps,) = start_job(1).connect(1, transport=transport)
    initialise([ps], {"k": count, "small": 1}, optim.Test(lr=-1.0))
    pieces = [chunk.stop - chunk.start for chunk in ps._layouts["k"].chunks]
    assert (sum(pieces), max(pieces), len(pieces)) == (count, 40 << 14, 16)
    at_once, leave = 0, ps._link._session._leave

    def look(ask: Any) -> None:
        nonlocal at_once
        leave(ask)
        at_once = max(at_once, ps._link._session._in_flight[0, False] // (10 << 18))

    ps._link._session._leave = look
    value, out = whole_numbers(count, 1), np.empty(count, "f4")
    ps.push("k", value, deadline()).wait()
    ps.pull("k", out, deadline()).wait()
    np.testing.assert_array_equal(out, whole_numbers(count).astype("f8") + value)
    assert at_once >= 2


def test_state_is_saved_and_restored_over_chunks_and_servers(start_job: StartJob) -> None:
    (ps,) = start_job(2, chunk_bytes=70_000).connect(1)
    count = 50_001
    initialise([ps], {"k": count}, optim.Adam(lr=0.01))

    def go_on(step: int) -> np.ndarray:
        out = np.empty(count, "f4")
        ps.pushpull("k", random_floats(count, step), out, deadline()).wait()
        return out

    go_on(1)
    work, chunks = ps.get_state("k", deadline())
    work.wait()
    assert (chunks[0].start, chunks[0].updates) == (0, 1)
    assert len(chunks) >= 3
    arrays = {name: np.concatenate([chunk.arrays[name] for chunk in chunks]) for name in chunks[0].arrays}
    assert set(arrays) == {"value", "exp_avg", "exp_avg_sq"}
    first = [go_on(2), go_on(3)]
    ps.put_state("k", 1, arrays, deadline()).wait()
    assert [out.tobytes() for out in (go_on(2), go_on(3))] == [out.tobytes() for out in first]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_state_of_half_types_fits_into_messages_that_just_hold_a_chunk(start_job: StartJob, dtype: str) -> None:
    (ps,) = start_job(1, chunk_bytes=40_000, max_message_bytes=40_000).connect(1)
    value = np.zeros(33_000, "u2" if dtype == "bfloat16" else "f2")
    ps.add_keys([("k", (33_000,), dtype)])
    ps.init("k", value, deadline()).wait()
    ps.set_rule(optim.SGD(lr=1.0, momentum=0.5, multi_precision=True), deadline()).wait()
    ps.pushpull("k", value, value, deadline()).wait()
    work, chunks = ps.get_state("k", deadline())
    work.wait()
    assert sum(chunk.arrays["master"].size for chunk in chunks) == 33_000


# ---- errors


def test_errors_come_back_with_their_types_and_the_store_goes_on(start_job: StartJob) -> None:
    clients = start_job(2, placement="lpt").connect(2)  # where a key's place depends on those before
    initialise(clients[:1], {"k": 3})
    clients[1].add_keys([("k", (3, 1), "float32")])
    with pytest.raises(ShapeMismatchError, match="client 1 has shape"):
        clients[1].init("k", None, deadline()).wait()
    clients[1].forget_keys(["k"])
    clients[0].add_keys([("not there", (3,), "float32")])
    with pytest.raises(KeyNotInitializedError, match="'not there'"):
        clients[0].pull("not there", np.empty(3, "f4"), deadline()).wait()
    with pytest.raises(ConfigError, match="no update rule"):
        clients[0]._command("set_optimizer", m.SetRule, ("no such rule", {}), deadline(), counts="rule").wait()
    with pytest.raises(ConfigError, match="no optimizer yet"):
        clients[0].set_hyperparams({"lr": 1.0}, deadline()).wait()
    clients[1].add_keys([("k", (3,), "float32")])
    clients[1].init("k", None, deadline()).wait()
    for client in clients:
        client.set_rule(optim.SGD(lr=2.0), deadline()).wait()
        client.set_hyperparams({"lr": 1.0}, deadline()).wait()
    outs = [np.empty(3, "f4"), np.empty(3, "f4")]
    works = [client.pushpull("k", np.ones(3, "f4"), out, deadline()) for client, out in zip(clients, outs, strict=True)]
    for work, out in zip(works, outs, strict=True):
        work.wait()
        np.testing.assert_array_equal(out, whole_numbers(3) - 2)


@pytest.mark.parametrize("key", [1 << 70, "x" * 300_000], ids=["int of 71 bits", "str of 300 kB"])
def test_a_key_that_cannot_be_sent_is_an_error_and_the_link_survives(start_job: StartJob, key: Any) -> None:
    (ps,) = start_job(1).connect(1)
    ps.add_keys([(key, (3,), "float32")])
    with pytest.raises(ProtocolError, match="Init"):
        ps.init(key, np.zeros(3, "f4"), deadline()).wait()
    initialise([ps], {"k": 3})


def test_a_second_push_before_the_first_is_done_is_refused(start_job: StartJob) -> None:
    clients = start_job(1).connect(2)
    initialise(clients, {"k": 3})
    first = clients[1].push("k", np.ones(3, "f4"), deadline())  # held until client 0 pushes
    with pytest.raises(KVError, match="its last push is not done"):
        clients[1].push("k", np.ones(3, "f4"), deadline())
    clients[0].push("k", np.ones(3, "f4"), deadline()).wait()
    first.wait()


def test_a_push_that_timed_out_may_be_tried_again_and_counts_once(start_job: StartJob) -> None:
    clients = start_job(2).connect(3)
    initialise(clients, {"k": 200_000}, optim.Test(lr=-1.0))
    values = [whole_numbers(200_000, rank) for rank in range(3)]
    clients[0].push("k", values[0], deadline()).wait()
    out = np.empty(200_000, "f4")
    for _ in range(2):
        with pytest.raises(KVTimeoutError) as caught:
            clients[1].pushpull("k", values[1], out, Deadline(0.5)).wait()
    for part in ("'k'", "client 1 of 3 at step 1", "server 0 still waits for client 2", "server 1 still waits"):
        assert part in str(caught.value)
    again = clients[1].pushpull("k", values[1], out, deadline())
    clients[2].push("k", values[2], deadline()).wait()
    again.wait()
    np.testing.assert_array_equal(out, np.sum([whole_numbers(200_000), *values], axis=0, dtype="f8"))


def test_an_idle_master_sleeps(start_job: StartJob, monkeypatch: pytest.MonkeyPatch) -> None:
    (client,) = start_job(2).connect(1)
    initialise([client], {"k": 100})
    client.pushpull("k", np.ones(100, "f4"), np.empty(100, "f4"), deadline()).wait()
    time.sleep(0.2)
    num_waits, wait = 0, Watch.wait

    def counted(watch: Watch[Any], timeout_s: float) -> list[Any]:
        nonlocal num_waits
        num_waits += threading.current_thread().name.startswith("kvmpi-io-client")
        return wait(watch, timeout_s)

    monkeypatch.setattr(Watch, "wait", counted)
    time.sleep(1.0)
    assert 1 <= num_waits <= 30, "20 times a second for the clock"


def test_a_barrier_that_timed_out_may_be_tried_again(start_job: StartJob) -> None:
    clients = start_job(1).connect(2)
    with pytest.raises(KVTimeoutError, match=r"barrier 1 on client 0.*the scheduler still waits for client 1"):
        clients[0].barrier(Deadline(0.5)).wait()
    clients[1].barrier(deadline()).wait()
    clients[0].barrier(deadline()).wait()
    works = [client.barrier(deadline()) for client in clients]
    for work in works:
        work.wait()


def test_a_client_that_vanishes_is_a_loss_to_the_others(start_job: StartJob) -> None:
    job = start_job(1, heartbeat_s=0.1, heartbeat_timeout_s=1.0)
    clients = job.connect(2)
    initialise(clients, {"k": 3})
    waiting = clients[0].pushpull("k", np.ones(3, "f4"), np.empty(3, "f4"), deadline())
    barrier = clients[0].barrier(deadline())
    clients[1].abort()
    for work in (waiting, barrier):
        with pytest.raises(ClientLostError, match="client 1"):
            work.wait(TIMEOUT_S)
    work, dead = clients[0].dead_clients(0.5, deadline())
    work.wait()
    assert dead == [1]
    with pytest.raises(ClientLostError):
        clients[0].pushpull("k", np.ones(3, "f4"), np.empty(3, "f4"), deadline()).wait(TIMEOUT_S)


def test_a_defect_in_the_io_thread_fails_what_waits_and_all_that_follows(
    start_job: StartJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clients = start_job(1).connect(2)
    initialise(clients, {"k": 3})
    waiting = clients[0].pushpull("k", np.ones(3, "f4"), np.empty(3, "f4"), deadline())

    def broken(now_s: float) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(clients[0]._link._session, "tick", broken)
    for work in (waiting, clients[0].barrier(deadline())):
        with pytest.raises(KVError, match="I/O thread of client 0 in store 1 failed: ZeroDivisionError: a defect"):
            work.wait(TIMEOUT_S)
    with pytest.raises(KVError, match="a defect"):
        clients[0].push("k", np.ones(3, "f4"), deadline()).wait(TIMEOUT_S)
    clients[0].close(deadline())
    assert "a defect" in caplog.text


# ---- joining and leaving


def test_a_scheduler_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = Config(num_servers=1, scheduler=f"ipc://{tmp_path}/nobody")
    ps = PsClient(config, store=1, mode="sync", client=0, num_clients=1, recorder=Recorder())
    with pytest.raises(KVTimeoutError, match=r"nobody.*no answer from the scheduler: it still waits for servers"):
        ps.connect(Deadline(0.3))
    ps.close(deadline())


def test_a_malformed_scheduler_endpoint_is_an_error_at_once() -> None:
    config = Config(num_servers=1, scheduler="nonsense")
    ps = PsClient(config, store=1, mode="sync", client=0, num_clients=1, recorder=Recorder())
    with pytest.raises(ConfigError, match="nonsense"):
        ps.connect(deadline())


def test_a_job_of_another_size_is_refused(start_job: StartJob) -> None:
    job = start_job(2)
    with pytest.raises(ConfigError, match="the scheduler knows 2 servers, KVMPI_NUM_SERVERS is 3"):
        job.new_client(0, 1, num_servers=3).connect(deadline())


def test_a_client_connects_without_a_deadline_too(start_job: StartJob) -> None:
    ps = start_job(1).new_client(0, 1)
    ps.connect(Deadline(None))
    ps.close(Deadline(None))


def test_close_may_be_repeated_and_ends_what_is_under_way(start_job: StartJob) -> None:
    clients = start_job(1).connect(2)
    initialise(clients, {"k": 3})
    waiting = clients[0].pushpull("k", np.ones(3, "f4"), np.empty(3, "f4"), deadline())
    for _ in range(2):
        clients[0].close(deadline())
    with pytest.raises(KVError):
        waiting.wait(TIMEOUT_S)
    for late in (clients[0].pull("k", np.empty(3, "f4"), deadline()), clients[0].barrier(deadline())):
        with pytest.raises(ServerLostError):
            late.wait(TIMEOUT_S)
    clients[1].pushpull("k", np.ones(3, "f4"), np.empty(3, "f4"), deadline()).wait(TIMEOUT_S)  # it had pushed this one
    with pytest.raises(ClientLostError, match=r"client 0 has closed the store; .* kv\.join"):
        clients[1].pushpull("k", np.ones(3, "f4"), np.empty(3, "f4"), deadline()).wait(TIMEOUT_S)


def test_close_is_quick_when_everyone_is_dead(start_job: StartJob) -> None:
    job = start_job(2)
    (ps,) = job.connect(1)
    initialise([ps], {"k": 3})
    job.stop_daemons()
    closing = threading.Thread(target=ps.close, args=(Deadline(3600.0),), daemon=True)
    closing.start()
    closing.join(TIMEOUT_S)  # an hour would be the caller's deadline
    assert not closing.is_alive()


def test_two_stores_side_by_side(start_job: StartJob) -> None:
    job = start_job(2)
    first, second = job.connect(1, "sync", store=1)[0], job.connect(1, "async", store=2)[0]
    initialise([first], {"k": 5})
    initialise([second], {"k": 7}, optim.Test(lr=-1.0))
    first.push("k", np.ones(5, "f4"), deadline()).wait()
    second.push("k", np.ones(7, "f4"), deadline()).wait()
    first.close(deadline())
    out = np.empty(7, "f4")
    second.pull("k", out, deadline()).wait()
    np.testing.assert_array_equal(out, whole_numbers(7) + 1)
    second.close(deadline())


def test_a_scheduler_that_cannot_write_its_state_goes_on_and_tries_again(
    start_job: StartJob, in_threads: InThreads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = start_job(1)
    clients = job.connect(2)

    def meet() -> None:
        in_threads(lambda client: client.barrier(deadline()).wait(), clients)

    def saved_barriers() -> int:
        before = scheduler_file.read(f"{job.config.job_dir}/scheduler-state")
        assert before is not None
        return before.stores[0].barriers_done

    def full(path: str, saved: SavedScheduler) -> None:
        tried.append(saved.stores[0].barriers_done)
        raise OSError(errno.ENOSPC, "No space left on device")

    meet()
    assert saved_barriers() == 1
    tried: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(scheduler_file, "write", full)
        for _ in range(5):
            meet()
        assert tried == [2, 3, 4, 5, 6], "at every change"
        wait_for(lambda: len(tried) > 5, "another attempt, without a change", 10.0)
    assert saved_barriers() == 1
    wait_for(lambda: saved_barriers() == 6, "the state in its file, without a change", 10.0)
    said = [line for line in caplog.messages if "its state" in line]
    assert "No space left on device" in said[0]
    assert [line for line in said[1:] if "again" not in line] == [], "said once"
    clients[0].close(deadline())
