"""Runs a Python program as a worker such that an error in it ends the job instead of hanging it.

    python rank_main.py (FILE | -m MODULE) [ARG...]

Exit handlers are told how the program has ended, which Python does not do for ``sys.exit``: a store that is closed in
good order would not be a client that is lost.

At exit mpi4py calls MPI_Finalize, which waits for all ranks of a client: one that has raised would wait for its peers,
and they for it. So an error sets mpi4py's abort status, as ``python -m mpi4py.run`` does; beyond that, the launcher is
told which rank it was, and the traceback starts in the user's program instead of in here.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import os
import pkgutil
import runpy
import sys
import threading
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType

STARTED_AS = os.getpid()


def main() -> None:
    """See the top of this file."""
    try:
        _run()
    except SystemExit as error:
        _leave_if_forked(error.code)
        raise
    _leave_if_forked(None)


def _run() -> None:
    """Run the program; what it ends with, if not in good order, is a ``SystemExit``."""
    del sys.argv[0]
    isolated = sys.flags.isolated or getattr(sys.flags, "safe_path", False)
    is_module = sys.argv[0] == "-m"
    if is_module:
        del sys.argv[0]
    if not isolated:  # what Python would have put there
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(sys.argv[0]))
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            _run_file(sys.argv[0])
    except SystemExit as error:
        if status := _status_of(error):
            sys.last_value = error  # exit handlers look there, to see how the program ended
        _failed(status)
        raise
    except BaseException as error:
        # Flushed before the report: the launcher shows the last lines of whom it holds responsible.
        error.__traceback__ = _users_part(error.__traceback__)
        sys.last_value = error  # as the interpreter does
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
        try:
            sys.excepthook(type(error), error, error.__traceback__)
            with contextlib.suppress(Exception):  # it may be closed, or be an object of the program's
                sys.stderr.flush()
        except SystemExit as end:  # of a hook of the program's
            status = _status_of(end)
            raise
        finally:  # whatever that hook does, the others must not wait
            _failed(status)
        sys.exit(status)


def _status_of(error: SystemExit) -> int:
    """What the process ends with."""
    code = error.code if isinstance(error.code, int) else int(error.code is not None)
    if code and not code & 0xFF:  # as ``os.system`` returns them; the system would make 0 of it
        error.code = code = 1
    return code & 0xFF


def _run_file(name: str) -> None:
    """As Python does it: the program is ``__main__`` until the process ends, also for its threads and exit handlers."""
    if name.endswith(".pyc") or pkgutil.get_importer(name) is not None:  # an archive
        runpy.run_path(name, run_name="__main__")
        return
    loader = SourceFileLoader("__main__", os.path.abspath(name))
    code = loader.source_to_code(loader.get_data(loader.path), loader.path)
    program = sys.modules["__main__"] = ModuleType("__main__")
    vars(program).update(__builtins__=builtins, __file__=loader.path, __cached__=None, __loader__=loader)
    exec(code, vars(program))


def _users_part(traceback: TracebackType | None) -> TracebackType | None:
    """``traceback`` without its first frames, those of who runs the program."""
    ours = {
        __file__,
        runpy.__file__,
        "<frozen runpy>",
        "<frozen importlib._bootstrap>",
        "<frozen importlib._bootstrap_external>",
    }
    while traceback is not None and traceback.tb_frame.f_code.co_filename in ours:
        traceback = traceback.tb_next
    return traceback


def _leave_if_forked(code: object) -> None:
    """End a child that the program has forked from one that speaks MPI: in there MPI's own end would wait for ever."""
    if os.getpid() == STARTED_AS or "mpi4py.MPI" not in sys.modules:
        return
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    vars(threading)["_shutdown"]()  # waits for its threads, as Python does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it may be closed
            stream.flush()
    os._exit((code or 0) & 0xFF)


def _failed(status: int) -> None:
    if status == 0 or os.getpid() != STARTED_AS:  # a child that the program has forked ends through here too
        return
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized() and not module.Is_finalized() and module.COMM_WORLD.size > 1:
        module._set_abort_status(status)  # takes effect at exit, after the program's own exit handlers
    folder, client, rank = (os.environ.get(f"KVMPI_{name}", "") for name in ("JOB_DIR", "CLIENT_RANK", "RANK"))
    try:
        fd = os.open(f"{folder}/client-{client}.status", os.O_WRONLY | os.O_NONBLOCK)
        os.write(fd, f"raised {rank} {status}\n".encode())
        os.close(fd)
    except OSError:  # another host, or the launcher is gone
        pass


if __name__ == "__main__":
    main()
