"""Jobs that run to their end: what processes see, what is shown, and with which status the job ends."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest
from jobs import HANGS_S
from test_launch_hosts import needs_root

from kvmpi.errors import ConfigError
from kvmpi.launchers import command, limits, mpirun
from kvmpi.launchers.output import last_words

try:
    MPI = mpirun.find(os.environ, 2)
except ConfigError:
    MPI = None
needs_mpi = pytest.mark.skipif(MPI is None, reason="no MPI here")

SHOW_ENV = """
import json, os, sys
env = {name: value for name, value in os.environ.items() if name.startswith(("KVMPI_", "OMP_", "HWLOC_"))}
json.dump(env, open(f"env-{env['KVMPI_RANK']}.json", "w"))
"""


@pytest.mark.skipif(MPI is None or MPI.kind != "openmpi", reason="no Open MPI here")
def test_clients_share_memory_in_folders_of_their_own(launch, write, tmp_path):
    """Two of a job may get one name for their files, and then read each other's messages."""
    program = """
        import json, os
        from mpi4py import MPI
        MPI.COMM_WORLD.Barrier()
        folder = os.environ["OMPI_MCA_btl_sm_backing_directory"]
        with open(f"shared-{os.environ['KVMPI_RANK']}.json", "w") as file:
            json.dump([folder, sorted(os.listdir(folder))], file)
        MPI.COMM_WORLD.Barrier()
    """
    job = launch("-n", "4", "-c", "2", "--", write("shared.py", textwrap.dedent(program)))
    assert job.finish() == 0, job.stderr
    found = [json.loads((tmp_path / f"shared-{rank}.json").read_text()) for rank in range(4)]
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert os.path.dirname(found[0][0]) == os.path.dirname(found[2][0])
    assert found[0][0] != found[2][0]
    assert [len(names) for _, names in found] == [2] * 4, "one of each rank"
    assert not os.path.exists(os.path.dirname(found[0][0]))


#: Stands in for another MPI's mpirun of two ranks, and ends at options that are PRRTE's.
AN_MPIRUN = f"""#!/bin/sh
case "$1" in --version) echo "VERSION"; exit;; esac
while [ "$1" != "{sys.executable}" ]; do
    case "$1" in --prtemca) echo "Error: unknown option \\"$1\\""; exit 1;; esac
    shift
done
PREFIX_SIZE=2 PREFIX_RANK=0 "$@" & PREFIX_SIZE=2 PREFIX_RANK=1 "$@"
rank_1=$?
wait $! && exit $rank_1
"""


@pytest.fixture
def of_another_mpi(write, tmp_path):
    """``of_another_mpi(version, prefix)`` is the environment of a job with an mpirun of that version."""

    def make(version, prefix):
        script = AN_MPIRUN.replace("VERSION", version).replace("PREFIX", prefix)
        (tmp_path / write("mpirun", script)).chmod(0o755)
        return {"KVMPI_MPIRUN": str(tmp_path / "mpirun")}

    return make


def test_ranks_of_open_mpi_4_share_memory_in_the_jobs_folder(launch, write, of_another_mpi, tmp_path):
    env = of_another_mpi("mpirun (Open MPI) 4.1.4", "OMPI_COMM_WORLD")
    write("shared.py", "import json, os; json.dump(dict(os.environ), open(f'{os.environ[\"KVMPI_RANK\"]}.json', 'w'))")
    job = launch("-n", "2", "shared.py", env=env)
    assert job.finish() == 0, job.stdout + job.stderr
    for rank in range(2):
        env = json.loads((tmp_path / f"{rank}.json").read_text())
        assert env["OMPI_MCA_btl_vader_backing_directory"] == f"/dev/shm/kvmpi-{env['KVMPI_JOB_ID']}/0"
        assert env["OMPI_MCA_orte_tmpdir_base"] == env["KVMPI_JOB_DIR"]


@pytest.mark.skipif(MPI is None or MPI.kind != "openmpi", reason="no Open MPI here")
def test_a_library_of_another_mpi_is_told_so(launch, write, of_another_mpi):
    """Ranks of MPICH, for whom mpi4py loads Open MPI, are each alone."""
    job = launch(
        "-n", "2", write("alone.py", "import kvmpi; kvmpi.create('mpi')"), env=of_another_mpi("HYDRA build", "PMI")
    )
    assert job.finish() == 1, job.stderr
    assert "ConfigError: client 0 has 2 workers, and MPI sees one: the library that mpi4py has loaded" in job.stderr


@pytest.mark.skipif(MPI is None or MPI.kind != "openmpi", reason="no Open MPI here")
def test_a_job_within_a_job_has_folders_of_its_own(launch, write, tmp_path):
    """What Open MPI was told for the outer one stands in the environment of its ranks."""
    write("inner.py", "import json, os; json.dump(dict(os.environ), open(f'{os.environ[\"KVMPI_RANK\"]}.json', 'w'))")
    program = """
        import os, subprocess, sys
        if os.environ["KVMPI_RANK"] == "1":
            subprocess.run([sys.executable, "-m", "kvmpi", "run", "-n", "2", "inner.py"], check=True)
    """
    job = launch("-n", "2", write("outer.py", textwrap.dedent(program)), env={"OMPI_MCA_a_user": "/tmp/of-the-user"})
    assert job.finish() == 0, job.stderr
    for rank in range(2):
        env = json.loads((tmp_path / f"{rank}.json").read_text())
        folders = {name: value for name, value in env.items() if name.startswith(("OMPI_MCA_", "PRTE_MCA_"))}
        own = [value for value in folders.values() if f"kvmpi-{env['KVMPI_JOB_ID']}" in value]
        assert len(own) >= 2
        assert [value for value in folders.values() if "/kvmpi-" in value] == own
        assert folders["OMPI_MCA_a_user"] == "/tmp/of-the-user"


@needs_mpi
def test_words_of_the_program_arrive_as_they_are(launch, write, tmp_path):
    """Also what mpirun would take for the end of its own."""
    program = "import json, os, sys; json.dump(sys.argv[1:], open(f'words-{os.environ[\"KVMPI_RANK\"]}.json', 'w'))"
    words = ["a b", "", ":", "--", "\\:", "\\\\:", "x:y", "\n", "-n", ":"]
    job = launch("-n", "3", "-c", "2", "-s", "0", "--", write("words.py", program), *words)
    assert job.finish() == 0, job.stderr
    for rank in range(3):
        assert json.loads((tmp_path / f"words-{rank}.json").read_text()) == words


@needs_mpi
def test_a_rank_that_fails_ends_the_others_also_with_options_of_the_interpreter(launch, write):
    program = """
import os, time
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    raise ArithmeticError("this one")
time.sleep(1000)
"""
    job = launch("-n", "2", "--", "python", "-u", "-W", "ignore", write("fails.py", program))
    assert job.finish() == 1
    assert "ArithmeticError: this one" in job.stderr


@needs_mpi
def test_environment_of_workers(launch, write, tmp_path):
    job = launch("-n", "5", "-c", "3", "-s", "2", write("show.py", SHOW_ENV), env={"KVMPI_TIMEOUT_S": "33"})
    assert job.finish() == 0, job.stderr
    seen = [json.loads((tmp_path / f"env-{rank}.json").read_text()) for rank in range(5)]
    assert [env["KVMPI_CLIENT_RANK"] for env in seen] == ["0", "0", "1", "1", "2"]
    for rank, env in enumerate(seen):
        assert env["KVMPI_RANK"] == str(rank)
        assert env["KVMPI_ROLE"] == "worker"
        assert env["KVMPI_JOB_ID"] == seen[0]["KVMPI_JOB_ID"]
        assert (env["KVMPI_NUM_WORKERS"], env["KVMPI_NUM_CLIENTS"], env["KVMPI_NUM_SERVERS"]) == ("5", "3", "2")
        assert env["KVMPI_SCHEDULER"] == "tcp://127.0.0.1:12345"
        assert env["KVMPI_TIMEOUT_S"] == "33"
        assert not {"KVMPI_TTY", "KVMPI_READY_FD", "HWLOC_XMLFILE"} & env.keys()
    job.assert_nothing_left(seen[0]["KVMPI_JOB_DIR"], timeout_s=0)


def test_output_of_every_role_has_its_name_and_keeps_its_stream(launch, write):
    program = write(
        "speak.py",
        "import pathlib, sys, time\n"
        "while not all('up' in pathlib.Path(f'logs/{role}.log').read_text() for role in ('scheduler', 'server-1')):\n"
        "    time.sleep(0.01)  # when workers end, so does who has not spoken yet\n"
        "print('out [bold]'); print('err', file=sys.stderr)\nprint('no end', end='')",
    )
    job = launch("-n", "2", "-c", "2", "-s", "2", "--log-dir", "logs", program)
    assert job.finish() == 0
    lines = job.stdout.splitlines()
    assert {"[scheduler] up scheduler 0 -", "[server 1] up server 1 tcp://127.0.0.1:12345"} <= set(lines)
    assert [line for line in lines if line.startswith("[worker 1]")] == ["[worker 1] out [bold]", "[worker 1] no end"]
    assert sorted(job.stderr.splitlines()) == ["[worker 0] err", "[worker 1] err"]
    logs = {path.name: path.read_text() for path in (job.folder / "logs").iterdir()}
    assert logs.keys() == {"scheduler.log", "server-0.log", "server-1.log", "worker-0.log", "worker-1.log"}
    assert sorted(logs["worker-1.log"].splitlines()) == ["err", "no end", "out [bold]"]


def test_a_process_that_no_descriptors_are_left_for_is_named(write, tmp_path):
    write("prog.py", "import time\ntime.sleep(60)\n")
    few = """
        import errno, os, runpy, sys
        from kvmpi.launchers import run

        class Few:  # the scheduler has two pipes, and one to say where it listens
            left = 4
            def __getattr__(self, name):
                return getattr(os, name)
            def pipe(self):
                self.left -= 1
                if self.left < 0:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                return os.pipe()

        run.os = Few()
        runpy.run_path(sys.argv.pop(1), run_name="__main__")
    """
    launcher = str(Path(__file__).with_name("launcher_under_test.py"))
    words = [sys.executable, "-c", textwrap.dedent(few), launcher, "-s", "1", "prog.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 126, done.stderr
    assert f"kvmpi run: server 0 could not be started: {sys.executable}: Too many open files" in done.stderr
    assert "raise the limit of open files, ulimit -n" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("limit", [12, 22])  # too few for the launcher, and for the scheduler
def test_a_job_that_may_have_too_few_descriptors_says_what_helps(write, tmp_path, limit):
    write("prog.py", "import time\ntime.sleep(60)\n")
    words = [sys.executable, "-m", "kvmpi", "run", "-n", "2", "-c", "2", "-s", "1", "prog.py"]
    few = ["sh", "-c", f'ulimit -n {limit} && exec "$@"', "sh", *words]
    done = subprocess.run(few, cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode in (1, 126), done.stderr
    assert "raise the limit of open files, ulimit -n" in done.stderr
    assert "Traceback" not in done.stderr


LAST_WORDS = [
    ("Too many open files (src/epoll.cpp:38)", "ulimit -n"),
    ("Resource temporarily unavailable (src/thread.cpp:241)", "ulimit -u"),
    ("RuntimeError: can't start new thread", "ulimit -u"), ("MemoryError", "ulimit -v"),
    ("ImportError: libquadmath.so.0: failed to map segment from shared object", "ulimit -v"),
    ("  Error:             Argument list too long", "put them into a file"),
    ("OSError: [Errno 27] File too large", "ulimit -f"),
    ("bdb.BdbQuit", "debugger"), ("EOFError: EOF when reading a line", "standard input"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "option"), LAST_WORDS)
def test_last_words_tell_of_a_limit(words, option):
    assert option in limits.advice([b"", words.encode()])


@pytest.mark.parametrize(("words", "option"), [LAST_WORDS[0], LAST_WORDS[-1]])
def test_last_words_that_tell_of_a_limit_are_explained(launch, write, words, option):
    write("prog.py", f"import sys\nsys.exit({words!r})\n")
    job = launch("-n", "1", "-s", "1", "prog.py")
    assert job.finish() == 1
    assert option in job.stderr
    assert "KVMPI_ON_CLIENT_LOSS" not in job.stderr


@pytest.mark.parametrize(("limit", "program", "number"), [
    ("-St 1", "while True: pass", signal.SIGXCPU), ("-t 1", "while True: pass", signal.SIGKILL),
    ("-f 1", "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_DFL); "
             "open('large', 'wb').write(bytes(1 << 20))", signal.SIGXFSZ),
])  # fmt: skip
def test_limits_that_kill_are_told_as_such(write, tmp_path, limit, program, number):
    write("prog.py", f"import os\nif os.environ['KVMPI_RANK'] == '0':\n    {program}\n".replace("; ", "\n    "))
    words = [sys.executable, "-m", "kvmpi", "run", "-n", "2", "-c", "2", "-s", "1", "prog.py"]
    limited = ["sh", "-c", f'ulimit {limit} && exec "$@"', "sh", *words]
    done = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 128 + number, done.stderr
    assert f"was killed by {number.name}" in done.stderr
    assert f"ulimit {limit.replace('S', '')[:2]}" in done.stderr
    assert "KVMPI_ON_CLIENT_LOSS" not in done.stderr


@needs_root
@pytest.mark.parametrize("layout", ["-n 2 -c 2 -s 1", pytest.param("-n 2", marks=needs_mpi)])
def test_a_host_that_does_not_reach_itself_is_told_so(write, tmp_path, layout):
    write("prog.py", "")
    words = [sys.executable, "-m", "kvmpi", "run", *layout.split(), "prog.py"]
    apart = ["unshare", "--net", *words]
    done = subprocess.run(apart, cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("kvmpi run: this host does not reach itself at 127.0.0.1 ")
    assert done.stderr.endswith("ip link set lo up\n")


@pytest.mark.parametrize("command", ["run -n 1 /bin/true", "bench tune", "doctor"])
def test_a_current_folder_that_is_gone_is_said(command, tmp_path):
    gone = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    words = ["sh", "-c", gone, "sh", sys.executable, "-m", "kvmpi", *command.split()]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 2
    name = command.split()[0]
    assert done.stderr == f"kvmpi {name}: the current folder has been removed, or made anew; cd to one that is there\n"


def test_a_umask_that_takes_ones_own_rights_is_said(tmp_path):
    words = ["sh", "-c", 'umask 777 && exec "$@"', "sh", sys.executable, "-m", "kvmpi", "run", "-n", "1", "/bin/true"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("kvmpi run: umask 777 takes from you what ")
    assert done.stderr.count("\n") == 1


def test_a_file_that_cannot_be_made_is_named(launch, tmp_path):
    (tmp_path / "logs" / "worker-0.log").mkdir(parents=True)
    job = launch("-n", "1", "--log-dir", "logs", "/bin/true")
    assert job.finish() == 1
    assert job.stderr == "kvmpi run: logs/worker-0.log: Is a directory\n"
    own = [card for card in Path("/tmp").glob("kvmpi-*/job.json") if f'"pid": {job.process.pid},' in card.read_text()]
    assert not own


@needs_mpi
def test_lines_of_ranks_are_never_mixed(launch, write):
    program = write(
        "flood.py",
        """
import os, sys
rank = os.environ["KVMPI_RANK"]
for i in range(200):
    for piece in (f"{i} ", rank * 3000, rank * 3000, "\\n"):  # unbuffered: one write for each piece
        sys.stdout.write(piece)
        sys.stdout.flush()
os.write(1, b"\\xff no end")
""",
    )
    job = launch("-n", "3", "-c", "2", program, errors="surrogateescape")
    assert job.finish() == 0, job.stderr
    lines = job.stdout.splitlines()
    for rank in "012":
        own = [line for line in lines if line.startswith(f"[worker {rank}]")]
        assert own == [f"[worker {rank}] {i} {rank * 6000}" for i in range(200)] + [f"[worker {rank}] \udcff no end"]


@needs_mpi
def test_a_remark_of_mpirun_that_means_nothing_is_left_out(launch, write, tmp_path):
    real = MPI.path
    remark = "plm:ssh: Warning: setpgid(7,7) failed in parent with errno=Permission denied(13)"
    (tmp_path / "mpirun").write_text(f'#!/bin/sh\necho "{remark}" >&2\necho "and another" >&2\nexec {real} "$@"\n')
    (tmp_path / "mpirun").chmod(0o755)
    job = launch("-n", "2", write("quiet.py", "print('done')\n"), env={"KVMPI_MPIRUN": str(tmp_path / "mpirun")})
    assert job.finish() == 0, job.stderr
    assert "and another" in job.stderr
    assert "setpgid" not in job.stderr


@pytest.mark.parametrize("clients", ["2", pytest.param("1", marks=needs_mpi)])
@pytest.mark.parametrize(
    ("how", "status", "text"),
    [
        ("sys.exit(3)", 3, "ended with exit status 3"),
        ("sys.exit(os.system('false'))", 1, "ended with exit status 1"),
        ("raise ValueError('boo')", 1, "ValueError: boo"),
        ("os.kill(os.getpid(), 11)", 139, "was killed by SIGSEGV"),
        ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL"),
        ("os._exit(139)", 139, "ended with exit status 139, as when SIGSEGV has killed what it had started"),
    ],
)
def test_exit_status_is_that_of_the_worker_that_failed(launch, write, clients, how, status, text):
    program = write(
        "fail.py",
        f"import os, sys, time\nif os.environ['KVMPI_RANK'] == '1':\n    {how}\ntime.sleep(1000)",
    )
    job = launch("-n", "2", "-c", clients, "-s", "1", program)
    assert job.finish() == status
    client = "0" if clients == "1" else "1"
    assert f"kvmpi run: worker 1 (client {client}) " in job.stderr
    assert text in job.stderr
    assert not job.environs()


@needs_mpi
@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("sys.exit(3)", 3),  # others wait in MPI_Init for a rank that never comes
        ("sys.exit(256)", 1),
        ("from mpi4py import MPI; raise ValueError('boo')", 1),  # and here in a barrier, while it would finalize
        ("from mpi4py import MPI; sys.exit(3)", 3),
        ("from mpi4py import MPI; os.kill(os.getpid(), 9)", 137),
        ("from mpi4py import MPI; MPI.COMM_WORLD.Abort(7)", 7),
    ],
)
def test_a_rank_that_fails_ends_its_peers(launch, write, how, status):
    program = write(
        "fail.py",
        f"""
import os, sys
if os.environ["KVMPI_RANK"] == "3":
    {how}
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
if os.environ["KVMPI_CLIENT_RANK"] == "0":
    import time; time.sleep(1000)
""",
    )
    job = launch("-n", "4", "-c", "2", program)
    assert job.finish() == status, job.stderr
    assert "kvmpi run: worker 3 (client 1) " in job.stderr
    assert "rank_main" not in job.stderr
    assert not job.environs()


@needs_mpi
@pytest.mark.parametrize(
    ("before", "status"),
    [
        ("sys.stderr.close()", 1),
        ("sys.stderr = None", 1),
        ("class Tee:\n        def write(self, text): pass\n    sys.stderr = Tee()", 1),  # cannot be flushed
        ("sys.excepthook = lambda *_: 1 / 0", 1),
        ("sys.excepthook = lambda *_: sys.exit(4)", 4),
    ],
)
def test_a_rank_that_cannot_show_its_error_ends_its_peers_too(launch, write, before, status):
    program = write(
        "fail.py",
        f"""
import sys
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    {before}
    raise ValueError("boo")
MPI.COMM_WORLD.Barrier()
""",
    )
    job = launch("-n", "2", program)
    assert job.finish() == status, job.stderr
    assert "kvmpi run: worker 1 (client 0) " in job.stderr
    assert not job.environs()


@needs_mpi
@pytest.mark.parametrize("clients", ["1", "2"])
def test_a_pipe_that_nobody_reads_ends_a_program_as_in_a_shell(launch, clients):
    """Python ignores that signal, and hands this on to what it executes."""
    job = launch("-n", "2", "-c", clients, "--", "sh", "-c", "kill -PIPE $$; echo alive; sleep 1000")
    assert job.finish() == 128 + signal.SIGPIPE, job.stdout
    assert "alive" not in job.stdout
    assert "was killed by SIGPIPE" in job.stderr


@needs_mpi
def test_every_client_has_a_world_of_its_own(launch, write):
    program = write(
        "world.py",
        "from mpi4py import MPI; import os\n"
        "world = MPI.COMM_WORLD\n"
        "print(os.environ['KVMPI_RANK'], world.rank, world.size, world.allreduce(int(os.environ['KVMPI_RANK'])))",
    )
    job = launch("-n", "5", "-c", "2", program)
    assert job.finish() == 0, job.stderr
    said = sorted(line.split("] ")[1] for line in job.stdout.splitlines() if line.startswith("[worker"))
    assert said == ["0 0 3 3", "1 1 3 3", "2 2 3 3", "3 0 2 7", "4 1 2 7"]
    assert job.stderr == "", "an MPI should be quiet"


@needs_mpi
def test_ranks_run_modules_and_see_their_arguments(launch, write):
    write("helper.py", "import sys\nif __name__ == '__main__': print(sys.argv[1:], __spec__.name)")
    job = launch("-n", "2", "--", "-m", "helper", "-n", "a b")
    assert job.finish() == 0, job.stderr
    assert "[worker 1] ['-n', 'a b'] helper" in job.stdout.splitlines()


def test_last_lines_of_standard_error_are_shown_again_unless_they_stand_right_above(launch, write):
    complain = "import sys\nfor i in range(100): print('line', i, file=sys.stderr)\n"
    job = launch(write("fail.py", complain + "sys.exit(4)"))
    assert job.finish() == 4
    end = ["[worker 0] line 99", "kvmpi run: worker 0 (client 0) ended with exit status 4"]
    assert job.stderr.splitlines()[-2:] == end

    job = launch(write("fail.py", complain + "for i in range(30): print(i)\nsys.exit(4)"))
    assert job.finish() == 4
    assert job.stderr.splitlines()[-21].endswith("exit status 4; its last lines on standard error:")
    assert job.stderr.splitlines()[-20:] == [f"    line {i}" for i in range(80, 100)]


def test_the_last_words_say_where_the_program_called_what_has_failed(launch, write):
    program = """
import sys
import time
import kvmpi

def train(kv):
    print("a line after", flush=True)
    kv.pull("nothing", None)

with kvmpi.create("dist_sync") as kv:
    try:
        train(kv)
    except kvmpi.errors.KVError as error:
        sys.excepthook(type(error), error, error.__traceback__)
        time.sleep(0.5)  # what has been written before is shown before
        print("and another on standard output", flush=True)
        sys.exit(3)
"""
    job = launch("-s", "1", write("calls.py", program), whole=True)
    assert job.finish() == 3
    words = job.stderr.splitlines()
    words = words[next(i for i, line in enumerate(words) if line.endswith("last lines on standard error:")) + 1 :]
    frames = [line.strip() for line in words if line.strip().startswith(("File", "..."))]
    assert ["calls.py" in frame for frame in frames[:-1]] == [True, True]
    assert frames[-1] == "... inside kvmpi"
    assert words[-1].startswith("    kvmpi.errors.DTypeMismatchError: ")
    assert len(words) < 12
    assert '/kvmpi/store/base.py", line' in job.stderr, "all of it is there, above"


def test_of_several_tracebacks_each_keeps_its_own_frames():
    lines = [
        b"Traceback (most recent call last):", b'  File "/pkg/kvmpi/a.py", line 1, in f', b"    g()", b"    ^^^",
        b'  File "/home/me/train.py", line 7, in h', b"    1 / 0", b"ZeroDivisionError: division by zero", b"",
        b"During handling of the above exception, another exception occurred:", b"",
        b"Traceback (most recent call last):", b'  File "<frozen runpy>", line 88, in _run_code',
        b'  File "/pkg/kvmpi/b.py", line 2, in k', b"    raise x", b"kvmpi.errors.KVError: x", b"    of two lines",
    ]  # fmt: skip
    found = last_words(lines, ["/pkg/kvmpi/"])
    assert found == [lines[0], b"  ... inside kvmpi", *lines[4:11], b"  ... inside kvmpi", *lines[14:]]
    stack = [
        b"[host:17] *** Process received signal ***",
        b"[host:17] Signal: Aborted (6)",
        b"[host:17] Signal code:  (-6)",
        *(b"[host:17] [%2d] /lib/libc.so.6(+0x3c050)[0x7f]" % i for i in range(25)),
        b"[host:17] *** End of error message ***",
    ]
    assert last_words([b"Resource temporarily unavailable", *stack], []) == [b"Resource temporarily unavailable"]
    assert last_words([b"%d" % i for i in range(50)], []) == [b"%d" % i for i in range(30, 50)]


@pytest.mark.parametrize(
    ("mode", "status", "text"),
    [
        ("port in use", 1, "ConfigError: port 5000 is in use"),
        ("silent", 1, "said nothing about where it listens for 1 s"),
        ("closes", 1, "closed KVMPI_READY_FD without saying where it listens"),
        ("nonsense", 1, "said 'nonsense' where tcp://HOST:PORT was expected"),
    ],
)
def test_a_scheduler_that_does_not_start_ends_the_job(launch, write, mode, status, text):
    program = write("train.py", "open('started', 'w')")
    job = launch("-s", "1", program, env={"TEST_SCHEDULER": mode, "TEST_HANDSHAKE_S": "1"})
    assert job.finish() == status
    assert "kvmpi run: scheduler " in job.stderr
    assert text in job.stderr
    assert not (job.folder / "started").exists()
    assert not job.environs()


def test_nor_is_it_started_again_before_there_is_a_job(launch, write):
    job = launch("--restart", "2", write("train.py", ""), env={"TEST_SCHEDULER": "port in use"})
    assert job.finish() == 1
    assert job.stderr.endswith("kvmpi run: scheduler ended with exit status 1\n"), job.stderr
    assert "started again" not in job.stderr
    assert "KVMPI_READY_FD" not in job.stderr


@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_a_server_or_scheduler_that_ends_early_is_a_failure(launch, write, role):
    program = write("train.py", "import time; time.sleep(1000)")
    job = launch("-s", "1", program, env={f"TEST_{role.upper()}": "exits 0"})
    assert job.finish() == 1
    who = "scheduler" if role == "scheduler" else "server 0"
    assert f"kvmpi run: {who} ended with exit status 0 while workers were still running" in job.stderr


def test_a_server_that_fails_while_it_stops_is_a_failure(launch, write):
    job = launch("-s", "1", write("train.py", "import time; time.sleep(0.5)"), env={"TEST_SERVER": "bad exit"})
    assert job.finish() == 9
    assert "kvmpi run: server 0 ended with exit status 9" in job.stderr


def test_a_worker_that_never_stops_talking_does_not_hide_the_failure_of_another(launch, write):
    text = """
import os, sys, time
if os.environ["KVMPI_RANK"] == "1":
    time.sleep(0.5)
    sys.exit(3)
while True:
    os.write(1, b"x" * 99 + b"\\n")
"""
    job = launch("-n", "2", "-c", "2", write("talk.py", text), stdout=subprocess.DEVNULL)
    assert job.finish(timeout_s=30) == 3
    assert "kvmpi run: worker 1 " in job.stderr


@needs_mpi
def test_a_forked_child_of_a_rank_ends_for_itself(launch, write):
    """It is not taken for the rank, and does not wait for the others, as MPI's end does."""
    text = """
import atexit, os, sys, threading, time
from mpi4py import MPI
statuses = []
for how in ("exit", "raise", "end"):
    if (pid := os.fork()) == 0:
        atexit.register(print, "handler", how)
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread", how))).start()
        if how == "exit":
            sys.exit(5)
        if how == "raise":
            raise ValueError
        break
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
else:
    print("statuses", *statuses)
"""
    job = launch("-n", "2", write("forks.py", text))
    assert job.finish() == 0, job.stderr
    said = Counter(line.partition("] ")[2] for line in job.stdout.splitlines() if line.startswith("[worker"))
    children = [f"{what} {how}" for what in ("handler", "thread") for how in ("exit", "raise", "end")]
    assert said == dict.fromkeys(["statuses 5 1 0", *children], 2)


def test_a_stray_grandchild_does_not_outlive_the_job(launch, write):
    text = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True); print('bye')"
    job = launch(write("leave.py", text))
    start = time.monotonic()
    assert job.finish() == 0
    assert time.monotonic() - start < 5, "its open standard output must not be waited for"
    assert not job.environs()


def test_a_reader_that_goes_away_ends_the_job(launch, write):
    program = write("talk.py", "import time\nwhile True: print('x' * 100); time.sleep(0.001)")
    job = launch(program)
    assert job.process.stdout is not None
    job.process.stdout.readline()
    job.process.stdout.close()
    assert job.process.wait(10) == 141
    assert not job.environs()


def test_a_terminal_gets_colours_and_its_name(launch, write):
    controller, terminal = pty.openpty()
    job = launch(write("tty.py", "import os; print(os.environ['KVMPI_TTY'])"), env={"TERM": "xterm"}, stdout=terminal)
    name = os.ttyname(terminal)
    assert job.finish() == 0
    os.set_blocking(controller, False)
    shown = os.read(controller, 10000).decode()
    assert f"\x1b[36m[worker 0]\x1b[0m {name}" in shown
    os.close(controller)
    os.close(terminal)


def test_the_command_lists_what_exists():
    asked = subprocess.run([sys.executable, "-m", "kvmpi", "--help"], capture_output=True, text=True, check=True)
    assert " run " in asked.stdout
    assert Path(sys.executable).with_name("kvmpi").exists()


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_a_job_that_is_started_without_standard_streams_ends(write, tmp_path, closed):
    """As daemons start programs: the numbers of what is closed are those of the next files that are opened."""
    program = write("leave.py", f"import pathlib; pathlib.Path({str(tmp_path / 'done')!r}).touch(); print('said')")
    command = [sys.executable, "-m", "kvmpi", "run", "-n", "1", "-s", "1", "--", program]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *command], capture_output=True, text=True, timeout=HANGS_S,
        check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "done").exists()
    assert done.stdout == ("" if closed.startswith(">") else "[worker 0] said\n")


@needs_mpi
@pytest.mark.parametrize("shape", ["-n 2 -c 1", "-n 2 -c 2"])
def test_who_reads_standard_input_finds_its_end(write, tmp_path, shape):
    program = write("read.py", "import sys; print(repr(sys.stdin.read()))")
    done = subprocess.run(
        [sys.executable, "-m", "kvmpi", "run", *shape.split(), "--", program], input="hello\n", capture_output=True,
        text=True, timeout=HANGS_S, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[worker 0] ''", "[worker 1] ''"]


def test_the_names_of_other_launchers_mean_the_same():
    for words in (["-n", "3", "-c", "2", "-s", "1"], ["-np", "3", "--clients", "2", "--servers=1"],
                  ["--workers", "3", "-c2", "-s1"]):  # fmt: skip
        found = command.parser().parse_args(words)
        assert (found.workers, found.clients, found.servers) == (3, 2, 1)
