"""Tier of a rule, which names its rule file and follows from the series that the rule reads.

- `host` reads series and records of exporters, and every join and aggregation stays within one host. Any shard can
  evaluate it that scrapes all of a host.
- `run` reads only series and records of the ledger. It is evaluated where the ledger is scraped.
- `fleet` reads only what rules of all tiers record, and is evaluated where that is gathered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Literal

from alerts.alert import Alert
from alerts.recording import Record
from flopwatch import catalogue as m

Tier = Literal["host", "run", "fleet"]
TIERS: tuple[Tier, ...] = ("host", "run", "fleet")
# Prometheus' own series are where their target is scraped. `up` of a ledger is read together with the ledger's series.
_SCRAPED = {"up": None, "prometheus_rule_evaluation_failures_total": "host"}
OF_LEDGER = {row.name for row in m.all_metrics() if row.domain == "run"} | {
    str(m.FLOPWATCH_LEDGER_REQUESTS_TOTAL),
    str(m.FLOPWATCH_LEDGER_RUNS),
}
_ONE_HOST = {"instance", "host"}  # an exporter, which is an instance, serves one host
_AGGREGATION = r"(?:sum|avg|min|max|count|group|quantile|topk|bottomk|stddev|count_values)"
_REMEMBERED = re.compile(r'\bALERTS(?:_FOR_STATE)?\{[^}]*alertname=~?"([^"]*)"')


def tiers(rules: Iterable[Record | Alert]) -> Iterator[Tier]:
    """Yield the tier of each rule. Raises ValueError for one that fits no tier."""
    every = list(rules)
    known: dict[str, Tier | None] = {}

    def tier(name: str) -> Tier | None:
        """Return the tier of a record or alert, None while it is looked for: a rule may read its own result."""
        if name not in known:
            known[name] = None
            found = {_tier(rule, sources(rule)) for rule in every if rule.name == name}
            known[name] = found.pop() if len(found) == 1 else "fleet"
        return known[name]

    def sources(rule: Record | Alert) -> set[str]:
        """Return where a rule's series are from: `exporter` and `ledger`, or the tier of the rules that record them."""
        found: set[str | None] = set()
        for name in set(re.findall(r"[a-z_:][a-z0-9_:]*", _without_labels(rule.expr))):
            family = re.sub(r"_(?:sum|count|bucket)$", "", name)
            if name in recorded:
                found.add(tier(name))
            elif name in _SCRAPED:
                found.add(_SCRAPED[name] and "exporter")
            elif name in m.BY_NAME or family in m.BY_NAME:
                found.add("ledger" if name in OF_LEDGER else "exporter")
        for pattern in _REMEMBERED.findall(rule.expr):
            found |= {tier(name) for name in alerted if re.fullmatch(pattern, name)}
        return {one for one in found if one is not None}

    recorded = {rule.name for rule in every if isinstance(rule, Record)}
    alerted = {rule.name for rule in every if isinstance(rule, Alert)}
    for rule in every:
        yield _tier(rule, sources(rule))


def _tier(rule: Record | Alert, sources: set[str]) -> Tier:
    if sources and sources <= {"exporter", "host"} and stays_on_one_host(rule.expr):
        return "host"
    if sources and sources <= {"ledger", "run"}:
        return "run"
    if not sources & {"exporter", "ledger"}:
        return "fleet"
    raise ValueError(
        f"{rule.name} fits no tier: it reads {' and '.join(sorted(sources))}. Read the ledger only, join within one "
        "instance or host, or record each part in a rule of its own and read the records."
    )


def stays_on_one_host(expr: str) -> bool:
    """Return whether every aggregation and every join of an expression keeps a label that only one host has."""
    text = _without_labels(expr)
    kept = re.findall(r"\b(?:by|on) \(([^)]*)\)", text)
    whole = re.search(rf"\b{_AGGREGATION}\s*\(", text) or re.search(r"\b(?:without|ignoring)\b", text)
    return not whole and all(_ONE_HOST & set(labels.split(", ")) for labels in kept)


def _without_labels(expr: str) -> str:
    """Return an expression without its matchers and ranges."""
    return re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", re.sub(r'"[^"]*"', '""', expr))
