"""Who this process is in its job: rank, ranks, name of the run, and the attempt, from what the launcher left behind.

Read: torchrun's variables (https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables), Open MPI's,
Slurm's (https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES), the addresses that Kubeflow and
JobSet give to pods, and /proc. Kubernetes tells a pod nothing about restarts: put them in FLOPWATCH_ATTEMPT, for
example from the pod's label `jobset.sigs.k8s.io/restart-attempt` through the downward API.

An attempt is one launch of all ranks. All of them must name it alike, and no two launches may share a name:

one node     scheduler's job and restart count, launcher's pid and start time, torchrun's restart count
many nodes   the same as rank 0 sees it, agreed through torch's store when torch.distributed is initialised before
             Run(); else without the launcher, which differs from node to node, and with MASTER_ADDR:MASTER_PORT in
             place of an unknown job
"""

from __future__ import annotations

import ipaddress
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_RANKS = (  # rank, ranks, rank on this node, and what shows that one node holds all ranks
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    # Not SLURM_NTASKS: an sbatch script has it too, and what that starts without srun is one process.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES"),
)


@dataclass(frozen=True, slots=True)
class Process:
    """What the kernel knows: pid, start in clock ticks after boot, age in seconds, inode of its pid namespace."""

    pid: int
    start_ticks: int
    age: float
    pid_namespace: int  # 0 if unknown


@dataclass(frozen=True, slots=True)
class Launch:
    """This process's place in its job. `name` is what the scheduler calls the run, None if it does not say."""

    rank: int
    world_size: int
    local_rank: int
    one_node: bool
    name: str | None
    job: str  # scheduler's job and restart count, "" if there is no scheduler
    meeting_point: str  # MASTER_ADDR:MASTER_PORT, "" if there is none
    launcher: str  # host, pid and start of the process that started the ranks of this node
    restarts: str  # torchrun's restart count

    def attempt(self) -> str:
        """Return the attempt's name as this rank sees it; rank 0's is right for all, see the module."""
        return "-".join(part for part in (self.job, self.launcher, self.restarts) if part)

    def attempt_without_launcher(self) -> str:
        """Return a name on which the ranks of many nodes agree without talking to each other."""
        return "-".join((self.job or self.meeting_point or "job", self.restarts))


def this_process(proc: Path = Path("/proc")) -> Process:
    """Return what the kernel knows of this process; the age is 0 where /proc does not tell."""
    pid = os.getpid()
    try:
        namespace = os.stat(proc / "self/ns/pid").st_ino
    except OSError:
        namespace = 0
    ticks = _start_ticks(proc, pid)
    # CLOCK_BOOTTIME and field 22 count from the same instant; containers may fake /proc/uptime but not the clock.
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0
    return Process(pid, ticks, max(0.0, age), namespace)


def _stat(proc: Path, pid: int) -> list[str]:
    # The second field is the command in parentheses and may itself hold spaces and parentheses.
    return (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _start_ticks(proc: Path, pid: int) -> int:
    """Return field 22 of /proc/PID/stat, 0 if it can't be read."""
    try:
        return int(_stat(proc, pid)[19])
    except (OSError, IndexError, ValueError):
        return 0


def _launcher_pid(proc: Path, pid: int) -> int:
    """Return the nearest ancestor that torchrun did not start: torchrun itself, past any wrapper script."""
    while pid > 1:
        try:
            if b"TORCHELASTIC_RUN_ID=" not in (proc / str(pid) / "environ").read_bytes():
                break
            pid = int(_stat(proc, pid)[1])
        except (OSError, IndexError, ValueError):
            break
    return pid


def clean(name: str) -> str:
    """Return the name in the characters and length that a run's name may have."""
    return re.sub(r"[^A-Za-z0-9._:/@+-]", "-", name)[:128]


def _scheduled_name(environ: Mapping[str, str]) -> str | None:
    if job := environ.get("SLURM_JOB_ID"):
        return f"{environ.get('SLURM_JOB_NAME', 'slurm')}-{job}"
    master = environ.get("MASTER_ADDR", environ.get("PET_MASTER_ADDR", ""))
    if "KUBERNETES_SERVICE_HOST" not in environ or not master or _is_address(master):
        return None
    pod, _, domain = master.partition(".")
    # JobSet and Kubeflow 2: NAME-node-0-0.NAME, the domain being the job. Kubeflow 1: NAME-master-0.
    return domain.partition(".")[0] or re.sub(r"-[a-z]+(-\d+)+$", "", pod)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def launch(environ: Mapping[str, str], host: str, process: Process, proc: Path = Path("/proc")) -> Launch:
    """Return this process's place in its job; a process without a launcher is rank 0 of 1."""
    rank, world_size, local_rank, one_node = 0, 1, 0, True
    for rank_key, world_key, local_key, node_key in _RANKS:
        if environ.get(rank_key, "").isdigit() and environ.get(world_key, "").isdigit():
            rank, world_size = int(environ[rank_key]), int(environ[world_key])
            local_rank = int(environ.get(local_key, "0"))
            holds_all = "1" if node_key == "SLURM_STEP_NUM_NODES" else str(world_size)
            one_node = world_size == 1 or environ.get(node_key) == holds_all
            break
    job = environ.get("FLOPWATCH_ATTEMPT", "")
    if not job and (slurm := environ.get("SLURM_JOB_ID")):
        job = f"slurm-{slurm}.{environ.get('SLURM_STEP_ID', 'batch')}-{environ.get('SLURM_RESTART_COUNT', '0')}"
    elastic = "TORCHELASTIC_RUN_ID" in environ
    # A single process may have a shell for a parent, which starts the next attempt too.
    starter = _launcher_pid(proc, os.getppid()) if elastic or world_size > 1 else process.pid
    master = environ.get("MASTER_ADDR", "")
    return Launch(
        rank, world_size, local_rank, one_node, _scheduled_name(environ), job,
        meeting_point=f"{master}:{environ.get('MASTER_PORT', '')}" if master else "",
        launcher=f"{host}-{starter}-{_start_ticks(proc, starter)}",
        restarts=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )
