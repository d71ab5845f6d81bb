"""A user's own update rule, which servers import with ``--import custom_rules``."""

from dataclasses import dataclass

import numpy as np

from kvmpi import optim


@optim.register("doubler")
@dataclass(frozen=True)
class Doubler(optim.Rule):
    """stored <- 2 * stored + gain * pushed."""

    gain: float = 1.0

    def compute(self, b):
        b.out[...] = 2 * b.stored + self.gain * b.pushed


@optim.register("normalized")
@dataclass(frozen=True)
class Normalized(optim.Rule):
    """stored <- stored - pushed / |pushed|."""

    def apply(self, stored, pushed, state, step, count=1):
        stored -= pushed / np.linalg.norm(pushed)
