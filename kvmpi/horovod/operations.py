"""Horovod's operations on tensors. All ranks call the same ones in the same order; names are for messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from kvmpi.compiling import not_compiled
from kvmpi.errors import ConfigError, UnsupportedError
from kvmpi.horovod import basics
from kvmpi.horovod.compression import Compression, NoneCompressor
from kvmpi.horovod.gradients import through
from kvmpi.horovod.handles import Handle, first
from kvmpi.horovod.unsupported import check_process_set
from kvmpi.torch.group import GroupWork

Compressor = type[NoneCompressor]


class Operation:
    """How ranks' tensors become one: ``Average``, ``Sum``, ``Min``, ``Max``, ``Product``."""

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind

    def __repr__(self) -> str:
        return f"hvd.{self.name}"


Average, Sum = Operation("Average", "avg"), Operation("Sum", "sum")
Min, Max, Product = Operation("Min", "min"), Operation("Max", "max"), Operation("Product", "product")
#: Horovod's own combination of gradients, which kvmpi does not have: an error where it is used.
Adasum = Operation("Adasum", "")


def chosen(op: Operation | None, average: bool | None, where: str) -> Operation:
    """The operation that is meant; by default the average.

    Raises:
        ConfigError: ``op`` is none of this module, or contradicts ``average``.
        UnsupportedError: Adasum.
    """
    if op is not None and average is not None:
        raise ConfigError(f"{where}: op and average are both given; average is the old way to say it")
    op = op or (Sum if average is False else Average)
    if not isinstance(op, Operation):
        raise ConfigError(f"{where}: op={op!r}; use hvd.Average, hvd.Sum, hvd.Min, hvd.Max or hvd.Product")
    if op is Adasum:
        raise UnsupportedError(f"{where}: Adasum is not supported; use hvd.Average or hvd.Sum")
    return op


# ---- allreduce


def _check_linear(op: Operation, title: str) -> None:
    if op not in (Average, Sum):
        raise UnsupportedError(
            f"{title}: {op} has no gradient; detach the tensor, or use hvd.Average or hvd.Sum where gradients flow"
        )


@not_compiled
def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None, op: Operation | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: Any = None,
) -> Handle:  # fmt: skip
    """Start to reduce several tensors, as one, in place."""
    return start_allreduce(list(tensors), True, _title("grouped_allreduce", name), average, op, prescale_factor,
                            postscale_factor, process_set)  # fmt: skip


def _times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """A tensor of the same dtype; of integers what is behind the point is left out."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor * factor
    return (tensor.double() * factor).to(tensor.dtype)


@not_compiled
def start_allreduce(
    tensors: list[torch.Tensor], in_place: bool, title: str, average: bool | None, op: Operation | None,
    prescale: float, postscale: float, process_set: Any, compression: Compressor = Compression.none,
) -> Handle:  # fmt: skip
    """Start to reduce tensors as one, in place or into new ones, which are the result."""
    check_process_set(process_set)
    op = chosen(op, average, title)
    sent, contexts = [], []
    for tensor in tensors:
        scaled = tensor.detach()
        if prescale != 1.0:
            scaled = _times(scaled, prescale)
        packed, context = compression.compress(scaled)
        own = in_place and packed.data_ptr() == tensor.data_ptr()
        # What is sent is overwritten: it must be the caller's only where that is what the caller wants.
        fresh = own or prescale != 1.0 or context is not None
        sent.append(packed if fresh else packed.clone())
        contexts.append(context)
    work = basics.group().reduce_all(sent, op.kind, _agreed(title, op, postscale))

    def result() -> list[torch.Tensor]:
        found = []
        for tensor, packed, context in zip(tensors, sent, contexts, strict=True):
            out = compression.decompress(packed, context)
            if postscale != 1.0:
                out = _times(out, postscale)
            if in_place:
                if out.data_ptr() != tensor.data_ptr():
                    tensor.detach().copy_(out)
                out = tensor
            found.append(out)
        return found

    return Handle([work], result)


@not_compiled
def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None, op: Operation | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: Any = None,
) -> Handle:  # fmt: skip
    """Start to reduce several tensors, as one, into new ones."""
    return start_allreduce(list(tensors), False, _title("grouped_allreduce", name), average, op, prescale_factor,
                            postscale_factor, process_set)  # fmt: skip


@not_compiled
def grouped_allreduce(
    tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
    compression: Compressor = Compression.none, op: Operation | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: Any = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Reduce several tensors, as one, into new ones. Gradients flow through it."""
    title = _title("grouped_allreduce", name)
    op = chosen(op, average, title)
    return list(_reduced(tensors, title, op, prescale_factor, postscale_factor, process_set, compression))


@not_compiled
def grouped_allreduce_(
    tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None, op: Operation | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: Any = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Reduce several tensors, as one, in place."""
    return grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    ).wait()  # fmt: skip


@not_compiled
def allreduce_async(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: Operation | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: Any = None,
) -> Handle:  # fmt: skip
    """Start ``allreduce``. The result does not remember how it was computed."""
    return first(start_allreduce([tensor], False, _title("allreduce", name), average, op, prescale_factor,
                                   postscale_factor, process_set))  # fmt: skip


@not_compiled
def allreduce_async_(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: Operation | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: Any = None,
) -> Handle:  # fmt: skip
    """Start ``allreduce_``."""
    return first(start_allreduce([tensor], True, _title("allreduce", name), average, op, prescale_factor,
                                   postscale_factor, process_set))  # fmt: skip


def _reduced(
    tensors: Sequence[torch.Tensor], title: str, op: Operation, prescale: float = 1.0, postscale: float = 1.0,
    process_set: Any = None, compression: Compressor = Compression.none,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Tensors reduced as one. The gradient of a sum or mean is the same reduction of the gradients."""
    options = prescale, postscale, process_set, compression

    def run(*some: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(start_allreduce(list(some), False, title, None, op, *options).wait())

    def back(*gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _check_linear(op, title)
        return _reduced(gradients, f"gradient of {title}", op, *options)

    return through(run, back, tensors)


@not_compiled
def allreduce(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None,
    compression: Compressor = Compression.none, op: Operation | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Reduce a tensor over all ranks into a new one, by default to the average. Gradients flow through it.

    Args:
        average: the old way to choose between ``Average`` and ``Sum``.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``; the average of integers is rounded toward zero.
        compression: ``Compression.fp16`` halves what travels.
        prescale_factor, postscale_factor: the tensor is multiplied before it travels, and the result afterwards.
    """
    title = _title("allreduce", name)
    op = chosen(op, average, title)
    return _reduced([tensor], title, op, prescale_factor, postscale_factor, process_set, compression)[0]


@not_compiled
def allreduce_(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: Operation | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: Any = None,
) -> torch.Tensor:  # fmt: skip
    """``allreduce`` in place."""
    return allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set).wait()


@not_compiled
def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None = None, op: Operation | None = None, process_set: Any = None
) -> Handle:
    """Start to sum or average a sparse tensor (COO) into a new one: only what is there travels.

    Raises:
        ConfigError: the tensor is dense.
    """
    check_process_set(process_set)
    title = _title("sparse_allreduce", name)
    op = chosen(op, None, title)
    if tensor.layout is not torch.sparse_coo:
        raise ConfigError(f"{title}: a tensor of layout {tensor.layout}; use hvd.allreduce for dense ones")
    own = tensor.detach().coalesce().clone()
    return Handle([basics.group().sum_sparse(own, op.kind, _agreed(title, op))], lambda: own)


# ---- moves


@not_compiled
def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> Handle:
    """Start ``allgather``."""
    check_process_set(process_set)
    return first(_gathers(_start_gathers([tensor], _title("allgather", name))))


@not_compiled
def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: Any = None
) -> Handle:
    """Start ``grouped_allgather``."""
    check_process_set(process_set)
    return _gathers(_start_gathers(tensors, _title("grouped_allgather", name)))


@not_compiled
def allgather(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """The tensors of all ranks, one behind the other in the first dimension, in which alone they may differ.

    Gradients flow through it: the mean over ranks of those of this rank's rows.
    """
    check_process_set(process_set)
    return _gathered([tensor], _title("allgather", name))[0]


@not_compiled
def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: Any = None
) -> list[torch.Tensor]:
    """``allgather`` of each of several tensors. Gradients flow through it."""
    check_process_set(process_set)
    return list(_gathered(tensors, _title("grouped_allgather", name)))


def _start_gathers(tensors: Sequence[torch.Tensor], title: str) -> list[GroupWork]:
    return [basics.group().all_gather_rows(tensor, title) for tensor in tensors]


def _gathers(works: Sequence[GroupWork]) -> Handle:
    return Handle(works, lambda: [work.result()[0] for work in works])


def _gathered(tensors: Sequence[torch.Tensor], title: str) -> tuple[torch.Tensor, ...]:
    rows: list[list[int]] = []

    def run(*some: torch.Tensor) -> tuple[torch.Tensor, ...]:
        works = _start_gathers(some, title)
        rows[:] = [work.result()[1] for work in works]
        return tuple(_gathers(works).wait())

    def back(*gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        means, own = _reduced(gradients, f"gradient of {title}", Average), basics.rank()
        return tuple(mean.narrow(0, sum(of[:own]), of[own]) for mean, of in zip(means, rows, strict=True))

    return through(run, back, tensors)


@not_compiled
def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Handle:
    """Start ``broadcast_``."""
    check_process_set(process_set)
    check_root(root_rank)
    work = basics.group().broadcast([tensor], root_rank)
    return Handle([work], lambda: tensor)


@not_compiled
def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Handle:
    """Start ``broadcast``."""
    return broadcast_async_(tensor.detach().clone(), root_rank, name, process_set)


@not_compiled
def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """The tensor takes what it holds on ``root_rank``."""
    return broadcast_async_(tensor, root_rank, name, process_set).wait()


@not_compiled
def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """A new tensor that holds what ``tensor`` holds on ``root_rank``.

    Gradients flow through it: on ``root_rank`` the mean over ranks, elsewhere zeros.
    """

    def run(one: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (broadcast_async(one, root_rank, name, process_set).wait(),)

    return through(run, lambda gradient: (_mean_on(root_rank, gradient),), [tensor])[0]


def _mean_on(root_rank: int, tensor: torch.Tensor) -> torch.Tensor:
    """The mean of the ranks' tensors on one of them, zeros on the others."""

    def run(one: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = one.detach().clone()
        basics.group().reduce(own, root_rank, ReduceOp.AVG).wait()
        return (own if basics.rank() == root_rank else own.zero_(),)

    return through(run, lambda gradient: (broadcast(gradient, root_rank) / basics.size(),), [tensor])[0]


@not_compiled
def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: Any = None
) -> Handle:
    """Start ``alltoall``."""
    work = _start_alltoall(tensor, splits, name, process_set)
    return Handle([work], lambda: work.result()[0] if splits is None else tuple(work.result()))


@not_compiled
def alltoall(tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: Any = None) -> Any:
    """Rows of the first dimension go to every rank: ``splits[r]`` to rank r, by default equal parts.

    Gradients flow through it, back to the ranks whose rows they are of.

    Returns:
        What came, in rank order; with ``splits`` also how many rows came from each rank, int32.
    """
    received: list[torch.Tensor] = []

    def run(one: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output, rows = _start_alltoall(one, splits, name, process_set).result()
        received[:] = [rows]
        return (output,)

    def back(gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (alltoall(gradient, received[0], name)[0],)

    (output,) = through(run, back, [tensor])
    return output if splits is None else (output, received[0])


def _start_alltoall(tensor: torch.Tensor, splits: Any, name: str | None, process_set: Any) -> GroupWork:
    check_process_set(process_set)
    wanted = None if splits is None else [int(split) for split in splits]
    return basics.group().all_to_all_rows(tensor, wanted, _title("alltoall", name))


@not_compiled
def reducescatter_async(
    tensor: torch.Tensor, name: str | None = None, op: Operation | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: Any = None,
) -> Handle:  # fmt: skip
    """Start ``reducescatter``."""
    check_process_set(process_set)
    title = _title("reducescatter", name)
    op = chosen(op, None, title)
    return first(_start_reducescatters([tensor], title, op, prescale_factor, postscale_factor))


@not_compiled
def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, op: Operation | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: Any = None,
) -> Handle:  # fmt: skip
    """Start ``grouped_reducescatter``."""
    check_process_set(process_set)
    title = _title("grouped_reducescatter", name)
    return _start_reducescatters(tensors, title, chosen(op, None, title), prescale_factor, postscale_factor)


@not_compiled
def reducescatter(
    tensor: torch.Tensor, name: str | None = None, compression: Compressor = Compression.none,
    op: Operation | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Reduce a tensor, and keep this rank's rows of the first dimension; parts differ by one row at most.

    Gradients flow through it: those of all ranks' rows, times the number of ranks if ``op`` is ``Sum``.
    """
    check_process_set(process_set)
    title = _title("reducescatter", name)
    op = chosen(op, None, title)
    return _scattered([tensor], title, op, prescale_factor, postscale_factor, compression)[0]


@not_compiled
def grouped_reducescatter(
    tensors: Sequence[torch.Tensor], name: str | None = None, compression: Compressor = Compression.none,
    op: Operation | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: Any = None,
) -> list[torch.Tensor]:  # fmt: skip
    """``reducescatter`` of each of several tensors. Gradients flow through it."""
    check_process_set(process_set)
    title = _title("grouped_reducescatter", name)
    op = chosen(op, None, title)
    return list(_scattered(tensors, title, op, prescale_factor, postscale_factor, compression))


def _start_reducescatters(
    tensors: Sequence[torch.Tensor], title: str, op: Operation, prescale: float, postscale: float
) -> Handle:
    sources = [tensor.detach() if prescale == 1.0 else _times(tensor.detach(), prescale) for tensor in tensors]
    said = _agreed(title, op, postscale)
    works = [basics.group().reduce_scatter_rows(source, op.kind, said) for source in sources]

    def result() -> list[torch.Tensor]:
        found = [work.result()[0] for work in works]
        return found if postscale == 1.0 else [_times(part, postscale) for part in found]

    return Handle(works, result)


def _scattered(
    tensors: Sequence[torch.Tensor], title: str, op: Operation, prescale: float, postscale: float,
    compression: Compressor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    def run(*some: torch.Tensor) -> tuple[torch.Tensor, ...]:
        packed = [compression.compress(tensor) for tensor in some]
        found = _start_reducescatters([sent for sent, _ in packed], title, op, prescale, postscale).wait()
        return tuple(compression.decompress(part, of) for part, (_, of) in zip(found, packed, strict=True))

    def back(*gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _check_linear(op, title)
        factor = prescale * postscale * (basics.size() if op is Sum else 1)
        return tuple(whole * factor for whole in _gathered(gradients, f"gradient of {title}"))

    return through(run, back, tensors)


# ---- meetings


@not_compiled
def barrier(process_set: Any = None) -> None:
    """Return when all ranks have come here."""
    check_process_set(process_set)
    basics.group().barrier().wait()


@not_compiled
def join(device: int = -1) -> int:
    """This rank has no more batches; returns the last rank that said so, when all have.

    Meanwhile it takes part in what the others reduce by sum or average, with zeros; averages are still over all ranks.
    Other operations of theirs are an error on all.
    """
    work = basics.group().join()
    work.wait()
    return int(work.result()[0])


def check_root(root_rank: int) -> None:
    """Raise ConfigError unless there is such a rank."""
    if not 0 <= root_rank < basics.size():
        raise ConfigError(f"root_rank={root_rank}: ranks go from 0 to {basics.size() - 1}")


def _title(op: str, name: str | None) -> str:
    return op if name is None else f"{op} of {name!r}"


def _agreed(title: str, op: Operation, postscale: float = 1.0) -> str:
    """What ranks that would not make the same of their tensors say differently."""
    return f"{title} by {op.name}" if postscale == 1.0 else f"{title} by {op.name}, times {postscale}"
