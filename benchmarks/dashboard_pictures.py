"""Makes the pictures of docs/dashboard.md from a real job, in a headless Chromium; see there for the command."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvmpi.benchmarks.browser import Browser

DOCS = Path(__file__).resolve().parents[1] / "docs"

#: Trains a linear model on data that differ between workers; the last worker has more of them.
PROGRAM = """
import sys, time
from pathlib import Path
import numpy as np
import kvmpi
kv = kvmpi.create("dist_sync_mpi")
make = np.random.default_rng(7)
truth = make.standard_normal(200_000).astype("f4")
own = np.random.default_rng([7, kv.rank])
weights = np.zeros_like(truth)
kv.init("weights", weights)
kv.client.init("stop", np.zeros(1))
kv.set_optimizer(kvmpi.optim.SGD(lr=0.08, rescale_grad=1 / kv.num_workers))
for step in range(1, 100_000):
    rows = own.integers(0, truth.size, 60_000 if kv.rank < kv.num_workers - 1 else 200_000)
    error = (weights - truth)[rows] + 0.1 * own.standard_normal(rows.size).astype("f4")
    gradient = np.zeros_like(weights)
    np.add.at(gradient, rows, 0.2 * error)
    some = error[:400]
    kv.pushpull("weights", gradient, weights)
    kv.report(step, loss=float(np.mean(some**2)), accuracy=float(np.mean(np.abs(some) < 0.5)))
    time.sleep(0.03)
    seen = np.full(1, float(Path(sys.argv[1]).exists()))  # all are to end at the same step
    kv.client.pushpull("stop", seen, seen)
    if seen[0]:
        break
"""


def main() -> int:
    seconds = float(sys.argv[1]) if sys.argv[1:] else 45.0
    with tempfile.TemporaryDirectory() as folder:
        program, stop, said = (Path(folder) / name for name in ("train.py", "stop", "said"))
        program.write_text(PROGRAM)
        command = [sys.executable, "-m", "kvmpi", "run", "-n", "4", "-c", "2", "-s", "2", "--dashboard", str(program)]
        with open(said, "wb") as err:
            job = subprocess.Popen([*command, str(stop)], stderr=err)
        try:
            deadline = time.monotonic() + 60
            while not (found := re.search(r"dashboard: (\S+)", said.read_text())):
                if time.monotonic() > deadline:
                    raise TimeoutError(said.read_text())
                time.sleep(0.1)
            time.sleep(seconds)
            with Browser() as page:
                for name, width, height, mobile, dark in (
                    ("dashboard", 1200, 980, False, False),
                    ("dashboard-dark", 1200, 980, False, True),
                    ("dashboard-phone", 360, 780, True, False),
                ):
                    page.resize(width, height, mobile=mobile, dark=dark)
                    page.open(found[1])
                    page.wait_for("document.body?.dataset.ready")
                    (DOCS / f"{name}.png").write_bytes(page.picture())
        finally:
            stop.touch()
            try:
                job.wait(30)
            except subprocess.TimeoutExpired:
                job.terminate()
                job.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
