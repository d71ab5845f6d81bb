"""Finds an mpirun, tells Open MPI from MPICH, and knows the flags and the environment that each needs."""

from __future__ import annotations

import importlib.util
import os
import pwd
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmpi.errors import ConfigError
from kvmpi.launchers.cores import YIELD
from kvmpi.launchers.hosts import Host, as_name
from kvmpi.machine import refuses_affinity

#: Variables by which an MPI launcher talks to its ranks. When the launcher itself runs under MPI or in a shell that
#: MPI has started, they would make our own MPI processes believe that they belong to that other job.
FOREIGN_PREFIXES = (
    *("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "PRTE_LAUNCHED", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_"),
    "JSM_",
)
#: By the first one sees that an mpirun of Open MPI 4 has started a process. Of the rest users may set some, too, but
#: another mpirun that has these takes itself for a rank, and ends without a word.
_ORTE_SERVER = "OMPI_MCA_orte_hnp_uri"
_ORTE = ("OMPI_MCA_orte_", "OMPI_MCA_ess", "OMPI_MCA_pmix", "OMPI_UNIVERSE_SIZE")
#: By which torchrun, or kvmpi.torch.c10d, tells the processes of a job where they meet.
TORCH_RENDEZVOUS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
)

#: Open MPI would count the slots of an allocation, which other processes of the job use too.
_NO_ALLOCATION = ("ras", "^slurm,lsf,pbs,tm,gridengine")

#: Seconds of silence before the first probe of a helper, seconds to the next ones, and how many may stay unanswered.
_PROBING = {"time": "60", "intvl": "20", "probes": "21"}

#: For an mpirun to say which one it is.
VERSION_S = 20.0

#: hydra stops all ranks before the one that called MPI_Abort has ended, so that only its words tell who it was.
MPICH_ABORT = re.compile(rb"^Abort\((\d+)\) on node \d+ ", re.MULTILINE)
#: After which PRRTE ends all ranks, and with status 0. Without its name: that of Open MPI 4 is ORTE.
PRTE_LOST = b" has lost communication with a remote daemon"
#: Which means nothing: a child was quicker than its parent. Of ssh, or of Open MPI 4's rsh.
PRTE_QUICK = b"sh: Warning: setpgid("

HELP = "install it with: pip install 'kvmpi[mpi]'; or run without MPI, every worker a client of its own: -c {workers}"


#: For hwloc where it may not ask which cores there are (see ``refuses_affinity``): all cores alike, and ask nobody.
ASK_NOBODY = {"HWLOC_THISSYSTEM": "0", "HWLOC_COMPONENTS": "no_os,stop"}

#: Files that ranks leave behind when they are killed, for ``watchdog.remove``. Open MPI's are of ranks for whom no
#: mpirun has made a folder, and stay whenever these end: of a worker that is alone in its client and loads MPI, too.
LITTER = ("/dev/shm/ucx_shm_posix_*", "/dev/shm/mpich_shm_*", "/dev/shm/sm_segment.*", "/dev/shm/vader_segment.*")


#: Where a libmpi lies below the folder that has its mpirun in bin/: mostly, on SUSE, on Debian, and an older Intel's.
_LIBRARIES = ("lib", "lib64", f"lib/{sysconfig.get_config_var('MULTIARCH') or ''}", "lib/release")


@dataclass(frozen=True)
class MPI:
    """One installed MPI."""

    path: str
    kind: str  # "openmpi", "openmpi4" (which knows no PRRTE, and has other names for most) or "mpich"

    @property
    def is_open_mpi(self) -> bool:
        """Whether it is an Open MPI, of whatever version; else it is an MPICH, or one that was made of it."""
        return self.kind != "mpich"

    def _library(self) -> Path | None:
        """The libmpi that was installed with it; None where distributions have it elsewhere."""
        soname = "libmpi.so.40" if self.is_open_mpi else "libmpi.so.12"
        path = Path(self.path).absolute()
        for prefix in dict.fromkeys((path.parent.parent, path.resolve().parent.parent)):  # it may be a link from ~/bin
            for folder in _LIBRARIES:
                if (found := prefix / folder / soname).exists():
                    return found
        return None

    def _option(self, name: str, value: str) -> tuple[str, str, str]:
        """An option for the runtime of an Open MPI."""
        return ("--mca" if self.kind == "openmpi4" else "--prtemca", name, value)

    def command_on(self, hosts: Sequence[Host], agent: str, network: str, exported: Iterable[str]) -> tuple[str, ...]:
        """The words before the program of a client whose ranks are on these hosts, as many as each has slots.

        Args:
            agent: a program that takes ``HOST WORDS...`` and runs the words there, as ssh does.
            network: an interface or a network that ranks talk over, or empty. Of an IPv6 network none of them knows
                what it means, and so this is then the interface.
            exported: names of environment variables that ranks on other hosts get too.
        """
        size = str(sum(host.slots for host in hosts))
        # An mpirun must see which of them it is on, which is the first; of another name than its own it does not.
        first = hosts[0].name if as_name(hosts[0].name) == hosts[0].name else "localhost"
        hosts = [Host(first, hosts[0].slots), *(Host(as_name(host.name), host.slots) for host in hosts[1:])]
        if self.kind == "mpich":
            interface = ("-iface", network) if network and "/" not in network else ()
            reach = ("-launcher", "ssh", "-launcher-exec", agent)
            # Not NAME:SLOTS, of which Intel's takes the names only, and gives them ranks in turn.
            places = ",".join(host.name for host in hosts for _ in range(host.slots))
            return (self.path, *reach, *interface, "-hosts", places, "-bind-to", "none", "-n", size)
        places = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        is_4 = self.kind == "openmpi4"
        shell, own_network = ("rsh", "oob_tcp_if_include") if is_4 else ("ssh", "prte_if_include")
        words = ["--host", places, *self._option(*_NO_ALLOCATION)]
        words += ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", "-n", size]
        words += [*self._option("plm", shell), *self._option(f"plm_{shell}_agent", agent)]
        words += self._option(f"plm_{shell}_no_tree_spawn", "1")  # other hosts do not have the agent
        if network:
            words += [*self._option(own_network, network), "--mca", "btl_tcp_if_include", network]
        for name in exported:
            words += ["-x", name]
        return (self.path, *words)

    def command(self, size: int, *, local: bool) -> tuple[str, ...]:
        """The words before the program of a client of ``size`` ranks; ``local`` keeps all of them on this host."""
        if self.kind == "mpich":
            here: tuple[str, ...] = ("-launcher", "fork", "-hosts", "localhost") if local else ()
            return (self.path, *here, "-bind-to", "none", "-n", str(size))
        # Several mpiruns on one host know nothing of each other: each would bind its ranks from core 0 upwards.
        here = ("--host", f"localhost:{size}", *self._option(*_NO_ALLOCATION)) if local else ()
        return (self.path, *here, "--oversubscribe", "--bind-to", "none", "-n", str(size))

    def env(self, job_dir: str, shm_dir: str, *, crowded: bool, one_host: bool) -> dict[str, str]:
        """What mpirun and its ranks need in their environment.

        Args:
            job_dir, shm_dir: folders for MPI's own files; the second is for shared memory and may be empty.
            crowded: there are more processes than cores.
            one_host: the ranks of a client share a host.
        """
        # A wheel of mpi4py finds the libmpi beside its interpreter; that of another MPI would not know its rank.
        libmpi = self._library()
        common = {"MPI4PY_LIBMPI": str(libmpi)} if libmpi is not None else {}
        if refuses_affinity():
            common |= ASK_NOBODY
        if self.kind == "mpich":
            # Named, though it does not exist: hydra then writes no topology file to /tmp, which it leaves there
            # when it is killed. rank_exec takes the name away again.
            # And Intel's ignores -bind-to: each client of a host would have its ranks on the first cores, one each.
            return {**common, "HWLOC_XMLFILE": f"{job_dir}/no-topology.xml", "I_MPI_PIN": "0"}
        env = {**common, "OMPI_MCA_osc": "^ucx"}  # the wheel's UCX prints a line for every window
        # Session folders and shared memory live where the launcher cleans up, also after kill -9.
        if self.kind == "openmpi4":
            env["OMPI_MCA_orte_tmpdir_base"] = job_dir
        else:
            env |= {"PRTE_MCA_prte_tmpdir_base": job_dir, "PRTE_MCA_prte_silence_shared_fs": "1"}
        if shm_dir:
            for component in ("btl_vader" if self.kind == "openmpi4" else "btl_sm", "osc_sm", "osc_rdma"):
                env[f"OMPI_MCA_{component}_backing_directory"] = shm_dir
        if not one_host:
            # Its helpers are silent until a rank ends: after the default of 300 s, firewalls have forgotten them, and
            # mpirun never hears of it. As long as by default until one that does not answer counts as lost.
            prefix = "OMPI" if self.kind == "openmpi4" else "PRTE"
            for name, value in _PROBING.items():
                env[f"{prefix}_MCA_oob_tcp_keepalive_{name}"] = value
        if one_host:
            # It serves one-sided messages between hosts, and where it finds none to serve it sleeps for a second.
            env["OMPI_MCA_btl"] = "^ofi"
        if crowded:
            env[YIELD] = "1"
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            env["OMPI_ALLOW_RUN_AS_ROOT"] = env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
        return env


def find(
    environ: Mapping[str, str], num_workers: int, *, beside: str = sys.executable, timeout_s: float = VERSION_S
) -> MPI:
    """``KVMPI_MPIRUN``, else the mpirun beside the interpreter ``beside``, on ``PATH``, or of ``pip install --user``.

    Raises:
        ConfigError: there is none, it does not run, or mpi4py is missing; the message says what to install.
    """
    hint = HELP.format(workers=num_workers)
    path = environ.get("KVMPI_MPIRUN", "")
    if path:
        given, path = path, shutil.which(path, path=environ.get("PATH")) or ""
        if not path:
            raise ConfigError(f"KVMPI_MPIRUN={given!r} is not an executable; {hint}")
    else:
        # Not resolved: the interpreter of a virtual environment is a link to one that lies elsewhere.
        neighbour = str(Path(beside).parent / "mpirun")
        path = shutil.which(neighbour) or shutil.which("mpirun", path=environ.get("PATH")) or _of_user()
        if not path:
            raise ConfigError(f"a client of several workers needs MPI, and no mpirun was found; {hint}")
    need_mpi4py(num_workers)
    kind = detect_kind(path, environ, timeout_s)
    return MPI(_binary(path, environ) if kind == "mpich" else path, kind)


def _of_user() -> str:
    """The mpirun of ``pip install --user``, whose folder of commands often is not on ``PATH``; empty: there is none."""
    return (site.ENABLE_USER_SITE and shutil.which("mpirun", path=os.path.join(site.getuserbase(), "bin"))) or ""


def _binary(path: str, environ: Mapping[str, str]) -> str:
    """``path``, or what it ought to run: Intel's is a script that takes the first ``mpiexec.hydra`` on ``PATH``."""
    beside = str(Path(path).absolute().with_name("mpiexec.hydra"))
    try:
        with open(path, "rb") as file:
            is_script = file.read(2) == b"#!"
    except OSError:  # it may be executed, and not read
        return path
    found = shutil.which("mpiexec.hydra", path=environ.get("PATH"))
    if not is_script or not os.access(beside, os.X_OK) or (found and os.path.samefile(found, beside)):
        return path
    return beside


def need_mpi4py(num_workers: int) -> None:
    """Raises:
    ConfigError: it is missing; the message says what to install.
    """
    if importlib.util.find_spec("mpi4py") is None:
        hint = HELP.format(workers=num_workers)
        raise ConfigError(f"a client of several workers needs MPI, and mpi4py was not found; {hint}")


def detect_kind(path: str, environ: Mapping[str, str], timeout_s: float = VERSION_S) -> str:
    """Ask ``mpirun --version``.

    Raises:
        ConfigError: it does not run, or is neither Open MPI nor an MPICH with hydra.
    """
    try:
        answer = subprocess.run(
            [path, "--version"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        ).stdout.decode(errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{path} --version failed ({error}); set KVMPI_MPIRUN to an mpirun that works") from None
    lowered = answer.lower()
    if "open mpi" in lowered or "openrte" in lowered or "prrte" in lowered:
        version = re.search(r"\((?:open mpi|openrte)\) v?(\d+)", lowered)
        return "openmpi4" if version is not None and int(version[1]) < 5 else "openmpi"
    if "hydra" in lowered or "mpich" in lowered or "intel(r) mpi" in lowered:
        return "mpich"
    first = answer.strip().splitlines()[:1]
    raise ConfigError(
        f"{path} is neither Open MPI nor MPICH: its --version says {first}; set KVMPI_MPIRUN to one of these"
    )


def with_home(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` with a ``HOME``, without which Open MPI does not begin."""
    if "HOME" in environ:
        return dict(environ)
    try:
        return {**environ, "HOME": pwd.getpwuid(os.getuid()).pw_dir}
    except KeyError:  # somebody who has only a number
        return {**environ, "HOME": tempfile.gettempdir()}


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without the traces of a job that the launcher itself runs in; ``PMIX_MCA_`` settings stay.

    A job is one of MPI, or one of torch.distributed: a process that has a rank there.
    """
    foreign = TORCH_RENDEZVOUS if "RANK" in environ else ()
    prefixes = (*FOREIGN_PREFIXES, *_ORTE) if _ORTE_SERVER in environ else FOREIGN_PREFIXES
    return {
        name: value
        for name, value in environ.items()
        if name.startswith("PMIX_MCA_") or not (name.startswith(prefixes) or name in foreign)
    }
