"""Elastic averaging in a scripted interleaving against an oracle, and DiLoCo's outer step."""

import sys

import numpy as np

import kvmpi

ALPHA, COUNT, TURNS = 0.3, 5000, 3


def weights_of(rank):
    return np.random.default_rng([5, rank]).standard_normal(COUNT)


def scripted(name):
    """Clients take turns, so the order of exchanges is known; w + center is conserved by each."""
    with kvmpi.create(name) as kv:
        p, clients = kv.mpi_size, kv.num_clients
        center = weights_of(99)
        kv.init("c", center.astype("f4"))
        kv.set_optimizer(kvmpi.optim.Elastic(ALPHA))
        local = [weights_of(client) for client in range(clients)]  # every worker of a client holds the same
        mine = local[kv.client_rank].astype("f4")
        for _ in range(TURNS):
            for client in range(clients):
                if client == kv.client_rank:
                    met = np.empty(COUNT, "f4")
                    kv.pushpull("c", mine, met)
                    np.testing.assert_allclose(met, center, rtol=0, atol=2e-6)
                    mine -= np.float32(ALPHA) * (mine - met)
                difference = ALPHA * (local[client] - center)
                total = local[client] + center
                local[client], center = local[client] - difference, center + difference
                assert np.abs(local[client] + center - total).max() < 1e-12
                kv.barrier()
        now = np.empty(COUNT, "f4")
        kv.pull("c", now)
        np.testing.assert_allclose(now, center, rtol=0, atol=2e-6)
        np.testing.assert_allclose(mine, local[kv.client_rank], rtol=0, atol=2e-6)
        kv.barrier()
        print(f"{name} {clients}x{p} elastic", flush=True)


def synchronous(name):
    """One round of all clients against one center."""
    with kvmpi.create(name) as kv:
        center = weights_of(99)
        kv.init("c", center.astype("f4"))
        kv.set_optimizer(kvmpi.optim.Elastic(ALPHA))
        for _ in range(3):
            met = np.empty(COUNT, "f4")
            kv.pushpull("c", weights_of(kv.client_rank).astype("f4"), met)
            np.testing.assert_allclose(met, center, rtol=0, atol=1e-5)
            center = center + ALPHA * sum(weights_of(client) - center for client in range(kv.num_clients))
        print(f"{name} synchronous elastic", flush=True)


def outer_averages(name):
    """DiLoCo with H=1 and Outer(lr=1, momentum=0) is averaging."""
    with kvmpi.create(name) as kv:
        center = np.zeros(COUNT, "f4")
        kv.init("c", center)
        kv.set_optimizer(kvmpi.optim.Outer(lr=1, momentum=0, nesterov=False))
        for step in range(4):
            mine = weights_of(10 * step + kv.rank).astype("f4")
            kv.pushpull("c", center - mine, center)
            groups = [[] for _ in range(kv.num_clients)]
            for rank, client in enumerate(clients_of_workers(kv)):
                groups[client].append(weights_of(10 * step + rank))
            mean = np.mean([np.mean(group, axis=0) for group in groups], axis=0)
            np.testing.assert_allclose(center, mean, rtol=0, atol=2e-6)
        print(f"{name} averages", flush=True)


def clients_of_workers(kv):
    from kvmpi.config import client_bounds

    return [c for c, (a, b) in enumerate(client_bounds(kv.num_workers, kv.num_clients)) for _ in range(a, b)]


grouped = sys.argv[1] == "grouped"
scripted("dist_async_mpi" if grouped else "dist_async")
synchronous("dist_sync_mpi" if grouped else "dist_sync")
outer_averages("dist_sync_mpi" if grouped else "dist_sync")
