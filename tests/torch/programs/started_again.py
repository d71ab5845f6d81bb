"""Run by test_torch_trainer: worker 0 is killed once; what its client pushes next, it has to learn by itself."""

from __future__ import annotations

import os
import signal

import torch
from torch import nn

import kvmpi
from kvmpi.torch import Trainer

STEPS, KILLED_AT, LR, MOMENTUM = 5, 2, 0.5, 0.5


class Model(nn.Module):
    """``others`` is used by the last worker only, ``unused`` and ``scale`` by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 2, sparse=True)
        self.others = nn.Embedding(4, 2, sparse=True)
        self.unused = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor(1.0))


def rows_of_table(step: int, rank: int) -> list[int]:
    """Which rows a worker uses; worker 1 none in the first step after the kill."""
    return [] if (step, rank) == (KILLED_AT, 1) else [step, rank]


def rows_of_others(step: int, rank: int) -> list[int]:
    return [step % 3] if rank == 2 else []


def main() -> None:
    with kvmpi.create("dist_sync_mpi") as kv:
        torch.manual_seed(0)
        model = Model()
        first = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        trainer = Trainer(model.named_parameters(), optimizer, kv, True)
        for step in range(kv.resumed_step, STEPS):
            if (step, kv.rank, os.environ.get("KVMPI_START", "0")) == (KILLED_AT, 0, "0"):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            for table, rows in (
                (model.table, rows_of_table(step, kv.rank)), (model.others, rows_of_others(step, kv.rank)),
            ):  # fmt: skip
                if rows:
                    (table(torch.tensor(rows)).sum() * (kv.rank + 1)).backward()
            trainer.step(1)
        for table, rows_of, value in (
            (model.table, rows_of_table, first["table.weight"]), (model.others, rows_of_others, first["others.weight"]),
        ):  # fmt: skip
            momentum = torch.zeros_like(value)
            for step in range(STEPS):
                gradient = torch.zeros_like(value)
                for rank in range(kv.num_workers):
                    for row in rows_of(step, rank):
                        gradient[row] += rank + 1
                changed = gradient[:, 0] > 0  # of the others the momentum stays as well
                momentum[changed] = MOMENTUM * momentum[changed] + gradient[changed]
                value[changed] -= LR * momentum[changed]
            torch.testing.assert_close(table.weight.detach(), value)
        for name in ("unused.weight", "unused.bias", "scale"):
            assert torch.equal(model.get_parameter(name), first[name]), name
        print("as if nothing had happened")


if __name__ == "__main__":
    main()
