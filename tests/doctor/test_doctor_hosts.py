"""Several hosts: who is tried with whom, what measured pairs mean, the ceiling, and real hosts with a slow link."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import HANGS_S

from kvmpi.benchmarks.netlab import PRIVATE, NetLab
from kvmpi.collectives.cost import Figures
from kvmpi.doctor import ceiling, pair_program, pairs, remote, report
from kvmpi.doctor.finding import Answer, Finding, Surroundings
from kvmpi.doctor.pairs import Pairs
from kvmpi.errors import ConfigError
from kvmpi.launchers import reach
from kvmpi.launchers.hosts import Host

TIMEOUT_S = HANGS_S
AT = Surroundings({}, "0" * 16)


@pytest.mark.parametrize("count", range(2, 18))
def test_every_pair_once_and_no_host_twice_in_a_round(count: int) -> None:
    found = pairs.rounds(count)
    assert sorted(pair for some in found for pair in some) == list(combinations(range(count), 2))
    for some in found:
        hosts = [host for pair in some for host in pair]
        assert len(set(hosts)) == len(hosts)
    assert len(found) == count - 1 + count % 2


def cells(rates: dict[tuple[int, int], float], trip_s: float = 1e-4) -> dict[tuple[int, int], dict[str, Any]]:
    return {pair: {"bytes_per_s": rate, "round_trip_s": trip_s} for pair, rate in rates.items()}


def test_what_measured_pairs_mean() -> None:
    names = ("a", "b", "c")
    even = {(i, j): 1e8 + 1e6 * (3 * i + j) for i in range(3) for j in range(3) if i != j}
    (found,) = pairs.judge(Pairs(names, cells(even)), AT)
    assert (found.level, "101 to 107 MB/s" in found.seen) == ("ok", True)
    (found,) = pairs.judge(Pairs(names, cells({**even, (2, 0): 1e7, (2, 1): 2e7})), AT)
    assert found.level == "warning"
    assert "slow: c -> a 10.0 MB/s, c -> b 20.0 MB/s; the fastest pair has 105" in found.seen
    assert "c is in all of them" in found.means
    (found,) = pairs.judge(Pairs(names, cells(even, 0.02)), AT)
    assert (found.level, "island" in found.do) == ("warning", True)
    broken = {(0, 1): {"failed": "connect", "error": "timed out"}, (1, 0): {"failed": "send", "error": "timed out"}}
    firewall, mtu = pairs.judge(Pairs(("a", "b"), broken), AT)
    assert firewall.level == mtu.level == "problem"
    assert "a -> b: connect: timed out" in firewall.seen
    assert "ports" in firewall.do
    assert "MTU" in mtu.means


@pytest.mark.parametrize(("words", "advice"), [
    ("me@far: Permission denied (publickey).", "ssh-copy-id far"), ("Host key verification failed.", "ssh far true"),
    ("ssh: Could not resolve hostname far", "/etc/hosts"), ("No module named kvmpi", "install it there"),
    ("bash: /x/python: No such file or directory", "install it there"), ("", "BatchMode"),
])  # fmt: skip
def test_hosts_that_cannot_be_reached(words: str, advice: str) -> None:
    found = pairs._unreached("far", words, 255)
    assert (found.level, advice in found.do, words in found.seen) == ("problem", True, True)


def test_answers_of_other_doctors() -> None:
    def finding(level: str) -> dict[str, Any]:
        return {"check": "memory", "level": level, "seen": "x", "means": "", "do": "", "facts": {}, "host": ""}

    text = "welcome!\n" + json.dumps({"findings": [finding("ok"), finding("warning")]}, indent=2)
    (found,) = remote.read("far", Answer(0, text, "", 1.0))
    assert (found.level, found.host, found.check) == ("warning", "far", "memory")
    text = json.dumps({"findings": [finding("ok"), finding("skipped")]}, indent=2)
    assert remote.read("far", Answer(0, text, "", 1.0))[0].level == "ok"
    (found,) = remote.read("far", Answer(1, "", "No module named kvmpi", 1.0))
    assert (found.level, "No module named kvmpi" in found.seen) == ("problem", True)


def test_a_network_and_no_other_host() -> None:
    ((found,), measured) = pairs.check(AT, [Host("localhost")], reach.ssh("ssh"), "nosuch")
    assert (found.check, found.level, measured) == ("hosts", "problem", None)
    assert "has no address on 'nosuch'; it has" in found.seen


def test_a_host_with_another_clock_and_one_that_wants_a_password(tmp_path: Path) -> None:
    """Both are this host, behind something like ssh."""
    shell = tmp_path / "shell"
    ahead = "import time, runpy; real = time.time; time.time = lambda: real() + 5\\n"
    ahead += "runpy.run_module('kvmpi.doctor.pair_program', run_name='__main__')"
    shell.write_text(
        f'#!/bin/sh\necho welcome; printf unfinished\ncase $1 in ahead) printf "{ahead}" > {tmp_path}/run.py\n'
        f"exec {sys.executable} {tmp_path}/run.py;;\nesac\necho 'Permission denied (publickey).' >&2; exit 255\n"
    )
    shell.chmod(0o755)
    at = Surroundings(dict(os.environ), "0123456789abcdef")
    found, measured = pairs.check(at, [Host("ahead"), Host("locked")], reach.ssh(str(shell)), "lo")
    by_name = {(finding.check, finding.level): finding for finding in found}
    assert "reached ahead 127.0.0.1" in by_name["hosts", "ok"].seen
    assert "ssh-copy-id locked" in by_name["hosts", "problem"].do
    clocks = by_name["clocks", "warning"]
    assert 4.0 < clocks.facts["ahead"]["offset_s"] < 6.0
    assert "ahead" in clocks.seen
    assert measured is not None
    assert measured.names == ("this host", "ahead")
    assert all(cell["bytes_per_s"] > 0 for cell in measured.cells.values()), measured


def test_strangers_are_hung_up_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=pair_program.serve, args=(listener, b"right"), daemon=True)
        server.start()
        for token, answer in ((b"wrong", b""), (b"right", b"p")):
            with socket.create_connection(listener.getsockname(), 10.0) as connection:
                connection.sendall(token + b"p")
                try:
                    assert connection.recv(1) == answer
                except ConnectionResetError:
                    assert answer == b""
        address, port = listener.getsockname()
        assert pair_program.measure(address, port, b"right", 0.02)["bytes_per_s"] > 0
        listener.shutdown(socket.SHUT_RDWR)  # a thread that waits does not notice that it is closed
        server.join(10.0)
        assert not server.is_alive()
    failed = pair_program.measure(address, port, b"right", 0.02)
    assert failed == {"failed": "connect", "error": "Connection refused"}


def test_round_trips_that_take_long_are_measured_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty of 600 ms take longer than the doctor waits, which then blamed a firewall."""
    times_s: list[float] = []
    monkeypatch.setattr(pair_program, "_PINGS_S", 1e-9, raising=False)
    monkeypatch.setattr(pair_program, "statistics", SimpleNamespace(median=lambda found: times_s.extend(found) or 1.0))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=pair_program.serve, args=(listener, b"right"), daemon=True).start()
        found = pair_program.measure(*listener.getsockname(), b"right", 0.02)
        listener.shutdown(socket.SHUT_RDWR)
    assert found["bytes_per_s"] > 0, "the other side is told that there are no more"
    assert len(times_s) == 1


def test_a_link_that_stands_still_has_a_rate() -> None:
    """From before the half of the measurement until after its end."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as ours:
        threading.Thread(target=pair_program._serve_one, args=(listener.accept()[0], b"right"), daemon=True).start()
        ours.settimeout(TIMEOUT_S)
        pings = bytes(pair_program._PINGS)
        ours.sendall(b"right" + pings)
        pair_program._exactly(ours, len(pings))
        start_s = time.perf_counter()
        ours.sendall(b"s" + struct.pack("<d", 0.2))
        time.sleep(0.3)  # which is the fault
        ours.sendall(b"late")
        count, took_s = pair_program._RESULT.unpack(pair_program._exactly(ours, 16))
        assert count == 4
        assert 0.1 < took_s <= time.perf_counter() - start_s


# ---- the ceiling


def test_gradients_of_models() -> None:
    layers = [3 * 16, *[16 * 16] * 6, 16 * 32, *[32 * 32] * 5, 32 * 64, *[64 * 64] * 5]
    resnet20 = 9 * sum(layers) + 2 * (16 * 7 + 32 * 6 + 64 * 6) + 64 * 10 + 10
    assert ceiling.gradient_bytes("resnet20") == 4 * resnet20
    textcnn = 18_765 * 300 + sum(100 * 300 * width + 100 for width in (3, 4, 5)) + 300 * 2 + 2
    assert ceiling.gradient_bytes("textcnn") == 4 * textcnn
    assert ceiling.gradient_bytes("gpt-small") == 4 * 124_439_808
    assert ceiling.gradient_bytes("10M") == 10 << 20
    for wrong in ("0", "resnet", "-3"):
        with pytest.raises(ConfigError, match="expected one of"):
            ceiling.gradient_bytes(wrong)


def test_the_ceiling_of_links_and_of_memory() -> None:
    figures = ceiling.figures(4e9, 2e9, 125e6, 1e-3)
    assert figures.message_s == pytest.approx(Figures().message_s + 5e-4)
    found = ceiling.estimate(100_000_000, 1.5, [1, 1, 1, 1], figures)
    assert found.least_s == pytest.approx(2 * 3 / 4 * 1e8 / 125e6)
    assert found.bound == "link"
    assert found.expected_s >= found.least_s
    assert found.worst_efficiency == pytest.approx(1.5 / (1.5 + found.expected_s))
    assert found.best_efficiency == pytest.approx(1.5 / (1.5 + max(0.0, found.expected_s - 1.0)))
    # Two ranks copy 8e9 bytes of result a second, which is 16e9 touched; 2 arrays are read and one is written.
    found = ceiling.estimate(100_000_000, 1.5, [2], figures)
    assert found.least_s == pytest.approx(3 * 1e8 / 16e9)
    assert (found.bound, found.algorithm) == ("memory", "shared")
    alone = ceiling.estimate(100_000_000, 1.5, [1], figures)
    assert (alone.expected_s, alone.best_efficiency) == (0.0, 1.0)
    lines = ceiling.describe(found, "mine", figures, cores=1)
    assert "100.0 MB of gradients in a step of 1.5 s, 2 workers on 1 host" in lines[0]
    assert "share 1 cores" in lines[-1]


# ---- hosts of a lab


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
def test_a_slow_link_is_found_between_real_hosts() -> None:
    if shutil.which("ip") is None or shutil.which("nsenter") is None or shutil.which("tc") is None:
        pytest.skip("needs iproute2 and nsenter")
    with NetLab(3, link="300mbit") as lab:
        lab.configure(2, "tc qdisc replace dev lab0 root tbf rate 50mbit burst 64kb latency 200ms")  # only outwards
        words = ["--json", "--hosts", ",".join(lab.hosts), "--remote-shell", f"{PRIVATE}/agent"]
        words += ["--interface", lab.subnet, "--model", "10M", "--step-seconds", "1", "-n", "3"]
        env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
        done = subprocess.run(
            lab.command_on(0, [sys.executable, "-m", "kvmpi", "doctor", *words]), env=env, capture_output=True,
            text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(done.stdout)
        by_name = {finding["check"]: finding for finding in found["findings"] if not finding["host"]}
        slow = by_name["pairs of hosts"]
        assert slow["level"] == "warning"
        fast_hosts, slow_host = lab.hosts[:2], lab.hosts[2]
        assert all(f"{slow_host} -> {host}" in slow["seen"] for host in fast_hosts), slow["seen"]
        assert not any(f"{host} -> " in slow["seen"] for host in fast_hosts), slow["seen"]
        assert f"{slow_host} is in all of them" in slow["means"]
        rates = {(pair["from"], pair["to"]): pair["bytes_per_s"] for pair in slow["facts"]["pairs"]}
        assert rates[slow_host, lab.hosts[0]] < 50e6 / 8 * 1.2
        assert len(rates) == 6
        assert "on 3 hosts, one client over MPI: right" in by_name["kvmpi run -n 3 -s 1"]["seen"]
        assert abs(by_name["clocks"]["facts"][slow_host]["offset_s"]) < 1.0, "they share a clock"
        assert {finding["host"] for finding in found["findings"]} == {"", *lab.hosts[1:]}, "each has been looked at"
        assert found["ceiling"]["bound"] == "link"
        assert found["ceiling"]["least_s"] >= 2 * 2 / 3 * (10 << 20) / (50e6 / 8) * 0.8
        # And now two hosts that cannot reach each other, though both can be reached from here.
        lab.configure(1, f"ip route add unreachable {lab.addresses[2]}/32")
        program = (
            "import json, sys; from kvmpi.doctor import pairs; from kvmpi.doctor.finding import Surroundings\n"
            "from kvmpi.launchers import reach; from kvmpi.launchers.hosts import Host; import os\n"
            "found, _ = pairs.check(Surroundings(dict(os.environ), '0' * 16), [Host(h) for h in sys.argv[3:]],\n"
            "                       reach.ssh(sys.argv[1]), sys.argv[2])\n"
            "print(json.dumps([[f.check, f.level, f.seen] for f in found]))"
        )
        command = [sys.executable, "-c", program, f"{PRIVATE}/agent", lab.subnet, *lab.hosts]
        done = subprocess.run(
            lab.command_on(0, command), env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        problems = [seen for _, level, seen in json.loads(done.stdout) if level == "problem"]
        assert f"{lab.hosts[1]} -> {slow_host}: connect: No route to host" in problems, done.stdout
        assert len(problems) == 2, "there and back"


def test_what_many_hosts_have_found_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    hosts = [f"n{i:03}" for i in range(200)]
    findings = [Finding("machine", "ok", "12 checks, nothing to complain about", host=name) for name in hosts]
    findings += [
        Finding("swap", "warning", f"{i} GB", "slow", "turn it off", host=name) for i, name in enumerate(hosts)
    ]
    report.show(findings, None, (), "title")
    lines = capsys.readouterr().out.splitlines()
    text = " ".join(" ".join(lines).split())
    assert "ok machine 12 checks, nothing to complain about (n000, n001, n002 and 197 more)" in text
    assert "n007: swap 7 GB warning swap the same kind 192 times more; --json has all" in text
    assert "warning: swap (n000, n001, n002, n003, n004, n005, n006, n007 and 192 more)" in text
    assert "7 GB and 192 more like these slow To do: turn it off" in text
    assert "200 warnings" in text
    assert len(lines) < 40
