"""The shortest way from card to page: one job, one Xid, one page, one MFU. The long way is in test_chain.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from demo.stack import DemoStack
from flopwatch import catalogue as m
from tests.support.job_log import JobLog
from tests.support.machine import PATIENCE

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.timeout(300)]

RUN = "lm-smoke"
PACE = 15.0  # a minute of the shipped rules is four seconds here
GPU = 6

Value = TypeVar("Value")


def wait_for(what: str, read: Callable[[], Value | None], stack: DemoStack) -> Value:
    """Return the first value that is not None, 0 or empty. Fail with `what` if there is none."""
    deadline = time.monotonic() + PATIENCE
    while not (value := read()):
        stack.check()
        assert time.monotonic() < deadline, f"{what} did not come; receiver errors: {stack.receiver.errors}"
        time.sleep(0.2)
    return value


def test_a_job_has_an_mfu_and_an_xid_pages_with_the_gpu_in_it(tmp_path: Path) -> None:
    trainer = ("--steps", "10000", "--step-floor", "0.2")
    with DemoStack(tmp_path, pace=PACE, push_interval=1.0, train="torch", trainer=trainer, run=RUN) as stack:
        assert stack.servers.alertmanager, f"no Alertmanager here: {stack.servers.why}"
        wait_for("step 10", lambda: JobLog.read(stack.train_log).step >= 10, stack)
        stack.node.xid(GPU, 79)
        page = wait_for("the page", lambda: stack.receiver.of("pagerduty"), stack)[0]
        assert stack.node.uuid(GPU) in str(page.payload)
        assert "79" in page.payload["payload"]["summary"]
        mfu = wait_for(
            "the MFU", lambda: stack.prometheus.value(f'run:training_mfu:ratio_rate5m{{run="{RUN}"}}'), stack
        )
        assert 0 < mfu < 1
        position = wait_for(
            "the ledger", lambda: stack.prometheus.value(f'{m.RUN_HIGH_WATER_STEPS}{{run="{RUN}"}}'), stack
        )
        assert position >= 1
        stack.control(stop=True)
        wait_for("the end of the run", lambda: JobLog.read(stack.train_log).of("finish"), stack)
    assert stack.processes() == []
