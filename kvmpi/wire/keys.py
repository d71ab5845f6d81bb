"""The CURVE keys of a job and the file that hands them to its processes.

A job has two key pairs. Listeners (scheduler, servers) hold the *listener* pair, by which those who connect know that
they talk to their own job. Everyone who connects holds the *member* pair, and a listener lets in no other public key.
Members trust each other: they run as one user, and each can read the one file with all four keys. A pair for every
process would keep out nobody more, and would have to be made before it is known how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import zmq

from kvmpi.errors import ConfigError
from kvmpi.wire.private import create_file, read_file

_MAX_FILE_BYTES = 4096
_VERSION = 1


@dataclass(frozen=True)
class KeyPair:
    """Two Z85 texts of 40 characters, as libzmq takes them."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class JobKeys:
    """What every process of one job knows, and nobody else."""

    listener: KeyPair
    member: KeyPair


class _Pair(msgspec.Struct, forbid_unknown_fields=True):
    public: str
    secret: str


class _File(msgspec.Struct, forbid_unknown_fields=True):
    kvmpi_keys: int
    listener: _Pair
    member: _Pair


def new_keys() -> JobKeys:
    """Fresh keys, from the random numbers of the operating system."""
    return JobKeys(KeyPair(*zmq.curve_keypair()), KeyPair(*zmq.curve_keypair()))


def create_keys(path: str) -> None:
    """Write new keys to the file ``path``, mode 0600. A file that is there already is kept, if its keys can be used.

    Raises:
        ConfigError: the file cannot be written, or what is there is not a private file with keys.
    """
    keys = new_keys()
    pairs = (_Pair(pair.public.decode(), pair.secret.decode()) for pair in (keys.listener, keys.member))
    if not create_file(path, msgspec.json.encode(_File(_VERSION, *pairs)) + b"\n"):
        read_keys(path)


def read_keys(path: str) -> JobKeys:
    """The keys in the file ``path``.

    Raises:
        ConfigError: the file is missing, others may use it, or it does not hold two pairs of keys.
    """
    content = read_file(path, _MAX_FILE_BYTES)
    try:
        file = msgspec.json.decode(content, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a file of keys: {error}") from None
    if file.kvmpi_keys != _VERSION:
        raise ConfigError(f"{path} holds keys of version {file.kvmpi_keys}, this process knows version {_VERSION}")
    return JobKeys(_pair(path, "listener", file.listener), _pair(path, "member", file.member))


def _pair(path: str, name: str, pair: _Pair) -> KeyPair:
    public, secret = pair.public.encode(errors="replace"), pair.secret.encode(errors="replace")
    try:
        fits = zmq.curve_public(secret) == public
    except (zmq.ZMQError, ValueError):
        fits = False
    if not fits:
        raise ConfigError(f"{path}: its {name} keys are not a pair; the file is damaged")
    return KeyPair(public, secret)
