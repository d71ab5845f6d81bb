"""Which buckets there are for the parameters that are trained just now; those that were laid out before come again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvmpi.store import KVStore
from kvmpi.torch import buckets, gradients
from kvmpi.torch.gradients import Bucket
from kvmpi.torch.parameters import KeyedParameters, next_key
from kvmpi.torch.weights import Weights

#: So many sets of parameters have buckets of their own: keys are for ever, and memory lasts while it may come again.
_MOST_PLANS = 4


class Plans:
    """Buckets by what they are made of: parameters, their dtypes and devices.

    Where layers are frozen and unfrozen in turn, the same sets of trained parameters come again and again. If there are
    ever new ones, gradients that come back travel with all that were ever trained, some as zeros. Where weights come
    back, which zeros would move, earlier buckets are forgotten.

    Args:
        weights: those that come back; without, gradients do, for which each block has a key.
        direct: whether gradients may stay where autograd has made them.
    """

    def __init__(
        self, kv: KVStore, params: KeyedParameters, weights: Weights | None, bucket_bytes: int, *, direct: bool
    ) -> None:
        self._kv, self._params, self._weights, self._bucket_bytes = kv, params, weights, bucket_bytes
        self._with_keys, self._direct = weights is None, direct and kv.is_capable("allreduce")
        self._made: dict[tuple[Any, ...], Bucket] = {}
        self._sets: set[tuple[Any, ...]] = set()
        self._ever = [False] * len(params)
        self._order: list[int] = []

    def look(self) -> list[tuple[bool, torch.dtype, torch.device]]:
        """What a plan depends on, to see whether it has changed."""
        return [(p.requires_grad, p.dtype, p.device) for p in self._params.tensors]

    def find(self, order: list[int]) -> list[Bucket]:
        """Buckets for what requires a gradient now; collective over all workers where there are keys.

        Args:
            order: of all parameters: that in which their gradients are expected.
        Raises:
            ConfigError: the store holds weights of another dtype or layout.
        """
        trained, kinds = [p.requires_grad for p in self._params.tensors], self.look()
        if self._weights is not None:
            self._params.check_as_before(i for i, now in enumerate(trained) if now)
        self._ever = [before or now for before, now in zip(self._ever, trained, strict=True)]
        wanted = tuple(kinds)
        if wanted not in self._sets:
            if len(self._sets) < _MOST_PLANS:
                self._sets.add(wanted)
            elif self._with_keys:
                trained = self._ever
            else:
                self._made, self._sets = {}, {wanted}
        tensors = self._params.tensors
        nbytes = [p.numel() * p.element_size() for p in tensors]
        plan = buckets.plan([i for i in order if trained[i]], nbytes, self._bucket_bytes)
        found, new = list[Bucket](), list[Bucket]()
        for indices in plan:
            parts = tuple((i, tensors[i].dtype, tensors[i].device) for i in sorted(indices))
            if parts not in self._made:
                self._made[parts] = Bucket(indices, tensors, self._kv.empty, filter(self._is_direct, indices))
                new.append(self._made[parts])
            found.append(self._made[parts])
        if order != self._order:  # what was cut from another order will not come again
            self._order, self._sets = list(order), {wanted}
            self._made = {parts: bucket for parts, bucket in self._made.items() if bucket in found}
        if self._with_keys:
            self._make_keys(new)
        return found

    def _is_direct(self, index: int) -> bool:
        tensor = self._params.tensors[index]
        if not self._direct or tensor.dtype != self._params.dtypes[index]:
            return False
        return gradients.may_be_direct(tensor, between_hosts=self._kv.num_hosts > 1)

    def _make_keys(self, new: Sequence[Bucket]) -> None:
        """A key for each block of gradients that come back: one array costs less than its many parts."""
        blocks, key = [block for bucket in new for block in bucket.blocks], next_key(self._kv)
        if blocks:
            self._kv.init(list(range(key, key + len(blocks))), blocks)
        for bucket in new:
            bucket.keys = list(range(key, key + len(bucket.blocks)))
            key += len(bucket.blocks)
