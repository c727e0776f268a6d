"""What really happened to a run, booked as it happens; nothing here has heard of a record or of the ledger.

The buckets are those of docs/goodput.md: a step made for the first time is productive, one made again or cut short is
lost. What a fault cost is all that is not productive, from the moment it struck (of an end in order: from that end)
until the first step that the run had not made before, or until its next end. Slow steps cost what they take beyond the
usual, which is productive all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flopwatch.ledger.buckets import BUCKETS


@dataclass(slots=True)
class Loss:
    """A fault that cost a run time."""

    kind: str
    cause: str
    effect: str  # end, planned, slow, stall
    attempt: str
    at: float  # it struck
    hosts: tuple[str, ...] = ()
    gpu: str = ""
    port: str = ""
    ended: float | None = None  # the attempt; of a slow stretch it
    alone: bool = True  # it is no part of what another costs
    recovered: float | None = None  # a new step was made
    gpu_seconds: float = 0.0

    @property
    def unplanned(self) -> bool:
        """Return whether it ended an attempt that nobody wanted to end."""
        return self.effect == "end"


@dataclass(slots=True)
class Truth:
    """The true books of one run; times are Unix seconds."""

    run: str
    tenant: str
    submitted: float
    step_flops: float  # of the model, on all GPUs
    peak_flops: float  # of a GPU, each second
    start: float | None = None
    end: float | None = None
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0.0))
    gpu_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0.0))
    released_gpu_seconds: float = 0.0  # between two allocations
    steps: int = 0  # ever made
    attempts: int = 0
    losses: list[Loss] = field(default_factory=list)
    open: Loss | None = None  # what the run has not recovered from
    recovering: float | None = None  # since when its processes are gone, unplanned, and it made no new step
    recoveries: list[float] = field(default_factory=list)  # seconds that took

    def book(self, bucket: str, seconds: float, gpus: float, held: bool = True) -> None:
        """Book seconds during which the run had these GPUs; held or, between two allocations, not."""
        self.seconds[bucket] += seconds
        if not held:
            self.released_gpu_seconds += seconds * gpus
            return
        self.gpu_seconds[bucket] += seconds * gpus
        if self.open is not None and bucket != "productive":
            self.open.gpu_seconds += seconds * gpus

    def made(
        self,
        first: int,
        count: int,
        each: float,
        began: float,
        gpus: float,
        slow: Loss | None = None,
        usual: float = 0.0,
    ) -> None:
        """Book `count` whole steps after step `first`, of so many seconds each; if they are slow, more than usual."""
        again = min(max(self.steps - first, 0), count)
        self.book("lost", again * each, gpus)
        if count > again:
            self.steps = first + count
            new = began + (again + 1) * each
            if self.open is not None:
                self.open.recovered = new
                self.open = None
            if self.recovering is not None:
                self.recoveries.append(new - self.recovering)
                self.recovering = None
            if slow is not None:
                slow.gpu_seconds += (count - again) * (each - usual) * gpus
                slow.ended = began + count * each
        self.book("productive", (count - again) * each, gpus)

    def strike(self, loss: Loss) -> None:
        """Note a fault; what is lost from now on is charged to it."""
        self.losses.append(loss)
        self.open = loss

    def over(self, t: float) -> None:
        """Note that the processes are gone."""
        if self.open is not None:
            self.open.ended = t
            if self.open.unplanned and self.recovering is None:
                self.recovering = t

    @property
    def wall(self) -> float:
        """Return the seconds from the first start to the end of the run."""
        assert self.start is not None
        assert self.end is not None
        return self.end - self.start

    @property
    def goodput(self) -> float:
        """Return the productive share of the wall clock."""
        return self.seconds["productive"] / self.wall

    @property
    def ettr(self) -> float:
        """Return the productive share of the time since submission."""
        return self.seconds["productive"] / (self.wall + self.seconds["queue"])

    @property
    def effective_mfu(self) -> float:
        """Return the FLOPs of the steps made, each counted once, over the peak of the GPUs held."""
        return self.steps * self.step_flops / (sum(self.gpu_seconds.values()) * self.peak_flops)

    @property
    def interruptions(self) -> list[Loss]:
        """Return what ended attempts unplanned."""
        return [loss for loss in self.losses if loss.unplanned]

    @property
    def mttf(self) -> float | None:
        """Return the running seconds for each unplanned end."""
        running = self.wall - self.seconds["down"]
        return running / len(self.interruptions) if self.interruptions else None

    @property
    def mttr(self) -> float | None:
        """Return the mean seconds from the end of the processes to the first new step; ends in a row count once."""
        return sum(self.recoveries) / len(self.recoveries) if self.recoveries else None
