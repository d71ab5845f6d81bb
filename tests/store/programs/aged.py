"""Clients whose gradients are of known ages: what they change, and what the histogram says, by the same numbers.

aged.py TYPE...
"""

import sys

import numpy as np

import kvmpi

#: In several chunks, and in one.
SHAPES = {"w": (6000, 3), "b": (5,)}
#: How often every other client pushes in a turn; and what one pushes then.
TURNS = ((0, 1.0), (1, 4.0), (3, 12.0), (2, 30.0))


def pattern(shape):
    return (np.arange(np.prod(shape), dtype="f8").reshape(shape) % 5 + 1).astype("f4")


for name in sys.argv[1:]:
    with kvmpi.create(name, chunk_bytes=16384, staleness=20) as kv:
        kv.init([*SHAPES], [np.zeros(shape, "f4") for shape in SHAPES.values()])
        kv.set_optimizer(kvmpi.optim.SGD(lr=1.0, rescale_grad=1.0 / kv.mpi_size, staleness_aware=True))
        outs = {key: np.full(shape, np.nan, "f4") for key, shape in SHAPES.items()}
        expected, ages = 0.0, []
        for turn, (often, size) in enumerate(TURNS):
            old = turn % kv.num_clients  # whose gradient will be old
            kv.pull([*SHAPES], [*outs.values()])
            kv.barrier()
            for other in range(kv.num_clients):
                for _ in range(often if other != old else 0):
                    if other == kv.client_rank:
                        # No update older than the pull that comes before it.
                        kv.pull([*SHAPES], [*outs.values()])
                        kv.pushpull([*SHAPES], [-pattern(shape) for shape in SHAPES.values()], [*outs.values()])
                        ages.append(0)
                    expected += 1.0
                    kv.barrier()
            age = often * (kv.num_clients - 1)
            if kv.client_rank == old:
                values = [-size * pattern(shape) for shape in SHAPES.values()]
                if turn % 2:
                    for key, value in zip(SHAPES, values, strict=True):
                        kv.push(key, value)
                else:
                    kv.push([*SHAPES], values)
                ages.append(age)
            expected += size / max(1, age)
            kv.barrier()
            kv.pull([*SHAPES], [*outs.values()])
            for key, shape in SHAPES.items():
                np.testing.assert_allclose(outs[key], expected * pattern(shape).astype("f8"), rtol=1e-6)
            kv.barrier()
        found = kv.stats()["staleness"] if kv.mpi_rank == 0 else {}
        wanted = {age: len(SHAPES) * ages.count(age) for age in sorted(set(ages))} if kv.mpi_rank == 0 else {}
        assert found == wanted, (found, wanted)
        print(name, kv.num_clients, "aged")
