"""The CUDA source: what nvcc makes of it, its conversions and its indices."""

from __future__ import annotations

import re
import subprocess

import numpy as np
import pytest
from kernel_helpers import DTYPES, EXPONENT, NVCC, SOURCE, random_vector, unsigned

from kvmpi.kernels import host


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_compiles_for_devices(tmp_path, arch):
    halves = [("float16", "float32"), ("bfloat16", "float32")]
    pairs = [(dtype, dtype) for dtype in DTYPES] + halves + [(wide, half) for half, wide in halves]
    instances = [f"SUM_KERNEL({a}_to_{b}, {a.capitalize()}, {b.capitalize()})" for a, b in pairs]
    source, ptx = tmp_path / "all.cu", tmp_path / "all.ptx"
    source.write_text("\n".join([SOURCE.read_text(), *instances]))
    # -ftz=true as CuPy has it
    flags = [f"-arch={arch}", "-ftz=true", "-std=c++14"]
    subprocess.run([NVCC, *flags, "-ptx", source, "-o", ptx], check=True, timeout=300)
    command = [NVCC, f"-arch={arch}", "-cubin", "-Xptxas", "-v", ptx, "-o", tmp_path / "all.cubin"]
    report = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True).stderr
    assert len(re.findall("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", report)) == len(pairs)
    registers = [int(found) for found in re.findall(r"Used (\d+) registers", report)]
    assert len(registers) == len(pairs), report
    assert max(registers) <= 64  # 4 blocks of 256 threads share 65536
    bodies = dict(re.findall(r"\.entry (\w+)\((.*?)\n}", ptx.read_text(), re.DOTALL))
    assert set(bodies) == {f"{a}_to_{b}" for a, b in pairs}
    for name, body in bodies.items():
        whole, half = r"\.(v4\.\w32|v2\.\w64)", r"\.(v2\.\w32|v4\.\w16)"
        loaded = half if name in ("float16_to_float32", "bfloat16_to_float32") else whole
        stored = half if name in ("float32_to_float16", "float32_to_bfloat16") else whole
        assert len(re.findall(rf"ld\.global{loaded}", body)) >= 8, name
        assert re.search(rf"st\.global{stored}", body), name
        assert not re.search(r"\.ftz|\bfma\.|\.local", body), name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_conversions_of_the_source(compile_for_host, dtype):
    """float32 to half: every half value, the middle between any two, and its neighbours; and random bits."""
    limit = EXPONENT[dtype][0]  # the bits of infinity
    values = np.arange(limit, dtype="u2").view(host.STORAGE[dtype])
    wide = np.empty(limit, "f4")
    host.widen(values, dtype, wide)
    middles = ((wide[1:].astype("f8") + wide[:-1]) / 2).astype("f4")
    positive = [wide, middles, np.nextafter(middles, np.float32(np.inf)), np.nextafter(middles, np.float32(0))]
    largest = wide[-1:] + (wide[-1:] - wide[-2:-1]) / 2
    noise = np.random.default_rng(5).integers(0, 1 << 32, 1 << 20, dtype="u4").view("f4")
    src = np.concatenate([*positive, largest, np.nextafter(largest, np.float32(0)), np.float32([np.inf, 1e-45])])
    src = np.concatenate([src, -src, noise])
    out, expected = host.empty(src.size, dtype), host.empty(src.size, dtype)
    code = f"{SOURCE.read_text()}\nSUM_KERNEL(narrow, Float32, {dtype.capitalize()})\n"
    args = (out.ctypes.data, src.ctypes.data, *8 * [0], np.int32(1), src.size, src.size, 0, np.float32(1))
    compile_for_host(code, "narrow")(4, 64, args)
    host.narrow(src, expected, dtype)
    np.testing.assert_array_equal(unsigned(out), unsigned(expected))


@pytest.mark.parametrize("aligned", [True, False])
def test_indices_have_64_bits(compile_for_host, aligned):
    """The last block of a launch over more than 2**32 threads, and only the memory that this block uses."""
    grid, block, lanes = 1 << 25, 256, 16 if aligned else 1
    count, num_last = grid * block * lanes, block * lanes
    sources = [random_vector("uint8", num_last + 16, seed) for seed in range(2)]
    out = np.zeros(num_last + 16, "u1")
    starts = [-array.ctypes.data % 16 for array in (out, *sources)]
    addresses = [array.ctypes.data + s - (count - num_last) for array, s in zip((out, *sources), starts, strict=True)]
    args = (*addresses, *7 * [0], np.int32(2), count, 0, count // 16 if aligned else 0)
    code = f"{SOURCE.read_text()}\nSUM_KERNEL(large, Uint8, Uint8)\n"
    compile_for_host(code, "large")(grid, block, (*args, np.uint8(1)), first_block=grid - 1)
    parts = [array[s : s + num_last] for array, s in zip((out, *sources), starts, strict=True)]
    np.testing.assert_array_equal(parts[0], parts[1] + parts[2])
