"""Decoder of NVLink Xids: 144 to 150 (NVLink 5) and 74 (NVLink 4 and older).

Its input is the text after `Xid (PCI:...): N, `. NVLink 5 writes unit, severity, link and six words. The first two
words, interrupt information and error status, are looked up in `data/xid_nvlink5.csv` (NVIDIA's Xid catalogue,
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html). Xid 74 has seven register words, read as in
https://github.com/NVIDIA/NVSentinel/pull/1526. An error without a row in the table has no action.
"""

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

from flopwatch.catalogue.xid import read_table

CODES = range(144, 151)
LAYOUT_2_SINCE = 575
SEVERITIES = ("unknown", "non-fatal", "link fatal", "fatal")

_LINK_5 = re.compile(
    r"\b(?P<unit>[A-Z][A-Z0-9_]{2,31}) +(?P<severity>Fatal|Non-?fatal|Link Fatal)\b[^(]{0,64}?"
    r"\bLink +(?P<link>-?[0-9]{1,3}) +\((?P<words>0x[0-9a-fA-F]{1,8}(?:,? +0x[0-9a-fA-F]{1,8})+)\)",
    re.IGNORECASE,
)
_LINK_4 = re.compile(
    r"\blink +(?P<link>[0-9]{1,3}) *\((?P<words>0x[0-9a-fA-F]{1,8}(?:,? +0x[0-9a-fA-F]{1,8})+)\)", re.IGNORECASE
)

_REGISTERS = (  # bits of Xid 74's first register word, decisive ones first: cause, severity, next steps
    (0b11 << 21, "SIGNAL_INTEGRITY", "fatal", "INVESTIGATE_LINK_SI_AND_CABLES"),
    (0b11 << 4, "ECC_OR_PARITY", "fatal", "CONTACT_SUPPORT"),
    (1 << 1 | 1 << 20, "SECONDARY", "non-fatal", "IGNORE"),
)


class LinkError(NamedTuple):
    """Error of one NVLink link.

    `unit` is the GPU's hardware unit that detected it. `link` is empty if the driver names none. `action` is NVIDIA's
    immediate action, `investigation` the next steps. Both are empty if NVIDIA's table lacks the error.
    """

    unit: str
    link: str
    severity: str
    action: str
    investigation: str


class LinkErrorRow(NamedTuple):
    """Row of data/xid_nvlink5.csv. `layouts`: (mask, value) of the interrupt word before and from driver R575."""

    xid: int
    units: tuple[str, ...]
    layouts: tuple[tuple[int, int], tuple[int, int]]
    status: int
    severity: str
    action: str
    investigation: str


def decode(xid: int, text: str, driver_version: str = "") -> LinkError | None:
    """Return the link error in the text of an NVLink Xid, or None if Xid or text is of another kind."""
    if xid == 74:
        return _registers(text)
    match = _LINK_5.search(text) if xid in CODES else None
    if match is None:
        return None
    words = [int(word, 16) for word in re.findall("0x[0-9a-fA-F]+", match["words"])]
    unit, link = match["unit"].upper(), _link(match["link"])
    row = find(table(), xid, words[0], words[1], unit, driver_version)
    if row is None:
        severity = match["severity"].lower().replace("nonfatal", "non-fatal")
        return LinkError(unit, link, severity, "", "")
    return LinkError(unit, link, row.severity, row.action, row.investigation)


def find(
    table: Sequence[LinkErrorRow], xid: int, interrupt: int, status: int, unit: str, driver_version: str = ""
) -> LinkErrorRow | None:
    """Return the row of `unit` and the first two words of an NVLink 5 Xid. Tries the driver's word layout first."""
    major = driver_version.partition(".")[0]
    layouts = (0, 1) if major.isdecimal() and int(major) < LAYOUT_2_SINCE else (1, 0)
    for layout in layouts:  # an earlier driver may have logged the Xid
        rows = [
            row
            for row in table
            if row.xid == xid
            and interrupt & row.layouts[layout][0] == row.layouts[layout][1]
            and any(unit.startswith(name) or name.startswith(unit) for name in row.units)
        ]
        exact = [row for row in rows if row.status == status]
        # Some units report a number, others one bit per error. Several bits may then be set.
        bits = [row for row in rows if row.status != 0 and row.status & status == row.status]
        if exact or bits:
            return max(exact or bits, key=lambda row: SEVERITIES.index(row.severity))
    return None


@functools.cache
def table() -> tuple[LinkErrorRow, ...]:
    """Return the rows of data/xid_nvlink5.csv."""
    return tuple(
        LinkErrorRow(
            int(row["xid"]),
            tuple(row["unit"].split("/")),
            (pattern(row["intrinfo_v1_before_r575"]), pattern(row["intrinfo_v2_from_r575"])),
            int(row["error_status"], 16),
            row["severity"].rstrip("?").lower(),
            row["immediate"],
            row["investigatory"],
        )
        for row in read_table("xid_nvlink5.csv")
    )


def pattern(text: str) -> tuple[int, int]:
    """Parse 32 bits, the highest first, where `-` is any bit. Return mask and value."""
    return int(text.replace("0", "1").replace("-", "0"), 2), int(text.replace("-", "0"), 2)


def _registers(text: str) -> LinkError | None:
    match = _LINK_4.search(text)
    if match is None:
        return None
    first = int(match["words"].partition(" ")[0].rstrip(","), 16)
    for bits, unit, severity, investigation in _REGISTERS:
        if first & bits:
            return LinkError(unit, _link(match["link"]), severity, "WORKFLOW_NVLINK_ERR", investigation)
    return LinkError("OTHER", _link(match["link"]), "unknown", "WORKFLOW_NVLINK_ERR", "")


def _link(text: str) -> str:
    return "" if text.startswith("-") else str(int(text))
