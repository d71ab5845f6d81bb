"""``ElasticAveraging`` and ``DiLoCo``: clients train on their own, and exchange weights every ``interval`` steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch

from kvmpi import optim
from kvmpi.errors import ConfigError
from kvmpi.store import KVStore
from kvmpi.torch.parameters import KeyedParameters, Parameters


class _Averaging(ABC):
    """What both have in common: the store holds a center, and every ``interval``-th ``step`` meets it."""

    def __init__(self, params: Parameters, kvstore: KVStore, rule: optim.Rule, interval: int) -> None:
        if not isinstance(kvstore, KVStore):
            raise ConfigError(f"kvstore is {kvstore!r}: expected a store, for example kvmpi.create('dist_async_mpi')")
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ConfigError(f"interval={interval!r}: expected the number of steps between exchanges, at least 1")
        if kvstore.optimizer is not None:
            raise ConfigError(f"the store applies {kvstore.optimizer!r} already; create one for {type(self).__name__}")
        self._params, self._kv, self._interval = KeyedParameters(params), kvstore, interval
        self._steps = 0
        self._params.create_in(kvstore)
        kvstore.set_optimizer(rule)

    @property
    def kvstore(self) -> KVStore:
        """The store that holds the center."""
        return self._kv

    def step(self) -> bool:
        """To be called after every step of the local optimizer; whether this was the ``interval``-th, with an exchange.

        All workers of a client call it equally often.
        """
        self._steps += 1
        if self._steps % self._interval:
            return False
        self.exchange()
        return True

    @abstractmethod
    def exchange(self) -> None:
        """Exchange with the center now. Collective over a client's workers; in a synchronous store over all workers."""

    def pull_center(self, out: Iterable[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """The center as it is now, in tensors of its own or in ``out`` (for example ``other_model.parameters()``).

        Collective over the workers of a client. The center is what one deploys.
        """
        found = [torch.empty_like(p) for p in self._params.data] if out is None else [p.detach() for p in out]
        if len(found) != len(self._params):
            raise ConfigError(f"pull_center: out has {len(found)} tensors, the model {len(self._params)} parameters")
        self._kv.pull(self._params.keys, found)
        return found

    def reset(self) -> None:
        """Go on from the center: for after ``kv.load``. Collective over the workers of a client."""
        self._kv.pull(self._params.keys, self._params.data)
        self._steps = 0


class ElasticAveraging(_Averaging):
    """Elastic averaging SGD: weights and a center on the servers pull at each other (Zhang, Choromanska, LeCun 2015).

    ::

        kv = kvmpi.create("dist_async_mpi")
        trainer = kvmpi.torch.Trainer(model.parameters(), optimizer, kv.client)    # SGD inside the client
        elastic = kvmpi.torch.ElasticAveraging(model.parameters(), kv, alpha=0.9 / kv.num_clients, interval=64)
        for x, y in batches:
            ...
            trainer.step(kv.mpi_size)
            elastic.step()

    Every ``interval``-th ``step`` does, with one and the same center on both sides, so that w + center is conserved:
    center += alpha * (w - center) on the servers, w -= alpha * (w - center) in every worker of the client. The workers
    of a client must hold the same weights (synchronous SGD inside it). A client of one worker needs no trainer.
    """

    def __init__(self, params: Parameters, kvstore: KVStore, alpha: float, interval: int = 64) -> None:
        """Create the keys, all workers with worker 0's weights, and set the rule. Collective over all workers.

        Args:
            alpha: from 0 to 1; the authors take 0.9 / (number of clients).
            interval: local steps between two exchanges.
        """
        super().__init__(params, kvstore, optim.Elastic(alpha), interval)
        self._alpha = float(alpha)
        self._met = [torch.empty_like(p) for p in self._params.data]

    def exchange(self) -> None:
        weights = self._params.data
        self._kv.pushpull(self._params.keys, weights, self._met)
        for weight, center in zip(weights, self._met, strict=True):
            difference = torch.sub(weight, center, out=center)
            weight.sub_(difference, alpha=self._alpha)


class DiLoCo(_Averaging):
    """DiLoCo: H local steps, then one outer step with Nesterov momentum on what they changed (Douillard et al. 2023).

    ::

        kv = kvmpi.create("dist_sync_mpi")
        diloco = kvmpi.torch.DiLoCo(model.parameters(), kv, interval=500)
        for x, y in batches:
            ...
            optimizer.step()                  # AdamW, usually; or a Trainer on kv.client for a synchronous island
            diloco.step()

    Every ``interval``-th ``step`` pushes center - w, the mean over the client's workers, pulls the new center, and all
    workers go on from there. Inside a client workers may step together (``Trainer`` on ``kv.client``) or each alone.
    With an asynchronous store the outer step takes each client's difference as it comes.
    """

    def __init__(
        self, params: Parameters, kvstore: KVStore, interval: int = 500, lr: float = 0.7, momentum: float = 0.9,
        nesterov: bool = True,
    ) -> None:  # fmt: skip
        """Create the keys, all workers with worker 0's weights, and set the rule. Collective over all workers.

        Args:
            interval: H, the local steps between two exchanges.
            lr, momentum, nesterov: of the outer step. ``lr=1, momentum=0, nesterov=False`` averages weights.
        """
        super().__init__(params, kvstore, optim.Outer(lr, momentum, nesterov), interval)
        self._center = [p.clone() for p in self._params.data]
        self._difference = [torch.empty_like(p) for p in self._params.data]

    def exchange(self) -> None:
        weights = self._params.data
        for center, weight, difference in zip(self._center, weights, self._difference, strict=True):
            torch.sub(center, weight, out=difference)
        self._kv.pushpull(self._params.keys, self._difference, self._center)
        for center, weight in zip(self._center, weights, strict=True):
            weight.copy_(center)

    def reset(self) -> None:
        super().reset()
        for center, weight in zip(self._center, self._params.data, strict=True):
            center.copy_(weight)
