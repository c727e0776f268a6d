"""Settings for all tests: patience on slow machines, open files, and the order that keeps every worker busy."""

from __future__ import annotations

import csv
import gc
import os
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, settings

from tests.support import ROOT, TESTS

# An example is too slow after seconds, not after its default of 0.2.
settings.register_profile("flopwatch", deadline=timedelta(seconds=20), suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("flopwatch")

MAX_FILES = 500
# Seconds per file on two idle cores; `make durations` measures them again.
DURATIONS = TESTS / "durations.csv"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that no worker ends with a long file while the others are idle."""
    with DURATIONS.open(newline="") as file:
        seconds = {row["file"]: float(row["seconds"]) for row in csv.DictReader(file)}
    items.sort(key=lambda item: -seconds.get(item.path.relative_to(ROOT).as_posix(), 0.0))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Collect garbage that keeps files open.

    A collector keeps hundreds of files open while it lives, and one test process makes hundreds of collectors.
    """
    if len(os.listdir("/proc/self/fd")) > MAX_FILES:
        gc.collect()
