"""Settings for all tests: patience on slow machines, open files, and the order that keeps every worker busy."""

from __future__ import annotations

import csv
import gc
import os
from collections.abc import Callable
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, settings

from tests.support import ROOT, TESTS

# An example is too slow after seconds, not after its default of 0.2.
settings.register_profile("flopwatch", deadline=timedelta(seconds=20), suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("flopwatch")

MAX_FILES = 500
FIGURE = "figure"
# Seconds per file on two idle cores; `make durations` measures them again.
DURATIONS = TESTS / "durations.csv"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that no worker ends with a long file while the others are idle."""
    with DURATIONS.open(newline="") as file:
        seconds = {row["file"]: float(row["seconds"]) for row in csv.DictReader(file)}
    items.sort(key=lambda item: -seconds.get(item.path.relative_to(ROOT).as_posix(), 0.0))


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Return a function that takes a measured figure as text. The summary prints it, also of a test on a worker."""
    return lambda text: request.node.user_properties.append((FIGURE, text))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures that tests measured."""
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == FIGURE:
                terminalreporter.write_line(str(text))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Collect garbage that keeps files open.

    A collector keeps hundreds of files open while it lives, and one test process makes hundreds of collectors.
    """
    if len(os.listdir("/proc/self/fd")) > MAX_FILES:
        gc.collect()
