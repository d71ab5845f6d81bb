"""Horovod's operations on tensors. All ranks call the same ones in the same order; names are for messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from kvmpi.errors import ConfigError, UnsupportedError
from kvmpi.horovod import basics
from kvmpi.horovod.compression import Compression, NoneCompressor
from kvmpi.horovod.unsupported import check_process_set
from kvmpi.torch.group import GroupWork

Compressor = type[NoneCompressor]
#: From tensors to as many others.
Run = Callable[..., tuple[torch.Tensor, ...]]


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

    def __init__(self, works: Sequence[GroupWork], result: Callable[[], Any]) -> None:
        self._works, self._finish = works, result
        self._result: Any = None
        self._taken = False

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> Any:
        """The result; the operation's error is raised here."""
        for work in self._works:
            work.wait()
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


# ---- gradients: those of Horovod, to its scale (docs/horovod.md)


class _Collective(torch.autograd.Function):
    """A call of all ranks whose gradient is another one, so that all of them must go back through it, or none."""

    @staticmethod
    def forward(context: Any, run: Run, back: Run, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        context.back = back
        return run(*tensors)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:  # type: ignore[override]
        return None, None, *context.back(*gradients)


def _through(run: Run, back: Run, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """``run(*tensors)``; where autograd looks on, ``back`` makes gradients of the tensors from those of the results."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _Collective.apply(run, back, *tensors)
    return run(*tensors)


def _check_linear(op: Operation, title: str) -> None:
    if op not in (Average, Sum):
        raise UnsupportedError(
            f"{title}: {op} has no gradient; detach the tensor, or use hvd.Average or hvd.Sum where gradients flow"
        )


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

    return Handle([work], result)


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
    """Reduce several tensors, as one, into new ones. Gradients flow through it."""
    title = _title("grouped_allreduce", name)
    op = chosen(op, average, title)
    return list(_reduced(tensors, title, op, prescale_factor, postscale_factor, process_set, compression))


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

    return _through(run, back, tensors)


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
    title = _title("allreduce", name)
    op = chosen(op, average, title)
    return _reduced([tensor], title, op, prescale_factor, postscale_factor, process_set, compression)[0]


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
    return Handle([work], lambda: work.result()[0])


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """The tensors of all ranks, one behind the other in the first dimension, in which alone they may differ.

    Gradients flow through it: the mean over ranks of those of this rank's rows.
    """
    check_process_set(process_set)
    return _gathered([tensor], _title("allgather", name))[0]


def _gathered(tensors: Sequence[torch.Tensor], title: str) -> tuple[torch.Tensor, ...]:
    rows: list[list[int]] = []

    def run(*some: torch.Tensor) -> tuple[torch.Tensor, ...]:
        works = [basics.group().all_gather_rows(tensor, title) for tensor in some]
        rows[:] = [work.result()[1] for work in works]
        return tuple(work.result()[0] for work in works)

    def back(*gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        means, own = _reduced(gradients, f"gradient of {title}", Average), basics.rank()
        return tuple(mean.narrow(0, sum(of[:own]), of[own]) for mean, of in zip(means, rows, strict=True))

    return _through(run, back, tensors)


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Handle:
    """Start ``broadcast_``."""
    check_process_set(process_set)
    check_root(root_rank)
    work = basics.group().broadcast([tensor], root_rank)
    return Handle([work], lambda: tensor)


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Handle:
    """Start ``broadcast``."""
    return broadcast_async_(tensor.detach().clone(), root_rank, name, process_set)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """The tensor takes what it holds on ``root_rank``."""
    return broadcast_async_(tensor, root_rank, name, process_set).wait()


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """A new tensor that holds what ``tensor`` holds on ``root_rank``.

    Gradients flow through it: on ``root_rank`` the mean over ranks, elsewhere zeros.
    """

    def run(one: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (broadcast_async(one, root_rank, name, process_set).wait(),)

    return _through(run, lambda gradient: (_mean_on(root_rank, gradient),), [tensor])[0]


def _mean_on(root_rank: int, tensor: torch.Tensor) -> torch.Tensor:
    """The mean of the ranks' tensors on one of them, zeros on the others."""

    def run(one: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = one.detach().clone()
        basics.group().reduce(own, root_rank, ReduceOp.AVG).wait()
        return (own if basics.rank() == root_rank else own.zero_(),)

    return _through(run, lambda gradient: (broadcast(gradient, root_rank) / basics.size(),), [tensor])[0]


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: Any = None
) -> Handle:
    """Start ``alltoall``."""
    work = _start_alltoall(tensor, splits, name, process_set)
    return Handle([work], lambda: work.result()[0] if splits is None else tuple(work.result()))


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

    (output,) = _through(run, back, [tensor])
    return output if splits is None else (output, received[0])


def _start_alltoall(tensor: torch.Tensor, splits: Any, name: str | None, process_set: Any) -> GroupWork:
    check_process_set(process_set)
    size = basics.size()
    if splits is None:
        if not tensor.dim() or tensor.shape[0] % size:
            raise ConfigError(f"alltoall: {tuple(tensor.shape)} has no {size} equal parts in its first dimension")
        parts = [tensor.shape[0] // size] * size
    else:
        parts = [int(split) for split in splits]
    return basics.group().all_to_all_rows(tensor, parts, _title("alltoall", name))


def reducescatter_async(
    tensor: torch.Tensor, name: str | None = None, op: Operation | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: Any = None,
) -> Handle:  # fmt: skip
    """Start ``reducescatter``."""
    check_process_set(process_set)
    title = _title("reducescatter", name)
    return _start_reducescatter(tensor, title, chosen(op, None, title), prescale_factor, postscale_factor)


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


def _start_reducescatter(tensor: torch.Tensor, title: str, op: Operation, prescale: float, postscale: float) -> Handle:
    source = tensor.detach() if prescale == 1.0 else tensor.detach() * prescale
    work = basics.group().reduce_scatter_rows(source, op.kind, title)
    return Handle([work], lambda: work.result()[0].mul_(postscale) if postscale != 1.0 else work.result()[0])


def _scattered(
    tensors: Sequence[torch.Tensor], title: str, op: Operation, prescale: float, postscale: float,
    compression: Compressor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    def run(*some: torch.Tensor) -> tuple[torch.Tensor, ...]:
        packed = [compression.compress(tensor) for tensor in some]
        handles = [_start_reducescatter(sent, title, op, prescale, postscale) for sent, _ in packed]
        return tuple(
            compression.decompress(handle.wait(), context) for handle, (_, context) in zip(handles, packed, strict=True)
        )

    def back(*gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _check_linear(op, title)
        factor = prescale * postscale * (basics.size() if op is Sum else 1)
        return tuple(whole * factor for whole in _gathered(gradients, f"gradient of {title}"))

    return _through(run, back, tensors)


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
