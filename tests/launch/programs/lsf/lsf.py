"""Stands in for LSF: bsub, bjobs, bkill and blaunch that obey the documented options, states and exit codes.

Called by one of these names. Jobs are run; they are folders below $LSF_STANDIN: ``state``, ``pid`` and ``words``. A job
waits for $LSF_WAIT_S first, and for ever if that is "for ever" or its name ends with $LSF_HELD. Its hosts are
$LSF_HOSTS, by default this machine; the first one runs it, and $LSF_SHELL, which takes a host and a command for a
shell, is how blaunch reaches the others.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
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
    (job / "env").write_text(repr(dict(os.environ)))
    # What runs the job is not of the job, and so has nothing of its environment.
    own = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
    with open(os.devnull, "r+b") as nothing:
        command = [sys.executable, "-IS", __file__, "run", str(number)]
        subprocess.Popen(command, env=own, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)
    print(f"Job <{number}> is submitted to queue <{given.get('-q', 'normal')}>.")
    return 0


def run(words: list[str]) -> int:
    number = words[0]
    job = HOME / number
    given, rest = ast.literal_eval((job / "words").read_text())
    command = " ".join(rest)
    (job / "pid").write_text("0")
    wait = os.environ.get("LSF_WAIT_S", "0.3")
    held = given.get("-J", "").endswith(os.environ.get("LSF_HELD", "\n"))
    until_s = float("inf") if held or wait == "for ever" else time.monotonic() + float(wait)
    while time.monotonic() < until_s:
        if (job / "killed").exists():
            (job / "state").write_text("EXIT")
            return 0
        time.sleep(0.05)
    tasks, names = int(given.get("-n", "1")), os.environ.get("LSF_HOSTS", os.uname().nodename).split()
    ptile = re.search(r"span\[ptile=(\d+)\]", given.get("-R", ""))
    each = int(ptile[1]) if ptile else tasks
    slots = [f"{name} {min(each, tasks - i * each)}" for i, name in enumerate(names) if i * each < tasks]
    env = {**ast.literal_eval((job / "env").read_text()), "LSB_JOBID": number, "LSB_MCPU_HOSTS": " ".join(slots)}
    with open(given["-o"], "ab") as out, open(given["-e"], "ab") as err:
        child = subprocess.Popen(["sh", "-c", command], env=env, stdout=out, stderr=err, start_new_session=True)
        (job / "pid").write_text(str(child.pid))
        (job / "state").write_text("RUN")
        status = child.wait()
        out.write(f"Sender: LSF System\nSubject: Job {number}: <{given.get('-J')}> {status}\n".encode())
    (job / "state").write_text("DONE" if status == 0 else "EXIT")
    return 0


def bjobs(words: list[str]) -> int:
    assert words[:3] == ["-noheader", "-o", "jobid stat"], words
    with open(HOME.parent / "asked", "a") as asked:
        print(*words[3:], file=asked)
    status = 0
    for number in words[3:]:
        job = HOME / number
        if job.exists():
            print(f"{number:<10} {(job / 'state').read_text()}")
        else:
            print(f"Job <{number}> is not found", file=sys.stderr)
            status = 255
    return status


def bkill(words: list[str]) -> int:
    if words[0] == "-J":
        assert words[2:] == ["0"], words
        named = [job for job in HOME.iterdir() if ast.literal_eval((job / "words").read_text())[0]["-J"] == words[1]]
        return max((bkill([job.name]) for job in named if (job / "state").read_text() in ("PEND", "RUN")), default=255)
    if len(words) > 1:
        return max(bkill([word]) for word in words)
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


def blaunch(words: list[str]) -> int:
    """As rsh does it: words are for a shell, unless ``-no-shell`` says that they are not."""
    plain = False
    while words[0].startswith("-"):
        option = words.pop(0)
        if option not in ("-no-shell", "-use-login-shell", "-n"):
            print(f"blaunch: {option}: unknown option", file=sys.stderr)
            return 255
        plain |= option == "-no-shell"
    host, *command = words
    if host not in os.environ.get("LSB_MCPU_HOSTS", "").split()[::2] or "LSB_JOBID" not in os.environ:
        print(f"blaunch: {host} is not of this job", file=sys.stderr)
        return 255
    line = shlex.join(command) if plain else " ".join(command)
    task = subprocess.Popen([os.environ["LSF_SHELL"], host, line], stdin=subprocess.PIPE, start_new_session=True)

    def feed() -> None:
        while text := os.read(0, 4096):
            os.write(task.stdin.fileno(), text)
        task.stdin.close()

    threading.Thread(target=feed, daemon=True).start()
    code = task.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    commands = {"bsub": bsub, "bjobs": bjobs, "bkill": bkill, "blaunch": blaunch}
    sys.exit(run(sys.argv[2:]) if sys.argv[1:2] == ["run"] else commands[os.path.basename(sys.argv[0])](sys.argv[1:]))
