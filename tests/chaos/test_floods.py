"""Servers under clients that push and pull as fast as they can, and never read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.floods import Flood


@pytest.mark.parametrize(("transport", "replicas"), [("ipc", 0), ("tcp", 1)])
def test_a_server_keeps_within_its_memory_under_clients_that_never_read(transport: str, replicas: int) -> None:
    """``python tests/chaos --pusher 60`` does it longer."""
    report = Flood(2.0, replicas=replicas, transport=transport).run()
    assert report.is_right, str(report)
    print(report)
