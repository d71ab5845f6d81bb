"""``save``, ``load`` and other calls in which all meet: what fails on one worker fails on all, changes nothing, and
leaves everybody in step."""

import sys
import time
from pathlib import Path

import numpy as np

import kvmpi
from kvmpi.errors import ConfigError, KVError, OrderMismatchError, ShapeMismatchError, UnsupportedError
from kvmpi.store import checkpoint, saving

COUNT = 70_000  # large enough that the workers of a host share the value of an mpi store
name, folder = sys.argv[1], Path(sys.argv[2])
kv = kvmpi.create(name)
r, n = kv.rank, kv.num_workers
good, absent = folder / "good", folder / "absent"
turns = iter(range(1000))


def in_step(label):
    """Nobody passes a barrier that another has not reached: a worker that is late has left a file before it."""
    for _ in range(3):
        turn = next(turns)
        if r == turn % n:
            time.sleep(0.05)
            (folder / f"turn {turn}").touch()
        kv.barrier()
        assert (folder / f"turn {turn}").exists(), f"worker {r} passed barrier {turn} too early, after: {label}"


def expect(label, call, kinds, *named):
    """It fails on every worker, with an error that says why, and the values are as they were."""
    raised = None
    try:
        call()
    except Exception as error:
        raised = error
    assert isinstance(raised, kinds), f"{label}: {raised!r} on worker {r}"
    assert all(str(word) in str(raised) for word in named), (label, raised)
    in_step(label)
    assert (value("w") == changed).all(), f"{label}: worker {r} has {value('w')[:3]}"
    assert kv.keys == ["w"], label


def value(key):
    out = np.empty(COUNT, "f4")
    kv.pull(key, out)
    return out


index = np.arange(COUNT, dtype="f4")
kv.init("w", index)
if name == "dist_async":
    kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
kv.save(good)
kv.push("w", index + r)
kv.barrier()
changed = value("w")
assert (changed == (n + (name == "dist_async")) * index + n * (n - 1) / 2).all()

for odd in (0, n - 1):
    file = absent if r == odd else good
    expect(f"load of a file that worker {odd} has not", lambda file=file: kv.load(file), KVError, absent)
expect("save into no folder", lambda: kv.save(folder / "none" / "w"), KVError, "none", "unchanged")
expect("save of states into no folder", lambda: kv.save_optimizer_states(folder / "none" / "w"), KVError, "none")
assert not (folder / "none").exists()

if r == 0:
    other = checkpoint.SavedKey("w", (5,), "float32", 0, {"value": np.zeros(5, "f4")})
    new = checkpoint.SavedKey("new", (5,), "float32", 0, {"value": np.zeros(5, "f4")})
    checkpoint.write(str(folder / "other"), name, 0, None, [new, other], with_values=True)
kv.barrier()
expect("load of another shape", lambda: kv.load(folder / "other"), ShapeMismatchError, "'w'", "(5,)", COUNT)

if r == 0:
    damaged = bytearray(good.read_bytes())
    damaged[-COUNT] ^= 1  # somewhere in the last value
    (folder / "damaged").write_bytes(damaged)
    (folder / "torn").write_bytes(damaged[: len(damaged) // 2])
kv.barrier()
expect("load of half a file", lambda: kv.load(folder / "torn"), KVError, "torn", "damaged")
for odd in (0, n - 1):  # a disk that is bad on one host
    file = folder / "damaged" if r == odd else good
    expect(f"load of a file damaged for worker {odd}", lambda file=file: kv.load(file), KVError, "damaged", "'w'")

if kv.mpi_size > 1:  # hosts that have no common file system
    kv.save(folder / "later")
    for odd in (0, n - 1):
        file = folder / "later" if r == odd else good
        expect(f"load of another file by worker {odd}", lambda file=file: kv.load(file), ConfigError, "file_checksum=")

for odd in (0, n - 1):
    size = COUNT + (r == odd)
    expect("assign", lambda size=size: kv.assign("w", np.ones(size, "f4")), ShapeMismatchError, f"worker {odd}", COUNT)
    calls = {"barrier": kv.barrier, "assign": lambda: kv.assign("w", np.ones(COUNT, "f4"))}
    if name != "mpi":
        calls["compression"] = lambda: kv.set_gradient_compression({"type": "fp16"})
    for label, call in calls.items():
        if r == odd:  # something that it had started
            kv._engine.push(lambda: [][1], writes=[kv._engine.variable("odd")], lane="cpu", name="odd")
        expect(label, call, IndexError if r == odd else KVError, "list index out of range")
    if name != "mpi":
        kind = {"type": "3bit" if r == odd else "fp16"}
        expect("compression", lambda kind=kind: kv.set_gradient_compression(kind), UnsupportedError, "3bit")

if kv.mpi_size > 1:  # some workers of a client make another call: the others are told, and nobody waits for anybody
    for call in (lambda: kv.save(folder / "mixed"), lambda: kv.load(good)):
        noticed = False
        try:
            if kv.client_rank == kv.num_clients - 1:
                value("w") if r == n - 1 else call()
        except OrderMismatchError:
            noticed = True
        assert noticed is (kv.client_rank == kv.num_clients - 1)
        in_step("another call")
    assert not (folder / "mixed").exists()
kv.load(good)
assert (value("w") == index).all()
in_step("load")
kv.save(folder / "again")
in_step("save")
kv.push("w", index)
kv.load(folder / "again")
assert (value("w") == index).all()
if kv.num_clients > 1:  # the others wait for worker 0's value
    raised = None
    try:
        kv.broadcast("z", np.zeros(COUNT + (kv.client_rank == kv.num_clients - 1), "f4"), np.empty(COUNT, "f4"))
    except ShapeMismatchError as error:
        raised = error
    assert f"client {kv.num_clients - 1}" in str(raised), raised
    in_step("broadcast")
if 1 < kv.num_clients < n:  # who gives the value is in a client that cannot agree on it
    raised = None
    try:
        kv.broadcast("y", np.zeros(COUNT + (r == 1), "f4"), np.empty(COUNT, "f4"))
    except ShapeMismatchError as error:
        raised = error
    assert "key 'y'" in str(raised), raised
    assert kv.client_rank == 0 or "client 0" in str(raised), raised
    in_step("broadcast where a client is not at one")
kv.close()

write, read = checkpoint.write, checkpoint.read


def slowly(do):
    """A disk that takes longer than a call may."""

    def later(*args, **options):
        time.sleep(6.5 * (r == 0))
        return do(*args, **options)

    return later


if name == "dist_sync_mpi":  # whose workers wait for each other, and whose clients do
    with kvmpi.create(name, timeout_s=5) as kv:
        saving.SLOWEST_BYTES_PER_S = 4 * COUNT / 20
        kv.init("w", index)
        checkpoint.write = slowly(write)
        kv.save(folder / "slow")
        checkpoint.write, checkpoint.read = write, slowly(read)
        kv.load(folder / "slow")
        assert (value("w") == index).all()
print(f"checkpoints {name} right", flush=True)
