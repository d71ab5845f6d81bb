"""Makes the example programs importable, and generates small folders of images."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

torch.set_num_threads(1)  # small models: threads would wait for each other, above all beside other tests

COUNTS = {"train": 24, "test": 6}  # images of each class


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of 16x16 pixels: class "dark" is dark, class "light" is light; one is larger, one grey."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(5)
    for split, count in COUNTS.items():
        for label, base in (("dark", 40), ("light", 200)):
            (folder / split / label).mkdir(parents=True)
            for i in range(count):
                side = 20 if (label, i) == ("light", 3) else 16
                pixels = rng.integers(base - 30, base + 30, (side, side, 3)).astype(np.uint8)
                image = Image.fromarray(pixels)
                if (label, i) == ("dark", 2):
                    image = image.convert("L")
                image.save(folder / split / label / f"{i:04}.png")
    (folder / "README.txt").write_text("not an image")
    return folder


@pytest.fixture(scope="session")
def image_tar(image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in an uncompressed tar, in an order of its own."""
    path = tmp_path_factory.mktemp("tar") / "images.tar"
    with tarfile.open(path, "w") as archive:
        for split in ("test", "train"):
            for file in sorted((image_folder / split).rglob("*.png"), reverse=True):
                archive.add(file, f"./{file.relative_to(image_folder)}")
    return path
