"""``kvmpi bench`` with real ranks: what it prints, writes and leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from jobs import HANGS_S, run_job
from processes import processes_with

from kvmpi.benchmarks import rows
from kvmpi.benchmarks.collective_report import COLUMNS
from kvmpi.benchmarks.netlab import NetLab
from kvmpi.benchmarks.plan import OPS
from kvmpi.errors import KVError
from kvmpi.launchers import mpirun

pytest.importorskip("mpi4py")

HERE = Path(__file__).parent
SHORT = ("--sizes", "0,4,64K", "--seconds", "0.01")
COUNTS = [0, 1, 16384]


def lines_of(folder: Path, name: str = "rows.json") -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def printed_rows(output: str) -> list[list[str]]:
    """The lines of the table below its header, as words."""
    lines = [line.split() for line in output.splitlines() if line and not line.startswith("#")]
    assert lines[0] == list(COLUMNS)
    return [words for words in lines if words != lines[0]]


def assert_verified_and_measured(op: str, found: list[dict], output: str) -> None:
    """``found``: what was written; ``output``: what was printed."""
    assert [words[:5] for words in printed_rows(output)] == [
        [str(row[name]) for name in ("size_B", "count", "dtype", "op", "algo")] for row in found
    ]
    expected = {"auto", "shared", "ring", "multi_ring", "mpi", rows.MPI_CALLS[op]}
    expected |= {"store", "baidu"} if op == "allreduce" else set()
    for count in COUNTS:
        of_count = [row for row in found if row["count"] == count]
        assert expected <= {row["algo"] for row in of_count}, output
        for row in of_count:
            assert row["op"] == op
            assert row["wrong"] == 0
            assert row["iters"] >= 5
            assert 0 < row["t_min"] <= row["t_p50"] <= row["t_p99"] <= row["t_max"]
            assert row["algbw"] == pytest.approx(row["size_B"] / row["t_p50"] / 1e3)
    first = found[0]
    assert first["ranks"] == 2
    assert first["nic"] == "loopback/shared memory"
    about = ("host", "cores", "mpi", "thread_level", "binding", "python", "numpy", "torch", "kvmpi", "commit")
    assert set(about) <= set(first)
    assert output.count("# auto took ") == 2  # nothing is chosen for no elements
    assert all(row["best"] and row["choice"] for row in found if row["algo"] == "auto" and row["count"])


def test_sums_are_verified_and_measured(bench, tmp_path):
    done = bench("allreduce", "-n", 2, *SHORT, "--json", "rows.json", "--plot", "picture.png")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_verified_and_measured("allreduce", lines_of(tmp_path), done.stdout)
    picture = (tmp_path / "picture.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(picture) > 10_000


def test_other_operations_on_ranks_that_an_mpirun_has_started(tmp_path):
    """And gradients in several buckets, and torch's bfloat16: in one job, which takes longer to start than they do."""
    others = [op for op in OPS if op != "allreduce"]
    mpi = mpirun.find(os.environ, 2)
    command = [*mpi.command(2, local=True), sys.executable, str(HERE / "programs" / "several.py")]
    for op in others:
        command += [op, *SHORT, "--json", f"{op}.json", "+"]
    command += ["allreduce", "--preset", "resnet20", "--seconds", "0.01", "--algorithms", "gloo:bucket"]
    command += ["--json", "buckets.json", "+", "allreduce", "--sizes", "2,4100", "--seconds", "0.01", "--vectors", "2"]
    command += ["--dtype", "bfloat16", "--algorithms", "shared:in,store,naive", "--json", "bfloat16.json", "+"]
    command += ["allgather", "--sizes", "12,20,24", "--seconds", "0.01", "--algorithms", "ring,gloo", "+"]
    command += ["broadcast", "-n", "3"]
    env = {**mpirun.clean(os.environ), **mpi.env(str(tmp_path), "", crowded=True, one_host=True)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count(f"statuses {[*[0] * (len(others) + 3), 2]}\n") == 2
    *outputs, _, _, uneven, _, _ = done.stdout.split("end\n")
    assert done.stderr.count("the job that was started has 2 ranks; leave -n out") == 1
    for op, output in zip(others, outputs, strict=True):
        found = lines_of(tmp_path, f"{op}.json")
        assert_verified_and_measured(op, found, output)
    (buckets,) = lines_of(tmp_path, "buckets.json")
    assert_gradients([buckets])
    assert (buckets["algo"], buckets["chunk_B"]) == ("gloo:bucket", 100_000)
    found = [(row["algo"], row["count"], row["dtype"], row["wrong"]) for row in lines_of(tmp_path, "bfloat16.json")]
    assert found == [(name, count, "bfloat16", 0) for count in (1, 2050) for name in ("shared:in", "store", "naive")]
    notes = [line.rpartition("divide ")[2] for line in uneven.splitlines() if "gloo left out" in line]
    assert notes == ["3 elements", "5 elements"]
    assert {(words[1], words[4]) for words in printed_rows(uneven) if words[4] == "gloo"} == {("6", "gloo")}
    found = lines_of(tmp_path, "broadcast.json")
    assert [row["count"] for row in found if row["algo"] == "gloo"] == COUNTS


def test_modifiers_and_vectors(bench, tmp_path):
    names = "shared,shared:in,shared:empty,shared:in:empty,shared:view,store,store:in,store:empty,store:view"
    names += ",agree,baidu,naive"
    done = bench(
        "allreduce", "-n", 2, "--sizes", "2,4100", "--seconds", "0.01", "--vectors", 2, "--dtype", "float16",
        "--algorithms", names, "--json", "rows.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = [(row["algo"], row["count"], row["vectors"], row["wrong"]) for row in lines_of(tmp_path)]
    assert found == [(name, count, 2, 0) for count in (1, 2050) for name in names.split(",")]


def assert_gradients(found: list[dict]) -> None:
    """Of a small model, all of them, and right."""
    assert {(row["count"], row["arrays"], row["preset"], row["wrong"]) for row in found} == {
        (269_722, 59, "resnet20", 0)
    }


def test_the_gradients_of_a_model(bench, tmp_path, monkeypatch):
    monkeypatch.delenv("HOME", raising=False)  # which Open MPI wants
    done = bench(
        "allreduce", "--preset", "resnet20", "--seconds", "0.01", "--algorithms", "shared,store:empty",
        "--json", "rows.json", "--plot", "bars.png",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = lines_of(tmp_path)
    assert {row["algo"] for row in found} == {"shared", "store:empty"}
    assert_gradients(found)
    assert (tmp_path / "bars.png").stat().st_size > 10_000


def test_ranks_that_spin_get_a_job_of_their_own(bench, tmp_path):
    if mpirun.find(os.environ, 2).kind != "openmpi":
        pytest.skip("only Open MPI can be told to yield")
    done = bench(
        "broadcast", "-n", "2,1", "--sizes", "1K", "--seconds", "0.02", "--yield", "both",
        "--algorithms", "MPI_Bcast", "--json", "rows.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = [(row["ranks"], row["algo"], row["idle"]) for row in lines_of(tmp_path)]
    assert found == [(n, *rest) for n in (2, 1) for rest in (("MPI_Bcast", "yield"), ("MPI_Bcast:spin", "spin"))]


def test_a_wrong_result_is_counted_and_named():
    done = run_job(
        "-n 2", HERE / "programs" / "liar.py", "allreduce", "--algorithms", "ring,liar", "--sizes", "4,1K",
        "--seconds", "0.01",
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    wrong = {(words[0], words[4]): words[14] for words in printed_rows(done.stdout.replace("[worker 0] ", ""))}
    assert wrong == {("4", "ring"): "0", ("4", "liar"): "0", ("1024", "ring"): "0", ("1024", "liar"): "2"}
    # The launcher says the last lines of whoever failed first once more, if that was rank 0.
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("[") and "WRONG" in line]
    assert said == "[worker 0] kvmpi bench: WRONG: allreduce by liar on 2 ranks, 1024 B of float32: 2 elements"


def test_between_simulated_hosts(bench, tmp_path):
    try:
        with NetLab(1, None):
            pass
    except KVError as error:
        pytest.skip(str(error))
    if mpirun.find(os.environ, 2).kind != "openmpi":
        pytest.skip("simulated hosts need Open MPI")
    done = bench(
        "allreduce", "--hosts", 2, "--link", "1gbit", "--sizes", "64K", "--seconds", "0.02",
        "--algorithms", "shared,ring,MPI_Allreduce,gloo", "--json", "rows.json", "--plot", "picture.png",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# shared left out: " in done.stdout
    found = lines_of(tmp_path)
    assert {"ring", "MPI_Allreduce"} <= {row["algo"] for row in found}
    assert {(row["hosts"], row["ranks"], row["link"], row["wrong"]) for row in found} == {(2, 2, "1gbit", 0)}


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_nothing_outlives_the_command(tmp_path, number, status):
    mark = f"TEST_MARK={uuid.uuid4().hex}"
    name, value = mark.split("=")
    env = {**os.environ, name: value}
    words = ("bench", "allreduce", "--sizes", "1M", "--seconds", "60", "--algorithms", "ring,MPI_Allreduce")
    parent = subprocess.Popen(
        [sys.executable, "-m", "kvmpi", *words], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    deadline_s = time.monotonic() + 30
    assert parent.stdout is not None
    for line in parent.stdout:  # the header comes when the ranks are there
        if line.split()[:1] == ["size_B"]:
            break
    assert sum("kvmpi.benchmarks.ranks" in line for line in processes_with(mark).values()) >= 2
    parent.send_signal(number)
    _, errors = parent.communicate(timeout=HANGS_S)
    assert parent.returncode == status
    if number == signal.SIGINT:
        assert errors == "kvmpi bench: stopped by SIGINT\n"
    while processes_with(mark):
        assert time.monotonic() < deadline_s, f"still there: {processes_with(mark)}"
        time.sleep(0.05)


def test_without_mpi_it_says_what_to_install(tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
    env["KVMPI_MPIRUN"] = str(tmp_path / "nothing")
    done = subprocess.run(
        [sys.executable, "-m", "kvmpi", "bench", "allreduce"], env=env, capture_output=True, text=True, timeout=HANGS_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "pip install 'kvmpi[mpi]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_tune_writes_what_auto_chooses_by(tmp_path: Path) -> None:
    from kvmpi.collectives import load_figures

    path = tmp_path / "tuning.json"
    words = [sys.executable, "-m", "kvmpi", "bench", "tune", "-n", "2", "--out", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "ranks by host: 0, 1" in done.stdout
    figures = load_figures(str(path))
    assert 1e8 < figures.copy_bytes_per_s < 1e12
    assert 1e-7 < figures.meeting_s < 0.1


def test_waiting_tells_what_training_keeps() -> None:
    words = [sys.executable, "-m", "kvmpi", "bench", "waiting", "-n", "3", "--seconds", "0.1", "--rounds", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "3 ranks on" in done.stdout
    assert "while collectives wait" in done.stdout
