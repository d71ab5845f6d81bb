"""Random trainings with ``Trainer`` and ``DistributedOptimizer``, where the store updates and where workers do."""

from __future__ import annotations

import contextlib
import copy
import time
from typing import Any

import numpy as np
import torch
from training_model import EPS, Encoder, Flat, Key, Rows, Rule, noise, rounded
from training_rules import CLASSES, Rules, Training, numbers, tensor

import kvmpi.torch

#: What a rule is told of, by the name of torch's class.
OPTIONS = {"SGD": ["lr", "momentum", "nesterov", "weight_decay"], "Adam": ["lr", "betas", "eps", "weight_decay"],
           "AdamW": ["lr", "betas", "eps", "weight_decay"],
           "Adagrad": ["lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"]}  # fmt: skip
HALF = ("float16", "bfloat16")


class Model(torch.nn.Module):
    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(params)

    def forward(self, gradients: dict[int, torch.Tensor]) -> torch.Tensor:
        """A loss with these gradients."""
        some = [(self.weights[k] * g).sum().double() for k, g in gradients.items()]
        return torch.stack(some).sum() if some else torch.zeros((), dtype=torch.float64, requires_grad=True)


class Loops(Training):
    def begin(self) -> None:
        options, program = self.program.options, self.program
        self.api, self.in_store = options["api"], options["in_store"]
        self.trains = self.api != "distributed"
        self.keys = [
            Key(tuple(shape), dtype, noise(int(np.prod(shape, dtype=np.int64)), program.seed, 999, number))
            for number, (shape, dtype) in enumerate(program.keys)
        ]
        self.weights = [[key.value.copy() for key in self.keys] for _ in self.clients]
        self.unknown = [set(range(len(self.keys))) for _ in self.clients]
        # Torch computes one norm of all gradients, in the narrowest of their dtypes.
        clips = any("clip" in step for step in program.steps)
        self.rounds = clips and any(dtype == "float32" for _, dtype in program.keys)
        self.most, self.saved, self.left = 1.0, None, dict.fromkeys(self.ranks, 10**6)
        self.make([key.value + (self.me != self.clients[0][0]) for key in self.keys])
        self.twins = [torch.nn.Parameter(torch.from_numpy(key.value.copy()).reshape(key.shape)) for key in self.keys]
        self.oracle = self.optimizer(self.twins, foreach=False)
        words = options.get("compression", {"type": "none"})
        if words["type"] != "none":
            self.kv.set_gradient_compression(words)
        self.encoders = [Encoder(words["type"], words.get("threshold", 0.5)) for _ in self.clients]

    def optimizer(self, params: list[torch.nn.Parameter], **more: Any) -> torch.optim.Optimizer:
        options = self.program.options
        groups = [{"params": [params[i] for i in of], **own} for of, own in options["groups"]]
        found: torch.optim.Optimizer = getattr(torch.optim, options["optimizer"])(groups, **more)
        return found

    def rule(self) -> kvmpi.optim.Rule:
        """What the torch optimizer says, which then has no other use than to be looked at."""
        options = self.program.options
        (_, first), *others = options["groups"]
        found: kvmpi.optim.Rule = CLASSES[options["optimizer"].lower()](**first, multi_precision=options["wide"])
        for keys, own in others:
            found = found.for_keys(keys, **own)
        return found

    def make(self, values: list[Flat]) -> None:
        options = self.program.options
        self.params = [
            torch.nn.Parameter(tensor(v, key.shape, key.dtype)) for v, key in zip(values, self.keys, strict=True)
        ]
        self.model, self.inner = Model(self.params), self.optimizer(self.params)
        in_store = self.in_store if options["says_where"] else None
        if self.trains:
            optimizer = self.rule() if self.api == "rule" else self.inner
            self.trainer = kvmpi.torch.Trainer(self.params, optimizer, self.kv, in_store)
            assert self.trainer.update_on_kvstore == self.in_store
            self.loop: Any = self.inner
        else:
            named = {"model": self.model, "names": self.model.named_parameters(), "": None}[options["named"]]
            self.loop = kvmpi.torch.DistributedOptimizer(
                self.inner, self.kv, named, update_on_kvstore=in_store, push=options["push"],
                average=options["average"], **options["buckets"],
            )  # fmt: skip
            assert self.loop.update_on_kvstore == self.in_store
        self.scheduler: Any = None
        if options["scheduler"] == "one cycle":
            cycle = options["optimizer"] != "Adagrad"
            self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.loop, 0.3, 40, cycle_momentum=cycle)
        elif options["scheduler"] == "exponential":
            self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.loop, 0.8)

    # ---- what gradients there are

    def gradient(self, number: int, rank: int, part: int = 0) -> Flat | Rows | None:
        """That of one worker; what the weights add to it comes later."""
        key, rng = self.keys[number], self.rng("gradient", number, rank)
        sparse = number in self.program.options["sparse"]
        if self.left[rank] <= 0 or number in self.program.options["never"]:
            return None
        # A backward pass that has no gradient at all begins no exchange, which the others of its client would look at.
        alike = self.api == "distributed" and self.looks
        absent = self.rng("nobody", number).random() < 0.07 or (not alike and rng.random() < 0.1)
        if absent and (self.number > 1 or not sparse):
            return None
        where = (self.program.seed, self.number, number, rank, part)
        if sparse:
            ids = np.array([rng.randrange(key.shape[0]) for _ in range(rng.choice([0, 1, 3, 9]))], np.int64)
            return Rows(ids, noise(len(ids) * key.width, *where).reshape(len(ids), key.width))
        return noise(key.value.size, *where)

    def of_worker(self, number: int, rank: int, step: dict[str, Any], weights: Flat) -> Flat | Rows | None:
        """With what the weights add to it."""
        found = self.gradient(number, rank)
        if isinstance(found, np.ndarray):
            if self.program.options["feedback"]:
                found = found + self.program.options["feedback"] * weights
            if step.get("accumulate"):
                found = found + self.gradient(number, rank, 1)
        return found

    def step(self, step: dict[str, Any]) -> None:
        self.together()
        self.looks = "clip" in step or "skip" in step
        self.change(step)
        for number, param in enumerate(self.params):
            param.requires_grad_(number not in step.get("frozen", ()))
        for turn in self.turns():
            ranks = [rank for client in turn for rank in self.clients[client]]
            if not any(self.left[rank] > 0 for rank in ranks):
                continue
            mine = self.place in turn and self.left[self.me] > 0
            options = [{n: v for n, v in group.items() if n != "params"} for group in self.inner.param_groups]
            if mine:
                self.work(step)
            self.simulate(step, turn, options)
            if mine:
                self.look(step)
            self.together()
        if self.scheduler is not None and not step.get("skip"):
            self.scheduler.step()

    def change(self, step: dict[str, Any]) -> None:
        for number, changes in step.get("options", {}).items():
            self.inner.param_groups[int(number)].update(changes)
        if "rate" in step and self.trains:
            self.trainer.set_learning_rate(step["rate"])
            assert self.trainer.learning_rate == step["rate"]
            if self.api == "rule":  # keys with rates of their own keep them
                self.inner.param_groups[0]["lr"] = step["rate"]
        if step.get("save") and self.number > 1:
            self.save("states")
            self.saved = self.remembered()
        if step.get("load") and self.saved is not None:
            self.restore("states", self.saved)
        if step.get("again"):
            self.again()

    # ---- the worker

    def work(self, step: dict[str, Any]) -> None:
        options = self.program.options
        self.loop.zero_grad()
        trained = [n for n in range(len(self.keys)) if n not in step.get("frozen", ())]
        own: dict[int, torch.Tensor] = {}
        for number in trained:
            found, key, param = self.gradient(number, self.me), self.keys[number], self.params[number]
            if isinstance(found, Rows):
                rows = tensor(found.values, (found.ids.size, *key.shape[1:]), key.dtype)
                own[number] = torch.sparse_coo_tensor(torch.from_numpy(found.ids)[None], rows, key.shape)
            elif found is not None:
                own[number] = tensor(found, key.shape, key.dtype)
                if options["feedback"]:
                    own[number] = own[number] + options["feedback"] * param.detach()
        if self.trains:
            for number, gradient in own.items():
                self.params[number].grad = gradient
            if step.get("clip"):
                self.trainer.allreduce_grads()
                torch.nn.utils.clip_grad_norm_([p for n, p in enumerate(self.params) if n in trained], step["clip"])
                self.trainer.update(step["batch"])
            else:
                self.trainer.step(step["batch"])
            return
        if step.get("accumulate"):
            second = {n: tensor(self.gradient(n, self.me, 1), self.keys[n].shape, self.keys[n].dtype) for n in own}
            with self.loop.no_sync():
                self.model(second).backward()
        self.model(own).backward()
        if step.get("clip"):
            torch.nn.utils.clip_grad_norm_(self.params, step["clip"])
        if not step.get("skip"):
            self.loop.step()
        if self.asynchronous:
            self.loop.synchronize()

    # ---- what it must come to

    def simulate(self, step: dict[str, Any], turn: list[int], options: list[dict[str, Any]]) -> None:
        sums = {client: self.of_client(client, step) for client in turn}
        if self.in_store:
            self.in_servers(step, turn, sums, options)
        else:
            assert len(turn) == len(self.clients)
            self.in_workers(step, sums, options)

    def of_client(self, client: int, step: dict[str, Any]) -> dict[int, Flat | Rows]:
        """By key: the sum over the workers of a client that have one."""
        found: dict[int, Flat | Rows] = {}
        for number in range(len(self.keys)):
            if number in step.get("frozen", ()):
                continue
            some = [self.of_worker(number, rank, step, self.weights[client][number]) for rank in self.clients[client]]
            if given := [one for one in some if one is not None]:
                found[number] = Rules.summed(given)
                self.unknown[client].discard(number)
        return found

    def clipped(self, grads: dict[int, Any], most: float) -> dict[int, Any]:
        norm = np.sqrt(sum(float(np.sum(g * g)) for g in grads.values()))
        return {number: g * np.minimum(1.0, most / (norm + 1e-6)) for number, g in grads.items()}

    def divisor(self, client: int, step: dict[str, Any]) -> float:
        if self.trains:
            return float(step["batch"])
        if self.program.options["average"] is False:
            return 1.0
        return float(len(self.clients[client] if "async" in self.program.store else self.ranks))

    def in_servers(
        self, step: dict[str, Any], turn: list[int], sums: dict[int, dict[int, Any]], options: list[dict[str, Any]]
    ) -> None:
        if step.get("skip"):
            return
        # A client of one worker whose pushes are updates of their own leaves out what it has not.
        alone = [c for c in turn if "async" in self.program.store and len(self.clients[c]) == 1]
        in_step = self.api == "distributed" and self.program.options["push"] == "step"
        pushed: dict[int, list[Any]] = {}
        for client in turn:
            if not any(self.left[rank] > 0 for rank in self.clients[client]):
                continue
            mine = dict(sums[client])
            if step.get("clip"):
                size = 1.0 if self.trains else self.shown(client)
                mine = {
                    n: g * size for n, g in self.clipped({n: g / size for n, g in mine.items()}, step["clip"]).items()
                }
            for number, key in enumerate(self.keys):
                if number in step.get("frozen", ()):
                    continue
                one = mine.get(number)
                if one is None:
                    if client in alone or (in_step and ("async" in self.program.store or len(self.clients) == 1)):
                        continue
                    one = np.zeros(key.value.size)
                    # Of what is known to have rows; where clients learn that by themselves, of what may have some.
                    known = number not in self.unknown[client]
                    sparse = number in self.program.options["sparse"] if known else len(self.clients) > 1
                    if self.trains and sparse and key.shape:
                        one = Rows(np.zeros(0, np.int64), np.zeros((0, key.width)))
                scale = 1.0 / self.divisor(client, step)
                first = 1.0 / self.program.steps[0]["batch"] if self.trains else scale
                if self.api == "distributed" and self.program.options["average"] is not False:
                    even = len(self.ranks) % len(self.clients) == 0
                    if in_step:
                        first = len(self.clients[client]) * scale if even else 1.0
                    elif not even and "async" in self.program.store:
                        first = 1.0
                # What is pushed, and what the rule makes of it.
                one = Rows(one.ids, one.values * (scale / first)) if isinstance(one, Rows) else one * (scale / first)
                one = self.encoders[client](number, key.dtype, one)
                one = Rows(one.ids, one.values * first) if isinstance(one, Rows) else one * first
                pushed.setdefault(number, []).append(one)
        for number, some in pushed.items():
            group = next(g for g, (of, _) in enumerate(self.program.options["groups"]) if number in of)
            name = self.program.options["optimizer"]
            h = {option: options[group][option] for option in OPTIONS[name]} | {"rescale_grad": 1.0}
            h["multi_precision"] = self.api == "rule" and self.program.options["wide"]
            h["lr"] = float(h["lr"])
            changed = self.keys[number].update(Rule(name.lower(), h), number, some)
            for client in turn:
                changed = changed if not self.asynchronous else self.rows_of(client, number, changed)
                self.weights[client][number][changed] = self.keys[number].value[changed]
        for client in alone:
            for number, key in enumerate(self.keys):
                if number not in pushed and number not in step.get("frozen", ()):
                    self.weights[client][number] = key.value.copy()
        if in_step and "async" in self.program.store:
            for client in turn:
                for number, key in enumerate(self.keys):
                    if number not in step.get("frozen", ()):
                        self.weights[client][number] = key.value.copy()

    def rows_of(self, client: int, number: int, changed: Any) -> Any:
        """An asynchronous store answers a push of rows with these, and others with all."""
        return changed if number in self.program.options["sparse"] else np.ones_like(changed)

    def shown(self, client: int) -> float:
        """What the sum over a client is divided by where it is clipped between backward and step."""
        if self.program.options["average"] is False:
            return 1.0
        return float(len(self.clients[client]))

    def in_workers(self, step: dict[str, Any], sums: dict[int, dict[int, Any]], options: list[dict[str, Any]]) -> None:
        grads: dict[int, Any] = {}
        for client, of_client in sums.items():
            if self.trains:  # which pushes zeros for what nobody has
                zeros = {
                    n: np.zeros(key.value.size) for n, key in enumerate(self.keys) if n not in step.get("frozen", ())
                }
                of_client = zeros | of_client
            for number, one in of_client.items():
                scale = 1.0 / self.divisor(client, step)
                if isinstance(one, Rows):
                    dense = np.zeros((self.keys[number].shape[0], self.keys[number].width))
                    np.add.at(dense, one.ids, one.values)
                    one = dense.reshape(-1)
                if self.trains:  # which divides what has come back
                    scale = 1.0
                encoded = self.encoders[client](number, self.keys[number].dtype, one * scale)
                grads[number] = grads.get(number, 0.0) + encoded
        if step.get("clip"):
            grads = self.clipped(grads, step["clip"])
        if self.trains:
            grads = {number: g / step["batch"] for number, g in grads.items()}
        for group, own in zip(self.oracle.param_groups, options, strict=True):
            group.update(copy.deepcopy({n: v for n, v in own.items() if n != "foreach"}))
        for number, twin in enumerate(self.twins):
            twin.grad = None
            if number in step.get("frozen", ()):
                continue
            if number in grads:
                twin.grad = torch.from_numpy(np.array(grads[number])).reshape(twin.shape)
            elif self.trains:
                twin.grad = torch.zeros_like(twin)
            if number in self.program.options["sparse"] and twin.grad is not None:
                ids = {int(i) for one in sums.values() if number in one for i in one[number].ids}
                rows = torch.tensor(sorted(ids), dtype=torch.int64)
                twin.grad = torch.sparse_coo_tensor(rows[None], twin.grad[rows], twin.shape)
        if not step.get("skip"):
            self.oracle.step()
        for client in range(len(self.clients)):
            self.weights[client] = [numbers(twin) for twin in self.twins]

    def look(self, step: dict[str, Any]) -> None:
        for number, param in enumerate(self.params):
            self.check(f"{self.api}: key {number} {self.keys[number].shape} after step {self.number}", number, param)
            if self.keys[number].dtype in HALF and self.keys[number].master is None:
                self.keys[number].value = numbers(param)
                for weights in self.weights:
                    weights[number] = self.keys[number].value.copy()

    def check(self, what: str, number: int, found: torch.Tensor) -> None:
        expected, dtype = self.weights[self.place][number], self.keys[number].dtype
        self.most = max(self.most, np.abs(expected[np.isfinite(expected)]).max(initial=0.0))
        ulps = 1.0 if dtype in HALF else 400
        if dtype == "float64" and self.rounds:
            ulps *= EPS["float32"] / EPS["float64"]
        self.compare(what, found, expected, dtype, 8.0 if dtype in HALF else self.most, ulps)

    # ---- states

    def remembered(self) -> Any:
        told = [{n: v for n, v in group.items() if n != "params"} for group in self.inner.param_groups]
        return copy.deepcopy(([key.copy() for key in self.keys], self.oracle.state_dict(), told))

    def save(self, name: str) -> None:
        if self.trains:
            self.trainer.save_states(self.path(name))
        elif self.in_store:
            self.kv.save_optimizer_states(self.path(name))
        elif self.kv.rank == 0:
            torch.save(self.loop.state_dict(), self.path(name))
        self.kv.barrier()

    def restore(self, name: str, saved: Any) -> None:
        keys, state, told = copy.deepcopy(saved)
        if self.trains:
            self.trainer.load_states(self.path(name))
            if self.api == "rule":
                assert self.trainer.learning_rate == told[0]["lr"]
                for group, own in zip(self.inner.param_groups, told, strict=True):
                    group.update(own)
            for number, (group, own) in enumerate(zip(self.inner.param_groups, told, strict=True)):
                for option in OPTIONS.get(self.program.options["optimizer"], ["lr"]):
                    assert group[option] == own[option], (number, option, group[option], own[option])
        elif self.in_store:
            self.kv.load_optimizer_states(self.path(name))
        else:
            self.loop.load_state_dict(torch.load(self.path(name), weights_only=True))
        for key, other in zip(self.keys, keys, strict=True):
            key.state, key.step, key.master = other.state, other.step, other.master
            if key.master is not None:
                key.master = np.where(rounded(key.master, key.dtype) == key.value, key.master, key.value)
        self.oracle.load_state_dict(state)

    def again(self) -> None:
        """Another store goes on with what this one has saved, and with worker 0's weights."""
        if self.number == 1:
            return
        self.save("again")
        saved = self.remembered()
        self.kv.close()
        self.make_store()
        self.make([numbers(param) for param in self.params])
        if self.api != "trainer":
            for group, own in zip(self.inner.param_groups, saved[2], strict=True):
                group.update(own)
        self.scheduler = None
        self.restore("again", saved)
        self.unknown = [set(range(len(self.keys))) for _ in self.clients]
        for number, key in enumerate(self.keys):
            key.value = self.weights[0][number].copy()
            for weights in self.weights:
                weights[number] = key.value.copy()
        words = self.program.options.get("compression", {"type": "none"})
        if words["type"] != "none":
            self.kv.set_gradient_compression(words)
        self.encoders = [Encoder(words["type"], words.get("threshold", 0.5)) for _ in self.clients]

    # ---- the end

    def end(self) -> None:
        if (join := self.program.options.get("join")) is not None:
            self.left = {rank: join[rank % len(join)] for rank in self.ranks}
            batch = self.program.options["batch"]
            for _ in range(max(self.left.values())):
                self.number += 1
                self.step({"batch": batch})
                self.left = {rank: count - 1 for rank, count in self.left.items()}
            (self.trainer if self.trains else self.loop).join()
            if self.in_store:
                self.await_end()
        elif self.api == "distributed" and self.rng("detach").random() < 0.3:
            self.loop.detach()
        self.kv.close()

    def await_end(self) -> None:
        """The others of a synchronous store are not through yet."""
        deadline_s = time.monotonic() + 30
        keyed = (self.trainer if self.trains else self.loop)._params
        keys = {id(tensor): key for tensor, key in zip(keyed.tensors, keyed.keys, strict=True)}
        while True:
            for number, param in enumerate(self.params):
                self.kv.pull(keys[id(param)], param.detach())
                self.weights[self.place][number] = self.keys[number].value
            with contextlib.ExitStack() as stack:
                if len(self.clients) > 1 and time.monotonic() < deadline_s:
                    stack.enter_context(contextlib.suppress(AssertionError))
                for number, param in enumerate(self.params):
                    self.check(f"key {number} after join", number, param)
                return
