"""True history of a run, accounted while it is simulated and independent of records and ledger.

The buckets are those of docs/goodput.md. A step that is made for the first time is productive. A step that is repeated
or interrupted is lost. A fault costs all time that is not productive from the moment it strikes. A planned end costs
such time from that end on. The cost stops at the first step above the high-water mark, or when the next fault strikes.
A slow step counts as productive, and its seconds above the usual step time are the cost of the slowdown.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flopwatch.ledger.buckets import BUCKETS


@dataclass(slots=True)
class TrueLoss:
    """Loss of a run to one fault: the true cause, the place and the cost in GPU seconds. Times are Unix seconds."""

    kind: str
    cause: str
    effect: str  # end, planned, slow, stall
    attempt: str
    at: float  # when the fault struck
    hosts: tuple[str, ...] = ()
    gpu: str = ""
    port: str = ""
    ended: float | None = None  # end of the attempt, or of the slowdown
    alone: bool = True  # not part of the loss of another fault
    recovered: float | None = None  # when the first step above the high-water mark was completed
    gpu_seconds: float = 0.0

    @property
    def unplanned(self) -> bool:
        """Return whether the fault caused an unplanned end of an attempt."""
        return self.effect == "end"


@dataclass(slots=True)
class RunTruth:
    """True totals of one run: seconds per bucket, steps, attempts, losses and recoveries. Times are Unix seconds."""

    run: str
    tenant: str
    submitted: float
    step_flops: float  # model FLOPs of a step on all GPUs
    peak_flops: float  # per GPU and second
    start: float | None = None
    end: float | None = None
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0.0))
    gpu_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0.0))
    released_gpu_seconds: float = 0.0  # between two allocations
    steps: int = 0  # high-water mark
    attempts: int = 0
    losses: list[TrueLoss] = field(default_factory=list)
    open: TrueLoss | None = None  # the loss that the run has not recovered from
    recovering: float | None = None  # time of an unplanned end without a step above the high-water mark since
    recoveries: list[float] = field(default_factory=list)  # seconds of each recovery

    def book(self, bucket: str, seconds: float, gpus: float, held: bool = True) -> None:
        """Add seconds of `gpus` GPUs to a bucket. With `held` False, the GPUs were released between two allocations."""
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
        slow: TrueLoss | None = None,
        usual: float = 0.0,
    ) -> None:
        """Add `count` completed steps of `each` seconds that follow step `first` and begin at Unix time `began`.

        The seconds of each step above `usual` are charged to the slowdown `slow`, if there is one.
        """
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

    def strike(self, loss: TrueLoss) -> None:
        """Record the loss of a fault that strikes now. Time that is not productive is charged to it from now on."""
        self.losses.append(loss)
        self.open = loss

    def over(self, t: float) -> None:
        """Record that the processes of the attempt ended at Unix time `t`."""
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
        """Return the effective MFU: the FLOPs of all distinct steps over the peak FLOPs of the GPU time held."""
        return self.steps * self.step_flops / (sum(self.gpu_seconds.values()) * self.peak_flops)

    @property
    def interruptions(self) -> list[TrueLoss]:
        """Return the losses to faults that ended an attempt unplanned."""
        return [loss for loss in self.losses if loss.unplanned]

    @property
    def mttf(self) -> float | None:
        """Return the mean running seconds between unplanned ends, None without an unplanned end."""
        running = self.wall - self.seconds["down"]
        return running / len(self.interruptions) if self.interruptions else None

    @property
    def mttr(self) -> float | None:
        """Return the mean seconds from an unplanned end to the first new step, None without a recovery.

        A new step is a step above the high-water mark. Ends without a new step between them count as one end.
        """
        return sum(self.recoveries) / len(self.recoveries) if self.recoveries else None
