"""Run by test_horovod on 2 and 3 ranks: gradients through Horovod's operations against one process in float64."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from raising import raises

import kvmpi.horovod as hvd
from kvmpi.errors import UnsupportedError

torch.set_num_threads(1)

#: From the tensors of all ranks to the result of each.
Oracle = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


def value(rank: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(17 + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def loss_of(result: torch.Tensor, rank: int) -> torch.Tensor:
    """Another one on each rank, and not linear."""
    weights = torch.arange(1, result.numel() + 1, dtype=torch.float64).reshape(result.shape)
    return (weights * (rank + 2) * result.sin()).sum()


def through(op: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor, penalty: bool) -> torch.Tensor | None:
    """The gradient of this rank's loss, or of the square of that gradient."""
    tensor = tensor.clone().requires_grad_()
    loss = loss_of(op(2 * tensor), hvd.rank())
    if penalty:
        loss = torch.autograd.grad(loss, tensor, create_graph=True)[0].square().sum()
    loss.backward()
    return tensor.grad


def expected(oracle: Oracle, tensors: Sequence[torch.Tensor], scale: float, penalty: bool) -> tuple[torch.Tensor, ...]:
    """The gradient of all ranks' losses together, times ``scale``."""
    tensors = [tensor.clone().requires_grad_() for tensor in tensors]
    results = oracle([2 * tensor for tensor in tensors])
    loss = sum(loss_of(result, rank) for rank, result in enumerate(results))
    if penalty:
        loss = sum(g.square().sum() for g in torch.autograd.grad(loss, tensors, create_graph=True, allow_unused=True))
    found = torch.autograd.grad(scale * loss, tensors, allow_unused=True)
    return tuple(torch.zeros_like(t) if g is None else g for t, g in zip(tensors, found, strict=True))


def agree(
    what: str, op: Callable[[torch.Tensor], torch.Tensor], oracle: Oracle, shapes: Sequence[Sequence[int]],
    scale: float = 1.0, *, penalty: bool = False,
) -> None:  # fmt: skip
    tensors = [value(rank, *shape) for rank, shape in enumerate(shapes)]
    wanted = expected(oracle, tensors, scale, penalty)[hvd.rank()]
    found = through(op, tensors[hvd.rank()], penalty)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, msg=lambda m: f"{what}: {m}")


def sums(size: int) -> None:
    like = [(3, 4)] * size
    for op, factor in ((hvd.Sum, 1.0), (hvd.Average, 1 / size)):

        def total(tensors: Sequence[torch.Tensor], factor: float = factor) -> list[torch.Tensor]:
            return [factor * sum(tensors)] * size

        def doubled(tensors: Sequence[torch.Tensor], total: Oracle = total) -> list[torch.Tensor]:
            return [3 * one + one.exp() for one in total(tensors)]

        def grouped(tensor: torch.Tensor, op: Any = op) -> torch.Tensor:
            tripled, _, exponent = hvd.grouped_allreduce([3 * tensor, tensor.detach(), tensor], op=op)
            return tripled + exponent.exp()

        for penalty in (False, True):
            agree(f"allreduce {op}", lambda one, op=op: hvd.allreduce(one, op=op), total, like, penalty=penalty)
        agree(f"grouped_allreduce {op}", grouped, doubled, like)
        for rows in (size, 2 * size + 1):  # Horovod's is the number of ranks times that of the losses' sum
            agree(
                f"reducescatter {op} of {rows} rows",
                lambda one, op=op: hvd.reducescatter(one, op=op, prescale_factor=0.5),
                lambda tensors, total=total: list((0.5 * total(tensors)[0]).tensor_split(size)),
                [(rows, 2)] * size,
                size,
            )


def moves(size: int) -> None:
    uneven = [(rank % 2 + rank, 3) for rank in range(size)]  # none of rank 0
    for name, gather in (("allgather", hvd.allgather), ("grouped", lambda one: hvd.grouped_allgather([one])[0])):
        agree(name, gather, lambda tensors: [torch.cat(list(tensors))] * size, uneven, 1 / size)
    agree("grouped_reducescatter", lambda one: hvd.grouped_reducescatter([one], op=hvd.Sum)[0],
          lambda tensors: list(sum(tensors).tensor_split(size)), [(4, 2)] * size, size)  # fmt: skip
    root = size - 1
    agree("broadcast", lambda one: hvd.broadcast(one, root), lambda tensors: [tensors[root]] * size, [(2, 3)] * size,
          1 / size)  # fmt: skip
    splits = [[(rank + 2 * to) % 3 for to in range(size)] for rank in range(size)]

    def parts(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        cut = [tensor.split(of) for tensor, of in zip(tensors, splits, strict=True)]
        return [torch.cat([cut[source][rank] for source in range(size)]) for rank in range(size)]

    for penalty in (False, True):
        agree("alltoall with splits", lambda one: hvd.alltoall(one, splits[hvd.rank()])[0], parts,
              [(sum(of), 2) for of in splits], penalty=penalty)  # fmt: skip
    splits = [[2] * size for _ in range(size)]
    agree("alltoall", hvd.alltoall, parts, [(2 * size, 2)] * size)


def contrast(rank: int, size: int) -> None:
    """Each rank's loss is over the embeddings of all, the weights are the same: as one process that has all samples."""
    samples = [value(r, 2 + r, 5) for r in range(size)]
    start = value(99, 5, 3)

    def loss(embeddings: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(embeddings @ embeddings.t(), dim=1).sum()

    weights = torch.nn.Parameter(start.clone())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weights], lr=0.1), [("weights", weights)], op=hvd.Sum)
    loss(hvd.allgather(samples[rank] @ weights)).backward()
    optimizer.step()
    alone = torch.nn.Parameter(start.clone())
    loss(torch.cat(samples) @ alone).backward()
    torch.testing.assert_close(weights.detach(), (alone - 0.1 * alone.grad).detach(), rtol=1e-12, atol=1e-12)


def main() -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    assert size == int(sys.argv[1])
    sums(size)
    moves(size)
    contrast(rank, size)
    tensor = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not hvd.allgather(tensor).requires_grad
    found = hvd.allreduce(tensor, op=hvd.Max)
    with raises(UnsupportedError, match=re.escape("allreduce: hvd.Max has no gradient; detach the tensor")):
        found.sum().backward()
    print("all gradients agree", flush=True)


if __name__ == "__main__":
    main()
