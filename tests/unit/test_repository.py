"""Workflows, the release check and the list of phrases: what can be checked of them without GitHub."""

from __future__ import annotations

import csv
import re
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import flopwatch

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RELEASE = runpy.run_path(str(ROOT / ".ci" / "release.py"))
PHRASES = runpy.run_path(str(ROOT / ".codespell" / "phrases.py"))
each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def steps(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each action that a workflow or an action uses, with the comment behind it."""
    yield from re.findall(r"^ *(?:- )?uses: (\S+)(.*)$", path.read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("path", [*WORKFLOWS, *(ROOT / ".github" / "actions").glob("*/action.yml")], ids=str)
def test_actions_are_pinned_by_commit_with_their_version_next_to_it(path: Path) -> None:
    for action, comment in steps(path):
        if action.startswith("./"):
            assert (ROOT / action / "action.yml").is_file()
        else:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action), action
            assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


def test_an_action_has_one_version_everywhere() -> None:
    paths = [*WORKFLOWS, *(ROOT / ".github" / "actions").glob("*/action.yml")]
    used = {action for path in paths for action, _ in steps(path) if not action.startswith("./")}
    assert len(used) == len({action.partition("@")[0] for action in used})


@each_workflow
def test_every_job_has_a_time_limit_and_few_permissions(path: Path) -> None:
    workflow: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] in ({}, {"contents": "read"})
    for job in workflow["jobs"].values():
        assert 5 <= job["timeout-minutes"] <= 120


def test_a_job_of_tests_may_take_twice_as_long_as_they_were_measured() -> None:
    with (ROOT / "tests" / "durations.csv").open(newline="") as file:
        measured = [(row["file"], float(row["seconds"])) for row in csv.DictReader(file)]
    workflow: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    jobs = {}
    for name, job in workflow["jobs"].items():
        for command in (step.get("run", "") for step in job["steps"]):
            if folder := re.search(r"pytest .*(tests/\w+)", command):
                workers = 2 if "-n auto" in command else 1
                seconds = sum(took for file, took in measured if file.startswith(f"{folder[1]}/"))
                jobs[name] = 60 * job["timeout-minutes"] / (seconds / workers)
    assert len(jobs) == 5
    assert {name: ratio for name, ratio in jobs.items() if ratio < 2} == {}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of the files that name a version, with a dated section of the changelog."""
    for name in ("exporter/flopwatch/__init__.py", "helm/Chart.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(
        f"# Changelog\n\n## {flopwatch.__version__} / 2026-12-01\n\n- [FEATURE] All of it.\n\n"
        "## 0.0.1 / 2026-01-01\n\nOld.\n"
    )
    return tmp_path


def test_a_release_is_the_version_of_package_chart_and_changelog(checkout: Path) -> None:
    version = flopwatch.__version__
    assert RELEASE["check"](f"v{version}", checkout) == (version, "- [FEATURE] All of it.")


@pytest.mark.parametrize(
    ("name", "old", "new", "reason"),
    [
        ("exporter/flopwatch/__init__.py", '= "', '= "9', "exporter/flopwatch/__init__.py is 9"),
        ("helm/Chart.yaml", "\nversion: ", "\nversion: 9", "helm/Chart.yaml, version is 9"),
        ("helm/Chart.yaml", 'appVersion: "', 'appVersion: "9', "helm/Chart.yaml, appVersion is 9"),
        ("CHANGELOG.md", "2026-12-01", "unreleased", "has the date unreleased"),
        ("CHANGELOG.md", f"## {flopwatch.__version__}", "## 0.0.9", "has no section"),
    ],
)
def test_a_release_whose_versions_differ_is_refused(checkout: Path, name: str, old: str, new: str, reason: str) -> None:
    text = (checkout / name).read_text()
    assert old in text
    (checkout / name).write_text(text.replace(old, new, 1))
    with pytest.raises(RELEASE["Mismatch"], match=re.escape(reason)):
        RELEASE["check"](f"v{flopwatch.__version__}", checkout)


@pytest.mark.parametrize("tag", ["0.2.0", "v0.2", "v0.2.0rc1", "v0.2.0-final"])
def test_a_tag_of_another_shape_is_refused(checkout: Path, tag: str) -> None:
    with pytest.raises(RELEASE["Mismatch"], match=re.escape(f"{tag}: write vX.Y.Z")):
        RELEASE["check"](tag, checkout)


def test_a_phrase_is_found_also_where_a_line_ends_in_it() -> None:
    text = "# a page of\n# which nothing is known\nthere is none\nvalue that is none\n"  # codespell:ignore
    assert list(PHRASES["findings"](text)) == [
        (4, "is none", "is not a, has no"),  # codespell:ignore
        (1, "of which", "two sentences"),  # codespell:ignore
    ]


def test_a_line_with_the_mark_and_a_test_of_jinja_have_no_phrase() -> None:
    text = "a page of which nothing is known  # codespell:ignore\n{% if losses is none %}\n"  # codespell:ignore
    assert list(PHRASES["findings"](text)) == []
