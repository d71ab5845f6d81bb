"""Baidu's ring against a sum in float64."""

from __future__ import annotations

import numpy as np
import pytest

from kvmpi.benchmarks.baidu_ring import BaiduRing
from kvmpi.deadline import Deadline

SEED = 23


@pytest.mark.parametrize("count", [0, 1, 2, 5, 1000, 4097])
@pytest.mark.parametrize("num_vectors", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_vector_gets_the_sum_of_all(run_ranks, size, num_vectors, count):
    vectors = np.random.default_rng([SEED, size, num_vectors, count]).standard_normal((size, num_vectors, count), "f4")

    def rank_main(comm):
        ring = BaiduRing(comm, num_vectors, count, "float32")
        mine = vectors[comm.rank].copy()
        for _ in range(2):  # its memory serves several calls
            ring.allreduce(list(mine), Deadline(20.0))
        np.testing.assert_array_equal(mine, vectors[comm.rank], err_msg="an input was changed")
        return ring.outs

    outs = [out for of_rank in run_ranks(size, rank_main) for out in of_rank]
    terms = vectors.reshape(size * num_vectors, count).astype("f8")
    bound = len(terms) * np.finfo("f4").eps * np.abs(terms).sum(axis=0)
    assert len(outs) == size * num_vectors
    for member, out in enumerate(outs):
        assert (np.abs(out - terms.sum(axis=0)) <= bound).all(), f"member {member} (seed {SEED})"
        np.testing.assert_array_equal(out, outs[0], err_msg=f"member {member} disagrees with member 0")


def test_half_types_are_added_as_numbers(run_ranks):
    bits = np.full(7, 0x3F80, "u2")  # 1.0 as bfloat16

    def rank_main(comm):
        ring = BaiduRing(comm, 1, bits.size, "bfloat16")
        ring.allreduce([bits], Deadline(20.0))
        return ring.outs[0]

    for out in run_ranks(3, rank_main):
        np.testing.assert_array_equal(out, np.full(7, 0x4040, "u2"))  # 3.0
