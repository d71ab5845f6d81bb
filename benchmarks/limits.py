"""What the memory of a host, or the links between hosts, allow a collective operation: lines in its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvmpi.benchmarks.netlab import parse_rate
from kvmpi.benchmarks.plot import Picture
from kvmpi.benchmarks.ranks import BUSBW
from kvmpi.benchmarks.sizes import parse_bytes
from kvmpi.benchmarks.table import Row

Memory = Mapping[int, Mapping[str, float]]

_CACHE_BYTES = 32 << 20


def picture(rows: Sequence[Row], memory: Memory, hosts: int | None, link: str | None) -> Picture:
    """How ``rows`` of one operation are drawn; ``memory``: rates of copies and additions by number of ranks."""
    op, preset = rows[0]["op"], rows[0]["preset"]
    where = f", {hosts} hosts at {link}" if hosts else ""
    return Picture(
        title=f"{op} of {rows[0]['dtype']}" + (f", gradients of {preset}" if preset else ""),
        label="algo", bandwidth="busbw", bandwidth_name="bus bandwidth, GB/s", time="t_p50",
        panel=lambda row: (row["ranks"],),
        panel_name=lambda row: f"{row['ranks']} ranks{where}",
        limits=lambda row: _limits(op, row["ranks"], memory.get(row["ranks"]), hosts, link),
        limits_from_bytes=0 if hosts else cache_bytes(),
        measured="Median time of the slowest rank.", caption=_caption(op, memory, hosts, link),
    )  # fmt: skip


def memory_limit(op: str, num_ranks: int, memory: Mapping[str, float], *, each: bool = False) -> float:
    """Bus bandwidth, in GB/s, that the host's memory allows.

    A host must read what its ranks contribute and write the result: once, or for ``each`` rank. Memory moves at the
    better of 2 * copy and 3 * add: a copy touches every byte of its result twice, an addition three times.
    """
    rate = max(2 * memory["copy"], 3 * memory["add"])
    reads = {"allreduce": num_ranks, "reduce_scatter": num_ranks, "allgather": 1, "broadcast": 1}[op]
    writes = {"allreduce": 1, "reduce_scatter": 1, "allgather": 1, "broadcast": 0}[op]
    if each and op != "reduce_scatter":
        writes = num_ranks - 1 if op == "broadcast" else num_ranks
    return rate / (reads + writes) * BUSBW[op](num_ranks)


def link_limit(op: str, num_ranks: int, num_hosts: int, rate_gb_per_s: float) -> float:
    """Bus bandwidth, in GB/s, of hosts that send and receive at ``rate_gb_per_s`` at once."""
    if num_hosts == 1:
        return float("inf")
    share = (num_hosts - 1) / num_hosts
    sent = {"allreduce": 2 * share, "reduce_scatter": share, "allgather": share, "broadcast": 1.0}[op]
    return rate_gb_per_s / sent * BUSBW[op](num_ranks)


def _limits(
    op: str, num_ranks: int, memory: Mapping[str, float] | None, hosts: int | None, link: str | None
) -> dict[str, float]:
    """Labelled limits, in GB/s of bus bandwidth."""
    rate = parse_rate(link) if link else None
    if hosts and rate:
        limit = link_limit(op, num_ranks, hosts, rate / 1e9)
        return {f"link limit {limit:.3g} GB/s": limit} if hosts > 1 else {}
    if hosts or memory is None or num_ranks == 1:
        return {}
    once, each = (memory_limit(op, num_ranks, memory, each=each) for each in (False, True))
    if op == "broadcast":  # rank 0 need not write
        return {f"memory limit {each:.3g} GB/s": each}
    found = {f"memory limit {once:.3g} GB/s": once}
    return found if each == once else {**found, f"... with a result for each rank {each:.3g}": each}


def _caption(op: str, memory: Memory, hosts: int | None, link: str | None) -> str:
    if hosts and link:
        return f"Link limit: what a host must send at least, at {link}, the other direction at the same time."
    if hosts or not memory:
        return ""
    formulas = {
        "allreduce": "must read n vectors and write one result (or n): S/t <= R/(n+1) (or R/2n)",
        "reduce_scatter": "must read n vectors and write one result: S/t <= R/(n+1)",
        "allgather": "must read all segments and write one result (or n): S/t <= R/2 (or R/(n+1))",
        "broadcast": "must read one vector and write n-1: S/t <= R/n",
    }
    rates = ", ".join(f"n={n}: {rate['copy']:.1f} and {rate['add']:.1f}" for n, rate in sorted(memory.items()))
    return (
        f"Memory limit, for what caches do not hold: the host {formulas[op]}, with R = max(2 copy, 3 add) from "
        f"the copies and additions that all ranks do at once (GB/s of result, {rates})."
    )


def cache_bytes() -> int:
    """The last-level cache of this machine, or a guess."""
    sizes = [_CACHE_BYTES]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            sizes.append(parse_bytes(path.read_text()))
        except (OSError, ValueError):
            continue
    return max(sizes[1:] or sizes)
