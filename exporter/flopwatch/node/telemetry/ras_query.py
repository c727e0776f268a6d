"""Child process that asks NCCL's RAS which ranks of a run have started fewer collectives than their peers.

It is separate because the answer has megabytes and its sender is not trusted. Before NCCL 2.29.2, answering can damage
the training process. MONITOR is new in that version and does nothing with an unknown group of events, so it shows the
version before the question. https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html
"""

import ctypes
import json
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flopwatch.catalogue.ranks import ranks_text

SAFE = 2, 29, 2  # version; before it, a question can damage the memory of the training (NVIDIA/nccl issue 1762)
COLLECTION = 3  # seconds that RAS waits for a process, after which it waits for 5 s more
DEADLINE = 10.0  # seconds for everything
MAX_LINE, MAX_BYTES, MAX_MEMORY = 1024, 16 << 20, 384 << 20
MAX_BEHIND = 64  # communicators in an answer, the smallest first
SET_PDEATHSIG = 1  # PR_SET_PDEATHSIG in linux/prctl.h: this process ends with its parent
LISTEN = "0A"  # state of a socket in /proc/net/tcp
ENDING = ("finalize_called", "destroy_flag", "abort_flag")

Member = tuple[str, int, int]  # host, pid, CUDA device


class NoAnswer(Exception):
    """Exception raised without a usable answer: its `outcome`, one of those of `flopwatch_nccl_ras_queries_total`."""

    def __init__(self, outcome: str, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome


def listeners(port: int, proc: Path) -> set[str]:
    """Return the sockets that listen on a TCP port, as links in /proc/pid/fd name them. NCCL has one per process."""
    found = set()
    for name in ("tcp", "tcp6"):
        with suppress(OSError, IndexError):
            for line in (proc / "net" / name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{fields[9]}]")
    return found


def not_held(port: int, pids: Collection[int], proc: Path) -> set[str]:
    """Return the listening sockets on a port that none of these processes is seen to hold.

    Without the right to trace a process, its sockets cannot be seen (proc(5), /proc/pid/fd).
    """
    found = listeners(port, proc)
    for pid in pids:
        with suppress(OSError):
            for file in os.scandir(proc / str(pid) / "fd"):
                with suppress(OSError):  # closed since
                    found.discard(os.readlink(file.path))
    return found


def ask(host: str, port: int, holders: Collection[int], proc: Path) -> bytes:
    """Return the report of the process that listens there. Raises NoAnswer or OSError.

    After the connection was made, no other process can answer it. So the sockets are compared once more before the
    question, in case a process began to listen since.
    """
    until = time.monotonic() + DEADLINE
    with socket.create_connection((host, port), timeout=1.0) as connection:

        def receive(size: int) -> bytes:
            connection.settimeout(max(0.001, until - time.monotonic()))
            return connection.recv(size)

        def command(text: str) -> str:
            connection.sendall(f"{text}\n".encode())
            line = b""
            while not line.endswith(b"\n"):
                byte = receive(1)
                if not byte or len(line) > MAX_LINE:
                    raise NoAnswer("malformed", f"no answer to {text}")
                line += byte
            return line.decode(errors="replace").strip()

        if not command("CLIENT PROTOCOL 2").startswith("SERVER PROTOCOL "):
            raise NoAnswer("malformed", "not NCCL's RAS")
        if command("SET FORMAT json") != "OK":
            raise NoAnswer("old", "NCCL before 2.28.7")
        if not command("MONITOR flopwatch").startswith("ERROR: Invalid event group"):
            raise NoAnswer("old", "NCCL before 2.29.2")
        if command(f"TIMEOUT {COLLECTION}") != "OK":
            raise NoAnswer("malformed", "the time limit was refused")
        if not_held(port, holders, proc):
            raise NoAnswer("shared", "another process has begun to listen")
        connection.sendall(b"STATUS\n")
        report = bytearray()
        while part := receive(1 << 16):
            report += part
            if len(report) > MAX_BYTES:
                raise NoAnswer("malformed", f"the report has more than {MAX_BYTES >> 20} MiB")
        return bytes(report)


def behind(report: bytes, size: int, pids: Mapping[int, int]) -> list[list[str]]:
    """Return the ranks of each communicator with a difference, and those of them that have started the fewest.

    Ranks of a process that does not answer RAS count as such. `size` is the number of the run's ranks and `pids` are
    those of this host's ranks. Raises NoAnswer, and for a malformed report KeyError, TypeError, ValueError and others.
    """
    document = json.loads(report)
    version = re.match(r"(\d+)\.(\d+)\.(\d+)", document["nccl_version"])
    if version is None or tuple(map(int, version.groups())) < SAFE:
        raise NoAnswer("old", f"NCCL {document['nccl_version'][:40]}")
    communicators = document["communicators"]
    # A communicator without ranks is one that is being made, which NCCL leaves zeroed (NVIDIA/nccl issue 2346).
    states = [rank["status"]["init_state"] for one in communicators for rank in one["ranks"]]
    if any(states) or not all(one["size"] for one in communicators):
        raise NoAnswer("initializing", "communicators are being made")
    names = _names(communicators, size, pids)
    found = []
    for one in communicators:
        members = _members(one)
        ranks = [names.get(members[place]) for place in sorted(members)]
        fewest = [names.get(members[place]) for place in _fewest(one)]
        if fewest and None not in ranks:
            texts = [ranks_text(rank for rank in some if rank is not None) for some in (ranks, fewest)]
            found += [(len(ranks), [text for text in texts if text is not None])]
    return [texts for _, texts in sorted(found) if len(texts) == 2][:MAX_BEHIND]


def _members(communicator: Mapping[str, Any]) -> dict[int, Member]:
    every = (*communicator["ranks"], *communicator["missing_ranks"])
    members = {int(one["rank"]): (str(one["host"]), int(one["pid"]), int(one["cuda_dev"])) for one in every}
    size = communicator["size"]
    if len(every) != size or members.keys() != set(range(size)):
        raise ValueError("a communicator whose ranks are not those that it should have")
    return members


def _names(communicators: list[Any], size: int, pids: Mapping[int, int]) -> dict[Member, int]:
    """Return the rank of each process by a communicator of all ranks, in which this host's have their pids."""
    names: dict[Member, int] = {}
    for one in communicators:
        if one["size"] == size:
            members = _members(one)
            ours = {members[rank][0] for rank, pid in pids.items() if members[rank][1] == pid}
            if len(ours) == 1 and all(members[rank][1] == pid for rank, pid in pids.items()):
                found = {member: rank for rank, member in members.items() if member[1] > 0}
                if any(names.get(member, rank) != rank for member, rank in found.items()):
                    raise NoAnswer("foreign", "two communicators of all ranks differ in their order")
                names |= found
    if not names:
        raise NoAnswer("foreign", "no communicator of all ranks has the pids of this host's")
    return names


def _fewest(communicator: Mapping[str, Any]) -> list[int]:
    """Return the ranks in a communicator that its other ranks wait for, as far as its numbers show it."""
    missing = communicator["missing_ranks"]
    silent = [one["rank"] for one in missing if one["status"]["unresponsive"] or one["status"]["considered_dead"]]
    ending = any(one["status"][flag] for one in communicator["ranks"] for flag in ENDING)
    if ending or len(silent) < len(missing):
        return []
    numbers = {one["rank"]: sum(map(int, one["collective_counts"].values())) for one in communicator["ranks"]}
    least = min(numbers.values(), default=0)
    # Sends, receives and all-to-alls are not counted, so a number of 0 means nothing.
    if silent or least == 0 or least == max(numbers.values()):
        return silent
    return [rank for rank, number in numbers.items() if number == least]


def main() -> None:
    """Answer the question on stdin with one line of JSON on stdout."""
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))
    signal.alarm(int(DEADLINE) + 2)
    with suppress(OSError, AttributeError):  # not in every libc
        ctypes.CDLL(None).prctl(SET_PDEATHSIG, signal.SIGKILL)
    question = json.load(sys.stdin)
    answer: dict[str, object] = {"outcome": "answered", "detail": "", "behind": []}
    try:
        report = ask(question["host"], question["port"], question["holders"], Path(question["proc"]))
        pids = {int(rank): pid for rank, pid in question["pids"].items()}
        answer["behind"] = behind(report, question["size"], pids)
    except NoAnswer as error:
        answer |= {"outcome": error.outcome, "detail": str(error)}
    except OSError as error:
        answer |= {"outcome": "deadline" if isinstance(error, TimeoutError) else "unreachable", "detail": str(error)}
    except Exception as error:  # of a report from a process that is not trusted
        answer |= {"outcome": "malformed", "detail": f"{type(error).__name__}: {error}"[:200]}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
