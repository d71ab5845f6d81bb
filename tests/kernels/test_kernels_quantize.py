"""Codes of two bits and of one bit against MXNet's rules, followed element by element."""

from __future__ import annotations

import numpy as np
import pytest

from kvmpi.kernels import quantize

SMALL, LARGE = [0, 1, 3, 4, 5, 8, 33], [quantize.BLOCK - 1, quantize.BLOCK, 2 * quantize.BLOCK + 7]
THRESHOLDS = [(2, 0.5), (1, -0.25), (2, 0.1), (1, 0.5), (1, 0.0)]
#: Following element by element takes long: large ones with a threshold of each kind.
CASES = [(*rest, count) for count in SMALL for rest in THRESHOLDS]
CASES += [(*rest, count) for count in LARGE for rest in THRESHOLDS[:2]]
F4 = np.float32


def followed(values: np.ndarray, residual: np.ndarray, bits: int, threshold: float) -> tuple[bytes, list, list]:
    """MXNet's codes, what they stand for and what is left: element by element, in numbers of float32."""
    t, codes, stand_for, left = F4(threshold), [], [], []
    for value, before in zip(values, residual, strict=True):
        total = F4(before) + F4(value)
        if bits == 2:
            code, meant = (0b11, t) if total >= t else (0b10, -t) if total <= -t else (0b00, F4(0))
        else:
            code, meant = (1, F4(1)) if total > t else (0, F4(-1))
        codes.append(f"{code:0{bits}b}")
        stand_for.append(meant)
        left.append(total - meant)
    text = "".join(codes)
    text += "0" * (-len(text) % 8)
    return bytes(int(text[at : at + 8], 2) for at in range(0, len(text), 8)), stand_for, left


def encoded(values: np.ndarray, residual: np.ndarray, left: np.ndarray, bits: int, threshold: float) -> np.ndarray:
    return (quantize.two_bit if bits == 2 else quantize.one_bit)(values, residual, left, threshold)


def decoded(codes: np.ndarray, count: int, bits: int, threshold: float) -> np.ndarray:
    return quantize.two_bit_values(codes, count, threshold) if bits == 2 else quantize.one_bit_values(codes, count)


@pytest.mark.parametrize(("bits", "threshold", "count"), CASES)
def test_codes_are_those_of_mxnet_and_nothing_gets_lost(bits: int, threshold: float, count: int) -> None:
    rng = np.random.default_rng([17, count, bits])
    residual, left = np.zeros(count, "f4"), np.full(count, np.nan, "f4")
    for step in range(3):
        # Multiples of the threshold too: whether it is reached is a matter of one bit.
        values = rng.standard_normal(count).astype("f4")
        values[::3] = rng.integers(-3, 4, values[::3].size).astype("f4") * F4(threshold)
        codes, meant, kept = followed(values, residual, bits, threshold)
        before = values.copy(), residual.copy()
        got = encoded(values, residual, left, bits, threshold)
        assert got.tobytes() == codes, f"step {step}"
        np.testing.assert_array_equal(left, np.array(kept, "f4"), err_msg=f"step {step}")
        np.testing.assert_array_equal(decoded(got, count, bits, threshold), np.array(meant, "f4"))
        assert np.array_equal(values, before[0])
        assert np.array_equal(residual, before[1]), "only what is left may be written"
        residual, left = left, residual
        assert quantize.packed_bytes(count, bits) == got.size == -(-count // (8 // bits))


def test_what_is_left_may_take_the_place_of_what_was_there() -> None:
    values, residual = (np.random.default_rng(seed).standard_normal(1001).astype("f4") for seed in (1, 2))
    for bits in (1, 2):
        left, place = np.empty(1001, "f4"), residual.copy()
        assert (
            encoded(values, residual, left, bits, 0.5).tobytes() == encoded(values, place, place, bits, 0.5).tobytes()
        )
        np.testing.assert_array_equal(place, left)


def test_what_is_left_stays_finite() -> None:
    """Where it would be more than float32 holds: else it would stay so for ever, or become not-a-number."""
    large = np.array([3e38, -3e38, 3.4e38, 1.0], "f4")
    most, exact = float(np.finfo("f4").max), large.astype("f8")
    for bits in (1, 2):
        left, total = np.zeros(4, "f4"), np.zeros(4)
        for sign in (1, 1, 1, -1, -1):
            codes = encoded(sign * large, left, left, bits, 0.5)
            total = np.clip(total + sign * exact, -most, most)
            meant = decoded(codes, 4, bits, 0.5)
            assert (np.sign(meant[:3]) == np.where(total[:3] > 0, 1, -1)).all(), f"{bits} bits: {meant} for {total}"
            total -= meant
            np.testing.assert_allclose(left, total, rtol=1e-6, atol=1e-6)


def test_the_first_element_is_in_the_high_bits_and_a_lone_low_bit_says_nothing() -> None:
    zeros, left = np.zeros(5, "f4"), np.empty(5, "f4")
    assert quantize.two_bit(np.array([1, 0, -1, 0, 1], "f4"), zeros, left, 1.0).tolist() == [0b11_00_10_00, 0b11_000000]
    assert quantize.one_bit(np.array([1, -1, -1, 1, 1], "f4"), zeros, left, 0.0).tolist() == [0b10011_000]
    assert quantize.two_bit_values(np.array([0b01_11_01_10], "u1"), 4, 0.5).tolist() == [0, 0.5, 0, -0.5]


@pytest.mark.parametrize("count", [0, 1, quantize.BLOCK, quantize.BLOCK + 3])
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_values_that_would_stay_for_ever_are_found(count: int, odd: float) -> None:
    values = np.full(count, np.finfo("f4").max, "f4")
    assert quantize.all_finite(values)
    for at in {0, count // 2, count - 1} if count else ():
        values[at] = odd
        assert not quantize.all_finite(values), f"element {at}"
        values[at] = 0
