"""Run by test_torch_streaming: exchanges with the center that fail while the server is stopped, and are made again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import kvmpi
from kvmpi.errors import KVTimeoutError
from kvmpi.torch import DiLoCo, ElasticAveraging

ALPHA, LR, MIXING, COUNT, STEPS = 0.25, 0.5, 0.125, 5, 9


def server() -> int:
    """Its process id."""
    mine = f"KVMPI_JOB_DIR={os.environ['KVMPI_JOB_DIR']}\0"
    for folder in Path("/proc").iterdir():
        try:
            environment = (folder / "environ").read_text(errors="replace") if folder.name.isdigit() else ""
        except OSError:
            continue
        if mine in environment and "KVMPI_ROLE=server\0" in environment:
            return int(folder.name)
    raise AssertionError("there is no server")


def change(step: int) -> torch.Tensor:
    return torch.arange(COUNT, dtype=torch.float64) * step + step % 3


class Oracle:
    """One client and its center, with exchanges that come late where they have failed."""

    def __init__(self, *, elastic: bool, overlap: int) -> None:
        self.elastic, self.overlap = elastic, overlap
        self.w, self.center = torch.zeros(COUNT, dtype=torch.float64), torch.zeros(COUNT, dtype=torch.float64)

    def merge(self, w: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        """The center meets what was sent; what becomes of weights that are ``w`` by now."""
        met = self.center
        self.center = met + (ALPHA if self.elastic else LR) * (sent - met)
        if self.elastic:
            return w - ALPHA * (sent - met)
        return MIXING * w + (1 - MIXING) * self.center if self.overlap else self.center


def check(store: str, *, elastic: bool, overlap: int) -> None:
    what, failing = f"{store}, elastic={elastic}, overlap={overlap}", 4
    oracle, pid = Oracle(elastic=elastic, overlap=overlap), server()
    w = torch.zeros(COUNT, dtype=torch.float64)
    pending: torch.Tensor | None = None
    failed: tuple[torch.Tensor, torch.Tensor] | None = None  # what was sent, and the weights when that had failed
    with kvmpi.create(store, timeout_s=1.0) as kv:
        averaging: Any
        if elastic:
            averaging = ElasticAveraging([w], kv, ALPHA, interval=2, overlap=overlap)
        else:
            averaging = DiLoCo([w], kv, 2, LR, momentum=0.0, nesterov=False, overlap=overlap,
                               mixing=MIXING if overlap else 0.0)  # fmt: skip
        for step in range(1, STEPS + 1):
            w += change(step)
            oracle.w = oracle.w + change(step)
            if pending is not None and step != failing + 1:  # from the step before
                oracle.w, pending = oracle.merge(oracle.w, pending), None
            if step == failing:
                os.kill(pid, signal.SIGSTOP)
            if step == failing + overlap:
                with pytest.raises(KVTimeoutError, match="no answer from server 0"):
                    averaging.step()
                os.kill(pid, signal.SIGCONT)
                failed, pending = (oracle.w if pending is None else pending, oracle.w), None
            else:
                averaging.step()
                if step % 2 == 0:
                    if failed is not None:
                        sent, then = failed
                        oracle.w, failed = oracle.merge(then, sent) + (oracle.w - then), None
                    pending = oracle.w
                    if not overlap:
                        oracle.w, pending = oracle.merge(oracle.w, pending), None
            torch.testing.assert_close(w, oracle.w, atol=1e-12, rtol=0, msg=lambda m: f"{what}, step {step}: {m}")  # noqa: B023
        averaging.finish()
        if pending is not None:
            oracle.merge(oracle.w, pending)
        [center] = averaging.pull_center()
        torch.testing.assert_close(center, oracle.center, atol=1e-12, rtol=0, msg=lambda m: f"{what}, center: {m}")
    print(f"right: {what}", flush=True)


if __name__ == "__main__":
    for kind in ("dist_sync", "dist_async"):
        for is_elastic in (True, False):
            for steps_meanwhile in (0, 1):
                check(kind, elastic=is_elastic, overlap=steps_meanwhile)
