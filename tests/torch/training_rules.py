"""Random trainings without torch: rules, codecs and rows in a store, key by key against ``training_model``."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from training_model import EPS, Encoder, Flat, Key, Rows, Rule, difference, noise, rounded

import kvmpi
from kvmpi import optim

CLASSES = {"sgd": optim.SGD, "adam": optim.Adam, "adamw": optim.AdamW, "adagrad": optim.Adagrad, "test": optim.Test}


def rule_of(rule: Rule) -> optim.Rule:
    made: optim.Rule = CLASSES[rule.kind](**rule.h)
    for key, different in rule.of_keys.items():
        made = made.for_keys([key], **different)
    return made


def tensor(numbers: Flat, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.from_numpy(np.array(numbers, np.float64)).reshape(shape).to(getattr(torch, dtype))


def numbers(array: torch.Tensor) -> Flat:
    found: Flat = array.detach().double().reshape(-1).numpy().copy()
    return found


class Training:
    """What all kinds of programs have: the store, who takes part, and whose turn it is."""

    def __init__(self, program: Any, clients: list[list[int]], me: int, folder: Path) -> None:
        self.program, self.me, self.folder, self.job = program, me, folder, clients
        self.number = 0
        self.make_store()

    def make_store(self) -> None:
        name = self.program.store
        self.kv = kvmpi.create(name, **self.program.settings)
        ranks = [rank for client in self.job for rank in client]
        self.clients = self.job
        if name in ("dist_sync", "dist_async"):
            self.clients = [[rank] for rank in ranks]
        elif name == "local":
            self.clients = [[self.me]]
        elif self.kv.num_clients == 1:
            self.clients = [ranks]
        self.asynchronous = "async" in name and len(self.clients) > 1
        self.place = next(i for i, client in enumerate(self.clients) if self.me in client)
        assert (self.kv.num_workers, self.kv.num_clients) == (sum(map(len, self.clients)), len(self.clients))

    @property
    def ranks(self) -> list[int]:
        return [rank for client in self.clients for rank in client]

    def rng(self, *where: object) -> random.Random:
        return random.Random(repr((self.program.seed, self.number, *where)))

    def turns(self) -> list[list[int]]:
        """Clients that step together, in the order in which servers hear of them."""
        return [[i] for i in range(len(self.clients))] if self.asynchronous else [list(range(len(self.clients)))]

    def together(self) -> None:
        """Where stores are asynchronous, others have done what came before."""
        if self.asynchronous:
            self.kv.barrier()

    def path(self, name: str) -> Path:
        own = f"{self.me}-" if self.program.store == "local" else ""
        return self.folder / f"{own}{self.program.seed}-{name}"

    def compare(self, what: str, found: torch.Tensor, expected: Flat, dtype: str, scale: float, ulps: float) -> None:
        """``ulps`` of the largest number that there is or was, ``scale``."""
        with np.errstate(all="ignore"):
            most = np.abs(expected[np.isfinite(expected)]).max(initial=scale)
        values = numbers(found)
        if (wrong := difference(values, expected, ulps * EPS[dtype] * most)).size:
            at = wrong[:4]
            raise AssertionError(
                f"{what} of {dtype}: {wrong.size} of {values.size} wrong, "
                f"at {at}: {values[at]}, expected {expected[at]}"
            )

    def run(self) -> None:
        self.begin()
        for step in self.program.steps:
            self.number += 1
            self.step(step)
        self.end()

    def begin(self) -> None:
        raise NotImplementedError

    def step(self, step: dict[str, Any]) -> None:
        raise NotImplementedError

    def end(self) -> None:
        self.kv.close()


class Rules(Training):
    def begin(self) -> None:
        program = self.program
        self.keys: list[Key] = []
        self.most = 1.0
        for number, (shape, dtype) in enumerate(program.keys):
            count = int(np.prod(shape, dtype=np.int64))
            self.keys.append(Key(tuple(shape), dtype, noise(count, program.seed, 999, number) * 2))
            first = self.keys[-1].value + (self.me != self.clients[0][0])
            self.kv.init(number, tensor(first, tuple(shape), dtype))
        self.files: dict[str, tuple[Rule, list[Key]]] = {}
        self.set_compression({"type": "none"})
        self.set_rule(program.options["rule"])

    def set_rule(self, words: tuple[str, dict[str, Any], dict[int, dict[str, Any]]]) -> None:
        kind, h, of_keys = words
        self.rule = Rule(kind, dict(h), {int(key): dict(changes) for key, changes in of_keys.items()})
        self.kv.set_optimizer(rule_of(self.rule))
        for key in self.keys:
            key.forget()

    def set_compression(self, words: dict[str, Any]) -> None:
        if words["type"] != "none":
            self.kv.set_gradient_compression(words)
        self.encoders = [Encoder(words["type"], words.get("threshold", 0.5)) for _ in self.clients]
        self.codec = words["type"]

    def pushed(self, number: int, rank: int, *, rows: bool) -> Flat | Rows:
        key, rng = self.keys[number], self.rng("pushed", number, rank)
        where = (self.program.seed, self.number, number, rank)
        if rows:
            ids = np.array([rng.randrange(key.shape[0]) for _ in range(rng.choice([0, 1, 3, 9]))], np.int64)
            return Rows(ids, noise(len(ids) * key.width, *where).reshape(len(ids), key.width) * self.scale(number))
        found = noise(key.value.size, *where) * self.scale(number)
        if found.size and self.codec not in ("1bit", "2bit") and rng.random() < 0.02:
            found[rng.randrange(found.size)] = rng.choice([np.nan, np.inf, -np.inf])
        return found

    def scale(self, number: int) -> float:
        return float(self.program.options["scale"]) if self.keys[number].dtype in ("float32", "float64") else 1.0

    def step(self, step: dict[str, Any]) -> None:
        self.together()
        # A file that was loaded may have brought a rule of another kind.
        if "hyper" in step and {name.partition("@")[0] for name in step["hyper"]} <= self.rule.h.keys():
            for name, value in step["hyper"].items():
                plain, _, key = name.partition("@")
                (self.rule.of_keys.setdefault(int(key), {}) if key else self.rule.h)[plain] = value
            self.kv.set_hyperparams(**step["hyper"])
        if "rule" in step:
            self.set_rule(step["rule"])
        if "compression" in step:
            self.set_compression(step["compression"])
        if "save" in step:
            getattr(self.kv, step["save"])(self.path(step["save"]))
            self.files[step["save"]] = (
                Rule(self.rule.kind, dict(self.rule.h), dict(self.rule.of_keys)),
                [key.copy() for key in self.keys],
            )
        if step.get("load") in self.files:
            self.load(step["load"])
        if step.get("again"):
            self.again()
        self.together()
        names, rows = step["keys"], {number for number in step["rows"] if self.keys[number].value.size}
        for turn in self.turns():
            given = {
                (number, rank): self.pushed(number, rank, rows=number in rows)
                for client in turn for rank in self.clients[client] for number in names
            }  # fmt: skip
            for number in names:
                sums = [
                    self.encoders[c](
                        number, self.keys[number].dtype, self.summed([given[number, r] for r in self.clients[c]])
                    )
                    for c in turn
                ]
                self.keys[number].update(self.rule, number, sums)
            if self.place in turn:
                self.exchange(names, given, step["way"])
            self.together()
        for number, key in enumerate(self.keys):
            out = torch.full(key.shape, 55.0, dtype=getattr(torch, key.dtype))
            self.kv.pull(number, out)
            self.check("pull", number, out)
            if key.dtype in ("float16", "bfloat16") and key.master is None:
                key.value = numbers(out)  # or what is rounded at a boundary would grow
        self.together()

    @staticmethod
    def summed(some: list[Flat | Rows]) -> Flat | Rows:
        if isinstance(some[0], Rows):
            # Rows are summed before they are rounded.
            ids, inverse = np.unique(np.concatenate([r.ids for r in some]), return_inverse=True)
            values = np.zeros((ids.size, some[0].values.shape[1]))
            np.add.at(values, inverse, np.concatenate([r.values for r in some]))
            return Rows(ids, values)
        total: Flat = np.sum(some, axis=0)
        return total

    def exchange(self, names: list[int], given: dict[tuple[int, int], Any], way: str) -> None:
        values, outs = [], []
        for number in names:
            key, mine = self.keys[number], given[number, self.me]
            if isinstance(mine, Rows):
                shape = (mine.ids.size, *key.shape[1:])
                values.append((torch.from_numpy(mine.ids), tensor(mine.values, shape, key.dtype)))
            else:
                values.append(tensor(mine, key.shape, key.dtype))
            outs.append(torch.full(key.shape, 55.0, dtype=getattr(torch, key.dtype)))
        if way == "push":
            self.kv.push(names, values)
            self.kv.pull(names, outs)
        elif way == "one by one":
            works = [self.kv.pushpull(n, v, o, async_op=True) for n, v, o in zip(names, values, outs, strict=True)]
            for work in works:
                work.wait()
        else:
            self.kv.pushpull(names, values, outs)
        for number, out in zip(names, outs, strict=True):
            self.check(way, number, out)

    def check(self, what: str, number: int, out: torch.Tensor) -> None:
        key = self.keys[number]
        half = key.dtype in ("float16", "bfloat16")
        self.compare(
            f"{what}: key {number} {key.shape} after step {self.number} under {self.rule}", out, key.value, key.dtype,
            0.0 if half else self.largest(number), 1.1 if half else 200,
        )  # fmt: skip

    def largest(self, number: int) -> float:
        """What was there once has been rounded then."""
        value = self.keys[number].value
        self.most = max(self.most, np.abs(value[np.isfinite(value)]).max(initial=0.0))
        return self.most

    def load(self, which: str) -> None:
        rule, keys = self.files[which]
        self.kv.load(self.path(which)) if which == "save" else self.kv.load_optimizer_states(self.path(which))
        self.rule = Rule(rule.kind, dict(rule.h), {key: dict(changes) for key, changes in rule.of_keys.items()})
        for key, saved in zip(self.keys, keys, strict=True):
            found = saved.copy()
            if which == "save":
                key.value = found.value
            elif found.master is not None:
                fits = rounded(found.master, key.dtype) == key.value
                found.master = np.where(fits, found.master, key.value)
            vars(key).update(state=found.state, step=found.step, master=found.master)

    def again(self) -> None:
        """Another store goes on with what this one has saved."""
        self.kv.save(self.path("again"))
        self.files["save"] = replace(self.rule), [key.copy() for key in self.keys]
        self.kv.close()
        self.make_store()
        for number, key in enumerate(self.keys):
            self.kv.init(number, torch.zeros(key.shape, dtype=getattr(torch, key.dtype)))
        self.set_compression({"type": "none"})
        self.kv.load(self.path("again"))
        self.files.clear()
