"""Clients train on their own, and every ``interval`` steps they exchange weights with a center that the store holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvmpi import optim
from kvmpi.compiling import methods_not_compiled
from kvmpi.engine import Work
from kvmpi.errors import ConfigError, KVError
from kvmpi.store import KVStore
from kvmpi.torch.forks import warn_of_forks
from kvmpi.torch.fragments import Fragments, Timetable, groups
from kvmpi.torch.parameters import KeyedParameters, Parameters


@dataclass
class _Exchange:
    """An exchange of ``keys``, ascending, under way, to be merged after step ``due``; ``work`` until it has arrived."""

    keys: list[int]
    due: int
    work: Work | None = None

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None

    def wait_for_each(self) -> list[bool]:
        """Which keys have come, where the call as a whole has failed; all are at their end then, and have said so."""
        if self.work is None:  # it was never begun
            return [False] * len(self.keys)
        # One a key, in ascending order, where there are servers; where there are none, one failure is that of all.
        works = self.work.operations
        if len(works) != len(self.keys):
            works = [self.work] * len(self.keys)
        return [_has_come(work) for work in works]


class Failed(NamedTuple):
    """A key of an exchange that failed: the weights that were to be merged, and whether there were no steps since.

    ``came``: others have failed, and this one has its answer, which is not merged yet.
    """

    weights: torch.Tensor
    whole: bool
    came: bool = False


@methods_not_compiled
class Averaging(ABC):
    """What ``ElasticAveraging`` and ``DiLoCo`` have in common: every ``interval``-th ``step`` meets the center."""

    def __init__(
        self,
        params: Parameters,
        kvstore: KVStore,
        rule: optim.Rule,
        interval: int,
        overlap: int,
        fragments: Fragments = 1,
    ) -> None:
        if not isinstance(kvstore, KVStore):
            raise ConfigError(f"kvstore is {kvstore!r}: expected a store, for example kvmpi.create('dist_async_mpi')")
        if kvstore.optimizer is not None:
            raise ConfigError(f"the store applies {kvstore.optimizer!r} already; create one for {type(self).__name__}")
        self._params, self._kv = KeyedParameters(params), kvstore
        for name, tensor in zip(self._params.names, self._params.tensors, strict=True):
            if not tensor.is_floating_point():
                raise ConfigError(f"{name} is of {tensor.dtype}: only floating-point tensors are averaged")
        self._params.check_memory()
        self._fragments = groups(fragments, self._params)
        self._timetable = Timetable(interval, len(self._fragments), overlap)
        self._steps = 0
        self._under_way: list[_Exchange] = []
        self._failed: dict[int, Failed] = {}  # by key, what is to be made again
        self._owed = Counter[int]()  # by key, how many more were due meanwhile, which others make in their turn
        self._unknown: set[int] = set()  # keys of exchanges that were broken off: the servers know what came of them
        warn_of_forks(kvstore)
        self._params.create_in(kvstore)
        kvstore.set_optimizer(rule)
        self._kind = type(rule)

    @property
    def kvstore(self) -> KVStore:
        """The store that holds the center."""
        return self._kv

    # ---- the timetable

    def step(self) -> bool:
        """To be called after every step of the local optimizer; whether an exchange ended here, and changed weights.

        All workers of a client call it equally often, up to ``join``; in a synchronous store all workers do.

        Raises:
            KVError: an exchange failed, which may have begun ``overlap`` steps ago; the weights are as they were. The
                next one first sends again what was sent then, which counts once, whether it had come or not.
        """
        self._steps += 1
        try:
            ended = self._merge(lambda exchange: exchange.due <= self._steps)
        except KVError:
            self._begin_due()  # whatever becomes of another fragment: other clients begin this one now
            raise
        if self._begin_due() and self._timetable.overlap == 0:
            ended = self._merge(lambda _: True) or ended
        return ended

    def _begin_due(self) -> bool:
        """Begin the exchange that the timetable has after this step, if there is one."""
        fragment = self._timetable.beginning(self._steps)
        if fragment is not None:
            self._begin(self._active(self._fragments[fragment]), self._timetable.overlap)
        return fragment is not None

    def exchange(self) -> None:
        """Exchange all parameters with the center now, and wait for it; what is under way is merged before.

        All workers go on from what comes of it. In DiLoCo every exchange is an outer step, and its momentum moves the
        center also when there was nothing to learn. Collective over a client's workers; in a synchronous store over
        all workers.
        """
        self.finish()
        keys = self._active(self._params.keys)
        self._begin(keys, 0, whole=True)
        self._merge(lambda _: True, whole=True)

    def finish(self) -> None:
        """Wait for the exchanges under way and merge them now, before their time: for the end of training.

        With ``overlap=0`` there are none. What has failed before is sent again. Collective over a client's workers.
        """
        self._merge(lambda _: True)
        self._make_up(self._failed.keys() | +self._owed)

    def join(self) -> None:
        """This worker has no more batches: ``finish``, then ``KVStore.join``, so that the others go on without it.

        To be called once by every worker, after its last ``step``. The weights stay as they are; ``pull_center`` says
        what the others have made of the center since.
        """
        self.finish()
        self._kv.join()

    def _active(self, keys: Iterable[int]) -> list[int]:
        """Without what is frozen: it is the same everywhere. A plain tensor, which has no gradient either, is not."""
        tensors = self._params.tensors
        return [k for k in keys if tensors[k].requires_grad or not isinstance(tensors[k], torch.nn.Parameter)]

    def _rule(self) -> Any:
        """The rule of the store, whose hyperparameters may have changed.

        Raises:
            ConfigError: it has become another one, which would take what is sent for something else.
        """
        rule = self._kv.optimizer
        if type(rule) is not self._kind:
            raise ConfigError(
                f"the store applies {rule!r} now, by kv.set_optimizer or a file that kv.load has read, and "
                f"{type(self).__name__} needs {self._kind.__name__}: load what was saved with it, and give another "
                "rule a store of its own"
            )
        return rule

    def _begin(self, keys: list[int], overlap: int, *, whole: bool = False) -> None:
        if not keys:
            return
        self._rule()
        try:
            self._make_up([k for k in keys if k in self._failed or self._owed[k]])
            self._prepare(keys)
        except KVError:
            self._owed.update(keys)
            raise
        exchange = _Exchange(sorted(keys), self._steps + overlap)
        self._send(exchange, wait=overlap == 0, whole=whole)
        self._under_way.append(exchange)

    def _send(self, exchange: _Exchange, *, wait: bool, whole: bool = False) -> None:
        sent, answers = zip(*(self._arrays(k) for k in exchange.keys), strict=True)
        try:
            exchange.work = self._kv.pushpull(exchange.keys, list(sent), list(answers), async_op=True)
            if wait:
                exchange.wait()
        except BaseException as error:
            self._note_failure(exchange, error, whole=whole)
            raise

    def _merge(self, due: Callable[[_Exchange], bool], *, whole: bool = False) -> bool:
        """Merge what is due, in the order in which it began; whether there was something."""
        ended = False
        for exchange in [e for e in self._under_way if due(e)]:
            self._receive(exchange)
            self._under_way.remove(exchange)
            self._take(exchange.keys, whole=whole)
            ended = True
        return ended

    def _receive(self, exchange: _Exchange) -> None:
        try:
            exchange.wait()
        except BaseException as error:
            self._under_way.remove(exchange)
            self._note_failure(exchange, error)
            raise

    # ---- failures

    def _note_failure(self, exchange: _Exchange, error: BaseException, *, whole: bool = False) -> None:
        """An exchange has failed, for the first time or when it was made again, or was broken off."""
        # As by Ctrl-C: what is not waited for goes on, and only the servers know what comes of it.
        known = {k: self._failed.pop(k) for k in exchange.keys if k in self._failed}
        self._unknown.update(exchange.keys)
        if not isinstance(error, KVError):
            return
        for k, came in zip(exchange.keys, exchange.wait_for_each(), strict=True):
            failed = known.get(k) or Failed(self._params.tensors[k].detach().clone(), whole)
            self._failed[k] = failed._replace(came=came)
            self._unknown.discard(k)

    def _make_up(self, keys: Iterable[int]) -> None:
        """Make exchanges that have failed again, and change the weights by what they would have been changed by.

        Servers count a push once that is made again. Another one in its place, with what was learned since, they would
        pass over if they had the first. One that has come through is not made again: it would count twice. Those that
        were due while it could not be made follow, so that there are as many of this client's as of others.
        """
        keys = sorted(keys)
        failed = [k for k in keys if k in self._failed]
        if again := [k for k in failed if not self._failed[k].came]:
            self._send(_Exchange(again, self._steps), wait=True)
        for k in failed:
            self._take_late(k, self._failed.pop(k))
        while owed := [k for k in keys if self._owed[k]]:
            self._prepare(owed)
            self._owed.subtract(owed)
            self._send(_Exchange(owed, self._steps), wait=True)
            self._take(owed, whole=False)

    # ---- what the two differ in

    @abstractmethod
    def _prepare(self, keys: list[int]) -> None:
        """Find out what is to be sent of ``keys``; it stays that until the exchange is made."""

    @abstractmethod
    def _arrays(self, key: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What is sent of ``key``, the same again if that has failed, and where the answer goes."""

    @abstractmethod
    def _take(self, keys: list[int], *, whole: bool) -> None:
        """Change the weights by what has arrived; ``whole``: there were no steps since, go on from the center."""

    @abstractmethod
    def _take_late(self, key: int, failed: Failed) -> None:
        """``_take`` of an exchange that was made again; steps since it failed stay done."""

    @property
    @abstractmethod
    def _memory(self) -> list[torch.Tensor]:
        """What this worker remembers from one step to another, besides its weights."""

    # ---- the center

    def pull_center(self, out: Iterable[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """The center as it is now, in tensors of its own or in ``out`` (for example ``other_model.parameters()``).

        Collective over the workers of a client; waits for exchanges under way. The center is what one deploys.
        """
        if isinstance(out, torch.nn.Module):
            raise ConfigError(f"pull_center: out is of {type(out).__name__}: pass other_model.parameters()")
        found = self._arrays_of_keys() if out is None else [p.detach() for p in out]
        if len(found) != len(self._params):
            raise ConfigError(f"pull_center: out has {len(found)} tensors, the model {len(self._params)} parameters")
        self._kv.pull(self._params.keys, found)
        return found

    def _arrays_of_keys(self) -> list[torch.Tensor]:
        """New ones, of the dtypes that the keys have; the model may have been converted since."""
        return [torch.empty_like(p, dtype=d) for p, d in zip(self._params.data, self._params.dtypes, strict=True)]

    def reset(self) -> None:
        """Go on from the center: for after ``kv.load``. Collective over the workers of a client.

        The next interval begins; exchanges under way are waited for and forgotten.
        """
        forgotten, self._under_way = self._under_way, []
        for exchange in forgotten:
            exchange.wait_for_each()  # where a failure matters, the pull says so too
        for weight, center in zip(self._params.data, self.pull_center(), strict=True):
            weight.copy_(center)
        self._unknown.clear()
        self._failed.clear()
        self._owed.clear()
        self._steps = 0

    # ---- to go on in the middle of an interval

    def state_dict(self) -> dict[str, Any]:
        """Where this worker is in its interval, for ``torch.save``, with what has arrived and is not merged yet.

        Weights, the local optimizer, and what ``kv.save`` writes (the center and the momentum of the outer step) belong
        to the same checkpoint. Weights differ from client to client, and so does this: every worker saves its own, or
        one of each client where they step together. Waits for exchanges under way; the tensors are copies.
        """
        for exchange in list(self._under_way):
            self._receive(exchange)
        return {
            "algorithm": type(self).__name__,
            "timetable": self._settings(),
            "steps": self._steps,
            "under_way": [[exchange.due, list(exchange.keys)] for exchange in self._under_way],
            "unknown": sorted(self._unknown.union(self._failed)),
            "memory": [tensor.clone() for tensor in self._memory],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was called; for after ``kv.load`` and the loading of the model. Not collective.

        Raises:
            ConfigError: the state is of another algorithm, timetable or model; nothing has changed.
        """
        mine = {"algorithm": type(self).__name__, "timetable": self._settings()}
        for name, value in mine.items():
            if state.get(name) != value:
                raise ConfigError(
                    f"load_state_dict: the state has {name} {state.get(name)!r}, this one {value!r}; create it with "
                    "the same arguments and model, or go on from the center: reset()"
                )
        shapes = [tuple(tensor.shape) for tensor in state["memory"]]
        expected = [tuple(tensor.shape) for tensor in self._memory]
        if shapes != expected:
            raise ConfigError(f"load_state_dict: the state has parameters of shapes {shapes}, this model {expected}")
        if self._under_way:
            raise ConfigError("load_state_dict: exchanges are under way; call finish() or reset() first")
        self._steps = state["steps"]
        self._under_way = [_Exchange(list(keys), due) for due, keys in state["under_way"]]
        self._unknown, self._failed, self._owed = set(state["unknown"]), {}, Counter()
        for mine_, saved in zip(self._memory, state["memory"], strict=True):
            mine_.copy_(saved)

    def _settings(self) -> list[Any]:
        return [self._timetable.interval, self._timetable.overlap, self._fragments]


def _has_come(work: Work) -> bool:
    try:
        work.wait()
    except KVError:
        return False
    return True
