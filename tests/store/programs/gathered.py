"""Servers that update when enough pushes are there, whoever they are from: who reads what when; and who has no more.

gathered.py SPLITS TYPE...
"""

import sys

import numpy as np

import kvmpi

#: In several chunks, and in one.
SHAPES = {"w": (6000, 3), "b": (5,)}


def pattern(shape, client, step):
    index = np.arange(np.prod(shape), dtype="f8").reshape(shape)
    return 100.0 * client + 10.0 * step + index % 7


splits = int(sys.argv[1])
for name in sys.argv[2:]:
    with kvmpi.create(name, softsync=splits, chunk_bytes=16384) as kv:
        size = max(1, kv.num_clients // splits)
        assert kv.pushes_per_update == size
        assert kv.is_capable("async")
        assert kv.is_capable("skip")
        assert not kv.is_capable("elastic")
        outs = {key: np.full(shape, np.nan, "f4") for key, shape in SHAPES.items()}
        values = {key: np.zeros(shape, "f8") for key, shape in SHAPES.items()}
        gathered = {key: np.zeros(shape, "f8") for key, shape in SHAPES.items()}
        kv.init([*SHAPES], [value.astype("f4") for value in values.values()])
        kv.set_optimizer(kvmpi.optim.SGD(lr=0.5))
        steps, updates, read, ages = [0] * kv.num_clients, 0, [0] * kv.num_clients, []
        # Whose turn it is: a fast client twice or three times before the others, one that is slow at last.
        turns = [0, 0, 0, *range(kv.num_clients), *range(kv.num_clients), 1 % kv.num_clients, 0]
        for number, client in enumerate(turns, 1):
            steps[client] += 1
            if client == kv.client_rank:
                ages.append(updates - read[client])
                given = [
                    (pattern(shape, client, steps[client]) / kv.mpi_size).astype("f4") for shape in SHAPES.values()
                ]
                if steps[client] % 2:
                    kv.push([*SHAPES], given)
                else:
                    kv.pushpull([*SHAPES], given, [*outs.values()])
            for key, shape in SHAPES.items():
                gathered[key] += pattern(shape, client, steps[client])
                if number % size == 0:
                    values[key] -= 0.5 * gathered[key]
                    gathered[key][...] = 0
            updates += number % size == 0
            if steps[client] % 2 == 0:
                read[client] = updates
                if client == kv.client_rank:
                    for key in SHAPES:
                        np.testing.assert_allclose(outs[key], values[key], rtol=1e-6)
            kv.barrier()
            if number % 3 == 0:
                kv.pull([*SHAPES], [*outs.values()])
                read = [updates] * kv.num_clients
                for key in SHAPES:
                    np.testing.assert_allclose(outs[key], values[key], rtol=1e-6)
            kv.barrier()
        found = kv.stats()["staleness"] if kv.mpi_rank == 0 else {}
        wanted = {age: len(SHAPES) * ages.count(age) for age in sorted(set(ages))} if kv.mpi_rank == 0 else {}
        assert found == wanted, (found, wanted)
        # All but client 0 have no more: then one push is enough, and what waits is an update.
        if kv.client_rank != 0:
            kv.join()
        else:
            for key in SHAPES:
                values[key] -= 0.5 * gathered[key]
            left = kvmpi.deadline.Deadline(60.0)
            while True:
                kv.pull([*SHAPES], [*outs.values()])
                if all(np.allclose(outs[key], values[key], rtol=1e-6) for key in SHAPES):
                    break
                assert left.remaining_s() > 0, (outs, values)
            kv.pushpull(
                [*SHAPES], [np.full(shape, 2.0 / kv.mpi_size, "f4") for shape in SHAPES.values()], [*outs.values()]
            )
            for key in SHAPES:
                np.testing.assert_allclose(outs[key], values[key] - 1.0, rtol=1e-6)
            if kv.mpi_size > 1 or kv.num_clients > 1:
                kv.join()
        print(name, splits, kv.num_clients, "gathered")
