"""NVML of a captured host: a replacement of the `pynvml` module that answers from an `nvml.json`.

Constants, structures and exceptions are those of the real package. A call returns its recorded answers in order, and
the last one for ever. A call that was not recorded fails with NVML_ERROR_NOT_SUPPORTED if the function was called with
other arguments, else with NVML_ERROR_FUNCTION_NOT_FOUND. The format: `node/capture/recorder.py`.
"""

import ctypes
import json
import types
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pynvml as real

from flopwatch.node.capture.recorder import PURE, SAMPLE_CALLS, Handles, field_key, structures
from flopwatch.node.collectors.nvml.fields import VALUE_MEMBERS

# Calls that need no recorded answer.
ALWAYS = {"nvmlShutdown": None, "nvmlGpmSampleFree": None}


class Replay:
    """Replacement of the pynvml module whose functions return the answers recorded on a captured host."""

    def __init__(self, recorded: Mapping[str, Mapping[str, Mapping[str, list[Any]]]]) -> None:
        self._recorded = recorded
        self._handles = Handles()
        self._asked: Counter[tuple[str, str, str]] = Counter()
        self._addresses: dict[str, int] = {}
        self._functions = {
            question.partition("(")[0] for sections in recorded.values() for question in sections.get("calls", {})
        }

    def __getattr__(self, name: str) -> Any:
        value = getattr(real, name)
        if name.startswith("nvml") and name not in PURE and isinstance(value, types.FunctionType):
            return partial(self._call, name)
        return value

    def _call(self, function: str, *arguments: Any, **named: Any) -> Any:
        if function in ALWAYS:
            return ALWAYS[function]
        subject, question = self._handles.question(function, (*arguments, *named.values()))
        sections = self._recorded.get(subject, {})
        if function == "nvmlDeviceGetFieldValues" and "fields" in sections:
            return self._fields(subject, question, arguments[1])
        if function not in self._functions:
            raise real.NVMLError(real.NVML_ERROR_FUNCTION_NOT_FOUND)
        answer = self._answer(subject, "calls", question, {"error": real.NVML_ERROR_NOT_SUPPORTED})
        result = self._result(answer, next(structures(arguments), None))
        if function == "nvmlGpmMetricsGet":
            return self._metrics(subject, arguments[0])
        if function in SAMPLE_CALLS:
            result = arguments[-1] if arguments else self._handle(f"sample{len(self._addresses)}", sample=True)
        self._handles.learn(function, arguments, result)
        return result

    def _answer(self, subject: str, section: str, question: str, default: Any) -> Any:
        """Return the next recorded answer to a call, the last one again after that, or else `default`."""
        answers = self._recorded.get(subject, {}).get(section, {}).get(question)
        if answers is None:
            return default
        key = (subject, section, question)
        self._asked[key] += 1
        return answers[min(self._asked[key], len(answers)) - 1]

    def _handle(self, name: str, sample: bool = False) -> Any:
        """Return a made-up pointer to a device, or to a GPM sample if `sample`. A name keeps its pointer."""
        address = self._addresses.setdefault(name, 0x1000 * (len(self._addresses) + 1))
        handle = ctypes.cast(ctypes.c_void_p(address), real.c_nvmlGpmSample_t if sample else real.c_nvmlDevice_t)
        self._handles.give(handle, name)
        return handle

    def _result(self, answer: Any, target: ctypes.Structure | None = None) -> Any:
        """Decode a recorded answer: return its value, raise its error, or fill the structure `target`."""
        if isinstance(answer, list):
            return [self._result(item) for item in answer]
        if not isinstance(answer, dict):
            return answer
        if "error" in answer:
            raise real.NVMLError(answer["error"])
        if "struct" in answer:
            filled = getattr(real, answer["struct"])() if target is None else target
            ctypes.memset(ctypes.addressof(filled), 0, ctypes.sizeof(filled))
            fill(filled, {name: value for name, value in answer.items() if name != "struct"})
            return filled if target is None else real.NVML_SUCCESS
        if "object" in answer:
            return real.nvmlFriendlyObject({name: self._result(value) for name, value in answer["object"].items()})
        if "ctype" in answer:
            return getattr(ctypes, answer["ctype"])(answer["value"])
        return self._handle(answer["handle"]) if "handle" in answer else answer["bytes"].encode("latin-1")

    def _fields(self, subject: str, question: str, fields: Any) -> Any:
        self._result(self._answer(subject, "calls", question, None))
        values = (real.c_nvmlFieldValue_t * len(fields))()
        for value, field in zip(values, fields, strict=True):
            value.fieldId, value.scopeId = field if isinstance(field, (tuple, list)) else (field, 0)
            unknown = {"error": real.NVML_ERROR_NOT_SUPPORTED}
            answer = self._answer(subject, "fields", field_key(value.fieldId, value.scopeId), unknown)
            for member, number in answer.items():
                if member == "error":
                    value.nvmlReturn = number
                else:
                    value.valueType = VALUE_MEMBERS.index(member)
                    setattr(value.value, member, number)
        return values

    def _metrics(self, subject: str, request: Any) -> Any:
        for metric in request.metrics[: request.numMetrics]:
            unknown = {"error": real.NVML_ERROR_NOT_SUPPORTED}
            answer = self._answer(subject, "metrics", str(metric.metricId), unknown)
            failed = isinstance(answer, dict)
            metric.nvmlReturn = answer["error"] if failed else real.NVML_SUCCESS
            metric.value = 0 if failed else float(answer)
        return request


def fill(struct: Any, members: Mapping[str, Any]) -> None:
    """Set the members of a ctypes structure to their recorded values."""
    for name, value in members.items():
        if isinstance(value, dict) and set(value) == {"hex"}:
            raw = bytes.fromhex(value["hex"])
            ctypes.memmove(ctypes.addressof(struct) + getattr(type(struct), name).offset, raw, len(raw))
        elif isinstance(value, dict):
            fill(getattr(struct, name), value)
        elif isinstance(value, list):
            for item, recorded in zip(getattr(struct, name), value, strict=False):
                fill(item, recorded)
        else:
            setattr(struct, name, value.encode() if isinstance(value, str) else value)


def load(folder: Path) -> Replay:
    """Return a replacement of the pynvml module for the host captured in `folder`."""
    return Replay(json.loads((folder / "nvml.json").read_bytes())["nvml"])
