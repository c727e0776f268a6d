"""Verdicts of the engine on simulated jobs of every kind, as a confusion matrix: what is wrong, and what it names.

Jobs with parallel groups are judged from their waits and numbers (`simulator.parallel_judge`). The stragglers and hangs
of `simulator.kinds` are judged from the records of their hosts, by the ledger. Late ranks of a run of 1,024 ranks show
how soon they are named, and healthy runs whether any rank is.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from statistics import fmean
from typing import Any

from flopwatch.ledger.ledger import Ledger
from flopwatch.ledger.stragglers import NAMED
from flopwatch.verdicts.overdue import overdue_after
from flopwatch.verdicts.stragglers import WINDOWS, StragglerVerdict, judge
from flopwatch.verdicts.waits import Interval
from simulator import parallel_cases, parallel_judge
from simulator.kinds import SCENARIOS, TroubleKind
from simulator.ledger_series import P99_OF, disturbed, records
from simulator.parallel_cases import LAYOUTS, late_rank
from simulator.parallel_step import Layout
from simulator.progress import progress
from simulator.ranks import PER_HOST, SynchronousJob, no_delay
from simulator.verdicts import SECONDS, AlertOutcome, KindScore, score

PARALLEL, LARGE = "parallel", "1,024 ranks"
LARGE_LAYOUT = Layout(tp=8, pp=4, dp=32)
LARGE_SHARES = {"late by 20 %": 0.2, "late by 10 %": 0.1}
LASTS = {"stragglers": 330.0, "hangs": 120.0}  # seconds of trouble after which a job ends
WHATIF_SEEDS = 20
HEALTHY_HOURS = 1000.0
PARTS = 28  # of the healthy hours
MAX_WHATIF_ERROR, MIN_RIGHT = 0.03, 0.95  # share of a step, and of the jobs of a kind


@dataclass(frozen=True)
class JobVerdict:
    """Verdict on one job: right, near (its host, its group or a part of its ranks), wrong (at any time) or none.

    `after` has the seconds to the first name, of a hang since the step became overdue. `whatif` has the error of the
    predicted step, as a share.
    """

    verdict: str
    result: str
    communicator_right: bool | None = None
    after: float | None = None
    whatif: float | None = None


@dataclass
class MatrixRow:
    """Verdicts on the jobs of a kind. `names`: a rank or host is to be named."""

    scenario: str
    kind: str
    names: bool
    jobs: list[JobVerdict] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return the row as a JSON object."""
        results, asked = Counter(job.result for job in self.jobs), [job.communicator_right for job in self.jobs]
        errors = [job.whatif for job in self.jobs if job.whatif is not None]
        after = (
            [job.after for job in self.jobs if job.after is not None and job.result == "right"] if self.names else []
        )
        return {
            "scenario": self.scenario,
            "kind": self.kind,
            "names": self.names,
            "jobs": len(self.jobs),
            **{result: results[result] for result in ("right", "near", "wrong", "none")},
            "verdicts": dict(Counter(job.verdict for job in self.jobs).most_common()),
            "communicators": sum(one is not None for one in asked),
            "communicators_right": sum(one is True for one in asked),
            "seconds_p50": quantile(after, 0.5),
            "seconds_p95": quantile(after, 0.95),
            "whatif_jobs": len(errors),
            "whatif_error_max": round(max(errors), 4) if errors else None,
        }


def quantile(values: Iterable[float], share: float) -> float | None:
    """Return the value that this share of the values does not exceed, None without values."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1) if ordered else None


def of_parallel(kind: str, seed: int, *, mend: bool) -> JobVerdict:
    """Return the verdict on a job with parallel groups."""
    found = parallel_judge.judged(kind, seed, mend=mend)
    named = found.verdict in parallel_judge.NAMES
    result = "wrong" if found.misnamed else "right" if found.right else "near" if named else "none"
    return JobVerdict(found.verdict, result, found.communicator_right, found.after, found.whatif)


def of_large(kind: str, seed: int) -> JobVerdict:
    """Return the verdict on a run of 1,024 ranks with a late rank, up to the interval that names one."""
    rank, seen = random.Random(f"{kind} {seed}").randrange(LARGE_LAYOUT.size), list[Interval]()
    job = late_rank(kind, LARGE_LAYOUT, rank, 1 + LARGE_SHARES[kind])
    steps, verdict = job.steps(str(seed), parallel_judge.STEPS * WINDOWS[-1][0]), StragglerVerdict("none")
    while some := [*islice(steps, parallel_judge.STEPS)]:
        seen += parallel_judge.intervals(some)
        verdict = judge(seen)
        if named := {one.rank: one.communicator for one in verdict.suspects}:
            right, after = named.keys() == job.ranks, parallel_judge.SECONDS * len(seen)
            return JobVerdict(
                verdict.kind, "right" if right else "wrong", {*named.values()} == {job.communicator}, after
            )
    return JobVerdict(verdict.kind, "none", False)


def of_ledger(scenario: str, kind_name: str, seed: int, *, mend: bool) -> JobVerdict:
    """Return the ledger's verdict on a job of two hosts."""
    kind, name = next(kind for kind in SCENARIOS[scenario] if kind.name == kind_name), f"{kind_name}-{seed}"
    trouble, truth = kind.make(random.Random(f"{name} trouble"))
    seconds = min(SECONDS[scenario], trouble.at + LASTS[scenario] + trouble.lasts)
    job = SynchronousJob(name, f"{name} job", trouble, seconds)
    ledger, label = Ledger(), "none"
    ranks: dict[int, float] = {}
    hosts: set[int] = set()
    fired, first = False, None
    published, mended = list[Mapping[int, float]](), truth.ranks or _of_host(truth.host)
    # Without a hang, no rank may be named while exporters and the ledger restart, are busy or cannot reach each other.
    for received, record in records(job) if trouble.hangs or scenario != "hangs" else disturbed(job):
        ledger.apply(record, received)
        run = ledger.runs["", name]
        if scenario == "hangs":
            hangs, label = run.hangs, "none"
            fired |= hangs.seconds is not None
            named = hangs.verdict.suspects if hangs.verdict is not None else ()
            if hangs.seconds is not None:
                label = "no suspect" if not named else "host" if named[0].rank is None else "rank"
            ranks |= {one.rank: received for one in named if one.rank is not None and one.rank not in ranks}
            hosts |= {int(one.host.rpartition("-")[2]) for one in named if one.rank is None}
        elif (verdict := run.stragglers.verdict) is not None:
            label = verdict.kind
            late = verdict.suspects if verdict.kind in NAMED else ()
            fired |= bool(late)
            curve = run.stragglers.whatif if {one.rank for one in late} == mended else {}
            if curve and curve not in published[-1:]:
                published.append(curve)
            if verdict.kind == "host":
                hosts |= {one.rank // PER_HOST for one in late}
            else:
                ranks |= {one.rank: received for one in late if one.rank not in ranks}
        if first is None and (ranks or hosts):
            first = received
    row = KindScore(kind)
    at = _overdue(job) if trouble.hangs else trouble.at
    score(row, truth, AlertOutcome(fired, ranks, frozenset(hosts), first), at)
    named_any = bool(ranks or hosts)
    result = "wrong" if row.wrong or row.alarms else "right" if row.right else "near" if named_any else "none"
    error = _whatif_error(job, mended, published) if mend else None
    return JobVerdict(label, result, None, row.after[0] if row.after else None, error if result == "right" else None)


def _of_host(host: int | None) -> frozenset[int]:
    return frozenset() if host is None else frozenset(range(host * PER_HOST, (host + 1) * PER_HOST))


def _is_named(kind: TroubleKind, seed: int) -> bool:
    """Return whether a rank or host is to be named in jobs of a kind."""
    _, truth = kind.make(random.Random(f"{kind.name}-{seed} trouble"))
    return truth.evident and bool(truth.ranks or truth.host is not None)


def _overdue(job: SynchronousJob) -> float:
    """Return when the step that hangs is overdue."""
    last = sorted([one.end - one.begin for one in job.segments if one.activity == "step" and one.end < inf][-P99_OF:])
    return job.segments[-1].begin + overdue_after(last[int(0.99 * len(last))])


def _whatif_error(job: SynchronousJob, ranks: frozenset[int], curves: Sequence[Mapping[int, float]]) -> float | None:
    """Return the error of the ledger's predicted step, as a share of the mean step of the job without these ranks.

    Of the ledger's values, the mean counts, because a few steps vary by more with the network alone.
    """
    if not ranks or not curves:
        return None

    def slow(rank: int, step: int, t: float) -> float:
        return no_delay(rank, step, t) if rank in ranks else job.trouble.slow(rank, step, t)

    well = SynchronousJob(job.name, f"{job.name} job", replace(job.trouble, slow=slow), job.seconds)
    steps = [one.end - one.begin for one in well.segments if one.waits is not None and one.begin >= job.trouble.at]
    return abs(fmean(curve[max(curve)] for curve in curves) / fmean(steps) - 1)


def evaluate(seeds: int, first: int = 1, hours: float = HEALTHY_HOURS) -> dict[str, Any]:
    """Return the verdicts on `seeds` jobs of every kind, and on `hours` of healthy runs, computed on all cores."""
    rows: list[tuple[MatrixRow, list[Future[JobVerdict]]]] = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for share in LARGE_SHARES:
            waiting = [pool.submit(of_large, share, seed) for seed in range(first, first + seeds)]
            rows.append((MatrixRow(LARGE, share, True), waiting))
        healthy = [
            pool.submit(parallel_judge.misnamed_in, layout, hours / PARTS, first + part)
            for part in range(PARTS // len(LAYOUTS))
            for layout in LAYOUTS.values()
        ]
        for scenario, kinds in SCENARIOS.items():
            for kind in kinds:
                row = MatrixRow(scenario, kind.name, _is_named(kind, first))
                waiting = [
                    pool.submit(of_ledger, scenario, kind.name, seed, mend=seed - first < WHATIF_SEEDS)
                    for seed in range(first, first + seeds)
                ]
                rows.append((row, waiting))
        for parallel in parallel_cases.KINDS:
            job = parallel_cases.case(parallel, first)
            row = MatrixRow(PARALLEL, parallel, bool(job.ranks) and job.verdict != "no suspect")
            waiting = [
                pool.submit(of_parallel, parallel, seed, mend=seed - first < WHATIF_SEEDS)
                for seed in range(first, first + seeds)
            ]
            rows.append((row, waiting))
        everything: list[Future[Any]] = [*healthy, *(future for _, futures in rows for future in futures)]
        with progress(f"Judging {len(everything):,} jobs", len(everything)) as advance:
            for one in as_completed(everything):
                one.result()
                advance(1)
        for row, futures in rows:
            row.jobs += [future.result() for future in futures]
        named = sum(future.result() for future in healthy)
    return report([row for row, _ in rows], seeds, hours, named)


def report(rows: Sequence[MatrixRow], seeds: int, hours: float, misnamed: int) -> dict[str, Any]:
    """Return the verdicts on all jobs as a JSON object. `misnamed` intervals of the healthy hours had a named rank."""
    named = [job for row in rows if row.names for job in row.jobs]
    results = Counter(job.result for job in named)
    wrong = sum(job.result == "wrong" for row in rows for job in row.jobs)
    asked = [job.communicator_right for job in named if job.communicator_right is not None]
    after = {
        "late_20_p95": [job.after for row in rows if row.kind == "late by 20 %" for job in row.jobs],
        "late_10_p95": [job.after for row in rows if row.kind == "late by 10 %" for job in row.jobs],
        "hang_p95": [job.after for row in rows if row.scenario == "hangs" and row.names for job in row.jobs],
    }
    return {
        "seeds": seeds,
        "jobs": sum(len(row.jobs) for row in rows),
        "precision": 1 - wrong / max(1, wrong + results["right"] + results["near"]),
        "recall": results["right"] / max(1, len(named)),
        "communicator": sum(asked) / max(1, len(asked)),
        **{name: quantile([inf if one is None else one for one in found], 0.95) for name, found in after.items()},
        "healthy_hours": hours,
        "healthy_misnamed": misnamed,
        "rows": [row.summary() for row in rows],
    }


def misses(found: Mapping[str, Any]) -> list[str]:
    """Return the bounds that the verdicts miss, in words."""
    bounds = [
        (found["precision"] >= 0.99, f"precision {found['precision']:.2%}, below 99 %"),
        (found["recall"] >= 0.95, f"recall {found['recall']:.2%}, below 95 %"),
        (found["communicator"] >= 0.95, f"right communicator {found['communicator']:.2%}, below 95 %"),
        (found["healthy_misnamed"] == 0, f"{found['healthy_misnamed']} healthy intervals with a named rank"),
    ]
    bounds += [
        (found[name] is not None and found[name] <= limit, f"{text} after {found[name]} s (p95), later than {limit} s")
        for name, text, limit in (
            ("late_20_p95", "late by 20 %", 60.0),
            ("late_10_p95", "late by 10 %", 300.0),
            ("hang_p95", "hang since overdue", 20.0),
        )
    ]
    rows = [
        (row["whatif_error_max"] is None or row["whatif_error_max"] <= MAX_WHATIF_ERROR, f"{row['kind']}: what-if")
        for row in found["rows"]
    ]
    rows += [(row["right"] >= MIN_RIGHT * row["jobs"], f"{row['kind']}: right") for row in found["rows"]]
    return [text for kept, text in (*bounds, *rows) if not kept]


def summary(found: Mapping[str, Any]) -> str:
    """Return in words how often the verdicts on all jobs are right, and how soon they follow."""
    return (
        f"{found['jobs']:,} jobs, {found['seeds']} of each kind: precision {found['precision']:.2%}, recall "
        f"{found['recall']:.2%}, right process group {found['communicator']:.1%}. A rank of 1,024 that computes 20 % "
        f"longer is named after {found['late_20_p95']} s (p95), one with 10 % after {found['late_10_p95']} s, and a "
        f"hang {found['hang_p95']} s after the step is overdue. In {found['healthy_hours']:,.0f} healthy hours "
        f"{found['healthy_misnamed']} intervals had a named rank."
    )


def markdown(found: Mapping[str, Any]) -> str:
    """Return the confusion matrix as Markdown: the summary, and a row for each kind."""
    rows = [
        (
            f"{row['kind']} ({row['scenario']})",
            *(row[result] for result in ("jobs", "right", "near", "wrong", "none")),
            ", ".join(f"{verdict} {count}" for verdict, count in row["verdicts"].items()),
            f"{row['communicators_right']} of {row['communicators']}" if row["communicators"] else "-",
            *("-" if row[name] is None else f"{row[name]:.0f} s" for name in ("seconds_p50", "seconds_p95")),
            "-" if row["whatif_error_max"] is None else f"{row['whatif_error_max']:.1%}",
        )
        for row in found["rows"]
    ]
    header = ("kind", "jobs", "right", "near", "wrong", "none", "verdicts", "group", "p50", "p95", "what-if")
    lines = [
        summary(found),
        "",
        *(f"| {' | '.join(map(str, row))} |" for row in (header, ["---"] * len(header), *rows)),
        "",
        "Bounds that are missed: " + ("; ".join(misses(found)) or "none") + ".",
    ]
    return "\n".join(lines)
