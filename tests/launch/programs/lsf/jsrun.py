"""Stands in for IBM's jsrun: its documented options, cores that steps have to themselves, its variables.

Hosts and their cores are $LSB_MCPU_HOSTS, of which the first only starts the job; each has $LSF_GPUS. A step waits
until there is room for all of its resource sets. A line for each, with its options and where its tasks are, is added to
$LSF_STANDIN/steps. Without a PMIx of its own it has ranks started by an mpirun ($LSF_MPIRUN), and gives them the names
of jsrun; steps with ``--smpiargs off`` are started by $LSF_SHELL.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

HOME = Path(os.environ["LSF_STANDIN"])
LONG = {
    "-a": "--tasks_per_rs", "-b": "--bind", "-c": "--cpu_per_rs", "-d": "--launch_distribution", "-g": "--gpu_per_rs",
    "-n": "--nrs", "-r": "--rs_per_host", "-h": "--chdir", "-E": "--env", "-x": "--exclude_hosts", "-M": "--smpiargs",
    "-X": "--exit_on_error", "-I": "--stdin_rank", "-k": "--stdio_stderr", "-o": "--stdio_stdout",
}  # fmt: skip


def parse(words: list[str]) -> tuple[dict[str, str], list[str]]:
    given: dict[str, str] = {}
    while words and words[0].startswith("-"):
        name, equals, value = words.pop(0).partition("=")
        name = LONG.get(name, name)
        if name not in LONG.values():
            sys.exit(f"Error: unrecognized option {name}")
        value = value if equals else words.pop(0)
        given[name] = f"{given[name]}\n{value}" if name == "--env" and name in given else value
    numbers = ("--nrs", "--tasks_per_rs", "--cpu_per_rs", "--gpu_per_rs", "--rs_per_host")
    if bad := [name for name in numbers if name in given and not given[name].isdigit()]:
        sys.exit(f"Error: {bad[0]} wants a number")
    if given.get("--bind", "rs") not in ("rs", "none") or given.get("--launch_distribution", "packed") != "packed":
        sys.exit("Error: not in this stand-in")
    return given, words


def number(given: dict[str, str], name: str, default: int) -> int:
    return int(given.get(name, default))


def alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def allocate(given: dict[str, str]) -> list[tuple[str, list[int]]] | None:
    """Hosts of the resource sets in their order, each with its GPUs; None: not now."""
    names = os.environ["LSB_MCPU_HOSTS"].split()
    total = dict(zip(names[2::2], map(int, names[3::2]), strict=True))
    cpus, gpus = number(given, "--cpu_per_rs", 1), number(given, "--gpu_per_rs", 0)
    files = [(file, json.loads(file.read_text())) for file in (HOME / "taken").glob("*")]
    taken = [sets for file, sets in files if alive(int(file.name))]
    found: list[tuple[str, list[int]]] = []
    for host, cores in total.items():
        if host in given.get("--exclude_hosts", "").split(","):
            continue
        here = [each for sets in taken for each in sets if each[0] == host]
        free = cores - sum(each[1] for each in here)
        devices = [i for i in range(int(os.environ.get("LSF_GPUS", "0"))) if not any(i in each[2] for each in here)]
        room = min(free // cpus, len(devices) // gpus if gpus else free, number(given, "--rs_per_host", free))
        for i in range(min(room, number(given, "--nrs", 1) - len(found))):
            found.append((host, devices[i * gpus : (i + 1) * gpus]))
    if len(found) < number(given, "--nrs", 1):
        return None
    mine = [(host, cpus, devices) for host, devices in found]
    (HOME / "taken" / str(os.getpid())).write_text(json.dumps(mine))
    return found


def take(given: dict[str, str]) -> list[tuple[str, list[int]]]:
    (HOME / "taken").mkdir(exist_ok=True)
    while True:
        with (HOME / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (found := allocate(given)) is not None:
                line = json.dumps({"options": given, "hosts": [host for host, _ in found]})
                with (HOME / "steps").open("a") as steps:
                    steps.write(line + "\n")
                return found
        time.sleep(0.1)


def task(words: list[str]) -> None:
    """Under the mpirun: what jsrun would have set."""
    sets, tasks, env, own, step = json.loads(words[0])
    rank, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    host, devices = sets[rank // tasks]
    local = sum(1 for i in range(rank) if sets[i // tasks][0] == host)
    os.environ.update({
        "JSM_NAMESPACE_RANK": str(rank), "JSM_NAMESPACE_SIZE": str(size), "JSM_NAMESPACE_LOCAL_RANK": str(local),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)), **env,
    })  # fmt: skip
    for name in own:
        os.environ.pop(name, None)
    if rank == 0:  # an mpirun loses input that comes before the rank is there
        os.dup2(os.open(f"/proc/{step}/fd/0", os.O_RDONLY), 0)
    os.execvp(words[1], words[1:])


def die_with_us() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def main(words: list[str]) -> int:
    given, program = parse(words)
    env = dict(line.split("=", 1) for line in given.get("--env", "").splitlines() if "=" in line)
    sets, tasks = take(given), number(given, "--tasks_per_rs", 1)
    if given.get("--smpiargs") == "off":
        assert len(sets) == tasks == 1
        host, devices = sets[0]
        given_env = {**os.environ, **env, "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
        command = [os.environ["LSF_SHELL"], host, shlex.join(program)]
    else:
        places = ",".join(f"{host}:{sum(tasks for h, _ in sets if h == host)}" for host in dict(sets))
        own = {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_prte_silence_shared_fs": "1",
        }
        own["PRTE_MCA_prte_tmpdir_base"] = str(HOME)
        given_env = {**os.environ, **own}
        command = [os.environ["LSF_MPIRUN"], "--host", places, "--prtemca", "ras", "^slurm,lsf,pbs,gridengine"]
        command += ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", "-n", str(len(sets) * tasks)]
        command += ["--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", os.environ["LSF_SHELL"]]
        command += [
            "--prtemca",
            "plm_ssh_no_tree_spawn",
            "1",
            "--prtemca",
            "prte_if_include",
            os.environ["LSF_NETWORK"],
        ]
        command += ["--mca", "btl_tcp_if_include", os.environ["LSF_NETWORK"], "--mca", "mpi_yield_when_idle", "1"]
        told = json.dumps([sets, tasks, env, list(own), os.getpid()])
        command += [sys.executable, "-IS", os.path.abspath(__file__), "task", told, *program]
    with_input = None if given.get("--smpiargs") == "off" else subprocess.DEVNULL
    child = subprocess.Popen(command, env=given_env, cwd=given.get("--chdir"), stdin=with_input, preexec_fn=die_with_us)
    for which in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(which, lambda received, _: child.send_signal(received))
    code = child.wait()
    (HOME / "taken" / str(os.getpid())).unlink()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    if sys.argv[1:2] == ["task"]:
        task(sys.argv[2:])
    sys.exit(main(sys.argv[1:]))
