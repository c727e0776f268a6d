"""What holds for all tests, on a machine that may stall and in a process that runs thousands of them."""

from __future__ import annotations

import gc
import os
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, settings

# An example is too slow after seconds, not after its default of 0.2.
settings.register_profile("flopwatch", deadline=timedelta(seconds=20), suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("flopwatch")

MOST_FILES = 500


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Let go of files that only garbage holds.

    A collector keeps hundreds open as long as its process lives, and here there are hundreds of collectors in one. The
    more a process holds, the more seldom Python looks for garbage by itself.
    """
    if len(os.listdir("/proc/self/fd")) > MOST_FILES:
        gc.collect()
