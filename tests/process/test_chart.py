"""Test the Helm chart.

It lints and renders under the Helm SDK, and its objects match Kubernetes' own schemas. Its flags, ports and secrets are
those of the code.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import tarfile
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import helm_python as helm
import kubernetes_validate
import pytest
import yaml

import flopwatch
from alerts import TIERS, AlertSettings, alertmanager_yaml, as_yaml, rules, rules_yaml
from alerts.dcgm import dcgm_rules
from dashboards.__main__ import BOARDS
from flopwatch.http import web_config
from flopwatch.node.collectors.identity.topology import SERVICE_ACCOUNT
from flopwatch.node.health import expectations
from flopwatch.settings import KUBELET_SOCKET, Address, BoardsSettings, ExporterSettings, LedgerSettings
from helm.generate import comments, readme, routing
from tests.support import ROOT
from tests.support.chart import (
    CHART,
    NAMESPACE,
    VARIANTS,
    Json,
    container,
    each_variant,
    files_of,
    mounts,
    notes,
    objects_of,
    only,
    render,
    settings_of,
)

# These kinds are not Kubernetes' own. tests/process/test_chart_monitoring.py checks them with the operators' schemas.
CRDS = {"PodMonitor", "PrometheusRule", "VMPodScrape", "VMRule", "AlertmanagerConfig"}


@each_variant
def test_the_chart_lints_strictly(variant: str) -> None:
    report = helm.lint(CHART, VARIANTS[variant], strict=True, kube_version="v1.32.0")
    assert report["errors"] == []
    assert [(m["severity"], m["error"]) for m in report["messages"]] == [(1, "icon is recommended")]


# The oldest version that the chart supports, and the three newest ones.
NEWEST = int(kubernetes_validate.latest_version().split(".")[1])
MINORS = ["1.26", *(f"1.{minor}" for minor in range(NEWEST - 2, NEWEST + 1))]


@pytest.mark.parametrize("kubernetes", MINORS)
def test_kubernetes_accepts_every_object_and_knows_every_field(kubernetes: str) -> None:
    skipped = set()
    for text in sorted({json.dumps(made) for variant in VARIANTS for made in render(variant).values()}):
        made = json.loads(text)
        try:
            kubernetes_validate.validate(made, kubernetes, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            skipped.add(made["kind"])
    assert skipped == CRDS


def test_the_check_of_kubernetes_fields_finds_a_misspelt_one() -> None:
    daemonset = only(render("defaults"), "DaemonSet")
    daemonset["spec"]["template"]["spec"]["runtimeClass"] = "nvidia"
    with pytest.raises(kubernetes_validate.ValidationError, match="runtimeClass"):
        kubernetes_validate.validate(daemonset, "1.32", strict=True)


def test_the_defaults_make_these_objects() -> None:
    assert sorted(render("defaults")) == [
        *(("ConfigMap", f"demo-flopwatch-dashboard-{name}") for name in sorted(BOARDS)),
        ("DaemonSet", "demo-flopwatch-exporter"),
        ("NetworkPolicy", "demo-flopwatch-exporter"),
        ("NetworkPolicy", "demo-flopwatch-ledger"),
        ("Pod", "demo-flopwatch-test-series"),
        ("PodMonitor", "demo-flopwatch-exporter"),
        ("PodMonitor", "demo-flopwatch-ledger"),
        ("PrometheusRule", "demo-flopwatch-fleet"),
        ("PrometheusRule", "demo-flopwatch-host"),
        ("PrometheusRule", "demo-flopwatch-run"),
        ("Role", "demo-flopwatch-test"),
        ("RoleBinding", "demo-flopwatch-test"),
        ("Secret", "demo-flopwatch-ledger"),
        ("Secret", "demo-flopwatch-otlp"),
        ("Service", "demo-flopwatch-exporter"),
        ("Service", "demo-flopwatch-ledger"),
        ("Service", "demo-flopwatch-otlp"),
        ("ServiceAccount", "demo-flopwatch"),
        ("ServiceAccount", "demo-flopwatch-exporter"),
        ("ServiceAccount", "demo-flopwatch-test"),
        ("StatefulSet", "demo-flopwatch-ledger"),
    ]


@each_variant
def test_every_object_has_the_recommended_labels(variant: str) -> None:
    for key, made in render(variant).items():
        labels = made["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "flopwatch", key
        assert labels["app.kubernetes.io/instance"] == "demo", key
        assert labels["app.kubernetes.io/managed-by"] == "Helm", key
        assert labels["app.kubernetes.io/version"] == flopwatch.__version__, key
        assert labels["helm.sh/chart"] == f"flopwatch-{helm.Chart.load(CHART).version}", key
        assert made["metadata"].get("namespace") == VARIANTS[variant].get("namespaceOverride"), key
        assert labels.items() >= VARIANTS[variant].get("commonLabels", {}).items(), key


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"exporter": {"port": "9450"}}, "at '/exporter/port': got string, want integer"),
        ({"exporter": {"kernelLog": "yes"}}, "at '/exporter/kernelLog': got string, want boolean"),
        ({"exporter": {"podResources": True}}, "at '/exporter/podResources': got boolean, want string"),
        ({"exporter": {"jobMapping": "jobs"}}, "at '/exporter/jobMapping': 'jobs' does not match pattern"),
        ({"exporter": {"topology": "slurm"}}, "at '/exporter/topology': 'slurm' does not match pattern"),
        ({"exporter": {"inspector": "otlp"}}, "at '/exporter/inspector': 'otlp' does not match pattern"),
        ({"exporter": {"dcgm": "localhost"}}, "at '/exporter/dcgm': 'localhost' does not match pattern"),
        ({"exporter": {"dcgmFields": "sm"}}, "at '/exporter/dcgmFields': 'sm' does not match pattern"),
        ({"exporter": {"expose": "dcgm-5"}}, "at '/exporter/expose': value must be one of '', 'dcgm'"),
        ({"exporter": {"series": "all"}}, "at '/exporter/series': value must be one of 'core', 'full'"),
        ({"exporter": {"simulate": "b200x8"}}, "at '/exporter/simulate': value must be one of '', 'h100x8'"),
        ({"exporter": {"ports": 9450}}, "at '/exporter': additional properties 'ports' not allowed"),
        ({"exporter": {"resources": {"limit": {}}}}, "additional properties 'limit' not allowed"),
        ({"otlp": {"hostPort": 70000}}, "at '/otlp/hostPort': maximum: got 70,000, want 65,535"),
        ({"ledger": {"url": "ledger:9451"}}, "at '/ledger/url': 'ledger:9451' does not match pattern"),
        ({"ledger": {"storage": {"size": 10}}}, "at '/ledger/storage/size': got number, want string"),
        ({"monitor": {"interval": "15"}}, "at '/monitor/interval': '15' does not match pattern"),
        ({"rules": {"labels": {"release": True}}}, "at '/rules/labels/release': got boolean, want string"),
        (
            {"monitor": {"kind": "servicemonitor"}},
            "at '/monitor/kind': value must be one of 'podmonitor', 'vmpodscrape'",
        ),
        ({"rules": {"alertLabels": {"severity": "info"}}}, "invalid propertyName 'severity'"),
        ({"routing": {"teams": ["a/b"]}}, "at '/routing/teams/0': 'a/b' does not match pattern"),
        ({"routing": {"email": {"to": "you"}}}, "at '/routing/email/to': 'you' does not match pattern"),
        ({"networkPolicy": {"prometheus": [{}]}}, "at '/networkPolicy/prometheus/0': minProperties: got 0, want 1"),
        ({"otlp": {"namespaces": ["a/b"]}}, "at '/otlp/namespaces/0': 'a/b' does not match pattern"),
        ({"networkPolicy": {"training": []}}, "at '/networkPolicy/training': minItems: got 0, want 1"),
        ({"tests": {"prometheusUrl": "http://p:9090/"}}, "at '/tests/prometheusUrl': 'http://p:9090/' does not match"),
        ({"prometheusRule": {}}, "additional properties 'prometheusRule' not allowed"),
        ({"fullnameOverride": "my.release"}, "at '/fullnameOverride': 'my.release' does not match pattern"),
        ({"image": {"repository": "registry/flopwatch:1.0"}}, "at '/image/repository': 'registry/flopwatch:1.0' does"),
        ({"image": {"digest": "sha256:12"}}, "at '/image/digest': 'sha256:12' does not match pattern"),
        ({"extraManifests": [1]}, "at '/extraManifests/0': got number, want string or object"),
    ],
)
def test_the_values_schema_refuses_a_wrong_value_and_names_it(values: Json, complaint: str) -> None:
    with pytest.raises(helm.HelmValuesError, match=re.escape(complaint)):
        helm.Chart.load(CHART).validate_schema(values)


def test_every_value_is_in_the_schema_and_has_a_comment_that_begins_with_its_name() -> None:
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))

    def check(values: Json, part: Json, prefix: str) -> None:
        assert part["additionalProperties"] is False
        assert part["properties"].keys() - values.keys() <= {"global", "enabled"}, prefix
        for key, value in values.items():
            inside = part["properties"][key]
            if "properties" in inside:
                check(value, inside, f"{prefix}{key}.")
            else:
                comment = rf"^ *# {re.escape(prefix + key)}: (?:.+\n *# )*.+\n *{key}:"
                assert re.search(comment, text, re.MULTILINE), prefix + key

    check(yaml.safe_load(text), schema, "")


@each_variant
def test_the_command_line_accepts_the_flags_and_the_ports_agree(variant: str) -> None:
    objects = render(variant)
    daemonset = only(objects, "DaemonSet")
    exporter = settings_of(daemonset)
    assert isinstance(exporter, ExporterSettings)
    assert exporter.host == "node-7"
    ports = {port["name"]: port for port in container(daemonset)["ports"]}
    assert exporter.listen == Address("::", ports["metrics"]["containerPort"])
    assert exporter.otlp_listen == Address("::", ports["otlp"]["containerPort"])
    on_node = (9450, 4318) if variant in ("slurm", "namespace") else (None, None)
    assert (ports["metrics"].get("hostPort"), ports["otlp"].get("hostPort")) == on_node
    mounted = mounts(container(daemonset))
    assert mounted[str(exporter.state)] == ("state", False)
    assert exporter.simulate == ("h100x8" if variant == "simulated" else None)
    if variant not in ("simulated", "unprivileged"):
        assert mounted[str(exporter.sysfs)] == ("sys", True)
    if variant == "no-ledger":
        assert exporter.ledger == "https://ledger.example.com"
        assert exporter.ledger_ca_file is not None
        assert mounted[str(exporter.ledger_ca_file.parent)] == ("ledger-ca", True)
        return
    statefulset = only(objects, "StatefulSet")
    ledger = settings_of(statefulset)
    assert isinstance(ledger, LedgerSettings)
    service = only(objects, "Service", "-ledger")
    scheme = "https" if variant == "hardened" else "http"
    assert exporter.ledger == f"{scheme}://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert ledger.listen == Address("::", service["spec"]["ports"][0]["port"])
    assert container(statefulset)["ports"] == [{"name": "metrics", "containerPort": ledger.listen.port}]
    claim = statefulset["spec"]["volumeClaimTemplates"][0]["metadata"]["name"]
    assert mounts(container(statefulset))[str(ledger.state)] == (claim, False)
    assert statefulset["spec"]["podManagementPolicy"] == "Parallel", "or no rollback mends what never gets ready"
    for workload in (daemonset, statefulset):
        volume, read_only = mounts(container(workload))["/tmp"]
        assert ({"name": volume, "emptyDir": {}} in workload["spec"]["template"]["spec"]["volumes"], read_only) == (
            True,
            False,
        ), "the root is read-only, and SQLite and `flopwatch doctor` need a place"


def test_exporter_and_ledger_read_the_same_token_and_the_chart_makes_it_unless_one_is_named() -> None:
    for variant, secret in (("defaults", "demo-flopwatch-ledger"), ("unprivileged", "flopwatch-ledger")):
        objects = render(variant)
        for workload in (only(objects, "DaemonSet"), only(objects, "StatefulSet")):
            settings = settings_of(workload)
            path = settings.ledger_token_file if isinstance(settings, ExporterSettings) else settings.token_file
            assert path is not None
            assert path.name == "token"
            (volume,) = [m["name"] for m in container(workload)["volumeMounts"] if m["mountPath"] == str(path.parent)]
            volumes = {entry["name"]: entry for entry in workload["spec"]["template"]["spec"]["volumes"]}
            assert volumes[volume] == {"name": volume, "secret": {"secretName": secret}}
        assert (("Secret", secret) in objects) is (variant == "defaults")
    first, second = (only(objects_of(files_of({})), "Secret", "-ledger")["data"]["token"] for _ in range(2))
    assert first != second
    assert len(first) >= 40


def test_a_ledger_elsewhere_needs_the_secret_it_asks_for() -> None:
    with helm.Chart.load(CHART) as chart, pytest.raises(Exception, match=r"ledger\.url needs ledger\.tokenSecret"):
        chart.render({"ledger": {"enabled": False, "url": "https://ledger.example.com"}})
    settings = settings_of(only(render("no-ledger"), "DaemonSet"))
    assert isinstance(settings, ExporterSettings)
    assert settings.ledger_token_file


def test_a_ledger_behind_tls_is_asked_by_its_name_and_only_it_has_the_key() -> None:
    objects = render("hardened")
    statefulset, daemonset, test = (only(objects, kind) for kind in ("StatefulSet", "DaemonSet", "Pod"))
    ledger, exporter = settings_of(statefulset), settings_of(daemonset)
    assert isinstance(ledger, LedgerSettings)
    assert isinstance(exporter, ExporterSettings)
    assert ledger.web_config is not None
    assert exporter.ledger_ca_file is not None
    folders = mounts(container(statefulset))
    volumes = {volume["name"]: volume for volume in statefulset["spec"]["template"]["spec"]["volumes"]}
    web = only(objects, "ConfigMap", "-ledger")
    assert volumes[folders[str(ledger.web_config.parent)][0]]["configMap"] == {"name": web["metadata"]["name"]}
    text = web["data"][ledger.web_config.name]
    (secret,) = [volume["secret"]["secretName"] for name, volume in volumes.items() if name == "tls"]
    assert secret == "flopwatch-ledger-tls"
    (folder,) = [path for path, (name, _) in folders.items() if name == "tls"]
    tls = web_config.parse(text).tls_server_config
    assert tls.files == (Path(folder, "tls.crt"), Path(folder, "tls.key")), "as cert-manager names them"
    for probe in ("livenessProbe", "readinessProbe"):
        assert container(statefulset)[probe]["httpGet"]["scheme"] == "HTTPS"
        assert "scheme" not in container(daemonset)[probe]["httpGet"]
    for pod, file in (
        (daemonset["spec"]["template"]["spec"], exporter.ledger_ca_file),
        (test["spec"], Path("/etc/flopwatch/ledger-ca/ca.crt")),
    ):
        (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "ledger-ca"]
        assert volume["secret"] == {"secretName": secret, "items": [{"key": "ca.crt", "path": "ca.crt"}]}
        (mount,) = [mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "ledger-ca"]
        assert (mount["mountPath"], mount["readOnly"]) == (str(file.parent), True)
    (endpoint,) = only(objects, "PodMonitor", "-ledger")["spec"]["podMetricsEndpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"] == {
        "ca": {"secret": {"name": secret, "key": "ca.crt"}},
        "serverName": urlsplit(exporter.ledger).hostname,
    }
    (plain,) = only(objects, "PodMonitor", "-exporter")["spec"]["podMetricsEndpoints"]
    assert "scheme" not in plain
    files = files_of(VARIANTS["hardened"] | {"monitor": {"kind": "annotations"}})
    annotations = [
        yaml.safe_load(files[name])["spec"]["template"]["metadata"]["annotations"]
        for name in ("ledger-statefulset.yaml", "exporter-daemonset.yaml")
    ]
    assert [found.get("prometheus.io/scheme") for found in annotations] == ["https", None]
    off = settings_of(only(objects_of(files_of({"ledger": {"tlsSecret": None}})), "DaemonSet"))
    assert (off.ledger.partition(":")[0], off.ledger_ca_file) == ("http", None), "null is how a value is taken away"


def test_cards_can_be_asked_for_by_a_mount() -> None:
    pod = only(render("hardened"), "DaemonSet")["spec"]["template"]["spec"]
    exporter = pod["containers"][0]
    asked = {one["name"]: one.get("value") for one in exporter["env"]}["NVIDIA_VISIBLE_DEVICES"]
    assert mounts({"volumeMounts": exporter["volumeMounts"]})[f"{asked}/all"] == ("devices", False)
    assert {"name": "devices", "hostPath": {"path": "/dev/null"}} in pod["volumes"]


def test_training_processes_need_the_token_that_the_chart_makes_or_that_is_named() -> None:
    for variant, secret in (("defaults", "demo-flopwatch-otlp"), ("unprivileged", "flopwatch-otlp")):
        daemonset = only(render(variant), "DaemonSet")
        settings = settings_of(daemonset)
        assert isinstance(settings, ExporterSettings)
        assert settings.otlp_token_file == Path("/etc/flopwatch/otlp/token")
        assert mounts(container(daemonset))["/etc/flopwatch/otlp"] == ("otlp-token", True)
        assert {"name": "otlp-token", "secret": {"secretName": secret}} in (
            daemonset["spec"]["template"]["spec"]["volumes"]
        )
        assert (("Secret", secret) in render(variant)) is (variant == "defaults")
        assert f"Mount the Secret {secret} at /etc/flopwatch." in notes(variant)
    off = files_of({"otlp": {"requireToken": False}})
    assert off["otlp-secret.yaml"].strip() == ""
    assert "otlp-token" not in off["exporter-daemonset.yaml"]
    assert "otlp.requireToken is false." in off["NOTES.txt"]
    assert "FLOPWATCH_TOKEN_FILE" not in off["NOTES.txt"]


def test_each_namespace_of_training_pods_gets_a_copy_of_the_token() -> None:
    files = files_of({"otlp": {"namespaces": ["team-a", "team-b"]}})
    secrets = list(yaml.safe_load_all(files["otlp-secret.yaml"]))
    assert [one["metadata"].get("namespace") for one in secrets] == [None, "team-a", "team-b"]
    assert {one["metadata"]["name"] for one in secrets} == {"demo-flopwatch-otlp"}
    assert len({one["data"]["token"] for one in secrets}) == 1
    assert len(base64.b64decode(secrets[0]["data"]["token"])) == 40
    assert "These namespaces have it: team-a, team-b." in files["NOTES.txt"]
    for one in secrets:
        kubernetes_validate.validate(one, "1.32", strict=True)


STATE = "/var/lib/flopwatch/observability-demo-flopwatch"
KERNEL_LOG = {STATE, "/sys", "/dev/kmsg"}
HOST_PATHS = {
    "simulated": set[str](),
    "unprivileged": set[str](),
    "hardened": {"/sys", "/dev/null"},
    "openshift": KERNEL_LOG,
    "mig": {STATE, "/sys"},
    "slurm": {
        *(STATE, "/sys", "/var/lib/k0s/kubelet/pod-resources", "/run/flopwatch-jobs", "/etc/slurm"),
        "/var/log/nccl-inspector",
    },
    "namespace": {*KERNEL_LOG - {STATE}, "/var/lib/flopwatch/gpu-monitoring-demo-flopwatch"},
    "kubernetes": {*KERNEL_LOG, "/var/lib/kubelet/pod-resources"},
    "gke": {*KERNEL_LOG, "/var/lib/kubelet/pod-resources", "/home/kubernetes/bin/nvidia"},
}


@each_variant
def test_only_the_container_that_reads_the_kernel_log_is_privileged_and_no_pod_asks_for_a_gpu(variant: str) -> None:
    objects = render(variant)
    pod = only(objects, "DaemonSet")["spec"]["template"]["spec"]
    host_paths = {volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
    assert host_paths == HOST_PATHS.get(variant, {"/sys"})
    assert ("runtimeClassName" in pod) is (variant not in ("simulated", "unprivileged", "gke", "gpu-operator-nri"))
    assert ("hostPID" in pod) is (variant == "slurm")
    assert pod.get("nodeSelector") == {
        "simulated": None,
        "unprivileged": {"pool": "gpu"},
        "gpu-operator": {"nvidia.com/gpu.deploy.client": "true"},
        "gke": None,
    }.get(variant, {"nvidia.com/gpu.present": "true"})
    for key, made in objects.items():
        spec = made.get("spec", {}).get("template", {}).get("spec", made.get("spec", {}))
        for each in spec.get("containers", []):
            assert not [name for kind in each.get("resources", {}).values() for name in kind if "gpu" in name], key
            security = spec.get("securityContext", {}) | each["securityContext"]
            assert security["readOnlyRootFilesystem"] is True, key
            if each["name"] == "kmsg":
                assert (security["privileged"], security["runAsUser"]) == (True, 0)
                continue
            privileged = key[0] == "DaemonSet" and variant == "gke"  # as its values say
            assert ("privileged" in security, security["allowPrivilegeEscalation"]) == (privileged, privileged), key
            added = {"add": ["SYS_ADMIN"]} if (key[0], variant) == ("DaemonSet", "mig") else {}
            assert security["capabilities"] == {"drop": ["ALL"]} | added, key
            assert ("NVIDIA_MIG_MONITOR_DEVICES" in str(each.get("env"))) is bool(added), key
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}, key
            # Run as root only where a value needs it: the node's files and the kubelet's socket belong to root.
            root = key[0] == "DaemonSet" and variant in ("gke", "kubernetes", "mig", "namespace", "openshift", "slurm")
            assert (security["runAsUser"] == 0, security["runAsNonRoot"]) == (root, not root), key
        assert key[0] == "DaemonSet" or "hostPath" not in str(spec), key


@each_variant
def test_the_kernel_log_comes_through_a_socket_that_both_containers_share(variant: str) -> None:
    daemonset = only(render(variant), "DaemonSet")
    exporter = settings_of(daemonset)
    names = [one["name"] for one in daemonset["spec"]["template"]["spec"]["containers"]]
    if variant not in ("gke", "kubernetes", "namespace", "openshift"):
        assert (names, exporter.kmsg) == (["exporter"], Path("/dev/kmsg"))
        return
    assert names == ["exporter", "kmsg"]
    kmsg = settings_of(daemonset, "kmsg")
    assert str(exporter.kmsg) == f"unix:{kmsg.listen}"
    assert mounts(container(daemonset, "kmsg")) == {
        str(kmsg.listen.parent): ("run", False),
        str(kmsg.kmsg): ("kmsg", True),
    }
    assert mounts(container(daemonset))[str(kmsg.listen.parent)] == ("run", False)
    volumes = {volume["name"]: volume for volume in daemonset["spec"]["template"]["spec"]["volumes"]}
    assert volumes["run"] == {"name": "run", "emptyDir": {}}
    assert volumes["kmsg"]["hostPath"]["path"] == "/dev/kmsg"


def test_owners_and_place_are_read_where_they_are_mounted() -> None:
    daemonset = only(render("slurm"), "DaemonSet")
    exporter, mounted = settings_of(daemonset), mounts(container(daemonset))
    volumes = {volume["name"]: volume for volume in daemonset["spec"]["template"]["spec"]["volumes"]}
    assert exporter.kubelet_socket == KUBELET_SOCKET
    for folder, path in (
        (KUBELET_SOCKET.parent, "/var/lib/k0s/kubelet/pod-resources"),
        (exporter.job_mapping, "/run/flopwatch-jobs"),
        (exporter.inspector, "/var/log/nccl-inspector"),
        (Path(exporter.topology.removeprefix("slurm:")).parent, "/etc/slurm"),
    ):
        volume, read_only = mounted[str(folder)]
        assert (volumes[volume]["hostPath"]["path"], read_only) == (path, True)
    assert Path(exporter.topology).name == "topology.conf"
    assert not [kind for kind, _ in render("slurm") if kind.startswith("ClusterRole")]


def test_the_exporter_alone_may_get_nodes_where_their_labels_give_the_place() -> None:
    objects = render("kubernetes")
    daemonset, role, binding = (only(objects, kind) for kind in ("DaemonSet", "ClusterRole", "ClusterRoleBinding"))
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"] == "observability-demo-flopwatch-exporter"
    pod = daemonset["spec"]["template"]["spec"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": pod["serviceAccountName"], "namespace": "observability"}
    ]
    assert pod["automountServiceAccountToken"] is False
    assert mounts(container(daemonset))[str(SERVICE_ACCOUNT)] == ("account", True)
    assert "account" not in str(container(daemonset, "kmsg"))
    (account,) = [volume["projected"]["sources"] for volume in pod["volumes"] if volume["name"] == "account"]
    files = [account[0]["serviceAccountToken"]["path"], account[1]["configMap"]["items"][0]["path"]]
    assert files == ["token", "ca.crt"], "what collectors/identity/topology.py reads"
    exporter = settings_of(daemonset)
    assert (exporter.topology, exporter.dcgm, exporter.dcgm_fields, exporter.expose) == (
        "kubernetes",
        "nvidia-dcgm.gpu-operator:5555",
        "1001-1005,1009",
        "dcgm",
    )


def test_values_add_to_what_the_chart_makes_and_replace_parts_of_it() -> None:
    objects = render("namespace")
    daemonset, statefulset = only(objects, "DaemonSet"), only(objects, "StatefulSet")
    assert daemonset["spec"]["updateStrategy"] == {"type": "OnDelete"}
    pod, exporter = daemonset["spec"]["template"]["spec"], container(daemonset)
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert pod["securityContext"] == {"supplementalGroups": [1000]}
    assert exporter["image"].endswith(f":{flopwatch.__version__}@{VARIANTS['namespace']['image']['digest']}")
    assert settings_of(daemonset).new_for == 300
    assert (exporter["livenessProbe"]["failureThreshold"], exporter["livenessProbe"]["timeoutSeconds"]) == (5, 5)
    assert exporter["readinessProbe"]["periodSeconds"] == 20
    assert container(daemonset, "kmsg")["resources"]["requests"] == {"cpu": "20m", "memory": "24Mi"}
    assert container(statefulset)["livenessProbe"]["failureThreshold"] == 5
    assert container(statefulset)["securityContext"]["runAsUser"] == 2000
    assert statefulset["spec"]["template"]["spec"]["priorityClassName"] == "cluster-critical"
    assert only(objects, "Service", "-exporter")["metadata"]["annotations"] == {"example.com/scraped": "true"}
    for workload in (daemonset, statefulset):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert labels.items() >= {"team": "platform", "sidecar.istio.io/inject": "false"}.items()
        assert "team" not in workload["spec"]["selector"]["matchLabels"], "a selector cannot be changed later"
    accounts = [made["metadata"] for (kind, _), made in objects.items() if kind == "ServiceAccount"]
    assert [account["annotations"] for account in accounts] == [{"example.com/owner": "platform"}] * 2
    assert only(objects, "ConfigMap", "-notes")["data"] == {"owner": "platform"}
    assert not [kind for kind, _ in objects if kind.startswith(("Role", "ClusterRole"))]
    (endpoint,) = only(objects, "PodMonitor", "-exporter")["spec"]["podMetricsEndpoints"]
    assert endpoint["metricRelabelings"] == [{"action": "labeldrop", "regex": "serial"}]


def test_every_container_has_the_limits_that_a_quota_asks_for() -> None:
    pods = [
        made["spec"].get("template", made)["spec"]
        for (kind, _), made in render("namespace").items()
        if kind in ("DaemonSet", "StatefulSet", "Pod")
    ]
    limits = [one["resources"]["limits"] for pod in pods for one in pod["containers"]]
    assert len(limits) == 4
    assert all(one.keys() == {"cpu", "memory"} for one in limits)


def test_two_renders_are_the_same_where_a_token_is_named_and_nothing_is_looked_up() -> None:
    assert files_of(VARIANTS["namespace"]) == files_of(VARIANTS["namespace"])
    (claim,) = only(render("namespace"), "StatefulSet")["spec"]["volumeClaimTemplates"]
    assert (claim["apiVersion"], claim["kind"], claim["spec"]["volumeMode"]) == (
        *("v1", "PersistentVolumeClaim"),
        "Filesystem",
    )


def test_the_operators_nri_plugin_finds_the_exporters_container_by_its_name() -> None:
    template = only(render("gpu-operator-nri"), "DaemonSet")["spec"]["template"]
    (key,) = template["metadata"]["annotations"]
    assert key == f"nvidia.cdi.k8s.io/container.{template['spec']['containers'][0]['name']}"


def test_a_driver_that_is_a_folder_of_the_node_is_mounted() -> None:
    daemonset = only(render("gke"), "DaemonSet")
    assert mounts(container(daemonset))["/usr/local/nvidia"] == ("driver", True)
    environ = {one["name"]: one.get("value") for one in container(daemonset)["env"]}
    assert environ["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"


def test_a_release_with_dots_in_its_name_has_names_that_kubernetes_accepts() -> None:
    with helm.Chart.load(CHART) as chart:
        files = chart.render({}, name="my.release", namespace=NAMESPACE)
    objects = objects_of(files)
    assert {name for kind, name in objects if kind == "Service"} == {
        f"my-release-flopwatch-{name}" for name in ("exporter", "ledger", "otlp")
    }
    for made in objects.values():
        if made["apiVersion"] in ("v1", "apps/v1"):
            kubernetes_validate.validate(made, "1.32", strict=True)


@pytest.mark.parametrize("shape", sorted((ROOT / "contrib" / "shapes").glob("*.json")), ids=lambda path: path.stem)
def test_the_nodes_expected_shape_is_read_by_the_exporter(shape: Path) -> None:
    values: Json = {"exporter": {"expect": json.loads(shape.read_text(encoding="utf-8"))}}
    objects = objects_of(files_of(values))
    daemonset, config = only(objects, "DaemonSet"), only(objects, "ConfigMap", "-expect")
    file = settings_of(daemonset).expect
    volume, read_only = mounts(container(daemonset))[str(file.parent)]
    volumes = {one["name"]: one for one in daemonset["spec"]["template"]["spec"]["volumes"]}
    assert (volumes[volume]["configMap"]["name"], read_only) == (config["metadata"]["name"], True)
    assert expectations.parse(config["data"][file.name]) == expectations.parse(shape.read_text(encoding="utf-8"))
    values["exporter"]["expect"]["gpus"] = 3
    other = only(objects_of(files_of(values)), "DaemonSet")
    restarts = [one["spec"]["template"]["metadata"]["annotations"]["checksum/expect"] for one in (daemonset, other)]
    assert restarts[0] != restarts[1], "the exporter reads it at its start"


@pytest.mark.parametrize("level", ["core", "full"])
def test_the_exporter_serves_the_level_of_the_values(level: str) -> None:
    text = files_of({"exporter": {"series": level}})["exporter-daemonset.yaml"]
    assert settings_of(yaml.safe_load(text)).series == level


def test_a_simulated_node_takes_nothing_of_the_node_whatever_else_is_asked_for() -> None:
    values = {"exporter": VARIANTS["slurm"]["exporter"] | VARIANTS["kubernetes"]["exporter"] | {"simulate": "h100x8"}}
    values["exporter"]["sysAdmin"] = True
    text = files_of(values)["exporter-daemonset.yaml"]
    pod = yaml.safe_load(text)["spec"]["template"]["spec"]
    assert "hostPath" not in text
    assert "hostPID" not in pod
    assert "SYS_ADMIN" not in text
    assert settings_of(yaml.safe_load(text)).expose == "dcgm"
    assert files_of(values)["exporter-clusterrole.yaml"].strip() == ""


@pytest.mark.parametrize(
    ("values", "needs"),
    [
        ({}, "privileged (folders of the node)"),
        ({"exporter": {"kernelLog": True}}, "privileged (the privileged container kmsg, folders of the node)"),
        ({"exporter": {"sysfs": ""}}, "restricted"),
        ({"exporter": {"sysfs": "", "podResources": "/var/lib/kubelet"}}, "privileged (folders of the node)"),
        ({"exporter": {"sysfs": "", "topology": "csv:/etc/place.csv"}}, "privileged (folders of the node)"),
        ({"exporter": {"sysfs": "", "sysAdmin": True}}, "privileged (folders of the node, CAP_SYS_ADMIN)"),
        (
            {"exporter": {"hostPID": True, "hostPort": 9450}},
            "privileged (hostPID, folders of the node, a port of the node)",
        ),
        (
            {"exporter": {"simulate": "h100x8", "hostPID": True}, "otlp": {"hostPort": 4318}},
            "privileged (a port of the node)",
        ),
        ({"exporter": {"simulate": "h100x8"}}, "restricted"),
    ],
)
def test_the_notes_name_the_pod_security_level_that_the_values_need(values: Json, needs: str) -> None:
    notes = files_of(values)["NOTES.txt"]
    assert f"must allow the level {needs}." in notes
    assert ("enforce=privileged" in notes) is needs.startswith("privileged")


def pod_security_errors(pod: Json) -> list[str]:
    """Return what the Pod Security levels restricted and baseline refuse in a pod, as far as our pods can have it.

    https://kubernetes.io/docs/concepts/security/pod-security-standards/
    """
    errors = [key for key in ("hostPID", "hostNetwork", "hostIPC") if pod.get(key)]
    allowed = {
        "configMap",
        "emptyDir",
        "projected",
        "secret",
        "downwardAPI",
        "persistentVolumeClaim",
        "csi",
        "ephemeral",
    }
    errors += [kind for volume in pod["volumes"] for kind in volume.keys() - {"name"} - allowed]
    for one in pod["containers"]:
        security = pod.get("securityContext", {}) | one["securityContext"]
        errors += ["hostPort" for port in one.get("ports", []) if port.get("hostPort")]
        errors += ["privileged"] if security.get("privileged") else []
        errors += ["capabilities"] if security.get("capabilities") != {"drop": ["ALL"]} else []
        errors += ["allowPrivilegeEscalation"] if security.get("allowPrivilegeEscalation") is not False else []
        errors += ["runAsNonRoot"] if not security.get("runAsNonRoot") or not security["runAsUser"] else []
        errors += ["seccompProfile"] if security.get("seccompProfile", {}).get("type") != "RuntimeDefault" else []
    return errors


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ({}, ["hostPath"]),
        ({"exporter": {"sysfs": ""}}, []),
        ({"exporter": {"simulate": "h100x8", "kernelLog": True}}, []),
        ({"exporter": {"podResources": "/var/lib/kubelet/pod-resources"}}, ["hostPath"] * 3 + ["runAsNonRoot"]),
        (
            {"exporter": {"kernelLog": True}},
            [
                *["hostPath"] * 3,
                "runAsNonRoot",
                *("privileged", "capabilities", "allowPrivilegeEscalation", "runAsNonRoot", "seccompProfile"),
            ],
        ),
    ],
)
def test_the_default_pods_need_nothing_but_a_folder_of_the_node(values: Json, refused: list[str]) -> None:
    objects = objects_of(files_of(values))
    exporter = only(objects, "DaemonSet")["spec"]["template"]["spec"]
    assert pod_security_errors(exporter) == refused
    level = "restricted" if not refused else "privileged"
    assert f"must allow the level {level}" in files_of(values)["NOTES.txt"]
    assert pod_security_errors(only(objects, "StatefulSet")["spec"]["template"]["spec"]) == []
    assert pod_security_errors({"volumes": [], **only(objects, "Pod")["spec"]}) == []


def test_the_notes_list_what_is_lost_without_privileges_and_why_the_exporter_is_root() -> None:
    lost = notes("defaults")
    for text in (
        "exporter.kernelLog is false.",
        "SXids",
        "before the exporter started",
        "no series has the pod of a GPU",
    ):
        assert text in lost
    assert "The exporters run as user 0" not in lost
    assert "exporter.sysfs is empty." in notes("unprivileged")
    assert "user 0, without any capability, because of exporter.kernelLog, exporter.podResources." in notes(
        "kubernetes"
    )
    assert "user 0, without any capability but CAP_SYS_ADMIN, because of exporter.sysAdmin." in notes("mig")
    assert "exporter.kernelLog is false" not in notes("kubernetes")


@each_variant
def test_every_selector_finds_the_pods_of_one_workload_and_the_port_it_names(variant: str) -> None:
    objects = render(variant)
    pods = {
        key: (made["spec"]["template"]["metadata"]["labels"], container(made)["ports"])
        for key, made in objects.items()
        if key[0] in ("DaemonSet", "StatefulSet", "Deployment")
    }
    for key, made in objects.items():
        if key[0] == "Service":
            selector, names = made["spec"]["selector"], [port["targetPort"] for port in made["spec"]["ports"]]
        elif key[0] in ("PodMonitor", "VMPodScrape"):
            selector = made["spec"]["selector"]["matchLabels"]
            names = [endpoint["port"] for endpoint in made["spec"]["podMetricsEndpoints"]]
        elif key[0] == "NetworkPolicy":
            selector = made["spec"]["podSelector"]["matchLabels"]
            names = [port["port"] for rule in made["spec"]["ingress"] for port in rule["ports"]]
        elif key in pods:
            selector, names = made["spec"]["selector"]["matchLabels"], []
        else:
            continue
        chosen = [ports for labels, ports in pods.values() if selector.items() <= labels.items()]
        assert len(chosen) == 1, key
        assert set(names) <= {port["name"] for port in chosen[0]}, key
        assert key[1].rpartition("-")[2] in (selector["app.kubernetes.io/component"], "otlp")


def test_a_training_pod_is_led_to_its_own_node() -> None:
    objects = render("defaults")
    assert only(objects, "Service", "-otlp")["spec"]["internalTrafficPolicy"] == "Local"
    assert only(objects, "Service", "-exporter")["spec"]["clusterIP"] == "None"


def test_boards_ask_for_a_password_and_the_kubelet_does_not_give_one() -> None:
    objects = render("boards")
    deployment = only(objects, "Deployment")
    settings, pod = settings_of(deployment), deployment["spec"]["template"]["spec"]
    assert settings == BoardsSettings(
        prometheus="http://prometheus.monitoring:9090",
        listen=Address("::", 9452),
        web_config=Path("/etc/flopwatch/web/web-config.yml"),
        token_file=Path("/etc/flopwatch/prometheus/token"),
    )
    mounted = mounts(container(deployment))
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for path, secret in ((settings.web_config, "boards-web"), (settings.token_file, "boards-prometheus")):
        name, read_only = mounted[str(path.parent)]
        assert (volumes[name]["secret"], read_only) == ({"secretName": secret}, True)
    for probe in ("livenessProbe", "readinessProbe"):
        assert container(deployment)[probe]["tcpSocket"] == {"port": "web"}
    assert only(objects, "Service", "-boards")["spec"]["ports"] == [{"name": "web", "port": 9452, "targetPort": "web"}]
    assert "port-forward service/demo-flopwatch-boards 9452" in notes("boards")


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (
            {"boards": {"enabled": True, "prometheusUrl": "http://p:9090"}},
            "boards.enabled needs boards.webConfigSecret",
        ),
        ({"boards": {"enabled": True, "webConfigSecret": "web"}}, "boards.enabled needs boards.prometheusUrl"),
        (
            {"openshift": {"scc": "privileged"}, "serviceAccount": {"create": False}},
            "openshift.scc needs serviceAccount",
        ),
        (
            {"monitor": {"interval": "5s"}},
            "monitor.scrapeTimeout (10s) is longer than monitor.interval (5s), which Prometheus refuses",
        ),
        ({"ledger": {"enabled": False, "tlsSecret": "tls"}}, "ledger.tlsSecret is for a ledger behind TLS"),
        (
            {"otlp": {"namespaces": ["team-a"], "tokenSecret": "own"}},
            "otlp.namespaces is for the token that the chart makes",
        ),
        ({"routing": {"kind": "secret"}}, "routing.kind needs a receiver"),
        ({"routing": {"kind": "alertmanagerconfig", "watchdogSecret": "w"}}, "routing.kind needs a receiver"),
    ],
)
def test_values_that_cannot_work_together_are_refused_with_what_is_missing(values: Json, complaint: str) -> None:
    with pytest.raises(helm.HelmError, match=re.escape(complaint)):
        files_of(values)


def test_a_network_policy_admits_only_prometheus_training_exporters_and_the_test() -> None:
    objects = render("boards")
    namespaces = {
        "monitoring": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}},
        "ingress": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}},
        "all": {"namespaceSelector": {}},
    }
    ours = {"app.kubernetes.io/name": "flopwatch", "app.kubernetes.io/instance": "demo"}
    of_any_release = {"app.kubernetes.io/name": "flopwatch", "app.kubernetes.io/component": "exporter"}
    exporters = {"podSelector": {"matchLabels": of_any_release}}
    test = {"podSelector": {"matchLabels": ours | {"app.kubernetes.io/component": "test"}}}
    policies = {name: made["spec"] for (kind, name), made in objects.items() if kind == "NetworkPolicy"}
    assert {name: spec["ingress"] for name, spec in policies.items()} == {
        "demo-flopwatch-exporter": [
            {"from": [namespaces["monitoring"], test], "ports": [{"port": "metrics"}]},
            {"from": [namespaces["all"]], "ports": [{"port": "otlp"}]},
        ],
        "demo-flopwatch-ledger": [
            {"from": [namespaces["monitoring"], exporters, test], "ports": [{"port": "metrics"}]}
        ],
        "demo-flopwatch-boards": [{"from": [namespaces["ingress"]], "ports": [{"port": "web"}]}],
    }
    assert all(spec["policyTypes"] == ["Ingress"] for spec in policies.values())
    labels = only(objects, "Pod")["metadata"]["labels"]
    assert test["podSelector"]["matchLabels"].items() <= labels.items()
    (scrapers, _) = only(render("defaults"), "NetworkPolicy", "-exporter")["spec"]["ingress"]
    assert scrapers["from"] == [namespaces["all"], test], "no Prometheus could be looked up"
    assert "these may scrape: every pod of the cluster, because no Prometheus could be looked up" in notes("defaults")
    off = objects_of(files_of({"networkPolicy": {"enabled": False}}))
    assert not [kind for kind, _ in off if kind == "NetworkPolicy"]


def test_exporters_leave_a_node_when_the_gpu_operator_takes_its_label_back() -> None:
    """Kubernetes deletes a DaemonSet's pod once a required term no longer holds. Terms are alternatives."""
    key = "nvidia.com/gpu.deploy.client"
    here, absent = {"key": key, "operator": "In", "values": ["true"]}, {"key": key, "operator": "DoesNotExist"}
    pool = {"key": "pool", "operator": "In", "values": ["training"]}

    def terms(made: Json) -> Any:
        pod = made["spec"]["template"]["spec"]
        node = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        return [term["matchExpressions"] for term in node["nodeSelectorTerms"]]

    assert terms(only(render("defaults"), "DaemonSet")) == [[here], [absent]]
    assert terms(only(render("gpu-operator"), "DaemonSet")) == [[here], [absent]]
    own = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [pool]}]}}
    files = files_of({"exporter": {"affinity": {"nodeAffinity": own}}})
    assert terms(only(objects_of(files), "DaemonSet")) == [[pool, here], [pool, absent]]
    values = {"exporter": {"gpuOperatorLabel": "", "affinity": {"podAffinity": {}}}}
    pod = only(objects_of(files_of(values)), "DaemonSet")["spec"]["template"]["spec"]
    assert pod["affinity"] == {"podAffinity": {}}
    assert "affinity" not in only(render("simulated"), "DaemonSet")["spec"]["template"]["spec"]


def test_on_openshift_our_account_alone_gets_the_security_context_constraints() -> None:
    objects = render("openshift")
    binding = only(objects, "RoleBinding", "-exporter-scc-privileged")  # a binding's role cannot be changed
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": "system:openshift:scc:privileged",
    }
    account = only(objects, "DaemonSet")["spec"]["template"]["spec"]["serviceAccountName"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}]
    assert ("ServiceAccount", account) in objects
    unprivileged = only(objects, "RoleBinding", "-others-scc-nonroot-v2")
    assert unprivileged["roleRef"]["name"] == "system:openshift:scc:nonroot-v2"
    (subject,) = unprivileged["subjects"]
    assert subject["name"] == only(objects, "StatefulSet")["spec"]["template"]["spec"]["serviceAccountName"] != account


def test_the_prometheus_rules_are_the_generated_files_with_their_templates_untouched() -> None:
    objects = render("defaults")
    made = [only(objects, "PrometheusRule", f"-{tier}") for tier in TIERS]
    assert {"groups": [group for one in made for group in one["spec"]["groups"]]} == rules(AlertSettings())
    assert "{{ $labels.run }}" in str(made)
    assert all(len(json.dumps(one)) < 200_000 for one in made)  # kubectl apply annotates with at most 262,144 bytes


def test_an_operator_before_0_66_gets_rules_without_keep_firing_for() -> None:
    kept, without = (
        [
            rule
            for (kind, _), one in render(name).items()
            if kind == "PrometheusRule"
            for group in one["spec"]["groups"]
            for rule in group["rules"]
        ]
        for name in ("defaults", "namespace")
    )
    assert any("keep_firing_for" in rule for rule in kept)
    assert without == [{key: value for key, value in rule.items() if key != "keep_firing_for"} for rule in kept]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((f"files/rules/{tier}.yaml", rules_yaml(AlertSettings(), tier)) for tier in TIERS),
        ("files/optional/dcgm.yaml", as_yaml(dcgm_rules(AlertSettings()))),
        ("files/alertmanager.yml", alertmanager_yaml(AlertSettings())),
        ("files/routing.yaml", routing()),
        ("README.md", readme()),
    ],
)
def test_the_charts_generated_files_are_what_the_code_writes(name: str, content: str) -> None:
    assert (CHART / name).read_text(encoding="utf-8") == content, "stale: run `make generate`"


def test_the_charts_readme_has_every_value_with_its_default_and_no_comment_is_cut() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| `(.*?)` \| (.+) \|$", readme(), re.MULTILINE)
    named = {name: (json.loads(default), text) for name, default, text in rows}
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    for name, (default, _) in named.items():
        value: Any = values
        for key in name.split("."):
            value = value[key]
        assert value == default, name
    assert {name.split(".")[0] for name in named} == set(values)
    # A line of a comment that looks like the name of a value would end the comment.
    assert comments((CHART / "values.yaml").read_text(encoding="utf-8")).keys() == named.keys()


def test_what_is_only_of_the_charts_making_is_not_packaged(tmp_path: Path) -> None:
    with tarfile.open(helm.package(CHART, destination=tmp_path)) as archive:
        names = {name.removeprefix("flopwatch/") for name in archive.getnames()}
    assert {"Chart.yaml", "README.md", "values.schema.json", "files/routing.yaml", "files/check.py"} <= names
    assert not [name for name in names if name.startswith("ci/") or name == "generate.py"]


def test_a_release_fits_into_the_secret_that_helm_keeps_it_in() -> None:
    """A Helm release is one Secret with the chart's files and rendered objects. Kubernetes limits a Secret to 1 MiB."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(helm.package(CHART, destination=folder)) as archive:
        files = {
            name: base64.b64encode(file.read()).decode()
            for name in archive.getnames()
            if (file := archive.extractfile(name)) is not None
        }
    release = json.dumps({"chart": files, "manifest": files_of(VARIANTS["routing"])})
    packed = len(base64.b64encode(base64.b64encode(gzip.compress(release.encode()))))
    assert 100_000 < packed < 0.7 * (1 << 20)


def test_grafanas_sidecar_finds_the_dashboards_as_they_were_generated() -> None:
    boards = {}
    for config in (made for (kind, _), made in render("unprivileged").items() if kind == "ConfigMap"):
        assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert config["metadata"]["annotations"] == {"grafana_folder": "Training"}
        assert len(json.dumps(config)) < 256 << 10  # the annotation that kubectl apply writes
        ((name, text),) = config["data"].items()
        boards[config["metadata"]["name"]] = (name, json.loads(text))
    assert boards == {
        f"watch-dashboard-{path.stem}": (f"flopwatch-{path.name}", json.loads(path.read_text(encoding="utf-8")))
        for path in CHART.glob("files/dashboards/*.json")
    }


def test_chart_and_package_have_the_same_version() -> None:
    assert helm.Chart.load(CHART).metadata["appVersion"] == flopwatch.__version__
