"""Test the script that `helm test` runs, against a real exporter, Prometheus and Alertmanager.

It names each missing part, and reports success once everything is there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

import flopwatch
from alerts import AlertSettings, alertmanager_yaml, rules_yaml
from demo.servers import find
from demo.stack import Child, fetch, free_ports
from tests.support import ROOT
from tests.support.chart import CHART, container, only, render
from tests.support.machine import until

spec = importlib.util.spec_from_file_location("check", CHART / "files" / "check.py")
assert spec is not None
assert spec.loader is not None
check: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check)

NO_RECEIVER = {"route": {"receiver": "null"}, "receivers": [{"name": "null"}]}


def arguments(variant: str) -> list[str]:
    """Return the arguments of the test pod, without the script."""
    (pod,) = only(render(variant), "Pod")["spec"]["containers"]
    assert pod["command"] == ["python", "-c"]
    script, *rest = pod["args"]
    assert script.strip() == (CHART / "files" / "check.py").read_text(encoding="utf-8").strip()
    return list(rest)


def test_the_pods_arguments_name_what_the_install_made() -> None:
    assert arguments("defaults") == [
        "--exporters=demo-flopwatch-exporter:9450",
        "--kubernetes=https://kubernetes.default.svc",
        "--ledger=http://demo-flopwatch-ledger:9451",
        "--namespace=observability",
        "--seconds=120",
    ]
    assert arguments("kube-prometheus-stack")[3:] == [
        "--prometheus=http://kps-kube-prometheus-stack-prometheus.monitoring:9090",
        '--monitor=podmonitor with the labels {"release":"kps"}',
        "--rules=http://kps-kube-prometheus-stack-prometheus.monitoring:9090",
        '--rules-are=prometheusrule with the labels {"release":"kps"}',
        "--alertmanager=http://kps-kube-prometheus-stack-alertmanager.monitoring:9093",
        "--receiver=",
        "--namespace=observability",
        "--seconds=120",
    ]
    assert arguments("hardened")[2:4] == [
        "--ledger=https://demo-flopwatch-ledger:9451",
        "--ledger-ca-file=/etc/flopwatch/ledger-ca/ca.crt",
    ]
    assert "--rules=http://vmalert-gpu.monitoring:8080" in arguments("victoria-metrics")
    assert not [text for text in arguments("no-ledger") if text.startswith(("--ledger", "--rules"))]


def test_what_it_asks_for_is_there_to_be_asked() -> None:
    text = (CHART / "files" / "check.py").read_text(encoding="utf-8")
    assert set(re.findall(r"flopwatch_\w+", text)) <= flopwatch.catalogue.BY_NAME.keys()
    assert check.WATCHDOG in (CHART / "files" / "rules" / "fleet.yaml").read_text(encoding="utf-8")


def status(wanted: int, made: int, ready: int) -> dict[str, int]:
    return {"desiredNumberScheduled": wanted, "currentNumberScheduled": made, "numberReady": ready}


def event(name: str, message: str, time: str) -> dict[str, Any]:
    return {"involvedObject": {"name": name}, "message": message, "lastTimestamp": time, "type": "Warning"}


# Of a real API server.
NO_CLASS = 'Error creating: pods "demo-exporter-" is forbidden: pod rejected: RuntimeClass "nvidia" not found'
PULLING = 'Failed to pull image "flopwatch:0.2.0": not found'


@pytest.mark.parametrize(
    ("pods", "events", "expected"),
    [
        (status(2, 2, 2), [], None),
        (status(0, 0, 0), [], "no node matches the DaemonSet demo-exporter: compare exporter.nodeSelector"),
        (
            status(2, 0, 0),
            [
                event("demo-exporter", NO_CLASS, "2026-11-24T10:00:09Z"),
                event("demo-exporter", "an earlier one", "2026-11-24T10:00:01Z"),
                event("another", "of something else", "2026-11-24T10:00:12Z"),
            ],
            f"the DaemonSet demo-exporter has 0 pods, for 2 nodes: {NO_CLASS}",
        ),
        (
            status(2, 2, 1),
            [event("demo-exporter-x7k2p", PULLING, "2026-11-24T10:00:09Z")],
            f"the DaemonSet demo-exporter has 1 pods that are ready, for 2 nodes: {PULLING}",
        ),
        (
            status(2, 1, 1),
            [],
            "the DaemonSet demo-exporter has 1 pods, for 2 nodes; see kubectl describe daemonset demo-exporter",
        ),
    ],
)
def test_a_node_without_its_exporter_fails_the_test_with_the_reason_of_the_event(
    pods: dict[str, int], events: list[Any], expected: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {
        "/apis/apps/v1/namespaces/gpu/daemonsets/demo-exporter": {"status": pods},
        "/api/v1/namespaces/gpu/events": {"items": events},
    }
    tokens = set()

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            tokens.add(self.headers["Authorization"])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answers[self.path.partition("?")[0]]).encode())

        def log_message(self, *_: Any) -> None:
            pass

    (tmp_path / "token").write_text("of the account")
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        kubernetes = check.Kubernetes(f"http://127.0.0.1:{server.server_port}", "gpu", tmp_path)
        if expected is None:
            assert check.daemonset(kubernetes, "demo-exporter") == "each of 2 nodes has its exporter"
        else:
            url = f"--kubernetes=http://127.0.0.1:{server.server_port}"
            flags = [url, f"--account={tmp_path}", "--namespace=gpu", "--exporters=demo-exporter:9450"]
            assert check.main(flags) == 1
            assert f"failed: {expected}" in capsys.readouterr().out
        server.shutdown()
    assert tokens == {"Bearer of the account"}


def test_the_tests_account_may_get_what_it_asks_for_and_no_more() -> None:
    objects = render("defaults")
    role, binding, pod = only(objects, "Role"), only(objects, "RoleBinding"), only(objects, "Pod")["spec"]
    assert [(rule["resources"], rule["verbs"]) for rule in role["rules"]] == [
        (["daemonsets"], ["get"]),
        (["events"], ["list"]),
    ]
    account = binding["subjects"][0]["name"]
    assert pod["serviceAccountName"] == account == only(objects, "ServiceAccount", "-test")["metadata"]["name"]
    assert pod["automountServiceAccountToken"] is True
    assert all("helm.sh/hook" in made["metadata"]["annotations"] for made in (role, binding))
    without = render("namespace")
    assert only(without, "Pod")["spec"]["automountServiceAccountToken"] is False
    assert "--kubernetes" not in str(only(without, "Pod"))


class Cluster:
    """Real exporter, Prometheus and Alertmanager on loopback, with configurations that a test can change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        servers = find()
        assert servers.alertmanager, servers.why
        ports = free_ports(4)
        self.exporter, self.prometheus, self.alertmanager, self.nothing = (f"127.0.0.1:{port}" for port in ports)
        # Ten times as fast, so that the rules are evaluated every 1.5 s.
        (folder / "rules.yaml").write_text(rules_yaml(AlertSettings(pace=10)))
        self.configure_prometheus(target=None, rules=False, reload=False)
        self.configure_alertmanager(NO_RECEIVER, reload=False)
        environ = os.environ | {"PYTHONPATH": "exporter"}
        self.children: dict[str, Child] = {}
        for name, command in {
            "exporter": [
                sys.executable,
                "-m",
                "flopwatch",
                "exporter",
                "--simulate=h100x8",
                f"--state={folder}/state",
                f"--listen={self.exporter}",
                "--otlp-listen=127.0.0.1:0",
            ],
            "prometheus": [
                *servers.prometheus,
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/tsdb",
                f"--web.listen-address={self.prometheus}",
                # Send an alert again soon if it fired while a new configuration was loaded. The default is a minute.
                "--rules.alert.resend-delay=1s",
            ],
            "alertmanager": [
                *servers.alertmanager,
                f"--config.file={folder}/alertmanager.yml",
                f"--storage.path={folder}/am",
                f"--web.listen-address={self.alertmanager}",
                "--cluster.listen-address=",
            ],
        }.items():
            self.children[name] = Child(name, command, environ, folder / f"{name}.log")
        for name, url in {
            "exporter": f"http://{self.exporter}/healthz",
            "prometheus": f"http://{self.prometheus}/-/ready",
            "alertmanager": f"http://{self.alertmanager}/-/ready",
        }.items():
            until(partial(self.answers, name, url))

    def answers(self, name: str, url: str) -> bool:
        self.children[name].check()
        try:
            fetch(url)
        except OSError:
            return False
        return True

    def configure_prometheus(self, target: str | None, rules: bool, reload: bool = True) -> None:
        """Reload Prometheus with another configuration."""
        (self.folder / "prometheus.yml").write_text(
            yaml.safe_dump(
                {
                    "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
                    "rule_files": [str(self.folder / "rules.yaml")] if rules else [],
                    "alerting": {"alertmanagers": [{"static_configs": [{"targets": [self.alertmanager]}]}]},
                    "scrape_configs": [
                        {
                            "job_name": "flopwatch",
                            "honor_labels": True,
                            "static_configs": [{"targets": [target], "labels": {"instance": "node-7"}}],
                        }
                    ]
                    if target
                    else [],
                }
            )
        )
        if reload:
            self.children["prometheus"].process.send_signal(signal.SIGHUP)

    def configure_alertmanager(self, config: object, reload: bool = True) -> None:
        """Reload Alertmanager with another configuration."""
        text = config if isinstance(config, str) else yaml.safe_dump(config)
        (self.folder / "alertmanager.yml").write_text(text)
        if reload:
            # Debian starts it through a shell in a mount namespace, which does not pass on a signal.
            check.ask(f"http://{self.alertmanager}/-/reload", {})

    def flags(self, seconds: float = 0, **other: str) -> list[str]:
        """Return the arguments of kube-prometheus-stack's test pod, with this cluster's addresses."""
        here = {
            "exporters": self.exporter,
            "kubernetes": "",  # there is none here
            "ledger": f"http://{self.exporter}",
            "prometheus": f"http://{self.prometheus}",
            "rules": f"http://{self.prometheus}",
            "alertmanager": f"http://{self.alertmanager}",
            "seconds": f"{seconds:g}",
        } | other
        names = [text.partition("=")[0].removeprefix("--") for text in arguments("kube-prometheus-stack")]
        assert here.keys() <= set(names)
        values = dict(text.removeprefix("--").split("=", 1) for text in arguments("kube-prometheus-stack"))
        return [f"--{name}={here.get(name, values[name])}" for name in names]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        yield made
    finally:
        for child in made.children.values():
            child.stop()


def wait_for_failure(capsys: pytest.CaptureFixture[str], flags: list[str], text: str) -> None:
    """Wait until the check fails with `text` in its last line."""
    last = ""

    def failed() -> bool:
        nonlocal last
        capsys.readouterr()
        status = check.main(flags)
        last = capsys.readouterr().out
        return status == 1 and text in last.splitlines()[-1]

    try:
        until(failed)
    except AssertionError as error:
        raise AssertionError(f"{text!r} was not reported; last: {last}") from error
    assert last.splitlines()[-1].startswith("failed: ")


@pytest.mark.long
def test_each_missing_part_is_named_until_nothing_is_missing(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Repair one problem after another, as in a first installation."""
    wait_for_failure(
        capsys, cluster.flags(exporters="no-such-service.invalid:9450"), "no exporter runs: no-such-service.invalid"
    )
    wait_for_failure(capsys, cluster.flags(exporters=cluster.nothing), "/metrics does not answer")
    wait_for_failure(capsys, cluster.flags(exporters=cluster.prometheus), "is not a flopwatch exporter")
    wait_for_failure(
        capsys, cluster.flags(ledger=f"http://{cluster.prometheus}/no"), "/no/healthz answers 404 Not Found"
    )
    wait_for_failure(capsys, cluster.flags(prometheus=f"http://{cluster.nothing}"), "/api/v1/query does not answer")
    wait_for_failure(
        capsys,
        cluster.flags(),
        "Prometheus has no series of ours, and 0 targets. We are a podmonitor with the "
        'labels {"release":"kps"}: compare that with what it selects',
    )
    with pytest.raises(check.MissingError, match=r"has none of our rules\. They are a vmrule: compare"):
        check.rules(f"http://{cluster.prometheus}", "vmrule")
    with pytest.raises(check.MissingError, match="FlopwatchWatchdog, which fires always, has not come to Alertmanager"):
        check.watchdog(f"http://{cluster.alertmanager}")
    cluster.configure_prometheus(cluster.nothing, rules=False)
    wait_for_failure(
        capsys, cluster.flags(), "connection refused. If a NetworkPolicy stands between, see networkPolicy.prometheus"
    )
    cluster.configure_prometheus(cluster.exporter, rules=True)
    wait_for_failure(
        capsys,
        cluster.flags(),
        "Alertmanager routes the test alert to null: that reaches no receiver. Set routing.kind",
    )
    cluster.configure_alertmanager(alertmanager_yaml(AlertSettings(watchdog_url="http://127.0.0.1:1/")))
    wait_for_failure(
        capsys, cluster.flags(receiver="pager"), "routes the test alert to slack: none matches tests.receiver, pager"
    )
    wait_for_failure(capsys, cluster.flags(alertmanager=f"http://{cluster.nothing}", rules=""), "does not answer")
    script = only(render("defaults"), "Pod")["spec"]["containers"][0]["args"][0]
    done = subprocess.run(
        [sys.executable, "-I", "-c", script, *cluster.flags(seconds=60)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(
        r"exporters that answer: 1\nthe ledger answers\nPrometheus has the series of 1 exporters\n"
        r"our \d{3} rules are evaluated\nFlopwatchWatchdog has come from Prometheus to Alertmanager\n"
        r"Alertmanager routes an alert to slack\n",
        done.stdout,
    )
    # No receiver was notified: every test alert has ended within group_wait.
    url = f"http://{cluster.alertmanager}/api/v2/alerts?filter=alertname={check.ALERT}"
    until(lambda: json.loads(fetch(url)) == [])
    notified = fetch(f"http://{cluster.alertmanager}/metrics").decode()
    assert (
        sum(
            float(count)
            for count in re.findall(
                r'^alertmanager_notification_requests_total\{.*integration="slack".*\} (\S+)', notified, re.MULTILINE
            )
        )
        == 0
    )


def test_it_waits_for_what_is_about_to_come(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Start the check right after an install, before Prometheus has loaded anything."""
    tried = []

    def comes() -> str:
        tried.append(time.monotonic())
        if len(tried) < 3:
            raise check.MissingError("not yet")
        return "there"

    check.until(30, comes, pause=0.01)
    assert (capsys.readouterr().out, len(tried)) == ("there\n", 3)
    with pytest.raises(check.MissingError, match="never"):
        check.until(0.05, lambda: exec("raise MissingError('never')", vars(check)), pause=0.01)


def test_it_runs_where_the_image_runs() -> None:
    """The pod has the image's Python and no files of its own that it could write to."""
    pod = only(render("defaults"), "Pod")["spec"]
    (one,) = pod["containers"]
    assert one["image"] == container(only(render("defaults"), "StatefulSet"))["image"]
    assert one["securityContext"]["readOnlyRootFilesystem"] is True
    imported = set(re.findall(r"^(?:import|from) (\w+)", one["args"][0], re.MULTILINE))
    assert imported <= sys.stdlib_module_names
