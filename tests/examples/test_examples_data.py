"""The examples' images: the same from a folder and a tar, in shares that are disjoint and complete."""

from __future__ import annotations

from pathlib import Path

import image_data
import image_models
import numpy as np
import pytest
import torch


def rows(images: image_data.Images) -> list[bytes]:
    return sorted(bytes([label]) + pixels.tobytes() for pixels, label in zip(images.pixels, images.labels, strict=True))


def test_folder_and_tar_hold_the_same(image_folder: Path, image_tar: Path) -> None:
    folder = image_data.load(str(image_folder), 0, 1, with_test=True)
    tar = image_data.load(str(image_tar), 0, 1, with_test=True)
    assert folder.classes == tar.classes == ["dark", "light"]
    assert folder.train.pixels.shape == (48, 3, 16, 16)
    assert np.array_equal(folder.train.pixels, tar.train.pixels)
    assert np.array_equal(folder.train.labels, tar.train.labels)
    assert np.array_equal(folder.test.pixels, tar.test.pixels)
    bright = folder.train.pixels.mean((1, 2, 3)) > 120
    assert np.array_equal(bright, folder.train.labels == 1)


@pytest.mark.parametrize("limit", [0, 31])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_shares_are_disjoint_and_complete(image_tar: Path, num_workers: int, limit: int) -> None:
    whole = image_data.load(str(image_tar), 0, 1, with_test=False, limit=limit)
    shares = [image_data.load(str(image_tar), r, num_workers, with_test=False, limit=limit) for r in range(num_workers)]
    assert sorted(row for share in shares for row in rows(share.train)) == rows(whole.train)
    assert all(share.train_count == len(whole.train) == (limit or 48) for share in shares)
    assert all(share.test is None for share in shares)
    assert all(set(share.train.labels) == {0, 1} for share in shares)


def test_digits_are_split_once_and_for_all() -> None:
    whole = image_data.load("digits", 0, 1, with_test=True)
    shares = [image_data.load("digits", rank, 4, with_test=False) for rank in range(4)]
    assert (len(whole.train), len(whole.test), whole.train.pixels.shape[1:]) == (1437, 360, (1, 8, 8))
    assert sum(len(share.train) for share in shares) == 1437
    x, y = whole.train.batch(np.arange(10))
    assert x.dtype == torch.float32
    assert x.min() == -1.0
    assert x.max() == 1.0
    assert y.dtype == torch.int64
    from sklearn.datasets import load_digits

    everything = {(d.astype(np.int64) * 255 // 16).astype(np.uint8).tobytes() for d in load_digits().data}
    assert {i.tobytes() for i in whole.test.pixels} <= everything


def test_batches_cover_an_epoch_and_differ_between_epochs() -> None:
    images = image_data.Images(np.zeros((10, 1, 8, 8), np.uint8), np.zeros(10, np.int64))
    first = list(image_data.batches(images, 5, 2, epoch=1, seed=0, rank=0))
    assert sorted(np.concatenate(first)) == list(range(10))
    again = list(image_data.batches(images, 5, 2, epoch=1, seed=0, rank=0))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, list(image_data.batches(images, 5, 2, epoch=2, seed=0, rank=0)))
    too_many = list(image_data.batches(images, 5, 3, epoch=1, seed=0, rank=0))
    assert [len(batch) for batch in too_many] == [5, 5, 5]


def test_augmented_images_are_shifted_and_mirrored() -> None:
    x = torch.arange(2 * 64.0).reshape(2, 1, 8, 8).repeat(20, 3, 1, 1)
    moved = image_data.augment(x, np.random.default_rng(0))
    assert moved.shape == x.shape
    assert set(moved[::2].unique().tolist()) <= set(x[0].unique().tolist())  # no pixel from elsewhere
    assert not torch.equal(moved, x)


@pytest.mark.parametrize("bad", ["no such file", "text", "empty"])
def test_data_that_is_none_says_what_is_expected(tmp_path: Path, bad: str) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="--data"):
        image_data.load(str(tmp_path / bad), 0, 1, with_test=True)


def test_models_have_the_size_that_they_should() -> None:
    resnet = image_models.create("resnet20", 3, 32, 10, seed=0)
    assert sum(p.numel() for p in resnet.parameters()) == 269_722  # He et al.: 0.27 million
    assert resnet(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    for size in (8, 16, 32):
        assert image_models.create("cnn", 1, size, 7, seed=0)(torch.zeros(2, 1, size, size)).shape == (2, 7)
    first, second = (image_models.create("cnn", 1, 8, 10, seed=4) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
