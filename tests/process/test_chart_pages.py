"""Test the pages on Kubernetes: their values, commands and objects are those of the chart and of Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import helm_python as helm
import kubernetes_validate
import pytest
import yaml

from alerts import AlertSettings, rules
from flopwatch.__main__ import _parser
from flopwatch.settings import ExporterSettings, LedgerSettings
from tests.support import ROOT
from tests.support.chart import CHART, VARIANTS, Json, files_of, objects_of, only

KUBERNETES = tuple(sorted(path.stem for path in (ROOT / "docs").glob("kubernetes*.md")))


def blocks() -> Iterator[tuple[str, Json]]:
    """Return each document in a YAML block of the pages, with the page's name."""
    for name in (*KUBERNETES, "privileges", "identity"):
        page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        for text in re.findall(r"^ *```yaml\n(.*?)^ *```", page, re.MULTILINE | re.DOTALL):
            for document in yaml.safe_load_all(text):
                yield name, document


# The operators' own schemas are not here. Of these, the parts that are ours or Kubernetes' own are checked.
OTHERS = {"VMAlert", "VMSingle", "Application", "HelmRelease", "JobSet", "Volcano's Job"}


def pod_of(document: Json) -> Json:
    """Return a pod with the parts that a block shows: those of a container, of a pod, or containers."""
    container = {key: document[key] for key in ("env", "volumeMounts") if key in document}
    containers = document.get("containers", [{"name": "train"} | container])
    spec: Json = {"containers": containers}
    if "volumes" in document:
        spec["volumes"] = document["volumes"]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec}


def test_every_yaml_block_of_the_pages_is_valid() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8")).keys()
    seen: dict[str, int] = {}
    for page, document in blocks():
        kind = document.get("kind", "")
        if document.get("apiVersion", "").startswith("batch.volcano.sh"):
            kind = "Volcano's Job"
        if kind == "Application":
            files_of(document["spec"]["source"]["helm"]["valuesObject"])
        elif kind == "HelmRelease":
            files_of(document["spec"]["values"])
        elif kind in ("JobSet", "Volcano's Job"):
            (part,) = document["spec"].get("replicatedJobs") or document["spec"]["tasks"]
            template = part["template"]["spec"].get("template", part["template"])
            kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **template}, "1.32", strict=True)
        elif kind in OTHERS:
            pass
        elif kind:
            kubernetes_validate.validate(document, "1.32", strict=True)
        elif "scrape_configs" in document:  # promtool checks these in test_chart_monitoring.py
            kind = "Prometheus"
        elif document.keys() <= values:
            kind = "values"
            files_of(document)
        else:
            kind = "parts of a pod"
            assert document.keys() <= {"env", "volumeMounts", "volumes", "containers"}, page
            kubernetes_validate.validate(pod_of(document), "1.32", strict=True)
        seen[kind] = seen.get(kind, 0) + 1
    assert seen.keys() - {"Role", "Job", "Prometheus", "values", "parts of a pod"} == OTHERS
    assert (seen["values"], seen["parts of a pod"]) >= (5, 3)


def test_the_values_for_tools_that_compare_renders_make_the_same_objects_each_time() -> None:
    (values,) = [one for page, one in blocks() if page == "kubernetes-gitops" and "lookup" in one]
    first, second = files_of(values), files_of(values)
    assert first == second
    assert "Secret" not in {kind for kind, _ in objects_of(first)}


def test_every_page_on_kubernetes_is_short() -> None:
    words = {name: len((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").split()) for name in KUBERNETES}
    assert [name for name, count in words.items() if count > 1500] == []
    assert len(words) == 6


def test_the_role_of_the_page_is_enough_for_an_installer_of_one_namespace() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    (role,) = [one for one in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "kind: Role\n" in one]
    allowed = {
        (group, resource)
        for rule in yaml.safe_load(role)["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        if {"get", "create", "update", "patch", "delete"} <= set(rule["verbs"])
    }
    for values in (VARIANTS["namespace"], VARIANTS["boards"] | {"lookup": False, "rbac": {"create": False}}):
        for kind, _ in (objects := objects_of(files_of(values))):
            group = next(made["apiVersion"] for (its, _), made in objects.items() if its == kind).rpartition("/")[0]
            plural = f"{kind.lower().removesuffix('y')}{'ies' if kind.endswith('y') else 's'}"
            assert (group.partition("/")[0], plural) in allowed, kind


def test_the_install_pages_use_commands_and_values_that_exist() -> None:
    page = "".join(
        (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        for name in ("install", "install-bare-metal", *KUBERNETES)
    )
    commands = re.findall(r"(?:bin/|`)flopwatch ((?:exporter|ledger) [^`\n]*--[^`\n]*)", page)
    assert len(commands) == 3
    for command in commands:
        assert _parser().parse_args(command.split()).command
    settings = [assignment.partition("=") for assignment in re.findall(r"--set \"?([^\s`\\\"]+)", page)]
    assert len(settings) >= 8
    with helm.Chart.load(CHART) as chart:
        for name, _, value in settings:
            values: Any = yaml.safe_load(re.sub(r"^{(.*)}$", r"[\1]", value))  # a list in Helm's syntax
            for key in reversed(name.split(".")):
                values = {key: values}
            chart.validate_schema(values)
    defaults = ExporterSettings()
    assert f"{defaults.listen.port}: `/metrics`; {defaults.otlp_listen.port}: telemetry" in page
    assert f"| {LedgerSettings().listen.port}: snapshots" in page


@pytest.mark.parametrize("page", ["kubernetes", "kubernetes-clouds", "privileges", "identity"])
def test_the_pages_name_values_that_exist(page: str) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    named = set(re.findall(rf"(?:`|--set )({'|'.join(values)})\.(\w+)", text))
    assert len(named) >= 3
    assert [f"{part}.{name}" for part, name in sorted(named) if name not in values[part]] == []


def test_the_job_of_the_tutorial_is_valid_and_its_endpoint_exists() -> None:
    page = (ROOT / "docs" / "kubernetes-quickstart.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    job = yaml.safe_load(text)
    kubernetes_validate.validate(job, "1.32", strict=True)
    train = job["spec"]["template"]["spec"]["containers"][0]
    arguments = train["command"][train["command"].index("flopwatch") + 1 :]
    assert _parser().parse_args(arguments).name == "first-run"
    endpoint = urlsplit(next(one["value"] for one in train["env"] if one["name"] == "FLOPWATCH_ENDPOINT"))
    with helm.Chart.load(CHART) as chart:
        files = chart.render(VARIANTS["kube-prometheus-stack"], name="flopwatch", namespace="flopwatch")
    service = only(objects_of(files), "Service", "-otlp")
    assert (endpoint.hostname, endpoint.port) == (
        f"{service['metadata']['name']}.flopwatch",
        service["spec"]["ports"][0]["port"],
    )
    made: Any = rules(AlertSettings())
    records = {rule["record"] for group in made["groups"] for rule in group["rules"] if "record" in rule}
    assert set(re.findall(r"^(run:\S+?)\{", page, re.MULTILINE)) <= records


def test_the_tutorials_log_of_helm_test_has_what_the_check_prints() -> None:
    page = (ROOT / "docs" / "kubernetes-quickstart.md").read_text(encoding="utf-8")
    (log,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    script = (CHART / "files" / "check.py").read_text(encoding="utf-8")
    texts = re.findall(r'return f?"([^"]+)"', script)
    patterns = [re.sub(r"\\\{.*?\\\}", ".+", re.escape(text)) for text in texts]
    for line in log.splitlines():
        assert any(re.fullmatch(pattern, line) for pattern in patterns), line
    made: Any = rules(AlertSettings())
    count = sum(len(group["rules"]) for group in made["groups"])
    assert f"our {count} rules" in log
    (failure,) = re.findall(r"fails with `([^`]+)`", page)
    for part in failure.split(" null: "):
        assert part in script
