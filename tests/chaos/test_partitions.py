"""Hosts of a real job are cut off for a while: not one push is lost or counted twice, and the job ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.partitions import Partitions

from kvmpi.errors import ConfigError, UnsupportedError

#: One of each kind, and one after which a server that was taken for lost comes back.
FAULTS = (("server", "apart", True), ("client", "in", False), ("scheduler", "out", False), ("server", "down", False))


def test_a_job_survives_partitions_of_its_hosts() -> None:
    """``python tests/chaos --partitions 30`` does it longer, and with longer ones."""
    try:
        report = Partitions(3, len(FAULTS), short_s=1.0, timeout_s=3.0, long_s=4.5, nbytes=1 << 18, faults=FAULTS).run()
    except (UnsupportedError, ConfigError) as error:
        pytest.skip(f"no hosts, or no MPI: {error}")
    assert report.is_right, f"{report}\n{report.idle}\n{report.left}\n{report.output}"
    assert report.restarted == 1, f"the server that was lost is not back: {report}\n{report.output}"
    print(report)
