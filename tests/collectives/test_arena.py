"""The arena: blocks that never overlap, live as long as what refers to them, and go back to the system."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmpi.collectives import arena as module
from kvmpi.collectives.arena import TOKEN_BYTES, Arena, own, usual_bytes

U1, F4 = np.dtype("u1"), np.dtype("f4")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300 << 10), st.integers(0, 3)), max_size=40), st.integers(0, 2**32))
def test_blocks_never_overlap_and_freed_ones_are_used_again(requests: list[tuple[int, int]], seed: int) -> None:
    """Those of whole pages, which go back to the system, and smaller ones."""
    gc.collect()  # what others have left was taken by the usual sizes, and is to be freed by them
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_GIVE_BACK_BYTES", 100 << 10)
        use_and_free(requests, seed)


def use_and_free(requests: list[tuple[int, int]], seed: int) -> None:
    arena = Arena(4 << 20)
    rng = np.random.default_rng(seed)
    kept: dict[int, np.ndarray] = {}
    for i, (nbytes, num_freed) in enumerate(requests):
        block = arena.empty(nbytes, U1)
        if block is not None:
            assert block.size == nbytes
            assert arena.offset_of(block) % 64 == 0
            block[:] = i % 251
            kept[i] = block
        for _ in range(min(num_freed, len(kept))):
            del kept[int(rng.choice(list(kept)))]
        del block
        changed = [j for j in kept if (kept[j] != j % 251).any()]
        assert not changed, f"blocks {changed} were overwritten by block {i}"
    kept.clear()
    gc.collect()
    assert arena._free == [(64, 4 << 20)], "not everything came back, or it lies in pieces"
    assert (arena.bytes[:TOKEN_BYTES].view("u8") == arena.token).all()


def test_a_block_lives_as_long_as_any_view_of_it() -> None:
    arena = Arena(8 << 20)
    block = arena.empty(1000, F4)
    views = [block[10:20].reshape(2, 5), torch.from_numpy(block)[3:]]
    block[:] = 7
    del block
    gc.collect()
    for _ in range(5):
        arena.empty(1 << 20, F4)[:] = 1
    assert (views[0] == 7).all()
    del views[0]
    assert bool((views[0] == 7).all())
    assert arena._free != [(64, 8 << 20)]
    views.clear()
    gc.collect()
    assert arena._free == [(64, 8 << 20)]


def test_memory_may_be_freed_in_the_middle_of_an_allocation() -> None:
    """The garbage collector does so: a cycle that holds a block is found whenever Python allocates."""
    arena = Arena(8 << 20)
    first = arena.empty(64, U1)
    with arena._lock:  # as in _take
        del first
        gc.collect()
        assert arena._returned
    assert arena.empty(64, U1) is not None
    gc.collect()
    assert arena._free == [(64, 8 << 20)]


def test_freed_memory_goes_back_to_the_system() -> None:
    arena = Arena(256 << 20)

    def used_bytes() -> int:
        return os.fstat(arena.fd).st_blocks * 512

    block = arena.empty(16 << 20, F4)
    block[:] = 1
    assert used_bytes() >= 64 << 20
    del block
    gc.collect()
    assert used_bytes() < 1 << 20


def test_no_room_and_memory_of_others() -> None:
    arena = Arena(1 << 20)
    assert arena.empty(1 << 20, U1) is None
    assert arena.offset_of(np.zeros(3)) is None
    block = arena.empty(0, F4)
    assert block.shape == (0,)
    assert arena.offset_of(arena.empty(5, F4)[2:]) is not None


@pytest.mark.filterwarnings("ignore:.*multi-threaded")
def test_a_forked_child_that_drops_an_array_leaves_the_parents_memory_alone() -> None:
    """As a DataLoader's worker does."""
    arena = Arena(16 << 20)
    block = arena.empty(1 << 20, F4)
    block[:] = 3
    if (pid := os.fork()) == 0:
        del block
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)
    assert (block == 3).all()


@pytest.mark.filterwarnings("ignore:.*multi-threaded")
def test_a_forked_child_has_an_arena_of_its_own() -> None:
    mine = own()
    assert own() is mine
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(write, b"own" if own() is not mine else b"the parent's")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 20) == b"own"
    os.close(read)
    os.close(write)


@pytest.mark.parametrize(("memory_tib", "cores"), [(0.02, 2), (0.5, 64), (1.5, 192), (6.0, 448), (24.0, 1920)])
def test_a_process_has_addresses_for_the_arenas_of_all_ranks(memory_tib: float, cores: int) -> None:
    memory_bytes = int(memory_tib * 2**40)
    found = usual_bytes(memory_bytes, cores)
    assert cores * found < 2**47 - 2**45, "a process on x86-64 has so many addresses, and needs some for itself"
    assert found == memory_bytes or cores * found > 2**45, "smaller than it must be"
    assert cores * found >= memory_bytes, "ranks that fill the memory evenly have room for that"
