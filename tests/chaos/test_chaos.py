"""Servers, masters, workers and the scheduler of a real job are killed, and not one push is lost or counted twice."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.harness import ROLES, Chaos


def test_a_job_survives_kills_of_all_its_processes() -> None:
    """``python tests/chaos`` does it longer."""
    report = Chaos(seed=5, kills=len(ROLES), nbytes=1 << 18).run()
    assert report.is_right, f"{report}\n{report.left}\n{report.output}"
    assert set(report.killed) == set(ROLES), f"somebody was spared: {report}"
    print(report)
