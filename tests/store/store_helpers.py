"""What tests of a store in one process share."""

from __future__ import annotations

import numpy as np
import torch

ALL = ["local", "mpi", "dist_sync", "dist_async", "dist_sync_mpi", "dist_async_mpi"]


def array(seed: int, shape=(2, 3), dtype="f4"):
    return np.random.default_rng([11, seed]).standard_normal(shape).astype(dtype)


def pulled(kv, key, like):
    out = np.empty_like(like) if isinstance(like, np.ndarray) else torch.empty_like(like)
    kv.pull(key, out)
    return out
