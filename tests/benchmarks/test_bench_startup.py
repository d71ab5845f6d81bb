"""``kvmpi bench startup``, with programs that import nothing large."""

from __future__ import annotations

import pytest

from kvmpi.benchmarks import startup


def test_startup_shows_every_phase_beside_a_bare_mpirun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(startup, "BARE", "import mpi4py.MPI")
    light = startup.WORKER.replace("import torch\nimport kvmpi.torch", "import numpy as torch\nimport kvmpi")
    assert light != startup.WORKER
    monkeypatch.setattr(startup, "WORKER", light)
    assert startup.main("startup", ["-n", "2", "-c", "1", "-s", "1", "--rounds", "1"]) == 0
    header, bare, *ours, note = capsys.readouterr().out.splitlines()
    assert header.split()[-2:] == ["s", "ratio"]
    assert bare.split()[-1] == "1.00"
    assert [" ".join(line.split()[8:-2]) for line in ours] == list(startup.PHASES)
    seconds = [float(line.split()[-2]) for line in ours]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    assert note.startswith("medians of 1")
