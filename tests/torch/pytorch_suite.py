"""Runs PyTorch's own tests of torch.distributed and DDP, as its wheel ships them, with ``kvmpi`` in the place of gloo.

    kvmpi run -n 4 tests/torch/pytorch_suite.py [--failures] [NAME...]

It needs PyTorch's own test dependency: pip install expecttest.

Each test gets a world of its own. Rank 0 prints one line per test: passed, skipped (by PyTorch: no GPU, another
backend) or failed and why, and a summary; exit status 1 if one failed. ``--failures`` shows no others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import unittest
import unittest.mock
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import kvmpi.torch.c10d  # noqa: F401 - registers the backend

os.environ["BACKEND"] = "gloo"  # PyTorch's tests know what its own backends can do; that of the CPU is the measure
torch.set_num_threads(1)

torch.manual_seed(0)  # the suite makes objects when it is imported

from torch.testing._internal import common_distributed, common_utils  # noqa: E402
from torch.testing._internal.distributed import distributed_test as suite  # noqa: E402

os.environ["BACKEND"] = "mpi"  # or many tests are skipped in a world of fewer than 8 ranks
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
#: As long as a test may wait for a rank that has failed.
TIMEOUT = timedelta(seconds=20)
SKIPS = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}


class Case(suite.DistributedTest._DistTestBase, common_utils.TestCase):  # type: ignore[misc]
    """One rank's view of a test, without the processes that PyTorch would start."""

    rank, world_size = RANK, SIZE
    file_name = "unused"
    meetings = 0

    def _barrier(self, *args: Any, **kwargs: Any) -> None:
        self.meetings += 1
        _meet(f"{self._testMethodName}/{self.meetings}", TIMEOUT)


_outside: Any = None


def _meet(where: str, timeout: timedelta = timedelta(seconds=150)) -> None:
    """All ranks come here, whatever became of their process group."""
    if _outside.add(f"meeting/{where}", 1) == SIZE:
        _outside.set(f"meeting/{where}/all", "yes")
    _outside.wait([f"meeting/{where}/all"], timeout)


def _instead_of_gloo(make: Any) -> Any:
    def call(*arguments: Any, backend: str | None = None, **options: Any) -> Any:
        return make(*arguments, backend="kvmpi" if backend == "gloo" else backend, **options)

    return call


OURS = {name: _instead_of_gloo(getattr(dist, name)) for name in ("new_group", "init_process_group")}


def outcome_of(name: str) -> str:
    """ "passed", "skipped: why" or "failed: why", of this rank."""
    case = Case(name)
    common_utils.set_rng_seed(1234)
    try:
        store = dist.PrefixStore(name, _outside)
        dist.init_process_group(backend="kvmpi", timeout=TIMEOUT, store=store, rank=RANK, world_size=SIZE)
        getattr(case, name)()
    except SystemExit as end:
        return f"skipped: {SKIPS.get(end.code, end.code)}"
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except BaseException as error:
        text = " ".join(str(error).split())
        return f"failed: {type(error).__name__}: {text.partition(' To execute this test')[0][:200]}"
    return "passed"


def main() -> int:
    global _outside
    brief = "--failures" in sys.argv
    wanted = [name for name in sys.argv[1:] if name.startswith("test_")]
    names = wanted or sorted(name for name in dir(suite.DistributedTest._DistTestBase) if name.startswith("test_"))
    _outside = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    if RANK == 0:
        _outside.set("folder", tempfile.mkdtemp(prefix="kvmpi-suite-"))
    os.environ["TEMP_DIR"] = folder = _outside.get("folder").decode()
    for name in ("barrier", "test_dir"):
        os.makedirs(os.path.join(folder, name), exist_ok=True)
    verdicts: Counter[str] = Counter()
    for number, name in enumerate(names):
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            unittest.mock.patch.multiple(dist, **OURS),
        ):
            mine = outcome_of(name)
        if not mine.startswith("passed"):
            dist.distributed_c10d._world.pg_coalesce_state.clear()
        _outside.set(f"outcome/{number}/{RANK}", mine)
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        _meet(f"after {name}")
        if RANK == 0:
            found = [_outside.get(f"outcome/{number}/{rank}").decode() for rank in range(SIZE)]
            worst = next((o for o in found if o.startswith("failed")), found[0])
            verdicts[worst.partition(":")[0]] += 1
            if not brief or worst.startswith("failed"):
                print(f"{name}: {worst}", flush=True)
        _meet(f"before the one after {name}")
    if RANK == 0:
        print(", ".join(f"{count} {what}" for what, count in sorted(verdicts.items())), flush=True)
        shutil.rmtree(folder)
    _meet("the end")
    # Some tests break their groups on purpose: the exit status is 1 then, since MPI cannot end in good order.
    return int(verdicts["failed"] > 0)


if __name__ == "__main__" and main():
    sys.exit(1)
