"""Gives the hosts of a ``NetLab`` a network that is slow, lossy or forgetful; see ``bad_switch``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from kvmpi.benchmarks.netlab import INTERFACE, NetLab

_SWITCH = Path(__file__).with_name("bad_switch.py")
#: The network namespace of the switch; those of the hosts follow.
_SWITCH_NAMESPACE = 0


class BadNetwork:
    """Inside of the ``with`` block of ``lab``, all frames between its hosts pass ``bad_switch``."""

    def __init__(self, lab: NetLab) -> None:
        self._lab = lab
        self._switch: subprocess.Popen[str] | None = None

    def __enter__(self) -> BadNetwork:
        for host in range(len(self._lab.hosts)):
            words = [sys.executable, "-I", "-S", str(_SWITCH), INTERFACE]
            subprocess.run(self._lab.command_on(host, words), check=True)
            self._lab.configure(None, f"ip link set port{host} nomaster")
            self._lab.configure(None, f"ip link set port{host} promisc on")
        namespace = f"/proc/{os.getpid()}/fd/{self._lab._namespaces[_SWITCH_NAMESPACE]}"
        self._switch = subprocess.Popen(
            ["nsenter", f"--net={namespace}", sys.executable, "-I", "-S", str(_SWITCH), str(len(self._lab.hosts))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._switch.stdout is not None
        assert self._switch.stdout.readline() == "ready\n"
        return self

    def be(self, **conditions: float) -> dict[str, int]:
        """What holds from now on, see ``Conditions``; at ``port`` alone, if that is given. What has happened so far."""
        assert self._switch is not None
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        self._switch.stdin.write(json.dumps(conditions) + "\n")
        self._switch.stdin.flush()
        found: dict[str, int] = json.loads(self._switch.stdout.readline())
        return found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._switch is not None
        self._switch.communicate(timeout=30.0)
