"""Print seconds and cases per test file from a JUnit report of pytest: `python -m tests.support.durations FILE`."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from pathlib import Path


def table(report: Path) -> str:
    """Return CSV with a line per test file, the longest first."""
    seconds: defaultdict[str, float] = defaultdict(float)
    cases: Counter[str] = Counter()
    for case in ET.parse(report).iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        seconds[file] += float(case.get("time", 0))
        cases[file] += 1
    lines = [
        f"{file},{taken:.1f},{cases[file]}\n" for file, taken in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    return "file,seconds,cases\n" + "".join(lines)


if __name__ == "__main__":
    print(table(Path(sys.argv[1])), end="")
