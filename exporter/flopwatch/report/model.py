"""Data of a run's report, in the form that `flopwatch report --format json` prints."""

from dataclasses import dataclass

from flopwatch.report.statistics import CheckpointInterval, MeanTime

OPEN, GOOD = "open", ("productive", "generation")


@dataclass(frozen=True, slots=True)
class Slice:
    """Interval of a run's wall clock, begin and end in Unix time, and its seconds per bucket."""

    begin: float
    end: float
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class Firing:
    """Period, in Unix time, in which an alert fired about the run or about one of its hosts."""

    name: str
    severity: str
    place: str
    began: float
    ended: float
    ongoing: bool


@dataclass(frozen=True, slots=True)
class CauseTotal:
    """Number of a run's settled incidents with one cause, and the GPU-seconds they cost."""

    cause: str
    incidents: int
    gpu_seconds: float


@dataclass(frozen=True, slots=True)
class ReportedLoss:
    """One incident of a run from the ledger. Until it is settled, its cost and its cause may change."""

    began: float
    back: float | None  # when the run made a new step again
    what: str  # status of the attempt's end, `slow` or `stall`
    cause: str
    confidence: str
    host: str
    part: str  # GPU and port
    why: str
    gpu_seconds: float
    settled: bool


@dataclass(frozen=True, slots=True)
class Outlier:
    """Rank, host or port that stands out, its place (such as host and GPU) and the reason as text."""

    name: str
    place: str
    finding: str


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """Number of durable checkpoints of a run, the last step saved, seconds per save, and actual and best interval."""

    commits: int
    committed_step: float | None
    blocking_seconds: float  # of one save
    interval: CheckpointInterval | None


@dataclass(frozen=True, slots=True)
class EnergySummary:
    """Energy of the run's GPUs in `seconds` of measured time, and its means per step and token."""

    joules: float
    seconds: float
    joules_per_step: float | None
    joules_per_token: float | None


@dataclass(frozen=True, slots=True)
class RunReport:
    """Report of one run. Times are Unix time, durations seconds, ratios from 0 to 1. An unknown value is None."""

    run: str
    tenant: str
    made_at: float
    state: str
    began: float
    ended: float
    gpus: float | None
    host_count: int | None
    wall_seconds: float
    queue_seconds: float | None
    buckets: dict[str, float]
    gpu_seconds: dict[str, float]
    open_seconds: float
    provisional_seconds: float | None
    mfu: float | None
    effective_mfu: float | None
    goodput: float | None
    ettr: float | None
    attempts: int
    ends: dict[str, int]
    high_water_step: float | None
    mttf: MeanTime
    mttr_seconds: float | None
    recoveries: int
    checkpoints: CheckpointSummary
    energy: EnergySummary | None
    declared: dict[str, str]
    timeline: list[Slice]
    mfu_over_time: list[tuple[float, float]]
    causes: list[CauseTotal]
    losses: list[ReportedLoss] | None  # None without a ledger
    alerts: list[Firing]
    ranks: list[Outlier]
    hosts: list[Outlier]
    links: list[Outlier]
    missed: list[str]
    stacks: str = ""  # of the last hang or straggler
    price: float | None = None  # of a GPU-hour
