"""What training takes of a worker's memory beside activations: so many times the bytes of the weights."""

from __future__ import annotations

from dataclasses import dataclass

#: Float32 numbers that an optimizer remembers of each weight.
OPTIMIZERS = {"sgd": 0, "momentum": 1, "adam": 2}

#: Of all: the weights and their gradients.
_ALWAYS = 2
#: What ``DistributedOptimizer`` and its store have beside them, and beside what is remembered, as measured with up to
#: four workers on one host. A store that updates has values of its own, what is pushed, and sums; shares need less.
_BESIDE_GRADIENTS, _BESIDE_WEIGHTS, _BESIDE_SHARES = 1, 3, 2


@dataclass(frozen=True)
class Memory:
    """Bytes of one worker.

    Attributes:
        gradients: where gradients come back, and each worker updates its weights.
        weights: where weights come back from a store in which each worker updates all of them.
        shares: where each worker updates its share.
    """

    gradients: float
    weights: float
    shares: float

    def verdict(self, optimizer: str) -> str:
        """Whether shares are worth it."""
        sizes = (
            f"a worker needs {_size(self.shares)} beside activations ({optimizer}), {_size(self.weights)} where the "
            f"store updates whole weights, {_size(self.gradients)} where gradients come back"
        )
        if self.shares < self.gradients:
            return f"{sizes}. It is worth it where memory is short"
        return f"{sizes}. It is worth it only where the store updates anyway"


def of(nbytes: float, optimizer: str, workers: int) -> Memory:
    """For a model whose weights take ``nbytes``, of float32."""
    remembered = OPTIMIZERS[optimizer]
    return Memory(
        nbytes * (_ALWAYS + _BESIDE_GRADIENTS + remembered),
        nbytes * (_ALWAYS + _BESIDE_WEIGHTS + remembered),
        nbytes * (_ALWAYS + _BESIDE_SHARES + remembered / workers),
    )


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.3g} MB"
