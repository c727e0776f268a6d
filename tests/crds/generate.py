"""Write schemas.json again: what the API server checks of the operators' objects that the chart and the examples make.

    python tests/crds/generate.py

From the CustomResourceDefinitions of the releases below (git clones them), all under the Apache License 2.0 (LICENSE).
Without descriptions, and closed: a field that a schema does not name is refused, as by kubectl's strict validation.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
FOLDER = "example/prometheus-operator-crd/monitoring.coreos.com_"
SOURCES = {
    ("https://github.com/prometheus-operator/prometheus-operator", "v0.93.0"): (
        f"{FOLDER}podmonitors.yaml",
        f"{FOLDER}prometheusrules.yaml",
        f"{FOLDER}alertmanagerconfigs.yaml",
    ),
    ("https://github.com/VictoriaMetrics/operator", "v0.74.1"): ("config/crd/overlay/crd.descriptionless.yaml",),
    ("https://github.com/kyverno/kyverno", "v1.19.0"): ("config/crds/kyverno/kyverno.io_clusterpolicies.yaml",),
}
KINDS = {"PodMonitor", "PrometheusRule", "AlertmanagerConfig", "VMPodScrape", "VMRule", "ClusterPolicy"}
# Large parts of a ClusterPolicy's rule that ours do not use. Without them, a policy that has one is refused.
UNUSED = {"validate", "verifyImages", "generate", "imageExtractors"}


class Loader(yaml.SafeLoader):
    """Takes a bare `=`, which YAML 1.1 reserves, for the text that it is."""


Loader.add_constructor("tag:yaml.org,2002:value", lambda loader, node: node.value)


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a structural schema as JSON Schema has it."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    made: dict[str, Any] = {
        key: schema[key]
        for key in (
            "type",
            "enum",
            "pattern",
            "required",
            "minimum",
            "maximum",
            "minItems",
            "maxItems",
            "minLength",
            "maxLength",
        )
        if key in schema
    }
    if schema.get("nullable"):
        made["type"] = [made["type"], "null"]
    if isinstance(schema.get("properties"), dict):
        made["properties"] = {
            name: closed(inside)
            for name, inside in schema["properties"].items()
            if not (name in UNUSED and "mutate" in schema["properties"])
        }
    if isinstance(schema.get("additionalProperties"), dict):
        made["additionalProperties"] = closed(schema["additionalProperties"])
    elif "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made["additionalProperties"] = False
    if "items" in schema:
        made["items"] = closed(schema["items"])
    return made


def git(*words: str) -> str:
    """Return what git prints."""
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Clone each release and write the schemas of what the chart makes."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for (url, version), files in SOURCES.items():
            clone = Path(folder) / version
            git("clone", "-q", "--bare", "--depth", "1", "--branch", version, url, str(clone))
            for file in files:
                for crd in yaml.load_all(git("-C", str(clone), "show", f"{version}:{file}"), Loader):
                    if crd["spec"]["names"]["kind"] not in KINDS:
                        continue
                    for served in crd["spec"]["versions"]:
                        if served["name"] == "v2beta1":  # Kyverno's own, which we do not use
                            continue
                        schema = closed(served["schema"]["openAPIV3Schema"])
                        schema["properties"]["metadata"] = {"type": "object"}
                        schema["properties"].pop("status", None)
                        found[f"{crd['spec']['group']}/{served['name']}/{crd['spec']['names']['kind']}"] = schema
            (HERE / "LICENSE").write_text(git("-C", str(clone), "show", f"{version}:LICENSE"), encoding="utf-8")
    sources = ", ".join(f"{url} {version}" for url, version in SOURCES)
    text = json.dumps(
        {"$comment": f"From {sources}, Apache-2.0 (LICENSE), by generate.py", **found},
        separators=(",", ":"),
        sort_keys=True,
    )
    (HERE / "schemas.json").write_text(text.replace('"additionalProperties"', '\n"additionalProperties"') + "\n")


if __name__ == "__main__":
    main()
