"""Arrays of ``kv.empty``: other workers of the host read them in place, and they outlive the store."""

import sys

import numpy as np
import torch

import kvmpi
from kvmpi.collectives import arena

COUNT = 1_000_003  # large enough for the workers to read from each other

for name in sys.argv[1:]:
    with kvmpi.create(name) as kv:
        n = kv.num_workers
        index = np.arange(COUNT) % 1000
        total = n * index + sum(range(n))
        kept = []
        for key, dtype in enumerate(["float32", "float64", "int32", torch.float32, torch.bfloat16]):
            array = kv.empty((COUNT,), dtype)
            of_torch = isinstance(dtype, torch.dtype)
            assert array.dtype == dtype
            assert tuple(array.shape) == (COUNT,)
            place = array.view(torch.uint8).numpy() if of_torch else array
            mapped = arena.own().offset_of(place) is not None
            assert mapped == (kv.mpi_size > 1), "where nobody else is on the host, ordinary memory will do"
            small = dtype is torch.bfloat16  # which holds whole numbers up to 256 only
            values, expected = (
                (index % 32 + kv.rank, n * (index % 32) + sum(range(n))) if small else (index + kv.rank, total)
            )
            kv.init(key, torch.zeros(COUNT, dtype=dtype) if of_torch else np.zeros(COUNT, dtype))
            for _ in range(2):
                array[:] = torch.from_numpy(values) if of_torch else values
                kv.pushpull(key, array)
                assert (np.asarray(array.double() if of_torch else array) == expected).all(), (name, dtype)
            out = kv.empty(COUNT, dtype)
            kv.pull(key, out)
            assert (out == array).all()
            kept.append((array, out))
    for array, out in kept:
        assert (out == array).all(), "the arrays belong to the program, not to the store"
    print(f"empty {name} right", flush=True)
