"""A stand-in for CuPy and its devices.

The stand-in compiles the CUDA source for the host and runs it thread by thread. Its devices are as late as CUDA lets
them be: queued work runs when somebody waits for it, or for what is queued behind it, and no other work does. What is
not ordered by an event is therefore not done.
"""

from __future__ import annotations

import collections
import ctypes
import types
import weakref

import numpy as np

# The CUDA source on the host

SHIM = """
#include <cstdint>
#include <cstring>
#include <utility>
#define __global__
#define __device__
#define __launch_bounds__(...)
struct Dim { unsigned int x; };
static Dim gridDim, blockDim, blockIdx, threadIdx;
static bool misaligned;
template <int BYTES> struct Vector  // notes what a device would refuse
{
    unsigned int words[BYTES / 4];
    Vector& operator=(const Vector& other)
    {
        misaligned |= (uintptr_t)this % BYTES || (uintptr_t)&other % BYTES;
        memcpy(words, other.words, BYTES);
        return *this;
    }
};
struct alignas(8) uint2 : Vector<8> {};
struct alignas(16) uint4 : Vector<16> {};
template <class To, class From> static To bits_as(From value) { To to; memcpy(&to, &value, sizeof to); return to; }
static float __uint_as_float(unsigned int bits) { return bits_as<float>(bits); }
static unsigned int __float_as_uint(float value) { return bits_as<unsigned int>(value); }
static double __dadd_rn(double a, double b) { return a + b; }
static double __dmul_rn(double a, double b) { return a * b; }
static float add(float a, float b) { return a + b; }
static float multiply(float a, float b) { return a * b; }
"""

LAUNCH = """
template <class... Args, size_t... I>
static void call(void (*kernel)(Args...), void** args, std::index_sequence<I...>) { kernel(*(Args*)args[I]...); }
template <class... Args>
static bool run(void (*kernel)(Args...), unsigned grid, unsigned block, unsigned first_block, void** args)
{
    misaligned = false;
    gridDim.x = grid;
    blockDim.x = block;
    for (blockIdx.x = first_block; blockIdx.x < grid; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x)
            call(kernel, args, std::index_sequence_for<Args...>());
    return !misaligned;
}
extern "C" bool launch(unsigned grid, unsigned block, unsigned first_block, void** args)
{
    return run(%s, grid, block, first_block, args);
}
"""


# The stand-in


class Machine:
    """Devices of 3 multiprocessors behind the part of CuPy that gpu.py uses; ``counts`` is what was allocated.

    An ``early`` one does everything as soon as it is queued: then it is the host that may be too late.
    """

    def __init__(self, compile_for_host, peers: set[tuple[int, int]], early: bool = False) -> None:
        self.compile_for_host, self.peers, self.enabled, self.early = compile_for_host, peers, set(), early
        self.counts, self.launches, self.copies, self.scratch_of = collections.Counter(), [], [], set()
        # from, to, device or None: pinned; memory, None if that was registered
        self.regions: list[tuple[int, int, int | None, np.ndarray | None]] = []
        self.pool = collections.defaultdict(list)
        self.device_ids, self.currents = [0], collections.defaultdict(list)
        self.nulls: dict[int, StandInStream] = {}
        self.streams, self.events = {}, {}

    def allocate(self, nbytes: int, device_id: int | None) -> np.ndarray:
        whole = np.full(nbytes + 512, 0xA5, "u1")
        memory = whole[-whole.ctypes.data % 512 :][:nbytes]
        self.regions.append((memory.ctypes.data, memory.ctypes.data + nbytes, device_id, memory))
        return memory

    def owner(self, address: int) -> int | str | None:
        return next((who for start, stop, who, _ in self.regions if start <= address < stop), "pageable")

    def check_reach(self, device_id: int, address: int) -> None:
        owner = self.owner(address)
        reachable = owner in (None, device_id) or (device_id, owner) in self.enabled
        assert reachable, f"a kernel on device {device_id} accesses memory of {owner}"

    def current_stream(self):
        return (self.currents[self.device_ids[-1]] or [self.null_stream()])[-1]

    def null_stream(self):
        return self.nulls.setdefault(self.device_ids[-1], StandInStream(self, 0))

    def pinned(self, nbytes: int):
        self.counts["pinned_calls"] += 1
        if not self.pool[nbytes]:
            self.counts["pinned"] += 1
            self.pool[nbytes].append(self.allocate(nbytes, None))
        memory = self.pool[nbytes].pop()
        pointer = (ctypes.c_char * nbytes).from_buffer(memory)
        weakref.finalize(pointer, self.pool[nbytes].append, memory)
        return pointer

    def empty(self, count: int, dtype) -> StandInArray:
        self.counts["device"] += 1
        self.scratch_of.add(self.current_stream().ptr)
        memory = self.allocate(count * np.dtype(dtype).itemsize, self.device_ids[-1])
        return StandInArray(self, memory.view(dtype), self.device_ids[-1])

    def asarray(self, values: np.ndarray) -> StandInArray:
        array = self.empty(values.size, values.dtype)
        array.memory[:] = values
        return array

    def attributes(self, address: int):
        owner, home = self.owner(address), self.device_ids[-1]
        kind = {"pageable": 0, None: 1}.get(owner, 2)
        # Some devices reach pageable memory too.
        seen = owner in (None, home, "pageable") or (home, owner) in self.enabled
        return types.SimpleNamespace(type=kind, devicePointer=address if seen else 0)

    def copy(self, dst: int, src: int, nbytes: int, kind: int, stream: int) -> None:
        assert "pageable" not in (self.owner(dst), self.owner(src))
        self.copies.append((self.owner(dst), self.owner(src)))
        on = self.streams[stream] if stream else self.null_stream()
        on.queue(lambda: ctypes.memmove(dst, src, nbytes))

    def register(self, address: int, nbytes: int, flags: int) -> None:
        assert flags == 1  # for all devices
        if any(start < address + nbytes and address < stop for start, stop, _, _ in self.regions):
            raise StandInError(712)
        self.counts["registered"] += 1
        self.regions.append((address, address + nbytes, None, None))

    def unregister(self, address: int) -> None:
        [found] = [region for region in self.regions if region[0] == address and region[3] is None]
        self.regions.remove(found)
        self.counts["unregistered"] += 1

    def enable_peer(self, peer: int) -> None:
        if (self.device_ids[-1], peer) in self.enabled:
            raise StandInError(704)
        self.enabled.add((self.device_ids[-1], peer))

    def query(self, event: int) -> int:
        return 0 if self.events[event].reached() else 600

    def module(self) -> types.ModuleType:
        machine, cupy = self, types.ModuleType("cupy")

        class Stream(StandInStream):
            def __init__(self, non_blocking: bool = False) -> None:
                machine.counts["streams"] += 1
                super().__init__(machine, 1000 + len(machine.streams))
                self.non_blocking = non_blocking
                machine.streams[self.ptr] = self

        runtime = types.SimpleNamespace(
            getDevice=lambda: self.device_ids[-1],
            memcpyDefault=4,
            memoryTypeHost=1,
            memoryTypeManaged=3,
            memcpyAsync=self.copy,
            eventQuery=self.query,
            pointerGetAttributes=self.attributes,
            hostRegister=self.register,
            hostUnregister=self.unregister,
            deviceCanAccessPeer=lambda device_id, peer: (device_id, peer) in self.peers,
            deviceEnablePeerAccess=self.enable_peer,
            CUDARuntimeError=StandInError,
        )
        cupy.cuda = types.SimpleNamespace(
            runtime=runtime,
            Stream=Stream,
            Event=lambda disable_timing=False, block=False: StandInEvent(self),
            Device=lambda device_id: StandInDevice(self, device_id),
            get_current_stream=self.current_stream,
            alloc_pinned_memory=self.pinned,
        )
        cupy.RawKernel = lambda code, name, options: StandInKernel(self, code, name)
        cupy.empty, cupy.asarray = self.empty, self.asarray
        return cupy


class StandInError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA error {status}")
        self.status = status


class StandInStream:
    def __init__(self, machine: Machine, ptr: int) -> None:
        self.machine, self.ptr, self.ops, self.ran = machine, ptr, [], 0
        self.device_id = machine.device_ids[-1]

    def queue(self, op) -> None:
        self.ops.append(op)
        if self.machine.early:
            self.run()

    def run(self, upto: int | None = None) -> None:
        while self.ran < (len(self.ops) if upto is None else upto):
            self.ran += 1
            self.ops[self.ran - 1]()

    def wait_event(self, event: StandInEvent) -> None:
        stream, position = event.stream, event.position
        self.queue(lambda: stream.run(position))

    def synchronize(self) -> None:
        raise AssertionError("a stream is synchronised")

    def __enter__(self) -> None:
        assert self.device_id == self.machine.device_ids[-1]
        self.machine.currents[self.machine.device_ids[-1]].append(self)

    def __exit__(self, *_: object) -> None:
        self.machine.currents[self.machine.device_ids[-1]].pop()


class StandInEvent:
    def __init__(self, machine: Machine) -> None:
        machine.counts["events"] += 1
        self.ptr, self.device_id = machine.counts["events"], machine.device_ids[-1]
        machine.events[self.ptr] = self

    def record(self, stream: StandInStream) -> None:
        assert stream.device_id == self.device_id
        self.stream, self.position = stream, len(stream.ops)

    def reached(self) -> bool:
        return self.stream.ran >= self.position

    def synchronize(self) -> None:
        self.stream.run(self.position)

    @property
    def done(self) -> bool:
        """Whoever asks gives the device time."""
        self.stream.run(self.position)
        return True


class StandInDevice:
    attributes = types.MappingProxyType({"MultiProcessorCount": 3})

    def __init__(self, machine: Machine, device_id: int) -> None:
        self.machine, self.id = machine, device_id

    def __enter__(self) -> None:
        self.machine.device_ids.append(self.id)

    def __exit__(self, *_: object) -> None:
        self.machine.device_ids.pop()


class StandInKernel:
    def __init__(self, machine: Machine, code: str, name: str) -> None:
        machine.counts["kernels"] += 1
        self.machine, self.launch = machine, machine.compile_for_host(code, name)

    def __call__(self, grid: tuple, block: tuple, args: tuple) -> None:
        assert len(grid) == len(block) == 1
        self.machine.launches.append((*grid, *block, args))
        home = self.machine.device_ids[-1]
        for address in filter(None, map(int, args[:10])):
            self.machine.check_reach(home, address)
        self.machine.current_stream().queue(lambda: self.launch(*grid, *block, args))


class StandInArray:
    def __init__(self, machine: Machine, memory: np.ndarray, device_id: int) -> None:
        self.machine, self.memory, self.device = machine, memory, StandInDevice(machine, device_id)
        self.dtype, self.size, self.shape, self.flags = memory.dtype, memory.size, memory.shape, memory.flags
        self.nbytes, self.data = memory.nbytes, types.SimpleNamespace(ptr=memory.ctypes.data)

    def __getitem__(self, part: slice) -> StandInArray:
        return StandInArray(self.machine, self.memory[part], self.device.id)

    def __iadd__(self, value: object) -> StandInArray:
        with self.device:
            self.machine.current_stream().queue(lambda: np.add(self.memory, value, out=self.memory))
        return self

    def get(self) -> np.ndarray:
        with self.device:
            self.machine.current_stream().run()
        return self.memory.copy()
