"""NCCL Inspector: which rank its files and metrics name in the ledger, and that it costs and blocks nothing else."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from flopwatch import catalogue as m
from flopwatch.ledger.stragglers import Stragglers
from flopwatch.node.scrape.scrape import Registry
from flopwatch.node.telemetry import inspector as inspector_module
from flopwatch.node.telemetry.inspector import MAX_BATCHES, MAX_PROCESSES, Inspector
from flopwatch.node.telemetry.inspector_formats import MAX_KINDS
from flopwatch.settings import ExporterSettings, SettingsError
from simulator.parallel_step import Layout
from tests.support.exporter_process import exporter
from tests.support.nccl_inspector import CAPTURES, FIRST_PID, FORMATS, PER_HOST, Job, otlp
from tests.support.nccl_inspector import Operation as Written
from tests.support.otlp_by_hand import request

SLOW_STAGE = dict.fromkeys(range(8, 16), 1.2)


def named(found: Stragglers) -> tuple[str, set[tuple[int, str, tuple[int, ...]]]]:
    """Return the kind of the verdict, and the suspects with the kind and ranks of their communicator."""
    assert found.verdict is not None, found.why
    ranks = {(one.rank, one.communicator.kind, one.communicator.ranks) for one in found.verdict.suspects}
    return found.verdict.kind, ranks


@pytest.mark.parametrize("form", FORMATS)
def test_a_late_rank_is_named_with_its_communicator_in_20_of_20_jobs(tmp_path: Path, form: str) -> None:
    found = []
    for seed in range(20):
        folder, late = tmp_path / str(seed), seed * 5 % 16
        folder.mkdir()
        first = late // 4 * 4
        right = "rank", {(late, "tp", (first, first + 1, first + 2, first + 3))}
        found.append(named(Job(folder, form, {late: 1.2}, seed=seed).run(6)) == right)
    assert found == [True] * 20


@pytest.mark.parametrize("form", FORMATS)
def test_no_rank_is_named_in_20_healthy_jobs(tmp_path: Path, form: str) -> None:
    found = []
    for seed in range(20):
        folder = tmp_path / str(seed)
        folder.mkdir()
        found.append(named(Job(folder, form, seed=seed).run(6)))
    assert found == [("none", set())] * 20


@pytest.mark.parametrize("form", FORMATS)
def test_two_late_ranks_are_both_named(tmp_path: Path, form: str) -> None:
    kind, ranks = named(Job(tmp_path, form, {5: 1.2, 14: 1.2}).run(8))
    assert (kind, {rank for rank, *_ in ranks}) == ("rank", {5, 14})


@pytest.mark.parametrize("form", FORMATS)
def test_an_uneven_pipeline_names_its_stage_where_receives_are_known_and_else_nothing(
    tmp_path: Path, form: str
) -> None:
    kind, ranks = named(Job(tmp_path, form, SLOW_STAGE).run(12))
    if form in ("2.30 json", "2.30 json verbose", "otlp"):
        assert (kind, {rank for rank, *_ in ranks}) == ("stage", set(range(8, 16)))
    else:
        assert (kind, ranks) == ("none", set())


def test_a_late_rank_in_an_uneven_pipeline_is_named(tmp_path: Path) -> None:
    assert named(Job(tmp_path, slow={**SLOW_STAGE, 5: 1.2}).run(8)) == ("rank", {(5, "tp", (4, 5, 6, 7))})


@pytest.mark.parametrize(
    ("layout", "group"),
    [
        (Layout(cp=4, dp=2), ("cp", (0, 1, 2, 3))),
        (Layout(dp=8, ep=4), ("ep", (0, 1, 2, 3))),
        (Layout(dp=4, pp=2), ("dp", (0, 1, 2, 3))),
        (Layout(dp=8), ("dp", tuple(range(8)))),
    ],
)
def test_a_late_rank_is_named_in_groups_of_each_kind(
    tmp_path: Path, layout: Layout, group: tuple[str, tuple[int, ...]]
) -> None:
    assert named(Job(tmp_path, slow={2: 1.2}, layout=layout).run(8)) == ("rank", {(2, *group)})


@pytest.mark.parametrize("form", ["2.28.3 json", "2.29.7 textfile", "2.30 textfile"])
def test_without_receives_a_pipeline_of_single_ranks_has_no_verdict_in_words(tmp_path: Path, form: str) -> None:
    found = Job(tmp_path, form, {2: 1.2}, Layout(dp=4, pp=2)).run(8)
    assert (found.verdict, found.why) == (None, "no rank measures its waits for other ranks")


def test_an_exporter_takes_the_pushed_metrics_of_the_plugin(tmp_path: Path) -> None:
    with exporter(tmp_path, "--inspector", "otlp", "--ledger", "embedded") as running:
        body = (CAPTURES / "otlp_generic_metrics.json").read_bytes()
        reply = httpx.post(
            f"http://{running.otlp}/v1/metrics", content=body, headers={"content-type": "application/json"}
        )
        assert (reply.status_code, reply.json()) == (200, {})
        page = running.get("/metrics")
        assert 'flopwatch_otlp_pushes_total{outcome="accepted"} 1' in page
        assert 'flopwatch_nccl_inspector_operations_total{outcome="malformed"} 0' in page


def outcomes(registry: Registry) -> dict[str, float]:
    return {
        labels[0]: value
        for row, labels, value in registry.samples()
        if row is m.FLOPWATCH_NCCL_INSPECTOR_OPERATIONS_TOTAL and value
    }


def test_a_rank_without_files_leaves_the_run_without_a_verdict_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, slow={5: 1.2})
    write = job.write
    monkeypatch.setattr(job, "write", lambda operations: write([one for one in operations if one.rank != 11]))
    found = job.run(8)
    assert (found.verdict, found.reason, found.why) == (None, "waits", "h1 reports no waits of its ranks")


def test_two_processes_that_claim_one_place_in_a_communicator_are_not_joined(tmp_path: Path) -> None:
    job = Job(tmp_path, slow={5: 1.2})
    job.run(2)
    forged = (tmp_path / "h0" / f"h0-pid{FIRST_PID + 4}.log").read_text().splitlines()[-1]
    with (tmp_path / "h0" / f"h0-pid{FIRST_PID}.log").open("a") as log:
        log.write(forged + "\n")
    found = job.run(10)
    assert found.verdict is None
    assert found.reason == "groups"
    assert "process groups that are not known" in found.why
    assert outcomes(job.registry)["unjoined"] > 0


def test_otlp_of_unknown_processes_and_communicators_is_bounded_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, "otlp", {5: 1.2})
    group = job.groups[0][0]
    flood = [Written(0, group, number, 0.1) for number in range(20)]
    for number in range(2 * MAX_PROCESSES):
        job.hosts[0].receive(request(otlp(flood, job.now, 0, process_pid=str(10_000 + number))))
    inspector = job.inspectors[0]
    assert len(inspector._batches) == MAX_PROCESSES
    for _ in range(3 * MAX_BATCHES):
        job.hosts[0].receive(request(otlp(flood, job.now, 0, process_pid="9999")))
    assert max(map(len, inspector._batches.values())) <= MAX_BATCHES
    assert outcomes(job.registry)["unjoined"] > 20 * MAX_PROCESSES
    assert outcomes(job.registry)["limit"] >= 20 * MAX_BATCHES
    many = [one._replace(group=type(group)("tp", (0, rank))) for rank, one in enumerate(flood * 30, 1)]
    job.hosts[0].receive(request(otlp(many, job.now, 0, process_pid="9998")))
    assert len(inspector._batches["pid:9998"][0].sums) == MAX_KINDS
    monkeypatch.setattr(inspector_module, "MAX_WAITING", 10 * MAX_KINDS)
    for number in range(20):
        job.hosts[0].receive(request(otlp(many, job.now, 0, process_pid=str(number))))
    kinds = sum(len(batch.sums) for waiting in inspector._batches.values() for batch in waiting)
    assert 9 * MAX_KINDS < kinds <= 10 * MAX_KINDS
    assert named(job.run(8)) == ("rank", {(5, "tp", (4, 5, 6, 7))})


def test_a_rank_whose_operations_were_dropped_counts_none_of_the_steps_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, "otlp")

    def measured() -> tuple[float, float]:
        pushes = [rank.push for rank in job.hosts[0]._attempts["", "lm", "a1"].live]
        rows = job.inspectors[0].waits(("", "lm", "a1"), pushes) or []
        return float(str(rows[0][4])), float(str(rows[0][5]))

    job.run(4)
    seconds, wait = measured()
    monkeypatch.setattr(inspector_module, "MAX_BATCHES", 3)
    monkeypatch.setattr(job, "look", lambda: None)
    job.run(5)
    assert outcomes(job.registry)["limit"] > 0
    monkeypatch.undo()
    job.run(4)
    later, longer = measured()
    assert (longer - wait) / (later - seconds) == pytest.approx(wait / seconds, rel=0.05)


def test_the_places_in_a_communicator_that_a_file_can_claim_are_bounded(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(2)
    log = tmp_path / "h0" / f"h0-pid{FIRST_PID}.log"
    line = json.loads(log.read_text().splitlines()[-1])
    line["header"]["n_ranks"] = 1 << 20
    for look in range(4):
        with log.open("a") as file:
            for rank in range(look * MAX_KINDS, (look + 1) * MAX_KINDS):
                line["header"]["rank"] = rank
                file.write(json.dumps(line) + "\n")
        job.run(1)
    assert max(map(len, job.inspectors[0]._members.values())) == MAX_PROCESSES


def test_otlp_metrics_are_refused_without_the_setting(tmp_path: Path) -> None:
    job = Job(tmp_path, "otlp")
    job.hosts[0]._inspector = None
    refused, reason = job.hosts[0].receive(request(otlp([Written(0, job.groups[0][0], 1, 0.1)], job.now, 0)))
    assert (refused, "not a push of flopwatch's hook" in reason) == (1, True)


def test_waits_that_the_hook_measures_have_priority(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(2)
    assert job.inspectors[0]._wanted
    host, key = job.hosts[0], ("", "lm", "a1")
    live = [rank.push for rank in host._attempts[key].live]
    measured = [replace(push, samples=push.samples[:2]) for push in live]
    assert host._waits(key, live) is not None
    assert host._waits(key, measured) is None


def test_a_thread_reads_the_files_and_ends_without_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path)
    job.run(2)
    now = [time.time()]
    inspector = Inspector(tmp_path / "h0", "h0", Registry(), every=0.01, now=lambda: now[0])
    pushes = [rank.push for rank in job.hosts[0]._attempts["", "lm", "a1"].live]
    before = threading.active_count()
    assert inspector.waits(("", "lm", "a1"), pushes) is None
    until = time.monotonic() + 10
    while len(inspector._batches) < PER_HOST and time.monotonic() < until:
        time.sleep(0.01)
    assert len(inspector._batches) == PER_HOST
    assert threading.active_count() == before + 1
    now[0] += 61
    assert inspector._thread is not None
    inspector._thread.join(10)
    assert threading.active_count() == before


@pytest.mark.parametrize("wrong", ["on", "nccl-inspector"])
def test_a_folder_is_an_absolute_path(wrong: str) -> None:
    with pytest.raises(SettingsError, match="absolute path"):
        ExporterSettings(inspector=wrong)


def test_the_worked_example_counts_no_receive_twice(tmp_path: Path) -> None:
    job = Job(tmp_path, slow={5: 1.2})
    rows: Mapping[int, list[object]] = {}
    job.run(6)
    key = ("", "lm", "a1")
    pushes = [rank.push for rank in job.hosts[0]._attempts[key].live]
    found = job.inspectors[0].waits(key, pushes)
    assert found is not None
    rows = {int(str(row[0])): row for row in found}
    for rank, tp, pp, dp in ((0, 16, 39, 26), (5, 16, 33, 8), (4, 40, 33, 8)):
        _, _, _, steps, seconds, _, _, groups = rows[rank]
        assert isinstance(groups, list)
        assert isinstance(steps, float)
        assert isinstance(seconds, float)
        by_kind = {kind: 1e3 * wait / steps / 10 for kind, _, wait in groups}
        assert by_kind["tp"] == pytest.approx(tp, rel=0.15, abs=3)
        assert by_kind["pp"] == pytest.approx(pp, rel=0.15)
        assert by_kind["dp"] == pytest.approx(dp, rel=0.15, abs=2)
        assert seconds / steps == pytest.approx(2.01, rel=0.02)
