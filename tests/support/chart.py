"""The chart as Helm renders it, for the tests of it."""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from functools import cache
from typing import Any

import helm_python as helm
import pytest
import yaml

from flopwatch.__main__ import _parser
from flopwatch.settings import BoardsSettings, ExporterSettings, KmsgSettings, LedgerSettings
from tests.support import ROOT

Json = dict[str, Any]
Objects = dict[tuple[str, str], Json]
CHART = ROOT / "helm"
NAMESPACE = "observability"
VARIANTS: dict[str, Json] = {"defaults": {}} | {
    path.name.removesuffix("-values.yaml"): yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted(CHART.glob("ci/*-values.yaml"))
}
SCHEMAS: Json = json.loads((ROOT / "tests" / "crds" / "schemas.json").read_text(encoding="utf-8"))
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def files_of(values: Json) -> dict[str, str]:
    """Return the text of each template, by its name."""
    with helm.Chart.load(CHART) as chart:
        return {
            path.removeprefix("flopwatch/templates/"): text
            for path, text in chart.render(values, name="demo", namespace=NAMESPACE).items()
        }


@cache
def _files(variant: str) -> dict[str, str]:
    return files_of(VARIANTS[variant])


@cache
def _objects(variant: str) -> Objects:
    return objects_of(_files(variant))


def objects_of(files: dict[str, str]) -> Objects:
    """Return what an install makes, by kind and name."""
    documents = [
        made for path, text in files.items() if path.endswith(".yaml") for made in yaml.load_all(text, yaml.CSafeLoader)
    ]
    made = [one for one in documents if one]
    found = {(one["kind"], one["metadata"]["name"]): one for one in made}
    assert len(found) == len(made), "two objects of one name"
    return found


def render(variant: str) -> Objects:
    """Return what an install with the values of a situation makes, by kind and name."""
    return copy.deepcopy(_objects(variant))


def notes(variant: str) -> str:
    """Return what an install prints."""
    return _files(variant)["NOTES.txt"]


def only(objects: Objects, kind: str, ending: str = "") -> Json:
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
    kind: Any = {
        "exporter": ExporterSettings,
        "ledger": LedgerSettings,
        "kmsg": KmsgSettings,
        "boards": BoardsSettings,
    }[arguments[0]]
    given = vars(_parser().parse_args(arguments))
    return kind(**{field.name: given[field.name] for field in fields(kind) if given.get(field.name) is not None})
