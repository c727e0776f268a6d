"""Test of the alert rules for stragglers and hangs on simulated jobs with a known verdict.

`promtool test rules` (https://prometheus.io/docs/prometheus/latest/configuration/unit_testing_rules/) evaluates the
rules over the series of many jobs at once. Its tests expect no alerts and no samples, so it prints all that exist.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from flopwatch.settings import SettingsError
from simulator.kinds import SCENARIOS, ExpectedVerdict, TroubleKind
from simulator.ledger_series import ledger_series
from simulator.progress import progress
from simulator.promtool import rule_test
from simulator.ranks import INTERVAL, PER_HOST, Series, SynchronousJob, Values

BATCH = 20  # jobs in one run of promtool: more have more samples than its queries may read
SECONDS = {"stragglers": 780.0, "hangs": 720.0}
STRAGGLING_RANK = 'rank:training_straggler:confirmed unless on (run) run_straggler_ratio{kind="host"} > 0'
STRAGGLING_HOST = (
    'max by (run, host) (rank:training_straggler:confirmed) and on (run) run_straggler_ratio{kind="host"} > 0'
)
ALERT = {"stragglers": "TrainingStraggler", "hangs": "TrainingHang"}
RANK = {"stragglers": STRAGGLING_RANK, "hangs": 'run_hang_suspect_ratio{rank!=""}'}
HOST = {"stragglers": STRAGGLING_HOST, "hangs": 'run_hang_suspect_ratio{rank=""}'}
TEXT_AT = {"stragglers": 780, "hangs": 555}  # seconds at which the alert text is read, before a silent rank is dropped
MIN_RIGHT = 0.95  # required share of explained jobs of a kind


@dataclass(frozen=True)
class AlertOutcome:
    """Result of the alert rules for one job: whether the alert fired, and the ranks and hosts named at any time.

    `ranks` has the seconds after which each rank was first named.
    """

    fired: bool = False
    ranks: Mapping[int, float] = field(default_factory=dict)
    hosts: frozenset[int] = frozenset()
    after: float | None = None  # seconds until the first name
    text: str = ""  # description of the alert


@dataclass
class KindScore:
    """Counts of the jobs of one kind by result. `wrong` counts jobs by the ranks and hosts named in error."""

    kind: TroubleKind
    right: int = 0
    explained: int = 0  # right, with the expected text in the alert
    abstained: int = 0  # the alert fired without the name
    silent: int = 0  # no alert where one is expected
    alarms: int = 0  # an alert where none is expected
    wrong: Counter[str] = field(default_factory=Counter)
    after: list[float] = field(default_factory=list)
    names: bool = False  # a rank or host is to be named

    @property
    def jobs(self) -> int:
        """Return the number of jobs of this kind."""
        return self.right + self.abstained + self.silent + self.alarms + self.wrong.total()

    @property
    def median(self) -> float | None:
        """Return the upper median of the seconds from the trouble to the first name, over jobs with a right result.

        Returns None if no rank or host was named in these jobs.
        """
        return sorted(self.after)[len(self.after) // 2] if self.after else None


@dataclass(frozen=True)
class Verdicts:
    """Scores of all kinds of a scenario."""

    scenario: str
    rows: tuple[KindScore, ...]

    @property
    def precision(self) -> float:
        """Return the share of jobs with a named rank or host in which the name is right, 1 without such a job."""
        right = sum(row.right for row in self.rows if row.names)
        named = right + sum(row.wrong.total() for row in self.rows)
        return right / named if named else 1.0

    @property
    def recall(self) -> float:
        """Return the share of jobs with an expected name in which the alert rules found it."""
        return sum(row.right for row in self.rows if row.names) / max(
            1, sum(row.jobs for row in self.rows if row.names)
        )

    @property
    def poor(self) -> list[KindScore]:
        """Return the kinds with a wrong name, or with a share of explained jobs below MIN_RIGHT."""
        return [row for row in self.rows if row.explained < MIN_RIGHT * row.jobs or row.wrong]


def evaluate(
    scenario: str, seeds: int, first: int, rules: Sequence[Path], promtool: str, kinds: Sequence[str] | None = None
) -> Verdicts:
    """Simulate `seeds` jobs of each kind, with seeds from `first` on, and score the rules on them.

    Raises SettingsError if one of `rules` is not a rule file, or if promtool is missing or fails.
    """
    rows: dict[str, KindScore] = {}
    chosen = [kind for kind in SCENARIOS[scenario] if kinds is None or kind.name in kinds]
    shipped, program = _needed(rules, scenario), shutil.which(promtool)
    if program is None:
        raise SettingsError(f"--promtool {promtool}: no such program")
    drawn = [(kind, seed) for kind in chosen for seed in range(first, first + seeds)]
    with progress(f"Judging {len(drawn):,} jobs", len(drawn)) as advance:
        for begin in range(0, len(drawn), BATCH):
            truths: dict[str, tuple[TroubleKind, ExpectedVerdict, float]] = {}
            jobs = []
            for kind, seed in drawn[begin : begin + BATCH]:
                name = f"{kind.name}-{seed}"
                trouble, truth = kind.make(random.Random(f"{name} trouble"))
                truths[name] = kind, truth, trouble.at
                jobs.append(SynchronousJob(name, f"{name} job", trouble, SECONDS[scenario]))
            outcomes = _evaluate(scenario, jobs, shipped, str(Path(program).absolute()))
            for name, (kind, truth, at) in truths.items():
                row = rows.setdefault(kind.name, KindScore(kind))
                score(row, truth, outcomes.get(name, AlertOutcome()), at)
            advance(len(truths))
    return Verdicts(scenario, tuple(rows.values()))


def score(row: KindScore, truth: ExpectedVerdict, outcome: AlertOutcome, at: float) -> None:
    """Count the outcome of a job in the score of its kind. Its trouble began at `at` seconds."""
    right_ranks = truth.ranks
    if truth.late is not None:
        right_ranks = frozenset(rank for rank, named_at in outcome.ranks.items() if truth.late(rank, named_at))
    right_hosts = frozenset(() if truth.host is None else (truth.host,))
    row.names |= truth.evident and bool(right_ranks or right_hosts)
    around = (
        frozenset(rank // PER_HOST for rank in right_ranks) or right_hosts
    )  # naming the host of the rank is not wrong
    others = [f"rank {rank}" for rank in outcome.ranks.keys() - right_ranks] + [
        f"host {host}" for host in outcome.hosts - around
    ]
    if others:
        row.wrong[", ".join(others)] += 1
    elif truth.late is None and outcome.fired != truth.alerts:
        row.silent += truth.alerts
        row.alarms += not truth.alerts
    elif not truth.evident or (outcome.ranks.keys() == right_ranks and outcome.hosts >= right_hosts):
        row.right += 1
        row.explained += row.kind.text_part in outcome.text
        if outcome.after is not None:
            row.after.append(outcome.after - at)
    else:
        row.abstained += 1


def _needed(rules: Sequence[Path], scenario: str) -> list[dict[str, Any]]:
    """Return the rule groups, reduced to the scenario's alert, the rules for ranks and hosts, and their inputs."""
    try:
        import yaml
    except ImportError as error:
        raise SettingsError("reading the rules needs PyYAML: pip install 'flopwatch[exporter]'") from error
    groups: list[dict[str, Any]] = []
    for path in rules:
        try:
            groups += yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
        except (OSError, yaml.YAMLError, TypeError, KeyError) as error:
            raise SettingsError(f"--rules {path}: {getattr(error, 'strerror', None) or 'not a rule file'}") from error
    every = [rule for group in groups for rule in group["rules"]]
    wanted: set[str] = set()
    alert = ALERT[scenario]
    pending = [RANK[scenario], HOST[scenario], *(_text(rule) for rule in every if rule.get("alert") == alert)]
    while pending:
        expr = pending.pop()
        for rule in every:
            name = rule.get("record")
            if name and name not in wanted and re.search(rf"(?<![\w:]){re.escape(name)}(?![\w:])", expr):
                wanted.add(name)
                pending.append(rule["expr"])
    kept = [
        {
            **group,
            "rules": [rule for rule in group["rules"] if rule.get("alert") == alert or rule.get("record") in wanted],
        }
        for group in groups
    ]
    return [group for group in kept if group["rules"]]


def _text(rule: dict[str, Any]) -> str:
    """Return the expression of a rule, followed by the description if the rule is an alert."""
    return f"{rule['expr']} {rule.get('annotations', {}).get('description', '')}"


def _evaluate(
    scenario: str, jobs: Sequence[SynchronousJob], groups: list[dict[str, Any]], promtool: str
) -> dict[str, AlertOutcome]:
    """Evaluate the rules over the series of all jobs, and return the outcome of each job by name."""
    length = f"{SECONDS[scenario]:.0f}s"
    firing = f'ALERTS{{alertname="{ALERT[scenario]}",alertstate="firing",severity="warning"}}'
    rank, host = (f"(({name}) and on (run) {firing})" for name in (RANK[scenario], HOST[scenario]))
    steps = f"[{length}:{INTERVAL:.0f}s]"
    asked = (
        f"max by (run) (max_over_time({firing}[{length}]))",
        f"min by (run, rank) (min_over_time(timestamp({rank}){steps}))",
        f"max by (run, host) (max_over_time({host}{steps}))",
        f"min by (run) (min_over_time(timestamp({rank} or {host}){steps}))",
    )
    read = set(
        re.findall(r"[A-Za-z_:][A-Za-z0-9_:]*", " ".join(_text(rule) for group in groups for rule in group["rules"]))
    )
    series = [
        {"series": _series(name), "values": _notation(values)}
        for job in jobs
        for name, values in (*job.series(), *ledger_series(job))
        if name[0] in read
    ]
    test = {
        "rule_files": ["rules.json"],
        "evaluation_interval": f"{INTERVAL:.0f}s",
        "tests": [
            {
                "interval": f"{INTERVAL:.0f}s",
                "input_series": series,
                "promql_expr_test": [{"expr": expr, "eval_time": length, "exp_samples": []} for expr in asked],
                "alert_rule_test": [
                    {"alertname": ALERT[scenario], "eval_time": f"{TEXT_AT[scenario]}s", "exp_alerts": []}
                ],
            }
        ],
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "rules.json").write_text(json.dumps({"groups": groups}))
        Path(folder, "test.json").write_text(json.dumps(test))
        done = rule_test(promtool, Path(folder, "test.json"))
    printed = done.stdout + done.stderr
    answers = list(_answers(printed, asked))
    texts = dict(
        re.findall(r'Labels:\{[^\n]*run="([^"]*)", severity="warning"[^\n]*\n[^\n]*description="(.*?)", \w+="', printed)
    )
    fired, ranks, hosts, first = ({} if done.returncode == 0 else answer for answer in answers)
    outcomes = {}
    for job in jobs:
        after = next((value for labels, value in first.items() if ("run", job.name) in labels), None)
        outcomes[job.name] = AlertOutcome(
            any(("run", job.name) in labels for labels in fired),
            _named(ranks, job.name, "rank"),
            frozenset(_named(hosts, job.name, "host")),
            after,
            texts.get(job.name, ""),
        )
    return outcomes


Answer = dict[frozenset[tuple[str, str]], float]


def _answers(printed: str, asked: Sequence[str]) -> Iterator[Answer]:
    """Yield the samples of each asked expression, which promtool printed as unexpected.

    Raises SettingsError if promtool printed neither success nor samples, or could not evaluate an expression.
    """
    if ("SUCCESS" not in printed and "expr:" not in printed) or ", err: " in printed:
        raise SettingsError(f"promtool: {printed.strip()[-400:]}")
    found = {}
    for expr, text in re.findall(r'expr: "(.*?)", time:.*?got:(.*?)(?=\n\s*expr:|\Z)', printed, re.DOTALL):
        found[expr.replace('\\"', '"')] = {
            frozenset(re.findall(r'(\w+)=\\?"(.*?)\\?"', labels)): float(value)
            for labels, value in re.findall(r'\{(.*?)\}"?,? (?:Sample: |Value: )?([-+\d.eE]+)', text)
        }
    for expr in asked:
        yield found.get(expr, {})


def _named(answer: Answer, run: str, label: str) -> dict[int, float]:
    series = ((dict(labels), value) for labels, value in answer.items())
    return {int(labels[label].rpartition("-")[2]): value for labels, value in series if labels["run"] == run}


def _series(series: Series) -> str:
    name, labels = series
    inside = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{inside}}}"


def _notation(values: Values) -> str:
    """Return samples in promtool's notation, where a repeated value is written once with the number of repetitions."""
    parts = []
    for value, times in groupby(
        "_" if value is None else value if isinstance(value, str) else f"{value:.12g}" for value in values
    ):
        number = sum(1 for _ in times)
        if value == "stale":
            parts += ["stale"] * number
        elif number == 1:
            parts.append(value)
        else:
            parts.append(f"_x{number}" if value == "_" else f"{value}x{number - 1}")
    return " ".join(parts)


def to_json(verdicts: Verdicts) -> dict[str, object]:
    """Return the scores of all kinds, with precision and recall, as a JSON object."""
    return {
        "scenario": verdicts.scenario,
        "precision": verdicts.precision,
        "recall": verdicts.recall,
        "kinds": {
            row.kind.name: {
                "jobs": row.jobs,
                "right": row.right,
                "explained": row.explained,
                "abstained": row.abstained,
                "silent": row.silent,
                "alarms": row.alarms,
                "wrong": dict(row.wrong),
                "named_after_seconds": row.median,
            }
            for row in verdicts.rows
        },
    }


def table(verdicts: Verdicts, seeds: int, first: int) -> str:
    """Return the scores of all kinds, with precision and recall, as text for a terminal."""
    lines = [
        f"{verdicts.scenario}: {seeds} jobs of each kind, seeds {first} to {first + seeds - 1}",
        "",
        f"{'kind':<18}{'right':>7}{'text':>6}{'abstained':>11}{'silent':>8}{'alarm':>7}{'wrong':>7}{'named after':>13}",
    ]
    for row in verdicts.rows:
        explained = row.explained if row.kind.text_part else "-"
        after = "-" if row.median is None else f"{row.median:.0f} s"
        lines.append(
            f"{row.kind.name:<18}{row.right:>7}{explained:>6}{row.abstained:>11}{row.silent:>8}{row.alarms:>7}"
            f"{row.wrong.total():>7}{after:>13}  {row.kind.text}{' !' if row in verdicts.poor else ''}"
        )
        lines += [f"  {times} x named {name}" for name, times in row.wrong.most_common()]
    lines.append(f"\nprecision {verdicts.precision:.1%}, recall {verdicts.recall:.1%}")
    return "\n".join(lines)
