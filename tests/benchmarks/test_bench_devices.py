"""``kvmpi bench devices`` on a stand-in for CuPy: its rows, what is found wrong, and what is said without a device."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import HANGS_S
from kernel_helpers import device_count

from kvmpi.benchmarks import device_rows, devices
from kvmpi.kernels import host

TINY = ["--sizes", "52,4K", "--vectors", "1,3", "--seconds", "0.0001"]


@pytest.fixture
def card(stand_in) -> types.ModuleType:
    """``kvmpi.kernels.gpu`` on a stand-in that says which card it is."""
    gpu, cupy, _ = stand_in()
    runtime = cupy.cuda.runtime
    runtime.getDeviceCount, runtime.getDeviceProperties = lambda: 1, lambda device_id: {"name": b"Stand-in 1"}
    runtime.driverGetVersion, runtime.runtimeGetVersion = lambda: 13010, lambda: 12040
    cupy.__version__ = "13.6.0"
    return gpu


def test_rows(card, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert devices.main("devices", [*TINY, "--dtypes", "float32,bfloat16", "--json", "rows.json"]) == 0
    rows = [json.loads(line) for line in Path("rows.json").read_text().splitlines()]
    cases = [(dtype, size) for dtype in ("float32", "bfloat16") for size in (52, 4096)]
    assert [(row["dtype"], row["size_B"], row["row"], row["vectors"]) for row in rows] == [
        (*case, name, vectors)
        for case in cases
        for name in device_rows.ROWS
        for vectors in ([None] if name in device_rows.COPIES else [1, 3])
    ]
    for row in rows:
        check_row(row, rows)
        assert (row["card"], row["cupy"], row["cuda"], row["driver_cuda"]) == ("Stand-in 1", "13.6.0", "12.4", "13.1")
        assert row["command"].startswith("kvmpi bench devices --sizes 52,4K")

    said = capsys.readouterr()
    assert said.err == ""
    lines = said.out.splitlines()
    assert "vectors on one Stand-in 1; driver for CUDA 13.1, CuPy 13.6.0 with CUDA 12.4; host " in lines[0]
    table = [line for line in lines if not line.startswith("#")]
    assert table[0].split()[:4] == ["size_B", "dtype", "row", "vectors"]
    assert len({len(line) for line in table}) == 1  # they line up
    assert [line.split()[2] for line in table[1:]] == [row["row"] for row in rows]


def check_row(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Its figures follow from its times, and its share from a copy."""
    assert row["wrong"] == 0, row
    assert row["iters"] >= device_rows.ROUNDS
    assert 0 < row["t_min"] <= row["t_p50"] <= row["t_p99"]
    times = {"copy:d2d": 2, "device_sum": (row["vectors"] or 0) + 1}.get(row["row"], 1)
    assert row["GB/s"] == pytest.approx(times * row["size_B"] / row["t_p50"] / 1e3)
    if row["row"] in device_rows.COPIES:
        assert row["of_copy"] is None
        return
    kind = device_rows.COMPARED[row["row"]]
    copy = next(o for o in rows if all(o[k] == row[k] for k in ("dtype", "size_B")) and o["row"] == kind)
    of = row["copy_d2d_gb_per_s"] if kind == "copy:d2d" else copy["GB/s"]
    assert row["of_copy"] == pytest.approx(row["GB/s"] / of)


@pytest.mark.parametrize("dtype", list(host.STORAGE))
def test_sums_are_exact(dtype):
    """Whatever the order: no partial sum of the most vectors needs more than a dtype has."""
    vectors = [device_rows.Tile(dtype, [k]).values for k in range(device_rows.MAX_VECTORS)]
    assert len({vector.tobytes() for vector in vectors}) == len(vectors)
    out = host.empty(vectors[0].size, dtype)
    for number in range(1, len(vectors) + 1):
        host.sum_vectors(out, vectors[number - 1 :: -1], dtype)
        expected = device_rows.Tile(dtype, range(number))
        assert expected.wrong(np.tile(out, 3)[: 2 * out.size + 5]) == 0
        out[[0, 7, -1]] += 1
        assert expected.wrong(out) == 3


def test_a_wrong_sum_is_counted(card, monkeypatch, capsys):
    start_sum = card.start_sum

    def off_by_one(dst, sources, dtype, **others):
        transfer = start_sum(dst, sources, dtype, **others)
        if isinstance(dst, np.ndarray) and len(sources) == 3:
            transfer.wait()
            dst[[3, 5]] += 1
        return transfer

    monkeypatch.setattr(card, "start_sum", off_by_one)
    assert devices.main("devices", TINY) == 1
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        f"kvmpi bench: WRONG: reduce of 3 vectors, {size} B of float32: 2 elements" for size in (52, 4096)
    ]
    wrong = {tuple(line.split()[:4]): line.split()[-1] for line in said.out.splitlines() if " float32 " in line}
    assert wrong["52", "float32", "reduce", "3"] == "2"
    assert wrong["52", "float32", "reduce", "1"] == "0"


@pytest.mark.parametrize("row", device_rows.COMPARED)
def test_work_that_is_not_done_is_wrong(card, monkeypatch, capsys, row):
    """Nothing that an earlier row has left in memory passes for it."""
    idle = types.SimpleNamespace(wait=lambda: None)
    start_sum, on_host = card.start_sum, row == device_rows.REDUCE
    of, function, done = {
        "reduce:pageable": (device_rows, "_reduce_pageable", None), "broadcast": (card, "start_copy", idle),
        "broadcast:pageable": (device_rows, "_broadcast_pageable", None),
    }.get(row, (card, "start_sum", idle))  # fmt: skip

    def do_nothing(dst, *others, **options):
        if function == "start_sum" and isinstance(dst, np.ndarray) != on_host:
            return start_sum(dst, *others, **options)
        return done

    monkeypatch.setattr(of, function, do_nothing)
    assert devices.main("devices", TINY) == 1
    expected = [
        f"kvmpi bench: WRONG: {row} of {vectors} vector{'s' * (vectors > 1)}, {size} B of float32: {count} elements"
        for size in (52, 4096)
        for vectors in (1, 3)
        for count in [size // 4 * (vectors if "broadcast" in row else 1)]
    ]
    assert capsys.readouterr().err.splitlines() == expected


def test_without_cupy(bench, tmp_path):
    (tmp_path / "cupy.py").write_text("raise ModuleNotFoundError(\"No module named 'cupy'\", name='cupy')\n")
    done = bench("devices")
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("kvmpi bench: there is no CuPy; pip install 'kvmpi[gpu]'")


@pytest.mark.parametrize(("error", "said"), [
    (ImportError("=====\nlibnvrtc.so.12: cannot open\n====="), "CuPy does not work (libnvrtc.so.12: cannot open)"),
    (ModuleNotFoundError("No module named 'fastrlock'", name="fastrlock"), "CuPy does not work (No module named"),
])  # fmt: skip
def test_a_cupy_that_cannot_be_imported(monkeypatch, capsys, error, said):
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(devices, "importlib", types.SimpleNamespace(import_module=fail))
    assert devices.main("devices", []) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvmpi bench: {said}")


def test_without_a_device(card, monkeypatch, capsys):
    runtime = sys.modules["cupy"].cuda.runtime

    def no_driver() -> int:
        raise runtime.CUDARuntimeError(35)

    for count, said in ((lambda: 0, "CuPy sees no device;"), (no_driver, "CuPy sees no device (CUDA error 35);")):
        monkeypatch.setattr(runtime, "getDeviceCount", count)
        assert devices.main("devices", []) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"kvmpi bench: {said}")
        assert "CUDA_VISIBLE_DEVICES" in line


def test_vectors_that_do_not_fit(card, monkeypatch, capsys):
    def full(count: int, dtype: object) -> None:
        raise MemoryError("out of memory allocating 52 bytes")

    monkeypatch.setattr(sys.modules["cupy"], "empty", full)
    assert devices.main("devices", TINY) == 2
    said = capsys.readouterr().err
    assert said == (
        "kvmpi bench: the vectors do not fit (out of memory allocating 52 bytes); give smaller --sizes or fewer "
        "--vectors\n"
    )


def test_a_device_that_fails(card, monkeypatch, capsys):
    cupy = sys.modules["cupy"]

    def fail(*_: object, **__: object) -> None:
        raise error

    for of, function, error in (
        (cupy.cuda.runtime, "memcpyAsync", cupy.cuda.runtime.CUDARuntimeError(700)),
        (cupy, "RawKernel", RuntimeError("CuPy failed to load libnvrtc.so.12")),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(of, function, fail)
            assert devices.main("devices", TINY) == 1
        assert capsys.readouterr().err == f"kvmpi bench: the device failed: {error}; see nvidia-smi and kvmpi doctor\n"


@pytest.mark.parametrize(("words", "said"), [
    ("--vectors 9", "--vectors 9: expected 1 to 8"), ("--vectors 0", "--vectors 0: expected positive numbers"),
    ("--dtypes float32,float8", "--dtypes float8: known are float32"), ("--sizes 0,4K", "a vector of 0 bytes"),
    ("--sizes x", "'x' is no size"), ("--plot x.txt", "--plot x.txt: expected a name"),
])  # fmt: skip
def test_mistakes_are_named(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        devices.main("devices", words.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_picture(card, tmp_path):
    pytest.importorskip("matplotlib")
    assert devices.main("devices", [*TINY, "--plot", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_nothing_imports_cupy_before_it_is_needed(tmp_path):
    (tmp_path / "cupy.py").write_text("raise AssertionError")
    command = [sys.executable, "-c", "import kvmpi.benchmarks.devices"]
    subprocess.run(command, cwd=tmp_path, timeout=HANGS_S, check=True)


@pytest.mark.gpu
@pytest.mark.skipif(device_count() == 0, reason="needs CuPy and a GPU")
def test_on_a_gpu(bench, tmp_path):
    words = ["--sizes", "4K,1M", "--vectors", "1,3", "--dtypes", "float32,bfloat16", "--seconds", 0.005]
    done = bench("devices", *words, "--json", "rows.json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.json").read_text().splitlines()]
    assert len(rows) == 2 * 2 * (3 + 2 * len(device_rows.COMPARED))
    for row in rows:
        check_row(row, rows)
    assert rows[0]["card"] in done.stdout
