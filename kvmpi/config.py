"""Every setting of kvmpi: its type, default and meaning, read from ``KVMPI_*`` in this one place."""

from __future__ import annotations

import itertools
import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from kvmpi.errors import ConfigError

MIB = 1 << 20
#: In the job's folder: what the job does, as the scheduler writes it while somebody looks, and once more at its end;
#: and what whoever looks touches.
STATUS_FILE, WATCHED_FILE = "status.json", "watched"
#: Also there: FIFOs with lines of JSON, by which the launcher tells the scheduler which processes have ended, and hears
#: which ones count as lost because they were silent.
ENDINGS_FILE, LOSSES_FILE = "endings", "losses"


def _setting(default: Any, meaning: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"meaning": meaning, "choices": choices})


#: A system's clock ends somewhere: longer than a human life is for ever.
MOST_SECONDS = 4e9
#: Of what is said again and again: who says it more often does nothing else.
LEAST_SECONDS = 0.01
#: A handshake takes a hundred bytes, and who is in the job some hundred for each process.
LEAST_MESSAGE_BYTES = 16 << 10
#: libzmq tells them apart by the bits of a number.
MOST_IO_THREADS = 32


@dataclass(frozen=True)
class Config:
    """The settings of one process. An argument beats the environment, the environment beats the default."""

    # What the launcher tells each process about the job. Users do not set these by hand.
    role: str = _setting("", "what this process is; set by the launcher", ("", "scheduler", "server", "worker"))
    job_id: str = _setting("", "the job that this process belongs to; set by the launcher")
    job_dir: str = _setting("", "private folder of the job on this host (mode 0700); set by the launcher")
    rank: int = _setting(-1, "number of this process within its role; set by the launcher")
    client_rank: int = _setting(0, "which client this worker belongs to; set by the launcher")
    start: int = _setting(0, "how often another was started in the place of this process before; set by the launcher")
    num_workers: int = _setting(1, "workers in the job; set by the launcher")
    num_clients: int = _setting(1, "clients in the job; set by the launcher, and by you where there is none of ours")
    num_servers: int = _setting(
        0, "servers in the job; set by the launcher, and by you where there is none of ours: 0 is one on each host then"
    )
    replicas: int = _setting(
        0, "further servers that hold each part of the values; set by the launcher (--replicas), and by you where "
        "there is none of ours"
    )  # fmt: skip
    scheduler: str = _setting("", "endpoint of the scheduler, tcp://HOST:PORT, IPv6 in brackets; set by the launcher")
    ready_fd: int = _setting(-1, "descriptor to which the scheduler writes its endpoint; set by the launcher")
    keys: str = _setting("", "file with the keys of the job (mode 0600), made by the scheduler; set by the launcher")
    resume: str = _setting(
        "", "folder with the snapshots that the job goes on from; set by the launcher (--resume), and by you where "
        "there is none of ours"
    )  # fmt: skip
    tty: str = _setting("", "terminal on which the launcher runs, for progress bars; set by the launcher")
    # What users may set.
    timeout_s: float = _setting(300.0, "seconds that one blocking call may take")
    grace_s: float = _setting(
        5.0, "seconds that processes have to end after SIGTERM, when a job ends early, before the launcher kills them"
    )
    heartbeat_s: float = _setting(
        1.0, "seconds between two heartbeats of a server or a master, or a quarter of KVMPI_HEARTBEAT_TIMEOUT_S where "
        "that is less; at most half of that"
    )  # fmt: skip
    heartbeat_timeout_s: float = _setting(20.0, "seconds of silence after which a peer counts as dead")
    report_s: float = _setting(
        1.0, "seconds between two reports of a worker or a server to the scheduler, for kvmpi top, the dashboard, the "
        "summary; 0: none",
    )  # fmt: skip
    metrics_port: int = _setting(
        -1, "port of the scheduler's Prometheus endpoint, server R has the R+1st after it; 0 lets the system choose; "
        "-1: there is none",
    )  # fmt: skip
    dashboard_port: int = _setting(
        -1, "port of the scheduler's web page; 0 lets the system choose; -1: there is none (--dashboard)"
    )
    metrics_host: str = _setting("127.0.0.1", "address that the Prometheus endpoints and the web page listen on")
    on_client_loss: str = _setting(
        "fail", "what synchronous rounds do when a client dies: fail on all others, wait for its return, or go on "
        "without it until it is back; reads of dist_ssp wait for it with wait, else they go on without it",
        ("fail", "wait", "shrink"),
    )  # fmt: skip
    staleness: int = _setting(
        3, "by how many pushes of a key a client of a store of type dist_ssp may be ahead of the slowest; where it is "
        "further, its reads wait",
    )  # fmt: skip
    softsync: int = _setting(
        1, "n of a store of type dist_softsync, whose servers update a value after a number of pushes that is the n-th "
        "part of the clients; 1: after as many as there are clients, whoever they are from",
    )  # fmt: skip
    engine: str = _setting("threaded", "threaded, or naive: all at once in the calling thread", ("threaded", "naive"))
    engine_threads: int = _setting(2, "threads of the engine's cpu lane")
    allreduce: str = _setting(
        "auto", "algorithm of the tensor collectives",
        ("auto", "shared", "hierarchical", "multi_ring", "ring", "host_ring", "nccl", "mpi", "naive"),
    )  # fmt: skip
    num_rings: int = _setting(2, "rings of multi_ring, 1 to 8")
    ring_transport: str = _setting(
        "auto",
        "what carries rings between hosts: MPI, or TCP connections of kvmpi's own, which take less processor time; "
        "auto takes those where no host has InfiniBand or the like",
        ("auto", "tcp", "mpi"),
    )
    interface: str = _setting(
        "",
        "interfaces (eth0) or networks (10.0.0.0/16, fd00::/64), separated by commas, for these; empty: any",
    )
    native: str = _setting(
        "auto", "compiled code in the collectives: auto uses it where it has been built, off leaves all to Python",
        ("auto", "off"),
    )  # fmt: skip
    ring_chunk_bytes: int = _setting(0, "bytes of one message of a ring; 0 chooses by size")
    ring_compression: str = _setting(
        "none", "float32 sums of a client, from 256 KiB on, travel between hosts as float16 or bfloat16: half the "
        "bytes; each host rounds what it sends on", ("none", "fp16", "bf16"),
    )  # fmt: skip
    tuning: str = _setting("", "file of kvmpi bench tune, by which auto chooses; empty takes built-in figures")
    bucket_bytes: int = _setting(8 * MIB, "keys of one list call are summed together up to this size")
    sharded_update: str = _setting(
        "off", "whether, in stores whose workers hold the values, each worker updates its share of a value alone, and "
        "remembers what momentum or Adam need of that share: on wants rules of kvmpi's, see docs/algorithms.md",
        ("off", "on"),
    )  # fmt: skip
    shared_input: str = _setting(
        "attach", "how ranks of a host read each other's private arrays: where they are (if the system allows it), or "
        "copied to shared memory", ("attach", "stage"),
    )  # fmt: skip
    placement: str = _setting("uniform", "which server owns which part of a key (a registered name)")
    chunk_bytes: int = _setting(
        0, "bytes of one message between master and server; 0 chooses by size: 2 MiB, up to 8 MiB for keys of which a "
        "server has more than 32 MiB"
    )  # fmt: skip
    window_bytes: int = _setting(
        4 * MIB,
        "unacknowledged bytes of one master at one server, or two messages of the size that "
        "KVMPI_CHUNK_BYTES=0 chooses; KVMPI_SHARED_BYTES if shared memory takes them",
    )
    retry_s: float = _setting(
        10.0, "seconds without any answer after which a request is sent again, the next time twice as many"
    )
    max_message_bytes: int = _setting(64 * MIB, "a message with a larger frame is refused by the receiver")
    transport: str = _setting("auto", "between processes of one host; auto takes ipc there", ("auto", "tcp", "ipc"))
    shared_payloads: str = _setting(
        "auto", "how large payloads go between processes of one host that ipc connects: auto takes shared memory (if "
        "the system allows it), off the socket", ("auto", "off"),
    )  # fmt: skip
    shared_bytes: int = _setting(
        0,
        "bytes of copies in shared memory that one peer may keep; what is more goes by the socket; 0: four windows",
    )
    host: str = _setting(
        "127.0.0.1", "address, name or interface of this host that the scheduler and the servers listen on"
    )
    security: str = _setting(
        "curve", "TCP between scheduler, servers and masters: encrypted and for members of the job only; off: open to "
        "everyone who reaches the ports", ("curve", "off"),
    )  # fmt: skip
    io_threads: int = _setting(
        0, "threads of a process that encrypt, copy and send what goes to other processes, each for some of its "
        "connections; 0: one for each four cores that it may use, 2 to 4, and no more than cores"
    )  # fmt: skip
    handshake_s: float = _setting(10.0, "seconds in which a new TCP connection must prove that it belongs to the job")
    scheduler_port: int = _setting(0, "port of the scheduler; 0 lets the system choose")
    mpirun: str = _setting(
        "", "the mpirun to use; empty looks beside the interpreter, on PATH, and where pip install --user puts it"
    )
    imports: str = _setting("", "modules, separated by commas, that servers import at start (custom rules)")
    snapshot_dir: str = _setting("", "folder into which servers write snapshots")
    snapshot_every: int = _setting(0, "steps from one snapshot to the next; 0 is off")
    snapshot_seconds: float = _setting(0.0, "seconds from one snapshot to the next; 0 is off")
    stall_s: float = _setting(
        60.0, "seconds after which a process says on standard error whom it waits for, and again after twice as long, "
        "and so on; half of KVMPI_TIMEOUT_S if that is less; 0: never",
    )  # fmt: skip
    timeline: str = _setting(
        "", "file for a timeline of the job (--timeline), made at its end of what its processes write to FILE.parts"
    )
    timeline_spans: int = _setting(1_000_000, "spans that one process writes at most; later ones are only counted")
    log_level: str = _setting(
        "WARNING", "of the scheduler's and the servers' log", ("DEBUG", "INFO", "WARNING", "ERROR")
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            choices = f.metadata["choices"]
            value = getattr(self, f.name)
            if choices and value not in choices:
                raise ConfigError(f"{env_name(f.name)}={value!r}: expected one of {', '.join(map(repr, choices))}")
            if isinstance(f.default, float) and not value <= MOST_SECONDS:
                raise ConfigError(f"{env_name(f.name)}={value}: expected seconds, at most {MOST_SECONDS:.0e}")
            if isinstance(f.default, int) and value >= 1 << 62:
                raise ConfigError(f"{env_name(f.name)}={value}: expected less than 2^62")
        for name in ("timeout_s", "heartbeat_s", "heartbeat_timeout_s", "retry_s", "handshake_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{env_name(name)}={getattr(self, name)}: must be positive")
        for name in ("heartbeat_s", "heartbeat_timeout_s", "retry_s", "report_s"):
            if 0 < getattr(self, name) < LEAST_SECONDS:
                raise ConfigError(f"{env_name(name)}={getattr(self, name)}: expected at least {LEAST_SECONDS} seconds")
        if self.heartbeat_s > self.heartbeat_timeout_s / 2:  # everybody would count as dead between two of them
            raise ConfigError(
                f"KVMPI_HEARTBEAT_S={self.heartbeat_s}: must be at most half of "
                f"KVMPI_HEARTBEAT_TIMEOUT_S={self.heartbeat_timeout_s}"
            )
        counts = ("engine_threads", "num_workers", "num_clients", "timeline_spans")
        for name in (*counts, "bucket_bytes", "window_bytes", "softsync"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{env_name(name)}={getattr(self, name)}: must be at least 1")
        for name in ("stall_s", "grace_s", "chunk_bytes", "staleness", "io_threads"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{env_name(name)}={getattr(self, name)}: must not be negative")
        if self.io_threads > MOST_IO_THREADS:
            raise ConfigError(f"KVMPI_IO_THREADS={self.io_threads}: must be at most {MOST_IO_THREADS}")
        if not 1 <= self.num_rings <= 8:
            raise ConfigError(f"KVMPI_NUM_RINGS={self.num_rings}: must be 1 to 8")
        if self.ring_chunk_bytes < 0:
            raise ConfigError(f"KVMPI_RING_CHUNK_BYTES={self.ring_chunk_bytes}: must not be negative")
        if self.shared_bytes < 0:
            raise ConfigError(f"KVMPI_SHARED_BYTES={self.shared_bytes}: must not be negative")
        if self.report_s < 0:
            raise ConfigError(f"KVMPI_REPORT_S={self.report_s}: must not be negative; 0 turns reports off")
        for name in ("metrics_port", "dashboard_port"):
            if not -1 <= getattr(self, name) <= 65535:
                raise ConfigError(f"{env_name(name)}={getattr(self, name)}: expected a port, 0 or -1")
        if not 0 <= self.scheduler_port <= 65535:
            raise ConfigError(f"KVMPI_SCHEDULER_PORT={self.scheduler_port}: expected a port, or 0")
        if self.num_servers < 0:
            raise ConfigError(f"KVMPI_NUM_SERVERS={self.num_servers}: must not be negative")
        if self.metrics_port > 0 and self.metrics_port + self.num_servers > 65535:
            raise ConfigError(
                f"KVMPI_METRICS_PORT={self.metrics_port}: there are no {self.num_servers} ports after it, one for each "
                "server; take a lower one, or 0"
            )
        if self.replicas < 0:
            raise ConfigError(f"KVMPI_REPLICAS={self.replicas}: must not be negative")
        for name in ("snapshot_every", "snapshot_seconds"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{env_name(name)}={getattr(self, name)}: must not be negative")
            if getattr(self, name) and not self.snapshot_dir:
                raise ConfigError(f"{env_name(name)} needs KVMPI_SNAPSHOT_DIR (--snapshot-dir): where are they to go?")
        if self.snapshot_every and self.snapshot_seconds:
            raise ConfigError("KVMPI_SNAPSHOT_EVERY and KVMPI_SNAPSHOT_SECONDS: only one of them can say when")
        if self.snapshot_dir and not (self.snapshot_every or self.snapshot_seconds):
            raise ConfigError(
                "KVMPI_SNAPSHOT_DIR (--snapshot-dir) needs KVMPI_SNAPSHOT_EVERY or KVMPI_SNAPSHOT_SECONDS "
                "(--snapshot-every, --snapshot-seconds): how often?"
            )
        if self.max_message_bytes < LEAST_MESSAGE_BYTES:
            raise ConfigError(
                f"KVMPI_MAX_MESSAGE_BYTES={self.max_message_bytes}: must be at least {LEAST_MESSAGE_BYTES}, for what "
                "processes say to each other besides values"
            )
        if self.chunk_bytes > self.max_message_bytes:
            raise ConfigError(
                f"KVMPI_CHUNK_BYTES={self.chunk_bytes} is above KVMPI_MAX_MESSAGE_BYTES={self.max_message_bytes}"
            )
        if self.role:  # else nobody has said yet how many workers there are
            client_bounds(self.num_workers, self.num_clients)

    @property
    def beat_s(self) -> float:
        """Seconds between two heartbeats. In half the timeout there are two: who hears none then was cut off itself."""
        return min(self.heartbeat_s, self.heartbeat_timeout_s / 4)

    @property
    def num_worlds(self) -> int:
        """Into how many groups workers are divided that reach none but each other: clients, where a launcher of ours
        has started them. Else all reach all."""
        return self.num_clients if self.role else 1

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, **explicit: Any) -> Config:
        """Read ``env`` (default: ``os.environ``); keyword arguments win.

        Raises:
            ConfigError: an unknown ``KVMPI_*`` name, or a value that does not parse or is not allowed.
        """
        env = os.environ if env is None else env
        known = {env_name(f.name): f for f in fields(cls)}
        unknown = sorted(k for k in env if k.startswith("KVMPI_") and k not in known)
        if unknown:
            guess = close_to(unknown, known)
            more = "" if guess else f"; known settings: {', '.join(sorted(known))}"
            raise ConfigError(f"unknown setting {', '.join(unknown)}{guess}{more}")
        given: dict[str, Any] = {}
        for name, f in known.items():
            text = env.get(name, "")
            if text == "":
                continue
            kind: Any = type(f.default)
            try:
                given[f.name] = kind(text)
            except ValueError:
                raise ConfigError(f"{name}={text!r}: expected {kind.__name__}, for example {f.default!r}") from None
        return cls(**{**given, **_checked(explicit)})

    def to_env(self) -> dict[str, str]:
        """The settings that differ from their defaults, as environment variables."""
        return {
            env_name(f.name): str(getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default
        }


def close_to(names: Iterable[str], known: Iterable[str]) -> str:
    """For an error about ``names``: which of those that are ``known`` somebody may have meant; empty: none."""
    import difflib

    known = list(known)
    close = [name for one in names for name in difflib.get_close_matches(one, known, 1, 0.75)]
    return f" (did you mean {', '.join(close)}?)" if close else ""


def _checked(explicit: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings that a program gives by name.

    Raises:
        ConfigError: one is unknown, or not of the kind of its default.
    """
    known = {f.name: f for f in fields(Config)}
    kinds: dict[type, type] = {float: numbers.Real, int: numbers.Integral}
    if unknown := sorted(set(explicit) - set(known)):
        guess = close_to(unknown, known)
        raise ConfigError(f"unknown setting {', '.join(unknown)}{guess}" + ("" if guess else "; see docs/settings.md"))
    for name, value in explicit.items():
        kind = type(known[name].default)
        if not isinstance(value, kinds.get(kind, kind)):
            raise ConfigError(f"{name}={value!r}: expected {kind.__name__}, for example {known[name].default!r}")
    return explicit


def env_name(field_name: str) -> str:
    """``timeout_s`` -> ``KVMPI_TIMEOUT_S``."""
    return f"KVMPI_{field_name.upper()}"


def empty_option(words: Sequence[str]) -> str:
    """What to say of an option whose value is empty, as a shell leaves it of a variable that is not set; else nothing.

    It would count as not given: a job without its hosts would run here, and one without its snapshots begin anew.
    """
    for before, word in itertools.pairwise(["", *words]):
        option = word[:-1] if word.startswith("--") and word.endswith("=") and word.count("=") == 1 else ""
        if option or (before.startswith("-") and not word):
            return f"{option or before}: the value is empty; is it a variable of the shell that is not set?"
    return ""


def client_bounds(num_workers: int, num_clients: int) -> list[tuple[int, int]]:
    """Half-open ranges of worker ranks, one per client; sizes differ by at most one, larger first.

    Raises:
        ConfigError: there are more clients than workers, or none of either.
    """
    if num_workers < 1 or num_clients < 1:
        raise ConfigError(f"{num_workers} workers in {num_clients} clients: both must be at least 1")
    if num_clients > num_workers:
        raise ConfigError(
            f"{num_clients} clients for {num_workers} workers: every client needs a worker; "
            f"use -c {num_workers} or fewer"
        )
    base, extra = divmod(num_workers, num_clients)
    starts = [i * base + min(i, extra) for i in range(num_clients + 1)]
    return list(itertools.pairwise(starts))


def settings_table() -> str:
    """Every setting as a Markdown table, for the documentation."""
    rows = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for f in fields(Config):
        default = repr(f.default) if f.default != "" else "(empty)"
        choices = ", ".join(f"`{c}`" for c in f.metadata["choices"] if c)
        meaning = f.metadata["meaning"] + (f" ({choices})" if choices else "")
        rows.append(f"| `{env_name(f.name)}` | {type(f.default).__name__} | {default} | {meaning} |")
    return "\n".join(rows)
