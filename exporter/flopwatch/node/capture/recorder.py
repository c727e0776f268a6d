"""Proxy of the `pynvml` module that records every call, its arguments and its answer as JSON.

Each subject (`system`, `gpu0`, `gpu0/mig1`) has `calls` {"nvmlDeviceGetPowerUsage()": [69850, 631950]}, `fields` {"82":
[{"uiVal": 48}], "164 scope 3": ...} and GPM `metrics` {"2": [88.0, "nan"]}, each with its answers. An error is
{"error": nvmlReturn_t}, and `encode` has the other forms. tests/support/nvml_replay.py replays a recording.
"""

import ctypes
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from flopwatch.node.collectors.nvml.fields import VALUE_MEMBERS, identity

PURE = {"nvmlStructToFriendlyObject", "nvmlFriendlyObjectToStruct", "nvmlExceptionClass"}  # call no driver

# Calls about GPM samples, which a replay creates itself.
SAMPLE_CALLS = {"nvmlGpmSampleAlloc", "nvmlGpmSampleFree", "nvmlGpmSampleGet", "nvmlGpmMigSampleGet"}

SYSTEM = "system"
SECTIONS = ("calls", "fields", "metrics")

Recorded = dict[str, dict[str, dict[str, list[Any]]]]


class Handles:
    """Names of NVML's handles in a recording: `gpu0` for GPU 0, `gpu0/mig1` for its MIG device 1."""

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}
        self._sampled: dict[Any, str] = {}

    def name(self, handle: Any) -> str:
        """Return the name of a handle, for example `handle7` if it was not named before."""
        return self._names.setdefault(identity(handle), f"handle{len(self._names)}")

    def give(self, handle: Any, name: str) -> None:
        """Set the name of a handle."""
        self._names[identity(handle)] = name

    def learn(self, function: str, arguments: tuple[Any, ...], result: Any) -> None:
        """Name the handle that a call returned, or record which subject a GPM sample was read from."""
        if function in ("nvmlGpmSampleGet", "nvmlGpmMigSampleGet"):
            self._sampled[identity(arguments[-1])], _ = self.question(function, arguments)
        elif not is_handle(result):
            return
        elif function.startswith("nvmlDeviceGetHandleByIndex"):
            self.give(result, f"gpu{arguments[0]}")
        elif function == "nvmlDeviceGetMigDeviceHandleByIndex":
            self.give(result, f"{self.name(arguments[0])}/mig{arguments[1]}")

    def question(self, function: str, arguments: Iterable[Any]) -> tuple[str, str]:
        """Return a call's subject, and the call without it: ("gpu0", "nvmlDeviceGetClockInfo(1)")."""
        given = list(arguments)
        if function == "nvmlGpmMetricsGet":
            # The second sample has the subject. The metrics are recorded one by one.
            return self._sampled.get(identity(given[0].sample2), SYSTEM), f"{function}()"
        subject = SYSTEM
        if given and is_handle(given[0]) and not _is_sample(given[0]):
            subject = self.name(given.pop(0))
        if function == "nvmlDeviceGetFieldValues":
            given.clear()
        if function == "nvmlGpmMigSampleGet":
            subject = f"{subject}/gi{given.pop(0)}"
        return subject, f"{function}({', '.join(map(self._argument, given))})"

    def _argument(self, value: Any) -> str:
        if _is_sample(value):
            return "sample"
        if is_handle(value):
            return self.name(value)
        if isinstance(structure(value), ctypes.Structure):
            return type(structure(value)).__name__
        return json.dumps(value)


def is_handle(value: Any) -> bool:
    """Return whether a value is an opaque handle of NVML or of a simulation."""
    if isinstance(value, ctypes._Pointer):
        return True
    plain = (type(None), bool, int, float, str, bytes, list, tuple, ctypes.Structure, ctypes.Array, ctypes._SimpleCData)
    return not isinstance(value, plain) and structure(value) is value and type(value).__name__ != "nvmlFriendlyObject"


def _is_sample(value: Any) -> bool:
    return type(value).__name__ == "LP_struct_c_nvmlGpmSample_t"


def structure(value: Any) -> Any:
    """Return the object behind a ctypes.byref(), and any other value as it is."""
    return getattr(value, "_obj", value) if type(value).__name__ == "CArgObject" else value


def structures(arguments: Iterable[Any]) -> Iterator[Any]:
    """Return the ctypes structures among the arguments of a call, which the call fills."""
    return (structure(argument) for argument in arguments if isinstance(structure(argument), ctypes.Structure))


def encode(value: Any, handles: Handles) -> Any:
    """Return a call's answer as JSON: a plain value, a list, {"handle": subject}, or {"struct": type, its members}."""
    if isinstance(value, bytes):
        return {"bytes": value.decode("latin-1")}
    if isinstance(value, ctypes.Structure):
        return {"struct": type(value).__name__, **_members(value)}
    if isinstance(value, ctypes._SimpleCData):
        return {"ctype": type(value).__name__, "value": value.value}
    if isinstance(value, (list, tuple, ctypes.Array)):
        return [encode(item, handles) for item in value]
    if type(value).__name__ == "nvmlFriendlyObject":
        return {"object": {name: encode(member, handles) for name, member in sorted(vars(value).items())}}
    return {"handle": handles.name(value)} if is_handle(value) else value


def _members(struct: ctypes.Structure) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, kind in ((field[0], field[1]) for field in struct._fields_):
        member = getattr(type(struct), name)
        raw = ctypes.string_at(ctypes.addressof(struct) + member.offset, ctypes.sizeof(kind))
        value = member.__get__(struct)  # pynvml's own access would decode any bytes as text
        if isinstance(value, (int, float)):
            members[name] = value
        elif not any(raw) or isinstance(value, ctypes._Pointer):
            continue
        elif isinstance(value, ctypes.Structure):
            members[name] = _members(value)
        elif isinstance(value, ctypes.Array) and issubclass(value._type_, ctypes.Structure):
            last = max(index for index, item in enumerate(value) if any(bytes(item)))
            members[name] = [_members(item) for item in value[: last + 1]]
        elif isinstance(value, bytes) and raw.rstrip(b"\0").isascii() and raw.rstrip(b"\0").decode().isprintable():
            members[name] = raw.rstrip(b"\0").decode()
        else:
            members[name] = {"hex": raw.hex()}
    return members


class Recorder:
    """Proxy of the pynvml module that records every call and its answer."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._handles = Handles()
        self._notes: Recorded = {}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._library, name)
        if name.startswith("nvml") and name not in PURE and callable(value) and not isinstance(value, type):
            return partial(self._call, name, value)
        return value

    def _call(self, function: str, asked: Any, *arguments: Any, **named: Any) -> Any:
        subject, question = self._handles.question(function, (*arguments, *named.values()))
        try:
            result = asked(*arguments, **named)
        except self._library.NVMLError as error:
            self._note(subject, "calls", question, {"error": error.value})
            raise
        self._handles.learn(function, arguments, result)
        answer = None
        if function == "nvmlDeviceGetFieldValues":
            self._note_fields(subject, result)
        elif function == "nvmlGpmMetricsGet":
            self._note_metrics(subject, arguments[0])
        elif function not in SAMPLE_CALLS:
            answer = encode(next(structures(arguments), result), self._handles)
        self._note(subject, "calls", question, answer)
        return result

    def _note_fields(self, subject: str, values: Iterable[Any]) -> None:
        for value in values:
            answer: dict[str, Any] = {"error": value.nvmlReturn}
            if value.nvmlReturn == 0:
                member = VALUE_MEMBERS[value.valueType] if value.valueType < len(VALUE_MEMBERS) else "ullVal"
                answer = {member: getattr(value.value, member)}
            self._note(subject, "fields", field_key(value.fieldId, value.scopeId), answer)

    def _note_metrics(self, subject: str, request: Any) -> None:
        for metric in request.metrics[: request.numMetrics]:
            answer: Any = {"error": metric.nvmlReturn}
            if metric.nvmlReturn == 0:
                answer = metric.value if math.isfinite(metric.value) else str(metric.value)
            self._note(subject, "metrics", str(metric.metricId), answer)

    def _note(self, subject: str, section: str, question: str, answer: Any) -> None:
        sections = self._notes.setdefault(subject, {name: {} for name in SECTIONS})
        sections[section].setdefault(question, []).append(answer)

    def recorded(self) -> Recorded:
        """Return the calls and answers so far, sorted, so that two recordings can be compared."""
        return arranged(self._notes)


def field_key(field: int, scope: int) -> str:
    """Return the name of an NVML field value in a recording: `82`, or `164 scope 3`."""
    return f"{field} scope {scope}" if scope else str(field)


def arranged(notes: Mapping[str, Mapping[str, Mapping[str, list[Any]]]]) -> Recorded:
    """Return a recording sorted, without empty sections. Equal last answers of a call become one answer."""
    return {
        subject: {
            section: {question: _shortened(entries[question]) for question in sorted(entries, key=natural)}
            for section, entries in sections.items()
            if entries
        }
        for subject, sections in sorted(notes.items(), key=lambda note: (note[0] != SYSTEM, natural(note[0])))
    }


def natural(name: str) -> list[Any]:
    """Return a key that sorts names by the numbers in them: gpu2 before gpu10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _shortened(answers: list[Any]) -> list[Any]:
    length = len(answers)
    while length > 1 and answers[length - 1] == answers[length - 2]:
        length -= 1
    return answers[:length]


def dumps(value: Any, depth: int = 4, indent: str = "") -> str:
    """Return JSON with a line per entry down to `depth` levels, for review and diffs."""
    if depth == 0 or not isinstance(value, dict) or not value:
        return json.dumps(value)
    inner = indent + " "
    lines = (f"{inner}{json.dumps(key)}: {dumps(item, depth - 1, inner)}" for key, item in value.items())
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
