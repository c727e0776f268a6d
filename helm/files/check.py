"""What `helm test` runs: do exporters answer, has Prometheus their series and our rules, and who is told of an alert?

It asks until it is so or the time is over, as a Prometheus needs a minute or two to take over what was just installed;
then it says in words what is missing and which value changes it. The alert it sends ends before anybody is told of it:
its route is asked for at once, and Alertmanager waits (group_wait) before it sends.

Standard library only: this is the argument of `python -c` in the chart's image.
"""

import argparse
import json
import re
import socket
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

ALERT = "FlopwatchTest"
WATCHDOG = "FlopwatchWatchdog"  # fires always
NOBODY = re.compile(r"(.*/)?(null|nobody|none|blackhole|devnull)", re.IGNORECASE)


class MissingError(Exception):
    """Something is not as it should be; the message says what, and what to do."""


def ask(url: str, body: Any = None, ca_file: str = "") -> bytes:
    """Return what a server answers, whose certificate is of this authority or of one that the system knows."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(
            Request(url, data, {"Content-Type": "application/json"}),
            timeout=10,
            context=ssl.create_default_context(cafile=ca_file or None),
        ) as answer:
            content: bytes = answer.read()
            return content
    except HTTPError as error:
        raise MissingError(f"{url.partition('?')[0]} answers {error.code} {error.reason}") from error
    except (OSError, ValueError) as error:
        raise MissingError(f"{url.partition('?')[0]} does not answer: {getattr(error, 'reason', error)}") from error


def api(url: str) -> Any:
    """Return the data of an answer of Prometheus."""
    return json.loads(ask(url))["data"]


def exporters(address: str) -> int:
    """Return how many exporters answer."""
    name, _, port = address.rpartition(":")
    try:
        found = sorted({info[4][0] for info in socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)})
    except OSError as error:
        raise MissingError(
            f"no exporter runs: {name} has no address ({error}). Does a node fit exporter.nodeSelector "
            "and gpuOperatorLabel? kubectl get daemonset says how many do"
        ) from error
    for node in found:
        at = f"[{node}]" if ":" in str(node) else node
        if b"flopwatch_build_info{" not in ask(f"http://{at}:{port}/metrics"):
            raise MissingError(f"{node}:{port} is no exporter of flopwatch")
    return len(found)


def ledger(url: str, ca_file: str) -> str:
    """Return that the ledger is well."""
    ask(f"{url}/healthz", ca_file=ca_file)
    return "the ledger answers"


def series(prometheus: str, expected: int, namespace: str, monitor: str) -> str:
    """Return what Prometheus has of ours."""
    query = quote("count(group by (instance) (flopwatch_build_info))")
    found = api(f"{prometheus}/api/v1/query?query={query}")["result"]
    count = int(found[0]["value"][1]) if found else 0
    if count >= expected:
        return f"Prometheus has the series of {count} exporters"
    targets = [
        target
        for target in api(f"{prometheus}/api/v1/targets?state=active")["activeTargets"]
        if target["discoveredLabels"].get("__meta_kubernetes_namespace", namespace) == namespace
        and "flopwatch" in json.dumps([target.get("scrapePool"), target["labels"]])
    ]
    errors = sorted({target["lastError"] for target in targets} - {""})
    if errors:
        raise MissingError(
            f"Prometheus has found {len(targets)} targets of ours, and cannot scrape them: "
            f"{'; '.join(errors)}. If a NetworkPolicy stands between, see networkPolicy.prometheus"
        )
    if count:
        raise MissingError(f"Prometheus has the series of {count} exporters, and {expected} answer")
    raise MissingError(
        f"Prometheus has no series of ours, and {len(targets)} targets. We are a {monitor}: compare "
        "that with what it selects (monitor.kind, monitor.labels)"
    )


def rules(url: str, are: str) -> str:
    """Return what a server evaluates of ours."""
    groups = [group for group in api(f"{url}/api/v1/rules")["groups"] if group["name"].startswith("flopwatch-")]
    if not groups:
        raise MissingError(
            f"{url} has none of our rules. They are a {are}: compare that with what it selects "
            "(rules.kind, rules.labels)"
        )
    every = [rule for group in groups for rule in group["rules"]]
    for rule in every:
        if rule.get("lastError"):
            raise MissingError(f"the rule {rule['name']} fails: {rule['lastError']}")
    return f"our {len(every)} rules are evaluated"


def alerts(alertmanager: str, name: str) -> Any:
    """Return the alerts of a name that Alertmanager has."""
    matcher = quote(f'alertname="{name}"')
    return json.loads(ask(f"{alertmanager}/api/v2/alerts?filter={matcher}"))


def watchdog(alertmanager: str) -> str:
    """Return that an alert of ours has come from Prometheus."""
    if not alerts(alertmanager, WATCHDOG):
        raise MissingError(
            f"{WATCHDOG}, which fires always, has not come to Alertmanager: does the Prometheus that "
            "has our rules send its alerts there (its page Status, Runtime)?"
        )
    return f"{WATCHDOG} has come from Prometheus to Alertmanager"


def send(alertmanager: str, namespace: str, ended: bool) -> None:
    """Send the test alert as Prometheus does, or its end."""
    now = datetime.now(timezone.utc)
    ask(
        f"{alertmanager}/api/v2/alerts",
        [
            {
                "labels": {"alertname": ALERT, "severity": "warning", "namespace": namespace},
                "annotations": {
                    "summary": "A test.",
                    "description": "helm test has sent this; nothing is wrong.",
                    "runbook_url": "",
                    "dashboard_url": "",
                },
                "startsAt": now.isoformat(),
                "endsAt": (now if ended else now + timedelta(minutes=5)).isoformat(),
            }
        ],
    )


def routed(alertmanager: str, receiver: str) -> str:
    """Return who would be told of the test alert."""
    found = alerts(alertmanager, ALERT)
    if not found:
        raise MissingError("Alertmanager has taken the test alert and does not show it")
    names = sorted({one["name"] for alert in found for one in alert["receivers"]})
    told = [name for name in names if (re.search(receiver, name) if receiver else not NOBODY.fullmatch(name))]
    if not told:
        wanted = f"none matches tests.receiver, {receiver}" if receiver else "that tells nobody"
        raise MissingError(
            f"Alertmanager routes the test alert to {', '.join(names)}: {wanted}. Set routing.kind, or "
            "add a route to your own configuration; an AlertmanagerConfig is taken where "
            "alertmanagerConfigSelector and alertmanagerConfigNamespaceSelector select it"
        )
    return f"Alertmanager routes an alert to {', '.join(told)}"


def until(seconds: float, check: Callable[[], str], pause: float = 2.0) -> None:
    """Print what a check returns. Raises what it raises once the time is over."""
    end = time.monotonic() + seconds
    while True:
        try:
            print(check(), flush=True)
            return
        except MissingError:
            if time.monotonic() >= end:
                raise
        time.sleep(pause)


def run(given: argparse.Namespace) -> None:
    """Check the chain from its begin. Raises MissingError."""
    count = 0

    def answer() -> str:
        nonlocal count
        count = exporters(given.exporters)
        return f"exporters that answer: {count}"

    until(given.seconds, answer)
    if given.ledger:
        until(given.seconds, lambda: ledger(given.ledger, given.ledger_ca_file))
    if given.prometheus:
        until(given.seconds, lambda: series(given.prometheus, count, given.namespace, given.monitor))
    if given.rules:
        until(given.seconds, lambda: rules(given.rules, given.rules_are))
    if given.alertmanager:
        if given.rules:
            until(given.seconds, lambda: watchdog(given.alertmanager))
        send(given.alertmanager, given.namespace, ended=False)
        try:
            until(min(given.seconds, 20.0), lambda: routed(given.alertmanager, given.receiver), 0.5)
        finally:
            send(given.alertmanager, given.namespace, ended=True)


def main(arguments: Sequence[str]) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--exporters", required=True)
    for name in (
        "ledger",
        "ledger-ca-file",
        "prometheus",
        "monitor",
        "rules",
        "rules-are",
        "alertmanager",
        "receiver",
        "namespace",
    ):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--seconds", type=float, default=0.0)
    try:
        run(parser.parse_args(arguments))
    except MissingError as error:
        print(f"failed: {error}.", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
