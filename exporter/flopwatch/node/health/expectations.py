"""Expectations of a host's parts, from a JSON file that hosts of the same shape share, or from `check --record`.

    {"gpus": 8, "gpu_model": "NVIDIA H100 80GB HBM3", "nvlinks_per_gpu": 18, "pcie_width": 16, "pcie_generation": 5,
     "ports": {"compute": {"count": 8, "rate_gbps": 400}}}

Every key is optional. The roles of ports are compute, storage and management, as in `infiniband_info`, and any.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from flopwatch.node.collectors import StateFile
from flopwatch.settings import SettingsError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ports:
    """Expected number of active ports of one role, and their rate in Gb/s."""

    count: int = 0
    rate_gbps: float = 0.0


@dataclass(frozen=True, slots=True)
class Expectations:
    """Expected parts of a host. 0 and empty expect nothing. There are no serial numbers, so that hosts can share it."""

    gpus: int = 0
    gpu_model: str = ""
    nvlinks_per_gpu: int = 0
    pcie_width: int = 0
    pcie_generation: int = 0
    ports: Mapping[str, Ports] = field(default_factory=dict)  # by role: compute, storage, management, any

    def content(self) -> dict[str, Any]:
        """Return the expectations as a JSON object, without those that are 0 or empty."""
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        given["ports"] = {
            role: {"count": one.count} | ({"rate_gbps": one.rate_gbps} if one.rate_gbps else {})
            for role, one in self.ports.items()
        }
        return {name: value for name, value in given.items() if value}


ROLES = ("compute", "storage", "management", "any")
_EXAMPLE = '{"gpus": 8, "nvlinks_per_gpu": 18, "ports": {"compute": {"count": 8, "rate_gbps": 400}}}'


def parse(text: str, name: str = "--expect") -> Expectations:
    """Parse expectations from JSON. Raises SettingsError with the wrong line or key, the file's `name` and advice."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingsError(f"{name}, line {error.lineno}: {error.msg}; write JSON, for example {_EXAMPLE}") from None
    except (ValueError, RecursionError):
        raise SettingsError(f"{name} cannot be read; write JSON, for example {_EXAMPLE}") from None
    _check_keys(name, content, tuple(one.name for one in fields(Expectations)))
    for key, number in content.items():
        if key not in ("gpu_model", "ports"):
            _number(name, key, number, whole=True)
    if not isinstance(content.get("gpu_model", ""), str):
        raise SettingsError(f'{name}: "gpu_model" is the name nvidia-smi prints, such as "NVIDIA H100 80GB HBM3"')
    return Expectations(**{**content, "ports": _ports(name, content.get("ports", {}))})


def _ports(name: str, content: Any) -> dict[str, Ports]:
    _check_keys(f'{name}: "ports"', content, ROLES)
    ports: dict[str, Ports] = {}
    for role, one in content.items():
        where = f'{name}: "ports", "{role}"'
        _check_keys(where, one, ("count", "rate_gbps"))
        ports[role] = Ports(
            int(_number(where, "count", one.get("count", 0), whole=True)),
            _number(where, "rate_gbps", one.get("rate_gbps", 0)),
        )
    return ports


def _check_keys(where: str, content: Any, known: tuple[str, ...]) -> None:
    if not isinstance(content, dict):
        raise SettingsError(f"{where} is not a JSON object; write for example {_EXAMPLE}")
    for key in content:
        if key not in known:
            raise SettingsError(f"{where}: {json.dumps(key)} is not one of {', '.join(known)}")


def _number(where: str, key: str, value: Any, whole: bool = False) -> float:
    kinds = (int,) if whole else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not 0 <= value < 100_000:
        raise SettingsError(f'{where}: "{key}" is {json.dumps(value)}; write a {"whole " if whole else ""}number')
    return value


def learnt_file(state: Path) -> Path:
    """Return the file of the state folder to which `flopwatch check --record` writes the expectations."""
    return state / "expected.json"


def load(file: Path | None, state: Path) -> Expectations:
    """Return the expectations in `file`, else those in the state folder, else empty ones. Raises SettingsError."""
    try:
        if file is not None:
            return parse(file.read_text(errors="replace"), f"--expect {file}")
        learnt = learnt_file(state)
        text = learnt.read_text(errors="replace")
        return parse(text, str(learnt)) if StateFile(learnt).load() else Expectations()
    except FileNotFoundError:
        if file is None:
            return Expectations()
        raise SettingsError(f"--expect {file}: file not found; create it with flopwatch check --record") from None
    except OSError as error:
        if file is None and isinstance(error, PermissionError):  # owned by root or the exporter's user
            log.warning("%s: %s; nothing is expected of this node", error.filename, error.strerror)
            return Expectations()
        raise SettingsError(f"{error.filename}: {error.strerror}") from None
