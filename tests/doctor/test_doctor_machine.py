"""Checks of a host and of a shell: each is shown its fault, in surroundings that are made for it, and a sound host."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import HANGS_S

from kvmpi import machine as this_machine
from kvmpi.doctor import attach, command, cores, machine, network, pairs, settings
from kvmpi.doctor.finding import Surroundings
from kvmpi.launchers import watchdog
from kvmpi.launchers.hosts import Host

MIB = 1 << 20


def at(
    root: Path, environ: Mapping[str, str] | None = None, files: Mapping[str, str] | None = None, **more: Any
) -> Any:
    """Surroundings with these files below ``root``."""
    for name, text in (files or {}).items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Surroundings(dict(environ or {}), root=str(root), temporary=str(root / "tmp"), **more)


def disk(free: int, flags: int = 0) -> Any:
    return lambda path: SimpleNamespace(f_bavail=free // 4096, f_blocks=2 * free // 4096, f_frsize=4096, f_flag=flags)


def test_another_kvmpi_on_path(tmp_path: Path) -> None:
    other = tmp_path / "kvmpi"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    found = machine.python(at(tmp_path, {"PATH": str(tmp_path)}))
    assert found.level == "warning"
    assert str(other) in found.means
    assert machine.python(at(tmp_path, {"PATH": "/nowhere"})).level == "ok"


def test_sources_in_the_place_of_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kvmpi").mkdir()
    assert machine.python(at(tmp_path, {"PATH": "/nowhere"})).level == "ok"
    (tmp_path / "kvmpi" / "__init__.py").touch()
    found = machine.python(at(tmp_path, {"PATH": "/nowhere"}))
    assert found.level == "warning"
    assert f"import the sources in it, {tmp_path}/kvmpi" in found.means
    (tmp_path / "kvmpi" / "__init__.py").unlink()
    (tmp_path / "kvmpi" / "__init__.py").symlink_to(machine.kvmpi.__file__)  # the tree of an editable installation
    assert machine.python(at(tmp_path, {"PATH": "/nowhere"})).level == "ok"


def test_packages_where_kvmpi_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sources are on PYTHONPATH."""

    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    assert machine.packages(at(tmp_path)).level == "ok"


def test_packages_that_are_missing_old_or_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "msgspec.py").write_text("raise ImportError('built for another Python')")
    found = machine.packages(at(tmp_path, {"PYTHONPATH": str(tmp_path)}))
    assert found.level == "problem"
    assert "built for another Python" in found.seen
    monkeypatch.setattr(metadata, "requires", lambda name: ["numpy>=99.1", "no-such>=1.0", "torch>=99; extra == 'x'"])
    found = machine.packages(at(tmp_path))
    assert found.level == "problem"
    assert "is older than 99.1; no-such is missing" in found.seen
    assert "torch" not in found.seen


@pytest.mark.parametrize(("free", "level"), [(31 * MIB, "problem"), (64 * MIB, "warning"), (512 * MIB, "ok")])
def test_shared_memory_that_is_too_small(
    free: int, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", disk(free))
    found = machine.shared_memory(at(tmp_path))
    assert found.level == level
    assert found.facts["free_bytes"] == free
    assert ("remount" in found.do) == (level != "ok")


def test_no_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for platform, level in (("linux", "warning"), ("darwin", "skipped")):
        monkeypatch.setattr(sys, "platform", platform)
        found = machine.shared_memory(at(tmp_path))
        assert (found.level, "No such file or directory" in found.seen) == (level, True)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "statvfs", disk(1000 * MIB, os.ST_RDONLY))
    found = machine.shared_memory(at(tmp_path))
    assert (found.level, "it can only be read" in found.seen, "DataLoaders" in found.means) == ("warning", True, True)


def test_leftovers_of_dead_jobs_and_of_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dead, living, young, embedded, used = "0" * 15 + "1", "0" * 15 + "2", "0" * 15 + "3", "abcd1234", "efgh5678"
    held = "0" * 15 + "4"  # by a launcher that is not seen in /proc
    hosted, in_use = "keys1234", "keys5678"  # of workers that have started servers on other hosts only
    here = at(tmp_path, files={
        f"dev/shm/kvmpi-{dead}/segment": "x" * 1000,
        f"tmp/kvmpi-{dead}-client-0-1/keys": "",
        f"dev/shm/kvmpi-{living}/segment": "",
        f"tmp/kvmpi-{young}/keys": "",
        f"tmp/kvmpi-{held}/keys": "",
        f"tmp/kvmpi-{hosted}/keys": "",
        f"tmp/kvmpi-{in_use}/keys": "",
        f"tmp/kvmpi-{embedded}/server-0": "",
        f"tmp/kvmpi-{used}/server-0": "",
        "tmp/kvmpi-mystuff/notes": "",
        "tmp/kvmpi-6fe0ab/file": "",
        "tmp/kvmpi-bench-dead_123/0/keys": "",
        "dev/shm/kvmpi-bench-dead_shm/segment": "",
        "tmp/kvmpi-lab-dead1234/scenario.json": "",
        "tmp/kvmpi-bench-running1/0/keys": "",
        "tmp/kvmpi-lab-running2/scenario.json": "",
        "proc/78/cmdline": "python\0watchdog.py\0/tmp/kvmpi-bench-running1\0",
        "proc/79/environ": "A=/tmp/kvmpi-lab-running2/x\0",
        "proc/net/unix": f"0: 2 1 1 {tmp_path}/tmp/kvmpi-{used}/server-0\n",
        "proc/77/environ": f"A=b\0KVMPI_JOB_ID={living}\0",
        "dev/shm/ucx_shm_posix_7f": "x",
        "dev/shm/sm_segment.host.0.7f.0": "x",
        "dev/shm/vader_segment.host.0.7f.0": "x",
        "dev/shm/somebody": "x",
    })  # fmt: skip
    for name, mode in (("abandon1", 0o700), ("mystuff1", 0o755)):
        (tmp_path / f"tmp/kvmpi-{name}").mkdir()
        (tmp_path / f"tmp/kvmpi-{name}").chmod(mode)
    for path in (tmp_path / "dev/shm").iterdir():
        os.utime(path, (0, 0))
    for path in (tmp_path / "tmp").iterdir():
        if young not in path.name:
            os.utime(path, (0, 0))
    expected = [
        f"dev/shm/kvmpi-{dead}", "dev/shm/ucx_shm_posix_7f",
        "dev/shm/sm_segment.host.0.7f.0", "dev/shm/vader_segment.host.0.7f.0",
        f"tmp/kvmpi-{embedded}", f"tmp/kvmpi-{hosted}", f"tmp/kvmpi-{dead}-client-0-1",
        "tmp/kvmpi-bench-dead_123", "dev/shm/kvmpi-bench-dead_shm", "tmp/kvmpi-lab-dead1234", "tmp/kvmpi-abandon1",
    ]  # fmt: skip
    locks = [watchdog.hold(str(tmp_path / f"tmp/kvmpi-{name}")) for name in (held, in_use)]
    found = machine.leftovers(here)
    assert found.level == "warning"
    assert found.facts["paths"] == sorted(str(tmp_path / name) for name in expected)
    assert found.facts["bytes"] >= 1000
    assert "kvmpi doctor --clean" in found.do
    assert machine.find_leftovers(here, young=True) == [str(tmp_path / f"tmp/kvmpi-{young}")]
    assert machine.remove_leftovers(here) == found.facts["paths"]
    assert machine.leftovers(here).level == "ok"
    assert command._clean(here) == 0
    assert capsys.readouterr().out.startswith(f"kept {tmp_path}/tmp/kvmpi-{young}: it is less than a minute old")
    for lock in locks:
        os.close(lock)
    assert machine.leftovers(here).facts["paths"] == [str(tmp_path / f"tmp/kvmpi-{name}") for name in (held, in_use)]
    assert (tmp_path / "tmp/kvmpi-mystuff/notes").exists()
    assert (tmp_path / f"dev/shm/kvmpi-{living}/segment").exists()


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_NOFILE: (256, 512), resource.RLIMIT_MEMLOCK: (64 << 10, 64 << 10)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    assert machine.open_files(at(tmp_path)).level == "warning"
    assert machine.locked_memory(at(tmp_path)).level == "ok"
    card = at(tmp_path, files={"sys/class/infiniband/mlx5_0/x": ""})
    assert machine.locked_memory(card).level == "warning"
    assert settings.forks(card).level == ("warning" if sys.version_info < (3, 14) else "ok")
    limits[resource.RLIMIT_NOFILE] = (1024, resource.RLIM_INFINITY)
    assert machine.open_files(at(tmp_path)).level == "ok"


@pytest.mark.parametrize("names", [("0::/pod/box", "sys/fs/cgroup"), ("7:pids:/pod/box", "sys/fs/cgroup/pids")])
def test_a_container_with_few_processes(
    names: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    line, folder = names
    files = {"proc/self/cgroup": f"{line}\n", f"{folder}/pod/pids.max": "max", f"{folder}/pod/pids.current": "999"}
    assert machine.processes(at(tmp_path, files=files)).level == "ok"
    for limit, workers, level in ((120, 2, "ok"), (100, 2, "warning"), (120, 8, "problem"), (20, 1, "problem")):
        files |= {f"{folder}/pod/box/pids.max": str(limit), f"{folder}/pod/box/pids.current": "30"}
        found = machine.processes(at(tmp_path, files=files, workers=workers))
        assert (found.level, found.facts["left"]) == (level, limit - 30)
        assert f"room for {max(0, limit - 30)} more processes and threads, by pids.max of this container" == found.seen
        assert ("--pids-limit" in found.do) == (level != "ok")


def test_a_user_with_few_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", {resource.RLIMIT_NPROC: (60, 60)}.__getitem__)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    files = {f"proc/{pid}/status": f"Name:\tx\nUid:\t{user}\t0\t0\t0\nThreads:\t{threads}\n"
             for pid, user, threads in ((1, 0, 500), (7, 12345, 20), (8, 12345, 3))}  # fmt: skip
    for user, level in ((12345, "problem"), (0, "ok")):  # it does not bind root
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        found = machine.processes(at(tmp_path, files=files))
        assert found.level == level
        assert (found.seen == "room for 37 more processes and threads, by ulimit -u") == (level == "problem")


def test_temporary_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = at(tmp_path, files={"tmp/x": ""})
    assert machine.temporary(here).level == "ok"
    assert machine.temporary(at(tmp_path, {"TMPDIR": "/no/such"})).level == "problem"
    monkeypatch.setattr(os, "statvfs", disk(1 * MIB))
    assert machine.temporary(here).level == "problem"
    monkeypatch.setattr(os, "statvfs", disk(1000 * MIB, os.ST_NOEXEC))
    assert "noexec" in machine.temporary(here).seen
    monkeypatch.chdir(tmp_path / "tmp")  # which Python takes in the end
    found = machine.temporary(here)
    assert (found.level, "set TMPDIR" in found.do) == ("warning", True)
    assert "neither /tmp nor /var/tmp can be written" in found.seen


def test_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_version", lambda name: "")
    assert machine.gpu(at(tmp_path)).level == "skipped"
    card = at(
        tmp_path, {"PYTHONPATH": str(tmp_path)}, {"dev/nvidia0": "", "cupy.py": "raise ImportError('no libcuda')"}
    )
    assert "no CuPy" in machine.gpu(card).seen
    monkeypatch.setattr(machine, "_version", lambda name: "13.0" if name == "cupy-cuda12x" else "")
    found = machine.gpu(card)
    assert found.level == "warning"
    assert "no libcuda" in found.seen


# ---- cores


@pytest.mark.parametrize("files", [
    {"proc/self/cgroup": "0::/pod/box\n", "sys/fs/cgroup/pod/cpu.max": "150000 100000",
     "sys/fs/cgroup/pod/box/cpu.max": "max 100000"},
    {"proc/self/cgroup": "4:cpu,cpuacct:/box\n", "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "75000",
     "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "50000",
     "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "50000"},
], ids=["v2", "v1"])  # fmt: skip
def test_a_container_with_less_than_it_shows(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    here = at(tmp_path, files=files, workers=1)
    assert this_machine.quota_cores(here.read) == 1.5
    assert cores.cores(here).level == "ok"
    assert cores.threads(here).facts["threads"] == 1, "kvmpi run knows the limit"
    found = cores.threads(at(tmp_path, {"OMP_NUM_THREADS": "2"}, files, workers=1))
    assert found.level == "warning"
    assert found.do == "export OMP_NUM_THREADS=1"
    assert cores.cores(at(tmp_path, files=files, workers=2)).level == "warning"


def test_a_process_knows_the_quota_of_its_real_group() -> None:
    group = Path(f"/sys/fs/cgroup/cpu/kvmpi-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text(str(int((group / "cpu.cfs_period_us").read_text()) * 5 // 4))
    except OSError as error:
        pytest.skip(f"no control group of version 1 can be made here: {error}")
    try:
        asks = "from kvmpi.machine import quota_cores as q, num_cores as n; from kvmpi.launchers import cores as c; "
        program = f"open('{group}/cgroup.procs', 'w').write('0'); {asks} print(q(), n(), c.usable())"
        found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANGS_S)
        assert found.stdout == "1.25 1 1\n", found
    finally:
        group.rmdir()


def test_threads_and_binding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for given, workers, level in (("", 4, "ok"), ("2", 4, "ok"), ("4", 4, "warning"), ("all", 1, "warning")):
        environ = {"OMP_NUM_THREADS": given} if given else {}
        assert cores.threads(at(tmp_path, environ, workers=workers)).level == level, given
    assert cores.threads(at(tmp_path, workers=16)).level == "ok", "one thread each: more workers are another matter"
    assert cores.cores(at(tmp_path, workers=16)).level == "warning"
    assert cores.binding(at(tmp_path, {"OMP_PROC_BIND": "close"})).do == "unset OMP_PROC_BIND"
    assert cores.binding(at(tmp_path, {"OMP_PROC_BIND": "false"})).level == "ok"
    assert cores.binding(at(tmp_path, {"PRTE_MCA_hwloc_default_binding_policy": "core"})).level == "warning"


def test_memory_and_load(tmp_path: Path) -> None:
    here = at(tmp_path, files={
        "proc/meminfo": "MemTotal: 64000000 kB\nMemAvailable: 8000000 kB\n", "proc/self/cgroup": "0::/box\n",
        "sys/fs/cgroup/box/memory.max": str(512 * MIB), "proc/loadavg": "99.5 1 1 1/2 3\n",
    })  # fmt: skip
    assert cores.memory(here).level == "warning"
    assert cores.memory(here).facts == {"free_bytes": 8_192_000_000, "limit_bytes": 512 * MIB}
    assert cores.load(here).level == "warning"
    (tmp_path / "sys/fs/cgroup/box/memory.max").write_text("max")
    (tmp_path / "proc/loadavg").write_text("0.1 1 1 1/2 3\n")
    assert cores.memory(here).level == cores.load(here).level == "ok"


@pytest.mark.parametrize(
    ("line", "folder", "limit", "used", "prefix"),
    [
        ("0::/box", "sys/fs/cgroup/box", "memory.max", "memory.current", ""),
        ("3:memory:/box", "sys/fs/cgroup/memory/box", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ],
)
def test_memory_that_others_in_the_container_have_taken(
    line: str, folder: str, limit: str, used: str, prefix: str, tmp_path: Path
) -> None:
    for cached_mib, level in ((1000, "ok"), (100, "warning")):
        here = at(tmp_path, files={
            "proc/meminfo": "MemTotal: 64000000 kB\nMemAvailable: 8000000 kB\n", "proc/self/cgroup": f"{line}\n",
            f"{folder}/{limit}": str(4096 * MIB), f"{folder}/{used}": str(3584 * MIB),
            f"{folder}/memory.stat": f"anon 5\n{prefix}inactive_file {(cached_mib - 24) * MIB}\n"
            f"{prefix}active_file {24 * MIB}\n",
        })  # fmt: skip
        found = cores.memory(here)
        assert found.level == level
        assert f"a limit of 4.0 GiB for this container, of which {(512 + cached_mib) / 1024:.1f} GiB" in found.seen


def test_memory_of_others_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(
        "import sys\nif sys.argv[1] == 'show':\n    print('1 2', flush=True); sys.stdin.read()\n"
        "elif sys.argv[2:] == ['1', '2']:\n    print('Operation not permitted'); sys.exit(3)\n"
    )
    monkeypatch.setattr(attach, "PROGRAM", (str(stand_in),))
    found = attach.cross_memory(at(tmp_path, files={"proc/sys/kernel/yama/ptrace_scope": "2\n"}))
    assert found.level == "warning"
    assert "Operation not permitted" in found.seen
    assert "ptrace_scope is 2" in found.seen
    assert "sysctl kernel.yama.ptrace_scope=1" in found.do
    stand_in.write_text("import time; time.sleep(100)")
    assert "said nothing in time" in attach.cross_memory(at(tmp_path, deadline_s=0.3)).seen


# ---- the shell


@pytest.mark.parametrize(("environ", "level", "words"), [
    ({}, "ok", "no KVMPI_"),
    ({"KVMPI_TIMEOUT": "3"}, "problem", "unknown setting KVMPI_TIMEOUT"),
    ({"KVMPI_TIMEOUT_S": "soon"}, "problem", "KVMPI_TIMEOUT_S='soon'"),
    ({"KVMPI_TUNING": "/no/such"}, "problem", "KVMPI_TUNING=/no/such"),
    ({"KVMPI_ROLE": "worker", "KVMPI_RANK": "0"}, "warning", "KVMPI_RANK, KVMPI_ROLE set by hand"),
    ({"KVMPI_ENGINE": "naive"}, "warning", "KVMPI_ENGINE=naive"),
    ({"KVMPI_TIMEOUT_S": "30"}, "ok", "KVMPI_TIMEOUT_S=30"),
])  # fmt: skip
def test_settings(environ: dict[str, str], level: str, words: str, tmp_path: Path) -> None:
    found = settings.settings(at(tmp_path, environ))
    assert (found.level, words in found.seen) == (level, True), found
    assert "known settings" not in found.seen


@pytest.mark.parametrize(("environ", "level", "words"), [
    ({}, "ok", "none"),
    ({"OMPI_COMM_WORLD_RANK": "0"}, "warning", "is a rank of an MPI job"),
    ({"OMPI_MCA_btl": "self,tcp"}, "warning", "over the network instead of shared memory"),
    ({"OMPI_MCA_btl": "^sm"}, "warning", "over the network instead of shared memory"),
    ({"OMPI_MCA_btl": "^self"}, "warning", "does not start"),
    ({"OMPI_MCA_btl": "self,sm,tcp"}, "ok", "OMPI_MCA_btl"),
    ({"OMPI_MCA_mpi_yield_when_idle": "1"}, "warning", "twice as long"),
    ({"OMPI_MCA_btl_tcp_if_include": "ib0"}, "warning", "no interface ib0"),
    ({"OMPI_MCA_btl_tcp_if_include": "eth0"}, "ok", "eth0"),
    ({"UCX_TLS": "tcp"}, "ok", "UCX_TLS=tcp"),
])  # fmt: skip
def test_variables_of_mpi(environ: dict[str, str], level: str, words: str, tmp_path: Path) -> None:
    found = settings.mpi_variables(at(tmp_path, environ, {"sys/class/net/eth0/speed": "1000"}))
    assert (found.level, words in found.seen) == (level, True), found


def test_proxies(tmp_path: Path) -> None:
    assert settings.proxies(at(tmp_path)).level == "ok"
    assert settings.proxies(at(tmp_path, {"HTTP_PROXY": "http://p:3128"})).level == "warning"
    assert settings.proxies(at(tmp_path, {"http_proxy": "http://p", "no_proxy": "localhost"})).level == "ok"


def test_batch_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(name: str, text: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    slurm = {**path, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}
    empty = {"PATH": str(tmp_path)}
    assert settings.batch(at(tmp_path, empty)).level == "skipped"
    monkeypatch.setenv("PATH", str(tmp_path))
    found = settings.batch(at(tmp_path, {**slurm, **empty}))
    assert (found.level, "srun was not found" in found.seen) == ("problem", True)
    monkeypatch.setenv("PATH", path["PATH"])
    program("srun", "echo slurm 20.02.1")
    assert "20.11" in settings.batch(at(tmp_path, slurm)).means
    program("srun", "echo slurm-wlm 23.11.4")
    found = settings.batch(at(tmp_path, slurm))
    assert (found.level, "n1:2, n2:2" in found.seen) == ("ok", True)
    assert settings.batch(at(tmp_path, {**slurm, "SLURM_TASKS_PER_NODE": "2"})).level == "problem"
    program("sbatch", "true")
    program("scontrol", "echo 'Slurmctld(primary) at x is DOWN'")
    assert "does not answer" in settings.batch(at(tmp_path, path)).seen
    program("scontrol", "echo 'Slurmctld(primary) at x is UP'")
    assert settings.batch(at(tmp_path, path)).level == "ok"


# ---- the network of this host


def test_addresses_by_which_others_reach_a_host() -> None:
    """Those of IPv4, and then those of IPv6 that are in use, and are not of one link: the lasting ones first."""
    lines = [
        f"2001:0db8{':0000' * 5}:0001 03 40 00 01 eth0", f"fd00{':0000' * 6}:0002 02 40 00 80 ib0",
        f"fe80{':0000' * 6}:0003 02 40 20 80 ib0", f"fd00{':0000' * 6}:0004 02 40 00 c8 ib0",
        f"fd00{':0000' * 6}:0005 03 40 00 20 eth0", f"fd00{':0000' * 6}:0006 03 40 00 80 eth0",
    ]  # fmt: skip
    table = "\n".join(line.replace(":", "") for line in lines)
    found = this_machine.addresses(lambda path: table if path == "/proc/net/if_inet6" else "")
    assert ("lo", "127.0.0.1") in found
    assert found[-3:] == [("ib0", "fd00::2"), ("eth0", "fd00::6"), ("eth0", "2001:db8::1")]
    assert not [address for _, address in found[:-3] if ":" in address]
    assert this_machine.addresses_of("localhost")[0] == "127.0.0.1"


def test_host_names_interfaces_and_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert network.interface(at(tmp_path), "no0").level == "problem"
    assert network.interface(at(tmp_path), "lo").facts["address"] == "127.0.0.1"
    assert network.interface(at(tmp_path), "", "127.0.0.1").facts["interface"] == "lo", (
        "the way to those that are meant"
    )
    others = [Host("localhost"), Host("me@n2"), Host("n3")]
    assert [pairs.first_other(at(tmp_path), hosts) for hosts in (others, others[:1], [])] == ["n2", "", ""]
    small = at(tmp_path, files={"proc/sys/net/ipv4/ip_local_port_range": "40000\t40100\n"})
    assert network.ports(small, "lo").level == "warning"
    assert network.ports(at(tmp_path / "other"), "lo").level == "ok"

    def refuse(*_: object, **__: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(network, "addresses_of", refuse)
    assert network.name(at(tmp_path)).level == "warning"
    monkeypatch.setattr(network.socket, "create_connection", refuse)
    found = network.ports(at(tmp_path), "lo")
    assert (found.level, "Operation not permitted" in found.seen, "firewall" in found.do) == ("problem", True, True)

    def find_it_down(*_: object, **__: object) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(network.socket, "create_connection", find_it_down)
    assert network.ports(at(tmp_path), "lo").do.endswith("ip link set lo up")
