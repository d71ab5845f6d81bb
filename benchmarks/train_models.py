"""Two small models to train on random data: a residual network and a transformer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def images(rank: int, batch: int) -> tuple[Tensor, Tensor]:
    """Of one worker."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(batch, 3, 32, 32, generator=generator), torch.randint(0, 10, (batch,), generator=generator)


def text(rank: int, batch: int) -> tuple[Tensor, Tensor]:
    """Of one worker."""
    shape, generator = (batch, SmallGPT.CONTEXT), torch.Generator().manual_seed(rank)
    found = torch.randint(0, SmallGPT.VOCABULARY, shape, generator=generator)
    return found, found.roll(-1, 1).flatten()


#: Model, data, samples of one worker in a step.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Any], int]] = {
    "resnet20": (ResNet20, images, 16),
    "gpt": (SmallGPT, text, 4),
}
