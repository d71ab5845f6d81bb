"""The ``kvmpi`` command: a table of subcommands, each in a module that is imported only when it is used."""

from __future__ import annotations

import argparse
import codecs
import errno
import gc
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence

from kvmpi import __version__

#: Name -> (module with ``main(argv) -> int``, one line of help). To add a subcommand, add a line.
COMMANDS = {
    "run": ("kvmpi.launchers.command", "start a job: scheduler, servers and workers"),
    "doctor": ("kvmpi.doctor.command", "look for what keeps jobs from starting or makes them slow, and say what to do"),
    "top": ("kvmpi.launchers.top", "see what a running job does"),
    "add-server": ("kvmpi.launchers.add_server", "give a running job one more server"),
    "bench": ("kvmpi.benchmarks.command", "measure: collectives beside MPI and gloo, parameter servers beside MXNet"),
    "plan": ("kvmpi.planner.command", "predict a job: steps, epochs, staleness, servers' load; recommend a layout"),
}

_TAKE_VALUES = ("doctor", "bench", "plan")  # in options of their own; run knows where those of a program begin
_START_JOBS = ("run", "doctor", "bench")  # whose processes begin in the current folder, and Open MPI asks for it
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_TEMPORARY_FOLDER = "No usable temporary directory"  # with the number of a file that is not there


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``kvmpi SUBCOMMAND ARG...``; the exit status. A subcommand parses its own arguments."""
    _open_standard_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    command = ""
    try:
        try:
            command = _command(words[:1])
            if command in _START_JOBS and not _is_in_a_folder():
                sys.stderr.write(
                    f"kvmpi {command}: the current folder has been removed, or made anew; cd to one that is there\n"
                )
                return 2
            if command == "doctor" and (said := _lack_of_threads()):  # before NumPy, which ends a process that has none
                sys.stderr.write(f"kvmpi doctor: {said}\n")
                return 1
            if command in _TAKE_VALUES:
                from kvmpi.config import empty_option  # here, where Ctrl-C is caught

                if said := empty_option(words[1:]):
                    sys.stderr.write(f"kvmpi {command}: {said}\n")
                    return 2
            module = importlib.import_module(COMMANDS[command][0])
            if argv is None:  # the process is ours: what was read stays, and is not looked through when it ends
                gc.freeze()
            status: int = module.main(words[1:])
        finally:  # help ends by SystemExit
            sys.stdout.flush()
    except KeyboardInterrupt:  # while it is imported, or of a command that has nothing to end
        return 128 + signal.SIGINT
    except BrokenPipeError:  # who read it has seen enough
        _drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        name = f"kvmpi {command}".rstrip()
        if _NO_TEMPORARY_FOLDER in str(error.strerror):
            sys.stderr.write(f"{name}: {error.strerror}; set TMPDIR to a folder that can be written, with room\n")
            return 1
        if error.errno not in _NO_ROOM:
            raise
        _drop_output()
        sys.stderr.write(f"{name}: {error.filename or 'standard output'}: {error.strerror}\n")
        return 1
    return status


def _command(words: Sequence[str]) -> str:
    parser = argparse.ArgumentParser(
        prog="kvmpi", description="A key-value store for data-parallel training over MPI and parameter servers."
    )
    parser.add_argument("--version", action="version", version=f"kvmpi {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, text) in COMMANDS.items():
        subparsers.add_parser(name, help=text, add_help=False)
    command: str = parser.parse_args(words).command
    return command


def _is_in_a_folder() -> bool:
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


def _lack_of_threads() -> str:
    """What helps where no thread can be started; else nothing."""
    import threading

    try:
        threading.Thread(target=int).start()
    except RuntimeError as error:
        from kvmpi.launchers import limits

        return limits.advice([str(error).encode()])
    return ""


def _drop_output() -> None:
    """What is still to be written to standard output: nothing can be done about it when the process ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def _open_standard_streams() -> None:
    """Whoever starts this without them, as daemons do: the next pipe must not get their numbers."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    for name, fd in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, "w", closefd=False))
    # What a program has called its curves need not be in the locale's alphabet; standard error does this by itself.
    if isinstance(sys.stdout, io.TextIOWrapper) and codecs.lookup(sys.stdout.encoding).name != "utf-8":
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
