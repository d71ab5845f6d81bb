"""A stand-in for NCCL between ranks that are threads, each with a stand-in for CuPy and ``kernels.gpu`` on that."""

from __future__ import annotations

import importlib.util
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
from device_stand_in import Machine

from kvmpi.kernels import host

_lock = threading.Lock()
_DTYPES = {"FLOAT32": "f4", "FLOAT64": "f8", "INT8": "i1", "UINT8": "u1", "INT32": "i4", "INT64": "i8"}


class StandInNcclError(RuntimeError):
    """As ``cupy.cuda.nccl.NcclError``."""


class Wire:
    """What the ranks of one job have in common: they meet, and look into each other's memory."""

    def __init__(self, size: int) -> None:
        self.size, self.calls, self.aborted = size, [list[Any]()] * size, 0
        self._meeting = threading.Barrier(size)

    def exchange(self, rank: int, calls: list[Any]) -> None:
        """All ranks have the same calls, in the same order: each does its part of every one."""
        self.calls[rank] = calls
        self._meet()
        results = [self._result(number) for number in range(len(calls))]
        self._meet()
        for (op, _, recv, count, kind, root), result in zip(calls, results, strict=True):
            if op != "reduce" or root == rank:
                memory(recv, count, kind)[:] = result
        self._meet()

    def _meet(self) -> None:
        try:
            self._meeting.wait(10.0)
        except threading.BrokenBarrierError:
            raise StandInNcclError("a rank did not come") from None

    def _result(self, number: int) -> np.ndarray:
        calls = [calls[number] for calls in self.calls]
        assert len({(op, count, kind, root) for op, _, _, count, kind, root in calls}) == 1, "ranks differ"
        op, _, _, count, kind, root = calls[0]
        sent = [memory(send, count, kind) for _, send, _, _, _, _ in calls]
        if op == "broadcast":
            return sent[root].copy()
        with np.errstate(over="ignore"):
            return np.sum(sent, axis=0, dtype=kind)


def memory(address: int, count: int, kind: str) -> np.ndarray:
    """Memory of a device."""
    holder = types.SimpleNamespace(
        __array_interface__={"data": (address, False), "shape": (count,), "typestr": f"<{kind}", "version": 3}
    )
    return np.asarray(holder)


class Communicator:
    """As ``NcclCommunicator``."""

    def __init__(self, wire: Wire, size: int, identity: bytes, rank: int) -> None:
        assert (size, identity) == (wire.size, b"identity of NCCL".ljust(128, b"."))
        self._wire, self._rank, self.queued = wire, rank, []

    def allReduce(self, send: int, recv: int, count: int, kind: str, op: str, stream: int) -> None:
        assert op == "sum"
        self.queued.append(("allReduce", send, recv, count, kind, 0))

    def reduce(self, send: int, recv: int, count: int, kind: str, op: str, root: int, stream: int) -> None:
        assert op == "sum"
        self.queued.append(("reduce", send, recv, count, kind, root))

    def broadcast(self, send: int, recv: int, count: int, kind: str, root: int, stream: int) -> None:
        self.queued.append(("broadcast", send, recv, count, kind, root))

    def flush(self) -> None:
        calls, self.queued = self.queued, []
        self._wire.exchange(self._rank, calls)

    def check_async_error(self) -> None:
        pass

    def abort(self) -> None:
        self._wire.aborted += 1

    def destroy(self) -> None:
        pass


class StandInModules:
    """In the place of ``kvmpi.collectives.nccl._Modules``, for one rank."""

    def __init__(self, wire: Wire, compile_for_host: Callable[..., Any], bus: str) -> None:
        self.machine = Machine(compile_for_host, set(), early=True)
        self.cupy, self.count = self.machine.module(), 1
        self.cupy.copyto = lambda dst, src, casting="same_kind": np.copyto(dst.memory, src.memory, casting=casting)
        self.cupy.cuda.runtime.deviceGetPCIBusId = lambda device: bus
        self.made: list[Communicator] = []
        self.nccl = types.SimpleNamespace(
            NcclError=StandInNcclError, NCCL_SUM="sum", get_unique_id=lambda: b"identity of NCCL".ljust(128, b"."),
            NcclCommunicator=lambda *words: self.made.append(Communicator(wire, *words)) or self.made[-1],
            groupStart=lambda: None, groupEnd=lambda: [made.flush() for made in self.made],
            **{f"NCCL_{name}": kind for name, kind in _DTYPES.items()},
        )  # fmt: skip
        self.gpu = self._own_gpu()

    def _own_gpu(self) -> Any:
        """``kvmpi.kernels.gpu`` knows one CuPy: each rank has a copy of it."""
        spec = importlib.util.spec_from_file_location("gpu_of_a_rank", host.__file__.replace("host.py", "gpu.py"))
        module = importlib.util.module_from_spec(spec)
        with _lock:
            before = sys.modules.get("cupy")
            sys.modules["cupy"] = self.cupy
            try:
                spec.loader.exec_module(module)
            finally:
                if before is None:
                    del sys.modules["cupy"]
                else:
                    sys.modules["cupy"] = before
        return module
