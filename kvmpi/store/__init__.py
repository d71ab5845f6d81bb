"""The store types: how engine, collectives and parameter servers combine behind one API."""

from kvmpi.store.base import KVStore
from kvmpi.store.factory import create, register_store

__all__ = ["KVStore", "create", "register_store"]
