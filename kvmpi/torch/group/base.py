"""What the operations of a process group have in common: who and where, how they begin, messages, the end."""

from __future__ import annotations

import functools
import inspect
import json
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from kvmpi.collectives import JOIN, Call, Comm, Entry
from kvmpi.collectives.exchange import GroupCollectives
from kvmpi.collectives.transfers import Transfers
from kvmpi.compiling import methods_not_compiled
from kvmpi.config import Config
from kvmpi.deadline import Deadline
from kvmpi.engine import Work, create_engine
from kvmpi.errors import ConfigError, DTypeMismatchError, KVError, ShapeMismatchError, UnsupportedError, ranks_in_words
from kvmpi.torch.group.tensors import octets
from kvmpi.torch.group.work import GroupWork

Buffer = npt.NDArray[Any]
Tensors = Sequence[torch.Tensor]

_LANE = "collectives"
#: Seconds that a group which is destroyed gives to what is under way.
_CLOSE_S = 10.0
#: Calls that are kept to be made again.
_MOST_CALLS = 256
#: Seconds in which the others may destroy it too, so that its communicators can be freed.
_LEAVE_S = 1.0


class Plan(NamedTuple):
    """One collective as this rank would do it: what must be equal on all ranks, how it runs, what its future holds.

    ``details`` is what a rank that has joined needs to know to take part; None if it cannot.
    """

    entries: list[Entry]
    run: Callable[[Deadline, str], None]
    results: Sequence[Any] = ()
    details: Any = None


_Method = TypeVar("_Method", bound=Callable[..., Any])


def also_named(*names: str) -> Callable[[_Method], _Method]:
    """Let a method take its arguments by the names that they have in C++, where each form of it has its own.

    Args:
        names: for each parameter of the method but ``self``, in order, its names there.
    """

    def decorate(method: _Method) -> _Method:
        own = list(inspect.signature(method).parameters)[1:]
        own_name = {name: mine for mine, known in zip(own, names, strict=True) for name in known.split()}

        @functools.wraps(method)
        def call(self: Any, *args: Any, **named: Any) -> Any:
            return method(self, *args, **{own_name.get(name, name): value for name, value in named.items()})

        return call  # type: ignore[return-value]

    return decorate


#: Its declared overloads are those of C++; what torch calls are the forms below.
_ProcessGroup: Any = dist.ProcessGroup


@methods_not_compiled
class GroupBase(_ProcessGroup):
    """The ranks of ``comm`` with a lane, an agreement and messages.

    Collectives run one after the other on the group's own lane, each after all ranks have agreed that they make the
    same call: a rank that makes another one, or cannot make it, is an error on all of them. Their time begins when
    they do. Messages between two ranks travel beside them, on a communicator of their own, as they come.

    Args:
        ranks: who they are in the world, for messages.
        timeout_s: seconds that one operation may take.
    """

    def __init__(
        self, comm: Comm, name: str, ranks: Sequence[int], timeout_s: float, config: Config,
    ) -> None:  # fmt: skip
        super().__init__(comm.rank, comm.size)
        self._name, self._description, self._ranks, self._timeout_s = name, "", list(ranks), timeout_s
        self._comms = [comm, comm.duplicate()]
        self._collectives = GroupCollectives.configured(comm, config, calls=comm)
        self._transfers = Transfers(self._comms[1])
        self._engine = create_engine(config.engine)
        self._engine.add_lane(_LANE, ordered=True)
        self._calls: dict[tuple[object, ...], Call] = {}
        self._thread = 0  # the lane's
        self._calls_back = False  # whether that runs callbacks of futures now
        self._closed = self._stuck = False

    # ---- who and where

    def rank(self) -> int:
        return self._collectives.rank

    def size(self) -> int:
        return self._collectives.size

    getRank, getSize = rank, size

    def getBackendName(self) -> str:
        return "kvmpi"

    def name(self) -> str:
        return "kvmpi"

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    # What torch looks for behind a group is the group itself.
    supports_splitting = supports_coalescing = supports_time_estimate = False

    def _get_backend(self, device: torch.device) -> GroupBase:
        return self

    def split_group(self, *_: Any, **options: Any) -> NoReturn:
        """Raises UnsupportedError, where C++ would read what is not there, and end the process."""
        raise UnsupportedError(
            f"process group {self._name!r} cannot be split or merged; make groups with torch.distributed.new_group, on "
            "all ranks of the world"
        )

    merge_remote_group = split_group

    def set_timeout(self, timeout: timedelta) -> None:
        """From the next operation on."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        pass

    # ---- how operations begin

    def _start(self, op: str, options: Any, prepare: Callable[[], Plan]) -> GroupWork:
        """Run a collective; what keeps this rank from it becomes an error on all."""
        if self._closed:
            raise KVError(f"{op} on process group {self._name!r}, which is destroyed")
        timeout_s, failure = self._seconds(options), None
        plan = Plan([], lambda *_: None)
        try:
            plan = prepare()
        except Exception as error:
            failure = error
        call = self._call(op, plan) if failure is None else Call(op, (), failure)

        def run() -> None:
            self._thread = threading.get_ident()
            deadline = Deadline(timeout_s)
            try:
                self._collectives.agree(call, deadline)
                plan.run(deadline, op)
            except KVError as error:
                raise self._reworded(error) from None

        work = GroupWork(self._push(run, op), plan.results, self._call_back)
        if failure is not None:
            try:
                work.wait()
            except KVError:
                pass  # as this rank's error, but for those that could not come
            raise failure
        return work

    def _call(self, op: str, plan: Plan) -> Call:
        """What is to be agreed on; the same object where it was before, since its text and digest take time."""
        key, details = (op, repr(plan.details), *plan.entries), plan.details
        found = self._calls.get(key)
        if found is None:
            if len(self._calls) >= _MOST_CALLS:
                self._calls.clear()
            found = self._calls[key] = Call(op, tuple(plan.entries), details=lambda: details)
        return found

    def _push(self, run: Callable[[], None], op: str) -> Work:
        """Run it on the lane: behind what is queued there, or, out of a callback that runs there, at once."""
        if not (self._calls_back and threading.get_ident() == self._thread):
            return self._engine.push(run, lane=_LANE, name=op)
        work = Work(op)
        try:
            run()
        except BaseException as error:
            work.finish(error)
        else:
            work.finish()
        return work

    def _call_back(self, callback: Callable[[], Any]) -> None:
        """Run callbacks of a future, in the thread in which its operation has finished.

        On the lane nothing else begins meanwhile, so that what they start comes next on all ranks: where it comes on a
        rank on which the operation is done before the callback is added, and the program waits for it.
        """
        if threading.get_ident() != self._thread:
            callback()
            return
        self._calls_back = True
        try:
            callback()
        finally:
            self._calls_back = False

    def join(self) -> GroupWork:
        """This rank has no more data: it adds zeros to what the others sum, until all have joined.

        The result is the rank that joined last. The others may reduce by sum and mean, and meet at barriers; anything
        else is an error on all. Each of their calls must come within the timeout of the group.
        """
        last: list[int] = []

        def run() -> None:
            try:
                last.append(self._stand_in())
            except KVError as error:
                raise self._reworded(error) from None

        return GroupWork(self._engine.push(run, lane=_LANE, name="join"), last)

    def _stand_in(self) -> int:
        rounds = np.zeros(self.size(), np.int64)
        while True:
            deadline = Deadline(self._timeout_s)
            description = self._collectives.agree(Call(JOIN), deadline).description
            if not description:
                # Who joined last has stood in for the fewest calls.
                self._collectives.allgather(rounds[self.rank() :][:1].copy(), rounds, deadline, "join")
                return int(np.flatnonzero(rounds == rounds.min())[-1])
            rounds[self.rank()] += 1
            op, _, details = json.loads(description)
            if details is None:
                reason = f"rank {self.rank()} has joined, and {op} needs what it does not have any more"
                self._collectives.agree(Call(op, (), UnsupportedError(reason)), deadline)
            plan = self._zeros(details)
            self._collectives.agree(Call(op, tuple(plan.entries)), deadline)
            plan.run(deadline, op)

    def _zeros(self, details: Any) -> Plan:
        """What a rank that has joined contributes to an operation with these ``details``."""
        raise NotImplementedError

    def _seconds(self, options: Any) -> float:
        timeout = options if isinstance(options, timedelta) else getattr(options, "timeout", None)
        if timeout is not None and timeout > timedelta(0):
            return timeout.total_seconds()
        return self._timeout_s

    def _reworded(self, error: KVError) -> KVError:
        """The error as users of torch know what it speaks of."""
        text = str(error).replace("of this client", "of this process group").replace("one client", "one process group")
        text = text.replace("KVMPI_TIMEOUT_S", "the timeout of the process group")
        text = (
            text.replace("this client's", "this process group's")
            .replace(": key ", ": tensor ")
            .replace(" has key ", " has tensor ")
        )
        own = list(range(self.size())) == self._ranks
        who = "" if own else f" of ranks {ranks_in_words(self._ranks)}"
        return type(error)(f"process group {self._name!r}{who}: {text}")

    # ---- messages

    @also_named("tensors", "dstRank", "tag")
    def send(self, tensors: Tensors, dest: int, tag: int = 0) -> GroupWork:
        flat = octets(single(tensors))
        return GroupWork(self._transfers.send(flat.buffer, dest, tag, self._timeout_s, self._label("send")), [])

    @also_named("tensors", "srcRank", "tag")
    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> GroupWork:
        return self._receive(tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> GroupWork:
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Tensors, source: int | None, tag: int) -> GroupWork:
        flat = octets(single(tensors), reads=False)
        work = self._transfers.receive(flat.buffer, source, tag, self._timeout_s, self._label("recv"), flat.back)
        return GroupWork(work, list(tensors))

    def _label(self, op: str) -> str:
        if self._closed:
            raise KVError(f"{op} on process group {self._name!r}, which is destroyed")
        return f"process group {self._name!r}: {op}"

    def _start_coalescing(self, device: torch.device) -> None:
        raise UnsupportedError("calls are not coalesced by device; use dist.batch_isend_irecv, or no device")

    # ---- the end

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def broken(self) -> bool:
        """Whether ranks were lost, or still owe messages, so that the process cannot end MPI in good order."""
        return self._collectives.broken or self._stuck

    @property
    def mpi_size(self) -> int:
        return self.size()

    def shutdown(self) -> None:
        """Wait a little for what is under way, and release everything. ``destroy_process_group`` does this.

        The others need not do so at the same time. A collective of theirs, now or later, is an error that names this
        rank.
        """
        if self._closed:
            return
        self._closed = True
        all_left = False
        deadline = Deadline(0.0 if self._collectives.broken else min(_CLOSE_S, self._timeout_s))

        def leave() -> None:
            nonlocal all_left
            all_left = self._collectives.leave(Deadline(min(_LEAVE_S, 0.5 * deadline.remaining_s())))

        if not self._collectives.broken:
            self._engine.push(leave, lane=_LANE, name="leave")
        try:
            self._engine.close(deadline.remaining_s())
        except KVError:
            self._stuck = True
        self._stuck |= not self._transfers.drain(deadline)
        self._collectives.close()
        if all_left and not self.broken:
            for comm in self._comms:
                comm.free()

    close = shutdown

    def abort(self, failure: BaseException | None = None) -> None:
        """Release everything at once: what is under way fails."""
        self._closed = True
        try:
            self._engine.close(0.0)
        except KVError:
            self._stuck = True

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.size():
            raise ConfigError(f"rank {root} as root: ranks of the group go from 0 to {self.size() - 1}")

    def _check_row(self, name: str, row: Sequence[torch.Tensor], own: int | None, *, equal: bool = False) -> None:
        """One tensor for each rank, the own one of ``own`` elements, or all of them."""
        if len(row) != self.size():
            raise ShapeMismatchError(f"{len(row)} {name} tensors for {self.size()} ranks: expected one for each")
        for rank, tensor in enumerate(row):
            if own is not None and (equal or rank == self.rank()):
                check_size(f"{name} tensor {rank}", tensor.numel(), own)


def entries(tensors: Sequence[torch.Tensor]) -> list[Entry]:
    """What has to be equal on all ranks. As of torch's other backends, lengths count, not shapes."""
    return [Entry(i, (tensor.numel(),), str(tensor.dtype).removeprefix("torch.")) for i, tensor in enumerate(tensors)]


def single(tensors: Tensors | torch.Tensor) -> torch.Tensor:
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ShapeMismatchError(f"{len(tensors)} tensors: this call takes one")
    return tensors[0]


def root_of(options: Any) -> int:
    """Of torch's options, or the root itself, which its process groups take in their place; of none, rank 0."""
    return 0 if options is None else int(getattr(options, "rootRank", options))


def as_row(rows: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors of one device's row."""
    if len(rows) == 1 and not isinstance(rows[0], torch.Tensor):
        return list(rows[0])
    return list(rows)


def check_size(name: str, found: int, expected: int) -> None:
    if found != expected:
        raise ShapeMismatchError(f"the {name} has {found} elements, expected {expected}")


def check_dtypes(tensors: Sequence[torch.Tensor]) -> None:
    found = {tensor.dtype for tensor in tensors}
    if len(found) > 1:
        raise DTypeMismatchError(f"inputs and outputs have different dtypes: {', '.join(sorted(map(str, found)))}")
