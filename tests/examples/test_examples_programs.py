"""The example programs: every algorithm as a job of one worker in this process, and one comparison of real jobs."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import compare
import compare_ddp
import pytest
import torch
import train_gpt
import train_images
import train_text
from jobs import HANGS_S, run_job

EXAMPLES = Path(train_images.__file__).parent


def read(log: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    header, *epochs = [json.loads(line) for line in log.read_text().splitlines()]
    assert header["event"] == "config"
    assert all(epoch["event"] == "epoch" for epoch in epochs)
    return header, epochs


@pytest.mark.parametrize("algorithm", list(train_images.ALGORITHMS))
def test_every_algorithm_learns_alone(algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    options = ["--limit", "500", "--epochs", "3", "--log", str(log)]
    assert train_images.main(["--algorithm", algorithm, *options]) == 0
    header, epochs = read(log)
    assert header["algorithm"] == algorithm
    assert header["store"] == train_images.ALGORITHMS[algorithm].store
    assert [epoch["epoch"] for epoch in epochs] == [1, 2, 3]
    assert epochs[-1]["val_accuracy"] > 0.7
    assert epochs[-1]["elapsed_s"] == pytest.approx(sum(epoch["epoch_s"] for epoch in epochs), abs=1e-4)
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith(f"{algorithm}: 1 worker, 1 client, ")
    assert lines[1].split() == ["epoch", "train", "loss", "val", "accuracy", "seconds"]
    assert len({len(line) for line in lines[1:]}) == 1, "columns are not aligned"
    assert err == ""  # no progress bar where there is no terminal


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    logs = [tmp_path / "first", tmp_path / "second"]
    for log in logs:
        train_images.main(["--algorithm", "mpi-sgd", "--limit", "100", "--epochs", "2", "--log", str(log)])
    first, second = ([(e["train_loss"], e["val_accuracy"]) for e in read(log)[1]] for log in logs)
    assert first == second


@pytest.mark.parametrize("options", [["--model", "cnn", "--augment"], ["--model", "resnet20", "--interval", "2"]])
def test_an_image_folder_in_a_tar(image_tar: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--data", str(image_tar), "--batch-size", "4", "--epochs", "2", "--target-accuracy", "0.9", *options]
    assert train_images.main(["--algorithm", "dist-esgd", *options]) == 0
    assert "48 images, 12 batches of 4" in capsys.readouterr().out


def test_nothing_is_left_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after ``--resume`` of a job that had ended: the accuracy is that of the weights."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(train_images.GradientExchange, "batches_done", lambda *_: 12)
    options = ["--limit", "100", "--epochs", "2", "--log=~/log", "--target-accuracy", "0.02"]
    assert train_images.main(["--algorithm", "mpi-sgd", *options]) == 0
    said = capsys.readouterr().out
    assert "goes on after batch 12\n" in said
    assert "all 2 epochs were done before, nothing is left to do: accuracy " in said
    assert not read(tmp_path / "log")[1]


def test_below_the_target_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--limit", "16", "--epochs", "1", "--target-accuracy", "0.99"]
    assert train_images.main(["--algorithm", "local", *options]) == 1
    assert "below --target-accuracy 99.00%" in capsys.readouterr().err


def test_help_lists_the_algorithms(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_images.main(["--help"])
    out = capsys.readouterr().out
    assert all(f"  {name:<13} {a.store}" in out for name, a in train_images.ALGORITHMS.items())


def test_local_refuses_several_workers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KVMPI_NUM_WORKERS", "2")
    assert train_images.main(["--algorithm", "local"]) == 2
    assert "one worker" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="one worker"):
        train_text.main(["--algorithm", "local"])


@pytest.mark.parametrize("program", [train_images, train_text])
def test_a_log_that_cannot_be_written_is_said(program: ModuleType) -> None:
    with pytest.raises(SystemExit, match="--log /no/such/folder: No such file or directory"):
        program.main(["--algorithm", "local", "--limit", "40", "--log", "/no/such/folder"])


def test_a_job_without_servers_is_told_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KVMPI_ROLE", "worker")
    assert train_images.main(["--algorithm", "dist-sgd"]) == 2
    assert "needs servers" in capsys.readouterr().err


def test_comparison_of_jobs(tmp_path: Path) -> None:
    command = [
        *(sys.executable, str(EXAMPLES / "compare.py"), "--algorithms", "mpi-esgd,dist-sgd", "--out", str(tmp_path)),
        *("-n", "2", "-c", "1", "-s", "1", "--epochs", "2", "--limit", "400", "--target-accuracy", "0.3"),
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, clients in (("mpi-esgd", 1), ("dist-sgd", 2)):
        header, epochs = read(tmp_path / f"{name}.jsonl")
        assert (header["workers"], header["clients"], header["servers"], len(epochs)) == (2, clients, 1, 2)
        row = next(line for line in done.stdout.splitlines() if line.startswith(f"│ {name}"))
        assert row.split("│")[2].strip() == str(clients)
        assert f"{epochs[-1]['val_accuracy']:.2%}" in row
    for picture in ("accuracy.png", "epoch_time.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_comparison_fails_with_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(algorithm: str, *_: Any) -> compare.Result:
        settings = {"model": "cnn", "data": "digits", "workers": 4, "clients": 2}
        epochs = [{"val_accuracy": 0.96, "epoch_s": 0.5, "elapsed_s": 0.5}]
        return {
            "mpi-sgd": compare.Result(algorithm, 0, 1.0, settings, epochs),
            "mpi-esgd": compare.Result(algorithm, 3, 1.0),
        }[algorithm]

    monkeypatch.setattr(compare, "run", run)
    assert compare.main(["--algorithms", "mpi-sgd", "--target-accuracy", "0.95", "--out", str(tmp_path)]) == 0
    assert compare.main(["--algorithms", "mpi-sgd", "--target-accuracy", "0.97", "--out", str(tmp_path)]) == 1
    assert compare.main(["--algorithms", "mpi-esgd,mpi-sgd", "--out", str(tmp_path)]) == 1
    assert "failed (3)" in capsys.readouterr().out
    for options, said in (
        (["--algorithms", "mpi-sdg"], "unknown algorithm mpi-sdg"),
        (["--algorithms", " , "], "--algorithms names none of local, dist-sgd"),
        (["--log", "x"], "--log: --algorithms says which"),
        (["--algorithm=local"], "--algorithm=local: --algorithms says which"),
        (["-n", "0"], "-n and -c must be at least 1"),
        (["--out", "/dev/null/x"], "--out /dev/null/x: Not a directory"),
    ):
        with pytest.raises(SystemExit):
            compare.main(["--out", str(tmp_path), *options])
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(("program", "options", "said"), [
    (train_images, "--batch-size 0", "--batch-size: must be at least 1"),
    (train_images, "--limit -5", "--limit: must be at least 0"),
    (train_text, "--epochs 0", "--epochs: must be at least 1"),
    (train_text, "--limit -5", "--limit: must be at least 0"),
    (train_gpt, "--reports 0", "--reports: must be at least 1"),
    (train_gpt, "--steps many", "--steps: invalid integer value: 'many'"),
    (compare_ddp, "--steps 0", "--steps: must be at least 1"),
    (compare_ddp, "-n 0", "-n: must be at least 1"),
    (compare_ddp, "--out /no/such/x.png", "--out /no/such/x.png: there is no such folder"),
    (train_gpt, "--heads 7", "--width 64 is no multiple of --heads 7"),
])  # fmt: skip
def test_options_that_cannot_be_are_said(
    program: ModuleType, options: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        program.arguments(options.split())
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("program", "options"), [
    ("train_digits", "--epochs 0"), ("train_digits", "--batch-size 0"), ("matrix_factorization", "--batch-size 0"),
    ("matrix_factorization", "--rank -1"), ("staleness", "--softsync 0"),
])  # fmt: skip
def test_programs_that_stand_alone_check_numbers_too(
    program: str, options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module(program).main  # here: some read scikit-learn, and each of pytest's workers this file
    with pytest.raises(SystemExit):
        main(options.split())
    assert re.search("(--batch-size|and --softsync) must be at least 1", capsys.readouterr().err)


@pytest.mark.parametrize(("program", "options", "said"), [
    ("train_images.py", "--algorithm mpi-sgd --limit 1", "1 training images for 2 workers"),
    ("train_text.py", "--batch-size 100000", "are too few for batches of 100000 on 2 workers"),
])  # fmt: skip
def test_too_little_data_is_said(program: str, options: str, said: str) -> None:
    done = run_job("-n 2 -s 1", EXAMPLES / program, *options.split())
    assert done.returncode
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_the_short_program_goes_on_from_its_checkpoint_wherever_it_was_interrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train_digits = importlib.import_module("train_digits")

    def run(epochs: int = 2) -> float:
        return train_digits.main(["--checkpoint", str(tmp_path / "of" / "digits.pt"), "--epochs", str(epochs)])

    whole = {}

    def interrupted(state: dict[str, Any], path: Path) -> None:
        whole.update(state["model"])  # of a run that nobody has interrupted until then
        path.write_bytes(b"half of it")
        raise KeyboardInterrupt

    saves = iter([torch.save, interrupted])
    monkeypatch.setattr(torch, "save", lambda *given, usual=torch.save: next(saves, usual)(*given))
    with pytest.raises(KeyboardInterrupt):
        run()
    accuracy = run()
    assert accuracy > 0.8
    again = torch.load(tmp_path / "of" / "digits.pt")["model"]
    assert whole
    assert all(torch.equal(whole[name], again[name]) for name in again)
    assert run(1) == accuracy
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["epoch 1", "epoch 2", "epoch 2"]
    assert last.endswith(f"digits.pt has 2 epochs, nothing is left to do: accuracy {accuracy:.2%}")
    assert [path.name for path in (tmp_path / "of").iterdir()] == ["digits.pt"]


def test_the_short_program_with_two_workers() -> None:
    done = run_job("-n 2", EXAMPLES / "train_digits.py", "--epochs", 2, "--batch-size", 64)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"[worker 0] epoch {epoch}" for epoch in (1, 2)]
    assert float(lines[-1].split()[-1].rstrip("%")) > 50


@pytest.mark.parametrize("store", ["dist_sync", "dist_async --aware", "dist_softsync --softsync 1"])
def test_a_slow_worker_keeps_nobody_from_learning(store: str) -> None:
    options = f"--store {store} --epochs 4 --step-ms 0 --slow-ms 3".split()
    done = run_job("-n 3 -c 3 -s 1", EXAMPLES / "staleness.py", *options)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line.split(":")[0] for line in lines] == ["[worker 0] worker 0", "[worker 2] worker 2"]
    assert min(float(line.split()[-1].rstrip("%")) for line in lines) > 70
    if store == "dist_sync":
        assert all("0.0 updates old, 0 at most" in line for line in lines)


def test_comparison_knows_every_algorithm() -> None:
    assert list(compare.COLOURS) == list(train_images.ALGORITHMS)
