"""Print seconds and cases per test file from JUnit reports of pytest: `python -m tests.support.durations FILE...`."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path


def table(reports: Iterable[Path]) -> str:
    """Return CSV with a line per test file, the longest first. A case in several reports counts once, in the newest."""
    taken: dict[tuple[str, str], float] = {}
    for report in sorted(reports, key=lambda path: path.stat().st_mtime):
        for case in ET.parse(report).iter("testcase"):
            taken[case.get("classname", ""), case.get("name", "")] = float(case.get("time", 0))
    files: defaultdict[str, list[float]] = defaultdict(list)
    for (module, _), seconds in taken.items():
        files[module.replace(".", "/") + ".py"].append(seconds)
    lines = [
        f"{file},{sum(seconds):.1f},{len(seconds)}\n"
        for file, seconds in sorted(files.items(), key=lambda item: -sum(item[1]))
    ]
    return "file,seconds,cases\n" + "".join(lines)


if __name__ == "__main__":
    print(table(map(Path, sys.argv[1:])), end="")
