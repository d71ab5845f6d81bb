"""A process group of torch.distributed over the tensor collectives: with what moves data, it is complete."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
import torch

from kvmpi.collectives import Entry
from kvmpi.compiling import methods_not_compiled
from kvmpi.deadline import Deadline
from kvmpi.errors import ShapeMismatchError
from kvmpi.torch.group.base import (
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
from kvmpi.torch.group.reductions import Reductions
from kvmpi.torch.group.tensors import octets
from kvmpi.torch.group.work import GroupWork

Buffer = npt.NDArray[Any]


@methods_not_compiled
class KvmpiProcessGroup(Reductions):
    """The ranks of a communicator as torch.distributed knows them. Made by ``init_process_group`` and ``new_group``."""

    @also_named("tensors tensor", "opts root", "timeout")
    def broadcast(self, tensors: Tensors | torch.Tensor, opts: Any = None, timeout: Any = None) -> GroupWork:
        root = root_of(opts)
        found = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)

        def prepare() -> Plan:
            self._check_root(root)
            flats = [octets(tensor, writes=self.rank() != root) for tensor in found]

            def run(deadline: Deadline, label: str) -> None:
                for flat in flats:
                    self._collectives.broadcast(flat.buffer, root, deadline, label)
                    if self.rank() != root:
                        flat.back()

            return Plan(entries(found), run, found)

        return self._start(f"broadcast from {root}", timeout or opts, prepare)

    @also_named("output", "input", "opts")
    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> GroupWork:
        return self.all_gather_single_coalesced([output], [source], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        def prepare() -> Plan:
            pairs = []
            for output, source in zip(outputs, inputs, strict=True):
                check_size("output", output.numel(), self.size() * source.numel())
                check_dtypes([output, source])
                pairs.append((octets(output, reads=False), octets(source)))

            def run(deadline: Deadline, label: str) -> None:
                for output, source in pairs:
                    self._collectives.allgather(source.buffer, output.buffer, deadline, label)
                    output.back()

            return Plan(entries(inputs), run, list(outputs))

        return self._start("all_gather", opts, prepare)

    @also_named("output_tensors", "input_tensors input_tensor", "opts timeout")
    def allgather(
        self, outputs: Sequence[Tensors] | Tensors, inputs: Tensors | torch.Tensor, opts: Any = None
    ) -> GroupWork:
        if isinstance(inputs, torch.Tensor):
            return self._gather_lists([outputs], [inputs], opts)
        return self._gather_lists(outputs, inputs, opts)

    @also_named("output_lists", "input_list", "opts")
    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> GroupWork:
        """``outputs[r][i]`` takes what rank r has as ``inputs[i]``: unlike in ``allgather``, the rank comes first."""
        return self._gather_lists([[*row] for row in zip(*outputs, strict=False)], inputs, opts)

    def _gather_lists(self, outputs: Sequence[Any], inputs: Tensors, opts: Any) -> GroupWork:
        def prepare() -> Plan:
            rows = []
            for row, source in zip(outputs, inputs, strict=True):
                self._check_row("output", row, source.numel())
                check_dtypes([source, *row])
                rows.append((octets(source), [octets(target, reads=False) for target in row]))

            def run(deadline: Deadline, label: str) -> None:
                for source, targets in rows:
                    self._collectives.gather_lists(
                        source.buffer, [target.buffer for target in targets], deadline, label
                    )
                    for target in targets:
                        target.back()

            return Plan(entries([target for row in outputs for target in row]), run, list(outputs))

        return self._start("all_gather", opts, prepare)

    @also_named("output_tensors", "input_tensors input_tensor", "opts root", "timeout")
    def gather(
        self, outputs: Sequence[Any], inputs: Tensors | torch.Tensor, opts: Any = None, timeout: Any = None
    ) -> GroupWork:
        source, root = single(inputs), root_of(opts)
        row: list[torch.Tensor] = as_row(outputs) if self.rank() == root else []

        def prepare() -> Plan:
            self._check_root(root)
            flat, targets = octets(source), [octets(target, reads=False) for target in row]
            if self.rank() == root:
                self._check_row("output", row, source.numel(), equal=True)
                check_dtypes([source, *row])

            def run(deadline: Deadline, label: str) -> None:
                sends = [flat.buffer if rank == root else None for rank in range(self.size())]
                receives: list[Buffer | None] = [target.buffer for target in targets] or [None] * self.size()
                self._collectives.exchange(sends, receives, deadline, label)
                for target in targets:
                    target.back()

            return Plan(entries([source]), run, [row])

        return self._start(f"gather to {root}", timeout or opts, prepare)

    @also_named("output_tensors output_tensor", "input_tensors", "opts root", "timeout")
    def scatter(
        self, outputs: Tensors | torch.Tensor, inputs: Sequence[Any], opts: Any = None, timeout: Any = None
    ) -> GroupWork:
        output, root = single(outputs), root_of(opts)
        row: list[torch.Tensor] = as_row(inputs) if self.rank() == root else []

        def prepare() -> Plan:
            self._check_root(root)
            flat, sources = octets(output, reads=False), [octets(source) for source in row]
            if self.rank() == root:
                self._check_row("input", row, output.numel(), equal=True)
                check_dtypes([output, *row])

            def run(deadline: Deadline, label: str) -> None:
                sends: list[Buffer | None] = [source.buffer for source in sources] or [None] * self.size()
                receives = [flat.buffer if rank == root else None for rank in range(self.size())]
                self._collectives.exchange(sends, receives, deadline, label)
                flat.back()

            return Plan(entries([output]), run, [output])

        return self._start(f"scatter from {root}", timeout or opts, prepare)

    @also_named("output_tensors", "input_tensors", "opts")
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        def prepare() -> Plan:
            for name, row in (("output", outputs), ("input", inputs)):
                self._check_row(name, row, None)
            check_dtypes([*outputs, *inputs])
            targets = [octets(target, reads=False) for target in outputs]
            sources = [octets(source) for source in inputs]

            def run(deadline: Deadline, label: str) -> None:
                sent, expected = ([tensor.numel() for tensor in row] for row in (inputs, outputs))
                sends, receives = [flat.buffer for flat in sources], [flat.buffer for flat in targets]
                self._collectives.exchange_counted(sends, receives, sent, expected, deadline, label)
                for target in targets:
                    target.back()

            return Plan([Entry(0, (), str(inputs[0].dtype))], run, list(outputs))

        return self._start("all_to_all", opts, prepare)

    @also_named("output", "input", "output_split_sizes", "input_split_sizes", "opts timeout")
    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int],
        opts: Any = None,
    ) -> GroupWork:  # fmt: skip
        def prepare() -> Plan:
            check_dtypes([output, source])
            expected, sent = self._counts("output", output, output_splits), self._counts("input", source, input_splits)
            target, flat = octets(output, reads=False), octets(source)
            size = output.element_size()

            def run(deadline: Deadline, label: str) -> None:
                sends, receives = _cut(flat.buffer, sent, size), _cut(target.buffer, expected, size)
                self._collectives.exchange_counted(sends, receives, sent, expected, deadline, label)
                target.back()

            return Plan([Entry(0, (), str(source.dtype))], run, [output])

        return self._start("all_to_all_single", opts, prepare)

    def _counts(self, name: str, tensor: torch.Tensor, splits: Sequence[int]) -> list[int]:
        """Elements for each rank: ``splits`` are rows of the first dimension; none are equal parts."""
        rows = tensor.shape[0] if tensor.dim() else tensor.numel()
        if not splits:
            if rows % self.size():
                raise ShapeMismatchError(f"{name} has {rows} rows, which are no equal parts for {self.size()} ranks")
            splits = [rows // self.size()] * self.size()
        if len(splits) != self.size() or sum(splits) != rows or min(splits) < 0:
            raise ShapeMismatchError(f"{name} splits {list(splits)}: expected {self.size()} of them, {rows} in all")
        return [int(split) * (tensor.numel() // rows if rows else 0) for split in splits]

    @also_named("opts timeout")
    def barrier(self, opts: Any = None) -> GroupWork:
        return self._start("barrier", opts, lambda: Plan([], lambda *_: None, (), "barrier"))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Return when all ranks are here; the error names all that did not come, as of any operation."""
        self.barrier(timeout).wait()

    def broadcast_text(self, text: Callable[[], bytes], root: int, title: str) -> GroupWork:
        """What ``text`` gives on ``root`` as the result on every rank; where that fails, all ranks fail."""
        heard: list[bytes] = []

        def prepare() -> Plan:
            mine = text() if self.rank() == root else b""
            return Plan([], lambda *where: heard.append(self._collectives.tell(mine, root, *where)), heard)

        return self._start(f"{title} from {root}", None, prepare)

    def all_gather_texts(self, text: Callable[[], bytes], title: str) -> GroupWork:
        """What ``text`` gives on each rank, of whatever lengths, as the results; where that fails, all ranks fail."""
        heard: list[bytes] = []

        def prepare() -> Plan:
            mine = text()
            return Plan([], lambda *where: heard.extend(self._collectives.all_tell(mine, *where)), heard)

        return self._start(title, None, prepare)

    # What torch calls the same before 2.13.
    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    alltoall_base = all_to_all_single


def _cut(buffer: Buffer, counts: Sequence[int], itemsize: int) -> list[Buffer]:
    """``counts[r]`` elements for rank r, one behind the other."""
    stops = [itemsize * stop for stop in itertools.accumulate(counts, initial=0)]
    return [buffer[start:stop] for start, stop in itertools.pairwise(stops)]
