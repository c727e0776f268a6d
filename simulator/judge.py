"""Comparison of the ledger with a simulated cluster's truth: the totals of each run, and the causes of its losses."""

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
from simulator.truth import RunTruth, TrueLoss

TOLERANCE = 0.01
HOUR = 3600.0
ENDS = ("end", "planned")  # effects of faults
_UNPLANNED = ("failed", "silent")  # statuses of attempts


@dataclass(frozen=True)
class Figure:
    """One value of a run, such as its goodput, in the truth and in the ledger. None means that there is no value."""

    name: str
    unit: str
    truth: float | None
    ledger: float | None
    of: float | None = None  # what the difference is divided by, if it is not the truth

    @property
    def off(self) -> float:
        """Return the relative error of the ledger, 1 if only the truth or only the ledger has a value."""
        if self.truth is None or self.ledger is None:
            return 0.0 if self.truth is self.ledger else 1.0
        whole = self.of if self.of is not None else abs(self.truth)
        return abs(self.ledger - self.truth) / whole if whole else float(self.ledger != self.truth)


@dataclass
class CauseScore:
    """Counts for one cause: losses that had it, incidents to which the ledger gave it, and cases where both agree."""

    true: int = 0
    found: int = 0
    right: int = 0
    true_gpu_seconds: float = 0.0
    found_gpu_seconds: float = 0.0
    placed: int = 0  # right ones for which the ledger names a host
    place_right: int = 0  # right ones for which the ledger names a right host

    @property
    def precision(self) -> float | None:
        """Return the share of the ledger's incidents with this cause that are right, None without such an incident."""
        return self.right / self.found if self.found else None

    @property
    def recall(self) -> float | None:
        """Return the share of losses with this cause for which the ledger found it, None without such a loss."""
        return self.right / self.true if self.true else None


@dataclass
class FleetJudgement:
    """Result of comparing the ledger with the truth of all runs."""

    figures: dict[str, list[Figure]] = field(default_factory=dict)  # by run
    causes: dict[str, CauseScore] = field(default_factory=dict)  # of ends; of other losses as in "slow: thermal"
    mistakes: Counter[tuple[str, str]] = field(default_factory=Counter)  # kind of fault, cause in the ledger
    missed: list[str] = field(default_factory=list)  # ends, slowdowns and stalls that the ledger does not have
    invented: list[str] = field(default_factory=list)  # incidents of attempts without a fault
    not_judged: Counter[str] = field(default_factory=Counter)  # faults too short or part of another loss

    @property
    def off(self) -> list[tuple[str, Figure]]:
        """Return each figure with a relative error above TOLERANCE, with the name of its run."""
        return [(run, figure) for run, figures in self.figures.items() for figure in figures if figure.off > TOLERANCE]

    def cause(self, name: str) -> CauseScore:
        """Return the score of a cause, which the first call with its name creates."""
        return self.causes.setdefault(name, CauseScore())


def judge(truths: Iterable[RunTruth], ledger: Ledger) -> FleetJudgement:
    """Compare the totals and incidents in the ledger with the true history of each run."""
    judgement = FleetJudgement()
    for truth in truths:
        run = ledger.runs[truth.tenant, truth.run]
        judgement.figures[truth.run] = _figures(truth, run)
        incidents = list(run.incidents.by_number.values())
        for loss in truth.losses:
            kind = "end" if loss.effect in ENDS else loss.effect
            if kind != "end" and not _is_visible(loss):
                judgement.not_judged[loss.kind] += 1
                continue
            prefix = "" if kind == "end" else f"{kind}: "
            true = judgement.cause(prefix + loss.cause)
            incident = next((one for one in incidents if one.kind == kind and _matches(one, loss)), None)
            true.true += 1
            true.true_gpu_seconds += loss.gpu_seconds
            if incident is None:
                judgement.missed.append(f"{prefix}{loss.attempt}")
                continue
            incidents.remove(incident)
            found = incident.figures(run.incidents.evidence)
            score = judgement.cause(prefix + found["cause"])
            score.found += 1
            score.found_gpu_seconds += found["gpu_seconds"]
            if found["cause"] != loss.cause:
                judgement.mistakes[loss.kind, found["cause"]] += 1
                continue
            true.right += 1
            if found["host"] and loss.hosts:
                true.placed += 1
                true.place_right += found["host"] in loss.hosts
        judgement.invented += [one.attempt if one.kind == "end" else f"{one.kind}: {one.attempt}" for one in incidents]
    return judgement


def _is_visible(loss: TrueLoss) -> bool:
    """Return whether a slowdown or a stall is long and separate enough for the ledger to show it.

    A slowdown must last at least MIN_SLOW_SECONDS. A stall must not be part of the loss of another fault. A step above
    the high-water mark must follow the stall before the next fault.
    """
    if loss.effect == "slow":
        return loss.ended is not None and loss.ended - loss.at >= MIN_SLOW_SECONDS
    return loss.alone and loss.recovered is not None


def _matches(incident: Incident, loss: TrueLoss) -> bool:
    """Return whether an incident is this loss: in the same attempt and, unless it is an end, at an overlapping time."""
    until = loss.ended if loss.effect == "slow" else loss.recovered
    return incident.attempt == loss.attempt and (
        incident.kind == "end" or (until is not None and incident.began < until and incident.ended > loss.at)
    )


def _figures(truth: RunTruth, run: RunLedger) -> list[Figure]:
    summary = views.summary(run, run.reporters.last)
    ends = sum(summary["ends"][end] for end in _UNPLANNED)
    running = sum(summary["buckets"][bucket] for bucket in BUCKETS if bucket not in ("down", "queue"))
    held, ledger_held = sum(truth.gpu_seconds.values()), sum(summary["gpu_seconds"].values())
    return [
        Figure("wall clock", "h", truth.wall / HOUR, summary["wall_seconds"] / HOUR),
        Figure("goodput", "", truth.goodput, summary["goodput"]),
        Figure("ETTR", "", truth.ettr if truth.seconds["queue"] else None, summary["ettr"]),
        Figure("effective MFU", "", truth.effective_mfu, summary["effective_mfu"]),
        Figure("attempts", "", truth.attempts, summary["attempts"]),
        Figure("unplanned ends", "", len(truth.interruptions), ends),
        Figure("MTTF", "h", None if truth.mttf is None else truth.mttf / HOUR, running / ends / HOUR if ends else None),
        Figure("recoveries", "", len(truth.recoveries), run.incidents.recoveries),
        Figure(
            "MTTR",
            "min",
            None if truth.mttr is None else truth.mttr / 60,
            run.incidents.recovery_seconds / run.incidents.recoveries / 60 if run.incidents.recoveries else None,
        ),
        # A stall that lasted until the attempt failed is part of the loss of that end.
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
            (ledger_held - summary["gpu_seconds"]["productive"]) / HOUR,
        ),
        # The error is a share of all GPU seconds, because a few seconds matter little in a bucket of one minute.
        *(
            Figure(
                f"  {bucket}",
                "GPU-h",
                truth.gpu_seconds[bucket] / HOUR,
                summary["gpu_seconds"][bucket] / HOUR,
                of=held / HOUR,
            )
            for bucket in BUCKETS
            if truth.gpu_seconds[bucket] or summary["gpu_seconds"][bucket]
        ),
    ]
