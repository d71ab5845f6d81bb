"""One worker's part of a random program: what it does in each kind of step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import random_mistakes
from random_arrays import numbers_of, torch
from random_calls import Caller, Given
from random_model import Flat, Key, Model, Rows, Rule

import kvmpi
from kvmpi.errors import UnsupportedError


class Runner(Caller):
    """``do_KIND`` carries out a step: on all workers alike, but for what each client and each worker may choose."""

    inner: Runner | None

    # ---- rounds

    def do_round(
        self, step: dict[str, Any], ranks: Sequence[int] | None = None, where: object = "round", way: str | None = None
    ) -> None:
        """Everybody pushes each of the keys once, each client in its own way; each gets the new values."""
        ranks = self.pushing(where) if ranks is None else ranks
        ways = ["list", "pushes", "one by one", "async", "push list", "pairs", "push only"]
        way = way or self.client_rng.choice(ways)
        views = self.replicated and not self.kv.sharded_update and way in ("list", "push list")
        given, expected, own = {}, {}, {}
        views_of = {}
        for name in step["keys"]:
            if not self.model.takes(name):
                continue
            given[name] = self.given(name, where, ranks, views=views)
            views_of[name] = self.told(given[name])
        news = {name: self.model.pushed(name, views_of[name]) for name in given}
        names = [name for name, new in news.items() if new is not None]
        if self.in_one_order(names):  # that in which lists of keys are processed
            names.sort(key=lambda name: name if isinstance(name, int) else list(self.model.keys).index(name))
        mets = {}
        for name in names:
            mets[name] = self.model.keys[name].value
        for name in names:
            self.note_push(name, views_of[name], news[name])  # type: ignore[arg-type]
        for name in names:
            expected[name] = self.expected(name)
            own[name] = given[name].get(self.me)
        if not names or self.me not in ranks:
            return
        elastic = self.model.rule is not None and self.model.rule.kind == "elastic"
        fused = {name: self.expected(name, mets[name] if elastic else None) for name in names}
        self.exchange(way, names, own, expected, fused)

    def pushing(self, where: object) -> Sequence[int]:
        """Who does: where nobody waits for pushes, some clients may leave them out."""
        rng = self.rng(self.number, where, "leave out")
        if self.model.exact or not self.kv.is_capable("skip") or rng.random() < 0.5:
            return self.model.ranks
        return [rank for client in self.model.clients if rng.random() < 0.6 for rank in client]

    def exchange(self, way: str, names: list[Any], own: Any, expected: Any, fused: Any) -> None:
        rng = self.client_rng
        shuffled = names if self.in_one_order(names) else rng.sample(names, len(names))
        if way == "list":
            self.call("pushpull", shuffled, own, fused)
        elif way == "pushes":
            for name in shuffled:
                self.call("push", [name], own, None)
            for name in rng.sample(names, len(names)):
                self.call("pull", [name], None, expected)
        elif way == "one by one":
            for name in names:
                self.call("pushpull", [name], own, fused)
        elif way == "async":
            for name in shuffled:
                self.call("pushpull", [name], own, fused, async_op=True)
        elif way == "push list":
            self.call("push", shuffled, own, None, async_op=rng.random() < 0.3)
            self.call("pull", rng.sample(names, len(names)), None, expected, async_op=rng.random() < 0.3)
        elif way == "pairs":
            for name in names:
                self.call("push", [name], own, None, async_op=rng.random() < 0.3)
                self.call("pull", [name], None, expected)
        else:
            self.call("push", shuffled, own, None)

    def do_behind(self, step: dict[str, Any]) -> None:
        """Several rounds of pushes, of which one client is late: those of the others have to wait."""
        late = self.rng(self.number, "late").randrange(len(self.model.clients))
        if self.place == late:
            time.sleep(0.03)
        for turn in range(3):
            self.do_round(step, where=("behind", turn), way="pushes" if turn == 2 else "push only")

    def do_burst(self, step: dict[str, Any]) -> None:
        """Operations that nobody waits for; those on one key take effect in order."""
        rng, ops = self.rng(self.number, "burst"), []
        kinds = ["push", "pull", "pushpull"] + (["allreduce"] if self.kv.is_capable("allreduce") else [])
        elastic = self.model.rule is not None and self.model.rule.kind == "elastic"
        for i in range(rng.choice([2, 5, 12])):
            name, op = rng.choice(step["keys"]), rng.choice(kinds)
            if op == "pull":
                ops.append((name, op, None, self.expected(name)))
                continue
            given = self.given(name, ("burst", i), self.model.ranks)
            if op == "allreduce":
                total = self.total(name, given)
                if total is not None:
                    ops.append((name, op, given[self.me], (name, "is", total, 0.0)))
                continue
            new = self.model.pushed(name, given) if self.model.takes(name) else None
            if new is None:
                continue
            met = self.model.keys[name].value if elastic else None
            self.note_push(name, given, new)
            ops.append((name, op, given[self.me], None if op == "push" else self.expected(name, met)))
        # A second push of a key waits for the round of the first, and all that is behind it: clients that have
        # different orders would wait for each other.
        pushes = [name for name, op, *_ in ops if op.startswith("push")]
        alone = len(self.model.clients) == 1
        if not self.in_one_order(step["keys"]) and (alone or len(pushes) == len(set(pushes))):
            order = self.client_rng.sample([name for name, *_ in ops], len(ops))
            queues = {name: [op for op in ops if op[0] == name] for name in set(order)}
            ops = [queues[name].pop(0) for name in order]
        for name, op, own, expected in ops:
            blocking = op == "push" and self.client_rng.random() < 0.3
            self.call(op, [name], own if own is None else {name: own}, None if op == "push" else {name: expected},
                      async_op=not blocking)  # fmt: skip

    def do_pull(self, step: dict[str, Any]) -> None:
        names = self.client_rng.sample(step["keys"], len(step["keys"]))
        expected = {name: self.expected(name) for name in names}
        if self.client_rng.random() < 0.7:
            self.call("pull", names, None, expected, async_op=self.client_rng.random() < 0.3)

    def do_view(self, step: dict[str, Any]) -> None:
        if self.replicated:
            for name in step["keys"]:
                try:
                    view = self.kv.view(name)
                except UnsupportedError:
                    assert self.kv.sharded_update
                    continue
                self.check(numbers_of(view), self.expected(name), "view")
                assert tuple(view.shape) == self.model.keys[name].shape
                assert not isinstance(view, np.ndarray) or not view.flags.writeable

    def total(self, name: Any, given: Given, scale: float = 1.0) -> Flat | None:
        """The sum of all vectors."""
        key = self.model.keys[name]
        plain = Model(self.model.clients, keys={name: Key(key.shape, key.dtype, np.zeros(key.count))})
        found = plain.pushed(name, given)
        return None if found is None else found.value * scale

    def do_allreduce(self, step: dict[str, Any]) -> None:
        if not self.kv.is_capable("allreduce"):
            return
        floats = all("float" in self.model.keys[name].dtype for name in step["keys"])
        scale = self.client_rng.choice([1.0, 1.0, 0.5, -2.0]) if floats else 1.0
        own, expected = {}, {}
        for name in step["keys"]:
            if scale == -2.0 and self.model.keys[name].dtype == "bfloat16":
                scale = 0.5
        for name in step["keys"]:
            given = self.given(name, "allreduce", self.model.ranks)
            total = self.total(name, given, scale)
            if total is not None:
                own[name], expected[name] = given[self.me], (name, "is", total, 0.0)
        if own:
            more = {} if scale == 1.0 else {"scale": scale}
            self.call("allreduce", list(own), own, expected, async_op=self.client_rng.random() < 0.3, **more)

    # ---- rows

    def do_rows(self, step: dict[str, Any]) -> None:
        """Some clients push rows of the keys, others whole arrays."""
        if self.model.rule is not None and (self.model.rule.averages or self.model.rule.kind == "updater"):
            return
        for name in step["keys"]:
            key = self.model.keys[name]
            if not key.shape or key.count > 100_000 or not self.model.takes(name):
                continue
            given: Given = {}
            for place, client in enumerate(self.model.clients):
                rows = self.rng(self.number, name, place).random() < 0.7
                given |= self.given(name, "rows", client, rows=rows)
            new = self.model.pushed(name, given)
            if new is None:
                continue
            self.note_push(name, given, new)
            own = given[self.me]
            union = [v.ids for vectors in given.values() for v in vectors if isinstance(v, Rows)]
            whole = any(not isinstance(v, Rows) for vectors in given.values() for v in vectors)
            if not self.model.exact:
                union = [v.ids for rank in self.mine for v in given[rank] if isinstance(v, Rows)]
                whole = False
            changed = (
                np.arange(key.shape[0]) if whole else np.unique(np.concatenate(union)) if union else np.zeros(0, int)
            )
            if isinstance(own[0], Rows):
                self.push_rows(name, own, changed)
            else:
                self.exchange(self.client_rng.choice(["one by one", "pairs"]), [name], {name: own},
                              {name: self.expected(name)}, {name: self.expected(name)})  # fmt: skip

    def elements(self, name: Any, ids: Any) -> Any:
        width = self.model.keys[name].width
        return (np.asarray(ids, np.int64)[:, None] * width + np.arange(width)).reshape(-1)

    def push_rows(self, name: Any, own: list[Rows], changed: Any) -> None:
        key, rng = self.model.keys[name], self.worker_rng
        ids_dtype = "int32" if key.dtype == "int64" else "int64"
        given, targets = [], []
        sparse = torch is not None and rng.random() < 0.4
        for rows in own:
            shape = (len(rows.ids), *key.shape[1:])
            if sparse:
                values = torch.from_numpy(np.array(rows.values, np.int64).reshape(shape)).to(getattr(torch, key.dtype))
                tensor = torch.sparse_coo_tensor(torch.from_numpy(rows.ids)[None], values, key.shape)
                given.append(tensor)
            else:
                ids: Any = rows.ids.astype(ids_dtype)
                if torch is not None and rng.random() < 0.2:
                    ids = torch.from_numpy(ids)
                targets.append((rows.ids, self.array(name, rows.values, out=True, shape=shape)))
                given.append((ids, targets[-1][1].array))
        value: Any = given[0] if len(given) == 1 and rng.random() < 0.7 else given
        way, expected = self.client_rng.choice(["push", "whole", "rows"]), self.expected(name)
        async_op = self.client_rng.random() < 0.3
        if way == "push":
            work = self.kv.push(name, value, async_op=async_op)
            self.wait(work, lambda: None)
            if work is None:
                for _, array in targets:
                    array.fill(66)
            self.call("pull", [name], None, {name: expected})
        elif way == "whole":
            outs = self.outs(name)
            work = self.kv.pushpull(name, value, self.plain(outs), async_op=async_op)

            def check_whole() -> None:
                for out in outs:
                    self.check(out.numbers(), expected, "pushpull of rows")
                    assert out.untouched_beside()

            self.wait(work, check_whole)
        else:
            out = None
            if torch is not None and rng.random() < 0.4:
                out = torch.zeros(key.shape, dtype=getattr(torch, key.dtype)).to_sparse(1)
            work = self.kv.pushpull(name, value, out, async_op=async_op)

            def check_rows() -> None:
                for tensor in [out] if out is not None else given if sparse else []:
                    ids = tensor._indices()[0].numpy()
                    assert np.array_equal(ids, changed) or not key.width, (name, ids, changed)
                    if key.width:
                        self.check(numbers_of(tensor._values()), expected, "rows", self.elements(name, ids))
                for ids, array in targets if out is None else []:
                    if key.width:
                        self.check(array.numbers(), expected, "rows of a pair", self.elements(name, ids))

            self.wait(work, check_rows)

    def do_row_pull(self, step: dict[str, Any]) -> None:
        names = [n for n in step["keys"] if self.model.keys[n].shape and self.model.keys[n].count <= 100_000]
        if not names or self.client_rng.random() < 0.2:
            return
        rng, wanted = self.worker_rng, []
        for name in names:
            rows = self.model.keys[name].shape[0]
            ids_shape = rng.choice([(0,), (1,), (5,), (3, 4), (100,)]) if rows else (0,)
            ids = np.array([rng.randrange(rows) for _ in range(int(np.prod(ids_shape)))], np.int64).reshape(ids_shape)
            out = self.array(name, 55, out=True, shape=(*ids_shape, *self.model.keys[name].shape[1:]))
            wanted.append((name, ids, out, self.expected(name)))
        arguments: Any = [names, [w[2].array for w in wanted], [w[1] for w in wanted]]
        if len(names) == 1:
            arguments = [argument[0] for argument in arguments]
        work = self.kv.row_sparse_pull(*arguments, async_op=self.client_rng.random() < 0.3)

        def then() -> None:
            for name, ids, out, expected in wanted:
                self.check(out.numbers(), expected, "row_sparse_pull", self.elements(name, ids.reshape(-1)))
                assert out.untouched_beside()

        self.wait(work, then)

    # ---- values and rules from elsewhere

    def do_init(self, step: dict[str, Any]) -> None:
        described = [(n, tuple(s), d) for n, s, d in step["keys"] if n not in self.model.keys]
        described = [(n, s, d if torch is not None or d != "bfloat16" else "float32") for n, s, d in described]
        if not described:
            return
        arrays, outs = [], []
        for name, shape, dtype in described:
            count = int(np.prod(shape, dtype=np.int64))
            first = self.model.clients[0][0]
            self.model.init(name, shape, dtype, self.numbers(count, "init", name, first))
            arrays.append(self.array(name, self.numbers(count, "init", name, self.me)))
            outs.append(self.outs(name))
        names, values = [n for n, _, _ in described], [a.array for a in arrays]
        if step["kind"] == "broadcast":
            self.kv.broadcast(names, values, [self.plain(of_key) for of_key in outs])
            self.settled()
            for name, of_key in zip(names, outs, strict=True):
                for out in of_key:
                    self.check(out.numbers(), self.expected(name), "broadcast")
        elif self.rng(self.number, "one by one").random() < 0.3:
            for name, value in zip(names, values, strict=True):
                self.kv.init(name, value)
        else:
            self.kv.init(names, [[value, value] if self.worker_rng.random() < 0.2 else value for value in values])
        for array in arrays:
            assert array.unchanged(), "init has changed what it was given"
            array.fill(66)
        assert list(self.kv.keys) == list(self.model.keys)

    do_broadcast = do_init

    def do_assign(self, step: dict[str, Any]) -> None:
        arrays = []
        for name in step["keys"]:
            key, first = self.model.keys[name], self.model.clients[0][0]
            key.value = self.model.stored(self.numbers(key.count, "assign", name, first), key.dtype)
            key.tolerance, key.least = 0.0 if key.momentum is None else key.tolerance, None
            arrays.append(self.array(name, self.numbers(key.count, "assign", name, self.me)))
        self.kv.assign(list(step["keys"]), [a.array for a in arrays])
        for array in arrays:
            array.fill(66)
        self.forget_values(step["keys"])

    def rule_of(self, words: Sequence[Any]) -> Rule:
        kind, lr, momentum, weight_decay = words
        # What a push has met is no answer where several are an update.
        if not self.model.exact or (kind == "elastic" and not self.kv.is_capable("elastic")):
            kind, lr, momentum, weight_decay = "test", -1.0, 0.0, 0.0
        return Rule(kind, lr, momentum, weight_decay, kind == "sgd" and self.rng(self.number, "wide").random() < 0.5)

    def optimizer(self, rule: Rule) -> Any:
        if rule.kind == "test":
            return kvmpi.optim.Test(lr=rule.lr)
        if rule.kind == "elastic":
            return kvmpi.optim.Elastic(rule.lr)
        if rule.kind == "outer":
            return kvmpi.optim.Outer(lr=rule.lr, momentum=rule.momentum, nesterov=False)
        return kvmpi.optim.SGD(
            lr=rule.lr, momentum=rule.momentum, weight_decay=rule.weight_decay, multi_precision=rule.multi_precision
        )

    def do_rule(self, step: dict[str, Any]) -> None:
        rule = self.rule_of(step["rule"])
        if rule.averages and self.model.narrow != "float32":
            return
        self.model.set_rule(rule)
        self.kv.set_optimizer(self.optimizer(rule))

    def do_hyper(self, step: dict[str, Any]) -> None:
        rule = self.model.rule
        if rule is None or rule.kind == "updater" or not self.model.exact:
            return
        lr = step["lr"] / 4 if rule.kind == "elastic" else step["lr"]
        self.model.rule = replace(rule, lr=lr)
        self.kv.set_hyperparams(**{"alpha" if rule.kind == "elastic" else "lr": lr})

    def do_updater(self, step: dict[str, Any]) -> None:
        if not self.kv.is_capable("updater"):
            return

        def add_twice(key: Any, pushed: Any, stored: Any) -> None:
            assert key in self.model.keys
            stored += pushed
            stored += pushed

        self.model.set_rule(Rule("updater", 2.0))
        self.kv.set_updater(add_twice)

    def do_compression(self, step: dict[str, Any]) -> None:
        if self.kv.is_capable("compression") and not (self.model.rule is not None and self.model.rule.averages):
            self.model.narrow = {"fp16": "float16", "bf16": "bfloat16", "none": "float32"}[step["type"]]
            self.kv.set_gradient_compression({"type": step["type"]})

    def path(self, name: str) -> Path:
        own = f"{self.me}-" if len(self.model.ranks) == 1 and self.program.store == "local" else ""
        return self.folder / f"{own}{self.program.seed}-{name}"

    def do_save(self, step: dict[str, Any]) -> None:
        self.kv.save(self.path("all"))
        self.settled()
        self.files["all"] = self.model.save(True)
        for name, key in self.files["all"].keys.items() if not self.model.exact else ():
            key.least = self.floor(name).least()

    def do_save_states(self, step: dict[str, Any]) -> None:
        self.kv.save_optimizer_states(self.path("states"))
        self.files["states"] = self.model.save(False)
        self.settled()

    def do_load(self, step: dict[str, Any]) -> None:
        if "all" in self.files:
            self.kv.load(self.path("all"))
            self.model.load(self.files["all"], True)
            self.forget_values(self.files["all"].keys)

    def do_load_states(self, step: dict[str, Any]) -> None:
        name = self.rng(self.number).choice(["states", "all"])
        if name in self.files:
            self.kv.load_optimizer_states(self.path(name))
            self.model.load(self.files[name], False)

    def do_again(self, step: dict[str, Any]) -> None:
        """Another store goes on with what this one has saved."""
        self.finish_pending()
        self.do_save(step)
        old = self.model
        if self.rng(self.number).random() < 0.7:
            self.kv.close()
        self.inner = None
        self.make_store()
        self.kv.load(self.path("all"))
        self.model.load(self.files["all"], True)
        assert self.model.keys.keys() == old.keys.keys()

    # ---- the rest

    def do_barrier(self, step: dict[str, Any]) -> None:
        self.kv.barrier()
        assert all(work.done() for work, _ in self.pending)
        self.settled()
        if not self.model.exact:
            self.call("pull", step["keys"], None, {name: self.expected(name) for name in step["keys"]})

    def do_wait_all(self, step: dict[str, Any]) -> None:
        self.kv.wait_all()
        assert all(work.done() for work, _ in self.pending)

    def do_clock(self, step: dict[str, Any]) -> None:
        self.kv.clock()
        assert self.kv.stats()["clock"] > 0

    def do_client(self, step: dict[str, Any]) -> None:
        """The same on the store among the workers of this client."""
        if self.inner is None:
            inner = Runner.__new__(Runner)
            inner.__dict__.update(self.__dict__)
            inner.kv, inner.model, inner.place = self.kv.client, Model([list(self.mine)]), 0
            inner.pending, inner.files, inner.replicated = [], {}, True
            inner.seen, inner.floors = {}, {}
            self.inner = inner
            inner.number, inner.worker_rng = self.number, self.worker_rng
            inner.client_rng = self.rng(self.number, "client store", self.place)
            shapes = {name: (key.shape, key.dtype) for name, key in self.model.keys.items()}
            inner.do_init({"kind": "init", "keys": [[name, *shapes[name]] for name in step["keys"]]})
        inner = self.inner
        inner.number, inner.worker_rng = self.number, self.worker_rng
        inner.client_rng = self.rng(self.number, "client store", self.place)
        kind = inner.client_rng.choice(["round", "allreduce", "burst", "view", "rows"])
        getattr(inner, f"do_{kind}")({"keys": list(inner.model.keys)})
        inner.finish_pending()

    def do_mistake(self, step: dict[str, Any]) -> None:
        random_mistakes.make(self, step["keys"])

    def do_join(self, step: dict[str, Any]) -> None:
        """Workers have different numbers of rounds left."""
        self.finish_pending()
        rng, number = self.rng(self.number, "join"), self.number
        left = {rank: rng.choice([0, 1, 2, 4]) for rank in self.model.ranks}
        for turn in range(max(left.values())):
            self.client_rng = self.rng(number, "client", self.place, turn)
            self.do_round(step, [rank for rank in self.model.ranks if left[rank] > turn], ("join", turn))
        self.finish_pending()
        self.kv.join()
        deadline_s = time.monotonic() + 30
        while True:
            try:
                for name in step["keys"]:
                    out = self.outs(name)[0]
                    self.kv.pull(name, out.array)
                    key = self.model.keys[name]
                    self.check(out.numbers(), (name, "is", key.value, key.tolerance), "pull after join")
                break
            except AssertionError:
                if len(self.model.clients) == 1 or time.monotonic() > deadline_s:
                    raise
        self.joined = True

    def do_end(self, step: dict[str, Any]) -> None:
        self.finish_pending()
        if not (self.model.exact or self.joined):
            self.do_barrier({"keys": list(self.model.keys)})
            self.settled()
        if step["how"] == "with":
            with self.kv:
                pass
        else:
            self.kv.close()
