"""Last operations in PyTorch's flight recorder, which are added to the stacks of a hang (docs/stacks.md).

A dump holds the interpreter's lock, for about 30 ms with 2,000 operations. With stacks it takes seconds, so it is JSON,
which has none. A dump of NCCL's operations asks CUDA for the state of each, which may block the job behind a lock of
CUDA. So by default only the numbers of NCCL's process groups are read.
https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # operations that it keeps; the first one set counts
ON_BY_DEFAULT = (2, 13)  # release of PyTorch that has a size by default; of others that is not known
MAX_SIZE = 10_000  # operations above which none is read
SHOWN, MAX_TEXT = 12, 2048  # operations and characters


def status(environ: Mapping[str, str] = os.environ) -> str:
    """Return whether PyTorch keeps operations: on, off or unknown. Empty without PyTorch."""
    if (torch := sys.modules.get("torch")) is None:
        return ""
    if (size := _size(environ)) is None:
        release = re.match(r"(\d+)\.(\d+)", getattr(torch, "__version__", ""))  # absent while it is imported
        return "on" if release and (*map(int, release.groups()),) >= ON_BY_DEFAULT else "unknown"
    return "on" if size > 0 else "off"


def text(environ: Mapping[str, str] = os.environ, library: Any = None, now: float | None = None) -> str:
    """Return the last operations at Unix time `now`, the newest first, or numbers of process groups. Never raises.

    FLOPWATCH_FLIGHT_RECORDER=1 reads NCCL's operations, too, and 0 reads nothing.
    """
    library, wanted = library or sys.modules.get("torch._C._distributed_c10d"), environ.get("FLOPWATCH_FLIGHT_RECORDER")
    try:
        if wanted == "0" or status(environ) == "off" or (_size(environ) or 0) > MAX_SIZE:
            return ""
        lines: list[str] = []
        for name, entries in (("_dump_nccl_trace_json", wanted == "1"), ("_dump_fr_trace_json", True)):
            if hasattr(library, name):
                dump = json.loads(getattr(library, name)(includeCollectives=entries))
                lines += _lines(dump, time.time() if now is None else now)
        return "\n".join(["flight recorder", *lines])[:MAX_TEXT] if lines else ""
    except Exception as error:
        return f"flight recorder: {error!r}"[:MAX_TEXT]  # the stacks are sent in any case


def _size(environ: Mapping[str, str]) -> int | None:
    given = next((environ[name] for name in SIZES if name in environ), "")
    return int(given) if given.isdecimal() else None


def _lines(dump: Mapping[str, Any], now: float) -> Iterator[str]:
    entries = dump.get("entries", [])
    for one in entries[: -SHOWN - 1 : -1]:
        name, described = one["process_group"]
        number, age = one["p2p_seq_id" if one["is_p2p"] else "collective_seq_id"], now - one["time_created_ns"] / 1e9
        sizes = ["x".join(map(str, size)) for size in (*one["input_sizes"], *one["output_sizes"])]
        operation = f"{one['profiling_name']} {number} in {described} {name}"
        yield f"  {operation}: {one['state']}, {age:.1f} s ago, {', '.join(sizes)}"
    for group, last in dump.get("pg_status", {}).items() if not entries else ():
        numbers = (f"{state} {last[f'last_{state}_collective']}" for state in ("enqueued", "started", "completed"))
        yield f"  group {group}: last {', '.join(numbers)}"
