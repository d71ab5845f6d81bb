"""Servers and clients as jobs of a batch system: a real Slurm on this machine, and programs that stand in for LSF."""

from __future__ import annotations

import ast
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from batch_sites import PROGRAMS, TIMEOUT_S, Site
from jobs import wait_for
from test_launch_kill import needs_mpi

from kvmpi.launchers import mpirun
from kvmpi.launchers.batch import ENDED, RUNS, SYSTEMS, WAITS, Lsf, Resources, Slurm

ALL = Resources(4, 1, "long", "physics", "1:00", True, ("--mem=4G",))


# ---- what they understand and say


def test_what_slurm_is_told() -> None:
    words = Slurm().submit("name", "/x y/s.sh", "/o", "/e", ALL)
    assert words[0] == "sbatch"
    assert words[-1] == "/x y/s.sh"
    for option in ("--ntasks=4", "--nodes=1", "--partition=long", "--account=physics", "--time=1:00", "--requeue"):
        assert option in words
    assert "--mem=4G" in words
    assert {"--nodes=3", "--ntasks=8", "--ntasks-per-node=3"} <= set(
        Slurm().submit("n", "s", "o", "e", Resources(8, 3))
    )
    assert not [w for w in Slurm().submit("n", "s", "o", "e", Resources()) if w.startswith(("--part", "--acc", "--ti"))]
    words = Slurm().submit("n", "/p%j/s", "/p%j/o", "/p%j/e", Resources())
    assert {"--output=/p%%j/o", "--error=/p%%j/e", "/p%j/s"} <= set(words)
    assert Slurm().number("123;cluster\n") == "123"
    with pytest.raises(ValueError, match="Batch job refused"):
        Slurm().number("Batch job refused")


def test_what_lsf_is_told() -> None:
    words = Lsf().submit("name", "/x y/s.sh", "/o", "/e", ALL)
    text = " ".join(words)
    for option in ("-J name", "-n 4", "-R span[hosts=1]", "-q long", "-P physics", "-W 1:00", " -r ", "--mem=4G"):
        assert option in text
    assert "span[ptile=3]" in Lsf().submit("n", "s", "o", "e", Resources(8, 3))
    assert words[-1] == "'/x y/s.sh'", "bsub gives it to a shell"
    assert Lsf().number("Job <77> is submitted to default queue <normal>.") == "77"
    with pytest.raises(ValueError, match="No such queue"):
        Lsf().number("No such queue")


@pytest.mark.parametrize(("system", "word", "state"), [
    ("slurm", "PENDING", WAITS), ("slurm", "RUNNING", RUNS), ("slurm", "COMPLETED", ENDED), ("slurm", "UNKNOWN", ENDED),
    ("slurm", "NODE_FAIL", ENDED), ("slurm", "REQUEUED", WAITS), ("slurm", "COMPLETING", RUNS),
    ("lsf", "PEND", WAITS), ("lsf", "RUN", RUNS), ("lsf", "SSUSP", RUNS), ("lsf", "DONE", ENDED),
    ("lsf", "EXIT", ENDED), ("lsf", "UNKNOWN", ENDED),
])  # fmt: skip
def test_states(system: str, word: str, state: str) -> None:
    assert SYSTEMS[system].state(word) == state


# ---- real jobs


def test_every_server_and_client_is_a_job(site: Site, tmp_path: Path) -> None:
    status, out, err = site.run("-n3", "-c2", "-s2", "--queue", "long", str(PROGRAMS / "sum_on_hosts.py"))
    assert status == 0, out + err
    names = {socket.gethostname()} if site.lab is None else set(site.lab.hosts)
    told = [line.partition("] ")[2].split() for line in out.splitlines()]
    assert [words[1:] for words in told] == [["got", "6.0"]] * 3
    assert {words[0] for words in told} <= names
    site.assert_nothing_is_left()
    if site.name == "lsf":
        asked = [ast.literal_eval(file.read_text())[0] for file in sorted((tmp_path / "jobs").glob("*/words"))]
        assert sorted((a["-J"].split("-", 2)[2], a["-n"], a["-q"]) for a in asked) == [
            ("client-0", "2", "long"), ("client-1", "1", "long"), ("server-0", "1", "long"), ("server-1", "1", "long"),
        ]  # fmt: skip


@pytest.mark.parametrize("end", ["interrupt", "launcher", "cancelled"])
def test_however_it_ends_no_job_is_left(site: Site, end: str, tmp_path: Path) -> None:
    job = site.start("-n2", "-c2", "-s1", str(PROGRAMS / "sum_on_hosts.py"), "wait")
    assert job.stdout is not None
    assert all("got 3.0" in job.stdout.readline() for _ in range(2))
    if end == "cancelled":
        if site.name == "slurm":
            words = ["squeue", "--noheader", "--format=%i %j"]
            listed = subprocess.run(site.on(words), env=site.env, capture_output=True, text=True, check=True).stdout
            (number,) = [line.split()[0] for line in listed.splitlines() if line.endswith("client-1")]
            subprocess.run(site.on(["scancel", number]), env=site.env, check=True)
        else:
            (number,) = [f.parent.name for f in (tmp_path / "jobs").glob("*/words") if "client-1" in f.read_text()]
            subprocess.run(["bkill", number], env=site.env, check=True, stdout=subprocess.DEVNULL)
    else:
        job.send_signal(signal.SIGINT if end == "interrupt" else signal.SIGKILL)
    _, err = job.communicate(timeout=TIMEOUT_S)
    if end == "interrupt":
        assert job.returncode == 130
    elif end == "cancelled":
        assert job.returncode in (130, 143), err
        assert "worker 1 (client 1)" in err
    site.assert_nothing_is_left()


def test_a_failure_in_a_job_is_the_failure_of_all(site: Site, tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text("import sys\nprint('no good', file=sys.stderr)\nsys.exit(3)\n")
    status, _, err = site.run("-n1", str(program))
    assert status == 3
    assert "[worker 0] no good" in err
    assert "worker 0 (client 0) on client-0 ended with exit status 3" in err
    site.assert_nothing_is_left()


def test_a_job_that_is_refused_says_why(lsf: Site) -> None:
    status, _, err = lsf.run("-n1", "--queue", "nosuch", str(PROGRAMS / "sum_on_hosts.py"))
    assert status == 1
    assert "bsub refuses with status 255: nosuch: No such queue" in err
    lsf.assert_nothing_is_left()


def test_a_job_that_waits_is_told_and_can_be_given_up(lsf: Site) -> None:
    lsf.env["LSF_WAIT_S"] = "for ever"
    job = lsf.start("-n1", str(PROGRAMS / "sum_on_hosts.py"))
    assert job.stderr is not None
    assert "client-0 waits in the queue (PEND)" in job.stderr.readline()
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 130
    lsf.assert_nothing_is_left()


def test_who_waited_in_vain_for_a_job_in_the_queue_is_told_so(lsf: Site) -> None:
    lsf.env |= {"LSF_HELD": "client-1", "KVMPI_TIMEOUT_S": "4"}
    status, _, err = lsf.run("-n2", "-c2", "-s1", str(PROGRAMS / "sum_on_hosts.py"))
    assert status == 1
    assert "kvmpi run: worker 1 still waited in the queue; others wait KVMPI_TIMEOUT_S for them" in err
    lsf.assert_nothing_is_left()


def test_inside_an_allocation_of_slurm(slurm: Site) -> None:
    command = ["salloc", "-Q", "-N3", "--ntasks-per-node=1", sys.executable, "-m", "kvmpi", "run"]
    command += ["--interface", slurm.network, "-n3", "-c3", "-s2", str(PROGRAMS / "sum_on_hosts.py")]
    done = subprocess.run(
        slurm.on(command), env=slurm.env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line.split("]")[0] for line in done.stdout.splitlines()) == [f"[worker {i}" for i in range(3)]
    assert done.stdout.count("got 6.0") == 3
    assert done.stderr == ""
    slurm.assert_nothing_is_left()


def test_a_client_on_several_nodes(slurm: Site) -> None:
    """Which nodes they are, only the job of the client learns."""
    if slurm.lab is None:
        pytest.skip("needs nodes with names of their own")
    status, out, err = slurm.run("-n4", "-c1", "-s1", "--client-hosts", "2", str(PROGRAMS / "sum_on_hosts.py"))
    assert status == 0, out + err
    told = sorted(line.split()[-3] for line in out.splitlines() if line.endswith("got 10.0"))
    assert len(told) == 4, out
    assert len(set(told)) == 2
    assert told[::2] == told[1::2]
    assert set(told) <= set(slurm.lab.hosts)
    slurm.assert_nothing_is_left()


def test_servers_on_nodes_of_their_own(slurm: Site) -> None:
    """A heterogeneous job: what is asked for apart is for the servers."""
    if slurm.lab is None:
        pytest.skip("needs nodes with names of their own")
    words = ["--interface", slurm.network, "-n2", "-c1", "-s1", str(PROGRAMS / "sum_on_hosts.py")]
    script = f"{sys.executable} -m kvmpi run --dry-run {' '.join(words)} >&2; exec {sys.executable} -m kvmpi run $@"
    command = ["salloc", "-Q", "-N2", "--ntasks-per-node=1", ":", "-N1", "-n1", "sh", "-c", script, "sh", *words]
    done = subprocess.run(
        slurm.on(command), env=slurm.env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    workers = {line.split()[-3] for line in done.stdout.splitlines() if line.endswith("got 3.0")}
    assert len(workers) == 2, done.stdout
    (elsewhere,) = set(slurm.lab.hosts) - workers
    assert f"# server 0, on {elsewhere};" in done.stderr
    assert f"--het-group=1 --nodelist={elsewhere}" in done.stderr
    slurm.assert_nothing_is_left()


def test_inside_a_job_of_lsf_and_clients_of_several_hosts(lsf_on_hosts: Site) -> None:
    """One job of three hosts, in which blaunch reaches the others, and one in which a client is a job of two hosts."""
    lab = lsf_on_hosts.lab
    assert lab is not None
    out = lsf_on_hosts.folder.parent / "out"
    words = ["--interface", lab.subnet, "-n6", "-c2", "-s1", str(PROGRAMS / "sum_on_hosts.py")]
    inside = [sys.executable, "-m", "kvmpi", "run", *words]
    subprocess.run(
        lsf_on_hosts.on(["bsub", "-n", "6", "-R", "span[ptile=2]", "-o", str(out), "-e", str(out), *inside]),
        env=lsf_on_hosts.env, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    status, said, complaints = lsf_on_hosts.run(
        "-n4", "-c1", "-s1", "--client-hosts=2", str(PROGRAMS / "sum_on_hosts.py")
    )
    assert status == 0, said + complaints
    told = sorted(line.split()[-3] for line in said.splitlines() if line.endswith("got 10.0"))
    assert told == [lab.hosts[0]] * 2 + [lab.hosts[1]] * 2, said
    wait_for(lambda: out.exists() and "Subject: Job 1" in out.read_text(), "the end of the job")
    lines = out.read_text()
    told = sorted(line.split()[-3] for line in lines.splitlines() if line.endswith("got 21.0"))
    assert told == sorted(lab.hosts * 2), lines
    assert "Subject: Job 1: <None> 0" in lines
    lsf_on_hosts.assert_nothing_is_left()


def test_a_dry_run_says_what_would_be_submitted(lsf: Site) -> None:
    words = [
        "--queue=long",
        "--project=p q",
        "--wall-time=1:30",
        "--requeue",
        "--submit-option=-M",
        "--submit-option=4G",
    ]
    status, out, err = lsf.run(
        "--dry-run", "-n5", "-c1", "-s1", "--client-hosts=2", *words, str(PROGRAMS / "sum_on_hosts.py")
    )
    assert status == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("# bsub") and "client-0" in line]
    submitted = shlex.split(line)[1:]
    folder = Path(submitted[-1].strip("'")).parent
    assert folder.parent == lsf.folder
    name = f"{folder.name}-client-0"
    nothing = ["-o", "/dev/null", "-e", "/dev/null"]
    assert submitted == [
        *("bsub", "-J", name, "-n", "5", "-R", "span[ptile=3]"), *nothing, "-r", "-q", "long", "-P", "p q",
        *("-W", "1:30", "-M", "4G", str(folder / f"{name}.sh")),
    ]  # fmt: skip
    assert not any((lsf.folder.parent / "jobs").iterdir())


#: What each task of a step says: where it is, its rank, how many there are, and a sum over them.
UNDER_SRUN = {
    "mpi": "import kvmpi, numpy as np, socket\n"
    "with kvmpi.create('mpi') as kv:\n"
    "    x = np.full(3, kv.rank + 1, 'f4'); kv.init('w', x); kv.pushpull('w', x)\n"
    "    print(socket.gethostname(), kv.rank, kv.num_workers, x[0])\n",
    "c10d": "import torch, kvmpi.torch.c10d, torch.distributed as dist, os, socket\n"
    "dist.init_process_group('kvmpi'); rank = dist.get_rank()\n"
    "x = torch.full((3,), rank + 1.0); dist.all_reduce(x)\n"
    "assert int(os.environ['LOCAL_RANK']) == rank % 2\n"
    "print(socket.gethostname(), rank, dist.get_world_size(), x[0].item())\n"
    "dist.destroy_process_group()\n",
    "dist_async": "import kvmpi; kvmpi.create('dist_async')",
    "role": "import os; os.environ['KVMPI_ROLE'] = 'worker'\n"
    "import kvmpi; print('up', kvmpi.create('mpi').num_workers)\n",
}


def by_srun(slurm: Site, kind: str, program: str) -> subprocess.CompletedProcess[str]:
    """Four tasks on two nodes, each of which runs a program that no launcher of ours has seen."""
    nodes = 1 if slurm.lab is None else 2
    command = ["srun", "-Q", f"--mpi={kind}", f"-N{nodes}", f"-n{2 * nodes}", sys.executable, "-c", UNDER_SRUN[program]]
    return subprocess.run(
        slurm.on(command), env=slurm.env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@needs_mpi
@pytest.mark.parametrize("program", ["mpi", "c10d"])
def test_an_srun_with_pmix_needs_no_launcher(slurm: Site, program: str) -> None:
    if mpirun.find(slurm.env, 2).kind != "openmpi":
        pytest.skip("for Open MPI")
    done = by_srun(slurm, "pmix", program)
    if "Invalid MPI type" in done.stderr:
        pytest.skip("this Slurm has no PMIx (Debian: apt-get install libpmix-dev)")
    assert done.returncode == 0, done.stdout + done.stderr
    hosts = (
        [socket.gethostname()] * 2 if slurm.lab is None else [name for name in slurm.lab.hosts[:2] for _ in range(2)]
    )
    total = sum(range(1, len(hosts) + 1))
    assert sorted(done.stdout.splitlines()) == [
        f"{host} {rank} {len(hosts)} {float(total)}" for rank, host in enumerate(hosts)
    ], done.stderr


@needs_mpi
@pytest.mark.parametrize("program", ["mpi", "c10d", "dist_async"])
def test_tasks_that_would_each_train_alone_are_an_error(slurm: Site, program: str) -> None:
    done = by_srun(slurm, "none", program)
    tasks = 2 if slurm.lab is None else 4
    assert done.returncode == 1, done.stdout
    said = f"ConfigError: srun has started {tasks} tasks without MPI between them"
    assert done.stderr.count(said) == tasks, done.stderr
    assert f"kvmpi run -n {tasks} PROGRAM" in done.stderr
    with_launcher = by_srun(slurm, "none", "role")
    assert with_launcher.stdout.splitlines() == ["up 1"] * tasks, with_launcher.stderr


@needs_mpi
def test_an_srun_that_the_mpi_does_not_understand(slurm: Site) -> None:
    """Open MPI knows no PMI-2, and takes each of the ranks for a whole job."""
    if mpirun.find(slurm.env, 2).kind != "openmpi":
        pytest.skip("MPICH understands PMI-2")
    done = by_srun(slurm, "pmi2", "mpi")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ConfigError: several ranks were started, and MPI sees one" in done.stderr
