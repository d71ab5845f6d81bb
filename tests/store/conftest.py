"""Stores of every type in one process, and a stand-in for devices."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from store_helpers import ALL

import kvmpi
from kvmpi import optim

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from device_fixtures import compile_for_host, import_gpu, stand_in  # noqa: F401 - fixtures

ASSIGNING = ["local", "mpi", "dist_sync", "dist_sync_mpi"]


@pytest.fixture(params=["threaded", "naive"])
def engine(request):
    return request.param


@pytest.fixture(params=ALL)
def any_store(request, engine):
    with kvmpi.create(request.param, engine=engine, timeout_s=20) as kv:
        if "async" in request.param:
            kv.set_optimizer(optim.Test(lr=-1))
        yield kv


@pytest.fixture(params=ASSIGNING)
def store(request):
    with kvmpi.create(request.param, timeout_s=20) as kv:
        yield kv
