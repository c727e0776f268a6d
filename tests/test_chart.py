"""The chart: it lints and renders under the Helm SDK, Kubernetes' own schemas take what it renders, and its flags,
ports and secrets are those of the code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest
import yaml

import flopwatch
from alerts import AlertSettings, alertmanager_yaml, rules, rules_yaml
from dashboards.__main__ import BOARDS
from flopwatch.__main__ import _parser
from flopwatch.node.collectors.identity.topology import SERVICE_ACCOUNT
from flopwatch.settings import KUBELET_SOCKET, Address, ExporterSettings, KmsgSettings, LedgerSettings

Json = dict[str, Any]
ROOT = Path(__file__).parent.parent
CHART = ROOT / "helm"
VARIANTS: dict[str, Json] = {"defaults": {}} | {
    path.name.removesuffix("-values.yaml"): yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted(CHART.glob("ci/*-values.yaml"))
}
CRDS = {"PodMonitor", "PrometheusRule"}  # their schemas are not Kubernetes' own
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def render(variant: str) -> dict[tuple[str, str], Json]:
    """Return what an install makes, by kind and name."""
    texts = files_of(VARIANTS[variant])
    documents = [made for path, text in texts.items() if path.endswith(".yaml") for made in yaml.safe_load_all(text)]
    return {(made["kind"], made["metadata"]["name"]): made for made in documents if made}


def files_of(values: Json) -> dict[str, str]:
    """Return the text of each template."""
    with helm.Chart.load(CHART) as chart:
        return dict(chart.render(values, name="demo", namespace="observability"))


def only(objects: dict[tuple[str, str], Json], kind: str, ending: str = "") -> Json:
    """Return the one object of this kind whose name ends so."""
    (found,) = [made for (its, name), made in objects.items() if its == kind and name.endswith(ending)]
    return found


def container(workload: Json, name: str = "") -> Json:
    """Return a container of a workload: the one of this name, else the first, whose ports and settings count."""
    containers = workload["spec"]["template"]["spec"]["containers"]
    (found,) = [one for one in containers if one["name"] == (name or containers[0]["name"])]
    return dict(found)


def mounts(one: Json) -> dict[str, tuple[str, bool]]:
    """Return what a container mounts where: volume and whether read-only, by path."""
    return {mount["mountPath"]: (mount["name"], mount.get("readOnly", False)) for mount in one["volumeMounts"]}


def settings_of(workload: Json, name: str = "") -> Any:
    """Return what our own command line makes of a container's arguments."""
    arguments = [text.replace("$(NODE_NAME)", "node-7") for text in container(workload, name)["args"]]
    kind: Any = {"exporter": ExporterSettings, "ledger": LedgerSettings, "kmsg": KmsgSettings}[arguments[0]]
    given = vars(_parser().parse_args(arguments))
    return kind(**{field.name: given[field.name] for field in fields(kind) if given.get(field.name) is not None})


@each_variant
def test_the_chart_lints_strictly(variant: str) -> None:
    report = helm.lint(CHART, VARIANTS[variant], strict=True, kube_version="v1.32.0")
    assert report["errors"] == []
    assert [(m["severity"], m["error"]) for m in report["messages"]] == [(1, "icon is recommended")]


@pytest.mark.parametrize("kubernetes", ["1.26", "1.32", kubernetes_validate.latest_version()])
@each_variant
def test_kubernetes_accepts_every_object_and_knows_every_field(variant: str, kubernetes: str) -> None:
    skipped = set()
    for (kind, _), made in render(variant).items():
        try:
            kubernetes_validate.validate(made, kubernetes, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            skipped.add(kind)
    assert skipped <= CRDS


def test_the_check_of_kubernetes_fields_finds_a_misspelt_one() -> None:
    daemonset = only(render("defaults"), "DaemonSet")
    daemonset["spec"]["template"]["spec"]["runtimeClass"] = "nvidia"
    with pytest.raises(kubernetes_validate.ValidationError, match="runtimeClass"):
        kubernetes_validate.validate(daemonset, "1.32", strict=True)


def test_the_defaults_make_these_objects() -> None:
    assert sorted(render("defaults")) == [
        *(("ConfigMap", f"demo-flopwatch-dashboard-{name}") for name in sorted(BOARDS)),
        ("DaemonSet", "demo-flopwatch-exporter"),
        ("Pod", "demo-flopwatch-test-series"),
        ("PodMonitor", "demo-flopwatch-exporter"),
        ("PodMonitor", "demo-flopwatch-ledger"),
        ("PrometheusRule", "demo-flopwatch"),
        ("Secret", "demo-flopwatch-ledger"),
        ("Service", "demo-flopwatch-exporter"),
        ("Service", "demo-flopwatch-ledger"),
        ("Service", "demo-flopwatch-otlp"),
        ("ServiceAccount", "demo-flopwatch"),
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
        assert "namespace" not in made["metadata"], key


@pytest.mark.parametrize(("values", "complaint"), [
    ({"exporter": {"port": "9450"}}, "at '/exporter/port': got string, want integer"),
    ({"exporter": {"kernelLog": "yes"}}, "at '/exporter/kernelLog': got string, want boolean"),
    ({"exporter": {"podResources": True}}, "at '/exporter/podResources': got boolean, want string"),
    ({"exporter": {"jobMapping": "jobs"}}, "at '/exporter/jobMapping': 'jobs' does not match pattern"),
    ({"exporter": {"topology": "slurm"}}, "at '/exporter/topology': 'slurm' does not match pattern"),
    ({"exporter": {"dcgm": "localhost"}}, "at '/exporter/dcgm': 'localhost' does not match pattern"),
    ({"exporter": {"expose": "dcgm-5"}}, "at '/exporter/expose': value must be one of '', 'dcgm'"),
    ({"exporter": {"simulate": "b200x8"}}, "at '/exporter/simulate': value must be one of '', 'h100x8'"),
    ({"exporter": {"ports": 9450}}, "at '/exporter': additional properties 'ports' not allowed"),
    ({"exporter": {"resources": {"limit": {}}}}, "additional properties 'limit' not allowed"),
    ({"otlp": {"hostPort": 70000}}, "at '/otlp/hostPort': maximum: got 70,000, want 65,535"),
    ({"ledger": {"url": "ledger:9451"}}, "at '/ledger/url': 'ledger:9451' does not match pattern"),
    ({"ledger": {"storage": {"size": 10}}}, "at '/ledger/storage/size': got number, want string"),
    ({"monitor": {"interval": "15"}}, "at '/monitor/interval': '15' does not match pattern"),
    ({"rules": {"labels": {"release": True}}}, "at '/rules/labels/release': got boolean, want string"),
    ({"prometheusRule": {}}, "additional properties 'prometheusRule' not allowed"),
])
def test_the_values_schema_refuses_a_wrong_value_and_names_it(values: Json, complaint: str) -> None:
    with pytest.raises(helm.HelmValuesError, match=re.escape(complaint)):
        helm.Chart.load(CHART).validate_schema(values)


def test_every_value_is_in_the_schema_and_has_a_comment_that_begins_with_its_name() -> None:
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))

    def check(values: Json, part: Json, prefix: str) -> None:
        assert part["additionalProperties"] is False
        assert part["properties"].keys() - {"global"} == values.keys(), prefix
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
    assert exporter.listen == Address("0.0.0.0", ports["metrics"]["containerPort"])
    assert exporter.otlp_listen == Address("0.0.0.0", ports["otlp"]["containerPort"])
    assert ports["otlp"].get("hostPort") == (None if variant == "unprivileged" else 4318)
    mounted = mounts(container(daemonset))
    assert mounted[str(exporter.state)] == ("state", False)
    assert exporter.simulate == ("h100x8" if variant == "simulated" else None)
    if exporter.simulate is None:
        assert mounted[str(exporter.sysfs)] == ("sys", True)
    if variant == "no-ledger":
        assert exporter.ledger == "https://ledger.example.com"
        return
    statefulset = only(objects, "StatefulSet")
    ledger = settings_of(statefulset)
    assert isinstance(ledger, LedgerSettings)
    service = only(objects, "Service", "-ledger")
    assert exporter.ledger == f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert ledger.listen == Address("0.0.0.0", service["spec"]["ports"][0]["port"])
    assert container(statefulset)["ports"] == [{"name": "metrics", "containerPort": ledger.listen.port}]
    claim = statefulset["spec"]["volumeClaimTemplates"][0]["metadata"]["name"]
    assert {"name": claim, "mountPath": str(ledger.state)} in container(statefulset)["volumeMounts"]


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
    first, second = (only(render("defaults"), "Secret")["data"]["token"] for _ in range(2))
    assert first != second
    assert len(first) >= 40


def test_a_ledger_elsewhere_needs_the_secret_it_asks_for() -> None:
    with helm.Chart.load(CHART) as chart, pytest.raises(Exception, match=r"ledger\.url needs ledger\.tokenSecret"):
        chart.render({"ledger": {"enabled": False, "url": "https://ledger.example.com"}})
    settings = settings_of(only(render("no-ledger"), "DaemonSet"))
    assert isinstance(settings, ExporterSettings)
    assert settings.ledger_token_file


def test_training_must_show_a_token_only_where_a_secret_is_named() -> None:
    assert "otlp-token" not in str(render("defaults"))
    daemonset = only(render("unprivileged"), "DaemonSet")
    settings = settings_of(daemonset)
    assert isinstance(settings, ExporterSettings)
    assert settings.otlp_token_file == Path("/etc/flopwatch/otlp/token")
    assert {"name": "otlp-token", "secret": {"secretName": "flopwatch-otlp"}} in (
        daemonset["spec"]["template"]["spec"]["volumes"])


HOST_PATHS = {
    "simulated": set[str](),
    "unprivileged": {"/var/lib/flopwatch", "/sys"},
    "slurm": {"/var/lib/flopwatch", "/sys", "/var/lib/k0s/kubelet/pod-resources", "/run/flopwatch-jobs", "/etc/slurm"},
}
NODE_PATHS = {"/var/lib/flopwatch", "/sys", "/dev/kmsg", "/var/lib/kubelet/pod-resources"}


@each_variant
def test_only_the_container_that_reads_the_kernel_log_is_privileged_and_no_pod_asks_for_a_gpu(variant: str) -> None:
    objects = render(variant)
    pod = only(objects, "DaemonSet")["spec"]["template"]["spec"]
    host_paths = {volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
    assert host_paths == HOST_PATHS.get(variant, NODE_PATHS)
    assert ("runtimeClassName" in pod) is (variant not in ("simulated", "unprivileged"))
    assert ("hostPID" in pod) is (variant == "slurm")
    assert pod.get("nodeSelector") == {
        "simulated": None, "unprivileged": {"pool": "gpu"},
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
            assert "privileged" not in security, key
            assert security["allowPrivilegeEscalation"] is False, key
            assert security["capabilities"] == {"drop": ["ALL"]}, key
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}, key
            # Root, without any capability, only where files of the node belong to root.
            assert (security["runAsUser"] == 0) is (key[0] == "DaemonSet" and variant != "simulated"), key
        assert key[0] == "DaemonSet" or "hostPath" not in str(spec), key


@each_variant
def test_the_kernel_log_comes_through_a_socket_that_both_containers_share(variant: str) -> None:
    daemonset = only(render(variant), "DaemonSet")
    exporter = settings_of(daemonset)
    names = [one["name"] for one in daemonset["spec"]["template"]["spec"]["containers"]]
    if variant in ("simulated", "unprivileged", "slurm"):
        assert (names, exporter.kmsg) == (["exporter"], Path("/dev/kmsg"))
        return
    assert names == ["exporter", "kmsg"]
    kmsg = settings_of(daemonset, "kmsg")
    assert str(exporter.kmsg) == f"unix:{kmsg.listen}"
    assert mounts(container(daemonset, "kmsg")) == {
        str(kmsg.listen.parent): ("run", False), str(kmsg.kmsg): ("kmsg", True)}
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
        (KUBELET_SOCKET.parent, "/var/lib/k0s/kubelet/pod-resources"), (exporter.job_mapping, "/run/flopwatch-jobs"),
        (Path(exporter.topology.removeprefix("slurm:")).parent, "/etc/slurm"),
    ):
        volume, read_only = mounted[str(folder)]
        assert (volumes[volume]["hostPath"]["path"], read_only) == (path, True)
    assert Path(exporter.topology).name == "topology.conf"
    assert not [kind for kind, _ in render("slurm") if kind.startswith("ClusterRole")]


def test_the_exporter_alone_may_get_nodes_where_their_labels_tell_the_place() -> None:
    objects = render("kubernetes")
    daemonset, role, binding = (only(objects, kind) for kind in ("DaemonSet", "ClusterRole", "ClusterRoleBinding"))
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"] == "observability-demo-flopwatch-exporter"
    pod = daemonset["spec"]["template"]["spec"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": pod["serviceAccountName"], "namespace": "observability"}]
    assert pod["automountServiceAccountToken"] is False
    assert mounts(container(daemonset))[str(SERVICE_ACCOUNT)] == ("account", True)
    assert "account" not in str(container(daemonset, "kmsg"))
    (account,) = [volume["projected"]["sources"] for volume in pod["volumes"] if volume["name"] == "account"]
    files = [account[0]["serviceAccountToken"]["path"], account[1]["configMap"]["items"][0]["path"]]
    assert files == ["token", "ca.crt"], "what collectors/identity/topology.py reads"
    exporter = settings_of(daemonset)
    assert (exporter.topology, exporter.dcgm, exporter.expose) == (
        "kubernetes", "nvidia-dcgm.gpu-operator:5555", "dcgm")


def test_a_simulated_node_takes_nothing_of_the_node_whatever_else_is_asked_for() -> None:
    values = {"exporter": VARIANTS["slurm"]["exporter"] | VARIANTS["kubernetes"]["exporter"] | {"simulate": "h100x8"}}
    text = files_of(values)["flopwatch/templates/exporter-daemonset.yaml"]
    pod = yaml.safe_load(text)["spec"]["template"]["spec"]
    assert "hostPath" not in text
    assert "hostPID" not in pod
    assert settings_of(yaml.safe_load(text)).expose == "dcgm"
    assert files_of(values)["flopwatch/templates/exporter-clusterrole.yaml"].strip() == ""


@pytest.mark.parametrize(("values", "needs"), [
    ({}, "privileged (the privileged container kmsg, folders of the node, a port of the node)"),
    ({"exporter": {"kernelLog": False, "hostPID": True}, "otlp": {"hostPort": 0}},
     "privileged (hostPID, folders of the node)"),
    ({"exporter": {"simulate": "h100x8", "hostPID": True}}, "privileged (a port of the node)"),
    ({"exporter": {"simulate": "h100x8"}, "otlp": {"hostPort": 0}}, "restricted"),
])
def test_the_notes_say_which_pod_security_level_the_values_need(values: Json, needs: str) -> None:
    notes = files_of(values)["flopwatch/templates/NOTES.txt"]
    assert f"must allow the level {needs}." in notes
    assert ("enforce=privileged" in notes) is needs.startswith("privileged")


@each_variant
def test_every_selector_finds_the_pods_of_one_workload_and_the_port_it_names(variant: str) -> None:
    objects = render(variant)
    pods = {
        key: (made["spec"]["template"]["metadata"]["labels"], container(made)["ports"])
        for key, made in objects.items() if key[0] in ("DaemonSet", "StatefulSet")
    }
    for key, made in objects.items():
        if key[0] == "Service":
            selector, names = made["spec"]["selector"], [port["targetPort"] for port in made["spec"]["ports"]]
        elif key[0] == "PodMonitor":
            selector = made["spec"]["selector"]["matchLabels"]
            names = [endpoint["port"] for endpoint in made["spec"]["podMetricsEndpoints"]]
        elif key in pods:
            selector, names = made["spec"]["selector"]["matchLabels"], []
        else:
            continue
        chosen = [ports for labels, ports in pods.values() if selector.items() <= labels.items()]
        assert len(chosen) == 1, key
        assert set(names) <= {port["name"] for port in chosen[0]}, key
        assert key[1].rpartition("-")[2] in (selector["app.kubernetes.io/component"], "otlp")


def test_prometheus_finds_us_by_its_release_label_and_renames_none_of_our_labels() -> None:
    for variant, release in (("defaults", "kube-prometheus-stack"), ("unprivileged", "prometheus")):
        for (kind, _), made in render(variant).items():
            if kind in CRDS:
                assert made["metadata"]["labels"]["release"] == release
            if kind == "PodMonitor":
                (endpoint,) = made["spec"]["podMetricsEndpoints"]
                assert endpoint["honorLabels"] is True
                assert re.fullmatch(r"\d+s", endpoint["interval"])
                targets = {change.get("targetLabel", "instance") for change in endpoint["relabelings"]}
                ours = {label for row in flopwatch.catalogue.all_metrics() for label in row.labels}
                assert not targets & ours
                drop = endpoint["relabelings"][-1]
                assert drop["action"] == "labeldrop"
                assert not [label for label in ours if re.fullmatch(drop["regex"], label)]


def test_a_training_pod_is_led_to_its_own_node() -> None:
    objects = render("defaults")
    assert only(objects, "Service", "-otlp")["spec"]["internalTrafficPolicy"] == "Local"
    assert only(objects, "Service", "-exporter")["spec"]["clusterIP"] == "None"


def test_the_prometheus_rule_is_the_generated_file_with_its_templates_untouched() -> None:
    made = only(render("defaults"), "PrometheusRule")
    assert made["spec"] == rules(AlertSettings())
    assert "{{ $labels.run }}" in str(made["spec"])


@pytest.mark.parametrize(("name", "content"), [
    ("rules.yaml", rules_yaml(AlertSettings())), ("alertmanager.yml", alertmanager_yaml(AlertSettings())),
])
def test_the_charts_generated_files_are_what_the_code_writes(name: str, content: str) -> None:
    assert (CHART / "files" / name).read_text(encoding="utf-8") == content, "stale: run `make generate`"


def test_grafanas_sidecar_finds_the_dashboards_as_they_were_generated() -> None:
    boards = {}
    for config in (made for (kind, _), made in render("unprivileged").items() if kind == "ConfigMap"):
        assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert config["metadata"]["annotations"] == {"grafana_folder": "Training"}
        assert len(json.dumps(config)) < 256 << 10  # what kubectl apply writes into an annotation
        ((name, text),) = config["data"].items()
        boards[config["metadata"]["name"]] = (name, json.loads(text))
    assert boards == {
        f"watch-dashboard-{path.stem}": (f"flopwatch-{path.name}", json.loads(path.read_text(encoding="utf-8")))
        for path in CHART.glob("files/dashboards/*.json")
    }


def test_helm_test_finds_a_running_exporter_and_misses_a_stopped_one(tmp_path: Path) -> None:
    (pod,) = only(render("defaults"), "Pod")["spec"]["containers"]
    assert pod["command"] == ["python", "-c"]
    script, *arguments = pod["args"]
    assert arguments == ["demo-flopwatch-exporter", "9450", "http://demo-flopwatch-ledger:9451", ""]
    assert set(re.findall(r"flopwatch_\w+", script)) <= flopwatch.catalogue.BY_NAME.keys()
    log = tmp_path / "log"
    with log.open("w") as out, subprocess.Popen(
        [sys.executable, "-m", "flopwatch", "exporter", "--simulate=h100x8", f"--state={tmp_path}",
         "--listen=127.0.0.1:0", "--otlp-listen=127.0.0.1:0"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": "exporter"}, stderr=out,
    ) as exporter:
        try:
            while not (found := re.search(r"metrics=127.0.0.1:(\d+)", log.read_text())):
                assert exporter.poll() is None, log.read_text()
                time.sleep(0.05)
            check = [sys.executable, "-c", script, "127.0.0.1", found[1], "", ""]
            done = subprocess.run(check, capture_output=True, text=True, timeout=240)
        finally:
            exporter.terminate()
    assert (done.returncode, done.stdout) == (0, "exporters that answer: 1\n"), done.stderr
    assert subprocess.run(check, capture_output=True, timeout=240).returncode == 1


def test_chart_and_package_have_the_same_version() -> None:
    assert helm.Chart.load(CHART).metadata["appVersion"] == flopwatch.__version__


def test_the_install_page_uses_commands_and_values_that_exist() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    commands = re.findall(r"(?:bin/|`)flopwatch ((?:exporter|ledger) [^`\n]*--[^`\n]*)", page)
    assert len(commands) == 3
    for command in commands:
        assert _parser().parse_args(command.split()).command
    settings = [assignment.partition("=") for assignment in re.findall(r"--set ([^\s`\\]+)", page)]
    assert len(settings) >= 8
    with helm.Chart.load(CHART) as chart:
        for name, _, value in settings:
            values: Any = yaml.safe_load(value)
            for key in reversed(name.split(".")):
                values = {key: values}
            chart.validate_schema(values)
    defaults = ExporterSettings()
    assert f"{defaults.listen.port}: `/metrics`; {defaults.otlp_listen.port}: telemetry" in page
    assert f"| {LedgerSettings().listen.port}: snapshots" in page


@pytest.mark.parametrize("page", ["install", "privileges", "identity"])
def test_the_pages_name_values_that_exist(page: str) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:`|--set )(exporter|otlp|ledger|monitor|rules|tests)\.(\w+)", text))
    assert len(named) >= 3
    assert [f"{part}.{name}" for part, name in sorted(named) if name not in values[part]] == []


def test_the_image_has_what_the_exporter_and_the_ledger_import() -> None:
    image = (ROOT / "exporter" / "Dockerfile").read_text(encoding="utf-8")
    assert image.count("[exporter,ledger]") == 2, "built, and installed without an index"
    assert re.search(r"^USER 65532:65532$", image, re.MULTILINE)
    assert re.search(r'^ENTRYPOINT \["flopwatch"\]$', image, re.MULTILINE)
