"""Sums of float32 whose terms travel as a half type: half the bytes, where the link is what they wait for.

Each rank rounds what it contributes, every host what it sends on, and the last one the sum. Additions themselves are in
float32, in the same order as ever: every rank gets the same bits, and the same bits in the next run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.arrays import address_of
from kvmpi.collectives.algorithm import Act, Algorithm, Tensor
from kvmpi.kernels import host

Buffer = npt.NDArray[Any]

#: By the name of ``KVMPI_RING_COMPRESSION``: the dtype that travels.
WIRES = {"none": "", "fp16": "float16", "bf16": "bfloat16"}


def allreduce(algorithm: Algorithm, tensors: Sequence[Tensor], wire: str, act: Act) -> None:
    """``algorithm.allreduce`` of vectors of float32 that travel as ``wire``."""
    packed = act.scratch(sum(tensor.out.size for tensor in tensors), host.STORAGE[wire])
    parts, start = list[Buffer](), 0
    for tensor in tensors:
        parts.append(packed[start : start + tensor.out.size])
        start += tensor.out.size
        host.narrow(_own(tensor.vectors, act), parts[-1], wire)
    algorithm.allreduce([Tensor([packed], packed)], wire, act)
    for tensor, part in zip(tensors, parts, strict=True):
        host.widen(part, wire, tensor.out)
        for copy in tensor.copies:
            if address_of(copy) != address_of(tensor.out):
                np.copyto(copy, tensor.out)


def _own(vectors: Sequence[Buffer], act: Act) -> Buffer:
    """The sum of this rank's vectors: not where the result goes, which ranks of a host may share."""
    if len(vectors) == 1:
        return vectors[0]
    total = act.scratch(vectors[0].size, np.float32)
    host.sum_vectors(total, vectors, "float32")
    return total
