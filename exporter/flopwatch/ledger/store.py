"""The ledger's state on disk: SQLite in WAL mode, one process at a time.

What `apply` returned from is on disk (synchronous=FULL: even a power cut loses nothing that was acknowledged), and what
is served is on disk: when a write fails, memory is dropped and read again. The sender keeps its snapshot, which is
cumulative, so its next one makes up for the one refused. Deliveries that come while another is being written wait for
it and share the next transaction, and its fsync.

A run that has ended is served for a day. One that nobody ended and nobody brought back is given up after
`abandoned_after`: it stopped when it was last heard of, since a month of silence is no down time that anybody waits for
to end; the log says so, its vanishing counts as an unplanned end, and its accounts are served for the day like others'.
A start after that goes on with the same accounts, while they are served.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flopwatch.catalogue import Sample
from flopwatch.ledger.accounting import Ledger, Run, Source
from flopwatch.ledger.incidents import Incident
from flopwatch.ledger.record import Key, Record, RecordError
from flopwatch.settings import SettingsError

log = logging.getLogger(__name__)

RETENTION = 24 * 3600.0  # seconds a run is served after its end was heard of
ABANDONED_AFTER = 30 * 24 * 3600.0
_CATCH_UP = 600.0  # seconds that senders have to be heard of again after a start, before a run is given up
_VERSION = 3
# The locks and the shared memory of WAL need one kernel: https://www.sqlite.org/wal.html, "does not work over a
# network filesystem".
_NETWORK = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "glusterfs",
    "afs",
    "pvfs2",
    "orangefs",
    "wekafs",
    "panfs",
    "fuse.sshfs",
    "fuse.ceph",
    "fuse.glusterfs",
    "fuse.juicefs",
    "fuse.s3fs",
    "fuse.gcsfuse",
)
# By the format they make of the one before.
_SCHEMA = (
    """
CREATE TABLE runs (
    tenant TEXT, run TEXT, ended INTEGER, heard REAL, state TEXT, PRIMARY KEY (tenant, run)
) WITHOUT ROWID;
CREATE TABLE sources (
    tenant TEXT, run TEXT, source TEXT, state TEXT, PRIMARY KEY (tenant, run, source)
) WITHOUT ROWID;
""",
    """
CREATE TABLE attempts (
    tenant TEXT, run TEXT, number INTEGER, state TEXT, PRIMARY KEY (tenant, run, number)
) WITHOUT ROWID;
CREATE TABLE incidents (
    tenant TEXT, run TEXT, number INTEGER, state TEXT, PRIMARY KEY (tenant, run, number)
) WITHOUT ROWID;
CREATE TABLE evidence (
    tenant TEXT, run TEXT, host TEXT, state TEXT, PRIMARY KEY (tenant, run, host)
) WITHOUT ROWID;
""",
    "",
)
# What of a run is kept a row each, and the column that tells them apart.
_PARTS = {"sources": "source", "attempts": "number", "incidents": "number", "evidence": "host"}


class NoSuchRun(Exception):
    """There is no run of this name, or `several`; the message says which."""

    def __init__(self, message: str, several: bool = False) -> None:
        super().__init__(message)
        self.several = several


class Ended(ValueError):
    """The run has ended already."""


@dataclass(slots=True)
class _Delivery:
    """Records that are to be taken together."""

    records: list[Record]
    done: bool = False
    error: Exception | None = None


def filesystem(path: Path, mounts: str) -> str:
    """Return the type of the filesystem a path is on, by the text of /proc/mounts."""
    kind, longest = "", -1
    for line in mounts.splitlines():
        _, where, fstype, *_ = line.split(" ")
        for octal, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
            where = where.replace(octal, character)
        # The last of several mounts on one place is the one in sight.
        if path.is_relative_to(where) and len(where) >= longest:
            kind, longest = fstype, len(where)
    return kind


class Store:
    """A ledger that survives its process. Safe to use from several threads."""

    def __init__(
        self,
        path: Path,
        *,
        silent_after: float = 60.0,
        new_for: float = 0.0,
        abandoned_after: float = ABANDONED_AFTER,
        clock: Callable[[], float] = time.time,
        mounts: Path = Path("/proc/self/mounts"),
    ) -> None:
        """Open or create the file. Raises SettingsError if it cannot be kept there or another process has it.

        A run is new for `new_for` seconds, in which its counters are served as 0, and given up when nothing was heard
        of it for `abandoned_after`.
        """
        self._path = path
        self._silent_after = silent_after
        self._new_for = new_for
        self._abandoned_after = abandoned_after
        self._clock = clock
        self._began = clock()
        self._lock = threading.Lock()
        self._queue_lock = threading.Lock()
        self._queue: list[_Delivery] = []
        self._ledger: Ledger | None = None
        self._heard: dict[Key, float] = {}
        self._forgotten: set[Key] = set()
        self._given_up: set[Key] = set()
        self._known: dict[Key, float | None] = {}  # runs that were served in full, and since when they are
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            kind = filesystem(path.resolve(), mounts.read_text())
            if kind in _NETWORK:
                raise SettingsError(
                    f"{path} is on a network filesystem ({kind}), which cannot lock a database; "
                    "give --state a local disk"
                )
            self._guard = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SettingsError(f"the ledger cannot be kept in {path}: {error}") from error
        try:
            fcntl.flock(self._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._db = self._open()
        except BlockingIOError:
            os.close(self._guard)
            raise SettingsError(f"another process keeps its ledger in {path}; give each its own --state") from None
        except sqlite3.Error as error:
            os.close(self._guard)
            raise SettingsError(f"the ledger cannot be kept in {path}: {error}") from error
        except SettingsError:
            os.close(self._guard)
            raise

    def close(self) -> None:
        """Close the file and let another process have it."""
        with self._lock:
            self._db.close()
            os.close(self._guard)

    def apply(self, lines: Iterable[object]) -> None:
        """Take records, all or none, and return once they are on disk.

        Raises RecordError for the first that is malformed, sqlite3.Error if they could not be written.
        """
        records = []
        for number, line in enumerate(lines, 1):
            try:
                records.append(Record.parse(line))
            except RecordError as error:
                raise RecordError(f"record {number}: {error}") from None
        delivery = _Delivery(records)
        with self._queue_lock:
            self._queue.append(delivery)
        with self._lock:
            if not delivery.done:
                with self._queue_lock:
                    queue, self._queue = self._queue, []
                self._take(queue)
        if delivery.error is not None:
            raise delivery.error

    def families(self, now: float) -> list[Sample]:
        """Return the samples of the runs that are served."""
        with self._lock:
            ledger = self._read()
            self._forget(ledger, now)
            return ledger.families(now, self._new(ledger, now))

    def summary(self, now: float | None = None) -> dict[str, Any]:
        """Return the figures of every run, as `flopwatch ledger replay --json` prints them."""
        with self._lock:
            return self._read().summary(now)

    def listing(self) -> list[dict[str, Any]]:
        """Return a few figures of each run, as of now."""
        with self._lock:
            ledger, now = self._read(), self._clock()
            self._forget(ledger, now)
            told = ("state", "attempts", "goodput", "wall_seconds", "high_water_step", "conflict")
            rows = []
            for key, run in ledger.runs.items():
                summary = run.summary(now)
                rows.append(
                    {
                        "tenant": key[0],
                        "run": key[1],
                        "start": run.start,
                        "silent_seconds": max(0.0, now - self._heard[key]),
                        **{name: summary[name] for name in told},
                    }
                )
            return rows

    def figures(self, run: str, tenant: str | None = None) -> dict[str, Any]:
        """Return the whole record of a run, as of now. Raises NoSuchRun."""
        with self._lock:
            ledger, now = self._read(), self._clock()
            self._forget(ledger, now)
            return self._find(ledger, run, tenant).figures(now)

    def close_run(self, run: str, tenant: str | None = None, status: str = "stopped") -> dict[str, Any]:
        """End a run by hand, and return what it was before. Raises NoSuchRun, Ended, RecordError, sqlite3.Error."""
        with self._lock:
            ledger, now = self._read(), self._clock()
            self._forget(ledger, now)
            found = self._find(ledger, run, tenant)
            if found.ended is not None:
                raise Ended(f"run {run!r} has {found.ended} already")
            before = {"tenant": found.tenant, "run": found.name, "state": found.state(now)}
        self.apply([{"t": now, "run": run, "tenant": before["tenant"], "event": "finish", "status": status}])
        return before

    @staticmethod
    def _find(ledger: Ledger, run: str, tenant: str | None) -> Run:
        tenants = sorted(key[0] for key in ledger.runs if key[1] == run and tenant in (None, key[0]))
        if not tenants:
            raise NoSuchRun(f"no run {run!r}" + (f" of tenant {tenant!r}" if tenant is not None else ""))
        if len(tenants) > 1:
            raise NoSuchRun(f"run {run!r} is one of several tenants: {', '.join(map(repr, tenants))}; say whose", True)
        return ledger.runs[tenants[0], run]

    def _take(self, deliveries: list[_Delivery]) -> None:
        """Take deliveries and write them, in one transaction; each is told what became of it."""
        now = self._clock()
        try:
            ledger = self._read()
            changed = {
                key for delivery in deliveries for record in delivery.records for key in ledger.apply(record, now)
            }
            self._write(ledger, changed & ledger.runs.keys(), now)
        except sqlite3.Error as error:
            self._ledger = None
            for delivery in deliveries:
                delivery.error = error
        except Exception as error:
            self._ledger = None
            if len(deliveries) > 1:
                # The mistake is in one of them, and the others are not to suffer from it.
                for delivery in deliveries:
                    self._take([delivery])
            else:
                deliveries[0].error = error
        except BaseException:
            self._ledger = None
            for delivery in deliveries:
                delivery.error = sqlite3.OperationalError("interrupted")
            raise
        finally:
            for delivery in deliveries:
                delivery.done = True

    def _new(self, ledger: Ledger, now: float) -> set[Key]:
        """Return the runs to be served at 0; one that was served in full never is again, whatever the clock does."""
        self._known = {
            key: first for key, first in self._known.items() if key in ledger.runs and ledger.runs[key].first == first
        }
        new = {
            key
            for key, run in ledger.runs.items()
            if key not in self._known and run.first is not None and 0 <= now - run.first < self._new_for
        }
        self._known |= {key: run.first for key, run in ledger.runs.items() if key not in new}
        return new

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except SettingsError:
            raise
        except (sqlite3.DatabaseError, ValueError, TypeError, LookupError) as error:
            # Its subclasses are about the disk, permissions or locks: the file may be good.
            if isinstance(error, sqlite3.DatabaseError) and type(error) is not sqlite3.DatabaseError:
                raise
            kept = self._set_aside()
            log.error("ledger: %s is damaged (%s), kept as %s; the accounts begin anew", self._path, error, kept)
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, timeout=10, check_same_thread=False)
        try:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
            [[verdict]] = db.execute("PRAGMA quick_check(1)")
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            [[version]] = db.execute("PRAGMA user_version")
            if version > _VERSION:
                raise SettingsError(f"{self._path} was written by a newer flopwatch (format {version}, not {_VERSION})")
            if version < _VERSION:
                db.executescript(f"BEGIN; {''.join(_SCHEMA[version:])} PRAGMA user_version={_VERSION}; COMMIT;")
            self._db = db
            self._ledger = None
            self._read()
        except BaseException:
            db.close()
            raise
        return db

    def _set_aside(self) -> Path:
        now = datetime.fromtimestamp(self._clock(), timezone.utc)
        kept = self._path.with_name(f"{self._path.name}.corrupt-{now:%Y%m%dT%H%M%S.%f}Z")
        for suffix in ("", "-wal", "-shm"):
            source = Path(f"{self._path}{suffix}")
            if source.exists():
                source.rename(f"{kept}{suffix}")
        return kept

    def _read(self) -> Ledger:
        """Return the ledger in memory, read from disk if there is none."""
        if self._ledger is None:
            ledger = Ledger(self._silent_after)
            heard: dict[Key, float] = {}
            parts: dict[str, dict[Key, dict[Any, Any]]] = {table: {} for table in _PARTS}
            for table, column in _PARTS.items():
                rows = self._db.execute(f"SELECT tenant, run, {column}, state FROM {table} ORDER BY {column}")
                for tenant, run, name, state in rows:
                    parts[table].setdefault((tenant, run), {})[name] = json.loads(state)
            for tenant, run, when, state in self._db.execute("SELECT tenant, run, heard, state FROM runs"):
                key = tenant, run
                values = json.loads(state) | {"silent_after": self._silent_after}
                ledger.runs[key] = Run.from_json(values, *(parts[table].get(key, {}) for table in _PARTS))
                heard[key] = when
            self._ledger, self._heard, self._forgotten, self._given_up = ledger, heard, set(), set()
        return self._ledger

    def _write(self, ledger: Ledger, changed: set[Key], now: float) -> None:
        self._heard |= dict.fromkeys(changed, now)
        self._forget(ledger, now)
        with self._db as db:
            for key in self._forgotten:
                for table in ("runs", *_PARTS):
                    db.execute(f"DELETE FROM {table} WHERE tenant = ? AND run = ?", key)
            for key in changed | (self._given_up & ledger.runs.keys()):
                run = ledger.runs[key]
                db.execute(
                    "INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?)",
                    (*key, run.ended is not None, self._heard[key], json.dumps(run.to_json())),
                )
                for table, names, part in (
                    ("sources", run.touched, run.sources.get),
                    ("attempts", run.rewritten, run.history.get),
                    ("incidents", run.changed, run.incidents.get),
                    ("evidence", run.evidence.touched, run.evidence.state),
                ):
                    _write_part(db, table, key, names, part)
                    names.clear()
        self._forgotten.clear()
        self._given_up.clear()

    def _forget(self, ledger: Ledger, now: float) -> None:
        """Stop serving runs that ended long ago, and give up those that nobody ends; the next delivery writes that."""
        for key, run in list(ledger.runs.items()):
            silent = now - self._heard[key]
            if run.ended is not None and silent > RETENTION:
                del ledger.runs[key], self._heard[key]
                self._forgotten.add(key)
            elif run.ended is None and silent > self._abandoned_after and now - self._began > _CATCH_UP:
                log.warning(
                    "ledger: run %s of tenant %r, last heard of %.0f days ago, is given up",
                    key[1],
                    key[0],
                    silent / 86400,
                )
                run.give_up()
                self._heard[key] = now
                self._given_up.add(key)


def _write_part(db: sqlite3.Connection, table: str, key: Key, names: Iterable[Any], part: Callable[[Any], Any]) -> None:
    """Write what has changed of one of a run's tables."""
    for name in names:
        state = part(name)
        if state is None:
            db.execute(f"DELETE FROM {table} WHERE tenant = ? AND run = ? AND {_PARTS[table]} = ?", (*key, name))
        else:
            state = asdict(state) if isinstance(state, Source | Incident) else state
            db.execute(f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?, ?)", (*key, name, json.dumps(state)))
