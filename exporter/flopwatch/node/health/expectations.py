"""Expectations of a host's parts, from a JSON file that hosts of the same shape share, or from `check --record`.

    {"gpus": 8, "gpu_model": "NVIDIA H100 80GB HBM3", "nvlinks_per_gpu": 18, "pcie_width": 16, "pcie_generation": 5,
     "ports": {"compute": {"count": 8, "rate_gbps": 400}}}

Every key is optional. The roles of ports are compute, storage and management, as in `infiniband_info`, and any.
"""

import logging
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from flopwatch.node.collectors import StateFile
from flopwatch.settings import SettingsError

log = logging.getLogger(__name__)

Count = Annotated[int, Meta(ge=0, lt=100_000)]
Role = Annotated[str, Meta(pattern="^(compute|storage|management|any)$")]


class Ports(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Expected number of active ports of one role, and their rate in Gb/s."""

    count: Count = 0
    rate_gbps: Annotated[float, Meta(ge=0, lt=100_000)] = 0.0


class Expectations(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Expected parts of a host. 0 and empty expect nothing. There are no serial numbers, so that hosts can share it."""

    gpus: Count = 0
    gpu_model: str = ""
    nvlinks_per_gpu: Count = 0
    pcie_width: Count = 0
    pcie_generation: Count = 0
    ports: dict[Role, Ports] = {}

    def content(self) -> dict[str, Any]:
        """Return the expectations as a JSON object, without those that are 0 or empty."""
        content: dict[str, Any] = msgspec.to_builtins(self)
        return content


_EXAMPLE = '{"gpus": 8, "nvlinks_per_gpu": 18, "ports": {"compute": {"count": 8, "rate_gbps": 400}}}'


def parse(text: str, name: str = "--expect") -> Expectations:
    """Parse expectations from JSON. Raises SettingsError with the wrong place, the file's `name` and advice."""
    try:
        return msgspec.json.decode(text, type=Expectations)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{name}: {error}; write JSON, for example {_EXAMPLE}") from None


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
