"""Programs that check arrays on a device: which device that is, and checks that all run and say how each has ended.

With ``DEVICE=cpu`` in the environment they do the same on the host, which shows that they are right themselves.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec.structs
import numpy as np
import pytest

from kvmpi import arrays
from kvmpi.config import Config

DEVICE = os.environ.get("DEVICE", "cuda:0")
ON_GPU = DEVICE != "cpu"
TESTS = Path(__file__).parent
#: Longer than a call's time-out, and that of the store's end behind it.
MEETING_S = 40.0


def device_count() -> int:
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount()
    except Exception:  # no CuPy, no driver or no device: all the same to a test that needs one
        return 0


def cuda_in_torch() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return device_count() > 0 and torch.cuda.is_available()


needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(device_count() == 0, reason="needs CuPy and a GPU")]


@pytest.fixture
def device_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program of checks finds around it, however its processes are started."""
    for name in ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    path = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.setenv("DEVICE", "cuda:0")


def one_host_for_each() -> None:
    """NCCL refuses two ranks on one GPU of a host: let it take every process for a host. Before it is used."""
    if ON_GPU:
        os.environ |= {"NCCL_HOSTID": f"process{os.getpid()}", "NCCL_SOCKET_IFNAME": "lo"}


def placed(flat: np.ndarray, dtype: str, offset: int = 0, device: str = DEVICE) -> arrays.Vector:
    """A copy of a host buffer in storage dtype on the device, ``offset`` elements after the beginning of its memory."""
    if device == "cpu":
        return arrays.Vector(flat.copy(), dtype, "cpu", True)
    import cupy

    memory = cupy.empty(offset + flat.size, flat.dtype)
    memory[offset:] = cupy.asarray(flat)
    if dtype != "bfloat16":
        return arrays.read(memory[offset:])
    raw = arrays.read(memory[offset:].view("i2"))  # CuPy has no such dtype
    return msgspec.structs.replace(raw, buffer=raw.buffer.view("u2"), dtype=dtype)


class Checks:
    """Runs checks one after the other, also when one has failed: each says one line, or what it died of.

    Args:
        only: names of those that are to run; all, if there are none.
        who: what every line begins with.
    """

    def __init__(self, only: list[str], who: str = "") -> None:
        self._only, self._who = only, who
        self._failed: list[str] = []
        self._run: list[str] = []
        self._config = Config.from_env()

    def run(self, check: Callable[..., Any], *arguments: Any) -> None:
        name = " ".join([check.__name__, *(str(a) for a in arguments if isinstance(a, str | int))])
        if self._only and check.__name__ not in self._only and name not in self._only:
            return
        self._run.append(name)
        start_s = time.monotonic()
        try:
            check(*arguments)
            said = f"{name}: right, {time.monotonic() - start_s:.1f} s"
        except Exception:
            self._failed.append(name)
            said = f"{name}: FAILED after {time.monotonic() - start_s:.1f} s\n{traceback.format_exc()}"
        self.say(said)
        self._meet()

    def _meet(self) -> None:
        """Return when all workers of the job are here, so that one's failure is not the next check's: by their files,
        since the library is what is tested."""
        config, number = self._config, len(self._run)
        if config.num_workers == 1 or not config.job_dir:
            return
        folder = Path(config.job_dir)
        (folder / f"check-{number}-{config.rank}").touch()
        deadline_s = time.monotonic() + MEETING_S
        while not all((folder / f"check-{number}-{rank}").exists() for rank in range(config.num_workers)):
            if time.monotonic() > deadline_s:
                self.say(f"{self._run[-1]}: other workers have not ended it {MEETING_S} s later; this one gives up")
                os._exit(1)
            time.sleep(0.01)

    def say(self, text: str) -> None:
        """One write, so that the texts of several processes do not mix."""
        sys.stdout.write(f"{self._who}{text}\n")
        sys.stdout.flush()

    def finish(self) -> int:
        """The exit status."""
        if not self._run:
            self.say(f"no checks are called {', '.join(self._only)}")
            return 1
        self.say(f"failed: {', '.join(self._failed)}" if self._failed else "all checks passed")
        return 1 if self._failed else 0
