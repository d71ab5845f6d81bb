"""Run by test_torch_c10d: loops of Lightning and Accelerate on kvmpi, against one process with all samples."""

from __future__ import annotations

import functools
import logging
import os
import sys
import tempfile
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kvmpi
import kvmpi.torch.c10d  # registers the backend
from kvmpi.torch import DistributedOptimizer

warnings.simplefilter("ignore")  # theirs, of what they would like to have
torch.set_num_threads(1)

BATCH, EPOCHS, CLIP = 8, 2, 0.5
INPUTS = torch.randn(96, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
TARGETS = (INPUTS.sum(1) > 0).long()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def share(rank: int, size: int) -> TensorDataset:
    return TensorDataset(INPUTS[rank::size], TARGETS[rank::size])


def one_process(size: int, clip: bool) -> torch.Tensor:
    """The mean of the ranks' losses in each step, whose rate is halved after the first epoch."""
    net = network()
    optimizer = sgd(net)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(EPOCHS):
        for batches in zip(*(DataLoader(share(rank, size), BATCH) for rank in range(size)), strict=True):
            optimizer.zero_grad()
            (sum(nn.functional.cross_entropy(net(x), y) for x, y in batches) / size).backward()
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            optimizer.step()
        schedule.step()
    return flat(net)


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def lightning(strategy: Any, data: TensorDataset, devices: int, size: int, clip: bool, wrap: Any) -> None:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_epoch=True, sync_dist=devices > 1)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("check", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=devices > 1)

        def configure_optimizers(self) -> Any:
            optimizer = wrap(sgd(self), self)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    module = Module()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=EPOCHS, accelerator="cpu", devices=devices, strategy=strategy, default_root_dir=folder,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=devices > 1, logger=False,
            use_distributed_sampler=False,
            gradient_clip_val=CLIP if clip else None,
        )  # fmt: skip
        trainer.fit(module, DataLoader(data, BATCH), DataLoader(data, BATCH))
        torch.testing.assert_close(flat(module), one_process(size, clip), atol=1e-12, rtol=0)
        assert trainer.global_step == EPOCHS * len(INPUTS) // (BATCH * size)
        if devices > 1:
            torch.distributed.barrier()  # before the first of them removes its folder, which they share


def _wrapped(kv: kvmpi.KVStore, options: dict[str, Any], optimizer: Any, module: nn.Module) -> DistributedOptimizer:
    return DistributedOptimizer(optimizer, kv, module, **options)


def lightning_with_a_store() -> None:
    for options in ({}, {"update_on_kvstore": True}, {"update_on_kvstore": True, "push": "step"}):
        clip = len(options) != 1  # else it is an error
        with kvmpi.create("mpi") as kv:
            wrap = functools.partial(_wrapped, kv, options)
            lightning("auto", share(kv.rank, kv.num_workers), 1, kv.num_workers, clip, wrap)


def accelerate() -> None:
    from accelerate import Accelerator

    torch.distributed.init_process_group("kvmpi")
    accelerator = Accelerator(cpu=True)
    size = accelerator.num_processes
    assert (size, torch.distributed.get_backend()) == (int(sys.argv[1]), "kvmpi")
    net = network()
    optimizer = sgd(net)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    net, optimizer = accelerator.prepare(net, optimizer)
    for _ in range(EPOCHS):
        for x, y in DataLoader(share(accelerator.process_index, size), BATCH):
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(net(x), y))
            accelerator.clip_grad_norm_(net.parameters(), CLIP)
            optimizer.step()
        schedule.step()
    torch.testing.assert_close(flat(net), one_process(size, True), atol=1e-12, rtol=0)
    assert accelerator.gather(torch.tensor([accelerator.process_index])).tolist() == list(range(size))
    torch.distributed.destroy_process_group()


def main() -> None:
    meeting = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    lightning_with_a_store()
    accelerate()
    from lightning.pytorch.strategies import DDPStrategy

    size = int(sys.argv[1])
    own, strategy = share(int(os.environ["RANK"]), size), DDPStrategy(process_group_backend="kvmpi")
    lightning(strategy, own, size, size, True, lambda optimizer, _: optimizer)
    assert torch.distributed.get_backend() == "kvmpi"
    torch.distributed.destroy_process_group()
    # Below MPI, Lightning lets processes meet at a port of its own. Who comes there once more, for what runs next, may
    # find the store of this group, which is about to end.
    os.environ |= meeting
    print("all train alike", flush=True)


if __name__ == "__main__":
    main()
