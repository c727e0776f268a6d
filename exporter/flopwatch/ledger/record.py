"""The ledger's one record: a line of a history, a snapshot on the wire. A JSON object, checked here and nowhere else.

    {"t": unix seconds, "run", "tenant", "attempt", "source", "event": "submitted" | "start" | "snapshot" | "finish",
     "activity_seconds": {activity: seconds}, "open_step_seconds", "step", "committed_step", "restored_step",
     "rank", "gpus", "model_flops", "peak_flops", "started", "submitted", "status", "gone",
     "waits": [[rank, place, started, steps, seconds, wait, tokens]],
     "evidence": [{"kind", "t", "count", "gpu", "port", "rank", "detail"}]}

`activity_seconds` and `model_flops` are cumulative for the process behind the source (its lowest live rank);
`step` on a start is the last completed step restored. Only t, run, event and attempt are required, the last not for
a submission, nor for a finish by hand, which ends the run's current attempt. Unknown fields are ignored.

`waits` is what each of its ranks has waited for others in the steps in which that was measured, with its place in the
pipeline, its process's start and its tokens (`flopwatch.ledger.stragglers`); cumulative, and only if all are measured.

`evidence` is what the source's node has seen that may explain a loss (`flopwatch.ledger.attribution`): of each kind and
place how often up to now and when last. Of a kind that is unknown the text is kept, and explains nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import fsum, inf
from typing import Any

from flopwatch.ledger.attribution import Evidence
from flopwatch.ledger.stragglers import Wait

# What a source may say of its time; anything else it says is `other`.
ACTIVITIES = (
    "step",
    "startup",
    "compile",
    "data_stall",
    "checkpoint_save",
    "checkpoint_restore",
    "evaluation",
    "generation",
    "other",
)
STATUSES = ("completed", "stopped", "preempted", "resized", "failed")
EVENTS = ("submitted", "start", "snapshot", "finish")
_RUN_NAME = re.compile(r"[A-Za-z0-9._:/@+-]{1,128}")
_NAME_LENGTH = 512
_MOST = 1e30
MOST_EVIDENCE = 64  # entries of a record
_MOST_RANKS = 64
_PLACE_LENGTH = 64
_LATE = 300.0  # seconds: what is seen after an attempt's last word comes with that
_EVIDENCE_TEXT = {"kind": 64, "gpu": 128, "port": 128, "detail": 200}  # characters kept

Key = tuple[str, str]  # tenant, run


class RecordError(ValueError):
    """A record that cannot be used; the message names the field and says why."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record; what it does not say is None."""

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
    waits: tuple[Wait, ...] | None = None
    evidence: tuple[Evidence, ...] = ()

    @classmethod
    def parse(cls, line: object) -> Record:
        """Return the record in a decoded JSON object; unknown fields are ignored. Raises RecordError."""
        if not isinstance(line, Mapping):
            raise RecordError("not a JSON object")
        stamp = _number(line, "t", signed=True)
        if stamp is None:
            raise RecordError("t: missing")
        event = _text(line, "event")
        if event not in EVENTS:
            raise RecordError(f"event: {event!r} is none of {', '.join(EVENTS)}" if event else "event: missing")
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
            raise RecordError(f"status: {status!r} is none of {', '.join(STATUSES)}")
        gone = line.get("gone", False)
        if not isinstance(gone, bool):
            raise RecordError("gone: not true or false")
        return cls(
            t=stamp,
            run=run,
            tenant=_text(line, "tenant"),
            attempt=attempt,
            source=_text(line, "source"),
            event=event,
            status=status,
            gone=gone,
            # A start is the snapshot of a process that has done nothing yet.
            activity={} if event == "start" else _activity(line.get("activity_seconds")),
            started=stamp if event == "start" else _number(line, "started", signed=True),
            submitted=stamp if event == "submitted" else _number(line, "submitted", signed=True),
            restored_step=_number(line, "step" if event == "start" else "restored_step"),
            **{
                name: _number(line, name)
                for name in ("step", "committed_step", "rank", "gpus", "model_flops", "peak_flops", "open_step_seconds")
            },
            waits=_waits(line.get("waits")),
            evidence=_evidence(line.get("evidence"), stamp, _text(line, "source")),
        )

    @property
    def key(self) -> Key:
        """Return the identity of the run."""
        return self.tenant, self.run

    @property
    def age(self) -> float:
        """Return the seconds the process has lived, by its own clock."""
        return fsum(self.activity.values()) if self.activity is not None else 0.0

    @property
    def born(self) -> float | None:
        """Return when the process started; None if the record does not show one."""
        if self.started is not None or self.activity is None or self.gone:  # gone: t is not the process's own
            return self.started
        return self.t - self.age

    @property
    def end(self) -> str | None:
        """Return how the source ended with this record, if it did."""
        return self.status if self.status is not None else "gone" if self.gone else None


def _text(line: Mapping[str, Any], name: str) -> str:
    value = line.get(name)
    if value is None:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        value = f"{value:d}" if abs(value) < 1 << 64 else value  # an attempt's number is a name too
    if not isinstance(value, str) or len(value) > _NAME_LENGTH:
        raise RecordError(f"{name}: not a string of at most {_NAME_LENGTH} characters")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise RecordError(f"{name}: half a character, which neither a database nor Prometheus takes")
    return value


def _number(line: Mapping[str, Any], name: str, *, signed: bool = False) -> float | None:
    value = line.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not -inf < value < inf:
        raise RecordError(f"{name}: {value!r} is not a finite number")
    if abs(value) > _MOST:
        raise RecordError(f"{name}: larger than {_MOST:g}")
    if value < 0 and not signed:
        raise RecordError(f"{name}: {value!r} is negative")
    return float(value)


def _activity(value: object) -> dict[str, float] | None:
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
        known = name if name in ACTIVITIES else "other"
        if number is not None:
            seconds[known] = seconds.get(known, 0.0) + number
    return seconds


def _waits(value: object) -> tuple[Wait, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) > _MOST_RANKS:
        raise RecordError(f"waits: not a list of at most {_MOST_RANKS} ranks")
    names, found = ("rank", "place", "started", "steps", "seconds", "wait", "tokens"), []
    for number, item in enumerate(value, 1):
        if not isinstance(item, list) or len(item) != len(names):
            raise RecordError(f"waits {number}: not [{', '.join(names)}]")
        told = dict(zip(names, item, strict=True))
        try:
            place = _text(told, "place")[:_PLACE_LENGTH]
            numbers = {name: _number(told, name, signed=name == "started") for name in names if name != "place"}
        except RecordError as error:
            raise RecordError(f"waits {number}: {error}") from None
        known = {name: value for name, value in numbers.items() if value is not None}
        if len(known) < len(numbers):
            raise RecordError(f"waits {number}: a number is missing")
        found.append(Wait(int(known.pop("rank")), place, **known))
    if len({wait.rank for wait in found}) < len(found):
        raise RecordError("waits: a rank is told twice")
    return tuple(found)


def _evidence(value: object, stamp: float, host: str) -> tuple[Evidence, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MOST_EVIDENCE:
        raise RecordError(f"evidence: not a list of at most {MOST_EVIDENCE} entries")
    found = []
    for number, item in enumerate(value, 1):
        if not isinstance(item, Mapping):
            raise RecordError(f"evidence {number}: not an object")
        try:
            seen, count, rank = _number(item, "t", signed=True), _number(item, "count"), _number(item, "rank")
            texts = {name: _printable(_text(item, name))[:most] for name, most in _EVIDENCE_TEXT.items()}
        except RecordError as error:
            raise RecordError(f"evidence {number}: {error}") from None
        if seen is None or not texts["kind"]:
            raise RecordError(f"evidence {number}: {'t' if seen is None else 'kind'}: missing")
        found.append(
            Evidence(
                t=min(seen, stamp + _LATE),  # nobody has seen what is yet to come
                count=1.0 if count is None else count,
                host=host,
                rank=None if rank is None else int(rank),
                **texts,
            )
        )
    return tuple(found)


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)
