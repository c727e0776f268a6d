"""Verdicts on real jobs of eight gloo ranks, in which one rank is late or stops: right names and their times.

    python -m bench.parallel --trials 20

The ranks push with the shipped hook to the exporters of two hosts, which send records to a ledger. Its series and its
stacks have the verdict. The line at which a late rank exceeds its peer's share of samples most must be the one where it
is late. Each trial is a run of its own. Several jobs do their trials in turn side by side, and a trial ends once the
rank is named and its line is known. The exit status is 1 if a trial is not right.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from flopwatch import catalogue as c
from flopwatch.catalogue.ranks import ranks_of
from simulator.confusion import quantile
from tests.support import ledger_process, parallel_job
from tests.support.exporter_process import exporter
from tests.support.parallel_job import HOSTS, MICROBATCHES, SIZE, USUAL, Control, Layout, Trial, start

ALL, PIPELINE = Layout(tp=2, dp=2, pp=2), Layout(tp=1, dp=2, pp=4)
LATE = 0.15  # seconds of a step that takes 0.5 s
HEALTHY_SECONDS, MAX_SECONDS, STARTS_IN = 100.0, 150.0, 120.0
KINDS = {
    **{f"late in {kind}": (ALL, kind, LATE) for kind in ("tp", "pp", "dp")},
    **{f"missing in {kind}": (ALL, kind, 0.0) for kind in ("tp", "pp", "dp")},
    "missing in pp, no tp": (PIPELINE, "pp", 0.0),
    "healthy": (ALL, "", 0.0),
}
NAMES = (c.RUN_STRAGGLER_INFO.name, c.RUN_HANG_SUSPECT_RATIO.name)


class Named(NamedTuple):
    """Rank that a verdict names, empty for a whole host, with kind and ranks of the process group."""

    rank: str
    kind: str
    ranks: str


@dataclass
class Outcome:
    """Result of a trial: seconds from the fault to the right name (None: not named), and all other names."""

    kind: str
    trial: Trial
    layout: Layout
    after: float | None = None
    line: str = ""  # of the job's code, where the rank is missing or late
    wrong: set[Named] = field(default_factory=set)
    judged: bool = False  # its waits

    @property
    def right(self) -> bool:
        """Whether the right rank alone was named, with its line of code, or rightly none."""
        return not self.wrong and (self.judged if self.trial.rank is None else self.done)

    @property
    def done(self) -> bool:
        """Whether the rank and its line are known."""
        return self.after is not None and self.line != ""

    def judge(self, page: Page, seconds: float) -> None:
        """Add what the ledger's page shows so many seconds after the fault."""
        names = page.names(self.trial.run)
        self.wrong |= {name for name in names if not self.expects(name)}
        self.judged = self.judged or page.judged(self.trial.run)
        if names and not self.wrong and self.after is None:
            self.after = seconds
        if self.after is not None and not self.line:
            self.line = page.line(self.trial)

    def expects(self, one: Named) -> bool:
        """Return whether a name is right: the rank, in the group where it is late or missing or in a finer one."""
        rank, where = self.trial.rank, self.trial.where
        if one.rank != str(rank) or rank is None or one.kind not in ("tp", where):
            return False
        members = self.layout.members(one.kind, rank)
        ranks = ranks_of(one.ranks)
        return {rank} < {*ranks} <= {*members} if one.kind == "pp" else ranks == members


def trial(kind: str, number: int) -> Trial:
    """Return a trial of a kind with another rank and another place for each number."""
    _, where, late = KINDS[kind]
    rank = (3 * number + 1) % SIZE if where else None
    name = f"{kind}-{number}".replace(" ", "-").replace(",", "")
    return Trial(name, rank, where, late, (number + number // SIZE) % (2 * MICROBATCHES))


class Job:
    """Eight ranks, and the trial that they are in."""

    def __init__(self, folder: Path, outcomes: list[Outcome], endpoints: Sequence[str]) -> None:
        folder.mkdir()
        self._outcomes, self._number, self._since = outcomes, 0, time.monotonic()
        self._control: Control
        layout, trials = outcomes[0].layout, [one.trial for one in outcomes]
        self._control, self.pids = start(folder, layout, trials, endpoints)
        self._begun = self._ending = False

    def look(self, page: Page) -> Outcome | None:
        """Judge the open trial by the ledger's page. Return its outcome once it has ended. Raises RuntimeError."""
        if self._number == len(self._outcomes):
            return None
        one, steps, now = self._outcomes[self._number], self._control.steps[self._number], time.monotonic()
        if not self._begun and steps >= USUAL:
            self._begun, self._since = True, now
        if not self._begun and now > self._since + STARTS_IN:
            raise RuntimeError(f"{one.trial.run} does not start")
        seconds = now - self._since
        one.judge(page, seconds)
        if self._begun and not self._ending and (one.done or seconds > limit(one)):
            self._ending = True
            self._control.end(self._number)
        if steps < self._control.last[self._number]:
            return None
        self._number, self._begun, self._ending, self._since = self._number + 1, False, False, now
        return one


def limit(one: Outcome) -> float:
    """Return the seconds after which a trial ends in any case."""
    return HEALTHY_SECONDS if one.trial.rank is None else MAX_SECONDS


class Page:
    """Series and stacks of a ledger at one time."""

    def __init__(self, ledger: ledger_process.Ledger) -> None:
        self._ledger = ledger
        self._names: dict[str, set[Named]] = {}
        self._judged: set[str] = set()
        for family in text_string_to_metric_families(ledger.ask("GET", "/metrics")[1]):
            for sample in family.samples:
                if sample.name in NAMES:
                    named = Named(*(sample.labels[key] for key in ("rank", "group", "ranks")))
                    self._names.setdefault(sample.labels["run"], set()).add(named)
                elif sample.name == c.RUN_STRAGGLER_RATIO.name:
                    self._judged.add(sample.labels["run"])

    def names(self, run: str) -> set[Named]:
        """Return the names that the verdicts on a run give."""
        return self._names.get(run, set())

    def judged(self, run: str) -> bool:
        """Return whether the waits of a run are judged."""
        return run in self._judged

    def line(self, trial: Trial) -> str:
        """Return the line at which the stacks show that a trial's rank stands still or is late, empty without it."""
        text = self._ledger.ask("GET", f"/v1/runs/stacks?run={trial.run}")[1]
        stacks = {part.partition(",")[0]: part for part in f"\n{text}".split("\nrank ") if part.strip()}
        own = stacks.pop(str(trial.rank), "")
        if not trial.late:
            found = re.search(r'File "\S*/(parallel_job\.py)", line (\d+), in stand_still\n', own)
            return f"{found[1]}:{found[2]}" if found else ""
        own_shares, others = shares(own), shares("".join(stacks.values()))
        latest = max(own_shares, key=lambda line: own_shares[line] - others.get(line, 0), default="")
        return latest if latest == late_line(trial.where) and stacks else ""


def shares(stacks: str) -> dict[str, int]:
    """Return the percentage of samples at each line of the job's code."""
    return {line: int(share) for share, line in re.findall(r"^ +(\d+)% (parallel_job\.py:\d+)", stacks, re.MULTILINE)}


def late_line(where: str) -> str:
    """Return the only line of the job's code at which a rank is late there."""
    lines = enumerate(Path(parallel_job.__file__).read_text().splitlines(), 1)
    [number] = [number for number, code in lines if f'self._late("{where}"' in code]
    return f"parallel_job.py:{number}"


def outcomes_of(kinds: Sequence[str], trials: Sequence[int], jobs: int) -> Iterator[Outcome]:
    """Yield the outcome of each trial of each kind as it ends. Raises RuntimeError."""
    import torch.distributed  # noqa: F401 - once, before the ranks are forked

    every = [Outcome(kind, trial(kind, number), KINDS[kind][0]) for number in trials for kind in kinds]
    shares = [[one for one in every if one.layout == layout] for layout in (ALL, PIPELINE)]
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        ledger = opened.enter_context(ledger_process.serving(folder / "ledger"))
        flags = ("--ledger", f"http://127.0.0.1:{ledger.port}", "--series=core")
        hosts = [
            opened.enter_context(exporter(folder / f"node-{number}", *flags, "--host", f"node-{number}"))
            for number in range(HOSTS)
        ]
        endpoints = [f"http://{host.otlp}" for host in hosts]
        running: list[Job] = []
        for share in shares:
            each = max(1, round(jobs * len(share) / len(every)))
            for number in range(min(each, len(share))):
                running.append(Job(folder / f"job-{len(running)}", share[number::each], endpoints))
                opened.callback(_kill, running[-1].pids)
        left = len(every)
        while left:
            page = Page(ledger)
            for job in running:
                if (ended := job.look(page)) is not None:
                    left -= 1
                    yield ended
            time.sleep(1.0)


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def row(kind: str, outcomes: Sequence[Outcome]) -> str:
    """Return the line of a kind in the table."""
    after = sorted(one.after for one in outcomes if one.after is not None)
    right, wrong = sum(one.right for one in outcomes), sum(bool(one.wrong) for one in outcomes)
    lines = sum(bool(one.line) for one in outcomes)
    times = (quantile(after, 0.5), quantile(after, 0.95), after[-1]) if after else ()
    shown = "".join(f"{seconds:>7.1f}" for seconds in times) or f"{'-':>7}" * 3
    return f"{kind:<22}{len(outcomes):>7}{right:>7}{wrong:>7}{lines:>7}{shown}"


def main() -> None:
    """Print each trial as it ends, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1, help="trials of each kind (default 1)")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial (default 0)")
    parser.add_argument("--jobs", type=int, default=6, help="jobs side by side, of eight ranks each (default 6)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that timeout(1) leaves no process
    found: list[Outcome] = []
    for one in outcomes_of(options.kinds, range(options.first, options.first + options.trials), options.jobs):
        found.append(one)
        after = "" if one.after is None else f"after {one.after:.0f} s {one.line}"
        print(one.trial.run, "right" if one.right else "NOT RIGHT", after, *one.wrong, file=sys.stderr, flush=True)
    print(f"{'kind':<22}{'trials':>7}{'right':>7}{'wrong':>7}{'line':>7}{'p50 s':>7}{'p95 s':>7}{'max s':>7}")
    for kind in options.kinds:
        print(row(kind, [one for one in found if one.kind == kind]))
    if not all(one.right for one in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
