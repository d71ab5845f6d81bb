"""Says which limit of system, batch system or network a process has met, as its words tell, and what helps."""

from __future__ import annotations

import re
import resource
import signal
from collections.abc import Iterable

from kvmpi.launchers.cores import machine

_NO_THREAD = (
    "no thread or process could be started: raise the limit of processes, ulimit -u or pids.max of the cgroup, or that "
    "of memory, ulimit -v, if there is one"
)
_REFUSED_THREADS = (
    "no thread could be started, because this container's filter of system calls refuses clone3: docker run "
    "--security-opt seccomp=unconfined, or a Docker from 20.10.10 on"
)
#: What the system, Python, libzmq, OpenBLAS and Open MPI say, and what helps; the first that fits counts.
_ADVICE = (
    (
        re.compile(rb"Too many open files|ERR_SYS_LIMITS_PIPES"),
        "no descriptors were left: raise the limit of open files, ulimit -n (ulimit -Hn says how far it goes)",
    ),
    (
        # The last is where PRRTE forks; it has no words for that error.
        re.compile(
            rb"can't start new thread|Resource temporarily unavailable|PRTE ERROR: .*odls_default_module\.c at "
        ),
        _NO_THREAD,
    ),
    (
        re.compile(rb"^MemoryError|Cannot allocate memory|failed to map segment|Memory allocation still failed"),
        "there was no memory: raise the limit, ulimit -v or memory.max of the cgroup, or run fewer processes here",
    ),
    (
        re.compile(rb"DUE TO TIME LIMIT|TERM_RUNLIMIT"),
        "its time in the batch system was over: ask for more (--wall-time, or sbatch --time, bsub -W), or go on from "
        "snapshots in another job (--snapshot-dir, --resume)",
    ),
    (
        re.compile(rb"oom[_-]kill event|OOM Killed|TERM_MEMLIMIT"),
        "the batch system gave it no more memory: ask for more (--submit-option=--mem=..., or sbatch --mem, bsub -M)",
    ),
    (
        re.compile(rb"Argument list too long"),
        "the program's arguments are too many for the system, or for an mpirun, which passes them on in an environment "
        "variable of 128 KiB at most: put them into a file",
    ),
    (
        re.compile(rb"File too large"),
        "a file became larger than it may be: raise the limit, ulimit -f, or write to a file system that takes it",
    ),
    (
        re.compile(rb"^(bdb\.)?BdbQuit|^EOFError: EOF when reading a line"),
        "breakpoint() and input() read standard input, and processes of a job have none: try it as a job of one worker "
        "by 'python PROGRAM', or take a debugger that one connects to (debugpy)",
    ),
    (
        re.compile(rb"failed to TCP connect to a peer MPI process|MPI processes are unable to reach each other"),
        "MPI has taken a network that does not lead from host to host, or a firewall is between them: name the network "
        "with --interface (kvmpi doctor --hosts tries it), and let the hosts reach each other's ports",
    ),
)

#: For processes that these signals have killed.
_OF_SIGNALS = {
    signal.SIGXCPU: "it seems to have used all the processor time that it may: raise the limit, ulimit -t, which hosts "
    "for logins often have, or run the job elsewhere",
    signal.SIGXFSZ: "a file became larger than it may be: raise the limit, ulimit -f",
}
#: For a process that was killed by SIGKILL while the kernel has killed some.
OUT_OF_MEMORY = (
    "it seems that the kernel has killed it for want of memory (dmesg says so): raise the limit, memory.max of the "
    "cgroup, docker run --memory, or run fewer processes here"
)


def of_signal(number: int) -> str:
    """What helps a process of this host that a signal has killed; empty where no limit would do that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if number == signal.SIGKILL and resource.RLIM_INFINITY != soft == hard:  # it comes in place of SIGXCPU then
        number = signal.SIGXCPU
    return next((text for its, text in _OF_SIGNALS.items() if its == number), "")


def num_killed_for_memory() -> int:
    """How many processes of this host the kernel has killed for want of memory; 0 where it does not say."""
    try:
        with open("/proc/vmstat") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0


def advice(lines: Iterable[bytes]) -> str:
    """What helps a process whose last words these are; empty if they tell of no limit."""
    words = list(lines)
    found = next((text for pattern, text in _ADVICE if any(map(pattern.search, words))), "")
    return _REFUSED_THREADS if found is _NO_THREAD and machine()["refuses_clone3"]() else found
