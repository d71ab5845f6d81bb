"""Push and pull through parameter servers, kvmpi beside MXNet: ``python benchmarks/ps.py --mxnet PYTHON``.

PYTHON is an interpreter with MXNet 1.9.1, in an environment of its own (Python 3.10: ``pip install mxnet==1.9.1
numpy==1.23.5``); without it only kvmpi is measured. Systems take turns, so that a busy machine hurts all alike; what
counts is the ratio of medians. client_bw is 2 * size / time of push+pull; server_bw is client_bw * clients / servers.
GB/s is 1e9 bytes per second. Exit status 1 if any value was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

WORKER = Path(__file__).with_name("ps_worker.py")
Results = dict[tuple[str, int, int], list[dict[str, float]]]


def results_of(output: str) -> list[dict[str, float]]:
    return [json.loads(line.split("RESULT ", 1)[1]) for line in output.splitlines() if "RESULT " in line]


def run_kvmpi(workers: int, servers: int, sizes: list[int], transport: str) -> list[dict[str, float]]:
    command = [sys.executable, "-m", "kvmpi", "run", "-n", str(workers), "-c", str(workers), "-s", str(servers)]
    command += ["--", str(WORKER), "kvmpi", "--sizes", *map(str, sizes)]
    env = {**os.environ, "KVMPI_TRANSPORT": transport}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        sys.exit(f"kvmpi failed:\n{done.stdout}\n{done.stderr}")
    return results_of(done.stdout)


def run_mxnet(python: str, workers: int, servers: int, sizes: list[int]) -> list[dict[str, float]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port), "DMLC_INTERFACE": "lo",
        "DMLC_NUM_SERVER": str(servers), "DMLC_NUM_WORKER": str(workers),
    }  # fmt: skip
    roles = ["scheduler", *["server"] * servers, *["worker"] * workers]
    processes = []
    for role in roles:
        program = ["-c", "import mxnet"] if role != "worker" else [str(WORKER), "mxnet", "--sizes", *map(str, sizes)]
        env = {**os.environ, **common, "DMLC_ROLE": role}
        processes.append(
            subprocess.Popen([python, *program], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    found: list[dict[str, float]] = []
    try:
        for role, process in zip(roles, processes):  # noqa: B905
            if role == "worker":
                output, errors = process.communicate(timeout=900)
                if process.returncode:
                    sys.exit(f"MXNet failed:\n{errors}")
                found += results_of(output)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4 << 10, 256 << 10, 4 << 20, 64 << 20])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each system")
    parser.add_argument("--mxnet", metavar="PYTHON", help="an interpreter that has MXNet")
    parser.add_argument("--json", metavar="FILE", help="also write one JSON line a row")
    options = parser.parse_args()
    systems = ["kvmpi tcp", "kvmpi ipc", *(["mxnet tcp"] if options.mxnet else [])]
    results: Results = {}
    for workers in options.workers:
        for _ in range(options.rounds):
            for system in systems:
                if system == "mxnet tcp":
                    lines = run_mxnet(options.mxnet, workers, options.servers, options.sizes)
                else:
                    transport = "tcp" if system == "kvmpi tcp" else "ipc"
                    lines = run_kvmpi(workers, options.servers, options.sizes, transport)
                for line in lines:
                    results.setdefault((system, workers, int(line["size_B"])), []).append(line)
    rows = [row(system, w, options.servers, size, results) for w in options.workers for size in options.sizes
            for system in systems]  # fmt: skip
    show(rows)
    if options.json:
        Path(options.json).write_text("".join(json.dumps(line) + "\n" for line in rows))
    return int(any(line["wrong"] for line in rows))


def row(system: str, workers: int, servers: int, size: int, results: Results) -> dict[str, float | str]:
    """Medians over the jobs of a system's own medians."""

    def median(of: str, name: str) -> float:
        return statistics.median(line[name] for line in results[of, workers, size])

    def us(name: str) -> float:
        return round(1e6 * median(system, name), 1)

    peer = ("mxnet tcp", workers, size)
    together = median(system, "push+pull_p50_s")
    client_bw = 2 * size / together / 1e9
    return {
        "system": system, "size_B": size, "keys": 1, "clients": workers, "servers": servers, "mode": "sync",
        "compress": "none", "push_us": us("push_p50_s"), "push_p99": us("push_p99_s"), "pull_us": us("pull_p50_s"),
        "pull_p99": us("pull_p99_s"), "push+pull_us": us("push+pull_p50_s"), "pushpull_us": us("pushpull_p50_s"),
        "client_bw": round(client_bw, 3), "server_bw": round(client_bw * workers / servers, 3),
        "imbalance": round(median(system, "imbalance"), 2),
        "vs_mxnet": round(together / median("mxnet tcp", "push+pull_p50_s"), 2) if peer in results else float("nan"),
        "wrong": sum(line["wrong"] for line in results[system, workers, size]),
    }  # fmt: skip


def show(rows: list[dict[str, float | str]]) -> None:
    table = Table(
        title="push and pull of one float32 key, dist_sync, loopback; times in us (medians), bandwidth in GB/s"
    )
    for name in rows[0]:
        table.add_column(name, justify="left" if name in ("system", "mode", "compress") else "right", no_wrap=True)
    for i, line in enumerate(rows):
        end = i + 1 == len(rows) or rows[i + 1]["size_B"] != line["size_B"]
        table.add_row(*("" if value != value else str(value) for value in line.values()), end_section=end)
    console = Console()
    Console(width=max(console.width, 200) if not console.is_terminal else None).print(table)


if __name__ == "__main__":
    sys.exit(main())
