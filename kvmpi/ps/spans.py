"""What the timeline shows of a master's push or pull, beside what goes on in its threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvmpi.ps.asks import FUSED, Ask
from kvmpi.trace import timeline


class Spans:
    """What the timeline gets of one push or pull: where a value comes back with a push, that part of it is a pull."""

    def __init__(self, store: int, client: int, asks: Sequence[Ask], clock: int, nbytes: int) -> None:
        self._store, self._client, self._asks, self._clock, self._nbytes = store, client, asks, clock, nbytes
        self._start_ns, self._accepted_ns = timeline.now(), 0

    def then(self, on_accepted: Callable[[], None] | None) -> Callable[[], None]:
        """Note when servers have taken the push in."""

        def noted() -> None:
            self._accepted_ns = timeline.now()
            if on_accepted is not None:
                on_accepted()

        return noted

    def end(self, phase: str, staleness: int) -> None:
        """All is done. ``staleness`` is that of a push."""
        key, _, step = self._asks[0].fields[:3]
        common: dict[str, int] = {
            "clock": self._clock, "step": step, "store": self._store, "peer": self._client, "chunk": len(self._asks)
        }  # fmt: skip
        if phase == "push":
            common["staleness"] = staleness
        timeline.span(phase, self._start_ns, key, nbytes=self._nbytes, end_ns=self._accepted_ns, **common)
        if self._accepted_ns and phase == "push" and self._asks[0].fields[FUSED]:
            common["staleness"] = timeline.NOTHING
            nbytes = sum(ask.cost_bytes for ask in self._asks)
            timeline.span("pull", self._accepted_ns, key, nbytes=nbytes, **common)
