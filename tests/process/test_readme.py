"""Test that the README is correct: its code runs, its commands are accepted, its tables and links are up to date."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from demo.servers import find
from docs.generate import key_metrics
from flopwatch import catalogue as c
from flopwatch.__main__ import _parser
from flopwatch.training import Run
from tests.support import ROOT
from tests.support.cases import for_each

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def commands() -> list[list[str]]:
    return [shlex.split(line, comments=True) for block in blocks("sh") for line in block.splitlines() if line.strip()]


class Batch:
    """Stand-in for a tensor of token ids."""

    def numel(self) -> int:
        return 8192


def test_the_training_loop_runs_and_its_steps_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOPWATCH_DISABLE", "1")
    saved: list[int] = []
    names = {
        "model": None,
        "loader": [Batch()] * 501,
        "train_step": lambda model, batch: None,
        "save": lambda model, step: saved.append(step),
        "load": lambda model: 1000,
    }
    exec(compile(blocks("python")[0], "README.md", "exec"), names)
    run = names["run"]
    assert isinstance(run, Run)
    points = run.snapshot().points
    assert saved == [1500]
    assert points[c.TRAINING_POSITION_STEPS] == [({}, 1501.0)]
    assert points[c.TRAINING_COMMITTED_STEPS] == [({}, 1500.0)]
    assert points[c.TRAINING_MODEL_FLOPS_TOTAL] == [({}, pytest.approx(501 * 8192 * 51.5e9))]
    assert points[c.TRAINING_HOOK_ERRORS_TOTAL] == [({}, 0.0)]


def test_every_flopwatch_command_is_accepted_by_the_command_line() -> None:
    quoted = [shlex.split(text)[1:] for text in re.findall(r"`(flopwatch [^`]+)`", README)]
    shown = [words[1:] for words in commands() if words[0] == "flopwatch"]
    assert len(quoted) >= 2
    assert len(shown) >= 1
    for words in quoted + shown:
        _parser().parse_args(words)


def test_every_make_target_exists() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    named = re.findall(r"make ([a-z]+)", README)
    assert {"demo", "test"} <= set(named) <= set(targets)


def test_prometheus_accepts_the_configuration_shown_with_the_rules_written_by_the_command_shown(tmp_path: Path) -> None:
    (command,) = (words for words in commands() if words[:3] == ["python", "-m", "alerts"])
    subprocess.run(
        [sys.executable, *command[1:-1], str(tmp_path / command[-1])],
        cwd=ROOT,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "exporter")},
        stdout=subprocess.DEVNULL,
    )
    (configuration,) = blocks("yaml")
    assert yaml.safe_load(configuration)["rule_files"] == ["monitoring/rules/*.yaml"]
    (tmp_path / "prometheus.yml").write_text(configuration)
    checked = subprocess.run(
        [find().promtool, "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr


def test_the_table_is_the_catalogues() -> None:
    assert key_metrics() in README
    assert key_metrics().count("\n| `") == 20


def test_every_setting_of_the_hook_is_explained_and_no_other() -> None:
    code = "".join(path.read_text() for path in (ROOT / "exporter" / "flopwatch" / "training").rglob("*.py"))
    page = (ROOT / "docs" / "training.md").read_text()
    assert set(re.findall(r"FLOPWATCH_[A-Z_]+", page)) == set(re.findall(r'"(FLOPWATCH_[A-Z_]+)"', code))


@for_each(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "alerts" / "runbooks").glob("*.md")),
    ],
    lambda page: page.name,
)
def test_every_link_into_the_repository_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)[^)]*\)", page.read_text())
    missing = [link for link in links if not page.parent.joinpath(link).exists()]
    assert missing == []
