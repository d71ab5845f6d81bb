"""Starts a job of MXNet - a scheduler, servers and workers on this host - and ends with its workers.

    python -m kvmpi.benchmarks.ps_mxnet PYTHON WORKERS SERVERS PROGRAM [ARG...]

PYTHON is an interpreter that has MXNet. A worker knows itself by ``KVMPI_RANK``, which may be another number than the
one that MXNet gives it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence

from kvmpi.launchers import processes


def missing(python: str, timeout_s: float = 60.0) -> str:
    """Why ``python`` cannot be used; empty if it can."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("DMLC_")}
    try:
        done = subprocess.run(
            [python, "-c", "import mxnet"], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            check=False, timeout=timeout_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"{python}: `import mxnet` takes longer than {timeout_s:g} s"
    except OSError as error:
        return f"{python}: {error.strerror}"
    lines = done.stderr.strip().splitlines() or [processes.describe_end(done.returncode)]
    return f"{python}: {lines[-1]}" if done.returncode else ""


def main(argv: Sequence[str]) -> int:
    """See the top of this file; the exit status. What is still running then is killed with this process."""
    python, num_workers, num_servers, *program = argv
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        **os.environ, "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port), "DMLC_INTERFACE": "lo",
        "DMLC_NUM_SERVER": num_servers, "DMLC_NUM_WORKER": num_workers,
    }  # fmt: skip

    def start(role: str, words: Sequence[str], rank: int = 0) -> subprocess.Popen[bytes]:
        env = {**common, "DMLC_ROLE": role, "KVMPI_RANK": str(rank)}
        return processes.start([python, *words], env, stdout=1, stderr=2)

    roles = ["scheduler", *["server"] * int(num_servers)]
    started = {start(role, ["-c", "import mxnet"]).pid: role for role in roles}
    started |= {start("worker", program, rank).pid: "worker" for rank in range(int(num_workers))}
    while "worker" in started.values():
        pid, status = os.wait()
        role, code = started.pop(pid), os.waitstatus_to_exitcode(status)
        if code:
            print(f"a {role} of MXNet {processes.describe_end(code)}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
