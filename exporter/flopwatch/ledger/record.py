"""Record of the ledger: one JSON object about one run, sent by an exporter or read from a recorded history.

The types below are its format (https://jcristharif.com/msgspec/constraints.html). A class with `array_like`, a named
tuple and a tuple are JSON lists. Unknown fields are ignored. Required are t, run and event, and attempt for a start or
snapshot. A finish without attempt ends the current attempt.

`source` is the reporting host. `pid` is true if the host knows one of the run's processes, and `overlaps` while another
attempt of the run is live on the host. `activity_seconds` and `model_flops` are cumulative for one process, the host's
lowest live rank. `work` has sums over the host's processes, and no FLOPs unless all of them count these. `page` is true
if alerts of the run may page. `step` of a start is the step restored from a checkpoint. `waits` has cumulative seconds
of each rank, and is absent unless all ranks of the host are measured. Its groups have the wait in each process group,
by the group's kind and ranks (`flopwatch.catalogue.ranks`). `computing_squares` has for each of these ranks the squares
of the seconds that it did not wait in a step. `ranks` is the text of the host's ranks. `open_step` is absent unless the
open step is late. `stacks` has those that the ledger requested, and when they were taken. `evidence`
has what the host observed: its count so far and the time of the last. `early` is true if longer steps caused it.
"""

from array import array
from collections.abc import Iterable
from functools import cached_property, lru_cache
from itertools import chain
from math import fsum, nan
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, get_args

import msgspec
from msgspec import Meta, Raw, Struct, field

from flopwatch.catalogue.ranks import MAX_LENGTH, count_of
from flopwatch.catalogue.stacks import MAX_STACKS

# Activities of a source; any other name counts as `other`.
ACTIVITIES: tuple[str, ...] = ("step", "startup", "compile", "data_stall", "checkpoint_save", "checkpoint_restore")
ACTIVITIES += ("evaluation", "generation", "other")
WORK = ("tokens", "steps", "step_seconds", "model_flops", "hardware_flops", "step_capacity_flops")
MAX_EVIDENCE = 64  # entries of a record
WAIT, WAIT_TOTALS = 3, 5  # of a process: its wait's place among its totals, and those before the ones of its groups
_MAX_RANKS = 64
_MAX_DELAY = 300.0  # seconds: evidence after an attempt's last report is sent with that report

Event = Literal["submitted", "start", "snapshot", "finish"]
Status = Literal["completed", "stopped", "preempted", "resized", "failed"]
EVENTS: tuple[str, ...] = get_args(Event)
STATUSES: tuple[str, ...] = get_args(Status)

Number = Annotated[float, Meta(ge=0, le=1e30)]
Stamp = Annotated[float, Meta(ge=-1e30, le=1e30)]
Rank = Annotated[int, Meta(ge=0, le=1 << 31)]
Text = Annotated[str, Meta(max_length=512)]
RunName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:/@+-]{1,128}\Z")]
Word = Annotated[str, Meta(max_length=64, pattern=r"^[^\W\d]\w*\Z")]
Ranks = Annotated[str, Meta(max_length=MAX_LENGTH)]  # as in flopwatch.catalogue.ranks
Kind = Annotated[str, Meta(max_length=MAX_LENGTH)]
Groups = Annotated[tuple[tuple[Kind, Ranks, Number], ...], Meta(max_length=16)]
_T = TypeVar("_T")
if TYPE_CHECKING:
    Nullable = Annotated[_T, "never None once a record is parsed"]
    Name = str
else:  # what a sender may write: null for what is absent, and a number for a name
    Nullable = _T | None
    Name = Text | Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]

RunKey = tuple[str, str]  # tenant, run
RankKey = tuple[str, str, int]  # tenant, run, rank
RankStack = tuple[Rank, Stamp, str]  # rank, Unix time, and the text of its threads' stacks


class RankProcess(NamedTuple):
    """Process of a rank: its place in the pipeline, its start, and kind and ranks of its process groups, if known."""

    rank: int
    place: str
    started: float
    groups: tuple[tuple[str, str], ...]


class HostWaits(Struct, frozen=True, gc=False):
    """Processes of a host, and the bytes of their totals over their measured steps, as doubles.

    Each process has steps, their seconds, tokens, seconds waited for other ranks, the squares of those it computed (NaN
    if unknown), and seconds waited in each of its groups. Records with the same processes share one object.
    """

    processes: tuple[RankProcess, ...]
    totals: bytes


class WaitRow(Struct, array_like=True, frozen=True, gc=False):
    """Rank in a record's `waits`. More values, of a newer exporter, are ignored."""

    rank: Rank
    place: Text
    started: Stamp
    steps: Number
    seconds: Number
    wait: Number
    tokens: Number
    groups: Groups = ()


class RankCall(NamedTuple):
    """Collectives that a rank has called: in the default process group, None if unknown, and by kind and ranks.

    `signs` and `gpu` are those of `flopwatch.verdicts.hangs`.
    """

    rank: Rank
    default: Number | None
    groups: Groups
    signs: Annotated[tuple[Word, ...], Meta(max_length=8)]
    gpu: tuple[Number | None, Number | None, Number | None, Number | None] | None


class OpenStep(Struct, frozen=True):
    """Late step of a host as of Unix time `t`: for how long it is open, after how long it is overdue, and its ranks.

    `ras` has the ranks of communicators, and those of them that have started the fewest collectives.
    """

    t: Stamp
    seconds: Number
    overdue_after: Number
    ranks: Annotated[tuple[RankCall, ...], Meta(max_length=_MAX_RANKS)]
    ras: Annotated[tuple[tuple[Ranks, Ranks], ...], Meta(max_length=_MAX_RANKS)] = ()


class Evidence(Struct, frozen=True):
    """Observation on a host, such as an Xid or a link that is down: its count so far and the Unix time of the last."""

    kind: Annotated[Text, Meta(min_length=1)]
    t: Stamp
    count: Number = 1.0
    host: Text = ""
    gpu: Text = ""
    port: Text = ""
    rank: Rank | None = None
    detail: Text = ""

    def of(self, host: str, latest: float) -> "Evidence":
        """Return what `host` observed, at `latest` (Unix time) at the latest, with short printable texts."""
        kind, gpu, port, detail = map(printable, (self.kind, self.gpu, self.port, self.detail))
        return Evidence(
            kind[:64], min(self.t, latest), self.count, host, gpu[:128], port[:128], self.rank, detail[:200]
        )


class RecordError(ValueError):
    """Exception raised for a malformed record. The message names the field and the reason."""


class LedgerRecord(Struct, dict=True):
    """Parsed record about one run. Absent `tenant`, `attempt` and `source` are empty, other absent values are None."""

    t: Stamp
    run: RunName
    event: Event
    tenant: Nullable[Name] = ""
    attempt: Nullable[Name] = ""
    source: Nullable[Name] = ""
    status: Status | None = None
    gone: bool = False
    activity: dict[str, Number] | None = field(name="activity_seconds", default=None)
    step: Number | None = None
    committed_step: Number | None = None
    restored_step: Number | None = None
    rank: Number | None = None
    gpus: Number | None = None
    model_flops: Number | None = None
    peak_flops: Number | None = None
    started: Stamp | None = None
    submitted: Stamp | None = None
    open_step_seconds: Number | None = None
    step_p99: Number | None = None
    ranks: Nullable[Ranks] = ""
    open_step: OpenStep | None = None
    pid: Nullable[bool] = False
    overlaps: Nullable[bool] = False
    page: Nullable[bool] = False
    early: Nullable[bool] = False
    work: dict[str, Number] = field(default_factory=dict)
    rows: Annotated[list[WaitRow], Meta(max_length=_MAX_RANKS)] | None = field(name="waits", default=None)
    computing_squares: list[Number] | None = None
    evidence: Nullable[Annotated[tuple[Evidence, ...], Meta(max_length=MAX_EVIDENCE)]] = ()
    stacks: Nullable[Annotated[tuple[RankStack, ...], Meta(max_length=_MAX_RANKS)]] = ()

    @classmethod
    def parse(cls, line: object) -> "LedgerRecord":
        """Return the record in `line`, its JSON text or a decoded object. Raises RecordError if it is malformed."""
        try:
            record = _DECODER.decode(line) if isinstance(line, bytes | str | Raw) else msgspec.convert(line, cls)
            record._complete()
        except (ValueError, RecursionError) as error:
            raise RecordError(refusal(error, event=EVENTS, status=STATUSES)) from None
        return record

    def _complete(self) -> None:
        """Check what the types do not check, and derive the values that the ledger uses. Raises ValueError."""
        for name in ("tenant", "attempt", "source", "ranks"):
            value = getattr(self, name)
            setattr(self, name, text := "" if value is None else str(value))
            if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
                raise ValueError(f"{name}: half a character (a lone surrogate), which cannot be stored")
        if not self.attempt and self.event in ("start", "snapshot"):
            raise ValueError("attempt: missing")
        self.status = (self.status or "completed") if self.event == "finish" else None
        if self.event == "submitted":
            self.submitted = self.t
        elif self.event == "start":  # the snapshot of a new process
            self.started, self.restored_step, self.activity = self.t, self.step, {}
        activity = self.activity or {}
        for name in [name for name in activity if name not in ACTIVITIES]:
            activity["other"] = activity.pop(name) + activity.get("other", 0.0)
        self.work = {name: total for name, total in self.work.items() if name in WORK}
        if self.ranks and _count("ranks", self.ranks) > _MAX_RANKS:
            raise ValueError(f"ranks: not the text of at most {_MAX_RANKS} ranks")
        processes = self.waits.processes if self.waits is not None else ()
        if len({process.rank for process in processes}) < len(processes):
            raise ValueError("waits: a rank is listed twice")
        if self.open_step is not None:
            for row in self.open_step.ranks:
                _check_groups(f"open_step: rank {row.rank}", row.groups)
            for text in chain(*self.open_step.ras):
                _count("open_step.ras", text)
        latest = self.t + _MAX_DELAY  # evidence of the future is a wrong clock
        self.evidence = tuple([one.of(self.source, latest) for one in self.evidence or ()])
        stacks = self.stacks or ()
        self.stacks = tuple([(rank, min(t, latest), printable(text[:MAX_STACKS], "\n")) for rank, t, text in stacks])

    @cached_property
    def waits(self) -> HostWaits | None:
        """Processes of the host and their totals, None if they are not measured. Raises ValueError."""
        if self.rows is None:
            return None
        rows, totals = [], list[float]()
        squares = [nan] * len(self.rows) if self.computing_squares is None else self.computing_squares
        if len(squares) != len(self.rows):
            raise ValueError("computing_squares: not a list with a number for each rank in waits")
        for row, square in zip(self.rows, squares, strict=True):
            groups = tuple([(kind, ranks) for kind, ranks, _ in row.groups])
            rows.append((row.rank, row.place[:64], row.started, groups))
            totals += (row.steps, row.seconds, row.tokens, row.wait, square, *[waited for _, _, waited in row.groups])
        return HostWaits(_processes(tuple(rows)), array("d", totals).tobytes())

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


_DECODER = msgspec.json.Decoder(LedgerRecord)


@lru_cache(maxsize=1 << 15)  # more than the hosts of the largest clusters
def _processes(rows: tuple[tuple[int, str, float, tuple[tuple[str, str], ...]], ...]) -> tuple[RankProcess, ...]:
    """Return the processes of a host, which are the same with each of its records. Raises ValueError."""
    for rank, _, _, groups in rows:
        _check_groups(f"waits: rank {rank}", groups)
    return tuple(RankProcess(*row) for row in rows)


def _check_groups(where: str, groups: Iterable[tuple[Any, ...]]) -> None:
    for kind, ranks, *_ in groups:
        if not kind.isidentifier():
            raise ValueError(f"{where}: {kind[:40]!r} is not the kind of a process group")
        _count(where, ranks)


def _count(where: str, ranks: str) -> int:
    """Return how many ranks a text has. Raises ValueError."""
    try:
        return count_of(ranks)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def refusal(error: Exception, **choices: tuple[str, ...]) -> str:
    """Return msgspec's reason after the path of the field, with the values that a field with `choices` may have."""
    reason, _, where = str(error).replace("`", "").replace("\\\\", "\\").partition(" - at ")
    name = where.removeprefix("$.")
    if name in choices:
        reason += f", send one of {', '.join(choices[name])}"
    return f"{name}: {reason}" if name else reason


def printable(text: object, keep: str = "") -> str:
    """Return the text with `?` for each unprintable character that is not in `keep`, such as a terminal's codes."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() or character in keep else "?" for character in text)
