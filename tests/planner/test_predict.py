"""Predictions against closed forms, what must be monotonic, and who is recommended."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvmpi.collectives.cost import Figures
from kvmpi.errors import ConfigError
from kvmpi.planner import models, predict
from kvmpi.planner.calibrate import from_lines
from kvmpi.planner.predict import Prediction
from kvmpi.planner.recommend import candidates, recommend
from kvmpi.planner.simulate import Course, Simulation
from kvmpi.planner.spec import ALGORITHMS, Cluster, Disturbance, Job, ServerFigures, parse_link

RATE = 1e8  # bytes per second of a link
#: Nothing costs anything but bytes on links.
FREE = Figures(
    meeting_s=1e-12, add_bytes_per_s=1e18, copy_bytes_per_s=1e18, message_s=1e-12, link_bytes_per_s=1, library_s=1.0
)
SERVERS = ServerFigures(message_s=1e-12, process_bytes_per_s=1e15)
NBYTES = 100_000_000


def cluster(hosts: int, **more: float) -> Cluster:
    plain = Cluster(
        hosts=hosts, server_hosts=8, link_bytes_per_s=RATE, latency_s=0.0, figures=FREE, server_figures=SERVERS
    )
    return replace(plain, **more)


def planned(hosts: int, job: Job, *, compute_s: float = 0.5, keys: int = 64, **more: float) -> Prediction:
    return predict.predict(models.plain(NBYTES, compute_s, keys), cluster(hosts, **more), job)


# ---- closed forms


@pytest.mark.parametrize("hosts", [2, 4, 8, 64])
def test_one_ring(hosts: int) -> None:
    """Patarasuk and Yuan: each link carries 2 (p-1)/p of the bytes; and the first chunk travels on its own."""
    found = planned(hosts, Job("mpi-SGD", hosts, 1, 0))
    least = 2 * (hosts - 1) / hosts * NBYTES / RATE
    assert least <= found.exposed_s <= 1.03 * least + 2 * hosts * 16 * (128 << 10) / RATE
    assert found.link_bytes == pytest.approx(2 * (hosts - 1) / hosts * NBYTES)
    assert found.bottleneck == "sums inside clients"
    shares = planned(hosts, Job("mpi-SGD", hosts, 1, 0, sharded=True))
    assert shares.step_s == found.sharded_step_s == pytest.approx(found.step_s)
    assert shares.link_bytes == pytest.approx(found.link_bytes), "half of it each way"


@pytest.mark.parametrize("workers", [2, 4, 7])
def test_shares_on_one_host_cost_a_copy(workers: int) -> None:
    """Each worker sums and copies its share out; then it copies all others' in."""
    figures = replace(FREE, add_bytes_per_s=1e9, copy_bytes_per_s=2e9)
    found = planned(1, Job("mpi-SGD", workers, 1, 0), figures=figures)
    assert found.sharded_step_s is not None
    copy_s = (workers - 1) / workers * NBYTES / 2e9
    assert found.exposed_s == pytest.approx((workers - 1) / workers * NBYTES / 1e9 + copy_s, rel=0.01)
    assert found.sharded_step_s - found.step_s == pytest.approx(copy_s, rel=0.01)


def test_one_worker_and_one_server() -> None:
    """All bytes go there and come back at the same time; the last piece has to come back by itself."""
    found = planned(1, Job("dist-SGD", 1, 1, 1))
    piece_s = (2 << 20) / RATE
    assert found.step_s == pytest.approx(0.5 + NBYTES / RATE + piece_s, rel=0.02)
    assert found.nic_busy == pytest.approx(1 / found.step_s, rel=0.02)
    assert found.pushed_bytes == NBYTES


@pytest.mark.parametrize(("workers", "servers"), [(8, 1), (12, 2), (16, 4)])
def test_a_saturated_server(workers: int, servers: int) -> None:
    """Incast: the servers' links carry what all clients send, however fast those are."""
    saturated_s = workers * NBYTES / servers / RATE
    found = planned(workers, Job("dist-SGD", workers, 1, servers))
    assert saturated_s + 0.5 <= found.step_s <= 1.05 * saturated_s + 0.5 + workers * (2 << 20) / RATE
    assert found.bottleneck == "servers' links"
    free = planned(workers, Job("dist-ASGD", workers, 1, servers))
    assert 0.99 * saturated_s <= free.step_s <= saturated_s + 0.8, "some compute while others use the links"
    assert free.nic_busy > 0.85


def test_one_straggler() -> None:
    """Who waits for all waits for the slowest; who waits for nobody loses only what that one does not do."""
    slow, fast_s = Disturbance(slow_workers=1, slow_factor=3.0), 1.0
    model, on = models.plain(1000, fast_s), cluster(4)
    waiting = predict.predict(model, on, Job("dist-SGD", 4, 1, 1), slow)
    assert waiting.step_s == pytest.approx(3.0, rel=0.01)
    assert waiting.bottleneck == "stragglers"
    free = predict.predict(model, on, Job("dist-ASGD", 4, 1, 1), slow)
    assert free.step_s == pytest.approx(4 / (3 / 1.0 + 1 / 3.0), rel=0.05)
    inside = predict.predict(model, on, Job("mpi-ASGD", 4, 2, 1), slow)
    assert inside.step_s == pytest.approx(2 / (1 / 1.0 + 1 / 3.0), rel=0.06)


@pytest.mark.parametrize("workers", [2, 5, 12])
def test_staleness_of_workers_that_are_alike(workers: int) -> None:
    found = planned(workers, Job("dist-ASGD", workers, 1, 1))
    assert found.mean_staleness == pytest.approx(workers - 1, abs=0.05)
    assert planned(workers, Job("dist-SGD", workers, 1, 1)).mean_staleness is None


def test_one_worker_alone_exchanges_nothing() -> None:
    assert planned(1, Job("mpi-SGD", 1, 1, 0), compute_s=0.2).exposed_s == 0


def test_weights_are_exchanged_once_an_interval() -> None:
    job = Job("dist-ESGD", 2, 1, 1, interval=10)
    found = planned(2, job)
    assert found.step_s == pytest.approx(0.5 + 2 * NBYTES / RATE / 10, rel=0.03)
    assert found.pushed_bytes == NBYTES / 10
    grouped = planned(4, Job("DiLoCo", 4, 2, 1, interval=1000))
    assert grouped.step_s == pytest.approx(0.5 + NBYTES / RATE, rel=0.05), "two hosts' rings in every step"


def test_communication_hides_behind_the_backward_pass() -> None:
    late, early = (planned(2, Job("mpi-SGD", 2, 1, 0, overlap=way), compute_s=6.0) for way in (False, True))
    assert late.exposed_s == pytest.approx(1.0, rel=0.05)
    assert early.exposed_s < 0.1


def test_failures() -> None:
    failing = Disturbance(mtbf_s=1000.0, restart_s=50.0)
    model = models.plain(1000, 1.0)
    for algorithm, waiting in (("dist-SGD", 8), ("dist-ASGD", 1), ("mpi-ASGD", 4)):
        found = predict.predict(model, cluster(8), Job(algorithm, 8, 2, 1), failing, steps=10)
        assert found.epoch_s == pytest.approx(10 * found.step_s * (1 + waiting * 50 / 1000))


def test_servers_beside_workers_share_their_links() -> None:
    """4 hosts, 4 servers: 3/4 of all goes over the network, into the server and, as an answer, into the worker."""
    found = planned(4, Job("dist-SGD", 4, 1, 4), compute_s=0.0, server_hosts=0)
    assert found.step_s == pytest.approx(2 * 0.75 * NBYTES / RATE, rel=0.1)


def test_a_processor_or_a_latency_can_be_what_limits() -> None:
    slow = ServerFigures(message_s=1e-12, process_bytes_per_s=1e7)
    found = planned(4, Job("dist-SGD", 4, 1, 1), server_figures=slow)
    assert found.bottleneck == "servers' processors"
    assert 0.5 + 4 * NBYTES / 1e7 <= found.step_s <= 1.35 * (0.5 + 4 * NBYTES / 1e7), "messages are whole before"
    busy = planned(4, Job("dist-SGD", 4, 1, 1), keys=1000, server_figures=replace(SERVERS, message_s=0.01))
    assert busy.step_s == pytest.approx(0.5 + 4 * 1000 * 0.01, rel=0.05)
    far = planned(1, Job("dist-SGD", 1, 1, 1), latency_s=1.0)  # a window of 4 MiB every two seconds
    assert far.step_s == pytest.approx(0.5 + 2 * NBYTES / (4 << 20), rel=0.15)


@pytest.mark.parametrize("algorithm", ["mpi-SGD", "mpi-ESGD"])
def test_what_a_resource_takes_is_part_of_the_step(algorithm: str) -> None:
    """Sums and broadcasts of a client go on beside each other, each as long as the step that waits for them."""
    slow = replace(FREE, meeting_s=0.01, message_s=1e-4, add_bytes_per_s=1e9, copy_bytes_per_s=1e8)
    for hosts in (1, 16):
        found = planned(hosts, Job(algorithm, 64, 1, 1, interval=1), compute_s=0.01, figures=slow)
        taken, of = re.findall(r"([\d.]+) s of a step of ([\d.]+) s", found.reason)[0]
        assert found.bottleneck == "sums inside clients"
        assert float(taken) <= float(of) * 1.01


def test_one_machine_does_the_work_of_all_hosts_of_a_lab() -> None:
    slow = ServerFigures(message_s=1e-12, process_bytes_per_s=NBYTES)  # four seconds for all bytes of a client
    found = planned(2, Job("dist-SGD", 2, 1, 8), lab_cores=2, server_figures=slow, link_bytes_per_s=1e12)
    assert found.step_s == pytest.approx(0.5 + 2 * 4 / 2, rel=0.25)
    assert found.step_s >= 0.5 + 2 * 4 / 2


@pytest.mark.parametrize("hosts", [1, 2, 32])
def test_many_workers_are_few_that_stand_for_them(hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, on = models.plain(NBYTES, 0.5, 32), replace(cluster(hosts), server_hosts=4)
    for algorithm in ("dist-SGD", "dist-ASGD"):
        job = Job(algorithm, 64, 1, 4)
        all_of_them = predict.predict(model, on, job, events=40_000)
        with monkeypatch.context() as patch:
            patch.setattr(predict, "_MANY", 32)
            patch.setattr(predict, "_REPRESENTATIVES", 16)
            seen: list[Course] = []
            patch.setattr(predict, "Simulation", lambda course, seen=seen: seen.append(course) or Simulation(course))
            few = predict.predict(model, on, job, events=10_000)
        assert [len(course.hosts) for course in seen] == [16]
        assert few.step_s == pytest.approx(all_of_them.step_s, rel=0.1)
        assert (few.mean_staleness or 0) == pytest.approx(all_of_them.mean_staleness or 0, rel=0.01)


@pytest.mark.parametrize("algorithm", ["dist-SGD", "dist-ASGD"])
def test_ten_thousand_workers(algorithm: str) -> None:
    started_s = time.process_time()
    model = models.preset("resnet50", 0.5)
    on = Cluster(hosts=2500, server_hosts=64, link_bytes_per_s=parse_link("25gbit"))
    found = predict.predict(model, on, Job(algorithm, 10_000, 1250, 64), Disturbance(jitter=0.1))
    assert math.isfinite(found.step_s)
    assert found.step_s >= 0.5 or not found.job.of.synchronous
    assert time.process_time() - started_s < 60, "seconds of processor time"


# ---- what must hold for all

JOBS = st.builds(
    lambda name, workers, clients, servers, interval, overlap: Job(
        name, workers, min(clients, workers), servers, interval, overlap
    ),
    st.sampled_from(list(ALGORITHMS)), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5),
    st.booleans(),
)  # fmt: skip


@settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate])
@given(JOBS, st.integers(1, 5), st.sampled_from([0, 3]), st.floats(1e-3, 2.0))
def test_more_of_anything_good_is_not_slower(job: Job, hosts: int, server_hosts: int, compute_s: float) -> None:
    model = models.plain(20_000_000, compute_s, 7)
    on = Cluster(hosts=hosts, server_hosts=server_hosts, link_bytes_per_s=RATE)

    def step_s(on: Cluster = on, job: Job = job, of: models.Model = model, slow: float = 1.0) -> float:
        return predict.predict(of, on, job, Disturbance(slow_workers=1, slow_factor=slow), events=3000).step_s

    usual, slack = step_s(), 1.02
    assert step_s(replace(on, link_bytes_per_s=4 * RATE)) <= slack * usual
    assert step_s(of=models.plain(40_000_000, compute_s, 7)) * slack >= usual
    assert step_s(of=models.plain(20_000_000, 2 * compute_s, 7)) * slack >= usual
    assert step_s(slow=2.0) * slack >= usual
    if job.of.averages:
        assert step_s(job=replace(job, interval=2 * job.interval)) <= slack * usual
    if job.of.synchronous:
        assert usual >= compute_s * 0.999


@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate])
@given(JOBS, st.integers(0, 9))
def test_a_seed_says_everything(job: Job, seed: int) -> None:
    def one(of: int) -> Prediction:
        return predict.predict(
            models.plain(10_000_000, 0.1, 5), cluster(3), job, Disturbance(jitter=0.3), seed=of, events=3000
        )

    assert one(seed) == one(seed)
    assert one(seed).step_s != one(seed + 1).step_s


# ---- models, figures, recommendations


def test_models_are_read(tmp_path) -> None:
    model = models.read("resnet50", 0.6)
    assert (model.nbytes, len(model.layers), model.compute_s) == (4 * 25_557_032, 161, pytest.approx(0.6))
    gradients = model.gradients()
    assert gradients[0][0] == 4000, "the last bias is there first"
    assert gradients[0][1] == pytest.approx(0.2, rel=1e-3), "after the forward pass, a third"
    assert gradients[-1][1] == pytest.approx(0.6)
    for word in ("1M", "1m", "1MB", "1MiB", "1048576", "1048576B", "1024k"):
        assert models.read(word, 0.1, 3).nbytes == 1 << 20
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"layers": [{"bytes": 8, "forward_s": 1, "backward_s": 2}]}))
    assert models.read(str(file), None) == models.Model("mine", (models.Layer(8, 1.0, 2.0),))
    file.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match=r"model .*mine\.json: .*can't decode byte"):
        models.read(str(file), None)


@pytest.mark.parametrize(("word", "compute_s", "words"), [
    ("resnet51", 0.5, "known are resnet50"), ("resnet50", None, "--compute-seconds"), ("0", 0.5, "of a byte or more"),
    ("9" * 5000, 0.5, "known are resnet50"),
    ("resnet50", -1.0, "expected seconds"), ("none.json", None, "No such file"), ("x.json", 0.5, "says what its"),
])  # fmt: skip
def test_bad_models(word: str, compute_s: float | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        models.read(word, compute_s)


@pytest.mark.parametrize("text", [
    "", "[]", '{"layers": []}', '{"layers": [{"bytes": 1}]}',
    '{"layers": [{"bytes": -1, "forward_s": 0, "backward_s": 0}]}',
    '{"layers": [{"bytes": 1, "backward_s": 0, "forward_s": 1%s}]}' % (400 * "0"),
])  # fmt: skip
def test_bad_files_of_models(text: str) -> None:
    with pytest.raises(ConfigError, match="model f"):
        models.from_json(text, "f")


def test_figures_of_servers_are_what_was_measured() -> None:
    truth = ServerFigures(message_s=2e-4, process_bytes_per_s=5e8)

    def line(nbytes: int, clients: int, mode: str = "sync") -> str:
        seconds = clients * (truth.message_s + nbytes / 2 / truth.process_bytes_per_s)
        row = {"row": "tcp:curve", "size_B": nbytes, "keys": 1, "clients": clients, "servers": 2, "mode": mode}
        return json.dumps({**row, "fused_p50": 1e6 * seconds if mode == "sync" else 1.0})

    near = {"size_B": 1 << 26, "keys": 1, "clients": 4, "servers": 2, "mode": "sync", "fused_p50": 1.0, "row": "ipc"}
    lines = [line(n, c, mode) for n in (4096, 1 << 26) for c in (1, 4) for mode in ("sync", "async")]
    quick = {**json.loads(lines[-2]), "fused_p50": 1e5}
    lines += [json.dumps({**quick, **more}) for more in ({"wrong": 3}, {"compress": "fp16"})]
    found = from_lines([*lines, json.dumps(near), ""], "f")
    assert found.process_bytes_per_s == pytest.approx(truth.process_bytes_per_s, rel=1e-6)
    assert found.message_s == pytest.approx(truth.message_s, rel=0.05)
    for bad, words in (([], "two sizes"), (["{}"], "line 1: no row"), (["x"], "line 1"), (lines[:1], "two sizes")):
        with pytest.raises(ConfigError, match=words):
            from_lines(bad, "f")


@pytest.mark.parametrize(("name", "value"), [
    ("clients", "4"), ("clients", 0), ("keys", 0), ("servers", 1.5), ("size_B", -1), ("fused_p50", math.nan),
    ("fused_p50", None),
])  # fmt: skip
def test_figures_of_servers_that_cannot_be(name: str, value: object) -> None:
    row = {"size_B": 1, "keys": 1, "clients": 4, "servers": 2, "mode": "sync", "fused_p50": 1.0, name: value}
    with pytest.raises(ConfigError, match=rf"^f, line 2: {name} is "):
        from_lines(["", json.dumps(row)], "f")


@pytest.mark.parametrize("servers", [1, 2, 8])
def test_what_bench_ps_has_measured_is_predicted(servers: int) -> None:
    """As docs/plan.md has it: c (keys o + S/b) / s."""
    truth, clients, keys = ServerFigures(message_s=2e-4, process_bytes_per_s=5e8), 4, 160

    def measured_s(nbytes: int) -> float:
        return clients * (keys * truth.message_s + nbytes / truth.process_bytes_per_s) / servers

    def line(nbytes: int) -> str:
        row = {"size_B": nbytes, "keys": keys, "clients": clients, "servers": servers, "mode": "sync"}
        return json.dumps({**row, "fused_p50": 1e6 * measured_s(nbytes)})

    found = from_lines([line(640 << 10), line(64 << 20)], "f")
    assert found.message_s == pytest.approx(truth.message_s, rel=0.05)
    on = cluster(1, server_figures=found, link_bytes_per_s=1e15)
    planned = predict.predict(models.plain(640 << 10, 0.0, keys), on, Job("dist-SGD", clients, 1, servers))
    assert planned.step_s == pytest.approx(measured_s(640 << 10), rel=0.1)


@pytest.mark.parametrize(("nbytes", "workers", "measured_s"), [
    (4 << 10, 1, 0.24e-3), (4 << 10, 4, 0.81e-3), (4 << 20, 1, 0.95e-3), (4 << 20, 4, 4.6e-3), (64 << 20, 1, 12.9e-3),
    (64 << 20, 4, 52.8e-3),
])  # fmt: skip
def test_processes_of_one_host_share_memory(nbytes: int, workers: int, measured_s: float) -> None:
    """The measured times are those of docs/benchmarks.md, "auto" and "fused", of one key and two servers."""
    job = Job("dist-SGD", workers, 1, 2)
    planned = predict.predict(models.plain(nbytes, 0.0, 1), Cluster(), job)
    assert 0.4 * measured_s < planned.step_s < 1.4 * measured_s
    alone = from_lines([line(job, size, "auto", size / 5e9) for size in (1 << 20, 64 << 20)], "f")
    assert alone.shared_bytes_per_s == pytest.approx(5e9 * workers / 2)
    beside = from_lines([line(job, size, "tcp:curve", size / 5e8) for size in (1 << 20, 64 << 20)], "f")
    assert beside.process_bytes_per_s == pytest.approx(5e8 * workers / 2)
    assert beside.shared_bytes_per_s == ServerFigures.shared_bytes_per_s, "a network says nothing of it"


def line(job: Job, nbytes: int, row: str, seconds: float) -> str:
    shape = {"size_B": nbytes, "keys": 1, "clients": job.num_clients, "servers": job.servers, "mode": "sync"}
    return json.dumps({**shape, "row": row, "fused_p50": 1e6 * seconds})


def test_the_strictest_of_the_fastest_is_recommended() -> None:
    def best(rate: float) -> Prediction:
        on = replace(cluster(4), link_bytes_per_s=rate, server_hosts=0)
        jobs = [job for job in candidates(8, 4, interval=16) if job.servers in (0, 2)]
        found = recommend(jobs, lambda job: predict.predict(models.plain(NBYTES, 0.5, 4), on, job, events=1000))
        times_s = [of.epoch_s for of in found.sorted]
        assert times_s == sorted(times_s)
        assert found.best in found.sorted
        return found.best

    fast = best(1e12)
    assert (fast.job.algorithm, fast.job.clients, fast.job.servers) == ("mpi-SGD", 1, 0)
    slow = best(1e7)
    assert slow.job.of.averages, "where the network is the bottleneck, it has to be used less"
    assert slow.job.interval > 1


def test_what_is_tried() -> None:
    jobs = candidates(8, 4)
    assert len({(j.algorithm, j.num_clients, j.servers, j.interval) for j in jobs}) == len(jobs)
    assert {j.clients for j in jobs if j.algorithm == "mpi-SGD"} == {1, 2, 4}
    assert {j.servers for j in jobs} == {0, 1, 2, 4}
    (only,) = candidates(8, 4, clients=2, servers=3, algorithms=["DiLoCo"], interval=7)
    assert only == Job("DiLoCo", 8, 2, 3, 7)


@pytest.mark.parametrize(("make", "words"), [
    (lambda: Job("SGD", 4), "known are dist-SGD"), (lambda: Job("dist-SGD", 4), "needs servers"),
    (lambda: Job("mpi-SGD", 4, 5, 1), "every client needs a worker"),
    (lambda: Job("mpi-SGD", 4, 2, 1, sharded=True), "mpi-SGD -n 4 -c 2 -s 1: workers update shares"),
    (lambda: Job("mpi-SGD", 1, 1, 0, sharded=True), "where there are several"),
    (lambda: Job("mpi-ESGD", 4, 2, 1, interval=0), "interval is 0"), (lambda: Cluster(hosts=0), "hosts is 0"),
    (lambda: Cluster(latency_s=-1.0), "latency_s is -1"), (lambda: Disturbance(slow_factor=0.5), "1 or more"),
    (lambda: Disturbance(mtbf_s=0), "positive time"), (lambda: ServerFigures(message_s=0), "message_s is 0"),
    (lambda: parse_link("fast"), "expected a speed"),
    (lambda: candidates(8, 4, clients=0), "8 workers in 0 clients"),
    (lambda: candidates(8, 4, interval=0), "interval is 0"),
])  # fmt: skip
def test_what_makes_no_sense_is_named(make, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()
