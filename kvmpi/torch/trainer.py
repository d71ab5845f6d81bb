"""``Trainer``: sums gradients over workers, and lets either the store or a local torch optimizer apply them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

import kvmpi
from kvmpi import optim
from kvmpi.compiling import methods_not_compiled
from kvmpi.errors import ConfigError, KVError, UnsupportedError
from kvmpi.files import replacing
from kvmpi.store import KVStore
from kvmpi.torch.forks import warn_of_forks
from kvmpi.torch.gradients import keep_apart
from kvmpi.torch.kinds import GradientKinds, no_rows
from kvmpi.torch.parameters import KeyedParameters, Parameters, check_sums, next_key
from kvmpi.torch.rules import has_stepped, keys_of_groups, move_in
from kvmpi.warning import warn

#: A ``local`` store that updates keeps a second copy of the weights: not by default for parameters larger than this.
BIG_PARAMETER = 16 * 1024 * 1024

_LOCAL = ("local", "device")


@methods_not_compiled
class Trainer:
    """Data-parallel training with one line of the loop changed: ``trainer.step(batch_size)`` for ``optimizer.step()``.

    ::

        trainer = kvmpi.torch.Trainer(model.parameters(), torch.optim.SGD(model.parameters(), lr=0.1), "dist_sync_mpi")
        for x, y in batches:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
            trainer.step(global_batch_size)

    Key i is parameter i. Construction is collective over all workers, and gives all of them worker 0's weights; so load
    a checkpoint of the model before. With ``update_on_kvstore=True`` the store holds the weights and applies the
    optimizer: gradients go there, weights come back, and what else changes the weights of a worker is overwritten. With
    ``False`` gradients come back summed, and the torch optimizer steps in every worker.

    Sparse gradients (``torch.nn.Embedding(..., sparse=True)``) travel as rows, there and back: those that any worker
    has. Where the store updates, it changes these rows only, and an optimizer's momentum, weight decay or averages of a
    row only with the row, as ``torch.optim.SparseAdam`` does. An asynchronous store answers with the rows that the
    client itself has pushed; what others change, ``pull_rows`` brings.

    A parameter with ``requires_grad=False`` stays as it is. One whose ``grad`` is None contributes zeros, or no rows if
    any worker has had sparse gradients of it, since other workers may have a gradient for it. Where the store updates
    and there are several clients, one of which no worker of a client has had a gradient yet contributes no rows from
    there: what nobody ever uses does not move. A client of one worker in ``dist_async`` skips it. Which parameters are
    frozen must be the same in all workers. Learning rates (and other options) that a ``torch.optim.lr_scheduler``, or
    anybody else, writes into the torch optimizer reach the store at the next step.
    """

    def __init__(
        self, params: Parameters, optimizer: Any, kvstore: KVStore | str | None, update_on_kvstore: bool | None = None
    ) -> None:
        """Create the keys and broadcast the weights.

        Args:
            params: ``model.parameters()`` or ``model.named_parameters()``.
            optimizer: a ``torch.optim`` instance over the same parameters, or a rule of ``kvmpi.optim``.
            kvstore: a store, or the name of a type; a store that is made here is closed by ``close``. With ``None``, or
                a local type and a torch optimizer, there is nothing to exchange: no store is made unless
                ``update_on_kvstore=True`` asks for it.
            update_on_kvstore: by default True where the store can apply the optimizer; always True with asynchronous
                stores, always False with ``kv.client``.
        Raises:
            ConfigError: (a ``ValueError``) the arguments do not go together.
        """
        self._params = KeyedParameters(params)
        self._torch: torch.optim.Optimizer | None = None
        self._rule: optim.Rule | None = None
        if isinstance(optimizer, torch.optim.Optimizer):
            self._torch = optimizer
            self._check_covers(optimizer)
            self._check_steps_alone(optimizer)
            self._covered = _sizes(optimizer)
        else:
            self._rule = optim.from_any(optimizer)
            if self._rule.averages:
                raise ConfigError(
                    f"{self._rule!r} works on weights, not on gradients; use kvmpi.torch.ElasticAveraging or DiLoCo"
                )
        if kvstore in _LOCAL and self._torch is not None and update_on_kvstore is not True:
            kvstore = None
        self._owned = isinstance(kvstore, str)
        self._kv: KVStore | None = kvmpi.create(kvstore) if isinstance(kvstore, str) else kvstore
        try:
            self._update_on_kvstore = self._decide(update_on_kvstore)
            self._kinds = GradientKinds(self._params.tensors, self._kv, in_store=self._update_on_kvstore)
            self._warned = self._is_summed = False
            # Whether there was a step, which says what a batch is, since this was made or has loaded states.
            self._is_scaled = False
            # Under which gradients are summed, by parameter and dtype: to convert the model makes others.
            self._sum_keys: dict[tuple[int, torch.dtype], int] = {}
            self._sent: Any = None
            if self._kv is not None:
                warn_of_forks(self._kv)
                if self._update_on_kvstore:
                    self._params.check_memory()
                    if self._torch is not None:
                        self._torch.register_state_dict_pre_hook(_warning_once())
                self._params.create_in(self._kv)
                if self._update_on_kvstore:
                    move_in(self._kv, object())  # for good: the rule that stays is divided by this one's batch size
                else:
                    self._sum_keys = dict(zip(enumerate(self._params.dtypes), self._params.keys, strict=True))
        except BaseException:
            self.close()
            raise

    # ---- which way

    def _check_covers(self, optimizer: torch.optim.Optimizer) -> None:
        mine = {id(tensor) for tensor in self._params.tensors}
        theirs = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        if theirs - mine:
            raise ConfigError(
                f"the optimizer has {len(theirs - mine)} parameters that the trainer was not given: they would differ "
                "from worker to worker; make both from the same model.parameters()"
            )
        for name, tensor in zip(self._params.names, self._params.tensors, strict=True):
            if tensor.requires_grad and id(tensor) not in theirs:
                raise ConfigError(f"{name} is not in the optimizer: freeze it with requires_grad_(False), or add it")

    @staticmethod
    def _check_steps_alone(optimizer: torch.optim.Optimizer) -> None:
        """Raise if the optimizer computes gradients itself, by a closure, which ``step`` has none of."""
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigError(
                f"{type(optimizer).__name__} steps with a closure, which it calls for gradients as often as it likes: "
                "use kvmpi.torch.DistributedOptimizer, whose step(closure) exchanges those of each call"
            )

    def _decide(self, wanted: bool | None) -> bool:
        """Whether the store updates the weights.

        Raises:
            ConfigError: it must and cannot, or may not and should.
        """
        kv = self._kv
        if kv is None:
            if wanted or self._torch is None:
                raise ConfigError(
                    "without a store there is nothing that could update the weights but a torch optimizer; "
                    "name a store type, or pass update_on_kvstore=False and a torch.optim instance"
                )
            return False
        why_not = self._why_not(kv)
        asynchronous = kv.is_capable("async")
        if wanted is None:
            wanted = why_not is None and (asynchronous or not self._too_big(kv))
            wanted = wanted or asynchronous or self._torch is None
        if asynchronous and not wanted:
            raise ConfigError(
                f"update_on_kvstore=False with store type {kv.type!r}: in an asynchronous store every push is an "
                "update, so there is no sum of gradients to get back; use update_on_kvstore=True or a synchronous store"
            )
        if wanted and why_not is not None:
            raise ConfigError(f"update_on_kvstore=True with store type {kv.type!r}: {why_not}")
        if not wanted and self._torch is None:
            raise ConfigError(
                f"update_on_kvstore=False with {self._rule!r}: rules of kvmpi.optim run in the store; "
                "pass a torch.optim instance to step in the worker"
            )
        if not wanted and kv.optimizer is not None:
            raise ConfigError(
                f"update_on_kvstore=False, but the store applies {kv.optimizer!r} to what is pushed; create another"
            )
        return wanted

    def _why_not(self, kv: KVStore) -> str | None:
        """Why this store cannot apply this optimizer; None if it can."""
        if not kv.is_capable("optimizer"):
            return "it takes no optimizer (kv.is_capable('optimizer') is False)"
        if self._torch is None:
            return None
        if has_stepped(self._torch.state.values()):
            return "the torch optimizer has stepped already, and its state would be lost; pass a new one"
        try:
            self._own_rule()
        except UnsupportedError as error:
            return str(error)
        return None

    def _too_big(self, kv: KVStore) -> bool:
        return kv.type in _LOCAL and max(tensor.numel() for tensor in self._params.tensors) > BIG_PARAMETER

    @property
    def kvstore(self) -> KVStore | None:
        """The store, if there is one."""
        return self._kv

    @property
    def update_on_kvstore(self) -> bool:
        """Whether the store holds the weights and applies the optimizer."""
        return self._update_on_kvstore

    # ---- the learning rate

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step (of the first parameter group, where a torch optimizer has several)."""
        if self._torch is not None:
            return float(self._torch.param_groups[0]["lr"])
        return float(getattr(self._rule, "lr"))  # noqa: B009 - a custom rule may have none

    def set_learning_rate(self, lr: float) -> None:
        """Use ``lr`` from the next step on, in all parameter groups. To be called alike in all workers."""
        if self._torch is not None:
            for group in self._torch.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr
        else:
            assert self._rule is not None
            self._rule = self._rule.with_hyperparams(lr=lr)

    # ---- the step

    def step(self, batch_size: float) -> None:
        """Sum gradients over workers, divide by ``batch_size``, update all weights. Collective over all workers.

        Stores sum, they never average. So ``batch_size`` is the GLOBAL batch: the samples of all workers together,
        where each worker's loss is a sum over its samples. Where it is a mean, as torch's losses are by default, pass
        ``kv.num_workers`` instead, for a mean over workers. An asynchronous store applies the gradients of each client
        by themselves: there it is the batch of one client (or ``kv.mpi_size``); in ``dist_softsync`` that of the
        clients whose pushes are one update (``kv.pushes_per_update * kv.mpi_size``).

        Where the store updates, and ``batch_size`` is not that of the first step, multiples of the gradients are
        pushed, and every ``p.grad`` stays as it is; the first time a ``UserWarning`` says so, since it is often a short
        last batch that nobody wanted.

        Raises:
            ConfigError: ``allreduce_grads`` has summed gradients already, for ``update``.
        """
        self._check(batch_size)
        if self._is_summed:
            raise ConfigError(
                "step() after allreduce_grads() would sum gradients a second time: call update(), which is the other "
                "half of a step. A loop that left update() out calls both halves again, with its next gradients"
            )
        if self._update_on_kvstore:
            self._remote_step(batch_size)
        else:
            self._sum_gradients(self._kv, 1.0 / batch_size)
            self._local_step()

    def skip(self, batch_size: float) -> None:
        """In place of a ``step`` that was done before the job was resumed, or before this client was started again.

        Weights stay as they are. The store is told of the optimizer and of learning rates that have changed, as
        ``step`` would tell it: clients make the same calls in the same order, also one that repeats its own.
        """
        self._check(batch_size)
        if self._update_on_kvstore:
            assert self._kv is not None
            self._rule_in_force(self._kv, batch_size)
        self._note_step()

    def allreduce_grads(self) -> None:
        """Replace every ``p.grad`` by its sum over workers: the first half of ``step``, for clipping in between.

        Where the store updates, over the workers of this client: with one client, or where gradients come back, these
        are all. A sum over ``batch_size`` samples has that many times the norm of their mean. Where the store updates
        and the client has several workers, ``kv.client`` gets keys, with memory for the weights once more.
        """
        self._check()
        if not self._update_on_kvstore:
            self._sum_gradients(self._kv)
        else:
            assert self._kv is not None
            if self._kv.mpi_size > 1:
                self._sum_gradients(self._kv.client)
        self._is_summed = True

    def update(self, batch_size: float) -> None:
        """The second half of ``step``: divide gradients by ``batch_size`` and update all weights.

        Where the store updates, each client's master pushes what became of the client's sum. A client that leaves this
        out, as after an overflow, has not stepped: in ``dist_async`` nobody minds, in a synchronous store of several
        clients, and in ``dist_ssp``, all must do so together (``kv.any``).
        """
        self._check(batch_size)
        if not self._is_summed:
            raise ConfigError(
                "update() without allreduce_grads() before it: call that first, or step() in place of both"
            )
        if self._update_on_kvstore:
            self._remote_step(batch_size, reduced=True)
        else:
            self._scale([p.grad for p in self._params.tensors if p.grad is not None], 1.0 / batch_size)
            self._local_step()
        self._is_summed = False

    def _keys_in(self, kv: KVStore) -> list[int]:
        """Keys for gradients of the dtypes that parameters have now; collective where there are new ones."""
        wanted = [(i, tensor.dtype) for i, tensor in enumerate(self._params.tensors)]
        if new := [each for each in wanted if each not in self._sum_keys]:
            keys = range(first := next_key(kv), first + len(new))
            kv.init(list(keys), [self._params.tensors[i].detach() for i, _ in new])
            self._sum_keys.update(zip(new, keys, strict=True))
        return [self._sum_keys[each] for each in wanted]

    def _check(self, batch_size: float = 1.0) -> None:
        """Raise if this call, or what has become of the optimizer since the last one, makes no sense."""
        if not batch_size > 0:
            raise ConfigError(f"batch_size={batch_size}: expected the number of samples of all workers, above 0")
        if self._update_on_kvstore:
            self._params.check_as_before(range(len(self._params)), orders=False)
        if self._torch is None:
            return
        if (sizes := _sizes(self._torch)) != self._covered:
            self._check_covers(self._torch)
            self._covered = sizes
        if self._update_on_kvstore and has_stepped(self._torch.state.values()):
            raise ConfigError(
                "the torch optimizer has got a state (load_state_dict), but the store updates weights, and keeps its "
                "own: read a file of trainer.save_states with trainer.load_states. Or load it before Trainer(...), and "
                "let the torch optimizer step, with update_on_kvstore=False"
            )

    def _local_step(self) -> None:
        assert self._torch is not None
        self._torch.step()

    def _sum_gradients(self, kv: KVStore | None, scale: float = 1.0) -> None:
        """Gradients become their sum over the workers of ``kv``, times ``scale``."""
        keep_apart(self._params.tensors)
        if kv is None:
            self._scale([p.grad for p in self._params.tensors if p.grad is not None], scale)
            return
        check_sums(kv, "Trainer, which was made for a store without an optimizer")
        keys = self._keys_in(kv)
        active = self._active()
        self._kinds.learn(active)
        active = [i for i in active if not self._kinds.is_left_to_others(i)]
        for i in active:
            self._kinds.fill_in(i)
        for is_sparse in (False, True):
            if found := [i for i in active if self._kinds.is_sparse(i) == is_sparse]:
                gradients = [grad for i in found if (grad := self._params.tensors[i].grad) is not None]
                if kv.is_capable("allreduce") and not is_sparse:
                    kv.allreduce([keys[i] for i in found], gradients, scale=scale)
                else:
                    kv.pushpull([keys[i] for i in found], gradients)
                    self._scale(gradients, scale)

    def _remote_step(self, batch_size: float, *, reduced: bool = False) -> None:
        kv = self._kv
        assert kv is not None
        rule = self._rule_in_force(kv, batch_size)
        active, weights = self._active(), self._params.data
        self._kinds.learn(active)
        absent = [i for i in active if self._params.tensors[i].grad is None]
        # Others may wait for this worker's part: in a round, to read where staleness is bounded, or in a client's sum.
        alone = kv.is_capable("skip") and kv.mpi_size == 1
        pushed = [i for i in active if not (alone and i in absent)]
        gradients = [self._kinds.gradient(i) for i in pushed]
        factor = self._wanted_scale(batch_size) / float(getattr(rule, "rescale_grad", 1.0))
        if factor != 1.0:
            if not self._warned and hasattr(rule, "rescale_grad"):
                self._warned = True
                warn(
                    f"step({batch_size}): the store's optimizer was set up for another batch size; gradients of such "
                    f"steps are multiplied by {factor:.4g} before they are pushed (drop the short last batch of an "
                    "epoch to avoid this)",
                )
            # Not in place: a step that fails is made again with the gradients as they were.
            gradients = [gradient * factor for gradient in gradients]
        skipped = kv.pull(absent, [weights[i] for i in absent], async_op=True) if alone and absent else None
        if pushed:
            outs = [no_rows(weights[i]) if self._kinds.is_sparse(i) else weights[i] for i in pushed]
            kv.pushpull(pushed, gradients, outs, reduced=reduced)
            for i, out in zip(pushed, outs, strict=True):
                if self._kinds.is_sparse(i):
                    weights[i][out._indices()[0]] = out._values()
        if skipped is not None:
            skipped.wait()
        self._note_step()

    def _note_step(self) -> None:
        if self._torch is not None:
            # Where lr_scheduler looks whether the optimizer has stepped, before it warns that it should have.
            self._torch._opt_called = True  # type: ignore[attr-defined]
            self._torch._step_count = getattr(self._torch, "_step_count", 0) + 1  # type: ignore[attr-defined]

    def _rule_in_force(self, kv: KVStore, batch_size: float | None) -> optim.Rule:
        """Bring the store's rule up to date with the optimizer that the user holds; collective when they differ.

        Args:
            batch_size: of a step; None: there is none, and the rule is to be that of a first one to come.
        """
        options = self._options()
        if kv.optimizer is None:
            rule = self._own_rule()
            if hasattr(rule, "rescale_grad") and batch_size is not None:
                rule = rule.with_hyperparams(rescale_grad=self._wanted_scale(batch_size))
            kv.set_optimizer(rule)
        elif (options, kv.num_optimizers) != self._sent:  # if a file was loaded meanwhile, this has the last word
            mine = self._own_rule()
            if type(kv.optimizer) is not type(mine):
                raise ConfigError(f"the store applies {kv.optimizer!r}, this trainer {mine!r}; use a store for each")
            changed = mine.changes_from(kv.optimizer)
            undivided = changed.pop("rescale_grad", None) is None and hasattr(mine, "rescale_grad")
            if undivided and batch_size is not None and not self._is_scaled:  # saved before there was a step
                changed["rescale_grad"] = self._wanted_scale(batch_size)
            if changed:
                kv.set_hyperparams(**changed)
        self._is_scaled |= batch_size is not None
        # A rule without a batch is to be looked at once more.
        self._sent = (options, kv.num_optimizers) if self._is_scaled else None
        assert kv.optimizer is not None
        return kv.optimizer

    def _options(self) -> Any:
        """What the user's optimizer says at the moment, to see whether it has changed."""
        return [self._rule] if self._torch is None else options_of(self._torch)

    def _own_rule(self) -> optim.Rule:
        if self._torch is None:
            assert self._rule is not None
            return self._rule
        return optim.from_any(self._torch, keys_of_groups(self._torch, self._params))

    def _wanted_scale(self, batch_size: float) -> float:
        return float(getattr(self._rule, "rescale_grad", 1.0)) / batch_size

    def _active(self) -> list[int]:
        """Keys whose gradients are exchanged, first layers first."""
        found = [i for i, tensor in enumerate(self._params.tensors) if tensor.requires_grad]
        self._kinds.look_at(found)
        return found

    @staticmethod
    def _scale(gradients: list[torch.Tensor], factor: float) -> None:
        if factor != 1.0:
            for gradient in gradients:
                gradient.mul_(factor)

    def pull_rows(self, parameter: torch.Tensor, row_ids: torch.Tensor) -> None:
        """Bring rows ``row_ids`` (integers of any shape) of a parameter up to date: those that a batch is about to use.

        To be called before the forward pass where an asynchronous store updates, alike in all workers of a client:
        ``step`` brings the rows that this client has pushed, and rows that only others push would stay as they were.
        Without a store, or where the worker updates, it does nothing.

        Raises:
            ConfigError: the trainer was not given this parameter.
            RowIndexError: the parameter has no such row.
        """
        index = next((i for i, tensor in enumerate(self._params.tensors) if tensor is parameter), None)
        if index is None:
            raise ConfigError("pull_rows: the trainer was not given this parameter")
        if self._update_on_kvstore:
            assert self._kv is not None
            ids = row_ids.unique()
            rows = parameter.detach()[ids]
            self._kv.row_sparse_pull(index, rows, ids)
            parameter.detach()[ids] = rows

    def join(self) -> None:
        """This worker has no more batches: the others go on without it, and ``step`` is no more. See ``KVStore.join``.

        To be called once by every worker, after its last ``step``. Returns when all workers of the client have joined.
        Where the store updates, the weights are then those that it holds. Where the torch optimizer steps in the
        worker, they stay what they are: take those of a worker with the most batches.
        """
        if self._kv is None:
            return
        self._kv.join()
        active = self._active()
        if self._update_on_kvstore and active:
            self._kv.pull(active, [self._params.data[i] for i in active])

    # ---- states

    def save_states(self, path: Any) -> None:
        """Write the optimizer's state (not the weights) to one file, with the learning rate of the next step.

        Before the first step there is no state; a trainer that reads such a file goes on as this one begins.

        Collective; worker 0 writes. Where the store updates, ``state_dict`` of the torch optimizer has no state, and a
        ``UserWarning`` says so; to load a state there (``load_state_dict``) is an error in the next step.

        Raises:
            KVError: worker 0 could not write it; on all workers. What was there before is unchanged.
        """
        kv = self._kv
        if self._update_on_kvstore:
            assert kv is not None
            self._rule_in_force(kv, None)  # what a scheduler has said since the last step
            kv.save_optimizer_states(path)
            return
        self._together(f"save_states to {path}", lambda: self._write(path) if kv is None or kv.rank == 0 else None)

    def _write(self, path: Any) -> None:
        assert self._torch is not None
        with replacing(os.fspath(path)) as temporary, open(temporary, "wb") as file:
            torch.save(self._torch.state_dict(), file)

    def _together(self, what: str, call: Callable[[], None]) -> None:
        """Where it fails on one worker, it is an error on all."""
        failure: Exception | None = None
        try:
            call()
        except Exception as error:  # of the system, of torch, or of pickle
            failure = error
        failed = failure is not None if self._kv is None else self._kv.any(failure is not None)
        if failure is not None:
            raise KVError(f"{what}: {type(failure).__name__}: {failure}") from failure
        if failed:
            raise KVError(f"{what}: another worker has failed, and says why")

    def load_states(self, path: Any) -> None:
        """Restore what ``save_states`` wrote, learning rate included. Collective; every worker reads ``path``.

        Raises:
            KVError: a worker could not read it; on all workers, and nothing is changed.
        """
        if self._update_on_kvstore:
            assert self._kv is not None
            self._kv.load_optimizer_states(path)
            if self._kv.optimizer is not None:
                self._adopt(self._kv.optimizer)
            self._sent, self._is_scaled = None, False
            return
        found: list[dict[str, Any]] = []
        self._together(
            f"load_states of {path}", lambda: found.append(torch.load(path, map_location="cpu", weights_only=True))
        )
        self._together(f"load_states of {path}", lambda: self._restore(found[0]))

    def _restore(self, state: dict[str, Any]) -> None:
        assert self._torch is not None
        self._torch.load_state_dict(state)

    def _adopt(self, rule: optim.Rule) -> None:
        """Let the user's optimizer say what the store's, just loaded, says."""
        if self._torch is None:
            found = {name: value for name, value in rule.hyperparams().items() if name != "rescale_grad"}
            self._rule = self._own_rule().with_hyperparams(**found)
            return
        for group, keys in zip(self._torch.param_groups, keys_of_groups(self._torch, self._params), strict=True):
            found = (rule.of_key(keys[0]) if keys else rule).hyperparams()
            group.update({n: tuple(v) if isinstance(v, list) else v for n, v in found.items() if n in group})

    # ---- the end

    def close(self) -> None:
        """Close the store if it was made here. Collective; idempotent."""
        if self._owned and self._kv is not None:
            self._kv.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._owned and self._kv is not None:
            self._kv.__exit__(kind, error, trace)


def _warning_once() -> Callable[[torch.optim.Optimizer], None]:
    """What an optimizer calls before it makes a ``state_dict`` in which there is no state."""
    warned = list[bool]()

    def hook(_: torch.optim.Optimizer) -> None:
        if not warned:
            warned.append(True)
            warn(
                "state_dict: the store updates weights, and has the state of the optimizer; write that with "
                "trainer.save_states(path), on all workers",
            )

    return hook


def _sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    """Of parameter groups, to see later whether there are new parameters."""
    return [len(group["params"]) for group in optimizer.param_groups]


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each parameter group as they are now, to see later whether they have changed."""
    return [
        {n: v.item() if isinstance(v, torch.Tensor) else v for n, v in group.items() if n != "params"}
        for group in optimizer.param_groups
    ]
