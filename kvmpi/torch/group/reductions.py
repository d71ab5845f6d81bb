"""Reductions of a process group: sums and other operations, to all ranks, to one, or a part to each."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvmpi.collectives import Entry
from kvmpi.compiling import methods_not_compiled
from kvmpi.deadline import Deadline
from kvmpi.errors import UnsupportedError
from kvmpi.kernels import host
from kvmpi.torch.group.base import (
    GroupBase,
    Plan,
    Tensors,
    also_named,
    as_row,
    check_dtypes,
    check_size,
    entries,
    root_of,
    single,
)
from kvmpi.torch.group.tensors import TIMES, Flat, is_sum, numbers, octets, reduction
from kvmpi.torch.group.work import GroupWork

Buffer = npt.NDArray[Any]


@methods_not_compiled
class Reductions(GroupBase):
    """``torch.distributed``: all_reduce, reduce, reduce_scatter, and their forms."""

    def __init__(self, *who: Any) -> None:
        super().__init__(*who)
        # DDP's join counts the ranks that go on, by a sum of one element whose work it hands to C++ in the forward pass
        # and lets go of; C++ waits for it in backward, for ever if the Python half of the work is gone by then.
        self._counts_of_ranks: deque[GroupWork] = deque(maxlen=64)

    @also_named("tensors tensor", "opts op", "timeout")
    def allreduce(self, tensors: Tensors | torch.Tensor, opts: Any = None, timeout: Any = None) -> GroupWork:
        op = _op_of(opts)
        found = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if len(found) == 1 and found[0].layout is torch.sparse_coo:
            return self.sum_sparse(found[0], op, f"all_reduce[{op}]", timeout or opts)
        work = self.reduce_all(found, op, f"all_reduce[{op}]", timeout or opts)
        if len(found) == 1 and found[0].numel() == 1 and getattr(opts, "asyncOp", False):
            self._counts_of_ranks.append(work)
        return work

    def reduce_all(self, tensors: Tensors, op: str, title: str, options: Any = None) -> GroupWork:
        """Reduce tensors in place, as one: ``op`` is a name of ``combine.OPERATIONS``, or a sum of ``is_sum``."""
        return self._start(title, options, lambda: self._reduction(tensors, op))

    def sum_sparse(self, tensor: torch.Tensor, op: str, title: str, options: Any = None) -> GroupWork:
        """Sum a sparse tensor in place: the elements of all ranks are brought together and added up on each."""

        def prepare() -> Plan:
            if op not in ("sum", "avg"):
                raise UnsupportedError(f"{op} of a sparse tensor: what is not there is 0 in sums only")
            mine = tensor.detach().coalesce()
            numbers(mine.values(), op)

            def run(deadline: Deadline, label: str) -> None:
                parts: list[torch.Tensor] = []
                for part in (mine.indices().t(), mine.values()):
                    texts = self._collectives.all_tell(octets(part).buffer.tobytes(), deadline, label)
                    count = len(parts[0]) if parts else sum(map(len, texts)) // (8 * mine.sparse_dim())
                    found = torch.empty((count, *part.shape[1:]), dtype=part.dtype, device="cpu")
                    np.copyto(octets(found).buffer, np.frombuffer(b"".join(texts), np.uint8))
                    parts.append(found.to(tensor.device))
                indices, values = parts
                total = torch.sparse_coo_tensor(
                    indices.t(), values, tensor.shape, device=tensor.device, check_invariants=True
                ).coalesce()
                with torch.no_grad():
                    if op == "avg":
                        whole = not (tensor.is_floating_point() or tensor.is_complex())
                        total = torch.div(total, self.size(), rounding_mode="trunc" if whole else None)
                    tensor.copy_(total)

            entry = Entry(0, tuple(tensor.shape), f"sparse {str(tensor.dtype).removeprefix('torch.')}")
            return Plan([entry], run, [tensor])

        return self._start(title, options, prepare)

    def _reduction(self, tensors: Tensors, op: str) -> Plan:
        flats = [numbers(tensor, op, writes=True) for tensor in tensors]
        like = [[str(tensor.dtype).removeprefix("torch."), tensor.numel()] for tensor in tensors]
        details = [op, like] if is_sum(op) else None
        return Plan(entries(tensors), lambda *where: self._sum(flats, tensors, op, *where), list(tensors), details)

    def _zeros(self, details: Any) -> Plan:
        if details == "barrier":
            return Plan([], lambda *_: None)
        op, like = details
        return self._reduction(
            [torch.zeros(count, dtype=getattr(torch, name), device="cpu") for name, count in like], op
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        return self.allreduce(tensors, opts)

    def _sum(self, flats: list[Flat], tensors: Tensors, op: str, deadline: Deadline, label: str) -> None:
        if is_sum(op) and not any(t.dtype == torch.bool for t in tensors):
            for dtype in dict.fromkeys(flat.dtype for flat in flats):
                alike = [flat for flat in flats if flat.dtype == dtype]
                scale = self._scale(alike[0], op)
                if len(alike) == 1 and scale == 1.0:
                    self._collectives.allreduce([alike[0].vector], alike[0].buffer, dtype, deadline, label)
                else:
                    tensors_of = [([flat.vector], flat.buffer, ()) for flat in alike]
                    self._collectives.allreduce_many(tensors_of, dtype, deadline, label, scale)
                for flat in alike:
                    self._divide_whole(flat, op)
        else:
            for flat, tensor in zip(flats, tensors, strict=True):
                self._collectives.fold(flat.buffer, flat.buffer, flat.dtype, reduction(tensor, op), deadline, label)
        for flat in flats:
            flat.back()

    def _scale(self, flat: Flat, op: str) -> float:
        """What a sum is multiplied by on the way; integers are divided by ``_divide_whole`` when they are there."""
        if op.startswith(TIMES):
            return float(op.removeprefix(TIMES))
        return 1.0 / self.size() if op == "avg" and not flat.is_whole else 1.0

    def _divide_whole(self, flat: Flat, op: str) -> None:
        """The mean of integers, rounded toward zero as by NCCL."""
        if op == "avg" and flat.is_whole:
            torch.from_numpy(flat.buffer).div_(self.size(), rounding_mode="trunc")

    def _divide(self, flat: Flat, op: str) -> None:
        if flat.is_whole:
            self._divide_whole(flat, op)
        elif self._scale(flat, op) != 1.0:
            host.scale(flat.buffer, self._scale(flat, op), flat.dtype)

    def _fold_parts(
        self, parts: Sequence[Buffer], target: Flat, op: str, kind: str, deadline: Deadline, label: str
    ) -> None:
        """``Collectives.fold_parts``, and what a sum is multiplied by; half types are rounded once."""
        if self._scale(target, op) == 1.0 or target.dtype not in host.HALF:
            self._collectives.fold_parts(parts, target.buffer, target.dtype, kind, deadline, label)
            self._divide(target, op)
            return
        wide = [np.empty(part.size, np.float32) for part in parts]
        for part, widened in zip(parts, wide, strict=True):
            host.widen(part, target.dtype, widened)
        total = np.empty(target.buffer.size, np.float32)
        self._collectives.fold_parts(wide, total, "float32", kind, deadline, label)
        host.narrow(total * np.float32(self._scale(target, op)), target.buffer, target.dtype)

    @also_named("tensors tensor", "opts root", "op", "timeout")
    def reduce(
        self, tensors: Tensors | torch.Tensor, opts: Any = None, op: Any = None, timeout: Any = None
    ) -> GroupWork:
        tensor, root = single(tensors), root_of(opts)
        name = _op_of(opts if hasattr(opts, "reduceOp") else op)

        def prepare() -> Plan:
            self._check_root(root)
            flat = numbers(tensor, name, writes=self.rank() == root)

            def run(deadline: Deadline, label: str) -> None:
                mine = self.rank() == root
                kind = reduction(tensor, name)
                if self._scale(flat, name) != 1.0 and flat.dtype in host.HALF:  # rounded once, after it was multiplied
                    out = flat.buffer if mine else np.empty_like(flat.buffer)
                    tensors = [([flat.vector], out, ())]
                    self._collectives.allreduce_many(tensors, flat.dtype, deadline, label, self._scale(flat, name))
                    if mine:
                        flat.back()
                    return
                self._collectives.reduce(
                    flat.buffer, flat.buffer if mine else None, flat.dtype, kind, root, deadline, label
                )
                if mine:
                    self._divide(flat, name)
                    flat.back()

            return Plan(entries([tensor]), run, [tensor])

        return self._start(f"reduce[{name}] to {root}", timeout or opts, prepare)

    @also_named("outputTensor", "inputTensor", "opts")
    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> GroupWork:
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        op = _op_of(opts)

        def prepare() -> Plan:
            pairs = []
            for output, source in zip(outputs, inputs, strict=True):
                check_dtypes([output, source])
                check_size("input", source.numel(), self.size() * output.numel())
                pairs.append((numbers(output, op, reads=False), numbers(source, op), source))

            def run(deadline: Deadline, label: str) -> None:
                for output, source, tensor in pairs:
                    self._scatter_sum(source, output, tensor, op, deadline, label)

            return Plan(entries(inputs), run, list(outputs))

        return self._start(f"reduce_scatter[{op}]", opts, prepare)

    def _scatter_sum(
        self, source: Flat, output: Flat, tensor: torch.Tensor, op: str, deadline: Deadline, label: str
    ) -> None:
        kind = reduction(tensor, op)
        if kind == "sum":
            where = deadline, label, self._scale(source, op)
            self._collectives.reduce_scatter([source.vector], output.buffer, source.dtype, *where)
            self._divide_whole(output, op)
        else:
            parts = np.split(source.buffer, self.size())
            self._collectives.fold_parts(parts, output.buffer, source.dtype, kind, deadline, label)
        output.back()

    @also_named("output_tensors output", "input_tensors input", "opts op", "timeout")
    def reduce_scatter(
        self,
        outputs: Tensors | torch.Tensor,
        inputs: Sequence[Tensors] | Tensors,
        opts: Any = None,
        timeout: Any = None,
    ) -> GroupWork:
        output, sources, op = single(outputs), as_row(inputs), _op_of(opts)

        def prepare() -> Plan:
            self._check_row("input", sources, output.numel())
            check_dtypes([output, *sources])
            flat, parts = numbers(output, op, reads=False), [numbers(source, op) for source in sources]

            def run(deadline: Deadline, label: str) -> None:
                kind = reduction(output, op)
                buffers = [part.buffer for part in parts]
                if kind == "sum" and len({buffer.size for buffer in buffers}) == 1:
                    whole = Flat(output, flat.flat, np.concatenate(buffers), flat.dtype)
                    where = deadline, label, self._scale(flat, op)
                    self._collectives.reduce_scatter([whole.vector], flat.buffer, flat.dtype, *where)
                    self._divide_whole(flat, op)
                else:
                    self._fold_parts(buffers, flat, op, kind, deadline, label)
                flat.back()

            return Plan(entries(sources), run, [output])

        return self._start(f"reduce_scatter[{op}]", timeout or opts, prepare)

    # What torch calls the same before 2.13.
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced


def _op_of(options: Any) -> str:
    """The name of a reduction, also of one that ``numbers`` refuses; of none, a sum."""
    wanted = getattr(options, "reduceOp", options)
    if wanted is None or isinstance(wanted, timedelta):
        return "sum"
    name: str = getattr(wanted, "op", wanted).name
    if name == "PREMUL_SUM":
        return f"{TIMES}{float(wanted.__getstate__()[1])!r}"
    return name.lower()
