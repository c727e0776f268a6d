"""Parser of the ledger's record: one JSON object about one run, sent by an exporter or read from a recorded history.

    {"t": unix seconds, "run", "tenant", "attempt", "source", "event": "submitted" | "start" | "snapshot" | "finish",
     "activity_seconds": {activity: seconds}, "open_step_seconds", "step", "committed_step", "restored_step",
     "rank", "gpus", "model_flops", "peak_flops", "started", "submitted", "status", "gone", "pid", "overlaps",
     "waits": [[rank, place, started, steps, seconds, wait, tokens, [[group, ranks, wait]]]],
     "ranks", "step_p99", "open_step": {"t", "seconds", "overdue_after",
                   "ranks": [[rank, default, [[group, ranks, called]], [sign], [utilization, power, usual, tensor]]]},
     "evidence": [{"kind", "t", "count", "gpu", "port", "rank", "detail"}]}

Required are t, run and event, and attempt for a start or snapshot. A finish without attempt ends the current attempt.
`source` is the reporting host. `pid` is true if the host knows one of the run's processes, and `overlaps` while another
attempt of the run is live on the host. `activity_seconds` and `model_flops` are cumulative for one process, the host's
lowest live rank. `step` of a start is the step restored from a checkpoint. `waits` has cumulative seconds of each rank,
and is absent unless all ranks of the host are measured. Its last field, which may be absent, has the wait in each
process group, by the group's kind and ranks (`flopwatch.catalogue.ranks`). `ranks` is the text of the host's ranks.
`open_step` is absent unless the open step is late. It has the time of the report, for how long the step is open, the
collectives that each rank has called in the default process group and in others, and its signs and GPU
(`flopwatch.verdicts.hangs`). `evidence` has what the host observed: its count so far and the time of the last. Unknown
fields are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import fsum, inf
from typing import Any, NamedTuple

from flopwatch.catalogue.ranks import MAX_LENGTH, count_of
from flopwatch.ledger.attribution import Evidence

# Activities of a source; any other name counts as `other`.
ACTIVITIES: tuple[str, ...] = ("step", "startup", "compile", "data_stall", "checkpoint_save", "checkpoint_restore")
ACTIVITIES += ("evaluation", "generation", "other")
STATUSES = ("completed", "stopped", "preempted", "resized", "failed")
EVENTS = ("submitted", "start", "snapshot", "finish")
MAX_EVIDENCE = 64  # entries of a record
_RUN_NAME = re.compile(r"[A-Za-z0-9._:/@+-]{1,128}")
_NUMBERS = ("step", "committed_step", "rank", "gpus", "model_flops", "peak_flops", "open_step_seconds", "step_p99")
_WAIT_FIELDS = ("rank", "place", "started", "steps", "seconds", "wait", "tokens")
_MAX_NAME_LENGTH = 512
_MAX_NUMBER = 1e30
_MAX_RANKS = 64
_MAX_PLACE_LENGTH = 64
_MAX_GROUPS, _MAX_SIGNS = 16, 8  # of a rank
_CALL_FIELDS, _GPU_FIELDS = 5, 4
_MAX_DELAY = 300.0  # seconds: evidence after an attempt's last report is sent with that report
_MAX_TEXT_LENGTHS = {"kind": 64, "gpu": 128, "port": 128, "detail": 200}  # of evidence; longer text is cut

RunKey = tuple[str, str]  # tenant, run


class RankWait(NamedTuple):
    """Totals of one rank over its measured steps: steps, their seconds, seconds waited for other ranks, and tokens.

    `groups` has kind, ranks and seconds waited of each process group, and is empty if they are not known.
    """

    rank: int
    place: str  # in the pipeline
    started: float  # start of the process
    steps: float
    seconds: float
    wait: float
    tokens: float
    groups: tuple[tuple[str, str, float], ...] = ()


class RankCall(NamedTuple):
    """Collectives that a rank has called: in the default process group, None if unknown, and by kind and ranks.

    `signs` and `gpu` are those of `flopwatch.verdicts.hangs`.
    """

    rank: int
    default: float | None
    groups: tuple[tuple[str, str, float], ...]
    signs: tuple[str, ...]
    gpu: tuple[float | None, ...] | None = None


class OpenStep(NamedTuple):
    """Late step of a host as of Unix time `t`: for how long it is open, after how long it is overdue, and its ranks."""

    t: float
    seconds: float
    overdue_after: float
    ranks: tuple[RankCall, ...]


class RecordError(ValueError):
    """Exception raised for a malformed record. The message names the field and the reason."""


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """Parsed record about one run. Absent `tenant`, `attempt` and `source` are empty, other absent values are None."""

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
    step_p99: float | None = None
    ranks: str = ""
    open_step: OpenStep | None = None
    pid: bool = False
    overlaps: bool = False

    @classmethod
    def parse(cls, line: object) -> LedgerRecord:
        """Return the record in `line`, a decoded JSON object. Raises RecordError if it is malformed."""
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
        parts |= {"ranks": _ranks(line), "open_step": _open_step(line.get("open_step"))}
        parts |= {flag: line.get(flag) is True for flag in ("pid", "overlaps")}
        return cls(stamp, run, tenant, attempt, source, event, status, gone, activity, **parts)

    @property
    def key(self) -> RunKey:
        """Return the run's identity: tenant and run name."""
        return self.tenant, self.run

    @property
    def age(self) -> float:
        """Return the seconds that the reporting process has lived: the sum of its activities, 0 if they are absent."""
        return fsum(self.activity.values()) if self.activity is not None else 0.0

    @property
    def born(self) -> float | None:
        """Return when the reporting process started, in Unix time, or None if the record does not show it."""
        if self.started is not None or self.activity is None or self.gone:  # with `gone`, t is the exporter's
            return self.started
        return self.t - self.age

    @property
    def end(self) -> str | None:
        """Return how the process ended: its status, `gone` if it vanished, or None if it has not ended."""
        return self.status if self.status is not None else "gone" if self.gone else None


def _text(line: Mapping[str, Any], name: str) -> str:
    """Return a text field of a record, empty if absent. Integers become text. Raises RecordError for other types."""
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
    """Return a numeric field of a record, None if absent. Raises RecordError if it is negative but not `signed`."""
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
    if value is None:
        return None
    if not isinstance(value, list) or len(value) > _MAX_RANKS:
        raise RecordError(f"waits: not a list of at most {_MAX_RANKS} ranks")
    waits = []
    for number, item in enumerate(value, 1):
        if not isinstance(item, list) or not len(_WAIT_FIELDS) <= len(item) <= len(_WAIT_FIELDS) + 1:
            raise RecordError(f"waits {number}: not [{', '.join(_WAIT_FIELDS)}]")
        fields = dict(zip(_WAIT_FIELDS, item, strict=False))
        try:
            place = _text(fields, "place")[:_MAX_PLACE_LENGTH]
            names = [name for name in _WAIT_FIELDS if name != "place"]
            numbers = {name: _number(fields, name, signed=name == "started") for name in names}
        except RecordError as error:
            raise RecordError(f"waits {number}: {error}") from None
        given = {name: value for name, value in numbers.items() if value is not None}
        if len(given) < len(numbers):
            raise RecordError(f"waits {number}: a number is missing")
        groups = _groups(item[-1], f"waits {number}") if len(item) > len(_WAIT_FIELDS) else ()
        waits.append(RankWait(int(given.pop("rank")), place, **given, groups=groups))
    if len({wait.rank for wait in waits}) < len(waits):
        raise RecordError("waits: a rank is listed twice")
    return tuple(waits)


def _ranks(line: Mapping[str, Any]) -> str:
    text = _text(line, "ranks")
    try:
        if text and (len(text) > MAX_LENGTH or count_of(text) > _MAX_RANKS):
            raise ValueError(f"not the text of at most {_MAX_RANKS} ranks")
    except ValueError as error:
        raise RecordError(f"ranks: {error}") from None
    return text


def _open_step(value: object) -> OpenStep | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not isinstance(rows := value.get("ranks"), list) or len(rows) > _MAX_RANKS:
        raise RecordError(f"open_step: not an object with at most {_MAX_RANKS} ranks")
    try:
        t = _number(value, "t", signed=True)
        seconds, limit = _number(value, "seconds"), _number(value, "overdue_after")
        if t is None or seconds is None or limit is None:
            raise RecordError("a number is missing")
        ranks = tuple(_rank_call(row) for row in rows)
    except RecordError as error:
        raise RecordError(f"open_step: {error}") from None
    return OpenStep(t, seconds, limit, ranks)


def _rank_call(item: object) -> RankCall:
    if not isinstance(item, list) or len(item) != _CALL_FIELDS or not isinstance(item[3], list):
        raise RecordError("a rank is not [rank, default, groups, signs, gpu]")
    rank, default = _number({"rank": item[0]}, "rank"), _number({"default": item[1]}, "default")
    if rank is None:
        raise RecordError("rank: missing")
    signs = tuple(_text({"sign": sign}, "sign") for sign in item[3])
    if len(signs) > _MAX_SIGNS or not all(sign.isidentifier() for sign in signs):
        raise RecordError(f"rank {rank:g}: signs: not at most {_MAX_SIGNS} words")
    gpu = item[4]
    if gpu is not None:
        if not isinstance(gpu, list) or len(gpu) != _GPU_FIELDS:
            raise RecordError(f"rank {rank:g}: gpu: not [utilization, power, usual, tensor]")
        gpu = tuple(_number({"gpu": number}, "gpu") for number in gpu)
    return RankCall(int(rank), default, _groups(item[2], f"rank {rank:g}"), signs, gpu)


def _groups(value: object, where: str) -> tuple[tuple[str, str, float], ...]:
    if not isinstance(value, list) or len(value) > _MAX_GROUPS:
        raise RecordError(f"{where}: not a list of at most {_MAX_GROUPS} groups")
    groups = []
    for item in value:
        if not isinstance(item, list) or len(item) != 3 or not all(isinstance(text, str) for text in item[:2]):
            raise RecordError(f"{where}: a group is not [kind, ranks, number]")
        kind, ranks, _ = item
        try:
            amount = _number({"number": item[2]}, "number")
            if len(ranks) > MAX_LENGTH or count_of(ranks) == 0 or not kind.isidentifier() or len(kind) > MAX_LENGTH:
                raise ValueError(f"{kind[:40]!r} {ranks[:40]!r}")
        except (RecordError, ValueError) as error:
            raise RecordError(f"{where}: group: {error}") from None
        if amount is None:
            raise RecordError(f"{where}: group: the number is missing")
        groups.append((kind, ranks, amount))
    return tuple(groups)


def _evidence(value: object, stamp: float, host: str) -> tuple[Evidence, ...]:
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
    """Return the text with `?` for each unprintable character, such as the escape codes of a terminal."""
    return "".join(character if character.isprintable() else "?" for character in str(text))
