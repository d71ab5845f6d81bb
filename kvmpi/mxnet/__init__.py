"""MXNet 1.9 on a KVStore: ``import kvmpi.mxnet``, then ``gluon.Trainer(..., kvstore="kvmpi_dist_sync_mpi")``.

Every store type is registered with MXNet as ``kvmpi_`` and its name. Calls block: when one returns, its arrays hold
their results. NDArrays in main memory are read and written where they are; others (on a device, or in the layout of
MXNet's oneDNN kernels) are copied. Of NDArrays of storage type row_sparse the rows travel that they have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np

import kvmpi
from kvmpi import optim
from kvmpi.errors import ConfigError, UnsupportedError
from kvmpi.store import KVStore
from kvmpi.warning import warn

try:
    import mxnet as mx
except (ImportError, AttributeError) as error:  # AttributeError: numpy.bool, which MXNet wants and NumPy 1.24 has not
    raise ImportError(
        f"kvmpi.mxnet needs MXNet, and its import fails: {error}; MXNet 1.9.1 works with Python 3.10 and NumPy 1.23: "
        "pip install mxnet==1.9.1 numpy==1.23.5"
    ) from error

from kvmpi.mxnet import ndarrays, rules
from kvmpi.mxnet.rules import rule_of

PREFIX = "kvmpi_"
_TYPES = (
    "local", "mpi", "dist_sync", "dist_async", "dist_ssp", "dist_softsync", "dist_sync_mpi", "dist_async_mpi",
    "dist_ssp_mpi", "dist_softsync_mpi",
)  # fmt: skip


class Store(mx.kvstore.KVStoreBase):
    """A store of kvmpi as MXNet sees one; ``store`` is kvmpi's own, with everything that MXNet has no name for.

    Made by ``mx.kv.create("kvmpi_...")``, collectively over all workers. Keys are ints or strs, one kind in a store.
    Values are NDArrays, or a list of them, one per device, which are summed; keys may be a list, with a list of values.
    Errors are those of kvmpi.
    """

    _name = ""

    def __init__(self) -> None:
        self.store: KVStore = kvmpi.create(self._name)
        self._optimizer: Any = None
        self._sent: tuple[Any, Any] = ((), None)  # what the servers know: the optimizer's options, the rule of them
        self._rates: dict[Any, tuple[float, float]] = {}  # learning rate and weight decay by key, likewise
        self._scale: float | None = 1.0  # rescale_grad of the rule; None: that of the first push
        self._updates, self._warned = 0, False

    # ---- who and where

    @property
    def type(self) -> str:
        """The name that it was created by: "kvmpi_dist_sync_mpi"."""
        return PREFIX + self.store.type

    @property
    def rank(self) -> int:
        """This worker's rank among all workers."""
        return self.store.rank

    @property
    def num_workers(self) -> int:
        return self.store.num_workers

    def is_capable(self, capability: str) -> bool:
        """Whether the store can do something: "optimizer" is what MXNet asks for.

        Raises:
            ConfigError: (a ``ValueError``) unknown capability.
        """
        return self.store.is_capable(capability.lower())

    # ---- keys and values

    def init(self, key: Any, value: Any) -> None:
        """Create keys. Collective over all workers; worker 0's value counts; returns when they can be read."""
        self.store.init(key, ndarrays.map_arrays(value, ndarrays.read))

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """``init``, then ``pull`` into ``out``: worker 0's value everywhere. Collective over all workers."""
        with ndarrays.Writing() as writing:
            self.store.broadcast(
                key, ndarrays.map_arrays(value, ndarrays.read), ndarrays.map_arrays(out, writing.to), priority
            )

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Add ``value``, summed over devices and workers, to the keys; with an optimizer, update them by it.

        Of row_sparse NDArrays the rows travel, where MXNet's optimizer would change no others. A change of the
        optimizer's ``rescale_grad``, as by another batch size, is this worker's own: it multiplies what is pushed.

        Raises:
            UnsupportedError: the optimizer has changed to something that has no equivalent; nothing was pushed.
        """
        pushed = self._pushed(value)
        self._follow(key)
        self.store.push(key, pushed, priority)

    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy the stored values into ``out``. As MXNet's, it leaves sparse arrays in there alone, by default."""
        types: set[str] = set()
        ndarrays.map_arrays(out, lambda array: types.add(array.stype))
        if types - {"default"}:
            wanted = ndarrays.wanted("pull", key, out)
            sparse = [(one, array) for one, array, _ in wanted if getattr(array, "stype", "default") != "default"]
            if sparse and not ignore_sparse:
                every_id = [mx.nd.arange(array.shape[0], dtype="int64") for _, array in sparse]
                self.row_sparse_pull([one for one, _ in sparse], [array for _, array in sparse], priority, every_id)
            left = [(one, array) for one, array, _ in wanted if getattr(array, "stype", "default") == "default"]
            if not left:
                return
            key, out = [one for one, _ in left], [array for _, array in left]
        with ndarrays.Writing() as writing:
            self.store.pull(key, ndarrays.map_arrays(out, writing.to), priority)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """``push`` and ``pull`` in one exchange; without ``out`` the result replaces ``value``."""
        with ndarrays.Writing() as writing:
            target = ndarrays.map_arrays(value if out is None else out, writing.to)
            pushed = target if out is None and self._factor() == 1.0 else self._pushed(value)
            self._follow(key)
            self.store.pushpull(key, pushed, target, priority)

    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None) -> None:
        """Fill row_sparse NDArrays with rows of their keys: those in ``row_ids``, each once, and nothing else.

        Args:
            key: one, or a list, with lists of as many ``out`` and ``row_ids``.
            out: for each key one, or a list.
            row_ids: for each key one for all of its ``out``, or a list with one for each; or one for all keys.
        Raises:
            ConfigError: lists of different lengths, or no ``row_ids``.
            UnsupportedError: ``out`` has another storage type.
        """
        keys, arrays, rows, chosen = [], [], [], []
        for one, array, ids in ndarrays.wanted("row_sparse_pull", key, out, row_ids):
            if getattr(array, "stype", "") != "row_sparse":
                raise UnsupportedError(f"row_sparse_pull of key {one!r}: out is no NDArray of storage type row_sparse")
            if not isinstance(ids, mx.nd.NDArray):
                raise ConfigError(f"row_sparse_pull of key {one!r}: row_ids is {ids!r}, expected an NDArray")
            keys.append(one)
            arrays.append(array)
            chosen.append(np.unique(ids.asnumpy().astype("i8")))
            rows.append(np.empty((chosen[-1].size, *array.shape[1:]), array.dtype))
        self.store.row_sparse_pull(keys, rows, chosen, priority)
        with mx.autograd.pause():  # a forward pass pulls what it needs
            for array, pair in zip(arrays, zip(rows, chosen, strict=True), strict=True):
                mx.nd.sparse.row_sparse_array(pair, array.shape, array.context, array.dtype).copyto(array)

    def _pushed(self, value: Any) -> Any:
        """What is pushed, as the store takes it: rows where the update leaves all others as they are."""
        optimizer, factor = self._optimizer, self._factor()
        by_rows = optimizer is None or getattr(optimizer, "lazy_update", False)
        if isinstance(optimizer, mx.optimizer.SGD | mx.optimizer.NAG):
            by_rows = by_rows or not (optimizer.momentum or optimizer.wd)
        if factor == 1.0:
            return ndarrays.map_arrays(value, ndarrays.read_rows if by_rows else ndarrays.read)
        if not self._warned:
            self._warned = True
            warn(
                f"the store's optimizer was set up with rescale_grad {self._scale:.4g}, for another batch size; with "
                f"{optimizer.rescale_grad:.4g} what this worker pushes is multiplied by {factor:.4g} (drop the short "
                "last batch of an epoch to avoid this)"
            )
        return ndarrays.map_arrays(
            value, lambda array: ndarrays.times(factor, (ndarrays.read_rows if by_rows else ndarrays.read)(array))
        )

    def _factor(self) -> float:
        """What is pushed is multiplied by this, since the servers' rule has the ``rescale_grad`` of all workers."""
        optimizer = self._optimizer
        if optimizer is None or self._scale is None or optimizer.rescale_grad == self._scale:
            return 1.0
        return float(optimizer.rescale_grad) / self._scale

    # ---- the optimizer

    def set_optimizer(self, optimizer: Any) -> None:
        """Let the store apply an optimizer of MXNet that has an equivalent in ``kvmpi.optim``, or a rule of that.

        Collective over all workers. What changes in the optimizer later - its learning rate, or that of its
        ``lr_scheduler``, which is asked before every push - reaches the servers with the next push. To be changed alike
        in all workers, but for ``rescale_grad``, which stays in the rule what it is now: see ``push``.

        Raises:
            UnsupportedError: it has no equivalent, or an option that has none.
        """
        if isinstance(optimizer, optim.Rule):
            self.store.set_optimizer(optimizer)
            self._optimizer = None
        else:
            self.store.set_optimizer(rule_of(optimizer))
            self._optimizer, self._sent, self._rates = (
                optimizer,
                (rules.options_of(optimizer), self.store.optimizer),
                {},
            )
            self._scale, self._warned = rules.scale_of(optimizer), False

    def _follow(self, key: Any) -> None:
        """Count an update of the keys, and tell the servers of changes in the optimizer before it is applied."""
        optimizer = self._optimizer
        if optimizer is None:
            return
        keys = list(key) if isinstance(key, list | tuple) else [key]
        optimizer._update_count(keys)
        if self._updates < optimizer.num_update:
            self._updates = optimizer.num_update
            self.store.clock()
        options, rates, now = rules.options_of(optimizer), rules.rates_of(optimizer, keys), self.store.optimizer
        known, sent = self._sent
        is_known = options == known and all(self._rates.get(one) == rates[one] for one in keys)
        # A file that was loaded, or anybody else, has changed the rule if it is another object.
        if is_known and now is sent and self._scale is not None:
            return
        rates = rules.rates_of(optimizer, self.store.keys)
        scale = rules.scale_of(optimizer) if self._scale is None else self._scale
        rule = rules.with_rates(optimizer, rates, scale)
        if type(rule) is not type(now):
            raise ConfigError(f"the store applies {now!r}, this program {rule!r}; use a store for each")
        changed = rule.changes_from(now)
        if self._scale is None:  # said by all, so that it is an error if a worker says something else
            changed["rescale_grad"] = rule.hyperparams()["rescale_grad"]
        if changed:
            self.store.set_hyperparams(**changed)
        self._sent, self._rates, self._scale = (options, self.store.optimizer), rates, scale

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write what the rule remembers, and how many updates there were, to one file. Collective; worker 0 writes.

        Hyperparameters are the program's own: ``dump_optimizer`` changes nothing.
        """
        self.store.save_optimizer_states(fname)

    def load_optimizer_states(self, fname: str) -> None:
        """Restore what ``save_optimizer_states`` wrote. Collective; every worker reads ``fname``; keys must exist.

        Raises:
            ConfigError: it is of another optimizer.
        """
        self.store.load_optimizer_states(fname)
        optimizer = self._optimizer
        if optimizer is not None:
            if type(rule_of(optimizer)) is not type(self.store.optimizer):
                raise ConfigError(f"{fname} is of {self.store.optimizer!r}, this program has {rule_of(optimizer)!r}")
            self._updates = int(self.store.stats()["clock"])
            optimizer.begin_num_update = optimizer.num_update = self._updates
            optimizer._index_update_count.update(dict.fromkeys(optimizer._index_update_count, self._updates))

    @property
    def _updater(self) -> SimpleNamespace:
        """Where gluon's Trainer looks for the optimizer, after ``load_states``."""
        return SimpleNamespace(optimizer=self._optimizer)

    def set_gradient_compression(self, compression_params: dict[str, Any]) -> None:
        """Send pushes in fewer bytes: ``{"type": "2bit", "threshold": 0.5}``, ``"1bit"``, ``"fp16"`` or ``"bf16"``."""
        self.store.set_gradient_compression(compression_params)

    # ---- waiting and ending

    def barrier(self) -> None:
        """Return when every worker is here."""
        self.store.barrier()

    _barrier = barrier

    def close(self) -> None:
        """Leave the job. Collective; idempotent; also runs at exit."""
        self.store.close()


class Trainer(mx.gluon.Trainer):
    """``gluon.Trainer`` with one exchange for all parameters in place of one after the other.

    The gradients of small parameters then travel together, and large ones while others are on their way.
    """

    def _allreduce_grads(self) -> None:
        store = self._kvstore
        if not isinstance(store, Store):
            super()._allreduce_grads()
            return
        with_gradients = [i for i, param in enumerate(self._params) if param.grad_req != "null"]
        active = [i for i in with_gradients if self._params[i]._stype == "default"]
        gradients = [self._params[i].list_grad() for i in active]
        if active:
            outs = [self._params[i].list_data() for i in active] if self._update_on_kvstore else None
            store.pushpull(active, gradients, outs)
        if sparse := [i for i in with_gradients if i not in active]:  # the next forward pulls the rows that it needs
            store.push(sparse, [self._params[i].list_grad() for i in sparse])


# ---- registration


def _creating(original: Callable[..., Any]) -> Callable[..., Any]:
    """MXNet makes no store for a single device unless "dist" is in its name: workers would train apart, unnoticed."""

    def create(kvstore: Any, *args: Any) -> Any:
        if isinstance(kvstore, str) and kvstore.lower().startswith(PREFIX):
            kvstore = mx.kv.create(kvstore)
        return original(kvstore, *args)

    return create


def _beginning(original: Callable[..., Any]) -> Callable[..., Any]:
    """MXNet's trainer takes only stores of its own for sparse parameters, which always update where they are stored."""

    def begin(trainer: Any) -> None:
        wanted = trainer._kvstore_params
        kvstore, update = wanted["kvstore"], wanted["update_on_kvstore"]
        is_ours = isinstance(kvstore, Store) or (isinstance(kvstore, str) and kvstore.lower().startswith(PREFIX))
        if is_ours and (trainer._contains_sparse_weight or trainer._contains_sparse_grad):
            if update is False:
                raise ConfigError(
                    "update_on_kvstore=False with row_sparse weights or gradients: leave that to the store"
                )
            store = mx.kv.create(kvstore) if isinstance(kvstore, str) else kvstore
            if trainer._compression_params:
                store.set_gradient_compression(trainer._compression_params)
            store.set_optimizer(trainer._optimizer)
            trainer._kvstore, trainer._distributed = store, True
            trainer._update_on_kvstore = trainer._kv_initialized = True
        else:
            original(trainer)
        if isinstance(trainer._kvstore, Store) and trainer._optimizer.rescale_grad == trainer._scale:
            # Before the first step, which says how large a batch is: states are loaded, or rows of weights pulled.
            trainer._kvstore._scale = None

    return begin


def _rescaling(original: Callable[..., Any]) -> Callable[..., Any]:
    """MXNet's trainer refuses another batch size, which its stores cannot do, and to go on from saved states."""

    def rescale(trainer: Any, scale: float) -> None:
        if isinstance(trainer._kvstore, Store):
            trainer._optimizer.rescale_grad = scale
        else:
            original(trainer, scale)

    return rescale


def _register(names: Iterable[str]) -> None:
    for name in names:
        mx.kvstore.KVStoreBase.register(type(PREFIX + name, (Store,), {"_name": name, "__module__": __name__}))
    create = _creating(mx.model._create_kvstore)
    for module in (mx.model, mx.gluon.trainer, mx.module.module):
        module._create_kvstore = create
    mx.gluon.Trainer._init_kvstore = _beginning(mx.gluon.Trainer._init_kvstore)
    mx.gluon.Trainer._check_and_rescale_grad = _rescaling(mx.gluon.Trainer._check_and_rescale_grad)


_register(_TYPES)
