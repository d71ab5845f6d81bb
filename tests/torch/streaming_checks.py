"""Run by test_torch_streaming with 3 workers in clients of 2 and 1, and 2 servers: streaming against NumPy's float64.

Local steps are numbers that depend on worker, step and element, and on the weights. Where stores are asynchronous,
clients take turns, so that the order in which servers hear of them is known.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kvmpi
from kvmpi.torch import DiLoCo, ElasticAveraging

SIZES = (5, 3, 12, 1, 7)
CLIENTS = ((0, 1), (2,))
CLIENT_OF = {rank: client for client, ranks in enumerate(CLIENTS) for rank in ranks}
NUM_WORKERS, STEPS = 3, 12


def start(key: int) -> np.ndarray:
    return np.random.default_rng([3, key]).integers(-64, 64, SIZES[key]) / 16


def change(key: int, step: int, rank: int, w: np.ndarray, exact: bool) -> np.ndarray:
    """One local step; ``exact``: sixteenths, whose sums and halves float32 holds without rounding."""
    noise = np.random.default_rng([key, step, rank]).integers(-8, 8, SIZES[key]) / 16
    return w + noise if exact else w - 0.05 * w + noise


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(256 * mantissa) / 256, exponent)


class Simulation:
    """All workers, and the center, in float64. ``fragments`` are lists of keys."""

    def __init__(
        self, *, asynchronous: bool, interval: int, fragments: list[list[int]], overlap: int, together: bool = False
    ) -> None:
        self.asynchronous, self.interval, self.overlap = asynchronous, interval, overlap
        self.fragments, self.together = fragments, together
        self.center = [start(key) for key in range(len(SIZES))]
        self.weights = [[start(key) for key in range(len(SIZES))] for _ in range(NUM_WORKERS)]
        self.arrived: list[tuple[int, int, int, np.ndarray, np.ndarray]] = []  # due, rank, key, sent, answer

    def step(self, step: int, exact: bool = False) -> None:
        for rank, own in enumerate(self.weights):
            # The workers of a client that steps together have the same gradients.
            of = CLIENTS[CLIENT_OF[rank]][0] if self.together else rank
            own[:] = [change(key, step, of, w, exact) for key, w in enumerate(own)]
        self.merge_due(step)
        for number, keys in enumerate(self.fragments):
            first = (number + 1) * self.interval // len(self.fragments)
            if step >= first and (step - first) % self.interval == 0:
                for key in keys:
                    self.exchange(key, step + self.overlap)
        self.merge_due(step)

    def exchange(self, key: int, due: int) -> None:
        if self.asynchronous:
            answers = [self.update(key, [ranks]) for ranks in CLIENTS]
        else:
            answers = [self.update(key, CLIENTS)] * len(CLIENTS)
        for client, ranks in enumerate(CLIENTS):
            for rank in ranks:
                self.arrived.append((due, rank, key, self.weights[rank][key].copy(), answers[client]))

    def merge_due(self, step: int) -> None:
        for _, rank, key, sent, answer in [entry for entry in self.arrived if entry[0] <= step]:
            self.weights[rank][key] = self.merged(rank, key, sent, answer)
        self.arrived = [entry for entry in self.arrived if entry[0] > step]

    def update(self, key: int, clients: Any) -> np.ndarray:
        raise NotImplementedError

    def merged(self, rank: int, key: int, sent: np.ndarray, answer: np.ndarray) -> np.ndarray:
        raise NotImplementedError


class DiLoCoSimulation(Simulation):
    def __init__(self, *, lr: float, momentum: float, mixing: float, bfloat16: bool = False, **how: Any) -> None:
        super().__init__(**how)
        self.lr, self.momentum, self.mixing, self.bfloat16 = lr, momentum, mixing, bfloat16
        self.velocity = [np.zeros(size) for size in SIZES]
        self.seen = [[c.copy() for c in self.center] for _ in range(NUM_WORKERS)]

    def update(self, key: int, clients: Any) -> np.ndarray:
        pushed = [np.mean([self.seen[r][key] - self.weights[r][key] for r in ranks], axis=0) for ranks in clients]
        gradient = np.mean([to_bfloat16(p) if self.bfloat16 else p for p in pushed], axis=0)
        self.velocity[key] = self.momentum * self.velocity[key] + gradient
        self.center[key] = self.center[key] - self.lr * (gradient + self.momentum * self.velocity[key])
        for ranks in clients:
            for rank in ranks:
                self.seen[rank][key] = self.center[key]
        return self.center[key]

    def merged(self, rank: int, key: int, sent: np.ndarray, answer: np.ndarray) -> np.ndarray:
        return self.mixing * self.weights[rank][key] + (1 - self.mixing) * answer


class ElasticSimulation(Simulation):
    def __init__(self, *, alpha: float, **how: Any) -> None:
        super().__init__(together=True, fragments=[list(range(len(SIZES)))], **how)
        self.alpha = alpha

    def update(self, key: int, clients: Any) -> np.ndarray:
        met = self.center[key]
        means = [np.mean([self.weights[r][key] for r in ranks], axis=0) for ranks in clients]
        self.center[key] = met + self.alpha * sum(mean - met for mean in means)
        return met

    def merged(self, rank: int, key: int, sent: np.ndarray, answer: np.ndarray) -> np.ndarray:
        return self.weights[rank][key] - self.alpha * (sent - answer)


def compare(
    kv: kvmpi.KVStore, make: Callable[[Any], DiLoCo | ElasticAveraging], simulation: Simulation, exact: bool, what: str
) -> None:
    """Step both, and look at all weights after every step and at the center at the end."""
    # What is computed in float32 has values below 32: a few roundings of each step, of which no error grows.
    bound = 0.0 if exact else STEPS * 8 * 32 * np.finfo("f4").eps / 2
    weights = [torch.from_numpy((start(key) + (kv.rank > 0)).astype("f4")) for key in range(len(SIZES))]
    averaging = make(weights)
    moved = 0
    for step in range(1, STEPS + 1):
        of = CLIENTS[kv.client_rank][0] if simulation.together else kv.rank
        for key, w in enumerate(weights):
            w.copy_(torch.from_numpy(change(key, step, of, w.numpy().astype("f8"), exact)))
        for client in range(kv.num_clients if simulation.asynchronous else 1):
            if not simulation.asynchronous or client == kv.client_rank:
                moved += averaging.step()
            if simulation.asynchronous:
                kv.barrier()
        simulation.step(step, exact)
        for key, w in enumerate(weights):
            error = np.abs(w.numpy() - simulation.weights[kv.rank][key]).max()
            assert error <= bound, f"{what}: key {key} after step {step}: {error} > {bound}"
            if exact:
                assert (simulation.weights[kv.rank][key].astype("f4") == simulation.weights[kv.rank][key]).all()
    center = averaging.pull_center()
    for key, c in enumerate(center):
        error = np.abs(c.numpy() - simulation.center[key]).max()
        assert error <= bound, f"{what}: center {key}: {error} > {bound}"
    assert moved >= 2, what
    if what.endswith("finish"):
        averaging.finish()
        simulation.merge_due(STEPS + 100)
        assert np.abs(weights[4].numpy() - simulation.weights[kv.rank][4]).max() <= bound, what
    # Else an exchange may be under way when the store is closed.


def streaming(store: str) -> None:
    asynchronous = store == "dist_async_mpi"
    all_keys, thirds = [[0, 1, 2, 3, 4]], [[3, 0], [2], [1, 4]]
    table: list[tuple[list[list[int]], int, int, float | None]] = [
        (all_keys, 4, 0, None),
        (thirds, 4, 0, 0.25),
        (thirds, 5, 3, 0.25),  # several are under way at a time
        (thirds, 3, 2, 0.0),
    ]
    for fragments, interval, overlap, mixing in table:
        what = f"{store} {fragments} {interval} {overlap} {mixing} finish"
        with kvmpi.create(store) as kv:
            compare(
                kv,
                lambda w: DiLoCo(
                    w, kv, interval, fragments=[[w[k] for k in keys] for keys in fragments], overlap=overlap,  # noqa: B023
                    mixing=mixing,  # noqa: B023
                ),
                DiLoCoSimulation(
                    lr=0.7, momentum=0.9, mixing=(0.5 if overlap else 0.0) if mixing is None else mixing,
                    asynchronous=asynchronous, interval=interval, fragments=fragments, overlap=overlap,
                ),
                exact=False, what=what,
            )  # fmt: skip


def narrow(store: str) -> None:
    """Numbers that float32 holds as they are, so that bfloat16 rounds the very same ones: equal bits."""
    with kvmpi.create(store) as kv:
        compare(
            kv,
            lambda w: DiLoCo(
                w, kv, 6, lr=0.5, momentum=0.5, fragments=[w[:2], w[2:]], overlap=2, mixing=0.5,
                pseudo_gradient_dtype=torch.bfloat16,
            ),
            DiLoCoSimulation(
                lr=0.5, momentum=0.5, mixing=0.5, bfloat16=True, asynchronous=store == "dist_async_mpi", interval=6,
                fragments=[[0, 1], [2, 3, 4]], overlap=2,
            ),
            exact=True, what=f"{store} bfloat16",
        )  # fmt: skip
        if kv.mpi_rank == 0:
            pushes = {key: (STEPS // 3 + 1) // 2 if key < 2 else STEPS // 6 for key in range(len(SIZES))}
            expected = sum(2 * SIZES[key] * count for key, count in pushes.items())
            assert kv.stats()["phases"]["push"]["bytes"] == expected, (kv.stats(), expected)


def elastic(store: str) -> None:
    for overlap in (1, 3):
        with kvmpi.create(store) as kv:
            compare(
                kv,
                lambda w: ElasticAveraging(w, kv, alpha=0.3, interval=4, overlap=overlap),  # noqa: B023
                ElasticSimulation(
                    alpha=0.3, asynchronous=store == "dist_async_mpi", interval=4, overlap=overlap
                ),
                exact=False, what=f"{store} elastic {overlap}",
            )  # fmt: skip


def resumed(store: str, folder: Path) -> None:
    """Saved with one exchange arrived and not merged, and one before its start: the rest has the same bits."""

    def local_steps(w: list[torch.Tensor], averaging: Any, steps: range, rank: int) -> None:
        for step in steps:
            for key, tensor in enumerate(w):
                tensor.copy_(torch.from_numpy(change(key, step, rank, tensor.numpy(), exact=False)))
            averaging.step()

    makers: list[Callable[[Any, Any], DiLoCo | ElasticAveraging]] = [
        lambda w, kv: DiLoCo(w, kv, 4, fragments=2, overlap=3),
        lambda w, kv: ElasticAveraging(w, kv, 0.3, 4, overlap=3),
    ]
    for number, make in enumerate(makers):
        ends = []
        for part in ("whole", "rest"):
            with kvmpi.create(store) as kv:
                w = [torch.from_numpy(start(key).astype("f4")) for key in range(len(SIZES))]
                averaging = make(w, kv)
                mine = folder / f"{number}-{kv.rank}.pt"
                if part == "whole":
                    local_steps(w, averaging, range(1, 10), kv.rank)
                    state = averaging.state_dict()
                    assert state["under_way"], "nothing is under way: this would not test much"
                    torch.save({"weights": w, "averaging": state}, mine)
                    kv.save(folder / f"{number}.center")
                else:
                    kv.load(folder / f"{number}.center")
                    found = torch.load(mine, weights_only=True)
                    for tensor, saved in zip(w, found["weights"], strict=True):
                        tensor.copy_(saved)
                    averaging.load_state_dict(found["averaging"])
                local_steps(w, averaging, range(10, STEPS), kv.rank)
                averaging.finish()
                ends.append([*w, *averaging.pull_center()])
        for whole, rest in zip(*ends, strict=True):
            assert torch.equal(whole, rest), f"{store}: resumed {number}"


def uneven(store: str) -> None:
    """Workers with fewer batches join, with exchanges under way; a mean is then of those that are left."""
    batches, interval, sizes = [7, 3, 5], 2, (3, 4)

    def steps_of(number: int) -> np.ndarray:
        return np.arange(1.0, sizes[number] + 1)

    center = [np.ones(size) for size in sizes]
    weights = [[c.copy() for c in center] for _ in batches]
    due: dict[int, tuple[int, np.ndarray]] = {}  # by rank: what is merged at the next step, or by join
    for step in range(1, max(batches) + 1):
        left = [rank for rank, count in enumerate(batches) if count >= step]
        number = (step + 1) % interval
        for rank in left:
            weights[rank] = [w + (rank + step) * steps_of(n) for n, w in enumerate(weights[rank])]
            if rank in due:
                other, answer = due[rank]
                weights[rank][other] = (weights[rank][other] + answer) / 2
        means = [np.mean([weights[r][number] for r in c if r in left], axis=0) for c in CLIENTS if set(c) & set(left)]
        center[number] = np.mean(means, axis=0)
        due = dict.fromkeys(left, (number, center[number]))
        for rank in left:
            if batches[rank] == step:  # it joins
                weights[rank][number] = (weights[rank][number] + center[number]) / 2

    with kvmpi.create(store) as kv:
        w = [torch.ones(size) for size in sizes]
        diloco = DiLoCo(w, kv, interval, lr=1.0, momentum=0.0, nesterov=False, fragments=2, overlap=1)
        for step in range(1, batches[kv.rank] + 1):
            for n, tensor in enumerate(w):
                tensor += (kv.rank + step) * torch.from_numpy(steps_of(n).astype("f4"))
            diloco.step()
        diloco.join()
        for n, found in enumerate(diloco.pull_center()):
            np.testing.assert_allclose(w[n].numpy(), weights[kv.rank][n], rtol=1e-5, err_msg=f"weights {n}")
            if kv.client_rank == 0:  # the last to join: the other one may see an earlier center
                np.testing.assert_allclose(found.numpy(), center[n], rtol=1e-5, err_msg=f"center {n}")


def under_way(store: str, folder: Path) -> None:
    """A step that begins an exchange does not wait for the other client, which begins when this one has gone on."""
    with kvmpi.create(store) as kv:
        (w,) = [torch.zeros(5) + kv.rank]
        diloco = DiLoCo([w], kv, 3, lr=1.0, momentum=0.0, nesterov=False, overlap=2, mixing=0.0)
        gone_on = folder / "gone on"
        w += kv.rank
        for step in range(1, 6):
            if step == 3 and kv.client_rank == 1:
                deadline = time.monotonic() + 30
                while not gone_on.exists():
                    assert time.monotonic() < deadline, "the other client waits for this one"
                    time.sleep(0.01)
            assert diloco.step() == (step == 5)
            if step == 4 and kv.rank == 0:
                gone_on.touch()
        assert torch.equal(w, torch.full((5,), (np.mean([0, 1]) + 2) / 2)), w


def main() -> None:
    folder = Path(sys.argv[1])
    for store in ("dist_sync_mpi", "dist_async_mpi"):
        streaming(store)
        narrow(store)
        elastic(store)
    resumed("dist_sync_mpi", folder)
    under_way("dist_sync_mpi", folder)
    uneven("dist_sync_mpi")
    print("all checks passed")


if __name__ == "__main__":
    main()
