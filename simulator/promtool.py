"""Prometheus' own evaluation of rules over series that are made up."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

# It ends after seconds, so it need not sweep its garbage as often as a server: a quarter less time.
GOGC = "400"


def rule_test(promtool: str, *tests: Path, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run `promtool test rules` on files of one folder and return how it ended, with what it printed.

    Raises OSError where there is no such program, and TimeoutExpired after `timeout` seconds.
    Source: https://prometheus.io/docs/prometheus/latest/configuration/unit_testing_rules/
    """
    return subprocess.run(
        [promtool, "test", "rules", *(test.name for test in tests)],
        cwd=tests[0].parent,
        check=False,
        env={"GOGC": GOGC, **os.environ},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
