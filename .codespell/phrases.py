"""Find phrases that docs/style.md does not allow: codespell looks at single words only.

    python .codespell/phrases.py [PATH ...]

Without paths it reads every file that git tracks and that codespell reads. Exits with status 1 if there is a finding.
A line with the mark `codespell:ignore` is skipped. Standard library only.
"""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PHRASES = {
    r"(?:is|are|was|were) none\b(?! %})": "is not a, has no",  # "is none %}" is a test of Jinja
    r"one that is none": "has no",
    r"what is no\b": "is not a, has no",
    r"of (?:which|whom)\b": "two sentences",
    r"by which\b": "two sentences",
    r"at that(?=[,.;])": "then, or nothing",
    r"what (?:asks|comes)\b": "the request, the input",
    r"the late (?:one|rank)\b": "the straggler",
    r"Bad:": "Expected:",
    r"Nothing:": "no_data=",
}
# A line may end inside a phrase, and the next one may begin with the mark of a comment.
GAP = r"(?:[ ]+|[ ]*\n[ ]*(?:#|//)?[ ]*)"
IGNORED = re.compile(r"codespell:ignore\b")
# "There is none" is a sentence.
ALLOWED_BEFORE = re.compile(r"\bthere[ ]+$", re.I)
FINDERS = [(re.compile(r"\b" + phrase.replace(" ", GAP)), instead) for phrase, instead in PHRASES.items()]


def findings(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, phrase and what to write instead."""
    lines = text.split("\n")
    for finder, instead in FINDERS:
        for found in finder.finditer(text):
            if ALLOWED_BEFORE.search(text[max(0, found.start() - 10) : found.start()]):
                continue
            number = text.count("\n", 0, found.start()) + 1
            if not IGNORED.search(lines[number - 1]):
                yield number, " ".join(re.split(r"[\s#/]+", found[0])), instead


def files(given: list[str]) -> Iterator[Path]:
    """Yield the files to read, relative to the repository."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--", *given], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    (skip,) = re.findall(r'^skip = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    for name in tracked.split("\0"):
        if name and not any(fnmatch.fnmatch(f"./{name}", pattern) for pattern in skip.split(",")):
            yield Path(name)


def main(given: list[str]) -> int:
    """Print each finding as codespell does."""
    count = 0
    for file in files(given):
        try:
            text = (ROOT / file).read_text(encoding="utf-8")
        except (UnicodeDecodeError, IsADirectoryError):
            continue
        for line, phrase, instead in sorted(findings(text)):
            print(f"{file}:{line}: {phrase} ==> {instead}")
            count += 1
    return min(count, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
