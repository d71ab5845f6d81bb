"""One seed from its beginning to its end: one job, or one that is killed as a whole and goes on from its snapshots."""

from __future__ import annotations

import logging
import random

from simulation.disk import SimulatedDisk
from simulation.network import Violation
from simulation.past import Past
from simulation.plan import KEYS
from simulation.scenario import Job, Killed, Outcome

from kvmpi.errors import ConfigError
from kvmpi.ps import snapshot_files
from kvmpi.ps.chains import PARTS_PER_SERVER
from kvmpi.ps.snapshot_book import Manifest

_LIVES = 3


def play(seed: int) -> Outcome:
    """All that happens with ``seed``.

    Raises:
        Violation: something that must never happen.
    """
    return _play_with_snapshots(seed) if random.Random(f"{seed} snapshots").random() < 0.2 else Job(seed).run()


def _play_with_snapshots(seed: int) -> Outcome:
    """A job that is killed twice, if it lives for so long, each time with all its processes."""
    disk, choose = SimulatedDisk(seed), random.Random(f"{seed} lives")
    fired: dict[str, int] = {}
    resumed: Manifest | None = None
    pasts: dict[int, Past] = {}
    try:
        for life in range(_LIVES):
            job = Job(seed, disk, resumed, None if resumed is None else pasts[resumed.number])
            if life + 1 < _LIVES:
                most = job.steps * job.num_clients * len(KEYS)
                job.killed_after = choose.randrange(most // 3 if resumed is None else 1, most)
                if job.mode == "sync" and choose.random() < 0.7:  # else there is hardly ever a snapshot by then
                    job.killed_beyond = choose.randrange(1 + most // 4)
            try:
                outcome = job.run()
                break
            except Killed:
                fired["kill all"] = fired.get("kill all", 0) + 1
                made = [number for number in disk.committed if job.oracle.knows(number)]
                pasts |= {number: job.oracle.past(number) for number in made}
            finally:
                for fault, count in job.network.faults.fired.items():
                    fired[fault] = fired.get(fault, 0) + count
            if choose.random() < 0.3:
                disk.tear()
            resumed = _newest_good(disk, job.cluster.config.num_servers)
            if resumed is not None:
                how = job.policy if job.mode == "sync" else job.mode
                for name in ("resume", f"resume {how}"):
                    fired[name] = fired.get(name, 0) + 1
        outcome.fired = {**fired, **disk.fired}
        return outcome
    finally:
        disk.close()


def _newest_good(disk: SimulatedDisk, num_servers: int) -> Manifest | None:
    """The snapshot to go on from, which is one of the last two if one of them is whole; None if there never was any."""
    last = disk.committed[-2:]
    whole = [number for number in last if number not in disk.torn]
    try:
        found = snapshot_files.choose(
            disk.directory, num_servers * PARTS_PER_SERVER, PARTS_PER_SERVER, logging.getLogger(__name__).info
        )
    except ConfigError as error:
        if whole:
            raise Violation(f"snapshot {whole[-1]} was complete and whole: {error}") from error
        # Servers would refuse to write over the snapshots of another job, as which a new one would take these.
        for number in disk.numbers(disk.directory):
            disk.remove(disk.directory, number)
        disk.committed.clear()
        return None
    if whole and found.number < whole[-1]:
        raise Violation(f"snapshot {whole[-1]} was complete and whole, {found.number} is taken")
    snapshot_files.prepare(disk.directory, disk.directory, found.number)
    # Of what is there now; what two of them after another were to be worth is gone with those that were older.
    there = disk.numbers(disk.directory)
    disk.committed = [number for number in disk.committed if number <= found.number and number in there]
    return found
