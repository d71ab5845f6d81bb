"""benchmarks/torch_operations.py: a line for every operation and size, after both backends were right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from jobs import HANGS_S

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "torch_operations.py"
OPERATIONS = [
    "all_reduce",
    "all_reduce_max",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_single",
    "reduce_scatter_single",
    "all_to_all_single",
    "gather",
    "scatter",
    "isend_irecv",
]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvmpi", "run", "-n", "3", *words, "--sizes", "4,300K", "--rounds", "1"]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, check=False)


def test_a_line_for_each_operation_and_size() -> None:
    done = run(str(PROGRAM))
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("[worker 0] ").split() for line in done.stdout.splitlines()]
    assert lines[0][:2] == ["3", "ranks,"]
    assert lines[1] == ["operation", "size", "kvmpi_us", "gloo_us", "gloo/kvmpi"]
    assert [line[:2] for line in lines[2:]] == [
        *([operation, "4_B"] for operation in [*OPERATIONS, "barrier"]),
        *([operation, "300_KiB"] for operation in OPERATIONS),
    ]
    for line in lines[2:]:
        ours, gloo, ratio = map(float, line[2:])
        assert ratio == pytest.approx(gloo / ours, abs=0.006, rel=0.01)


def test_a_wrong_result_ends_it(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import runpy\nfrom kvmpi.collectives.exchange import GroupCollectives\n"
        "plain = GroupCollectives.exchange\n"
        "def exchange(self, sends, receives, *where):\n"
        "    plain(self, sends, receives, *where)\n"
        "    if receives[0] is not None and receives[0].nbytes == 102400:\n"
        "        receives[0][5] = 77\n"
        "GroupCollectives.exchange = exchange\n"
        f"runpy.run_path({str(PROGRAM)!r}, run_name='__main__')\n"
    )
    done = run(str(wrong))
    assert done.returncode == 1, done.stdout
    assert "of 307200 bytes by kvmpi: wrong result on rank" in done.stderr
