"""Collectors: one file per source of numbers on a node, each read in a child process of its own (`node/reader.py`).

A collector reads what its constructor was given and returns samples. It isolates one field, one GPU, one port from
the next; an error it does not expect leaves `read` and costs the source, never the scrape.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from flopwatch.catalogue import Metric, Sample

log = logging.getLogger(__name__)


class Unsupported(Exception):
    """The source does not exist on this machine; the text says why."""


class AccessLost(Exception):
    """This process lost its access to the source (a device file, a cgroup); that says nothing about the hardware.

    `samples` are served all the same: which parts there are, and that they cannot be read.
    """

    def __init__(self, reason: str, samples: Iterable[Sample] = ()) -> None:
        super().__init__(reason)
        self.samples = list(samples)


class RestartReader(Exception):
    """Only a new process can read this source again; the text says why."""


class Collector(Protocol):
    """One source: a name, and a read that returns samples or raises.

    Where it has a method `close`, that is called before its process ends on purpose: at the end, to release the driver.
    """

    name: str

    def read(self) -> list[Sample]: ...


class StateFile:
    """A JSON object on disk, replaced as a whole; a full or read-only disk costs its persistence and nothing else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._saved = ""
        self._failing = False

    def load(self) -> dict[str, Any]:
        """Return the stored object; an absent or unreadable one is empty."""
        try:
            value = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def save(self, value: Mapping[str, Any]) -> bool:
        """Store the object unless it is what was stored last; return whether it is on disk."""
        text = json.dumps(value, indent=1)
        if text == self._saved:
            return True
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text)
            temporary.replace(self._path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()  # half a file on a full disk
            if not self._failing:
                log.warning("cannot keep %s (%s); after a restart it is not remembered", self._path, error)
            self._failing = True
            return False
        self._saved, self._failing = text, False
        return True


class Inventory:
    """The parts this node was seen to have, by key, so that a missing one is a series and not a gap.

    Delete the file to make the node forget a part that was removed on purpose.
    """

    def __init__(self, path: Path, info: Metric) -> None:
        self._file = StateFile(path)
        self._info = info
        self.parts = read_inventory(path, info)

    def update(self, found: Mapping[str, Mapping[str, str]]) -> None:
        """Remember the parts found now, with their info labels, and keep them on disk."""
        self.parts.update({key: dict(labels) for key, labels in found.items()})
        self._file.save(self.parts)

    def info(self) -> list[Sample]:
        """Return the info series of every part, present or missing."""
        return [(self._info, tuple(part[label] for label in self._info.labels), 1) for part in self.parts.values()]


def read_inventory(path: Path, info: Metric) -> dict[str, dict[str, str]]:
    """Return the info labels of each part in an inventory file; entries that are none are left out.

    A label that the row has gained since the file was written is empty until the part is seen again.
    """
    parts = {key: part for key, part in StateFile(path).load().items() if isinstance(part, dict)}
    return {
        key: {label: part.get(label, "") for label in info.labels}
        for key, part in parts.items()
        if {*info.labels[:2]} <= part.keys() and all(isinstance(value, str) for value in part.values())
    }
