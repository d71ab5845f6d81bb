"""``kvmpi bench timeline``: what exchanges cost while the timeline is written, in turns with such that it is not."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kvmpi
from kvmpi.benchmarks.options import at_least
from kvmpi.benchmarks.report import complain
from kvmpi.benchmarks.sizes import format_bytes, parse_sizes
from kvmpi.config import Config
from kvmpi.trace import parts, timeline

_ABOUT = """\
What exchanges cost while the timeline is written, in turns with such that it is not. One process has all of a job: a
worker, a server and the scheduler. So the timeline can be put on and off between two rounds, and both kinds meet the
same noise. All spans of an exchange are written by this one process.
"""
_ROUND_S = 0.2


def main(name: str, argv: Sequence[str]) -> int:
    """The exit status: 1 if a value was wrong."""
    parser = argparse.ArgumentParser(prog=f"kvmpi bench {name}", description=_ABOUT)
    parser.add_argument("--sizes", default="4K,64K,1M,4M", help="bytes of a push and pull (default 4K,64K,1M,4M)")
    parser.add_argument("--rounds", type=at_least(1), default=15, help="rounds of each kind (default 15)")
    options = parser.parse_args(argv)
    try:
        counts = parse_sizes(options.sizes, 4)
    except ValueError as error:
        parser.error(f"--sizes: {error}")
    print(
        "# times of one pushpull in us: medians of rounds; cpu: of all threads; overhead: median over pairs of rounds"
    )
    print(f"{'size':>6} {'off':>9} {'on':>9} {'overhead':>9} {'cpu off':>9} {'cpu on':>9} {'overhead':>9} {'spans':>6}")
    status = 0
    for count in counts:
        row = _measure(max(1, count), options.rounds)
        if row["wrong"]:
            complain(f"WRONG: {row['size']}: the values of {row['wrong']} rounds")
            status = 1
        print(
            "{size:>6} {off:9.1f} {on:9.1f} {wall:8.2f}% {cpu_off:9.1f} {cpu_on:9.1f} {cpu:8.2f}% {spans:6.1f}".format(
                **row
            )
        )
        sys.stdout.flush()
    return status


def _measure(count: int, rounds: int) -> dict[str, Any]:
    value, out = np.arange(1, count + 1, dtype=np.float32), np.empty(count, np.float32)
    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder, kvmpi.create("dist_sync") as kv:
        config = Config(timeline=str(Path(folder, "t.json")), role="worker", rank=0)
        kv.init("w", value)
        calls = _calls_in(kv, value, out, _ROUND_S)
        spans, wrong = 0, 0
        for number in range(2 * rounds):
            on = number % 4 in (1, 2)  # off, on, on, off: what drifts hits both alike
            np.negative(value, out=value)
            if on:
                timeline.begin(config)
            times[on].append(_round(kv, value, out, calls))
            if on:
                timeline.end()
            wrong += not (out == value).all()
        spans = sum(parts.read(path).num_spans for path in Path(folder).glob("*/*.part"))
    pairs = list(zip(times[False], times[True], strict=True))
    wall, cpu = (statistics.median(100 * (on[i] / off[i] - 1) for off, on in pairs) for i in (0, 1))
    (off, cpu_off), (on_us, cpu_on) = (
        tuple(1e6 * statistics.median(found[i] for found in times[kind]) for i in (0, 1)) for kind in (False, True)
    )
    return {
        "size": format_bytes(4 * count), "off": off, "on": on_us, "wall": wall, "cpu_off": cpu_off, "cpu_on": cpu_on,
        "cpu": cpu, "spans": spans / (rounds * calls), "wrong": wrong,
    }  # fmt: skip


def _calls_in(kv: Any, value: Any, out: Any, seconds: float) -> int:
    kv.pushpull("w", value, out)
    begin = time.perf_counter()
    for _ in range(5):
        kv.pushpull("w", value, out)
    return max(5, int(5 * seconds / (time.perf_counter() - begin)))


def _round(kv: Any, value: Any, out: Any, calls: int) -> tuple[float, float]:
    """Seconds of one call: on the clock, and of processors."""
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        kv.pushpull("w", value, out)
    return (time.perf_counter() - begin) / calls, (time.process_time() - cpu) / calls


if __name__ == "__main__":
    sys.exit(main("timeline", sys.argv[1:]))
