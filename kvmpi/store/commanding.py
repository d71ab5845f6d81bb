"""What a client's master tells servers and scheduler besides values: rules, codecs, who meets whom."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvmpi import optim
from kvmpi.collectives import Entry
from kvmpi.compiling import methods_not_compiled
from kvmpi.engine import Work
from kvmpi.errors import KeyNotInitializedError, ShapeMismatchError, UnsupportedError
from kvmpi.ps import PsClient, codec
from kvmpi.store.base import KVStore, seconds_of_silence
from kvmpi.store.call import Invocation, KeyState
from kvmpi.store.grammar import Key


@methods_not_compiled
class Commanding(KVStore):
    """The part of a store on servers that is about all of its keys."""

    _ps: PsClient | None
    #: How pushes travel; the same on all workers.
    _codec: codec.Codec = codec.get("none")

    def _command(
        self, run: Callable[[PsClient], Work | None], call: Invocation, result: list[str] | None = None
    ) -> Work:
        """Push: the master does something for all workers of its client; ``result`` of the master reaches all."""
        ps = self._ps
        work: Work | None = None
        if ps is not None:
            work = self._engine.push(
                lambda: run(ps), reads=call.done, writes=[self._control], name=call.op,
                lane="cpu" if call.op == "create" else "inline",
            )  # fmt: skip
        if self.mpi_size > 1 or work is None:
            work = self._tell_op(call.op, [self._control], call, result=result)
        return work

    def _start_set_rule(self, rule: optim.Rule, call: Invocation) -> Work:
        _check_fit(rule, self._codec)
        return self._command(lambda ps: ps.set_rule(rule, call.deadline), call)

    def _start_set_hyperparams(self, rule: optim.Rule, hyperparams: dict[str, Any], call: Invocation) -> Work:
        now = rule.hyperparams()
        changed = {name: now[name] for name in hyperparams}
        return self._command(lambda ps: ps.set_hyperparams(changed, call.deadline), call)

    def set_gradient_compression(self, params: dict[str, Any]) -> None:
        def prepare() -> codec.Codec:
            chosen = codec.of(params)
            _check_fit(self._rule, chosen)
            return chosen

        with self._meeting("set_gradient_compression") as call:
            chosen = self._enter_settled(
                call, prepare, lambda chosen: [Entry(chosen.text)], lambda chosen: chosen.params()
            )
        self._codec = chosen
        if self._ps is not None:
            self._ps.set_codec(chosen)

    @property
    def keeps_errors(self) -> bool:
        return isinstance(self._codec, codec.Quantizer)

    def restore_errors(self, parts: Mapping[Key, Sequence[tuple[int, int]]]) -> None:
        details = [[key, [list(part) for part in some]] for key, some in parts.items()]
        self._tell_of_errors(
            "restore_errors", list(parts), details,
            lambda ps: ps.restore_errors(parts.items()),
        )  # fmt: skip

    def move_errors(self, moves: Mapping[tuple[Key, Key], Sequence[tuple[int, int, int]]]) -> None:
        details = [[*keys, [list(part) for part in some]] for keys, some in moves.items()]

        def check(states: Mapping[Key, KeyState]) -> None:
            for (source, target), some in moves.items():
                for start, stop, first in some:
                    for key, last in ((source, stop), (target, first + stop - start)):
                        if not (0 <= start <= stop and first >= 0 and last <= states[key].count):
                            raise ShapeMismatchError(
                                f"move_errors of key {key!r} on worker {self.rank}: elements {start}:{stop} of "
                                f"{source!r} to {first} of {target!r}, the key has {states[key].count} elements"
                            )

        self._tell_of_errors(
            "move_errors", [key for keys in moves for key in keys], details,
            lambda ps: ps.move_errors([(*keys, some) for keys, some in moves.items()]), check,
        )  # fmt: skip

    def _tell_of_errors(
        self, op: str, keys: Sequence[Key], details: Any, tell: Callable[[PsClient], object],
        check: Callable[[Mapping[Key, KeyState]], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """Let what pushes of ``keys`` have left out be changed on the master, by ``tell``. Collective over the client.

        Args:
            details: what all workers have to give alike.
            check: raises if the states of the keys do not fit.
        """
        call = self._call(op)

        def prepare() -> list[KeyState]:
            if unknown := [key for key in keys if key not in self._keys]:
                raise KeyNotInitializedError(
                    f"{op} of key {unknown[0]!r} on worker {self.rank}: the key was never initialised"
                )
            states = {key: self._keys[key] for key in keys}
            check(states)
            return list(states.values())

        states = self._enter(call, prepare, lambda _: [Entry(repr(details))], lambda _: details)
        if (ps := self._ps) is not None:

            def change() -> None:
                tell(ps)

            # A worker that has joined waits for no push that others have waited for.
            written = [state.value for state in states]
            self._engine.push(change, reads=call.done, writes=written, lane="inline", name=op).wait()

    def pushed_dtype(self, dtype: str) -> str:
        return self._codec.wire_dtype(dtype)

    def _barrier(self, call: Invocation, failure: Exception | None = None) -> None:
        if failure is not None:  # which all workers of this client know
            if self._ps is not None:
                self._ps.barrier(call.deadline, failure).wait()
            return
        first, said, heard = ["0"], [str(int(self._did))], [""]

        def meet(ps: PsClient) -> Work:
            def hear() -> None:
                is_done = said == ["1"] or first == ["-1"]
                heard[0] = f"{first[0]} {int(is_done)}"

            return _then(ps.barrier(call.deadline, None, first, said), hear)

        self._command(meet, call, result=heard).wait()
        now_first, is_done = heard[0].split()
        self._first, self._is_done = int(now_first), is_done == "1"

    def _any_client(self, condition: bool, call: Invocation) -> bool:
        said = [str(int(condition))]
        self._command(lambda ps: ps.barrier(call.deadline, said=said), call, result=said).wait()
        return said == ["1"]

    def _set_clock(self, clock: int) -> None:
        super()._set_clock(clock)
        if self._ps is not None:
            self._ps.clock = clock

    def num_dead(self, timeout_s: float = 60.0) -> int:
        call = self._call("num_dead")
        seconds = self._enter(call, lambda: seconds_of_silence(timeout_s), details=lambda seconds: seconds)
        result = ["0"]

        def ask(ps: PsClient) -> Work:
            work, dead = ps.dead_clients(seconds, call.deadline)
            return _then(work, lambda: result.__setitem__(0, str(len(dead))))

        self._command(ask, call, result=result).wait()
        return int(result[0])

    def _imbalance(self) -> float:
        return 1.0 if self._ps is None else self._ps.imbalance()


def _then(work: Work, run: Callable[[], None]) -> Work:
    """``work`` and ``run`` after it: who waits for ``work`` itself may go on before its callbacks have been called."""
    both = Work(work.name)

    def end(_: Work) -> None:
        try:
            run()
        finally:
            both.finish(work.error())

    work.add_done_callback(end)
    return both


def _check_fit(rule: optim.Rule | None, chosen: codec.Codec) -> None:
    if rule is not None and rule.of_weights and isinstance(chosen, codec.Quantizer):
        raise UnsupportedError(
            f"gradient compression {chosen.text} is for gradients, and {rule.name} is sent weights, of which too "
            "little would be left; use fp16, bf16 or none"
        )
