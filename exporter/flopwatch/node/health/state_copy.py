"""A copy of what the exporter remembers (`--state`), for a look at the node beside it.

Readers notice a part that is missing since, and go on in the kernel log where they stopped, by files that they also
write. Whoever only looks must not: the exporter would start over from a place that it never read up to, or find files
that belong to root.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from flopwatch.node.driver_release import CONFIRMATION, REQUEST
from flopwatch.node.scrape.reader import simulated_node
from flopwatch.settings import ExporterSettings, SettingsError

MAX_FILE = 4 << 20


@contextmanager
def copied(settings: ExporterSettings) -> Iterator[ExporterSettings]:
    """Give settings with a copy of the state folder, as far as it can be read; raises SettingsError without room."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="flopwatch-")
    except OSError as error:
        raise SettingsError(
            f"there is no room for a temporary folder ({error}); set TMPDIR to one that can be written"
        ) from error
    with folder as path:
        try:
            _copy(settings, Path(path))
        except (OSError, shutil.Error) as error:
            raise SettingsError(f"--state {settings.state} cannot be copied to {path}: {error}") from error
        yield replace(settings, state=Path(path))


def _copy(settings: ExporterSettings, folder: Path) -> None:
    simulated = simulated_node(settings)
    if settings.simulate is not None and simulated.is_dir():
        shutil.copytree(simulated, folder / "simulated", symlinks=True, ignore=shutil.ignore_patterns("*.new"))
    for name in (REQUEST, CONFIRMATION):  # with its time, which the request counts from
        with suppress(OSError):
            shutil.copy2(settings.state / name, folder / name)
    for file in settings.state.glob("*.json"):
        content = b""
        with suppress(OSError):
            content = file.read_bytes() if file.stat().st_size <= MAX_FILE else b""
        if content:
            (folder / file.name).write_bytes(content)
