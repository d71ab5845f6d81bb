"""What a launcher is asked while its job runs: for one more server, by way of a FIFO in the job's folder."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from kvmpi.errors import ConfigError, KVTimeoutError
from kvmpi.launchers.endings import make_fifo
from kvmpi.launchers.output import LineSplitter

#: In the job's folder, which is its user's alone: where the launcher is asked, and, with a token behind it, answers.
_REQUESTS, _ANSWER = "requests", "answered-"
_PATIENCE_S = 10.0
ENDING = "the job is ending, or has only begun"


class Requests:
    """The launcher's end.

    Attributes:
        fd: readable when somebody asks; whoever reads it has that served, and closes it.
    """

    def __init__(self, folder: str) -> None:
        self._folder, self._splitter = folder, LineSplitter()
        path = os.path.join(folder, _REQUESTS)
        make_fifo(path)
        self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # without any it would read as ended

    def serve(self, chunk: bytes, add: Callable[[], str]) -> None:
        """Tell those who ask in ``chunk`` which server ``add`` has started, or the ConfigError that it has raised."""
        for line in self._splitter.feed(chunk):
            if re.fullmatch(rb"[0-9a-f]{16}", line):
                try:
                    found = {"added": add()}
                except ConfigError as error:
                    found = {"error": str(error)}
                self._answer(line.decode(), found)

    def _answer(self, token: str, found: dict[str, str]) -> None:
        path = os.path.join(self._folder, _ANSWER + token)
        try:
            Path(f"{path}.new").write_text(json.dumps(found))
            os.replace(f"{path}.new", path)
        except OSError:
            pass  # no room: who has asked is told by what the job prints

    def close(self) -> None:
        """Nobody is heard any more."""
        os.close(self._writer)


def ask(folder: Path) -> str:
    """Ask the launcher of the job with this folder for one more server; the server's name.

    Raises:
        ConfigError: the job cannot have one, or none any more.
        KVTimeoutError: the launcher does not answer.
    """
    token = secrets.token_hex(8)
    answer = folder / f"{_ANSWER}{token}"
    try:
        requests = os.open(folder / _REQUESTS, os.O_WRONLY | os.O_NONBLOCK)
        os.write(requests, f"{token}\n".encode())
        os.close(requests)
    except OSError:
        raise ConfigError(ENDING) from None
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        if answer.exists():
            found = json.loads(answer.read_text())
            answer.unlink(missing_ok=True)
            if "error" in found:
                raise ConfigError(found["error"])
            return str(found["added"])
        if not folder.exists():
            raise ConfigError(ENDING)
        time.sleep(0.05)
    raise KVTimeoutError(f"the launcher has said nothing for {_PATIENCE_S:.0f} s; is it stopped?")
