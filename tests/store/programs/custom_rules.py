"""A user's own update rule, which servers import with ``--import custom_rules``."""

from dataclasses import dataclass

from kvmpi import optim


@optim.register("doubler")
@dataclass(frozen=True)
class Doubler(optim.Rule):
    """stored <- 2 * stored + gain * pushed."""

    gain: float = 1.0

    def compute(self, b):
        b.out[...] = 2 * b.stored + self.gain * b.pushed
