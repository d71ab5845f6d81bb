"""The process group of Horovod's operations: as torch's, and with parts whose rows differ from rank to rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvmpi.collectives import Entry
from kvmpi.collectives.schedule import segment_bounds
from kvmpi.deadline import Deadline
from kvmpi.errors import KVError, ShapeMismatchError
from kvmpi.torch.group import GroupWork, KvmpiProcessGroup
from kvmpi.torch.group.base import Plan
from kvmpi.torch.group.tensors import numbers, octets, reduction


class HorovodGroup(KvmpiProcessGroup):
    """All ranks of the job. Results whose sizes only the others know are those of the works."""

    def all_gather_rows(self, tensor: torch.Tensor, title: str) -> GroupWork:
        """The tensors of all ranks along the first dimension, in which they may differ; and how many rows each has."""
        found: list[Any] = []

        def prepare() -> Plan:
            flat, rest = octets(tensor), _rest(tensor, title)

            def run(deadline: Deadline, label: str) -> None:
                rows = np.empty(self.size(), np.int64)
                self._collectives.allgather(np.array([tensor.shape[0]]), rows, deadline, label)
                output, parts = self._rows_of(rows.tolist(), rest, tensor)
                self._collectives.exchange([flat.buffer] * self.size(), parts, deadline, label)
                found.extend([output.to(tensor.device), rows.tolist()])

            return Plan([Entry(0, rest, _dtype(tensor))], run, found)

        return self._start(title, None, prepare)

    def all_to_all_rows(self, tensor: torch.Tensor, wanted: Sequence[int] | None, title: str) -> GroupWork:
        """``wanted[r]`` rows go to rank r, by default equal parts; what came, and how many rows from each rank."""
        found: list[torch.Tensor] = []

        def prepare() -> Plan:
            flat, rest = octets(tensor), _rest(tensor, title)
            if wanted is None and tensor.shape[0] % self.size():
                raise ShapeMismatchError(
                    f"{title}: {tensor.shape[0]} rows are no {self.size()} equal parts; pass splits"
                )
            splits = [tensor.shape[0] // self.size()] * self.size() if wanted is None else wanted
            if len(splits) != self.size() or sum(splits) != tensor.shape[0] or min(splits) < 0:
                raise ShapeMismatchError(
                    f"{title}: splits {list(splits)} of {tensor.shape[0]} rows; expected {self.size()} numbers, with "
                    "that sum"
                )

            def run(deadline: Deadline, label: str) -> None:
                table = np.empty((self.size(), self.size()), np.int64)
                self._collectives.allgather(np.array(splits, np.int64), table.reshape(-1), deadline, label)
                rows = table[:, self.rank()].tolist()
                output, parts = self._rows_of(rows, rest, tensor)
                row_bytes = math.prod(rest) * tensor.element_size()
                stops = np.cumsum([0, *splits]) * row_bytes
                sends = [flat.buffer[stops[r] : stops[r + 1]] for r in range(self.size())]
                self._collectives.exchange(sends, parts, deadline, label)
                found.extend([output.to(tensor.device), torch.tensor(rows, dtype=torch.int32, device="cpu")])

            return Plan([Entry(0, rest, _dtype(tensor))], run, found)

        return self._start(title, None, prepare)

    def reduce_scatter_rows(self, tensor: torch.Tensor, op: str, title: str) -> GroupWork:
        """Each rank gets its rows of the reduced tensor; parts differ by one row at most, longer ones first."""
        found: list[torch.Tensor] = []

        def prepare() -> Plan:
            source, rest = numbers(tensor, op), _rest(tensor, title)
            bounds = segment_bounds(tensor.shape[0], self.size())
            start, stop = bounds[self.rank()]
            output = torch.empty((stop - start, *rest), dtype=tensor.dtype, device=tensor.device)
            target = numbers(output, op, reads=False)

            def run(deadline: Deadline, label: str) -> None:
                count = math.prod(rest) * (2 if tensor.is_complex() else 1)  # of the numbers that are reduced
                kind = reduction(tensor, "sum" if op == "avg" else op)
                if kind == "sum" and tensor.shape[0] % self.size() == 0:
                    where = deadline, label, self._scale(source, op)
                    self._collectives.reduce_scatter([source.vector], target.buffer, source.dtype, *where)
                    self._divide_whole(target, op)
                else:
                    parts = [source.buffer[first * count : last * count] for first, last in bounds]
                    self._fold_parts(parts, target, op, kind, deadline, label)
                target.back()
                found.append(output)

            return Plan([Entry(0, tuple(tensor.shape), _dtype(tensor))], run, found)

        return self._start(title, None, prepare)

    def _reworded(self, error: KVError) -> KVError:
        """Here ranks are those of the client, and the time is ``KVMPI_TIMEOUT_S``, as the error says."""
        return error

    def _rows_of(
        self, rows: Sequence[int], rest: Sequence[int], like: torch.Tensor
    ) -> tuple[torch.Tensor, list[np.ndarray]]:  # type: ignore[type-arg]
        """An empty tensor of so many rows from each rank, and the bytes of each rank's part of it."""
        output = torch.empty((sum(rows), *rest), dtype=like.dtype, device="cpu")
        buffer = octets(output).buffer
        stops = np.cumsum([0, *rows]) * (math.prod(rest) * like.element_size())
        return output, [buffer[stops[r] : stops[r + 1]] for r in range(self.size())]


def _rest(tensor: torch.Tensor, title: str) -> tuple[int, ...]:
    """The shape of a row."""
    if not tensor.dim():
        raise ShapeMismatchError(f"{title}: a tensor without dimensions has no rows; reshape it to (1,)")
    return tuple(tensor.shape[1:])


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
