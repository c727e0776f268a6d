"""Ledger on disk: an SQLite file in WAL mode, owned by one process at a time.

When `apply` returns, its records are on disk (synchronous=FULL). After a failed write, the state in memory is dropped
and read again from disk. Deliveries that arrive during a write share the next transaction. A run has series for a day
after its end, and is in the API for 30 days. A run that is silent for `abandoned_after` seconds is ended as stopped at
its last report, and a start within a day continues it.
"""

import fcntl
import json
import logging
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from flopwatch.catalogue import Sample
from flopwatch.ledger import state, views
from flopwatch.ledger.ledger import Ledger
from flopwatch.ledger.record import LedgerRecord, RankKey, RecordError, RunKey
from flopwatch.ledger.run import RunLedger
from flopwatch.settings import SettingsError

log = logging.getLogger(__name__)

SERIES_RETENTION = 24 * 3600.0  # seconds for which a run has series after its end was received
RETENTION = 30 * 24 * 3600.0  # seconds for which it is kept
ABANDONED_AFTER = 30 * 24 * 3600.0
MAX_AHEAD = 24 * 3600.0  # seconds that the time of a record may be ahead of this clock
_CATCH_UP = 600.0  # seconds after a start in which no run is given up, so that senders can report first
_VERSION = 3
# WAL "does not work over a network filesystem": https://www.sqlite.org/wal.html.
_NETWORK = re.compile(
    r"nfs4?|cifs|smb3|smbfs|ceph|lustre|gpfs|beegfs|glusterfs|afs|pvfs2|orangefs|wekafs|panfs"
    r"|fuse\.(sshfs|ceph|glusterfs|juicefs|s3fs|gcsfuse)"
)
# Tables with a row for each part of a run, and the column that identifies the part.
_PARTS = {"sources": "source", "attempts": "number", "incidents": "number", "evidence": "host"}
_TABLE = "CREATE TABLE {} (\n    tenant TEXT, run TEXT, {}, state TEXT, PRIMARY KEY (tenant, run{})\n) WITHOUT ROWID;\n"
_SCHEMA = _TABLE.format("runs", "ended INTEGER, heard REAL", "") + "".join(
    _TABLE.format(table, f"{column} {'INTEGER' if column == 'number' else 'TEXT'}", f", {column}")
    for table, column in _PARTS.items()
)


class NoSuchRun(Exception):
    """Exception raised if no run has the name, or with `several` if runs of several tenants have it."""

    def __init__(self, message: str, several: bool = False) -> None:
        super().__init__(message)
        self.several = several


class AlreadyEnded(ValueError):
    """Exception raised if the run to close has already ended."""


@dataclass(slots=True)
class Delivery:
    """Records that are applied all or none, whether they were applied, and the error if that failed."""

    records: list[LedgerRecord]
    done: bool = False
    error: Exception | None = None
    wanted: list[RankKey] = field(default_factory=list)  # ranks of their hosts whose stacks are requested


def filesystem(path: Path, mounts: str) -> str:
    """Return the type of the filesystem that a path is on, from the text of /proc/mounts."""
    kind, longest = "", -1
    for line in mounts.splitlines():
        _, where, fstype, *_ = line.split(" ")
        where = re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), where)
        # The last of several mounts on one directory hides the others.
        if path.is_relative_to(where) and len(where) >= longest:
            kind, longest = fstype, len(where)
    return kind


class Store:
    """Ledger in an SQLite file, safe to use from several threads."""

    def __init__(
        self,
        path: Path,
        *,
        silent_after: float = 60.0,
        new_for: float = 0.0,
        abandoned_after: float = ABANDONED_AFTER,
        clock: Callable[[], float] = time.time,
        mounts: Path = Path("/proc/self/mounts"),
        executor: Executor | None = None,
    ) -> None:
        """Open or create the file. Raises SettingsError if that fails or another process has it open.

        All times are in seconds. A node is silent after `silent_after` without a report, and a run is abandoned after
        `abandoned_after`. For `new_for`, the counters of a new run are served as 0. The `executor` judges large runs.
        """
        self._path = path
        self._silent_after, self._new_for, self._abandoned_after = silent_after, new_for, abandoned_after
        self._clock, self._executor = clock, executor
        self._began = clock()
        self._lock, self._queue_lock = threading.Lock(), threading.Lock()
        self._queue: list[Delivery] = []
        self._ledger: Ledger | None = None
        self._forgotten, self._given_up = set[RunKey](), set[RunKey]()
        self._known: dict[RunKey, float | None] = {}  # runs that were served in full, with their `first`
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            kind = filesystem(path.resolve(), mounts.read_text())
            if _NETWORK.fullmatch(kind):
                text = "which cannot lock a database; set --state to a local disk"
                raise SettingsError(f"{path} is on a network filesystem ({kind}), {text}")
            self._guard = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.exists() and path.stat().st_size == 0:
                    log.warning("%s is empty, so the ledger begins without its earlier runs", path)
                self._open()
            except BaseException:
                os.close(self._guard)
                raise
        except BlockingIOError:
            raise SettingsError(f"another process keeps its ledger in {path}; give each its own --state") from None
        except (OSError, sqlite3.Error) as error:
            raise SettingsError(f"the ledger cannot be kept in {path}: {error}") from error

    def close(self) -> None:
        """Close the file and release its lock."""
        with self._lock:
            self._db.close()
            os.close(self._guard)

    def apply(self, lines: Iterable[object]) -> list[RankKey]:
        """Apply decoded JSON records, all or none, write them to disk, and return the ranks whose stacks are wanted.

        Raises RecordError or sqlite3.Error.
        """
        delivery = self.delivery(lines)
        self.write([delivery])
        if delivery.error is not None:
            raise delivery.error
        return delivery.wanted

    def delivery(self, lines: Iterable[object]) -> Delivery:
        """Return decoded JSON records for `write`. Raises RecordError."""
        records = []
        latest = self._clock() + MAX_AHEAD
        for number, line in enumerate(lines, 1):
            try:
                records.append(LedgerRecord.parse(line))
                for name in ("t", "started", "submitted"):
                    if (stamp := getattr(records[-1], name)) is not None and stamp > latest:
                        raise RecordError(f"{name}: {stamp:g} is more than a day ahead of this ledger's clock")
            except RecordError as error:
                raise RecordError(f"record {number}: {error}") from None
        return Delivery(records)

    def write(self, deliveries: list[Delivery]) -> None:
        """Apply deliveries and write them to disk in one transaction. Set `done` and `error` of each."""
        with self._queue_lock:
            self._queue += deliveries
        with self._lock:
            if not all(delivery.done for delivery in deliveries):
                with self._queue_lock:
                    queue, self._queue = self._queue, []
                self._take(queue)

    def families(self, now: float) -> Iterator[list[Sample]]:
        """Yield some samples at a time, and at last those of all runs served as of `now` in Unix time, by family."""
        with self._lock:
            ledger, runs = self._served(now)
            samples = next(runs)  # chooses the runs in the same lock as `_new`, so that no counter falls to 0 later
        while True:
            yield samples  # records need not wait for the samples of all runs
            with self._lock:
                if self._ledger is not ledger:  # a write failed, so these samples may not be on disk
                    samples = [*chain.from_iterable(self._served(now)[1])]
                    break
                if (some := next(runs, None)) is None:
                    break
                samples += some
        yield sorted(samples, key=lambda sample: sample[0].name)

    def _served(self, now: float) -> tuple[Ledger, Iterator[list[Sample]]]:
        """Return the ledger, and the samples of each run that is served. The caller holds the lock."""
        ledger = self._read()
        self._forget(ledger, now)
        return ledger, ledger.families(now, self._new(ledger, now))

    def summary(self, now: float | None = None) -> dict[str, Any]:
        """Return the summary of every run as of `now`, in the form that `flopwatch ledger replay --json` prints."""
        with self._lock:
            return self._read().summary(now)

    def listing(self) -> list[dict[str, Any]]:
        """Return one JSON object per run, as of now: its state, attempts, goodput and seconds since its last record."""
        with self._lock:
            ledger, now = self._read(), self._clock()
            self._forget(ledger, now)
            shown = ("state", "attempts", "goodput", "wall_seconds", "high_water_step", "conflict")
            rows = []
            for key, run in ledger.runs.items():
                summary, silent = views.summary(run, now), max(0.0, now - ledger.received[key])
                row = {"tenant": key[0], "run": key[1], "start": run.start, "silent_seconds": silent}
                rows.append(row | {name: summary[name] for name in shown})
            return rows

    def figures(self, run: str, tenant: str | None = None) -> dict[str, Any]:
        """Return a run's summary, buckets, attempts and incidents, as of now. Raises NoSuchRun."""
        with self._lock:
            ledger, now = self._read(), self._clock()
            self._forget(ledger, now)
            return views.figures(self._find(ledger, run, tenant), now)

    def close_run(self, run: str, tenant: str | None = None, status: str = "stopped") -> dict[str, Any]:
        """End a run and return its previous state. Raises NoSuchRun, AlreadyEnded, RecordError or sqlite3.Error."""
        with self._lock:
            ledger, now = self._read(), self._clock()
            self._forget(ledger, now)
            account = self._find(ledger, run, tenant)
            if account.ended is not None:
                raise AlreadyEnded(f"run {run!r} has {account.ended} already")
            before = {"tenant": account.tenant, "run": account.name, "state": account.state(now)}
        self.apply([{"t": now, "run": run, "tenant": before["tenant"], "event": "finish", "status": status}])
        return before

    @staticmethod
    def _find(ledger: Ledger, run: str, tenant: str | None) -> RunLedger:
        """Return the run with this name, of any tenant if `tenant` is None. Raises NoSuchRun for no or several runs."""
        tenants = sorted(key[0] for key in ledger.runs if key[1] == run and tenant in (None, key[0]))
        if not tenants:
            raise NoSuchRun(f"no run {run!r}" + (f" of tenant {tenant!r}" if tenant is not None else ""))
        if len(tenants) > 1:
            names = ", ".join(map(repr, tenants))
            raise NoSuchRun(f"several tenants have a run {run!r}: {names}; name the tenant", several=True)
        return ledger.runs[tenants[0], run]

    def _take(self, deliveries: list[Delivery]) -> None:
        """Apply deliveries and write them in one transaction. Set `done` and `error` of each."""
        now = self._clock()
        try:
            ledger = self._read()
            records = [record for delivery in deliveries for record in delivery.records]
            changed = {key for record in records for key in ledger.apply(record, now)}
            self._write(ledger, changed & ledger.runs.keys(), now)
            for delivery in deliveries:
                delivery.wanted = ledger.wanted_stacks(delivery.records)
        except Exception as error:
            self._ledger = None
            for delivery in deliveries:
                if len(deliveries) == 1 or isinstance(error, sqlite3.Error):
                    delivery.error = error
                else:  # one delivery breaks the ledger: apply each alone, so that the others succeed
                    self._take([delivery])
        except BaseException:
            self._ledger = None
            for delivery in deliveries:
                delivery.error = sqlite3.OperationalError("interrupted")
            raise
        finally:
            for delivery in deliveries:
                delivery.done = True

    def _new(self, ledger: Ledger, now: float) -> set[RunKey]:
        """Return the keys of new runs, whose counters are served as 0. A run once served in full is never new again."""
        firsts = {key: run.first for key, run in ledger.runs.items()}
        unknown = firsts.items() - self._known.items()
        new = {key for key, first in unknown if first is not None and 0 <= now - first < self._new_for}
        self._known = {key: first for key, first in firsts.items() if key not in new}
        return new

    def _open(self) -> None:
        """Connect to the file. Move a damaged file aside and start with an empty one."""
        try:
            self._connect()
        except SettingsError:
            raise
        except (sqlite3.DatabaseError, ValueError, TypeError, LookupError, RecursionError) as error:
            # A subclass reports the disk, permissions or locks, and the file may be intact.
            if isinstance(error, sqlite3.DatabaseError) and type(error) is not sqlite3.DatabaseError:
                raise
            kept = self._set_aside()
            log.error("ledger: %s is damaged (%s): moved to %s, starting with an empty ledger", self._path, error, kept)
            self._connect()

    def _connect(self) -> None:
        """Check, upgrade and read the file, and keep the connection to it."""
        db = sqlite3.connect(self._path, timeout=10, check_same_thread=False)
        try:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
            [[verdict]] = db.execute("PRAGMA quick_check(1)")
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            [[version]] = db.execute("PRAGMA user_version")
            if version not in (0, _VERSION):
                which = "a newer" if version > _VERSION else "an older"
                text = f"{self._path} was written by {which} flopwatch (format {version}, not {_VERSION})"
                raise SettingsError(f"{text}; set --state to another folder")
            if version == 0:  # a new file
                db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={_VERSION}; COMMIT;")
            self._db = db
            self._read()
        except BaseException:
            db.close()
            raise

    def _set_aside(self) -> Path:
        now = datetime.fromtimestamp(self._clock(), timezone.utc)
        kept = self._path.with_name(f"{self._path.name}.corrupt-{now:%Y%m%dT%H%M%S.%f}Z")
        for suffix in ("", "-wal", "-shm"):
            if (source := Path(f"{self._path}{suffix}")).exists():
                source.rename(f"{kept}{suffix}")
        return kept

    def _read(self) -> Ledger:
        """Return the ledger in memory, after reading it from disk if memory was dropped."""
        if self._ledger is None:
            ledger = Ledger(self._silent_after, self._executor)
            parts: dict[str, dict[RunKey, dict[Any, Any]]] = {table: {} for table in _PARTS}
            # Older versions wrote -Infinity, which msgspec does not read.
            for table, column in _PARTS.items():
                rows = self._db.execute(f"SELECT tenant, run, {column}, state FROM {table} ORDER BY {column}")
                for tenant, run, name, saved in rows:
                    parts[table].setdefault((tenant, run), {})[name] = json.loads(saved)
            for tenant, run, when, saved in self._db.execute("SELECT tenant, run, heard, state FROM runs"):
                key = tenant, run
                values = json.loads(saved) | {"silent_after": self._silent_after}
                ledger.runs[key] = state.from_json(values, *(parts[table].get(key, {}) for table in _PARTS))
                ledger.received[key] = when
            self._ledger, self._forgotten, self._given_up = ledger, set(), set()
        return self._ledger

    def _write(self, ledger: Ledger, changed: set[RunKey], now: float) -> None:
        """Write the changed runs and delete the forgotten ones, in one transaction."""
        self._forget(ledger, now)
        with self._db as db:
            for key in self._forgotten:
                for table in ("runs", *_PARTS):
                    db.execute(f"DELETE FROM {table} WHERE tenant = ? AND run = ?", key)
            for key in changed | (self._given_up & ledger.runs.keys()):
                run = ledger.runs[key]
                saved = msgspec.json.encode(state.to_json(run)).decode()
                columns = *key, run.ended is not None, ledger.received[key], saved
                db.execute("INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?)", columns)
                for table, name, row in state.changed_rows(run):
                    if row is None:
                        where = f"tenant = ? AND run = ? AND {_PARTS[table]} = ?"
                        db.execute(f"DELETE FROM {table} WHERE {where}", (*key, name))
                    else:
                        values = *key, name, msgspec.json.encode(row).decode()
                        db.execute(f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?, ?)", values)
        self._forgotten.clear()
        self._given_up.clear()

    def _forget(self, ledger: Ledger, now: float) -> None:
        """Retire and delete runs that ended long ago, and end abandoned runs. The next write stores it on disk."""
        ledger.retired.clear()
        for key, run in list(ledger.runs.items()):
            silent = now - ledger.received[key]
            if run.ended is not None and silent > RETENTION:
                ledger.forget(key)
                self._forgotten.add(key)
            elif run.ended is not None and silent > SERIES_RETENTION:
                ledger.retired.add(key)
            elif run.ended is None and silent > self._abandoned_after and now - self._began > _CATCH_UP:
                days = silent / 86400
                log.warning("ledger: run %s of tenant %r given up, last reported %.0f days ago", key[1], key[0], days)
                run.give_up()
                ledger.received[key] = now
                self._given_up.add(key)
