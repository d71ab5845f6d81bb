"""The pure part of ``kvmpi run``: what would be started, and what is refused before anything is."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from kvmpi.config import Config
from kvmpi.errors import ConfigError
from kvmpi.launchers import command, hosts, job, mpirun, program, reach
from kvmpi.launchers.batch import Resources
from kvmpi.launchers.cores import SHARE, share_cores
from kvmpi.launchers.mpirun import MPI
from kvmpi.launchers.program import Program, ProgramNotFoundError

TRAIN = Program((sys.executable,), ("train.py",), ("--lr", "0.1"))
OPENMPI = MPI("/mpi/bin/mpirun", "openmpi")
OPENMPI_4 = MPI("/mpi/bin/mpirun", "openmpi4")
MPICH = MPI("/mpi/bin/mpirun", "mpich")


def plan(workers, clients, servers=0, environ=None, **kwargs):
    kwargs.setdefault("mpi", OPENMPI)
    return job.plan(
        TRAIN,
        num_workers=workers,
        num_clients=clients,
        num_servers=servers,
        environ={} if environ is None else environ,
        job_id="abc",
        job_dir="/jobs/abc",
        **kwargs,
    )


def test_seven_workers_in_three_clients():
    clients = plan(7, 3, 2).of_role("client")
    assert [list(client.workers) for client in clients] == [[0, 1, 2], [3, 4], [5, 6]]
    for number, client in enumerate(clients):
        assert client.command[client.command.index("-n") + 1] == str(len(client.workers))
        first_rank, client_rank = client.command[client.command.index(job.RANK_EXEC) + 1 :][:2]
        assert (first_rank, client_rank) == (str(client.workers[0]), str(number))
        assert client.env["KVMPI_CLIENT_RANK"] == str(number)
        assert client.command[-3:] == ("train.py", "--lr", "0.1")


def test_start_order_is_scheduler_servers_clients():
    labels = [process.label for process in plan(3, 2, 2).processes]
    assert labels == ["scheduler", "server 0", "server 1", "client 0", "worker 2"]


def test_clients_of_one_worker_need_no_mpi():
    workers = plan(3, 3, mpi=None).of_role("worker")
    assert [worker.command for worker in workers] == [(sys.executable, job.RANK_MAIN, "train.py", "--lr", "0.1")] * 3
    assert [worker.env["KVMPI_RANK"] for worker in workers] == ["0", "1", "2"]
    assert [worker.env["KVMPI_CLIENT_RANK"] for worker in workers] == ["0", "1", "2"]


@pytest.mark.parametrize("mpi", [OPENMPI, MPICH])
def test_every_environment_is_a_valid_configuration(mpi):
    planned = plan(4, 2, 1, environ={"KVMPI_TIMEOUT_S": "7", "HOME": "/home/me"}, mpi=mpi)
    for process in planned.processes:
        config = Config.from_env({**planned.env, **process.env})
        assert (config.num_workers, config.num_clients, config.num_servers) == (4, 2, 1)
        assert (config.job_id, config.job_dir, config.timeout_s) == ("abc", "/jobs/abc", 7.0)
    assert planned.env["HOME"] == "/home/me"


@pytest.mark.parametrize(("security", "keys"), [("", "/jobs/abc/keys"), ("curve", "/jobs/abc/keys"), ("off", None)])
def test_the_keys_of_a_job_lie_in_its_folder(security, keys):
    environ = {"KVMPI_KEYS": "/of/another/job", "KVMPI_SECURITY": security}
    planned = plan(2, 2, 1, environ=environ)
    assert planned.env.get("KVMPI_KEYS") == keys
    assert ("KVMPI_KEYS" in planned.describe()) == (keys is not None)


def test_what_another_job_left_in_the_environment_is_dropped():
    foreign = {"KVMPI_RANK": "5", "KVMPI_SCHEDULER": "tcp://elsewhere:1", "OMPI_COMM_WORLD_RANK": "3", "PMI_FD": "9"}
    foreign["MV2_COMM_WORLD_SIZE"] = "4"
    kept = {"OMPI_MCA_pml": "ob1", "PMIX_MCA_gds": "hash"}
    env = plan(2, 1, environ={**foreign, **kept}).env
    assert not foreign.keys() & env.keys()
    assert kept.items() <= env.items()


def test_what_an_mpirun_of_open_mpi_4_has_told_its_ranks_is_dropped():
    """As its ranks have it, where a ``kvmpi run`` among them would start another one."""
    of_users = {"OMPI_MCA_ess": "env", "OMPI_MCA_orte_tmpdir_base": "/scratch", "OMPI_MCA_btl": "self,vader"}
    assert mpirun.clean(of_users) == of_users
    told = {
        "OMPI_MCA_ess": "^singleton", "OMPI_MCA_ess_base_jobid": "945487873", "OMPI_MCA_ess_base_vpid": "0",
        "OMPI_MCA_orte_hnp_uri": "945487872.0;tcp://10.0.0.1:34025", "OMPI_MCA_orte_ess_num_procs": "1",
        "OMPI_MCA_orte_tmpdir_base": "/tmp", "OMPI_MCA_pmix": "^s1,s2,cray,isolated", "OMPI_UNIVERSE_SIZE": "2",
    }  # fmt: skip
    assert mpirun.clean({**of_users, **told}) == {"OMPI_MCA_btl": "self,vader"}


def test_where_another_job_of_torch_meets_is_dropped():
    of_torchrun = {
        "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a",
        "MASTER_PORT": "1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_RANK": "0", "ROLE_WORLD_SIZE": "2",
        "ROLE_NAME": "default", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
    }  # fmt: skip
    assert mpirun.clean({**of_torchrun, "HOME": "/"}) == {"HOME": "/"}
    assert mpirun.clean({"MASTER_ADDR": "a"}) == {"MASTER_ADDR": "a"}, "the user's own, for a job to come"


@pytest.mark.parametrize(("cores", "workers", "threads"), [(8, 2, "4"), (2, 7, "1"), (9, 4, "2")])
def test_cores_are_divided_among_workers(cores, workers, threads):
    assert plan(workers, 1, cores=cores).env["OMP_NUM_THREADS"] == threads
    assert plan(workers, 1, cores=cores, environ={"OMP_NUM_THREADS": "3"}).env["OMP_NUM_THREADS"] == "3"


def places(counts, servers=()):
    """A host for each client, ``host0`` is this one; so many workers each."""
    clients = tuple((hosts.Host(f"host{i}", count),) for i, count in enumerate(counts))
    return job.Places(hosts.Layout(tuple(servers), clients), reach.ssh("sh"), "host0", "10.0.0.1")


def test_workers_connect_over_the_network_that_the_user_names():
    spread = places([1, 1], ["host1"])
    assert "KVMPI_INTERFACE" not in plan(2, 2, 1, places=spread, mpi=None).env
    named = dataclasses.replace(spread, network="10.0.0.0/24")
    assert plan(2, 2, 1, places=named, mpi=None).env["KVMPI_INTERFACE"] == "10.0.0.0/24"


def test_a_batch_system_counts_for_its_own_jobs():
    """Those of a launcher that was itself started again are not: their numbers begin anew."""
    environ = {"SLURM_RESTART_COUNT": "2", "LSB_RESTART": "Y", "SLURM_JOB_ID": "7"}
    layout = places([1, 1], ["server-0"]).layout
    resources = {name: Resources() for name in layout.names}
    submitted = job.Places(layout, reach.BatchReach("slurm", ("sbatch",), {}, "/shared", resources), "", "10.0.0.1")
    assert not {"SLURM_RESTART_COUNT", "LSB_RESTART"} & plan(2, 2, 1, environ=environ, places=submitted).env.keys()
    assert plan(2, 2, 1, environ=environ).env["SLURM_RESTART_COUNT"] == "2"


def test_processes_end_as_they_do_without_a_terminal():
    assert not {"PYTHONINSPECT"} & plan(2, 1, 1, environ={"PYTHONINSPECT": "1", "PYTHONHASHSEED": "1"}).env.keys()


def test_hosts_of_an_mpirun_that_have_no_plain_names():
    """It would take what is before a colon for the name, and is told names of our own, which its agent knows."""
    there = hosts.Layout((), ((hosts.Host("fd00::1", 2), hosts.Host("me@fd00::2", 1), hosts.Host("plain", 1)),))
    spread = job.Places(there, reach.ssh("sh"), "fd00::1", "fd00::1", "fd00::/64", "eth0")
    (client,) = plan(4, 1, places=spread, mpi=MPI("/opt/bin/mpirun", "openmpi")).of_role("client")
    assert client.command[client.command.index("--host") + 1] == "localhost:2,kvmpi-me-fd00--2:1,plain:1"
    assert client.command[client.command.index("btl_tcp_if_include") + 1] == "eth0"
    agent = subprocess.run(
        ["sh", "-c", reach.Reach("ssh", ("echo",)).agent(there.names), "sh", "-x", "kvmpi-me-fd00--2", "true"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert agent.stdout == "me@fd00::2 true\n"
    with pytest.raises(ConfigError, match=r"client 0 is to run on several hosts, and MPICH .* this one is fd00::1"):
        plan(4, 1, places=spread, mpi=MPI("/opt/bin/mpirun", "mpich"))


def test_each_host_has_its_cores_for_its_own_workers():
    """As many as there are on it, which only it knows; here all on this one."""
    planned = plan(5, 5, 1, cores=8, places=places([1] * 5, ["host4"]), mpi=None)
    assert "OMP_NUM_THREADS" not in planned.env
    here, *others, last = planned.of_role("worker")
    assert (here.env["OMP_NUM_THREADS"], here.env.get(SHARE)) == ("8", None)
    assert [worker.env[SHARE] for worker in others] == ["1,1"] * 3
    assert last.env[SHARE] == "1,2"
    assert [process.env["OMP_NUM_THREADS"] for process in planned.of_role("scheduler", "server")] == ["1", "1"]
    for process in plan(4, 2, places=places([2, 2]), environ={"OMP_NUM_THREADS": "3"}).of_role("client"):
        assert process.env[SHARE] == "2,2"
        assert "OMP_NUM_THREADS" not in process.env
    two = job.Places(hosts.Layout((), ((hosts.Host("a", 3), hosts.Host("b", 1)),)), reach.ssh("sh"), "a", "10.0.0.1")
    (client,) = plan(4, 1, places=two).of_role("client")
    assert client.env[SHARE] == "3,3"
    assert SHARE in client.command, "mpirun takes it to the other host"
    assert "OMPI_MCA_mpi_yield_when_idle" not in client.env
    client, other, worker = plan(5, 3, 1, cores=8, local=False).of_role("client", "worker")
    assert client.env[SHARE] == other.env[SHARE] == "1,2,2", "their mpiruns know where they are"
    assert (worker.env["OMP_NUM_THREADS"], worker.env.get(SHARE)) == ("2", None)


@pytest.mark.parametrize(("told", "others", "cores", "expected"), [
    ("4,6", {}, 16, {"OMP_NUM_THREADS": "4"}),
    ("4,6", {"OMP_NUM_THREADS": "7"}, 16, {"OMP_NUM_THREADS": "7"}),
    ("4,6", {}, 2, {"OMP_NUM_THREADS": "1"}),
    ("4,6", {"OMPI_COMM_WORLD_SIZE": "4"}, 6, {"OMP_NUM_THREADS": "1"}),
    ("4,6", {"OMPI_COMM_WORLD_SIZE": "4"}, 5, {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}),
    ("0,0,1", {"OMPI_COMM_WORLD_SIZE": "64", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 8, {"OMP_NUM_THREADS": "4"}),
    ("0,0,2", {"OMPI_COMM_WORLD_SIZE": "64", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 8, {"OMP_NUM_THREADS": "2"}),
    ("2,3,1", {"OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_SIZE": "6"}, 8,
     {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}),
    ("0,0,1", {"MPI_LOCALNRANKS": "8"}, 8, {"OMP_NUM_THREADS": "1"}),
    ("", {}, 8, {}),
])  # fmt: skip
def test_cores_are_shared_on_the_host_itself(told, others, cores, expected):
    environ = {SHARE: told, **others} if told else dict(others)
    share_cores(environ, cores)
    assert environ == {**others, **expected}


def test_ranks_yield_only_when_there_are_more_processes_than_cores():
    alone, crowded = (plan(2, 1, servers, cores=2).of_role("client")[0].env for servers in (0, 1))
    assert "OMPI_MCA_mpi_yield_when_idle" not in alone
    assert crowded["OMPI_MCA_mpi_yield_when_idle"] == "1"


def test_a_transport_between_hosts_is_left_out_where_all_ranks_share_one():
    here, anywhere = (plan(2, 1, local=local).of_role("client")[0].env for local in (True, False))
    assert here["OMPI_MCA_btl"] == "^ofi"
    assert "OMPI_MCA_btl" not in anywhere
    assert "OMPI_MCA_btl" not in plan(2, 1, local=True, environ={"OMPI_MCA_btl": "self"}).of_role("client")[0].env


def test_settings_for_mpi_go_to_mpirun_only_and_the_users_win():
    planned = plan(3, 2, 1, environ={"OMPI_MCA_osc": "sm"})
    with_mpi = [process.label for process in planned.processes if "PRTE_MCA_prte_tmpdir_base" in process.env]
    assert with_mpi == ["client 0"]
    assert "OMPI_MCA_osc" not in planned.of_role("client")[0].env
    assert planned.env["OMPI_MCA_osc"] == "sm"


#: What Open MPI 4.1.4 has of that, by its ompi_info --all and the help of its mpirun.
OF_OPEN_MPI_4 = {
    *("orte_tmpdir_base", "btl_vader_backing_directory", "osc_sm_backing_directory", "osc_rdma_backing_directory"),
    *("osc", "btl", "mpi_yield_when_idle", "ras", "plm", "plm_rsh_agent", "plm_rsh_no_tree_spawn"),
    *("oob_tcp_if_include", "btl_tcp_if_include"),
}


def test_open_mpi_4_is_told_by_its_own_names():
    """Its mpirun ends at an option that it does not know, and says nothing of other names that it does not know."""
    two_hosts = [hosts.Host("a", 2), hosts.Host("b", 2)]
    alone, spread = OPENMPI_4.command(4, local=True), OPENMPI_4.command_on(two_hosts, "/agent", "eth0", ["A"])
    for command_line in (alone, spread, OPENMPI_4.command(4, local=False)):
        options = {word for word in command_line if word.startswith("-")}
        assert options <= {"--host", "--mca", "--map-by", "--oversubscribe", "--bind-to", "-n", "-x"}
    told = {spread[i + 1]: spread[i + 2] for i, word in enumerate(spread) if word == "--mca"}
    assert told == {
        "ras": "^slurm,lsf,pbs,tm,gridengine", "plm": "rsh", "plm_rsh_agent": "/agent", "plm_rsh_no_tree_spawn": "1",
        "oob_tcp_if_include": "eth0", "btl_tcp_if_include": "eth0",
    }  # fmt: skip
    env = OPENMPI_4.env("/jobs/abc", "/shm/abc", crowded=True, one_host=True)
    assert {name.removeprefix("OMPI_MCA_") for name in env if not name.startswith("OMPI_ALLOW")} <= OF_OPEN_MPI_4
    assert env["OMPI_MCA_orte_tmpdir_base"] == "/jobs/abc"
    assert env["OMPI_MCA_btl_vader_backing_directory"] == "/shm/abc"


@pytest.mark.parametrize(("says", "kind"), [
    ("mpirun (Open MPI) 4.1.4", "openmpi4"), ("mpirun (Open MPI) 3.1.6", "openmpi4"),
    ("mpirun (Open MPI) 4.1.5rc2", "openmpi4"), ("orterun (OpenRTE) 4.1.4", "openmpi4"),
    ("mpirun (Open MPI) 5.0.11", "openmpi"), ("mpirun (Open MPI) 10.0.0", "openmpi"),
    ("prterun (PRRTE) 3.0.12", "openmpi"), ("mpirun (Open MPI) main", "openmpi"),
])  # fmt: skip
def test_versions_of_open_mpi(says, kind, tmp_path):
    assert mpirun.detect_kind(fake_mpirun(tmp_path, says), {"PATH": "/bin"}) == kind


def test_hosts_of_mpich_and_of_intels_mpi_are_named_once_for_each_rank():
    """Intel's mpirun overlooks the number in NAME:NUMBER."""
    spread = MPICH.command_on([hosts.Host("a", 3), hosts.Host("b", 1)], "/agent", "", [])
    assert spread[spread.index("-hosts") + 1] == "a,a,a,b"


def test_ranks_of_intels_mpi_are_not_bound_to_the_first_cores():
    """Its mpirun ignores -bind-to, and each client's begins at the first core."""
    bound, free = (plan(4, 2, mpi=MPICH, environ=said).of_role("client") for said in ({"I_MPI_PIN": "1"}, {}))
    assert [client.env.get("I_MPI_PIN") for client in (*bound, *free)] == [None, None, "0", "0"]


def test_imports_are_added_to_those_of_the_user():
    env = plan(1, 1, environ={"KVMPI_IMPORTS": "mine"}, imports=("a.b", "c")).env
    assert env["KVMPI_IMPORTS"] == "mine,a.b,c"


def test_files_are_found_from_wherever_a_program_has_gone():
    """Workers read them when they make their stores."""
    env = plan(1, 1, 1, {"KVMPI_TUNING": "t.json", "KVMPI_TIMELINE": "u.json"}).env
    assert (env["KVMPI_TUNING"], env["KVMPI_TIMELINE"]) == (os.path.abspath("t.json"), os.path.abspath("u.json"))
    assert "KVMPI_TUNING" not in plan(1, 1, 1, {"KVMPI_TUNING": ""}).visible


def test_a_bad_setting_is_found_while_planning():
    with pytest.raises(ConfigError, match="KVMPI_TIMEOUT_S"):
        plan(1, 1, environ={"KVMPI_TIMEOUT_S": "soon"})


def test_dry_run_shows_every_command_and_starts_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("open('started', 'w')")
    assert command.main(["-n", "2", "-c", "2", "-s", "1", "--dry-run", "train.py", "--lr", "a b", "-n", "9"]) == 0
    text = capfd.readouterr().out
    assert "# 2 workers in 2 clients, 1 servers" in text
    assert f"KVMPI_ROLE=server KVMPI_RANK=0 {' '.join(job.RoleCommands().server)}" in text
    runs = f"{sys.executable} {job.RANK_MAIN} train.py --lr 'a b' -n 9"
    assert f"KVMPI_CLIENT_RANK=1 KVMPI_ROLE=worker KVMPI_RANK=1 {runs}" in text
    assert os.listdir() == ["train.py"]


def test_home_in_options_as_shells_leave_it(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        command.main(["-s", "1", "--dry-run", "--snapshot-every=3", "--snapshot-dir=~/s", "--resume=~/r", __file__])
        == 0
    )
    shown = capfd.readouterr().out
    assert f"KVMPI_RESUME={tmp_path}/r" in shown
    assert f"KVMPI_SNAPSHOT_DIR={tmp_path}/s" in shown
    assert "~" not in shown


def test_dry_run_shows_names_as_they_are_whatever_the_encoding(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("trän\udcff.py").touch()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert command.main(["--dry-run", "trän\udcff.py"]) == 0
    assert "trän".encode() + b"\xff.py" in sys.stdout.buffer.getvalue()


@pytest.mark.parametrize(
    ("argv", "status", "says"),
    [
        (["-n", "2", "-c", "3", "train.py"], 2, "3 clients for 2 workers"),
        (["-n", "0", "train.py"], 2, "0 workers"),
        (["-s", "-1", "train.py"], 2, "-s -1"),
        ([], 2, "no PROGRAM"),
        (["-n", "2", "--"], 2, "no PROGRAM"),
        (["-"], 2, "a program on standard input"),
        (["python", "-"], 2, "a program on standard input"),
        (["-n", "2", "python3", "-u"], 2, "a program on standard input"),
        (["no-such-program"], 127, "'no-such-program' not found on PATH"),
        (["no-such.py"], 127, "'no-such.py' not found in this directory"),
        (["./no-such"], 127, "'./no-such' not found"),
        (["-m", "no_such.module"], 127, "no module named 'no_such.module'"),
        (["./plain.txt"], 127, "neither executable nor a Python script"),
        (["--batch-dir", ".", "train.py"], 2, "--batch-dir is for jobs that are submitted; add --launcher slurm"),
        (["--launcher", "lsf", "train.py"], 2, "the batch system's bsub was not found on PATH"),
        (["--hostfile", "hosts", "train.py"], 2, "--hostfile hosts: No such file"),
        (["--hosts", "", "train.py"], 2, "--hosts: the value is empty; is it a variable of the shell"),
        (["-s", "1", "--resume=", "train.py"], 2, "--resume: the value is empty"),
        (["-s2", "--restart", "-1", "train.py"], 2, "must not be negative"),
        (["-s2", "--replicas=2", "train.py"], 2, "3 servers or more are needed"),
        (["-s2", "--replicas=-1", "train.py"], 2, "--replicas -1: must not be negative"),
        (["--timeline", "no-such/t.json", "train.py"], 2, "t.json.parts cannot be written to"),
        (["--timeline", ".", "train.py"], 2, "that is a folder"),
        (["--timeline", "pipe", "train.py"], 2, "pipe' cannot be written: that is no file"),
        (["--timeline", "t.json", "--log-dir", "plain.txt", "train.py"], 2, "--log-dir plain.txt: File exists"),
    ],
)
def test_bad_arguments(argv, status, says, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("open('started', 'w')")
    Path("plain.txt").write_text("hello")
    os.mkfifo("pipe")
    assert command.main(argv) == status
    assert says in capfd.readouterr().err
    assert sorted(os.listdir()) == ["pipe", "plain.txt", "train.py"]


def test_an_unknown_option_is_refused(capfd):
    with pytest.raises(SystemExit) as caught:
        command.main(["--frobnicate", "train.py"])
    assert caught.value.code == 2
    assert "--frobnicate" in capfd.readouterr().err


@pytest.mark.parametrize("kvmpi_mpirun", ["", "/no/such/mpirun"])
def test_without_mpirun_the_message_says_what_to_install(kvmpi_mpirun, tmp_path):
    environ = {"PATH": str(tmp_path), "KVMPI_MPIRUN": kvmpi_mpirun}
    with pytest.raises(ConfigError, match=r"mpirun.*pip install 'kvmpi\[mpi\]'.*-c 4"):
        mpirun.find(environ, 4, beside=str(tmp_path / "python"))


def fake_mpirun(folder: Path, version: str) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / "mpirun"
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)
    return str(path)


def test_without_mpi4py_the_message_says_what_to_install(tmp_path, monkeypatch):
    fake_mpirun(tmp_path, "mpirun (Open MPI) 5.0.11")
    monkeypatch.setattr(mpirun.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"mpi4py was not found.*pip install 'kvmpi\[mpi\]'"):
        mpirun.find({"PATH": "/bin"}, 4, beside=str(tmp_path / "python"))


def test_mpirun_is_looked_for_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(mpirun.importlib.util, "find_spec", lambda name: object())
    chosen = fake_mpirun(tmp_path / "chosen", "mpirun (Open MPI) 5.0.11")
    beside = fake_mpirun(tmp_path / "beside", "HYDRA build details:")
    on_path = fake_mpirun(tmp_path / "path", "mpirun (Open MPI) 4.1.4")
    python = str(tmp_path / "beside" / "python")
    environ = {"PATH": str(tmp_path / "path") + ":/bin"}
    assert mpirun.find({**environ, "KVMPI_MPIRUN": chosen}, 2, beside=python) == MPI(chosen, "openmpi")
    assert mpirun.find(environ, 2, beside=python) == MPI(beside, "mpich")
    assert mpirun.find(environ, 2, beside=str(tmp_path / "python")) == MPI(on_path, "openmpi4")
    of_user = fake_mpirun(tmp_path / "bin", "mpirun (Open MPI) 5.0.11")  # of pip install --user
    monkeypatch.setattr(mpirun.site, "USER_BASE", str(tmp_path))
    monkeypatch.setattr(mpirun.site, "ENABLE_USER_SITE", True)
    assert mpirun.find(environ, 2, beside=str(tmp_path / "python")) == MPI(on_path, "openmpi4")
    environ["PATH"] = str(tmp_path / "nothing")
    assert mpirun.find(environ, 2, beside=str(tmp_path / "python")) == MPI(of_user, "openmpi")
    monkeypatch.setattr(mpirun.site, "ENABLE_USER_SITE", False)  # as in a virtual environment
    with pytest.raises(ConfigError, match="no mpirun was found"):
        mpirun.find(environ, 2, beside=str(tmp_path / "python"))


def test_intels_mpirun_is_not_left_to_find_its_other_half(tmp_path, monkeypatch):
    """It is a script that runs whatever mpiexec.hydra is on PATH, or fails where there is none."""
    monkeypatch.setattr(mpirun.importlib.util, "find_spec", lambda name: object())
    intel = fake_mpirun(tmp_path / "intel", "Intel(R) MPI Library for Linux* OS, Version 2021.18.1")
    hydra = fake_mpirun(tmp_path / "other", "HYDRA build details:")
    python, path = str(tmp_path / "intel" / "python"), f"/bin:{tmp_path}/other"
    assert mpirun.find({"PATH": path}, 2, beside=python) == MPI(intel, "mpich"), "there is none to be found"
    for folder in ("intel", "other"):
        Path(hydra).with_name("mpirun").rename(tmp_path / folder / "mpiexec.hydra")
        fake_mpirun(tmp_path / "other", "HYDRA build details:")
    whole = str(tmp_path / "intel" / "mpiexec.hydra")
    for elsewhere in ("/bin", path):
        assert mpirun.find({"PATH": elsewhere}, 2, beside=python) == MPI(whole, "mpich")
    activated = f"{tmp_path}/intel:{path}"
    assert mpirun.find({"PATH": activated}, 2, beside=python) == MPI(intel, "mpich")
    assert mpirun.find({"PATH": activated, "KVMPI_MPIRUN": "mpirun"}, 2, beside="/python") == MPI(intel, "mpich")


@pytest.mark.parametrize(("mpirun_at", "libmpi_at", "kind"), [
    ("opt/bin/mpirun", "opt/lib/libmpi.so.40", "openmpi"), ("opt/bin/mpirun", "opt/lib64/libmpi.so.40", "openmpi4"),
    ("usr/bin/mpirun", f"usr/lib/{sysconfig.get_config_var('MULTIARCH')}/libmpi.so.40", "openmpi4"),
    ("opt/intel/bin/mpirun", "opt/intel/lib/release/libmpi.so.12", "mpich"),
    ("opt/bin/mpirun", "opt/lib64/libmpi.so.12", "mpich"), ("opt/bin/mpirun", None, "openmpi"),
])  # fmt: skip
def test_a_wheel_of_mpi4py_is_led_to_the_library_of_the_mpirun(mpirun_at, libmpi_at, kind, tmp_path):
    """Else it takes the first it finds: that of another wheel in the environment, if there is one."""
    for name in filter(None, (mpirun_at, libmpi_at)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "home/bin").mkdir(parents=True)
    (tmp_path / "home/bin/mpirun").symlink_to(tmp_path / mpirun_at)
    for named in (mpirun_at, "home/bin/mpirun"):
        env = MPI(str(tmp_path / named), kind).env("", "", crowded=False, one_host=True)
        assert env.get("MPI4PY_LIBMPI") == (libmpi_at and str(tmp_path / libmpi_at))


def test_an_unknown_mpirun_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="neither Open MPI nor MPICH"):
        mpirun.detect_kind(fake_mpirun(tmp_path, "WhatMPI 1.0"), {"PATH": "/bin"})


def test_programs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    Path("script").write_text("#!/usr/bin/env python3\n")
    Path("tool").write_text("#!/bin/sh\n")
    Path("tool").chmod(0o755)
    python = sys.executable
    assert program.resolve(["train.py", "x"]).command() == (python, "train.py", "x")
    assert program.resolve(["script"]).command() == (python, "script")
    assert program.resolve(["python", "train.py"]).command() == (python, "train.py")
    assert program.resolve(["python3", "-u", "train.py"]).command() == (python, "-u", "train.py")
    options = ["-uO", "-W", "ignore", "-Xdev"]
    for words in (["train.py", "-c"], ["-m", "json.tool", "-u"], ["script"]):
        found = program.resolve(["python", *options, *words])
        assert found.command(runner=("r",)) == (python, *options, "r", *words)
    assert program.resolve(["python", "-c", "pass"]).command(runner=("r",)) == (python, "-c", "pass")
    with pytest.raises(ProgramNotFoundError, match=r"'absent\.py' not found in this directory"):
        program.resolve(["python", "-u", "absent.py"])
    assert program.resolve(["-m", "json.tool", "f"]).command() == (python, "-m", "json.tool", "f")
    assert program.resolve(["./tool", "x"]).command(runner=("r",)) == (str(tmp_path / "tool"), "x")
    assert program.resolve(["train.py"]).command(runner=("r",)) == (python, "r", "train.py")
    for name in ("python3.99", "env/bin/python"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("#!/bin/sh\n")
        Path(name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for given, by in (
        ("env/bin/python", "env/bin/python"),
        ("python3.99", str(tmp_path / "python3.99")),
        (python, python),
    ):
        assert program.resolve([given, "-u", "train.py", "x"]).command(runner=("r",)) == (
            by,
            "-u",
            "r",
            "train.py",
            "x",
        )
        assert program.resolve([given, "-c", "pass"]).command(runner=("r",)) == (by, "-c", "pass")
    assert program.resolve(["env/bin/python", "-m", "only_there"]).command() == ("env/bin/python", "-m", "only_there")
    for line, by in {
        "#!/usr/bin/env python": [python], f"#!{tmp_path}/env/bin/python": [f"{tmp_path}/env/bin/python"],
        "#!/usr/bin/env -S python -u": None, "#!/usr/bin/env ruby": None,
    }.items():  # fmt: skip
        Path("tool").write_text(f"{line}\n")
        expected = (str(tmp_path / "tool"), "x") if by is None else (*by, "r", str(tmp_path / "tool"), "x")
        assert program.resolve(["./tool", "x"]).command(runner=("r",)) == expected
    Path("plain").write_text("")
    with pytest.raises(ProgramNotFoundError, match=r"make it executable with chmod \+x and call it \./plain"):
        program.resolve(["plain"])
    monkeypatch.setenv("PATH", "/bin")
    with pytest.raises(ProgramNotFoundError, match=r"'tool' is in this directory.*; call it \./tool"):
        program.resolve(["tool"])


def test_snapshots_go_where_the_job_was_resumed_from_unless_told_otherwise():
    def settings(environ=None, **said):
        env = plan(1, 1, 1, environ, snapshots=job.Snapshots(**said)).env
        return {name: value for name, value in env.items() if "SNAPSHOT" in name or "RESUME" in name}

    assert settings() == settings({"KVMPI_RESUME": "/of/another/job"}) == {}
    assert settings(directory="d", every=5) == {
        "KVMPI_SNAPSHOT_DIR": os.path.abspath("d"), "KVMPI_SNAPSHOT_EVERY": "5",
    }  # fmt: skip
    assert settings(resume="/d") == {"KVMPI_RESUME": "/d"}
    further = {"KVMPI_RESUME": "/d", "KVMPI_SNAPSHOT_DIR": "/d", "KVMPI_SNAPSHOT_SECONDS": "2.5"}
    assert settings(resume="/d", seconds=2.5) == further
    assert settings({"KVMPI_SNAPSHOT_SECONDS": "2.5"}, resume="/d") == further
    assert settings(resume="/d", directory="/e", seconds=2.5) == {**further, "KVMPI_SNAPSHOT_DIR": "/e"}


@pytest.mark.parametrize(("servers", "said", "expected"), [
    (0, {"directory": "d", "every": 1}, "-s"), (0, {"resume": "d"}, "-s"), (1, {"every": 5}, "KVMPI_SNAPSHOT_DIR"),
    (1, {"directory": "d"}, "how often"), (1, {"directory": "d", "every": 1, "seconds": 1.0}, "only one"),
    (1, {"directory": "d", "every": -1}, "negative"), (1, {"directory": "d", "seconds": -1.0}, "negative"),
])  # fmt: skip
def test_snapshots_that_make_no_sense(servers, said, expected):
    with pytest.raises(ConfigError, match=expected):
        plan(1, 1, servers, snapshots=job.Snapshots(**said))


def test_roles_take_nothing_from_the_current_folder_that_is_found_elsewhere(tmp_path):
    """It is searched all the same, for what ``--import`` names."""
    for name in ("random", "types", "zmq"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError('not this one')")
    (tmp_path / "only_here.py").write_text("import sys; print(sys.argv[1:])")
    commands = job.RoleCommands()
    for command_line in (commands.scheduler, commands.server):
        assert command_line[-3:-1] == ("-m", "kvmpi.ps"), "so it is to be found among processes"
        words = [*command_line[:-1], "waldo"]
        ended = subprocess.run(words, cwd=tmp_path, text=True, capture_output=True, check=False, timeout=60)
        assert ended.stderr == "usage: python -m kvmpi.ps scheduler|server [PARENT]\n"
    words = [*command_line[:-2], "only_here", "waldo"]
    ended = subprocess.run(words, cwd=tmp_path, text=True, capture_output=True, check=False, timeout=60)
    assert ended.stdout == "['waldo']\n", ended.stderr


def test_a_remote_shell_of_the_current_folder_is_found_from_any_other(tmp_path, monkeypatch):
    (tmp_path / "shell").write_text("#!/bin/sh\n")
    (tmp_path / "shell").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert reach.ssh("./shell -x").words == (str(tmp_path / "shell"), "-x")
    assert reach.ssh("sh").words == ("sh",)


def test_what_is_silent_for_hours_stays_known_to_firewalls(tmp_path, monkeypatch):
    """The least that one of a cloud keeps a connection without traffic is four minutes."""
    (tmp_path / "ssh").write_text("#!/bin/sh\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    words = reach.ssh("./ssh -o ServerAliveInterval=5").words
    given = [word for word in words if word.startswith("ServerAliveInterval=")]
    assert given[0] == "ServerAliveInterval=5", "ssh takes the first"
    assert int(given[1].partition("=")[2]) < 240
    for mpi, prefix in ((OPENMPI, "PRTE"), (OPENMPI_4, "OMPI")):
        options = f"{prefix}_MCA_oob_tcp_keepalive_"
        env = mpi.env("", "", crowded=False, one_host=False)
        # The system probes again after the second of these, also where the one before was answered.
        assert max(int(env[options + "time"]), int(env[options + "intvl"])) < 240
        assert int(env[options + "time"]) + int(env[options + "intvl"]) * int(env[options + "probes"]) >= 480
