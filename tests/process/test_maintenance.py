"""Test a node's maintenance: the content of the file, the series that the exporter serves for it, and the command."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from flopwatch.catalogue import HOST_MAINTENANCE_UNTIL_TIMESTAMP_SECONDS
from flopwatch.node.maintenance import MAX_DURATION, Maintenance, duration, end, until
from tests.support.exporter_process import exporter, flopwatch_command

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("2h", NOW + 7200),
        ("90s", NOW + 90),
        ("1.5d", NOW + 129_600),
        ("0s", NOW),
        ("1800000300", NOW + 300),
        ("1799999999.5", NOW - 0.5),
        ("999d", NOW + MAX_DURATION),
        ("9999999999", NOW + MAX_DURATION),
        ("", None),
        ("soon", None),
        ("7", None),
        ("2 h", None),
        ("-2h", None),
        ("nan", None),
    ],
)
def test_a_text_is_a_length_from_when_it_was_written_or_a_unix_time_or_nothing(text: str, ends: float | None) -> None:
    assert end(text, NOW) == ends


def test_a_length_has_a_unit() -> None:
    assert [duration(text) for text in ("10m", "10", "m", "")] == [600, None, None, None]


def test_an_end_is_served_until_a_day_after_it(tmp_path: Path) -> None:
    def served(now: float) -> list[float]:
        samples = Maintenance(tmp_path, "node-7", lambda: now).samples()
        assert all(sample[:2] == (HOST_MAINTENANCE_UNTIL_TIMESTAMP_SECONDS, ("node-7",)) for sample in samples)
        return [value for _, _, value in samples]

    assert served(NOW) == []
    (tmp_path / "maintenance").write_text(f"{NOW:.0f}\n")
    os.utime(tmp_path / "maintenance", (NOW, NOW))
    assert [served(NOW + later) for later in (-60, 60, 86_400, 86_401)] == [[NOW], [NOW], [NOW], []]
    (tmp_path / "maintenance").write_bytes(b"\xff\xfe")
    assert served(NOW) == []
    (tmp_path / "maintenance").unlink()
    (tmp_path / "maintenance").mkdir()
    assert served(NOW) == []


def test_an_unreadable_file_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = Maintenance(tmp_path, "node-7")
    file = tmp_path / "maintenance"
    assert (node.samples(), until(tmp_path), caplog.messages) == ([], (None, ""), [])
    file.write_text("two hours\n")
    for _ in range(2):
        assert node.samples() == []
    problem = f"{file} contains 'two hours'; write 2h, or the Unix time of the end"
    assert caplog.messages == [f"{problem}: alerts of this node are not held back"]
    shown = flopwatch_command("maintenance", "list", "--state", tmp_path)
    assert (shown.returncode, shown.stdout, shown.stderr) == (1, "", f"flopwatch: {problem}\n")
    file.write_text("2h\n")
    assert len(node.samples()) == 1
    file.unlink()
    file.mkdir()
    assert node.samples() == []
    assert caplog.messages[1:] == [f"{file} cannot be read: Is a directory: alerts of this node are not held back"]


@pytest.mark.long
def test_the_exporter_serves_what_the_command_sets_and_forgets_nothing_in_a_restart(tmp_path: Path) -> None:
    state = tmp_path / "state"
    series = "host_maintenance_until_timestamp_seconds{host=node-7}"
    with exporter(state, "--simulate", "h100x8") as running:
        assert series not in running.series()
        before = time.time()
        done = flopwatch_command("maintenance", "start", "--for", "2h", "--state", state)
        assert re.fullmatch(r"in maintenance until 2\d{3}-\d\d-\d\d \d\d:\d\d:\d\d \+\d{4}\n", done.stdout), done
        # A page younger than a quarter of a second is shared, so the first one may be older than the command.
        assert running.wait_until(lambda scraped: series in scraped)[series] == pytest.approx(before + 7200, abs=30)
        assert running.end() == 0
    with exporter(state, "--simulate", "h100x8") as running:
        assert running.series()[series] == pytest.approx(before + 7200, abs=30)
        assert flopwatch_command("maintenance", "stop", "--state", state).stdout == "not in maintenance\n"
        assert running.wait_until(lambda scraped: scraped[series] < before + 3600)[series] <= time.time()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["start"], 2, "--for"),
        (["start", "--for", "2"], 2, "2 is no time; write 90m, 2h or 3d"),
        (["start", "--for", "0s"], 2, "0s is no time"),
        (["start", "n7", "--for", "2h"], 2, "unrecognized arguments: n7"),
        (["start", "--for", "2h", "--state", "/nowhere/at/all"], 1, "cannot write /nowhere/at/all/maintenance"),
    ],
)
def test_an_impossible_command_is_an_error(arguments: list[str], status: int, message: str) -> None:
    done = flopwatch_command("maintenance", *arguments)
    assert done.returncode == status
    assert message in done.stderr
    assert "Traceback" not in done.stderr
