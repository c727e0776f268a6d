"""Ledger of all runs, in memory. A start after `completed` begins a new generation of the run, with counters at 0."""

from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from typing import Any

from flopwatch import catalogue as m
from flopwatch.catalogue import Sample
from flopwatch.ledger import views
from flopwatch.ledger.record import LedgerRecord, RankKey, RunKey
from flopwatch.ledger.run import RunLedger

MAX_RUNS_WITH_SERIES = 500  # each has about 100 series


class Ledger:
    """Ledger of all runs by tenant and name, in memory. `received` has the Unix time of each run's last record.

    Runs in `retired` ended long ago. They have no series, and start as a new generation. `executor` judges large runs.
    """

    def __init__(self, silent_after: float = 60.0, executor: Executor | None = None) -> None:
        self._silent_after, self._executor = silent_after, executor
        self.runs: dict[RunKey, RunLedger] = {}
        self.received: dict[RunKey, float] = {}
        self.retired: set[RunKey] = set()
        self._with_pid: set[RunKey] = set()  # runs with a process that an exporter knows, since the ledger's start
        self._with_series: set[RunKey] = set()

    def apply(self, line: Mapping[str, Any] | LedgerRecord, received: float | None = None) -> set[RunKey]:
        """Apply a record received at `received` (Unix time) and return the keys of changed runs. Raises RecordError."""
        record = line if isinstance(line, LedgerRecord) else LedgerRecord.parse(line)
        key, changed = record.key, {record.key}
        run = self.runs.get(key)
        if run is None:
            run = RunLedger(*key, self._silent_after)
        elif (
            (run.ended == "completed" or key in self.retired)
            and record.event != "submitted"
            and run.place(record) == "next"
        ):
            old, run = run, self._next_generation(run)
            self.received[old.tenant, old.name] = self.received[key]
            changed.add((old.tenant, old.name))
        run.executor = self._executor
        run.apply(record, received)
        if run.attempt is not None or run.submitted is not None:  # a late record of a forgotten run is not a new run
            self.runs[key] = run
            self.received[key] = record.t if received is None else received
            if record.pid:
                self._with_pid.add(key)
        return changed

    def wanted_stacks(self, records: Iterable[LedgerRecord]) -> list[RankKey]:
        """Return the ranks of the records' hosts whose stacks are requested."""
        known = [(one, self.runs[one.key].stacks) for one in records if one.key in self.runs]
        return sorted({(*one.key, rank) for one, stacks in known for rank in stacks.of_host(one)})

    def forget(self, key: RunKey) -> None:
        """Delete a run."""
        del self.runs[key], self.received[key]
        self._with_pid.discard(key)

    def _next_generation(self, old: RunLedger) -> RunLedger:
        """Rename a completed run to `RUN#GENERATION`, and return an empty run for its next generation."""
        generation, since = old.generation + 1, old.buckets.frontier
        run = RunLedger(old.tenant, old.name, self._silent_after, generation=generation, since=since)
        old.name = f"{old.name}#{old.generation}"
        for one in (old, run):  # the rows of the old name are written again under the new one, or deleted
            one.reporters.changed |= old.reporters.nodes.keys()
            one.changed_history |= old.history.keys()
            one.incidents.changed |= old.incidents.by_number.keys()
            one.incidents.evidence.changed |= old.incidents.evidence.hosts()
        run.reporters.past = dict(old.reporters.past)
        self.runs[old.tenant, old.name] = old
        if old.resubmitted > old.buckets.frontier:
            run.submitted = run.resubmitted = old.resubmitted
        return run

    def families(self, now: float, new: Container[RunKey] = ()) -> Iterator[list[Sample]]:
        """Yield how many runs have series as of `now`, then the samples of each. Counters of runs in `new` are 0."""
        served = [key for key in self.runs if key not in self.retired]
        shown = self._with_series = set(sorted(served, key=lambda key: self._order(key, now))[:MAX_RUNS_WITH_SERIES])
        counts = {"exported": len(shown), "without_series": len(served) - len(shown)}
        runs = [(key, self.runs[key]) for key in served if key in shown]
        yield [(m.FLOPWATCH_LEDGER_RUNS, (name,), count) for name, count in counts.items()]
        for key, run in runs:
            yield views.families(run, now, new=key in new)

    def _order(self, key: RunKey, now: float) -> tuple[bool, bool, float, bool]:
        """Return the sort key of a run: runs with the highest have no series if there are too many runs.

        Ended runs are dropped first, then runs without a known process, each time the longest silent first. Among
        reporting runs, those that have series keep them.
        """
        silent = now - self.received[key]
        silent = silent if silent > self._silent_after else 0.0
        return self.runs[key].ended is not None, key not in self._with_pid, silent, key not in self._with_series

    def summary(self, now: float | None = None) -> dict[str, Any]:
        """Return the summary of every run by name, as of `now` in Unix time or else of the run's last record."""
        runs = {f"{key[0]}/{key[1]}" if key[0] else key[1]: run for key, run in self.runs.items()}
        return {"runs": {name: views.summary(run, now) for name, run in runs.items()}}
