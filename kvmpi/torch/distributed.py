"""``DistributedOptimizer``: an existing PyTorch loop goes on as it is, and exchanges gradients during its backward."""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

from kvmpi import optim
from kvmpi.compiling import not_compiled
from kvmpi.errors import ConfigError, UnsupportedError
from kvmpi.machine import num_cores
from kvmpi.store import KVStore
from kvmpi.torch import buckets, gradients, rules
from kvmpi.torch.exchange import Exchange
from kvmpi.torch.forks import warn_of_forks
from kvmpi.torch.layers import Layers
from kvmpi.torch.leftovers import Leftovers
from kvmpi.torch.norms import NormBuffers
from kvmpi.torch.other_buffers import OtherBuffers
from kvmpi.torch.parameters import KeyedParameters, Parameters, check_sums, next_key, start_alike
from kvmpi.torch.same_gradients import SameGradients
from kvmpi.torch.trainer import options_of
from kvmpi.torch.weights import Weights
from kvmpi.warning import warn


class _StateInStore(defaultdict[torch.Tensor, Any]):
    """The state of an optimizer that is where the store is: there is one, though it cannot be looked at here.

    Of an optimizer whose state is false ``torch.distributed.checkpoint`` makes a step, with gradients of zero, to have
    one: the store would count it, and move its momentum.
    """

    def __bool__(self) -> bool:
        return True


class DistributedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose gradients are exchanged while the backward pass goes on. Two lines of a loop change.

    ::

        kv = kvmpi.create("mpi")
        optimizer = kvmpi.torch.DistributedOptimizer(torch.optim.AdamW(model.parameters()), kv, model)
        for x, y in batches:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()      # gradients leave, bucket by bucket, last layers first
            optimizer.step()

    It is an optimizer like the one that it was given, with its parameter groups, state and ``state_dict``, for
    schedulers, ``GradScaler`` and checkpoints. Construction is collective over all workers, and gives all of them
    worker 0's weights and buffers; so load a checkpoint of the model before, and one of the optimizer on every worker.

    **Gradients come back** where the store is synchronous and has no optimizer. When ``backward`` returns, every
    ``p.grad`` is the mean over all workers: clip, unscale, look at them as in a loop of one process. A parameter that
    no worker has used has no gradient. A worker without a backward steps with what others have made of theirs. Several
    backward passes before a step add up; inside ``no_sync`` they exchange nothing, which is what accumulation wants for
    all but the last.

    **Weights come back** with ``update_on_kvstore=True``, a store with an optimizer (``kv.set_optimizer``), and
    asynchronous stores. The store updates with the optimizer's rule and options, for this optimizer alone; it is an
    error if its user has given it others. Schedulers reach it before the next gradients do. Given the model, ``step``
    does not wait for the weights: each layer's next forward waits for its own, and so does whatever else reads a
    parameter. Call ``synchronize`` before its memory is read by another way (``p.data`` of before). Given parameters
    only, ``step`` waits.

    What leaves in ``backward`` cannot be changed any more: clipping and ``GradScaler`` are errors then. With
    ``push="step"`` gradients are summed over the workers of the client in ``backward``, and the master pushes them in
    ``step``. In between every ``p.grad`` is the mean over the workers of this client, on all of them: clip, unscale,
    add to it. A parameter that no worker of the client has used has no gradient. It costs that the way to the servers
    is not hidden behind the backward pass, a copy of the gradients in the master, and where a client has several
    workers memory for another copy of the large weights. An overflow that ``GradScaler`` finds leaves the step out: in
    ``dist_async`` stores for this client, in others for all clients, which ask each other in every ``step``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kvstore: KVStore,
        named_parameters: torch.nn.Module | Parameters | None = None,
        *,
        average: bool | None = None,
        update_on_kvstore: bool | None = None,
        push: str = "backward",
        norm_buffers: str = "first",
        bucket_bytes: int = buckets.BUCKET_BYTES,
        overlap: bool | None = None,
    ) -> None:
        """Create the keys, broadcast weights and buffers, put hooks on parameters.

        Args:
            named_parameters: the model, ``model.named_parameters()``, or by default what the optimizer has.
            average: divide by the number of workers (of an asynchronous client: by its own). By default, unless
                somebody else has set the store's optimizer, whose ``rescale_grad`` it is then.
            update_on_kvstore: whether the store updates weights; by default only where it must.
            push: when a store that updates weights gets gradients, "backward" or "step". Where gradients come back it
                makes no difference.
            norm_buffers: running statistics of batch normalisation after each step: "first", those of the first
                worker; "mean" over workers; "own". Where weights come back, the workers are those of the client. Other
                buffers that change follow the first worker, unless it is "own".
            bucket_bytes: gradients leave together up to this size.
            overlap: they leave during the backward pass; else at its end. By default, unless all workers are on one
                host and compute on all of its cores: what is exchanged meanwhile would take them from that. Nor where
                there are no servers and all gradients fit into one bucket, or between hosts into 256 KiB.
        Raises:
            ConfigError: (a ``ValueError``) the arguments do not go together, or with the optimizer that the store has.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"optimizer is {type(optimizer).__name__}: expected an instance of a torch.optim class")
        if isinstance(optimizer, DistributedOptimizer):
            raise ConfigError("optimizer is a DistributedOptimizer already")
        if not isinstance(kvstore, KVStore):
            raise ConfigError(f"kvstore is {kvstore!r}: expected a store, for example kvmpi.create('mpi')")
        if norm_buffers not in ("first", "mean", "own"):
            raise ConfigError(f"norm_buffers={norm_buffers!r}: expected 'first', 'mean' or 'own'")
        if push not in ("backward", "step"):
            raise ConfigError(f"push={push!r}: expected 'backward' or 'step'")
        if bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes={bucket_bytes}: expected at least 1")
        self._inner, self._kv, self._bucket_bytes = optimizer, kvstore, bucket_bytes
        given = rules.given_rule(kvstore)
        self._model = named_parameters if isinstance(named_parameters, torch.nn.Module) else None
        self._names = self._names_of(named_parameters)
        # In the order of the model, where it is known: the reverse of it is the first guess at what comes when.
        place = {identity: number for number, identity in enumerate(self._names)}
        tensors = sorted(self._own_tensors(), key=lambda tensor: place.get(id(tensor), 0))
        self._params = KeyedParameters(self._named(tensors, 0), next_key(kvstore))
        self._update_on_kvstore, self._overlap = self._decide(update_on_kvstore), overlap
        if self._update_on_kvstore:
            self._params.check_memory()
        self._in_step = self._update_on_kvstore and push == "step"
        self._average = given is None if average is None else average
        divisor = 1
        if self._average:
            of_update = kvstore.mpi_size * kvstore.pushes_per_update
            divisor = of_update if kvstore.is_capable("async") else kvstore.num_workers
        own_rule = self._update_on_kvstore and given is None
        scale = rescale = 1.0 / divisor  # gradients are multiplied by one of them, here or by the rule
        even = kvstore.num_workers % kvstore.num_clients == 0
        if own_rule and (even or not kvstore.is_capable("async")):
            scale = 1.0
        else:
            rescale = 1.0  # there is one rule for all clients
        self._scale, self._factor, self._warned = scale, 1.0, False
        if self._in_step and average is not False:
            # What is shown, and clipped, is the mean over the client's workers; what the rule expects is their sum.
            self._average, self._factor, self._scale = True, scale * kvstore.mpi_size, 1.0 / kvstore.mpi_size
            if own_rule and even:
                self._factor, rescale = 1.0, kvstore.mpi_size / divisor
        self._rescale = rescale if own_rule else None
        warn_of_forks(kvstore)
        self._in_store = _StateInStore(dict)
        self._layers: Layers | None = None
        self._same: SameGradients | None = None
        self._stand_in: torch.Tensor | None = None  # a parameter that shows zeros in place of no gradient
        self._tenant, self._leftovers = object(), Leftovers(kvstore)
        self._params.create_in(kvstore, as_they_lie=True)
        self._known: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # whose rest began alike
        self._start_rest_alike()
        if own_rule:
            rule = optim.from_any(optimizer, self._keys_of_groups())
            rules.make_rule(kvstore, rule.with_hyperparams(rescale_grad=rescale))
        self._weights = Weights(kvstore, self._params) if self._update_on_kvstore else None
        self._exchange = self._new_exchange()
        # What the store knows of; nothing, where it is to hear of what a scheduler has done before.
        follows = self._update_on_kvstore and given is not None
        in_force = not follows or rules.agrees(given, optimizer, self._keys_of_groups())  # type: ignore[arg-type]
        self._in_force = (options_of(optimizer), kvstore.num_optimizers) if in_force else None
        self._norm_buffers = norm_buffers
        self._look_at_layers()
        rules.move_in(kvstore, self._tenant)

    # ---- construction

    def _decide(self, wanted: bool | None) -> bool:
        kv = self._kv
        must = kv.is_capable("async") or kv.optimizer is not None
        if wanted is False and must:
            why = "it is asynchronous" if kv.optimizer is None else f"it applies {kv.optimizer!r} to what is pushed"
            raise ConfigError(f"update_on_kvstore=False with store type {kv.type!r}: {why}")
        if kv.optimizer is not None and kv.optimizer.averages:
            raise ConfigError(
                f"the store's {kv.optimizer!r} works on weights, not on gradients; use kvmpi.torch.ElasticAveraging or "
                "DiLoCo, and DistributedOptimizer with kv.client inside a client"
            )
        if not (wanted or must):
            return False
        if not kv.is_capable("optimizer"):
            raise ConfigError(f"update_on_kvstore=True with store type {kv.type!r}: it takes no optimizer")
        rules.check_empty(kv)
        given = rules.given_rule(kv)
        if given is None:
            if rules.has_stepped(self._inner.state.values()):
                raise ConfigError(
                    "the optimizer has stepped already, and the store would not get its state: pass a new one"
                )
            try:
                optim.from_any(self._inner, self._keys_of_groups())
            except UnsupportedError as error:
                hint = "" if must else "; or leave update_on_kvstore=False"
                raise ConfigError(f"the store cannot apply this optimizer: {error}{hint}") from None
        else:
            rules.agrees(given, self._inner, self._keys_of_groups())
        return True

    def _keys_of_groups(self) -> list[list[int]]:
        return rules.keys_of_groups(self._inner, self._params)

    def _names_of(self, named: Any) -> dict[int, str]:
        """Names of tensors, by identity."""
        if named is None:
            return {}
        params = KeyedParameters(named.named_parameters() if isinstance(named, torch.nn.Module) else named)
        found = {id(tensor): name for name, tensor in zip(params.names, params.tensors, strict=True)}
        strangers = sum(id(tensor) not in found for tensor in self._own_tensors())
        if strangers:
            raise ConfigError(
                f"the optimizer has {strangers} parameters that named_parameters has not; make both from one model"
            )
        return found

    def _own_tensors(self) -> list[torch.Tensor]:
        return [tensor for group in self._inner.param_groups for tensor in group["params"]]

    def _start_rest_alike(self) -> None:
        """What else there is in modules that are new to the model begins alike everywhere: frozen parameters, buffers.

        Collective over all workers.
        """
        if self._model is None:
            return
        new = [module for module in self._model.modules() if module not in self._known]
        self._known.update(new)
        own = {id(tensor) for tensor in self._own_tensors()}
        found = [
            t for each in (torch.nn.Module.parameters, torch.nn.Module.buffers) for m in new for t in each(m, False)
        ]
        rest = {id(t): t for t in found if id(t) not in own and t.numel()}
        start_alike(self._kv, [tensor.detach() for tensor in rest.values()])

    def _named(self, tensors: list[torch.Tensor], first: int) -> list[tuple[str, torch.Tensor]]:
        return [(self._names.get(id(t), f"parameter {i}"), t) for i, t in enumerate(tensors, first)]

    def _new_exchange(self) -> Exchange:
        self._index = {id(tensor): i for i, tensor in enumerate(self._params.tensors)}
        kv, keys = self._kv if not self._in_step else None, self._params.keys
        if self._in_step and self._kv.mpi_size > 1:
            kv = self._kv.client
            keys = self._keys_in(kv)
        return Exchange(
            kv, self._params, keys, weights=None if self._in_step else self._weights, scale=self._scale,
            average=self._average, bucket_bytes=self._bucket_bytes, overlap=self._overlaps(),
            before_pass=lambda: None if self._in_step else self._bring_up_to_date(), leftovers=self._leftovers,
        )  # fmt: skip

    def _look_at_layers(self) -> None:
        """Of the model as it is now: whose statistics are exchanged, and who waits for weights. Collective."""
        if self._model is None:
            return
        if self._norm_buffers != "own":
            in_client = self._update_on_kvstore
            self._exchange.norms = NormBuffers(self._kv, self._model, self._norm_buffers, in_client=in_client)
            self._exchange.others = OtherBuffers(self._kv, self._model, in_client=in_client)
        if self._layers is not None:
            self._layers.close()
        if self._weights is not None:
            self._layers = Layers(self._model, self._index, self._weights)

    def _keys_in(self, client: KVStore) -> list[int]:
        """Keys of the store inside the client, for what is large enough to be summed by itself."""
        first = next_key(client)
        large = [i for i in range(len(self._params)) if gradients.may_be_direct(self._params.tensors[i])]
        if large:
            client.init([first + i for i in large], [self._params.as_it_lies(i) for i in large])
        return list(range(first, first + len(self._params)))

    def _overlaps(self) -> bool:
        if self._overlap is not None:
            return self._overlap
        servers = self._kv.num_servers and not self._in_step
        if servers or any(t.is_cuda for t in self._params.tensors):
            return True  # what is exchanged is mostly waited for
        hosts = self._kv.num_hosts
        all_bytes = sum(t.numel() * t.element_size() for t in self._params.tensors)
        one_call_bytes = self._bucket_bytes if hosts == 1 else min(self._bucket_bytes, buckets.SMALL_BYTES)
        if all_bytes <= one_call_bytes:
            return False  # one call costs less than two
        if hosts != 1:
            return True
        return self._kv.num_workers * torch.get_num_threads() < num_cores()

    # ---- the rule of the store

    def _bring_up_to_date(self) -> None:
        """Tell the store what was loaded into the model, and what has changed in the optimizer's options."""
        if self._weights is None:
            check_sums(self._kv, "DistributedOptimizer, which was made for a store without an optimizer")
            return
        self._weights.hand_over()
        if self._rescale is not None:
            rules.keep_own(self._kv, self._rescale)
        # Of a file that was loaded meanwhile, what the optimizer says has the last word.
        told = (options_of(self._inner), self._kv.num_optimizers)
        if told != self._in_force:
            rules.follow(self._kv, self._inner, self._keys_of_groups())
            self._in_force = told

    # ---- as an optimizer

    @property
    def kvstore(self) -> KVStore:
        """The store."""
        return self._kv

    @property
    def update_on_kvstore(self) -> bool:
        """Whether the store holds the weights and applies the optimizer."""
        return self._update_on_kvstore

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the optimizer that this one was made from."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._inner.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the optimizer that this one was made from; empty where the store updates."""
        return self._in_store if self._update_on_kvstore and not self._inner.state else self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the optimizer that this one was made from."""
        return self._inner.defaults

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_inner" not in self.__dict__:
            raise AttributeError(name)
        if name == "_step_supports_amp_scaling" and not self._update_on_kvstore:
            self._complete()  # GradScaler looks here before it looks for an overflow, which it does on all workers
        elif name == "_step_supports_amp_scaling":
            if self._in_step:
                self._show_all()
                return True  # so that ``step`` hears of an overflow, and can tell other clients
            raise ConfigError(
                "GradScaler with a store that updates weights: it has got scaled gradients during the backward pass. "
                "Let it take them in step(), with DistributedOptimizer(..., push='step')"
            )
        return getattr(self._inner, name)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a DistributedOptimizer cannot be copied or pickled; save its state_dict()")

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._inner!r}, kvstore={self._kv.type!r})"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the weights. What no backward has exchanged is exchanged now: all workers step equally often.

        In asynchronous stores, the workers of a client.

        Raises:
            KVError: another ``DistributedOptimizer`` was made for one of the parameters since; or the optimizer that
                this one was made from has got others since.
        """
        self._exchange.check_own()
        strangers = sum(len(group["params"]) for group in self._inner.param_groups) - len(self._params)
        if strangers > 0:
            raise ConfigError(
                f"the optimizer has {strangers} parameters that this DistributedOptimizer has not, whose gradients "
                "would differ from worker to worker: call add_param_group of this one, which adds them to both"
            )
        if not self._update_on_kvstore:
            if closure is None:
                self._complete()
                self._share_gradients()
            told = self._told
            vars(self._inner).update(told)
            try:
                result = self._inner.step() if closure is None else self._inner.step(self._exchanging(closure))
            finally:
                for name in told:
                    delattr(self._inner, name)
            self._exchange.stepped()
            return result
        return self._step_with_hooks(*() if closure is None else (closure,))

    @not_compiled  # nothing in it is arithmetic of tensors, and the compiler fails at the hooks
    def _step_with_hooks(self, *closure: Callable[[], Any]) -> Any:
        """``_step_in_store`` with the hooks of the optimizer, and of all optimizers, around it."""
        return torch.optim.Optimizer.profile_hook_step(self._step_in_store)(self._inner, *closure)

    def _exchanging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``closure``, and after it what no backward of it has exchanged.

        Its value becomes what the gradients are, the mean of all workers or their sum: by it a line search goes on or
        ends, which it has to do on all of them alike.
        """

        def evaluate() -> Any:
            self._exchange.called()
            result = closure()
            self._complete()
            self._share_gradients()
            if result is None:
                return None
            value = self._exchange.summed_value(torch.as_tensor(result, dtype=torch.float64, device="cpu").detach())
            return value.to(result) if isinstance(result, torch.Tensor) else float(value)

        return evaluate

    def _step_in_store(self, _: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._hide_stand_in()
        self._complete()
        if self._in_step:
            self._push()
        else:
            self._exchange.check_unchanged()
        self._exchange.stepped()
        assert self._weights is not None
        if self._layers is None or self._inner._optimizer_step_post_hooks or _global_optimizer_post_hooks:
            self._weights.wait()  # a hook may read weights
        else:
            self._layers.after_step()
        # Where lr_scheduler looks whether the optimizer has stepped, before it warns that it should have.
        self._inner._opt_called = True  # type: ignore[attr-defined]
        return result

    def _show_all(self) -> None:
        """``GradScaler.step`` is about to look for an overflow, in the gradients that ``step`` will push.

        Those of a worker that had no backward are there from now on. Where there are none in the client, others may
        have some: then it is shown zeros, since ``GradScaler.update`` fails if there was nothing to look at.
        """
        self._complete()
        tensors = [tensor for tensor in self._own_tensors() if tensor.requires_grad]
        if tensors and all(tensor.grad is None for tensor in tensors):
            self._stand_in = min(tensors, key=torch.Tensor.numel)
            self._stand_in.grad = torch.zeros_like(self._stand_in)

    def _hide_stand_in(self) -> None:
        if self._stand_in is not None:
            self._stand_in.grad = None
        self._stand_in = None

    def _complete(self) -> None:
        """What no backward of this step has exchanged is exchanged."""
        if not self._exchange.complete:
            self._exchange.finish()

    def _share_gradients(self) -> None:
        """What loops do to gradients after a backward, those without one have not done: they get what others have."""
        if self._exchange.some_have_none:
            if self._same is None:
                self._same = SameGradients(self._kv.client if self._in_step else self._kv, self._params)
            self._same.take_over(has_pass=self._exchange.has_pass)

    @property
    def _told(self) -> dict[str, Any]:
        """What GradScaler tells optimizers that unscale by themselves."""
        return {name: vars(self)[name] for name in ("grad_scale", "found_inf") if name in vars(self)}

    def _push(self) -> None:
        """Gradients leave as they are now, unless there is an overflow."""
        assert self._weights is not None
        told = self._told
        if told and not isinstance(told.get("found_inf"), torch.Tensor):
            raise ConfigError(
                f"worker {self._kv.rank} had no gradient for scaler.unscale_(optimizer) to look at, as it had no "
                "backward in this step, and GradScaler.update would fail: leave unscale_ out in such a step"
            )
        if told:
            overflow = bool(told.get("found_inf"))
            if not self._kv.is_capable("skip") and self._kv.num_clients > 1:
                overflow = self._kv.any(overflow)  # or the others would wait for what this client does not push
            if overflow:
                return
            if (scale := told.get("grad_scale")) is not None:
                inverse = scale.double().reciprocal().float()
                for grad in [tensor.grad.detach() for tensor in self._params.tensors if tensor.grad is not None]:
                    grad.mul_(inverse.to(grad.device))
        self._share_gradients()  # the master may have had no backward
        self._bring_up_to_date()
        self._weights.send_all(self._exchange.order[::-1], self._factor, self._bucket_bytes)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of every optimizer; with ``set_to_none=False`` gradients stay where they leave from."""
        if not set_to_none:
            if not self._in_step:
                self._wait()  # what is under way is read where it is
            self._exchange.keep()
        self._exchange.release()
        self._inner.zero_grad(set_to_none)
        if not self._update_on_kvstore or self._in_step:
            self._exchange.zeroed()

    def synchronize(self, broken: bool = False) -> None:
        """Return when nothing is under way: gradients that have come back, or weights, are those of all workers.

        To be called by all workers alike where a backward pass was broken off on any of them, else by whom it pleases:
        it waits, and nothing more.

        Args:
            broken: it was on this one, by an error that the program goes on after, or this one has no batch; not where
                it has gone through. The others' gradients are summed with what there is of this worker's, be it
                nothing, and are there. Then call ``step``, as the others do.
        """
        if self._exchange.is_open or broken:
            self._exchange.finish(broken)
        self._wait()

    def _wait(self) -> None:
        if self._weights is not None:
            self._weights.wait()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add up on this worker; the first one outside exchanges the sum. For all alike."""
        with self._exchange.no_sync():
            yield

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of every optimizer; collective over all workers, since new keys are made.

        What else new layers of the model have, frozen parameters and buffers, begins alike as well.

        Raises:
            ConfigError: gradients have been exchanged, for a step that is still to come, and cannot be a second time.
            KVError: the store cannot take the group; then there is none.
        """
        self.synchronize()
        if self._exchange.fresh and ((self._update_on_kvstore and not self._in_step) or not self._average):
            raise ConfigError("add_param_group between a backward pass and its step: call it after optimizer.step()")
        if self._weights is not None:
            self._weights.hand_over()
        self._inner.add_param_group(param_group)
        try:
            if self._update_on_kvstore:
                assert self._kv.optimizer is not None
                rules.stated(self._kv.optimizer, self._inner, self._keys_of_groups())
            added = [tensor for tensor in self._own_tensors() if id(tensor) not in self._index]
            new = KeyedParameters(self._named(added, len(self._params)), next_key(self._kv))
            new.create_in(self._kv, as_they_lie=True)
        except BaseException:
            self._inner.param_groups.pop()
            raise
        self._params.extend(new)
        self._start_rest_alike()
        self._exchange.close()
        self._exchange = self._new_exchange()
        self._look_at_layers()  # the group may be of new ones

    def state_dict(self) -> dict[str, Any]:
        """As of every optimizer. Where the store updates, it has the state, and a ``UserWarning`` says so."""
        self.synchronize()
        if self._update_on_kvstore and not self._warned:
            self._warned = True
            warn(
                "state_dict: the store updates weights, and has the state of the optimizer; write that with "
                "kv.save_optimizer_states(path), on all workers",
            )
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of every optimizer; on every worker alike.

        Raises:
            ConfigError: there is state in it, and the store updates.
        """
        if self._update_on_kvstore and rules.has_stepped(state_dict.get("state", {}).values()):
            raise ConfigError(
                "load_state_dict: the store updates weights, and keeps its optimizer's state to itself; "
                "save and load that with kv.save_optimizer_states and kv.load_optimizer_states"
            )
        self._inner.load_state_dict(state_dict)

    def join(self) -> None:
        """This worker has no more batches: the others go on without it. See ``KVStore.join`` and ``Trainer.join``.

        To be called once by every worker, after its last ``step``.
        """
        self.synchronize()
        if self._weights is not None:
            self._weights.hand_over()
        self._exchange.leave()
        self._kv.join()
        if self._update_on_kvstore:
            trained = [i for i, tensor in enumerate(self._params.tensors) if tensor.requires_grad]
            self._kv.pull([self._params.keys[i] for i in trained], [self._params.as_it_lies(i) for i in trained])

    def detach(self) -> None:
        """Take the hooks off parameters and model: the optimizer that this one was made from goes on alone."""
        self.synchronize()
        self._exchange.close()
        rules.move_out(self._kv, self._tenant)
        if self._layers is not None:
            self._layers.close()
