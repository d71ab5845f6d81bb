"""Models and batches on the device under test, made as the CPU makes them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import optimizer_loops as loops
import torch
from device_checks import DEVICE, ON_GPU
from torch import nn

STEPS, BATCH = loops.STEPS, loops.BATCH
WIDTH, ROWS = (768, 512) if ON_GPU else (64, 8)


def make(of_cpu: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    return lambda seed: of_cpu(seed).to(DEVICE)


def on_device(of_cpu: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    def get(step: int, rank: int) -> Any:
        rank, x, y = of_cpu(step, rank)
        return rank, x.to(DEVICE), y.to(DEVICE)

    return get


def shard_of(rank: int, step: int) -> Any:
    return on_device(loops.shard)(step, rank)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def images(seed: int) -> nn.Module:
    """Convolutions and batch normalisation, in channels_last."""
    return loops.convolutions(seed).to(DEVICE)


def wide(seed: int) -> nn.Module:
    """Of layers whose gradients take a device a while."""
    torch.manual_seed(seed)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3)).double()


def wide_shard(step: int, rank: int) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return rank, x, torch.randint(0, 3, (ROWS,), generator=generator)


@contextlib.contextmanager
def side_stream() -> Iterator[None]:
    """A stream that does not wait for the default one, as the current one."""
    if not ON_GPU:
        yield
        return
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
    torch.cuda.synchronize()


def flat(tensors: Any) -> torch.Tensor:
    """On the CPU, in float64."""
    return torch.cat([t.detach().double().cpu().reshape(-1) for t in tensors])


def one(model: nn.Module, plain: nn.Module, what: str, tolerance: float) -> None:
    """Both have the same parameters."""
    difference = (flat(model.parameters()) - flat(plain.parameters())).abs().max()
    assert difference <= tolerance, f"{what}: weights differ by {difference}"
