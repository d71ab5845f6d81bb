"""A shard as entries of a log: one by one as they were logged, or all that make it from nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy.typing as npt

from kvmpi.arrays import DTYPES
from kvmpi.errors import KVError, ProtocolError
from kvmpi.kernels import host
from kvmpi.kernels.rows import Rows
from kvmpi.ps import codec, requests
from kvmpi.ps.membership import Membership
from kvmpi.ps.order import Span
from kvmpi.ps.rounds import is_of_this_server
from kvmpi.ps.row_chunks import WIRE_ID
from kvmpi.ps.rulebook import in_force, rule_change
from kvmpi.ps.shard import Shard
from kvmpi.ps.slot import Slot
from kvmpi.ps.steps import Mark
from kvmpi.wire import MAX_HEADER_BYTES, as_array, entries
from kvmpi.wire import messages as m

Buffer = npt.NDArray[Any]
Key = int | str
#: Of keys in one entry, which is to fit into a header.
_KEYS_BYTES = MAX_HEADER_BYTES // 4
Record = tuple[entries.Entry, tuple[Buffer, ...]]


def apply(shard: Shard, entry: entries.Entry, payloads: list[memoryview], *, keep: bool) -> None:
    """Make the change that ``entry`` says. ``keep``: the payloads' memory must stay as it is.

    Raises:
        Exception: it was not made, or half of it, and nobody knows whether another server has made it.
    """
    match entry:
        case entries.Joined():
            shard.take_in(entry.client, entry.incarnation)
            if entry.entered_after >= 0:
                shard.clients.enter(entry.client, entry.entered_after)
        case entries.Gone():
            shard.drop(entry.client, entry.text, entry.incarnation)
        case entries.Returned():
            shard.bring_back(entry.client)
        case entries.Entered():
            shard.enter(entry.client, entry.step)
        case entries.RuleCall() | entries.HyperCall():
            shard.rulebook.apply(entry, shard.slots)
        case entries.Finished():
            shard.finish(entry.client)
        case entries.Created():
            _create(shard, entry, as_array(payloads[0], DTYPES[entry.dtype]), keep=keep)
        case entries.Round():
            slot = _slot(shard, entry)
            clients = list(range(shard.num_clients)) if entry.clients is None else entry.clients
            _set_open(shard, slot, payloads, shard.num_clients, clients, entry)
            shard.rounds.end_round(slot, keep=keep)
            if slot.failed is not None and is_of_this_server(slot.failed):
                raise slot.failed
        case entries.Skipped():
            slot = _slot(shard, entry)
            slot.note_step(slot.ANYBODY, entry.at, entry.done)
            slot.begin_round()
            slot.skip_round(None)
        case entries.Partial():
            # What is added to it here later would change what is still to be sent on.
            _set_open(shard, _slot(shard, entry), payloads, entry.cursor, entry.clients, entry, copies=keep)
        case entries.Single():
            slot, encoding = _slot(shard, entry), codec.get(entry.codec)
            wire = requests.pushed(slot, entry.rows, payloads, encoding)
            try:
                if shard.discipline.gathers:
                    slot.gather(wire, encoding.wire_dtype(slot.dtype), entry.seen, keep=keep)
                    answer = slot.value
                else:
                    answer = slot.apply_alone(wire, encoding.wire_dtype(slot.dtype), entry.seen)
            except Exception as error:
                if is_of_this_server(error):
                    raise
                return  # as at the head, whose client was told
            slot.note_single(entry.client, entry, answer)
            if shard.discipline.gathers:
                shard.singles.settle(slot)
        case entries.Answered():
            _slot(shard, entry).met_by.pop(entry.client, None)
        case entries.Restored():
            slot = _slot(shard, entry)
            slot.restore(entry.updates, _named(slot, entry.names, payloads))
            slot.restored = (entry.client, shard.clients.incarnations[entry.client], entry.request)
        case entries.StoreState():
            shard.rulebook.restore(entry)
        case entries.Saved():
            shard.saved |= frozenset(entry.keys)
        case entries.SlotState():
            _restore_slot(shard, entry, payloads, keep=keep)
        case _:
            raise ProtocolError(f"a {type(entry).__name__} is no change of a shard")


def dump(shard: Shard) -> list[Record]:
    """Entries that make ``shard`` as it is now, but for what its open rounds hold. Everything is copied."""
    records: list[Record] = [(entries.Opened(shard.mode, shard.num_clients), ())]
    clients = shard.clients
    records += [
        (entries.Joined(client, number, _entered_after(clients, client, number)), ())
        for client, number in clients.incarnations.items()
    ]
    records += [(entries.Gone(*loss), ()) for loss in clients.losses()]
    records += [(entries.Returned(client), ()) for client in sorted(clients.entering)]
    records += [(entries.Finished(client), ()) for client in sorted(clients.finished)]
    records.append((shard.rulebook.dump(), ()))
    records += [(entries.Saved(keys), ()) for keys in _in_entries(shard.saved)]
    for slot in shard.slots.values():
        names, arrays = slot.dump()
        if slot.met is not None:
            names, arrays = [*names, slot.OLD_VALUE], [*arrays, slot.met.copy()]
        if slot.touched is not None:
            names, arrays = [*names, slot.TOUCHED], [*arrays, slot.touched.copy()]
        names_gathered, arrays_gathered = slot.dump_gathered()
        names, arrays = [*names, *names_gathered], [*arrays, *arrays_gathered]
        layout = shard.layouts[slot.key]
        steps = {client: slot.lasting_steps(client) for client in sorted(slot.steps.keys() - slot.entering.keys())}
        records.append((
            entries.SlotState(
                slot.key, slot.chunk, layout.num_chunks, slot.count, layout.shape, slot.dtype, slot.rounds,
                slot.updates, slot.generation, steps, slot.restored, [in_force(change) for change in slot.rules],
                None if slot.failed is None else str(slot.failed), names,
                {client: (mark.done, list(mark.steps)) for client, mark in slot.marks.items()}, slot.latest,
                dict(slot.entering), {client: version for client, (version, _) in slot.met_by.items()},
                dict(slot.bases), slot.gathered, slot.pushes,
            ),
            (*arrays, *(met for _, met in slot.met_by.values())),
        ))  # fmt: skip
    return records


def _in_entries(keys: Iterable[Key]) -> Iterator[list[Key]]:
    """``keys``, as many together as an entry has room for."""
    some: list[Key] = []
    left = _KEYS_BYTES
    for key in sorted(keys, key=str):
        nbytes = len(msgspec.msgpack.encode(key))
        if some and nbytes > left:
            yield some
            some, left = [], _KEYS_BYTES
        some.append(key)
        left -= nbytes
    if some:
        yield some


def _entered_after(clients: Membership, client: int, incarnation: int) -> int:
    return clients.entered_after.get(client, -1) if clients.entered.get(client) == incarnation else -1


def _slot(shard: Shard, entry: Any) -> Slot:
    return shard.slots[entry.key, entry.chunk]


def _create(shard: Shard, entry: entries.Created | entries.SlotState, value: Buffer, *, keep: bool) -> Slot:
    layout = m.Init(-1, entry.key, entry.chunk, entry.num_chunks, entry.count, entry.shape, entry.dtype)
    return shard.create(layout, value.copy() if keep else value)


def _set_open(
    shard: Shard, slot: Slot, payloads: list[memoryview], cursor: int, clients: list[int],
    entry: entries.Round | entries.Partial, *, copies: bool = False,
) -> None:  # fmt: skip
    """Make the open round hold the sum of the pushes of ``clients``, who are before the cursor, in its own memory if it
    ``copies`` that."""
    dtype = host.ACCUMULATE[slot.dtype]
    slot.accumulator, slot.cursor, slot.contributors = None, cursor, list(clients)
    total = as_array(payloads[-1], DTYPES[dtype])
    rows = Rows(as_array(payloads[0], WIRE_ID), total.reshape(entry.rows, slot.width)) if entry.rows >= 0 else None
    slot.add((total.copy() if copies else total) if rows is None else rows, dtype)
    slot.open_steps.clear()
    slot.open_spans[:] = [Span(entry.earliest, entry.latest)]
    for i, client in enumerate(clients):
        slot.steps[client] = max(slot.rounds + 1, slot.steps.get(client, 0))
        if entry.at:
            slot.note_step(client, entry.at[i if len(entry.at) > 1 else 0], entry.done)


def _named(slot: Slot, names: list[str], payloads: list[memoryview]) -> dict[str, Buffer]:
    others = {"value": DTYPES[slot.dtype], Slot.OLD_VALUE: DTYPES[slot.dtype]}
    others |= {Slot.TOUCHED: WIRE_ID, Slot.GATHERED_ROWS: WIRE_ID}
    accumulated = DTYPES[host.ACCUMULATE[slot.dtype]]
    return {
        name: as_array(payload, others.get(name, accumulated))
        for name, payload in zip(names, payloads, strict=True)
    }  # fmt: skip


def _restore_slot(shard: Shard, entry: entries.SlotState, payloads: list[memoryview], *, keep: bool) -> None:
    slot = _create(shard, entry, as_array(payloads[0], DTYPES[entry.dtype]), keep=keep)
    arrays = _named(slot, entry.names, payloads[: len(entry.names)])
    for (client, version), payload in zip(entry.met.items(), payloads[len(entry.names) :], strict=True):
        slot.met_by[client] = version, as_array(payload, DTYPES[slot.dtype]).copy()
    met, touched = arrays.pop(Slot.OLD_VALUE, None), arrays.pop(Slot.TOUCHED, None)
    del arrays["value"]  # it is there
    slot.restore_gathered(entry.gathered, arrays)
    slot.restore(entry.updates, arrays)
    slot.met = None if met is None else met.copy()
    slot.touched = None if touched is None else touched.copy()
    slot.failed = None if entry.failed is None else KVError(entry.failed)
    slot.rounds, slot.generation, slot.restored = entry.rounds, entry.generation, entry.restored
    slot.steps, slot.entering, slot.bases = dict(entry.steps), dict(entry.entering), dict(entry.bases)
    slot.marks = {client: Mark(*mark) for client, mark in entry.marks.items()}
    slot.latest = entry.latest
    slot.pushes = entry.pushes
    slot.rules.clear()
    slot.rules.extend(rule_change(change) for change in entry.rules)
