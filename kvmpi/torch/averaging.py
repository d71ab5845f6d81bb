"""``ElasticAveraging`` and ``DiLoCo``: clients train on their own, and exchange weights every ``interval`` steps."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvmpi import optim
from kvmpi.compiling import methods_not_compiled
from kvmpi.engine import Work
from kvmpi.errors import ConfigError, KVError
from kvmpi.store import KVStore
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


class _Failed(NamedTuple):
    """A key of an exchange that failed: the weights that were to be merged, and whether there were no steps since.

    ``came``: others have failed, and this one has its answer, which is not merged yet.
    """

    weights: torch.Tensor
    whole: bool
    came: bool = False


@methods_not_compiled
class _Averaging(ABC):
    """What both have in common: the store holds a center, and every ``interval``-th ``step`` meets it."""

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
        self._failed: dict[int, _Failed] = {}  # by key, what is to be made again
        self._unknown: set[int] = set()  # keys of exchanges that were broken off: the servers know what came of them
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
        self._make_up(sorted(self._failed))

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
        self._make_up([k for k in keys if k in self._failed])
        self._prepare(keys)
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
            failed = known.get(k) or _Failed(self._params.tensors[k].detach().clone(), whole)
            self._failed[k] = failed._replace(came=came)
            self._unknown.discard(k)

    def _make_up(self, keys: list[int]) -> None:
        """Make exchanges that have failed again, and change the weights by what they would have been changed by.

        Servers count a push once that is made again. Another one in its place, with what was learned since, they would
        pass over if they had the first. One that has come through is not made again: it would count twice.
        """
        if again := [k for k in keys if not self._failed[k].came]:
            self._send(_Exchange(sorted(again), self._steps), wait=True)
        for k in keys:
            self._take_late(k, self._failed.pop(k))

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
    def _take_late(self, key: int, failed: _Failed) -> None:
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
        found = [torch.empty_like(p) for p in self._params.data] if out is None else [p.detach() for p in out]
        if len(found) != len(self._params):
            raise ConfigError(f"pull_center: out has {len(found)} tensors, the model {len(self._params)} parameters")
        self._kv.pull(self._params.keys, found)
        return found

    def reset(self) -> None:
        """Go on from the center: for after ``kv.load``. Collective over the workers of a client.

        The next interval begins; exchanges under way are waited for and forgotten.
        """
        forgotten, self._under_way = self._under_way, []
        for exchange in forgotten:
            exchange.wait_for_each()  # where a failure matters, the pull says so too
        self._kv.pull(self._params.keys, self._params.data)
        self._unknown.clear()
        self._failed.clear()
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
        self._unknown, self._failed = set(state["unknown"]), {}
        for mine_, saved in zip(self._memory, state["memory"], strict=True):
            mine_.copy_(saved)

    def _settings(self) -> list[Any]:
        return [self._timetable.interval, self._timetable.overlap, self._fragments]


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

    With ``overlap=1`` the difference is subtracted after the next local step, which is computed while it is on its way:
    the order of the authors' own program. Still both sides move by the same difference.

    ``kv.set_hyperparams(alpha=...)``, called like ``step``, changes both sides, and so does a file with another alpha
    that ``kv.load`` reads.

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

    def _take_late(self, key: int, failed: _Failed) -> None:
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


@methods_not_compiled
class DiLoCo(_Averaging):
    """DiLoCo: H local steps, then one outer step with Nesterov momentum on what they changed (Douillard et al. 2023).

    ::

        kv = kvmpi.create("dist_sync_mpi")
        diloco = kvmpi.torch.DiLoCo(model.parameters(), kv, interval=500)
        for x, y in batches:
            ...
            optimizer.step()                  # AdamW, usually; or a Trainer on kv.client for a synchronous island
            diloco.step()
        diloco.finish()

    Every ``interval``-th ``step`` pushes center - w, the mean over the client's workers, pulls the new center, and all
    workers go on from there. Inside a client workers may step together (``Trainer`` on ``kv.client``) or each alone.
    With an asynchronous store the outer step takes each client's difference as it comes.

    **Streaming** (Douillard et al. 2025, arXiv:2501.18512) exchanges as many bytes, but not all at once, and does not
    wait for them. With ``fragments=P`` the parameters are exchanged in P parts, each every ``interval`` steps, at steps
    of its own. With ``overlap=T`` the exchange that begins after step t is merged after step t + T, and T local steps
    are done meanwhile: w = mixing * w + (1 - mixing) * center, where ``mixing=0`` drops these steps, and 0.5 is a mean
    of both. ``pseudo_gradient_dtype=torch.bfloat16`` halves what is pushed; the center stays as it is.

    Parameters with ``requires_grad=False`` begin with worker 0's values and are not exchanged; which ones they are is
    the same in all workers. Buffers, such as the statistics of batch norm, are each worker's own; to average them as
    well, add those of floating-point types to ``params``. The local optimizer keeps its state through an exchange.
    """

    def __init__(
        self, params: Parameters, kvstore: KVStore, interval: int = 500, lr: float = 0.7, momentum: float = 0.9,
        nesterov: bool = True, fragments: Fragments = 1, overlap: int = 0, mixing: float | None = None,
        pseudo_gradient_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """Create the keys, all workers with worker 0's weights, and set the rule. Collective over all workers.

        Args:
            interval: H, the local steps between two exchanges of a parameter.
            lr, momentum, nesterov: of the outer step. ``lr=1, momentum=0, nesterov=False`` averages weights.
            fragments: their number, of parameters in order and of about equal bytes; or the parameters of each one, for
                example of every P-th layer: ``[[p for b in blocks[i::P] for p in b.parameters()] for i in range(P)]``.
            overlap: local steps that are done while an exchange is under way, less than ``interval``.
            mixing: the local weights' part in a merge, at least 0 and less than 1; by default 0.5, without overlap 0.
            pseudo_gradient_dtype: torch.bfloat16 or torch.float16, in which masters push differences of float32. Each
                is rounded to nearest, by at most 1 part in 256 (in 2048), and nothing makes up for that later. None:
                what the store is set to, by default no rounding.
        """
        if mixing is None:
            mixing = 0.5 if overlap else 0.0
        if not isinstance(mixing, int | float) or not 0.0 <= mixing < 1.0:
            raise ConfigError(f"mixing={mixing!r}: expected the local weights' part, at least 0 and less than 1")
        compression = _compression(pseudo_gradient_dtype, kvstore)
        super().__init__(params, kvstore, optim.Outer(lr, momentum, nesterov), interval, overlap, fragments)
        if compression:
            kvstore.set_gradient_compression({"type": compression})
        self._mixing = float(mixing)
        self._center = [p.clone() for p in self._params.data]
        self._difference = [torch.empty_like(p) for p in self._params.data]

    def _prepare(self, keys: list[int]) -> None:
        if unknown := sorted(self._unknown.intersection(keys)):
            self._kv.pull(unknown, [self._center[k] for k in unknown])
            self._unknown.difference_update(unknown)
        weights = self._params.data
        for k in keys:
            torch.sub(self._center[k], weights[k], out=self._difference[k])

    def _arrays(self, key: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._difference[key], self._center[key]

    def _take(self, keys: list[int], *, whole: bool) -> None:
        for k in keys:
            self._merge_center(k, self._params.tensors[k].detach(), whole=whole)

    def _merge_center(self, key: int, weights: torch.Tensor, *, whole: bool) -> None:
        if whole or self._mixing == 0.0:
            weights.copy_(self._center[key])
        else:
            torch.lerp(self._center[key], weights, self._mixing, out=weights)

    def _take_late(self, key: int, failed: _Failed) -> None:
        weights = self._params.tensors[key].detach()
        learned = weights - failed.weights
        self._merge_center(key, failed.weights, whole=failed.whole)
        torch.add(failed.weights, learned, out=weights)

    @property
    def _memory(self) -> list[torch.Tensor]:
        return self._center

    def reset(self) -> None:
        super().reset()
        for center, weight in zip(self._center, self._params.data, strict=True):
            center.copy_(weight)


def _has_come(work: Work) -> bool:
    try:
        work.wait()
    except KVError:
        return False
    return True


_CODECS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "none", None: ""}


def _compression(dtype: torch.dtype | None, kv: KVStore) -> str:
    """The type for ``set_gradient_compression``; empty for none.

    Raises:
        ConfigError: no such dtype, or a store whose workers have no servers to push to.
    """
    if dtype not in _CODECS:
        known = ", ".join(map(str, itertools.islice(_CODECS, 3)))
        raise ConfigError(f"pseudo_gradient_dtype={dtype!r}: expected one of {known}, or None")
    if dtype is not None and isinstance(kv, KVStore) and not kv.is_capable("compression"):
        raise ConfigError(
            f"pseudo_gradient_dtype={dtype} with a {kv.type!r} store: it sends nothing to servers, so there is nothing "
            "to compress; use a dist store, with servers (-s), or leave it out"
        )
    return _CODECS[dtype]
