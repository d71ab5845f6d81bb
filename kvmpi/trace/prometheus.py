"""The Prometheus endpoint: the numbers of a board as metrics, through the library prometheus-client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvmpi.errors import ConfigError
from kvmpi.trace import http_server
from kvmpi.trace.board import Board

#: Key in the picture, name, kind, meaning.
_OF_WORKERS = (
    ("steps", "steps", "counter", "Steps done."),
    ("bytes", "communication_bytes", "counter", "Bytes summed, pushed, pulled, broadcast; of a pushpull, both ways."),
    ("compute_s", "compute_seconds", "counter", "Seconds of the program outside of calls of the store."),
    ("blocked_s", "blocked_seconds", "counter", "Seconds of the program in calls of the store."),
    ("communication_s", "communication_seconds", "counter", "Seconds in which something was under way."),
    ("steps_per_s", "steps_per_second", "gauge", "Steps per second, over the last few reports."),
    ("bytes_per_s", "communication_bytes_per_second", "gauge", "Bytes per second, over the last few reports."),
    ("keys", "keys", "gauge", "Keys of the stores that are open."),
    ("imbalance", "server_imbalance", "gauge", "Bytes on the most loaded server over the mean; 1 is even."),
    ("behind", "steps_behind", "gauge", "Steps behind the worker that is furthest."),
    ("resident_bytes", "resident_bytes", "gauge", "Memory of the process."),
    ("silent_s", "silent_seconds", "gauge", "Since its newest report."),
)
_OF_SERVERS = (
    ("keys", "keys", "gauge", "Keys of which it holds a part."),
    ("held_bytes", "held_bytes", "gauge", "Bytes of values and of what rules remember."),
    ("received_bytes", "received_bytes", "counter", "Bytes of payloads received."),
    ("sent_bytes", "sent_bytes", "counter", "Bytes of payloads sent."),
    ("requests", "requests", "counter", "Messages received."),
    ("refused", "refused", "counter", "Messages that made no sense."),
    ("rounds", "rounds", "counter", "Updates of the chunk that has most."),
    ("queue", "queue", "gauge", "Requests that wait for others."),
    ("resident_bytes", "resident_bytes", "gauge", "Memory of the process."),
)


def serve(board: Board, host: str, port: int) -> tuple[str, Callable[[], None]]:
    """Serve ``board`` in threads of their own; the URL, and what ends it.

    Raises:
        ConfigError: prometheus-client is not installed.
        OSError: the port or the address cannot be had.
    """
    try:
        import prometheus_client as prometheus
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    except ImportError:
        raise ConfigError(
            "KVMPI_METRICS_PORT needs prometheus-client: pip install 'kvmpi[metrics]', or leave the setting out"
        ) from None

    families = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}

    class Collector:
        def collect(self) -> Iterator[Any]:
            for name, kind, meaning, label_names, samples in metrics(board.read()[1]):
                family = families[kind](name, meaning, labels=label_names)
                for labels, value in samples:
                    family.add_metric(labels, value)
                yield family

    registry = prometheus.CollectorRegistry(auto_describe=False)
    registry.register(Collector())  # type: ignore[arg-type]

    class Handler(http_server.Handler, prometheus.MetricsHandler):  # type: ignore[misc]
        pass

    Handler.registry = registry
    return http_server.Server((host, port), Handler).start("kvmpi-metrics", "metrics")


Samples = list[tuple[list[str], float]]


def metrics(picture: dict[str, Any]) -> Iterator[tuple[str, str, str, list[str], Samples]]:
    """Name, kind, meaning, names of labels, and samples of each metric in a picture of ``Statistics.snapshot``."""
    if not picture:
        return
    job = picture["job"]
    workers, servers = picture["workers"], picture["servers"]
    for key, name, kind, meaning in _OF_WORKERS:
        samples = [([job, str(w["rank"]), str(w["client"])], float(w[key])) for w in workers]
        if samples:
            yield f"kvmpi_worker_{name}", kind, meaning, ["job", "worker", "client"], samples
    for key, name, kind, meaning in _OF_SERVERS:
        samples = [([job, str(s["rank"])], float(s[key])) for s in servers]
        if samples:
            yield f"kvmpi_server_{name}", kind, meaning, ["job", "server"], samples
    if servers:
        late = [([job, str(s["rank"])], float(len(s["missing"]))) for s in servers]
        yield "kvmpi_server_awaited_clients", "gauge", "Clients that open rounds wait for.", ["job", "server"], late
    newest = [
        ([job, str(w["rank"]), str(w["client"]), name], float(value))
        for w in workers for name, value in w["newest"].items()
    ]  # fmt: skip
    if newest:
        labels = ["job", "worker", "client", "name"]
        yield "kvmpi_worker_reported", "gauge", "What the program has told kv.report last.", labels, newest
    if workers:
        stale = [
            ([job, str(w["rank"]), str(w["client"]), clocks], float(count))
            for w in workers for clocks, count in w["staleness_counts"].items()
        ]  # fmt: skip
        labels = ["job", "worker", "client", "updates"]
        yield "kvmpi_worker_pushes_by_staleness", "counter", "Pushes by how old their values were.", labels, stale
    if picture["shape"]["workers"]:
        yield "kvmpi_workers_reporting", "gauge", "Workers that report.", ["job"], [([job], float(len(workers)))]
        yield (
            "kvmpi_lost",
            "gauge",
            "Clients and servers that are lost.",
            ["job"],
            [([job], float(len(picture["lost"])))],
        )
