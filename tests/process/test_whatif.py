"""`flopwatch whatif` on a published trace, and on another file."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from flopwatch.__main__ import main
from flopwatch.commands.whatif import page
from tests.support import ROOT

TRACES = ROOT / "tests" / "captures" / "straggler_traces"
PUBLISHED = json.loads((TRACES / "published.json").read_text())


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["whatif", str(TRACES / "trace-AR.parquet"), "--json"]) == 0
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def test_the_slow_worker_of_a_published_trace_is_first_and_mending_it_gains_the_most(answer: dict[str, Any]) -> None:
    published = PUBLISHED["AR"]
    assert answer["slowdown"] == pytest.approx(published["blocking_slowdown"], rel=1e-4)
    for part, name in (("stage", "stage"), ("replica", "dp_rank")):
        wanted = published[f"blocking_decompose_by_{name}"]
        assert answer[f"slowdown_by_{part}"] == {key: pytest.approx(value, rel=1e-3) for key, value in wanted.items()}
    first, second = answer["slowdown_by_worker"][:2]
    assert (first["replica"], first["stage"]) == (0, 0)
    assert first["slowdown"] > 1.9 > 1.1 > second["slowdown"]
    assert answer["mended"]["1"] == pytest.approx(answer["ideal_step_seconds"], rel=0.01)


def test_the_page_has_the_slowest_part_of_each_kind(answer: dict[str, Any]) -> None:
    lines = page(answer).splitlines()
    assert lines[1].startswith("a step took 46.336 s, and 23.485 s if all operations of a kind were alike")
    assert "  replica 0, stage 0          1.979" in lines
    assert "  1 mended                    23.446 s, 49.4% less" in lines


def test_a_file_that_is_no_trace_is_one_line_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace").write_text("none")
    assert main(["whatif", str(tmp_path / "trace")]) == 1
    assert capsys.readouterr().err.startswith(f"flopwatch: {tmp_path}/trace cannot be read as Parquet: ")
