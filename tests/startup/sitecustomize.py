"""Read by every Python process of the tests, when it starts: torch's compiler is loaded when something is compiled.

The first optimizer of a process, and its first step, load ``torch._dynamo``, which takes longer than ``import torch``,
only to tell it what not to compile. Most processes of the tests make a few steps, and compile nothing.
"""

import functools
import sys
from importlib.machinery import PathFinder

#: Whoever looks for the program's own frames passes over those of torch, and so over these. The compiler imports it.
_NAME = "torch.startup"
sys.modules[_NAME] = sys.modules[__name__]
__name__ = _NAME


def is_loaded():
    """Whether somebody has asked for the compiler: from then on everything is as torch has made it."""
    return "torch._dynamo" in sys.modules


def change_compile(module):
    """``torch._compile``: what it hides from the compiler need not be hidden before there is one."""
    disable = module._disable_dynamo

    def disable_later(function=None, recursive=True):
        if function is None:
            return functools.partial(disable_later, recursive=recursive)
        hidden = disable(function, recursive)

        @functools.wraps(function)
        def call(*args, **options):
            return (hidden if is_loaded() else function)(*args, **options)

        return call

    module._disable_dynamo = disable_later


def change_optimizer(module):
    """``torch.optim.optimizer``: a step ends what is being compiled, and is made with gradients or without."""
    import torch

    use_grad = module._use_grad_for_differentiable

    def use_grad_later(step):
        ends_graph = use_grad(step)

        @functools.wraps(step)
        def call(self, *args, **options):
            if is_loaded():
                return ends_graph(self, *args, **options)
            with torch.set_grad_enabled(self.defaults["differentiable"]):
                return step(self, *args, **options)

        return call

    module._use_grad_for_differentiable = use_grad_later


class Finder:
    """Changes modules as soon as they have been read."""

    def __init__(self, changes):
        self._changes = changes

    def find_spec(self, name, path, target=None):
        if name not in self._changes:
            return None
        change = self._changes.pop(name)
        if not self._changes:
            sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        read = spec.loader.exec_module

        def read_and_change(module):
            read(module)
            change(module)

        spec.loader.exec_module = read_and_change
        return spec


sys.meta_path.insert(0, Finder({"torch._compile": change_compile, "torch.optim.optimizer": change_optimizer}))
