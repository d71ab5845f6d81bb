"""Stands for one process that a batch system runs: submits it, shows what it writes, ends with it, and takes it along.

    batch_exec.py SYSTEM FOLDER NAME RESOURCES -- COMMAND [ARG...]

The launcher starts this as it would start an ssh, and writes the same to its standard input; ``COMMAND`` is
remote_exec. Since nobody there can read that pipe, it goes through files in ``FOLDER``, which has to be on a file
system that all hosts share: what is to run, signals to pass on, and a sign of life, without which the process ends.
``RESOURCES`` is JSON. When the launcher ends, the batch job is cancelled.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from kvmpi.launchers.batch import ENDED, QUEUED, RUNS, SYSTEMS, WAITS, BatchSystem, Resources, script
from kvmpi.launchers.batch_states import States

POLL_S = 1.0
#: While a job runs it says itself when it ends: the system is asked seldom, since many may ask it.
RUNS_S = 5.0
#: A system that does not answer is asked again for so long.
PATIENCE_S = 120.0
#: After the end of a batch job, for its last output to come over a shared file system.
SETTLE_S = 5.0
#: Added to the time that a process has to end, for the order to come there; less than what the launcher adds.
ORDER_S = 1.0
PR_SET_PDEATHSIG = 1


class Follower:
    """Shows what a growing file gets."""

    def __init__(self, path: str, target: int) -> None:
        self._path, self._target, self._read = path, target, 0

    def show(self) -> bytes:
        """Copy what is new; that."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._read)
                new = file.read()
        except OSError:
            return b""
        self._read += len(new)
        written = 0
        while written < len(new):
            written += os.write(self._target, new[written:])
        return new


class BatchJob:
    """One job of the batch system, from its submission to its end."""

    def __init__(self, system: BatchSystem, folder: str, name: str, command: Sequence[str], asked: Resources) -> None:
        self._system, self._name = system, name
        # One that is started again has files of its own: the process before it may not have learnt that it is over.
        attempts = (os.path.join(folder, name + suffix) for suffix in ("", *(f".{i}" for i in range(2, 10_000))))
        self._base = next(base for base in attempts if not os.path.exists(f"{base}.spec"))
        self._out, self._err = Follower(f"{self._base}.out", 1), Follower(f"{self._base}.err", 2)
        self._command, self._asked = [*command, self._base], asked
        self._states: States | None = None
        self.grace_s = 0.0
        self._end_word = b""
        self._tail = b""
        self.status: int | None = None

    def submit(self, spec: bytes) -> None:
        """Put down what is to run, and submit it.

        Raises:
            OSError: the files cannot be written, or the system refuses.
        """
        self._write("spec", spec, 0o600)
        self._write("orders", b"", 0o600)
        self._write("alive", b"", 0o600)
        self._write("sh", script(self._command, f"{self._base}.out", f"{self._base}.err").encode(), 0o700)
        told = json.loads(spec)
        self.grace_s = float(told["env"]["KVMPI_GRACE_S"])
        self._end_word = f"{told['word']} end ".encode()
        path = f"{self._base}.sh"
        words = self._system.submit(self._name, path, f"{self._base}.out", f"{self._base}.err", self._asked)
        done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        if done.returncode != 0:
            raise OSError(f"{words[0]} refuses with status {done.returncode}: {(done.stderr or done.stdout).strip()}")
        try:
            number = self._system.number(done.stdout)
        except ValueError as error:
            raise OSError(str(error)) from None
        here = os.environ.get("KVMPI_JOB_DIR") or os.path.dirname(self._base)
        self._states = States(self._system, os.path.join(here, "states"), number)
        os.write(2, f"{told['word']} submitted\n".encode())

    def _write(self, kind: str, text: bytes, mode: int) -> None:
        with os.fdopen(os.open(f"{self._base}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(text)

    def order(self, text: bytes) -> None:
        """Pass numbers of signals on."""
        with open(f"{self._base}.orders", "ab") as file:
            file.write(text)

    def show(self) -> None:
        """Copy what it has written, and see whether that says that it has ended."""
        os.utime(f"{self._base}.alive")
        self._out.show()
        self._tail = (self._tail + self._err.show())[-4096:]
        place = self._tail.rfind(self._end_word) if self._end_word else -1
        if place >= 0 and b"\n" in self._tail[place:]:
            code = os.waitstatus_to_exitcode(int(self._tail[place + len(self._end_word) :].split()[0]))
            self.status = code if code >= 0 else 128 - code

    def look(self, most_s: float) -> tuple[str, str]:
        """Whether it waits, runs or has ended, and the system's own word for that; a job nobody knows has ended.

        Args:
            most_s: how old the answer may be.
        Raises:
            OSError: the system does not answer.
        """
        assert self._states is not None
        word = self._states.word(most_s)
        return self._system.state(word), word

    def cancel(self) -> None:
        """Have the system end it."""
        if self._states is not None:
            self._states.cancel()

    def close(self) -> None:
        """Nobody has to ask about it any more."""
        if self._states is not None:
            with contextlib.suppress(OSError):  # the launcher may have removed all
                self._states.close()


def follow(job: BatchJob, orders: int) -> int:
    """Until the job ends, or the launcher does; an exit status."""
    told, waited, ending_s, silent_since_s = "", False, None, None
    look_s = POLL_S
    next_look_s = time.monotonic() + look_s
    while True:
        readable, _, _ = select.select([orders] if orders >= 0 else [], [], [], POLL_S / 4)
        if readable:
            text = os.read(orders, 4096)
            job.order(text or f"{int(signal.SIGTERM)}\n".encode())
            if not text:
                orders = -1
            numbers = [int(word) for word in text.split()] or [signal.SIGTERM]
            if signal.SIGTERM in numbers:
                ending_s = time.monotonic() + job.grace_s + ORDER_S
            if signal.SIGKILL in numbers:
                job.cancel()
                return 128 + signal.SIGKILL
        job.show()
        if job.status is not None:
            return job.status
        now_s = time.monotonic()
        if ending_s is not None and now_s >= ending_s:
            job.cancel()
            return 128 + signal.SIGTERM
        if now_s < next_look_s:
            continue
        try:
            state, word = job.look(look_s)
            silent_since_s = None
            look_s = RUNS_S if state == RUNS else POLL_S
            next_look_s = time.monotonic() + look_s
        except OSError as error:
            next_look_s = time.monotonic() + POLL_S
            silent_since_s = silent_since_s or now_s
            if now_s - silent_since_s > PATIENCE_S:
                raise OSError(f"no answer for {PATIENCE_S:.0f} s: {error}") from None
            continue
        if state == WAITS and told != word:
            _say(f"{job._name}{QUEUED}{word})")
        if state == RUNS and waited:
            _say(f"{job._name} runs ({word})")
        waited = state == WAITS
        if state == WAITS and ending_s is not None:
            job.cancel()  # nobody is there to be asked gently
            return 128 + signal.SIGTERM
        told = word
        if state == ENDED:
            deadline_s = time.monotonic() + SETTLE_S
            while job.status is None and time.monotonic() < deadline_s:
                time.sleep(0.1)
                job.show()
            if job.status is None:
                _say(f"{job._name} was ended by the batch system ({word})")
            return 1 if job.status is None else job.status


def _say(text: str) -> None:
    os.write(2, f"kvmpi: {text}\n".encode())


def main(argv: list[str]) -> int:
    """See the top of this file."""
    system, folder, name, resources = argv[:4]
    command = argv[argv.index("--") + 1 :]
    if sys.platform == "linux":  # the launcher asks for SIGKILL, after which nobody would cancel the job
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the launcher says by its pipe what it wants
    spec = b""
    while not spec.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return 1
        spec += byte
    given = json.loads(resources)
    asked = Resources(**{**given, "extra": tuple(given.get("extra", ()))})
    job = BatchJob(SYSTEMS[system], folder, name, command, asked)
    try:
        job.submit(spec)
        return follow(job, 0)
    except OSError as error:
        _say(f"{name}: {error}")
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            job.cancel()
        return 1
    except BaseException:
        job.cancel()
        raise
    finally:
        job.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
