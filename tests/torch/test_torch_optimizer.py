"""``DistributedOptimizer`` in one process: an optimizer for whoever looks, all store types, and what it refuses."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import optimizer_loops as loops
import optimizer_steps
import pytest
import torch
from optimizer_loops import flat, loss_of, mlp, plain_steps, same_in_all, sgd, shard, winding, winding_steps
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import kvmpi
from kvmpi import optim
from kvmpi.errors import ConfigError, KVError
from kvmpi.torch import DistributedOptimizer, Trainer
from kvmpi.torch.parameters import memory_order

SYNC = ["local", "mpi", "dist_sync", "dist_sync_mpi"]
ASYNC = ["dist_async", "dist_async_mpi"]


@pytest.fixture(autouse=True)
def all_warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def kv() -> Iterator[kvmpi.KVStore]:
    with kvmpi.create("local") as store:
        yield store


# ---- every store type


@pytest.mark.parametrize("store", SYNC)
def test_gradients_come_back(store: str) -> None:
    with kvmpi.create(store) as kv:
        for loop in (plain_steps, loops.schedules, loops.accumulation, loops.clipping, loops.scaled):
            same_in_all(kv, loop)
        same_in_all(kv, winding_steps, make=winding, optimizer=loops.adamw)


@pytest.mark.parametrize("store", [*SYNC, *ASYNC])
@pytest.mark.parametrize("parameters_only", [True, False])
def test_weights_come_back(store: str, parameters_only: bool) -> None:
    for loop in (plain_steps, loops.schedules, loops.accumulation):
        with kvmpi.create(store) as kv:
            update = None if store in ASYNC else True
            same_in_all(kv, loop, parameters_only=parameters_only, update_on_kvstore=update)
    with kvmpi.create(store) as kv:
        same_in_all(kv, loops.schedules, optimizer=two_rates, update_on_kvstore=True)


def two_rates(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2:].parameters(), "lr": 0.5}], lr=0.1)


def test_an_asynchronous_client_of_one_worker_does_not_push_what_it_has_not() -> None:
    """So it is as in one process: a layer that was not used does not decay."""
    with kvmpi.create("dist_async") as kv:
        same_in_all(kv, winding_steps, make=winding, optimizer=loops.sgd)


# ---- an optimizer for whoever looks


def test_it_is_the_optimizer_that_it_was_given(kv: kvmpi.KVStore) -> None:
    model = mlp()
    inner = torch.optim.AdamW(model.parameters(), lr=0.5)
    optimizer = DistributedOptimizer(inner, kv, model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert optimizer.kvstore is kv
    assert not optimizer.update_on_kvstore
    plain_steps(model, optimizer, lambda step: [shard(step, 0)], 2)
    assert set(optimizer.state) == set(model.parameters())
    assert optimizer.state_dict()["param_groups"] == inner.state_dict()["param_groups"]
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("state"))
    plain_steps(model, optimizer, lambda step: [shard(step, 0)], 1)
    optimizer.state_dict()
    assert calls == ["before", "after", "state"]
    other = torch.optim.AdamW(mlp().parameters(), lr=0.25)
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups is inner.param_groups
    assert inner.param_groups[0]["lr"] == 0.25
    assert "AdamW" in repr(optimizer)
    assert "kvstore='local'" in repr(optimizer)
    with pytest.raises(AttributeError):
        optimizer.no_such_thing  # noqa: B018


@pytest.mark.parametrize("inner_scheduler", [True, False])
@pytest.mark.parametrize("update", [True, False])
def test_schedulers_see_that_it_steps(kv: kvmpi.KVStore, update: bool, inner_scheduler: bool) -> None:
    """Without the warning that a scheduler steps before its optimizer."""
    model = mlp()
    inner = sgd(model)
    optimizer = DistributedOptimizer(inner, kv, model, update_on_kvstore=update)
    schedule = torch.optim.lr_scheduler.StepLR(inner if inner_scheduler else optimizer, 1, 0.5)
    plain_steps(model, optimizer, lambda step: [shard(step, 0)], 1)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for metric in (1.0, 2.0):
        plateau.step(metric)
    assert optimizer.param_groups[0]["lr"] == 0.025


@pytest.mark.parametrize("update", [True, False])
def test_hooks_of_the_step_are_those_of_the_optimizer(kv: kvmpi.KVStore, update: bool) -> None:
    """With its arguments, which they may replace; after the step they see its weights."""
    model, plain = mlp(), mlp()

    def observed(model: Any, optimizer: Any) -> list[Any]:
        seen = list[Any]()
        inner = optimizer.__dict__.get("_inner", optimizer)

        def before(owner: Any, args: Any, kwargs: Any) -> Any:
            assert owner is inner is args[0]
            seen.append(("before", len(args), dict(kwargs)))
            return (args[0], lambda: seen.append("closure")), {}

        def after(owner: Any, args: Any, kwargs: Any) -> None:
            assert owner is inner
            seen.append(("after", len(args), [round(v, 12) for v in flat(model.parameters()).tolist()]))

        handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
        handles.append(register_optimizer_step_pre_hook(lambda *_: seen.append("all before")))
        handles.append(register_optimizer_step_post_hook(lambda *_: seen.append("all after")))
        plain_steps(model, optimizer, lambda step: [shard(step, 0)], 2)
        for handle in handles:
            handle.remove()
        plain_steps(model, optimizer, lambda step: [shard(step, 0)], 1)
        return seen

    found = observed(model, DistributedOptimizer(sgd(model), kv, model, update_on_kvstore=update))
    assert found == observed(plain, sgd(plain))
    assert [each if isinstance(each, str) else each[0] for each in found] == [
        "all before", "before", "closure", "after", "all after"
    ] * 2  # fmt: skip


@pytest.mark.parametrize("update", [True, False])
def test_copies_of_the_model_are_on_their_own(kv: kvmpi.KVStore, update: bool) -> None:
    model = mlp()
    optimizer = DistributedOptimizer(sgd(model), kv, model, update_on_kvstore=update)
    plain_steps(model, optimizer, lambda step: [shard(step, 0)], 1)
    torch.save(model, buffer := io.BytesIO())
    buffer.seek(0)
    copies = copy.deepcopy(model), torch.load(buffer, weights_only=False)  # for which weights have been waited
    plain_steps(model, optimizer, lambda step: [shard(step, 0)], 1)
    for other in copies:
        other.zero_grad()
        loss_of(other, [shard(0, 0)]).backward()
        assert other[0].weight.grad is not None
        other.state_dict()
    assert (optimizer._weights is not None and optimizer._weights.in_flight) == update
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="save its state_dict"):
            copied(optimizer)


def test_a_state_that_is_elsewhere_is_a_warning(kv: kvmpi.KVStore) -> None:
    model = mlp()
    optimizer = DistributedOptimizer(sgd(model), kv, model, update_on_kvstore=True)
    with pytest.warns(UserWarning, match="save_optimizer_states") as caught:
        optimizer.state_dict()
    optimizer.state_dict()  # once is enough
    assert [w.filename for w in caught] == [__file__]


def test_when_detached_the_other_goes_on_alone(kv: kvmpi.KVStore) -> None:
    model, plain = mlp(), mlp()
    inner, plain_optimizer = sgd(model), sgd(plain)
    optimizer = DistributedOptimizer(inner, kv, model, update_on_kvstore=True)
    plain_steps(model, optimizer, lambda step: [shard(step, 0)], 1)
    optimizer.detach()
    kv.close()
    before = flat(model.parameters())
    model.state_dict()
    plain_steps(model, inner, lambda step: [shard(step, 0)], 1)
    assert not torch.equal(flat(model.parameters()), before)
    del plain, plain_optimizer


def test_after_the_store_is_closed_a_backward_says_so(kv: kvmpi.KVStore) -> None:
    model = mlp()
    DistributedOptimizer(sgd(model), kv, model)
    kv.close()
    with pytest.raises(KVError, match="is closed"):
        loss_of(model, [shard(0, 0)]).backward()


def by_hand(model: nn.Module, loss: torch.Tensor) -> None:
    """Gradients without a backward pass."""
    params = [*model.parameters()]
    for parameter, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
        parameter.grad = grad


def exchanges_of(optimizer: Any) -> list[None]:
    """One element for each exchange from here on."""
    seen = list[None]()
    finish = optimizer._exchange.finish
    optimizer._exchange.finish = lambda: seen.append(finish())
    return seen


def test_what_a_closure_sets_by_hand_is_exchanged(kv: kvmpi.KVStore) -> None:
    """As often as it is called, and only if it has set something."""
    model = mlp()
    for average in (True, False):
        optimizer = DistributedOptimizer(torch.optim.LBFGS(model.parameters(), max_iter=3), kv, model, average=average)
        called, seen = [], exchanges_of(optimizer)

        def closure(called: list[None] = called, optimizer: Any = optimizer) -> torch.Tensor:
            called.append(None)
            by_hand(model, loss := loss_of(model, [shard(0, 0)]))
            return loss.detach()

        for _ in range(2):
            optimizer.step(closure)
        assert len(seen) == len(called) == 6
        optimizer.step(lambda: torch.tensor(0.0))
        optimizer.detach()


def test_gradients_set_by_hand_are_summed_in_every_step(kv: kvmpi.KVStore) -> None:
    """And once: a second step with the same ones is with their sums. Some of both cannot be told apart."""
    model = mlp()
    optimizer = DistributedOptimizer(sgd(model), kv, model, average=False)
    seen = exchanges_of(optimizer)
    for step in range(3):
        by_hand(model, loss_of(model, [shard(step, 0)]))
        for _ in range(2):
            optimizer.step()
        assert len(seen) == step + 1
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with pytest.raises(ConfigError, match=r"gradient of 0\.weight was set after.*others"):
        optimizer.step()
    # What a loop makes of sums before the step is what it steps with.
    optimizer.zero_grad()
    loss_of(model, [shard(3, 0)]).backward()
    seen.clear()
    for p in model.parameters():
        p.grad = p.grad * 0.5
    optimizer.step(lambda: None)
    assert not seen


def test_sums_are_not_summed_again_by_a_backward_of_other_layers(kv: kvmpi.KVStore) -> None:
    layers = nn.ModuleList([nn.Linear(4, 1, bias=False) for _ in range(2)])
    optimizer = DistributedOptimizer(torch.optim.SGD(layers.parameters()), kv, layers, average=False)
    layers[0](torch.ones(1, 4)).sum().backward()
    with pytest.raises(ConfigError, match=r"a second backward.*inside 'with optimizer\.no_sync"):
        layers[1](torch.ones(1, 4)).sum().backward()
    optimizer.zero_grad()
    layers[0](torch.ones(1, 4)).sum().backward()
    layers[0].zero_grad()  # then there is nothing to add to
    layers[1].zero_grad()
    layers[1](torch.ones(1, 4)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("update", [False, True])
def test_layers_that_are_added_are_like_the_others(kv: kvmpi.KVStore, update: bool) -> None:
    """Also to what loads a checkpoint; those that the store cannot take, or only the inner optimizer has, are not."""
    model = mlp()
    inner = sgd(model)
    optimizer = DistributedOptimizer(inner, kv, model, update_on_kvstore=update)
    model[4] = nn.Linear(6, 3).double()
    optimizer.add_param_group({"params": model[4].parameters()})
    loaded = {name: value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(loaded)
    refused = [
        (
            {"params": nn.Parameter(torch.ones(3, dtype=torch.complex64))},
            "parameter 8 is of torch.complex64; .*torch.view_as_real of it",
        )
    ]
    if update:
        refused.append(({"params": nn.Parameter(torch.ones(3)), "maximize": True}, "maximize=True"))
    for group, said in refused:
        with pytest.raises(KVError, match=said):
            optimizer.add_param_group(group)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    plain_steps(model, optimizer, lambda step: [shard(step, 0)], 1)
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())
    inner.add_param_group({"params": nn.Linear(2, 2).parameters()})
    with pytest.raises(ConfigError, match="2 parameters that this DistributedOptimizer has not"):
        optimizer.step()


@pytest.mark.parametrize("overlap", [True, False])
def test_of_two_for_one_parameter_the_last_exchanges(kv: kvmpi.KVStore, overlap: bool) -> None:
    """Both would sum the same memory."""
    model = mlp()
    first = DistributedOptimizer(sgd(model), kv, model, overlap=overlap)
    head = DistributedOptimizer(torch.optim.SGD(model[4].parameters()), kv, overlap=overlap)
    last = DistributedOptimizer(sgd(model), kv, model, overlap=overlap)
    loss_of(model, [shard(0, 0)]).backward()
    assert [each._exchange.fresh for each in (first, head, last)] == [False, False, True]
    last.step()
    for each, name in ((first, r"4\.weight"), (head, "parameter 0")):
        with pytest.raises(KVError, match=rf"another DistributedOptimizer was made for {name} .*detach"):
            each.step()
        each.detach()
    loss_of(model, [shard(1, 0)]).backward()
    assert last._exchange.fresh


def test_gradients_are_there_when_backward_returns_and_zero_grad_lets_go_of_them(kv: kvmpi.KVStore) -> None:
    model = mlp()
    optimizer = DistributedOptimizer(sgd(model), kv, model)
    loss_of(model, [shard(0, 0)]).backward()
    assert not optimizer._exchange.is_open
    views = [p.grad for p in model.parameters()]
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    loss_of(model, [shard(1, 0)]).backward()
    order = [optimizer._params.names[i] for bucket in optimizer._exchange._buckets for i in bucket.indices]
    assert sorted(order) == sorted(name for name, _ in model.named_parameters())
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters())
    assert all(p.grad.shape == v.shape for p, v in zip(model.parameters(), views, strict=True))


def num_arrived(exchange: Any) -> int:
    """How many gradients of this pass are there."""
    return sum(index not in missing for index, missing in exchange._progress.missing.items())


def test_where_nothing_can_run_beside_a_backward_buckets_leave_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a host's cores compute, unless there are more of them, or servers, or the program says otherwise."""
    threads = torch.get_num_threads()
    for cores, store, overlap, waits in [
        (threads, "local", None, True), (threads + 1, "local", None, False), (threads, "dist_sync", None, False),
        (threads, "local", True, False), (threads + 1, "local", False, True), (threads, "dist_sync", False, True),
        (threads, "local on two hosts", None, False),
    ]:  # fmt: skip
        store, _, hosts = store.partition(" on ")
        monkeypatch.setattr(kvmpi.KVStore, "num_hosts", 2 if hosts else 1)
        monkeypatch.setattr("kvmpi.torch.distributed.num_cores", lambda cores=cores: cores)
        with kvmpi.create(store) as kv:
            model = mlp()
            optimizer = DistributedOptimizer(sgd(model), kv, model, bucket_bytes=1, overlap=overlap)
            left, send = list[int](), optimizer._exchange._send

            def noted(numbers: Any, exchange: Any = optimizer._exchange, send: Any = send, left: Any = left) -> None:
                left += [num_arrived(exchange)] * len(numbers)
                send(numbers)

            monkeypatch.setattr(optimizer._exchange, "_send", noted)
            for step in range(2):
                plain_steps(model, optimizer, lambda step: [shard(step, 0)], 1)
                assert left[6 * step :] == ([6] * 6 if waits else list(range(1, 7))), (cores, store, overlap)


@pytest.mark.parametrize(("store", "num_hosts"), [("local", 1), ("local", 2), ("dist_sync", 1)])
def test_what_fits_into_one_bucket_leaves_at_the_end_unless_servers_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, store: str, num_hosts: int
) -> None:
    monkeypatch.setattr(kvmpi.KVStore, "num_hosts", num_hosts)
    monkeypatch.setattr("kvmpi.torch.distributed.num_cores", lambda: torch.get_num_threads() + 1)
    nbytes = sum(8 * p.numel() for p in mlp().parameters())
    for bucket_bytes in (nbytes - 1, nbytes):
        with kvmpi.create(store) as kv:
            model = mlp()
            optimizer = DistributedOptimizer(sgd(model), kv, model, bucket_bytes=bucket_bytes)
            assert optimizer._exchange._overlap == (bucket_bytes < nbytes or store == "dist_sync")


@pytest.mark.parametrize("update", [True, False])
def test_buckets_leave_as_soon_as_they_are_full_the_first_layers_first_at_the_servers(
    monkeypatch: pytest.MonkeyPatch, update: bool
) -> None:
    with kvmpi.create("dist_sync") as kv:
        model = mlp()
        optimizer = DistributedOptimizer(
            sgd(model), kv, model.named_parameters(), update_on_kvstore=update, bucket_bytes=1
        )
        plain_steps(model, optimizer, lambda step: [shard(step, 0)], 1)
        names, left, pushpull = optimizer._params.names, list[tuple[list[str], int, int]](), kv.pushpull

        def noted(keys: list[int], values: Any, out: Any = None, priority: int = 0, **options: Any) -> Any:
            known = [names[optimizer._params.keys.index(key)] for key in keys if key in optimizer._params.keys]
            sent = [bucket for bucket in optimizer._exchange._buckets if set(bucket.keys) & set(keys)]
            known += [names[i] for bucket in sent for i in bucket.indices]
            left.append((known, priority, num_arrived(optimizer._exchange)))
            assert options in ({"async_op": True}, {"async_op": True, "reduced": False})
            return pushpull(keys, values, out, priority, **options)

        monkeypatch.setattr(kv, "pushpull", noted)
        optimizer.zero_grad()
        loss_of(model, [shard(1, 0)]).backward()
        assert sorted(name for names, _, _ in left for name in names) == sorted(names)
        assert [len(names) for names, _, _ in left] == [1] * 6
        assert [names[0].partition(".")[0] for names, _, _ in left] == ["4", "4", "2", "2", "0", "0"]
        assert [priority for _, priority, _ in left] == list(range(6))
        assert [arrived for _, _, arrived in left] == list(range(1, 7)), "a bucket left late"
        optimizer.step()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (0, 2, 3, 1)])
def test_memory_order_of_permuted_tensors(order: tuple[int, ...]) -> None:
    tensor = torch.arange(120).view(2, 3, 4, 5).permute(order)
    found = tensor.permute(memory_order(tensor))
    assert found.is_contiguous()
    assert found.data_ptr() == tensor.data_ptr()
    gaps = torch.arange(120).view(12, 10)[::2, ::3]
    assert memory_order(gaps) == (0, 1)


def test_parameters_with_gaps_and_none_at_all(kv: kvmpi.KVStore) -> None:
    """Slices of a larger tensor, scalars, empty ones: each as in one process."""

    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        wide = torch.randn(6, 8, dtype=torch.float64)
        return nn.ParameterList([nn.Parameter(wide[::2, ::3]), torch.tensor(2.0).double(), torch.empty(0).double()])

    def loop(model: Any, optimizer: Any, shards: Any) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            (model[0].square().sum() * model[1] + model[2].sum()).backward()
            optimizer.step()

    for update in (False, True):
        with kvmpi.create("mpi") as store:
            same_in_all(store, loop, make=make, update_on_kvstore=update)


# ---- what it refuses


def refusals() -> dict[str, Callable[[kvmpi.KVStore, nn.Module], Any]]:
    def stepped(model: nn.Module) -> torch.optim.Optimizer:
        plain_steps(model, optimizer := sgd(model), lambda step: [shard(step, 0)], 1)
        return optimizer

    def with_rule(kv: kvmpi.KVStore, rule: Any, **options: Any) -> Callable[[nn.Module], Any]:
        kv.set_optimizer(rule)
        return lambda model: DistributedOptimizer(sgd(model), kv, model, **options)

    def given(kv: kvmpi.KVStore, rule: Any, optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
        kv.set_optimizer(rule)
        return DistributedOptimizer(optimizer, kv, model)

    def warming(model: nn.Module) -> torch.optim.Optimizer:
        torch.optim.lr_scheduler.LinearLR(optimizer := torch.optim.SGD(model.parameters(), lr=1.0))
        return optimizer

    def after(kv: kvmpi.KVStore, model: nn.Module, update_on_kvstore: bool) -> Any:
        """Whatever the first of two does: when the second one's rule is in force, it is that of both."""
        DistributedOptimizer(sgd(other := mlp()), kv, other, update_on_kvstore=update_on_kvstore)
        return DistributedOptimizer(sgd(model), kv, model, update_on_kvstore=True)

    def behind_a_trainer(kv: kvmpi.KVStore, model: nn.Module) -> Any:
        """Whose rule divides by the size of its batch."""
        trainer = Trainer((other := mlp()).parameters(), sgd(other), kv, True)
        loss_of(other, [shard(0, 0)]).backward()
        trainer.step(4)
        return DistributedOptimizer(sgd(model), kv, model)

    def rms(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(model.parameters())

    return {
        "expected an instance of a torch.optim class": lambda kv, m: DistributedOptimizer(optim.SGD(0.1), kv, m),
        "a DistributedOptimizer already": lambda kv, m: DistributedOptimizer(DistributedOptimizer(sgd(m), kv), kv),
        "expected a store": lambda kv, m: DistributedOptimizer(sgd(m), "mpi", m),
        "norm_buffers='last'": lambda kv, m: DistributedOptimizer(sgd(m), kv, m, norm_buffers="last"),
        "bucket_bytes=0": lambda kv, m: DistributedOptimizer(sgd(m), kv, m, bucket_bytes=0),
        "parameters that named_parameters has not": lambda kv, m: DistributedOptimizer(sgd(m), kv, m[0]),
        "cannot apply": lambda kv, m: DistributedOptimizer(rms(m), kv, m, update_on_kvstore=True),
        "stepped already": lambda kv, m: DistributedOptimizer(stepped(m), kv, m, update_on_kvstore=True),
        "takes no optimizer": lambda kv, m: DistributedOptimizer(sgd(m), kv.client, m, update_on_kvstore=True),
        "works on weights": lambda kv, m: with_rule(kv, optim.Elastic(0.5))(m),
        "applies SGD": lambda kv, m: with_rule(kv, optim.SGD(0.1), update_on_kvstore=False)(m),
        r"the optimizer has lr=0\.1:": lambda kv, m: with_rule(kv, optim.SGD(0.3, momentum=0.9, weight_decay=0.01))(m),
        r"Adam\(lr=0\.1\), but SGD\(lr=0\.1.* is another rule": lambda kv, m: with_rule(kv, optim.Adam(0.1))(m),
        "but .*RMSprop has no equivalent": lambda kv, m: given(kv, optim.SGD(0.1), rms(m), m),
        r"the optimizer has lr@2=0\.5": lambda kv, m: given(kv, optim.SGD(0.1), two_rates(m), m),
        r"the optimizer has weight_decay=0\.0": lambda kv, m: given(
            kv, optim.SGD(1.0, weight_decay=0.1), warming(m), m
        ),
        "has one rule": lambda kv, m: after(kv, m, update_on_kvstore=True),
        "already, and a store": lambda kv, m: after(kv, m, update_on_kvstore=False),
        "or Trainer trains with this store already": behind_a_trainer,
    }


@pytest.mark.parametrize("said", list(refusals()))
def test_forbidden_combinations(kv: kvmpi.KVStore, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        refusals()[said](kv, mlp())


@pytest.mark.parametrize("make", [DistributedOptimizer, Trainer])
def test_an_optimizer_that_the_store_gets_too_late(make: Any) -> None:
    """What came back would be weights, in the place of gradients."""
    with kvmpi.create("dist_sync") as kv:
        model = mlp()
        if make is Trainer:
            trains = Trainer(model.parameters(), sgd(model), kv, False)
        else:
            trains = DistributedOptimizer(sgd(model), kv, model)
        kv.set_optimizer(optim.SGD(0.1))

        def train() -> None:
            loss_of(model, [shard(0, 0)]).backward()
            trains.step(1)

        with pytest.raises(ConfigError, match="made for a store without an optimizer: the store applies SGD"):
            train()


@optim.register("sign of tests/torch")
@dataclass(frozen=True)
class Sign(optim.Rule):
    lr: float = 0.1
    factor: float = 2.0

    def compute(self, b: optim.Block) -> None:
        b.out[...] = b.stored - self.lr * self.factor * np.sign(b.pushed)


def test_the_rule_of_the_user_stays_but_for_what_schedulers_write(kv: kvmpi.KVStore) -> None:
    """Also what they have written before: and nothing else, as whether there are master copies."""

    def loop(model: Any, optimizer: Any, shards: Any, schedule: Any) -> None:
        for step in range(4):
            plain_steps(model, optimizer, lambda _, step=step: shards(step), 1)
            schedule.step()

    model, plain = mlp(), mlp()
    optimizers = sgd(model), sgd(plain)
    schedules = [torch.optim.lr_scheduler.LinearLR(each, 0.25, total_iters=3) for each in optimizers]
    kv.set_optimizer(optim.SGD(0.1, momentum=0.9, weight_decay=0.01, multi_precision=True))
    optimizer = DistributedOptimizer(optimizers[0], kv, model)
    loop(model, optimizer, lambda step: [shard(step, 0)], schedules[0])
    loop(plain, optimizers[1], lambda step: [shard(step, 0)], schedules[1])
    optimizer.synchronize()
    assert (flat(model.parameters()) - flat(plain.parameters())).abs().max() < 1e-12
    assert kv.optimizer.multi_precision


def test_a_rule_without_an_equivalent_hears_what_an_optimizer_can_say(kv: kvmpi.KVStore) -> None:
    kv.set_optimizer(Sign(0.5))
    model, target = nn.Linear(2, 2, bias=False), torch.zeros(2, 2)
    with pytest.raises(ConfigError, match=r"Sign\(lr=0\.5\), but the optimizer has lr=0\.25"):
        DistributedOptimizer(torch.optim.RMSprop(model.parameters(), lr=0.25), kv, model)
    inner = torch.optim.RMSprop(model.parameters(), lr=0.5)
    optimizer, before = DistributedOptimizer(inner, kv, model), model.weight.detach().clone()
    for lr in (0.5, 0.25):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        (model.weight - target).sum().backward()
        optimizer.step()
    assert torch.allclose(model.state_dict()["weight"], before - 2 * (0.5 + 0.25))


def test_after_one_is_detached_another_has_its_own_rule() -> None:
    with kvmpi.create("dist_async") as kv:
        for make in (sgd, loops.adamw):
            same_in_all(kv, plain_steps, optimizer=make)
            assert isinstance(kv.optimizer, optim.SGD if make is sgd else optim.AdamW)


def test_an_asynchronous_store_has_no_gradients_to_give_back() -> None:
    with kvmpi.create("dist_async") as kv, pytest.raises(ConfigError, match="it is asynchronous"):
        DistributedOptimizer(sgd(model := mlp()), kv, model, update_on_kvstore=False)


def test_a_sparse_gradient_names_its_parameter(kv: kvmpi.KVStore) -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    DistributedOptimizer(sgd(model), kv, model)
    with pytest.raises(ConfigError, match=r"gradient of 0\.weight is sparse.*Trainer does.*c10d"):
        model(torch.tensor([1, 2])).sum().backward()


@pytest.mark.parametrize("store", [*SYNC, *ASYNC])
def test_between_backward_and_step_gradients_are_the_loops(store: str) -> None:
    one_of_each = store in ("local", "dist_async")  # clients that wait for others, and those that do not
    (optimizer_steps.as_one_process if one_of_each else optimizer_steps.some_as_one_process)(store)


def test_push_is_in_backward_or_in_step(kv: kvmpi.KVStore) -> None:
    with pytest.raises(ConfigError, match="push='later': expected 'backward' or 'step'"):
        DistributedOptimizer(sgd(model := mlp()), kv, model, push="later")
