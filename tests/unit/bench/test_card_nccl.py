"""Judgement of section `nccl` of `make card`: each FAIL is provoked once, without a GPU."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.card import nccl
from bench.card.nccl import Job, Setup, outcome_of, ras_line, run_setup, run_setups, trial_line
from bench.card.report import FAIL, INFO, PASS, Line, Report
from bench.parallel import Named
from tests.support.parallel_job import SIZE, Control

SETUP = Setup("own", ("missing in tp",))
RIGHT, OTHER = Named("5", "tp", "4,5"), Named("4", "tp", "4,5")
LINE = "parallel_job.py:130"


class Page:
    """Series and stacks of a ledger that names these ranks."""

    def __init__(self, *named: Named, line: str = "", judged: bool = False) -> None:
        self._named, self._line, self._judged = set(named), line, judged

    def names(self, run: str) -> set[Named]:
        return self._named

    def judged(self, run: str) -> bool:
        return self._judged

    def line(self, trial: object) -> str:
        return self._line


def judged(kind: str, page: Any) -> Line:
    """Return the line of a trial in which the ledger had this page after 9 s."""
    one, report = outcome_of(SETUP, kind), Report("nccl")
    one.judge(page, 9.0)
    trial_line(one, "trial", report)
    return report.lines[0]


@pytest.mark.parametrize("kind", ["missing in tp", "late in tp"])
def test_a_trial_passes_if_only_its_rank_is_named_with_its_line(kind: str) -> None:
    right = judged(kind, Page(RIGHT, line=LINE))
    assert (right.status, right.measured) == (PASS, f"named after 9 s, {LINE}")
    wrong = judged(kind, Page(RIGHT, OTHER, line=LINE))
    assert (wrong.status, wrong.measured) == (FAIL, f"not named, wrong: {OTHER}")
    assert (judged(kind, Page()).status, judged(kind, Page()).measured) == (FAIL, "not named")
    assert judged(kind, Page(RIGHT)).measured == "named after 9 s, no line"
    assert judged(kind, Page(RIGHT)).status == FAIL


def test_a_healthy_trial_passes_if_it_is_judged_and_no_rank_is_named() -> None:
    assert judged("healthy", Page(judged=True)).status == PASS
    assert judged("healthy", Page(OTHER, judged=True)).status == FAIL
    assert judged("healthy", Page()).status == INFO


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ({"outcome": "answered", "behind": [["0-7", "5"], ["4,5", "5"]]}, PASS),
        ({"outcome": "answered", "behind": [["0-7", "4"]]}, FAIL),
        ({"outcome": "answered", "behind": []}, FAIL),
        ({"outcome": "status 1", "detail": "killed"}, FAIL),
    ],
)
def test_an_answer_of_ras_without_the_missing_rank_fails(answer: dict[str, Any], status: str) -> None:
    report = Report("nccl")
    ras_line(outcome_of(SETUP, "missing in tp"), answer, "trial", report)
    assert [(line.name, line.status) for line in report.lines] == [("nccl.trial.ras_names", status)]


@pytest.fixture
def site(tmp_path: Path) -> Any:
    """Return a place for ranks without ledger and NCCL."""
    return SimpleNamespace(folder=tmp_path, hosts=[SimpleNamespace(otlp="127.0.0.1:1")] * 2, nccl=None, device="cpu")


def start_ranks(monkeypatch: pytest.MonkeyPatch, *, broken: bool) -> list[int]:
    """Replace the ranks by processes that do nothing. A broken job has one that an error ends. Return their pids."""
    pids: list[int] = []

    def start(folder: Path, *_: object) -> tuple[Control, list[int]]:
        for rank in range(SIZE):
            error = "RuntimeError: NCCL error" if broken and rank == 3 else ""
            (folder / f"rank-{rank}.log").write_text(f"begun\n{error}\n")
            command = "kill -9 $$" if error else "exec sleep 60"
            pids.append(os.posix_spawn("/bin/sh", ["sh", "-c", command], os.environ))
        return Control(1), pids

    monkeypatch.setattr(nccl, "start", start)
    return pids


def test_a_rank_that_fails_ends_its_job_and_the_others_run(monkeypatch: pytest.MonkeyPatch, site: Any) -> None:
    pids = start_ranks(monkeypatch, broken=True)
    report = Report("nccl")
    run_setups([SETUP, Setup("newer", (), newer=True)], site, report)
    assert [(line.status, line.name, line.measured) for line in report.lines] == [
        (FAIL, "nccl.own.ran", "RuntimeError: rank 3 ended with -9: RuntimeError: NCCL error"),
        (INFO, "nccl.newer.unavailable", "CARD_NCCL has no folder with a newer NCCL and its plugins"),
    ]
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_nothing_begins_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch, site: Any) -> None:
    pids = start_ranks(monkeypatch, broken=True)
    report = Report("nccl", end=time.monotonic() + nccl.LEAST)
    run_setups([SETUP], site, report)
    run_setup(SETUP, site, report)
    assert [(line.status, line.name) for line in report.lines] == [
        (INFO, "nccl.own.time"),
        (INFO, "nccl.own-missing-in-tp.time"),
    ]
    assert len(pids) == SIZE


@pytest.mark.parametrize("broken", [True, False])
def test_only_a_rank_that_fails_while_it_answers_ends_its_job(
    monkeypatch: pytest.MonkeyPatch, site: Any, broken: bool
) -> None:
    start_ranks(monkeypatch, broken=broken)
    monkeypatch.setattr(nccl, "ANSWERS_IN", 5.0 if broken else 0.2)
    job = Job(SETUP, [outcome_of(SETUP, "missing in tp")], site)
    try:
        if broken:
            with pytest.raises(RuntimeError, match="rank 3 ended with -9"):
                job.ask("run")
        else:
            job.ask("run")
    finally:
        job.kill()
