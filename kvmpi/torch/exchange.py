"""Gradients leave for the store during the backward pass: hooks, buckets in ``kv.empty`` memory, what comes back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from kvmpi.compiling import methods_not_compiled, not_compiled
from kvmpi.engine import Work
from kvmpi.errors import ConfigError, KVError
from kvmpi.store import KVStore
from kvmpi.store.call import JoinedWork
from kvmpi.torch import buckets, ownership
from kvmpi.torch.gradients import Bucket
from kvmpi.torch.learning import Learner
from kvmpi.torch.leftovers import Leftovers
from kvmpi.torch.norms import NormBuffers
from kvmpi.torch.other_buffers import OtherBuffers
from kvmpi.torch.ownership import Hooks
from kvmpi.torch.parameters import KeyedParameters, next_key, not_compressed, start_sum, summing
from kvmpi.torch.plans import Plans
from kvmpi.torch.weights import Weights
from kvmpi.warning import warn

#: Workers tell each other where they are modulo this: their sums are exact, and who goes astray is not so far off.
_PLACES = 61
#: Larger tensors are scaled while they are copied, in one pass over memory.
_SMALL_COUNT = 1 << 14
_NOTHING = contextlib.nullcontext()


@methods_not_compiled
class Exchange:
    """What ``DistributedOptimizer`` does with gradients and weights.

    A *pass* begins with the first gradient of a backward, and ends with that backward. Each bucket leaves as soon as it
    is full and those before it have left; at the end what is not full leaves with zeros. Buckets are planned after the
    first pass, in the order in which gradients came. Where weights come back, the second pass is timed, and from the
    fourth on buckets leave such that the first layers' weights are back first; the fifth and the eighth are timed anew.

    Gradients are copied to blocks that leave as a whole. Where workers hold the values, large ones in host memory are
    summed where autograd has made them instead: to copy those costs more than to call the store with more.

    Args:
        kv: where the gradients go; None: they stay here, and a pass exchanges nothing.
        keys: those of ``kv`` under which gradients are summed that stay where autograd has made them, by parameter.
        weights: the store holds and updates these; else gradients come back, summed.
        scale: every gradient is multiplied by it before it leaves.
        average: the sum with this scale is a mean, of which the mean is itself: a second pass before a step adds up.
        overlap: buckets leave during the backward; else all at its end.
        before_pass: called before anything leaves.
        leftovers: of the exchange before this one, of fewer parameters, if there was one.
    """

    def __init__(
        self, kv: KVStore | None, params: KeyedParameters, keys: Sequence[int], *, weights: Weights | None,
        scale: float, average: bool, bucket_bytes: int, overlap: bool, before_pass: Callable[[], None],
        leftovers: Leftovers,
    ) -> None:  # fmt: skip
        self._kv, self._params, self._keys, self._weights, self._overlap = kv, params, keys, weights, overlap
        self._scale, self._average, self._before_pass = scale, average, before_pass
        self._leftovers = leftovers
        self._lock = threading.RLock()  # gradients on several devices arrive in several threads
        self._tensors = params.tensors
        self._hooks: Hooks | None = None
        #: What hooks take their gradients out of, if there is nothing else to do for them.
        self._listening: dict[int, set[int]] = {}
        self._steps = self._zeroed = 0  # steps of the loop, and since the last how often it has begun anew
        self._paused = self._open = self._has_backward = self._broken = self._warned = False
        self._leaves = False  # no step will follow
        self._begun = False  # something was done, in this step, since gradients were zeroed
        # Whose weights come back, in this pass or the last, and whether somebody has written to their gradients since.
        self._sent: list[tuple[Bucket, Callable[[], bool]]] = []
        self._flying: list[Work] = []  # sums that come back
        self._left_as: list[tuple[Bucket, dict[int, int]]] = []  # their gradients, where a backward pass goes on
        self._held: list[int] = []  # buckets that are full, and leave when the backward is over
        #: Since the last step: whether gradients are as the store has returned, or taken, them.
        self.fresh = False
        self._are_sums = False  # and no backward pass has added to them since, or the loop begun anew with them
        #: Whether some workers had a pass in the last exchange, and others none.
        self.some_have_none = False
        self._in_closure = False  # a closure was called since, and has made no pass yet
        #: What is exchanged along with each pass.
        self.norms: NormBuffers | None = None
        self.others: OtherBuffers | None = None
        self._used = [0.0] * len(self._tensors)  # 1 where this worker has a gradient
        self._made: list[torch.Tensor] = []  # gradients as autograd has made them, in host memory; see ``release``
        self._taken: set[int] = set()  # addresses of direct gradients of this pass
        self._gone: set[int] = set()  # and of those that have left
        self._unused: list[int] = []  # what no worker had in the last pass, where gradients come back
        self._value_key: int | None = None
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._progress = buckets.Progress(())
        self._plans: Plans | None = None
        ownership.remove_unused()
        if kv is None:
            self._learner = Learner(None, len(self._tensors), times=False)
            return
        # What is left to multiply by where the store does not do it on the way.
        self._prescale = 1.0 if kv.is_capable("allreduce") and weights is None else scale
        # A client of one worker pushes when it likes, and only what it has.
        self._alone = weights is not None and kv.is_capable("skip") and kv.mpi_size == 1
        # The sum over workers, which travels with the last bucket: whether any worker has one.
        # So does where they are in their loops: how many say it, and the sum of that, for each of two numbers; and how
        # many have no pass, and only come along.
        self._all_used = torch.zeros(len(self._tensors) + 5, dtype=not_compressed(kv, torch.float32), device="cpu")
        self._all_used_key = next_key(kv)
        if weights is None:
            kv.init(self._all_used_key, self._all_used)
        # Who plans alike: where gradients come back all workers, since buckets are keys; else those that call together.
        planners: KVStore | None = None
        if (kv.num_workers if weights is None else kv.mpi_size) > 1:
            planners = kv if weights is None else kv.client
        self._learner = Learner(planners, len(self._tensors), times=weights is not None and not weights.splits)
        self._hooks = Hooks(kv, params, self._hook)
        # A store that brings weights back takes gradients where they are if it copies them anyway, and as they are.
        direct = weights is None or (weights.splits and scale == 1.0)
        self._plans = Plans(kv, params, weights, bucket_bytes, direct=direct)
        self._plan()

    def close(self) -> None:
        """Leave the parameters alone from here on."""
        if self._hooks is not None:
            self._hooks.remove()
        self._before_pass = lambda: None  # none comes, and a cycle would keep model and gradients for long

    def check_own(self) -> None:
        """Raise if another optimizer exchanges these gradients, so that this one would do it a second time."""
        if self._hooks is not None:
            self._hooks.check_own()

    @property
    def has_pass(self) -> bool:
        """Whether the loop has seen what came of the last exchange: it was in a backward of this worker, or in place of
        one that was broken off; else in its step."""
        return self._has_backward or self._broken

    @property
    def order(self) -> list[int]:
        """In which gradients come, as far as that is known."""
        return self._learner.order

    # ---- the plan

    def _plan(self) -> None:
        """Take buckets for what requires a gradient now; all workers do so at the same point of their programs."""
        if self._plans is None:
            return
        found, self._planned_for = self._plans.find(self._learner.order), self._plans.look()
        self._trained = [p.requires_grad for p in self._tensors]
        if found == self._buckets:
            return
        for bucket in self._buckets:
            bucket.forget()
        self._buckets = found
        self._learner.forget()
        self._bucket_of = {i: bucket for bucket in self._buckets for i in bucket.indices}
        self._number_of = {i: number for number, bucket in enumerate(self._buckets) for i in bucket.indices}
        self._progress = buckets.Progress([bucket.indices for bucket in self._buckets])
        if self._weights is None:
            self._leftovers.lay_out({i: place for bucket in self._buckets for i, place in bucket.places()})

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        @not_compiled
        def hook(_: torch.Tensor) -> None:  # called so often that every look at an attribute counts
            missing = self._listening.get(index)
            if missing is None or index not in missing:
                self._arrived(index)
                return
            missing.remove(index)
            if not missing:
                self._full()

        return hook

    def _listen(self) -> None:
        """Whether hooks do no more than to take their gradients out of what is missing."""
        usual = self._open and not self._paused and self._learner.passes and not self._learner.is_timing
        self._listening = self._progress.missing if usual else {}

    # ---- a pass

    def _full(self) -> None:
        """A bucket has got its last gradient."""
        with self._lock, torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
            self._leave(self._progress.leaving())

    def _arrived(self, index: int) -> None:
        """The ``grad`` of a parameter has got all that this backward gives."""
        # Entering no_grad is a third of what a hook takes, and only a backward that makes a graph needs it.
        with self._lock, torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
            if self._paused:
                self._begun, self.fresh, self._are_sums = True, False, False
                return
            if not self._open:
                self._begin(index)
                torch.autograd.Variable._execution_engine.queue_callback(self.finish)  # type: ignore[attr-defined]
            if not self._trained[index]:
                return
            if index not in self._progress.missing[index]:
                raise KVError(
                    f"the gradient of {self._params.names[index]} arrives twice before the exchange is through: the "
                    "backward before this one has failed; where you catch that, call "
                    "optimizer.synchronize(broken=True), and then step(). Or two checkpoints with use_reentrant=True, "
                    "each of which makes a backward of its own, use it in one pass: use_reentrant=False does not"
                )
            self._learner.arrived(index, self._number_of[index])
            self._leave(self._progress.arrive(index))

    def _begin(self, index: int | None) -> None:
        new = self._by_hand if index is None and self._are_sums and not self._average else []
        if new and (self._shows_some or (self.fresh and not self._in_closure)):
            raise ConfigError(
                f"the gradient of {self._params.names[new[0]]} was set after the backward pass, and to exchange it now "
                "would sum again what has been summed of others: set it before that pass, or let gradients be averaged"
            )
        if self.fresh and (self._weights is not None or (not self._average and self._shows_some)):
            or_else = ""
            if self._weights is not None:
                or_else = (
                    ", or let them leave in step(), with push='step'. A checkpoint inside the model with "
                    "use_reentrant=True makes a backward of its own: use_reentrant=False does not"
                )
            raise ConfigError(
                "a second backward before optimizer.step(), when the gradients of the first have left for the "
                f"store: do all but the last of them inside 'with optimizer.no_sync():'{or_else}"
            )
        if index is not None:
            self._warn_of_graph(index)
        self._before_pass()
        if self._plans is not None and self._planned_for != self._plans.look():
            self._plan()
        self._progress = buckets.Progress([bucket.indices for bucket in self._buckets], self._learner.leaving)
        self._learner.begin(len(self._buckets))
        self._used = [0.0] * len(self._tensors)
        self._sent, self._held, self._flying, self._left_as = [], [], [], []
        self.release()
        self._taken.clear()
        self._gone.clear()
        self._open, self._has_backward, self._begun = True, index is not None, True
        for i in self._bucket_of:
            if not self._trained[i]:  # it is in the plan because it was, and will be: nobody need wait for it
                self._leave(self._progress.arrive(i))
        self._listen()

    def _warn_of_graph(self, index: int) -> None:
        """What comes back is no function of the weights to autograd: a penalty on it would be a constant."""
        grad = self._tensors[index].grad
        if not self._warned and grad is not None and grad.requires_grad:
            self._warned = True
            warn(
                "backward(create_graph=True): the gradients that come back from other workers have no graph, so that "
                "a loss made of p.grad does not train anything. Take torch.autograd.grad(loss, parameters, "
                "create_graph=True) for it, and call backward() without create_graph"
            )

    def _leave(self, full: list[int]) -> None:
        """Buckets are full."""
        if self._overlap:
            self._send(full)
        else:
            self._held += full

    def _gather(self, bucket: Bucket) -> None:
        """Bring gradients, scaled, to where they leave from, and let the parameters show them there.

        Bucket by bucket: torch copies many small tensors in a quarter of the time that it takes one by one.
        """
        places: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        if self._weights is not None:
            self._weights.wait(bucket.indices)  # of layers that were not used since
        for i in bucket.direct:
            self._params.check_dense(i)
            self._check_apart(i)
            self._used[i] = 1.0 if bucket.find(i, self._taken, hidden=not self._trained[i]) else 0.0
        for i in bucket.copied:
            tensor, place = self._tensors[i], bucket.place(i)
            grad = tensor.grad
            if not self._trained[i]:
                if grad is place:
                    tensor.grad = grad.clone()  # to stay as it is
                grad = None
            if grad is None:
                place.zero_()
                continue
            self._used[i] = 1.0
            if grad is place:
                if self._prescale != 1.0:
                    place.mul_(self._prescale)
                continue
            self._params.check_dense(i)
            if self._prescale == 1.0 or grad.numel() <= _SMALL_COUNT:
                places.append(place)
                grads.append(grad)
            else:
                torch.mul(grad, self._prescale, out=place)
            tensor.grad = place
            if grad.device.type == "cpu":
                self._made.append(grad)
        if places:
            torch._foreach_copy_(places, grads)
            if self._prescale != 1.0:
                torch._foreach_mul_(places, self._prescale)

    def _check_apart(self, index: int) -> None:
        """Raise if a gradient is the same memory as one that is being summed there, too late for a copy."""
        grad = self._tensors[index].grad
        if self._trained[index] and grad is not None and grad.data_ptr() in self._gone:
            raise ConfigError(
                f"the gradient of {self._params.names[index]} shares its memory with another that is on its way to "
                "other workers, as of parameters that are added: give it memory of its own, with "
                "parameter.register_hook(torch.clone), or let gradients leave when the pass is over, with overlap=False"
            )

    def release(self) -> None:
        """Give back the memory in which autograd has made gradients.

        To be called where a loop without an exchange would do so. In the middle of a backward pass, C libraries tend to
        return memory to the system that the next layer asks for again, page by page: a tenth of a step of ResNet-20.
        """
        self._made.clear()
        for bucket in self._buckets:
            bucket.forget()

    def keep(self) -> None:
        """Gradients stay where they are from one pass to the next: let that be memory that others can read."""
        with self._lock, torch.no_grad():
            for bucket in self._buckets:
                bucket.keep()

    def _send(self, numbers: Sequence[int]) -> None:
        """These buckets leave, in this order."""
        if self._weights is not None:
            for number in numbers:
                self._push(number, self._weights)
            return
        for number in numbers:
            self._gather(self._buckets[number])
        # One call costs less than several; but what comes later in a call is not on its way before the rest is.
        for some in [[number] for number in numbers] if self._overlap else [numbers]:
            self._sum(some)

    def _sum(self, numbers: Sequence[int]) -> None:
        """Gradients leave, and come back summed."""
        keys, arrays = list[int](), list[torch.Tensor]()
        for bucket in [self._buckets[number] for number in numbers]:
            keys += [*bucket.keys, *(self._keys[i] for i in bucket.direct)]
            arrays += [*bucket.blocks, *(bucket.arrays[i] for i in bucket.direct)]
            self._gone.update(bucket.arrays[i].data_ptr() for i in bucket.direct)
        if len(self._buckets) - 1 in numbers:
            step = (1.0, self._steps % _PLACES) if self.has_pass else (0.0, 0.0)
            zeroed = (1.0, self._zeroed % _PLACES) if self._has_backward else (0.0, 0.0)
            without = 0.0 if self.has_pass or self._leaves else 1.0
            self._all_used.copy_(torch.tensor([*self._used, *step, *zeroed, without], device="cpu"))
            keys.append(self._all_used_key)
            arrays.append(self._all_used)
        if keys and self._kv is not None:
            self._flying.append(start_sum(self._kv, keys, arrays, self._scale, numbers[0])[0])
            if self._overlap:
                some = [self._buckets[number] for number in numbers]
                self._left_as += [(bucket, bucket.host_versions()) for bucket in some]

    def _push(self, number: int, weights: Weights) -> None:
        """Gradients leave, and weights come back."""
        bucket = self._buckets[number]
        self._gather(bucket)
        left = bucket.held()
        versions = [tensor._version for tensor in left]
        arrays = [bucket.arrays[i] if self._used[i] or not self._alone else None for i in bucket.indices]
        self._gone.update(bucket.arrays[i].data_ptr() for i in bucket.direct)

        def changed() -> bool:
            return [tensor._version for tensor in left] != versions

        works = weights.send(bucket.indices, arrays, number, reduced=False, changed=changed)
        self._sent.append((bucket, changed))
        self._learner.sent(number, works)

    def finish(self, broken: bool = False) -> None:
        """End the pass, or make one if there was none: everything leaves; where gradients come back, they are there.

        Args:
            broken: others have a backward here, which this worker has not.
        """
        with self._lock, torch.no_grad():
            self._broken = broken
            if not self._open:
                self._begin(None)
            for number in range(len(self._buckets)) if self._learner.is_timing else ():
                if self._progress.absent(number):
                    self._learner.filled(number)
            self._send([*self._held, *self._progress.finish()])
            if self._weights is not None:
                self._weights.fetch()
            self._open, self.fresh, self._are_sums = False, True, self._weights is None
            self._in_closure = False
            self._listen()
            if self.norms is not None:
                self.norms.start()
            if self.others is not None:
                self.others.start()
            if self._weights is None:
                self._receive()
            if self.norms is not None:
                self.norms.finish()
            if not self._learner.knows_all and self._learner.end(len(self._buckets)):
                self._plan()

    def _receive(self) -> None:
        """Gradients come back: a parameter that no worker has used has none, as without an exchange."""
        flying, self._flying = self._flying, []
        if flying:
            together = JoinedWork(flying, "gradients")
            together.on_waited = flying[0].on_waited
            together.wait()
        self._check_left()
        if not self._bucket_of:
            return
        used = self._all_used.tolist()
        *place, without = used[-5:]
        self._check_place(*place)
        self.some_have_none = place[0] > 0 and without > 0
        self._unused = [i for i in self._bucket_of if self._trained[i] and used[i] <= 0]
        if self._kv is not None and self._kv.keeps_errors:
            # What was left of them has travelled with zeros, and nobody takes it.
            parts: dict[int | str, list[tuple[int, int]]] = {}
            for i, (key, *where) in (each for bucket in self._buckets for each in bucket.places()):
                if used[i] <= 0:
                    parts.setdefault(key, []).append((where[0], where[1]))
            if parts:
                self._kv.restore_errors(parts)
        for i, bucket in self._bucket_of.items():
            if self._trained[i]:
                self._tensors[i].grad = bucket.grads[i] if used[i] > 0 else None

    def _check_left(self) -> None:
        """Raise if somebody has written to gradients on their way: what came of that would differ between workers."""
        left, self._left_as = self._left_as, []
        for bucket, versions in left:
            changed = [i for i, version in versions.items() if bucket.arrays[i]._version != version]
            if changed:
                raise ConfigError(
                    f"the gradient of {self._params.names[changed[0]]} was changed during the backward pass, on its "
                    "way to other workers. Hooks that change gradients are registered before the DistributedOptimizer "
                    "is made; or let gradients leave when the pass is over, with overlap=False"
                )

    def _came_back(self, index: int) -> torch.Tensor | None:
        bucket = self._bucket_of.get(index)
        return None if bucket is None else bucket.grads.get(index)

    @property
    def _shows_some(self) -> bool:
        """Whether any parameter shows the gradient that has come back, be it one that this backward has added to."""
        return any(p.grad is not None and p.grad is self._came_back(i) for i, p in enumerate(self._tensors))

    @property
    def _replaced(self) -> list[int]:
        """What shows another gradient than the one that has come back."""
        return [
            i
            for i, p in enumerate(self._tensors)
            if p.requires_grad and p.grad is not None and p.grad is not self._came_back(i)
        ]

    @property
    def _by_hand(self) -> list[int]:
        """What shows a gradient that was not exchanged."""
        if not self.fresh or self._in_closure:
            return self._replaced
        # Between a pass and the step a loop puts others in the place of what came back, as to clip: those are to stay.
        return [i for i in self._unused if self._tensors[i].grad is not None]

    @property
    def complete(self) -> bool:
        """Whether everything is exchanged that is there. All workers are in the same place, so it is so for all."""
        # To sum sums once more, for a second step with the same gradients, would not leave them what they are.
        return (self.fresh or (self._are_sums and not self._average)) and not self._by_hand

    def called(self) -> None:
        """A closure is about to compute gradients: without a pass, those that are others then are to be exchanged."""
        self._in_closure = self.fresh and not self._replaced

    def summed_value(self, value: torch.Tensor) -> torch.Tensor:
        """A number of this worker's, summed and scaled as gradients are that come back. Collective over all workers.

        Args:
            value: of one element, in float64.
        """
        if self._kv is None or self._weights is not None:
            return value
        if self._value_key is None:
            self._value_key = next_key(self._kv)
            self._kv.init(self._value_key, torch.zeros(1, dtype=torch.float64, device="cpu"))
        found = value.reshape(1).cpu().clone()
        summing(self._kv)(self._value_key, found)
        return found.mul_(self._scale).reshape(())

    def stepped(self) -> None:
        """The loop has made a step."""
        if self.others is not None:
            with torch.no_grad():
                self.others.take()
        self._steps, self._zeroed = self._steps + 1, 0
        self.fresh = self._in_closure = self._begun = False

    def zeroed(self) -> None:
        """The loop begins anew with its gradients."""
        # Who zeroes what is zero already, as at the end of a step and before the next, has left nothing out.
        self._zeroed += self._begun
        self._begun = self.fresh = self._are_sums = False

    def _check_place(self, passes: float, steps: float, backwards: float, zeroed: float) -> None:
        """Raise if workers whose backward this is, or would have been, are not all at the same place of their loops.

        Args:
            passes, steps, backwards, zeroed: sums over these, all multiplied by the same.
        """
        if not self.has_pass or self._kv is None:
            return
        off = abs(steps / passes - self._steps % _PLACES)
        if self._has_backward:  # who has none may have zeroed what there was of it
            off = max(off, abs(zeroed / backwards - self._zeroed % _PLACES))
        if off > 0.25 / self._kv.num_workers:
            raise KVError(
                f"worker {self._kv.rank}: the gradients of this backward pass, in step {self._steps + 1}, were summed "
                "with those of another pass of other workers, and are wrong. All workers make the same number of "
                "backward passes outside of no_sync() in a step; and where one fails, but not after one that has gone "
                "through, its worker calls optimizer.synchronize(broken=True)"
            )

    def leave(self) -> None:
        """No pass will follow: take part in the first one, if there was none, since the others plan after it."""
        if self.norms is not None:
            self.norms.leave()
        if self.others is not None:
            self.others.leave()
        if self._weights is None and not self._learner.passes:
            self._leaves = True
            self.finish()

    @property
    def is_open(self) -> bool:
        """Whether a pass has begun and not ended."""
        return self._open

    def check_unchanged(self) -> None:
        """Raise if somebody has changed gradients that the store has taken already: it would be in vain."""
        for bucket, changed in self._sent:
            shown = all(
                g is bucket.grads.get(i, g) if (g := self._tensors[i].grad) is not None else not self._used[i]
                for i in bucket.indices
            )
            if not shown or changed():
                raise ConfigError(
                    "gradients were changed after the backward pass (clipped, unscaled, added to): the store has taken "
                    "them by then. Let it take them in step(), with DistributedOptimizer(..., push='step'), or leave "
                    "them as they are"
                )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add to ``grad`` and exchange nothing."""
        before, self._paused = self._paused, True
        self._listen()
        try:
            yield
        finally:
            self._paused = before
            self._listen()
