"""Processes that something else than MPI has started together: none of them trains by itself without a word."""

from __future__ import annotations

import pytest

import kvmpi
from kvmpi.collectives import mpi_comm
from kvmpi.errors import ConfigError

OTHERS = {"WORLD_SIZE": "3", "NODE_RANK": "0", "LOCAL_RANK": "1", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
SRUN = {"SLURM_STEP_NUM_TASKS": "2"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*mpi_comm._SIZE_VARIABLES, "PMIX_RANK", "RANK", *OTHERS, *SRUN):
        monkeypatch.delenv(name, raising=False)


def start(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("store_type", ["mpi", "dist_sync", "dist_async_mpi"])
@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (
            OTHERS,
            "WORLD_SIZE to 3 has not set RANK .*torchrun, or with 'kvmpi run -n 3 PROGRAM'.*of type 'local'",
        ),
        (SRUN, "srun has started 2 tasks .*'kvmpi run -n 2 PROGRAM'"),
    ],
)
def test_one_of_several_does_not_train_by_itself(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], said: str, store_type: str
) -> None:
    start(monkeypatch, environ)
    with pytest.raises(ConfigError, match=said):
        kvmpi.create(store_type)
    with kvmpi.create("local") as kv:
        assert kv.num_workers == 1


@pytest.mark.parametrize("environ", [{}, OTHERS | {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "4"}, OTHERS | {"PMI_SIZE": "4"}])
def test_who_is_alone_or_a_rank_of_mpi_is_no_lone_task(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    start(monkeypatch, environ)
    assert mpi_comm.lone_tasks() is None
