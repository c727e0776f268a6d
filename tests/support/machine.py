"""Helpers for machines that are slow or stall for a second: patience, several tries, ports no other process gets."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

PATIENCE = 120.0  # seconds after which what a test waits for never comes


def until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait for what another thread or process does. Raises AssertionError."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s"
        time.sleep(0.01)


def node_builds() -> bool:
    """Return whether there is a Node here that can build the viewer, as the Makefile asks."""
    node = shutil.which("node")
    return (
        node is not None
        and shutil.which("npm") is not None
        and int(
            subprocess.run(
                [node, "-p", "process.versions.node.split('.')[0]"], capture_output=True, text=True, check=True
            ).stdout
        )
        >= 20
    )


def shortest(measure: Callable[[], float], enough: float, tries: int = 4) -> float:
    """Return the shortest of some durations in seconds, and the first that is short enough.

    A stall of the machine makes one of them longer, a fault of ours all.
    """
    took = measure()
    while took >= enough and tries > 1:
        took, tries = min(took, measure()), tries - 1
    return took


def reserve() -> socket.socket:
    """Return a socket that reserves a port of loopback without listening, for a caller that needs this port.

    A server that sets SO_REUSEADDR, as they do, can listen there although it is bound here; no other process is given
    the port as a free one. Nor is it the port of a client on another address, where a server of all addresses fails.
    """
    from demo.stack import free_ports  # its imports are slow, and few callers of this file need them

    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    while True:
        with suppress(OSError):  # taken since then
            held.bind(("127.0.0.1", *free_ports(1)))
            return held


@contextmanager
def reserved_port() -> Iterator[int]:
    """Give such a port for the length of a block."""
    with reserve() as held:
        yield int(held.getsockname()[1])
