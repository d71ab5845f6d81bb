"""Checks of ``DistributedOptimizer`` where the store updates and weights come back; each makes its stores."""

from __future__ import annotations

import copy
import io
import re
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optimizer_loops as loops
import torch
from optimizer_loops import (
    STEPS,
    adamw,
    clients_of,
    convolutions,
    expect,
    flat,
    image_shard,
    loss_of,
    mlp,
    plain_steps,
    same_in_all,
    sgd,
    shard,
    training,
    winding,
    winding_steps,
)
from torch import nn

import kvmpi
from kvmpi import optim
from kvmpi.config import Config
from kvmpi.errors import ConfigError, KVError
from kvmpi.torch import DistributedOptimizer


def loops_of_people(store: str) -> None:
    for loop in (plain_steps, loops.gradients_in_place, loops.zeroed_by_the_model, loops.schedules, loops.accumulation,
                 loops.only_without_sync, loops.checkpointed(False), loops.one_has_failed):  # fmt: skip
        with kvmpi.create(store) as kv:
            same_in_all(kv, loop, update_on_kvstore=True)
    with kvmpi.create(store) as kv:
        same_in_all(kv, plain_steps, optimizer=adamw, update_on_kvstore=True, parameters_only=True)
    with kvmpi.create(store) as kv:
        same_in_all(kv, plain_steps, optimizer=loops.adagrad, update_on_kvstore=True)
    with kvmpi.create(store) as kv:
        same_in_all(kv, plain_steps, make=convolutions, get=image_shard, update_on_kvstore=True)


def groups_of_parameters(store: str) -> None:
    """Groups with options of their own, which schedulers change by group; one that is added; one that catches up."""

    def groups(model: Any) -> torch.optim.Optimizer:
        decayed = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() == 1]
        return torch.optim.AdamW([{"params": rest, "lr": 0.02, "weight_decay": 0.0}, {"params": decayed}], lr=0.01)

    def rates_of_their_own(model: Any, optimizer: Any, shards: Any) -> None:
        slower, faster = lambda step: 0.5**step, lambda step: 1.0 + 0.5 * step
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [slower, faster])
        for step in range(6):
            plain_steps(model, optimizer, lambda _, step=step: shards(step), 1)
            schedule.step()
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.05, 0.1  # alike from here on
        plain_steps(model, optimizer, shards)

    def grown(model: Any, optimizer: Any, shards: Any) -> None:
        plain_steps(model, optimizer, shards)
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.3, "momentum": 0.5})
        plain_steps(model, optimizer, shards)

    def partly_frozen(seed: int) -> nn.Module:
        model = mlp(seed)
        model[0].requires_grad_(False)
        return model

    def last(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model[2:].parameters(), lr=0.1, momentum=0.9)

    for loop in (loops.schedules, rates_of_their_own):
        with kvmpi.create(store) as kv:
            same_in_all(kv, loop, optimizer=groups, update_on_kvstore=True)
    with kvmpi.create(store) as kv:
        same_in_all(kv, grown, make=partly_frozen, optimizer=last, update_on_kvstore=True)


def rule_of_the_user(store: str) -> None:
    """Who sets the store's optimizer says what becomes of the sum; schedulers of the given one reach it."""
    with kvmpi.create(store) as kv:
        kv.set_optimizer(optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.01, rescale_grad=1 / kv.num_workers))
        same_in_all(kv, loops.schedules)
    with kvmpi.create(store) as kv:
        kv.set_optimizer(optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.01))
        same_in_all(kv, loops.schedules, average=True)


def graphs_that_change(store: str) -> None:
    """Rules of stores take what nobody has used for a gradient of zero."""

    class Filled(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                if p.grad is None and p.requires_grad:
                    p.grad = torch.zeros_like(p)
            return super().step(closure)

    def filled(model: Any) -> torch.optim.Optimizer:
        kind = torch.optim.SGD if model.training_in_store else Filled
        return kind(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    made: list[Any] = []

    def make(seed: int) -> Any:
        made.append(winding(seed))
        made[-1].training_in_store = len(made) == 2
        return made[-1]

    def loop(model: Any, optimizer: Any, shards: Any) -> None:
        winding_steps(model, optimizer, shards)

    with kvmpi.create(store) as kv:
        same_in_all(kv, loop, make=make, optimizer=filled, update_on_kvstore=True)


def frozen_in_turn(store: str) -> None:
    """What is frozen stays as it is; memory is that of a few plans, and there are no keys for gradients."""
    for which in (loops.one_in_turn, loops.all_sets_in_turn):
        with kvmpi.create(store) as kv:
            made, empty, alive = list[Any](), kv.empty, list[int]()

            def counted(*arguments: Any, made: Any = made, empty: Any = empty, **options: Any) -> Any:
                block = empty(*arguments, **options)
                made.append(weakref.ref(block))
                return block

            def noted(step: int, which: Any = which, made: Any = made, alive: Any = alive, kv: Any = kv) -> Any:
                if step in (16, 47):
                    alive += [sum(ref() is not None for ref in made), len(kv.keys)]
                return which(step)

            kv.empty = counted
            same_in_all(kv, loops.freezing(noted, 48), update_on_kvstore=True, optimizer=sgd_of_trained)
            assert alive[3] == alive[1], f"{which.__name__}: {alive}"
            assert alive[2] <= max(alive[0], 4 * 6), f"{which.__name__}: {alive}"


def sgd_of_trained(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def converted(store: str) -> None:
    """The store holds weights as they were: it says so before anything leaves."""
    with training(store) as (kv, model, optimizer):
        plain_steps(model, optimizer, lambda step: [shard(step, kv.rank)], 2)
        optimizer.synchronize()
        model.float()
        _, x, y = shard(2, kv.rank)
        backward = nn.functional.cross_entropy(model(x.float()), y).backward
        expect(ConfigError, "0.weight is of torch.float32 now, and the store", backward)
        model.double()
        optimizer.zero_grad()
        loss_of(model, [shard(2, kv.rank)]).backward()
        optimizer.step()
    # Here both orders of the dimensions have the same shape.
    with training(store, make=lambda _: nn.Conv2d(2, 2, 2).double()) as (kv, model, optimizer):
        model(torch.ones(1, 2, 3, 3).double()).sum().backward()
        optimizer.step()
        optimizer.synchronize()
        model.to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        backward = model(torch.ones(1, 2, 3, 3).double()).sum().backward
        expect(ConfigError, "weight has its dimensions in the order (0, 2, 3, 1) in memory now", backward)


class Attentive(nn.Module):
    """The projection inside ``attention`` is never called; ``head`` is."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x).unsqueeze(1)
        return self.head(self.attention(x, x, x, need_weights=False)[0].squeeze(1))


def attentive(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Attentive().double()


def layers_wait_for_their_own(store: str) -> None:
    with training(store, attentive, bucket_bytes=1) as (kv, model, optimizer):
        names, waits, wait = optimizer._params.names, list[str](), optimizer._weights.wait

        def noted(indices: Any = None) -> None:
            waits.extend(names[i] for i in indices or () if i in optimizer._weights._flights)
            wait(indices)

        for step in range(3):
            optimizer.zero_grad()
            if step == 2:
                handles = [
                    m.register_forward_hook(lambda m, *_: waits.append(type(m).__name__)) for m in model.modules()
                ]
                optimizer._weights.wait = noted
            loss_of(model, [shard(step, kv.rank)]).backward()
            optimizer.step()
            assert optimizer._weights.in_flight
        for handle in handles:
            handle.remove()
        # What a layer waits for stands before its name, which is noted when its forward is done.
        begin, middle, end = waits.index("Linear"), waits.index("MultiheadAttention"), waits.index("Attentive")
        assert sorted(waits[:begin]) == ["body.bias", "body.weight"], waits
        assert set(waits[begin + 1 : middle]) == {n for n in names if n.startswith("attention")}, waits
        assert sorted(waits[middle + 1 : end - 1]) == ["head.bias", "head.weight"], waits
        held = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert not optimizer._weights.in_flight
        for name, key in zip(names, optimizer._params.keys, strict=True):
            stored = torch.empty_like(held[name])
            kv.pull(key, stored)
            assert torch.equal(held[name], stored), name
    with kvmpi.create(store) as kv:
        same_in_all(kv, plain_steps, make=attentive, update_on_kvstore=True)


def _saved(model: nn.Module) -> Any:
    """The last weight as it comes out of a file."""
    file = io.BytesIO()
    torch.save(model[2].weight, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _called(model: nn.Module) -> Any:
    return torch.func.functional_call(model, dict(model.named_parameters()), shard(0, 0)[1])


#: What reads weights and is no layer's forward; whether they are all waited for, and what is found.
READERS = {
    "operator": lambda model: model[2].weight * 2,
    "moving average": lambda model: torch.zeros_like(model[2].weight).lerp_(model[2].weight, 0.5),
    "list": lambda model: torch.nn.utils.parameters_to_vector(model.parameters()),
    "foreach": lambda model: torch.stack(torch._foreach_norm(list(model.parameters()))),
    "data": lambda model: model[2].weight.data.clone(),
    "numpy": lambda model: torch.from_numpy(np.array(model[2].weight.detach())),
    "text": lambda model: torch.tensor([float(word) for word in re.findall(r"-?\d+\.\d+", repr(model[2].weight))]),
    "copy": lambda model: copy.deepcopy(model)[2].weight,
    "copy of one": lambda model: copy.copy(model[2].weight),
    "file": _saved,
    "subclass": lambda model: model[2].weight.as_subclass(torch.Tensor).clone(),
    "another's weight": lambda model: nn.functional.linear(torch.ones(2, 7, dtype=torch.float64), model[2].weight),
    "functional call": _called,
    "compiled": lambda model: torch.compile(lambda weight: weight.sin() * 2, backend="eager")(model[2].weight),
}


def whoever_reads_waits(store: str) -> None:
    """Weights are read while another worker is late: what is found is what comes. Who only looks at them goes on."""
    with training(store) as (kv, model, optimizer):
        kind = type(model[2].weight)
        # A compiler takes longer to read than all else takes, and does not know where weights come from.
        compiler = kv.type == "mpi" and not kv.sharded_update
        for name, read in READERS.items():
            if name == "compiled" and not compiler:
                continue
            for late_s in (0.0, 0.1):
                optimizer.zero_grad()
                time.sleep(late_s if kv.rank == kv.num_workers - 1 else 0.0)
                loss_of(model, [shard(int(late_s > 0), kv.rank)]).backward()
                optimizer.step()
                optimizer.zero_grad()
                assert model[2].weight.grad is None
                assert isinstance(model[2].weight, nn.Parameter)
                assert [tuple(p.shape) for p in model.parameters()] == [tuple(p.shape) for p in mlp(0).parameters()]
            assert optimizer._weights.in_flight, f"{name}: nothing was under way"
            found = read(model).detach()
            assert type(model[2].weight) is kind, name
            optimizer.synchronize()
            assert torch.equal(found, read(model).detach()), name
            assert {type(p) for p in model.parameters()} == {kind}


def first_layers_first(store: str) -> None:
    """Buckets leave in the order that the first worker of the client has found, and everybody trains alike.

    It is found anew when they have left in that order for a while.
    """
    from kvmpi.torch import buckets
    from kvmpi.torch.exchange import Exchange

    schedule, send, passes, timed = buckets.schedule, Exchange._send, list[list[int]](), list[tuple[Any, Any]]()

    def found(full_s: Any, cost_s: Any) -> list[int]:
        timed.append((full_s, cost_s))
        in_turn = list(range(len(full_s)))
        assert sorted(schedule(full_s, cost_s)) == in_turn
        return orders(len(full_s))[len(timed) - 1] if kv.mpi_rank == 0 else in_turn

    def orders(count: int) -> list[list[int]]:
        return [[1, 0, *range(count - 1, 1, -1)], [*range(1, count), 0], [count - 1, *range(count - 1)]]

    def noted(self: Exchange, numbers: list[int]) -> None:
        for number in numbers:
            if not passes or len(passes[-1]) == len(self._buckets):
                passes.append([])
            passes[-1].append(number)
        send(self, numbers)

    with kvmpi.create(store) as kv:
        buckets.schedule, Exchange._send = found, noted
        try:
            same_in_all(kv, lambda *given: plain_steps(*given, 12), update_on_kvstore=True, bucket_bytes=1)
        finally:
            buckets.schedule, Exchange._send = schedule, send
        count = len(passes[0])
        assert count > 3
        assert passes == [order for order in [list(range(count)), *orders(count)] for _ in range(3)], passes
        assert len(timed) == 3, timed
        for full_s, cost_s in timed:
            assert min(full_s) > 0
            assert sorted(full_s) == full_s, "the last layers' gradients are there first"
            assert max(cost_s) > 0


def shares_of_first_layers_first(store: str) -> None:
    """Nothing comes back before the backward is over; then the weights of first layers do, and ever more at once."""
    with training(store, bucket_bytes=1) as (kv, model, optimizer):
        assert kv.sharded_update == (kv.num_workers > 1)
        calls = list[tuple[str, list[str]]]()
        names = dict(zip(optimizer._params.keys, optimizer._params.names, strict=True))

        def noting(op: str) -> Callable[..., Any]:
            method = getattr(kv, op)

            def call(keys: Any, *arguments: Any, **named: Any) -> Any:
                calls.append((op, [names[key] for key in keys]))
                return method(keys, *arguments, **named)

            return call

        for step in range(3):
            optimizer.zero_grad()
            if step == 2:
                for op in ("push", "pull", "pushpull"):
                    setattr(kv, op, noting(op))
            loss_of(model, [shard(step, kv.rank)]).backward()
            optimizer.step()
        pushed = [name for op, some in calls if op == "push" for name in some]
        pulled = [some for op, some in calls if op == "pull"]
        assert [op for op, _ in calls] == ["push"] * len(pushed) + ["pull"] * len(pulled), calls
        assert [name for some in pulled for name in some] == pushed[::-1], calls
        assert sorted(pushed) == sorted(names.values())
        assert [len(some) for some in pulled[:-1]] == [2**i for i in range(len(pulled) - 1)], calls
        optimizer.synchronize()


def compiled(store: str) -> None:
    """Models compile as they do alone, in one piece; or in a piece for each layer if they are compiled afterwards."""

    def whole(seed: int) -> Any:
        return torch.compile(mlp(seed), backend="aot_eager")

    class Own(nn.Module):  # in place, a module of torch's own is not compiled at all
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.body = mlp(seed)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    def in_place(seed: int) -> Any:
        model = Own(seed)
        model.compile(backend="eager")
        return model

    def inside(seed: int) -> Any:
        model = mlp(seed)
        model[2] = torch.compile(model[2], backend="eager")
        return model

    def afterwards(model: Any, optimizer: Any, shards: Any) -> None:
        plain_steps(torch.compile(model, backend="eager"), optimizer, shards)

    from torch._dynamo.utils import counters  # with the compiler, which takes longer to load than all of torch

    for make, loop, most in (
        (whole, plain_steps, 1), (in_place, plain_steps, 1), (inside, plain_steps, 1), (mlp, afterwards, 6)
    ):  # fmt: skip
        torch._dynamo.reset()
        counters.clear()
        with kvmpi.create(store) as kv:
            same_in_all(kv, loop, make=make, alone=plain_steps, oracle=mlp, update_on_kvstore=True)
        assert 1 <= counters["stats"]["unique_graphs"] <= most, (make.__name__, counters["stats"])


def compiled_steps(store: str) -> None:
    """That of the optimizer, or all of a step."""

    def its_step(model: Any, optimizer: Any, shards: Any) -> None:
        step_of = torch.compile(optimizer.step, backend="eager")
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, shards(step)).backward()
            step_of()

    for loop in (its_step, loops.compiled_steps):
        with kvmpi.create(store) as kv:
            same_in_all(kv, loop, alone=plain_steps, update_on_kvstore=True)


def too_late(store: str) -> None:
    """What would change gradients that have left, or use weights that are no more, is an error."""

    def backward(kv: Any, model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        loss_of(model, [shard(0, kv.rank)]).backward()

    with training(store) as (kv, model, optimizer):
        backward(kv, model, optimizer)
        optimizer.step()
        backward(kv, model, optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        expect(ConfigError, "changed after the backward", optimizer.step)
    with training(store) as (kv, model, optimizer):
        backward(kv, model, optimizer)
        model[0].weight.grad = torch.ones_like(model[0].weight)
        expect(ConfigError, "changed after the backward", optimizer.step)
    with training(store) as (kv, model, optimizer):
        for step in range(3):  # what waits for the store may set to zero what it has taken
            backward(kv, model, optimizer)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        backward(kv, model, optimizer)
        optimizer.step()
        model.zero_grad(set_to_none=False)
        expect(ConfigError, "while the store took them", lambda: backward(kv, model, optimizer))
    with training(store) as (kv, model, optimizer):
        backward(kv, model, optimizer)
        expect(ConfigError, "a second backward", lambda: backward(kv, model, optimizer))
    with training(store) as (kv, model, optimizer):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, [shard(0, kv.rank)])).backward()
        expect(ConfigError, "GradScaler", lambda: scaler.step(optimizer))
    with training(store, bucket_bytes=1) as (kv, model, optimizer):
        # The weights of the last layer are used once more, before it, where autograd does not see that.
        hidden = model[2](model[1](model[0](shard(0, kv.rank)[1])))
        hidden = hidden @ model[4].weight.detach().T @ model[4].weight.detach()
        if kv.sharded_update:  # weights come when the backward is over
            model[4](hidden).sum().backward()
        else:
            expect(RuntimeError, "modified by an inplace operation", model[4](hidden).sum().backward)
    with training(store) as (kv, model, optimizer):
        tied = nn.Linear(6, 3).double()
        tied.weight = nn.Parameter(model[4].weight.detach())
        both = [("one", model[4].weight), ("other", tied.weight)]
        optimizer = torch.optim.SGD([p for _, p in both], lr=0.1)
        with kvmpi.create(store) as another:
            make = lambda: DistributedOptimizer(optimizer, another, both, update_on_kvstore=True)  # noqa: E731
            expect(ConfigError, "other and one are two parameters that share memory", make)
    with training(store) as (kv, model, optimizer):
        stepped = adamw(mlp(0))
        plain_steps(stepped_model := mlp(0), (stepped := adamw(stepped_model)), lambda step: [shard(step, 0)], 1)
        expect(ConfigError, "save_optimizer_states", lambda: optimizer.load_state_dict(stepped.state_dict()))


def resumed(store: str) -> None:
    path = Path(tempfile.gettempdir()) / f"kvmpi-test-{Config.from_env().job_id}-{store}"
    with training(store, optimizer=adamw) as (kv, model, optimizer):
        plain_steps(model, optimizer, lambda step: [shard(step, kv.rank)], 3)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        kv.save_optimizer_states(path)

    def loaded(seed: int) -> nn.Module:
        model = mlp(seed)
        model.load_state_dict(weights)
        return model

    with training(store, loaded, adamw) as (kv, model, optimizer):
        kv.load_optimizer_states(path)
        plain_steps(model, optimizer, lambda step: [shard(step + 3, kv.rank)], 3)
        optimizer.synchronize()
        if kv.rank == 0:
            path.unlink()
        plain = mlp(0)
        plain_steps(plain, adamw(plain), lambda step: [shard(step, rank) for rank in range(kv.num_workers)])
        assert (flat(model.parameters()) - flat(plain.parameters())).abs().max() < 1e-12


def checkpoint_of_torch(store: str) -> None:
    """``torch.distributed.checkpoint`` asks for the state between steps, and what the store has stays as it is."""
    from torch.distributed.checkpoint import state_dict as checkpoint  # takes seconds

    for push in ("backward", "step"):
        with training(store, optimizer=adamw, push=push) as (kv, model, optimizer):
            for first in (0, 3):
                plain_steps(model, optimizer, lambda step, first=first: [shard(first + step, kv.rank)], 3)
                optimizer.zero_grad()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found = checkpoint.get_optimizer_state_dict(model, optimizer)
                assert not found["state"], found
                checkpoint.set_optimizer_state_dict(model, optimizer, found)
            optimizer.synchronize()
            plain = mlp(0)
            plain_steps(plain, adamw(plain), lambda step: [shard(step, rank) for rank in range(kv.num_workers)])
            assert (flat(model.parameters()) - flat(plain.parameters())).abs().max() < 1e-12


def loaded(store: str) -> None:
    """What all load into the model, or into a layer, is what the store goes on from; its momentum stays."""

    def loop(model: Any, optimizer: Any, shards: Any) -> None:
        for step in range(STEPS):
            plain_steps(model, optimizer, lambda _, step=step: shards(step), 1)
            if step == 1:
                model.load_state_dict(mlp(5).state_dict())
            if step == 3:
                part = {
                    name.removeprefix("2."): tensor for name, tensor in mlp(6).state_dict().items() if name[0] == "2"
                }
                model[2].load_state_dict({"weight": part["weight"]}, strict=False)
        model[0].load_state_dict(mlp(7)[0].state_dict())  # and no step after it

    for parts in (1, 150):  # each bucket is under way when the model is loaded, or all
        with kvmpi.create(store) as kv:
            same_in_all(kv, loop, update_on_kvstore=True, bucket_bytes=parts)
    with kvmpi.create(store) as kv:
        same_in_all(kv, loop, optimizer=adamw, update_on_kvstore=True)
    with training(store) as (kv, model, optimizer):
        model.load_state_dict(mlp(kv.rank + 5).state_dict())
        optimizer.join()
        assert torch.equal(flat(model.parameters()), flat(mlp(5).parameters())), "worker 0's weights count"


def written_to(store: str) -> None:
    """Who clips weights between steps is told, once, that the store does not know; and may hand them over."""

    def clamped(model: Any, optimizer: Any, shards: Any) -> None:
        for step in range(STEPS):
            plain_steps(model, optimizer, lambda _, step=step: shards(step), 1)
            if isinstance(optimizer, DistributedOptimizer):
                optimizer.synchronize()
            with torch.no_grad():
                model[2].weight.clamp_(-0.05, 0.05)
            model.load_state_dict(model.state_dict())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for parts in (1, 1 << 20):
            with kvmpi.create(store) as kv:
                model, _ = same_in_all(kv, clamped, update_on_kvstore=True, bucket_bytes=parts)
                assert model[2].weight.abs().max() <= 0.05
    with training(store) as (kv, model, optimizer):
        for step in range(3):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                plain_steps(model, optimizer, lambda _, step=step: [shard(step, kv.rank)], 1)
            said = [str(warning.message) for warning in told]
            assert len(said) == (step == 1), said
            if said:
                assert "2.weight was written to between two steps" in said[0], said
            optimizer.synchronize()
            with torch.no_grad():
                model[2].weight.clamp_(-0.05, 0.05)


def loaded_by_one(store: str) -> None:
    """Nobody waits for ever for those who have loaded nothing."""
    with kvmpi.create(store, timeout_s=20 if store == "mpi" else 4) as kv:  # with MPI nobody waits until time is over
        model = mlp(kv.rank)
        optimizer = DistributedOptimizer(sgd(model), kv, model, update_on_kvstore=True)
        plain_steps(model, optimizer, lambda step: [shard(step, kv.rank)], 3)
        if kv.rank == 1:
            model.load_state_dict(mlp(5).state_dict())
        said = "weights were loaded into the model" if kv.rank == 1 else "assign" if kv.mpi_size > 1 else "in 4.0 s"
        expect(KVError, said, lambda: plain_steps(model, optimizer, lambda step: [shard(step, kv.rank)], 2))
        kv.abort()


def uneven_batches(store: str) -> None:
    with training(store) as (kv, model, optimizer):
        batches = [2, 5] if kv.num_workers == 2 else [5, 0, 3, 5]
        plain_steps(model, optimizer, lambda step: [shard(step, kv.rank)], batches[kv.rank])
        optimizer.join()
        plain = mlp(0)
        plain_optimizer = sgd(plain)
        for step in range(max(batches)):
            plain_optimizer.zero_grad()
            for rank in range(kv.num_workers):
                if batches[rank] > step:
                    (loss_of(plain, [shard(step, rank)]) / kv.num_workers).backward()
            plain_optimizer.step()
        if kv.client_rank in (0, kv.num_clients - 1):  # the clients with the most batches
            assert (flat(model.parameters()) - flat(plain.parameters())).abs().max() < 1e-12, f"{store}, {batches}"


def asynchronous(store: str) -> None:
    """Gradients that do not depend on weights: the sum of all steps is known, whatever their order.

    Of those after weights were loaded, since all workers meet there.
    """
    with kvmpi.create(store) as kv:
        torch.manual_seed(kv.rank)
        model = nn.ParameterDict({"used": torch.randn(40), "unused": torch.ones(3)}).double()
        start = torch.manual_seed(0) and torch.randn(40).double()
        given = torch.optim.SGD([{"params": [model["unused"]]}, {"params": [model["used"]], "lr": 0.5}], lr=7.0)
        optimizer = DistributedOptimizer(given, kv, model, bucket_bytes=1)
        assert torch.equal(model["used"].detach().float(), start.float())
        for step in range(-STEPS, STEPS):
            if step == 0:
                model.load_state_dict({"used": start, "unused": torch.ones(3).double()})
            optimizer.zero_grad()
            (model["used"] * (torch.arange(40) + kv.rank + step)).sum().backward()
            optimizer.step()
        optimizer.synchronize()
        kv.barrier()
        kv.pull(optimizer._params.keys[1], model["used"].detach())
        size = {rank: len(ranks) for ranks in clients_of(kv) for rank in ranks}
        grads = [(torch.arange(40) + r + step) / size[r] for r in range(kv.num_workers) for step in range(STEPS)]
        expected = start - 0.5 * sum(grads)
        assert (model["used"].detach() - expected).abs().max() < 1e-9
        assert torch.equal(model["unused"].detach(), torch.ones(3).double())


CHECKS = (
    loops_of_people, groups_of_parameters, rule_of_the_user, graphs_that_change, frozen_in_turn, converted,
    layers_wait_for_their_own, whoever_reads_waits, first_layers_first, shares_of_first_layers_first, compiled,
    compiled_steps, too_late, resumed, checkpoint_of_torch, loaded, written_to, uneven_batches, asynchronous,
    loaded_by_one,
)  # fmt: skip
