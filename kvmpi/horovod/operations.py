"""Horovod's operations on tensors. All ranks call the same ones in the same order; names are for messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvmpi.errors import ConfigError, UnsupportedError
from kvmpi.horovod import basics
from kvmpi.horovod.compression import Compression, NoneCompressor
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


class Handle:
    """An operation under way; ``synchronize`` waits for it and gives its result."""

    def __init__(self, work: GroupWork, result: Callable[[], Any]) -> None:
        self._work, self._finish = work, result
        self._result: Any = None
        self._taken = False

    def done(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> Any:
        """The result; the operation's error is raised here."""
        self._work.wait()
        if not self._taken:
            self._result, self._taken = self._finish(), True
        return self._result


def synchronize(handle: Handle) -> Any:
    """Wait for an operation that an ``_async`` function has started; returns what its other form returns.

    Raises:
        KVTimeoutError: a rank did not make the same call within ``KVMPI_TIMEOUT_S``; names it.
        OrderMismatchError, ShapeMismatchError, DTypeMismatchError: ranks made different calls; names the difference.
    """
    return handle.wait()


def poll(handle: Handle) -> bool:
    """Whether ``synchronize`` would return at once."""
    return handle.done()


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


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None, op: Operation | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: Any = None,
) -> Handle:  # fmt: skip
    """Start to reduce several tensors, as one, in place."""
    return start_allreduce(list(tensors), True, _title("grouped_allreduce", name), average, op, prescale_factor,
                            postscale_factor, process_set)  # fmt: skip


def start_allreduce(
    tensors: list[torch.Tensor], in_place: bool, title: str, average: bool | None, op: Operation | None,
    prescale: float, postscale: float, process_set: Any, compression: Compressor = Compression.none,
) -> Handle:  # fmt: skip
    """Start to reduce tensors as one, in place or into new ones, which are the result."""
    check_process_set(process_set)
    kind = chosen(op, average, title).kind
    sent, contexts = [], []
    for tensor in tensors:
        scaled = tensor.detach()
        if prescale != 1.0:
            scaled = scaled * prescale
        packed, context = compression.compress(scaled)
        own = in_place and packed.data_ptr() == tensor.data_ptr()
        # What is sent is overwritten: it must be the caller's only where that is what the caller wants.
        fresh = own or prescale != 1.0 or context is not None
        sent.append(packed if fresh else packed.clone())
        contexts.append(context)
    work = basics.group().reduce_all(sent, kind, title)

    def result() -> list[torch.Tensor]:
        found = []
        for tensor, packed, context in zip(tensors, sent, contexts, strict=True):
            out = compression.decompress(packed, context)
            if postscale != 1.0:
                out.mul_(postscale)
            if in_place:
                if out.data_ptr() != tensor.data_ptr():
                    tensor.detach().copy_(out)
                out = tensor
            found.append(out)
        return found

    return Handle(work, result)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None, op: Operation | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: Any = None,
) -> Handle:  # fmt: skip
    """Start to reduce several tensors, as one, into new ones."""
    return start_allreduce(list(tensors), False, _title("grouped_allreduce", name), average, op, prescale_factor,
                            postscale_factor, process_set)  # fmt: skip


def grouped_allreduce(
    tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
    compression: Compressor = Compression.none, op: Operation | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: Any = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Reduce several tensors, as one, into new ones."""
    return start_allreduce(list(tensors), False, _title("grouped_allreduce", name), average, op, prescale_factor,
                            postscale_factor, process_set, compression).wait()  # fmt: skip


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None, op: Operation | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: Any = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Reduce several tensors, as one, in place."""
    return grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    ).wait()  # fmt: skip


def allreduce_async(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: Operation | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: Any = None,
) -> Handle:  # fmt: skip
    """Start ``allreduce``. The result does not remember how it was computed."""
    return _first(start_allreduce([tensor], False, _title("allreduce", name), average, op, prescale_factor,
                                   postscale_factor, process_set))  # fmt: skip


def allreduce_async_(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: Operation | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: Any = None,
) -> Handle:  # fmt: skip
    """Start ``allreduce_``."""
    return _first(start_allreduce([tensor], True, _title("allreduce", name), average, op, prescale_factor,
                                   postscale_factor, process_set))  # fmt: skip


class _Allreduce(torch.autograd.Function):
    """The gradient of a reduction by sum or mean is the same reduction of the gradient."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, start: Callable[[torch.Tensor], Handle]) -> torch.Tensor:
        context.start = start
        return start(tensor).wait()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return context.start(gradient).wait(), None


def allreduce(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None,
    compression: Compressor = Compression.none, op: Operation | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Reduce a tensor over all ranks into a new one, by default to the average. Gradients flow through it.

    Args:
        average: the old way to choose between ``Average`` and ``Sum``.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``; of integers there is no average.
        compression: ``Compression.fp16`` halves what travels.
        prescale_factor, postscale_factor: the tensor is multiplied before it travels, and the result afterwards.
    """

    def start(one: torch.Tensor) -> Handle:
        return _first(start_allreduce([one], False, _title("allreduce", name), average, op, prescale_factor,
                                       postscale_factor, process_set, compression))  # fmt: skip

    return _Allreduce.apply(tensor, start) if tensor.requires_grad else start(tensor).wait()


def allreduce_(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: Operation | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: Any = None,
) -> torch.Tensor:  # fmt: skip
    """``allreduce`` in place."""
    return allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set).wait()


# ---- moves


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> Handle:
    """Start ``allgather``."""
    check_process_set(process_set)
    work = basics.group().all_gather_rows(tensor, _title("allgather", name))
    return Handle(work, lambda: work.result()[0])


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """The tensors of all ranks, one behind the other in the first dimension, in which alone they may differ."""
    return allgather_async(tensor, name, process_set).wait()


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Handle:
    """Start ``broadcast_``."""
    check_process_set(process_set)
    check_root(root_rank)
    work = basics.group().broadcast([tensor], root_rank)
    return Handle(work, lambda: tensor)


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Handle:
    """Start ``broadcast``."""
    return broadcast_async_(tensor.detach().clone(), root_rank, name, process_set)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """The tensor takes what it holds on ``root_rank``."""
    return broadcast_async_(tensor, root_rank, name, process_set).wait()


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """A new tensor that holds what ``tensor`` holds on ``root_rank``."""
    return broadcast_async(tensor, root_rank, name, process_set).wait()


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: Any = None
) -> Handle:
    """Start ``alltoall``."""
    check_process_set(process_set)
    size = basics.size()
    if splits is None:
        if not tensor.dim() or tensor.shape[0] % size:
            raise ConfigError(f"alltoall: {tuple(tensor.shape)} has no {size} equal parts in its first dimension")
        parts = [tensor.shape[0] // size] * size
    else:
        parts = [int(split) for split in splits]
    work = basics.group().all_to_all_rows(tensor, parts, _title("alltoall", name))

    def result() -> Any:
        output, received = work.result()
        return output if splits is None else (output, received)

    return Handle(work, result)


def alltoall(tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: Any = None) -> Any:
    """Rows of the first dimension go to every rank: ``splits[r]`` to rank r, by default equal parts.

    Returns:
        What came, in rank order; with ``splits`` also how many rows came from each rank, int32.
    """
    return alltoall_async(tensor, splits, name, process_set).wait()


def reducescatter_async(
    tensor: torch.Tensor, name: str | None = None, op: Operation | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: Any = None,
) -> Handle:  # fmt: skip
    """Start ``reducescatter``."""
    check_process_set(process_set)
    title = _title("reducescatter", name)
    kind = chosen(op, None, title).kind
    source = tensor.detach() if prescale_factor == 1.0 else tensor.detach() * prescale_factor
    work = basics.group().reduce_scatter_rows(source, kind, title)
    return Handle(
        work, lambda: work.result()[0].mul_(postscale_factor) if postscale_factor != 1.0 else work.result()[0]
    )


def reducescatter(
    tensor: torch.Tensor, name: str | None = None, compression: Compressor = Compression.none,
    op: Operation | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Reduce a tensor, and keep this rank's rows of the first dimension; parts differ by one row at most."""
    packed, context = compression.compress(tensor.detach())
    handle = reducescatter_async(packed, name, op, prescale_factor, postscale_factor, process_set)
    return compression.decompress(handle.wait(), context)


# ---- meetings


def barrier(process_set: Any = None) -> None:
    """Return when all ranks have come here."""
    check_process_set(process_set)
    basics.group().barrier().wait()


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


def _first(handle: Handle) -> Handle:
    """The only tensor instead of a list of one."""
    inner = handle._finish
    handle._finish = lambda: inner()[0]
    return handle
