"""``DistributedOptimizer`` as Horovod has it: gradients are reduced while the backward pass goes on."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from kvmpi.compiling import methods_not_compiled
from kvmpi.config import Config
from kvmpi.errors import ConfigError, KVError, UnsupportedError
from kvmpi.horovod import basics
from kvmpi.horovod.compression import Compression
from kvmpi.horovod.handles import Handle
from kvmpi.horovod.operations import Average, Operation, Sum, chosen, start_allreduce
from kvmpi.horovod.unsupported import check_process_set
from kvmpi.torch.buckets import Progress, plan
from kvmpi.torch.gradients import keep_apart
from kvmpi.warning import warn

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
        """As of the optimizer, on gradients that are reduced over all ranks: those that ``closure`` computes, each time
        that it is called, if there is one."""
        if closure is not None and self._hvd.steps_synchronize:
            if self._hvd.under_way():
                self._hvd.synchronize()
            closure = self._hvd.reducing(closure)
        elif self._hvd.steps_synchronize:
            if self._hvd.synchronized:
                warn(
                    "optimizer.step() after optimizer.synchronize() reduces the gradients a second time; "
                    "call it inside 'with optimizer.skip_synchronize():'",
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


# Its hooks run around the ``step`` of the optimizer's own class; torch would put them around this one, too, when it
# reads a state.
_Distributed.step.hooked = True  # type: ignore[attr-defined]

#: By parameter: what reduces its gradients, the last that was made.
_reductions: WeakIdKeyDictionary = WeakIdKeyDictionary()


@methods_not_compiled
class _Reduction:
    """Gradients leave in buckets, in one order on all ranks: the reverse of that of the parameters.

    Which parameters there are, and which of them are trained, is looked at after each step: those that are new by then
    leave when it is over, and with the others from the next one on.

    Args:
        optimizer: whose ``param_groups`` they are in. It refers to this object, and not the other way round: who trains
            in turn with several optimizers leaves nothing behind.
        names: of parameters, by identity.
    """

    def __init__(
        self, optimizer: Any, names: Mapping[int, str], compression: Any, passes: int, op: Operation, predivide: float,
        sparse_as_dense: bool,
    ) -> None:  # fmt: skip
        self._optimizer, self._names = weakref.ref(optimizer), names
        self._compression, self._op, self._predivide, self._dense = compression, op, predivide, sparse_as_dense
        self._bucket_bytes = Config.from_env().bucket_bytes
        self._params: list[torch.nn.Parameter] = []
        self._hooks: dict[int, Any] = {}
        weakref.finalize(self, _remove, self._hooks).atexit = False
        self._handles: list[Handle] = []
        self._left_as: list[tuple[int, torch.Tensor, int]] = []  # gradients that are on their way, and their versions
        self.steps_synchronize, self.synchronized = True, False
        #: What somebody has put over the optimizer's own ``step`` before, and the optimizer that it refers to.
        self.patched_step: Any = None
        self.patched: Any = None
        self._passes = passes
        self._alone = basics.size() == 1
        self._plan(self._trained())
        self.set_passes(passes)

    def _trained(self) -> list[torch.nn.Parameter]:
        """The parameters that need gradients, in an order that does not change."""
        optimizer = self._optimizer()
        groups = () if optimizer is None else optimizer.param_groups
        own = {id(p): p for group in groups for p in group["params"] if p.requires_grad}
        named = [own.pop(identity) for identity in self._names if identity in own]
        return [*named, *own.values()]

    def _plan(self, params: list[torch.nn.Parameter]) -> None:
        """Reduce the gradients of these from now on."""
        for identity in self._hooks.keys() - {id(p) for p in params}:
            self._hooks.pop(identity).remove()
        self._params = params
        self._index = {id(p): index for index, p in enumerate(params)}
        nbytes = [p.numel() * p.element_size() for p in params]
        self._buckets = plan(range(len(nbytes))[::-1], nbytes, self._bucket_bytes)
        for param in params if not self._alone else ():
            if id(param) in self._hooks:
                continue
            earlier = _reductions.get(param)
            if earlier is not None and (other := earlier()) is not None and other is not self:
                other.give_way(param)
            _reductions[param] = weakref.ref(self)
            self._hooks[id(param)] = param.register_post_accumulate_grad_hook(
                functools.partial(_has_gradient, weakref.ref(self), id(param))
            )

    def give_way(self, param: torch.nn.Parameter) -> None:
        """Another optimizer reduces the gradients of ``param`` from now on."""
        hook = self._hooks.pop(id(param), None)
        if hook is not None:  # else it is frozen there
            hook.remove()

    def _name(self, index: int) -> str:
        return self._names.get(id(self._params[index]), f"parameter {index}")

    def set_passes(self, passes: int) -> None:
        if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
            raise ConfigError(f"backward_passes_per_step={passes!r}: expected a number of passes, at least 1")
        self._passes = passes
        self._left = [passes] * len(self._params)
        self._progress = Progress(self._buckets)

    def reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``closure``, after which its gradients are those of all ranks, and its value is reduced as they are.

        By that value a line search goes on or ends, which it has to do on all ranks alike.
        """

        def reduced() -> Any:
            with torch.enable_grad():  # not all optimizers do so
                loss = closure()
            self.synchronize()
            if loss is None or self._alone:
                return loss
            value = torch.as_tensor(loss, dtype=torch.float64, device="cpu").detach().reshape(1)
            handle = start_allreduce([value.clone()], True, "value of a closure", None, self._op, 1.0, 1.0, None)
            found = handle.wait()[0].reshape(())
            return found.to(loss) if isinstance(loss, torch.Tensor) else float(found)

        return reduced

    def under_way(self) -> bool:
        return 0 in self._left

    def has_gradient(self, identity: int) -> None:
        """A backward pass has computed the gradient of a parameter."""
        index = self._index[identity]
        self._left[index] -= 1
        if self._left[index] < 0:
            raise KVError(
                f"the gradient of {self._name(index)} was computed more than backward_passes_per_step="
                f"{self._passes} times before a step; give the number of backward passes of a step"
            )
        if self._left[index] == 0:
            for number in self._progress.arrive(index):
                self._launch(self._buckets[number])

    def _launch(self, bucket: Sequence[int]) -> None:
        """Start to reduce; a parameter without a gradient here may have one elsewhere, unless it is frozen by now."""
        bucket = [index for index in bucket if self._params[index].requires_grad]
        if not bucket:
            return
        self._check_apart(bucket)
        keep_apart([self._params[index] for index in bucket])
        gradients = []
        for index in bucket:
            param = self._params[index]
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            elif param.grad.layout is not torch.strided:
                if not self._dense:
                    raise UnsupportedError(
                        f"the gradient of {self._name(index)} is sparse; pass sparse_as_dense=True, or make it dense"
                    )
                param.grad = param.grad.to_dense()
            gradients.append(param.grad)
        op, before, after = self._op, 1.0, 1.0
        if self._predivide != 1.0:
            op, before, after = Sum, 1.0 / self._predivide, self._predivide / basics.size()
        self._left_as += [(index, grad, grad._version) for index, grad in zip(bucket, gradients, strict=True)]
        title = f"gradients from {self._name(bucket[0])} on"
        self._handles.append(start_allreduce(gradients, True, title, None, op, before, after, None, self._compression))

    def _check_apart(self, bucket: Sequence[int]) -> None:
        """Raise if a gradient is the same memory as one that is being reduced there."""
        if self._compression is not Compression.none or self._predivide != 1.0:
            return  # what travels is a copy
        under_way = {grad.data_ptr() for _, grad, _ in self._left_as if grad.numel()}
        for index in bucket:
            grad = self._params[index].grad
            if grad is not None and grad.layout is torch.strided and grad.data_ptr() in under_way:
                raise KVError(
                    f"the gradient of {self._name(index)} shares its memory with another that is on its way to other "
                    "ranks: give it memory of its own, with param.register_hook(torch.clone)"
                )

    def _check_unchanged(self) -> None:
        """Raise if somebody has written to gradients on their way, or put others in their place, on this rank alone."""
        changed = [
            index
            for index, grad, version in self._left_as
            if self._params[index].grad is not grad or grad._version != version
        ]
        if changed:
            self._left_as.clear()
            raise KVError(
                f"the gradient of {self._name(changed[0])} was changed after loss.backward() (clipped, added to, "
                f"unscaled, replaced), on its way to other ranks: {_FIRST}"
            )

    def _check_own(self) -> None:
        """Raise if another optimizer reduces these gradients, so that this one would do it a second time."""
        taken = [index for index, param in enumerate(self._params) if id(param) not in self._hooks]
        if taken:
            raise KVError(
                f"another hvd.DistributedOptimizer was made for {self._name(taken[0])} since, and reduces its "
                "gradients: of several for one parameter only the last can be used"
            )

    def synchronize(self) -> None:
        if not self._alone:
            launched = {index for index, _, _ in self._left_as}
            self._check_unchanged()
            self._check_own()
            keep_apart(param for index, param in enumerate(self._params) if index not in launched)
            for number in self._progress.finish():
                self._launch(self._buckets[number])
            trained = self._trained()
            if {id(p) for p in trained} != self._index.keys():
                before = self._index.keys()
                self._plan(trained)
                # What no hook knew of is still as this rank has computed it.
                for bucket in self._buckets:
                    self._launch([index for index in bucket if id(trained[index]) not in before])
            self._left_as.clear()
            handles, self._handles = self._handles, []
            for handle in handles:
                handle.wait()
        self.set_passes(self._passes)
        self.synchronized = True


def _remove(hooks: dict[int, Any]) -> None:
    for hook in hooks.values():
        hook.remove()


def _has_gradient(of: weakref.ref[_Reduction], identity: int, _: torch.Tensor) -> None:
    """The hook of a parameter."""
    reduction = of()
    if reduction is not None:
        reduction.has_gradient(identity)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = Compression.none, backward_passes_per_step: int = 1, op: Operation = Average,
    gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Any = None, sparse_as_dense: bool = False,
    process_set: Any = None,
) -> Any:  # fmt: skip
    """``optimizer``, whose ``step`` works on gradients that are reduced over all ranks.

    It is an instance of the optimizer's own class, with the same parameter groups and state. Gradients leave during the
    last of ``backward_passes_per_step`` backward passes, several together, in one order on all ranks; ``step`` waits
    for them. The gradients of several passes add up. A parameter without a gradient counts as zeros, if it needs one.
    Parameters may be added, frozen and unfrozen between steps, on all ranks alike. Of several such optimizers for one
    parameter the last reduces its gradient; to use an earlier one then is an error.

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
        found, {id(p): name for name, p in named}, compression, backward_passes_per_step, op,
        gradient_predivide_factor, sparse_as_dense,
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
