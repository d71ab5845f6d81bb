"""One command line trains under every launcher, a client is killed on the way, and all is learnt that was to be."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch_sites import PROGRAMS, Site
from jobs import HANGS_S, environs_with, wait_for
from test_launch_kill import needs_mpi

from kvmpi.benchmarks.netlab import PRIVATE, NetLab
from kvmpi.errors import UnsupportedError

pytestmark = [needs_mpi, pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")]

EXAMPLES = Path(__file__).parents[2] / "examples"
WORKERS, BATCH, EPOCHS = 3, 16, 3
#: Client 0 is two ranks of MPI, client 1 one process without it.
SHAPE = ["-n", str(WORKERS), "-c", "2", "-s", "1", "--restart", "1", "--"]
TRAIN_IMAGES = [
    *(str(EXAMPLES / "train_images.py"), "--algorithm", "mpi-sgd"),
    *("--epochs", str(EPOCHS), "--batch-size", str(BATCH), "--target-accuracy", "0.9"),
]
SOFTMAX = PROGRAMS / "softmax.py"
# What a client misses while it is started again is waited for; other tests may have the processor.
SETTINGS = {"KVMPI_TIMEOUT_S": "120", "OMP_NUM_THREADS": "1"}
TIMEOUT_S = HANGS_S


def expected_accuracy() -> float:
    """In the end: the same gradients one after the other, in torch alone."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import image_data
        import image_models
        import torch
    finally:
        sys.path.remove(str(EXAMPLES))
    torch.set_num_threads(1)  # several would wait for each other
    shares = [image_data.load("digits", rank, WORKERS, with_test=rank == 0) for rank in range(WORKERS)]
    model = image_models.create("cnn", 1, 8, 10, 0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    count = shares[0].train_count // WORKERS // BATCH
    for epoch in range(1, EPOCHS + 1):
        orders = [image_data.batches(s.train, BATCH, count, epoch, 0, rank) for rank, s in enumerate(shares)]
        for chosen in zip(*orders, strict=True):
            optimizer.zero_grad()
            for share, indices in zip(shares, chosen, strict=True):
                x, y = share.train.batch(indices)
                (torch.nn.functional.cross_entropy(model(x), y) / WORKERS).backward()
            optimizer.step()
        schedule.step()
    test = shares[0].test
    assert test is not None
    x, y = test.batch(range(len(test)))
    with torch.no_grad():
        return float((model.eval()(x).argmax(1) == y).float().mean())


def expected_weights() -> np.ndarray:
    """In the end: the same gradients one after the other, in float64."""
    program = runpy.run_path(str(SOFTMAX))
    weights = np.zeros((program["FEATURES"], program["CLASSES"]))
    velocity = np.zeros_like(weights)
    for step in range(program["STEPS"]):
        gradients = [program["gradient"](weights, rank, step) for rank in range(WORKERS)]
        velocity = program["MOMENTUM"] * velocity + sum(gradients) / WORKERS
        weights = weights - program["LR"] * velocity
    return weights


@contextlib.contextmanager
def here(request: pytest.FixtureRequest) -> Iterator[tuple[list[str], Callable[..., list[str]], dict[str, str]]]:
    yield ["--launcher", "local"], list, {}


@contextlib.contextmanager
def on_four_hosts(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Each has a network of its own: client 0 is on two of them, client 1 and the server on one each."""
    try:
        with NetLab(4, link=None) as lab:
            words = ["--launcher", "mpirun", "--remote-shell", f"{PRIVATE}/agent", "--interface", lab.subnet]
            words += ["--hosts", ",".join(f"{name}:1" for name in lab.hosts)]
            yield words, lambda command: lab.command_on(0, command), {}
    except UnsupportedError as error:
        pytest.skip(str(error))


@contextlib.contextmanager
def submitted(request: pytest.FixtureRequest) -> Iterator[Any]:
    site: Site = request.getfixturevalue(request.node.callspec.params["launcher"])
    yield ["--launcher", site.name, "--interface", site.network, "--batch-dir", str(site.folder)], site.on, site.env
    site.assert_nothing_is_left()


PLACES = {"local": here, "mpirun": on_four_hosts, "slurm": submitted, "lsf": submitted}


def members(mark: str, **wanted: str) -> list[int]:
    """Processes of the job with these values in their environment."""
    fitting = {f"KVMPI_{name}": value for name, value in wanted.items()}
    return [pid for pid, environ in environs_with(mark).items() if fitting.items() <= environ.items()]


def run_and_kill(
    launcher: str, request: pytest.FixtureRequest, folder: Path, program: list[str], begun: str, go_on: Path
) -> str:
    """Run a program, kill the whole of client 0 once ``begun`` was said, and make ``go_on``; what the job has said."""
    with PLACES[launcher](request) as (words, on, env):
        mark = f"TEST_RUN={os.urandom(8).hex()}"
        env = {**{k: v for k, v in os.environ.items() if not k.startswith("KVMPI_")}, **env, **SETTINGS}
        env.update([mark.split("=")])
        command = on([sys.executable, "-m", "kvmpi", "run", *words, *SHAPE, *program])
        out, err = folder / "out", folder / "err"
        with out.open("w") as stdout, err.open("w") as stderr:
            job = subprocess.Popen(command, env=env, cwd=folder, stdout=stdout, stderr=stderr)
        try:
            wait_for(lambda: begun in out.read_text() or job.poll() is not None, "the first steps", TIMEOUT_S)
            # The whole of an MPI client: its mpirun, what that has on other hosts, and the ranks.
            killed = members(mark, CLIENT_RANK="0")
            for pid in killed:
                with contextlib.suppress(ProcessLookupError):  # it has ended with those before it
                    os.kill(pid, signal.SIGKILL)
            go_on.touch()
            status = job.wait(TIMEOUT_S)
        finally:
            job.kill()
            job.wait()
        said, complaints = out.read_text(), err.read_text()
        assert status == 0, said + complaints
        assert len(killed) >= 5, "an mpirun, and two ranks below what supervises them"
        assert "client 0 was killed by SIGKILL; it is started again (1 of 1)" in complaints
        assert said.count(begun) == 1, "what the processes before have said is said again"
        wait_for(lambda: not members(mark), "the end of all processes", 10.0)
        return said


@pytest.mark.parametrize("launcher", list(PLACES))
def test_a_client_is_killed_and_all_is_learnt_that_was_to_be(
    launcher: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    go_on = tmp_path / "go on"
    said = run_and_kill(launcher, request, tmp_path, [str(SOFTMAX), str(go_on)], "step 10 is done", go_on)
    assert said.count("goes on after step ") == 2, said
    found = [json.loads(line.partition("end ")[2]) for line in said.splitlines() if "] end [[" in line]
    assert len(found) == WORKERS, said
    expected = expected_weights()
    assert np.abs(expected).max() > 0.3, "nothing was learnt"
    for weights in found:
        np.testing.assert_allclose(np.array(weights), expected, rtol=1e-4, atol=1e-5)


def test_an_example_trains_as_if_nothing_had_happened(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    said = run_and_kill("local", request, tmp_path, TRAIN_IMAGES, "]     1 ", tmp_path / "go on")
    assert "; goes on after batch " in said
    last = [line for line in said.splitlines() if f"]     {EPOCHS} " in line]
    assert len(last) == 1, said
    assert float(last[0].split()[-2].rstrip("%")) / 100 == pytest.approx(expected_accuracy(), abs=0.012), said
