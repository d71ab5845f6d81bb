"""Buffers of a model that are no statistics of normalisation: those that change follow the first worker's."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator

import torch
from torch import nn

from kvmpi.engine import Work
from kvmpi.store import KVStore
from kvmpi.torch.norms import is_norm
from kvmpi.torch.parameters import next_key, summing

#: Which buffers change is looked at after each of the first passes, and then every so often.
_FIRST_LOOKS, _LOOK_EVERY = 4, 64
#: A buffer that has had more sizes than this, as what is kept from batch to batch, stays each worker's own.
_MOST_SIZES = 4


class OtherBuffers:
    """After each step all workers go on with the first's buffers that are no statistics of normalisation.

    Codebooks, vectors of a power iteration, ranges of quantisation, and whatever a model has that was compiled to
    TorchScript. Most buffers never change, as masks: those travel that have changed, on any worker, between one look
    and the next; by content, since many are written by way of ``.data``. They travel as the bytes that they are.

    Args:
        in_client: only the workers of one client exchange them.
    """

    def __init__(self, kv: KVStore, model: nn.Module, *, in_client: bool) -> None:
        self._kv = kv.client if in_client and kv.mpi_size > 1 else kv
        self._num_workers = kv.mpi_size if in_client else kv.num_workers
        self._places = list(_places(model)) if self._num_workers > 1 else []
        if not self._places:
            return
        self._contents = [_content(*place) for place in self._places]
        self._passes, self._is_here, self._is_first = 0, True, self._kv.rank == 0
        self._moving: list[int] = []
        #: By place and size: the key, and what travels.
        self._arrays: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
        self._sizes = [0] * len(self._places)  # of the first worker's, at the last look
        self._work: Work | None = None
        # How many workers have seen a change; the sizes that the first has; how many there are.
        self._told = torch.zeros(2 * len(self._places) + 1, dtype=torch.int64, device="cpu")
        self._key = next_key(self._kv)
        self._kv.init(self._key, self._told)

    def leave(self) -> None:
        """This worker has no more batches: what it has is not asked for."""
        self._is_here = False

    def start(self) -> None:
        """Send what changes. Collective."""
        if not self._places:
            return
        if self._work is not None:  # of a pass without a step
            self._work.wait()
        self._passes += 1
        if self._passes <= _FIRST_LOOKS or self._passes % _LOOK_EVERY == 0:
            self._look()
        if not self._moving:
            self._work = None
            return
        self._told.zero_()
        keys, arrays = [self._key], [self._told]
        for i in self._moving:
            key, array = self._arrays[i, self._sizes[i]]
            found = _buffer(*self._places[i]) if self._is_first and self._is_here else None
            if found is not None and found.nbytes == array.numel():
                array.copy_(_bytes(found))
                self._told[i] = 1
            else:
                array.zero_()
            keys.append(key)
            arrays.append(array)
        self._work = summing(self._kv)(keys, arrays, async_op=True)

    def _look(self) -> None:
        """Find what has changed since the last look, on any worker."""
        count = len(self._places)
        contents = [_content(*place) for place in self._places]
        changed = [now != before for now, before in zip(contents, self._contents, strict=True)]
        sizes = [found.nbytes if (found := _buffer(*place)) is not None else 0 for place in self._places]
        self._contents = contents
        mine = [*changed, *(sizes if self._is_first else [0] * count), 1] if self._is_here else [0] * (2 * count + 1)
        self._told.copy_(torch.tensor(mine, device="cpu"))
        summing(self._kv)(self._key, self._told)
        told = self._told.tolist()
        self._sizes = told[count:-1]
        self._moving = [i for i in range(count) if told[i] and self._sizes[i]]
        if told[-1] == self._num_workers:  # else one has joined, and nobody makes keys any more
            self._make_keys()
        self._moving = [i for i in self._moving if (i, self._sizes[i]) in self._arrays]

    def _make_keys(self) -> None:
        had = [i for i, _ in self._arrays]
        new = [
            (i, self._sizes[i])
            for i in self._moving
            if (i, self._sizes[i]) not in self._arrays and had.count(i) < _MOST_SIZES
        ]
        first = next_key(self._kv)
        for key, each in enumerate(new, first):
            self._arrays[each] = key, self._kv.empty((each[1],), torch.uint8).zero_()
        if new:
            self._kv.init([self._arrays[each][0] for each in new], [self._arrays[each][1] for each in new])

    def take(self) -> None:
        """What has come back becomes this worker's: not before the step, since graphs may need what was."""
        if not self._places or self._work is None:
            return
        self._work.wait()
        self._work = None
        for i in [] if self._is_first else self._moving:
            found, array = _buffer(*self._places[i]), self._arrays[i, self._sizes[i]][1]
            if found is not None and self._told[i] and found.nbytes == array.numel():
                found.copy_(array.view(found.dtype).view(found.shape))


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Where the model has buffers that are no statistics of normalisation, each once."""
    known = set[int]()
    for module in model.modules():
        if not is_norm(module):
            for name, tensor in module.named_buffers(recurse=False):
                if id(tensor) not in known and _buffer(module, name) is not None:
                    known.add(id(tensor))
                    yield module, name


def _buffer(module: nn.Module, name: str) -> torch.Tensor | None:
    """A buffer of whose memory a copy can be made, and which can be written to."""
    found = getattr(module, name, None)
    if type(found) is not torch.Tensor or found.layout is not torch.strided or found.is_quantized:
        return None
    if not found.numel() or found.is_meta or found.is_inference():
        return None
    return found.detach() if all(s or n < 2 for n, s in zip(found.shape, found.stride(), strict=True)) else None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.resolve_conj().resolve_neg().contiguous()
    return whole.reshape(-1).view(torch.uint8).cpu()


def _content(module: nn.Module, name: str) -> int:
    """A number that is another for other content; 0 for none."""
    found = _buffer(module, name)
    if found is None:
        return 0
    content = _bytes(found)  # without NumPy, by which memory could not be resized any more
    return zlib.crc32((ctypes.c_char * content.numel()).from_address(content.data_ptr()))
