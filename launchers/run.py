"""Runs a planned job to its end: starts it in order, shows its output, notices the first failure, leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from kvmpi.config import STATUS_FILE, Config
from kvmpi.errors import (
    STORE_OVER,
    VALUES_LOST,
    ClientLostError,
    ConfigError,
    PeerLostError,
    ServerLostError,
    names_in_words,
)
from kvmpi.launchers import processes, questions
from kvmpi.launchers.endings import Endings, Losses, make_fifo
from kvmpi.launchers.explanation import Explanation, in_words
from kvmpi.launchers.failure import Failure, Inquest
from kvmpi.launchers.job import Job, Process
from kvmpi.launchers.mpirun import MPICH_ABORT, PRTE_LOST, PRTE_QUICK
from kvmpi.launchers.output import Output, OutputClosedError, Stream, shortened
from kvmpi.launchers.remote import SILENT, Child, RemoteProcess, has_ended, kill_group, signal_group
from kvmpi.launchers.requests import ENDING, Requests
from kvmpi.launchers.restarts import Restarts
from kvmpi.launchers.signals import SignalCatcher
from kvmpi.launchers.starting import Starter

HANDSHAKE_S = 30.0  # for the scheduler to say where it listens
RESUME_S = 600.0  # the same if it reads a snapshot first, to see whether it is whole
KILL_S = 5.0  # for those that are killed to have ended
BATCH_S = 3.0  # for orders to jobs of a batch system, and words of theirs, which go through files
VERDICT_S = 1.0  # for a scheduler to end that has closed what it says where it listens through
_FOLLOWED_S = 3.0  # for the client to end whose loss others have failed for
_KEPT_LINES = 200  # of each process's standard error: of a long traceback not all is shown once more
DRAIN_READS = 32  # of 64 KiB each: more than a pipe holds, so that a process that never pauses does not hold us up


class Runner:
    """One run of one job. A single thread does everything, because the parent-death signal follows threads."""

    def __init__(self, job: Job, output: Output, watchdog: processes.Watchdog, signals: SignalCatcher) -> None:
        self._job = job
        self._output = output
        self._watchdog = watchdog
        self._selector = selectors.DefaultSelector()
        self._children: dict[str, Child] = {}
        self._living: dict[str, Child] = {}  # those that have not ended
        self._plans = {process.label: process for process in job.processes}
        self._workers = job.of_role("worker", "client")
        config = Config.from_env(job.env)
        is_batch = job.places is not None and job.places.reach.is_batch
        self._grace_s = config.grace_s + (BATCH_S if is_batch else 0.0)
        self._restarts = Restarts(job.restarts, job.replicas, config.on_client_loss, config.heartbeat_timeout_s)
        self._starter = Starter(job)
        self._has_unsent: dict[RemoteProcess, int] = {}  # and the pipes that we wait for to take more of it
        self._starts: Counter[str] = Counter()  # how often processes were started
        self._tails: dict[str, deque[bytes]] = {}
        self._codes: dict[str, int] = {}  # how processes have ended
        self._open_ranks: dict[str, dict[str, int]] = {}  # by mpirun, programs of ranks that have not ended
        self._failure: Failure | None = None
        self._inquest = Inquest()
        #: A worker that is a client, and has failed since another was gone; and until when that one may be found.
        self._follower: tuple[Failure, float] | None = None
        self._writers: dict[str, list[int]] = {}
        self._streams: dict[str, list[tuple[int, Stream]]] = {}  # of a process and the ranks below it
        self._may_have_ended = True  # some child: since SIGCHLD
        self._endpoint = b""  # what the scheduler has said about where it listens
        self._ready_closed = False
        self._stopping = False
        self._explanation = Explanation(job, self._plans, self._children, self._tails, self._codes, self._restarts)
        self._env = dict(job.env)
        self.picture: dict[str, Any] = {}  # of the job at its end, as the scheduler has left it
        self._catcher, self._signals = signals, signals.caught
        self._answered = 0
        self._selector.register(signals.wakeup_fd, selectors.EVENT_READ, "wakeup")
        self._endings, self._losses = Endings(job.job_dir), Losses(job.job_dir)
        self._selector.register(self._losses.fd, selectors.EVENT_READ, "losses")
        self._requests = Requests(job.job_dir)
        self._selector.register(self._requests.fd, selectors.EVENT_READ, "requests")

    # ---- the course of a job

    def run(self) -> int:
        """Run the job; its exit status."""
        try:
            self._start_scheduler()
            self._starter.add(*self._job.of_role("server"), *self._workers)
            self._start_due()
            while not self._over() and self._working():
                self._step(None)
            if self._follower is not None and not self._over():
                self._blame(self._follower[0])
            self._drain()
        except OutputClosedError:
            self._blame(Failure("", 128 + signal.SIGPIPE, ""))
        interrupted = self._signals[0] if self._signals and self._failure is None else 0
        self._stop()
        self._finish()
        if interrupted:
            self._output.say(f"kvmpi run: stopped by {signal.Signals(interrupted).name}")
            return 128 + interrupted
        if self._failure is None:
            return 0
        if self._failure.label:
            for line in self._explanation.lines(self._failure, self._output.newest):
                self._output.say(line)
        return self._failure.status

    def _over(self) -> bool:
        return bool(self._signals) or self._failure is not None

    def _working(self) -> bool:
        labels = (*self._living, *self._restarts.planned)
        return self._starter.has_waiting or any(self._plans[label].workers for label in labels)

    def _is_done(self) -> bool:
        """Whether some workers have done what was to be done, and no others are at work."""
        return not self._working() and any(self._codes.get(process.label) == 0 for process in self._workers)

    def _is_wanted(self, label: str) -> bool:
        """Whether a process that has died is to be started again: not where others have come to the end without it."""
        shrinks = self._restarts.on_client_loss == "shrink" and label.split()[0] in ("worker", "client")
        return not (shrinks and self._is_done())

    def _goes_on_after(self, label: str) -> bool:
        """Whether a job whose process ``label`` has just failed still does, or has done, something."""
        return self._working() or self._is_done() or self._restarts.can_restart(label)

    def _start_scheduler(self) -> None:
        """Start it and wait until it has said where it listens."""
        read_end, write_end = os.pipe()
        try:
            self._start(self._plans["scheduler"], {"KVMPI_READY_FD": str(write_end)}, (write_end,))
        finally:
            os.close(write_end)
        os.set_blocking(read_end, False)
        self._selector.register(read_end, selectors.EVENT_READ, "ready")
        patience_s = RESUME_S if "KVMPI_RESUME" in self._env else HANDSHAKE_S
        deadline = time.monotonic() + patience_s
        text = f"said nothing about where it listens for {patience_s:.0f} s"
        while not self._over() and not self._endpoint.endswith(b"\n"):
            if self._ready_closed:
                # Normally it is about to end with an error, and that says more than we could.
                deadline = min(deadline, time.monotonic() + VERDICT_S)
                text = "closed KVMPI_READY_FD without saying where it listens"
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self._failure = Failure("scheduler", 1, text)
            else:
                self._step(left_s)
        if self._over():
            return
        endpoint = self._endpoint.decode(errors="replace").strip()
        if not endpoint.startswith("tcp://"):
            self._failure = Failure("scheduler", 1, f"said {endpoint!r} where tcp://HOST:PORT was expected")
        self._env["KVMPI_SCHEDULER"] = endpoint

    def _start_due(self) -> None:
        for process in self._starter.take_due(time.monotonic()):
            if self._over():
                break
            self._start(process, self._again_env(process.label))

    def _start(self, process: Process, extra: Mapping[str, str] | None = None, pass_fds: tuple[int, ...] = ()) -> None:
        """Start one process with pipes for its output, and FIFOs for that of the ranks below it."""
        self._codes.pop(process.label, None)
        self._open_ranks.pop(process.label, None)
        self._streams.setdefault(process.label, [])
        self._open_output(process.label)
        if process.role == "client":
            self._fifo(f"client-{process.rank}.status", Stream(process.label, 0))
            for rank in process.workers:
                self._codes.pop(f"worker {rank}", None)
                self._open_output(f"worker {rank}")
                self._fifo(f"worker-{rank}.out", Stream(f"worker {rank}", 1, process.label))
                self._fifo(f"worker-{rank}.err", Stream(f"worker {rank}", 2, process.label))
        pipes: list[tuple[int, int]] = []
        try:
            pipes.extend(os.pipe() for _ in range(2))
            env = {**self._env, **process.env, **(extra or {}), "KVMPI_START": str(self._starts[process.label])}
            self._starts[process.label] += 1
            child = self._starter.start(process, env, self._env, pipes, pass_fds)
        except OSError as error:
            where = f" on {process.host}" if process.host else ""
            text = f"could not be started{where}: {process.command[0]}: {error.strerror}"
            self._failure = Failure(process.label, 126, text)
            for read_end, _ in pipes:
                os.close(read_end)
            return
        finally:
            for _, write_end in pipes:
                os.close(write_end)
        for target, (read_end, _) in enumerate(pipes, start=1):
            self._watch(read_end, Stream(process.label, target))
        self._children[process.label] = self._living[process.label] = child
        self._watchdog.add(child.pid)
        if isinstance(child, RemoteProcess) and not child.write():
            self._selector.register(child.orders, selectors.EVENT_WRITE, child)
            self._has_unsent[child] = child.orders

    def _open_output(self, label: str) -> None:
        self._tails[label] = deque(maxlen=_KEPT_LINES)
        self._output.open_log(label)

    def _fifo(self, name: str, stream: Stream) -> None:
        path = os.path.join(self._job.job_dir, name)
        if os.path.exists(path):
            os.unlink(path)  # of a process before this one
        make_fifo(path)
        self._watch(os.open(path, os.O_RDONLY | os.O_NONBLOCK), stream)
        # A FIFO that nobody has opened yet reads as ended. A writer of our own holds it open, until the rank has it;
        # that of the reports, which ranks open at different times, until the end of the job.
        writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        self._writers.setdefault("" if stream.target == 0 else stream.label, []).append(writer)

    def _release(self, label: str) -> None:
        for fd in self._writers.pop(label, []):
            os.close(fd)

    def _watch(self, fd: int, stream: Stream) -> None:
        os.set_blocking(fd, False)
        self._selector.register(fd, selectors.EVENT_READ, stream)
        self._streams[stream.client or stream.label].append((fd, stream))

    def _again_env(self, label: str) -> dict[str, str]:
        """What a process that is started again has to know: a scheduler, where the others look for it."""
        port = self._env.get("KVMPI_SCHEDULER", "").rpartition(":")[2]
        return {"KVMPI_SCHEDULER_PORT": port} if label == "scheduler" else {}

    # ---- events

    def _step(self, timeout_s: float | None) -> None:
        """Wait for something to happen, at most ``timeout_s``, and take note of it."""
        now_s = time.monotonic()
        for left_s in (
            None if (suspect := self._inquest.suspect) is None else max(0.0, suspect.deadline_s - now_s),
            None if self._stopping else self._restarts.left_s(now_s),
            None if self._stopping else self._starter.left_s(now_s),
            None if self._stopping or self._follower is None else max(0.0, self._follower[1] - now_s),
        ):
            if left_s is not None:
                timeout_s = left_s if timeout_s is None else min(timeout_s, left_s)
        ready = [key for key, _ in self._selector.select(timeout_s)]
        # Reports of ranks first: an mpirun comments on what a rank has reported before.
        for key in sorted(ready, key=lambda key: not (isinstance(key.data, Stream) and key.data.target == 0)):
            if key.fd in self._selector.get_map():  # reading another may have closed it
                self._read(key.fd, key.data)
        if self._answered != self._catcher.asked:
            self._answered = self._catcher.asked
            self._ask()
        if self._may_have_ended:
            self._may_have_ended = False
            self._reap()
        if not self._stopping and not self._over():
            self._end_unheard()
            for label in self._restarts.take_due(time.monotonic()):
                if self._is_wanted(label):
                    self._starter.add(self._plans[label])
            self._start_due()
        if (suspect := self._inquest.suspect) is not None and time.monotonic() >= suspect.deadline_s:
            self._blame(suspect.failure)
        if self._follower is not None and not self._stopping and time.monotonic() >= self._follower[1]:
            self._blame(self._follower[0])

    def _ask(self) -> None:
        """Have every process that answers say what it waits for."""
        asked, passed_on = [], set()
        for label, child in self._children.items():
            if child.returncode is not None:
                continue
            if isinstance(child, RemoteProcess):
                child.signal(signal.SIGUSR1)  # those there that answer get it
                asked.append(f"{label} on {child.host}")
            elif self._plans[label].spans and questions.ask_ranks(child.pid):
                passed_on.add(child.pid)
                asked.append(f"the ranks of {label}")
        asked += questions.ask(self._job.job_dir, but=passed_on)
        names = names_in_words(asked) or "nobody: no process of the job answers yet"
        self._output.say(f"kvmpi run: SIGUSR1: asked {names}")

    def _read(self, fd: int, what: Stream | RemoteProcess | str) -> bool:
        """Read once; false when nothing was there. Those who are told something take what there is room for."""
        if isinstance(what, RemoteProcess):
            if what.write():
                self._selector.unregister(self._has_unsent.pop(what))
            return True
        try:
            chunk = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if what == "wakeup":
            self._may_have_ended = True
            return bool(chunk)
        if what == "ready":
            self._endpoint += chunk
            if not chunk:
                self._close(fd)
                self._ready_closed = True
            return bool(chunk)
        if what == "losses":
            self._restarts.hear("scheduler", self._children["scheduler"], time.monotonic())
            for role, rank in self._losses.feed(chunk):
                self._hear_loss(role, rank)
            return bool(chunk)
        if what == "requests":
            self._requests.serve(chunk, self._add_server)
            return bool(chunk)
        assert isinstance(what, Stream)
        if chunk:
            self._show(what, what.splitter.feed(chunk))
        else:
            self._close(fd)
            self._show(what, what.splitter.close())
        return bool(chunk)

    def _add_server(self) -> str:
        """Start one more server, which the scheduler gives a share of what the others have; its name."""
        if self._stopping or self._over() or "KVMPI_SCHEDULER" not in self._env:
            raise ConfigError(ENDING)
        process = self._job.another_server(sum(label.startswith("server") for label in self._plans))
        self._plans[process.label] = process
        self._start(process)
        self._output.say(f"kvmpi run: {process.label} is added")
        return process.label

    def _close(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)

    def _show(self, stream: Stream, lines: list[bytes]) -> None:
        if stream.target == 0:
            for line in lines:
                self._rank_report(stream.label, line.decode().split())
            return
        child = self._children.get(stream.label)
        if stream.target == 2 and isinstance(child, RemoteProcess):
            lines = [own for line in lines if (own := child.hear(line)) or not line]
        if stream.label.startswith("client"):
            lines = [line for line in lines if PRTE_QUICK not in line]
        if stream.target == 2:
            self._tails[stream.label].extend(map(shortened, lines))
            if stream.label.startswith("client") and any(PRTE_LOST in line for line in lines):
                self._open_ranks.setdefault(stream.label, {})["of a host that is lost"] = 0
            if stream.client and (found := MPICH_ABORT.search(b"\n".join(lines))) is not None:
                rank, status = stream.label.split()[1], found[1].decode()
                self._rank_report(stream.client, ["raised", rank, status])
        if stream.label.startswith("client") and self._is_comment(stream):
            return
        self._output.lines(stream.label, stream.target, lines)

    def _is_comment(self, stream: Stream) -> bool:
        """Of an mpirun on being stopped by us, or by a rank with a traceback, which helps nobody."""
        plan = self._plans[stream.label]
        # Ranks elsewhere print through it.
        by_us = self._stopping and not (stream.target == 1 and (plan.host or plan.spans))
        return by_us or self._inquest.has_said_why(stream.label)

    def _rank_report(self, client: str, words: list[str]) -> None:
        """``start RANK PID`` and ``end RANK WAITSTATUS`` from rank_exec, ``raised RANK STATUS`` from rank_main."""
        self._release(f"worker {words[1]}")
        if words[0] != "raised":
            ranks = self._open_ranks.setdefault(client, {})
            if words[0] == "start":
                ranks[words[1]] = int(words[2])
            else:
                ranks.pop(words[1], None)
        if self._stopping or words[0] not in ("raised", "end") or self._restarts.bears(client, 1):
            return  # where the job can bear it, the end of the whole mpirun is what counts
        code = int(words[2]) if words[0] == "raised" else os.waitstatus_to_exitcode(int(words[2]))
        failure = Failure.of(f"worker {words[1]}", code)
        raised = words[0] == "raised"
        if not raised:
            self._codes[failure.label] = code
        lost = raised and self._has_lost_a_peer(failure.label, client)
        if self._inquest.hear(client, failure, code, time.monotonic(), raised=raised, has_lost_a_peer=lost):
            self._blame(failure)

    def _has_lost_a_peer(self, worker: str, process: str) -> bool:
        """Whether that is the error which a worker, by itself or below the mpirun ``process``, has ended with."""
        for fd, stream in list(self._streams[process]):
            if (stream.label, stream.target) == (worker, 2):
                self._read_all(fd, stream)
        last = next((line for line in reversed(self._tails[worker]) if line.strip()), b"")
        names = (PeerLostError, ClientLostError, ServerLostError)
        return any(name.__name__.encode() in last.partition(b":")[0] for name in names)

    def _would_fail_again(self, label: str) -> bool:
        """Whether a worker under ``label`` has ended with an error that another in its place would meet too.

        Nobody has some values any more, or all have left the store. Where the job goes on without clients that are
        lost, one that comes too late is another of those.
        """
        final: list[tuple[type[PeerLostError], str]] = [(ServerLostError, VALUES_LOST)]
        if self._restarts.on_client_loss != "shrink":
            final.append((ClientLostError, STORE_OVER))
        words = [line for rank in self._plans[label].workers for line in self._tails.get(f"worker {rank}", ())]
        return any(error.__name__.encode() in line and text.encode() in line for line in words for error, text in final)

    def _blame(self, failure: Failure) -> None:
        """Settle the matter. Who was under suspicion already came earlier."""
        suspect, self._inquest.suspect = self._inquest.suspect, None
        if self._failure is None:
            self._failure = failure if suspect is None else suspect.failure

    def _reap(self) -> None:
        # Workers first: one that has failed may have taken a server with it, and the last one ends the job.
        for label, child in [*reversed(self._living.items())]:
            if child.poll() is None:
                continue
            del self._living[label]
            self._watchdog.discard(child.pid)
            if isinstance(child, RemoteProcess) and (fd := self._has_unsent.pop(child, None)) is not None:
                self._selector.unregister(fd)
            self._drain(label)  # its last words, and the reports of its ranks, before the verdict on it
            code = child.returncode
            assert code is not None
            if code == 0 and self._open_ranks.get(label):
                code = 1  # an mpirun that has lost its helper on another host, or has been stopped, and does not say so
            silent = isinstance(child, RemoteProcess) and child.is_silent and not self._stopping
            code = 1 if silent else code
            self._codes[label] = code
            if self._stopping:
                self._judge_stopped(label, code)
            elif (suspect := self._inquest.suspect) is not None and suspect.client == label:
                self._inquest.hear_of_client(label, processes.exit_status(code), hears_all=self._hears_all(label))
                self._blame(Failure.of(label, code))
            elif code == 0 and not self._is_early(label):
                self._tell_end(label)
            else:
                how = f"{processes.describe_end(code)}{' while workers were still running' if code == 0 else ''}"
                how = SILENT if silent else how
                # Somebody has sent it SIGTERM, upon which it ends in good order: that is no other death for the job.
                bears = self._restarts.bears(label, code or -signal.SIGTERM) and not self._would_fail_again(label)
                bears &= "KVMPI_SCHEDULER" in self._env  # else it is the scheduler, and there is no job yet
                if bears and self._goes_on_after(label):
                    self._tell_end(label)
                    what = self._restarts.plan(label, time.monotonic(), is_wanted=self._is_wanted(label))
                    self._output.say(f"kvmpi run: {label} {how}; {what}")
                else:
                    failure = Failure(label, processes.exit_status(code) or 1, how)
                    if code and self._plans[label].role == "worker" and self._has_lost_a_peer(label, label):
                        self._follower = self._follower or (failure, time.monotonic() + _FOLLOWED_S)
                    else:
                        self._blame(failure)
        processes.bury_orphans({*self._watchdog.pids, *(child.pid for child in self._living.values())})

    def _hears_all(self, label: str) -> bool:
        """Whether all ranks of an mpirun report here, which they cannot from hosts that lack the job's folder."""
        ranks = self._open_ranks.get(label, {})
        return all(str(rank) in ranks or f"worker {rank}" in self._codes for rank in self._plans[label].workers)

    def _is_early(self, label: str) -> bool:
        """Whether a process that has ended is one that workers still at work need."""
        return self._plans[label].role in ("scheduler", "server") and self._working()

    def _tell_end(self, label: str) -> None:
        """Say to the scheduler that a server or a client is gone, if that is certain, and the job goes on."""
        if label == "scheduler" or not has_ended(self._children[label]):
            return
        how, (role, rank) = processes.describe_end(self._codes[label]), self._plans[label].member
        left = role == "client" and self._codes[label] == 0
        how += ", and had not closed the store" if left else ""
        self._endings.tell(role, rank, self._starts[label] - 1, how, returns=not left)

    def _hear_loss(self, role: str, rank: int) -> None:
        """A server or a client counts as lost because nobody hears it."""
        for label, child in self._children.items():
            if self._plans[label].member == (role, rank):
                self._restarts.note_unheard(label, child, time.monotonic())

    def _end_unheard(self) -> None:
        """Those that were told so, and have not ended: others are to take their places."""
        while self._read(self._losses.fd, "losses"):  # who takes our output may have held us up for long
            pass
        for label, child in self._restarts.take_unheard(time.monotonic()):
            if child is not self._children[label] or child.returncode is not None:
                continue
            if self._restarts.bears(label, -signal.SIGKILL) or self._is_stopped(label):
                self._output.say(f"kvmpi run: {label} counts as lost, and does not end; it is killed")
                kill_group(child)

    def _is_stopped(self, label: str) -> bool:
        """Whether a process here, or a rank below it, waits for SIGCONT."""
        child = self._children[label]
        if isinstance(child, RemoteProcess):
            return False
        ranks = {} if self._plans[label].spans else self._open_ranks.get(label, {})
        return any(map(processes.is_stopped, (child.pid, *filter(None, ranks.values()))))

    def _judge_stopped(self, label: str, code: int) -> None:
        """A server that fails while it saves its state at the end is a failure; dying of our signals is not."""
        if self._over() or self._plans[label].role not in ("scheduler", "server"):
            return
        if code not in (0, -signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM):
            self._failure = Failure.of(label, code)

    # ---- the end

    def _stop(self) -> None:
        """End what is left: clients first, then servers, which a client may need that has something to save.

        The scheduler is the last, so that nobody keeps words for it. SIGTERM, and SIGKILL after the grace or at a
        second Ctrl-C; whole process groups.
        """
        self._stopping = True
        self._inquest.suspect = None
        asked = len(self._signals)
        for roles in (("worker", "client"), ("server",), ("scheduler",)):
            labels = [label for label in self._children if self._plans[label].role in roles]
            self._end(labels, signal.SIGTERM, self._grace_s, enough=lambda: len(self._signals) > asked)
            if left := list(filter(self._still_runs, labels)):
                self._output.say(f"kvmpi run: SIGTERM did not end {in_words(left)}; killed")
                self._end(left, signal.SIGKILL, KILL_S, enough=lambda: False)

    def _end(self, labels: list[str], number: int, patience_s: float, enough: Callable[[], bool]) -> None:
        """Send a signal to those that run, and wait until they have ended, at most so long, or it is ``enough``."""
        alive = list(filter(self._still_runs, labels))
        for label in alive:
            self._signal(label, number)
        deadline = time.monotonic() + patience_s
        while any(map(self._still_runs, alive)) and not enough():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            with contextlib.suppress(OutputClosedError):
                self._step(left_s)

    def _still_runs(self, label: str) -> bool:
        return label in self._living

    def _signal(self, label: str, number: int) -> None:
        """To a process and its group. An mpirun would kill its ranks one second after SIGTERM, so they get that."""
        child = self._children[label]
        programs = [pid for pid in self._open_ranks.get(label, {}).values() if pid]
        if number == signal.SIGTERM and programs and len(programs) == len(self._plans[label].workers):
            for pid in programs:
                with contextlib.suppress(OSError):
                    os.killpg(pid, number)
            return
        is_mpirun = self._plans[label].role == "client" and not isinstance(child, RemoteProcess)
        if not (number == signal.SIGTERM and is_mpirun and questions.end_ranks(child.pid)):
            signal_group(child, number)

    def _read_picture(self) -> None:
        """Before the job's folder is gone."""
        try:
            with open(os.path.join(self._job.job_dir, STATUS_FILE), "rb") as file:
                self.picture = json.load(file)
        except (OSError, ValueError):
            pass  # the scheduler was killed, or never began

    def _finish(self) -> None:
        """Sweep up, show the last output, and say what went wrong."""
        self._read_picture()
        self._watchdog.finish()
        self._requests.close()
        self._endings.close()
        for label in list(self._writers):
            self._release(label)
        for fd in self._has_unsent.values():
            self._selector.unregister(fd)
        for child in self._children.values():
            child.poll()
        self._drain()
        try:
            for key in list(self._selector.get_map().values()):
                if isinstance(key.data, Stream):
                    self._show(key.data, key.data.splitter.close())
                if key.data != "wakeup":
                    self._close(key.fd)
        except OutputClosedError:
            pass
        self._selector.close()

    def _drain(self, label: str = "") -> None:
        """Read all that is there now, of one process or of all, without waiting; a grandchild may keep a pipe open."""
        for streams in [self._streams[label]] if label else list(self._streams.values()):
            for fd, stream in list(streams):
                self._read_all(fd, stream)

    def _read_all(self, fd: int, stream: Stream) -> None:
        try:
            for _ in range(DRAIN_READS):
                known = self._selector.get_map().get(fd)
                if known is None or known.data is not stream or not self._read(fd, stream):
                    break
        except OutputClosedError:
            if not self._stopping:
                raise
