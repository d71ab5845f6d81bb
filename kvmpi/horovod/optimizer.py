"""``DistributedOptimizer`` as Horovod has it: gradients are reduced while the backward pass goes on."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from kvmpi.config import Config
from kvmpi.errors import ConfigError, KVError, UnsupportedError
from kvmpi.horovod import basics
from kvmpi.horovod.compression import Compression
from kvmpi.horovod.handles import Handle
from kvmpi.horovod.operations import Average, Operation, Sum, chosen, start_allreduce
from kvmpi.horovod.unsupported import check_process_set
from kvmpi.torch.buckets import Progress, plan

#: What has to be done before gradients are looked at or changed.
_FIRST = "call optimizer.synchronize() first, and optimizer.step() inside 'with optimizer.skip_synchronize():'"


class _Distributed:
    """What is put before the class of an optimizer. Fields are the optimizer's own, but for ``_hvd``."""

    _hvd: _Reduction
    param_groups: list[dict[str, Any]]

    def synchronize(self) -> None:
        """Return when the gradients of all parameters are reduced. Collective; ``step`` does it by itself."""
        self._hvd.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """``step`` inside does not synchronize: for after a ``synchronize`` of the caller's, as to clip gradients."""
        self._hvd.steps_synchronize = False
        try:
            yield
        finally:
            self._hvd.steps_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on so many backward passes come before a step."""
        self._hvd.set_passes(passes)

    def step(self, closure: Any = None) -> Any:
        """As of the optimizer, on gradients that are reduced over all ranks."""
        if self._hvd.steps_synchronize:
            if self._hvd.synchronized:
                warnings.warn(
                    "optimizer.step() after optimizer.synchronize() reduces the gradients a second time; "
                    "call it inside 'with optimizer.skip_synchronize():'",
                    stacklevel=2,
                )
            self._hvd.synchronize()
        self._hvd.synchronized = False
        update = self._hvd.patched_step or super().step  # type: ignore[misc]
        return update(closure)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Where GradScaler looks first, before it looks at gradients: those on their way are not what all ranks get."""
        if self._hvd.under_way():
            raise KVError(f"GradScaler.step() while gradients are on their way to other ranks: {_FIRST}")
        return bool(vars(self).get("_step_supports_amp_scaling", False))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        vars(self)["_step_supports_amp_scaling"] = value

    def zero_grad(self, *arguments: Any, **options: Any) -> Any:
        """As of the optimizer; an error while gradients are under way."""
        if self._hvd.under_way():
            raise KVError(
                "optimizer.zero_grad() between loss.backward() and optimizer.step() or optimizer.synchronize(): the "
                "gradients are on their way to other ranks; call it before backward, or after step"
            )
        return super().zero_grad(*arguments, **options)  # type: ignore[misc]


class _Reduction:
    """Gradients leave in buckets, in one order on all ranks: the reverse of that of the parameters."""

    def __init__(
        self, params: list[tuple[str, torch.nn.Parameter]], compression: Any, passes: int, op: Operation,
        predivide: float, sparse_as_dense: bool,
    ) -> None:  # fmt: skip
        self._compression, self._op, self._predivide, self._dense = compression, op, predivide, sparse_as_dense
        trained = [(name, p) for name, p in params if p.requires_grad]
        self._names, self._params = [name for name, _ in trained], [p for _, p in trained]
        nbytes = [p.numel() * p.element_size() for p in self._params]
        self._buckets = plan(range(len(nbytes))[::-1], nbytes, Config.from_env().bucket_bytes)
        self._handles: list[Handle] = []
        self._left_as: list[tuple[int, torch.Tensor, int]] = []  # gradients that are on their way, and their versions
        self.steps_synchronize, self.synchronized = True, False
        #: What somebody has put over the optimizer's own ``step`` before, and the optimizer that it refers to.
        self.patched_step: Any = None
        self.patched: Any = None
        self.set_passes(passes)
        self._alone = basics.size() == 1
        if not self._alone:
            for index, param in enumerate(self._params):
                param.register_post_accumulate_grad_hook(lambda _, index=index: self._has_gradient(index))  # type: ignore[misc]

    def set_passes(self, passes: int) -> None:
        if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
            raise ConfigError(f"backward_passes_per_step={passes!r}: expected a number of passes, at least 1")
        self._passes = passes
        self._left = [passes] * len(self._params)
        self._progress = Progress(self._buckets)

    def under_way(self) -> bool:
        return bool(self._progress.arrived)

    def _has_gradient(self, index: int) -> None:
        self._left[index] -= 1
        if self._left[index] < 0:
            raise KVError(
                f"the gradient of {self._names[index]} was computed more than backward_passes_per_step="
                f"{self._passes} times before a step; give the number of backward passes of a step"
            )
        if self._left[index] == 0:
            for number in self._progress.arrive(index):
                self._launch(self._buckets[number])

    def _launch(self, bucket: Sequence[int]) -> None:
        """Start to reduce; a parameter without a gradient here may have one elsewhere."""
        gradients = []
        for index in bucket:
            param = self._params[index]
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            elif param.grad.layout is not torch.strided:
                if not self._dense:
                    raise UnsupportedError(
                        f"the gradient of {self._names[index]} is sparse; pass sparse_as_dense=True, or make it dense"
                    )
                param.grad = param.grad.to_dense()
            gradients.append(param.grad)
        op, before, after = self._op, 1.0, 1.0
        if self._predivide != 1.0:
            op, before, after = Sum, 1.0 / self._predivide, self._predivide / basics.size()
        self._left_as += [(index, grad, grad._version) for index, grad in zip(bucket, gradients, strict=True)]
        title = f"gradients from {self._names[bucket[0]]} on"
        self._handles.append(start_allreduce(gradients, True, title, None, op, before, after, None, self._compression))

    def _check_unchanged(self) -> None:
        """Raise if somebody has written to gradients on their way: what came of that would differ between ranks."""
        changed = [index for index, grad, version in self._left_as if grad._version != version]
        self._left_as.clear()
        if changed:
            raise KVError(
                f"the gradient of {self._names[changed[0]]} was changed after loss.backward() (clipped, added to, "
                f"unscaled), on its way to other ranks: {_FIRST}"
            )

    def synchronize(self) -> None:
        if not self._alone:
            self._check_unchanged()
            for number in self._progress.finish():
                self._launch(self._buckets[number])
            self._left_as.clear()
            handles, self._handles = self._handles, []
            for handle in handles:
                handle.wait()
        self.set_passes(self._passes)
        self.synchronized = True


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = Compression.none, backward_passes_per_step: int = 1, op: Operation = Average,
    gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Any = None, sparse_as_dense: bool = False,
    process_set: Any = None,
) -> Any:  # fmt: skip
    """``optimizer``, whose ``step`` works on gradients that are reduced over all ranks.

    It is an instance of the optimizer's own class, with the same parameter groups and state. Gradients leave during the
    last of ``backward_passes_per_step`` backward passes, several together, in one order on all ranks; ``step`` waits
    for them. The gradients of several passes add up. A parameter without a gradient counts as zeros.

    Args:
        named_parameters: names for messages; all parameters of the optimizer that need gradients must be among them.
        op: ``Average`` or ``Sum`` (or ``Min``, ``Max``).
        gradient_predivide_factor: f divides by f before the sum and by size/f after it; with ``Average`` only.
        num_groups, groups: how Horovod groups tensors; kvmpi's own way (``KVMPI_BUCKET_BYTES``) is taken instead.
        sparse_as_dense: sparse gradients are made dense; else they are an error.
    Raises:
        ConfigError: the arguments do not go together.
        UnsupportedError: Adasum, or a process set.
        NotLaunchedError: ``init`` was not called.
    """
    check_process_set(process_set)
    basics.group()
    op = chosen(op, None, "DistributedOptimizer")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer is {type(optimizer).__name__}: expected an instance of a torch.optim class")
    if isinstance(optimizer, _Distributed):
        raise ConfigError("optimizer is distributed already")
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ConfigError("gradient_predivide_factor goes with op=hvd.Average only")
    if not gradient_predivide_factor > 0:
        raise ConfigError(f"gradient_predivide_factor={gradient_predivide_factor}: expected a number above 0")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    named = [(f"parameter {i}", p) for i, p in enumerate(params)]
    if named_parameters is not None:
        named = list(named_parameters)
        if any(not isinstance(item, tuple) for item in named):
            raise ConfigError("named_parameters: expected pairs of name and parameter, as model.named_parameters()")
        names = [name for name, _ in named]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"named_parameters has these names twice: {', '.join(twice)}")
        known, own = {id(p) for _, p in named}, {id(p) for p in params}
        missing = sum(id(p) not in known for p in params)
        if missing:
            raise ConfigError(f"named_parameters lacks {missing} of the optimizer's parameters")
        named = [(name, p) for name, p in named if id(p) in own]
    kind: Any = type(type(optimizer).__name__, (_Distributed, type(optimizer)), {})
    found = kind.__new__(kind)
    found.__dict__ = optimizer.__dict__
    found._hvd = _Reduction(
        named, compression, backward_passes_per_step, op, gradient_predivide_factor, sparse_as_dense
    )  # fmt: skip
    if "step" in optimizer.__dict__:
        _go_round(optimizer, found)
    return found


def _go_round(optimizer: torch.optim.Optimizer, found: Any) -> None:
    """A scheduler that was made before has put a ``step`` over that of ``optimizer``: it comes last, not instead.

    The scheduler knows its ``step`` by attributes, and looks for it in ``optimizer``, which it refers to weakly.
    """
    found._hvd.patched_step, found._hvd.patched = optimizer.__dict__["step"], optimizer

    @functools.wraps(found._hvd.patched_step)
    def step(*arguments: Any, **options: Any) -> Any:
        return _Distributed.step(found, *arguments, **options)

    found.__dict__["step"] = step
