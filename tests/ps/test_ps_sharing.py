"""Clients and servers of one host that hand every payload over in shared memory, however small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ps_helpers import TIMEOUT_S

from kvmpi import optim
from kvmpi.deadline import Deadline
from kvmpi.ps.landing import Landing
from kvmpi.wire import bundle, context, partner
from kvmpi.wire.shared_memory import Arena

COUNT = 5000


@pytest.fixture(autouse=True)
def _share_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partner, "SHARE_FROM_BYTES", 1)
    monkeypatch.setattr(context, "SHARE_FROM_BYTES", 1)
    monkeypatch.setattr(bundle, "SMALL_BYTES", 1)


def _value(client: int, step: int) -> np.ndarray:
    return (np.arange(COUNT) % 97 + 100 * client + step).astype("f4")


@pytest.mark.parametrize("shared_bytes", [0, 4096], ids=["room", "no room"])
@pytest.mark.parametrize("replicas", [0, 1])
def test_rounds_are_exact_and_values_that_were_read_never_change(
    start_job: Callable[..., Any], in_threads: Callable[..., Any], replicas: int, shared_bytes: int
) -> None:
    job = start_job(chunk_bytes=4096, replicas=replicas, shared_bytes=shared_bytes)
    clients = job.connect(3)
    deadline = Deadline(TIMEOUT_S)

    def run(client: Any) -> list[np.ndarray]:
        rank = clients.index(client)
        client.add_keys([("k", (COUNT,), "float32")])
        client.init("k", np.zeros(COUNT, "f4") if rank == 0 else None, deadline).wait()
        read = []
        for step in range(1, 8):
            out = np.empty(COUNT, "f4")
            client.pushpull("k", _value(rank, step), out, deadline).wait()
            read.append(out)
        return read

    for read in in_threads(run, clients):
        for step, out in enumerate(read, 1):
            np.testing.assert_array_equal(out, sum(_value(client, step) for client in range(3)), err_msg=f"{step}")


def test_an_update_does_not_reach_a_value_that_a_client_still_holds(start_job: Callable[..., Any]) -> None:
    """Pushes bring values that nobody fetches: they stay in the server's memory while it goes on."""
    job = start_job(chunk_bytes=4096)
    (client,) = job.connect(1)
    deadline = Deadline(TIMEOUT_S)
    client.set_rule(optim.SGD(lr=1.0), deadline).wait()
    client.add_keys([("k", (COUNT,), "float32")])
    client.init("k", np.zeros(COUNT, "f4"), deadline).wait()
    landings = []
    for step in range(1, 6):
        landings.append(Landing(np.full(COUNT, np.nan, "f4")))
        client.push_ahead("k", _value(0, step), landings[-1], deadline).wait()
    assert all(landing.holds for landing in landings), "nothing was held: this test proves nothing"
    for step, landing in enumerate(landings, 1):
        expected = -sum(_value(0, before) for before in range(1, step + 1))
        np.testing.assert_array_equal(landing.buffer, expected, err_msg=f"step {step}")


def test_what_lies_in_memory_of_the_client_is_read_there(
    start_job: Callable[..., Any], in_threads: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may write to it again as soon as a push is done, whoever of the others is still to push."""
    copied: list[int] = []
    place = Arena.place
    monkeypatch.setattr(Arena, "place", lambda arena, payload: copied.append(payload.nbytes) or place(arena, payload))
    job = start_job(chunk_bytes=8192)
    clients = job.connect(3)
    deadline = Deadline(TIMEOUT_S)

    def run(client: Any) -> list[np.ndarray]:
        rank = clients.index(client)
        client.add_keys([("k", (COUNT,), "float32")])
        client.init("k", np.zeros(COUNT, "f4") if rank == 0 else None, deadline).wait()
        mine, read = client.empty(COUNT, "float32"), []
        for step in range(1, 8):
            mine[:] = _value(rank, step)
            client.push("k", mine, deadline).wait()
            mine[:] = np.nan
            read.append(np.empty(COUNT, "f4"))
            client.pull("k", read[-1], deadline).wait()
        return read

    for read in in_threads(run, clients):
        for step, out in enumerate(read, 1):
            np.testing.assert_array_equal(out, sum(_value(client, step) for client in range(3)), err_msg=f"{step}")
    assert sum(copied) <= COUNT * 4, "more than the first value was copied"
