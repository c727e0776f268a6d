"""Release of the drivers: what may be asked for, when it begins and ends, and how it is reported."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from flopwatch.catalogue import (
    FLOPWATCH_DRIVER_RELEASED,
    FLOPWATCH_DRIVER_RELEASED_SECONDS_TOTAL,
    FLOPWATCH_DRIVER_RELEASED_UNTIL_TIMESTAMP_SECONDS,
    Sample,
)
from flopwatch.node import driver_release
from flopwatch.node.driver_release import MAX_DURATION, Release, duration, end
from flopwatch.node.scrape.reader import Reader
from tests.support.machine import PATIENCE, until

NOW = 1_800_000_000.0


class Driver(Reader):
    """A reader that records its requests. The test can keep its last handle open."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.hung = False

    def release(self) -> bool:
        self.requests.append("release")
        return not self.hung

    def resume(self) -> None:
        self.requests.append("resume")


class Node:
    """A release with clocks the test moves."""

    def __init__(self, state: Path) -> None:
        self.time = NOW
        self.state = state
        self.driver = Driver()
        self.release = self.restarted()

    def restarted(self) -> Release:
        return Release(self.state, [self.driver], now=lambda: self.time, clock=lambda: self.time - NOW)

    def ask(self, text: str) -> None:
        """Write the file by hand, now."""
        (self.state / "release").write_text(text)
        os.utime(self.state / "release", (self.time, self.time))

    def files(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in self.state.iterdir()}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def released(until: float, seconds: float) -> list[Sample]:
    return [
        (FLOPWATCH_DRIVER_RELEASED, (), 1),
        (FLOPWATCH_DRIVER_RELEASED_UNTIL_TIMESTAMP_SECONDS, (), until),
        (FLOPWATCH_DRIVER_RELEASED_SECONDS_TOTAL, (), seconds),
    ]


def in_use(seconds: float) -> list[Sample]:
    return [(FLOPWATCH_DRIVER_RELEASED, (), 0), (FLOPWATCH_DRIVER_RELEASED_SECONDS_TOTAL, (), seconds)]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("10m", 600),
        ("1.5h", 5400),
        ("0", 0),
        ("0s", 0),
        ("10", None),
        ("", None),
        ("-5m", None),
        ("10 m", None),
        ("1e3s", None),
        ("soon", None),
        ("nan", None),
    ],
)
def test_a_time_is_a_number_with_a_unit(text: str, seconds: float | None) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "until"),
    [
        ("10m", NOW + 600),
        ("1800000600", NOW + 600),
        ("1800000600.250", NOW + 600.25),
        ("1700000000", 1_700_000_000),
        ("0", NOW),
        ("48h", NOW + MAX_DURATION),
        ("9999999999", NOW + MAX_DURATION),
        ("600", None),
        ("whatever", None),
    ],
)
def test_a_request_is_a_time_or_the_unix_time_of_its_end_a_day_at_most(text: str, until: float | None) -> None:
    assert end(text, NOW) == until


def test_a_file_written_by_hand_releases_the_drivers_for_that_time(node: Node) -> None:
    node.release.check()
    assert (node.driver.requests, node.release.samples()) == ([], in_use(0))
    node.ask("10m\n")
    node.release.check()
    assert node.driver.requests == ["release"]
    assert node.files() == {"release": "10m\n", "released": "1800000600.000\n"}
    node.time += 599
    node.release.check()
    assert node.driver.requests == ["release"]
    assert node.release.samples() == released(NOW + 600, 599)
    node.time += 2
    node.release.check()
    assert node.driver.requests == ["release", "resume"]
    assert node.release.samples() == in_use(601)
    assert node.files() == {}
    node.release.check()
    assert node.driver.requests == ["release", "resume"]


@pytest.mark.parametrize("how", ["0", ""])
def test_a_release_ends_early_by_a_zero_or_without_its_file(node: Node, how: str) -> None:
    node.ask("10m")
    node.release.check()
    node.time += 60
    if how:
        node.ask(how)
    else:
        (node.state / "release").unlink()
    node.release.check()
    assert node.driver.requests == ["release", "resume"]
    assert node.release.samples() == in_use(60)
    assert node.files() == {}


def test_a_release_that_is_prolonged_is_confirmed_again(node: Node) -> None:
    node.ask("1m")
    node.release.check()
    node.time += 30
    node.ask("1m")
    node.release.check()
    assert node.files()["released"] == "1800000090.000\n"
    assert node.release.samples() == released(NOW + 90, 30)


def test_a_restarted_exporter_goes_on_with_the_release(node: Node) -> None:
    node.ask("10m")
    node.release.check()
    node.time += 300
    restarted = node.restarted()
    restarted.check()
    assert node.driver.requests == ["release", "release"]
    assert restarted.samples() == released(NOW + 600, 0)


def test_a_request_whose_time_is_over_is_removed_and_does_nothing(node: Node) -> None:
    node.ask("10m")
    (node.state / "released").write_text("1800000600.000\n")
    node.time += 700
    node.restarted().check()
    assert (node.driver.requests, node.files()) == ([], {})


@pytest.mark.parametrize("text", ["", "soon", "10", "\x00\xff", "10m 20m"])
def test_what_is_no_request_changes_nothing(node: Node, text: str) -> None:
    node.ask(text)
    node.release.check()
    assert (node.driver.requests, node.release.samples()) == ([], in_use(0))
    node.ask("10m")
    node.release.check()
    node.ask(text)
    node.release.check()
    assert node.driver.requests == ["release"]
    assert node.release.samples() == released(NOW + 600, 0)


def test_nothing_is_confirmed_while_a_handle_is_open(node: Node) -> None:
    node.driver.hung = True
    node.ask("10m")
    node.release.check()
    node.release.check()
    assert "released" not in node.files()
    node.driver.hung = False
    node.release.check()
    assert node.driver.requests == ["release"] * 3
    assert node.files()["released"] == "1800000600.000\n"


def test_a_signal_asks_for_ten_minutes_in_the_same_file(node: Node) -> None:
    node.release.request(600)
    assert node.files() == {"release": "1800000600.000\n"}
    os.utime(node.state / "release", (NOW, NOW))
    node.release.check()
    assert node.driver.requests == ["release"]


def test_a_signal_releases_also_where_the_state_folder_cannot_be_written(node: Node, tmp_path: Path) -> None:
    node.state = tmp_path / "not there"
    without_folder = node.restarted()
    without_folder.request(600)
    without_folder.check()
    assert node.driver.requests == ["release"]
    node.time += 601
    without_folder.check()
    assert without_folder.samples() == in_use(601)
    without_folder.check()
    assert node.driver.requests == ["release", "resume"]


def test_a_guest_of_the_state_folder_leaves_its_files_alone(node: Node) -> None:
    guest = Release(node.state, [node.driver], now=lambda: node.time, clock=lambda: node.time, guest=True)
    node.ask("10m")
    guest.check()
    assert (node.driver.requests, node.files()) == (["release"], {"release": "10m"})
    assert guest.samples()[0] == (FLOPWATCH_DRIVER_RELEASED, (), 1)
    node.time += 601
    guest.check()
    assert (node.driver.requests, node.files()) == (["release", "resume"], {"release": "10m"})


def exporter(state: Path, driver: Driver, ended: threading.Event) -> threading.Thread:
    """Return a started thread that does what the exporter does with its release."""
    running = Release(state, [driver])

    def loop() -> None:
        while not ended.wait(0.02):
            running.check()

    thread = threading.Thread(target=loop)
    thread.start()
    return thread


def test_the_command_waits_until_the_exporter_has_done_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_release, "CONFIRMATION_TIMEOUT", PATIENCE)
    driver, ended = Driver(), threading.Event()
    running = exporter(tmp_path, driver, ended)
    try:
        assert driver_release.ask(tmp_path, 600) == ""
        assert driver.requests == ["release"]
        assert driver_release.ask(tmp_path, 0) == ""
        assert driver.requests == ["release", "resume"]
        until(lambda: list(tmp_path.iterdir()) == [])  # the request goes first
    finally:
        ended.set()
        running.join()


def test_the_command_reports_that_no_exporter_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_release, "CONFIRMATION_TIMEOUT", 0.1)
    assert driver_release.ask(tmp_path, 600).startswith("no exporter confirmed within 0.1 s")
    assert driver_release.ask(tmp_path / "not there", 600).startswith("cannot write")


def test_taking_back_a_release_that_was_not_requested_leaves_no_file_and_does_not_wait(tmp_path: Path) -> None:
    assert driver_release.ask(tmp_path, 0) == ""
    assert list(tmp_path.iterdir()) == []
