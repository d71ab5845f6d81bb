"""Which deaths a job bears, what is started again, and jobs that go on with fewer workers."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from jobs import wait_for
from test_launch_kill import needs_mpi

from kvmpi import optim
from kvmpi.launchers.restarts import OUT_OF_THE_JOB, Restarts
from kvmpi.store import checkpoint

RETURNING = str(Path(__file__).parent / "programs" / "returning.py")
FIRST_VALUE = str(Path(__file__).parent / "programs" / "first_value.py")
MEETING = str(Path(__file__).parent / "programs" / "meeting.py")
SCHEDULE = str(Path(__file__).parent / "programs" / "schedule.py")
SELDOM = str(Path(__file__).parent / "programs" / "seldom.py")
ALL_RETURN = str(Path(__file__).parent / "programs" / "all_return.py")
CLOCKS = str(Path(__file__).parent / "programs" / "clocks.py")
GROWING = str(Path(__file__).parent / "programs" / "growing.py")
FEWER = """
import os, signal, sys
import numpy as np
import kvmpi

with kvmpi.create("dist_sync") as kv:
    kv.init("w", np.zeros(5, "f4"))
    kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
    out = np.empty(5, "f4")
    for step in range(40 if kv.rank == 0 else 10 * kv.rank):
        kv.pushpull("w", np.ones(5, "f4"), out)
    if kv.rank and sys.argv[1] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if kv.rank:
        kv.join()
        try:
            kv.push("w", out)
        except kvmpi.KVError as error:
            print("refused" if "join" in str(error) else error, flush=True)
    kv.pull("w", out)
    print(f"end {kv.rank} {out[0]:.0f}", flush=True)
"""


@pytest.mark.parametrize(("label", "returncode", "settings", "expected"), [
    ("server 1", -9, {"replicas": 1}, True), ("server 1", OUT_OF_THE_JOB, {"replicas": 1}, True),
    ("server 1", 1, {"replicas": 1}, False), ("server 1", -9, {"replicas": 0}, False),
    ("scheduler", -9, {}, True), ("scheduler", -9, {"most": 0}, False),
    ("worker 3", -9, {}, False), ("worker 3", 1, {"on_client_loss": "wait"}, True),
    ("client 0", -9, {"on_client_loss": "wait", "most": 0}, False), ("client 0", 1, {"on_client_loss": "shrink"}, True),
])  # fmt: skip
def test_what_a_job_bears(label, returncode, settings, expected):
    assert Restarts(**{"most": 3, "replicas": 0, **settings}).bears(label, returncode) is expected


@pytest.mark.parametrize(("status", "expected"), [
    (128 + signal.SIGKILL, True), (128 + signal.SIGRTMAX, True), (128 + signal.SIGINT, False), (1, False),
    (255, False),  # sys.exit(-1), and an ssh that cannot connect
])  # fmt: skip
def test_who_was_killed_is_told_how_to_survive_it(status, expected):
    assert bool(Restarts(0, 0).advice("worker 1", status)) is expected


@pytest.mark.parametrize(("options", "victim"), [
    ("-n 2 -c 2 -s 1", -1), ("-n 1 -s 2 --replicas 1", 0), ("-n 1 -s 2 --replicas 1", 1),
])  # fmt: skip
def test_an_asynchronous_store_outlives_its_clients(launch, tmp_path, options, victim):
    """Also where servers follow others, and one that has only followed answers in the end."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ["PYTHONPATH"]])
    settings = {"KVMPI_TIMEOUT_S": "30", "PYTHONPATH": paths}
    program = ("--", ALL_RETURN, str(tmp_path), str(victim))
    job = launch(*options.split(), "--restart", "1", *program, env=settings, whole=True)
    assert job.finish(60.0) == 0, job.stderr
    workers = int(options.split()[1])
    assert f"found {[10.0 * workers] * 3}" in job.stdout, job.stdout + job.stderr
    assert "Traceback" not in job.stderr


def test_who_is_to_be_heard_and_is_not_counts_as_lost():
    restarts = Restarts(1, 0, silence_s=20.0)
    restarts.hear("scheduler", "first", 0.0)
    restarts.hear("scheduler", "first", 7.0)
    assert restarts.left_s(7.0) == pytest.approx(25.0)
    assert restarts.take_unheard(31.9) == []
    assert restarts.take_unheard(32.1) == [("scheduler", "first")]
    assert restarts.left_s(33.0) is None
    restarts.plan("scheduler", 33.0)
    restarts.take_due(34.0)
    restarts.hear("scheduler", "second", 35.0)
    assert restarts.left_s(35.0) is None, "it could not be started again"


def test_pauses_double_and_there_is_an_end():
    restarts = Restarts(2, 1, "wait")
    for now_s, pause_s in ((0.0, 0.1), (10.0, 0.2)):
        assert "started again" in restarts.plan("worker 0", now_s)
        assert "worker 0" in restarts.planned
        assert restarts.left_s(now_s) == pytest.approx(pause_s)
        assert restarts.take_due(now_s + pause_s - 0.01) == []
        assert restarts.take_due(now_s + pause_s + 0.01) == ["worker 0"]
        assert restarts.left_s(now_s) is None
    assert not restarts.bears("worker 0", -9)
    assert "goes on without it" in Restarts(0, 1).plan("server 1", 0.0)


def test_who_is_not_heard_has_some_time_to_end_by_itself():
    restarts = Restarts(1, 1, "wait")
    worker, server = object(), object()
    restarts.note_unheard("worker 0", worker, 10.0)
    restarts.note_unheard("server 1", server, 12.0)
    assert restarts.left_s(11.0) == pytest.approx(4.0)
    assert restarts.take_unheard(14.9) == []
    assert restarts.take_unheard(15.1) == [("worker 0", worker)]
    assert restarts.left_s(15.1) == pytest.approx(1.9)
    assert restarts.take_unheard(18.0) == [("server 1", server)]
    assert restarts.left_s(18.0) is None
    without = Restarts(0, 0, "fail")
    without.note_unheard("server 0", server, 0.0)
    assert without.left_s(0.0) is None, "others find out that its values are gone"
    without.note_unheard("worker 0", worker, 0.0)
    assert without.take_unheard(5.1) == [("worker 0", worker)], "nobody may ever need to"


def test_clients_that_others_go_on_without_are_started_again_while_there_is_something_to_do():
    restarts = Restarts(1, 0, "shrink")
    assert "goes on without it" in restarts.plan("worker 1", 0.0, is_wanted=False)
    assert "started again (1 of 1)" in restarts.plan("worker 1", 0.0)
    assert "goes on without it" in restarts.plan("worker 1", 1.0)
    assert restarts.bears("worker 1", -9)


@pytest.mark.parametrize(("how", "settings"), [
    ("join", {}), ("die", {"KVMPI_ON_CLIENT_LOSS": "shrink", "KVMPI_HEARTBEAT_TIMEOUT_S": "100"}),
])  # fmt: skip
def test_the_others_go_on_with_their_rounds(launch, write, how, settings):
    """Workers have 40, 10 and 20 batches: 40 + 10 + 20 pushes in all."""
    job = launch("-n", "3", "-c", "3", "-s", "2", write("fewer.py", FEWER), how, env=settings, whole=True)
    assert job.finish(60.0) == 0, job.stderr
    assert "end 0 70" in job.stdout
    assert job.stdout.count("refused") == (2 if how == "join" else 0)
    assert job.stderr.count("goes on without it") == (2 if how == "die" else 0)


ASYNC = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
import kvmpi

with kvmpi.create("dist_async") as kv:
    kv.init("w", np.zeros(5, "f4"))
    kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
    deadline = time.monotonic() + 30
    while kv.rank == 0 and not Path("pushed").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for step in range(40 if kv.rank == 0 else 5):
        kv.push("w", np.ones(5, "f4"))
        time.sleep(0.01 * (kv.rank == 0))
    if kv.rank == 0 and sys.argv[1] == "137":
        time.sleep(60)  # until it is ended
    if kv.rank == 1:
        kv.pull("w", np.empty(5, "f4"))
        Path("pushed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    out = np.empty(5, "f4")
    kv.pull("w", out)
    print(f"end {out[0]:.0f}", flush=True)
"""


@pytest.mark.parametrize(("policy", "status"), [("shrink", 0), ("", 137)])
def test_an_asynchronous_job_goes_on_without_a_worker_if_it_is_told_to(launch, write, policy, status):
    settings = {"KVMPI_ON_CLIENT_LOSS": policy} if policy else {}
    program = write("async.py", ASYNC)
    job = launch("-n", "2", "-c", "2", "-s", "2", program, str(status), env=settings, whole=True)
    assert job.finish(60.0) == status, job.stderr
    assert ("end 45" in job.stdout) is (status == 0)
    assert ("set KVMPI_ON_CLIENT_LOSS=shrink" in job.stderr) is (status != 0)


#: Worker 1 fails once, inside a ``with`` statement or not. The others wait for it in a barrier.
FAILING = """
import contextlib
import os
import sys
import numpy as np
import kvmpi

store = kvmpi.create("dist_sync")
with store if sys.argv[1] == "with" else contextlib.nullcontext():
    store.init("w", np.zeros(5, "f4"))
    out = np.zeros(5, "f4")
    for step in range(store.resumed_step, 6):
        if store.rank == 1 and step == 3 and not os.path.exists("failed"):
            open("failed", "w").close()
            if sys.argv[1] == "exit":
                sys.exit("bad data")
            raise ValueError("bad data")
        store.pushpull("w", np.full(5, step, "f4"), out)
        store.barrier()
    print(f"end {store.rank} {out[0]:.0f}", flush=True)
store.close()
"""


@pytest.mark.parametrize(
    ("policy", "how"),
    [("wait", "with"), ("wait", "exit"), ("shrink", "with"), ("shrink", "without"), ("fail", "without")],
)
def test_the_others_learn_at_once_of_a_client_whose_program_fails(launch, write, policy, how):
    """Not when it has been silent for long; and who closes a store because of an error has not left in good order."""
    settings = {"KVMPI_ON_CLIENT_LOSS": policy, "KVMPI_HEARTBEAT_TIMEOUT_S": "100"}
    restart = ["--restart", "1"] if policy == "wait" else []
    workers = 3 if policy == "shrink" else 2
    layout = ("-n", str(workers), "-c", str(workers), "-s", "1")
    program = write("failing.py", FAILING)
    job = launch(*layout, *restart, program, how, env=settings, whole=True)
    assert (job.finish(60.0) == 0) is (policy != "fail"), job.stderr
    assert ("] bad data" if how == "exit" else "ValueError: bad data") in job.stderr
    assert "KVTimeoutError" not in job.stderr
    assert policy == "fail" or "ClientLostError" not in job.stderr
    last = {"wait": ["end 0 10", "end 1 10"], "shrink": ["end 0 10", "end 2 10"], "fail": []}[policy]
    assert sorted(re.findall("end .*", job.stdout)) == last


#: Worker 1 ends without a word, before it has a store or in a round.
ENDING = """
import os, signal, sys
import numpy as np
import kvmpi

if os.environ["KVMPI_RANK"] == "1" and sys.argv[1] == "early":
    os._exit(3)
if os.environ["KVMPI_RANK"] == "1" and sys.argv[1] == "nothing":
    os._exit(0)
kv = kvmpi.create("dist_sync")
kv.init("w", np.zeros(50_000, "f4"))
kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
out = np.zeros(50_000, "f4")
for step in range(10):
    if step == 5 and kv.rank == 1:
        os._exit(int(sys.argv[1]))
    kv.pushpull("w", np.ones(50_000, "f4"), out)
print(f"end {kv.rank} {out.min():.0f} {out.max():.0f}", flush=True)
kv.close()
"""


#: Two stores, of which a process may have pushed to one alone in the step in which it dies.
TWO_STORES = """
import os, signal, sys
import numpy as np
import kvmpi

STEPS, DIES_IN, COUNT = 12, 7, 70_000
is_back = os.path.exists(sys.argv[1])
with kvmpi.create("dist_sync") as sums, kvmpi.create("dist_async") as updates:
    out = np.empty(COUNT, "f4")
    for kv in (sums, updates):
        kv.init("w", np.zeros(COUNT, "f4"))
        kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
    for step in range(min(sums.resumed_step, updates.resumed_step), STEPS):
        for kv in (sums, updates):
            if kv is updates and step == DIES_IN and kv.rank == 1 and not is_back:
                open(sys.argv[1], "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            if step >= kv.resumed_step:
                kv.push("w", np.full(COUNT, kv.rank + 1, "f4"))
                kv.pull("w", out)
        updates.barrier()
    for kv in (sums, updates):
        kv.pull("w", out)
        assert (out == STEPS * 3).all(), out
    print(f"worker {kv.rank} from {sums.resumed_step} and {updates.resumed_step}", flush=True)
"""


def test_a_client_that_is_back_finds_how_far_it_was_in_each_of_its_stores(launch, write, tmp_path):
    """With rounds, and without: nothing counts twice, and its barriers are those of the others."""
    layout = ("-n", "2", "-c", "2", "-s", "2", "--replicas", "1", "--restart", "1")
    job = launch(*layout, write("stores.py", TWO_STORES), tmp_path / "back", whole=True)
    assert job.finish(60.0) == 0, job.stderr
    ends = [f"worker {rank} from {8 if rank == 1 else 0} and {7 if rank == 1 else 0}" for rank in range(2)]
    assert sorted(re.findall("worker . from.*", job.stdout)) == ends, job.stdout


@pytest.mark.parametrize(("workers", "how", "policy", "ends"), [
    (2, "early", "shrink", ["end 0 10 10"]), (3, "5", "shrink", ["end 0 25 25", "end 2 25 25"]),
    (2, "0", "shrink", ["end 0 15 15"]), (3, "0", "fail", []), (2, "0", "wait", []), (2, "nothing", "wait", []),
])  # fmt: skip
def test_nobody_waits_for_the_heartbeats_of_a_process_that_has_ended(launch, write, workers, how, policy, ends):
    settings = {"KVMPI_ON_CLIENT_LOSS": policy, "KVMPI_HEARTBEAT_TIMEOUT_S": "100"}
    layout = ("-n", str(workers), "-c", str(workers), "-s", str(workers - 1))
    job = launch(*layout, write("ending.py", ENDING), how, env=settings, whole=True)
    assert job.finish(60.0) == (0 if ends else 1), job.stderr
    assert sorted(re.findall("end .*", job.stdout)) == ends
    said = "client 1 has ended with exit status 0, and" if policy == "wait" else "was lost: its process ended with exit"
    assert said in job.stderr or how == "early"
    assert (job.stderr.count("ClientLostError: ") > 0) is (not ends)


def test_nobody_waits_for_the_heartbeats_of_a_server_that_is_not_started_again(launch, tmp_path):
    settings = {"KVMPI_HEARTBEAT_TIMEOUT_S": "100"}
    layout = ("-n", "2", "-c", "2", "-s", "3", "--replicas", "1", "--restart", "0")
    job = launch(*layout, GROWING, "dist_sync", env=settings, whole=True)
    wait_for(lambda: (tmp_path / "runs").exists() or job.process.poll() is not None, "the first steps")
    [victim] = job.pids(ROLE="server", RANK="1")
    os.kill(victim, signal.SIGKILL)
    (tmp_path / "stop").touch()
    assert job.finish(60.0) == 0, job.stderr
    assert job.stdout.count("] 0 wrong after ") == 2
    assert "server 1 was killed by SIGKILL; the job goes on without it" in job.stderr
    assert "server 1 was lost: its process was killed by SIGKILL" in job.stderr


#: Worker 0 dies in step 8, and begins with what all have assigned, saved and loaded: the other has trained since, alone
#: for two steps where it need not wait.
ELSEWHERE = """
import os, signal, time
import numpy as np
import kvmpi

with kvmpi.create("dist_sync") as kv:
    kv.init("w", np.zeros(5, "f4"))
    kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
    kv.assign("w", np.full(5, 1000, "f4"))
    kv.save("saved")
    kv.load("saved")
    if os.path.exists("died"):
        open("back", "w").close()
    out, deadline_s = np.zeros(5, "f4"), time.monotonic() + 30
    for step in range(kv.resumed_step, 20):
        if step == 8 and kv.rank == 0 and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        while step == 10 and not os.path.exists("back"):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        kv.pushpull("w", np.ones(5, "f4"), out)
        if step == 12:
            print(f"before {kv.rank} {out.min():.0f} {out.max():.0f}", flush=True)
            kv.load("saved")
            kv.pull("w", out)
            print(f"loaded {kv.rank} {out.min():.0f} {out.max():.0f}", flush=True)
    print(f"end {kv.rank} {out.min():.0f} {out.max():.0f}", flush=True)
"""


@pytest.mark.parametrize(("policy", "trained"), [("wait", 1026), ("shrink", 1024)])
def test_a_process_that_is_started_again_puts_nothing_in_the_place_of_what_was_trained_since(
    launch, write, policy, trained
):
    layout = ("-n", "2", "-c", "2", "-s", "1", "--restart", "1")
    job = launch(*layout, write("elsewhere.py", ELSEWHERE), env={"KVMPI_ON_CLIENT_LOSS": policy}, whole=True)
    assert job.finish(60.0) == 0, job.stderr
    for what, value in (("before", trained), ("loaded", 1000), ("end", 1014)):
        assert sorted(re.findall(f"{what} .*", job.stdout)) == [f"{what} {rank} {value} {value}" for rank in (0, 1)]


def test_rates_that_change_by_step_are_those_of_the_steps_that_are_left(launch, write, tmp_path):
    job = launch("-n", "2", "-c", "2", "-s", "2", "--restart", "1", SCHEDULE, whole=True)
    assert job.finish(60.0) == 0, job.stderr
    expected = 2 * (3 * 2 + 2 * 5 + 9 * 10 + 6 * 2)
    assert sorted(re.findall("end .*", job.stdout)) == [f"end {rank} {expected}" for rank in range(2)]
    rule = checkpoint.read(str(tmp_path / "saved"), [], with_values=True).rule
    assert rule == optim.Test(lr=-10.0), "the one in force, which the process that saves was not told"


#: A key is made in the middle of the loop, and worker 1 dies before it has pushed it.
LATE_KEY = """
import os, signal
import numpy as np
import kvmpi

with kvmpi.create("dist_sync") as kv:
    kv.init("w", np.zeros(5, "f4"))
    for step in range(kv.resumed_step, 9):
        if step == 6:
            kv.init("late", np.zeros(5, "f4"))
            if kv.rank == 1 and not os.path.exists("died"):
                open("died", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
        for key in ("w", "late") if step >= 6 else ("w",):
            kv.pushpull(key, np.ones(5, "f4"))
"""


def test_a_program_that_was_told_of_a_later_step_than_all_its_keys_have_is_told_so(launch, write):
    settings = {"KVMPI_TIMEOUT_S": "30"}
    job = launch(
        "-n", "2", "-c", "2", "-s", "1", "--restart", "1", write("late.py", LATE_KEY), env=settings, whole=True
    )
    assert job.finish(25.0) == 1, "it does not wait until the time is over"
    assert "told that it goes on at step 6, but with keys that were made since it is 5" in job.stderr


#: The last two workers have less to do.
UNEVEN = """
import time
import numpy as np
import kvmpi

with kvmpi.create("dist_async") as kv:
    kv.init("w", np.zeros(5, "f4"))
    kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
    for step in range(20 if kv.rank < 2 else 5):
        time.sleep(0.02)
        kv.push("w", np.ones(5, "f4"))
    kv.pull("w", out := np.zeros(5, "f4"))
print(f"end {kv.rank} {out[0] >= (20 if kv.rank < 2 else 5)}", flush=True)
"""


def test_where_every_worker_is_a_client_one_whose_processes_end_takes_no_other_with_it(launch, write):
    job = launch("-n", "4", "-c", "2", "-s", "1", write("uneven.py", UNEVEN), whole=True)
    assert job.finish(60.0) == 0, job.stderr
    assert sorted(re.findall("end .*", job.stdout)) == [f"end {rank} True" for rank in range(4)]


def test_clients_are_not_started_again_for_values_that_nobody_has_any_more(launch, tmp_path):
    layout = ("-n", "2", "-c", "2", "-s", "3", "--replicas", "1", "--restart", "50")
    job = launch(*layout, GROWING, "dist_sync", env={"KVMPI_TIMEOUT_S": "40"}, whole=True)
    wait_for(lambda: (tmp_path / "runs").exists() or job.process.poll() is not None, "the first steps")
    victims = [pid for rank in ("0", "1") for pid in job.pids(ROLE="server", RANK=rank)]
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    assert len(victims) == 2
    assert job.finish(60.0) == 1
    assert "ServerLostError" in job.stderr
    assert "its part of the values is lost" in job.stderr
    assert not re.search(r"(worker|client) \d ended with exit status 1; it is started again", job.stderr)


#: Worker 0 is killed when all have closed the store.
LATE = """
import os, signal
import numpy as np
import kvmpi

with kvmpi.create("dist_sync") as kv:
    kv.init("w", np.zeros(5, "f4"))
    kv.barrier()
    rank = kv.rank
if rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_clients_are_not_started_again_and_again_for_a_store_that_is_over(launch, write):
    job = launch("-n", "2", "-c", "2", "-s", "1", "--restart", "50", write("late.py", LATE), whole=True)
    assert job.finish(60.0) == 1
    assert job.stderr.count("it is started again (") == 1
    assert "comes too late: store 1 is over, all its clients have left" in job.stderr


#: Worker DIES stops once in the middle: STORE DIES.
STOPPING = """
import os, signal, sys
import numpy as np
import kvmpi

with kvmpi.create(sys.argv[1]) as kv:
    kv.init("w", np.zeros(5, "f4"))
    kv.set_optimizer(kvmpi.optim.Test(lr=-1.0))
    out = np.zeros(5, "f4")
    for step in range(kv.resumed_step, 10):
        if step == 4 and kv.rank == int(sys.argv[2]) and not os.path.exists("stopped"):
            open("stopped", "w").close()
            os.kill(os.getpid(), signal.SIGSTOP)
        kv.pushpull("w", np.ones(5, "f4"), out)
    print(f"end {kv.rank} {out.min():.0f} {out.max():.0f}", flush=True)
"""
SOON = {"KVMPI_HEARTBEAT_TIMEOUT_S": "2", "KVMPI_HEARTBEAT_S": "0.2", "KVMPI_TIMEOUT_S": "40"}


@pytest.mark.parametrize(("layout", "store", "dies", "label"), [
    (("-n", "3", "-c", "3"), "dist_sync", "1", "worker 1"),
    (("-n", "3", "-c", "2"), "dist_sync_mpi", "0", "client 0"),  # the master of two
    (("-n", "3", "-c", "2"), "dist_sync", "1", "client 0"),  # where the other is a client too
])  # fmt: skip
def test_a_client_that_is_stopped_is_ended_and_started_again(launch, write, layout, store, dies, label):
    job = launch(*layout, "-s", "1", "--restart", "1", write("stops.py", STOPPING), store, dies, env=SOON, hasty=True)
    assert job.finish(60.0) == 0, job.stderr
    count = int(layout[1])
    assert sorted(re.findall("end .*", job.stdout)) == [
        f"end {rank} {10 * count} {10 * count}" for rank in range(count)
    ]
    assert f"kvmpi run: {label} counts as lost, and does not end; it is killed" in job.stderr
    assert f"kvmpi run: {label} was killed by SIGKILL; it is started again (1 of 1)" in job.stderr


LOST_IN_TWO_WAYS = """
import os, signal, time
import kvmpi
kv = kvmpi.create("dist_async")
kv.barrier()
if kv.rank == 1:
    time.sleep(3.0)
    os.kill(os.getpid(), signal.SIGSTOP)
kv.abort()
time.sleep(60.0)
"""


def test_a_client_that_is_stopped_when_nobody_waits_for_it_ends_the_job(launch, write):
    """With the default heartbeats, of which there is one a second. Who only has no store any more is left alone."""
    settings = {"KVMPI_HEARTBEAT_TIMEOUT_S": "2"}
    job = launch("-n", "2", "-c", "2", "-s", "1", write("stops.py", LOST_IN_TWO_WAYS), env=settings, hasty=True)
    assert job.finish(60.0) == 128 + signal.SIGKILL, job.stderr
    assert "client 0 was lost" in job.stderr
    assert re.findall(r"kvmpi run: (.*) counts as lost, and does not end", job.stderr) == ["worker 1"]


@pytest.mark.parametrize(("role", "number", "said"), [
    ("server", signal.SIGSTOP, "server 1 counts as lost, and does not end; it is killed"),
    ("scheduler", signal.SIGSTOP, "scheduler counts as lost, and does not end; it is killed"),
    ("server", signal.SIGTERM, "server 1 ended with exit status 0 while workers were still running; it is started"),
    ("scheduler", signal.SIGTERM, "scheduler ended with exit status 0 while workers were still running; it is started"),
])  # fmt: skip
def test_what_is_stopped_or_told_to_end_is_started_again(launch, tmp_path, role, number, said):
    layout = ("-n", "2", "-c", "2", "-s", "2", "--replicas", "1")
    job = launch(*layout, GROWING, "dist_sync", env=SOON, hasty=True)
    wait_for(lambda: (tmp_path / "runs").exists() or job.process.poll() is not None, "the first steps")
    who = {"ROLE": role, "RANK": "1"} if role == "server" else {"ROLE": role}
    [victim] = job.pids(**who)
    os.kill(victim, number)
    wait_for(lambda: job.pids(**who) not in ([], [victim]), "another process in its place", 30.0)
    (tmp_path / "stop").touch()
    assert job.finish(60.0) == 0, job.stderr
    assert job.stdout.count("] 0 wrong after ") == 2
    assert said in job.stderr
    assert job.stderr.count("it is started again") == 1, "nobody else had to be"
    assert role == "server" or "goes on where the one before it has ended" in job.stderr


def test_a_job_of_which_nobody_is_left_has_failed(launch, write):
    job = launch("-n", "2", "-c", "2", write("fails.py", "raise SystemExit(3)"), env={"KVMPI_ON_CLIENT_LOSS": "shrink"})
    assert job.finish(30.0) == 3


@pytest.mark.parametrize("store", ["dist_sync", "dist_async"])
def test_client_0_may_die_before_it_has_given_any_value(launch, store):
    settings = {"KVMPI_ON_CLIENT_LOSS": "shrink", "KVMPI_HEARTBEAT_TIMEOUT_S": "2", "KVMPI_TIMEOUT_S": "30"}
    job = launch("-n", "3", "-c", "3", "-s", "2", FIRST_VALUE, store, env=settings, whole=True)
    assert job.finish(60.0) == 0, job.stderr
    waits = re.findall(r"value of worker (\d) after ([0-9.]+) s", job.stdout)
    assert [giver for giver, _ in waits] == ["1", "1"], job.stdout
    assert max(float(seconds) for _, seconds in waits) < 10.0
    assert job.stdout.count("sum 5") == (2 if store == "dist_sync" else 0), job.stdout


@pytest.mark.parametrize(("layout", "store", "dies"), [
    (("-n", "3", "-c", "3"), "dist_sync", "1"),
    # All workers of a client go down with its master, and client 0 is who gave the first values.
    (("-n", "3", "-c", "2"), "dist_sync_mpi", "0"),
])  # fmt: skip
def test_a_client_that_was_left_out_comes_back(launch, layout, store, dies):
    settings = {"KVMPI_ON_CLIENT_LOSS": "shrink", "KVMPI_HEARTBEAT_TIMEOUT_S": "2", "KVMPI_HEARTBEAT_S": "0.2"}
    job = launch(*layout, "-s", "2", "--restart", "2", RETURNING, store, dies, env=settings, whole=True)
    assert job.finish(90.0) == 0, job.stderr
    assert job.stdout.count(": 0 wrong") == 9, job.stdout
    assert len(set(re.findall(r"in from step (\d+)", job.stdout))) == 1, job.stdout
    assert "started again (1 of 2)" in job.stderr
    away = {int(line.rpartition(" ")[2]) for line in job.stdout.splitlines() if " away for " in line}
    # They were 10 steps further. That the last of them is over, servers may not know before the next one begins.
    assert min(away) >= 9, "the others have not gone on"


def test_a_client_that_others_wait_for_repeats_what_is_missing_of_keys_that_are_pushed_in_some_steps(launch):
    settings = {"KVMPI_HEARTBEAT_TIMEOUT_S": "3", "KVMPI_HEARTBEAT_S": "0.2", "KVMPI_TIMEOUT_S": "30"}
    job = launch("-n", "3", "-c", "3", "-s", "2", "--restart", "5", SELDOM, env=settings, hasty=True)
    assert job.finish(150.0) == 0, job.stderr
    assert job.stdout.count(" 0 wrong") == 12, job.stdout
    assert "started again (5 of 5)" in job.stderr


@pytest.mark.parametrize("how", ["skip", "again"])
def test_a_client_that_others_wait_for_meets_them_at_their_barriers(launch, how):
    settings = {"KVMPI_HEARTBEAT_TIMEOUT_S": "3", "KVMPI_HEARTBEAT_S": "0.2", "KVMPI_TIMEOUT_S": "40"}
    job = launch("-n", "3", "-c", "3", "-s", "2", "--restart", "3", MEETING, how, "1", env=settings, hasty=True)
    assert job.finish(120.0) == 0, job.stderr
    assert job.stdout.count(" 0 wrong") == 6, job.stdout
    assert "passed without" not in job.stdout
    assert "started again (3 of 3)" in job.stderr


@needs_mpi
def test_a_process_is_taken_in_whatever_the_clock_of_the_one_before_it_said(launch, tmp_path):
    paths = os.pathsep.join(filter(None, [os.path.dirname(CLOCKS), os.environ.get("PYTHONPATH")]))
    settings = {"KVMPI_HEARTBEAT_TIMEOUT_S": "40", "TEST_FOLDER": str(tmp_path), "PYTHONPATH": paths}
    layout = ("-n", "3", "-c", "2", "-s", "2", "--replicas", "1", "--restart", "2", "--import", "clocks")
    job = launch(*layout, CLOCKS, env=settings, whole=True)
    wait_for(lambda: (tmp_path / "runs").exists() or job.process.poll() is not None, "the first steps")
    for role in ("server", "worker"):  # worker 1 is of client 0, which an mpirun has started
        [victim] = job.pids(ROLE=role, RANK="1")
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda role=role, victim=victim: job.pids(ROLE=role, RANK="1") not in ([], [victim]), "another")
    (tmp_path / "stop").touch()
    assert job.finish(60.0) == 0, job.stderr
    assert sorted(re.findall("end .*", job.stdout)) == [f"end {rank} 0 0" for rank in range(3)]
    assert "later incarnation" not in job.stderr
    for who in ("server 1", "client 0"):
        assert f"scheduler: {who} was lost: its process " in job.stderr, "not when its heartbeats are missed"
        assert job.stderr.count(f"kvmpi run: {who} ") == 1, "it is started again once"
