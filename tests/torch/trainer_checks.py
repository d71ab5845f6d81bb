"""Checks of ``Trainer``, the averaging algorithms and DDP over a store, with 4 workers in 2 clients and 2 servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from optimizer_loops import compiler_keeps_out
from raising import raises
from torch import nn

import kvmpi
from kvmpi.errors import KVError
from kvmpi.torch import DiLoCo, DistributedOptimizer, ElasticAveraging, Trainer, ddp_comm_hook

NUM_WORKERS, NUM_CLIENTS, BATCH, STEPS = 4, 2, 8, 4


def make_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([t.detach().double().reshape(-1) for t in tensors])


def samples(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(BATCH, 5, generator=generator), torch.randint(0, 3, (BATCH,), generator=generator)


def backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y, reduction="sum").backward()


def plain_torch(batches: Sequence[int] = [STEPS] * NUM_WORKERS) -> nn.Module:
    """One process with the samples of all workers, which have so many batches, from worker 0's first weights."""
    model = make_model(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(max(batches)):
        parts = [samples(step, rank) for rank in range(len(batches)) if batches[rank] > step]
        backward(model, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
        for p in model.parameters():
            p.grad /= len(batches) * BATCH
        optimizer.step()
    return model


def synchronous_training(store: str, update: bool) -> None:
    with kvmpi.create(store) as kv:
        assert kv.num_workers == NUM_WORKERS
        model = make_model(seed=kv.rank)  # worker 0's count
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        trainer = Trainer(model.parameters(), optimizer, kv, update)
        for step in range(STEPS):
            backward(model, *samples(step, kv.rank))
            trainer.step(NUM_WORKERS * BATCH)
        difference = (flat(model.parameters()) - flat(plain_torch().parameters())).abs().max()
        assert difference < 1e-6, f"{store}, update_on_kvstore={update}: {difference}"


def compiled_together(store: str, update: bool) -> None:
    """All of a step in one function that is compiled, with calls of the store as users make them."""
    with kvmpi.create(store) as kv:
        model = make_model(seed=kv.rank)
        trainer = Trainer(model.parameters(), torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), kv, update)
        kv.client.init(["loss", "count"], [torch.zeros(1), torch.zeros(1)])

        @torch.compile(backend="eager")
        def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            backward(model, x, y)
            trainer.step(kv.num_workers * BATCH)
            rank = torch.full((1,), kv.rank + 1.0)
            count = torch.ones(1)
            work = kv.client.pushpull("count", count, async_op=True)
            work.wait()
            kv.client.pushpull("loss", rank)
            kv.barrier()
            return rank / count if kv.any(kv.rank == kv.num_workers - 1) else rank

        ranks = [kv.rank] if kv.mpi_size == 1 else range(kv.num_workers)
        with compiler_keeps_out():
            for step in range(STEPS):
                assert train(*samples(step, kv.rank)).item() == sum(ranks) / len(ranks) + 1
        difference = (flat(model.parameters()) - flat(plain_torch([STEPS] * kv.num_workers).parameters())).abs().max()
        assert difference < 1e-6, f"{store}, update_on_kvstore={update}: {difference}"


def uneven_batches(store: str, batches: Sequence[int]) -> None:
    """Some workers join early; all end with the weights of one process that had the same samples."""
    with kvmpi.create(store) as kv:
        model = make_model(seed=kv.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        trainer = Trainer(model.parameters(), optimizer, kv, update_on_kvstore=True)
        for step in range(batches[kv.rank]):
            backward(model, *samples(step, kv.rank))
            trainer.step(NUM_WORKERS * BATCH)
        trainer.join()
        if kv.client_rank == 0:  # the client with the most batches
            difference = (flat(model.parameters()) - flat(plain_torch(batches).parameters())).abs().max()
            assert difference < 1e-6, f"{store}, batches {batches}: {difference}"


def halves_of_a_step(store: str) -> None:
    """Each client clips its own sum, of rows too; masters push what has become of it."""

    def make(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 2)).double()

    def loss(model: nn.Module, step: int, ranks: Sequence[int]) -> torch.Tensor:
        ids = [torch.randint(0, 9, (5,), generator=torch.Generator().manual_seed(10 * step + rank)) for rank in ranks]
        return sum(((model(i) - rank) ** 2).sum() for i, rank in zip(ids, ranks, strict=True))  # type: ignore[return-value]

    def clip(model: nn.Sequential) -> None:
        rows = model[0].weight.grad
        model[0].weight.grad = rows * min(1.0, 2.0 / float(rows.to_dense().norm()))
        nn.utils.clip_grad_norm_(model[1].parameters(), 2.0)

    with kvmpi.create(store) as kv:
        model, plain = make(kv.rank), make(0)
        trainer = Trainer(model.parameters(), torch.optim.SGD(model.parameters(), lr=0.1), kv, update_on_kvstore=True)
        reference = torch.optim.SGD(plain.parameters(), lr=0.1)
        size = NUM_WORKERS // kv.num_clients
        for step in range(STEPS):
            model.zero_grad()
            loss(model, step, [kv.rank]).backward()
            trainer.allreduce_grads()
            clip(model)
            if kv.any(step == 2 and kv.rank == 3):
                continue
            trainer.update(BATCH)
            total = [torch.zeros_like(p) for p in plain.parameters()]
            for first in range(0, NUM_WORKERS, size):
                plain.zero_grad()
                loss(plain, step, range(first, first + size)).backward()
                clip(plain)
                total = [t + p.grad.to_dense() / BATCH for t, p in zip(total, plain.parameters(), strict=True)]
            for p, grad in zip(plain.parameters(), total, strict=True):
                p.grad = grad
            reference.step()
        difference = (flat(model.parameters()) - flat(plain.parameters())).abs().max()
        assert difference < 1e-12, f"{store}: {difference}"


def converted(store: str) -> None:
    """The model is of another dtype for some steps: gradients are summed as they are."""
    with kvmpi.create(store) as kv:
        model = make_model(seed=kv.rank)
        trainer = Trainer(model.parameters(), torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), kv, False)
        num_keys = list[int]()
        for step in range(STEPS):
            dtype = torch.float64 if step in (1, 2) else torch.float32
            model.to(dtype)
            x, y = samples(step, kv.rank)
            backward(model, x.to(dtype), y)
            trainer.step(NUM_WORKERS * BATCH)
            num_keys.append(len(kv.keys))
        assert num_keys[1] == num_keys[-1], "dtypes that come again have keys"
        difference = (flat(model.parameters()) - flat(plain_torch().parameters())).abs().max()
        assert difference < 1e-6, f"{store}: {difference}"


def gradient_of_one_worker(store: str) -> None:
    """The others have None, and still take part."""
    with kvmpi.create(store, staleness=0) as kv:
        weight = nn.Parameter(torch.ones(3))
        trainer = Trainer([weight], kvmpi.optim.SGD(lr=1.0), kv)
        if kv.rank == 1:
            weight.grad = torch.full((3,), 0.5)
        trainer.step(1)
        kv.barrier()
        kv.pull(0, weight)
        assert torch.equal(weight.detach(), torch.full((3,), 0.5)), f"{store}: {weight}"


def layers_of_one_worker(store: str) -> None:
    """Each worker has a gradient of its own layer alone, and none of the last; nobody waits for the others in vain."""
    for push in ("backward", "step"):
        with kvmpi.create(store, staleness=0) as kv:
            model = nn.ModuleList(nn.Linear(3, 1, bias=False) for _ in range(NUM_WORKERS + 1))
            for layer in model:
                nn.init.ones_(layer.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            optimizer = DistributedOptimizer(optimizer, kv, model, push=push)
            for _ in range(STEPS):
                optimizer.zero_grad()
                model[kv.rank](torch.full((1, 3), kv.rank + 1.0)).sum().backward()
                optimizer.step()
            kv.barrier()
            optimizer.zero_grad()
            for rank, layer in enumerate(model):
                kv.pull(rank, layer.weight)
                moved = 0.5 * STEPS * (rank + 1) if rank < NUM_WORKERS else 0.0
                torch.testing.assert_close(layer.weight.detach(), torch.full((1, 3), 1.0 - moved))


def sparse_training(store: str, update: bool) -> None:
    """An embedding of which each worker uses other rows, and one worker none in some steps, its first among them."""

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(40, 3, sparse=True), nn.Linear(3, 2))

    def ids(step: int, rank: int) -> torch.Tensor:
        return torch.randint(0, 36, (5,), generator=torch.Generator().manual_seed(10 * step + rank))

    def loss(model: nn.Module, step: int, ranks: Sequence[int]) -> torch.Tensor:
        return sum((model(ids(step, rank)) - rank).pow(2).sum() for rank in ranks)  # type: ignore[return-value]

    with kvmpi.create(store) as kv:
        plain, model = make(), make()
        trainer = Trainer(model.parameters(), torch.optim.Adagrad(model.parameters(), lr=0.2), kv, update)
        assert trainer.update_on_kvstore == update
        reference = torch.optim.Adagrad(plain.parameters(), lr=0.2)
        for step in range(STEPS):
            workers = [rank for rank in range(NUM_WORKERS) if (rank, step) not in ((1, 0), (1, 2))]
            for one, ranks in ((plain, workers), (model, [kv.rank] if kv.rank in workers else [])):
                one.zero_grad()
                if ranks:
                    loss(one, step, ranks).backward()
            for p in plain.parameters():
                p.grad.mul_(1 / BATCH)
            reference.step()
            trainer.step(BATCH)
        if update:
            assert kv.mpi_rank != 0 or kv.stats()["phases"]["push"]["bytes"] < STEPS * (2 * 5 * 16 + 8 * 4) + 1
        difference = (flat(model.parameters()) - flat(plain.parameters())).abs().max()
        assert difference < 1e-5, f"{store}, update_on_kvstore={update}: {difference}"


def rows_of_others(store: str) -> None:
    """In an asynchronous store what others have changed comes with pull_rows."""
    with kvmpi.create(store) as kv:
        table = nn.Embedding(8, 2, sparse=True)
        nn.init.zeros_(table.weight)
        trainer = Trainer(table.parameters(), torch.optim.SGD(table.parameters(), lr=1.0), kv)
        table(torch.tensor([kv.rank, 7])).sum().backward()
        trainer.step(1)
        kv.barrier()
        trainer.pull_rows(table.weight, torch.tensor([[0, 1], [2, 7]]))
        expected = torch.zeros(8, 2)
        expected[:4], expected[7] = -1.0, -4.0
        assert torch.equal(table.weight.detach()[[0, 1, 2, 7]], expected[[0, 1, 2, 7]]), table.weight


def client_store(store: str) -> None:
    with kvmpi.create(store) as kv:
        ranks = torch.zeros(NUM_WORKERS)
        ranks[kv.rank] = 1.0
        kv.client.init("ranks", ranks)
        kv.client.pushpull("ranks", ranks)
        mine = [2 * kv.client_rank, 2 * kv.client_rank + 1] if store.endswith("mpi") else [kv.rank]
        assert ranks.nonzero().flatten().tolist() == mine, f"{store}: {ranks}"
        assert (kv.client.rank, kv.client.num_workers) == (kv.mpi_rank, kv.mpi_size)
        inside = kv.client
    assert inside.closed


def elastic_averaging(store: str, compression: str = "none") -> None:
    """Servers and clients exchange in any order; the sum of the center and of every client's weights stays."""
    with kvmpi.create(store) as kv, kvmpi.create("dist_sync") as total:
        model = make_model(seed=0)
        elastic = ElasticAveraging(model.parameters(), kv, alpha=0.3, interval=1)
        kv.set_gradient_compression({"type": compression})
        for p in model.parameters():
            p.data += kv.client_rank  # in place of local steps
        start = flat(model.parameters())
        count = kv.num_clients
        expected = (count + 1) * (start - kv.client_rank) + sum(range(count))
        for _ in range(5):
            elastic.step()
        kv.barrier()
        weights = flat(model.parameters()) * (kv.mpi_rank == 0)
        total.init(0, weights)
        total.pushpull(0, weights)
        found = weights + flat(elastic.pull_center())
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        # Client 0 starts at the center, and stays there if it is through before any other begins.
        moved = not torch.allclose(flat(model.parameters()), start)
        assert moved or kv.client_rank == 0, "nothing was exchanged"


def diloco_that_averages(store: str) -> None:
    with kvmpi.create(store) as kv:
        model = make_model(seed=kv.rank)
        diloco = DiLoCo(model.parameters(), kv, interval=1, lr=1.0, momentum=0.0, nesterov=False)
        start = flat(model.parameters())
        assert torch.equal(start, flat(make_model(seed=0).parameters()))
        for p in model.parameters():
            p.data += kv.rank
        diloco.step()
        mean = sum(range(NUM_WORKERS)) / NUM_WORKERS
        torch.testing.assert_close(flat(model.parameters()), start + mean, atol=1e-6, rtol=0)
        assert torch.equal(flat(model.parameters()), flat(diloco.pull_center()))


def unmodified_ddp_over_a_store(store: str) -> None:
    """DDP's process group is the client; its gradients go through servers, to all clients."""
    from kvmpi.torch import c10d

    c10d.make_client_the_world()
    torch.distributed.init_process_group("kvmpi")
    with kvmpi.create(store) as kv:
        assert torch.distributed.get_rank() == kv.mpi_rank
        assert torch.distributed.get_world_size() == kv.mpi_size
        # Clients begin alike, the workers of one need not.
        for _ in range(2):
            model = nn.parallel.DistributedDataParallel(make_model(seed=kv.mpi_rank), bucket_cap_mb=1e-4)
            model.register_comm_hook(None, ddp_comm_hook(kv))
            trained_by_ddp(kv, model)
        assert {key.partition(".")[0] for key in kv.keys} == {"ddp", "ddp2"}
        for view in (False, True):
            layers_of_one_client(kv, gradient_as_bucket_view=view)
        what_is_left_of_unused_layers(kv)
        what_is_left_in_other_buckets(kv)
    torch.distributed.destroy_process_group()


def trained_by_ddp(kv: kvmpi.KVStore, model: nn.Module, wrap: Callable[[Any], Any] = lambda train: train) -> None:
    """``wrap`` gets the function that does a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 / BATCH, momentum=0.9)

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        backward(model, x, y)
        optimizer.step()

    step_of = wrap(train)
    for step in range(STEPS):
        step_of(*samples(step, kv.rank))
    difference = (flat(model.parameters()) - flat(plain_torch([STEPS] * kv.num_workers).parameters())).abs().max()
    assert difference < 1e-6, f"{kv.type} under DDP: {difference}"


def compiled_ddp_over_a_store(store: str) -> None:
    """A step in one function that is compiled, with the hook that calls the store."""
    from kvmpi.torch import c10d

    c10d.make_client_the_world()
    torch.distributed.init_process_group("kvmpi")
    with kvmpi.create(store) as kv:
        model = nn.parallel.DistributedDataParallel(make_model(seed=kv.mpi_rank))
        model.register_comm_hook(None, ddp_comm_hook(kv))
        with compiler_keeps_out():
            trained_by_ddp(kv, model, torch.compile(backend="eager"))
    torch.distributed.destroy_process_group()


class Choice(nn.Module):
    """Of three layers one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 1, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        result: torch.Tensor = self.layers[layer](x)
        return result


def layers_of_one_client(kv: kvmpi.KVStore, **how: bool) -> None:
    """What a client does not use, and does not know to be used, has the gradient that others have; else none."""
    model = Choice()
    parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True, **how)
    parallel.register_comm_hook(None, ddp_comm_hook(kv))
    size = kv.mpi_size
    for clear in (True, False):
        parallel.zero_grad(set_to_none=clear)
        parallel(torch.full((1, 3), kv.rank + 1.0), kv.client_rank).sum().backward()
        for client in range(2):
            mean = sum(rank + 1 for rank in range(client * size, (client + 1) * size)) / kv.num_workers
            torch.testing.assert_close(model.layers[client].weight.grad, torch.full((1, 3), mean))
        assert model.layers[2].weight.grad is None


def what_is_left_of_unused_layers(kv: kvmpi.KVStore) -> None:
    """Under compression, nobody has a gradient of what nobody uses, and what was left of it goes with the next."""
    kv.set_gradient_compression({"type": "2bit", "threshold": 1.0})
    model = Choice()
    parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    parallel.register_comm_hook(None, ddp_comm_hook(kv))

    def drawn(step: int, rank: int) -> float:
        return 1.0 if step < 1 else (rank + 1) / 8

    left = [[0.0] * kv.num_clients for _ in range(3)]
    for step, used in enumerate([0, 1, 0, 2, 2, 1, 0, 0]):
        parallel.zero_grad()
        parallel(torch.full((1, 3), drawn(step, kv.rank)), used).sum().backward()
        mean = 0.0
        for client in range(kv.num_clients):
            ranks = range(client * kv.mpi_size, (client + 1) * kv.mpi_size)
            wanted = left[used][client] + sum(drawn(step, rank) for rank in ranks)
            left[used][client] = wanted - (wanted >= 1)
            mean += (wanted >= 1) / kv.num_workers
        for layer in range(3):
            found = model.layers[layer].weight.grad
            if layer == used:
                torch.testing.assert_close(found, torch.full((1, 3), mean), msg=f"step {step}: {found}, {mean}")
            else:
                assert found is None, f"step {step}: layer {layer} has {found}"
    kv.set_gradient_compression({"type": "none"})


class Scales(nn.Module):
    """Three parameters of which autograd has the gradients in another order than DDP expects them in."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.zeros(count)) for count in (6, 4, 8))

    def forward(self, factors: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(self.get_parameter(name) * factors[name]).sum() for name in "acb"]).sum()


def what_is_left_in_other_buckets(kv: kvmpi.KVStore) -> None:
    """After the first step DDP puts others together, and what was left of a gradient is still its parameter's."""
    kv.set_gradient_compression({"type": "2bit", "threshold": 1.0})
    model = Scales()
    parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=48 / 2**20)
    parallel.register_comm_hook(None, ddp_comm_hook(kv))
    before = set(kv.keys)

    def drawn(name: str, step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + 10 * rank + ord(name))
        return torch.randint(-4, 5, model.get_parameter(name).shape, generator=generator) / 8.0

    left = {name: [torch.zeros_like(p) for _ in range(kv.num_clients)] for name, p in model.named_parameters()}
    for step in range(5):
        parallel.zero_grad()
        parallel({name: drawn(name, step, kv.rank) for name in left}).backward()
        for name, errors in left.items():
            mean = torch.zeros_like(errors[0])
            for client in range(kv.num_clients):
                ranks = range(client * kv.mpi_size, (client + 1) * kv.mpi_size)
                wanted = errors[client] + sum(drawn(name, step, rank) for rank in ranks)
                codes = wanted.sign() * (wanted.abs() >= 1)
                errors[client], mean = wanted - codes, mean + codes / kv.num_workers
            found = model.get_parameter(name).grad
            assert torch.equal(found, mean), f"step {step}, {name}: {found}, expected {mean}"
    assert len(buckets := set(kv.keys) - before) > 4, f"the same buckets all the time: {buckets}"
    kv.set_gradient_compression({"type": "none"})


def states_of_one_worker(store: str, folder: Path) -> None:
    """Worker 0 cannot write states, another one cannot read them: an error on all, after which they go on."""
    with kvmpi.create(store) as kv:
        model = make_model(seed=0)
        trainer = Trainer(model.parameters(), torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), kv, False)
        for where, said in ((folder / "none" / "states", "No such file"), (folder, "Is a directory")):
            with raises(KVError, match=said if kv.rank == 0 else "another worker has failed"):
                trainer.save_states(where)
        backward(model, *samples(0, kv.rank))
        trainer.step(NUM_WORKERS * BATCH)
        trainer.save_states(folder / "states")
        trainer.set_learning_rate(0.7)
        with raises(KVError, match="FileNotFoundError" if kv.rank == 2 else "another worker has failed"):
            trainer.load_states(folder / ("none" if kv.rank == 2 else "states"))
        assert trainer.learning_rate == 0.7, "what one cannot read, nobody has taken"
        trainer.load_states(folder / "states")
        for step in range(1, STEPS):
            backward(model, *samples(step, kv.rank))
            trainer.step(NUM_WORKERS * BATCH)
        difference = (flat(model.parameters()) - flat(plain_torch().parameters())).abs().max()
        assert difference < 1e-6, f"{store}: {difference}"


def mean_of_an_update(store: str) -> None:
    """Where servers gather pushes, gradients become the mean over the workers whose pushes are one update."""
    with kvmpi.create(store, softsync=1) as kv:
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), kv, [("weight", weight)])
        for factor in (kv.rank + 1.0, 0.0):
            optimizer.zero_grad()
            (weight * factor).sum().backward()
            optimizer.step()
            kv.barrier()
        expected = -0.5 * sum(range(1, kv.num_workers + 1)) / kv.num_workers
        assert torch.allclose(weight, torch.full((3,), expected)), (weight, expected)


def main() -> None:
    for store in ("dist_sync", "dist_sync_mpi"):
        synchronous_training(store, update=True)
        synchronous_training(store, update=False)
        sparse_training(store, update=True)
        sparse_training(store, update=False)
        diloco_that_averages(store)
        halves_of_a_step(store)
        converted(store)
    uneven_batches("dist_sync_mpi", [1, 5, 4, 2])
    uneven_batches("dist_sync_mpi", [0, 4, 2, 0])
    for store in ("dist_sync", "dist_sync_mpi", "dist_async_mpi", "dist_ssp"):
        gradient_of_one_worker(store)
    layers_of_one_worker("dist_ssp")
    for store in ("dist_softsync", "dist_softsync_mpi"):
        mean_of_an_update(store)
    for store in ("dist_async", "dist_async_mpi"):
        client_store(store)
        elastic_averaging(store)
        elastic_averaging(store, "bf16")
        rows_of_others(store)
    states_of_one_worker("dist_sync_mpi", Path(os.environ["KVMPI_JOB_DIR"]))
    unmodified_ddp_over_a_store("dist_sync_mpi")


def compiled() -> None:
    """In a job of any shape that has servers: reading the compiler takes each worker longer than all of the above."""
    compiled_together("dist_sync_mpi", update=True)
    compiled_together("dist_sync", update=False)
    compiled_ddp_over_a_store("dist_sync_mpi")
