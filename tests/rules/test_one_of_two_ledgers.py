"""One of two ledgers away: it is the only thing that alerts, and the records of runs go on."""

from __future__ import annotations

import json
from pathlib import Path

from demo.servers import find
from simulator.promtool import rule_test
from tests.support import ROOT

# From five minutes on, ledger l does not answer. Both had the same books, and the exporter still delivers to ledger r.
SERIES = {
    'up{job="ledger",instance="l"}': "1x20 0x120",
    'up{job="ledger",instance="r"}': "1x140",
    'up{job="exporter",instance="a"}': "1x140",
    'flopwatch_build_info{version="0.1.0",instance="a",job="exporter"}': "1x140",
    'flopwatch_collector_success{collector="nvml",instance="a",job="exporter"}': "1x140",
    'gpu_info{gpu="0",uuid="A",host="node-a",instance="a",job="exporter"}': "1x140",
    'training_rank_info{run="lm",rank="0",host="node-a",uuid="A",instance="a",job="exporter"}': "1x140",
    'flopwatch_ledger_records_sent_total{outcome="sent",instance="a",job="exporter"}': "0+2x20 40+1x120",
    'flopwatch_ledger_records_sent_total{outcome="failed",instance="a",job="exporter"}': "0x20 0+1x120",
    'flopwatch_ledger_requests_total{outcome="accepted",instance="l",job="ledger"}': "0+1x20 stale",
    'flopwatch_ledger_requests_total{outcome="accepted",instance="r",job="ledger"}': "0+1x140",
    'run_state{tenant="t",run="lm",state="running",instance="l",job="ledger"}': "1x20 stale",
    'run_state{tenant="t",run="lm",state="running",instance="r",job="ledger"}': "1x140",
    'run_state{tenant="t",run="lm",state="down",instance="l",job="ledger"}': "0x20 stale",
    'run_state{tenant="t",run="lm",state="down",instance="r",job="ledger"}': "0x140",
    'run_gpus{tenant="t",run="lm",instance="l",job="ledger"}': "64x20 stale",
    'run_gpus{tenant="t",run="lm",instance="r",job="ledger"}': "64x140",
    'run_model_flops_total{tenant="t",run="lm",instance="l",job="ledger"}': "0+6x20 stale",
    'run_model_flops_total{tenant="t",run="lm",instance="r",job="ledger"}': "0+6x140",
    'run_step_capacity_flops_total{tenant="t",run="lm",instance="l",job="ledger"}': "0+15x20 stale",
    'run_step_capacity_flops_total{tenant="t",run="lm",instance="r",job="ledger"}': "0+15x140",
}


def test_only_the_ledger_that_is_away_alerts(tmp_path: Path) -> None:
    test = {
        "interval": "15s",
        "input_series": [{"series": series, "values": values} for series, values in SERIES.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (count_over_time(ALERTS{alertstate="firing"}[35m]))',
                "eval_time": "35m",
                "exp_samples": [
                    {"labels": f'{{alertname="{name}"}}', "value": 1}
                    for name in ("FlopwatchLedgerDown", "FlopwatchWatchdog")
                ],
            },
            {
                "expr": "round(run:training_mfu:ratio_rate5m, 0.01)",
                "eval_time": "12m",
                "exp_samples": [{"labels": '{run="lm"}', "value": 0.4}],
            },
        ],
    }
    rules = {"rule_files": [f"{ROOT}/helm/files/rules/*.yaml"], "evaluation_interval": "15s", "tests": [test]}
    (tmp_path / "test.yaml").write_text(json.dumps(rules))
    done = rule_test(find().promtool, tmp_path / "test.yaml", timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
