"""Run by test_torch_streaming: exchanges with the center that fail while a server is stopped, and are made again.

There are two servers, of which the other one answers for its keys.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from raising import raises

import kvmpi
from kvmpi.errors import KVTimeoutError
from kvmpi.torch import DiLoCo, ElasticAveraging

ALPHA, LR, MIXING, SIZES, STEPS = 0.25, 0.5, 0.125, (5, 3, 4, 5), 9


def servers() -> list[int]:
    """Their process ids."""
    mine = f"KVMPI_JOB_DIR={os.environ['KVMPI_JOB_DIR']}\0"
    found = []
    for folder in Path("/proc").iterdir():
        try:
            environment = (folder / "environ").read_text(errors="replace") if folder.name.isdigit() else ""
        except OSError:
            continue
        if mine in environment and "KVMPI_ROLE=server\0" in environment:
            found.append(int(folder.name))
    assert len(found) == 2, found
    return found


def change(step: int) -> torch.Tensor:
    return torch.arange(sum(SIZES), dtype=torch.float64) * step + step % 3


class Oracle:
    """One client and its center, with exchanges that come late where they have failed."""

    def __init__(self, *, elastic: bool, overlap: int) -> None:
        self.elastic, self.overlap = elastic, overlap
        self.w, self.center = torch.zeros(2, sum(SIZES), dtype=torch.float64)

    def merge(self, w: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        """The center meets what was sent; what becomes of weights that are ``w`` by now."""
        met = self.center
        self.center = met + (ALPHA if self.elastic else LR) * (sent - met)
        if self.elastic:
            return w - ALPHA * (sent - met)
        return MIXING * w + (1 - MIXING) * self.center if self.overlap else self.center


def check(store: str, *, elastic: bool, overlap: int, failing: int) -> None:
    """The exchange that begins after step ``failing`` fails, for some keys; what was sent then counts once for all."""
    what = f"{store}, elastic={elastic}, overlap={overlap}, failing={failing}"
    oracle, pid = Oracle(elastic=elastic, overlap=overlap), servers()[0]
    all_weights = torch.zeros(sum(SIZES), dtype=torch.float64)
    w = list(all_weights.split(SIZES))
    pending: torch.Tensor | None = None
    failed: tuple[torch.Tensor, torch.Tensor] | None = None  # what was sent, and the weights when that had failed
    with kvmpi.create(store, timeout_s=1.0) as kv:
        averaging: Any
        if elastic:
            averaging = ElasticAveraging(w, kv, ALPHA, interval=2, overlap=overlap)
        else:
            averaging = DiLoCo(w, kv, 2, LR, momentum=0.0, nesterov=False, overlap=overlap,
                               mixing=MIXING if overlap else 0.0)  # fmt: skip

        def make_up() -> None:
            nonlocal failed
            if failed is not None:
                sent, then = failed
                oracle.w, failed = oracle.merge(then, sent) + (oracle.w - then), None

        for step in range(1, STEPS + 1):
            all_weights += change(step)
            oracle.w = oracle.w + change(step)
            if pending is not None and step != failing + 1:  # from the step before
                oracle.w, pending = oracle.merge(oracle.w, pending), None
            if step == failing:
                os.kill(pid, signal.SIGSTOP)
            if step == failing + overlap:
                with raises(KVTimeoutError, match="no answer from server"):
                    averaging.step()
                os.kill(pid, signal.SIGCONT)
                came = [key.came for key in averaging._failed.values()]
                assert {*came} == {True, False}, f"{what}: one server was stopped, and {came} have come"
                failed, pending = (oracle.w if pending is None else pending, oracle.w), None
            else:
                averaging.step()
                if step % 2 == 0:
                    make_up()
                    pending = oracle.w
                    if not overlap:
                        oracle.w, pending = oracle.merge(oracle.w, pending), None
            found = all_weights.clone()
            torch.testing.assert_close(found, oracle.w, atol=1e-12, rtol=0, msg=lambda m: f"{what}, step {step}: {m}")  # noqa: B023
        averaging.finish()
        if pending is not None:
            oracle.w = oracle.merge(oracle.w, pending)
        make_up()
        torch.testing.assert_close(all_weights, oracle.w, atol=1e-12, rtol=0, msg=lambda m: f"{what}, at the end: {m}")
        center = torch.cat(averaging.pull_center())
        torch.testing.assert_close(center, oracle.center, atol=1e-12, rtol=0, msg=lambda m: f"{what}, center: {m}")
    print(f"right: {what}", flush=True)


def weights_that_go_on(num_stopped: int) -> None:
    """What is on its way when an exchange fails may be read much later: it must not be what steps have made of it.

    Where one of both servers has answered, its part is made up for with the center that it has met then.
    """
    pids, w = servers()[:num_stopped], torch.zeros(4 << 20, dtype=torch.float64)
    # More than fits into the buffers of a connection.
    with kvmpi.create("dist_async", timeout_s=5.0, transport="tcp", window_bytes=1 << 28) as kv:
        elastic = ElasticAveraging([w], kv, ALPHA, interval=1)
        w += 1.0
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        with raises(KVTimeoutError, match="no answer from server"):
            elastic.step()
        w += 1000.0
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        for _ in range(2):
            elastic.step()
        [center] = elastic.pull_center()
        assert torch.equal(w + center, torch.full_like(w, 1001.0)), f"from {(w + center).min()} to {(w + center).max()}"
    print(f"right: weights that go on, {num_stopped} stopped", flush=True)


if __name__ == "__main__":
    for is_elastic in (True, False):
        for steps_meanwhile in (0, 1):
            check("dist_sync", elastic=is_elastic, overlap=steps_meanwhile, failing=4)
            # Made up for by the next exchange, or, where that was the last one, at the end.
            last = 8 if is_elastic == bool(steps_meanwhile) else 4
            check("dist_async", elastic=is_elastic, overlap=steps_meanwhile, failing=last)
    for number in (1, 2):
        weights_that_go_on(number)
