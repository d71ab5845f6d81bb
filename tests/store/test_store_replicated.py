"""The store without servers, its workers as threads of this process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvmpi
from kvmpi.collectives.memory_comm import MemoryComm
from kvmpi.config import Config
from kvmpi.errors import ConfigError
from kvmpi.store.replicated import ReplicatedStore

RunRanks = Callable[..., list[Any]]


def test_workers_with_other_buckets_get_an_error_not_other_sums(run_ranks: RunRanks) -> None:
    def rank_main(comm: MemoryComm) -> None:
        kv = ReplicatedStore("mpi", Config(bucket_bytes=(1 << 20) + comm.rank, timeout_s=20.0), comm)
        with pytest.raises(ConfigError, match=r"KVMPI_BUCKET_BYTES=1048577 on MPI rank 1"):
            kv.init(["a", "b"], [np.zeros(5), np.zeros(5)])
        kv.abort()

    run_ranks(2, rank_main)


def test_a_view_of_a_torch_key_is_the_value_and_warns_of_nothing() -> None:
    torch = pytest.importorskip("torch")
    with kvmpi.create("local") as kv, warnings.catch_warnings():
        warnings.simplefilter("error")
        kv.init("w", torch.arange(6.0).reshape(2, 3))
        kv.push("w", torch.ones(2, 3))
        assert torch.equal(kv.view("w"), torch.ones(2, 3))
        assert kv.view("w").data_ptr() == kv.view("w").data_ptr()
