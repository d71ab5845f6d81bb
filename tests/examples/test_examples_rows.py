"""The examples with row-sparse keys: factors as of a plain NumPy program, and sentences in every algorithm."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import matrix_factorization
import numpy as np
import pytest
import torch
import train_text
from jobs import run_job

import kvmpi

EXAMPLES = Path(train_text.__file__).parent
OPTIONS = ["--epochs", "3", "--batch-size", "20", "--rank", "3"]


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ratings") / "ratings"
    rng = np.random.default_rng(4)
    lines = [f"anna{rng.integers(30)}, {rng.integers(25)} {rng.integers(1, 11) / 2} 978300760\n" for _ in range(900)]
    path.write_text("\n".join(lines))  # with empty lines in between
    return path


def plain(path: Path, num_workers: int) -> list[float]:
    """The same in NumPy, in float64, without a store: the mini-batches of all workers make one step."""
    found = [line.replace(",", "").split() for line in path.read_text().split("\n") if line]
    names = [list(dict.fromkeys(line[side] for line in found)) for side in (0, 1)]
    ids = np.array([[names[side].index(line[side]) for side in (0, 1)] for line in found])
    values = np.array([float(line[2]) for line in found])
    test = np.arange(len(found)) % 10 == 9
    train_ids, train_values, mean = ids[~test], values[~test], values[~test].mean()
    tables = [0.3 * np.random.default_rng(1 + side).standard_normal((len(names[side]), 3)) for side in (0, 1)]
    squares = [np.zeros_like(table) for table in tables]
    errors = []
    for epoch in (1, 2, 3):
        order = np.random.default_rng(epoch).permutation(len(train_ids))
        for step in range(len(train_ids) // num_workers // 20):
            chosen = np.concatenate([order[w::num_workers][20 * step : 20 * (step + 1)] for w in range(num_workers)])
            gradients = [np.zeros_like(table) for table in tables]
            for (user, item), value in zip(train_ids[chosen], train_values[chosen], strict=True):
                u, v = tables[0][user], tables[1][item]
                error = mean + u @ v - value
                gradients[0][user] += error * v + 0.02 * u
                gradients[1][item] += error * u + 0.02 * v
            for table, square, gradient in zip(tables, squares, gradients, strict=True):
                square += gradient**2
                table -= 0.5 * gradient / (np.sqrt(square) + 1e-10)
        predicted = mean + (tables[0][ids[test, 0]] * tables[1][ids[test, 1]]).sum(1)
        errors.append(float(np.sqrt(np.mean((predicted - values[test]) ** 2))))
    return errors


@pytest.mark.parametrize("store", ["local", "dist_sync", "dist_async"])
def test_factors_of_one_worker(ratings: Path, store: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = matrix_factorization.main(["--ratings", str(ratings), "--store", store, *OPTIONS])
    np.testing.assert_allclose(found, plain(ratings, 1), rtol=1e-4)
    out = capsys.readouterr().out
    assert out.startswith("810 ratings of 30 users and 25 items; 1 workers")
    moved = re.search(r"moved ([\d.]+) MB; whole keys would have been ([\d.]+) MB", out)
    assert (moved is not None) == (store != "local")


def test_factors_of_three_workers_and_of_a_job_that_goes_on(ratings: Path, tmp_path: Path) -> None:
    """The first job ends after two epochs of 13 steps, and its snapshot is in the middle of the second.

    There is only one, since the next is left out where a disk is slow.
    """
    program, options = EXAMPLES / "matrix_factorization.py", ["--ratings", ratings, *OPTIONS]
    done = run_job(f"-n 3 -c 3 -s 2 --snapshot-dir {tmp_path} --snapshot-every 20", program, *options, "--epochs", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    again = run_job(f"-n 3 -c 3 -s 2 --resume {tmp_path}", program, *options)
    assert again.returncode == 0, again.stdout + again.stderr
    found = [
        (line.split()[-3], float(line.split()[-1]))
        for line in (done.stdout + again.stdout).splitlines()
        if "RMSE" in line
    ]
    assert [epoch for epoch, _ in found] == ["1:", "2:", "2:", "3:"], done.stdout + again.stdout
    expected = plain(ratings, 3)
    np.testing.assert_allclose([error for _, error in found], [*expected[:2], *expected[1:]], atol=1e-4)


def test_a_header_is_no_rating(ratings: Path, tmp_path: Path) -> None:
    path = tmp_path / "ratings.csv"
    path.write_text("userId,movieId,rating,timestamp\n" + ratings.read_text())
    for found, expected in zip(
        matrix_factorization.read(str(path)), matrix_factorization.read(str(ratings)), strict=True
    ):
        np.testing.assert_array_equal(found, expected)
    path.write_text("1 2 3.5\n1::3::4\n")
    with pytest.raises(SystemExit, match="line 2: expected USER ITEM RATING"):
        matrix_factorization.read(str(path))


def test_a_file_of_ratings_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        matrix_factorization.main(["--ratings", str(tmp_path / "none")])
    assert f"error: --ratings {tmp_path / 'none'}: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "options", "said"), [
    ("", "", "0 ratings for training and 0 for testing are too few"),
    ("a b 1\na c 2\n", "--batch-size 1", "2 ratings for training and 0 for testing are too few"),
    ("a b 1\n" * 20, "--batch-size 100", "18 ratings .* for batches of 100 on 1 workers"),
])  # fmt: skip
def test_too_few_ratings_are_said(text: str, options: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "ratings").write_text(text)
    with pytest.raises(SystemExit, match=said):
        matrix_factorization.main(["--ratings", str(tmp_path / "ratings"), *options.split()])


def test_made_up_ratings_can_be_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """Their noise has a deviation of 0.1."""
    found = matrix_factorization.main(["--store", "local", "--epochs", "3", "--batch-size", "400"])
    assert found[-1] < 0.65 < 0.8 < found[0]


# ---- sentences

SMALL = ["--dimension", "12", "--maps", "8", "--epochs", "2", "--limit", "40"]


@pytest.fixture(scope="module")
def alone() -> float:
    """The accuracy without servers."""
    return train_text.main([*SMALL, "--batch-size", "1", "--dropout", "0", "--algorithm", "local"])


@pytest.mark.parametrize("algorithm", [name for name in train_text.STORES if name != "local"])
def test_sentences_in_every_algorithm(
    algorithm: str, alone: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone all but elastic averaging do the same, and one sentence is a mini-batch."""
    log = tmp_path / "log"
    options = ["--batch-size", "1", "--dropout", "0", "--algorithm", algorithm, "--log", str(log)]
    accuracy = train_text.main([*SMALL, *options])
    header, *epochs = [json.loads(line) for line in log.read_text().splitlines()]
    assert header["store"] == train_text.STORES[algorithm]
    assert epochs[-1]["val_accuracy"] == pytest.approx(accuracy)
    assert epochs[-1]["train_loss"] < epochs[0]["train_loss"]
    if algorithm != "mpi-esgd":
        assert accuracy == pytest.approx(alone)
    assert "36 sentences of" in capsys.readouterr().out


def test_sentences_in_a_job_that_goes_on(tmp_path: Path) -> None:
    """Two epochs of nine steps, and the second once more, from the snapshot after the first."""
    program, options = EXAMPLES / "train_text.py", [*SMALL, "--dropout", "0"]
    folder, losses = tmp_path / "snapshots", []
    for number, option in enumerate([f"--snapshot-dir {folder} --snapshot-every 9", f"--resume {folder}"]):
        log = tmp_path / f"log{number}"
        done = run_job(f"-n 2 -c 1 -s 1 {option}", program, *options, "--log", log)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Warning" not in done.stderr
        assert ("goes on after batch 9\n" in done.stdout) == number
        pushed, dense = re.search(r"pushed ([\d.]+) MB; dense it would have been ([\d.]+) MB", done.stdout).groups()  # type: ignore[union-attr]
        assert 0 < float(pushed) < float(dense)
        losses.append([json.loads(line)["train_loss"] for line in log.read_text().splitlines()[1:]])
        shutil.rmtree(folder / "18", ignore_errors=True)
    assert losses[0][1:] == losses[1], "the second epoch is not the same"


def test_a_folder_of_sentences(tmp_path: Path) -> None:
    for name, line in (("neg", "a dull caf\xe9 \n"), ("pos", "a bright and lively film \n")):
        (tmp_path / f"rt-polarity.{name}").write_bytes(line.encode("latin-1") * 20)
    sentences, classes, test, test_classes, num_words = train_text.load(str(tmp_path))
    assert (sentences.shape, test.shape, num_words) == ((36, 5), (4, 5), 2 + 7)
    assert (sentences != train_text.PAD).sum(1).tolist() == [3 + 2 * int(label) for label in classes]
    assert sorted({int(label) for label in torch.cat([classes, test_classes])}) == [0, 1]
    with pytest.raises(SystemExit, match=r"no rt-polarity\.neg there"):
        train_text.load(str(tmp_path / "elsewhere"))


def test_the_gradient_of_words_is_sparse() -> None:
    model = train_text.Classifier(50, 4, 2, 0.0)
    model(torch.tensor([[3, 7, 3, train_text.PAD]])).sum().backward()
    grad = model.words.weight.grad
    assert grad.is_sparse
    with kvmpi.create("local") as kv:
        kv.init("words", torch.zeros(50, 4))
        kv.pushpull("words", grad)
    assert grad._indices()[0].tolist() == [3, 7]


def test_workers_that_would_train_alone_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVMPI_NUM_WORKERS", "2")
    with pytest.raises(SystemExit):
        matrix_factorization.main(["--store", "local"])
    assert "every worker would train alone" in capsys.readouterr().err
