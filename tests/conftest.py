"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

# Starting Python is most of what the tests take, and without bytecode it takes twice as long. Where nothing may be
# written beside the sources, this and all processes of the tests keep it in a folder of its own. First of all imports.
if sys.dont_write_bytecode:
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parents[1] / "build" / "bytecode")

# What every Python process of the tests reads when it starts, those of jobs and of pytest's own workers.
if (startup := str(Path(__file__).parent / "startup")) not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [startup, os.environ.get("PYTHONPATH")]))

# The launcher leaves this to whoever has set it; tests say themselves what it is to be.
os.environ.pop("OMP_NUM_THREADS", None)

# Threads that NumPy has for large matrices, which no test needs, look for work for a while when it is loaded: that is a
# quarter of what loading it takes.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

# A shell that starts something in the background lets it ignore Ctrl-C, and nohup a hang-up, and all processes that it
# starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import pytest
from hypothesis import HealthCheck, settings
from jobs import HANGS_S, run_job
from rank_threads import run_ranks  # noqa: F401 - a fixture

# On a machine that does other things, too, an example takes as long as it takes, and so does drawing it.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """For ``TMPDIR``: a new folder, in whose folders sockets may lie, as their names have an end."""
    with tempfile.TemporaryDirectory(prefix="k-", dir="/tmp") as folder:
        yield Path(folder)


#: Files that take long, the longest first, and those that take some time with few tests, which would come last: begun
#: at the end, one of them would keep all others waiting.
LONG = [
    "torch_jobs", "torch_c10d", "store_jobs", "store_joining", "simulated_jobs", "launch_restarts", "gluon_jobs",
    "bench_jobs", "store_checkpoints", "launch_batch", "bench_train", "launch_kill_anywhere", "horovod", "mpi",
    "launch_run", "ps_lossy", "failures", "torch_interrupts", "joined_ranks", "bench_torch_operations", "ps_fuzz",
    "torch_streaming", "docs", "store_mistakes", "torch_random_trainings", "launch_questions", "launch_anywhere",
    "plan_command", "agreement", "store_memory", "store_random_programs", "launch_ipv6",
    "wire_fuzz", "networks", "engine_serial", "examples_gpt", "launch_snapshots", "launch_adding", "examples_ddp",
    "trace_jobs", "kernels_gpu_source", "launch_temporary", "partitions", "chaos", "store_dropped", "bench_report",
    "ps_protocol_life",
]  # fmt: skip

Job = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def job() -> Job:
    """``run_job``, which must end with status 0: otherwise the test fails and shows what the job printed."""

    def run(
        options: str, program: Path, *arguments: object, timeout_s: float = HANGS_S, **settings: object
    ) -> subprocess.CompletedProcess[str]:
        done = run_job(options, program, *arguments, timeout_s=timeout_s, settings=settings)
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, then those with most tests; in a file, as it has them."""
    number = Counter(item.path for item in items)
    place = {f"test_{name}": i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: (place.get(item.path.stem, len(LONG)), -number[item.path], item.path))


def pytest_collection() -> None:
    """What thousands of tests are made of stays until the end: the collector looks through it only once."""
    gc.disable()


def pytest_collection_finish() -> None:
    """The collector, which many tests call, passes over it from now on."""
    gc.enable()
    gc.collect()
    gc.freeze()
