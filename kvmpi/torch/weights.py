"""Weights that a store updates: gradients leave for it, weights come back while the loop goes on."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from kvmpi import arrays
from kvmpi.engine import Work
from kvmpi.errors import ConfigError, KVError, rebuild
from kvmpi.store import KVStore
from kvmpi.torch import buckets, pending
from kvmpi.torch.parameters import KeyedParameters
from kvmpi.warning import warn


class _Flight:
    """Weights under way that have left together, until they are there; ``changed`` says if their gradients were."""

    def __init__(
        self, indices: Iterable[int], works: Iterable[Work | None], changed: Callable[[], bool] | None
    ) -> None:
        self.indices, self.works, self.changed = list(indices), list(works), changed

    @classmethod
    def together(cls, flights: Sequence[_Flight]) -> _Flight:
        """Several as one."""
        changed = [flight.changed for flight in flights if flight.changed is not None]
        return cls(
            [i for flight in flights for i in flight.indices], [work for flight in flights for work in flight.works],
            lambda: any(each() for each in changed),
        )  # fmt: skip

    def wait(self) -> None:
        for work in self.works:
            if work is not None:
                work.wait()
        if self.changed is not None and self.changed():
            raise ConfigError(
                "gradients were changed, set to zero for instance, while the store took them: its weights may be wrong "
                "now. Set them to zero by optimizer.zero_grad(), which waits, or let them leave in step(), with "
                "DistributedOptimizer(..., push='step')"
            )


class Weights:
    """The parameters of a model that a store holds and updates, and which of them are on their way back."""

    def __init__(self, kv: KVStore, params: KeyedParameters) -> None:
        self._kv, self._params = kv, params
        self._lock = threading.RLock()  # gradients on several devices arrive in several threads
        self._flights: dict[int, _Flight] = {}
        #: Of which parameters the store is still to take the weights: they were loaded into the model.
        self.loaded: set[int] = set()
        # How often each was written to when the store's weights came, to see what else writes there.
        self._versions: dict[int, int] = {}
        self._note_versions(range(len(params)))
        # Nobody waits for a gradient that no worker of the client has: neither other clients nor a round.
        self._leaves_out = kv.is_capable("skip") or kv.num_clients == 1
        self._left: list[_Flight] = []  # of which no weights have been asked for
        self._planned: tuple[list[int], list[tuple[int, ...]]] = ([], [])
        self._warned = False

    @property
    def splits(self) -> bool:
        """Whether weights come back no sooner than with ``fetch``: where each worker updates its share, that brings
        first those of the first layers, whose gradients come last."""
        return self._kv.sharded_update

    # ---- there

    def send(
        self, indices: Sequence[int], gradients: Sequence[torch.Tensor | None], priority: int, *, reduced: bool,
        changed: Callable[[], bool] | None = None,
    ) -> list[Work | None]:  # fmt: skip
        """Start to push gradients, laid out as the weights, and to bring the weights; of None only the latter. If it
        ``splits``, weights come with ``fetch``.

        ``changed``: whether somebody has changed the gradients since, who should not have before the weights are there.
        """
        kv, keys = self._kv, self._params.keys
        with self._lock:
            self._params.check_as_before(indices)
            self._warn_of_changes(indices)
            some = [(i, gradient) for i, gradient in zip(indices, gradients, strict=True) if gradient is not None]
            left = [i for i, gradient in zip(indices, gradients, strict=True) if gradient is None]
            works: list[Work | None] = []
            pushed, values = [i for i, _ in some], [gradient for _, gradient in some]
            names = [keys[i] for i in pushed]
            if self.splits:
                if some:
                    works.append(kv.push(names, values, priority, async_op=True, reduced=reduced))
                self._left.append(_Flight(indices, works, changed))
                return works
            if some:
                weights = [self._params.as_it_lies(i) for i in pushed]
                works.append(kv.pushpull(names, values, weights, priority, async_op=True, reduced=reduced))
            if left:
                weights = [self._params.as_it_lies(i) for i in left]
                works.append(kv.pull([keys[i] for i in left], weights, priority, async_op=True))
            self._depart(_Flight(indices, works, changed))
            return works

    def fetch(self) -> None:
        """Start to bring the weights of all gradients that have left, the last of them first.

        Ever more of them in a call: the first layers wait for one bucket, and later ones are needed later.
        """
        with self._lock:
            left, self._left, wanted = self._left[::-1], [], 1
            while left:
                some, left = left[:wanted], left[wanted:]
                wanted *= 2
                flight = _Flight.together(some)
                weights = [self._params.as_it_lies(i) for i in flight.indices]
                keys = [self._params.keys[i] for i in flight.indices]
                flight.works.append(self._kv.pull(keys, weights, async_op=True))
                self._depart(flight)

    def _depart(self, flight: _Flight) -> None:
        """Weights are on their way."""
        self._flights.update(dict.fromkeys(flight.indices, flight))
        self._note_change(flight)
        pending.mark(self._tensors_of(flight), partial(_wait, weakref.ref(self), flight.indices))

    def send_all(self, order: Sequence[int], factor: float, bucket_bytes: int) -> None:
        """Push what parameters that are trained have as gradients, sums of the client, times ``factor``.

        Several together, in the order of ``order``: that in which the next forward needs the weights. The gradients may
        be changed when this returns.

        Raises:
            ConfigError: a gradient is sparse, or a weight of another dtype than the store's.
        """
        self.wait()
        tensors = self._params.tensors
        trained = [i for i in order if tensors[i].requires_grad]
        self._params.check_as_before(trained)
        if self._planned[0] != trained:
            nbytes = [p.numel() * p.element_size() for p in tensors]
            self._planned = trained, buckets.plan(trained, nbytes, bucket_bytes)
        gradients = {i: self._gradient(i, factor) for i in trained}
        asks = self._kv.is_capable("async")  # else what is left out is what it was
        plan = self._planned[1]
        for number, bucket in enumerate(plan):
            some = [i for i in bucket if asks or gradients[i] is not None]
            if some:
                self.send(some, [gradients[i] for i in some], len(plan) - number, reduced=True)
        self.fetch()

    def _gradient(self, index: int, factor: float) -> torch.Tensor | None:
        grad = self._params.tensors[index].grad
        if grad is None:
            return None if self._leaves_out else torch.zeros_like(self._params.as_it_lies(index))
        self._params.check_dense(index)
        grad = grad.detach()
        if factor != 1.0:
            grad = grad * factor
        return grad.permute(self._params.order(index))

    def hand_over(self) -> None:
        """Weights that were loaded become the store's, worker 0's for all. Collective over all workers, if there are.

        Raises:
            KVError: other workers have loaded none.
        """
        if not self.loaded:
            return
        found = sorted(self.loaded)
        try:
            self._kv.assign([self._params.keys[i] for i in found], [self._params.as_it_lies(i) for i in found])
        except KVError as error:
            what = (
                "weights were loaded into the model, for the store to go on from, which all workers do before one step"
            )
            raise rebuild(type(error).__name__, f"{what}: {error}") from error
        self._note_versions(found)
        self.loaded.clear()

    # ---- and back

    @property
    def in_flight(self) -> bool:
        """Whether weights are on their way."""
        return bool(self._flights)

    def wait(self, indices: Iterable[int] | None = None) -> None:
        """Return when these weights, or all, are there.

        Raises:
            ConfigError: gradients were changed before the weights were waited for.
        """
        with self._lock:
            for i in list(self._flights) if indices is None else indices:
                flight = self._flights.get(i)
                if flight is None:
                    continue
                for other in flight.indices:
                    self._flights.pop(other, None)
                try:
                    flight.wait()
                finally:
                    pending.settle(self._tensors_of(flight))
                self._note_change(flight)

    def _tensors_of(self, flight: _Flight) -> list[torch.Tensor]:
        return [self._params.tensors[i] for i in flight.indices]

    def _note_change(self, flight: _Flight) -> None:
        """Tell autograd that weights change: what still needs the old ones is an error, not a wrong gradient."""
        arrays.note_writes(self._tensors_of(flight))
        self._note_versions(flight.indices)

    def _note_versions(self, indices: Iterable[int]) -> None:
        self._versions.update((i, self._params.tensors[i]._version) for i in indices)

    def _warn_of_changes(self, indices: Iterable[int]) -> None:
        """Something else than the store has written to weights, which come back as the store has them: say so once."""
        if self._warned:
            return
        tensors = self._params.tensors
        changed = [i for i in indices if self._versions.get(i, tensors[i]._version) != tensors[i]._version]
        if changed:
            self._warned = True
            warn(
                f"{self._params.names[changed[0]]} was written to between two steps (clipped, masked, initialised?), "
                "of which the store that updates it does not know: what it sends back replaces that. If it was to "
                "last, call model.load_state_dict(model.state_dict()) on all workers, which hands weights over, or "
                "step in the workers (update_on_kvstore=False)",
            )


def _wait(weights: weakref.ref[Weights], indices: Sequence[int]) -> None:
    """What a parameter calls that is read; it must not keep a store from going."""
    if (found := weights()) is not None:
        found.wait(indices)
