"""Test of `helm test`: each node has its exporter, Prometheus has their series and rules, and alerts reach a receiver.

Each check is repeated until it succeeds or the time is over, as a Prometheus needs a minute or two to load new objects.
A failure names what is missing and the value to change. The test alert ends before it is sent to anyone: its route is
read at once, and Alertmanager waits for group_wait.

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
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

ALERT = "FlopwatchTest"
WATCHDOG = "FlopwatchWatchdog"  # always fires
NO_RECEIVER = re.compile(r"(.*/)?(null|none|blackhole|devnull)", re.IGNORECASE)


class MissingError(Exception):
    """Failed check. The message contains what is wrong and what to do."""


def ask(url: str, body: Any = None, ca_file: str = "", token: str = "") -> bytes:
    """Return the body of a response. Its certificate must be of this authority, or of a system one."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urlopen(
            Request(url, data, headers), timeout=10, context=ssl.create_default_context(cafile=ca_file or None)
        ) as answer:
            content: bytes = answer.read()
            return content
    except HTTPError as error:
        raise MissingError(f"{url.partition('?')[0]} answers {error.code} {error.reason}") from error
    except (OSError, ValueError) as error:
        raise MissingError(f"{url.partition('?')[0]} does not answer: {getattr(error, 'reason', error)}") from error


def api(url: str) -> Any:
    """Return the data of a response of Prometheus."""
    return json.loads(ask(url))["data"]


class Kubernetes:
    """API server at `url`, and the objects of one namespace. `account` is the folder with the token and the CA."""

    def __init__(self, url: str, namespace: str, account: Path) -> None:
        self._url, self._namespace, self._account = url, namespace, account

    def get(self, api: str, name: str) -> Any:
        """Return the object or the list `name` of an API such as apis/apps/v1."""
        try:
            token = (self._account / "token").read_text()
        except OSError as error:
            raise MissingError(f"the test has no token of a service account: {error}") from error
        ca_file = self._account / "ca.crt"
        url = f"{self._url}/{api}/namespaces/{self._namespace}/{name}"
        return json.loads(ask(url, ca_file=str(ca_file) if ca_file.exists() else "", token=token))

    def warning(self, name: str) -> str:
        """Return the last warning about a DaemonSet or one of its pods, "" without a warning."""
        events = self.get("api/v1", f"events?fieldSelector={quote('type=Warning')}")["items"]
        ours = [event for event in events if event["involvedObject"]["name"].startswith(name)]
        ours.sort(key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")
        return str(ours[-1]["message"]) if ours else ""


def daemonset(kubernetes: Kubernetes, name: str) -> str:
    """Return a line about the exporters' pods. Raises MissingError, with the event's text, if a node lacks one."""
    status = kubernetes.get("apis/apps/v1", f"daemonsets/{name}")["status"]
    wanted, made, ready = (
        status.get(key, 0) for key in ("desiredNumberScheduled", "currentNumberScheduled", "numberReady")
    )
    if not wanted:
        raise MissingError(
            f"no node matches the DaemonSet {name}: compare exporter.nodeSelector and gpuOperatorLabel with the "
            "labels of your nodes (kubectl get nodes --show-labels)"
        )
    if min(made, ready) < wanted:
        what = f"{made} pods" if made < wanted else f"{ready} pods that are ready"
        why = kubernetes.warning(name)
        advice = f": {why}" if why else f"; see kubectl describe daemonset {name}"
        raise MissingError(f"the DaemonSet {name} has {what}, for {wanted} nodes{advice}")
    return f"each of {wanted} nodes has its exporter"


def exporters(address: str) -> int:
    """Return the number of exporters that answer."""
    name, _, port = address.rpartition(":")
    try:
        found = sorted({info[4][0] for info in socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)})
    except OSError as error:
        raise MissingError(
            f"no exporter runs: {name} has no address ({error}). Check with kubectl get daemonset that a node "
            "matches exporter.nodeSelector and gpuOperatorLabel"
        ) from error
    for node in found:
        at = f"[{node}]" if ":" in str(node) else node
        if b"flopwatch_build_info{" not in ask(f"http://{at}:{port}/metrics"):
            raise MissingError(f"{node}:{port} is not a flopwatch exporter")
    return len(found)


def ledger(url: str, ca_file: str) -> str:
    """Return a line about the ledger. Raises MissingError if it does not answer."""
    ask(f"{url}/healthz", ca_file=ca_file)
    return "the ledger answers"


def series(prometheus: str, expected: int, namespace: str, monitor: str) -> str:
    """Return a line about flopwatch's series in Prometheus. Raises MissingError if some are missing."""
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
    """Return a line about flopwatch's rules in a server. Raises MissingError if they are missing or fail."""
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
    """Return a line about the watchdog alert. Raises MissingError if Alertmanager does not have it."""
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
    """Return a line about the receivers of the test alert. Raises MissingError if there are none."""
    found = alerts(alertmanager, ALERT)
    if not found:
        raise MissingError("Alertmanager has taken the test alert and does not show it")
    names = sorted({one["name"] for alert in found for one in alert["receivers"]})
    receivers = [name for name in names if (re.search(receiver, name) if receiver else not NO_RECEIVER.fullmatch(name))]
    if not receivers:
        wanted = f"none matches tests.receiver, {receiver}" if receiver else "that reaches no receiver"
        raise MissingError(
            f"Alertmanager routes the test alert to {', '.join(names)}: {wanted}. Set routing.kind, or "
            "add a route to your own configuration; an AlertmanagerConfig is taken where "
            "alertmanagerConfigSelector and alertmanagerConfigNamespaceSelector select it"
        )
    return f"Alertmanager routes an alert to {', '.join(receivers)}"


def until(seconds: float, check: Callable[[], str], pause: float = 2.0) -> None:
    """Print the result of a check. Raises its error once the time is over."""
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
    """Run all checks, from the exporters to the receiver. Raises MissingError."""
    count = 0

    def answer() -> str:
        nonlocal count
        count = exporters(given.exporters)
        return f"exporters that answer: {count}"

    if given.kubernetes:
        kubernetes = Kubernetes(given.kubernetes, given.namespace, Path(given.account))
        until(given.seconds, lambda: daemonset(kubernetes, given.exporters.rpartition(":")[0]))
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
    """Run the checks with these arguments. Return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--exporters", required=True)
    parser.add_argument("--account", default="/var/run/secrets/kubernetes.io/serviceaccount")
    for name in (
        "kubernetes",
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
