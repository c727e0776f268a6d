"""Test the admission policies of examples/kubernetes: their schemas, and the pods that they make.

Each policy is evaluated on pods with the labels of a scheduler. The hook reads the environment that comes out.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import helm_python as helm
import jsonschema
import kubernetes_validate
import pytest
import yaml

from flopwatch.training.process import launcher
from flopwatch.training.run_info import Arguments, RunInfo, declare
from tests.support import ROOT
from tests.support.admission import FOLDER, Json, admitted, documents
from tests.support.chart import CHART, SCHEMAS, objects_of, only

NATIVE, KYVERNO = "training-env-native.yaml", "training-env-kyverno.yaml"
POLICIES = ("native", "kyverno")
each_policy = pytest.mark.parametrize("policy", POLICIES)
FROM = {"1.32": "v1alpha1", "1.33": "v1alpha1", "1.34": "v1beta1", "1.35": "v1beta1", "1.36": "v1", "1.37": "v1"}
OWNER = [{"apiVersion": "v1", "kind": "Some", "name": "some", "uid": "7d1c", "controller": True}]


def pod(labels: Json | None = None, annotations: Json | None = None, owner: Any = OWNER, **container: Any) -> Json:
    metadata: Json = {"name": "p", "namespace": "team-a"}
    for key, value in (("labels", labels), ("annotations", annotations), ("ownerReferences", owner)):
        if value:
            metadata[key] = value
    train = {"name": "train", "image": "train:1", "resources": {"limits": {"nvidia.com/gpu": "8"}}} | container
    containers = [{"name": "proxy", "image": "proxy:1"}, train]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": containers}}


def env(made: Json) -> dict[str, str]:
    """Return the variables of the training container, as the kubelet fills them in."""
    variables = made["spec"]["containers"][1].get("env", [])
    assert len({one["name"] for one in variables}) == len(variables)
    facts = {"spec.nodeName": "node-7", "metadata.namespace": made["metadata"]["namespace"]}
    for key, value in made["metadata"].get("annotations", {}).items():
        facts[f"metadata.annotations['{key}']"] = value
    return {
        one["name"]: one["value"] if "value" in one else facts.get(one["valueFrom"]["fieldRef"]["fieldPath"], "")
        for one in variables
    }


def hook(environ: dict[str, str]) -> RunInfo:
    """Return what the hook makes of the variables."""
    arguments = Arguments(environ, lambda name, error: pytest.fail(f"{name}: {error}"))
    texts = dict.fromkeys(("tenant", "gpu_uuid", "owner", "team", "page"))
    return declare(arguments, launcher.this_process(), 0.0, "bf16", None, **texts)


JOBSET = {
    "jobset.sigs.k8s.io/jobset-name": "llama",
    "jobset.sigs.k8s.io/jobset-uid": "12ab",
    "jobset.sigs.k8s.io/restart-attempt": "2",
    "batch.kubernetes.io/job-name": "llama-node-0",
}


@each_policy
@pytest.mark.parametrize(
    ("made", "run", "attempt"),
    [
        pytest.param(pod(JOBSET), "llama", "12ab-2", id="JobSet and TrainJob"),
        pytest.param(pod({"training.kubeflow.org/job-name": "bert"}), "bert", "7d1c-0", id="PyTorchJob"),
        pytest.param(
            pod({"volcano.sh/job-name": "moe"}, {"volcano.sh/job-version": "3"}), "moe", "7d1c-3", id="Volcano"
        ),
        pytest.param(pod({"kueue.x-k8s.io/pod-group-name": "g"}, owner=None), "g", "", id="a group of plain pods"),
        pytest.param(pod({"batch.kubernetes.io/job-name": "one"}), "one", "7d1c-0", id="Job"),
        pytest.param(pod({"ray.io/cluster": "rays-x7k2p"}), "", "", id="Ray, which the hook knows"),
        pytest.param(pod({"flopwatch/run": "mine"} | JOBSET), "mine", "12ab-2", id="a name of your own"),
        pytest.param(pod(owner=None), "", "", id="a plain pod"),
    ],
)
def test_a_pod_gets_the_run_and_the_attempt_of_its_gang(policy: str, made: Json, run: str, attempt: str) -> None:
    before = copy.deepcopy(made)
    after = admitted(policy, made)
    kubernetes_validate.validate(after, "1.36", strict=True)
    variables = env(after)
    assert variables == {
        "FLOPWATCH_ENDPOINT": "http://flopwatch-otlp.flopwatch:4318",
        "FLOPWATCH_HOST": "node-7",
        "FLOPWATCH_TOKEN_FILE": "/etc/flopwatch/token",
        "FLOPWATCH_TENANT": "team-a",
        "FLOPWATCH_SUBMITTED_AT": "",
        **({"FLOPWATCH_RUN": run} if run else {}),
        **({"FLOPWATCH_ATTEMPT": attempt} if attempt else {}),
    }
    info = hook(variables)
    assert (info.host, info.tenant, info.launch.job, info.submitted_at) == ("node-7", "team-a", attempt, None)
    assert after["spec"]["containers"][0] == before["spec"]["containers"][0], "it has no GPU"
    assert after["spec"]["containers"][1]["volumeMounts"] == [
        {"name": "flopwatch-token", "mountPath": "/etc/flopwatch", "readOnly": True}
    ]
    secret = {"secretName": "flopwatch-otlp", "optional": True}
    assert after["spec"]["volumes"] == [{"name": "flopwatch-token", "secret": secret}]
    assert admitted(policy, after) == after, "a policy may be called again"


@each_policy
def test_what_a_container_sets_itself_is_left_alone(policy: str) -> None:
    own = [{"name": "FLOPWATCH_RUN", "value": "own"}, {"name": "FLOPWATCH_HOST", "value": "h"}]
    mount = {"name": "data", "mountPath": "/data"}
    made = pod(JOBSET, env=own, volumeMounts=[mount])
    made["spec"]["volumes"] = [{"name": "data", "emptyDir": {}}]
    after = admitted(policy, made)
    assert (env(after)["FLOPWATCH_RUN"], env(after)["FLOPWATCH_HOST"]) == ("own", "h")
    assert env(after)["FLOPWATCH_ATTEMPT"] == "12ab-2"
    assert after["spec"]["containers"][1]["volumeMounts"][0] == mount
    assert [volume["name"] for volume in after["spec"]["volumes"]] == ["data", "flopwatch-token"]


@each_policy
def test_a_claim_is_a_gpu_and_a_pod_without_one_is_left_alone(policy: str) -> None:
    claim = pod(JOBSET, resources={"claims": [{"name": "gpus"}]})
    assert env(admitted(policy, claim))["FLOPWATCH_RUN"] == "llama"
    for resources in ({}, {"limits": {"cpu": "4"}}, {"requests": {"cpu": "4"}}):
        without = pod(JOBSET, resources=resources)
        assert admitted(policy, without) == without


def job(suspend: bool, annotations: Json | None = None, **status: str) -> Json:
    metadata = {"annotations": annotations} if annotations else {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "llama-node-0", "creationTimestamp": "2026-11-28T10:00:00Z"},
        "spec": {"suspend": suspend, "template": {"metadata": {"labels": {"a": "b"}, **metadata}, "spec": {}}},
        "status": status,
    }


@each_policy
def test_a_job_that_a_queue_admits_keeps_the_time_of_its_submission(policy: str) -> None:
    submitted = {"flopwatch/submitted-at": "1795860000"}

    def template(new: Json, old: Json) -> Any:
        return admitted(policy, new, old)["spec"]["template"]["metadata"].get("annotations")

    assert template(job(False), job(True)) == submitted
    assert template(job(False, {"a": "b"}), job(True)) == {"a": "b"} | submitted
    assert template(job(False, {"flopwatch/submitted-at": "1"}), job(True)) == {"flopwatch/submitted-at": "1"}
    assert template(job(True), job(True)) is None
    assert template(job(False), job(False)) is None
    assert template(job(False, startTime="2026-11-28T11:00:00Z"), job(True)) is None, "its template is immutable"


@each_policy
def test_a_pod_that_a_queue_admits_reports_when_it_was_submitted(policy: str) -> None:
    waiting = admitted(policy, pod(JOBSET))
    waiting["metadata"]["creationTimestamp"] = "2026-11-28T10:00:00Z"
    waiting["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    free = copy.deepcopy(waiting)
    del free["spec"]["schedulingGates"]
    assert hook(env(admitted(policy, free, waiting))).submitted_at == 1795860000
    assert admitted(policy, waiting, waiting) == waiting
    assert admitted(policy, free, free) == free


def test_every_variable_is_one_of_the_hooks_settings() -> None:
    settings = (ROOT / "docs" / "training.md").read_text(encoding="utf-8").partition("## Settings")[2]
    folder = ROOT / "exporter" / "flopwatch" / "training"
    source = "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    for name in (NATIVE, KYVERNO):
        variables = set(re.findall(r"\bFLOPWATCH_[A-Z_]+", (FOLDER / name).read_text(encoding="utf-8")))
        assert len(variables) == 7
        for variable in variables:
            assert f"`{variable}`" in settings, variable
            assert variable in source, variable


def test_endpoint_and_secret_are_those_of_a_release_called_flopwatch() -> None:
    with helm.Chart.load(CHART) as chart:
        objects = objects_of(chart.render({}, name="flopwatch", namespace="flopwatch"))
    service = only(objects, "Service", "-otlp")
    assert only(objects, "Secret", "-otlp")["metadata"]["name"] == "flopwatch-otlp"
    variables = env(admitted("kyverno", pod()))
    port = service["spec"]["ports"][0]["port"]
    assert variables["FLOPWATCH_ENDPOINT"] == f"http://{service['metadata']['name']}.flopwatch:{port}"


@pytest.mark.parametrize("kubernetes", sorted(FROM))
def test_kubernetes_accepts_the_native_policies_in_the_versions_that_they_name(kubernetes: str) -> None:
    made = copy.deepcopy(documents(NATIVE))
    assert [one["kind"].removeprefix("MutatingAdmissionPolicy") for one in made] == ["", "Binding"] * 2
    for one in made:
        one["apiVersion"] = f"admissionregistration.k8s.io/{FROM[kubernetes]}"
        kubernetes_validate.validate(one, kubernetes, strict=True)
    assert all(one["apiVersion"].endswith("/v1") for one in documents(NATIVE))
    text = (FOLDER / NATIVE).read_text(encoding="utf-8")
    assert "It needs Kubernetes 1.36. For 1.34 and 1.35, replace" in text
    with pytest.raises(kubernetes_validate.ValidationError, match="mutation"):
        kubernetes_validate.validate(made[0] | {"spec": made[0]["spec"] | {"mutation": []}}, kubernetes, strict=True)


def test_before_1_36_there_is_no_v1_and_before_1_32_no_such_policy() -> None:
    for one in documents(NATIVE):
        for kubernetes in ("1.31", "1.35"):
            with pytest.raises(kubernetes_validate.SchemaNotFoundError):
                kubernetes_validate.validate(one, kubernetes, strict=True)


def test_kyvernos_schema_accepts_its_policy() -> None:
    (policy,) = documents(KYVERNO)
    schema = SCHEMAS["kyverno.io/v1/ClusterPolicy"]
    validator = jsonschema.Draft7Validator(schema)
    assert [error.message for error in validator.iter_errors(policy)] == []
    # The schema leaves a foreach within a foreach open.
    rules = schema["properties"]["spec"]["properties"]["rules"]["items"]["properties"]
    inner = jsonschema.Draft7Validator(rules["mutate"]["properties"]["foreach"])
    nested = [part["foreach"] for part in policy["spec"]["rules"][0]["mutate"]["foreach"] if "foreach" in part]
    assert [[error.message for error in inner.iter_errors(one)] for one in nested] == [[]]
    wrong = yaml.safe_load(yaml.safe_dump(policy))
    wrong["spec"]["rules"][1]["mutate"]["patchesJSON6902"] = wrong["spec"]["rules"][1]["mutate"].pop("patchesJson6902")
    assert ["'patchesJSON6902' was unexpected" in error.message for error in validator.iter_errors(wrong)] == [True]
    wrong = yaml.safe_load(yaml.safe_dump(policy))
    wrong["spec"]["rules"][0]["mutate"]["foreach"][1]["preconditions"]["all"][0]["operator"] = "MoreThan"
    assert ["'MoreThan' is not one of" in error.message for error in validator.iter_errors(wrong)] == [True]
