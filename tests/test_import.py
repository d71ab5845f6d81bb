"""``import kvmpi`` is cheap: it starts nothing and loads nothing optional."""

from __future__ import annotations

import subprocess
import sys

import pytest
from jobs import HANGS_S

import kvmpi
from kvmpi import cli

PROGRAM = """
import sys, threading
import kvmpi
assert threading.active_count() == 1
loaded = {"mpi4py", "torch", "cupy", "zmq"} & set(sys.modules)
assert not loaded, loaded
kvmpi.create, kvmpi.optim.SGD, kvmpi.errors.KVError, kvmpi.KVStore, kvmpi.Work, kvmpi.register_store
assert threading.active_count() == 1
loaded = {"mpi4py", "torch", "cupy"} & set(sys.modules)
assert not loaded, loaded
kv = kvmpi.create("local")
kv.close()
# Servers and their scheduler are other processes, but where there is no launcher.
assert not {"mpi4py", "torch", "cupy", "kvmpi.ps.daemon"} & set(sys.modules)
"""


def test_the_command_says_its_version(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"kvmpi {kvmpi.__version__}\n"


def test_ctrl_c_while_a_command_is_imported_is_no_error_of_python(monkeypatch):
    def interrupt(name):
        raise KeyboardInterrupt(name)

    monkeypatch.setattr(cli.importlib, "import_module", interrupt)
    assert cli.main(["run", "-n", "1", "true"]) == 130


def test_importing_starts_nothing_and_needs_nothing_optional():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["kvmpi.torch", "kvmpi.horovod"])
def test_without_torch_it_says_what_to_install(name):
    program = f"import sys; sys.modules['torch'] = None; import {name}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert "pip install 'kvmpi[torch]'" in done.stderr.splitlines()[-1]
