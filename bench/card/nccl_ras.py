"""Dialogues with NCCL's RAS, stored verbatim, and the results of flopwatch's query and parser."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flopwatch.node.telemetry import ras_query
from tests.support.parallel_job import SIZE

JSON = ("CLIENT PROTOCOL 2", "SET FORMAT json", "MONITOR flopwatch", "TIMEOUT 3", "STATUS")
TEXT = ("CLIENT PROTOCOL 2", "TIMEOUT 3", "VERBOSE STATUS")
SECONDS = 12.0


def dialogue(port: int, commands: Sequence[str], path: Path) -> bytes:
    """Send commands, write the dialogue with its times, and return what followed the last command. Raises OSError."""
    began, lines = time.monotonic(), []
    answer = b""
    try:
        with socket.create_connection(("localhost", port), timeout=2.0) as connection:
            connection.settimeout(SECONDS)
            for command in commands:
                lines.append(f"{time.monotonic() - began:8.3f} >> {command}")
                connection.sendall(f"{command}\n".encode())
                last = command == commands[-1]
                answer = _receive(connection, whole=last)
                lines.append(f"{time.monotonic() - began:8.3f} << {answer.decode(errors='backslashreplace')}")
    except OSError as error:
        lines.append(f"{time.monotonic() - began:8.3f} -- {error!r}")
        raise
    finally:
        path.write_text("\n".join(lines) + "\n")
    return answer


def _receive(connection: socket.socket, *, whole: bool) -> bytes:
    """Return one line, or all until the end of the stream."""
    received = b""
    while whole or not received.endswith(b"\n"):
        part = connection.recv(1 << 16 if whole else 1)
        if not part:
            break
        received += part
    return received


def monitor(port: int, path: Path, ended: threading.Event) -> None:
    """Write RAS's events in a thread until `ended`, if it has MONITOR."""

    def listen() -> None:
        with (
            suppress(OSError),
            path.open("wb") as file,
            socket.create_connection(("localhost", port), 2.0) as connection,
        ):
            connection.settimeout(0.5)
            connection.sendall(b"SET FORMAT json\nMONITOR all\n")
            while not ended.is_set():
                with suppress(TimeoutError):
                    if not (part := connection.recv(1 << 16)):
                        return
                    file.write(part)
                    file.flush()

    threading.Thread(target=listen, daemon=True).start()


def judged(report: bytes, pids: Mapping[int, int]) -> dict[str, object]:
    """Return what the parser makes of a report: the ranks that are behind, or why there are none."""
    try:
        return {"behind": ras_query.behind(report, SIZE, pids)}
    except ras_query.NoAnswer as error:
        return {"outcome": error.outcome, "detail": str(error)}
    except Exception as error:
        return {"outcome": "malformed", "detail": repr(error)}


def queried(port: int, pids: Mapping[int, int]) -> dict[str, Any]:
    """Return the answer of flopwatch's own child process, as the exporter starts it."""
    place = {"host": "localhost", "port": port, "proc": "/proc"}
    question = {**place, "size": SIZE, "pids": dict(pids), "holders": list(pids.values())}
    child = subprocess.run(
        [sys.executable, "-m", "flopwatch.node.telemetry.ras_query"],
        input=json.dumps(question).encode(),
        capture_output=True,
        timeout=20,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    if child.returncode != 0:
        return {"outcome": f"status {child.returncode}", "detail": child.stderr.decode()[-300:]}
    answer: dict[str, Any] = json.loads(child.stdout)
    return answer
