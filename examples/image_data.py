"""Labelled images in memory: scikit-learn's digits, or train/CLASS/x.jpg and test/CLASS/x.jpg in a folder or a tar."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
SPLIT_SEED = 0  # of what is fixed for ever: which digits are for testing, and which images --limit keeps


@dataclass
class Images:
    """Pixels as bytes, shape (count, channels, height, width), and a class number for each image."""

    pixels: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        """These images as floats from -1 to 1, and their labels."""
        x = torch.from_numpy(self.pixels[chosen]).float().div_(127.5).sub_(1.0)
        return x, torch.from_numpy(self.labels[chosen])


@dataclass
class DataSet:
    """One worker's share of the training images, how many there are in all, and (where wanted) the test images."""

    train: Images
    train_count: int
    test: Images | None
    classes: list[str]


def load(source: str, rank: int, num_workers: int, *, with_test: bool, limit: int = 0) -> DataSet:
    """Training images ``rank::num_workers`` of ``source``: "digits", a folder or a tar.

    Args:
        with_test: read the test images too; one worker needs them.
        limit: use only so many training images in all, drawn from all classes; 0 is all.
    """
    if source == "digits":
        return _digits(rank, num_workers, with_test, limit)
    if not os.path.exists(source):
        sys.exit(f"--data {source}: expected 'digits', a folder with train/CLASS/*.jpg, or a tar of one")
    members, read = _folder(source) if os.path.isdir(source) else _tar(source)
    classes = sorted({label for split, label, _ in members if split == "train"})
    number = {label: i for i, label in enumerate(classes)}
    splits = {
        name: [(number[label], place) for split, label, place in members if split == name and label in number]
        for name in ("train", "test")
    }
    if not splits["train"] or not splits["test"]:
        sys.exit(f"--data {source}: no images in train/CLASS/ and test/CLASS/ ({', '.join(SUFFIXES)})")
    kept = _kept(len(splits["train"]), limit)
    train = _decode([splits["train"][i] for i in kept[rank::num_workers]], read)
    test = _decode(splits["test"], read) if with_test else None
    return DataSet(train, len(kept), test, classes)


def batches(images: Images, batch_size: int, count: int, epoch: int, seed: int, rank: int) -> Iterator[np.ndarray]:
    """``count`` batches of indices for one epoch: the share, shuffled anew, and again if it is too short."""
    order = np.random.default_rng([seed, epoch, rank]).permutation(len(images))
    order = np.resize(order, count * batch_size)
    for i in range(count):
        yield order[i * batch_size : (i + 1) * batch_size]


def augment(x: Tensor, rng: np.random.Generator, shift: int = 4) -> Tensor:
    """Mirror half of the images and move each by up to ``shift`` pixels, in place of more data."""
    count, _, height, width = x.shape
    padded = torch.nn.functional.pad(x, (shift,) * 4, mode="reflect")
    down, right = rng.integers(0, 2 * shift + 1, (2, count))
    moved = torch.stack([padded[i, :, down[i] :, right[i] :][:, :height, :width] for i in range(count)])
    mirrored = torch.from_numpy(rng.random(count) < 0.5)
    moved[mirrored] = moved[mirrored].flip(3)
    return moved


def _kept(count: int, limit: int) -> np.ndarray:
    """Indices of the training images in use, shuffled so that every share holds all classes."""
    order = np.random.default_rng(SPLIT_SEED).permutation(count)
    return order[:limit] if limit else order


def _digits(rank: int, num_workers: int, with_test: bool, limit: int) -> DataSet:
    # The file that sklearn.datasets.load_digits reads; importing scikit-learn itself takes each worker two seconds.
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        sys.exit("--data digits needs scikit-learn, which brings the images: pip install scikit-learn")
    path = os.path.join(found.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
    pixels = (table[:, :64].astype(np.float32) * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    everything = Images(pixels, table[:, 64].astype(np.int64))
    order = np.random.default_rng(SPLIT_SEED).permutation(len(everything))
    train, test = order[360:], order[:360]
    train = train[_kept(len(train), limit)]
    mine = train[rank::num_workers]

    def pick(chosen: np.ndarray) -> Images:
        return Images(everything.pixels[chosen], everything.labels[chosen])

    return DataSet(pick(mine), len(train), pick(test) if with_test else None, [str(i) for i in range(10)])


Member = tuple[str, str, object]  # (train or test, class, where the file is)
Reader = Callable[[object], bytes]


def _folder(path: str) -> tuple[list[Member], Reader]:
    members: list[Member] = []
    for split in ("train", "test"):
        for folder, _, files in sorted(os.walk(os.path.join(path, split))):
            label = os.path.basename(folder)
            members += [(split, label, os.path.join(folder, f)) for f in sorted(files) if f.lower().endswith(SUFFIXES)]

    def read(place: object) -> bytes:
        with open(str(place), "rb") as file:
            return file.read()

    return members, read


def _tar(path: str) -> tuple[list[Member], Reader]:
    """An uncompressed tar is read where it lies, by position, from several threads."""
    members: list[tuple[str, str, str, tuple[int, int]]] = []
    try:
        with tarfile.open(path, "r:") as archive:
            for item in archive:
                parts = item.name.strip("./").split("/")
                if item.isfile() and len(parts) >= 3 and item.name.lower().endswith(SUFFIXES):
                    members.append((parts[-3], parts[-2], item.name, (item.offset_data, item.size)))
    except tarfile.TarError as error:
        sys.exit(f"--data {path}: not an uncompressed tar ({error})")
    file = open(path, "rb")  # noqa: SIM115 - read until the process ends

    def read(place: object) -> bytes:
        offset, size = place  # type: ignore[misc]
        return os.pread(file.fileno(), size, offset)

    return [(split, label, place) for split, label, _, place in sorted(members, key=lambda m: m[2])], read


def _decode(chosen: list[tuple[int, object]], read: Reader) -> Images:
    from PIL import Image

    def one(place: object) -> np.ndarray:
        image = Image.open(io.BytesIO(read(place))).convert("RGB")
        return np.asarray(image if not size else image.resize(size))

    size: tuple[int, int] = ()  # type: ignore[assignment]
    if not chosen:
        return Images(np.empty((0, 3, 1, 1), np.uint8), np.empty(0, np.int64))
    height, width, _ = one(chosen[0][1]).shape
    size = (width, height)
    pixels = np.empty((len(chosen), height, width, 3), np.uint8)
    with ThreadPoolExecutor() as pool:
        for i, image in enumerate(pool.map(one, [place for _, place in chosen], chunksize=64)):
            pixels[i] = image
    labels = np.array([label for label, _ in chosen], np.int64)
    return Images(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)), labels)
