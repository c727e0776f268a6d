"""Set-up of NCCL in a rank of the section `nccl`, and files with what PyTorch knows of the rank's process groups.

All ranks share one GPU. NCCL refuses two ranks of one host on one GPU, and takes each for another host by NCCL_HOSTID.
https://github.com/NVIDIA/nccl/blob/v2.30.7-1/src/init.cc
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from flopwatch.training import Run
from flopwatch.training.process import flight_recorder
from tests.support.parallel_job import HOSTS, SIZE

RAS_PORT = 28028  # of the first host; the next have the next ports
ENVIRON = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,ENV,RAS,PROFILE",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
}
LOOK_EVERY = 0.1
GROUPS, READINGS = 20, 200  # of the measurement of cost
LAST_OPERATIONS = 40


def host_of(rank: int) -> int:
    """Return the number of the host that a rank is on."""
    return rank * HOSTS // SIZE


def prepare(rank: int, folder: Path, environ: Mapping[str, str], library: Path | None) -> None:
    """Send output to a file and load NCCL, before PyTorch loads its own. Both have one SONAME, so the first counts."""
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ |= environ
    os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_RAS_ADDR": f"localhost:{RAS_PORT + host_of(rank)}"}
    if library is not None:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def answer_questions(rank: int, folder: Path) -> None:
    """Write the state of PyTorch's process groups for each file `ask-NAME` that appears, in a thread."""

    def look() -> None:
        answered: set[str] = set()
        while True:
            for path in folder.glob("ask-*"):
                if path.name not in answered:
                    answered.add(path.name)
                    _write(folder / f"{path.name.removeprefix('ask-')}-rank-{rank}.json", _parts(rank))
            time.sleep(LOOK_EVERY)

    threading.Thread(target=look, name="questions", daemon=True).start()


def _write(path: Path, parts: Mapping[str, Callable[[], object]]) -> None:
    """Write the result and seconds of each part at once, because a later part may block or crash."""
    found: dict[str, object] = {}
    for name, part in parts.items():
        began = time.perf_counter()
        try:
            result = part()
        except Exception as error:
            result = {"error": repr(error)}
        found[name] = {"seconds": round(time.perf_counter() - began, 6), "result": result}
        path.with_suffix(".part").write_text(json.dumps(found, indent=1, default=str))
        os.replace(path.with_suffix(".part"), path)
    path.with_suffix(".done").touch()


def _parts(rank: int) -> dict[str, Callable[[], object]]:
    """Return what is written: cheap and harmless reads first."""
    library: Any = sys.modules["torch._C._distributed_c10d"]
    operations = {**os.environ, "FLOPWATCH_FLIGHT_RECORDER": "1"}
    parts: dict[str, Callable[[], object]] = {
        "about": lambda: {"rank": rank, "pid": os.getpid(), **_versions()},
        "groups": _groups,
        "status": flight_recorder.status,
        "text": flight_recorder.text,
        "functions": lambda: {name: str(getattr(library, name).__doc__) for name in dir(library) if "_dump_" in name},
    }
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        if hasattr(library, name):
            parts[f"{name} without operations"] = partial(_dumped, getattr(library, name), False)
            parts[name] = partial(_dumped, getattr(library, name), True)
    parts["text with operations"] = lambda: flight_recorder.text(operations)
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        if hasattr(library, name):
            parts[name] = partial(_unpickled, getattr(library, name))
    return parts


def _dumped(call: Callable[..., bytes], operations: bool) -> object:
    return _shortened(json.loads(call(includeCollectives=operations)))


def _unpickled(call: Callable[..., bytes]) -> object:
    return _shortened(pickle.loads(call(True, False, False)))


def _shortened(dump: dict[str, Any]) -> dict[str, Any]:
    """Return a dump with its last operations only, and how many there were."""
    if (entries := dump.get("entries")) is not None:
        dump = {**dump, "entries": entries[-LAST_OPERATIONS:]}
    return {"operations": len(entries or ()), "dump": dump}


def _versions() -> dict[str, object]:
    import torch

    files = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "nccl" in line}
    cuda: Any = torch.cuda
    version = cuda.nccl.version() if cuda.is_available() else None
    return {"torch": torch.__version__, "nccl": version, "files": sorted(files)}


def _groups() -> list[dict[str, object]]:
    import torch.distributed as dist

    c10d: Any = dist.distributed_c10d
    found = []
    for group, (backend, _) in list(c10d._world.pg_map.items()):
        number = group._get_sequence_number_for_group()
        about = {"name": group.group_name, "description": group.group_desc, "backend": backend, "number": number}
        found.append({**about, "ranks": dist.get_process_group_ranks(group)})
    return found


def measure_cost(rank: int, device: str, folder: Path) -> None:
    """Write the seconds of a read of all process groups, as the hook does before each push. All ranks call this."""
    import torch
    import torch.distributed as dist

    from flopwatch.training.torch import runtime

    groups: list[Any] = [dist.new_group(list(range(SIZE))) for _ in range(GROUPS)]
    for group in groups:
        dist.all_reduce(torch.ones(1, device=device), group=group)
    run = Run("cost", environ={"FLOPWATCH_DISABLE": "1"})
    polls: list[Callable[[], None]] = []
    with mock.patch.object(run.recorder, "poll", polls.append):
        runtime.watch_collectives(run.recorder)
    library: Any = sys.modules["torch._C._distributed_c10d"]
    calls: dict[str, Callable[[], object]] = {"read of all groups": polls[0]}
    calls["number of one group"] = groups[0]._get_sequence_number_for_group
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        if hasattr(library, name):
            calls[f"{name} without operations"] = partial(getattr(library, name), includeCollectives=False)
    seconds = {name: _median(call) for name, call in calls.items()}
    c10d: Any = dist.distributed_c10d
    (folder / f"cost-rank-{rank}.json").write_text(
        json.dumps(
            {"groups": len(c10d._world.pg_map), "microseconds": {k: round(v * 1e6, 2) for k, v in seconds.items()}}
        )
    )
    run.finish()


def _median(call: Callable[[], object]) -> float:
    taken = []
    for _ in range(READINGS):
        began = time.perf_counter()
        with contextlib.suppress(RuntimeError):
            call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
