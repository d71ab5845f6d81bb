"""Updates of values of any dtype, whole or by rows: half types are computed in float32 and rounded once per update."""

from __future__ import annotations

import numpy as np

from kvmpi.errors import DTypeMismatchError, ShapeMismatchError, UnsupportedError
from kvmpi.kernels import host
from kvmpi.kernels.rows import Rows, put, take
from kvmpi.optim.rule import Array, Rule


def make_master(stored: Array, dtype: str) -> Array:
    """A float32 copy of a vector of a half type, for ``update``."""
    master = np.empty(stored.size, np.float32)
    host.widen(stored, dtype, master)
    return master


def fitting_master(master: Array, stored: Array, dtype: str) -> Array:
    """``make_master``, with what ``master`` knows more exactly where the two agree, as far as ``stored`` can tell."""
    rounded, found = np.empty_like(stored), make_master(stored, dtype)
    host.narrow(master, rounded, dtype)
    bits = host.STORAGE["bfloat16"]  # so that not-a-numbers are equal too
    return np.where(rounded.view(bits) == stored.view(bits), master, found)


def update(
    rule: Rule,
    stored: Array,
    dtype: str,
    pushed: Array,
    state: dict[str, Array],
    step: int,
    count: int = 1,
    master: Array | None = None,
    out: Array | None = None,
) -> None:
    """Apply ``rule`` to ``stored`` in place, or put the new value into ``out`` and leave ``stored`` as it is.

    A rule that raises leaves no trace in ``stored``, ``state`` and ``master``.

    Cost: a few blocks of scratch; with a half type, a rule that needs the whole vector costs a float32 copy of it; one
    that is not of kvmpi a copy of all that it can change.

    Args:
        stored: a host vector of ``dtype``.
        pushed: the sum over ``count`` clients, in the accumulation dtype (float32 for half types); not changed.
        state: the rule's arrays for this vector, in the accumulation dtype; filled by the first update.
        step: 1 for the first update of this vector.
        master: for half types, the float32 copy that ``make_master`` made: it takes the update, is always changed in
            place, and is rounded into the result. Without it each update rounds what is stored.
        out: a host vector of ``dtype``. May be the memory of ``pushed`` where both have one dtype.
    """
    if never_raises(rule):
        _update(rule, stored, dtype, pushed, state, step, count, master, out)
        return
    changed = {name: array for name, array in state.items() if name in rule.slots()}
    kept = [(vector, vector.copy()) for vector in (stored, master, *changed.values()) if vector is not None]
    try:
        _update(rule, stored, dtype, pushed, state, step, count, master, out)
    except BaseException:
        for vector, before in kept:
            np.copyto(vector, before)
        for name in [name for name in state if name not in changed and name in rule.slots()]:
            del state[name]
        raise


def never_raises(rule: Rule) -> bool:
    """Once its arguments have been looked at: whether there is no code in it but ours."""
    return type(rule).__module__.startswith("kvmpi.optim.")


def _update(
    rule: Rule, stored: Array, dtype: str, pushed: Array, state: dict[str, Array], step: int, count: int,
    master: Array | None, out: Array | None,
) -> None:  # fmt: skip
    if dtype not in host.HALF:
        if host.STORAGE.get(dtype) != stored.dtype:
            raise DTypeMismatchError(f"update by {rule.name}: a vector of {dtype} cannot be kept as {stored.dtype}")
        if out is None:
            rule.apply(stored, pushed, state, step, count)
        else:
            rule.apply_into(out, stored, pushed, state, step, count)
        return
    target = stored if out is None else out
    for name, vector in (("pushed", pushed), ("master", master)):
        if vector is not None and vector.dtype != np.float32:
            raise DTypeMismatchError(f"update by {rule.name}: {name} is {vector.dtype}, expected float32 for {dtype}")
    if not stored.shape == pushed.shape == target.shape == (stored if master is None else master).shape:
        raise ShapeMismatchError(
            f"update by {rule.name}: stored has shape {stored.shape}, pushed {pushed.shape}, out {target.shape}, "
            f"master {None if master is None else master.shape}; expected equal lengths"
        )
    if not rule.in_blocks:
        wide = make_master(stored, dtype) if master is None else master
        rule.apply(wide, pushed, state, step, count)
        host.narrow(wide, target, dtype)
        return
    rule.ensure_state(state, stored.size, np.dtype(np.float32))
    names = list(rule.slots())
    length = min(stored.size, max(1, host.BLOCK_BYTES // 4))
    scratch = np.empty(length if master is None else 0, np.float32)
    for start in range(0, stored.size, length or 1):
        part = slice(start, min(start + length, stored.size))
        if master is None:
            wide = scratch[: part.stop - start]
            host.widen(stored[part], dtype, wide)
        else:
            wide = master[part]
        rule.apply(wide, pushed[part], {name: state[name][part] for name in names}, step, count)
        host.narrow(wide, target[part], dtype)


def check_by_rows(rule: Rule | None) -> None:
    """Raise an ``UnsupportedError`` if ``rule`` cannot update some rows of a value alone."""
    if rule is not None and rule.averages:
        raise UnsupportedError(f"{rule!r} takes weights, or differences of weights, as a whole: push a dense array")
    if rule is not None and not rule.in_blocks:
        raise UnsupportedError(
            f"the rule {rule.name!r} must see a whole vector (it overrides apply): push dense arrays"
        )
    if rule is not None and rule.replies_old:
        raise UnsupportedError(f"the rule {rule.name!r} answers with the value that a push met: push dense arrays")


def update_rows(
    rule: Rule,
    stored: Array,
    dtype: str,
    pushed: Rows,
    state: dict[str, Array],
    step: int,
    count: int = 1,
    master: Array | None = None,
) -> None:
    """Apply ``rule`` to some rows of ``stored``, and of what it remembers of them; all other rows stay as they are.

    The rows get the same bits as from an ``update`` with zeros elsewhere. That would also move rows of which a momentum
    is left, or which decay: those are left to the next push that has them, as by torch.optim.SparseAdam and by MXNet
    with ``lazy_update``. ``step`` counts updates of the vector, whichever rows they had, as there.

    Cost: copies of the rows and their state, in blocks; for a rule that is not of kvmpi, of all of them at once. The
    first update allocates state for all rows.

    Args:
        pushed: rows of the matrix that ``stored`` is, in the accumulation dtype.
        others: see ``update``.
    Raises:
        UnsupportedError: a rule that cannot be applied by rows.
    """
    check_by_rows(rule)
    width = pushed.width
    rule.ensure_state(state, stored.size, host.STORAGE[host.ACCUMULATE[dtype]])
    if not stored.size:
        return
    tables = {name: state[name] for name in rule.slots()}
    # What raises does so before anything is written back.
    length = max(1, host.BLOCK_BYTES // (4 * width) if never_raises(rule) else pushed.count)
    for start in range(0, pushed.count, length):
        ids = pushed.ids[start : start + length]
        some = take(stored, width, ids)
        states = {name: take(table, width, ids) for name, table in tables.items()}
        masters = None if master is None else take(master, width, ids)
        update(
            rule,
            some.reshape(-1),
            dtype,
            pushed.values[start : start + length].reshape(-1),
            {name: rows.reshape(-1) for name, rows in states.items()},
            step,
            count,
            None if masters is None else masters.reshape(-1),
        )
        put(stored, ids, some)
        for name, rows in states.items():
            put(tables[name], ids, rows)
        if master is not None and masters is not None:
            put(master, ids, masters)
