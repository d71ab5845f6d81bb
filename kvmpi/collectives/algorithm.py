"""What every algorithm of the tensor collectives is given, and what it has to do."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from kvmpi.arrays import address_of
from kvmpi.collectives import arena
from kvmpi.collectives.cost import Choice
from kvmpi.collectives.schedule import Range, segment_bounds
from kvmpi.deadline import Deadline

Buffer = npt.NDArray[Any]


class Scratch:
    """Memory that every call uses anew: fresh memory costs a page fault every 4 KiB.

    It lies where other ranks of the host can read it, if there is such memory.
    """

    def __init__(self) -> None:
        #: What calls use anew; another one after a call for which it was too small.
        self.memory: Buffer = np.empty(0, np.uint8)
        #: How many bytes of it the call under way has taken.
        self.used = 0
        self._more: list[Buffer] = []  # what did not fit: others may read there as long as the call lasts
        self._wanted = 0

    def begin(self) -> None:
        """A new call: what was taken before is free."""
        if self._wanted > self.memory.size:
            # Twice as much, or there would be another one for each call that is a little larger.
            self.memory = shared_bytes(2 * self._wanted)
        self._more.clear()
        self.used = self._wanted = 0

    def __call__(self, count: int, dtype: Any) -> Buffer:
        """Uninitialised memory of shape ``(count,)``, until the next ``begin``."""
        nbytes = count * np.dtype(dtype).itemsize
        start, self.used = self.used, self.used + -(-nbytes // 64) * 64
        self._wanted = max(self._wanted, self.used)
        if self.used > self.memory.size:
            self._more.append(shared_bytes(nbytes))
            return self._more[-1].view(dtype)
        return self.memory[start : start + nbytes].view(dtype)


def shared_bytes(nbytes: int) -> Buffer:
    """Memory that other ranks of the host can map, if there is such memory here."""
    try:
        found = arena.own().empty(nbytes, np.dtype(np.uint8))
    except OSError:
        found = None
    return np.empty(nbytes, np.uint8) if found is None else found


class Act(msgspec.Struct):
    """One collective under way on one rank: what it is called, and until when it may take.

    ``scale``: what a sum is multiplied by, before half types are rounded. ``rounds``: so are their partial sums, each
    time that they travel; else those are float32.
    """

    label: str
    op: str
    choice: Choice
    rank: int
    size: int
    deadline: Deadline
    scratch: Scratch
    scale: float = 1.0
    rounds: bool = False

    def describe(self) -> str:
        """For error messages."""
        return f"{self.label}: {self.choice.algorithm} {self.op} on MPI rank {self.rank} of {self.size}"

    def chunk_count(self, itemsize: int) -> int:
        """Elements of one message at most."""
        return max(1, self.choice.chunk_bytes // itemsize)

    def segments(self, count: int) -> list[Range]:
        """Which elements belong to which rank, in a reduce-scatter or an allgather of ``count``."""
        return segment_bounds(count, self.size)


class Tensor(msgspec.Struct):
    """One tensor of an allreduce: ``vectors`` of shape ``(count,)`` are summed into ``out``.

    ``out`` may be the first vector, and overlaps no other. ``copies`` get the result, too. ``devices`` are vectors in
    the memory of GPUs, for algorithms that say that they sum those.
    """

    vectors: Sequence[Buffer]
    out: Buffer
    copies: Sequence[Buffer] = ()
    devices: Sequence[Any] = ()


_serials = itertools.count(1)


class Batch(list[Tensor]):
    """Tensors of host memory that are summed where they lie.

    Attributes:
        serial: of tensors that are summed again and again tells them from all others that there have been; else 0.
    """

    def __init__(self, tensors: Iterable[Tensor], dtype: str, *, once: bool = False) -> None:
        super().__init__(tensors)
        self.dtype = dtype
        self.nbytes = sum(tensor.out.nbytes for tensor in self)
        self.serial = 0 if once else next(_serials)


def pack(tensors: Sequence[Tensor], act: Act) -> Tensor:
    """Several tensors as one, in scratch; vectors that lie one behind the other stay where they are.

    A tensor of fewer vectors than others has zeros in their place. ``unpack`` copies the result to where it belongs.
    """
    if len(tensors) == 1:
        return tensors[0]
    counts = [tensor.out.size for tensor in tensors]
    total, dtype = sum(counts), tensors[0].out.dtype
    vectors = []
    for i in range(max(len(tensor.vectors) for tensor in tensors)):
        parts = [tensor.vectors[i] if i < len(tensor.vectors) else None for tensor in tensors]
        packed = _adjacent(parts, total)
        if packed is None:
            packed, start = act.scratch(total, dtype), 0
            for part, count in zip(parts, counts, strict=True):
                packed[start : start + count] = 0 if part is None else part
                start += count
        vectors.append(packed)
    out = _adjacent([tensor.out for tensor in tensors], total)
    return Tensor(vectors, act.scratch(total, dtype) if out is None else out)


def unpack(tensors: Sequence[Tensor], packed: Tensor) -> None:
    """The result of ``pack(tensors)`` goes to every tensor's ``out`` and ``copies``."""
    start = 0
    for tensor in tensors:
        found = packed.out[start : start + tensor.out.size]
        start += tensor.out.size
        for target in (tensor.out, *tensor.copies):
            if address_of(target) != address_of(found):
                np.copyto(target, found)


def _adjacent(parts: Sequence[Buffer | None], total: int) -> Buffer | None:
    """One view of ``parts`` where each begins where the one before it ends."""
    first = parts[0]
    if first is None:
        return None
    address = address_of(first)
    for part in parts:
        if part is None or address_of(part) != address:
            return None
        address += part.nbytes
    # The parts are alive for as long as the call, which is all that the view is used for.
    return np.lib.stride_tricks.as_strided(first, (total,), writeable=first.flags.writeable)


class Algorithm(Protocol):
    """A way to do the four collectives on host memory, on a communicator of at least two ranks.

    Vectors have the storage dtype of ``dtype``, and there is at least one element.
    """

    def allreduce(self, tensors: Sequence[Tensor], dtype: str, act: Act) -> None:
        """Sum every tensor's vectors of all ranks, on every rank."""
        ...

    def reduce_scatter(self, vectors: Sequence[Buffer], out: Buffer, dtype: str, act: Act) -> None:
        """Sum ``vectors``; ``out`` gets this rank's segment, and may be that part of the first vector."""
        ...

    def allgather(self, out: Buffer, act: Act) -> None:
        """Bring to ``out`` of every rank each rank's own segment of it."""
        ...

    def broadcast(self, buffer: Buffer, root: int, act: Act) -> None:
        """Copy ``buffer`` of rank ``root`` into that of every rank."""
        ...
