"""Verdicts of the ledger on real jobs of eight gloo ranks, one trial of each kind of `bench.parallel`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.parallel import KINDS
from tests.support.exporter_process import ENVIRONMENT

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.e2e, pytest.mark.torch, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def rows() -> dict[str, list[str]]:
    """Return the numbers of each kind: trials, right ones, with a wrong name, and with the line of code."""
    command = [sys.executable, "-m", "bench.parallel", "--trials", "1", "--jobs", "8"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=800)
    lines = done.stdout.splitlines()[1:]
    assert len(lines) == len(KINDS), done.stderr
    return {line[:22].strip(): line[22:].split()[:4] for line in lines}


@pytest.mark.parametrize("kind", KINDS)
def test_the_rank_and_its_group_are_named_and_no_other(kind: str, rows: dict[str, list[str]]) -> None:
    assert rows[kind] == ["1", "1", "0", "0" if kind == "healthy" else "1"]
