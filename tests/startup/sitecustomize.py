"""Read by every Python process of the tests, when it starts: torch loads what it has for compilers when they want it.

The first optimizer of a process, and its first step, load ``torch._dynamo``, which takes longer than ``import torch``,
only to tell it what not to compile. And nearly half of ``import torch`` are parts that make graphs of a program. Most
processes of the tests make a few steps, and compile nothing.

And no garbage is looked for in what libraries are made of, neither when they are read nor when Python ends: that is a
fifth of all that a process does which does little, as most do.
"""

import functools
import gc
import importlib
import sys
from importlib.util import LazyLoader, _LazyModule

#: What is read in one go, with all that it needs. Of ``kvmpi``, what it reads only when it is wanted.
LIBRARIES = (
    "numpy", "zmq", "msgspec", "mpi4py", "pytest", "unittest", "hypothesis", "kvmpi", "kvmpi.optim", "kvmpi.ps.client",
    "kvmpi.ps.daemon", "kvmpi.ps.server", "kvmpi.store", "kvmpi.torch", "kvmpi.horovod", "kvmpi.launchers.command",
    "kvmpi.benchmarks.command", "torch._dynamo", "torch._functorch.aot_autograd", "sympy",
)  # fmt: skip
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


def read_what_stays(read, module):
    """Nearly everything that a library makes when it is read stays, so the collector passes over it."""
    if not gc.isenabled():  # a part of another
        read(module)
        return
    gc.disable()
    try:
        read(module)
    finally:
        gc.freeze()
        gc.enable()


#: A fifth of what NumPy reads.
HINTS = ("numpy._typing", "numpy.typing")


#: What torch names two functions of when it is read.
CONTROL_FLOW = "torch._higher_order_ops"


def name_control_flow(read, module):
    """In the place of ``CONTROL_FLOW`` while torch is read: the two functions, which read it when they are called."""

    def later(name):
        return lambda *args, **options: getattr(sys.modules[CONTROL_FLOW], name)(*args, **options)

    module.cond, module.while_loop = later("cond"), later("while_loop")


def change_torch(module):
    """``torch``: what it is told by a part that is read later it is told now."""
    if CONTROL_FLOW in sys.modules:
        del sys.modules[CONTROL_FLOW]
        importlib.import_module(CONTROL_FLOW)  # from now on itself, which is read later
    if set_metaclass := getattr(module._C, "_set_generator_metaclass", None):  # torch 2.13
        from torch._opaque_base import OpaqueBaseMeta

        set_metaclass(OpaqueBaseMeta)


def and_then(change):
    def read_and_change(read, module):
        def read_all(module):
            read(module)
            change(module)

        read_what_stays(read_all, module)

    return read_and_change


class LaterModule(_LazyModule):
    """Is not read because somebody imports it, or looks for the module of a function among all that there are."""

    def __getattribute__(self, name):
        if name in ("__class__", "__spec__", "__file__", "__name__"):
            return object.__getattribute__(self, name)
        self.__class__ = _LazyModule
        return getattr(self, name)


class LaterHintsModule(LaterModule):
    """The same of one that most want ``NDArray`` of, which is in hints only, and anything with an argument will do."""

    def __getattribute__(self, name):
        if name == "__path__":  # looked at before anything is taken from a package
            return object.__getattribute__(self, name)
        return list if name == "NDArray" else LaterModule.__getattribute__(self, name)


class Later(LazyLoader):
    """Reads a module when something in it is asked for."""

    def exec_module(self, module):
        kind = LaterHintsModule if module.__name__ in HINTS else LaterModule
        super().exec_module(module)
        module.__class__ = kind


class Again:
    """Loads what has just been loaded."""

    def create_module(self, spec):
        return sys.modules[spec.name]

    def exec_module(self, module):
        pass


class Finder:
    """Reads some modules in a way of their own, and others only when something in them is asked for.

    Args:
        readers: by the name of a module, what reads it.
        later: the modules that are asked for later, if ever.
        first: by the name of a module, one of ``later`` that must be read first, which reads that one.
    """

    def __init__(self, readers, later, first):
        self._readers = readers
        self._later = later
        self._first = first

    def find_spec(self, name, path, target=None):
        if name in self._first:
            sys.modules[self._first[name]].__doc__  # noqa: B018 - asks for something in it
            sys.modules[name].__spec__.loader = Again()  # Python takes the specification that the module has by now
            return sys.modules[name].__spec__
        if name not in self._later and name not in self._readers:
            return None
        # Who has installed a project to work on it has another finder for that.
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is None:
            return None
        if name in self._later and name not in self._readers:
            self._later.remove(name)
            spec.loader.exec_module = functools.partial(self._read_first, spec.loader.exec_module)
            spec.loader = Later(spec.loader)
        else:
            spec.loader.exec_module = functools.partial(self._readers.pop(name), spec.loader.exec_module)
        return spec

    def _read_first(self, read, module):
        self._first = {name: first for name, first in self._first.items() if first != module.__name__}
        read(module)


sys.meta_path.insert(
    0,
    Finder(
        {
            **dict.fromkeys(LIBRARIES, read_what_stays),
            "torch": and_then(change_torch),
            CONTROL_FLOW: name_control_flow,
            "torch._compile": and_then(change_compile),
            "torch.optim.optimizer": and_then(change_optimizer),
        },
        {  # the first are NumPy's docstrings
            "numpy._core._add_newdocs",
            *HINTS,
            "scipy.stats",
            "torch._meta_registrations",
            "torch._native",
            "torch.export",
            "torch.distributions",
            "torch.masked",
            "torch.nn.intrinsic",
            "torch.quantization",
            CONTROL_FLOW,
        },
        dict.fromkeys(
            ["torch._decomp", "torch._prims", "torch._refs", "torch.utils._content_store"], "torch._meta_registrations"
        ),
    ),
)
