"""What-if from traces of operations: the slowdowns that the authors of three published traces computed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flopwatch.verdicts.operations import Operation, Replay, Row, TraceError, read
from tests.support import ROOT

TRACES = ROOT / "tests" / "captures" / "straggler_traces"
PUBLISHED = json.loads((TRACES / "published.json").read_text())


@pytest.fixture(scope="module", params=["ST", *(pytest.param(name, marks=pytest.mark.long) for name in ("AR", "SE"))])
def trace(request: pytest.FixtureRequest) -> tuple[Replay, dict[str, dict[str, float]], float]:
    """Return the replay of a published trace, what was published of it, and the seconds of its ideal step."""
    replay = Replay(read(TRACES / f"trace-{request.param}.parquet"))
    return replay, PUBLISHED[request.param], replay.step_seconds()


def test_the_slowdown_is_the_published_one(trace: tuple[Replay, dict[str, float], float]) -> None:
    replay, published, ideal = trace
    as_it_was = replay.step_seconds(lambda replica, operation: True)
    assert as_it_was / ideal == pytest.approx(published["blocking_slowdown"], rel=1e-4)


def test_each_replica_and_stage_has_its_published_part(
    trace: tuple[Replay, dict[str, dict[str, float]], float],
) -> None:
    replay, published, ideal = trace
    for stage, slowdown in published["blocking_decompose_by_stage"].items():
        seconds = replay.step_seconds(of_stage(int(stage)))
        assert seconds / ideal == pytest.approx(slowdown, rel=1e-3), f"stage {stage}"
    for replica, slowdown in list(published["blocking_decompose_by_dp_rank"].items())[:2]:
        seconds = replay.step_seconds(of_replica(int(replica)))
        assert seconds / ideal == pytest.approx(slowdown, rel=1e-3), f"replica {replica}"


def of_stage(stage: int) -> Callable[[int, Operation], bool]:
    return lambda _, operation: operation.stage == stage


def of_replica(number: int) -> Callable[[int, Operation], bool]:
    return lambda replica, _: replica == number


def one_stage() -> list[Row]:
    """Return a step of one stage and two replicas: a forward and a backward pass, and the end of the step."""
    kinds = {"forward-compute": 1.0, "backward-compute": 2.0, "grads-reduce-scatter": 0.5, "optimizer": 0.25}
    rows = []
    for replica in (0, 1):
        now = 0.0
        for kind, seconds in kinds.items():
            rows.append(Row(replica, 0, 7, kind, now, seconds, 0, 0))
            now += seconds
    return rows


def test_a_slow_replica_makes_the_other_wait_in_what_they_do_together() -> None:
    rows = one_stage()
    rows[0] = replace(rows[0], duration=3.0)
    rows[1:4] = [replace(row, start=row.start + 2.0) for row in rows[1:4]]
    rows[6] = replace(rows[6], duration=2.5)  # it waits for two seconds
    rows[7] = replace(rows[7], start=rows[7].start + 2.0)
    replay = Replay(rows)
    assert replay.step_seconds(lambda replica, operation: True) == 5.75
    assert replay.step_seconds() == 4.75  # both take two seconds forward
    assert replay.step_seconds(lambda replica, _: replica == 1) == 4.75
    assert replay.step_seconds(lambda _, operation: operation == Operation("forward-compute", 0, 0)) == 5.75


def test_a_trace_that_cannot_be_replayed_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = one_stage()
    with pytest.raises(TraceError, match="step 7, replica 1: optimizer 0 of stage 0 is missing"):
        Replay(rows[:-1])
    with pytest.raises(TraceError, match="the pipeline is interleaved"):
        Replay([replace(row, chunk=1) for row in rows])
    with pytest.raises(TraceError, match="has not one forward transfer for each microbatch"):
        Replay([*rows, *(replace(rows[0], kind="forward-send", number=number) for number in (0, 1))])
    (tmp_path / "trace").write_text("dp_rank,stage\n")
    with pytest.raises(TraceError, match="cannot be read as Parquet"):
        read(tmp_path / "trace")
    with pytest.raises(TraceError, match="cannot be read as Parquet"):
        read(tmp_path / "missing")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TraceError, match="needs pyarrow"):
        read(tmp_path / "trace")
