"""One worker of a random program: calls with arrays of all kinds, and whether what comes back is right."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import random_arrays
from random_arrays import Array
from random_model import Flat, Floor, Key, Model, Rows, Saved, data
from random_programs import Program

import kvmpi

Given = dict[int, list[Any]]  # by rank: vectors, Rows, or the name of a key whose view is pushed


class View:
    """A stored value that is pushed."""

    def __init__(self, name: Any) -> None:
        self.name = name


class Caller:
    """Args:
    clients: ranks of the job, by client; ``me`` is one of them.
    """

    def __init__(self, program: Program, clients: Sequence[Sequence[int]], me: int, folder: str) -> None:
        self.program, self.me, self.folder, self.job = program, me, Path(folder), clients
        self.pending: list[tuple[Any, Callable[[], None]]] = []
        self.files: dict[str, Saved] = {}
        self.inner: Any = None
        self.joined = False
        self.make_store()

    def make_store(self) -> None:
        name = self.program.store
        self.kv = kvmpi.create(name, **self.program.settings)
        ranks = [rank for client in self.job for rank in client]
        clients: list[Any] = list(self.job)
        if name == "local":
            clients = [[self.me]]
        elif name.startswith("dist_") and not name.endswith("_mpi"):
            clients = [[rank] for rank in ranks]
        self.seen: dict[Any, Flat] = {}
        self.floors: dict[Any, Floor] = {}
        self.model = Model(clients, exact=not self.program.loose or len(clients) == 1)
        self.place = next(i for i, client in enumerate(clients) if self.me in client)
        self.replicated = self.kv.is_capable("view")
        assert (self.kv.num_workers, self.kv.num_clients) == (len(self.model.ranks), len(clients))
        self.ahead = self.program.settings.get("staleness")
        self.of_update = len(clients) if name.startswith("dist_sync") else 1
        if "softsync" in name:
            self.of_update = max(1, len(clients) // self.program.settings["softsync"])
        assert self.kv.pushes_per_update == self.of_update

    def rng(self, *where: object) -> random.Random:
        return random.Random(repr((self.program.seed, *where)))

    @property
    def mine(self) -> Sequence[int]:
        """The workers of this client."""
        return self.model.clients[self.place]

    def step(self, number: int) -> None:
        self.number, step = number, self.program.steps[number]
        self.client_rng, self.worker_rng = self.rng(number, "client", self.place), self.rng(number, "worker", self.me)
        if self.worker_rng.random() < 0.5:
            self.finish_pending()
        names = [name for name in step.get("keys", ()) if step["kind"] not in ("init", "broadcast")]
        step = {**step, "keys": [name for name in names if name in self.model.keys] or step.get("keys", ())}
        if names and not any(name in self.model.keys for name in names):
            return
        getattr(self, f"do_{step['kind']}")(step)

    def end(self) -> None:
        if not self.kv.closed:
            self.finish_pending()
            self.kv.close()

    # ---- what is pushed and what comes back

    def numbers(self, count: int, *where: object) -> Flat:
        found = data(count, self.program.seed, self.number, *where)
        return found if self.model.exact else np.abs(found)

    def given(
        self, name: Any, where: object, ranks: Sequence[int], *, rows: bool = False, views: bool = False
    ) -> Given:
        """What ``ranks`` push to a key; the same on all workers."""
        key, found = self.model.keys[name], {}
        for rank in ranks:
            rng = self.rng(self.number, where, name, rank)
            # Weights of different numbers of devices have no mean: workers of a client give as many.
            averages = self.model.rule is not None and self.model.rule.averages
            of = next(i for i, client in enumerate(self.model.clients) if rank in client) if averages else rank
            how_many = self.rng(self.number, where, name, "devices", of).choice(
                [1, 1, 1, 2, 3, 8] if key.count < 100_000 else [1, 1, 1, 2]
            )
            vectors: list[Any] = []
            for i in range(how_many):
                if rows:
                    most = key.shape[0]
                    ids = np.array(
                        [rng.randrange(most) for _ in range(rng.choice([0, 1, 5, 40]) if most else 0)], np.int64
                    )
                    if rng.random() < 0.2:
                        ids.sort()
                    values = self.numbers(len(ids) * key.width, where, name, rank, i).reshape(len(ids), key.width)
                    vectors.append(Rows(ids, values))
                    if i == 1:
                        break
                    continue
                alike = [n for n, k in self.model.keys.items() if (k.shape, k.dtype) == (key.shape, key.dtype)]
                if views and rng.random() < 0.2:
                    vectors.append(View(rng.choice(alike)))
                else:
                    vectors.append(self.numbers(key.count, where, name, rank, i))
            found[rank] = vectors
        return found

    def told(self, given: Given) -> Given:
        """With the numbers in the place of views."""
        return {
            rank: [self.model.keys[v.name].value if isinstance(v, View) else v for v in vectors]
            for rank, vectors in given.items()
        }

    def note_push(self, name: Any, given: Given, new: Key) -> None:
        """The model goes on; without rounds, some of what clients have pushed is there at least."""
        for place, client in enumerate(self.model.clients) if not self.model.exact else ():
            pushed = self.model.contribution(name, given, client)
            if pushed is not None:
                self.floor(name).push(place, pushed)
        self.model.keys[name] = new

    def floor(self, name: Any) -> Floor:
        """What is in a key at least, for this client."""
        if name not in self.floors:
            key, clients = self.model.keys[name], len(self.model.clients)
            least = key.value if key.least is None else key.least
            self.floors[name] = Floor(least, clients, self.place, ahead=self.ahead, size=self.of_update)
        return self.floors[name]

    def settled(self) -> None:
        """All workers have met: nobody has seen more than there is."""
        for name, seen in self.seen.items():
            assert (seen <= self.model.keys[name].value).all(), f"key {name!r}: a pull has had too much"
        self.seen.clear()
        for floor in self.floors.values():
            floor.meet()

    def forget_values(self, names: Iterable[Any]) -> None:
        """Others are in their place. What was pulled before may be waited for, and checked, later."""
        self.seen = {}
        for name in names:
            self.floors.pop(name, None)

    def expected(self, name: Any, met: Flat | None = None) -> tuple[Any, ...]:
        key = self.model.keys[name]
        if self.model.exact:
            return name, "is", (key.value if met is None else met), key.tolerance
        return name, "at least", self.floor(name).least(), self.seen

    def check(self, found: Flat, expected: tuple[Any, ...], what: str, part: Any = slice(None)) -> None:
        name, relation, value, tolerance_or_seen = expected
        value = value[part]
        assert found.shape == value.shape, (what, name, found.shape, value.shape)
        if relation == "at least":
            right = found >= value
            if isinstance(part, slice):
                seen = tolerance_or_seen
                seen[name] = np.maximum(seen.get(name, found), found)
        else:
            right = np.abs(found - value) <= tolerance_or_seen
        if not right.all():
            wrong = np.flatnonzero(~right)
            at = wrong[:4]
            raise AssertionError(
                f"{what} of key {name!r} {self.model.keys[name].shape} {self.model.keys[name].dtype}: {len(wrong)} of "
                f"{found.size} wrong, at {at}: {found[at]}, expected {value[at]}"
            )

    def array(self, name: Any, numbers: Any, *, out: bool = False, shape: Any = None) -> Array:
        key = self.model.keys[name]
        return random_arrays.make(
            self.worker_rng, self.kv, key.shape if shape is None else shape, key.dtype, numbers, out=out
        )

    def outs(self, name: Any) -> list[Array]:
        return [self.array(name, 55, out=True) for _ in range(self.worker_rng.choice([1, 1, 1, 2, 3]))]

    def wait(self, work: Any, then: Callable[[], None]) -> None:
        if work is None:
            then()
        else:
            self.pending.append((work, then))

    def finish_pending(self) -> None:
        rng, waiting = self.worker_rng, self.pending
        self.pending = []
        rng.shuffle(waiting)
        if waiting and rng.random() < 0.3:
            self.kv.wait_all()
            assert all(work.done() for work, _ in waiting)
        for work, then in waiting:
            work.wait(rng.choice([None, 120.0]))
            then()

    def in_one_order(self, names: Sequence[Any]) -> bool:
        """Whether clients that push these keys in different orders might wait for each other: those of the naive engine
        wait for each push, and others when what they push does not fit into the window of a server.
        """
        large = any(self.model.keys[name].count > 70_001 for name in names) or "KVMPI_WINDOW_BYTES" in os.environ
        return self.program.settings.get("engine") == "naive" or (large and len(self.model.clients) > 1)

    def call(self, op: str, names: Sequence[Any], given: dict[Any, list[Any]] | None, expected: dict[Any, Any] | None,
             *, async_op: bool = False, **more: Any) -> None:  # fmt: skip
        """``op`` on whole arrays of these keys; what comes back is checked, now or when it is waited for."""
        rng, as_list, one_by_one = self.worker_rng, self.client_rng.random() < 0.3, self.client_rng.random() < 0.3
        inputs = {} if given is None else {
            name: [self.kv.view(v.name) if isinstance(v, View) else self.array(name, v) for v in given[name]]
            for name in names
        }  # fmt: skip
        outs: dict[Any, list[Any]] = {}
        in_place = False
        if expected is not None:
            way = rng.choice(["fresh", "fresh", "in place", "over", "exchanged", "shifted"]) if inputs else "fresh"
            plain = all(isinstance(a, Array) and a.writable for arrays in inputs.values() for a in arrays)
            if way in ("in place", "over", "exchanged") and not plain:
                way = "fresh"
            if way == "in place":
                outs, in_place = inputs, True
            elif way == "over":
                outs = {name: rng.sample(arrays, rng.randint(1, len(arrays))) for name, arrays in inputs.items()}
            elif way == "exchanged":
                outs = self.exchanged(inputs)
            elif way == "shifted":
                outs = self.shifted(inputs)
            else:
                outs = {name: self.outs(name) for name in names}
        written = {id(a) for arrays in outs.values() for a in arrays}
        if expected is not None and not in_place:
            kept_order = rng.random() < 0.3
            outs = {name: arrays * 2 if kept_order else arrays for name, arrays in outs.items()}  # the same twice

        values = [self.plain(inputs[name]) for name in names] if inputs else None
        targets = None if expected is None or in_place else [self.plain(outs[name]) for name in names]
        keys: Any = list(names)
        if values is not None and targets is None and one_by_one:
            keys, values = self.repeated(names, inputs)
        if len(keys) == 1 and not as_list:
            keys, values, targets = keys[0], values and values[0], targets and targets[0]
        arguments = [a for a in (values, targets) if a is not None]
        work = getattr(self.kv, op)(
            keys, *arguments, priority=0 if self.in_one_order(names) else rng.randint(-5, 5), async_op=async_op, **more
        )
        assert (work is not None) == async_op
        del values, targets, arguments

        whole = [a for arrays in inputs.values() for a in arrays if isinstance(a, Array)]
        if not async_op and op == "push":
            for array in whole:
                assert array.unchanged(), f"push has changed what was pushed to one of {names}"
                array.fill(66)  # ours again
        if async_op and op == "push" and rng.random() < 0.5:
            whole = []  # nobody else holds them now
        inputs = {}

        def then() -> None:
            for array in whole:
                if id(array) not in written:
                    assert array.unchanged(), f"{op} has changed what was pushed to one of {names}"
            for name, arrays in outs.items():
                for array in arrays:
                    self.check(array.numbers(), expected[name], op)  # type: ignore[index]
                    assert array.untouched_beside(), f"{op} of {name!r} has written beside the array"

        self.wait(work, then)

    def plain(self, arrays: Sequence[Any]) -> Any:
        found = [a.array if isinstance(a, Array) else a for a in arrays]
        return found[0] if len(found) == 1 and self.worker_rng.random() < 0.8 else found

    def exchanged(self, inputs: dict[Any, list[Any]]) -> dict[Any, list[Any]]:
        """Each key gets its result where another one like it is read from."""
        outs = {}
        groups: dict[Any, list[Any]] = {}
        for name in inputs:
            groups.setdefault((self.model.keys[name].shape, self.model.keys[name].dtype), []).append(name)
        for names in groups.values():
            for name, other in zip(names, [*names[1:], names[0]], strict=True):
                outs[name] = [inputs[other][0]]
        return outs

    def shifted(self, inputs: dict[Any, list[Any]]) -> dict[Any, list[Any]]:
        """Results lie partly over what is read."""
        outs = {}
        for name, arrays in inputs.items():
            key = self.model.keys[name]
            first, rng = arrays[0], self.worker_rng
            if key.dtype == "bfloat16" or not isinstance(first, Array):
                outs[name] = self.outs(name)
                continue
            shift, numbers = rng.choice([1, 3, 64]), first.numbers()
            start, stop = rng.choice([(0, shift), (shift, 0)])
            base = (
                self.kv.empty(key.count + shift, key.dtype)
                if rng.random() < 0.5
                else np.empty(key.count + shift, key.dtype)
            )
            base[:] = 0
            source = Array(base, lambda b, s=start, k=key: b[s : s + k.count].reshape(k.shape), numbers)
            target = Array.__new__(Array)
            target.base, target.writable = base, True
            target._take = lambda b, s=stop, k=key: b[s : s + k.count].reshape(k.shape)
            target.array = target._take(base)
            target.kept = base.copy()
            source.unchanged = source.untouched_beside = target.untouched_beside = lambda: True  # type: ignore[method-assign]
            inputs[name] = [source, *arrays[1:]]
            outs[name] = [target]
        return outs

    def repeated(self, names: Sequence[Any], inputs: dict[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
        """Keys with several vectors stand several times in the list."""
        entries = [(name, array) for name in names for array in inputs[name]]
        self.worker_rng.shuffle(entries)
        return [name for name, _ in entries], [a.array if isinstance(a, Array) else a for _, a in entries]
