"""Owner of a process, from the name of its control group: /proc/PID/cgroup, man 7 cgroups.

Slurm: `/slurm/uid_U/job_J/...` (version 1) or `/system.slice/[NODE_]slurmstepd.scope/job_J/...` (version 2),
https://slurm.schedmd.com/cgroup_v2.html. Kubernetes: a component with `podUID`, with dashes from the cgroupfs driver
and underscores from systemd's. Container engines: the container's 64 hexadecimal digits. A process is invisible where
/proc is mounted with hidepid, and one of another pod without hostPID.
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
    """Return the owner in the text of /proc/PID/cgroup as slurm:JOB, pod:UID or container:ID, or None."""
    paths = [line.split(":", 2)[2] for line in text.splitlines() if line.count(":") >= 2]
    for kind, pattern in (("slurm", _SLURM), ("pod", _POD), ("container", _CONTAINER)):
        for path in paths:
            # The last match is the innermost. A node can itself be a container.
            matches = list(pattern.finditer(path))
            if matches:
                name = matches[-1][1].replace("_", "-")
                return f"{kind}:{name}"
    return None


def of_process(pid: int, file: str, proc: Path) -> str:
    """Return the text of a file in /proc/PID. Raises OSError."""
    # pathlib would intern every part of the path, and the interpreter's table of strings would grow by a megabyte.
    with open(f"{proc}/{pid}/{file}", "rb") as content:
        return content.read().decode(errors="replace")


def user(status: str) -> str | None:
    """Return the real user id in the text of /proc/PID/status."""
    match = re.search(r"^Uid:\s+([0-9]+)\b", status, re.MULTILINE | re.ASCII)
    return None if match is None else match[1]


def owner(pid: int, proc: Path = Path("/proc")) -> str:
    """Return slurm:JOB, pod:UID, container:ID (12 digits) or else user:UID; "unknown" for an invisible process."""
    try:
        found = parse(of_process(pid, "cgroup", proc))
        if found is not None:
            return found
        uid = user(of_process(pid, "status", proc))
    except OSError:
        return UNKNOWN
    return UNKNOWN if uid is None else f"user:{uid}"


def stat(pid: int, proc: Path = Path("/proc")) -> list[str]:
    """Return the fields of /proc/PID/stat after the command name, which may contain anything. Raises OSError."""
    return of_process(pid, "stat", proc).rpartition(")")[2].split()


def started(pid: int, proc: Path = Path("/proc")) -> str | None:
    """Return the start time of a process in clock ticks since boot (proc(5), stat), or None if it is invisible."""
    try:
        fields = stat(pid, proc)
    except OSError:
        return None
    return fields[19] if len(fields) > 19 else None
