"""What the engine costs per operation: rates of empty operations, and the latency of push and wait.

Run ``python benchmarks/engine_overhead.py [--ops 50000] [--samples 2000]``; it takes a few seconds and needs nothing
but kvmpi. Rates are medians of ``--rounds`` rounds. Latencies are from the call of ``push`` to the return of ``wait``.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

from kvmpi.engine import Engine, create_engine

LANES = {"ordered": "reduce", "cpu": "cpu", "inline": "inline"}


def nothing() -> None:
    pass


def new_engine(kind: str) -> Engine:
    engine = create_engine(kind)
    engine.add_lane("reduce", ordered=True)
    engine.push(nothing).wait()  # threads start here, not while the clock runs
    engine.push(nothing, lane="reduce").wait()
    return engine


def dependent(engine: Engine, lane: str, num_ops: int) -> None:
    """Every operation writes one variable: one chain."""
    var = engine.variable()
    for _ in range(num_ops):
        engine.push(nothing, writes=(var,), lane=lane)
    engine.wait_all()
    assert var.version == num_ops


def independent(engine: Engine, lane: str, num_ops: int) -> None:
    """Operations without variables."""
    for _ in range(num_ops):
        engine.push(nothing, lane=lane)
    engine.wait_all()


def key_like(engine: Engine, lane: str, num_ops: int) -> None:
    """Operations over 100 variables: each reads one and writes another, as the operations of a store do."""
    variables = [engine.variable() for _ in range(100)]
    for i in range(num_ops):
        engine.push(nothing, reads=(variables[i * 7 % 100],), writes=(variables[i % 100],), lane=lane)
    engine.wait_all()
    assert sum(var.version for var in variables) == num_ops


def rate_per_s(engine: Engine, pattern: Callable[[Engine, str, int], None], lane: str, ops: int, rounds: int) -> float:
    pattern(engine, lane, ops // 10)
    elapsed_s = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        pattern(engine, lane, ops)
        elapsed_s.append(time.perf_counter() - start_s)
    return ops / statistics.median(elapsed_s)


def latencies_us(engine: Engine, lane: str, num_samples: int) -> list[float]:
    var = engine.variable()
    samples_us = []
    for i in range(num_samples + num_samples // 10):
        start_ns = time.perf_counter_ns()
        engine.push(nothing, writes=(var,), lane=lane).wait()
        if i >= num_samples // 10:
            samples_us.append((time.perf_counter_ns() - start_ns) / 1e3)
    return sorted(samples_us)


def main() -> None:
    parser = argparse.ArgumentParser(description="what the engine costs per operation")
    parser.add_argument("--ops", type=int, default=50_000, help="operations of one round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; the median counts")
    parser.add_argument("--samples", type=int, default=2_000, help="latencies to measure")
    args = parser.parse_args()
    if min(args.ops, args.rounds, args.samples) < 1:
        parser.error("--ops, --rounds and --samples must be positive")

    print(f"Python {platform.python_version()}, {args.ops} operations a round, median of {args.rounds}")
    header = f"{'engine':<10}{'lane':<9}{'dependent/s':>13}{'independent/s':>15}{'key-like/s':>12}"
    print(f"{header}{'p50 us':>9}{'p99 us':>9}")
    for kind, names in (("threaded", ("ordered", "cpu", "inline")), ("naive", ("ordered",))):
        for name in names:
            engine = new_engine(kind)
            lane = LANES[name]
            rates = [
                rate_per_s(engine, pattern, lane, args.ops, args.rounds)
                for pattern in (dependent, independent, key_like)
            ]
            samples_us = latencies_us(engine, lane, args.samples)
            engine.close(timeout_s=10.0)
            p50_us, p99_us = (samples_us[int(q * (len(samples_us) - 1))] for q in (0.50, 0.99))
            print(
                f"{kind:<10}{name:<9}{rates[0]:>13,.0f}{rates[1]:>15,.0f}{rates[2]:>12,.0f}{p50_us:>9.1f}{p99_us:>9.1f}"
            )


if __name__ == "__main__":
    main()
