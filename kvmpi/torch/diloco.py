"""``DiLoCo``: many local steps, then one outer step on what they changed."""

from __future__ import annotations

import itertools

import torch

from kvmpi import optim
from kvmpi.compiling import methods_not_compiled
from kvmpi.errors import ConfigError
from kvmpi.store import KVStore
from kvmpi.torch.averaging import Averaging, Failed
from kvmpi.torch.fragments import Fragments
from kvmpi.torch.parameters import Parameters


@methods_not_compiled
class DiLoCo(Averaging):
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
        center = self._center[key]
        if whole or self._mixing == 0.0:
            weights.copy_(center)
        elif weights.dtype == center.dtype:
            torch.lerp(center, weights, self._mixing, out=weights)
        else:  # the model has been converted since, model.to(torch.bfloat16)
            weights.copy_(torch.lerp(center, weights.to(center.dtype), self._mixing))

    def _take_late(self, key: int, failed: Failed) -> None:
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
