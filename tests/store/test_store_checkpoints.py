"""``save`` and ``load`` that cannot do what they should, in real jobs and in one process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from jobs import run_job

import kvmpi
from kvmpi import errors, optim
from kvmpi.ps.client import SavedChunk
from kvmpi.store import checkpoint

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize(
    ("options", "store"),
    [
        ("-n 3", "mpi"),
        ("-n 3 -c 3 -s 2", "dist_sync"),
        ("-n 2 -c 2 -s 1", "dist_async"),
        ("-n 4 -c 2 -s 1", "dist_sync_mpi"),
    ],
)
def test_what_fails_on_one_worker_fails_on_all_and_changes_nothing(tmp_path, options, store):
    done = run_job(options, PROGRAMS / "checkpoints.py", store, tmp_path, settings={"timeout_s": 15})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"checkpoints {store} right") == int(options.split()[1])


def test_any_byte_that_has_changed_is_found_and_files_without_checksums_are_read(tmp_path):
    path, rule = tmp_path / "saved", optim.SGD(lr=0.1, momentum=0.9)
    arrays = {
        3: {"value": np.arange(5, dtype="f4"), "momentum": np.arange(5, dtype="f4") + 0.5},
        4: {"value": np.zeros(0, "f4"), "momentum": np.zeros(0, "f4")},
        5: {"value": np.arange(7, dtype="u2"), "master": np.arange(7, dtype="f4") + 0.25},
    }
    keys = [
        checkpoint.SavedKey(key, (found["value"].size,), "bfloat16" if key == 5 else "float32", 2, found)
        for key, found in arrays.items()
    ]

    def same(found):
        values = {saved.key: saved.arrays for saved in found.keys}
        return (found.clock, found.rule, values.keys()) == (7, rule, arrays.keys()) and all(
            np.array_equal(values[key][name], array) for key, of_key in arrays.items() for name, array in of_key.items()
        )

    checkpoint.write(str(path), "mpi", 7, rule, keys, with_values=True)
    whole = path.read_bytes()
    header_bytes = 8 + int.from_bytes(whole[:8], "little")
    assert len(whole) - header_bytes == sum(array.nbytes for found in arrays.values() for array in found.values())
    for i in range(header_bytes, len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 0x10]) + whole[i + 1 :])
        with pytest.raises(errors.KVError, match=rf"{path}.*damaged: key [35] "):
            checkpoint.read(str(path), {3, 4, 5}, with_values=True)

    checksum = whole.index(b"manifest_crc32")
    for i in range(header_bytes):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 0x01]) + whole[i + 1 :])
        if i in range(checksum, checksum + len("manifest_crc32")):
            assert same(checkpoint.read(str(path), {3, 4, 5}, with_values=True)), "nobody finds that one"
            continue
        with pytest.raises(errors.KVError, match=rf"load of {path}: "):
            checkpoint.read(str(path), {3, 4, 5}, with_values=True)

    path.write_bytes(whole)
    with safetensors.safe_open(path, framework="numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        manifest = json.loads(file.metadata()["manifest"])
    del manifest["crc32"]  # and there is none of the manifest
    safetensors.numpy.save_file(tensors, path, metadata={"manifest": json.dumps(manifest)})
    assert same(checkpoint.read(str(path), {3, 4, 5}, with_values=True))


@pytest.fixture
def saved(tmp_path):
    """A checkpoint, and a function that replaces what it says of its keys, with or without the right checksum."""
    path = tmp_path / "saved"
    key = checkpoint.SavedKey(3, (4,), "float32", 2, {"value": np.arange(4, dtype="f4")})
    checkpoint.write(str(path), "mpi", 7, optim.SGD(lr=0.1), [key], with_values=True)
    with safetensors.safe_open(path, framework="numpy") as file:
        tensors, metadata = {"0/value": file.get_tensor("0/value")}, file.metadata()

    def change(edit, checksum=None):
        manifest = json.loads(metadata["manifest"])
        edit(manifest)
        found = {"manifest": json.dumps(manifest)} | ({} if checksum is None else {"manifest_crc32": checksum})
        safetensors.numpy.save_file(tensors, path, metadata=found)

    return path, change, metadata["manifest_crc32"]


def test_a_folder_is_no_checkpoint(tmp_path):
    with pytest.raises(errors.KVError, match=rf"load of {tmp_path}: it is a folder.*--resume"):
        checkpoint.read(str(tmp_path), {3}, with_values=True)


@pytest.mark.parametrize(
    "edit",
    [
        lambda manifest: manifest.update(clock=8),
        lambda manifest: manifest.update(rule=["sgd", {"lr": 0.2}]),
        lambda manifest: manifest["keys"].clear(),
        lambda manifest: manifest.pop("crc32"),
    ],
    ids=["clock", "rule", "keys", "checksums"],
)
def test_a_file_that_says_something_else_than_was_saved_is_damaged(saved, edit):
    path, change, checksum = saved
    change(edit)
    checkpoint.read(str(path), {3}, with_values=True)  # nothing else is wrong with it
    change(edit, checksum)
    with pytest.raises(errors.KVError, match=rf"load of {path}: the file is damaged: what it says of its keys"):
        checkpoint.read(str(path), {3}, with_values=True)


@pytest.mark.parametrize(
    "edit",
    [
        lambda manifest: manifest.update(clock=None),
        lambda manifest: manifest.update(clock=float("inf")),
        lambda manifest: manifest.pop("clock"),
        lambda manifest: manifest.pop("rule"),
        lambda manifest: manifest.update(rule=3),
        lambda manifest: manifest.update(rule=["sgd"]),
        lambda manifest: manifest.update(rule=["ours", {}]),
        lambda manifest: manifest.update(rule=["sgd", {"lr": "fast"}]),
        lambda manifest: manifest["keys"][0].__setitem__(0, [3]),
        lambda manifest: manifest["keys"][0].__setitem__(1, [None]),
        lambda manifest: manifest["keys"][0].__setitem__(1, ["four"]),
        lambda manifest: manifest["keys"][0].__setitem__(1, [10**30]),
        lambda manifest: manifest["keys"][0].__setitem__(2, {}),
        lambda manifest: manifest["keys"][0].pop(),
        lambda manifest: manifest.update(libraries=[]),
    ],
    ids=[
        "clock", "endless-clock", "no-clock", "no-rule", "rule", "half-a-rule", "unknown-rule", "rate", "key",
        "no-count", "text-count", "huge-count", "dtype", "short-key", "no-libraries",
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_an_error_that_names_the_file(saved, edit):
    """Files from before there was a checksum of it have none. Read with or without values, or both ways, it is seen."""
    path, change, _ = saved
    change(edit)
    said = []
    for with_values in (True, False):
        try:
            checkpoint.read(str(path), {3}, with_values=with_values)
        except errors.KVError as error:
            said.append(str(error))
    assert said
    assert all(text.startswith(f"load of {path}: ") for text in said), said


@pytest.mark.parametrize(
    ("options", "store", "left"), [("-n 3 -c 3 -s 2", "dist_sync", 2), ("-n 4 -c 2 -s 1", "dist_sync_mpi", 2)]
)
def test_those_who_go_on_without_client_0_save_and_load(tmp_path, options, store, left):
    settings = {"on_client_loss": "shrink", "heartbeat_timeout_s": 2, "heartbeat_s": 0.2, "timeout_s": 30}
    done = run_job(options, PROGRAMS / "first_left.py", store, tmp_path, settings=settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all there") == left, done.stdout + done.stderr


@pytest.mark.parametrize("what", ["save", "assign", "load"])
@pytest.mark.parametrize(("options", "on_client_loss", "left"), [
    ("-n 2 -c 2 -s 1 --restart 1", "wait", 2), ("-n 3 -c 3 -s 2", "shrink", 2),
])  # fmt: skip
def test_what_client_0_was_lost_in_the_middle_of_is_done_when_the_call_returns(
    tmp_path, options, on_client_loss, left, what
):
    settings = {"on_client_loss": on_client_loss, "heartbeat_timeout_s": 2, "heartbeat_s": 0.2, "timeout_s": 30}
    done = run_job(options, PROGRAMS / "lost_halfway.py", what, tmp_path, settings=settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done all the same") == left, done.stdout + done.stderr


@pytest.mark.parametrize("what", ["save", "assign", "load"])
def test_who_comes_back_before_anybody_has_pushed_goes_through_it_as_well(tmp_path, what):
    settings = {"on_client_loss": "shrink", "heartbeat_timeout_s": 2, "heartbeat_s": 0.2, "timeout_s": 60}
    done = run_job("-n 2 -c 2 -s 1 --restart 1", PROGRAMS / "back_before.py", what, tmp_path, settings=settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("through") == 2, done.stdout + done.stderr


@pytest.mark.parametrize("what", ["assign", "load"])
def test_who_comes_back_after_some_steps_puts_nothing_back_that_was_there_before_the_first(tmp_path, what):
    settings = {"on_client_loss": "shrink", "heartbeat_timeout_s": 2, "heartbeat_s": 0.2, "timeout_s": 60}
    done = run_job("-n 1 -c 1 -s 1 --restart 1", PROGRAMS / "begins_again.py", what, tmp_path, settings=settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as trained") == 1, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("options", "on_client_loss"), [("-n 2 -c 2 -s 1 --restart 1", "wait"), ("-n 1 -c 1 -s 1 --restart 1", "shrink")]
)
def test_who_is_started_again_and_loads_the_latest_file_changes_no_rule(tmp_path, options, on_client_loss):
    settings = {"on_client_loss": on_client_loss, "heartbeat_timeout_s": 2, "heartbeat_s": 0.2, "timeout_s": 60}
    done = run_job(options, PROGRAMS / "loads_latest.py", tmp_path, settings=settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as trained") == int(options.split()[1]), done.stdout + done.stderr


def test_a_chunk_without_an_update_is_saved_with_those_that_have_one():
    """Its client was lost in the middle of the first push."""
    half = np.array([1.5, -2.0], "f4").view("u4").__rshift__(16).astype("u2")  # bfloat16, exactly
    chunks = [
        SavedChunk(0, 2, 0, {"value": half}),
        SavedChunk(2, 3, 1, {"value": half[:1], "master": np.array([1.25], "f4"), "momentum": np.array([4.0], "f4")}),
    ]
    saved = checkpoint.SavedKey.of_chunks("w", (3,), "bfloat16", chunks, optim.SGD(0.1, momentum=0.5))
    assert saved.updates == 1
    assert saved.arrays["master"].tolist() == [1.5, -2.0, 1.25]
    assert saved.arrays["momentum"].tolist() == [0.0, 0.0, 4.0]
    assert saved.arrays["value"].tolist() == [*half.tolist(), half[0]]

    chunks = [SavedChunk(0, 2, 0, {"value": half}), SavedChunk(2, 3, 1, {"value": half[:1], "sum": np.ones(1, "f4")})]
    rule = optim.Adagrad(0.1, initial_accumulator_value=0.25)
    saved = checkpoint.SavedKey.of_chunks("w", (3,), "bfloat16", chunks, rule)
    assert saved.arrays["sum"].tolist() == [0.25, 0.25, 1.0]


def test_a_rule_that_differs_for_many_keys_is_not_made_anew_with_each_of_them(tmp_path, monkeypatch):
    """It has a part for each of them, as where biases do not decay: that would be as many as keys times keys."""
    made: list[object] = []
    check = optim.SGD._validate
    with kvmpi.create("dist_sync") as kv:
        keys = list(range(60))
        kv.init(keys, [np.zeros(2, "f4")] * len(keys))
        with pytest.raises(errors.ConfigError, match="hyperparameters that most keys have"):
            kv.set_optimizer(optim.SGD(lr=0.1).for_keys([f"{k:04000}" for k in keys], weight_decay=0.5))
        kv.set_optimizer(optim.SGD(lr=0.1).for_keys(keys, weight_decay=0.5))
        monkeypatch.setattr(optim.SGD, "_validate", lambda rule: (made.append(rule), check(rule)))
        for save in (lambda: kv.save(tmp_path / "saved"), lambda: kv.assign(keys, [np.ones(2, "f4")] * len(keys))):
            made.clear()
            save()
            assert len(made) <= 2 * (1 + len(keys))
        kv.set_hyperparams(**{"weight_decay@7": 0.25})  # and is the new one after a change
        kv.save(tmp_path / "saved")
    rule = checkpoint.read(tmp_path / "saved", keys, with_values=True).rule
    assert [rule.of_key(key).weight_decay for key in (6, 7)] == [0.5, 0.25]
