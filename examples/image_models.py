"""Two convolutional networks for small images: one that learns digits in seconds, and ResNet-20 for CIFAR."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SmallCNN(nn.Sequential):
    """Two convolutions and two linear layers; any image of 8x8 pixels or more."""

    def __init__(self, channels: int, size: int, num_classes: int) -> None:
        left = size // 4  # pixels a side after two halvings
        super().__init__(
            nn.Conv2d(channels, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * left * left, 64),
            nn.ReLU(),
            nn.Linear(64, num_classes),
        )


class _Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut without parameters."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.stride, self.missing = stride, outside - inside

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        # "Option A" of the paper: every other pixel, and zeros for the channels that are not there.
        shortcut = nn.functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.missing))
        return torch.relu(out + shortcut)


class ResNet20(nn.Module):
    """ResNet-20 for CIFAR, 0.27 million parameters (He et al. 2015, arXiv:1512.03385, section 4.2)."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        shapes = [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2 + [(32, 64, 2)] + [(64, 64, 1)] * 2
        self.blocks = nn.Sequential(*(_Block(*shape) for shape in shapes))
        self.last = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)).mean((2, 3)))


def create(name: str, channels: int, size: int, num_classes: int, seed: int) -> nn.Module:
    """The model called ``name``, with the same first weights for the same seed."""
    torch.manual_seed(seed)
    if name == "cnn":
        return SmallCNN(channels, size, num_classes)
    if name == "resnet20":
        return ResNet20(channels, num_classes)
    raise ValueError(f"unknown model {name!r}; known: cnn, resnet20")
