"""``kvmpi run``: reads the command line, plans the job, and runs it."""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from os.path import expanduser
from pathlib import Path

from kvmpi.config import client_bounds, empty_option, env_name
from kvmpi.errors import ConfigError, KVError, UnsupportedError
from kvmpi.launchers import batch, limits, mpirun, processes, program, remote_exec, summary, where
from kvmpi.launchers import job as jobs
from kvmpi.launchers.cores import usable
from kvmpi.launchers.jsrun import Jsrun
from kvmpi.launchers.output import Output
from kvmpi.launchers.reach import BatchReach
from kvmpi.launchers.run import Runner
from kvmpi.launchers.signals import SignalCatcher
from kvmpi.launchers.timeline import Timeline
from kvmpi.launchers.watchdog import hold
from kvmpi.trace import card

SUMMARY_S = 5.0  # a shorter job is a try, of which nobody wants to know more
MAX_TMPDIR = 40  # bytes; unix sockets below it must stay under 108


def parser() -> argparse.ArgumentParser:
    """The options of ``kvmpi run``, without PROGRAM and what follows it."""
    result = argparse.ArgumentParser(
        prog="kvmpi run",
        usage="kvmpi run [options] [--] PROGRAM [ARG ...]\n       kvmpi run [options] [--] -m MODULE [ARG ...]",
        description="Start the scheduler, servers and workers of a job, here or on several hosts, and end it.",
        allow_abbrev=False,
    )
    add = result.add_argument
    # Of --option=~/x shells leave the ~ to us. Longer names, and -np, are what other launchers have.
    add(
        "-n", "-np", "--workers", dest="workers", type=int, default=1, metavar="WORKERS",
        help="number of workers (default 1)",
    )  # fmt: skip
    add(
        "-c", "--clients", dest="clients", type=int, default=1, metavar="CLIENTS",
        help="clients that the workers are divided into (default 1)",
    )  # fmt: skip
    add("-s", "--servers", dest="servers", type=int, default=0, metavar="SERVERS", help="number of servers (default 0)")
    add("--launcher", choices=("auto", "local", "mpirun", "lsf", "slurm"), default="auto", help="default auto")
    add("--hostfile", type=expanduser, default="", metavar="F", help="hosts to run on, a line for each: NAME slots=N")
    add("--hosts", default="", metavar="H:N,...", help="the same as a list: hosts and how many workers each takes")
    add("--queue", default="", metavar="Q", help="of a batch system: queue or partition")
    add("--project", default="", metavar="P", help="of a batch system: project or account")
    add("--wall-time", default="", metavar="T", help="of a batch system, as it writes times")
    add(
        "--client-hosts", type=int, default=1, metavar="H",
        help="of a batch system: hosts that each client is spread over (default 1)",
    )  # fmt: skip
    add("--requeue", action="store_true", help="the batch system may run servers and clients again")
    add(
        "--submit-option", dest="submit_options", action="append", default=[], metavar="O",
        help="further option of bsub or sbatch; may be given several times, as --submit-option=--mem=4G",
    )  # fmt: skip
    add(
        "--jsrun", action=argparse.BooleanOptionalAction, default=None,
        help="in a job of LSF, start processes by jsrun (default: if it is there)",
    )  # fmt: skip
    add(
        "--jsrun-option", dest="jsrun_options", action="append", default=[], metavar="O",
        help="what jsrun is asked for workers; may be given several times, as --jsrun-option=--gpu_per_rs=1",
    )  # fmt: skip
    add(
        "--batch-dir",
        type=expanduser,
        default="",
        metavar="D",
        help="of a batch system: folder that all hosts share (default: the current one)",
    )
    add("--server-hosts", default="", metavar="H,...", help="hosts of the servers (default: those of the workers)")
    add("--interface", default="", metavar="I", help="network between hosts: eth0, or 10.0.0.0/16 (default: any)")
    add(
        "--remote-shell", default="ssh", metavar="CMD",
        help="takes HOST COMMAND and runs it there; without a password (default ssh)",
    )  # fmt: skip
    add(
        "--replicas", type=int, default=0, metavar="R",
        help="further servers that hold each part of the values: so many may die, and nothing is lost (default 0)",
    )  # fmt: skip
    add(
        "--restart", type=int, default=None, metavar="N",
        help="how often each client that has died is started again while the others wait for it, and each server with "
        "--replicas (default: clients never, servers 20 times)",
    )  # fmt: skip
    add(
        "--snapshot-dir",
        type=expanduser,
        default="",
        metavar="DIR",
        help="folder into which servers write snapshots of their state",
    )
    add("--snapshot-every", type=int, default=0, metavar="N", help="a snapshot after every N steps")
    add("--snapshot-seconds", type=float, default=0.0, metavar="T", help="a snapshot about every T seconds")
    add("--resume", type=expanduser, default="", metavar="DIR", help="go on from the newest snapshot in DIR")
    add("--log-dir", type=expanduser, default="", metavar="D", help="also write D/worker-3.log and the like")
    add(
        "--timeline", type=expanduser, default="", metavar="F",
        help="where the time of the job goes, as a trace for ui.perfetto.dev; compressed if F ends in .gz",
    )  # fmt: skip
    add(
        "--dashboard", nargs="?", type=int, const=0, default=None, metavar="PORT",
        help="a web page on this host that shows the job while it runs; without PORT the system chooses one",
    )  # fmt: skip
    add(
        "--summary", action=argparse.BooleanOptionalAction, default=None,
        help="who has computed, communicated and waited for how long, at the end (default: on a terminal, if the job "
        "took some seconds)",
    )  # fmt: skip
    add("--import", dest="imports", action="append", default=[], metavar="MODULE", help="module that servers import")
    add("--dry-run", action="store_true", help="show what would be started, and start nothing")
    return result


def split(argv: Sequence[str], options: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Cut ``argv`` before PROGRAM, so that nothing behind it is taken for an option of ours."""
    takes_value = {name for action in options._actions for name in action.option_strings if action.nargs is None}
    may_take_number = {name for action in options._actions for name in action.option_strings if action.nargs == "?"}
    i = 0
    while i < len(argv):
        word = argv[i]
        if word in may_take_number and i + 1 < len(argv) and argv[i + 1].isdigit():
            i += 2
            continue
        if word == "--":
            return list(argv[:i]), list(argv[i + 1 :])
        if word == "-m" or not word.startswith("-") or word == "-":
            break
        i += 2 if word in takes_value else 1
    return list(argv[:i]), list(argv[i:])


def main(argv: Sequence[str], *, commands: jobs.RoleCommands | None = None) -> int:
    """Run ``kvmpi run ARGV``; the exit status. ``commands`` replaces the scheduler and the servers, for tests."""
    options = parser()
    ours, words = split(argv, options)
    args = options.parse_args(ours)
    try:
        if said := empty_option(ours):
            raise ConfigError(said)
        return _run(args, words, commands)
    except KeyboardInterrupt:  # so early that no job was there to stop
        return 128 + signal.SIGINT
    except OSError as error:
        advice = limits.advice([str(error).encode()])
        if not advice:
            raise
        print(f"kvmpi run: {error.strerror}; {advice}", file=sys.stderr)
        return 1
    except KVError as error:
        print(f"kvmpi run: {error}", file=sys.stderr)
        if isinstance(error, program.ProgramNotFoundError):
            return 127
        return 2 if isinstance(error, (ConfigError, UnsupportedError)) else 1


def _run(args: argparse.Namespace, words: list[str], commands: jobs.RoleCommands | None) -> int:
    bounds = client_bounds(args.workers, args.clients)
    resolved = program.resolve(words)
    environ = dict(os.environ)
    if outer := environ.get(env_name("job_id")):  # a worker of another job has called this
        # Of its MPI's settings those that name the folders of that job were not the user's.
        environ = {
            name: value
            for name, value in environ.items()
            if name not in jobs.FILES_AND_PORTS
            and not (name.startswith(("OMPI_MCA_", "PRTE_MCA_")) and f"/kvmpi-{outer}" in value)
        }
    environ = mpirun.with_home(environ)
    places = where.find(
        launcher=args.launcher, hostfile=args.hostfile, hosts=args.hosts, server_hosts=args.server_hosts,
        remote_shell=args.remote_shell, network=args.interface, bounds=bounds, num_servers=args.servers,
        environ=environ, batch_dir=os.path.join(args.batch_dir or ".", f"kvmpi-{secrets.token_hex(4)}"),
        asked=batch.Resources(
            1, 1, args.queue, args.project, args.wall_time, args.requeue, tuple(args.submit_options)
        ),
        client_hosts=args.client_hosts, by_jsrun=args.jsrun, jsrun_options=args.jsrun_options,
    )  # fmt: skip
    if args.batch_dir and args.launcher not in ("slurm", "lsf"):  # with one of them it may be a job of jsrun, as well
        raise ConfigError("--batch-dir is for jobs that are submitted; add --launcher slurm or --launcher lsf")
    by_jsrun = places is not None and isinstance(places.reach, Jsrun)
    mpi = None
    if jobs.needs_mpi(args.workers, args.clients):
        if by_jsrun:
            mpirun.need_mpi4py(args.workers)
        else:
            mpi = mpirun.find(mpirun.clean(environ), args.workers)

    def plan(job_id: str, job_dir: str, shm_dir: str) -> jobs.Job:
        return jobs.plan(
            resolved,
            num_workers=args.workers,
            num_clients=args.clients,
            num_servers=args.servers,
            replicas=args.replicas,
            restarts=args.restart,
            snapshots=jobs.Snapshots(
                args.snapshot_dir, args.snapshot_every, args.snapshot_seconds, args.resume or _of_before(environ, args)
            ),
            environ=environ,
            job_id=job_id,
            job_dir=job_dir,
            shm_dir=shm_dir,
            mpi=mpi,
            local=args.launcher != "mpirun",
            cores=usable(),
            tty=_tty(),
            imports=tuple(args.imports),
            places=places,
            dashboard=args.dashboard,
            commands=commands,
            timeline=args.timeline,
        )

    described = plan("JOB_ID", "JOB_DIR", "SHM_DIR").describe()  # also finds every mistake before anything exists
    if args.dry_run:
        sys.stdout.buffer.write(os.fsencode(described + "\n"))  # words as they are given to processes
        return 0
    _check_umask()
    if places is None and (args.servers or mpi is not None):
        _check_loopback()
    _open_files(100 + 8 * (args.workers + args.servers))  # pipes and FIFOs of all that start at once
    signals = SignalCatcher()
    try:
        output = Output(environ, args.log_dir, interrupted=lambda: bool(signals.caught))
    except OSError as error:
        signals.close()
        raise ConfigError(f"--log-dir {args.log_dir}: {error.strerror}") from None
    job_id = secrets.token_hex(8)
    job_dir = os.path.join(_short_tmpdir(), f"kvmpi-{job_id}")
    uses_shm = (by_jsrun or (mpi is not None and mpi.is_open_mpi)) and os.access(jobs.SHM, os.W_OK)
    shm_dir = os.path.join(jobs.SHM, f"kvmpi-{job_id}") if uses_shm else ""
    if os.path.realpath(os.path.dirname(job_dir)) == os.path.realpath(jobs.SHM):  # TMPDIR is there too
        shm_dir = shm_dir and os.path.join(job_dir, "shm")
    # The folders come after the watchdog, which removes them: so a kill -9 leaves none, whenever it comes.
    folders = [folder for folder in (job_dir, shm_dir) if folder]
    if places is not None and isinstance(places.reach, BatchReach):
        folders.append(places.reach.folder)
    watchdog = processes.Watchdog(job_id, [*folders, *mpirun.LITTER])
    try:
        for folder in folders:
            os.mkdir(folder, 0o700)
        held = [hold(folder) for folder in folders]  # so that others know, also those who do not see this process
        if places is not None and not places.reach.is_apart:
            remote_exec.make_files([job_dir], {jobs.AGENT: places.reach.agent(places.layout.names)})
            made_there = [f"+{folder}" for folder in folders]
            watchdog.others = [
                processes.Watchdog(job_id, made_there, functools.partial(places.reach.command, host))
                for host in places.others
            ]
        card.write(job_dir, job_id, words, (args.workers, args.clients, args.servers))
        started_s = time.monotonic()
        runner = Runner(plan(job_id, job_dir, shm_dir), output, watchdog, signals)
        # As late as this: the folder that it makes is gone only with what ``make`` makes of it.
        timeline = Timeline.of(args.timeline or environ.get("KVMPI_TIMELINE", ""))
        try:
            return runner.run()
        finally:
            for fd in held:
                os.close(fd)
            if timeline is not None:
                output.say(f"kvmpi run: {timeline.make(job_id)}")
            _summarise(args, runner.picture, output, time.monotonic() - started_s)
    except OSError as error:
        if error.filename is None or limits.advice([str(error).encode()]):  # nobody takes the output, or see main
            raise
        raise KVError(f"{error.filename}: {error.strerror}") from None
    finally:
        try:
            watchdog.finish()  # of a job that did not begin, too, nothing is left when its launcher has ended
        finally:
            signals.close()
            output.close()


def _open_files(count: int) -> None:
    """Have room for so many, as far as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (count if hard == resource.RLIM_INFINITY else min(count, hard), hard)
        )


def _of_before(environ: Mapping[str, str], args: argparse.Namespace) -> str:
    """Where this very command has left snapshots, if a batch system runs it once more; else nothing."""
    again = environ.get("SLURM_RESTART_COUNT", "0") != "0" or environ.get("LSB_RESTART", "").lower() in ("y", "yes")
    folder = args.snapshot_dir or environ.get("KVMPI_SNAPSHOT_DIR", "")
    return folder if again and folder and any(Path(folder).glob("*/snapshot.json")) else ""


def _summarise(args: argparse.Namespace, picture: summary.Picture, output: Output, seconds: float) -> None:
    """Say at the end how the time was spent, where somebody reads it; with ``--log-dir`` a file has it in any case."""
    if not picture.get("workers"):
        if args.summary:
            output.say("kvmpi run: no summary, because no worker has reported: none had a store, or KVMPI_REPORT_S=0")
        return
    if args.log_dir:
        output.keep("summary.json", json.dumps(summary.as_json(picture, seconds), indent=1).encode() + b"\n")
    wanted = sys.stderr.isatty() and seconds >= SUMMARY_S if args.summary is None else args.summary
    if wanted:
        for line in summary.lines(picture, seconds):
            output.say(line)


def _short_tmpdir() -> str:
    """The temporary folder, unless its name is too long for the unix sockets that processes put into the job's, or has
    bytes that addresses cannot have."""
    folder = tempfile.gettempdir()
    name = folder.encode(errors="ignore")
    fits = len(name) <= MAX_TMPDIR and name == os.fsencode(folder)
    return folder if fits or not os.access("/tmp", os.W_OK) else "/tmp"


def _check_umask() -> None:
    """Raise if this user may not use what is made from now on."""
    os.umask(mask := os.umask(0o077))
    if mask & 0o700:
        raise ConfigError(
            f"umask {mask:03o} takes from you what files and folders of the job need; set another: umask 022"
        )


def _check_loopback() -> None:
    """Raise where processes of this host cannot reach each other, as in a network namespace that is new."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("127.0.0.1", 9))  # nothing is sent
        except OSError as error:
            raise ConfigError(
                f"this host does not reach itself at 127.0.0.1 ({error.strerror}), as the processes of a job do; bring "
                "its loopback interface up, as root: ip link set lo up"
            ) from None


def _tty() -> str:
    for fd in (2, 1):
        try:
            return os.ttyname(fd)
        except OSError:
            continue
    return ""
