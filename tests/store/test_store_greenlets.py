"""Libraries that put greenlets in the place of threads: an error says what to do, where waits would be for ever."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types

import pytest
from jobs import HANGS_S

import kvmpi
from kvmpi import errors

USE = """
import numpy as np, kvmpi
with kvmpi.create({name!r}) as kv:
    kv.init("w", np.zeros(10, "f4"))
    out = np.zeros(10, "f4")
    kv.pushpull("w", np.arange(10, dtype="f4"), out)
    print(out.sum())
"""


def patched(how: str, name: str) -> subprocess.CompletedProcess[str]:
    program = f"import gevent.monkey\ngevent.monkey.{how}\n{USE.format(name=name)}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANGS_S, check=False)


needs_gevent = pytest.mark.skipif(importlib.util.find_spec("gevent") is None, reason="needs gevent")


@needs_gevent
@pytest.mark.parametrize("how", ["patch_all()", "patch_all(select=False)", "patch_all(thread=False)", "patch_queue()"])
@pytest.mark.parametrize("name", ["dist_sync", "mpi"])
def test_a_store_refuses_to_wait_among_greenlets(how, name):
    done = patched(how, name)
    assert done.returncode == 1, done.stdout + done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("kvmpi.errors.UnsupportedError: gevent has replaced Python's ")
    assert "call gevent.monkey.patch_all(thread=False, select=False, queue=False)" in last


@needs_gevent
@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("patch_all(thread=False, select=False, queue=False)", "dist_sync"),  # as the error says
        ("patch_socket()", "dist_sync"),
        ("patch_all()", "local"),  # which waits for nobody
    ],
)
def test_with_what_is_left_to_the_system_a_store_works(how, name):
    done = patched(how, name)
    assert (done.returncode, done.stdout) == (0, "45.0\n"), done.stderr


@pytest.mark.parametrize("replaced", [(), ("thread", "select")])
def test_eventlet_is_asked_what_it_has_replaced(replaced, monkeypatch):
    """A module stands in for it, with the one function of it that is called."""
    patcher = types.ModuleType("eventlet.patcher")
    patcher.is_monkey_patched = replaced.__contains__
    monkeypatch.setitem(sys.modules, "eventlet.patcher", patcher)
    if not replaced:
        kvmpi.create("mpi").close()
        return
    with pytest.raises(errors.UnsupportedError, match=r"thread and select .*monkey_patch\(thread=False, select=False"):
        kvmpi.create("mpi")
