"""Jobs of real processes, started as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType


def run_job(
    options: str,
    program: Path,
    *arguments: object,
    timeout_s: float = 120.0,
    settings: Mapping[str, object] = MappingProxyType({}),
) -> subprocess.CompletedProcess[str]:
    """``kvmpi run OPTIONS PROGRAM ARGUMENTS`` with ``KVMPI_*`` settings; output is captured."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
    env.update({f"KVMPI_{name.upper()}": str(value) for name, value in settings.items()})
    command = [sys.executable, "-m", "kvmpi", "run", *options.split(), "--", str(program), *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
