"""Run by test_torch_jobs: the only client is killed, or the job ends and is resumed, before a step that uses no row.

rows_again.py kill|STEPS [FOLDER OF SNAPSHOTS]
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import kvmpi
from kvmpi.torch import Trainer

STEPS, UNUSED_IN, LR, MOMENTUM, DECAY = 5, (2, 3), 0.5, 0.5, 0.25


class Model(nn.Module):
    """``layer`` is used in the same steps as ``table``; in others it decays, and rows of the table do not."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 2, sparse=True)
        self.layer = nn.Linear(3, 2, bias=False)


def main() -> None:
    kills, last = sys.argv[1] == "kill", STEPS if sys.argv[1] == "kill" else int(sys.argv[1])
    with kvmpi.create("dist_sync_mpi") as kv:
        torch.manual_seed(0)
        model = Model()
        table, layer = (p.detach().clone() for p in model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
        trainer = Trainer(model.named_parameters(), optimizer, kv, True)
        for step in range(kv.resumed_step, last):
            if kills and (step, kv.rank, os.environ.get("KVMPI_START", "0")) == (UNUSED_IN[0], 0, "0"):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            if step not in UNUSED_IN:
                model.table(torch.tensor([1, 1 + kv.rank])).sum().backward()
                model.layer(torch.ones(3)).sum().backward()
            trainer.step(1)
        n = kv.num_workers
        momenta = torch.zeros_like(table), torch.zeros_like(layer)
        for step in range(last):
            rows = torch.zeros(5, 2)
            for rank in range(n) if step not in UNUSED_IN else ():
                rows[1] += 1
                rows[1 + rank] += 1
            dense = torch.full_like(layer, float(n) if step not in UNUSED_IN else 0.0)
            used = rows[:, 0] > 0
            momenta[0][used] = MOMENTUM * momenta[0][used] + rows[used] + DECAY * table[used]
            table[used] -= LR * momenta[0][used]
            momenta[1].mul_(MOMENTUM).add_(dense + DECAY * layer)
            layer -= LR * momenta[1]
        torch.testing.assert_close(model.table.weight.detach(), table)
        torch.testing.assert_close(model.layer.weight.detach(), layer)
        if len(sys.argv) > 2:
            until_s = time.monotonic() + 60
            while not [*Path(sys.argv[2]).glob("*/snapshot.json")]:
                assert time.monotonic() < until_s, "no snapshot"
                time.sleep(0.02)
        print(f"as if nothing had happened, from {kv.resumed_step}")


if __name__ == "__main__":
    main()
