"""The ledger's record: one JSON object, a line of a history or a snapshot on the wire. This is its only parser.

    {"t": unix seconds, "run", "tenant", "attempt", "source", "event": "submitted" | "start" | "snapshot" | "finish",
     "activity_seconds": {activity: seconds}, "open_step_seconds", "step", "committed_step", "restored_step",
     "rank", "gpus", "model_flops", "peak_flops", "started", "submitted", "status", "gone",
     "waits": [[rank, place, started, steps, seconds, wait, tokens]],
     "evidence": [{"kind", "t", "count", "gpu", "port", "rank", "detail"}]}

Required are t, run, event and attempt. A submission needs no attempt, nor does a finish by hand, which ends the run's
current attempt. Unknown fields are ignored. `activity_seconds` and `model_flops` are cumulative for the process behind
the source (its lowest live rank). `step` on a start is the last completed step restored.

`waits` holds what each rank of the source has waited for others in the measured steps, with its place in the pipeline,
its process start and its tokens (`flopwatch.ledger.stragglers`). It is cumulative, and absent unless all are measured.

`evidence` holds what the source's host observed that may explain a loss (`flopwatch.ledger.attribution`): for each kind
and place the count so far and the time of the last one. Unknown kinds are stored and explain nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import fsum, inf
from typing import Any

from flopwatch.ledger.attribution import Evidence
from flopwatch.ledger.stragglers import RankWait

# Activities of a source; any other name counts as `other`.
ACTIVITIES: tuple[str, ...] = ("step", "startup", "compile", "data_stall", "checkpoint_save", "checkpoint_restore")
ACTIVITIES += ("evaluation", "generation", "other")
STATUSES = ("completed", "stopped", "preempted", "resized", "failed")
EVENTS = ("submitted", "start", "snapshot", "finish")
MAX_EVIDENCE = 64  # entries of a record
_RUN_NAME = re.compile(r"[A-Za-z0-9._:/@+-]{1,128}")
_NUMBERS = ("step", "committed_step", "rank", "gpus", "model_flops", "peak_flops", "open_step_seconds")
_WAIT_FIELDS = ("rank", "place", "started", "steps", "seconds", "wait", "tokens")
_MAX_NAME_LENGTH = 512
_MAX_NUMBER = 1e30
_MAX_RANKS = 64
_MAX_PLACE_LENGTH = 64
_MAX_DELAY = 300.0  # seconds: evidence after an attempt's last report is sent with that report
_MAX_TEXT_LENGTHS = {"kind": 64, "gpu": 128, "port": 128, "detail": 200}  # of evidence; longer text is cut

RunKey = tuple[str, str]  # tenant, run


class RecordError(ValueError):
    """Malformed record. The message names the field and the reason."""


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """One parsed record. An absent field is None."""

    t: float
    run: str
    tenant: str
    attempt: str
    source: str
    event: str
    status: str | None
    gone: bool
    activity: dict[str, float] | None
    step: float | None
    committed_step: float | None
    restored_step: float | None
    rank: float | None
    gpus: float | None
    model_flops: float | None
    peak_flops: float | None
    started: float | None
    submitted: float | None
    open_step_seconds: float | None
    waits: tuple[RankWait, ...] | None = None
    evidence: tuple[Evidence, ...] = ()

    @classmethod
    def parse(cls, line: object) -> LedgerRecord:
        """Return the record in a decoded JSON object. Raises RecordError."""
        if not isinstance(line, Mapping):
            raise RecordError("not a JSON object")
        stamp = _number(line, "t", signed=True)
        if stamp is None:
            raise RecordError("t: missing")
        event = _text(line, "event")
        if event not in EVENTS:
            raise RecordError(f"event: {event!r} is not one of {', '.join(EVENTS)}" if event else "event: missing")
        run = _text(line, "run")
        if not run:
            raise RecordError("run: missing")
        if not _RUN_NAME.fullmatch(run):
            raise RecordError(f"run: {run!r} does not match {_RUN_NAME.pattern}")
        attempt = _text(line, "attempt")
        if not attempt and event in ("start", "snapshot"):
            raise RecordError("attempt: missing")
        status = (_text(line, "status") or "completed") if event == "finish" else None
        if status is not None and status not in STATUSES:
            raise RecordError(f"status: {status!r} is not one of {', '.join(STATUSES)}")
        gone = line.get("gone", False)
        if not isinstance(gone, bool):
            raise RecordError("gone: not true or false")
        tenant, source, start = _text(line, "tenant"), _text(line, "source"), event == "start"
        activity = {} if start else _activity(line.get("activity_seconds"))  # a start is the snapshot of a new process
        numbers = {"started": stamp if start else _number(line, "started", signed=True)}
        numbers["submitted"] = stamp if event == "submitted" else _number(line, "submitted", signed=True)
        numbers["restored_step"] = _number(line, "step" if start else "restored_step")
        numbers |= {name: _number(line, name) for name in _NUMBERS}
        waits, evidence = _waits(line.get("waits")), _evidence(line.get("evidence"), stamp, source)
        parts: dict[str, Any] = {"waits": waits, "evidence": evidence, **numbers}
        return cls(stamp, run, tenant, attempt, source, event, status, gone, activity, **parts)

    @property
    def key(self) -> RunKey:
        """Return the identity of the run."""
        return self.tenant, self.run

    @property
    def age(self) -> float:
        """Return the age of the process in seconds, by its own clock."""
        return fsum(self.activity.values()) if self.activity is not None else 0.0

    @property
    def born(self) -> float | None:
        """Return the process start in Unix time; None if the record has none."""
        if self.started is not None or self.activity is None or self.gone:  # of `gone`, t is the exporter's
            return self.started
        return self.t - self.age

    @property
    def end(self) -> str | None:
        """Return how the source ended with this record; None if it did not."""
        return self.status if self.status is not None else "gone" if self.gone else None


def _text(line: Mapping[str, Any], name: str) -> str:
    """Return a text field, empty if absent. Raises RecordError."""
    value = line.get(name)
    if value is None:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        value = f"{value:d}" if abs(value) < 1 << 64 else value  # an attempt may be named by a number
    if not isinstance(value, str) or len(value) > _MAX_NAME_LENGTH:
        raise RecordError(f"{name}: not a string of at most {_MAX_NAME_LENGTH} characters")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise RecordError(f"{name}: half a character (a lone surrogate), which cannot be stored")
    return value


def _number(line: Mapping[str, Any], name: str, *, signed: bool = False) -> float | None:
    """Return a numeric field, None if absent. Raises RecordError."""
    value = line.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not -inf < value < inf:
        raise RecordError(f"{name}: {value!r} is not a finite number")
    if abs(value) > _MAX_NUMBER:
        raise RecordError(f"{name}: larger than {_MAX_NUMBER:g}")
    if value < 0 and not signed:
        raise RecordError(f"{name}: {value!r} is negative")
    return float(value)


def _activity(value: object) -> dict[str, float] | None:
    """Return seconds per activity. Raises RecordError."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RecordError("activity_seconds: not an object of seconds per activity")
    seconds: dict[str, float] = {}
    for name in value:
        try:
            number = _number(value, name)
        except RecordError as error:
            raise RecordError(f"activity_seconds: {error}") from None
        activity = name if name in ACTIVITIES else "other"
        if number is not None:
            seconds[activity] = seconds.get(activity, 0.0) + number
    return seconds


def _waits(value: object) -> tuple[RankWait, ...] | None:
    """Return the waits of each rank. Raises RecordError."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) > _MAX_RANKS:
        raise RecordError(f"waits: not a list of at most {_MAX_RANKS} ranks")
    waits = []
    for number, item in enumerate(value, 1):
        if not isinstance(item, list) or len(item) != len(_WAIT_FIELDS):
            raise RecordError(f"waits {number}: not [{', '.join(_WAIT_FIELDS)}]")
        fields = dict(zip(_WAIT_FIELDS, item, strict=True))
        try:
            place = _text(fields, "place")[:_MAX_PLACE_LENGTH]
            names = [name for name in _WAIT_FIELDS if name != "place"]
            numbers = {name: _number(fields, name, signed=name == "started") for name in names}
        except RecordError as error:
            raise RecordError(f"waits {number}: {error}") from None
        given = {name: value for name, value in numbers.items() if value is not None}
        if len(given) < len(numbers):
            raise RecordError(f"waits {number}: a number is missing")
        waits.append(RankWait(int(given.pop("rank")), place, **given))
    if len({wait.rank for wait in waits}) < len(waits):
        raise RecordError("waits: a rank is listed twice")
    return tuple(waits)


def _evidence(value: object, stamp: float, host: str) -> tuple[Evidence, ...]:
    """Return the evidence of a host in a record with this stamp. Raises RecordError."""
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_EVIDENCE:
        raise RecordError(f"evidence: not a list of at most {MAX_EVIDENCE} entries")
    items = []
    for number, item in enumerate(value, 1):
        if not isinstance(item, Mapping):
            raise RecordError(f"evidence {number}: not an object")
        try:
            seen, count, rank = _number(item, "t", signed=True), _number(item, "count"), _number(item, "rank")
            texts = {name: printable(_text(item, name))[:most] for name, most in _MAX_TEXT_LENGTHS.items()}
        except RecordError as error:
            raise RecordError(f"evidence {number}: {error}") from None
        if seen is None or not texts["kind"]:
            raise RecordError(f"evidence {number}: {'t' if seen is None else 'kind'}: missing")
        seen = min(seen, stamp + _MAX_DELAY)  # evidence of the future is a wrong clock
        count, place = 1.0 if count is None else count, None if rank is None else int(rank)
        items.append(Evidence(t=seen, count=count, host=host, rank=place, **texts))
    return tuple(items)


def printable(text: object) -> str:
    """Return the text with a question mark for each character that a terminal would interpret."""
    return "".join(character if character.isprintable() else "?" for character in str(text))
