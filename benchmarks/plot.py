"""The picture of a table: bus bandwidth against size, a line for each row, and the limit that nothing can pass."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvmpi.benchmarks.netlab import parse_rate
from kvmpi.benchmarks.ranks import BUSBW
from kvmpi.benchmarks.sizes import format_bytes, parse_bytes
from kvmpi.benchmarks.table import Row

#: kvmpi's rows are solid lines in strong colours, all others dashed.
_COLOURS = {
    "auto": "#1a1a1a", "shared": "#0072b2", "hierarchical": "#56b4e9", "multi_ring": "#009e73", "ring": "#7fbf3f",
    "host_ring": "#b8a900", "nccl": "#76b900", "mpi": "#cc79a7", "naive": "#9c9c9c", "store": "#d55e00",
    "gloo": "#e69f00", "baidu": "#8c564b", "MPICH": "#9467bd",
}  # fmt: skip
_LIBRARY, _OTHER = "#d62728", "#7f7f7f"
_MARKERS = "osD^v<>P*Xph"
_CACHE_BYTES = 32 << 20
_INK = "#404040"


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


def draw(
    path: str, rows: Sequence[Row], memory: Mapping[int, Mapping[str, float]], *, hosts: int | None, link: str | None
) -> None:
    """Write the picture of ``rows`` to ``path``; ``memory``: rates of copies and additions by number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: dict[Any, Any] = {
        "font.size": 10, "axes.edgecolor": _INK, "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
        "text.color": _INK, "axes.spines.top": False, "axes.spines.right": False, "axes.titleweight": "bold",
    }  # fmt: skip
    with pyplot.rc_context(style):
        groups = sorted({row["ranks"] for row in rows})
        labels = list(dict.fromkeys(row["algo"] for row in rows))
        curves = len({row["size_B"] for row in rows if row["size_B"]}) > 1
        width = 1.2 + 5.2 * len(groups) + (1.8 if curves else 0)
        shape = {"height_ratios": (1.7, 1)} if curves else {}
        figure, axes = pyplot.subplots(
            2 if curves else 1, len(groups), figsize=(width, 8.2 if curves else 1.9 + 0.32 * len(labels)),
            sharex="col" if curves else False, sharey="row", squeeze=False, layout="constrained", gridspec_kw=shape,
        )  # fmt: skip
        op = rows[0]["op"]
        for column, num_ranks in enumerate(groups):
            own = [row for row in rows if row["ranks"] == num_ranks and row["size_B"]]
            limits = _limits(op, num_ranks, memory.get(num_ranks), hosts, link)
            if curves:
                top, bottom = axes[0][column], axes[1][column]
                _curves(top, own, labels, "busbw")
                _curves(bottom, own, labels, "t_p50")
                bottom.set_xlabel("bytes of the array (K, M, G: powers of 1024)")
                _lines(top, limits, from_bytes=0 if hosts else cache_bytes())
            else:
                _bars(axes[0][column], own, labels, limits)
            where = f", {hosts} hosts at {link}" if hosts else ""
            axes[0][column].set_title(f"{num_ranks} ranks{where}", loc="left", fontsize=11)
        if curves:
            axes[0][0].set_ylabel("bus bandwidth, GB/s")
            axes[0][0].set_ylim(bottom=0)
            axes[1][0].set_ylabel("time, us")
            handles, names = axes[0][0].get_legend_handles_labels()
            figure.legend(handles, names, loc="outside right upper", frameon=False, fontsize=9)
        what = rows[0]["preset"] and f", gradients of {rows[0]['preset']}"
        figure.suptitle(f"{op} of {rows[0]['dtype']}{what}", x=0.01, ha="left", fontsize=13, fontweight="bold")
        kinds = "Solid: kvmpi; dashed: others." if curves else "Pale: not kvmpi."
        words = f"Median time of the slowest rank. {kinds} {_caption(op, memory, hosts, link)}"
        caption = "\n".join(textwrap.wrap(words, int(width * 14)))
        figure.supxlabel(caption, x=0.01, ha="left", fontsize=8)
        figure.savefig(path, dpi=160)
        pyplot.close(figure)


def _curves(axis: Any, rows: Sequence[Row], labels: Sequence[str], column: str) -> None:
    """A line for each label over a logarithmic axis of sizes."""
    for number, label in enumerate(labels):
        points = sorted((row["size_B"], row[column]) for row in rows if row["algo"] == label)
        if points:
            axis.plot(
                *zip(*points, strict=True), label=label, zorder=4 if label == "auto" else 3, **_look(label, number)
            )
    low, high = min(row["size_B"] for row in rows), max(row["size_B"] for row in rows)
    axis.set_xscale("log", base=2)
    if column == "t_p50":
        axis.set_yscale("log")
    axis.set_xlim(low / 1.5, high * 1.5)
    ticks = [size for size in (1 << bits for bits in range(0, 40, 2)) if low <= size <= high]
    ticks = ticks[:: -(-len(ticks) // 8) or 1]
    axis.set_xticks(ticks, [_short(size) for size in ticks], rotation=30, ha="right")
    axis.minorticks_off()
    axis.grid(color="#e4e4e4", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")


def _lines(axis: Any, limits: Mapping[str, float], from_bytes: int) -> None:
    """Limits as labelled lines, for sizes from ``from_bytes`` on."""
    low, high = axis.get_xlim()
    start = min(max(low, from_bytes), high / 64)
    for number, (name, limit) in enumerate(limits.items()):
        axis.plot([start, high], [limit, limit], color=_INK, linewidth=1.2, linestyle=(0, (6, 2)), zorder=2)
        axis.annotate(
            name, (high, limit), xytext=(0, -4 if number else 3), textcoords="offset points", fontsize=8, ha="right",
            va="top" if number else "bottom", bbox={"color": "white", "alpha": 0.7, "pad": 0.5}, zorder=5,
        )  # fmt: skip


def _bars(axis: Any, rows: Sequence[Row], labels: Sequence[str], limits: Mapping[str, float]) -> None:
    found = {row["algo"]: row for row in rows}
    for place, label in enumerate(labels):
        if label in found:
            value = found[label]["busbw"]
            alpha = 1.0 if _is_ours(label) else 0.55
            axis.barh(place, value, color=_look(label, 0)["color"], alpha=alpha, height=0.7)
            axis.annotate(
                f"{value:.2f}  ({found[label]['t_p50'] / 1e3:.1f} ms)", (value, place), xytext=(4, 0),
                textcoords="offset points", va="center", fontsize=8, bbox={"color": "white", "alpha": 0.7, "pad": 0.2},
            )  # fmt: skip
    axis.set_yticks(range(len(labels)), labels)
    axis.set_ylim(len(labels) - 0.4, -1.1)
    axis.set_xlabel("bus bandwidth, GB/s (median time)")
    for number, (name, limit) in enumerate(limits.items()):
        axis.axvline(limit, color=_INK, linewidth=1.2, linestyle=(0, (6, 2)))
        where, box = (limit, -1.0 + 0.35 * number), {"color": "white", "alpha": 0.8, "pad": 0.2}
        axis.annotate(f"{name} ", where, fontsize=8, ha="right", va="center", bbox=box)
    axis.set_xlim(0, 1.35 * max([row["busbw"] for row in rows] + [0.8 * limit for limit in limits.values()]))


def _short(nbytes: int) -> str:
    """``65536`` -> ``64K``, as in ``--sizes``."""
    return format_bytes(nbytes).removesuffix("iB").removesuffix("B").replace(" ", "")


def _is_ours(label: str) -> bool:
    kind = label.partition(":")[0]
    return not kind.startswith("MPI") and kind not in ("gloo", "baidu")


def _look(label: str, number: int) -> dict[str, Any]:
    kind, _, how = label.partition(":")
    ours = _is_ours(label)
    colour = _LIBRARY if kind.startswith("MPI_") else _COLOURS.get(kind, _OTHER)
    return {
        "color": colour, "linestyle": "-" if ours and not how else "-." if ours else ":" if how else "--",
        "linewidth": 2.4 if kind == "auto" else 1.6, "marker": _MARKERS[number % len(_MARKERS)], "markersize": 4,
    }  # fmt: skip


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


def _caption(op: str, memory: Mapping[int, Mapping[str, float]], hosts: int | None, link: str | None) -> str:
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
