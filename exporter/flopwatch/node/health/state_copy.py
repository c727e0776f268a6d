"""Copy of the exporter's state folder, for `flopwatch check` and `doctor`, whose reads would change the original."""

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
    """Yield settings whose state folder is a temporary copy. Raises SettingsError if it cannot be made."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="flopwatch-")
    except OSError as error:
        raise SettingsError(f"cannot create a temporary folder ({error}); set TMPDIR to a writable one") from error
    with folder as path:
        try:
            _copy(settings, Path(path))
        except OSError as error:
            raise SettingsError(f"--state {settings.state} cannot be copied to {path}: {error}") from error
        yield replace(settings, state=Path(path))


def _copy(settings: ExporterSettings, folder: Path) -> None:
    simulated = simulated_node(settings)
    if settings.simulate is not None and simulated.is_dir():
        shutil.copytree(simulated, folder / "simulated", symlinks=True, ignore=shutil.ignore_patterns("*.new"))
    for name in (REQUEST, CONFIRMATION):  # with its modification time, from which the request counts
        with suppress(OSError):
            shutil.copy2(settings.state / name, folder / name)
    for file in settings.state.glob("*.json"):
        content = b""
        with suppress(OSError):
            content = file.read_bytes() if file.stat().st_size <= MAX_FILE else b""
        if content:
            (folder / file.name).write_bytes(content)
