"""Models to train on random data: two residual networks, a transformer, and a classifier of sentences."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class _Residual(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside),
        )  # fmt: skip
        self.stride, self.missing = stride, outside - inside

    def forward(self, x: Tensor) -> Tensor:
        shortcut = nn.functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.missing))
        return torch.relu(self.body(x) + shortcut)


class ResNet20(nn.Module):
    """ResNet-20 for 32 x 32 pixels, 0.27 million parameters (He et al. 2015, section 4.2)."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2 + [(32, 64, 2)] + [(64, 64, 1)] * 2
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.Sequential(*(_Residual(*shape) for shape in shapes))
        self.last = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.blocks(self.first(x)).mean((2, 3)))
        return found


class _Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 ones, beside a shortcut."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if (inside, stride) != (outside, 1):
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class ResNet50(nn.Module):
    """ResNet-50 for 1000 classes, 25.6 million parameters (He et al., CVPR 2016, table 1; stride in the 3x3)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)
        )
        blocks, inside = [], 64
        for width, num_blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for block in range(num_blocks):
                blocks.append(_Bottleneck(inside, width, 1 if block else stride))
                inside = 4 * width
        self.blocks, self.last = nn.Sequential(*blocks), nn.Linear(inside, 1000)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.blocks(self.first(x)).mean((2, 3)))
        return found


class TextCNN(nn.Module):
    """Convolutions of 3, 4 and 5 words over embeddings, 6.0 million parameters (Kim, EMNLP 2014, arXiv:1408.5882)."""

    VOCABULARY, LENGTH, WIDTH = 18765, 56, 300

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(self.VOCABULARY, self.WIDTH)
        self.filters = nn.ModuleList(nn.Conv1d(self.WIDTH, 100, size) for size in (3, 4, 5))
        self.last = nn.Linear(300, 2)

    def forward(self, x: Tensor) -> Tensor:
        words = self.words(x).transpose(1, 2)
        found: Tensor = self.last(torch.cat([torch.relu(f(words)).amax(2) for f in self.filters], 1))
        return found


class _Layer(nn.Module):
    """Attention and a feed-forward part, each behind a layer norm (Radford et al. 2019)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.norm1(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.project(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norm2(x))


class SmallGPT(nn.Module):
    """A transformer of 6 layers of width 256, 5.0 million parameters, which predicts the next of 512 tokens."""

    VOCABULARY, CONTEXT, WIDTH = 512, 64, 256

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.VOCABULARY, self.WIDTH)
        self.places = nn.Embedding(self.CONTEXT, self.WIDTH)
        self.layers = nn.Sequential(*(_Layer(self.WIDTH, 4) for _ in range(6)))
        self.norm, self.head = nn.LayerNorm(self.WIDTH), nn.Linear(self.WIDTH, self.VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(self.layers(self.tokens(x) + self.places.weight[: x.shape[1]])))
        return found.flatten(0, 1)


def images(side: int, num_classes: int) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    """Makes square images with classes."""

    def make(rank: int, batch: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(rank)
        classes = torch.randint(0, num_classes, (batch,), generator=generator)
        return torch.randn(batch, 3, side, side, generator=generator), classes

    return make


def text(rank: int, batch: int) -> tuple[Tensor, Tensor]:
    """Tokens, and the one after each."""
    shape, generator = (batch, SmallGPT.CONTEXT), torch.Generator().manual_seed(rank)
    found = torch.randint(0, SmallGPT.VOCABULARY, shape, generator=generator)
    return found, found.roll(-1, 1).flatten()


def sentences(rank: int, batch: int) -> tuple[Tensor, Tensor]:
    """Words with classes."""
    generator = torch.Generator().manual_seed(rank)
    words = torch.randint(0, TextCNN.VOCABULARY, (batch, TextCNN.LENGTH), generator=generator)
    return words, torch.randint(0, 2, (batch,), generator=generator)


#: Model; data, by rank and number of samples; samples of one worker in a step.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], tuple[Tensor, Tensor]], int]] = {
    "resnet50": (ResNet50, images(64, 1000), 8),
    "resnet20": (ResNet20, images(32, 10), 16),
    "textcnn": (TextCNN, sentences, 16),
    "gpt-small": (SmallGPT, text, 4),
}
