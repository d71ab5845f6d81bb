"""Measured epochs beside predicted ones: the table, the JSON lines and the bars of ``kvmpi bench figure12``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from kvmpi.benchmarks.lab_jobs import Measured, Scenario
from kvmpi.benchmarks.table import Row, Table
from kvmpi.collectives.cost import Figures
from kvmpi.machine import num_cores
from kvmpi.planner import models
from kvmpi.planner.predict import Prediction, predict
from kvmpi.planner.spec import ALGORITHMS, Cluster, Job, parse_link

_COLUMNS = {
    "algorithm": 9, "n": 3, "c": 3, "s": 2, "hosts": 5, "link": 7, "model": 8, "step_s": 6, "planned_s": 9,
    "off_%": 5, "epoch_s": 7, "stale": 5, "wrong": 5,
}  # fmt: skip

LEGEND = (
    "step_s: measured, mean over workers and epochs; planned_s: by kvmpi plan; off_%: planned over measured",
    "stale: measured staleness; wrong: keys with wrong values; computation is a sleep",
)
#: Of a core that adds or copies vectors: bytes of the result per second.
_ADD_BYTES_PER_S, _COPY_BYTES_PER_S = 5e9, 7.5e9
_LATENCY_S = 1e-4
_TARGET = 20  # per cent


def plan(scenario: Scenario) -> Prediction:
    """What the planner makes of a scenario, on hosts that share the cores of this machine."""
    cores = num_cores()
    usual = Figures()
    share = cores / max(cores, scenario.workers)
    figures = Figures(
        add_bytes_per_s=min(usual.add_bytes_per_s, _ADD_BYTES_PER_S * share),
        copy_bytes_per_s=min(usual.copy_bytes_per_s, _COPY_BYTES_PER_S * share),
        message_s=2e-4, meeting_s=1e-3,  # ranks take turns on a core
    )  # fmt: skip
    cluster = Cluster(
        hosts=scenario.hosts, server_hosts=scenario.servers, link_bytes_per_s=parse_link(scenario.link),
        latency_s=_LATENCY_S, lab_cores=cores, figures=figures,
    )  # fmt: skip
    of = ALGORITHMS[scenario.algorithm]
    clients = scenario.clients if of.grouped else 1
    job = Job(scenario.algorithm, scenario.workers, clients, scenario.servers, scenario.interval)
    work_s = scenario.compute_s / len(scenario.counts)
    layers = tuple(models.Layer(4 * count, work_s / 3, 2 * work_s / 3) for count in scenario.counts)
    return predict(models.Model(scenario.model, layers), cluster, job, steps=scenario.steps)


def row_of(scenario: Scenario, measured: Measured, planned: Prediction) -> Row:
    """All that is known of one job."""
    step_s = measured.epoch_s / scenario.steps
    return {
        "algorithm": scenario.algorithm, "n": scenario.workers, "c": planned.job.num_clients, "s": scenario.servers,
        "hosts": scenario.hosts, "link": scenario.link, "model": scenario.model, "step_s": step_s,
        "planned_s": planned.step_s, "off_%": 100 * (planned.step_s / step_s - 1), "epoch_s": measured.epoch_s,
        "planned_epoch_s": planned.epoch_s, "stale": measured.staleness, "planned_stale": planned.mean_staleness,
        "wrong": measured.wrong, "bytes": scenario.nbytes, "keys": len(scenario.counts),
        "compute_s": scenario.compute_s, "interval": scenario.interval, "steps": scenario.steps,
        "epochs": scenario.epochs, "epochs_s": list(measured.epochs_s), "processor_s": measured.processor_s,
        "bottleneck": planned.bottleneck,
    }  # fmt: skip


def table() -> Table:
    """For rows of ``row_of``."""
    texts = {"algorithm": ALGORITHMS, "link": ["link"], "model": ["model"]}
    return Table(_COLUMNS, texts)


def line(row: Row) -> str:
    """A row as it is shown: seconds with two digits."""
    seconds = {name: f"{row[name]:.2f}" for name in ("step_s", "planned_s", "epoch_s")}
    stale = None if row["stale"] is None else f"{row['stale']:.1f}"
    return table().line({**row, **seconds, "off_%": f"{row['off_%']:+.0f}", "stale": stale})


def speedups(rows: Sequence[Row]) -> str:
    """How much faster clients of several workers are than workers that are clients."""
    words = []
    for kind in ("SGD", "ASGD", "ESGD"):
        found = {row["algorithm"]: row["epoch_s"] for row in rows}
        if f"dist-{kind}" in found and f"mpi-{kind}" in found:
            words.append(f"mpi-{kind} {found[f'dist-{kind}'] / found[f'mpi-{kind}']:.1f} times as fast as dist-{kind}")
    return "; ".join(words)


def errors(rows: Sequence[Row]) -> str:
    """How far the plan is off, at most and in the median."""
    off = [abs(row["off_%"]) for row in rows]
    within = sum(share <= _TARGET for share in off)
    return (
        f"the plan is off by {statistics.median(off):.0f} % (median) and {max(off):.0f} % at most; "
        f"{within} of {len(off)} are within {_TARGET} %"
    )


def draw(path: str, rows: Sequence[Row], title: str) -> None:
    """Write bars of the measured epochs, and beside them what was planned, to ``path``."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 3.6), layout="constrained")
    bars: Any
    kinds = (("epoch_s", "measured", "#0072b2", -0.2), ("planned_epoch_s", "kvmpi plan", "#bdbdbd", 0.2))
    for name, label, colour, shift in kinds:
        places = [place + shift for place in range(len(rows))]
        bars = axes.bar(places, [row[name] for row in rows], 0.38, label=label, color=colour)
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    axes.set_xticks(range(len(rows)), [row["algorithm"] for row in rows])
    axes.set_ylabel("mean epoch, s")
    axes.set_title(title, fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
