"""Parameters, optimizer state and small objects on all ranks. Nothing is pickled: what travels is data, never code."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from kvmpi.compiling import not_compiled
from kvmpi.errors import ConfigError, ProtocolError, UnsupportedError
from kvmpi.horovod import basics
from kvmpi.horovod.operations import check_root
from kvmpi.horovod.unsupported import check_process_set
from kvmpi.torch.group.tensors import octets

_BASICS: Any = ((float, float.__float__), (str, str.__str__), (bytes, bytes))
_SEQUENCES: Any = ((list, "list"), (tuple, "tuple"), (set, "set"), (frozenset, "frozenset"))
#: Nesting of what is sent.
_MAX_DEPTH = 64


@not_compiled
def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Parameters and buffers take, in place, what they hold on ``root_rank``.

    Args:
        params: ``model.state_dict()``, or ``model.named_parameters()``, alike on all ranks.
    """
    check_root(root_rank)
    if isinstance(params, Mapping):
        named: Iterable[Any] = sorted(params.items())
    elif isinstance(params, Iterable):
        named = [item if isinstance(item, tuple) else (str(i), item) for i, item in enumerate(params)]
    else:
        raise ConfigError(f"broadcast_parameters of {type(params).__name__}: pass a state_dict or named_parameters()")
    tensors = [tensor for _, tensor in named if tensor is not None]
    strange = next((tensor for tensor in tensors if not isinstance(tensor, torch.Tensor)), None)
    if strange is not None:
        raise ConfigError(f"broadcast_parameters: {type(strange).__name__} is no tensor; use broadcast_object for it")
    if tensors:
        basics.group().broadcast(tensors, root_rank).wait()


@not_compiled
def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """State and options of ``optimizer`` become, on all ranks, those of ``root_rank``; other ranks need none before.

    Args:
        model: Horovod looks for sparse layers there; here it makes no difference.
    Raises:
        UnsupportedError: an option that is neither a number, a text nor a tensor.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError("broadcast_optimizer_state: the state of LBFGS cannot be sent; use another optimizer")
    check_root(root_rank)
    text = _broadcast(lambda: encode(optimizer.state_dict()), root_rank, "optimizer state")
    if basics.rank() != root_rank:
        optimizer.load_state_dict(decode(text))


@not_compiled
def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = None) -> Any:
    """The object that ``root_rank`` has.

    Args:
        obj: None, numbers, texts, bytes, tensors, NumPy arrays, and lists, tuples, sets and dicts of them.
    Raises:
        UnsupportedError: anything else; it would have to be pickled. Raised on every rank.
    """
    check_process_set(process_set)
    check_root(root_rank)
    text = _broadcast(lambda: encode(obj), root_rank, name)
    return obj if basics.rank() == root_rank else decode(text)


def _broadcast(text: Callable[[], bytes], root_rank: int, name: str | None) -> bytes:
    return basics.group().broadcast_text(text, root_rank, f"broadcast_object of {name!r}").result()[0]


@not_compiled
def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The objects of all ranks, of the kinds that ``broadcast_object`` takes; raises on every rank as that does."""
    work = basics.group().all_gather_texts(lambda: encode(obj), f"allgather_object of {name!r}")
    return [decode(text) for text in work.result()]


def encode(obj: Any) -> bytes:
    """An object as bytes. Raises UnsupportedError if it is, or holds, more than data."""
    return msgspec.msgpack.encode(_plain(obj, 0))


def decode(text: bytes) -> Any:
    """What ``encode`` was given.

    Raises:
        ProtocolError: the bytes are none of ``encode``.
    """
    try:
        return _object(msgspec.msgpack.decode(text), 0)
    except (msgspec.DecodeError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ProtocolError(f"an object from another rank cannot be read: {error}") from None


def _plain(obj: Any, depth: int) -> Any:
    """With everything that msgpack does not tell apart as a list that begins with its kind."""
    if depth > _MAX_DEPTH:
        raise UnsupportedError(f"an object with more than {_MAX_DEPTH} levels is not sent; does it hold itself?")
    if obj is None or isinstance(obj, bool):
        return obj
    if isinstance(obj, np.generic) and not isinstance(obj, str | bytes):  # some are floats, too
        return _plain(np.asarray(obj), depth)
    if isinstance(obj, str) and not _is_unicode(obj):
        return ["text", str.encode(obj, "utf-8", "surrogatepass")]
    for basic, narrow in _BASICS:  # msgpack knows these, but no subclasses of them
        if isinstance(obj, basic):
            return narrow(obj)
    if isinstance(obj, int):
        number = int.__int__(obj)
        return number if -(1 << 63) <= number < 1 << 63 else ["int", str(number)]
    if isinstance(obj, torch.Tensor):
        return ["tensor", str(obj.dtype).removeprefix("torch."), list(obj.shape), octets(obj).buffer.tobytes()]
    if isinstance(obj, np.ndarray):
        if obj.dtype.hasobject:
            raise UnsupportedError(f"an array of {obj.dtype} is not sent: its elements would have to be pickled")
        file = io.BytesIO()
        np.lib.format.write_array(file, obj, allow_pickle=False)
        return ["array", file.getvalue()]
    for kind, name in ((OrderedDict, "ordered"), (dict, "dict")):
        if isinstance(obj, kind):
            return [name, *([_plain(key, depth + 1), _plain(value, depth + 1)] for key, value in obj.items())]
    for sequence, name in _SEQUENCES:
        if isinstance(obj, sequence):
            return [name, *(_plain(item, depth + 1) for item in obj)]
    raise UnsupportedError(
        f"{type(obj).__module__}.{type(obj).__qualname__} is not sent between ranks: it would have to be pickled; send "
        "numbers, texts, bytes, tensors, arrays, and lists, tuples, sets and dicts of them"
    )


def _is_unicode(text: str) -> bool:
    """Whether it has no halves of characters, as the names of files have that are not UTF-8; msgpack knows none."""
    try:
        str.encode(text, "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _object(plain: Any, depth: int) -> Any:
    if not isinstance(plain, list):
        return plain
    if depth > _MAX_DEPTH:
        raise ValueError("too deep")
    kind, *rest = plain
    if kind == "int":
        return int(rest[0])
    if kind == "text":
        return rest[0].decode("utf-8", "surrogatepass")
    if kind == "array":
        found = np.lib.format.read_array(io.BytesIO(rest[0]), allow_pickle=False)
        return found if found.shape else found[()]
    if kind == "tensor":
        name, shape, data = rest
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} is no dtype")
        if not data:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)
    if kind in ("dict", "ordered"):
        pairs = [(_object(key, depth + 1), _object(value, depth + 1)) for key, value in rest]
        return dict(pairs) if kind == "dict" else OrderedDict(pairs)
    make = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind]
    return make(_object(item, depth + 1) for item in rest)
