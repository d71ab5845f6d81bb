"""Checks how processes of this host share memory: reads from each other, and how fast memory is when all use it."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator

from kvmpi.doctor.finding import Finding, Surroundings, ask
from kvmpi.errors import KVTimeoutError
from kvmpi.launchers import mpirun

PROGRAM = ("-m", "kvmpi.doctor.memory_program")


@contextlib.contextmanager
def _talking(at: Surroundings, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of ``memory_program`` with pipes; it ends with the block."""
    env = {**mpirun.clean(at.environ), "KVMPI_JOB_ID": at.job_id}
    process = subprocess.Popen(
        [sys.executable, *PROGRAM, *words], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


def _line(process: subprocess.Popen[bytes], deadline_s: float) -> list[str]:
    """The words of its next line.

    Raises:
        KVTimeoutError: none came until ``deadline_s`` of ``time.monotonic``, or it has ended.
    """
    assert process.stdout is not None
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline_s - time.monotonic())):
                raise KVTimeoutError("a process that measures memory has said nothing in time")
            part = os.read(process.stdout.fileno(), 4096)
            if not part:
                raise KVTimeoutError("a process that measures memory has ended early")
            line += part
    return line.decode().split()


def cross_memory(at: Surroundings) -> Finding:
    """Whether workers may read from each other's private arrays, and what it costs if not."""
    try:
        with _talking(at, "show") as shown:
            words = _line(shown, time.monotonic() + at.deadline_s)
            answer = ask(at, (sys.executable, *PROGRAM, "read", *words))
    except KVTimeoutError as error:
        return Finding("cross-memory attach", "warning", str(error))
    if answer.status == 0:
        return Finding("cross-memory attach", "ok", "workers of this host read from each other's arrays")
    scope = at.read("/proc/sys/kernel/yama/ptrace_scope")
    if answer.status == 3:
        seen = f"the system refuses it ({answer.last_words(1)})" + (f"; ptrace_scope is {scope}" if scope else "")
        do = "use arrays of kv.empty, which need none of it; or in a container: docker run --cap-add SYS_PTRACE ..."
        if scope in ("2", "3"):
            do += "\nor, as root:\nsysctl kernel.yama.ptrace_scope=1"
            do += "\n(from 3 the system goes back at its next start only)" if scope == "3" else ""
        return Finding(
            "cross-memory attach", "warning", seen, "Workers of a host copy every large private array to shared memory "
            "before others read it: one more pass through memory. Results are the same.", do,
        )  # fmt: skip
    return Finding("cross-memory attach", "warning", f"trying it {answer.end()}: {answer.last_words(1)}")


def memory_rates(at: Surroundings, num_processes: int) -> dict[str, float]:
    """Bytes of result per second that each of so many processes copies and adds, all at once; those of the slowest.

    Raises:
        KVTimeoutError: they did not come to an end.
    """
    deadline_s = time.monotonic() + at.deadline_s
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(_talking(at, "rates")) for _ in range(num_processes)]
        for process in running:
            _line(process, deadline_s)
        for process in running:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        found = [list(map(float, _line(process, deadline_s))) for process in running]
    return {"copy": min(words[0] for words in found), "add": min(words[1] for words in found)}
