"""Checks of several hosts: whether each can be reached, their clocks, and how fast each pair of them is."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import kvmpi
from kvmpi.doctor.finding import Finding, Surroundings
from kvmpi.errors import names_in_words
from kvmpi.launchers import mpirun, where
from kvmpi.launchers.hosts import Host, without_user
from kvmpi.launchers.reach import Reach
from kvmpi.launchers.remote_exec import own_address

COMMAND = (sys.executable, "-m", "kvmpi.doctor.pair_program")
START_S = 25.0  # ssh gives up after 20
_MEASURE_S = 0.3
_ANSWER_S = 8.0
_BUDGET_S = 12.0
_CLOCK_S = 0.5
#: A pair is slow below this share of the fastest one's rate.
_SLOW = 0.4
_RECHECKED = 6
_FAR_S = 2e-3


@dataclass
class Probe:
    """The doctor's end of one ``pair_program``."""

    name: str
    here: bool
    process: subprocess.Popen[bytes]
    word: str
    errors: Any
    answers: list[dict[str, Any]] = field(default_factory=list)
    text: bytes = b""
    about: dict[str, Any] = field(default_factory=dict)  # its first answer

    def tell(self, order: Mapping[str, Any]) -> None:
        """Write a line to it."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()

    def take(self, chunk: bytes) -> None:
        """What it has written."""
        *lines, self.text = (self.text + chunk).split(b"\n")
        for line in lines:
            mark, _, rest = line.partition(b" ")
            if mark.decode(errors="replace") == self.word:
                self.answers.append(json.loads(rest))

    def last_words(self) -> str:
        """Of what reaches the host, or of the program there."""
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read(1 << 16).decode(errors="replace").splitlines()]
        return "; ".join(line for line in lines[-2:] if line)[:200]


@dataclass(frozen=True)
class Pairs:
    """What was measured: ``cells[i, j]`` is from host i to host j."""

    names: tuple[str, ...]
    cells: Mapping[tuple[int, int], Mapping[str, Any]]

    @property
    def slowest_bytes_per_s(self) -> float | None:
        rates = [cell["bytes_per_s"] for cell in self.cells.values() if "bytes_per_s" in cell]
        return min(rates, default=None)

    @property
    def longest_round_trip_s(self) -> float | None:
        return max((cell["round_trip_s"] for cell in self.cells.values() if "round_trip_s" in cell), default=None)


def first_other(at: Surroundings, hosts: Sequence[Host]) -> str:
    """By which name the way to other hosts is looked for; empty where there are none."""
    names = [host.name for host in hosts]
    here = where.find_here(names, at.environ) if names else ""
    return next((without_user(name) for name in names if name != here), "")


def check(
    at: Surroundings, hosts: Sequence[Host], way: Reach, network: str
) -> tuple[list[Finding], Pairs | None]:  # fmt: skip
    """All findings about these hosts and this one, where the scheduler will be."""
    names = [host.name for host in hosts]
    here = where.find_here(names, at.environ)
    others = [name for name in names if name != here]
    try:
        address = own_address(network, without_user(others[0]) if others else "") if others or network else "127.0.0.1"
    except (OSError, ValueError) as error:
        return [Finding("hosts", "problem", f"{network or others[0]}: {error}", "This host has no way there.",
                        "correct the name, or name the network with --interface")], None  # fmt: skip
    with _probes(at, [here or "this host", *others], way, network, address) as probes:
        ready, findings = _start(probes)
        findings += _clocks(ready)
        if len(ready) < 2:
            return findings, None
        pairs = _measure(ready)
        return [*findings, *judge(pairs, at)], pairs


@contextlib.contextmanager
def _probes(at: Surroundings, names: Sequence[str], way: Reach, network: str, address: str) -> Iterator[list[Probe]]:
    """One on each host, the first on this one; all are ended with the block."""
    env = {**mpirun.clean(at.environ), "KVMPI_JOB_ID": at.job_id}
    word, token = f"kvmpi-{secrets.token_hex(8)}", secrets.token_hex(16)
    probes: list[Probe] = []
    try:
        for index, name in enumerate(names):
            command = COMMAND if index == 0 else way.command(name, COMMAND)
            errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
            process = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
            )
            probes.append(Probe(name, index == 0, process, word, errors))
            probes[-1].tell({"word": word, "token": token, "network": network, "towards": address})
        yield probes
    finally:
        for probe in probes:
            assert probe.process.stdin is not None and probe.process.stdout is not None  # noqa: PT018
            with contextlib.suppress(OSError):
                probe.process.stdin.close()
        end_s = time.monotonic() + 2.0
        for probe in probes:
            try:
                probe.process.wait(max(0.0, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                probe.process.kill()
                probe.process.wait()
            assert probe.process.stdout is not None
            probe.process.stdout.close()
            probe.errors.close()


def _await(probes: Iterable[Probe], timeout_s: float) -> dict[str, dict[str, Any]]:
    """The next answer of each; those that do not come in time are missing."""
    found: dict[str, dict[str, Any]] = {}
    waiting = {probe.name: probe for probe in probes}
    end_s = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for probe in waiting.values():
            assert probe.process.stdout is not None
            selector.register(probe.process.stdout, selectors.EVENT_READ, probe)
        while True:
            for name, probe in list(waiting.items()):
                if probe.answers:
                    found[name] = waiting.pop(name).answers.pop(0)
            ready = selector.select(max(0.0, end_s - time.monotonic())) if waiting else []
            if not ready:
                return found
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                key.data.take(chunk)
                if not chunk:
                    selector.unregister(key.fileobj)
                    if not key.data.answers:
                        waiting.pop(key.data.name, None)


def _start(probes: Sequence[Probe]) -> tuple[list[Probe], list[Finding]]:
    answers = _await(probes, START_S)
    ready, findings = [], []
    for probe in probes:
        probe.about = answers.get(probe.name, {})
        if "port" in probe.about:
            ready.append(probe)
            continue
        words, status = probe.about.get("error") or probe.last_words(), probe.process.poll()
        findings.append(_unreached(probe.name, words, status))
    others = [probe for probe in ready if not probe.here]
    versions = {probe.name: probe.about["kvmpi"] for probe in others if probe.about["kvmpi"] != kvmpi.__version__}
    if versions:
        listed = names_in_words([f"{name} has {version}" for name, version in versions.items()])
        findings.append(Finding(
            "hosts", "problem", f"{listed}; this host has {kvmpi.__version__}",
            "Processes of different versions refuse each other.", "install the same everywhere",
        ))  # fmt: skip
    if others:
        listed = names_in_words([f"{probe.name} {probe.about['address']}" for probe in others])
        findings.insert(0, Finding("hosts", "ok", f"reached {listed}", facts={p.name: p.about for p in others}))
    return ready, findings


def _unreached(name: str, words: str, status: int | None) -> Finding:
    seen = f"{name}: {words or 'no answer'}" + ("" if status is None else f" (exit status {status})")
    if status is None and not words:
        seen = f"{name} has not answered within {START_S:.0f} s"
    do = f"try it by hand:\nssh -o BatchMode=yes {name} true"
    means = "No process of a job can be started there."
    if "Permission denied" in words:
        do = f"ssh must work without a password:\nssh-copy-id {name}"
    elif "Host key verification" in words:
        do = f"accept its key once:\nssh {name} true"
    elif "resolve" in words:
        do = "correct the name, or add it to /etc/hosts"
    elif "No module named" in words or "not found" in words or "No such file" in words:
        means = f"All hosts need kvmpi under the same path: {sys.executable} does not run it there."
        do = "install it there in the same place, or put the environment on a file system that all hosts share"
    return Finding("hosts", "problem", seen, means, do, host=name)


def _clocks(ready: Sequence[Probe]) -> list[Finding]:
    """How far clocks are apart: half a round trip after asking they are taken to have answered."""
    offsets: dict[str, tuple[float, float]] = {}
    for probe in ready:
        best = None
        for _ in range(3 if not probe.here else 0):
            start_s, wall_s = time.perf_counter(), time.time()
            probe.tell({"do": "time"})
            answer = _await([probe], _ANSWER_S).get(probe.name)
            if answer is None:
                break
            trip_s = time.perf_counter() - start_s
            if best is None or trip_s < best[1]:
                best = (answer["time"] - wall_s - trip_s / 2, trip_s)
        if best is not None:
            offsets[probe.name] = best
    if not offsets:
        return []
    worst, (offset_s, trip_s) = max(offsets.items(), key=lambda item: abs(item[1][0]))
    facts = {name: {"offset_s": offset, "uncertain_s": trip / 2} for name, (offset, trip) in offsets.items()}
    seen = f"{worst} is {abs(offset_s) * 1e3:.0f} ms {'ahead' if offset_s > 0 else 'behind'}"
    seen += f" (within {trip_s / 2 * 1e3:.0f} ms)" + (", the others less" if len(offsets) > 1 else "")
    if abs(offset_s) - trip_s / 2 > _CLOCK_S:
        return [Finding(
            "clocks", "warning", seen, "Nothing of a job depends on clocks, but times in logs and timelines of "
            "different hosts do not fit together.", "run an NTP client, such as chrony", facts,
        )]  # fmt: skip
    return [Finding("clocks", "ok", seen, facts=facts)]


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of ``count`` hosts, in rounds in which no host is in two pairs: the circle method of tournaments."""
    places: list[int] = list(range(count + count % 2))
    found = []
    for _ in range(len(places) - 1):
        pairs = zip(places[: len(places) // 2], reversed(places[len(places) // 2 :]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
        places = [places[0], places[-1], *places[1:-1]]
    return found


def _measure(ready: Sequence[Probe]) -> Pairs:
    cells: dict[tuple[int, int], dict[str, Any]] = {}

    def run(some: Sequence[tuple[int, int]], seconds: float) -> dict[tuple[int, int], dict[str, Any]]:
        for i, j in some:
            about = ready[j].about
            order = {"do": "measure", "address": about["address"], "port": about["port"], "seconds": seconds}
            ready[i].tell(order)
        answers = _await([ready[i] for i, _ in some], _ANSWER_S)
        missing = {"failed": "answer", "error": f"no answer within {_ANSWER_S:.0f} s"}
        return {(i, j): answers.get(ready[i].name, missing) for i, j in some}

    end_s = time.monotonic() + _BUDGET_S
    for some in rounds(len(ready)):
        if time.monotonic() < end_s:
            cells |= run(some, _MEASURE_S)
            cells |= run([(j, i) for i, j in some], _MEASURE_S)
    # What looks slow may have been disturbed: once more, alone.
    for pair in slow(cells)[:_RECHECKED]:
        again = run([pair], 2 * _MEASURE_S)[pair]
        if again.get("bytes_per_s", 0.0) > cells[pair]["bytes_per_s"]:
            cells[pair] = again
    return Pairs(tuple(probe.name for probe in ready), cells)


def slow(cells: Mapping[tuple[int, int], Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Pairs far below the fastest one, slowest first."""
    rates = {pair: cell["bytes_per_s"] for pair, cell in cells.items() if "bytes_per_s" in cell}
    best = max(rates.values(), default=0.0)
    return sorted((pair for pair, rate in rates.items() if rate < _SLOW * best), key=lambda pair: rates[pair])


def judge(pairs: Pairs, at: Surroundings) -> list[Finding]:
    """What the measured pairs mean."""
    names, cells = pairs.names, pairs.cells
    findings = []
    broken = {pair: cell for pair, cell in cells.items() if "failed" in cell}
    for (i, j), cell in list(broken.items())[:4]:
        low, _, high = at.read("/proc/sys/net/ipv4/ip_local_port_range").partition("\t")
        means, do = "The scheduler, servers and MPI ranks of a job listen on ports that the system chooses.", (
            f"let the hosts of a job reach each other's TCP ports {low or 1024} to {high or 65535}, or name another "
            "network with --interface"
        )  # fmt: skip
        if cell["failed"] == "send":
            means = (
                "Small messages arrive and large ones do not: the MTU of the two ends, or of what is between, differ."
            )
            do = f"compare them:\nip link show\nping -M do -s 1472 {names[j]}"
        findings.append(Finding(
            "pairs of hosts", "problem", f"{names[i]} -> {names[j]}: {cell['failed']}: {cell['error']}", means, do,
            host=names[i],
        ))  # fmt: skip
    rates = [cell["bytes_per_s"] for cell in cells.values() if "bytes_per_s" in cell]
    if not rates:
        return findings
    trips = [cell["round_trip_s"] for cell in cells.values() if "bytes_per_s" in cell]
    listed = [
        {"from": names[i], "to": names[j], **cell} for (i, j), cell in sorted(cells.items())
    ]  # fmt: skip
    seen = (
        f"{min(rates) / 1e6:,.0f} to {max(rates) / 1e6:,.0f} MB/s; round trips {statistics.median(trips) * 1e3:.2f} ms"
    )
    seen += f" (at most {max(trips) * 1e3:.2f})"
    total = len(names) * (len(names) - 1)
    if len(cells) < total:
        seen += f"; {len(cells)} of {total} measured"
    facts = {"pairs": listed}
    if found := slow(cells):
        worst = ", ".join(
            f"{names[i]} -> {names[j]} {cells[i, j]['bytes_per_s'] / 1e6:,.1f} MB/s" for i, j in found[:4]
        )
        common = set.intersection(*({i, j} for i, j in found))
        who = f" {names[next(iter(common))]} is in all of them." if len(common) == 1 else ""
        findings.append(Finding(
            "pairs of hosts", "warning", f"slow: {worst}; the fastest pair has {max(rates) / 1e6:,.0f}",
            f"A sum over all hosts is as slow as the slowest of them.{who}",
            "look at its cable, its switch port, and which interface it takes (--interface); or make each side a "
            "client of its own, with servers between them (-c, docs/algorithms.md)", facts,
        ))  # fmt: skip
    elif max(trips) > _FAR_S:
        findings.append(Finding(
            "pairs of hosts", "warning", seen, "So far apart, every step of a ring costs a round trip.",
            "make each island a client of its own: -c, with DiLoCo or elastic averaging (docs/algorithms.md)", facts,
        ))  # fmt: skip
    else:
        findings.append(Finding("pairs of hosts", "ok", seen, facts=facts))
    return findings
