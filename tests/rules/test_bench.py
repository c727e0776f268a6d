"""The bench of the rules at the size of eight nodes: it evaluates what it claims to, over series that exist."""

from __future__ import annotations

from typing import Any

import pytest

from alerts import AlertSettings, records, rules
from bench.pages import GPUS, PORTS
from bench.rules import Group, RulesMeasurement, measure, table

pytestmark = pytest.mark.long

NODES = 8
SETTINGS = AlertSettings(pace=15)


@pytest.fixture(scope="module")
def measured() -> RulesMeasurement:
    return measure(NODES * GPUS, 18, SETTINGS)


def test_every_group_is_evaluated_at_its_interval_and_no_rule_fails(measured: RulesMeasurement) -> None:
    groups: Any = rules(SETTINGS)["groups"]
    assert measured.failures == ()
    assert {group.name: group.rules for group in measured.groups} == {
        group["name"]: len(group["rules"]) for group in groups
    }
    assert all(0 < group.mean <= group.worst for group in measured.groups)
    assert {group.interval for group in measured.groups} == {0.2, 0.333, 1, 4, 8}


def test_the_records_of_a_healthy_cluster_are_as_many_as_its_ranks_hosts_ports_and_runs(
    measured: RulesMeasurement,
) -> None:
    ranks = NODES * GPUS
    wanted = {
        "rank:training_mfu:ratio_rate5m": ranks,
        "rank:training_collective_wait:ratio": ranks,
        "port:infiniband_was_active:bool": NODES * PORTS,
        "port:infiniband_rail:info": ranks,
        "rail:infiniband_transmit_bytes:rate5m": GPUS,
        "instance:host:info": NODES,
        "host:lemon:score": NODES,
        "run:training_mfu:ratio_rate5m": 1,
        "run:gpu_energy_joules_per_token:ratio_rate5m": 1,
        "run:run_goodput:ratio_1h": 1,
        "run:run_goodput:ratio_7d": 1,
        "fleet:gpu_allocated:count": 1,
    }
    assert {name: measured.recorded.get(name) for name in wanted} == wanted
    assert measured.recorded.keys() <= {record.name for record in records(SETTINGS)}
    assert measured.scraped_series > 100 * ranks
    assert measured.head_series > measured.scraped_series
    assert measured.memory > 2**20


def test_the_table_begins_with_the_group_that_takes_most_of_its_interval() -> None:
    text = table(
        RulesMeasurement(
            groups=(Group("slow", 2, 60, 3, 6), Group("fast", 1, 15, 1, 3)),
            slowest=(("run:a:b", 2.0),),
            failures=("run:c:d: many-to-many",),
            recorded={"run:a:b": 7},
            firing=0,
            scraped_series=1_000_000,
            head_series=1_100_000,
            memory=3 * 2**30,
            cores=0.5,
            waited=0.25,
        )
    )
    assert text.splitlines()[1:3] == [
        "fast                         1     15 s   1.00 s   3.00 s       20.0%",
        "slow                         2     60 s   3.00 s   6.00 s       10.0%",
    ]
    assert "all groups together: 0.12 s of evaluation a second" in text.splitlines()
    assert text.splitlines()[-3:] == [
        "series scraped 1,000,000, recorded 7, in the head 1,100,000; alerts pending or firing 0",
        "Prometheus: at most 3.0 GiB resident, 0.50 cores, and waited for one 0.25 s a second",
        "run:c:d: many-to-many",
    ]
