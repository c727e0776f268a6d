"""Client of the run ledger: sends the merged records of this host's attempts to an embedded or a remote ledger.

Records are cumulative, so only the newest of an attempt matter. Undelivered records are sent again, and for a remote
ledger they are also on disk. No error affects a push or a scrape.
"""

import hashlib
import json
import logging
import math
import random
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from flopwatch import catalogue as m
from flopwatch.connection import KeptConnection
from flopwatch.ledger.record import RecordError
from flopwatch.node.collectors import StateFile, replace_file
from flopwatch.node.scrape.reader import Reading
from flopwatch.node.scrape.scrape import Registry
from flopwatch.node.telemetry import evidence
from flopwatch.node.telemetry.admission import AttemptKey, RankKey
from flopwatch.node.telemetry.attempts import Record
from flopwatch.node.telemetry.ranks import Telemetry

if TYPE_CHECKING:
    from flopwatch.ledger.store import Store

log = logging.getLogger(__name__)

TICK = 1.0  # seconds between two records of an attempt for an embedded ledger
URL_INTERVAL = 15.0  # the same for a remote ledger, on the mean: it serves thousands of hosts
# Range of the factor on that. The first request is at a random time, and regular ones let the ledger judge all hosts of
# a run in intervals of about the same length.
SPREAD = (0.9, 1.1)
URGENT = 1.0  # seconds within which a change is sent that an incident may begin with, and a tick
URGENT_KINDS = ("xid", "sxid", "gpu_missing", "link_down", "host_oom", "exception", "signal", "exit", "oom", "pid_gone")
# Seconds after which an overdue step is sent once more, to show whether its ranks call collectives. It is then sent
# twice again, so that the ledger misses the records of a host that is gone.
AGAIN = 5.0
# If steps take LONGER times the mean of the last SAMPLES, a record is sent early, so that a rank is named sooner. Steps
# of over LONG seconds are too few for that. At most MAX_EARLY are sent in a row, then one in EARLY_EVERY seconds. None
# is sent to a ledger whose last answer took BUSY seconds.
SAMPLE, SAMPLES = 4.5, 36  # seconds between two, a little less than between two pushes of a hook, and their number
LONGER, LONG, MAX_EARLY, EARLY_EVERY, BUSY = 1.08, 4.0, 8, 60.0, 0.5
READ_EVERY = 2.0  # seconds between two readings of the GPUs for a late step
URL_BACKOFF_MAX = 60.0
URL_TIMEOUT = 5.0
STOP_TIMEOUT = 0.5
SAVE_INTERVAL = 15.0  # seconds between two writes of the state from which evidence continues after a restart
MAX_PENDING = 1000


def _wanted(body: str) -> list[RankKey] | None:
    """Return the ranks whose stacks a response with status 200 requests, None if it is not a ledger's.

    A captive portal or another server may send 200 too.
    """
    try:
        answer = json.loads(body)
        wanted = [(str(tenant), str(run), int(rank)) for tenant, run, rank in answer.get("stacks", ())]
        return wanted if isinstance(answer["accepted"], int) else None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


class Outcomes:
    """Counter of records by outcome (sent, failed, refused), which logs each change of the outcome."""

    def __init__(self, registry: Registry) -> None:
        self._counter = registry.metric(m.FLOPWATCH_LEDGER_RECORDS_SENT_TOTAL)
        for outcome in ("sent", "failed", "refused"):
            self._counter.add(outcome, by=0)
        self.state = "nothing sent yet"

    def add(self, outcome: str, count: int, detail: str = "") -> None:
        """Add `count` records to the counter of an outcome. `detail` is for the log."""
        self._counter.add(outcome, by=count)
        if outcome != self.state:
            level = logging.INFO if outcome == "sent" else logging.ERROR
            log.log(level, "ledger records %s%s", outcome, detail and f": {detail}")
            self.state = outcome


class Embedded:
    """Ledger inside this exporter, and the source of its run families in /metrics."""

    name = "ledger"
    pending = False  # records to send again

    def __init__(self, store: "Store", outcomes: Outcomes, now: Callable[[], float] = time.time) -> None:
        self.store, self._outcomes, self._now = store, outcomes, now
        self.wanted: list[RankKey] = []  # ranks whose stacks it requests

    def take(self, key: AttemptKey, records: list[Record], *, again: bool = False) -> bool:
        """Apply records. Return True if they were accepted or refused for good, False if they must be sent again."""
        try:
            self.wanted += self.store.apply(records)
        except RecordError as error:
            self._outcomes.add("refused", len(records), str(error))
            return True
        except Exception as error:
            self._outcomes.add("failed", len(records), f"{type(error).__name__}: {error}")
            return False
        self._outcomes.add("sent", len(records))
        return True

    def flush(self, *, last: bool = False) -> None:
        """Do nothing, because no record is pending."""

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def ask(self, deadline: float) -> Reading:
        """Return the samples of the run families as they are now."""
        began, now = time.monotonic(), self._now()
        *_, samples = self.store.families(now)
        return Reading(samples, duration=time.monotonic() - began, at=now)


class Remote:
    """Client of a remote ledger. Per run, this host sends about one request in `interval` seconds, at random times.

    A change that an incident may begin with is sent at once: a step becomes overdue, a process ends, an Xid, a port.
    """

    def __init__(
        self,
        url: str,
        token_file: Path | None,
        spool: Path,
        outcomes: Outcomes,
        *,
        ca_file: Path | None = None,
        interval: float = URL_INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url.rstrip("/") + "/v1/snapshots"
        self._token_file = token_file
        self._spool, self._outcomes, self._interval, self._clock = spool, outcomes, interval, clock
        self._next: dict[tuple[str, str], float] = {}
        self._states: dict[AttemptKey, tuple[object, StepTrend]] = {}  # last ones of attempts
        place = urlsplit(self._url)
        self._connection = KeptConnection(place.netloc.rpartition("@")[2], place.scheme == "https", ca_file)
        self._backoff = self._retry_at = self._took = 0.0  # _took: seconds that the last answer took
        self.pending = self._spooled()
        self.wanted: list[RankKey] = []  # ranks whose stacks it requests

    def take(self, key: AttemptKey, records: list[Record], *, again: bool = False) -> bool:
        """Keep the newest records of an attempt until `flush` sends them, and return True.

        Final records, and all while the ledger is unreachable, are also on disk. `again`: only the evidence is new.
        """
        *before, last = self.pending.get(key, records)
        if again and last["t"] >= records[-1]["t"]:
            entries = evidence.joined(last.get("evidence", []), records[-1].get("evidence", []))
            records = [*before, {**last, "evidence": entries}]
        self.pending[key] = records
        self._next.setdefault(key[:2], self._clock() + random.uniform(0, self._interval))
        state = urgent_state(records[-1])
        last_state, trend = self._states.pop(key, (state, StepTrend()))
        self._states[key] = state, trend
        while len(self._states) > MAX_PENDING:
            del self._states[next(iter(self._states))]
        if last_state != state:
            self._next[key[:2]] = min(self._next[key[:2]], self._clock() + random.uniform(0, URGENT))
            # Else a ledger that was away for a moment would take this host for gone.
            self._retry_at = min(self._retry_at, self._clock() + random.uniform(0, AGAIN))
        if self._took < BUSY and trend.is_early(records[-1], self._clock()):
            records[-1]["early"], self._next[key[:2]] = True, self._clock()
        if self._backoff > 0 or "status" in records[-1] or "gone" in records[-1]:
            self._write(key)
        while len(self.pending) > MAX_PENDING:
            oldest = next(iter(self.pending))
            self._outcomes.add("refused", len(self.pending[oldest]), "the spool is full, the oldest is dropped")
            self._forget(oldest)
        return True

    def flush(self, *, last: bool = False) -> None:
        """Send pending records of runs that are due (`last`: of all runs). Writes what could not be sent to disk."""
        clock = self._clock()
        if clock < self._retry_at and not last:
            return
        runs: dict[tuple[str, str], list[AttemptKey]] = {}
        for key in self.pending:
            runs.setdefault(key[:2], []).append(key)
        for run in [run for run in self._next if run not in runs and self._next[run] < clock]:
            del self._next[run]
        failed = False
        for run, keys in runs.items():
            if last or self._next.get(run, clock) <= clock:
                failed = failed or not self._send(keys, STOP_TIMEOUT if last else URL_TIMEOUT)
                self._next[run] = clock + random.uniform(*SPREAD) * self._interval
            if failed:
                for key in self.pending.keys() & keys:
                    self._write(key)
        if failed:
            self._backoff = min(URL_BACKOFF_MAX, max(self._interval, 2 * self._backoff))
            self._retry_at = clock + random.uniform(0.5, 1.5) * self._backoff

    def _send(self, keys: list[AttemptKey], timeout: float) -> bool:
        """Send records. Return True if they were accepted or refused for good, False if they must be sent again."""
        began = self._clock()
        records = sorted((record for key in keys for record in self.pending[key]), key=lambda record: record["t"])
        try:
            status, body = self._post(json.dumps(records).encode(), timeout)
        except (OSError, ValueError) as error:
            self._outcomes.add("failed", len(records), f"{self._url}: {error}")
            return False
        self._took = self._clock() - began
        detail = f"{self._url} answers {status}: {body}"
        wanted = _wanted(body) if 200 <= status < 300 else None
        if status == 413 and len(keys) > 1:
            half = len(keys) // 2
            return self._send(keys[:half], timeout) and self._send(keys[half:], timeout)
        if wanted is not None:
            self.wanted += wanted
            self._outcomes.add("sent", len(records))
        elif status in (400, 413, 422):
            self._outcomes.add("refused", len(records), detail)
        else:
            hint = "; no ledger answers so, check --ledger" if 200 <= status < 300 else ""
            self._outcomes.add("failed", len(records), detail + hint)
            return False
        self._backoff = 0.0
        for key in keys:
            self._forget(key)
        return True

    def _post(self, body: bytes, timeout: float) -> tuple[int, str]:
        """Return the status and the first bytes of the response. Raises OSError or ValueError without a response."""
        place, headers = urlsplit(self._url), {"Content-Type": "application/json"}
        if self._token_file is not None:
            headers["Authorization"] = f"Bearer {self._token_file.read_text().strip()}"
        if user := place.netloc.rpartition("@")[0]:
            headers["Authorization"] = f"Basic {b64encode(unquote(user).encode()).decode()}"
        response, answer = self._connection.post(place.path, body, headers, timeout, 500)
        return response.status, answer.decode(errors="replace")

    def _spooled(self) -> dict[AttemptKey, list[Record]]:
        pending: dict[AttemptKey, list[Record]] = {}
        for path in sorted(self._spool.glob("*.json")):
            try:
                records = json.loads(path.read_bytes())
                pending[records[0]["tenant"], records[0]["run"], records[0]["attempt"]] = records
            except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
                log.error("spool file ignored path=%s error=%r", path, str(error))
        return pending

    def _path(self, key: AttemptKey) -> Path:
        return self._spool / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.json"

    def _write(self, key: AttemptKey) -> None:
        try:
            self._spool.mkdir(parents=True, exist_ok=True)
            replace_file(self._path(key), json.dumps(self.pending[key]))
        except OSError as error:
            self._outcomes.add("failed", 0, f"the spool is not writable: {error}")

    def _forget(self, key: AttemptKey) -> None:
        self.pending.pop(key, None)
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            log.error("spool file not deleted error=%r", str(error))


class StepTrend:
    """Measured steps of a host's ranks in the last three minutes, which decide whether a record is sent early."""

    def __init__(self) -> None:
        self._samples, self._sampled, self._paid = [(0.0, 0.0)], -math.inf, -math.inf  # steps, and their seconds

    def is_early(self, record: Record, clock: float) -> bool:
        """Add a record at `clock`. Return whether to send it early, because the last steps took longer than before."""
        rows = record.get("waits", ())
        if not rows or clock < self._sampled + SAMPLE:
            return False
        self._sampled, steps, seconds = clock, *(math.fsum(row[at] for row in rows) for at in (3, 4))
        (first, first_seconds), (last, last_seconds) = self._samples[0], self._samples[-1]
        if steps < last:  # after a restart of ranks
            self._samples = [(steps, seconds)]
        if steps - last < 2 * len(rows):  # a single step varies too much
            return False
        self._samples = [*self._samples[-SAMPLES:], (steps, seconds)]
        usual, now = (last_seconds - first_seconds) * (steps - last), (seconds - last_seconds) * (last - first)
        paid = max(self._paid, clock - MAX_EARLY * EARLY_EVERY) + EARLY_EVERY
        early = paid <= clock and now > LONGER * usual and seconds - last_seconds < LONG * (steps - last)
        self._paid = paid if early else self._paid
        return early


def urgent_state(record: Record) -> object:
    """Return what the ledger should know at once: how late a step is, signs of ranks, and parts that broke."""
    late, stage, signs = record.get("open_step"), 0, list[object]()
    if late is not None and late["seconds"] >= late["overdue_after"]:
        seconds, limit = late["seconds"], late["overdue_after"]
        bounds = *(limit + AGAIN * times for times in (1, 2, 3)), 2 * limit, 3 * limit
        stage = 1 + sum(seconds >= bound for bound in bounds)
        signs = [(row[0], *row[3]) for row in late["ranks"] if row[3]] + late.get("ras", [])
    broken = {
        tuple(entry.get(name) for name in ("kind", "gpu", "port", "rank", "detail"))
        for entry in record.get("evidence", [])
        if entry["kind"] in URGENT_KINDS
    }
    return stage, signs, broken, record.get("gone", False), len(record.get("stacks", ()))


class Forward:
    """Thread that checks the ranks every second and sends the records of changed attempts to the ledger.

    It calls `read`, which must not block, to have the GPUs read for a late step.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        ledger: Embedded | Remote,
        tick: float = TICK,
        memory: StateFile | None = None,
        clock: Callable[[], float] = time.monotonic,
        read: Callable[[], object] = lambda: None,
    ) -> None:
        self._telemetry, self._ledger, self._tick = telemetry, ledger, tick
        self._read, self._read_at = read, -math.inf
        self._memory, self._clock, self._saved = memory, clock, clock()  # `memory`: a file
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="forward", daemon=True)

    def start(self) -> None:
        """Restore the evidence of a previous process, and start the thread."""
        if self._memory is not None and (state := self._memory.load()):
            try:
                self._telemetry.restore(state)
            except (LookupError, TypeError, ValueError) as error:
                log.warning("saved evidence ignored error=%r", f"{type(error).__name__}: {error}")
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread once it has sent pending records, or after two seconds."""
        self._stopping.set()
        self._telemetry.pushed.set()
        self._thread.join(timeout=2)

    def _loop(self) -> None:
        while not self._stopped():
            self._send_changes()
        self._send_changes(last=True)

    def _stopped(self) -> bool:
        """Wait for the next tick, or without ranks and records for a push. Return whether `stop` was called."""
        if self._telemetry.summary() or self._ledger.pending:
            return self._stopping.wait(self._tick)
        self._telemetry.pushed.wait(SAVE_INTERVAL)
        self._telemetry.pushed.clear()
        return self._stopping.is_set()

    def _send_changes(self, *, last: bool = False) -> None:
        try:
            self._telemetry.check()
            if self._clock() - self._read_at >= READ_EVERY and self._telemetry.needs_reading():
                self._read_at = self._clock()
                self._read()
            for key, (version, records) in self._telemetry.due().items():
                if self._ledger.take(key, records, again=version < 0):
                    self._telemetry.delivered(key, version)
            self._ledger.flush(last=last)
            self._telemetry.stacks.add(self._ledger.wanted)
            self._ledger.wanted = []
            if self._memory is not None and (last or self._clock() - self._saved >= SAVE_INTERVAL):
                self._saved = self._clock()
                self._memory.save(self._telemetry.state())
        except Exception:
            # The thread must survive any bug. Scrapes and pushes do not depend on it.
            log.exception("forwarding failed")
