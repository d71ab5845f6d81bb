"""The gradients of well-known models, as shapes computed from their architectures."""

from __future__ import annotations

from collections.abc import Callable

Shape = tuple[int, ...]


def resnet50() -> list[Shape]:
    """ResNet-50 for 1000 classes, in the order of its layers: 161 arrays, 25,557,032 parameters.

    Source: He et al., CVPR 2016, table 1, with the stride in the 3x3 convolutions, which changes no shape.
    """
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            shapes += [(width, channels, 1, 1), (width,), (width,)]
            shapes += [(width, width, 3, 3), (width,), (width,)]
            shapes += [(4 * width, width, 1, 1), (4 * width,), (4 * width,)]
            if block == 0:  # the shortcut has to change the number of channels too
                shapes += [(4 * width, channels, 1, 1), (4 * width,), (4 * width,)]
            channels = 4 * width
    return [*shapes, (1000, channels), (1000,)]


def gpt_small() -> list[Shape]:
    """A transformer of the size of GPT-2 small, whose output shares the embedding: 148 arrays, 124,439,808 parameters.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """
    vocabulary, context, width, num_layers = 50257, 1024, 768, 12
    layer: list[Shape] = [
        (width,), (width,),  # layer norm
        (width, 3 * width), (3 * width,), (width, width), (width,),  # attention
        (width,), (width,),  # layer norm
        (width, 4 * width), (4 * width,), (4 * width, width), (width,),  # feed-forward
    ]  # fmt: skip
    return [(vocabulary, width), (context, width), *(num_layers * layer), (width,), (width,)]


PRESETS: dict[str, Callable[[], list[Shape]]] = {"resnet50": resnet50, "gpt-small": gpt_small}
