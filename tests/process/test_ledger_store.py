"""Test the ledger's file: restarts, kills, damage, a full disk, a second process."""

from __future__ import annotations

import json
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwatch import catalogue as m
from flopwatch.catalogue import Sample
from flopwatch.ledger import views
from flopwatch.ledger.ledger import Ledger
from flopwatch.ledger.record import RecordError
from flopwatch.ledger.store import Store, filesystem
from flopwatch.settings import SettingsError
from tests.support import ROOT, TESTS
from tests.support.histories import Generated, histories, mangled, samples

CAPTURES = TESTS / "captures"
HISTORIES = CAPTURES / "histories"
EXPORTER = ROOT / "exporter"
NOW = 9000.0
LATER = 2e9  # later than any generated history


def history(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HISTORIES / f"{name}.jsonl").read_text().splitlines()]


def summary_in_memory(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a ledger that only ever was in memory."""
    ledger = Ledger()
    for record in records:
        ledger.apply(record)
    return ledger.summary()


def families(store: Store, now: float, meanwhile: Callable[[], object] = bool) -> list[Sample]:
    """Return the samples of a scrape. `meanwhile` is called when it leaves the lock for the first time."""
    parts = store.families(now)
    next(parts)
    meanwhile()
    *_, samples = parts
    return samples


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Limit the size of every file that this process writes, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("name", ["crash_and_move", "two_nodes_then_one", "crash_loop"])
def test_a_ledger_restarted_at_every_turn_gives_the_same_figures(name: str, tmp_path: Path) -> None:
    records = history(name)
    step = max(1, len(records) // 20)
    for begin in range(0, len(records), step):
        with closing(Store(tmp_path / "ledger.sqlite", clock=lambda: NOW)) as store:
            store.apply(records[begin : begin + step])
    with closing(Store(tmp_path / "ledger.sqlite", clock=lambda: NOW)) as store:
        assert store.summary() == summary_in_memory(records)
        ledger = Ledger()
        for record in records:
            ledger.apply(record)
        assert families(store, NOW) == samples(ledger, NOW)


CHILD = """
import json, sys
from pathlib import Path
from flopwatch.ledger.store import Store
store = Store(Path(sys.argv[1]))
for number, line in enumerate(open(sys.argv[2]), 1):
    store.apply([json.loads(line)])
    print(number, flush=True)
"""


def test_a_ledger_killed_at_any_moment_has_what_it_acknowledged_and_loses_no_second(tmp_path: Path) -> None:
    records, chance = history("crash_and_move"), random.Random(7)
    path, before = tmp_path / "ledger.sqlite", 0
    for _ in range(8):
        # The sender starts from the first record each time. Records that the ledger already has change nothing.
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), str(HISTORIES / "crash_and_move.jsonl")],
            stdout=subprocess.PIPE,
            env={"PYTHONPATH": str(EXPORTER)},
        )
        assert child.stdout is not None
        stop_at = min(len(records) - 1, before + chance.randint(1, 120))
        acknowledged = 0
        while acknowledged < stop_at:
            acknowledged = int(child.stdout.readline())
        if chance.random() < 0.5:
            threading.Event().wait(chance.uniform(0, 0.004))
        child.kill()
        rest = child.stdout.read().split()  # printed before it died; the last number may be cut short
        acknowledged = max([acknowledged, *(int(number) for number in rest[:-1])])
        child.wait()
        child.stdout.close()
        # A record in flight at the kill has no acknowledgement. It may be in the file or not.
        prefixes = range(max(acknowledged, before), min(len(records), max(acknowledged, before) + len(rest) + 2) + 1)
        with closing(Store(path, clock=lambda: NOW)) as store:
            summary = store.summary()
        matching = [number for number in prefixes if summary_in_memory(records[:number]) == summary]
        assert matching, f"not the books after any of the records {prefixes}"
        before = matching[0]
    with closing(Store(path, clock=lambda: NOW)) as store:
        for record in records:
            store.apply([record])
        assert store.summary() == summary_in_memory(records)


def test_all_records_of_a_delivery_are_taken_or_none(tmp_path: Path) -> None:
    records = history("crash_and_move")
    with closing(Store(tmp_path / "ledger.sqlite")) as store:
        store.apply(records[:50])
        before = store.summary()
        with pytest.raises(RecordError, match=r"^record 2: step: Expected float >= 0.0$"):
            store.apply([records[50], {**records[51], "step": -1}])
        assert store.summary() == before


def test_a_record_of_the_far_future_is_refused(tmp_path: Path) -> None:
    submitted = {"run": "r", "event": "submitted"}
    with closing(Store(tmp_path / "ledger.sqlite", clock=lambda: 1e9)) as store:
        store.apply([{**submitted, "t": 1e9 + 3600}])
        forged = {"run": "forged", "event": "snapshot", "attempt": "a", "t": 1e9}
        for field in ("t", "started", "submitted"):
            problem = rf"record 1: {field}: 1e\+30 is more than a day ahead of this ledger's clock"
            with pytest.raises(RecordError, match=problem):
                store.apply([{**forged, field: 1e30}])
        assert [run["run"] for run in store.listing()] == ["r"]


def test_an_empty_file_is_logged_before_the_ledger_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "ledger.sqlite").touch()
    with closing(Store(tmp_path / "ledger.sqlite")) as store:
        assert store.listing() == []
    assert "ledger.sqlite is empty, so the ledger begins without its earlier runs" in caplog.text


def test_when_the_disk_is_full_the_sender_gets_an_error_and_its_next_snapshot_makes_up_for_it(tmp_path: Path) -> None:
    records = history("crash_and_move")
    with closing(Store(tmp_path / "ledger.sqlite", clock=lambda: NOW)) as store:
        store.apply(records[:60])
        before, served = store.summary(), families(store, 1500)
        with file_size_limit((tmp_path / "ledger.sqlite-wal").stat().st_size), pytest.raises(sqlite3.OperationalError):
            store.apply(records[60:90])
        assert (store.summary(), families(store, 1500)) == (before, served)
        store.apply(records[60:61])
        assert store.summary() == summary_in_memory(records[:61])
        store.apply(records[120:])
    with closing(Store(tmp_path / "ledger.sqlite", clock=lambda: NOW)) as store:
        assert store.summary()["runs"]["r"]["buckets"] == pytest.approx(
            summary_in_memory(records)["runs"]["r"]["buckets"]
        )


def intact(path: Path) -> None:
    with closing(Store(path)) as store:
        store.apply(history("crash_and_move"))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: b"not a database, for sure" * 100, id="another file"),
        pytest.param(lambda content: content[: len(content) // 2], id="cut off"),
        pytest.param(lambda content: content[:4096] + bytes(len(content) - 4096), id="zeroed pages"),
        pytest.param(lambda content: content.replace(b'"frontier"', b'"frontear"'), id="another meaning"),
    ],
)
def test_a_damaged_file_is_kept_aside_and_the_accounts_start_over(damage: Any, tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    intact(path)
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    with closing(Store(path, clock=lambda: 1.7e9)) as store:
        assert store.summary() == {"runs": {}}
        store.apply(history("crash_loop"))
    kept = tmp_path / "ledger.sqlite.corrupt-20231114T221320.000000Z"
    assert kept.read_bytes() == damaged
    with closing(Store(path)) as store:
        assert list(store.summary()["runs"]) == ["loop"]


@pytest.mark.parametrize(("format", "which"), [(2, "an older"), (4, "a newer")])
def test_a_file_of_another_format_is_refused_and_left_alone(format: int, which: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    intact(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version={format}")
    with pytest.raises(SettingsError, match=rf"was written by {which} flopwatch \(format {format}, not 3\)"):
        Store(path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ledger.sqlite", "ledger.sqlite.lock"]


def test_a_second_ledger_on_the_same_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(Store(path)) as store:
        with pytest.raises(SettingsError, match=r"^another process keeps its ledger in .*; give each its own --state$"):
            Store(path)
        store.apply(history("crash_loop"))
    with closing(Store(path)) as store:
        assert list(store.summary()["runs"]) == ["loop"]


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "lustre", "fuse.sshfs"])
def test_a_network_filesystem_is_refused(kind: str, tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\nserver:/state {tmp_path.resolve()} {kind} rw 0 0\n")
    with pytest.raises(SettingsError, match=rf"is on a network filesystem \({kind}\)"):
        Store(tmp_path / "state" / "ledger.sqlite", mounts=mounts)
    assert not (tmp_path / "state" / "ledger.sqlite").exists()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib/flopwatch/ledger.sqlite", "ext4"),
        ("/var/library/ledger.sqlite", "overlay"),
        ("/mnt/fast disk/ledger.sqlite", "xfs"),
        ("/home/me/ledger.sqlite", "nfs4"),
        ("/home/local/ledger.sqlite", "tmpfs"),
    ],
)
def test_the_filesystem_of_a_path_is_that_of_the_closest_and_newest_mount(path: str, kind: str) -> None:
    mounts = (
        "overlay / overlay rw,relatime 0 0\n/dev/sda1 /var/lib ext3 rw 0 0\n/dev/sda2 /var/lib ext4 rw 0 0\n"
        "/dev/sdb1 /mnt/fast\\040disk xfs rw 0 0\nserver:/home /home nfs4 rw,vers=4.2 0 0\n"
        "tmpfs /home/local tmpfs rw 0 0\n"
    )
    assert filesystem(Path(path), mounts) == kind


def test_a_folder_that_cannot_be_written_is_an_error_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"^the ledger cannot be kept in .*/file/ledger.sqlite: "):
        Store(tmp_path / "file" / "ledger.sqlite")


def test_an_ended_run_has_series_for_a_day_and_is_in_the_api_for_thirty(tmp_path: Path) -> None:
    clock = [NOW]
    path = tmp_path / "ledger.sqlite"

    def runs(store: Store, now: float) -> set[str]:
        return {labels[1] for row, labels, _ in families(store, now) if row is m.RUN_STATE}

    with closing(Store(path, clock=lambda: clock[0])) as store:
        store.apply(history("crash_and_move"))
        # The day begins when the ledger received the end. A sender may have been cut off for long, or its clock be
        # wrong.
        assert runs(store, NOW + 24 * 3600) == {"r"}
        assert runs(store, NOW + 24 * 3600 + 1) == set()
        clock[0] += 24 * 3600 + 1
        store.apply(history("crash_loop")[:3])
        assert runs(store, clock[0]) == {"loop"}
    with closing(Store(path, clock=lambda: clock[0])) as store:
        assert store.figures("r")["buckets"]["productive"] == 6000
        assert runs(store, clock[0]) == {"loop"}
        clock[0] = NOW + 30 * 24 * 3600
        assert {row["run"] for row in store.listing()} == {"r", "loop"}
        clock[0] += 1
        assert {row["run"] for row in store.listing()} == {"loop"}
        store.apply(history("crash_loop")[3:4])
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT run FROM runs").fetchall() == [("loop",)]
        assert db.execute("SELECT DISTINCT run FROM sources").fetchall() == [("loop",)]
    with closing(Store(path, clock=lambda: clock[0])) as store:
        # A run that has not ended stays down for as long as that takes.
        assert runs(store, clock[0] + 30 * 24 * 3600) == {"loop"}


def test_an_abandoned_run_is_given_up_and_its_accounts_are_served_for_another_day(tmp_path: Path) -> None:
    day, path = 24 * 3600.0, tmp_path / "ledger.sqlite"
    clock = [NOW]

    def states(store: Store) -> dict[str, str]:
        return {
            labels[1]: labels[2]
            for row, labels, value in families(store, clock[0])
            if row is m.RUN_STATE and value == 1
        }

    def opened() -> Store:
        return Store(path, clock=lambda: clock[0], abandoned_after=7 * day)

    with closing(opened()) as store:
        store.apply([*history("crash_loop")[:7], {"t": 5, "run": "never", "event": "submitted"}])
        clock[0] += 7 * day - 1
        assert states(store) == {"loop": "down", "never": "queued"}
    clock[0] += day
    with closing(opened()) as store:
        # A ledger that was away itself waits for its senders first.
        assert states(store) == {"loop": "down", "never": "queued"}
        clock[0] += 601
        assert states(store) == {"loop": "stopped", "never": "stopped"}
        before = store.figures("loop")
        assert (before["summary"]["wall_seconds"], before["buckets"]["productive"]) == (60, 15)
        # A state that no delivery has written yet is computed again.
    with closing(opened()) as store:
        clock[0] += 601
        assert states(store) == {"loop": "stopped", "never": "stopped"}
        store.apply(history("crash_and_move")[:1])
    with closing(opened()) as store:
        assert states(store) == {"loop": "stopped", "never": "stopped", "r": "queued"}
        assert {**store.figures("loop"), "at": 0} == {**before, "at": 0}
        clock[0] += day + 1
        assert states(store) == {"r": "queued"}


def test_a_new_run_is_served_at_0_for_a_minute_once(tmp_path: Path) -> None:
    path, clock = tmp_path / "ledger.sqlite", [NOW]

    def productive(store: Store, now: float) -> set[float]:
        samples = families(store, now)
        assert {row.name for row, _, _ in samples} == {row.name for row, _, _ in families(store, NOW + 1e4)}
        return {value for row, labels, value in samples if row is m.RUN_SECONDS_TOTAL and labels[2] == "productive"}

    with closing(Store(path, new_for=60, clock=lambda: clock[0])) as store:
        store.apply(history("crash_and_move"))
        zero = {row.name: value for row, _, value in families(store, NOW + 59) if row.type == "counter"}
        assert set(zero.values()) == {0}
        opened = [value for row, _, value in families(store, NOW + 59) if row is m.RUN_OPEN_SECONDS]
        assert opened == [store.summary()["runs"]["r"]["wall_seconds"]]
    with closing(Store(path, new_for=60, clock=lambda: clock[0])) as store:
        assert {value for row, _, value in families(store, NOW + 59) if row.type == "counter"} == {0}
        assert productive(store, NOW + 60) == {6000}
        # A clock set back does not make the run new again. That would reset every counter.
        assert productive(store, NOW + 30) == productive(store, NOW - 3600) == {6000}
        # A new generation is another run.
        clock[0] = NOW + 100
        store.apply(
            [
                {**record, "t": record["t"] + 20000, "attempt": f"again-{record.get('attempt')}"}
                for record in history("crash_and_move")
            ]
        )
        assert productive(store, NOW + 130) == {0, 6000}
        assert productive(store, NOW + 160) == {6000}


def test_the_sources_of_an_ended_attempt_leave_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(Store(path)) as store:
        store.apply(history("two_nodes_then_one"))
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT tenant, run, source FROM sources").fetchall() == [("research", "llm", "h3")]


def test_a_new_generation_and_the_old_one_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    again = [
        {**record, "t": record["t"] + 20000, "attempt": f"again-{record.get('attempt')}"}
        for record in history("crash_and_move")
    ]
    with closing(Store(path)) as store:
        store.apply([*history("crash_and_move"), *again[:10]])
        before = store.summary()
    with closing(Store(path)) as store:
        assert store.summary() == before
        store.apply(again[10:])
        runs = store.summary()["runs"]
    assert set(runs) == {"r", "r#1"}
    assert runs["r"]["buckets"] == pytest.approx(runs["r#1"]["buckets"])


def counters(samples: list[Sample]) -> dict[tuple[str, ...], float]:
    return {(row.name, *labels): value for row, labels, value in samples if row.type == "counter"}


def test_a_run_that_starts_during_a_scrape_does_not_wait_for_its_end_and_never_falls_back_to_0(tmp_path: Path) -> None:
    records, seen = history("crash_and_move"), list[bool]()
    with closing(Store(tmp_path / "ledger.sqlite", new_for=60, clock=lambda: NOW)) as store:
        store.apply(records)

        def begin() -> None:
            store.apply([{**record, "run": "second"} for record in records])
            seen.append("second" in store.summary()["runs"])

        first, then = counters(families(store, NOW + 60, begin)), counters(families(store, NOW + 59))
    assert seen == [True]
    assert {labels for labels, value in first.items() if value > then[labels]} == set()


def test_a_scrape_shows_nothing_of_a_write_that_fails_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = history("crash_and_move")
    with closing(Store(tmp_path / "ledger.sqlite")) as store:
        store.apply([{**record, "run": run} for run in ("a", "b", "c") for record in records[:60]])

        def fail() -> None:
            with monkeypatch.context() as patch, suppress(sqlite3.OperationalError):
                patch.setattr(store, "_write", Mock(side_effect=sqlite3.OperationalError("disk full")))
                store.apply([{**record, "run": run} for run in ("a", "b", "c") for record in records[60:120]])

        before = families(store, NOW)
        assert families(store, NOW, fail) == before
        assert families(store, NOW) == before


def test_deliveries_and_scrapes_from_many_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    records = history("crash_and_move")
    with closing(Store(tmp_path / "ledger.sqlite")) as store:
        errors: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for record in records[:120]:
                    store.apply([{**record, "run": f"r{number}"}])
                    families(store, NOW)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        expected = summary_in_memory(records[:120])["runs"]["r"]
        assert store.summary()["runs"] == {f"r{number}": expected for number in range(4)}


def test_the_file_can_be_copied_while_it_is_in_use(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(Store(path)) as store:
        store.apply(history("crash_loop"))
        (tmp_path / "copy").mkdir()
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", tmp_path / "copy" / f"ledger.sqlite{suffix}")
        with closing(Store(tmp_path / "copy" / "ledger.sqlite")) as copy:
            assert copy.summary() == store.summary()


@pytest.mark.long
@given(histories(clean=False), st.integers(0, 2**32))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a_ledger_with_restarts_has_the_figures_of_one_without(generated: Generated, seed: int) -> None:
    chance, lines = random.Random(seed), list(mangled(generated.lines, seed))
    with tempfile.TemporaryDirectory() as folder:
        path, at = Path(folder) / "ledger.sqlite", 0
        while at < len(lines):
            with closing(Store(path, clock=lambda: LATER)) as store:
                for _ in range(chance.randint(1, 5)):
                    size = chance.randint(1, 20)
                    store.apply(lines[at : at + size])
                    at += size
        replayed = Ledger()
        for line in lines:
            replayed.apply(line)
        with closing(Store(path, clock=lambda: LATER)) as store:
            assert store.summary() == replayed.summary()
            for _, name in replayed.runs:
                live, replayed_figures = store.figures(name), views.figures(replayed.runs["", name], LATER)
                assert (live["attempts"], live["incidents"]) == (
                    replayed_figures["attempts"],
                    replayed_figures["incidents"],
                )


def test_deliveries_that_come_together_share_a_transaction_and_each_is_on_disk_when_it_returns(tmp_path: Path) -> None:
    path, count = tmp_path / "ledger.sqlite", 40
    written: list[int] = []
    with closing(Store(path, clock=lambda: NOW)) as store:
        commits = 0

        def trace(statement: str) -> None:
            nonlocal commits
            commits += statement == "COMMIT"

        store._db.set_trace_callback(trace)

        def deliver(number: int) -> None:
            store.apply([{"t": 1.0, "run": f"r{number}", "event": "submitted"}])
            with closing(sqlite3.connect(path)) as db:
                [[count]] = db.execute("SELECT count(*) FROM runs WHERE run = ?", (f"r{number}",))
                written.append(count)

        with store._lock:  # like a slow disk
            threads = [threading.Thread(target=deliver, args=(number,)) for number in range(count)]
            for thread in threads:
                thread.start()
            while len(store._queue) < count:
                threading.Event().wait(0.001)
        for thread in threads:
            thread.join()
        assert (written, commits) == ([1] * count, 1)


def test_a_delivery_that_breaks_the_ledger_costs_the_others_nothing(tmp_path: Path) -> None:
    class Broken(Ledger):
        def apply(self, line: Any, received: float | None = None) -> Any:
            if line.run == "bad":
                raise ArithmeticError("a mistake of ours")
            return super().apply(line, received)

    outcomes: dict[str, str] = {}
    with closing(Store(tmp_path / "ledger.sqlite", clock=lambda: NOW)) as store:
        make = store._read

        def read() -> Ledger:
            ledger = make()
            ledger.__class__ = Broken
            return ledger

        store._read = read  # type: ignore[method-assign]

        def deliver(run: str) -> None:
            try:
                store.apply([{"t": 1.0, "run": run, "event": "submitted"}])
                outcomes[run] = "taken"
            except ArithmeticError as error:
                outcomes[run] = str(error)

        with store._lock:
            threads = [threading.Thread(target=deliver, args=(run,)) for run in ("a", "bad", "b")]
            for thread in threads:
                thread.start()
            while len(store._queue) < 3:
                threading.Event().wait(0.001)
        for thread in threads:
            thread.join()
        assert outcomes == {"a": "taken", "bad": "a mistake of ours", "b": "taken"}
    with closing(Store(tmp_path / "ledger.sqlite", clock=lambda: NOW)) as store:
        assert set(store.summary()["runs"]) == {"a", "b"}
