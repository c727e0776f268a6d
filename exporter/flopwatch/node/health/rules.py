"""Rules of a host's fitness for training: each has a reason, its verdict, and what to do. docs/check.md has the table.

`data/health_rules.csv` has the rules in the order of docs/check.md. Each finds the series of its first row at one of
the numbers `equals`, or `above` a number, with `of` as their last label. Or it names a function of `searches.py`, which
gets `of` as an argument. `data/health_rises.csv` has the limits of counters, and `data/health_actions.csv` the actions.

Actions follow the driver's own recovery action (NVML field 230, nvmlDeviceGpuRecoveryAction_t), if there is one.
Otherwise they follow NVIDIA's guidelines (https://docs.nvidia.com/deploy/gpu-debug-guidelines/) and Xid catalogue
(https://docs.nvidia.com/deploy/xid-errors/). Ports are judged as in leptonai/gpud and NVIDIA/NVSentinel. A port without
a known role counts as compute. The limit of the NVLink bit error ratio after correction is DCGM's.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from flopwatch.catalogue import BY_NAME, Metric
from flopwatch.catalogue.xid import read_table
from flopwatch.node.health import searches
from flopwatch.node.health.facts import Facts, Found

OK, DEGRADED, BAD, UNKNOWN = "ok", "degraded", "bad", "unknown"

ACTIONS = {row["action"]: row["what_to_do"] for row in read_table("health_actions.csv")}  # by label of the series


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule for one reason: verdict, label of the action, text, the rows it reads, and the search for affected parts."""

    reason: str
    verdict: str
    action: str
    text: str
    rows: tuple[Metric, ...]
    find: Callable[[Facts], Iterator[Found]]


def _search(row: Metric, columns: Mapping[str, str]) -> Callable[[Facts], Iterator[Found]]:
    """Return the search of a rule in the table, whose first row is `row`."""
    text, last, name = columns["text"], columns["of"], columns["search"]
    if name:
        search: Callable[..., Iterator[Found]] = getattr(searches, name)
        return partial(search, of=last) if last else search
    numbers, above = [*map(float, columns["equals"].split())], float(columns["above"] or math.inf)

    def find(facts: Facts) -> Iterator[Found]:
        for labels, number in facts.of(row).items():
            if (number in numbers or number > above) and last in ("", labels[-1]):
                yield facts.found(row, labels, f"{text} ({number:g})" if number > above else text)

    return find


def _rule(columns: Mapping[str, str]) -> Rule:
    rows = tuple(BY_NAME[name] for name in columns["rows"].split())
    search = _search(rows[0], columns)
    return Rule(columns["reason"], columns["verdict"], columns["action"], columns["text"], rows, search)


RULES: tuple[Rule, ...] = tuple(map(_rule, read_table("health_rules.csv")))


@dataclass(frozen=True, slots=True)
class Rise:
    """Limit of an error counter: a rise of more than `per_second` between two looks is a reason for a verdict."""

    reason: str
    verdict: str
    action: str
    text: str
    row: Metric
    per_second: float
    but: frozenset[str]  # values of the row's last label that are exempt


def _rise(columns: Mapping[str, str]) -> Rise:
    row, limit, but = BY_NAME[columns["row"]], float(columns["per_minute"] or 0) / 60, columns["but"].split()
    return Rise(columns["reason"], columns["verdict"], columns["action"], columns["text"], row, limit, frozenset(but))


RISES: tuple[Rise, ...] = tuple(map(_rise, read_table("health_rises.csv")))
