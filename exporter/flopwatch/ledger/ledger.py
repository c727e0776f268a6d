"""Ledger of all runs, in memory. A start after `completed` begins a new generation of the run, with counters at 0."""

from collections.abc import Container, Mapping
from typing import Any

from flopwatch.catalogue import Sample
from flopwatch.ledger import views
from flopwatch.ledger.record import LedgerRecord, RunKey
from flopwatch.ledger.run import RunLedger


class Ledger:
    """Ledger of all runs by tenant and name, in memory."""

    def __init__(self, silent_after: float = 60.0) -> None:
        self._silent_after = silent_after
        self.runs: dict[RunKey, RunLedger] = {}

    def apply(self, line: Mapping[str, Any] | LedgerRecord, received: float | None = None) -> set[RunKey]:
        """Apply a record received at `received` (Unix time) and return the keys of changed runs. Raises RecordError."""
        record = line if isinstance(line, LedgerRecord) else LedgerRecord.parse(line)
        key, changed = record.key, {record.key}
        run = self.runs.get(key)
        if run is None:
            run = RunLedger(*key, self._silent_after)
        elif run.ended == "completed" and record.event != "submitted" and run.place(record) == "next":
            old, run = run, self._next_generation(run)
            changed.add((old.tenant, old.name))
        run.apply(record, received)
        if run.attempt is not None or run.submitted is not None:  # a late record of a forgotten run is not a new run
            self.runs[key] = run
        return changed

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

    def families(self, now: float, new: Container[RunKey] = ()) -> list[Sample]:
        """Return the samples of all runs as of `now`, sorted by family. Counters of the runs in `new` are 0."""
        samples = [sample for key, run in self.runs.items() for sample in views.families(run, now, new=key in new)]
        return sorted(samples, key=lambda sample: sample[0].name)

    def summary(self, now: float | None = None) -> dict[str, Any]:
        """Return the summary of every run by name, as of `now` in Unix time or else of the run's last record."""
        runs = {f"{key[0]}/{key[1]}" if key[0] else key[1]: run for key, run in self.runs.items()}
        return {"runs": {name: views.summary(run, now) for name, run in runs.items()}}
