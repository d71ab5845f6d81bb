"""What is planned: hosts and links, a job on them, and what disturbs it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from kvmpi.collectives.cost import Figures
from kvmpi.config import client_bounds
from kvmpi.errors import ConfigError

#: Of a link's bits that are payload: TCP over frames of 1500 bytes.
PAYLOAD_SHARE = 0.95
#: Workers, hosts, servers, cores: there are no more anywhere.
MOST = 1_000_000
#: With more, so many steps take nearly no time, and one takes it all, that no simulation comes across it.
_MOST_JITTER = 3


@dataclass(frozen=True)
class Algorithm:
    """How workers exchange what they learn; see docs/algorithms.md.

    Attributes:
        store: the store type.
        grouped: the workers of a client sum among themselves first; else every worker is a client.
        synchronous: servers wait for all clients.
        averages: weights are exchanged every ``interval`` steps, not gradients after every step.
    """

    name: str
    store: str
    grouped: bool
    synchronous: bool
    averages: bool = False


ALGORITHMS = {
    of.name: of
    for of in (
        Algorithm("dist-SGD", "dist_sync", False, True),
        Algorithm("dist-ASGD", "dist_async", False, False),
        Algorithm("dist-ESGD", "dist_async", False, False, True),
        Algorithm("mpi-SGD", "dist_sync_mpi", True, True),
        Algorithm("mpi-ASGD", "dist_async_mpi", True, False),
        Algorithm("mpi-ESGD", "dist_async_mpi", True, False, True),
        Algorithm("DiLoCo", "dist_sync_mpi", True, True, True),
    )
}


@dataclass(frozen=True)
class ServerFigures:
    """Of servers and of the masters that talk to them; ``kvmpi bench ps`` measures them.

    Attributes:
        message_s: a server's processor for one key of one client, there and back.
        process_bytes_per_s: that one process encrypts or decrypts, copies and adds.
        shared_bytes_per_s: the same where all are on one host, and hand payloads over in shared memory.
    """

    message_s: float = 1.5e-4
    process_bytes_per_s: float = 6e8
    shared_bytes_per_s: float = 2.5e9

    def __post_init__(self) -> None:
        _check_positive(self, "message_s", "process_bytes_per_s", "shared_bytes_per_s")


@dataclass(frozen=True)
class Cluster:
    """Hosts, all alike.

    Attributes:
        hosts: that workers are on; they are filled in order.
        server_hosts: further hosts, for servers alone; 0: servers are on the workers' hosts.
        cores: of a host; 0 for more than its workers use. Workers that compute on fewer cores take longer.
        link_bytes_per_s: payload of a host's link, in each direction.
        latency_s: from host to host, one way.
        lab_cores: of the one machine on which all hosts are simulated, which moves every byte; 0: no lab.
        figures: of the collectives; their ``link_bytes_per_s`` does not count.
    """

    hosts: int = 1
    server_hosts: int = 0
    cores: int = 0
    link_bytes_per_s: float = PAYLOAD_SHARE * 1.25e9
    latency_s: float = 2e-5
    lab_cores: int = 0
    figures: Figures = field(default_factory=Figures)
    server_figures: ServerFigures = field(default_factory=ServerFigures)

    def __post_init__(self) -> None:
        _check_positive(self, "hosts", most=MOST)
        _check_positive(self, "link_bytes_per_s")
        _check_not_negative(self, "server_hosts", "cores", "lab_cores", most=MOST)
        _check_not_negative(self, "latency_s")

    @property
    def shared(self) -> bool:
        """Whether all processes share the memory of one host."""
        return self.hosts == 1 and not self.server_hosts and not self.lab_cores


@dataclass(frozen=True)
class Job:
    """A job.

    Attributes:
        interval: steps from one exchange of weights to the next, for algorithms that average.
        overlap: gradients leave during the backward pass.
        sharded: each worker updates its share of the weights (``KVMPI_SHARDED_UPDATE``).
        window_bytes, chunk_bytes, bucket_bytes: as in ``KVMPI_WINDOW_BYTES`` and so on.
    """

    algorithm: str
    workers: int
    clients: int = 1
    servers: int = 0
    interval: int = 64
    overlap: bool = False
    sharded: bool = False
    window_bytes: int = 4 << 20
    chunk_bytes: int = 2 << 20
    bucket_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ConfigError(f"algorithm {self.algorithm!r}: known are {', '.join(ALGORITHMS)}")
        _check_positive(self, "interval", "window_bytes", "chunk_bytes", "bucket_bytes")
        _check_not_negative(self, "servers", most=MOST)
        client_bounds(self.workers, self.clients)
        if not self.servers and not (self.algorithm == "mpi-SGD" and self.clients == 1):
            raise ConfigError(
                f"{self.algorithm} in {self.num_clients} clients needs servers (-s N); without any there is mpi-SGD "
                "with one client"
            )
        if self.sharded and not self.may_shard:
            raise ConfigError(
                f"{self.algorithm} -n {self.workers} -c {self.num_clients} -s {self.servers}: workers "
                "update shares of the weights where there are several, and no servers"
            )

    @property
    def of(self) -> Algorithm:
        return ALGORITHMS[self.algorithm]

    @property
    def may_shard(self) -> bool:
        """Whether the workers hold the values, and are several."""
        return not self.servers and self.workers > 1

    @property
    def num_clients(self) -> int:
        """As the servers see it."""
        return self.clients if self.of.grouped else self.workers


@dataclass(frozen=True)
class Disturbance:
    """What makes workers different.

    Attributes:
        jitter: standard deviation of the logarithm of a step's time, which is drawn for every worker and step.
        slow_workers, slow_factor: so many workers, the last ones, take so many times as long.
        mtbf_s: mean time between failures of one worker; infinity: none fails.
        restart_s: until a client that has failed computes again.
    """

    jitter: float = 0.0
    slow_workers: int = 0
    slow_factor: float = 1.0
    mtbf_s: float = math.inf
    restart_s: float = 60.0

    def __post_init__(self) -> None:
        _check_not_negative(self, "jitter", most=_MOST_JITTER)
        _check_not_negative(self, "slow_workers", "restart_s")
        if not self.slow_factor >= 1 or math.isinf(self.slow_factor):
            raise ConfigError(f"a worker that takes {self.slow_factor} times as long: expected 1 or more")
        if not self.mtbf_s > 0:
            raise ConfigError(f"failures every {self.mtbf_s} s: expected a positive time")


def parse_link(text: str) -> float:
    """``1gbit`` -> bytes of payload per second.

    Raises:
        ConfigError: it is no speed.
    """
    number, unit = text[:-4], text[-4:].lower()
    scales = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    try:
        rate = float(number) * scales[unit] / 8
    except (ValueError, KeyError):
        rate = 0.0
    if not 0 < rate < math.inf:
        raise ConfigError(f"link {text!r}: expected a speed such as 100mbit, 1gbit or 2.5gbit")
    return PAYLOAD_SHARE * rate


def _check_positive(of: Any, *names: str, most: float = 1e18) -> None:
    for name in names:
        if not 0 < getattr(of, name) <= most:
            seen = f"{type(of).__name__}: {name} is {getattr(of, name)}"
            raise ConfigError(f"{seen}: expected a positive number, {most:g} at most")


def _check_not_negative(of: Any, *names: str, most: float = 1e18) -> None:
    known = {f.name for f in fields(of)}
    for name in names:
        assert name in known
        if not 0 <= getattr(of, name) <= most:
            seen = f"{type(of).__name__}: {name} is {getattr(of, name)}"
            raise ConfigError(f"{seen}: expected zero or more, {most:g} at most")
