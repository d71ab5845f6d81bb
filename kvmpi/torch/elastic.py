"""``ElasticAveraging``: weights and a center pull at each other."""

from __future__ import annotations

from typing import Any

import torch

from kvmpi import optim
from kvmpi.store import KVStore
from kvmpi.torch.averaging import Averaging, Failed
from kvmpi.torch.parameters import Parameters


class ElasticAveraging(Averaging):
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

    With ``overlap=1`` the difference is subtracted after the next local step, which is computed while it is on its way:
    the order of the authors' own program. Still both sides move by the same difference.

    ``kv.set_hyperparams(alpha=...)``, called like ``step``, changes both sides, and so does a file with another alpha
    that ``kv.load`` reads. In an asynchronous store with several clients put a ``kv.barrier()`` before and behind it:
    servers take the first client's alpha at once, for all.

    Momentum is the business of the local optimizer, and the exchange leaves it as it is: with
    ``torch.optim.SGD(momentum=..., nesterov=True)`` this is the authors' EAMSGD. Parameters with
    ``requires_grad=False`` begin with worker 0's values and are not exchanged; buffers, such as the statistics of batch
    norm, are each worker's own, unless ``params`` lists them.

    It takes memory for the weights once more, twice with ``overlap`` or where a client of one worker has them in host
    memory. Under ``fp16`` or ``bf16`` compression, which rounds what is pushed, both sides move by what was rounded.
    """

    def __init__(
        self, params: Parameters, kvstore: KVStore, alpha: float, interval: int = 64, overlap: int = 0
    ) -> None:
        """Create the keys, all workers with worker 0's weights, and set the rule. Collective over all workers.

        Args:
            alpha: from 0 to 1; the authors take 0.9 / (number of clients).
            interval: local steps between two exchanges.
            overlap: local steps that are done while an exchange is under way, less than ``interval``.
        """
        super().__init__(params, kvstore, optim.Elastic(alpha), interval, overlap)
        self._overlap = overlap
        self._alphas: dict[int, float] = {}  # by key, that of the servers when it was sent
        self._met = [torch.empty_like(p) for p in self._params.data]
        # By key, what the servers are sent, where that is not the weights themselves. With ``overlap`` these change
        # before the answer is there. And what a client of one worker has in host memory the store lends to the wire:
        # servers may read it after an exchange has failed, and would get what later steps have made of it.
        lends = kvstore.mpi_size == 1
        self._sent = {
            k: kvstore.empty(p.shape, p.dtype) if lends and p.device.type == "cpu" else torch.empty_like(p)
            for k, p in enumerate(self._params.data)
            if overlap or (lends and p.device.type == "cpu")
        }

    def _prepare(self, keys: list[int]) -> None:
        rule = self._rule()
        for k in keys:
            self._alphas[k] = rule.of_key(k).alpha
            weights = self._params.tensors[k].detach()
            narrow = getattr(torch, self._kv.pushed_dtype(str(weights.dtype).removeprefix("torch.")))
            if narrow != weights.dtype and k not in self._sent:
                self._sent[k] = torch.empty_like(weights)
            if k in self._sent:
                # The servers move by what they get, so that is what the weights move by.
                self._sent[k].copy_(weights.to(narrow))

    def _arrays(self, key: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._sent_of(key), self._met[key]

    def _take(self, keys: list[int], *, whole: bool) -> None:
        for k in keys:
            self._move(k, self._sent_of(k))

    def _take_late(self, key: int, failed: Failed) -> None:
        self._move(key, self._sent.get(key, failed.weights))

    def _move(self, key: int, sent: torch.Tensor) -> None:
        difference = torch.sub(sent, self._met[key], out=self._met[key])
        self._params.tensors[key].detach().sub_(difference, alpha=self._alphas[key])

    def _sent_of(self, key: int) -> torch.Tensor:
        if (copy := self._sent.get(key)) is not None:
            return copy
        failed = self._failed.get(key)
        return self._params.tensors[key].detach() if failed is None else failed.weights

    @property
    def _memory(self) -> list[torch.Tensor]:
        return [*self._sent.values(), *self._met] if self._overlap else []

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"alphas": dict(self._alphas)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        rule = self._rule()
        self._alphas = {k: rule.of_key(k).alpha for k in self._params.keys} | state.get("alphas", {})
