"""The ledger's state on disk: SQLite in WAL mode, one transaction per delivery, one process at a time.

What `apply` returned from is on disk (synchronous=FULL: one fsync a delivery, and even a power cut loses nothing that
was acknowledged), and what is served is on disk: when a write fails, memory is dropped and read again. The sender keeps
its snapshot, which is cumulative, so its next one makes up for the one refused.
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
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flopwatch.catalogue import Sample
from flopwatch.ledger.accounting import Ledger, Run
from flopwatch.ledger.record import Key, Record, RecordError
from flopwatch.settings import SettingsError

log = logging.getLogger(__name__)

RETENTION = 24 * 3600.0  # seconds a run is served after its end was heard of
_VERSION = 1
# The locks and the shared memory of WAL need one kernel: https://www.sqlite.org/wal.html, "does not work over a
# network filesystem".
_NETWORK = (
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "afs", "pvfs2", "orangefs",
    "wekafs", "panfs", "fuse.sshfs", "fuse.ceph", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs", "fuse.gcsfuse",
)
_SCHEMA = """
CREATE TABLE runs (
    tenant TEXT, run TEXT, ended INTEGER, heard REAL, state TEXT, PRIMARY KEY (tenant, run)
) WITHOUT ROWID;
CREATE TABLE sources (
    tenant TEXT, run TEXT, source TEXT, state TEXT, PRIMARY KEY (tenant, run, source)
) WITHOUT ROWID;
"""


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
        clock: Callable[[], float] = time.time,
        mounts: Path = Path("/proc/self/mounts"),
    ) -> None:
        """Open or create the file. Raises SettingsError if it cannot be kept there or another process has it."""
        self._path = path
        self._silent_after = silent_after
        self._clock = clock
        self._lock = threading.Lock()
        self._ledger: Ledger | None = None
        self._heard: dict[Key, float] = {}
        self._forgotten: set[Key] = set()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            kind = filesystem(path.resolve(), mounts.read_text())
            if kind in _NETWORK:
                raise SettingsError(
                    f"{path} is on a network filesystem ({kind}), which cannot lock a database; "
                    "give --state a local disk")
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
        with self._lock:
            now = self._clock()
            ledger = self._read()
            try:
                changed = {key for record in records for key in ledger.apply(record)}
                self._write(ledger, changed & ledger.runs.keys(), now)
            except BaseException:
                self._ledger = None
                raise

    def families(self, now: float) -> list[Sample]:
        """Return the samples of the runs that are served."""
        with self._lock:
            ledger = self._read()
            self._forget(ledger, now)
            return ledger.families(now)

    def summary(self, now: float | None = None) -> dict[str, Any]:
        """Return the figures of every run, as `flopwatch ledger replay --json` prints them."""
        with self._lock:
            return self._read().summary(now)

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
                db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={_VERSION}; COMMIT;")
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
            sources: dict[Key, dict[str, Any]] = {}
            for tenant, run, source, state in self._db.execute("SELECT tenant, run, source, state FROM sources"):
                sources.setdefault((tenant, run), {})[source] = json.loads(state)
            for tenant, run, when, state in self._db.execute("SELECT tenant, run, heard, state FROM runs"):
                values = json.loads(state) | {"silent_after": self._silent_after}
                ledger.runs[tenant, run] = Run.from_json(values, sources.get((tenant, run), {}))
                heard[tenant, run] = when
            self._ledger, self._heard, self._forgotten = ledger, heard, set()
        return self._ledger

    def _write(self, ledger: Ledger, changed: set[Key], now: float) -> None:
        self._heard |= dict.fromkeys(changed, now)
        self._forget(ledger, now)
        with self._db as db:
            for key in self._forgotten:
                db.execute("DELETE FROM runs WHERE tenant = ? AND run = ?", key)
                db.execute("DELETE FROM sources WHERE tenant = ? AND run = ?", key)
            for key in changed:
                run = ledger.runs[key]
                db.execute(
                    "INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?)",
                    (*key, run.ended is not None, now, json.dumps(run.to_json())))
                for name in run.touched:
                    if name in run.sources:
                        db.execute(
                            "INSERT OR REPLACE INTO sources VALUES (?, ?, ?, ?)",
                            (*key, name, json.dumps(asdict(run.sources[name]))))
                    else:
                        db.execute("DELETE FROM sources WHERE tenant = ? AND run = ? AND source = ?", (*key, name))
                run.touched.clear()
        self._forgotten.clear()

    def _forget(self, ledger: Ledger, now: float) -> None:
        """Stop serving runs that ended long ago; the next delivery deletes them."""
        for key, run in list(ledger.runs.items()):
            if run.ended is not None and now - self._heard[key] > RETENTION:
                del ledger.runs[key], self._heard[key]
                self._forgotten.add(key)
