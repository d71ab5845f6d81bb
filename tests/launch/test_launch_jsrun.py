"""Inside a job of LSF with jsrun: what it is asked for, and real jobs by a program that stands in for it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_sites import PROGRAMS, TIMEOUT_S, Site, jsm_site
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import await_lines, command_line, environs_with
from test_launch_kill import needs_mpi

from kvmpi.benchmarks.netlab import NetLab
from kvmpi.config import client_bounds
from kvmpi.errors import ConfigError, UnsupportedError
from kvmpi.launchers import jsrun, mpirun, where
from kvmpi.launchers.hosts import Host

# ---- what is asked for


def test_options_in_jsruns_words() -> None:
    assert jsrun.parse(["--gpu_per_rs=1", "-c7", "-r 6", "-E=A=B"]) == (
        ("--gpu_per_rs", "1"), ("--cpu_per_rs", "7"), ("--rs_per_host", "6"), ("--env", "A=B"),
    )  # fmt: skip
    for word in ("--nrs=3", "-n3", "--stdio_stderr=x", "-g", "gpus", "--tasks_per_rs=0", "-rx", "--no_such=1"):
        with pytest.raises(ConfigError, match="--jsrun-option"):
            jsrun.parse([word])


@pytest.mark.parametrize(("slots", "workers", "servers", "options", "cores", "expected"), [
    ([42, 42], 12, 0, {"--rs_per_host": "6", "--cpu_per_rs": "7"}, 7, [6, 6]),
    ([42, 42], 8, 2, {}, 10, [4, 4]),           # a server on each
    ([42, 42], 2, 2, {}, 41, [1, 1]),
    ([42], 1, 2, {}, 40, [1]),
    ([42], 2, 2, {}, 20, [2]),                 # with 21 two would fit before the servers come
    ([42], 2, 0, {}, 21, [2]),
    ([4, 4], 5, 2, {}, 1, [3, 2]),
    ([4, 4], 4, 2, {"--rs_per_host": "2"}, 1, [2, 2]),
    ([4, 4], 6, 0, {"--tasks_per_rs": "3"}, 4, [3, 3]),
    ([42, 42], 4, 0, {"--rs_per_host": "2"}, 42 // 2, [2, 2]),
])  # fmt: skip
def test_cores_and_places(
    slots: list[int], workers: int, servers: int, options: dict[str, str], cores: int, expected: list[int]
) -> None:
    hosts = [Host(f"h{i}", count) for i, count in enumerate(slots)]
    layout, found = jsrun.place(hosts, [(0, workers)], servers, [], tuple(options.items()))
    assert [host.slots for host in layout.clients[0]] == expected
    assert found == cores


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 12), st.integers(0, 4), st.integers(1, 4))
def test_what_is_said_to_fit_fits_in_the_order_of_its_start(
    slots: list[int], workers: int, servers: int, clients: int
) -> None:
    """Steps are given to a first-fit of the cores, servers first, each on its host; nothing may have to wait."""
    hosts = [Host(f"h{i}", count) for i, count in enumerate(slots)]
    bounds = client_bounds(workers, min(clients, workers))
    taken = [sum(1 for k in range(servers) if k % len(slots) == len(slots) - 1 - i) for i in range(len(slots))]
    left = [had - used for had, used in zip(slots, taken, strict=True)]
    try:
        layout, cores = jsrun.place(hosts, bounds, servers, [], ())
    except ConfigError:
        assert min(left) < 0 or sum(left) < workers, "one core for each would have done"
        return
    assert [layout.servers.count(host.name) for host in hosts] == taken
    free = dict(zip([host.name for host in hosts], left, strict=True))
    for _ in range(workers):
        host = next(name for name, count in free.items() if count >= cores)
        free[host] -= cores
    assert [sum(host.slots for host in client) for client in layout.clients] == [end - first for first, end in bounds]


def test_clients_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"9 workers and 1 servers with --cpu_per_rs=2 do not fit .*\(a 8\)"):
        jsrun.place([Host("a", 8)], [(0, 9)], 1, [], (("--cpu_per_rs", "2"),))
    with pytest.raises(ConfigError, match=r"client 1 has 2 workers, and --tasks_per_rs=3 must"):
        jsrun.place([Host("a", 8)], [(0, 3), (3, 5)], 1, [], (("--tasks_per_rs", "3"),))


def test_who_is_started_by_jsrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("jsrun", "blaunch"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def find(launcher: str = "auto", **options: Any) -> Any:
        given = {"hostfile": "", "hosts": "", "server_hosts": "", "remote_shell": "true", "network": "lo", **options}
        environ = {"LSB_JOBID": "7", "PATH": str(tmp_path), "LSB_MCPU_HOSTS": f"{socket.gethostname()} 1 x1 8 x2 8"}
        environ |= given.pop("environ", {})
        return where.find(launcher=launcher, bounds=[(0, 4)], num_servers=1, environ=environ, **given)

    places = find()
    assert places.reach.kind == "jsrun"
    assert places.layout.names == ["x1", "x2"], "the first host only starts the job"
    assert (places.here, places.reach.is_apart) == ("", True)
    command = " ".join(places.reach.command("x2", ["program"]))
    assert "--exclude_hosts x1 " in command
    assert "--smpiargs off" in command
    assert command.endswith(" program")
    one = find(environ={"LSB_MCPU_HOSTS": f"{socket.gethostname()} 8"})
    assert (one.reach.kind, one.others) == ("jsrun", [socket.gethostname()]), "also on the only host"
    words = find(jsrun_options=["-g1", "-c2", "-a2", "-EA=1", "-EB=2", "-brs"]).reach.ranks(4)
    asked = " ".join(words)
    for option in ("--nrs 2 ", "--tasks_per_rs 2 ", "--cpu_per_rs 2 ", "--gpu_per_rs 1 ", "--env A=1 --env B=2"):
        assert option in asked
    assert asked.count("--cpu_per_rs") == 1
    worker = " ".join(find(jsrun_options=["-a2", "-c2", "-g1"]).reach.process("worker", "x1", ["program"]))
    for option in ("--nrs 1 ", "--tasks_per_rs 1 ", "--cpu_per_rs 2 ", "--gpu_per_rs 1 ", "--smpiargs off "):
        assert option in worker
    assert find(by_jsrun=False).reach.kind == "blaunch"
    assert find("local", network="") is None
    for words_of, options in (
        ("no jsrun starts", {"by_jsrun": False, "jsrun_options": ["-g1"]}),
        ("no job of LSF with a jsrun", {"by_jsrun": True, "environ": {"LSB_JOBID": ""}}),
        ("no job of LSF with a jsrun", {"by_jsrun": True, "hosts": "a,b"}),
    ):
        with pytest.raises(ConfigError, match=words_of):
            find(**options)


# ---- real jobs


@pytest.fixture(scope="module")
def lab() -> Iterator[NetLab]:
    try:
        with NetLab(3, link=None) as made:
            yield made
    except UnsupportedError as error:
        pytest.skip(str(error))


@pytest.fixture
def jsm(tmp_path: Path, lab: NetLab) -> Site:
    """A job of two hosts with four cores each, started on a third one."""
    return jsm_site(tmp_path, lab, mpirun.find(os.environ, 2).path)


def steps(site: Site) -> list[dict[str, Any]]:
    """What jsrun was asked for, and where it has put it."""
    return [json.loads(line) for line in (site.folder.parent / "jobs" / "steps").read_text().splitlines()]


@needs_mpi
def test_clients_servers_and_lone_workers(jsm: Site, tmp_path: Path) -> None:
    """Two ranks, a worker by itself and two servers; then a sum in ranks that a plain jsrun has started."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os\n"
        + (PROGRAMS / "sum_on_hosts.py").read_text().replace('"got"', 'os.environ["CUDA_VISIBLE_DEVICES"]')
    )
    status, out, err = jsm.run("-n3", "-c2", "-s2", "--jsrun-option=-g1", "--jsrun-option=-r1", str(program))
    assert status == 0, out + err
    assert jsm.lab is not None
    _, first, second = jsm.lab.hosts
    told = sorted(line.partition("] ")[::2] for line in out.splitlines())
    # A set of the client on each host, with its device; which step comes first, and gets the first device, is open.
    ranks = [text.split() for label, text in told if label == "[client 0"]
    assert sorted(host for host, _, _ in ranks) == sorted((first, second))
    (alone,) = [text.split() for label, text in told if label == "[worker 2"]
    assert alone[0] in (first, second)
    assert {total for _, _, total in (*ranks, alone)} == {"6.0"}
    devices = [(host, device) for host, device, _ in (*ranks, alone)]
    assert len(set(devices)) == 3
    assert {device for _, device in devices} == {"0", "1"}
    placed = steps(jsm)
    assert sorted(step["hosts"] for step in placed if "--exclude_hosts" in step["options"]) == sorted(
        [[first], [second]]
    )
    (client,) = [step["options"] for step in placed if "--smpiargs" not in step["options"]]
    assert (client["--nrs"], client["--gpu_per_rs"], client["--rs_per_host"]) == ("2", "1", "1")
    assert int(client["--cpu_per_rs"]) >= 1
    jsm.assert_nothing_is_left()

    program.write_text(
        "import kvmpi, numpy as np, os\n"
        "with kvmpi.create('mpi') as kv:\n    x = np.full(3, kv.rank + 1, 'f4'); kv.init('w', x); kv.pushpull('w', x)\n"
        "    print(kv.num_workers, x[0], os.environ['JSM_NAMESPACE_RANK'] == str(kv.rank))\n"
    )
    plain = subprocess.run(
        jsm.on(["jsrun", "-n", "4", "-a", "1", "-c", "1", "-r", "2", "-d", "packed", sys.executable, str(program)]),
        env=jsm.env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert plain.stdout.splitlines() == ["4 10.0 True"] * 4, plain.stdout + plain.stderr


#: What stands on the command line of whom; the last such process is killed.
VICTIMS = {
    "jsrun of a client": "jsrun --nrs 2",
    "jsrun of a server": "--exclude_hosts",
    "what starts a rank": "rank_exec.py 0 0 ",
    "a rank": "rank_main.py",
    "what starts a worker": "remote_exec.py",
    "the launcher": "-m kvmpi run",
}


@needs_mpi
@pytest.mark.parametrize("victim", list(VICTIMS))
def test_kill_9_leaves_nothing(victim: str, jsm: Site) -> None:
    job = jsm.start("-n3", "-c2", "-s1", str(PROGRAMS / "stuck.py"))
    try:
        await_lines(job, 3, "stuck", TIMEOUT_S)
        job_id = jsm.job_id()
        assert jsm.files_of(job_id), "there is something to be left"
        lines_of = {pid: command_line(pid) for pid in environs_with(jsm.mark)}
        fitting = sorted(pid for pid, line in lines_of.items() if VICTIMS[victim] in line and "/agent" not in line)
        os.kill(job.pid if victim == "the launcher" else fitting[-1], signal.SIGKILL)
        _, err = job.communicate(timeout=TIMEOUT_S)
        assert job.returncode not in (0, None), err
        jsm.assert_nothing_is_left(job_id=job_id)
    finally:
        job.kill()
        job.wait()


def test_a_dry_run_says_what_jsrun_would_be_asked(jsm: Site) -> None:
    status, out, err = jsm.run("--dry-run", "-n3", "-c2", "-s1", "--jsrun-option=-g2", str(PROGRAMS / "stuck.py"))
    assert status == 0, err
    lines = out.splitlines()
    (server,) = [line for line in lines if line.startswith("# jsrun") and "--exclude_hosts" in line]
    assert "--cpu_per_rs 1 " in server
    (worker,) = [line for line in lines if line.startswith("# jsrun") and "--exclude_hosts" not in line]
    assert "--gpu_per_rs 2 " in worker
    (client,) = [line for line in lines if " jsrun --nrs 2 " in line]
    assert "--gpu_per_rs 2 " in client
    assert "rank_exec.py 0 0 JOB_DIR " in client
    assert not (jsm.folder.parent / "jobs" / "steps").exists()
