"""`flopwatch simulate`: a cluster in virtual time, and the ledger's figures next to the truth."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TextIO

from flopwatch.commands import Commands, command, flag, need_checkout, positive
from flopwatch.settings import SettingsError


def run(options: argparse.Namespace) -> int:
    """Simulate and compare; return 1 if a figure of the ledger is off by more than 1 %, or a verdict is poor."""
    need_checkout("simulate", "simulator")
    from simulator import kinds, output
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
    report = scenario, options.seed, result.judgement, result.records
    print(json.dumps(output.to_json(*report), indent=2) if options.json else output.table(*report))
    for name, figure in result.judgement.off:
        print(f"flopwatch: {name}: {figure.name.strip()} is off by {figure.off:.1%}", file=sys.stderr)
    return 1 if result.judgement.off else 0


def _verdicts(options: argparse.Namespace) -> int:
    from simulator import verdicts

    names = ("days", "gpus", "faults", "every", "history", "metrics")
    excess = [f"--{name}" for name in names if getattr(options, name) is not None]
    if excess:
        raise SettingsError(f"--scenario {options.scenario} is of many small jobs: it takes no {' or '.join(excess)}")
    if options.seeds < 1:
        raise SettingsError(f"--seeds {options.seeds}: write a number from 1 on")
    result = verdicts.evaluate(options.scenario, options.seeds, options.seed, options.rules, options.promtool)
    if options.json:
        print(json.dumps(verdicts.to_json(result), indent=2))
    else:
        print(verdicts.table(result, options.seeds, options.seed))
    for row in result.poor:
        wrong = f"{row.right} of {row.jobs} right, {row.wrong.total()} wrong"
        print(f"flopwatch: {row.kind.name}: {wrong}", file=sys.stderr)
    return 1 if result.poor else 0


def _written(flag: str, path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{flag} {path}: {error.strerror}") from error


def add(commands: Commands) -> None:
    """Describe the command."""
    text = "simulate a cluster with faults in virtual time, and compare the ledger's figures with the truth"
    parser = command(commands, "simulate", run, text)
    add = partial(flag, parser)
    text = "llama3 (default), crash_loop, leaf_failure, rolling_maintenance, slowdowns or healthy; stragglers or "
    text += "hangs: the verdicts of the rules on jobs with each kind of them"
    add("--scenario", "NAME", text, default="llama3")
    add("--days", "N", "how long (default: the scenario's)", positive)
    add("--gpus", "N", "how many the job has, in nodes of 8 (default: the scenario's)", int)
    add("--seed", "N", "the same seed gives the same history (default 1)", int, default=1)
    text = "a script of faults in place of the scenario's: YAML, or a JSON object a line"
    add("--faults", "FILE", text, Path)
    text = "how often every node reports (default: only when something changed, which gives the same figures)"
    add("--every", "SECONDS", text, positive)
    add("--history", "FILE", "write the records, for `flopwatch ledger replay`", Path)
    text = "write what a Prometheus would have scraped, for `promtool tsdb create-blocks-from openmetrics`: "
    text += "the ledger's series and, of at most 256 nodes, a few of theirs"
    add("--metrics", "FILE", text, Path)
    add("--step", "SECONDS", "scrape interval of --metrics (default 60)", positive, default=60.0)
    text = "of stragglers and hangs: number of jobs of each kind, from --seed on (default 50)"
    add("--seeds", "N", text, int, default=50)
    rules = Path("helm/files/rules.yaml")
    add("--rules", "FILE", f"the shipped rules (default {rules})", Path, default=rules)
    add("--promtool", "PROGRAM", "Prometheus' promtool (default: on PATH)", default="promtool")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
