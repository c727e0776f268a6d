"""Collectors: each module reads one source of samples on a node, in a reader process (`node/scrape/reader.py`).

An expected error of one field, GPU or port costs only its samples. Any other error leaves `read` and costs all samples.
"""

import json
import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any, Protocol

from flopwatch.catalogue import Metric, Sample

log = logging.getLogger(__name__)
MAX_DEPTH = 64  # levels of a state file, far more than any has, and few enough to write it again
_parsed: dict[Path, tuple[tuple[int, ...] | None, dict[str, dict[str, Any]]]] = {}  # version and content by file


class Unsupported(Exception):
    """Error raised by `build` or `read` if the source does not exist on this machine. The text is the reason."""


class AccessLost(Exception):
    """Error raised by `read` without access to the source. `samples` report its GPUs as unreadable, not as failed."""

    def __init__(self, reason: str, samples: Iterable[Sample] = ()) -> None:
        super().__init__(reason)
        self.samples = list(samples)


class RestartReader(Exception):
    """Error raised by `read` if only a new reader process can read the source again. The text is the reason."""


class Collector(Protocol):
    """Interface of a collector. An optional method `close` releases the driver before the reader process exits."""

    name: str

    def read(self) -> list[Sample]:
        """Return the source's current samples. Raises Unsupported, AccessLost, RestartReader or the driver's error."""


def replace_file(path: Path, text: str, mode: int | None = None) -> None:
    """Replace the content of a file atomically, and set its mode if given. Raises OSError, and then changes nothing."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        draft.write_text(text)
        if mode is not None:
            draft.chmod(mode)
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise


class StateFile:
    """JSON file that keeps a collector's state across restarts. If it cannot be written, one warning is logged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._saved = ""
        self._failing = False

    def load(self) -> dict[str, Any]:
        """Return the stored object, or an empty dict if the file is absent or invalid. An invalid file is set aside."""
        try:
            value = json.loads(self._path.read_bytes())
            if not isinstance(value, dict):
                problem = f"it contains {type(value).__name__} and no object"
            elif _deeper(value, MAX_DEPTH):
                problem = f"it has more than {MAX_DEPTH} levels"
            else:
                return value
        except FileNotFoundError:
            return {}
        except OSError as error:
            log.warning("cannot read %s (%s); what it remembers is lost", self._path, error)
            return {}
        except (ValueError, RecursionError) as error:
            problem = str(error)
        damaged = self._path.with_name(f"{self._path.name}.damaged")
        with suppress(OSError):
            self._path.replace(damaged)
        log.warning(
            "%s is damaged (%s); what it remembers is lost, and the file is kept as %s", self._path, problem, damaged
        )
        return {}

    def save(self, value: Mapping[str, Any]) -> bool:
        """Write the object, unless it equals the last one written. Return whether the file now contains it."""
        text = json.dumps(value)  # without `indent`, because Python indents ten times more slowly
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


def signature(path: str | Path) -> tuple[int, ...] | None:
    """Return inode, modification time and size of a file or folder, or None if absent. A change alters them."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def load_objects(path: Path) -> dict[str, dict[str, Any]]:
    """Return the objects in a state file by key. The result is cached until the file changes, so do not modify it."""
    version, (last, parts) = signature(path), _parsed.get(path, (None, {}))
    if version != last or not parts:
        parts = {key: part for key, part in StateFile(path).load().items() if isinstance(part, dict)}
        _parsed[path] = version, parts
    return parts


def _deeper(value: object, depth: int) -> bool:
    """Return whether a decoded JSON value has more than `depth` levels of objects and lists."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, (dict, list)) and (not depth or any(_deeper(one, depth - 1) for one in inner))


class Inventory:
    """GPUs or ports ever seen on this node, by key, in a file. Delete the file after removing hardware on purpose."""

    def __init__(self, path: Path, info: Metric) -> None:
        self._file = StateFile(path)
        self._info = info
        self.parts = read_inventory(path, info)

    def update(self, found: Mapping[str, Mapping[str, str]]) -> None:
        """Add the GPUs or ports found now, by key with their info labels, and write the file."""
        self.parts.update({key: dict(labels) for key, labels in found.items()})
        self._file.save(self.parts)

    def info(self) -> list[Sample]:
        """Return one info sample of every GPU or port in the inventory, also of missing ones."""
        return [(self._info, tuple(part[label] for label in self._info.labels), 1) for part in self.parts.values()]


def read_inventory(path: Path, info: Metric) -> dict[str, dict[str, str]]:
    """Return info labels by GPU or port from an inventory file. Skips invalid entries. Absent labels become empty."""
    return {
        key: {label: part.get(label, "") for label in info.labels}
        for key, part in load_objects(path).items()
        if {*info.labels[:2]} <= part.keys() and all(isinstance(value, str) for value in part.values())
    }


def read_runtime(path: Path) -> dict[str, dict[str, list[Any]]]:
    """Return MIG instances, pids and links by GPU uuid from the file `runtime` of the NVML collector."""
    kinds, parts = {"mig": dict, "pids": int, "links": int}, load_objects(path)
    lists = {
        uuid: {name: value for name, value in part.items() if isinstance(value, list)} for uuid, part in parts.items()
    }
    return {
        uuid: {name: [copy(one) for one in part.get(name, ()) if isinstance(one, kind)] for name, kind in kinds.items()}
        for uuid, part in lists.items()
    }
