"""Rules of the program's own run on the servers, and a server without them says what is missing."""

import numpy as np
from custom_rules import Doubler, Normalized
from raising import raises

import kvmpi
from kvmpi.errors import UnsupportedError

with kvmpi.create("dist_sync") as kv:
    value = np.arange(3, dtype="f4")
    kv.init("w", value)
    kv.set_optimizer(Doubler(gain=3.0))
    out = np.empty_like(value)
    kv.pushpull("w", value + kv.rank, out)
    n = kv.num_workers
    assert (out == 2 * value + 3 * (n * value + n * (n - 1) / 2)).all(), out

with kvmpi.create("dist_sync") as kv:
    kv.init(["small", "large"], [np.zeros(5, "f4"), np.zeros(400_000, "f4")])
    kv.set_optimizer(Normalized())
    out = np.empty(5, "f4")
    kv.pushpull("small", np.full(5, kv.rank + 1, "f4"), out)
    np.testing.assert_allclose(out, np.full(5, -(5**-0.5)), rtol=1e-6)
    grad, value = np.ones(400_000, "f4"), np.empty(400_000, "f4")
    with raises(UnsupportedError, match=r"'normalized' must see a whole vector.*KVMPI_PLACEMENT=hash"):
        kv.pushpull("large", grad, value)  # each part of it has a norm of its own
with kvmpi.create("dist_sync", placement="hash") as kv:
    kv.init("large", np.zeros(400_000, "f4"))
    kv.set_optimizer(Normalized())
    kv.pushpull("large", grad, value)
    np.testing.assert_allclose(value, np.full(400_000, -(400_000**-0.5)), rtol=1e-5)
print("custom rule", flush=True)
