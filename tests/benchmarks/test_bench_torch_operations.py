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


#: The program, and once more with an exchange of kvmpi that spoils what it has received; in groups that stay.
TWICE = f"""
import runpy
import torch.distributed as dist
from kvmpi.collectives.exchange import GroupCollectives
plain = GroupCollectives.exchange
def exchange(self, sends, receives, *where):
    plain(self, sends, receives, *where)
    if receives[0] is not None and receives[0].nbytes == 102400:
        receives[0][5] = 77
dist.destroy_process_group = lambda: None
runpy.run_path({str(PROGRAM)!r}, run_name="__main__")
print("end", flush=True)
dist.init_process_group = lambda backend: None
GroupCollectives.exchange = exchange
runpy.run_path({str(PROGRAM)!r}, run_name="__main__")
"""


def test_a_line_for_each_operation_and_size_until_a_result_is_wrong(tmp_path: Path) -> None:
    """Both in one job, which takes longer to start than they take."""
    program = tmp_path / "twice.py"
    program.write_text(TWICE)
    words = ["run", "-n", "3", str(program), "--sizes", "4,300K", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "kvmpi", *words], capture_output=True, text=True, timeout=HANGS_S, check=False
    )
    said = [line.removeprefix("[worker 0] ") for line in done.stdout.splitlines() if line.startswith("[worker 0] ")]
    assert "end" in said, done.stderr
    lines = [line.split() for line in said[: said.index("end")]]
    assert lines[0][:2] == ["3", "ranks,"]
    assert lines[1] == ["operation", "size", "kvmpi_us", "gloo_us", "gloo/kvmpi"]
    assert [line[:2] for line in lines[2:]] == [
        *([operation, "4_B"] for operation in [*OPERATIONS, "barrier"]),
        *([operation, "300_KiB"] for operation in OPERATIONS),
    ]
    for line in lines[2:]:
        ours, gloo, ratio = map(float, line[2:])
        assert ratio == pytest.approx(gloo / ours, abs=0.006, rel=0.01)
    assert done.returncode == 1, done.stdout
    assert "of 307200 bytes by kvmpi: wrong result on rank" in done.stderr
