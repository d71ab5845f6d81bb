"""Turns what the user named as PROGRAM into a command that can be started, or says why it cannot."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvmpi.errors import ConfigError

#: Options of Python's: followed by a value, in the same word or the next; and of one letter, in any number in a word.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_FLAGS = frozenset("bBdEIOPqsSuvx")
_PYTHON = re.compile(r"python\d*(\.\d+)*")
_NO_INPUT = "a program on standard input: workers have none, and would run nothing; write it to a file, and name that"


class ProgramNotFoundError(ConfigError):
    """PROGRAM does not exist, or cannot be executed."""


@dataclass(frozen=True)
class Program:
    """What every worker runs: ``interpreter`` is empty for anything that is not a Python program."""

    interpreter: tuple[str, ...]
    target: tuple[str, ...]  # a path or ("-m", module)
    args: tuple[str, ...]

    def command(self, runner: Sequence[str] = ()) -> tuple[str, ...]:
        """The command line; ``runner`` are interpreter arguments that run a Python program in their own way."""
        inner = tuple(runner) if self.interpreter else ()
        return (*self.interpreter, *inner, *self.target, *self.args)


def resolve(words: Sequence[str], python: str = sys.executable) -> Program:
    """The program that ``words`` (PROGRAM ARG...) stand for.

    ``-m MODULE``, a ``.py`` file and a script that names Python in its first line run under ``python``, the
    interpreter of the launcher: what ``PATH`` would find is often another environment. So do ``python`` and
    ``python3`` themselves; another Python, by its path or its version, runs the program itself. Everything else is an
    executable, by path or from ``PATH``.

    Raises:
        ProgramNotFoundError: nothing of that name can be run; the message names it.
        ConfigError: there is no program at all, or it is to come by standard input.
    """
    if not words:
        raise ConfigError("no PROGRAM given; for example: kvmpi run -n 2 train.py")
    name, args = words[0], tuple(words[1:])
    if name == "-":
        raise ConfigError(_NO_INPUT)
    if name == "-m":
        if not args:
            raise ConfigError("-m needs the name of a module; for example: kvmpi run -n 2 -m package.train")
        if python == sys.executable:
            _require_module(args[0])
        return Program((python,), ("-m", args[0]), args[1:])
    if _PYTHON.fullmatch(os.path.basename(name)) and (chosen := _interpreter(name, python)):
        # ``python -u train.py`` is the same as ``train.py``, but for the options of Python's own.
        python = chosen
        count = _count_options(args)
        rest = args[count:]
        if rest[:1] in ((), ("-",)):
            raise ConfigError(_NO_INPUT)
        if rest[:1] == ("-m",) or os.path.isfile(rest[0]) or rest[0].endswith(".py"):
            program = resolve(rest, python) if rest[0] == "-m" else _script(rest[0], rest[1:], python)
            return replace(program, interpreter=(python, *args[:count]))
        return Program((), (python,), args)
    if name.endswith(".py") or (
        os.path.isfile(name) and not os.access(name, os.X_OK) and b"python" in _first_line(name)
    ):
        return _script(name, args, python)
    found = shutil.which(name)
    if found is None:
        if os.path.isfile(name) and os.access(name, os.X_OK):
            raise ProgramNotFoundError(f"program {name!r} is in this directory, and PATH is not; call it ./{name}")
        if os.path.isfile(name):
            raise ProgramNotFoundError(
                f"program {name!r} is neither executable nor a Python script; make it executable with chmod +x"
                + ("" if os.sep in name else f" and call it ./{name}")
            )
        if os.path.isdir(name):
            raise ProgramNotFoundError(f"program {name!r} is a directory")
        raise ProgramNotFoundError(f"program {name!r} not found{_where(name)}")
    path = os.path.abspath(found) if os.sep in found else found
    by = _named_in(path)
    return Program(() if by is None else (_interpreter(by, python) or by,), (path,), args)


def _interpreter(name: str, own: str) -> str | None:
    """The Python that is meant by a name or a path."""
    return own if name in ("python", "python3") else shutil.which(name)


def _named_in(path: str) -> str | None:
    """The Python that the first line of an executable script names; None: another, or with options."""
    words = _first_line(path)[2:].decode(errors="replace").split()
    words = words[1:] if words and os.path.basename(words[0]) == "env" else words
    return words[0] if len(words) == 1 and _PYTHON.fullmatch(os.path.basename(words[0])) else None


def _script(name: str, args: tuple[str, ...], python: str) -> Program:
    if not os.path.isfile(name):
        raise ProgramNotFoundError(f"program {name!r} not found{_where(name)}")
    if not os.access(name, os.R_OK):
        raise ProgramNotFoundError(f"program {name!r} cannot be read; check its permissions")
    return Program((python,), (name,), args)


def _count_options(args: Sequence[str]) -> int:
    """How many words at the beginning are options of Python's that leave it to run a program."""
    count = 0
    while count < len(args):
        word = args[count]
        if word in _WITH_VALUE:
            count += 2
        elif word.startswith(_WITH_VALUE) or (word[:1] == "-" and len(word) > 1 and set(word[1:]) <= _FLAGS):
            count += 1
        else:
            break
    return count


def _where(name: str) -> str:
    if os.sep in name:
        return ""
    return " in this directory" if name.endswith(".py") else " on PATH"


def _first_line(path: str) -> bytes:
    """That of a script; empty for anything else."""
    try:
        with open(path, "rb") as file:
            first = file.readline(256)
    except OSError:
        return b""
    return first if first.startswith(b"#!") else b""


def _require_module(module: str) -> None:
    # Only the top-level package is looked up: finding a submodule would import its parents into the launcher.
    top = module.partition(".")[0]
    sys.path.insert(0, os.getcwd())  # as ``python -m`` does
    try:
        found = importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        found = False
    finally:
        del sys.path[0]
    if not found:
        raise ProgramNotFoundError(f"no module named {module!r} for this Python")
