"""Runs one MPI rank's program: gives it its worker rank and its own output, and tells the launcher how it ended.

mpirun runs this file by path with ``python -I -S``, so it imports little and starts in about 10 ms:

    rank_exec.py FIRST_RANK CLIENT_RANK [FOLDER...] -- PROGRAM [ARG...]

It stays as the parent of the program, because the launcher needs to know which rank failed first, and how. What
mpirun says about that depends on the MPI (hydra reports a signal like an exit status, and lets the others wait for
ever when a rank fails before MPI_Init). Output goes through FIFOs in the job's folder, byte for byte; on a host that
does not have that folder, the rank keeps the output that mpirun gave it.
"""

from __future__ import annotations

import errno
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: What mpirun and jsrun take for the end of a command line; in a program's words a backslash is put before it.
SEPARATOR = ":"
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK")
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1


def mpi_rank(environ: dict[str, str]) -> int:
    """The rank that the MPI launcher has given this process; -1 when there is none."""
    for name in RANK_VARIABLES:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return -1


def die_with_parent(parent: int) -> None:
    """Ask the kernel to SIGKILL this process when ``parent`` ends; exit when it has ended already."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)


def hidden(words: tuple[str, ...]) -> tuple[str, ...]:
    """``words``, of which none is a separator."""
    return tuple("\\" + word if word.lstrip("\\") == SEPARATOR else word for word in words)


def shown(words: list[str]) -> list[str]:
    """What ``hidden`` was given."""
    return [word[1:] if word[:1] == "\\" and word.lstrip("\\") == SEPARATOR else word for word in words]


def open_fifo(path: str) -> int:
    """The write end of a FIFO that the launcher reads; -1 when this host does not have it.

    Raises:
        OSError: the FIFO exists and nobody reads it: the launcher is gone.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # blocking, it would wait for a reader that never comes
    except FileNotFoundError:
        return -1
    os.set_blocking(fd, True)
    return fd


def report(fd: int, line: str) -> None:
    """Tell the launcher; a short write into a FIFO is atomic, so ranks can share one."""
    if fd >= 0:
        try:
            os.write(fd, line.encode())
        except OSError:
            pass


def sibling(name: str) -> Any:
    """A file beside this one: -I has kept its folder out of the path."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    try:
        return __import__(name)
    finally:
        del sys.path[0]


def settle(folders: list[str], is_first: bool) -> None:
    """Make the job's folders on a host on which nobody else of the job clears up."""
    import json

    environ, remote_exec = os.environ, sibling("remote_exec")
    marks = [f"{name}={environ[name]}" for name in ("KVMPI_JOB_DIR", "KVMPI_RANK")]
    sibling("watchdog").guard(environ["KVMPI_JOB_ID"], folders, marks)
    spec = json.loads(remote_exec.read_line(0)) if is_first else {"files": {}}
    remote_exec.make_files(folders, spec["files"])


def keep_clients_apart(client_rank: str) -> None:
    """Let Open MPI share memory in a folder of this client's own.

    It names its files by 16 bits that it makes of mpirun's process id. Two clients of a job with the same ones would
    take each other's files, and read messages that are not theirs.
    """
    for name, folder in list(os.environ.items()):
        ours = name.startswith("OMPI_MCA_") and name.endswith("_backing_directory")
        if ours and os.path.basename(folder).startswith("kvmpi-"):
            os.environ[name] = f"{folder}/{client_rank}"
            os.makedirs(os.environ[name], 0o700, exist_ok=True)


def end_with_input(child: int) -> None:
    """End the program when our standard input ends, which the launcher holds open."""
    import threading
    import time

    grace_s = float(os.environ["KVMPI_GRACE_S"])

    def watch() -> None:
        while os.read(0, 4096):
            pass
        for number, pause_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 0.0)):
            os.killpg(child, number)
            time.sleep(pause_s)

    threading.Thread(target=watch, daemon=True).start()


def supervise(child: int) -> int:
    """Wait for ``child``, passing signals on to its process group; its wait status."""

    questions = sibling("questions")

    def forward(number: int, frame: object) -> None:
        try:
            os.killpg(child, signal.SIGTERM if number == questions.END else number)
        except OSError:
            pass

    def ask(number: int, frame: object) -> None:
        folder = os.environ.get("KVMPI_JOB_DIR", "")
        if os.path.isdir(folder):
            questions.ask(folder, group=child)
        else:  # who answers has nowhere to say so
            questions.ask_ranks(child)

    for number in (*FORWARDED, questions.END):
        signal.signal(number, forward)
    signal.signal(signal.SIGUSR1, ask)  # a question, for those who answer: others would be killed by it
    return os.waitpid(child, 0)[1]


def end_like(status: int) -> None:
    """End this process as the child has ended, so that mpirun sees what it would have seen without us."""
    if os.WIFSIGNALED(status):
        import resource

        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has left one, if any
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        os._exit(128 + number)
    os._exit(os.WEXITSTATUS(status))


def main(argv: list[str]) -> None:
    """See the top of this file."""
    die_with_parent(os.getppid())
    end = argv.index("--")
    first_rank, client_rank, folders, program = int(argv[0]), argv[1], argv[2:end], shown(argv[end + 1 :])
    own_rank = mpi_rank(dict(os.environ))
    if own_rank < 0:
        sys.exit(f"kvmpi: mpirun has set none of {', '.join(RANK_VARIABLES)}; is it the mpirun of another MPI?")
    rank = first_rank + own_rank
    os.environ.update({"KVMPI_ROLE": "worker", "KVMPI_RANK": str(rank)})
    folder = os.environ.get("KVMPI_JOB_DIR", "")
    if folders:
        settle(folders, own_rank == 0)
    keep_clients_apart(client_rank)
    sibling("cores").share_cores(os.environ)
    if os.environ.get("HWLOC_XMLFILE", "").startswith(f"{folder}/"):
        del os.environ["HWLOC_XMLFILE"]  # it was for hydra only, see mpirun.py
    try:
        status_fd = open_fifo(f"{folder}/client-{client_rank}.status")
        outputs = {1: open_fifo(f"{folder}/worker-{rank}.out"), 2: open_fifo(f"{folder}/worker-{rank}.err")}
    except OSError as error:
        if error.errno == errno.ENXIO:
            sys.exit("kvmpi: the launcher is gone")
        raise

    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # a signal to mpirun's group reaches the program once, through us
        die_with_parent(parent)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and so would the program
            signal.signal(number, signal.SIG_DFL)
        # PRRTE never says that its own input has ended: who reads, as a debugger does, would wait for ever.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for target, fd in outputs.items():
            if fd >= 0:
                os.dup2(fd, target)
        try:
            os.execvp(program[0], program)
        except OSError as error:
            os.write(2, f"kvmpi: cannot run {program[0]}: {error.strerror}\n".encode())
            os._exit(127)
    try:
        os.setpgid(child, child)  # also here: a signal may be passed on before the child has got so far
    except OSError:
        pass
    for fd in outputs.values():
        if fd >= 0:
            os.close(fd)
    if folders and own_rank == 0:
        end_with_input(child)
    report(status_fd, f"start {rank} {child}\n")
    status = supervise(child)
    report(status_fd, f"end {rank} {status}\n")
    end_like(status)


if __name__ == "__main__":
    main(sys.argv[1:])
