"""docs/scale.md and docs/shards.md: the table is what `flopwatch size` prints, and Prometheus takes the files."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from alerts import AlertSettings, rules
from bench import sizing as size
from bench.size import RECORDS_AND_ALERTS
from bench.sizing import table
from demo.servers import find
from tests.support import ROOT
from tests.support.rule_files import seconds
from tests.support.scale_page import PAGE, SNIPPETS, snippet

DAY = 86_400


def cells(nodes: int) -> dict[str, str]:
    """Return name and value of each row that the command prints."""
    cluster = size.Cluster(nodes)
    rows = re.findall(r"^ *(\S.*?)  +(\S.*?)(?:  +.*)?$", table(cluster, size.size(cluster)).partition("\n")[2], re.M)
    return dict(rows)


def test_the_table_is_what_the_command_prints() -> None:
    (text,) = re.findall(r"^<!-- cells are .*?-->\n(.*?)^<!-- end -->", PAGE, re.M | re.S)
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines())
    found = [cells(int(nodes.replace(",", ""))) for nodes in header[1:]]
    assert len(rows) >= 8
    for name, *values in rows:
        assert values == [one[name] for one in found], name


@pytest.mark.parametrize("text", SNIPPETS, ids=lambda text: text.splitlines()[0])
def test_prometheus_takes_each_configuration(text: str, tmp_path: Path) -> None:
    path = tmp_path / "prometheus.yml"
    path.write_text(text)
    (tmp_path / "flopwatch").symlink_to(ROOT / "helm" / "files" / "rules")
    agent = ["--agent"] if "--agent" in text.splitlines()[0] else []
    checked = subprocess.run([find().promtool, "check", "config", *agent, str(path)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_what_is_sent_are_records_and_alerts_and_nothing_else() -> None:
    sending = [yaml.safe_load(text)["remote_write"][0] for text in SNIPPETS if text.startswith("# records")]
    assert len(sending) == 3
    assert [one["write_relabel_configs"] for one in sending] == 3 * [
        [{"source_labels": ["__name__"], "regex": RECORDS_AND_ALERTS, "action": "keep"}]
    ]
    groups: Any = rules(AlertSettings())["groups"]
    assert all(
        re.fullmatch(RECORDS_AND_ALERTS, rule["record"])
        for group in groups
        for rule in group["rules"]
        if "record" in rule
    )


@pytest.mark.parametrize(("name", "files"), [("shard", ["flopwatch/host.yaml"]), ("forwards", None)])
def test_the_shards_take_every_target_once(name: str, files: list[str] | None) -> None:
    shard = yaml.safe_load(snippet(name))
    (job,) = shard["scrape_configs"]
    hashed, kept = job["relabel_configs"]
    assert (hashed["action"], kept["action"]) == ("hashmod", "keep")
    assert hashed["target_label"] == kept["source_labels"][0]
    assert hashed["modulus"] == 4
    assert "external_labels" not in shard.get("global", {})
    assert shard.get("rule_files") == files


def test_the_fleet_evaluates_what_no_shard_does_and_gathers_their_records() -> None:
    fleet = yaml.safe_load(snippet("fleet"))
    assert fleet["rule_files"] == ["flopwatch/run.yaml", "flopwatch/fleet.yaml"]
    (match,) = fleet["scrape_configs"][1]["params"]["match[]"]
    assert match == f'{{__name__=~"{RECORDS_AND_ALERTS}"}}'


def looks_back(raw: bool) -> float:
    """Return how far back any rule looks into a raw series, or into a recorded one, in seconds."""
    groups: Any = rules(AlertSettings())["groups"]
    furthest = 0.0
    for group in groups:
        for rule in group["rules"]:
            for name, window, offset in re.findall(
                r"\b([a-zA-Z_:][\w:]*)(?:\{[^}]*\})?(?:\[(\w+)(?::\w*)?\])?(?:\s+offset\s+(\w+))?", rule["expr"]
            ):
                if (":" not in name) == raw and name != "ALERTS":
                    furthest = max(furthest, sum(seconds(text) for text in (window, offset) if text))
    return furthest


def test_raw_series_and_records_are_kept_for_as_long_as_rules_look_back() -> None:
    assert 6 * DAY < looks_back(raw=True) < 8 * DAY
    assert 29 * DAY < looks_back(raw=False) < 31 * DAY
    assert "| 8 days at least |" in PAGE
    assert "| 31 days at least," in PAGE


def test_the_largest_group_has_as_many_rules_as_the_page_states() -> None:
    groups: Any = rules(AlertSettings())["groups"]
    (stated,) = re.findall(r"(\d+) rules in the largest group", PAGE)
    assert int(stated) == max(len(group["rules"]) for group in groups)


def test_the_ledger_receives_records_as_often_as_the_page_states() -> None:
    (stated,) = re.findall(r"of\s+each run about every\s+(\d+) s", PAGE)
    assert float(stated) == size.LEDGER_EVERY
