"""Conversion of a run to and from its rows in the ledger's file. The format is 3."""

from collections.abc import Iterator, Mapping
from math import inf
from types import MappingProxyType
from typing import Any

import msgspec

from flopwatch.ledger.attempt import Attempt, ReportingNode
from flopwatch.ledger.attribution import LOSSES
from flopwatch.ledger.incidents import Incident
from flopwatch.ledger.reporters import OtherAttempt
from flopwatch.ledger.run import RunLedger

# Per line an attribute of RunLedger and its saved keys, in order. `key=attribute` if the attribute has another name.
_LAYOUT = """: tenant name
reporters: silent_after last clock past set_back=clock_offsets rivals=others
buckets: frontier
: ended
incidents: recoveries recovery_seconds recovering losses=count losing=current
incidents: losing_seconds=charged_seconds losing_gpu_seconds=charged_gpu_seconds slowing=slow
incidents: settled badput horizon unsettled
: resubmitted
buckets: pending seconds gpu_seconds mark high_water committed committed_at provisional
buckets: work provisional_from positioned flops retained capacity unpriced_flops unpriced_seconds
stragglers: straggler_gpu_seconds=gpu_seconds
stacks: stacks=rows of_straggler
: generation first since submitted start attempts ends left_out page"""
_KEYS = tuple(
    (name.partition("=")[0], part, name.rpartition("=")[2])
    for part, _, names in (line.partition(":") for line in _LAYOUT.splitlines())
    for name in names.split()
)
_TIMES = ("since", "last", "resubmitted", "clock", "horizon")  # may be -inf, which msgspec encodes as null


def to_json(run: RunLedger) -> dict[str, Any]:
    """Return a run's state for the table `runs`, without its nodes, ended attempts, incidents and evidence."""
    state = {key: getattr(getattr(run, part) if part else run, name) for key, part, name in _KEYS}
    # The first step of another attempt is left out if it is unknown, and `certain` if it is false.
    state["rivals"] = {
        name: list(other) if other.certain else [x for x in other[:-1] if x is not None]
        for name, other in state["rivals"].items()
    }
    return state | {"attempt": msgspec.to_builtins(run.attempt)}


def from_json(
    state: Mapping[str, Any],
    nodes: Mapping[str, Mapping[str, Any]],
    history: Mapping[int, dict[str, Any]] = MappingProxyType({}),
    incidents: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
    evidence: Mapping[str, list[Any]] = MappingProxyType({}),
) -> RunLedger:
    """Restore a run from its saved state and rows. Raises ValueError, TypeError or LookupError if they are damaged."""
    values = {"first": 0.0} | dict(state)
    values |= {name: -inf for name in _TIMES if values.get(name) is None}
    for name in ("settled", "badput"):
        values[name] = {kind: {} for kind in LOSSES} | values.get(name, {})
    if values.get("recovering") is not None:
        values["recovering"] = tuple(values["recovering"])
    values["rivals"] = {name: OtherAttempt(*other) for name, other in values.get("rivals", {}).items()}
    run = RunLedger(values["tenant"], values["name"], values["silent_after"])
    attempt = values.pop("attempt")
    if attempt is not None:
        run.reporters.attempt = Attempt.from_json(attempt, values["attempts"])
    for key, part, name in _KEYS:
        if key in values:
            setattr(getattr(run, part) if part else run, name, values.pop(key))
    if values:
        raise ValueError(f"unknown state: {', '.join(values)}")
    run.reporters.replace({name: ReportingNode.from_json(one) for name, one in nodes.items()})
    run.history = dict(history)
    run.incidents.by_number = msgspec.convert(dict(incidents), dict[int, Incident])
    run.incidents.evidence.restore(evidence)
    return run


def changed_rows(run: RunLedger) -> Iterator[tuple[str, str | int, Any]]:
    """Yield (table, key, state) of each row of a run that changed since the last call. State None deletes it."""
    nodes, incidents, evidence = run.reporters.nodes, run.incidents.by_number, run.incidents.evidence
    for source in run.reporters.changed:
        yield "sources", source, nodes.get(source)
    for number in run.changed_history:
        yield "attempts", number, run.history.get(number)
    for number in run.incidents.changed:
        yield "incidents", number, incidents.get(number)
    for host in evidence.changed:
        yield "evidence", host, evidence.to_json(host)
    for changed in (run.reporters.changed, run.changed_history, run.incidents.changed, evidence.changed):
        changed.clear()
