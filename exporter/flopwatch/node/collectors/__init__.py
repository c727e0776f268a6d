"""Collectors: one module per source of numbers on a node, each read in a child process (`node/scrape/reader.py`).

A collector isolates one field, GPU or port from the next. An error it does not expect leaves `read` and costs that
source, never the scrape.
"""

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
    """The source does not exist on this machine. The text is the reason."""


class AccessLost(Exception):
    """Loss of access to the source, which proves no hardware fault. `samples` mark its parts as not readable."""

    def __init__(self, reason: str, samples: Iterable[Sample] = ()) -> None:
        super().__init__(reason)
        self.samples = list(samples)


class RestartReader(Exception):
    """Request for a new reader process, the only one that can read this source again. The text is the reason."""


class Collector(Protocol):
    """Source of samples. An optional `close` releases the driver before the process ends on purpose."""

    name: str

    def read(self) -> list[Sample]:
        """Return the current samples, or raise Unsupported, AccessLost, RestartReader or the driver's error."""


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically. Raises OSError, after which the old file is complete and no draft is left."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        draft.write_text(text)
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise


class StateFile:
    """JSON object on disk, replaced atomically. Without a writable disk it is lost at a restart, with one warning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._saved = ""
        self._failing = False

    def load(self) -> dict[str, Any]:
        """Return the stored object, or an empty one if the file is absent or invalid."""
        try:
            value = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def save(self, value: Mapping[str, Any]) -> bool:
        """Store the object unless it equals the last stored one. Return whether it is on disk."""
        text = json.dumps(value, indent=1)
        if text == self._saved:
            return True
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, text)
        except OSError as error:
            if not self._failing:
                log.warning("cannot keep %s (%s); after a restart it is not remembered", self._path, error)
            self._failing = True
            return False
        self._saved, self._failing = text, False
        return True


class Inventory:
    """Parts that this node was seen to have, by key. To forget a part that was removed on purpose, delete the file."""

    def __init__(self, path: Path, info: Metric) -> None:
        self._file = StateFile(path)
        self._info = info
        self.parts = read_inventory(path, info)

    def update(self, found: Mapping[str, Mapping[str, str]]) -> None:
        """Add the parts found now, with their info labels, and store all of them."""
        self.parts.update({key: dict(labels) for key, labels in found.items()})
        self._file.save(self.parts)

    def info(self) -> list[Sample]:
        """Return the info series of every part, present or missing."""
        return [(self._info, tuple(part[label] for label in self._info.labels), 1) for part in self.parts.values()]


def read_inventory(path: Path, info: Metric) -> dict[str, dict[str, str]]:
    """Return the info labels of each part in an inventory file, without invalid entries. A new label is empty."""
    parts = {key: part for key, part in StateFile(path).load().items() if isinstance(part, dict)}
    return {
        key: {label: part.get(label, "") for label in info.labels}
        for key, part in parts.items()
        if {*info.labels[:2]} <= part.keys() and all(isinstance(value, str) for value in part.values())
    }
