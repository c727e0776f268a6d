"""Every number, comparison, label matcher and `for` of the alerts, changed one at a time: a rule test has to notice.

promtool tests the mutants of an alert with the alert's own tests and the records it reads. A mutant that
passes every test is a hole in the tests or means the same as the alert. EQUIVALENT lists the latter, with the reason.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from alerts import Alert
from alerts.settings import duration
from demo.servers import find
from simulator.promtool import rule_test
from tests.support import TESTS
from tests.support.rule_files import ALERTS, SETTINGS, alive, seconds, under

pytestmark = pytest.mark.long

RULES = TESTS / "rules"
NAMES = sorted({alert.name for alert in ALERTS})

# How many mutants of an alert `make test` tries; 0 is all.
SAMPLE = int(os.environ.get("FLOPWATCH_MUTANTS", "5"))

# By the alert and the mutant's name: why it means the same as the alert.
EQUIVALENT: dict[tuple[str, str], str] = {
    ("FlopwatchWatchdog", "info: vector([1 -> (0)])"): "that there is a series is the alert, not its value",
    ("FlopwatchWatchdog", "info: vector([1 -> 2])"): "that there is a series is the alert, not its value",
    (
        "GpuTooFew",
        "critical: or gpu_readable)) or on (instance) [0 -> (-1)] * max by (instance) (hos",
    ): "it is the value, for the text",
    (
        "GpuXidRepeated",
        "warning: last_over_time(gpu_xid_last_timestamp_seconds"
        '[{xid=~"8|11|13|25|31|32|43|66|67|69|80|137|141"} -> {}][1d]) ) > time()',
    ): "it is matched by the Xid, which the other side has already chosen",
    # The alert is pending for a scrape; if it goes on by itself then, HostOnFaultyLeaf goes on, too. Here that one is
    # evaluated before the mutants, and not, as in its group, after the alert.
    (
        "LeafDown",
        'critical: lertname="NodeLost"}) ) > 1 and on (leaf) ALERTS[{alertname="LeafDown",alertstate="firing"} '
        '-> {alertstate="firing"}]',
    ): "the order of evaluation",
    (
        "LeafDown",
        'critical: lertname="NodeLost"}) ) > 1 and on (leaf) ALERTS[{alertname="LeafDown",alertstate="firing"} '
        '-> {alertname="LeafDown"}]',
    ): "the order of evaluation",
}

# One token of PromQL. A range or offset is not a threshold, and a label matcher is one token with its comma.
TOKEN = re.compile(
    r"""
    (?P<text>"(?:[^"\\]|\\.)*")
  | (?P<range>\[[^\]]*\]|\boffset\s+\w+)
  | (?P<parameter>\b(?:topk|bottomk|(?:histogram_)?quantile(?:_over_time)?)\b(?:\s+(?:by|without)\s*\([^)]*\))?
      \s*\(\s*[\d.]+)
  | (?P<matchers>\{[^}]*\})
  | (?P<name>[A-Za-z_:][A-Za-z0-9_:]*)
  | (?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)
  | (?P<comparison>==|!=|<=|>=|<|>)
""",
    re.VERBOSE,
)
MATCHER = re.compile(r'\w+(?:=~|!~|!=|=)"(?:[^"\\]|\\.)*"')
OTHER = {"==": "!=", "!=": "==", "<": ">", ">": "<", "<=": ">=", ">=": "<="}


@dataclass(frozen=True, slots=True)
class Mutant:
    """An alert with one change. `name` shows the change and the words around it."""

    name: str
    alert: Alert


def moved(number: str) -> tuple[str, str]:
    """Return the threshold lowered and raised by a tenth, or by one where it counts things."""
    value = float(number)
    if value < 10 and value == int(value):
        return f"({value - 1:g})", f"{value + 1:g}"
    return f"{0.9 * value:.12g}", f"{1.1 * value:.12g}"


def changes(expr: str) -> Iterator[tuple[int, int, str]]:
    """Yield every change of an expression as start, end and replacement."""
    for token in TOKEN.finditer(expr):
        start, end, text = token.start(), token.end(), token.group()
        match token.lastgroup:
            case "number":
                for other in moved(text):
                    yield start, end, other
            case "comparison":
                yield start, end, OTHER[text]
                if text in "<>" and re.match(r"\s*0\b(?!\.)", expr[end:]):
                    yield start, end, text + "="
            case "matchers":
                matchers = MATCHER.findall(text)
                for left_out in range(len(matchers)):
                    yield start, end, f"{{{','.join(matchers[:left_out] + matchers[left_out + 1 :])}}}"


def mutants(alert: Alert) -> Iterator[Mutant]:
    """Yield every mutant of an alert."""
    for start, end, text in changes(alert.expr):
        before, after = alert.expr[max(0, start - 50) : start], alert.expr[end : end + 25]
        name = " ".join(f"{before}[{alert.expr[start:end]} -> {text}]{after}".split())
        yield Mutant(f"{alert.severity}: {name}", replace(alert, expr=alert.expr[:start] + text + alert.expr[end:]))
    if alert.for_ == "0s":
        yield Mutant(f"{alert.severity}: for 1m", replace(alert, for_="1m"))
    else:
        yield Mutant(f"{alert.severity}: for 0s", replace(alert, for_="0s"))
        yield Mutant(f"{alert.severity}: for twice", replace(alert, for_=duration(2 * seconds(alert.for_))))


def sampled(found: list[Mutant]) -> list[Mutant]:
    """Return SAMPLE mutants, by a hash of what they are, so that a change of another alert keeps the choice."""
    ordered = sorted(found, key=lambda mutant: hashlib.sha256(mutant.name.encode()).digest())
    return ordered[:SAMPLE] if SAMPLE else ordered


def renamed(test: dict[str, Any], alert: str, names: list[str]) -> dict[str, Any]:
    """Return an alert's rule test as one for each of the names; texts are left out, as no mutant changes them."""
    plain = re.compile(rf'(?<=alertname=")(?:{alert})(?=")')
    groups = []
    for group in test["tests"]:
        cases = [
            {**case, "alertname": name, "exp_alerts": [{"exp_labels": one["exp_labels"]} for one in case["exp_alerts"]]}
            for case in group.get("alert_rule_test", ())
            for name in names
        ]
        queries = [
            {
                **case,
                "expr": plain.sub(name, case["expr"]),
                "exp_samples": [
                    {**sample, "labels": plain.sub(name, sample["labels"])} for sample in case["exp_samples"]
                ],
            }
            for case in group.get("promql_expr_test", ())
            for name in names
        ]
        groups.append({**group, "alert_rule_test": cases, "promql_expr_test": queries})
    return {**test, "rule_files": ["rules.yaml"], "tests": groups}


def lasts(test: dict[str, Any]) -> float:
    """Return the last evaluation time in a rule test, in seconds."""
    return max(
        seconds(case["eval_time"]) for kind in ("alert_rule_test", "promql_expr_test") for case in test.get(kind, ())
    )


def survivors(folder: Path, name: str, tried: list[tuple[str, list[Alert]]]) -> list[str]:
    """Return which of these alerts, each in its variants, pass the rule tests of the alert called `name`.

    All of them are in one rule file, under names of their own and with the alert itself, which has to pass, so that
    promtool loads the series once. The short tests run first, and a mutant that failed one is not in the next. promtool
    stops at a rule that cannot be evaluated: that one is out, and the others are run again.
    """
    test = yaml.safe_load((RULES / f"{name}.yaml").read_text())
    # Alerts that it remembers in ALERTS go with it; one that remembers itself is renamed in itself.
    base, others = under(
        [
            *(alert.expr for _, variants in tried for alert in variants),
            *(case["expr"] for group in test["tests"] for case in group.get("promql_expr_test", ())),
        ]
    )
    base += [{key: value for key, value in alert.rule(SETTINGS).items() if key != "annotations"} for alert in others]
    itself = re.compile(rf'(?<=alertname="){name}(?=")')
    left = dict(enumerate([("itself", [alert for alert in ALERTS if alert.name == name]), *tried]))
    groups = sorted(test["tests"], key=lambda group: (-lasts(group), len(group["input_series"])))
    while groups and len(left) > 1:
        rules = [
            *alive(base, groups[-1]),
            *(
                {
                    "alert": f"{name}_m{number}",
                    "expr": itself.sub(f"{name}_m{number}", alert.expr),
                    "for": alert.for_,
                    "labels": alert.labels,
                    **({"keep_firing_for": alert.keep_firing_for} if alert.keep_firing_for else {}),
                }
                for number, (_, variants) in left.items()
                for alert in variants
            ),
        ]
        (folder / "rules.yaml").write_text(json.dumps({"groups": [{"name": "one", "rules": rules}]}))
        (folder / "test.yaml").write_text(
            json.dumps(renamed({**test, "tests": [groups[-1]]}, name, [f"{name}_m{number}" for number in left]))
        )
        done = rule_test(find().promtool, folder / "test.yaml", timeout=1800)
        output = done.stdout + done.stderr
        broken = {int(number) for number in re.findall(rf"rule: {name}_m(\d+), time: ", output)}
        failed = broken or {int(number) for number in re.findall(rf"\b{name}_m(\d+)\b", output)}
        assert failed or done.returncode == 0, output
        assert 0 not in failed, output
        left = {number: one for number, one in left.items() if number not in failed}
        if not broken:
            groups.pop()
    return [mutant for number, (mutant, _) in left.items() if number]


def tried_of(name: str, sample: bool) -> list[tuple[str, list[Alert]]]:
    """Return the mutants of an alert, each with the alert's other severities as they are."""
    variants = [alert for alert in ALERTS if alert.name == name]
    found = []
    for alert in variants:
        own = [mutant for mutant in mutants(alert) if (name, mutant.name) not in EQUIVALENT]
        for mutant in sampled(own) if sample else own:
            found.append((mutant.name, [mutant.alert if one is alert else one for one in variants]))
    return found


@pytest.fixture(scope="module")
def surviving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[list[str]]]]:
    """Give, for each alert, which of its mutants survive; as many promtools run at once as there are processors."""
    longest_first = sorted(NAMES, key=lambda name: (RULES / f"{name}.yaml").stat().st_size, reverse=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {
            name: pool.submit(survivors, tmp_path_factory.mktemp(name), name, tried_of(name, sample=SAMPLE > 0))
            for name in longest_first
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", NAMES)
def test_no_mutant_of_an_alert_passes_its_rule_tests(name: str, surviving: dict[str, Future[list[str]]]) -> None:
    assert surviving[name].result() == []


@pytest.mark.skipif(SAMPLE > 0, reason="make mutations")
def test_no_rule_test_fails_for_a_mutant_listed_as_equivalent(tmp_path: Path) -> None:
    for name in {name for name, _ in EQUIVALENT}:
        variants = [alert for alert in ALERTS if alert.name == name]
        listed = [
            (mutant.name, [mutant.alert if one is alert else one for one in variants])
            for alert in variants
            for mutant in mutants(alert)
            if (name, mutant.name) in EQUIVALENT
        ]
        assert survivors(tmp_path, name, listed) == [mutant for mutant, _ in listed]


def test_every_mutant_is_a_rule_that_prometheus_reads() -> None:
    for alert in ALERTS:
        for mutant in mutants(alert):
            promql_parser.parse(mutant.alert.expr)


def test_what_is_called_equivalent_is_a_mutant_that_exists() -> None:
    existing = {(alert.name, mutant.name) for alert in ALERTS for mutant in mutants(alert)}
    assert EQUIVALENT.keys() <= existing


def test_the_changes_are_of_thresholds_comparisons_and_matchers_and_of_nothing_else() -> None:
    expr = 'topk by (a) (1, rate(x_5{b="1",c!~"2|3"}[5m] offset 1m)) > 20 and quantile by (a) (0.5, y) >= 3'
    assert [(expr[start:end], text) for start, end, text in changes(expr)] == [
        ('{b="1",c!~"2|3"}', '{c!~"2|3"}'),
        ('{b="1",c!~"2|3"}', '{b="1"}'),
        (">", "<"),
        ("20", "18"),
        ("20", "22"),
        (">=", "<="),
        ("3", "(2)"),
        ("3", "4"),
    ]
    assert [text for _, _, text in changes("x > 0")] == ["<", ">=", "(-1)", "1"]
    assert [text for _, _, text in changes("x < 1.5e-12")] == [">", "1.35e-12", "1.65e-12"]
