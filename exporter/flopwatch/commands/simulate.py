"""`flopwatch simulate`: a cluster in virtual time, and the ledger's figures beside the truth."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from flopwatch.commands import Commands, command, need_checkout
from flopwatch.settings import SettingsError

if TYPE_CHECKING:
    from simulator.judge import Judgement
    from simulator.scenarios import Scenario


def run(options: argparse.Namespace) -> int:
    """Simulate and compare; 1 if a figure of the ledger is off by more than 1 %, or a verdict of the rules is poor."""
    need_checkout("simulate", "simulator")
    from simulator import kinds
    from simulator.faults import script
    from simulator.scenarios import SCENARIOS, simulate

    if options.scenario in kinds.SCENARIOS:
        return _verdicts(options)
    if options.scenario not in SCENARIOS:
        raise SettingsError(f"--scenario {options.scenario}: there are {', '.join((*SCENARIOS, *kinds.SCENARIOS))}")
    scenario = SCENARIOS[options.scenario].sized(options.days, options.gpus)
    faults = script(options.faults) if options.faults is not None else None
    with ExitStack() as files:
        history, metrics = (
            files.enter_context(_written(flag, path)) if path is not None else None
            for flag, path in (("--history", options.history), ("--metrics", options.metrics))
        )
        result = simulate(scenario, options.seed, faults, options.every, history, metrics, options.step)
    if options.json:
        print(json.dumps(to_json(scenario, options.seed, result.judgement, result.records), indent=2))
    else:
        print(table(scenario, options.seed, result.judgement, result.records))
    off = result.judgement.off
    for name, figure in off:
        print(f"flopwatch: {name}: {figure.name.strip()} is off by {figure.off:.1%}", file=sys.stderr)
    return 1 if off else 0


def _verdicts(options: argparse.Namespace) -> int:
    from simulator import verdicts

    given = [
        f"--{name}"
        for name in ("days", "gpus", "faults", "every", "history", "metrics")
        if getattr(options, name) is not None
    ]
    if given:
        raise SettingsError(f"--scenario {options.scenario} is of many small jobs: it takes no {' or '.join(given)}")
    if options.seeds < 1:
        raise SettingsError(f"--seeds {options.seeds}: write a number from 1 on")
    found = verdicts.evaluate(options.scenario, options.seeds, options.seed, options.rules, options.promtool)
    print(
        json.dumps(verdicts.to_json(found), indent=2)
        if options.json
        else verdicts.table(found, options.seeds, options.seed)
    )
    for row in found.poor:
        print(
            f"flopwatch: {row.kind.name}: {row.right} of {row.jobs} right, {row.wrong.total()} wrong", file=sys.stderr
        )
    return 1 if found.poor else 0


def _written(flag: str, path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{flag} {path}: {error.strerror}") from error


def to_json(scenario: Scenario, seed: int, judgement: Judgement, records: int) -> dict[str, object]:
    """Return the comparison as a JSON object."""
    return {
        "scenario": scenario.name,
        "seed": seed,
        "days": scenario.days,
        "records": records,
        "gpus": sum(job.nodes for job in scenario.jobs) * scenario.topology().gpus_per_node,
        "runs": {
            name: {
                figure.name.strip(): {
                    "unit": figure.unit,
                    "truth": figure.truth,
                    "ledger": figure.told,
                    "off": figure.off,
                }
                for figure in figures
            }
            for name, figures in judgement.figures.items()
        },
        "causes": {
            name: {
                "true": cause.true,
                "said": cause.said,
                "right": cause.right,
                "precision": cause.precision,
                "recall": cause.recall,
                "lost_gpu_hours": cause.true_gpu_seconds / 3600,
                "said_lost_gpu_hours": cause.said_gpu_seconds / 3600,
                "named_hosts": cause.placed,
                "right_hosts": cause.place_right,
            }
            for name, cause in sorted(judgement.causes.items())
        },
        "mistakes": [
            {"fault": kind, "said": said, "times": times} for (kind, said), times in judgement.mistakes.most_common()
        ],
        "missed_attempts": judgement.missed,
        "invented_attempts": judgement.invented,
        "not_judged": dict(judgement.not_judged),
    }


def table(scenario: Scenario, seed: int, judgement: Judgement, records: int) -> str:
    """Return the comparison for people."""
    gpus = sum(job.nodes for job in scenario.jobs) * scenario.topology().gpus_per_node
    lines = [
        f"{scenario.name}: {scenario.text}",
        f"{scenario.days:g} days, {gpus:,} GPUs, seed {seed}, {records:,} records",
    ]
    off = [figure for _, figure in judgement.off]
    for name, figures in judgement.figures.items():
        lines += ["", f"{name:<22}{'truth':>19}{'ledger':>19}{'off':>9}"]
        for figure in figures:
            lines.append(
                f"{figure.name:<22}{_number(figure.truth, figure.unit):>19}"
                f"{_number(figure.told, figure.unit):>19}{figure.off:>9.2%}{' !' if figure in off else ''}"
            )
    if judgement.causes:
        lines += [
            "",
            f"{'cause':<20}{'true':>6}{'said':>6}{'right':>6}{'precision':>11}{'recall':>8}"
            f"{'lost GPU-h':>13}{'said':>12}{'host right':>12}",
        ]
    for name, cause in sorted(judgement.causes.items(), key=lambda item: (": " in item[0], -item[1].true)):
        host = f"{cause.place_right}/{cause.placed}" if cause.placed else "-"
        lines.append(
            f"{name:<20}{cause.true:>6}{cause.said:>6}{cause.right:>6}{_share(cause.precision):>11}"
            f"{_share(cause.recall):>8}{cause.true_gpu_seconds / 3600:>13,.0f}{cause.said_gpu_seconds / 3600:>12,.0f}"
            f"{host:>12}"
        )
    lines += [f"  {times} x {kind}: said {said}" for (kind, said), times in judgement.mistakes.most_common()]
    lines += [
        f"  {times} x {kind}: over too soon, or a part of another loss, and not judged"
        for kind, times in judgement.not_judged.items()
    ]
    lines += [f"  not in the ledger: {loss}" for loss in judgement.missed]
    lines += [f"  did not happen: {loss}" for loss in judgement.invented]
    return "\n".join(lines)


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return (
        f"{value:,.0f} {unit}".rstrip()
        if value == round(value) or abs(value) >= 1000
        else (f"{value:.4g} {unit}".rstrip())
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def add(commands: Commands) -> None:
    """Describe the command."""
    parser = command(
        commands,
        "simulate",
        run,
        "let a cluster live through faults in virtual time, and compare the ledger's figures with the truth",
    )
    add = parser.add_argument
    add(
        "--scenario",
        default="llama3",
        metavar="NAME",
        help="llama3 (default), crash_loop, leaf_failure, rolling_maintenance, slowdowns or healthy; stragglers or "
        "hangs: what the rules say of jobs with each kind of them",
    )
    add("--days", type=_positive, metavar="N", help="how long (default: the scenario's)")
    add("--gpus", type=int, metavar="N", help="how many the job has, in nodes of 8 (default: the scenario's)")
    add("--seed", type=int, default=1, metavar="N", help="the same seed gives the same history (default 1)")
    add(
        "--faults",
        type=Path,
        metavar="FILE",
        help="a script of faults in place of the scenario's: YAML, or a JSON object a line",
    )
    add(
        "--every",
        type=_positive,
        metavar="SECONDS",
        help="let all nodes speak that often; else only when there is something to say, which gives the same figures",
    )
    add("--history", type=Path, metavar="FILE", help="write the records, for `flopwatch ledger replay`")
    add(
        "--metrics",
        type=Path,
        metavar="FILE",
        help="write what a Prometheus would have scraped, for `promtool tsdb "
        "create-blocks-from openmetrics`: the ledger's series and, of at most 256 nodes, a few of theirs",
    )
    add("--step", type=_positive, default=60.0, metavar="SECONDS", help="how often it would have (default 60)")
    add(
        "--seeds",
        type=int,
        default=50,
        metavar="N",
        help="of stragglers and hangs: so many jobs of each kind, from --seed on (default 50)",
    )
    add(
        "--rules",
        type=Path,
        default=Path("helm/files/rules.yaml"),
        metavar="FILE",
        help="the shipped rules (default helm/files/rules.yaml)",
    )
    add("--promtool", default="promtool", metavar="PROGRAM", help="Prometheus' promtool (default: on PATH)")
    add("--json", action="store_true", help="print JSON instead of tables")
