"""Meanings of Xid and SXid codes, from the tables in data/.

`xid.csv` is NVIDIA's Xid catalogue (https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html) with a
severity of ours. `error` ends the job and leaves the GPU fine, `critical` needs a reset or a drain, `fatal` a reboot or
new hardware. `sxid.csv` is from https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SXID_SEVERITIES = {"always fatal": "fatal", "potentially fatal": "critical", "non-fatal": "warning"}  # by class


@dataclass(frozen=True, slots=True)
class XidMeaning:
    """Meaning of an Xid or SXid: NVIDIA's name, class (`category`) and action, and flopwatch's severity and `page`."""

    name: str
    category: str
    severity: str
    action: str
    page: str = ""  # what to do with a GPU that is not fit for work after this Xid; empty for other codes


@cache
def xids() -> Mapping[int, XidMeaning]:
    """Return the meaning of each Xid, by code."""
    return {
        int(row["xid"]): XidMeaning(row["name"], row["class"], row["severity"], row["action"], row["page"])
        for row in read_table("xid.csv")
    }


@cache
def paging_xids() -> tuple[int, ...]:
    """Return the Xids after which a GPU is not fit for work, in ascending order."""
    return tuple(sorted(code for code, meaning in xids().items() if meaning.page))


@cache
def sxids() -> Mapping[str, XidMeaning]:
    """Return the meaning of each SXid, by code."""
    meanings = {}
    for row in read_table("sxid.csv"):
        category = row["fabric_manager_guide_class"]
        meanings[row["sxid"]] = XidMeaning(row["name"], category, SXID_SEVERITIES[category], row["action"])
    return meanings


def read_table(name: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file in data/ as dictionaries by column heading."""
    text = (Path(__file__).parents[1] / "data" / name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))
