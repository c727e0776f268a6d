"""Evaluator of the admission policies in examples/kubernetes, as far as a cluster's answer follows from the policy.

The native policy is evaluated by cel-python, Kyverno's by jmespath with the functions that Kyverno adds. Both make JSON
patches of operation "add".
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import cache
from typing import Any

import celpy
import jmespath
import yaml

from tests.support import ROOT

Json = dict[str, Any]
FOLDER = ROOT / "examples" / "kubernetes"


@cache
def documents(name: str) -> list[Json]:
    """Return the objects of a file of the examples."""
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def add(target: Any, path: str, value: Any) -> None:
    """Apply the operation "add" of a JSON patch. Kyverno makes missing parents."""
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]
    for index, part in enumerate(parents):
        after = (*parents, last)[index + 1]
        made: Any = [] if after == "-" else {}
        target = target.setdefault(part, made) if isinstance(target, dict) else target[int(part)]
    if isinstance(target, list):
        target.append(value) if last == "-" else target.insert(int(last), value)
    else:
        target[last] = value


def admitted(kind: str, new: Json, old: Json | None = None) -> Json:
    """Return the object as the policies of a kind, "native" or "kyverno", leave it."""
    made = copy.deepcopy(new)
    for path, value in {"native": _native, "kyverno": _kyverno}[kind](made, old):
        add(made, path, value)
    return made


def _matches(rules: Any, group: str, resource: str, operation: str) -> bool:
    return any(
        group in rule["apiGroups"] and resource in rule["resources"] and operation in rule["operations"]
        for rule in rules
    )


@cache
def _program(expression: str) -> Any:
    environment = celpy.Environment(annotations={"JSONPatch": celpy.celtypes.MapType})
    return environment.program(environment.compile(expression))


def _native(new: Json, old: Json | None) -> Iterator[tuple[str, Any]]:
    group, resource = ("batch", "jobs") if new["kind"] == "Job" else ("", "pods")

    class Lazy(celpy.celtypes.MapType):
        """Variables. Each is evaluated when it is used."""

        def __getitem__(self, key: Any) -> Any:
            return evaluate(expressions[str(key)])

        def __contains__(self, key: Any) -> bool:
            return str(key) in expressions

    context = {"object": celpy.adapter.json_to_cel(new), "variables": Lazy()}
    if old is not None:
        context["oldObject"] = celpy.adapter.json_to_cel(old)

    def evaluate(text: str) -> Any:
        return _program(text).evaluate(context)

    for policy in documents("training-env-native.yaml"):
        if policy["kind"] != "MutatingAdmissionPolicy":
            continue
        spec = policy["spec"]
        operation = "CREATE" if old is None else "UPDATE"
        if not _matches(spec["matchConstraints"]["resourceRules"], group, resource, operation):
            continue
        expressions = {one["name"]: one["expression"] for one in spec["variables"]}
        if not all(evaluate(condition["expression"]) for condition in spec["matchConditions"]):
            continue
        for mutation in spec["mutations"]:
            for patch in _python(evaluate(mutation["jsonPatch"]["expression"]), celpy.celtypes.BoolType):
                assert patch["op"] == "add"
                yield patch["path"], patch["value"]


def _python(value: Any, boolean: type) -> Any:
    """Return a value of CEL as one of JSON. CEL's booleans are integers in Python."""
    if isinstance(value, dict):
        return {str(key): _python(inside, boolean) for key, inside in value.items()}
    if isinstance(value, list):
        return [_python(inside, boolean) for inside in value]
    return bool(value) if isinstance(value, boolean) else str(value) if isinstance(value, str) else int(value)


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def _search(expression: str, context: Json) -> Any:
    functions = jmespath.functions

    class Kyverno(functions.Functions):  # type: ignore[name-defined, misc]
        """Functions that Kyverno adds. A duration is text in seconds here, such as 5s."""

        @functions.signature({"types": ["string"]}, {"types": ["string"]})  # type: ignore[untyped-decorator]
        def _func_time_diff(self, begin: str, end: str) -> str:
            return f"{(_time(end) - _time(begin)).total_seconds():.0f}s"

        @functions.signature({"types": ["string"]}, {"types": ["string"]})  # type: ignore[untyped-decorator]
        def _func_divide(self, dividend: str, divisor: str) -> float:
            return int(dividend.removesuffix("s")) / int(divisor.removesuffix("s"))

        @functions.signature({"types": []})  # type: ignore[untyped-decorator]
        def _func_to_string(self, value: Any) -> str:
            return value if isinstance(value, str) else f"{value:g}" if value % 1 else f"{value:.0f}"

    return jmespath.search(expression, context, options=jmespath.Options(custom_functions=Kyverno()))


def _substitute(value: Any, context: Json) -> Any:
    if isinstance(value, dict):
        return {key: _substitute(inside, context) for key, inside in value.items()}
    if isinstance(value, list):
        return [_substitute(inside, context) for inside in value]
    if not isinstance(value, str):
        return value
    if (whole := re.fullmatch(r"{{((?:(?!}}).)*)}}", value)) is not None:
        found = _search(whole[1].strip(), context)
        assert found is not None, f"Kyverno refuses a variable without a value: {value}"
        return found

    def text(match: re.Match[str]) -> str:
        found = _search(match[1].strip(), context)
        return found if isinstance(found, str) else json.dumps(found)

    return re.sub(r"{{((?:(?!}}).)*)}}", text, value)


OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "GreaterThan": lambda key, value: key > value,
    "Equals": lambda key, value: type(key) is type(value) and key == value,
    "AnyNotIn": lambda key, value: key not in value,
}


def _holds(conditions: Json, context: Json) -> bool:
    return all(
        OPERATORS[one["operator"]](_substitute(one["key"], context), _substitute(one["value"], context))
        for one in conditions.get("all", [])
    )


def _patches(text: str, context: Json) -> Iterator[tuple[str, Any]]:
    for patch in yaml.safe_load(_substitute(text, context)):
        assert patch["op"] == "add"
        yield patch["path"], patch["value"]


def _foreach(parts: Any, context: Json, depth: int) -> Iterator[tuple[str, Any]]:
    for part in parts:
        for index, element in enumerate(_search(part["list"], context) or []):
            names = {"element": element, "elementIndex": index, f"element{depth}": element}
            inside = context | names | {f"elementIndex{depth}": index}
            if not _holds(part.get("preconditions", {}), inside):
                continue
            yield from _foreach(part.get("foreach", []), inside, depth + 1)
            if "patchesJson6902" in part:
                yield from _patches(part["patchesJson6902"], inside)


def _kyverno(new: Json, old: Json | None) -> Iterator[tuple[str, Any]]:
    kind, operation = ("batch/v1/Job" if new["kind"] == "Job" else "v1/Pod"), "CREATE" if old is None else "UPDATE"
    (policy,) = documents("training-env-kyverno.yaml")
    for rule in policy["spec"]["rules"]:
        (match,) = [one["resources"] for one in rule["match"]["any"]]
        if kind not in match["kinds"] or operation not in match["operations"]:
            continue
        context: Json = {"request": {"object": copy.deepcopy(new), "oldObject": old}}
        for entry in rule.get("context", []):
            variable = entry["variable"]
            found = _search(variable["jmesPath"], context) if "jmesPath" in variable else None
            found = _substitute(variable["value"], context) if "value" in variable else found
            context[entry["name"]] = variable.get("default") if found is None else found
        if not _holds(rule.get("preconditions", {}), context):
            continue
        yield from _foreach(rule["mutate"].get("foreach", []), context, 0)
        if "patchesJson6902" in rule["mutate"]:
            yield from _patches(rule["mutate"]["patchesJson6902"], context)
