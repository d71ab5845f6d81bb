"""benchmarks/sparse_bytes.py: what it says of bytes is what arithmetic says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from jobs import HANGS_S

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "sparse_bytes.py"


def test_bytes_of_rows_and_of_a_whole_key() -> None:
    options = ["--rows", "5000", "--width", "20", "--share", "0.1", "--steps", "3"]
    done = subprocess.run(
        [sys.executable, PROGRAM, *options], capture_output=True, text=True, timeout=HANGS_S, check=False
    )
    assert done.returncode == 0, done.stderr
    found = dict(re.findall(r"^(whole key|rows) +([\d.]+ +[\d.]+)", done.stdout, re.MULTILINE))
    assert found["whole key"].split() == ["0.400", "0.400"]
    assert found["rows"].split() == ["0.042", "0.042"]  # 500 rows of 80 bytes, and their numbers
    assert "10 times fewer bytes" in done.stdout
