"""How the jobs of one launcher are, and their end: of the processes that stand for them one asks, or tells, for all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import time

from kvmpi.launchers.batch import BatchSystem

#: For an answer; meanwhile the one that has asked shows nothing, and gives no sign of life.
ANSWER_S = 10.0
_ANSWER, _LOCK = "answer", "lock"
#: For a system to take note that it is to end jobs.
CANCEL_S = 30.0
#: Until the first who ends its job does so: when a job of thousands is stopped, all of them are to be ended at once.
GATHER_S = 0.3
#: Jobs that one command ends: more would not fit into a command line, and would keep a system busy for long.
MOST_ENDED = 500
_TO_END, _ENDING = ".end", "ending"


class States:
    """One job's part in this.

    Args:
        folder: of this host, where the processes meet: it has a file for each job that has not ended, named by its
            number, and the newest answer, a line for each of these jobs.
    """

    def __init__(self, system: BatchSystem, folder: str, number: str) -> None:
        self._system, self._folder, self._number = system, folder, number
        with contextlib.suppress(OSError):  # then it asks about itself in vain, and can still be ended
            os.makedirs(folder, 0o700, exist_ok=True)
            self._write(number, b"")

    def word(self, most_s: float) -> str:
        """The system's word for the state of this job, of an answer that is at most so old.

        Raises:
            OSError: the system does not answer, or another process is just asking it.
        """
        word = self._known(most_s)
        if word is None:
            with open(os.path.join(self._folder, _LOCK), "wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                word = self._known(most_s)  # of somebody who has asked meanwhile
                if word is None:
                    self._ask()
                    word = self._known(most_s)
        if word is None:
            raise OSError(f"the answer about job {self._number} has come too late")
        return word

    def _known(self, most_s: float) -> str | None:
        """What the newest answer says, if it is not too old; of jobs that nobody knows, a word of our own."""
        try:
            with open(os.path.join(self._folder, _ANSWER), "rb") as file:
                if not 0 <= time.time() - os.fstat(file.fileno()).st_mtime <= most_s:
                    return None
                answer = b"\n" + file.read()
        except FileNotFoundError:
            return None
        _, found, rest = answer.partition(f"\n{self._number} ".encode())
        if not found:
            raise OSError(f"nobody has asked about job {self._number} yet")
        return rest.partition(b"\n")[0].decode()

    def _ask(self) -> None:
        numbers = sorted(name for name in os.listdir(self._folder) if name.isdigit())
        words, nothing = self._system.look(numbers), subprocess.DEVNULL
        try:
            done = subprocess.run(words, capture_output=True, text=True, stdin=nothing, check=False, timeout=ANSWER_S)
        except subprocess.TimeoutExpired:
            raise OSError(f"{words[0]} has not answered for {ANSWER_S:.0f} s") from None
        known = self._system.words(done.stdout)
        if done.returncode != 0 and not _is_unknown(done.stderr) and not known.keys() >= set(numbers):
            raise OSError(f"{words[0]}: {done.stderr.strip()}")
        lines = (f"{number} {known.get(number, 'UNKNOWN')}\n" for number in numbers)
        self._write(f"{_ANSWER}.new", "".join(lines).encode())
        os.replace(os.path.join(self._folder, f"{_ANSWER}.new"), os.path.join(self._folder, _ANSWER))

    def cancel(self) -> None:
        """Have the system end the job, together with all others that are to be ended now."""
        request = os.path.join(self._folder, self._number + _TO_END)
        try:
            self._write(self._number + _TO_END, b"")
            with open(os.path.join(self._folder, _ENDING), "wb") as lock:
                _wait_for(lock.fileno())
                if not os.path.exists(request):
                    return  # somebody has done it
                time.sleep(GATHER_S)
                numbers = sorted(name.removesuffix(_TO_END) for name in os.listdir(self._folder) if _TO_END in name)
                for first in range(0, len(numbers), MOST_ENDED):
                    self._end(numbers[first : first + MOST_ENDED])
        except OSError:  # the launcher may have removed all, or whoever ends jobs takes too long
            self._end([self._number])

    def _end(self, numbers: list[str]) -> None:
        words, nothing = self._system.cancel(numbers), subprocess.DEVNULL
        subprocess.run(words, capture_output=True, stdin=nothing, check=False, timeout=CANCEL_S)
        for number in numbers:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._folder, number + _TO_END))

    def _write(self, name: str, text: bytes) -> None:
        with open(os.path.join(self._folder, name), "wb") as file:
            file.write(text)

    def close(self) -> None:
        """This job has ended, or nobody wants to know."""
        os.unlink(os.path.join(self._folder, self._number))


def _wait_for(lock: int) -> None:
    """Raises OSError: another one has it for too long."""
    until_s = time.monotonic() + CANCEL_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until_s:
                raise
        time.sleep(0.05)


def _is_unknown(text: str) -> bool:
    """Whether a system says that it has no such job, any more."""
    lowered = text.lower()
    return "invalid job id" in lowered or "is not found" in lowered
