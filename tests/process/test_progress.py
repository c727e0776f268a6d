"""Test progress bars on a terminal, without one, and without colours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from demo.servers import find
from tests.support import ROOT
from tests.support.exporter_process import ENVIRONMENT, alive
from tests.support.machine import PATIENCE, until

SIMULATE = [sys.executable, "-m", "flopwatch", "simulate", "--scenario", "healthy", "--days", "0.2", "--gpus", "16"]
PLAIN = {name: value for name, value in ENVIRONMENT.items() if name not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
COLOUR = re.compile(r"\x1b\[[0-9;]*[34]\d[0-9;]*m")


def on_a_terminal(*command: str | Path, **environ: str) -> tuple[int, str, str]:
    """Return the exit status and the output of a command, and what it shows on a terminal as standard error."""
    terminal, end = os.openpty()
    with subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=end,
        env={**PLAIN, "TERM": "xterm", **environ},
        text=True,
    ) as process:
        os.close(end)
        shown = b""
        try:
            while part := os.read(terminal, 65536):
                shown += part
        except OSError:  # the last process closed it
            pass
        finally:
            os.close(terminal)
        output = process.communicate(timeout=PATIENCE)[0]
    return process.returncode, output, shown.decode()


def piped(*command: str | Path, **environ: str) -> tuple[int, str, str]:
    """Return the exit status, output and errors of a command without a terminal."""
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=PATIENCE, env={**PLAIN, **environ}
    )
    return done.returncode, done.stdout, done.stderr


def test_a_simulation_shows_its_progress_on_a_terminal_only() -> None:
    status, table, shown = on_a_terminal(*SIMULATE)
    assert "Simulating 0.2 days" in shown
    assert "100%" in shown
    assert COLOUR.search(shown)
    for environ in ({}, {"FORCE_COLOR": "1"}):
        assert piped(*SIMULATE, **environ) == (status, table, "")
    assert status == 0
    assert "\x1b" not in table


def test_a_progress_bar_has_no_colour_with_no_color() -> None:
    status, _, shown = on_a_terminal(*SIMULATE, NO_COLOR="1")
    assert (status, "100%" in shown) == (0, True)
    assert not COLOUR.search(shown)


@pytest.mark.parametrize("scenario", ["parallel", "stragglers"])
def test_jobs_that_are_judged_are_counted(scenario: str) -> None:
    arguments = ["simulate", "--scenario", scenario, "--seeds", "1", "--promtool", find().promtool]
    status, table, shown = on_a_terminal(sys.executable, "-m", "flopwatch", *arguments)
    assert (status, bool(table)) == (0, True), shown
    found = re.search(r"Judging (\d+) jobs", shown)
    assert found is not None
    assert int(found[1]) > 5
    assert "100%" in shown


def test_a_build_shows_its_last_step_on_a_terminal_and_the_end_of_its_output_after_a_failure() -> None:
    progress = ROOT / ".ci" / "progress"
    work = "echo Collecting torch; sleep 1; echo ready"
    status, output, shown = on_a_terminal(progress, "sh", "-c", work)
    assert (status, output) == (0, "")
    assert "0 s  Collecting torch" in shown
    assert shown.endswith("\r\x1b[K")
    assert piped(progress, "sh", "-c", work) == (0, "", "")
    assert piped(progress, "sh", "-c", "echo no space left; exit 3") == (3, "", "no space left\n")


def test_a_build_that_is_interrupted_leaves_no_process(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    build = subprocess.Popen([ROOT / ".ci" / "progress", "sh", "-c", f"sleep 300 & echo $! > {pids}; wait"])
    until(lambda: pids.is_file() and pids.read_text())
    build.terminate()
    assert build.wait(PATIENCE) != 0
    until(lambda: not alive(int(pids.read_text())))
