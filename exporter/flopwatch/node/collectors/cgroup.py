"""Owner of a process (Slurm job, pod, container or user), from its control group: /proc/PID/cgroup, man 7 cgroups.

Slurm: `/slurm/uid_U/job_J/...` (version 1) or `/system.slice/[NODE_]slurmstepd.scope/job_J/...` (version 2),
https://slurm.schedmd.com/cgroup_v2.html. Kubernetes: a path component with `podUID`, in which systemd's driver writes
underscores for dashes. Container engines: the container's 64 hexadecimal digits. Without hostPID, processes of other
pods are invisible. If /proc is mounted with hidepid, those of other users are invisible too.
"""

import re
from pathlib import Path

UNKNOWN = "unknown"

# A pod can run in a Slurm job, and a Slurm daemon in a pod. The job is then the nearer owner.
_SLURM = re.compile(r"/(?:[^/]*_)?slurm[^/]*/(?:uid_[0-9]+/)?job_([0-9]+)(?=/|$)", re.ASCII)
# A reader in its own cgroup namespace sees only the tail of a path. The UID of a static pod has no dashes.
_POD = re.compile(
    r"[/-]pod([0-9a-f]{8}([-_]?)[0-9a-f]{4}\2[0-9a-f]{4}\2[0-9a-f]{4}\2[0-9a-f]{12})(?=/|:|\.slice|$)", re.ASCII
)
_CONTAINER = re.compile(r"[/:-]([0-9a-f]{12})[0-9a-f]{52}(?=/|:|\.scope|$)", re.ASCII)


def parse(text: str) -> str | None:
    """Return the owner in the text of /proc/PID/cgroup: slurm:JOB, pod:UID or container:ID, or None without one."""
    paths = [line.split(":", 2)[2] for line in text.splitlines() if line.count(":") >= 2]
    for kind, pattern in (("slurm", _SLURM), ("pod", _POD), ("container", _CONTAINER)):
        for path in paths:
            matches = list(pattern.finditer(path))  # the last one is the innermost, and a node can be a container
            if matches:
                name = matches[-1][1].replace("_", "-")
                return f"{kind}:{name}"
    return None


def of_process(pid: int, file: str, proc: Path) -> str:
    """Return the text of the file /proc/PID/`file`. Raises OSError."""
    # pathlib would intern every part of the path, and the interpreter's table of strings would grow by a megabyte.
    with open(f"{proc}/{pid}/{file}", "rb") as content:
        return content.read().decode(errors="replace")


def user(status: str) -> str | None:
    """Return the real user id in the text of /proc/PID/status, or None without one."""
    match = re.search(r"^Uid:\s+([0-9]+)\b", status, re.MULTILINE | re.ASCII)
    return None if match is None else match[1]


def owner(pid: int, proc: Path = Path("/proc")) -> str:
    """Return a process's owner: slurm:JOB, pod:UID, container:ID (12 digits), else user:UID. "unknown" if invisible."""
    try:
        found = parse(of_process(pid, "cgroup", proc))
        if found is not None:
            return found
        uid = user(of_process(pid, "status", proc))
    except OSError:
        return UNKNOWN
    return UNKNOWN if uid is None else f"user:{uid}"


def stat(pid: int, proc: Path = Path("/proc")) -> list[str]:
    """Return the fields of /proc/PID/stat after the command name, which may contain spaces. Raises OSError."""
    return of_process(pid, "stat", proc).rpartition(")")[2].split()


def started(pid: int, proc: Path = Path("/proc")) -> str | None:
    """Return the start time of a process in clock ticks since boot (proc(5), stat), or None if it is invisible."""
    try:
        fields = stat(pid, proc)
    except OSError:
        return None
    return fields[19] if len(fields) > 19 else None
