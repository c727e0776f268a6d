"""Settings for the tests of collectors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flopwatch.node.collectors.xid import nvml_events


@pytest.fixture(scope="session", autouse=True)
def short_waits() -> Iterator[None]:
    """Let the threads that wait for NVML events end soon after their test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvml_events, "WAIT_MILLISECONDS", 100)
        yield
