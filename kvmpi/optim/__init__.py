"""Update rules: what a server, or a local store, does with a pushed vector.

A rule is an immutable set of plain numbers. It travels as its registered name and ``hyperparams()``; the vectors that
belong to a key (stored value, state, master copy) are the caller's.
"""

from kvmpi.optim.apply import check_by_rows, fitting_master, make_master, never_raises, update, update_rows
from kvmpi.optim.convert import from_any
from kvmpi.optim.registry import create, known, register
from kvmpi.optim.rule import Block, Rule
from kvmpi.optim.rules import SGD, Adagrad, Adam, AdamW, Elastic, Outer, Test

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Block",
    "Elastic",
    "Outer",
    "Rule",
    "Test",
    "check_by_rows",
    "create",
    "fitting_master",
    "from_any",
    "known",
    "make_master",
    "never_raises",
    "register",
    "update",
    "update_rows",
]
