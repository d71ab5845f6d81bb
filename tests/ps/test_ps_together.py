"""Several small keys that a client pushes and pulls at once: each is exact, and each fails by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from ps_helpers import deadline, initialise, whole_numbers

from kvmpi import optim
from kvmpi.deadline import Deadline
from kvmpi.errors import KVError, KVTimeoutError
from kvmpi.ps import Exchange, PsClient

StartJob = Callable[..., Any]  # see conftest.ThreadJob
InThreads = Callable[..., list[Any]]
COUNTS = {f"k{i}": count for i, count in enumerate([0, 1, 3, 4097, 64, 65, 1000, 7])}


def together(
    ps: PsClient, values: dict[str, np.ndarray], outs: dict[str, np.ndarray], keys: Sequence[str] = ()
) -> list[Exchange]:
    """An exchange of ``keys``, else of all, in their places."""
    keys = keys or list(values)
    turns = ps.next_pushes(keys)
    return [Exchange(key, values[key], outs[key], turns[key]) for key in keys]


def values_of(rank: int, step: int) -> dict[str, np.ndarray]:
    return {key: whole_numbers(count, rank, step) for key, count in COUNTS.items()}


def sums(step: int, ranks: Sequence[int]) -> dict[str, np.ndarray]:
    """In float64, by nothing under test."""
    return {
        key: np.sum([whole_numbers(count, rank, step).astype("f8") for rank in ranks], axis=0)
        for key, count in COUNTS.items()
    }


@pytest.mark.parametrize("chunk_bytes", [0, 8000])
@pytest.mark.parametrize("num_clients", [1, 3])
def test_rounds_of_several_keys(start_job: StartJob, in_threads: InThreads, num_clients: int, chunk_bytes: int) -> None:
    clients = start_job(2, chunk_bytes=chunk_bytes).connect(num_clients)  # of 8000 bytes a key has several chunks
    initialise(clients, COUNTS, optim.Test(lr=-1.0))

    def work(rank: int) -> None:
        ps = clients[rank]
        expected = {key: whole_numbers(count).astype("f8") for key, count in COUNTS.items()}
        for step in range(1, 5):
            values = values_of(rank, step)
            outs = values if step % 2 else {key: np.full(count, np.nan, "f4") for key, count in COUNTS.items()}
            if (step + rank) % 3:
                ps.exchange_together(together(ps, values, outs), deadline()).wait()
            else:  # others exchange one by one what this client pushes at once
                for one in [ps.pushpull(key, values[key], outs[key], deadline()) for key in COUNTS]:
                    one.wait()
            for key, total in sums(step, range(num_clients)).items():
                expected[key] = expected[key] + total
                np.testing.assert_array_equal(outs[key], expected[key], err_msg=f"{key}, client {rank}, step {step}")
        assert ps._recorder.snapshot()["phases"]["push"]["calls"] == 4 * len(COUNTS)

    in_threads(work, range(num_clients))


def test_what_is_late_is_named_and_what_came_counts_once(start_job: StartJob) -> None:
    clients = start_job(2).connect(2)
    initialise(clients, COUNTS, optim.Test(lr=-1.0))
    mine, others = values_of(0, 1), values_of(1, 1)
    outs = {key: np.full(count, np.nan, "f4") for key, count in COUNTS.items()}
    other_outs = {key: np.empty(count, "f4") for key, count in COUNTS.items()}
    late = "k3"
    there = [key for key in COUNTS if key != late]
    pushed = clients[1].exchange_together(together(clients[1], others, other_outs, there), deadline())
    with pytest.raises(KVTimeoutError) as caught:
        clients[0].exchange_together(together(clients[0], mine, outs), Deadline(2.5)).wait()
    for part in ("pushpull of key 'k0', 'k1', 'k2' and 5 more on client 0 of 2 at step 1, clock 0", f"(key {late!r})",
                 "still waits for client 1"):  # fmt: skip
        assert part in str(caught.value)
    pushed.wait()
    first = sums(1, range(2))
    for key in there:  # these have had their round, and its value
        np.testing.assert_array_equal(outs[key], whole_numbers(COUNTS[key]) + first[key], err_msg=key)
    # The late one is made again, in the same round; the others are in their next.
    again = clients[0].exchange_together(together(clients[0], mine, outs), deadline())
    clients[1].pushpull(late, others[late], other_outs[late], deadline()).wait()
    clients[1].exchange_together(together(clients[1], others, other_outs, there), deadline()).wait()
    again.wait()
    for key in COUNTS:
        rounds = 1 if key == late else 2
        expected = whole_numbers(COUNTS[key]) + rounds * first[key]
        np.testing.assert_array_equal(outs[key], expected, err_msg=key)
        np.testing.assert_array_equal(other_outs[key], expected, err_msg=key)


def test_one_that_its_servers_refuse_fails_alone(start_job: StartJob, monkeypatch: pytest.MonkeyPatch) -> None:
    (ps,) = start_job(2).connect(1)
    initialise([ps], COUNTS, optim.Test(lr=-1.0))
    broken: list[int] = [COUNTS["k5"]]
    compute = optim.Test.compute

    def fail(self: Any, block: Any) -> None:
        if block.stored.size in broken:
            raise ZeroDivisionError("of a rule")
        compute(self, block)

    monkeypatch.setattr(optim.Test, "compute", fail)
    values, outs = values_of(0, 1), {key: np.full(count, np.nan, "f4") for key, count in COUNTS.items()}
    with pytest.raises(KVError, match=r"key 'k5'.*ZeroDivisionError: of a rule"):
        ps.exchange_together(together(ps, values, outs), deadline()).wait()
    broken.clear()
    ps.exchange_together(together(ps, values, outs), deadline()).wait()
    for key, total in sums(1, [0]).items():
        rounds = 1 if key == "k5" else 2
        np.testing.assert_array_equal(outs[key], whole_numbers(COUNTS[key]) + rounds * total, err_msg=key)


def test_a_second_push_of_one_of_them_is_refused_and_leaves_the_others(start_job: StartJob) -> None:
    clients = start_job(1).connect(2)
    initialise(clients, COUNTS, optim.Test(lr=-1.0))
    values, outs = values_of(0, 1), {key: np.empty(count, "f4") for key, count in COUNTS.items()}
    others = values_of(1, 1)
    clients[0].push("k7", values["k7"], deadline()).wait()
    held = clients[0].pushpull("k6", values["k6"], outs["k6"], deadline())  # until client 1 pushes
    exchanges = together(clients[0], values, outs)
    with pytest.raises(KVError, match="push of key 'k6' on client 0: its last push is not done"):
        clients[0].exchange_together(exchanges, deadline())
    for exchange in exchanges:
        clients[0].give_up(exchange.key, exchange.turn)
    clients[1].push("k7", others["k7"], deadline()).wait()
    clients[1].push("k6", others["k6"], deadline()).wait()
    held.wait()
    other_outs = {key: np.empty(count, "f4") for key, count in COUNTS.items()}
    works = [
        ps.exchange_together(together(ps, mine, into), deadline())
        for ps, mine, into in zip(clients, (values, others), (outs, other_outs), strict=True)
    ]
    for work in works:
        work.wait()
    for key, total in sums(1, range(2)).items():
        rounds = 2 if key in ("k6", "k7") else 1
        np.testing.assert_array_equal(outs[key], whole_numbers(COUNTS[key]) + rounds * total, err_msg=key)
