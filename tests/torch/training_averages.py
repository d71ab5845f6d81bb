"""Random trainings with ``ElasticAveraging`` and ``DiLoCo``, against the papers' equations in float64.

Local steps are numbers that depend on worker, step and element, and on the weights. Where stores are asynchronous,
clients take turns, so that the order in which servers hear of them is known.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from training_loops import Model
from training_model import EPS, Flat, noise, rounded, updated
from training_rules import Training, numbers, tensor

import kvmpi.torch


class Averages(Training):
    def begin(self) -> None:
        program = self.program
        self.o = program.options
        self.h = dict(self.o["rule"])
        self.shapes = [tuple(shape) for shape, _ in program.keys]
        self.dtypes = [dtype for _, dtype in program.keys]
        start = [noise(int(np.prod(s, dtype=np.int64)), program.seed, 999, k) for k, s in enumerate(self.shapes)]
        self.center = [value.copy() for value in start]
        self.velocity = [np.zeros(value.size) for value in start]
        # By rank: weights, what it takes for the center, and what has arrived: due, key, sent, answer, alpha, whole.
        self.weights = {rank: [value.copy() for value in start] for rank in self.ranks}
        self.seen = {rank: [value.copy() for value in start] for rank in self.ranks}
        self.under_way: dict[int, list[Any]] = {rank: [] for rank in self.ranks}
        self.steps, self.most = 0, 1.0
        self.gone: set[int] = set()
        self.make([value + (self.me != self.ranks[0]) for value in start])

    def make(self, values: list[Flat]) -> None:
        self.params = [
            torch.nn.Parameter(tensor(v, s, d)) for v, s, d in zip(values, self.shapes, self.dtypes, strict=True)
        ]
        o = self.o
        if o["algorithm"] == "elastic":
            self.averaging: Any = kvmpi.torch.ElasticAveraging(
                self.params, self.kv, self.h["alpha"], o["interval"], o["overlap"]
            )
        else:
            self.averaging = kvmpi.torch.DiLoCo(
                self.params, self.kv, o["interval"], self.h["lr"], self.h["momentum"], self.h["nesterov"],
                [[self.params[k] for k in of] for of in o["fragments"]], o["overlap"], o["mixing"],
                torch.bfloat16 if o["bfloat16"] else None,
            )  # fmt: skip

        # Workers of a client sum their gradients, or do as if they had.
        self.inner: Any = None
        if o["inner"]:
            of = torch.optim.SGD(self.params, lr=0.5)
            self.inner = (
                kvmpi.torch.Trainer(self.params, of, self.kv.client)
                if o["inner"] == "trainer"
                else kvmpi.torch.DistributedOptimizer(of, self.kv.client, self.params)
            )

    # ---- local steps

    def mine(self, key: int, rank: int) -> Flat:
        return noise(self.center[key].size, self.program.seed, self.number, key, rank)

    def move(self, trained: list[int]) -> None:
        """The local step of this worker."""
        if self.inner is None:
            with torch.no_grad():
                for k in trained:
                    moved = self.moved(k, self.me, numbers(self.params[k]))
                    self.params[k].copy_(tensor(moved, self.shapes[k], self.dtypes[k]))
            return
        found = {
            k: tensor(self.mine(k, self.me) + numbers(self.params[k]) / 8, self.shapes[k], self.dtypes[k])
            for k in trained
        }
        for param in self.params:
            param.grad = None
        if self.o["inner"] == "trainer":
            for k, gradient in found.items():
                self.params[k].grad = gradient
            self.inner.step(self.kv.mpi_size)
        else:
            Model(self.params)(found).backward()
            self.inner.step()

    def moved(self, key: int, rank: int, weights: Flat) -> Flat:
        # The workers of a client that step together have the same gradients.
        ranks = next(client for client in self.clients if rank in client)
        if self.o["inner"]:
            some = [self.mine(key, r) + weights / 8 for r in ranks if r not in self.gone]
            return weights - 0.5 * np.sum(some, axis=0) / len(ranks)
        of = ranks[0] if self.o["together"] else rank
        return weights * 0.9375 + noise(weights.size, self.program.seed, self.number, key, of) / 4

    def live(self, client: int) -> list[int]:
        return [rank for rank in self.clients[client] if rank not in self.gone]

    # ---- what is exchanged

    def exchange(self, turn: list[int], keys: list[int], overlap: int, *, whole: bool = False) -> None:
        """The clients of ``turn`` send these keys; servers update once."""
        clients = [client for client in turn if self.live(client)]
        for key in [k for k in keys if k not in self.frozen]:
            pushed = []
            for client in clients:
                elastic = self.o["algorithm"] == "elastic"
                given = [self.weights[r][key] - (0.0 if elastic else self.seen[r][key]) for r in self.live(client)]
                mean = np.mean(given, axis=0) * (1 if elastic else -1)
                pushed.append(
                    rounded(mean, "bfloat16") if self.o["bfloat16"] and self.dtypes[key] == "float32" else mean
                )
            if not pushed:
                continue
            met = self.center[key]
            state = {"momentum": self.velocity[key]}
            kind = "elastic" if self.o["algorithm"] == "elastic" else "outer"
            self.center[key] = updated(kind, self.h, met, np.sum(pushed, axis=0), state, 1, len(pushed))
            self.velocity[key] = state["momentum"]
            for client in clients:
                for rank in self.live(client):
                    answer = met if kind == "elastic" else self.center[key]
                    sent = self.weights[rank][key].copy()
                    if kind == "outer":
                        self.seen[rank][key] = answer
                    self.under_way[rank].append((self.steps + overlap, key, sent, answer, self.h.get("alpha"), whole))

    def merge(self, turn: list[int], before: int = 10**9) -> None:
        for client in turn:
            for rank in self.live(client):
                for _, key, sent, answer, alpha, whole in [e for e in self.under_way[rank] if e[0] <= before]:
                    mixing = 0.0 if whole else self.mixing
                    old = self.weights[rank][key]
                    if self.o["algorithm"] == "elastic":
                        self.weights[rank][key] = old - alpha * (sent - answer)
                    else:
                        self.weights[rank][key] = mixing * old + (1 - mixing) * answer
                self.under_way[rank] = [e for e in self.under_way[rank] if e[0] > before]

    @property
    def mixing(self) -> float:
        if self.o["mixing"] is None:
            return 0.5 if self.o["overlap"] else 0.0
        return float(self.o["mixing"])

    # ---- a step

    def step(self, step: dict[str, Any]) -> None:
        self.together()
        self.frozen = set(step.get("frozen", ()))
        for key, param in enumerate(self.params):
            param.requires_grad_(key not in self.frozen)
        if "hyper" in step:
            self.h.update(step["hyper"])
            self.kv.set_hyperparams(**step["hyper"])
        self.together()
        trained = [k for k in range(len(self.params)) if k not in self.frozen]
        for rank in self.ranks:
            for k in trained:
                self.weights[rank][k] = self.moved(k, rank, self.weights[rank][k])
        self.move(trained)
        self.steps += 1
        for turn in self.turns():
            self.act(turn, step)
            self.together()
        if step.get("center"):
            for key, found in enumerate(self.averaging.pull_center()):
                self.check(f"center of key {key} after step {self.number}", key, found, self.center[key])
        if step.get("again"):
            self.again()
        if step.get("reset"):
            self.averaging.reset()
            for rank in self.ranks:
                self.weights[rank] = [c.copy() for c in self.center]
                self.seen[rank] = [c.copy() for c in self.center]
                self.under_way[rank].clear()
            self.steps = 0
        for key, param in enumerate(self.params):
            self.check(f"key {key} after step {self.number}", key, param, self.weights[self.me][key])
        self.together()

    def act(self, turn: list[int], step: dict[str, Any]) -> None:
        o, mine = self.o, self.place in turn
        if mine:
            self.averaging.step()
        self.merge(turn, self.steps)
        count = len(o["fragments"])
        for p, keys in enumerate(o["fragments"]):
            first = (p + 1) * o["interval"] // count
            if self.steps >= first and (self.steps - first) % o["interval"] == 0:
                self.exchange(turn, keys, o["overlap"])
                if not o["overlap"]:
                    self.merge(turn, self.steps)
        if step.get("exchange"):
            if mine:
                self.averaging.exchange()
            self.merge(turn)
            self.exchange(turn, list(range(len(self.params))), 0, whole=True)
            self.merge(turn)
        if step.get("finish"):
            if mine:
                self.averaging.finish()
            self.merge(turn)

    def check(self, what: str, key: int, found: torch.Tensor, expected: Flat) -> None:
        self.most = max(self.most, np.abs(expected).max(initial=0.0))
        ulps = 400.0
        if self.o["bfloat16"]:  # what is rounded at a boundary differs by one part in 256
            ulps *= EPS["bfloat16"] / EPS["float32"] / 50
        self.compare(f"{self.o['algorithm']}: {what}", found, expected, self.dtypes[key], self.most, ulps)

    # ---- states

    def again(self) -> None:
        """Another store goes on with what this one has saved."""
        weights, state = [numbers(p) for p in self.params], copy.deepcopy(self.averaging.state_dict())
        self.kv.save(self.path("again"))
        self.kv.close()
        self.make_store()
        self.make([value + 1 for value in weights])
        self.kv.load(self.path("again"))
        with torch.no_grad():
            for param, value, shape, dtype in zip(self.params, weights, self.shapes, self.dtypes, strict=True):
                param.copy_(tensor(value, shape, dtype))
        self.averaging.load_state_dict(state)

    def end(self) -> None:
        self.frozen = set()
        for param in self.params:
            param.requires_grad_(True)
        if (join := self.o.get("join")) is not None:
            left = {rank: join[rank % len(join)] for rank in self.ranks}
            turn = list(range(len(self.clients)))
            for _ in range(max(left.values())):
                self.number += 1
                self.steps += 1
                for rank in self.ranks:
                    if not left[rank] and rank not in self.gone:
                        # Who joins has merged what was under way.
                        self.merge_of(rank)
                        self.gone.add(rank)
                for rank in [rank for rank in self.ranks if rank not in self.gone]:
                    self.weights[rank] = [self.moved(k, rank, w) for k, w in enumerate(self.weights[rank])]
                if self.me not in self.gone:
                    self.move(list(range(len(self.params))))
                mine = self.place
                if self.me in self.gone:
                    self.place = -1  # it does nothing more
                self.act(turn, {})
                self.place = mine
                if self.me not in self.gone:
                    for key, param in enumerate(self.params):
                        self.check(f"key {key} in join {self.number}", key, param, self.weights[self.me][key])
                left = {rank: max(0, count - 1) for rank, count in left.items()}
            self.averaging.join()
            if self.me not in self.gone:
                self.merge_of(self.me)
            for key, param in enumerate(self.params):
                self.check(f"key {key} after join", key, param, self.weights[self.me][key])
            if len(self.clients) == 1:
                for key, found in enumerate(self.averaging.pull_center()):
                    self.check(f"center of key {key} after join", key, found, self.center[key])
        self.kv.close()

    def merge_of(self, rank: int) -> None:
        client = next(i for i, ranks in enumerate(self.clients) if rank in ranks)
        others = {r for r in self.clients[client] if r != rank}
        gone, self.gone = self.gone, self.gone | others
        self.merge([client])
        self.gone = gone
