"""Fixtures: the CUDA source on the host, and ``kvmpi.kernels.gpu`` on a stand-in and on a GPU."""

from __future__ import annotations

import ctypes
import importlib
import shutil
import subprocess
import sys
import threading
import types

import numpy as np
import pytest
from device_stand_in import LAUNCH, SHIM, Machine
from jobs import HANGS_S
from kernel_helpers import device_count

from kvmpi import kernels


@pytest.fixture(scope="session")
def compile_for_host(tmp_path_factory):
    """``compile_for_host(code, name)``: the kernel as ``launch(grid, block, args, first_block=0)``, in any thread."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++ to run the CUDA source on the host")
    folder, known = tmp_path_factory.mktemp("kernels"), {}
    lock = threading.Lock()  # what is compiled has one grid, in its variables

    def compiled(code: str, name: str):
        with lock:
            if (code, name) not in known:
                source = folder / f"{name}_{len(known)}.cpp"
                source.write_text(f"{SHIM}\n#line 1\n{code}\n{LAUNCH % name}")
                command = ["g++", "-std=c++14", "-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared"]
                subprocess.run([*command, source, "-o", source.with_suffix(".so")], check=True, timeout=HANGS_S)
                known[code, name] = ctypes.CDLL(str(source.with_suffix(".so"))).launch
        function = known[code, name]
        function.restype = ctypes.c_bool

        def launch(grid: int, block: int, args: tuple, first_block: int = 0) -> None:
            # As CuPy does: a Python integer has 64 bits, a NumPy scalar its own size; the kernel knows what it takes.
            values = [(arg if isinstance(arg, np.generic) else np.int64(arg)).tobytes() for arg in args]
            buffers = [ctypes.create_string_buffer(value.ljust(16, b"\xff"), 16) for value in values]
            pointers = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
            with lock:
                assert function(grid, block, first_block, pointers), f"{name}: a misaligned access"

        return launch

    return compiled


@pytest.fixture
def import_gpu(monkeypatch):
    """``kvmpi.kernels.gpu`` with empty caches, on top of the CuPy that is given or of the real one."""

    def forget() -> None:
        sys.modules.pop("kvmpi.kernels.gpu", None)
        vars(kernels).pop("gpu", None)

    def imported(cupy: types.ModuleType | None = None) -> types.ModuleType:
        if cupy is not None:
            monkeypatch.setitem(sys.modules, "cupy", cupy)
        forget()
        return importlib.import_module("kvmpi.kernels.gpu")

    yield imported
    forget()


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(device_count() == 0, reason="needs CuPy and a GPU")]


@pytest.fixture(params=["stand_in", pytest.param("gpu", marks=ON_GPU)])
def cuda(request, import_gpu):
    """``(gpu, cupy)``, once each on the stand-in and on a GPU."""
    if request.param == "gpu":
        return import_gpu(), importlib.import_module("cupy")
    cupy = Machine(request.getfixturevalue("compile_for_host"), set()).module()
    return import_gpu(cupy), cupy


@pytest.fixture
def stand_in(import_gpu, compile_for_host):
    """``make(peers, early)`` gives ``(gpu, cupy, machine)``."""

    def make(peers: set[tuple[int, int]] = frozenset(), early: bool = False):
        machine = Machine(compile_for_host, peers, early)
        cupy = machine.module()
        return import_gpu(cupy), cupy, machine

    return make
