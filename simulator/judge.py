"""The truth of a simulated cluster beside what the ledger says: figures, and the causes it found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from flopwatch.ledger import views
from flopwatch.ledger.buckets import BUCKETS
from flopwatch.ledger.incidents import Incident
from flopwatch.ledger.ledger import Ledger
from flopwatch.ledger.run import RunLedger
from flopwatch.ledger.slowdowns import MIN_SLOW_SECONDS
from simulator.truth import Loss, Truth

TOLERANCE = 0.01
HOUR = 3600.0
ENDS = ("end", "planned")  # effects of faults
_UNPLANNED = ("failed", "silent")  # statuses of attempts


@dataclass(frozen=True)
class Figure:
    """One figure, true and told; None where there is none."""

    name: str
    unit: str
    truth: float | None
    told: float | None
    of: float | None = None  # what the difference is a share of, if not the truth

    @property
    def off(self) -> float:
        """Return by what share the ledger is off."""
        if self.truth is None or self.told is None:
            return 0.0 if self.truth is self.told else 1.0
        whole = self.of if self.of is not None else abs(self.truth)
        return abs(self.told - self.truth) / whole if whole else float(self.told != self.truth)


@dataclass
class Cause:
    """How often a cause was so, was said, and both; and what it cost."""

    true: int = 0
    said: int = 0
    right: int = 0
    true_gpu_seconds: float = 0.0
    said_gpu_seconds: float = 0.0
    placed: int = 0  # right ones whose host the ledger names
    place_right: int = 0

    @property
    def precision(self) -> float | None:
        """Return the share of what was said that is so."""
        return self.right / self.said if self.said else None

    @property
    def recall(self) -> float | None:
        """Return the share of what is so that was said."""
        return self.right / self.true if self.true else None


@dataclass
class Judgement:
    """What a simulation showed."""

    figures: dict[str, list[Figure]] = field(default_factory=dict)  # by run
    causes: dict[str, Cause] = field(default_factory=dict)  # of ends; of others as in "slow: thermal"
    mistakes: Counter[tuple[str, str]] = field(default_factory=Counter)  # kind of fault, what was said instead
    missed: list[str] = field(default_factory=list)  # ends, slow stretches and stalls that the ledger does not have
    invented: list[str] = field(default_factory=list)  # incidents of attempts to which nothing happened
    not_judged: Counter[str] = field(default_factory=Counter)  # faults that were over, or another's, before they told

    @property
    def off(self) -> list[tuple[str, Figure]]:
        """Return the figures that are off by more than is allowed, with their runs."""
        return [(run, figure) for run, figures in self.figures.items() for figure in figures if figure.off > TOLERANCE]

    def cause(self, name: str) -> Cause:
        """Return what is known of a cause."""
        return self.causes.setdefault(name, Cause())


def judge(truths: Iterable[Truth], ledger: Ledger) -> Judgement:
    """Return what the ledger makes of what really happened."""
    judgement = Judgement()
    for truth in truths:
        told = ledger.runs[truth.tenant, truth.run]
        judgement.figures[truth.run] = _figures(truth, told)
        incidents = list(told.incidents.by_number.values())
        for loss in truth.losses:
            kind = "end" if loss.effect in ENDS else loss.effect
            if kind != "end" and not _tells(loss):
                judgement.not_judged[loss.kind] += 1
                continue
            prefix = "" if kind == "end" else f"{kind}: "
            true = judgement.cause(prefix + loss.cause)
            incident = next((one for one in incidents if one.kind == kind and _is(one, loss)), None)
            true.true += 1
            true.true_gpu_seconds += loss.gpu_seconds
            if incident is None:
                judgement.missed.append(f"{prefix}{loss.attempt}")
                continue
            incidents.remove(incident)
            found = incident.figures(told.incidents.evidence)
            said = judgement.cause(prefix + found["cause"])
            said.said += 1
            said.said_gpu_seconds += found["gpu_seconds"]
            if found["cause"] != loss.cause:
                judgement.mistakes[loss.kind, found["cause"]] += 1
                continue
            true.right += 1
            if found["host"] and loss.hosts:
                true.placed += 1
                true.place_right += found["host"] in loss.hosts
        judgement.invented += [one.attempt if one.kind == "end" else f"{one.kind}: {one.attempt}" for one in incidents]
    return judgement


def _tells(loss: Loss) -> bool:
    """Return whether a slow stretch lasted for long enough to be one, or a stall came to an end of its own."""
    if loss.effect == "slow":
        return loss.ended is not None and loss.ended - loss.at >= MIN_SLOW_SECONDS
    return loss.alone and loss.recovered is not None


def _is(incident: Incident, loss: Loss) -> bool:
    """Return whether an incident is this loss: the end of its attempt, or a time that overlaps with its own."""
    until = loss.ended if loss.effect == "slow" else loss.recovered
    return incident.attempt == loss.attempt and (
        incident.kind == "end" or (until is not None and incident.began < until and incident.ended > loss.at)
    )


def _figures(truth: Truth, run: RunLedger) -> list[Figure]:
    told = views.summary(run, run.reporters.last)
    ends = sum(told["ends"][end] for end in _UNPLANNED)
    running = sum(told["buckets"][bucket] for bucket in BUCKETS if bucket not in ("down", "queue"))
    held, held_told = sum(truth.gpu_seconds.values()), sum(told["gpu_seconds"].values())
    return [
        Figure("wall clock", "h", truth.wall / HOUR, told["wall_seconds"] / HOUR),
        Figure("goodput", "", truth.goodput, told["goodput"]),
        Figure("ETTR", "", truth.ettr if truth.seconds["queue"] else None, told["ettr"]),
        Figure("effective MFU", "", truth.effective_mfu, told["effective_mfu"]),
        Figure("attempts", "", truth.attempts, told["attempts"]),
        Figure("unplanned ends", "", len(truth.interruptions), ends),
        Figure("MTTF", "h", None if truth.mttf is None else truth.mttf / HOUR, running / ends / HOUR if ends else None),
        Figure("recoveries", "", len(truth.recoveries), run.incidents.recoveries),
        Figure(
            "MTTR",
            "min",
            None if truth.mttr is None else truth.mttr / 60,
            run.incidents.recovery_seconds / run.incidents.recoveries / 60 if run.incidents.recoveries else None,
        ),
        # A stall that the attempt did not survive is a part of its end.
        Figure(
            "lost to ends",
            "GPU-h",
            sum(
                loss.gpu_seconds
                for loss in truth.losses
                if loss.effect in ENDS or (loss.effect == "stall" and loss.recovered is None)
            )
            / HOUR,
            sum(incident.gpu_seconds for incident in run.incidents.by_number.values() if incident.kind == "end") / HOUR,
        ),
        Figure(
            "not productive",
            "GPU-h",
            (held - truth.gpu_seconds["productive"]) / HOUR,
            (held_told - told["gpu_seconds"]["productive"]) / HOUR,
        ),
        # A few seconds of a bucket that holds a minute are no matter: these are shares of all.
        *(
            Figure(
                f"  {bucket}",
                "GPU-h",
                truth.gpu_seconds[bucket] / HOUR,
                told["gpu_seconds"][bucket] / HOUR,
                of=held / HOUR,
            )
            for bucket in BUCKETS
            if truth.gpu_seconds[bucket] or told["gpu_seconds"][bucket]
        ),
    ]
