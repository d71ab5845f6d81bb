"""The gradients of well-known models, as shapes computed from their architectures, and how often each is used."""

from __future__ import annotations

from collections.abc import Callable

Shape = tuple[int, ...]
#: Shapes in the order of the layers; each with the number of places of one sample at which it is applied.
Uses = list[tuple[Shape, int]]


def _resnet50() -> Uses:
    places = 112 * 112
    found: Uses = [((64, 3, 7, 7), places), ((64,), places), ((64,), places)]
    channels, side = 64, 56
    for width, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            before = side * side
            if block == 0 and width > 64:
                side //= 2
            after = side * side
            shapes = [((width, channels, 1, 1), before), ((width,), before), ((width,), before)]
            shapes += [((width, width, 3, 3), after), ((width,), after), ((width,), after)]
            shapes += [((4 * width, width, 1, 1), after), ((4 * width,), after), ((4 * width,), after)]
            if block == 0:  # the shortcut has to change the number of channels too
                shapes += [((4 * width, channels, 1, 1), after), ((4 * width,), after), ((4 * width,), after)]
            found += shapes
            channels = 4 * width
    return [*found, ((1000, channels), 1), ((1000,), 1)]


def _resnet20() -> Uses:
    found: Uses = [((16, 3, 3, 3), 1024), ((16,), 1024), ((16,), 1024)]
    channels, side = 16, 32
    for width in (16, 32, 64):
        for block in range(3):
            if block == 0 and width > 16:
                side //= 2
            places = side * side
            for inside in (channels, width):
                found += [((width, inside, 3, 3), places), ((width,), places), ((width,), places)]
            channels = width
    return [*found, ((10, channels), 1), ((10,), 1)]


def _gpt_small() -> Uses:
    vocabulary, context, width, num_layers = 50257, 1024, 768, 12
    layer: list[Shape] = [
        (width,), (width,),  # layer norm
        (width, 3 * width), (3 * width,), (width, width), (width,),  # attention
        (width,), (width,),  # layer norm
        (width, 4 * width), (4 * width,), (4 * width, width), (width,),  # feed-forward
    ]  # fmt: skip
    shapes = [(vocabulary, width), (context, width), *(num_layers * layer), (width,), (width,)]
    return [(shape, context) for shape in shapes]


def _textcnn() -> Uses:
    words, width, maps, length = 18765, 300, 100, 20
    found: Uses = [((words, width), 0)]
    for window in (3, 4, 5):
        found += [((maps, width, window), length), ((maps,), length)]
    return [*found, ((2, 3 * maps), 1), ((2,), 1)]


#: Name -> shapes and uses.
USES: dict[str, Callable[[], Uses]] = {
    "resnet50": _resnet50, "resnet20": _resnet20, "gpt-small": _gpt_small, "textcnn": _textcnn,
}  # fmt: skip


def resnet50() -> list[Shape]:
    """ResNet-50 for 1000 classes, in the order of its layers: 161 arrays, 25,557,032 parameters.

    Source: He et al., CVPR 2016, table 1, with the stride in the 3x3 convolutions, which changes no shape.
    """
    return [shape for shape, _ in _resnet50()]


def resnet20() -> list[Shape]:
    """ResNet-20 for 32 x 32 pixels and 10 classes: 59 arrays, 269,722 parameters.

    Source: He et al., CVPR 2016, section 4.2, with shortcuts that have no parameters.
    """
    return [shape for shape, _ in _resnet20()]


def gpt_small() -> list[Shape]:
    """A transformer of the size of GPT-2 small, whose output shares the embedding: 148 arrays, 124,439,808 parameters.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """
    return [shape for shape, _ in _gpt_small()]


def textcnn() -> list[Shape]:
    """A network for sentences on 18,765 words of 300 numbers: 9 arrays, 5,990,402 parameters.

    Source: Kim, "Convolutional Neural Networks for Sentence Classification", 2014, on the MR sentences.
    """
    return [shape for shape, _ in _textcnn()]


PRESETS: dict[str, Callable[[], list[Shape]]] = {
    "resnet50": resnet50, "gpt-small": gpt_small, "resnet20": resnet20, "textcnn": textcnn,
}  # fmt: skip
