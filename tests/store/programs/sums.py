"""Worker r pushes r+1 under Test(rescale_grad=2), for 4 rounds: every pulled value is known exactly."""

import sys

import numpy as np

import kvmpi

SHAPES = [(2, 3), (300, 301), (1211, 1211)]
ROUNDS = 4

for name in sys.argv[1:]:
    with kvmpi.create(name) as kv:
        n, r = kv.num_workers, kv.rank
        keys = [f"{shape} {dtype}" for shape in SHAPES for dtype in ("f4", "f2")]
        ones = [np.ones(shape, dtype) for shape in SHAPES for dtype in ("f4", "f2")]
        kv.init(keys, ones if r == 0 else [np.full_like(one, 99) for one in ones])  # worker 0's value counts
        outs = [np.empty_like(one) for one in ones]
        kv.pull(keys, outs)
        assert all((out == 1).all() for out in outs), "init"
        kv.assign(keys, [np.full_like(one, r + 5) for one in ones])  # where a host's workers may share what they hold
        kv.pull(keys, outs)
        assert all((out == 5).all() for out in outs), "assign"
        kv.set_optimizer(kvmpi.optim.Test(rescale_grad=2))
        kv.assign(keys, [np.full_like(one, r + 1) for one in ones])
        for i in range(ROUNDS):
            values = [np.full_like(one, r + 1) for one in ones]
            if i % 2:
                kv.pushpull(keys, values, outs)
            else:
                kv.push(keys, values)
                kv.pull(keys, outs)
            expected = 1 + 2 * n * (n + 1) / 2 * (i + 1)
            for key, out in zip(keys, outs):  # noqa: B905
                assert (out == expected).all(), (name, n, r, key, i, out.flat[0], expected)
        print(f"{name} {kv.num_workers} {kv.num_clients} {kv.num_servers} exact", flush=True)
