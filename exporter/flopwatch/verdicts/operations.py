"""What-if from a trace of operations: what a step would take if all ranks were alike, or all but some.

Format: one row per operation of a Megatron job, https://github.com/ByteDance-Seed/StragglerAnalysis (Parquet). The
method is that of https://arxiv.org/abs/2505.05713: operations are replayed in the order of their dependencies, each as
soon as these have ended. Communication ends a transfer after its last member began, so waits follow from the replay.
Only one rank of each tensor parallel group is traced. Interleaved pipelines are refused.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"
# Operations of a step that all replicas of a stage do together, and after the computation one after the other.
GATHER, SCATTER, SEPARATE = "params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"
CLIP, EMBEDDING = "optimizer-clip-main-grad", "embedding-grads-all-reduce"
LAYERNORM, OPTIMIZER, COLLECTION = "layernorm-grads-all-reduce", "optimizer", "gc"
TOGETHER = (GATHER, SCATTER, SEPARATE, CLIP)
COMPUTATION = (f"{FORWARD}-compute", f"{BACKWARD}-compute", OPTIMIZER, COLLECTION)
# Of a trace, in the order of the fields of Row.
COLUMNS = ("dp_rank", "stage", "step", "optype", "start_ts", "duration", "seq_id", "mc")
MAX_OVERLAP = 0.010  # seconds; a transfer may end so much before its last member began, because clocks differ


class TraceError(ValueError):
    """Exception raised for a trace that cannot be replayed. The message gives the reason."""


class Operation(NamedTuple):
    """Operation of one pipeline stage in a step: its type, its number among those of its type, and the stage."""

    kind: str
    number: int
    stage: int


Place = tuple[int, int, Operation]  # step, replica, operation


@dataclass(frozen=True, slots=True)
class Row:
    """Row of a trace: times in seconds, `chunk` the part of the model that the operation is about."""

    replica: int
    stage: int
    step: int
    kind: str
    start: float
    duration: float
    number: int
    chunk: int

    @property
    def operation(self) -> Operation:
        """Return the operation without its step and replica."""
        return Operation(self.kind, self.number, self.stage)


def read(path: Path) -> list[Row]:
    """Return the rows of a trace in the Parquet format. Needs pyarrow. Raises TraceError."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise TraceError("reading a trace needs pyarrow: pip install 'flopwatch[whatif]'") from error
    try:
        columns = parquet.read_table(path, columns=list(COLUMNS)).to_pydict()
    except (OSError, pyarrow.ArrowException) as error:
        raise TraceError(f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}") from error
    missing = set(COLUMNS) - columns.keys()
    if missing:
        raise TraceError(f"{path} has no column {', '.join(sorted(missing))}")
    return [Row(*values) for values in zip(*(columns[name] for name in COLUMNS), strict=True)]


class Replay:
    """Replay of a trace, whose steps and replicas all have the operations of its first step and replica."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows: dict[Place, Row] = {(row.step, row.replica, row.operation): row for row in rows}
        self.steps = sorted({step for step, _, _ in self._rows})
        self.replicas = sorted({replica for _, replica, _ in self._rows})
        pattern = self.steps[0], self.replicas[0]
        first = [row for (step, replica, _), row in self._rows.items() if (step, replica) == pattern]
        if any(row.chunk > 0 for row in first):
            raise TraceError(
                "the pipeline is interleaved; only traces with one chunk of the model per stage are replayed"
            )
        self._after, self._groups = _dependencies(first)
        self.seconds = self._seconds()
        kinds = defaultdict(list)
        for (_, _, operation), seconds in self.seconds.items():
            kinds[operation.kind].append(seconds)
        self.usual = {kind: (fmean if kind in COMPUTATION else median)(values) for kind, values in kinds.items()}

    def _seconds(self) -> dict[Place, float]:
        """Return the seconds of each operation, of communication without its wait for others."""
        found = {}
        for step in self.steps:
            for group in self._groups:
                rows = {(replica, one): self._row(step, replica, one) for replica in self.replicas for one in group}
                began = self._began(group, {place: row.start for place, row in rows.items()})
                for (replica, operation), row in rows.items():
                    seconds = row.start + row.duration - (began[replica] if _waits(operation) else row.start)
                    found[step, replica, operation] = seconds if seconds > -MAX_OVERLAP else 0.0
        return found

    def _began(self, group: Sequence[Operation], ready: Mapping[tuple[int, Operation], float]) -> dict[int, float]:
        """Return when a group begins in each replica: once its members are `ready`, in all replicas if these wait."""
        began = {replica: max(ready[replica, operation] for operation in group) for replica in self.replicas}
        return dict.fromkeys(began, max(began.values())) if group[0].kind in TOGETHER else began

    def _row(self, step: int, replica: int, operation: Operation) -> Row:
        try:
            return self._rows[step, replica, operation]
        except KeyError:
            kind, number, stage = operation
            raise TraceError(f"step {step}, replica {replica}: {kind} {number} of stage {stage} is missing") from None

    def step_seconds(self, measured: Callable[[int, Operation], bool] = lambda replica, operation: False) -> float:
        """Return the mean seconds of a step in which operations take the usual time of their type.

        Those for which `measured` (replica, operation) is true take as long as in the trace.
        """
        keep = {(replica, operation): measured(replica, operation) for _, replica, operation in self._rows}
        total = 0.0
        for step in self.steps:
            ends: dict[tuple[int, Operation], float] = {}
            for group in self._groups:
                ready = {
                    (replica, one): max((ends[replica, before] for before in self._after[one]), default=0.0)
                    for replica in self.replicas
                    for one in group
                }
                began = self._began(group, ready)
                for replica, one in ready:
                    seconds = self.seconds[step, replica, one] if keep[replica, one] else self.usual[one.kind]
                    ends[replica, one] = began[replica] + seconds
            total += max(ends.values())
        return total / len(self.steps)


def _waits(operation: Operation) -> bool:
    """Return whether an operation waits for others, as a send or receive does."""
    return operation.kind in (*TOGETHER, EMBEDDING) or operation.kind.endswith(("-send", "-recv"))


def _dependencies(rows: Sequence[Row]) -> tuple[dict[Operation, list[Operation]], list[list[Operation]]]:
    """Return the operations before each operation, and groups that end together, in an order for the replay."""
    after: dict[Operation, list[Operation]] = {row.operation: [] for row in rows}
    last = max(row.stage for row in rows)
    for stage in range(last + 1):
        here = sorted((row for row in rows if row.stage == stage), key=lambda row: (row.start, row.number, row.kind))
        _of_stage(here, stage in (0, last), after)
    group_of: dict[Operation, tuple[object, ...]] = {}
    for operation in after:
        kind, number, stage = operation
        if kind.endswith(("-send", "-recv")):
            direction = kind.partition("-")[0]
            to = 1 if direction == FORWARD else -1
            group_of[operation] = direction, number, stage if kind.endswith("-send") else stage - to
        elif kind in (EMBEDDING, CLIP):
            group_of[operation] = (kind,)
        else:
            group_of[operation] = operation
    groups: defaultdict[tuple[object, ...], list[Operation]] = defaultdict(list)
    for operation, group in group_of.items():
        groups[group].append(operation)
    order = TopologicalSorter[tuple[object, ...]]()
    for operation, before in after.items():
        order.add(group_of[operation], *({group_of[one] for one in before} - {group_of[operation]}))
    try:
        return after, [groups[group] for group in order.static_order()]
    except CycleError:
        raise TraceError("operations depend on each other in a circle") from None


def _of_stage(rows: Sequence[Row], has_embedding: bool, after: dict[Operation, list[Operation]]) -> None:
    """Add what is done before each operation of one stage. `rows` are in the order of their begin."""
    of = {kind: [row.operation for row in rows if row.kind == kind] for kind in {row.kind for row in rows}}
    computed = [row.operation for row in rows if row.kind.endswith("-compute")]
    for kinds in ([row.operation for row in rows if row.kind in (GATHER, SCATTER)], computed):
        _chain(after, kinds)
    for direction in (FORWARD, BACKWARD):
        passes = of[f"{direction}-compute"]
        received, sent = of.get(f"{direction}-recv", []), of.get(f"{direction}-send", [])
        if len(received) not in (0, len(passes)) or len(sent) not in (0, len(passes)):
            raise TraceError(f"stage {passes[0].stage} has not one {direction} transfer for each microbatch")
        _chain(after, received)
        _chain(after, sent)
        for number, receive in enumerate(received):
            after[passes[number]].append(receive)
            if number > 0:
                after[receive].append(passes[number - 1])
        for one, send in zip(passes, sent, strict=False):
            after[send].append(one)
    first = next(index for index, operation in enumerate(computed) if operation.kind == f"{BACKWARD}-compute")
    for kind in ("recv", "send") if first >= 2 else ():
        for operation in of.get(f"{BACKWARD}-{kind}", [])[:1]:
            after[operation].append(computed[first - 2])
    for gather in of.get(GATHER, [])[:1]:
        after[of[f"{FORWARD}-compute"][0]].append(gather)
    overlapped = SEPARATE in of
    scatter = of.get(SCATTER, [])
    chain = [computed[-1], *of.get(COLLECTION, []), *of.get(LAYERNORM, [])]
    chain += of.get(EMBEDDING, []) if has_embedding else []
    chain += of[SEPARATE] if overlapped else scatter
    _chain(after, [*chain, *of.get(CLIP, []), *of.get(OPTIMIZER, [])])
    if overlapped and scatter:
        after[scatter[0]].append(of[f"{BACKWARD}-compute"][-1])
        for operation in of.get(LAYERNORM, []):
            after[operation].append(scatter[-1])


def _chain(after: Mapping[Operation, list[Operation]], operations: Iterable[Operation]) -> None:
    for one, other in pairwise(operations):
        after[other].append(one)
