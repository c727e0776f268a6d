"""Real ranks: processes with the variables that torchrun would set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tests.support import ROOT
from tests.support.machine import reserve


def start(command: Sequence[str], world_size: int, **environ: str) -> list[subprocess.Popen[str]]:
    """Start Python with this command line as so many gloo ranks, without pushing unless `environ` asks for it.

    They inherit the socket that reserves their port, so it stays theirs while they live.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("FLOPWATCH_", "TORCHELASTIC_"))}
    with reserve() as held:
        port = held.getsockname()[1]
        return [
            subprocess.Popen(
                [sys.executable, *command],
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[held.fileno()],
                env={
                    **inherited,
                    "PYTHONPATH": f"{ROOT / 'exporter'}:{ROOT}",
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(world_size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "GLOO_SOCKET_IFNAME": "lo",
                    "OMP_NUM_THREADS": "1",
                    "FLOPWATCH_DISABLE": "1",
                    **environ,
                },
            )
            for rank in range(world_size)
        ]


def answers(script: str, world_size: int, seconds: float = 280.0) -> list[Any]:
    """Run a script as so many ranks and return what each printed as JSON. Raises AssertionError."""
    processes = start([script], world_size)
    try:
        printed = [process.communicate(timeout=seconds)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * world_size
        return [json.loads(text) for text in printed]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
