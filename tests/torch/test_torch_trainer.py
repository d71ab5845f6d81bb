"""``kvmpi.torch.Trainer`` in one process: its rules, and its results beside those of a plain torch loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kvmpi
from kvmpi import optim
from kvmpi.errors import ConfigError, DuplicateKeyError
from kvmpi.torch import DistributedOptimizer, ElasticAveraging, Trainer
from kvmpi.torch import trainer as trainer_module

BATCH = 8
SYNC = ["local", "mpi", "dist_sync", "dist_sync_mpi"]
ASYNC = ["dist_async", "dist_async_mpi"]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "groups": lambda p: in_groups([*p]),
}


def in_groups(params: list[Any]) -> torch.optim.Optimizer:
    """Each with options of its own."""
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.02, "momentum": 0.0, "weight_decay": 0.1}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


@pytest.fixture(autouse=True)
def all_warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def backward(model: nn.Module, step: int, batch: int = BATCH) -> None:
    """Gradients of a loss that is a sum over ``batch`` samples."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(batch, 5, generator=generator), torch.randint(0, 3, (batch,), generator=generator)
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y, reduction="sum").backward()


def plain_steps(optimizer: str = "nesterov", steps: int = 5, batch: int = BATCH) -> nn.Module:
    model = make_model()
    opt = OPTIMIZERS[optimizer](model.parameters())
    for step in range(steps):
        backward(model, step, batch)
        for p in model.parameters():
            p.grad /= batch
        opt.step()
    return model


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)


def trainer_for(model: nn.Module, store: Any, update: bool | None = None, optimizer: str = "nesterov") -> Trainer:
    return Trainer(model.parameters(), OPTIMIZERS[optimizer](model.parameters()), store, update)


# ---- results


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize(
    ("store", "update"), [*((s, u) for s in SYNC for u in (True, False)), *((s, True) for s in ASYNC)]
)
def test_steps_equal_plain_torch(store: str, update: bool, optimizer: str) -> None:
    model = make_model()
    with trainer_for(model, store, update, optimizer) as trainer:
        for step in range(5):
            backward(model, step)
            trainer.step(BATCH)
    assert_equal(model, plain_steps(optimizer))


def test_a_rule_of_kvmpi_does_what_its_torch_twin_does() -> None:
    model = make_model()
    rule = optim.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    with Trainer(model.named_parameters(), rule, "local") as trainer:
        assert trainer.update_on_kvstore
        assert trainer.kvstore is not None
        for step in range(5):
            backward(model, step)
            trainer.step(BATCH)
    assert_equal(model, plain_steps())


def test_own_rescale_grad_of_a_rule_counts_too() -> None:
    model = make_model()
    rule = optim.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, rescale_grad=0.5)
    with Trainer(model.parameters(), rule, "mpi") as trainer:
        for step in range(5):
            backward(model, step)
            trainer.step(BATCH / 2)
    assert_equal(model, plain_steps())


@pytest.mark.parametrize(
    ("store", "update"), [("mpi", False), ("mpi", True), ("dist_sync", True), ("dist_async", True)]
)
def test_allreduce_then_update_equals_step_and_leaves_room_for_clipping(store: str, update: bool) -> None:
    model, expected = make_model(), make_model()
    opt = torch.optim.SGD(expected.parameters(), lr=0.1)
    with trainer_for(model, store, update, "sgd") as trainer:
        for step in range(3):
            backward(model, step)
            trainer.allreduce_grads()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            trainer.update(BATCH)
            backward(expected, step)
            nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
            for p in expected.parameters():
                p.grad /= BATCH
            opt.step()
    assert_equal(model, expected)


@pytest.mark.parametrize(("store", "update"), [("mpi", True), ("mpi", False), ("dist_async", True)])
def test_frozen_parameters_stay_and_missing_gradients_are_zero(store: str, update: bool) -> None:
    model = make_model()
    model[0].weight.requires_grad_(False)
    before = [p.detach().clone() for p in model.parameters()]
    with trainer_for(model, store, update, "sgd") as trainer:
        for step in range(2):
            backward(model, step)
            model[2].weight.grad = None
            trainer.step(BATCH)
    changed = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert changed == [False, True, False, True]


@pytest.mark.parametrize("update", [True, False])
def test_another_batch_size_divides_by_it_and_warns_once(update: bool) -> None:
    model, expected = make_model(), make_model()
    opt = torch.optim.SGD(expected.parameters(), lr=0.1)
    with trainer_for(model, "dist_sync", update, "sgd") as trainer, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, batch in enumerate([8, 8, 3, 8, 5]):
            backward(model, step, batch)
            trainer.step(batch)
            backward(expected, step, batch)
            for p in expected.parameters():
                p.grad /= batch
            opt.step()
    assert_equal(model, expected)
    assert [w.category for w in caught] == ([UserWarning] if update else [])
    assert all(Path(w.filename) == Path(__file__) for w in caught)


@pytest.mark.parametrize("halves", [False, True])
def test_a_step_that_fails_is_made_again_with_the_same_gradients(halves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another batch size than the first, so that they are scaled."""
    model, expected = make_model(), make_model()
    opt = torch.optim.SGD(expected.parameters(), lr=0.1)
    with trainer_for(model, "dist_sync", True, "sgd") as trainer, warnings.catch_warnings(action="ignore"):

        def step(batch: int) -> None:
            trainer.update(batch) if halves else trainer.step(batch)

        def fail(*_: Any, **__: Any) -> None:
            raise kvmpi.errors.KVTimeoutError("no answer from server 0")

        for number, batch in enumerate((8, 2)):
            backward(model, number, batch)
            backward(expected, number, batch)
            if halves:
                trainer.allreduce_grads()
            if number == 1:
                monkeypatch.setattr(trainer.kvstore, "pushpull", fail)
                with pytest.raises(kvmpi.errors.KVTimeoutError, match="no answer"):
                    step(batch)
                monkeypatch.undo()
            step(batch)
            for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
                # Not to the last bit: torch rounds its own steps as the processor likes. Scaled twice is by half.
                torch.testing.assert_close(mine.grad, theirs.grad)
                theirs.grad /= batch
            opt.step()
    assert_equal(model, expected)


# ---- learning rates


@pytest.mark.parametrize(
    ("store", "update"), [("local", None), ("mpi", True), ("mpi", False), ("dist_sync", True), ("dist_async", True)]
)
def test_learning_rates_and_schedulers_reach_the_store(store: str, update: bool | None) -> None:
    model, expected = make_model(), make_model()
    opts = [OPTIMIZERS["nesterov"](m.parameters()) for m in (model, expected)]
    schedules = [torch.optim.lr_scheduler.StepLR(opt, 2, 0.5) for opt in opts]
    with Trainer(model.parameters(), opts[0], store, update) as trainer:
        for step in range(6):
            backward(model, step)
            trainer.step(BATCH)
            backward(expected, step)
            for p in expected.parameters():
                p.grad /= BATCH
            opts[1].step()
            for schedule in schedules:
                schedule.step()
        assert trainer.learning_rate == pytest.approx(0.1 / 8)
        trainer.set_learning_rate(0.0)
        assert trainer.learning_rate == 0.0
        backward(model, 9)
        trainer.step(BATCH)
        if trainer.update_on_kvstore:
            assert trainer.kvstore.optimizer.lr == 0.0
    assert_equal(model, expected)


def test_set_learning_rate_of_a_rule() -> None:
    model = make_model()
    with Trainer(model.parameters(), optim.SGD(lr=0.5), "mpi") as trainer:
        trainer.set_learning_rate(0.25)
        assert trainer.learning_rate == 0.25
        backward(model, 0)
        trainer.step(BATCH)
        assert trainer.kvstore.optimizer == optim.SGD(lr=0.25, rescale_grad=1 / BATCH)
        trainer.set_learning_rate(0.125)
        trainer.step(BATCH)
        assert trainer.kvstore.optimizer == optim.SGD(lr=0.125, rescale_grad=1 / BATCH)


# ---- which way


@pytest.mark.parametrize("store", [*SYNC, *ASYNC])
def test_the_store_updates_by_default_where_it_can(store: str) -> None:
    with trainer_for(make_model(), store) as trainer:
        assert trainer.update_on_kvstore == (store != "local")
        assert (trainer.kvstore is None) == (store == "local")


def test_gradients_come_back_by_default_where_the_store_cannot_update(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    with Trainer(model.parameters(), torch.optim.RMSprop(model.parameters()), "mpi") as trainer:
        assert not trainer.update_on_kvstore
    with kvmpi.create("dist_sync_mpi") as kv:
        assert not trainer_for(model, kv.client).update_on_kvstore
    monkeypatch.setattr(trainer_module, "BIG_PARAMETER", 10)
    with kvmpi.create("local") as kv:
        assert not trainer_for(model, kv).update_on_kvstore


def combinations() -> dict[str, Callable[[nn.Module], Trainer]]:
    def stepped(model: nn.Module) -> Trainer:
        opt = torch.optim.Adam(model.parameters())
        backward(model, 0)
        opt.step()
        return Trainer(model.parameters(), opt, "mpi", True)

    def on_client(model: nn.Module) -> Trainer:
        with kvmpi.create("mpi") as kv:
            return trainer_for(model, kv.client, True)

    def store_with_rule(model: nn.Module) -> Trainer:
        with kvmpi.create("mpi") as kv:
            kv.set_optimizer(optim.SGD(0.1))
            return trainer_for(model, kv, False)

    return {
        "asynchronous store": lambda m: trainer_for(m, "dist_async", False),
        "no sum of gradients": lambda m: trainer_for(m, "dist_async_mpi", False),
        "no equivalent": lambda m: Trainer(m.parameters(), torch.optim.RMSprop(m.parameters()), "dist_sync", True),
        "has no equivalent": lambda m: Trainer(m.parameters(), torch.optim.RMSprop(m.parameters()), "dist_async"),
        "takes no optimizer": on_client,
        "stepped already": stepped,
        "create another": store_with_rule,
        "run in the store": lambda m: Trainer(m.parameters(), optim.SGD(0.1), "mpi", False),
        "without a store": lambda m: Trainer(m.parameters(), optim.SGD(0.1), None),
        "works on weights": lambda m: Trainer(m.parameters(), optim.Elastic(0.5), "mpi"),
        "ElasticAveraging or DiLoCo": lambda m: Trainer(m.parameters(), optim.Outer(), "mpi"),
        "unknown store type": lambda m: trainer_for(m, "dist_snyc"),
        "was not given": lambda m: Trainer(m[0].parameters(), torch.optim.SGD(m.parameters(), 0.1), "mpi"),
        "is not in the optimizer": lambda m: Trainer(m.parameters(), torch.optim.SGD(m[0].parameters(), 0.1), "mpi"),
        "same tensor": lambda m: Trainer([*m.parameters()] * 2, optim.SGD(0.1), "mpi"),
        "only once": lambda m: Trainer([], optim.SGD(0.1), "mpi"),
        "one tensor": lambda m: Trainer(m[0].weight, optim.SGD(0.1), "mpi"),
        "expected a torch tensor": lambda m: Trainer([1.0], optim.SGD(0.1), "mpi"),
        "not an optimizer": lambda m: Trainer(m.parameters(), "sgd", "mpi"),
        "LBFGS steps with a closure": lambda m: Trainer(m.parameters(), torch.optim.LBFGS(m.parameters()), "mpi"),
    }


@pytest.mark.parametrize("said", list(combinations()))
def test_forbidden_combinations(said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        combinations()[said](make_model())
    assert isinstance(caught.value, ConfigError)


def test_a_store_takes_one_trainer() -> None:
    with kvmpi.create("mpi") as kv:
        trainer_for(model := make_model(), kv, False)
        for second in (lambda: trainer_for(model, kv, False), lambda: ElasticAveraging(model.parameters(), kv, 0.5)):
            with pytest.raises(DuplicateKeyError, match=r"4 of the keys 0 to 3, .* Make another with kvmpi.create"):
                second()


@pytest.mark.parametrize("update", [True, False])
def test_the_second_half_of_a_step_needs_the_first(update: bool) -> None:
    with trainer_for(model := make_model(), "mpi", update) as trainer:
        backward(model, 0)
        trainer.allreduce_grads()
        trainer.update(BATCH)
        with pytest.raises(ConfigError, match=r"update\(\) without allreduce_grads"):
            trainer.update(BATCH)
        with pytest.raises(ConfigError, match="batch_size=0"):
            trainer.step(0)
        backward(model, 1)
        trainer.allreduce_grads()
        with pytest.raises(ConfigError, match=r"sum gradients a second time: call update\(\)"):
            trainer.step(BATCH)
        trainer.update(BATCH)
        trainer.step(BATCH)


def test_where_the_store_updates_a_model_is_not_to_be_converted() -> None:
    with trainer_for(model := make_model(), "mpi", True) as trainer:
        backward(model, 0)
        trainer.step(BATCH)
        backward(model.double().float(), 1)  # as it was
        trainer.step(BATCH)
        model.bfloat16()
        for call in (lambda: trainer.step(BATCH), trainer.allreduce_grads):
            with pytest.raises(ConfigError, match=r"0 is of torch.bfloat16 now, .* of torch.float32: convert"):
                call()


@pytest.mark.parametrize("update", [True, False])
def test_parameters_that_the_optimizer_gets_later_are_an_error(update: bool) -> None:
    model, other = make_model(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    model[2].requires_grad_(False)
    with Trainer(model.parameters(), optimizer, "mpi", update) as trainer:
        backward(model, 0)
        trainer.step(BATCH)
        before = model[2].weight.detach().clone()
        model[2].requires_grad_(True)
        optimizer.add_param_group({"params": model[2].parameters()})  # those that the trainer has
        backward(model, 1)
        trainer.step(BATCH)
        assert not torch.equal(model[2].weight, before)
        optimizer.add_param_group({"params": other.parameters()})
        for call in (
            lambda: trainer.step(BATCH), lambda: trainer.skip(BATCH), trainer.allreduce_grads,
            lambda: trainer.update(BATCH),
        ):  # fmt: skip
            with pytest.raises(ConfigError, match="2 parameters that the trainer was not given"):
                call()


@pytest.mark.parametrize(("store", "update"), [
    ("mpi", True), ("mpi", False), ("dist_sync", True), ("dist_sync", False), ("dist_async", True),
])  # fmt: skip
def test_a_sparse_embedding_trains_as_without_a_store(store: str, update: bool) -> None:
    """Only the rows of the batches move; without gradients once; with another batch size once."""

    def train(trainer: Trainer | None, model: nn.Module, opt: torch.optim.Optimizer) -> None:
        for step, ids in enumerate([[1, 2, 1], [5, 0, 5], [], [7, 1, 2]]):
            opt.zero_grad()
            size = 4 + step // 3
            if ids:
                model(torch.tensor(ids)).pow(2).sum().backward()
            if trainer is not None:
                trainer.step(size)
            else:
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad.mul_(1 / size)
                opt.step()

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Embedding(8, 3, sparse=True), nn.Linear(3, 2))
        return model, torch.optim.SGD(model.parameters(), lr=0.3)

    model, opt = make()
    expected, plain_opt = make()
    train(None, expected, plain_opt)
    with Trainer(model.named_parameters(), opt, store, update) as trainer:
        with warnings.catch_warnings(action="ignore"):  # of the other batch size
            train(trainer, model, opt)
        rows = model[0].weight.detach().clone()
        trainer.pull_rows(model[0].weight, torch.tensor([[7, 0], [7, 3]]))
        torch.testing.assert_close(model[0].weight.detach(), rows, rtol=0, atol=0)
        with pytest.raises(ConfigError, match="pull_rows"):
            trainer.pull_rows(torch.zeros(3, 3), torch.tensor([0]))
        sent = trainer.kvstore.stats()["phases"].get("push", {"bytes": 0})["bytes"]
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6, msg=name)
    untouched = make()[0][0].weight[[3, 4, 6]]
    torch.testing.assert_close(model[0].weight[[3, 4, 6]], untouched, rtol=0, atol=0)
    # Rows of 3 elements and their number: 2, 2, none and 3 of them; and weight and bias of the other layer.
    pushes = 3 if store == "dist_async" else 4
    assert sent == (7 * 16 + pushes * 8 * 4 if store.startswith("dist") else 0)


def test_sparse_gradients_come_back_sparse_to_an_optimizer_that_wants_them() -> None:
    weight = nn.Embedding(6, 2, sparse=True)
    before = weight.weight.detach().clone()
    with Trainer(weight.parameters(), torch.optim.SparseAdam(weight.parameters(), lr=0.1), "dist_sync") as trainer:
        assert not trainer.update_on_kvstore
        weight(torch.tensor([4, 4, 1])).sum().backward()
        trainer.step(1)
        assert weight.weight.grad.is_sparse
        assert weight.weight.grad._indices().tolist() == [[1, 4]]
    assert (weight.weight.detach() != before).any(1).tolist() == [False, True, False, False, True, False]


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize(("store", "update"), [(None, None), ("mpi", False), ("mpi", True), ("dist_sync", False)])
def test_gradients_that_share_memory_are_divided_once(store: str | None, update: bool | None, halves: bool) -> None:
    """As autograd makes them of a sum."""
    both = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    with Trainer(both, torch.optim.SGD(both, lr=1.0), store, update) as trainer:
        ((both[0].unsqueeze(0) + both[1].unsqueeze(0)) * torch.ones(2, 3)).sum().backward()
        assert both[0].grad.data_ptr() == both[1].grad.data_ptr(), "the test is to be of one memory"
        if halves:
            trainer.allreduce_grads()
            trainer.update(2)
        else:
            trainer.step(2)
    for p in both:
        assert torch.equal(p, torch.full_like(p, -1.0)), p


def test_who_creates_a_store_closes_it() -> None:
    with trainer_for(make_model(), "dist_sync") as trainer:
        mine = trainer.kvstore
    assert mine.closed
    with kvmpi.create("mpi") as kv:
        trainer_for(make_model(), kv).close()
        assert not kv.closed


# ---- states


@pytest.mark.parametrize(("store", "update"), [("local", None), ("mpi", True), ("mpi", False), ("dist_sync", True)])
@pytest.mark.parametrize("optimizer", ["nesterov", "adamw", "groups"])
def test_a_resumed_run_equals_an_uninterrupted_one(
    store: str, update: bool | None, optimizer: str, tmp_path: Path
) -> None:
    model = make_model()
    with trainer_for(model, store, update, optimizer) as trainer:
        for step in range(3):
            backward(model, step)
            trainer.step(BATCH)
        trainer.save_states(tmp_path / "states")
    with trainer_for(model, store, update, optimizer) as trainer:
        trainer.set_learning_rate(123.0)  # the file knows better
        trainer.load_states(tmp_path / "states")
        assert trainer.learning_rate == {"nesterov": 0.1, "adamw": 0.01, "groups": 0.1}[optimizer]
        for step in range(3, 5):
            backward(model, step)
            trainer.step(BATCH)
    assert_equal(model, plain_steps(optimizer))


@pytest.mark.parametrize("store", ["local", "mpi", "dist_sync"])
def test_a_resumed_run_knows_which_gradients_are_rows(store: str, tmp_path: Path) -> None:
    """Of one that comes late, in a step without it: the table stays, and what is dense goes on as it was pushed."""

    def train(model: nn.Module, first: int, stop: int, path: Path | None) -> None:
        opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.1)
        with Trainer(model.parameters(), opt, store, True) as trainer:
            if path is not None:
                trainer.load_states(path)
            for step in range(first, stop):
                opt.zero_grad()
                table, dense, other = model.children()
                loss = other.weight.sum()
                if step != 3:
                    loss = loss + table(torch.tensor([step, 1])).sum() + dense.weight.pow(2).sum()
                loss.backward()
                trainer.step(1)
            trainer.save_states(tmp_path / "states")

    def make() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Embedding(8, 3, sparse=True), nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False))

    train(whole := make(), 0, 6, None)
    train(parts := make(), 0, 3, None)
    train(parts, 3, 6, tmp_path / "states")
    for mine, theirs in zip(parts.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    with kvmpi.create("local") as kv, pytest.raises(kvmpi.errors.KeyNotInitializedError, match="never initialised"):
        kv.pushed_by_rows(3)


@pytest.mark.parametrize(("store", "update"), [("local", True), ("dist_sync", True), ("mpi", False)])
def test_saved_states_have_the_learning_rate_of_the_next_step(store: str, update: bool, tmp_path: Path) -> None:
    """A scheduler steps after the optimizer, and before one saves."""
    with trainer_for(model := make_model(), store, update, "nesterov") as trainer:
        backward(model, 0)
        trainer.step(BATCH)
        trainer.set_learning_rate(0.025)
        trainer.save_states(tmp_path / "states")
    with trainer_for(make_model(), store, update, "nesterov") as trainer:
        trainer.load_states(tmp_path / "states")
        assert trainer.learning_rate == 0.025


@pytest.mark.parametrize(
    ("store", "update"), [("local", True), ("dist_sync", True), ("mpi", False), ("dist_async", None)]
)
def test_states_from_before_the_first_step_begin_anew(store: str, update: bool, tmp_path: Path) -> None:
    """With the options of the trainer that has saved them, which goes on, and for whatever batch comes then."""
    first, again, other = make_model(), make_model(), make_model()
    with trainer_for(first, store, update, "groups") as trainer, warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.save_states(tmp_path / "states")
        for step in range(5):
            backward(first, step)
            trainer.step(BATCH)
    for model, steps_before in ((again, 0), (other, 2)):
        with trainer_for(model, store, update, "groups") as trainer, warnings.catch_warnings():
            warnings.simplefilter("error")
            trainer.set_learning_rate(0.0)
            for step in range(steps_before):  # of which there is momentum, but nothing has moved
                backward(model, step)
                trainer.step(BATCH)
            trainer.load_states(tmp_path / "states")
            assert trainer.learning_rate == 0.1
            for step in range(5):
                backward(model, step)
                trainer.step(BATCH)
        for mine, theirs in zip(model.parameters(), first.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    assert_equal(first, plain_steps("groups"))


@pytest.mark.parametrize(
    ("front", "load"),
    [("Trainer", "load"), ("Trainer", "load_optimizer_states"), ("DistributedOptimizer", "load_optimizer_states")],
)
def test_after_a_load_the_store_does_what_the_optimizer_says(front: str, load: str, tmp_path: Path) -> None:
    """The file's learning rate is that of when it was written; what somebody tells the store himself stays."""
    with kvmpi.create("local") as kv:
        w = torch.zeros(3, requires_grad=True)
        optimizer: Any = torch.optim.SGD([w], lr=1.0)
        if front == "Trainer":
            trainer = Trainer([w], optimizer, kv, update_on_kvstore=True)
        else:
            optimizer = DistributedOptimizer(optimizer, kv, [("w", w)], update_on_kvstore=True)

        def step() -> float:
            """By how much the weights went down."""
            w.grad, before = None, w.detach().clone()
            w.sum().backward()
            trainer.step(1) if front == "Trainer" else optimizer.step()
            if front == "DistributedOptimizer":
                optimizer.synchronize()
            return float((before - w.detach())[0])

        assert step() == 1.0
        kv.save(tmp_path / "saved")
        optimizer.param_groups[0]["lr"] = 0.25
        assert step() == 0.25
        getattr(kv, load)(tmp_path / "saved")
        if load == "load":
            kv.pull(kv.keys, [w.detach()])
        assert [step(), step()] == [0.25, 0.25]
        kv.set_hyperparams(lr=2.0)
        assert [step(), step()] == [2.0, 2.0]


@pytest.mark.parametrize("halves", [False, True])
def test_where_the_store_updates_the_torch_optimizer_has_no_state(halves: bool) -> None:
    """Neither to write, nor to be read later."""
    model = make_model()
    saved = OPTIMIZERS["nesterov"](plain := [*make_model().parameters()])
    for p in plain:
        p.grad = torch.ones_like(p)
    saved.step()
    optimizer = OPTIMIZERS["nesterov"](model.parameters())
    with Trainer(model.parameters(), optimizer, "mpi", True) as trainer:
        backward(model, 0)
        trainer.step(BATCH)
        with pytest.warns(UserWarning, match=r"write that with trainer\.save_states") as caught:
            optimizer.state_dict()
        assert [w.filename for w in caught] == [__file__]
        optimizer.load_state_dict(optimizer.state_dict())  # options alone; and once is enough
        trainer.step(BATCH)
        optimizer.load_state_dict(saved.state_dict())
        calls = (trainer.allreduce_grads,) if halves else (lambda: trainer.step(BATCH), lambda: trainer.skip(BATCH))
        for call in calls:
            with pytest.raises(ConfigError, match=r"trainer\.load_states.*before Trainer"):
                call()


def test_states_that_cannot_be_written_leave_the_old_file(tmp_path: Path) -> None:
    trainer = trainer_for(make_model(), None)
    with pytest.raises(kvmpi.KVError, match="save_states"):
        trainer.save_states(tmp_path / "no such folder" / "states")
