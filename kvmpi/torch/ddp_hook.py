"""A communication hook of DistributedDataParallel that sums gradients through a store."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from kvmpi.compiling import not_compiled
from kvmpi.errors import ConfigError
from kvmpi.store import KVStore
from kvmpi.torch.futures import future_of
from kvmpi.torch.leftovers import Leftovers
from kvmpi.torch.parameters import start_sum

Hook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]

#: The prefixes of the hooks of each store.
_prefixes: weakref.WeakKeyDictionary[KVStore, list[str]] = weakref.WeakKeyDictionary()


def ddp_comm_hook(kv: KVStore, prefix: str = "ddp") -> Hook:
    """A hook for an unmodified DDP model: gradients become their mean over all workers of ``kv``.

    ::

        kvmpi.torch.c10d.make_client_the_world()          # in a job of several clients
        torch.distributed.init_process_group("kvmpi")
        model = torch.nn.parallel.DistributedDataParallel(model)
        model.register_comm_hook(None, kvmpi.torch.ddp_comm_hook(kvmpi.create("dist_sync_mpi")))

    DDP itself then exchanges no gradients: its process group gives the workers of a client the same first weights and
    buffers. Workers of different clients must begin with the same weights: seed alike, or broadcast through ``kv``.
    Gradients travel in DDP's buckets, each a key of ``kv`` (``prefix``, number, length, dtype) that is made when the
    bucket first comes; DDP forms new buckets after its first step, and the old keys stay. Several hooks of a store, for
    several models, are made in the same order by all workers: the second has keys that begin with ``prefix`` and a 2.

    Under ``2bit`` and ``1bit`` compression, what pushes have left out of a parameter goes with it into other buckets,
    and is kept while no worker has a gradient of it other than zeros.

    When backward returns, gradients are those of all workers: they are clipped and unscaled as in one process. Sparse
    ones, of ``Embedding(sparse=True)``, are an error: DDP's process group exchanges those, without this hook, and so
    does ``kvmpi.torch.Trainer``, without DDP.

    Args:
        kv: a synchronous store without an optimizer: it sums, and DDP's optimizer steps in every worker. A store that
            has other keys has keys that are strs.
    Raises:
        ConfigError: the store is asynchronous, or applies an optimizer.
    """
    if not isinstance(kv, KVStore):
        raise ConfigError(f"ddp_comm_hook of {kv!r}: expected a store, for example kvmpi.create('dist_sync_mpi')")
    if kv.is_capable("async"):
        raise ConfigError(
            f"ddp_comm_hook with store type {kv.type!r}: in an asynchronous store every push is an update, so there is "
            "no sum of gradients to get back; use a synchronous store, or kvmpi.torch.DistributedOptimizer without DDP"
        )
    members = dict[str, tuple[int, ...]]()  # by key: whose gradients its bucket has
    made, unused, leftovers = set[str](), dict[str, _Unused](), Leftovers(kv)
    before = _prefixes.setdefault(kv, [])
    before.append(prefix)
    if (number := before.count(prefix)) > 1:
        prefix = f"{prefix}{number}"

    @not_compiled
    def hook(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if kv.optimizer is not None:
            raise ConfigError(
                f"ddp_comm_hook: the store applies {kv.optimizer!r} to what is pushed, and gives no gradients back; "
                "create another, or take kvmpi.torch.DistributedOptimizer without DDP"
            )
        joined = torch._C._current_graph_task_id() == -1  # there is no pass: DDP's join stands in for one
        if kv.num_clients > 1 and not joined:
            _after_ddp(partial(_fill_unused, bucket.parameters(), bucket.gradients()))
        gradients: torch.Tensor = bucket.buffer()
        key = f"{prefix}.{bucket.index()}.{gradients.numel()}.{str(gradients.dtype).removeprefix('torch.')}"
        names = tuple(map(id, bucket.parameters()))
        while members.setdefault(key, names) != names:  # what of the others is left for the next push is theirs
            key += "'"
        if key not in made:
            kv.init(key, torch.zeros_like(gradients))
            made.add(key)
        if bucket.index() == 0:  # with which every pass begins
            for last in unused.values():
                last.restore(kv)
            unused.clear()
        ends = itertools.accumulate((part.numel() for part in bucket.gradients()), initial=0)
        ranges = zip(names, itertools.pairwise(ends), strict=True)
        leftovers.lay_out({name: (key, *where) for name, where in ranges})
        if not kv.keeps_errors:
            work, left = start_sum(kv, key, gradients, 1.0 / kv.num_workers)
            return future_of(work, lambda: gradients if left == 1.0 else gradients.mul_(left))
        unused[key] = found = _Unused(key, bucket.gradients())
        if found.key not in made:
            kv.init(found.key, found.users)
            made.add(found.key)
        work, left = start_sum(kv, [key, found.key], [gradients, found.users], 1.0 / kv.num_workers)
        return future_of(work, lambda: found.clear(gradients).mul_(left))

    hook.__annotations__.clear()  # DDP compares them with its own, which are no strings
    return hook


class _Unused:
    """Parameters of a bucket of which no worker has a gradient, where pushes leave something out for the next.

    What was left of them travels with their zeros: they stay zeros, and it is kept for a pass in which they are used.
    """

    def __init__(self, key: str, parts: Sequence[torch.Tensor]) -> None:
        self.key, self._of = f"{key}.users", key
        ends = list(itertools.accumulate((part.numel() for part in parts), initial=0))
        self._ranges = list(itertools.pairwise(ends))
        #: How many workers have a gradient of each, when it is summed; in a dtype that travels as it is.
        self.users = torch.tensor([float(part.any()) for part in parts], dtype=torch.float64, device="cpu")

    def clear(self, gradients: torch.Tensor) -> torch.Tensor:
        """The sums, without what has come of what was left."""
        for start, stop in self._found:
            gradients[start:stop].zero_()
        return gradients

    def restore(self, kv: KVStore) -> None:
        """What has come of it is still to be said. Alike on all workers of a client, before the next pass."""
        if found := self._found:
            kv.restore_errors({self._of: found})

    @property
    def _found(self) -> list[tuple[int, int]]:
        return [where for where, count in zip(self._ranges, self.users.tolist(), strict=True) if not count]


def _after_ddp(call: Callable[[], None]) -> None:
    """Call it at the end of the backward pass, after DDP, in such a callback, has put gradients where they belong."""
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(call))


def _fill_unused(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Gradients of what no worker of this client has used and those of others have: DDP, which knows of the ranks of
    its process group only, leaves them as they were."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if (parameter.grad is None or not parameter.grad.any()) and gradient.any():
            parameter.grad = gradient.to(parameter.dtype, copy=True)
