"""`flopwatch whatif`: print from a trace of operations what makes a step slow, and what mending it would gain.

Format and method: `flopwatch.verdicts.operations`.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopwatch.commands import Commands, command
from flopwatch.settings import SettingsError

if TYPE_CHECKING:
    from flopwatch.verdicts.operations import Operation, Replay

MENDED = (1, 2, 4)  # numbers of the slowest workers
MAX_WORKERS = 8  # whose part is computed
SHOWN = 6  # lines of a part of the page

Worker = tuple[int, int]  # replica and pipeline stage


def run(options: argparse.Namespace) -> None:
    """Print what makes the steps of a trace slow. Raises SettingsError."""
    from flopwatch.verdicts.operations import Replay, TraceError, read

    try:
        answer = analysis(Replay(read(options.trace)))
    except TraceError as error:
        raise SettingsError(str(error)) from None
    print(json.dumps(answer, indent=2) if options.json else page(answer))


def analysis(replay: "Replay") -> dict[str, Any]:
    """Return the seconds of a step as traced, with all operations of a kind alike, and without the slowest workers.

    A slowdown is that of a step in which only one part of the job keeps its traced times, as a ratio to a step in which
    no part does. The parts are kinds of operations, pipeline stages, replicas, and the slowest workers.
    """
    operations = {operation for _, _, operation in replay.seconds}
    kinds = sorted({operation.kind for operation in operations})
    stages = sorted({operation.stage for operation in operations})
    ideal, traced = replay.step_seconds(), replay.step_seconds(lambda replica, operation: True)

    def alone(part: "Callable[[int, Operation], object]", value: object) -> float:
        """Return the slowdown if only the operations whose `part` is `value` keep their traced times."""
        return replay.step_seconds(lambda replica, operation: part(replica, operation) == value) / ideal

    def without(workers: Sequence[Worker]) -> float:
        return replay.step_seconds(lambda replica, operation: (replica, operation.stage) not in workers)

    by_kind = {kind: alone(lambda _, operation: operation.kind, kind) for kind in kinds}
    by_stage = {stage: alone(lambda _, operation: operation.stage, stage) for stage in stages}
    by_replica = {replica: alone(lambda replica, _: replica, replica) for replica in replay.replicas}
    # A worker slows its stage and its replica, so the lower of the two bounds its own part.
    workers = sorted(
        ((replica, stage) for replica in replay.replicas for stage in stages),
        key=lambda worker: -min(by_replica[worker[0]], by_stage[worker[1]]),
    )[:MAX_WORKERS]
    by_worker = {worker: alone(lambda replica, operation: (replica, operation.stage), worker) for worker in workers}
    slowest = sorted(by_worker, key=lambda worker: -by_worker[worker])
    mended = {number: without(slowest[:number]) for number in MENDED if number <= len(slowest)}
    return {
        "steps": len(replay.steps),
        "replicas": len(replay.replicas),
        "stages": len(stages),
        "step_seconds": traced,
        "ideal_step_seconds": ideal,
        "slowdown": traced / ideal,
        "slowdown_by_operation": by_kind,
        "slowdown_by_stage": {str(stage): value for stage, value in by_stage.items()},
        "slowdown_by_replica": {str(replica): value for replica, value in by_replica.items()},
        "slowdown_by_worker": [
            {"replica": replica, "stage": stage, "slowdown": by_worker[replica, stage]} for replica, stage in slowest
        ],
        "mended": {str(number): seconds for number, seconds in mended.items()},
    }


def page(answer: dict[str, Any]) -> str:
    """Return an analysis as text."""
    traced = answer["step_seconds"]
    lines = [
        f"{answer['steps']} steps of {answer['replicas']} replicas in {answer['stages']} stages",
        f"a step took {traced:.3f} s, and {answer['ideal_step_seconds']:.3f} s if all operations of a kind were alike: "
        f"slowdown {answer['slowdown']:.3f}",
        "",
        "slowdown by one part alone",
    ]
    for name in ("operation", "stage", "replica"):
        parts = sorted(answer[f"slowdown_by_{name}"].items(), key=lambda part: -part[1])[:SHOWN]
        lines += [f"  {f'{name} {part}' if name != 'operation' else part:<28}{value:.3f}" for part, value in parts]
    for worker in answer["slowdown_by_worker"][:SHOWN]:
        text = f"replica {worker['replica']}, stage {worker['stage']}"
        lines.append(f"  {text:<28}{worker['slowdown']:.3f}")
    lines += ["", "a step if the slowest workers had been as fast as usual"]
    lines += [
        f"  {f'{number} mended':<28}{seconds:.3f} s, {1 - seconds / traced:.1%} less"
        for number, seconds in answer["mended"].items()
    ]
    return "\n".join(lines)


def add(commands: Commands) -> None:
    """Register the command and its flags."""
    text = "print from a trace of operations which part of a job slows its steps, and what mending it gains"
    parser = command(commands, "whatif", run, text)
    parser.add_argument("trace", metavar="TRACE", type=Path, help="Parquet file in the format of StragglerAnalysis")
    parser.add_argument("--json", action="store_true", help="print JSON")
