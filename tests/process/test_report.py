"""Test `flopwatch report` with a real Prometheus, on a run whose figures are known by hand, and in a real browser."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from alerts import AlertSettings, records
from flopwatch.report import page, queries
from flopwatch.report.model import CauseTotal, EnergySummary, Firing, Outlier, ReportedLoss, RunReport
from flopwatch.report.statistics import checkpoint_interval, mean_time_between
from tests.support.ledger_process import serving
from tests.support.reports import HISTORY, flopwatch, prometheus, whole_world

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = '<script>alert(1)</script>"&'


# What it computes.


@pytest.mark.parametrize(
    ("seconds", "count", "expected"),
    [
        # Exact limits of a Poisson count, from tables: 3 events 0.6187 to 8.7673, 0 events 0 to 3.6889, 10 events
        # 4.7954 to 18.3904.
        (100, 3, (100 / 3, 100 / 8.7673, 100 / 0.6187)),
        (100, 0, (None, 100 / 3.6889, None)),
        (1000, 10, (100, 1000 / 18.3904, 1000 / 4.7954)),
        # Llama 3's 419 unexpected interruptions in 54 days: one per 3.1 hours.
        (54 * 86_400, 419, (3.0931 * 3600, 2.8106 * 3600, 3.4120 * 3600)),
    ],
)
def test_the_mean_time_to_failure_has_its_exact_interval(
    seconds: float, count: int, expected: tuple[float | None, ...]
) -> None:
    estimate = mean_time_between(seconds, count)
    assert estimate.count == count
    for value, by_hand in zip((estimate.seconds, estimate.low, estimate.high), expected, strict=True):
        assert value == (None if by_hand is None else pytest.approx(by_hand, rel=1e-3))


def test_without_time_there_is_no_mean_time() -> None:
    assert mean_time_between(0, 0) == mean_time_between(-1, 0)
    assert mean_time_between(0, 0).low is None


def test_the_checkpoint_interval_is_dalys() -> None:
    # Daly 2006: delta 5 min, M 24 h: sqrt(2 delta M) (1 + sqrt(delta / 2M) / 3 + delta / 2M / 9) - delta = 115.3 min.
    interval = checkpoint_interval(3600, 300, 86_400, 600)
    assert interval is not None
    assert interval.optimum == pytest.approx(60 * 116.67, rel=0.01)
    # No interval near the optimum is better, and the actual interval is worse.
    assert interval.least_waste < interval.waste
    for near in (0.8, 1.25):
        other = checkpoint_interval(near * interval.optimum, 300, 86_400, 600)
        assert other is not None
        assert other.waste > interval.least_waste
    assert checkpoint_interval(3600, 0, 86_400, 600) is None
    seldom = checkpoint_interval(3600, 300, 100, 0)
    assert seldom is not None
    assert seldom.optimum == 100


# What it queries.


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory, base: float) -> Iterator[str]:
    """Run a real ledger that has the recorded history, in which a GPU falls off the bus a second before the crash."""
    records = [json.loads(line) for line in HISTORY.read_text().splitlines()]
    last = [record for record in records if record.get("attempt") == "a1"][-1]
    last["evidence"] = [{"kind": "xid", "t": last["t"] - 1 + base, "count": 1, "gpu": "GPU-5", "detail": "79"}]
    with serving(tmp_path_factory.mktemp("ledger")) as running:
        assert running.post("\n".join(json.dumps({**record, "t": record["t"] + base}) for record in records))[0] == 200
        yield f"http://127.0.0.1:{running.port}"


@pytest.fixture(scope="module")
def base() -> float:
    return float(int(time.time()) - 12_000)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, base: float) -> Iterator[str]:
    with prometheus(whole_world(base), tmp_path_factory.mktemp("prometheus")) as address:
        yield address


@pytest.fixture(scope="module")
def report(url: str) -> dict[str, Any]:
    answer = flopwatch("r", "--prometheus", url, "--lookback", "4h", "--json", "--price", "2.5")
    assert answer.stderr == ""
    result: dict[str, Any] = json.loads(answer.stdout)
    return result


def test_the_figures_are_those_worked_out_by_hand(report: dict[str, Any], base: float) -> None:
    assert (report["state"], report["attempts"], report["ends"]) == ("completed", 2, {"silent": 1, "completed": 1})
    assert report["goodput"] == pytest.approx(6000 / 7895)
    assert report["ettr"] == pytest.approx(6000 / 8495)
    assert report["effective_mfu"] == pytest.approx(600 * 3.2e16 / (7895 * 8 * 989.4e12))
    assert report["mfu"] == pytest.approx(0.4)
    assert (report["began"] - base, report["ended"] - base) == (pytest.approx(600), pytest.approx(600 + 7895))
    assert {name: seconds for name, seconds in report["buckets"].items() if seconds} == pytest.approx(
        {"productive": 6000, "lost": 195, "startup": 600, "checkpoint_save": 200, "down": 900}
    )
    assert report["queue_seconds"] == 600
    assert (report["gpus"], report["host_count"]) == (8, 2)
    assert report["mttf"]["count"] == 1
    assert report["mttf"]["seconds"] == pytest.approx(7895 - 900)


def test_the_timeline_is_the_wall_clock_without_gap_or_overlap_and_shows_the_down_time_where_it_was(
    report: dict[str, Any], base: float
) -> None:
    slices = report["timeline"]
    assert slices[0]["begin"] == pytest.approx(report["began"])
    assert slices[-1]["end"] == pytest.approx(report["ended"])
    assert all(one["end"] == pytest.approx(two["begin"]) for one, two in itertools.pairwise(slices))
    assert sum(sum(one["seconds"].values()) for one in slices) == pytest.approx(7895)
    (down,) = [one for one in slices if one["seconds"].get("down", 0) > 60]
    with HISTORY.open() as lines:
        starts = [record["t"] for record in map(json.loads, lines) if record["event"] == "start"]
    assert down["begin"] - base < starts[1] - 890
    assert starts[1] - 1 < down["end"] - base < starts[1] + 60


def test_alerts_on_the_run_and_on_its_hosts_are_listed_and_those_on_other_hosts_are_not(
    report: dict[str, Any], base: float
) -> None:
    assert {(alert["name"], alert["place"]) for alert in report["alerts"]} == {
        ("GpuXidCritical", "host node-1, uuid GPU-5, xid 79"),
        ("TrainingDown", ""),
    }
    for alert in report["alerts"]:
        assert alert["began"] - base == pytest.approx(2700, abs=40)
        assert alert["ended"] - base == pytest.approx(3300, abs=75)  # a minute's window
        assert not alert["ongoing"]
    assert report["hosts"] == [{"name": "node-1", "place": "", "finding": "1 x GpuXidCritical"}]


def test_the_rank_that_was_late_and_the_link_with_errors_are_named_with_their_place(report: dict[str, Any]) -> None:
    (rank,) = report["ranks"]
    assert (rank["name"], rank["place"]) == ("rank 5", "node-1, GPU-5")
    match = re.fullmatch(r"was the straggler in ([\d.]+)% of the run, at 20\.0% of a step", rank["finding"])
    assert match is not None
    assert float(match[1]) == pytest.approx(25, abs=0.3)  # of 526 evaluations, one at the window's edge
    (link,) = report["links"]  # node-2's port, with twice as many errors, does not run this job
    assert (link["name"], link["place"]) == ("mlx5_0 port 1", "node-1")


def test_energy_is_the_integral_of_the_power_that_was_measured(report: dict[str, Any]) -> None:
    """Without stale markers, Prometheus repeats the last sample of the power for five minutes."""
    energy = report["energy"]
    assert energy["seconds"] == pytest.approx(3000 + 300, abs=30)
    assert energy["joules"] == pytest.approx(4000 * energy["seconds"])
    assert energy["joules_per_step"] == pytest.approx(4000 / 0.5)
    assert energy["joules_per_token"] == pytest.approx(4000 / 800)
    text = page.render(changed_report(report), "markdown")
    assert re.search(
        r"\| Energy of the GPUs \| 3\.6\d kWh \| 8,000 J per step; 5 J per token; measured for 4[12]% of", text
    )


def test_the_energy_of_unmeasured_gpus_is_unknown(report: dict[str, Any]) -> None:
    text = page.render(changed_report(report, energy=None), "markdown")
    assert "| Energy of the GPUs | unknown | needs the energy of every rank's GPU" in text
    energy = EnergySummary(joules=7200.0, seconds=9000.0, joules_per_step=None, joules_per_token=0.0123)
    text = page.render(changed_report(report, energy=energy), "markdown")
    assert "| Energy of the GPUs | 0.002 kWh | 0.0123 J per token; measured for 100% of the wall clock |" in text


def test_missing_measurements_are_listed(report: dict[str, Any]) -> None:
    assert any("measured on 7 of 8 ranks" in line for line in report["missed"])
    assert "1 ranks had no measured wait: cuda_graph." in report["missed"]


def test_each_loss_in_the_ledger_has_its_place(url: str, ledger: str, base: float) -> None:
    answer = flopwatch("r", "--prometheus", url, "--ledger", ledger, "--lookback", "4h", "--format", "json")
    assert answer.stderr == ""
    result = json.loads(answer.stdout)
    (loss,) = result["losses"]
    lost = loss.pop("gpu_seconds") / 8
    assert lost == pytest.approx(900 + 300 + 195, rel=0.02)  # down, the second startup, repeated steps
    assert loss.pop("began") - base == pytest.approx(2955, abs=16)
    assert loss.pop("back") - base == pytest.approx(4335, abs=40)
    assert "Xid 79" in loss.pop("why")
    assert loss == {
        "what": "silent",
        "cause": "gpu",
        "confidence": "certain",
        "host": "a1-host",
        "part": "GPU-5",
        "settled": True,
    }
    cost = f"{lost * 8 / 3600:.1f} GPU-hours lost to it"
    assert result["hosts"][0] == {"name": "a1-host", "place": "", "finding": cost}


def test_without_a_ledger_the_page_explains_how_to_see_each_loss(report: dict[str, Any]) -> None:
    assert report["losses"] is None
    assert "add --ledger URL" in page.render(changed_report(report), "markdown")
    assert "No attempt ended" in page.render(changed_report(report, losses=[]), "markdown")


def test_the_costliest_of_many_losses_are_listed_in_order_of_time(report: dict[str, Any]) -> None:
    losses = [
        ReportedLoss(3600.0 * hour, None, "failed", "gpu", "likely", f"node-{hour}", "", "", 3600.0 * (hour % 60), True)
        for hour in range(60)
    ]
    text = page.render(changed_report(report, losses=losses), "markdown")
    assert [int(hour) for hour in re.findall(r"gpu, likely node-(\d+)", text)] == list(range(10, 60))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("r", "--ledger", "127.0.0.1:9451"), "--ledger '127.0.0.1:9451': write http://HOST:PORT"),
        (("r", "--ledger", "http://127.0.0.1:9"), "set --ledger to http://HOST:PORT"),
        (("unknown",), "no run 'unknown'"),
        (("shared",), "--tenant one or two"),
        (("r", "--price", "cheap"), "not a price"),
        (("r", "--lookback", "long"), "seconds"),
        (("r", "--out", "/nowhere/at/all.html"), "/nowhere/at/all.html"),
    ],
)
def test_what_cannot_be_reported_is_an_error_of_one_line(url: str, arguments: tuple[str, ...], complaint: str) -> None:
    answer = flopwatch(*arguments, "--prometheus", url)
    assert answer.returncode in (1, 2)
    assert complaint in answer.stderr
    assert "Traceback" not in answer.stderr
    assert answer.stdout == ""


def test_a_server_that_is_not_a_prometheus_is_an_error() -> None:
    answer = flopwatch("r", "--prometheus", "http://127.0.0.1:9")
    assert answer.returncode == 1
    assert "is --prometheus right?" in answer.stderr


def test_the_records_it_reads_are_made() -> None:
    made = {record.name for record in records(AlertSettings())}
    assert {queries.RUN_MFU, queries.LOST, queries.STRAGGLER, queries.WAIT} <= made
    assert {queries.POWER, queries.STEPS, queries.TOKENS} <= made


# What it writes.


class Elements(HTMLParser):
    """HTML parser that collects the elements of a page and the addresses they would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name == "src" or (name == "href" and tag == "link")]

    def handle_data(self, data: str) -> None:
        self.text += data


def changed_report(report: dict[str, Any], **changes: Any) -> RunReport:
    """Return a report from its JSON with some fields changed."""
    from flopwatch.report.model import CheckpointSummary, Slice
    from flopwatch.report.statistics import CheckpointInterval, MeanTime

    interval = report["checkpoints"]["interval"]
    whole = RunReport(
        **{
            **report,
            "mttf": MeanTime(**report["mttf"]),
            "timeline": [Slice(**one) for one in report["timeline"]],
            "checkpoints": CheckpointSummary(
                **{**report["checkpoints"], "interval": interval and CheckpointInterval(**interval)}
            ),
            "mfu_over_time": [tuple(point) for point in report["mfu_over_time"]],
            "energy": report["energy"] and EnergySummary(**report["energy"]),
            "losses": report["losses"] and [ReportedLoss(**one) for one in report["losses"]],
            "causes": [CauseTotal(**one) for one in report["causes"]],
            "alerts": [Firing(**one) for one in report["alerts"]],
            "ranks": [Outlier(**one) for one in report["ranks"]],
            "hosts": [Outlier(**one) for one in report["hosts"]],
            "links": [Outlier(**one) for one in report["links"]],
        }
    )
    return replace(whole, **changes)


def test_a_page_fetches_nothing_and_has_no_script_whatever_things_are_called(report: dict[str, Any]) -> None:
    hostile = changed_report(
        report,
        run=HOSTILE,
        tenant=HOSTILE,
        declared={"owner": HOSTILE},
        missed=[HOSTILE],
        causes=[CauseTotal(HOSTILE, 1, 3600.0)],
        losses=[ReportedLoss(0, None, HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, 1.0, False)],
        alerts=[Firing(HOSTILE, HOSTILE, HOSTILE, 0, 1, False)],
        ranks=[Outlier(HOSTILE, HOSTILE, HOSTILE)],
        stacks=f"rank 0\n\n{HOSTILE}\n```\n# title",
    )
    elements = Elements()
    elements.feed(page.render(hostile, "html"))
    assert not {"script", "iframe", "img", "object"} & set(elements.tags)
    assert elements.fetched == ["data:,"]
    assert elements.text.count("<script>alert(1)</script>") >= 15
    lines = page.render(hostile, "markdown").splitlines()
    code = [line for line in lines if line.startswith("    ")]  # Markdown shows an indented block as it is
    assert [line.strip() for line in code] == ["rank 0", HOSTILE, "```", "# title"]
    assert "<script" not in "\n".join(line for line in lines if line not in code).replace("\\<script", "")


def test_markdown_has_the_same_figures(report: dict[str, Any]) -> None:
    text = page.render(changed_report(report), "markdown")
    assert "| Goodput | 76.0% |" in text
    assert "| down | 15.0 min | 11.4% | 2.0 |" in text
    assert "rank 5" in text


def test_a_run_with_hardly_any_data_has_a_page_too(report: dict[str, Any]) -> None:
    bare = changed_report(
        report,
        goodput=None,
        mfu=None,
        ettr=None,
        effective_mfu=None,
        gpus=None,
        host_count=None,
        buckets={},
        gpu_seconds={},
        wall_seconds=0.0,
        timeline=[],
        mfu_over_time=[],
        causes=[],
        alerts=[],
        ranks=[],
        hosts=[],
        links=[],
        missed=[],
        high_water_step=None,
        declared={},
        price=None,
        mttf=mean_time_between(0, 0),
        energy=None,
    )
    elements = Elements()
    elements.feed(page.render(bare, "html"))
    assert elements.text.count("unknown") >= 4


@pytest.mark.skipif(CHROMIUM is None and "CI" not in os.environ, reason="there is no Chromium here; CI has one")
def test_a_real_browser_shows_the_page_without_complaint(url: str, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    written = tmp_path / "report.html"
    answer = flopwatch("r", "--prometheus", url, "--lookback", "4h", "--price", "2.5", "--out", str(written))
    assert (answer.returncode, answer.stdout) == (0, "")
    shown = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--enable-logging=stderr",
            "--v=0",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=2000",
            "--window-size=1100,2200",
            f"--screenshot={tmp_path / 'report.png'}",
            written.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "CONSOLE" not in shown.stderr, shown.stderr
    assert (tmp_path / "report.png").stat().st_size > 20_000
