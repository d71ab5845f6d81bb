"""Stands in for LSF: bsub, bjobs and bkill that obey the documented options, states and exit codes, and run the jobs.

Called by one of these names. Jobs are folders below $LSF_STANDIN: ``state``, ``pid`` and ``words``. A job waits for
$LSF_WAIT_S first, and for ever if that is "for ever".
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HOME = Path(os.environ["LSF_STANDIN"])
TAKES_VALUE = {"-J", "-n", "-R", "-o", "-e", "-q", "-P", "-W", "-M", "-G"}
QUEUES = {"", "normal", "long"}


def bsub(words: list[str]) -> int:
    given: dict[str, str] = {}
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option in TAKES_VALUE:
            given[option] = words.pop(0)
        elif option in ("-r", "-rn"):
            given[option] = ""
        else:
            print(f"{option}: Illegal option.", file=sys.stderr)
            return 255
    if given.get("-q", "") not in QUEUES:
        print(f"{given['-q']}: No such queue. Job not submitted.", file=sys.stderr)
        return 255
    number = 1
    while True:
        try:
            (HOME / str(number)).mkdir()
            break
        except FileExistsError:
            number += 1
    job = HOME / str(number)
    (job / "words").write_text(repr((given, words)))
    (job / "state").write_text("PEND")
    if os.fork() == 0:
        os.setsid()
        run(job, number, given, " ".join(words))
        os._exit(0)
    print(f"Job <{number}> is submitted to queue <{given.get('-q', 'normal')}>.")
    return 0


def run(job: Path, number: int, given: dict[str, str], command: str) -> None:
    with open(os.devnull, "r+b") as nothing:
        for fd in (0, 1, 2):
            os.dup2(nothing.fileno(), fd)
    (job / "pid").write_text("0")
    wait = os.environ.get("LSF_WAIT_S", "0.3")
    until_s = float("inf") if wait == "for ever" else time.monotonic() + float(wait)
    while time.monotonic() < until_s:
        if (job / "killed").exists():
            (job / "state").write_text("EXIT")
            return
        time.sleep(0.05)
    tasks = given.get("-n", "1")
    env = {**os.environ, "LSB_JOBID": str(number), "LSB_MCPU_HOSTS": f"{os.uname().nodename} {tasks}"}
    with open(given["-o"], "ab") as out, open(given["-e"], "ab") as err:
        child = subprocess.Popen(["sh", "-c", command], env=env, stdout=out, stderr=err, start_new_session=True)
        (job / "pid").write_text(str(child.pid))
        (job / "state").write_text("RUN")
        status = child.wait()
        out.write(f"Sender: LSF System\nSubject: Job {number}: <{given.get('-J')}> {status}\n".encode())
    (job / "state").write_text("DONE" if status == 0 else "EXIT")


def bjobs(words: list[str]) -> int:
    assert words[:3] == ["-noheader", "-o", "stat"], words
    job = HOME / words[3]
    if not job.exists():
        print(f"Job <{words[3]}> is not found", file=sys.stderr)
        return 255
    print((job / "state").read_text())
    return 0


def bkill(words: list[str]) -> int:
    job = HOME / words[0]
    print(f"Job <{words[0]}> is being terminated")
    (job / "killed").write_text("")
    group = int((job / "pid").read_text())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if group and (job / "state").read_text() == "RUN":
            try:
                os.killpg(group, number)
            except OSError:
                break
            until_s = time.monotonic() + 8.0  # JOB_TERMINATE_INTERVAL
            while (job / "state").read_text() == "RUN" and time.monotonic() < until_s:
                time.sleep(0.05)
    return 0


if __name__ == "__main__":
    sys.exit({"bsub": bsub, "bjobs": bjobs, "bkill": bkill}[os.path.basename(sys.argv[0])](sys.argv[1:]))
