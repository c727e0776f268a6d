"""Command line of the fleet simulator: flags and output of `python -m simulator` and of `flopwatch simulate`."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from flopwatch.settings import SettingsError

PARALLEL = "parallel"  # scenario of jobs with parallel groups
VERDICTS = "verdicts"  # scenario of jobs of every kind
DESCRIPTION = "Simulate a fleet with faults in virtual time and compare the ledger's figures with the truth"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the simulator to a parser."""
    add = parser.add_argument
    add(
        "--scenario",
        default="llama3",
        metavar="NAME",
        help="llama3 (default), crash_loop, leaf_failure, rolling_maintenance, slowdowns or healthy. stragglers and "
        "hangs test the alert rules on small jobs with each kind of straggler or hang, and parallel the verdicts on "
        "jobs with tensor, context, expert, data and pipeline parallelism. verdicts judges jobs of all these kinds "
        "and 1,000 healthy hours, and prints a confusion matrix",
    )
    add("--days", type=_positive, metavar="N", help="length of the simulation (default: the scenario's)")
    add("--gpus", type=int, metavar="N", help="GPUs of the job, in nodes of 8 (default: the scenario's)")
    add("--seed", type=int, default=1, metavar="N", help="the same seed gives the same history (default 1)")
    add(
        "--faults",
        type=Path,
        metavar="FILE",
        help="faults that replace the scenario's: YAML, or one JSON object per line",
    )
    add(
        "--every",
        type=_positive,
        metavar="SECONDS",
        help="interval at which every node sends records (default: only on changes, which gives the same figures)",
    )
    add("--history", type=Path, metavar="FILE", help="write the records, for `flopwatch ledger replay`")
    add(
        "--metrics",
        type=Path,
        metavar="FILE",
        help="write the series that Prometheus would scrape, for `promtool tsdb create-blocks-from openmetrics`: "
        "the ledger's and, for clusters of at most 256 nodes, a few of each node",
    )
    add("--step", type=_positive, default=60.0, metavar="SECONDS", help="scrape interval of --metrics (default 60)")
    add(
        "--seeds",
        type=int,
        default=50,
        metavar="N",
        help="stragglers, hangs, parallel and verdicts: jobs of each kind, with seeds from --seed on (default 50)",
    )
    add("--hours", type=_positive, metavar="N", help="verdicts: length of the healthy runs together (default 1000)")
    add(
        "--rules",
        type=Path,
        nargs="+",
        default=[Path("helm/files/rules", file) for file in ("host.yaml", "run.yaml")],
        metavar="FILE",
        help="stragglers and hangs: the alert rules and the records that they read (default: host.yaml and run.yaml "
        "in helm/files/rules)",
    )
    add(
        "--promtool",
        default="promtool",
        metavar="PROGRAM",
        help="stragglers and hangs: promtool of Prometheus (default: on PATH)",
    )
    add("--json", action="store_true", help="print JSON instead of tables")


def run(options: argparse.Namespace) -> int:
    """Run the chosen scenario, print its comparison with the truth and return the exit status.

    The status is 1 if a value of the ledger differs from the truth by more than 1 %. It is also 1 if the alert rules or
    the verdicts name a wrong rank or host, or explain too few jobs of a kind. Raises SettingsError for a wrong flag.
    """
    from simulator import kinds, output
    from simulator.faults import script
    from simulator.scenarios import SCENARIOS, simulate

    if options.hours is not None and options.scenario != VERDICTS:
        raise SettingsError(f"--hours is for --scenario {VERDICTS}, not {options.scenario}")
    if options.scenario in (*kinds.SCENARIOS, PARALLEL, VERDICTS):
        return _run_verdicts(options)
    if options.scenario not in SCENARIOS:
        known = ", ".join((*SCENARIOS, *kinds.SCENARIOS, PARALLEL, VERDICTS))
        raise SettingsError(f"--scenario {options.scenario}: there are {known}")
    scenario = SCENARIOS[options.scenario].sized(options.days, options.gpus)
    faults = script(options.faults) if options.faults is not None else None
    with ExitStack() as files:
        history, metrics = (
            files.enter_context(_opened(flag, path)) if path is not None else None
            for flag, path in (("--history", options.history), ("--metrics", options.metrics))
        )
        result = simulate(scenario, options.seed, faults, options.every, history, metrics, options.step)
    if options.json:
        print(json.dumps(output.to_json(scenario, options.seed, result), indent=2))
    else:
        print(output.table(scenario, options.seed, result))
    off = result.judgement.off
    for name, figure in off:
        print(f"flopwatch: {name}: {figure.name.strip()} is off by {figure.off:.1%}", file=sys.stderr)
    return 1 if off else 0


def _run_verdicts(options: argparse.Namespace) -> int:
    from simulator import confusion, parallel_judge, verdicts

    names = ("days", "gpus", "faults", "every", "history", "metrics")
    excess = [f"--{name}" for name in names if getattr(options, name) is not None]
    if excess:
        raise SettingsError(
            f"--scenario {options.scenario} simulates many small jobs: it takes no {' or '.join(excess)}"
        )
    if options.seeds < 1:
        raise SettingsError(f"--seeds {options.seeds}: write a number of at least 1")
    if options.scenario == PARALLEL:
        rows = parallel_judge.evaluate(options.seeds, options.seed)
        print(json.dumps(parallel_judge.to_json(rows), indent=2) if options.json else parallel_judge.table(rows))
        return 1 if any(row.misnamed or row.right < verdicts.MIN_RIGHT * len(row.outcomes) for row in rows) else 0
    if options.scenario == VERDICTS:
        found = confusion.evaluate(options.seeds, options.seed, options.hours or confusion.HEALTHY_HOURS)
        print(json.dumps(found, indent=1) if options.json else confusion.markdown(found))
        return 1 if confusion.misses(found) else 0
    result = verdicts.evaluate(options.scenario, options.seeds, options.seed, options.rules, options.promtool)
    if options.json:
        print(json.dumps(verdicts.to_json(result), indent=2))
    else:
        print(verdicts.table(result, options.seeds, options.seed))
    for row in result.poor:
        wrong = f"{row.right} of {row.jobs} right, {row.wrong.total()} wrong"
        print(f"flopwatch: {row.kind.name}: {wrong}", file=sys.stderr)
    return 1 if result.poor else 0


def _opened(flag: str, path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{flag} {path}: {error.strerror}") from error


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number
