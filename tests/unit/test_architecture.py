"""Every door of the walks in docs/architecture.md is a file that exists, and holds the names that the page gives."""

from __future__ import annotations

import re

from tests.support import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
DOORS = re.findall(r"^\| +\d+ \| `([^`]+)` \| (.*?) \|", PAGE, re.M)


def text_of(door: str) -> str:
    """Return the source of a door, which is a file or folder of the package or of the checkout; "" if there is none."""
    for path in (ROOT / "exporter" / "flopwatch" / door, ROOT / door):
        if path.exists():
            files = sorted(path.glob("*.py")) if path.is_dir() else [path]
            return "".join(file.read_text(encoding="utf-8") for file in files)
    return ""


def test_each_door_is_a_file_with_the_names_that_the_page_gives() -> None:
    missing = [
        f"{door}: {name}"
        for door, names in DOORS
        for name in re.findall(r"`<?([A-Za-z_.]+)>?`", names)
        if not all(re.search(rf"\b{part}\b", text_of(door)) for part in name.split("."))
    ]
    assert len(DOORS) >= 30
    assert missing == []
