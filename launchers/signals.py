"""Turns signals to a launcher, to end or to ask, into entries of a list and bytes that wake its event loop."""

from __future__ import annotations

import os
import signal
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalCatcher:
    """While open, signals do not interrupt the launcher but are noted; SIGCHLD only wakes it.

    Attributes:
        caught: numbers of the ending signals, in the order in which they came.
        asked: how often SIGUSR1 has come, which asks all processes of the job what they wait for.
        wakeup_fd: becomes readable at every signal; whoever waits on it reads it empty.
    """

    def __init__(self) -> None:
        self.caught: list[int] = []
        self.asked = 0
        self.wakeup_fd, self._write_end = os.pipe()
        os.set_blocking(self.wakeup_fd, False)
        os.set_blocking(self._write_end, False)
        # Under nohup SIGHUP is ignored, and shall stay so. A shell's background job ignores SIGINT, but whoever
        # sends it to us by number wants us to end.
        handled = [n for n in ENDING if n == signal.SIGINT or signal.getsignal(n) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._note) for number in handled}
        self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._note_question)
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        # A mask is inherited, and who has started us may have blocked it: nobody would hear that a child has ended.
        self._mask_before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.caught.append(number)

    def _note_question(self, number: int, frame: FrameType | None) -> None:
        self.asked += 1

    def close(self) -> None:
        """Give the signals back to whom they belonged."""
        signal.set_wakeup_fd(self._wakeup_before)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.wakeup_fd)
        os.close(self._write_end)
