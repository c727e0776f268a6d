"""Place of this process in its job: rank, world size, run name, attempt, tenant and owner, from the launcher.

torchrun     https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables, also under Ray Train
Slurm        https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES, job_array.html
Open MPI     https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html. MPICH and Intel MPI (Hydra), MVAPICH
Kubernetes   addresses that JobSet, Kubeflow and Volcano give to pods, and the service account's namespace

An attempt is one launch of all ranks. All ranks must use the same name for it, and no two launches may share one. On
one node the name is the scheduler's job and restart count, the launcher's pid and start time, and torchrun's restart
count. On many nodes it is rank 0's name, shared through torch's store. Without a store the name has no pid and time.
"""

import ipaddress
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_RANKS = (  # variables: rank, world size, local rank, and the one that shows that one node holds all ranks
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # Not SLURM_NTASKS: an sbatch script has it too, and what that starts without srun is one process.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES"),
)
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
MAX_SECONDS = 30.0  # for squeue to answer


@dataclass(frozen=True, slots=True)
class Process:
    """A process as the kernel sees it: pid, start in clock ticks after boot, age in seconds, pid namespace's inode."""

    pid: int
    start_ticks: int
    age: float
    pid_namespace: int  # 0 if unknown


@dataclass(frozen=True, slots=True)
class Launch:
    """Place of a process in its job, from the environment variables of its launcher and scheduler."""

    rank: int
    world_size: int
    local_rank: int
    one_node: bool
    name: str | None  # of the run, from the scheduler
    job: str  # scheduler's job and restart count, "" if there is no scheduler
    meeting_point: str  # MASTER_ADDR:MASTER_PORT, "" if there is none
    launcher: str  # host, pid and start of the process that started all ranks, if it is on this node, else of this one
    restarts: str  # torchrun's restart count
    tenant: str = ""  # Slurm's account, the pod's namespace
    owner: str = ""  # Slurm's user
    team: str = ""  # Slurm's account

    def attempt(self) -> str:
        """Return the attempt's name as this rank derives it. On many nodes, all ranks must use rank 0's."""
        return "-".join(part for part in (self.job, self.launcher, self.restarts) if part)

    def attempt_without_launcher(self) -> str:
        """Return an attempt's name that ranks on many nodes derive alike without communication."""
        return "-".join((self.job or self.meeting_point or "job", self.restarts))


def this_process(proc: Path = Path("/proc")) -> Process:
    """Return this process as the kernel sees it. The age is 0 if /proc is unreadable."""
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
    try:
        return int(_stat(proc, pid)[19])
    except (OSError, IndexError, ValueError):
        return 0


def _launcher_pid(proc: Path, pid: int) -> int:
    """Return the pid of the nearest ancestor that torchrun did not start: torchrun itself, above wrapper scripts."""
    while pid > 1:
        try:
            if b"TORCHELASTIC_RUN_ID=" not in (proc / str(pid) / "environ").read_bytes():
                break
            pid = int(_stat(proc, pid)[1])
        except (OSError, IndexError, ValueError):
            break
    return pid


def clean(name: str) -> str:
    """Return the name cut to 128 characters, with "-" for each character that a run's name may not contain."""
    return re.sub(r"[^A-Za-z0-9._:/@+-]", "-", name)[:128]


def launch(
    environ: Mapping[str, str],
    host: str,
    process: Process,
    proc: Path = Path("/proc"),
    modules: Mapping[str, Any] = sys.modules,
    pod: Path = POD,
) -> Launch:
    """Return this process's place in its job. A process without a launcher is rank 0 of 1."""
    rank, world_size, local_rank, one_node, started_by = _ranks(environ)
    # Ray's daemon starts the ranks of every attempt on its node, so its pid identifies no attempt.
    one_node = one_node and (world_size == 1 or "RAY_JOB_ID" not in environ)
    # A single process's parent may be a shell that starts the next attempt too. A container's first sees no parent.
    launched = one_node and os.getppid() > 0 and ("TORCHELASTIC_RUN_ID" in environ or world_size > 1)
    starter = _launcher_pid(proc, os.getppid()) if launched else process.pid
    master = environ.get("MASTER_ADDR", "")
    meeting_point = f"{master}:{environ.get('MASTER_PORT', '')}" if master else ""
    launcher, restarts = f"{host}-{starter}-{_start_ticks(proc, starter)}", environ.get(_RESTARTS, "0")
    name, job = _scheduled_name(environ, modules), _job(environ, started_by, meeting_point)
    account = environ.get("SLURM_JOB_ACCOUNT", "")
    tenant = environ.get("FLOPWATCH_TENANT", "") or account or _namespace(environ, pod)
    owner = environ.get("FLOPWATCH_OWNER", "") or environ.get("SLURM_JOB_USER", "")
    team = environ.get("FLOPWATCH_TEAM", "") or account
    place = rank, world_size, local_rank, one_node, name
    return Launch(*place, job, meeting_point, launcher, restarts, tenant, owner, team)


def _ranks(environ: Mapping[str, str]) -> tuple[int, int, int, bool, str]:
    """Return rank, world size, local rank, whether one node holds all ranks, and the variable with the rank."""
    for rank_key, world_key, local_key, node_key in _RANKS:
        if not (environ.get(rank_key, "").isdigit() and environ.get(world_key, "").isdigit()):
            continue
        if rank_key == "PMI_RANK" and local_key not in environ:
            continue  # of Slurm's own PMI, which sets no local rank
        world_size = int(environ[world_key])
        holds_all = "1" if node_key == "SLURM_STEP_NUM_NODES" else str(world_size)
        # DeepSpeed's launcher sets LOCAL_SIZE.
        on_node = environ.get(node_key, environ.get("LOCAL_SIZE") if rank_key == "RANK" else None)
        local = environ.get(local_key, "")
        local_rank, one_node = int(local) if local.isdigit() else 0, world_size == 1 or on_node == holds_all
        return int(environ[rank_key]), world_size, local_rank, one_node, rank_key
    return 0, 1, 0, True, ""


def _job(environ: Mapping[str, str], started_by: str, meeting_point: str) -> str:
    """Return the scheduler's job and its restart count, the same on all ranks, "" if there is no scheduler."""
    if attempt := environ.get("FLOPWATCH_ATTEMPT", ""):
        return attempt
    slurm, restart = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_RESTART_COUNT", "0")
    parts = [f"slurm-{slurm}-{restart}" if slurm else ""]
    if job := environ.get("RAY_JOB_ID", ""):
        # Started below Slurm, Ray's head and workers are steps of their own. MASTER_PORT is new in each attempt.
        parts += [f"ray-{job}", meeting_point]
    elif started_by in ("RANK", "SLURM_PROCID", ""):
        parts = [f"slurm-{slurm}.{environ.get('SLURM_STEP_ID', 'batch')}-{restart}" if slurm else ""]
    elif namespace := environ.get("PMIX_NAMESPACE"):
        # mpirun in a batch script: ranks on its own node have no step, ranks on other nodes that of mpirun's daemons.
        parts.append(f"mpi-{namespace}")
    return "-".join(filter(None, parts))


def _scheduled_name(environ: Mapping[str, str], modules: Mapping[str, Any]) -> str | None:
    if "RAY_JOB_ID" in environ and (name := _experiment(modules)):
        return name
    if job := environ.get("SLURM_JOB_ID"):
        if (array := environ.get("SLURM_ARRAY_JOB_ID")) and (task := environ.get("SLURM_ARRAY_TASK_ID")):
            job = f"{array}_{task}"
        return f"{environ.get('SLURM_JOB_NAME', 'slurm')}-{job}"
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return None
    if (cluster := environ.get("RAY_CLUSTER_NAME")) and (ray := environ.get("RAY_JOB_ID")):
        return f"{cluster}-{ray}"
    for key in ("MASTER_ADDR", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT"):
        host = re.sub(r":\d+$", "", environ.get(key, ""))
        if host and not _is_address(host):
            return _job_of(host)
    return None


def _job_of(host: str) -> str:
    """Return the name of the Kubernetes job that gave a pod this host name, with or without the cluster's domain.

    JobSet, TrainJob: NAME-node-0-0.NAME, the domain being the job. Volcano: NAME-master-0.NAME. PyTorchJob:
    NAME-master-0. Each may be followed by NAMESPACE.svc.cluster.local.
    """
    pod, *domain = host.split(".")
    if "svc" in domain:
        domain = domain[: max(0, domain.index("svc") - 1)]
    return domain[0] if domain else re.sub(r"-[a-z]+(-\d+)+$", "", pod)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost"
    return True


def _experiment(modules: Mapping[str, Any]) -> str:
    """Return the name of Ray Train's experiment, which its restarts share, "" outside an experiment."""
    # Looked up, not imported: a worker of Ray Train has imported it.
    train = modules.get("ray.train")
    try:
        return str(train.get_context().get_experiment_name() or "") if train is not None else ""
    except Exception:  # its own error for a process that Ray started for something else
        return ""


def _namespace(environ: Mapping[str, str], pod: Path) -> str:
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return ""
    try:
        return (pod / "namespace").read_text().strip()
    except (OSError, ValueError):
        return ""


def external_id(environ: Mapping[str, str], modules: Mapping[str, Any]) -> str:
    """Return the id of this process's Weights & Biases run, "" without one. wandb.init() may come after Run()."""
    # Looked up, not imported. https://docs.wandb.ai/models/ref/python/experiments/run
    run = getattr(modules.get("wandb"), "run", None)
    if run is not None and not getattr(run, "disabled", False) and isinstance(name := getattr(run, "id", None), str):
        return clean(name)
    return clean(environ.get("WANDB_RUN_ID", ""))


class Submission:
    """Reader of the Unix time at which the Slurm job was submitted. It runs `squeue` once, in the background.

    Call it on one rank of the run until it returns the time. After a requeue it returns None, because Slurm then only
    has the time of the requeue. https://slurm.schedmd.com/squeue.html
    """

    def __init__(
        self, environ: Mapping[str, str], squeue: str = "squeue", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._job = environ.get("SLURM_JOB_ID", "") if environ.get("SLURM_RESTART_COUNT", "0") == "0" else ""
        # %s is Unix time, whatever the time zone; a user's SQUEUE_ variables could filter the job out.
        self._environ = {key: text for key, text in environ.items() if not key.startswith("SQUEUE_")}
        self._environ["SLURM_TIME_FORMAT"] = "%s"
        self._command = [squeue, "--noheader", f"--jobs={self._job}", "--format=%V"]
        self._clock = clock
        self._asked: subprocess.Popen[str] | None = None
        self._deadline = 0.0
        self._answer: float | None = None

    def __call__(self) -> float | None:
        """Return the Unix time, None while it is unknown and after a requeue."""
        if self._job:
            self._ask()
        return self._answer

    def _ask(self) -> None:
        if self._asked is None:
            self._deadline = self._clock() + MAX_SECONDS
            try:
                null, pipe = subprocess.DEVNULL, subprocess.PIPE
                self._asked = subprocess.Popen(
                    self._command, env=self._environ, text=True, stdin=null, stdout=pipe, stderr=null
                )
            except OSError:  # no Slurm client here, as in most containers
                self._job = ""
            return
        if self._asked.poll() is None:
            if self._clock() < self._deadline:
                return
            self._asked.kill()
        self._job = ""
        printed, _ = self._asked.communicate()
        # A heterogeneous job has a line for each component. All were submitted at once.
        if (first := printed.strip().partition("\n")[0].strip()).isdigit():
            self._answer = float(first)
