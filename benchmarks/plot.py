"""The picture of a table: bandwidth against size, a line for each row, and limits that nothing can pass."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvmpi.benchmarks.sizes import format_bytes
from kvmpi.benchmarks.table import Row

#: kvmpi's rows are solid lines in strong colours, all others dashed.
_COLOURS = {
    "auto": "#1a1a1a", "shared": "#0072b2", "hierarchical": "#56b4e9", "multi_ring": "#009e73", "ring": "#7fbf3f",
    "host_ring": "#b8a900", "nccl": "#76b900", "mpi": "#cc79a7", "naive": "#9c9c9c", "store": "#d55e00",
    "gloo": "#e69f00", "baidu": "#8c564b", "MPICH": "#9467bd", "tcp": "#0072b2", "ipc": "#009e73", "mxnet": "#e69f00",
    "reduce": "#0072b2", "broadcast": "#d55e00", "device_sum": "#009e73",
}  # fmt: skip
_OTHERS = ("gloo", "baidu", "mxnet")
_LIBRARY, _OTHER = "#d62728", "#7f7f7f"
_MARKERS = "osD^v<>P*Xph"
_INK = "#404040"


@dataclass(frozen=True)
class Picture:
    """What is drawn of rows: panels side by side, in each a line for every ``label`` over the sizes.

    Attributes:
        label, bandwidth, time: names of columns.
        panel: by what rows are divided into panels, and these are ordered.
        limits: labelled limits of a panel, in the unit of bandwidth, for sizes from ``limits_from_bytes`` on.
        measured: what the times are; the caption begins with it.
    """

    title: str
    label: str
    bandwidth: str
    bandwidth_name: str
    time: str
    panel: Callable[[Row], tuple[int, ...]]
    panel_name: Callable[[Row], str]
    measured: str
    caption: str = ""
    limits: Callable[[Row], Mapping[str, float]] = lambda row: {}
    limits_from_bytes: int = 0


def draw(path: str, rows: Sequence[Row], picture: Picture) -> None:
    """Write the picture of ``rows``, none of them of size 0, to ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: dict[Any, Any] = {
        "font.size": 10, "axes.edgecolor": _INK, "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
        "text.color": _INK, "axes.spines.top": False, "axes.spines.right": False, "axes.titleweight": "bold",
    }  # fmt: skip
    with pyplot.rc_context(style):
        panels = sorted({picture.panel(row) for row in rows})
        labels = list(dict.fromkeys(row[picture.label] for row in rows))
        curves = len({row["size_B"] for row in rows}) > 1
        width = 1.2 + 5.2 * len(panels) + (1.8 if curves else 0)
        shape = {"height_ratios": (1.7, 1)} if curves else {}
        figure, axes = pyplot.subplots(
            2 if curves else 1, len(panels), figsize=(width, 8.2 if curves else 1.9 + 0.32 * len(labels)),
            sharex="col" if curves else False, sharey="row", squeeze=False, layout="constrained", gridspec_kw=shape,
        )  # fmt: skip
        for column, panel in enumerate(panels):
            own = [row for row in rows if picture.panel(row) == panel]
            limits = picture.limits(own[0])
            if curves:
                top, bottom = axes[0][column], axes[1][column]
                _curves(top, own, labels, picture, picture.bandwidth)
                _curves(bottom, own, labels, picture, picture.time)
                bottom.set_yscale("log")
                bottom.set_xlabel("bytes (K, M, G: powers of 1024)")
                _lines(top, limits, picture.limits_from_bytes)
            else:
                _bars(axes[0][column], own, labels, picture, limits)
            axes[0][column].set_title(picture.panel_name(own[0]), loc="left", fontsize=11)
        if curves:
            axes[0][0].set_ylabel(picture.bandwidth_name)
            axes[0][0].set_ylim(bottom=0)
            axes[1][0].set_ylabel("time, us")
            handles, names = axes[0][0].get_legend_handles_labels()
            figure.legend(handles, names, loc="outside right upper", frameon=False, fontsize=9)
        figure.suptitle(picture.title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        kinds = "Solid: kvmpi; dashed: others." if curves else "Pale: not kvmpi."
        words = f"{picture.measured} {kinds} {picture.caption}"
        caption = "\n".join(textwrap.wrap(words, int(width * 14)))
        figure.supxlabel(caption, x=0.01, ha="left", fontsize=8)
        figure.savefig(path, dpi=160)
        pyplot.close(figure)


def _curves(axis: Any, rows: Sequence[Row], labels: Sequence[str], picture: Picture, column: str) -> None:
    """A line for each label over a logarithmic axis of sizes."""
    for number, label in enumerate(labels):
        points = sorted((row["size_B"], row[column]) for row in rows if row[picture.label] == label)
        if points:
            axis.plot(
                *zip(*points, strict=True), label=label, zorder=4 if label == "auto" else 3, **_look(label, number)
            )
    low, high = min(row["size_B"] for row in rows), max(row["size_B"] for row in rows)
    axis.set_xscale("log", base=2)
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


def _bars(axis: Any, rows: Sequence[Row], labels: Sequence[str], picture: Picture, limits: Mapping[str, float]) -> None:
    found = {row[picture.label]: row for row in rows}
    for place, label in enumerate(labels):
        if label in found:
            value = found[label][picture.bandwidth]
            alpha = 1.0 if _is_ours(label) else 0.55
            axis.barh(place, value, color=_look(label, 0)["color"], alpha=alpha, height=0.7)
            axis.annotate(
                f"{_digits(value)}  ({_digits(found[label][picture.time] / 1e3)} ms)", (value, place), xytext=(4, 0),
                textcoords="offset points", va="center", fontsize=8, bbox={"color": "white", "alpha": 0.7, "pad": 0.2},
            )  # fmt: skip
    axis.set_yticks(range(len(labels)), labels)
    axis.set_ylim(len(labels) - 0.4, -1.1)
    axis.set_xlabel(f"{picture.bandwidth_name} (median time)")
    for number, (name, limit) in enumerate(limits.items()):
        axis.axvline(limit, color=_INK, linewidth=1.2, linestyle=(0, (6, 2)))
        where, box = (limit, -1.0 + 0.35 * number), {"color": "white", "alpha": 0.8, "pad": 0.2}
        axis.annotate(f"{name} ", where, fontsize=8, ha="right", va="center", bbox=box)
    axis.set_xlim(0, 1.35 * max([row[picture.bandwidth] for row in rows] + [0.8 * limit for limit in limits.values()]))


def _digits(value: float) -> str:
    """Three of them, or all before the point."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _short(nbytes: int) -> str:
    """``65536`` -> ``64K``, as in ``--sizes``."""
    return format_bytes(nbytes).removesuffix("iB").removesuffix("B").replace(" ", "")


def _is_ours(label: str) -> bool:
    kind = label.partition(":")[0]
    return not kind.startswith("MPI") and kind not in _OTHERS


def _look(label: str, number: int) -> dict[str, Any]:
    kind, _, how = label.partition(":")
    ours = _is_ours(label)
    colour = _LIBRARY if kind.startswith("MPI_") else _COLOURS.get(kind, _OTHER)
    return {
        "color": colour, "linestyle": "-" if ours and not how else "-." if ours else ":" if how else "--",
        "linewidth": 2.4 if kind == "auto" else 1.6, "marker": _MARKERS[number % len(_MARKERS)], "markersize": 4,
    }  # fmt: skip
