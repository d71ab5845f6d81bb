"""The parameters of a model as keys of a store, everywhere with worker 0's first weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvmpi.arrays import DTYPES
from kvmpi.engine import Work
from kvmpi.errors import ConfigError, DTypeMismatchError, DuplicateKeyError, ShapeMismatchError
from kvmpi.store import KVStore

#: So much of what is not trained is copied to be sent, each by itself.
_SMALL_BYTES = 64 << 10

Parameters = Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor]


class KeyedParameters:
    """A fixed list of parameters with their names; ``keys[i]`` is ``first_key + i``."""

    def __init__(self, params: Parameters, first_key: int = 0) -> None:
        """Take ``model.parameters()``, ``model.named_parameters()`` or a dict of tensors.

        Raises:
            ConfigError: nothing, something that is no tensor, or a parameter twice.
        """
        if isinstance(params, torch.Tensor):
            raise ConfigError("params is one tensor: pass a list, model.parameters() or model.named_parameters()")
        if isinstance(params, torch.nn.Module) or not isinstance(params, Iterable):
            kind = type(params).__name__
            raise ConfigError(f"params is of {kind}: pass model.parameters() or model.named_parameters()")
        self.names: list[str] = []
        self.tensors: list[torch.Tensor] = []
        items: Iterable[Any] = params.items() if isinstance(params, Mapping) else params
        for index, item in enumerate(items):
            name, tensor = item if isinstance(item, tuple) and len(item) == 2 else (f"parameter {index}", item)
            if not isinstance(tensor, torch.Tensor):
                raise ConfigError(f"params[{index}] is {type(tensor).__name__}, expected a torch tensor")
            if torch.nn.parameter.is_lazy(tensor):
                raise ConfigError(f"{name} has no shape yet (LazyModule): call the model with a batch before")
            self.names.append(str(name))
            self.tensors.append(tensor)
        if not self.tensors:
            raise ConfigError("params is empty: a generator such as model.parameters() can be used only once")
        first: dict[int, int] = {}
        for index, tensor in enumerate(self.tensors):
            if id(tensor) in first:
                raise ConfigError(f"{self.names[index]} is the same tensor as {self.names[first[id(tensor)]]}")
            first[id(tensor)] = index
        self.keys = list(range(first_key, first_key + len(self.tensors)))
        #: Those that the keys are made of.
        self.dtypes = [tensor.dtype for tensor in self.tensors]
        self.orders = [memory_order(tensor) for tensor in self.tensors]

    def extend(self, others: KeyedParameters) -> None:
        """Go on with ``others``, too."""
        self.names += others.names
        self.tensors += others.tensors
        self.keys += others.keys
        self.dtypes += others.dtypes
        self.orders += others.orders

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def data(self) -> list[torch.Tensor]:
        """The tensors without their autograd history; the same memory."""
        return [tensor.detach() for tensor in self.tensors]

    def as_it_lies(self, index: int) -> torch.Tensor:
        """One of ``data`` with its dimensions in the order of its memory: contiguous, if it has no gaps."""
        data = self.tensors[index].detach()
        return data.permute(memory_order(data))

    def order(self, index: int) -> tuple[int, ...]:
        """``memory_order`` of one of them: that of the dimensions of its key."""
        return memory_order(self.tensors[index])

    def check_dense(self, index: int) -> None:
        """Raise if the gradient of one of them is sparse."""
        grad = self.tensors[index].grad
        if grad is not None and grad.layout is not torch.strided:
            raise ConfigError(
                f"the gradient of {self.names[index]} is sparse, which DistributedOptimizer does not exchange; "
                "kvmpi.torch.Trainer does, and so does DistributedDataParallel on kvmpi.torch.c10d. Or make it dense "
                "(torch.nn.Embedding(..., sparse=False))"
            )

    def _check_whole(self) -> None:
        """Raise where this worker holds a part of a parameter: the parts of several workers would be added up."""
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if is_traceable_wrapper_subclass(tensor) and not hasattr(tensor, "full_tensor"):
                raise ConfigError(
                    f"{name} is of {type(tensor).__name__}, a class that wraps other tensors: stores "
                    "carry plain ones; freeze it, or leave it out of the optimizer"
                )
            # Of a flat parameter of FSDP1, which is a plain tensor: its shape where it is whole.
            flat = getattr(tensor, "_unpadded_unsharded_size", None)
            if hasattr(tensor, "full_tensor") or (flat is not None and flat.numel() != tensor.numel()):
                raise ConfigError(
                    f"{name} is sharded (FSDP, tensor parallel), so that each worker holds another part of it: stores "
                    "carry whole parameters, alike in all workers of a client; use DistributedDataParallel instead"
                )

    def check_as_before(self, indices: Iterable[int], *, orders: bool = True) -> None:
        """Raise if a parameter has been converted, of which a store holds the weights as they were.

        Args:
            orders: so that its dimensions lie in another order in memory, also.
        """
        for i in indices:
            tensor, dtype, order = self.tensors[i], self.dtypes[i], self.orders[i]
            if tensor.dtype != dtype:
                now, then = f"is of {tensor.dtype}", f"of {dtype}"
            elif orders and (found := self.order(i)) != order:
                now, then = f"has its dimensions in the order {found} in memory", f"in the order {order}"
            else:
                continue
            raise ConfigError(
                f"{self.names[i]} {now} now, and the store that updates it holds weights {then}: convert the model "
                "before it is wrapped (DistributedOptimizer, Trainer), or wrap it anew with a store of its own"
            )

    def check_memory(self) -> None:
        """Raise where two parameters are one in memory, if what comes for each is to be all that it holds."""
        self._check_whole()
        first: dict[tuple[torch.device, int], str] = {}
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if tensor.numel() and (other := first.setdefault((tensor.device, tensor.data_ptr()), name)) != name:
                raise ConfigError(
                    f"{name} and {other} are two parameters that share memory: let modules share one parameter instead "
                    "(a.weight = b.weight), which is passed once, as model.parameters() does"
                )

    def create_in(self, kv: KVStore, *, as_they_lie: bool = False) -> None:
        """Make the keys; every worker goes on with the weights of worker 0. Collective over all workers of ``kv``.

        Args:
            as_they_lie: the keys get the shapes of ``as_it_lies``.
        Raises:
            DuplicateKeyError: the store has keys of these numbers.
            DTypeMismatchError: a parameter of a dtype that stores do not carry.
            ConfigError: a parameter of which this worker holds a part.
        """
        self._check_whole()
        if taken := set(self.keys).intersection(kv.keys):
            raise DuplicateKeyError(
                f"the store has {len(taken)} of the keys {self.keys[0]} to {self.keys[-1]}, which these parameters "
                "are to have, already: every Trainer and ElasticAveraging needs a store without keys. Make another "
                "with kvmpi.create, or give the parameters of all models to one"
            )
        for name, dtype in zip(self.names, self.dtypes, strict=True):
            if str(dtype).removeprefix("torch.") not in DTYPES:
                hint = ""
                if dtype.is_complex:
                    hint = (
                        ". Keep torch.view_as_real of it as the parameter, and take torch.view_as_complex where it is "
                        "used; or let DistributedDataParallel on kvmpi.torch.c10d sum its gradients"
                    )
                raise DTypeMismatchError(f"{name} is of {dtype}; stores carry {', '.join(DTYPES)}{hint}")
        values = [self.as_it_lies(i) for i in range(len(self))] if as_they_lie else self.data
        kv.broadcast(self.keys, values, values)


def start_alike(kv: KVStore, tensors: Iterable[torch.Tensor]) -> None:
    """Give all workers worker 0's values of tensors that are not trained: frozen parameters, buffers.

    Collective over all workers. It makes a key for each, or for each part of one that is sparse.

    Raises:
        ShapeMismatchError: one of them has another shape, or a sparse one another number of entries, on other workers.
    """
    found = [_carried(part) for tensor in tensors for part in _parts(tensor.detach())]
    writable = [t for t in found if all(step or n < 2 for n, step in zip(t.shape, t.stride(), strict=True))]
    if writable:
        first = next_key(kv)
        # What NumPy has seen cannot be resized any more, as observers of quantisation do with their buffers.
        apart = [t.clone() if t.nbytes <= _SMALL_BYTES and not t.is_inference() else t for t in writable]
        try:
            kv.broadcast(list(range(first, first + len(apart))), apart, apart)
        except ShapeMismatchError as error:
            raise ShapeMismatchError(
                f"buffers and frozen parameters of the model begin alike on all workers, so they have the same shapes, "
                f"and sparse ones as many entries: {error}"
            ) from error
        for tensor, value in zip(writable, apart, strict=True):
            if value is not tensor:
                tensor.copy_(value)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that one is made of, in its memory."""
    if is_traceable_wrapper_subclass(tensor):
        # Of one that is distributed (DTensor) each worker holds another part.
        names = [] if hasattr(tensor, "full_tensor") else tensor.__tensor_flatten__()[0]
        return [part for name in names for part in _parts(getattr(tensor, name).detach())]
    if tensor.is_meta:
        return []
    if tensor.layout is torch.sparse_coo:
        found = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        found = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        found = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        return [tensor]
    return [part for part in found if part.numel()]


def _carried(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that stores carry; it is only copied."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    known = str(tensor.dtype).removeprefix("torch.") in DTYPES
    return tensor if known else tensor[..., None].view(torch.uint8)


def summing(kv: KVStore) -> Callable[..., Work | None]:
    """The call that sums gradients: ``kv.allreduce``, which keeps no copy of them, where the store has it."""
    return kv.allreduce if kv.is_capable("allreduce") else kv.pushpull


def check_sums(kv: KVStore, who: str) -> None:
    """Raise if the store does something else with gradients than to sum them: its user has set an optimizer since."""
    if kv.optimizer is not None and not kv.is_capable("allreduce"):
        raise ConfigError(
            f"{who}: the store applies {kv.optimizer!r} to what is pushed, and gives no gradients back; set it before, "
            "and the store updates weights, or create another store for it"
        )


def start_sum(kv: KVStore, key: Any, value: Any, scale: float, priority: int = 0) -> tuple[Work, float]:
    """Start to sum gradients over workers, in place; and what the sum is still to be multiplied by then."""
    if kv.is_capable("allreduce"):
        work, scale = kv.allreduce(key, value, None, priority, async_op=True, scale=scale), 1.0
    else:
        work = kv.pushpull(key, value, None, priority, async_op=True)
    assert work is not None
    return work, scale


def not_compressed(kv: KVStore, dtype: torch.dtype) -> torch.dtype:
    """In which dtype numbers of ``dtype`` travel that are no gradients: a store rounds what it is pushed of float32, if
    it is told to by ``set_gradient_compression`` or a setting; and half types may not hold what theirs add up to."""
    may_round = kv.is_capable("compression") or kv.ring_compression != "none"
    dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    return torch.float64 if dtype == torch.float32 and may_round else dtype


def next_key(kv: KVStore) -> int:
    """The first int that is no key yet, and nor is any above it."""
    return 1 + max((key for key in kv.keys if isinstance(key, int)), default=-1)


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dimensions from the slowest to the fastest: ``tensor.permute(...)`` is contiguous where there is such an order.

    So a tensor in channels-last format can be sent, and filled, where it lies. Of a tensor with gaps: as they are.
    """
    dimensions = tuple(range(tensor.dim()))
    if tensor.is_contiguous():
        return dimensions
    found = tuple(sorted(dimensions, key=lambda d: (-tensor.stride()[d], d)))
    return found if tensor.permute(found).is_contiguous() else dimensions
