"""Check that a tag, the package, the chart and the changelog agree on the version of a release.

    python .ci/release.py v0.2.0            # prints the version
    python .ci/release.py v0.2.0 --notes    # prints the section of the changelog

Exits with status 1 and a reason if they differ, or if the section of the changelog has no date. Standard library only.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class Mismatch(Exception):
    """Two places name different versions, or one names none."""


def find(path: Path, pattern: str) -> str:
    """Return the one match of `pattern` in a file. Raises Mismatch."""
    found = re.findall(pattern, path.read_text(encoding="utf-8"), re.M)
    if len(found) != 1:
        raise Mismatch(f"{path.name}: expected one match of {pattern}, found {len(found)}")
    return str(found[0])


def check(tag: str, root: Path = ROOT) -> tuple[str, str]:
    """Return the version of a tag and its section of the changelog. Raises Mismatch."""
    if not re.fullmatch(r"v\d+\.\d+\.\d+(-(a|b|rc)\.\d+)?", tag):
        raise Mismatch(f"{tag}: write vX.Y.Z, or vX.Y.Z-rc.N for a pre-release")
    version = tag[1:]
    chart = root / "helm" / "Chart.yaml"
    # Python writes 0.3.0rc1 where semantic versioning writes 0.3.0-rc.1.
    expected = {
        "exporter/flopwatch/__init__.py": re.sub(r"-(a|b|rc)\.", r"\1", version),
        "helm/Chart.yaml, version": version,
        "helm/Chart.yaml, appVersion": re.sub(r"-(a|b|rc)\.", r"\1", version),
    }
    actual = {
        "exporter/flopwatch/__init__.py": find(
            root / "exporter" / "flopwatch" / "__init__.py", r'^__version__ = "(.+)"$'
        ),
        "helm/Chart.yaml, version": find(chart, r"^version: (.+)$"),
        "helm/Chart.yaml, appVersion": find(chart, r'^appVersion: "(.+)"$'),
    }
    for place, is_there in actual.items():
        if is_there != expected[place]:
            raise Mismatch(f"{place} is {is_there}, but the tag {tag} needs {expected[place]}")
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(version)} / (\S+)\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    if section is None:
        raise Mismatch(f"CHANGELOG.md has no section ## {version} / YYYY-MM-DD")
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", section[1]):
        raise Mismatch(f"CHANGELOG.md: {version} has the date {section[1]}; write YYYY-MM-DD")
    return version, section[2].strip()


def main(arguments: list[str]) -> int:
    """Print the version, or its notes."""
    tag, *options = arguments
    try:
        version, notes = check(tag)
    except Mismatch as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    print(notes if options == ["--notes"] else version)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
