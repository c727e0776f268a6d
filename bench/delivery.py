"""Time from a fault of a real training job to its Slack message, at the intervals of production.

    python -m bench.delivery

Runs a DDP job of four ranks, an exporter on a simulated node, a ledger, Prometheus and Alertmanager on loopback. All
intervals are those of the shipped settings. First one rank computes 30 % longer. After its message, another rank is
stopped. Prints the seconds from each fault until Prometheus has the rank's name, until the alert fires and until Slack
has the message. It takes about three minutes.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from demo.stack import DemoStack
from flopwatch import catalogue as m

RUN, SLOW_RANK, STOPPED_RANK = "delivery", 2, 1
PUSH = 5.0  # seconds between two pushes, as shipped
STEP_FLOOR = 0.4  # seconds, most of it sleep
WARM_UP = 40.0  # seconds in which all ranks are measured
PATIENCE = 180.0  # seconds


@dataclass(frozen=True, slots=True)
class Delivery:
    """Seconds from a fault to the name of its rank in Prometheus, to the firing alert and to the message in Slack."""

    alert: str
    named: float
    fired: float
    sent: float
    text: str  # of the message

    def __str__(self) -> str:
        return f"{self.alert}: named {self.named:.0f} s, alert {self.fired:.0f} s, Slack {self.sent:.0f} s"


def since(began: float, stack: DemoStack, seen: Callable[[], object]) -> float:
    """Return the seconds from Unix time `began` until `seen` is true. Raises TimeoutError if it does not get true."""
    while not seen():
        if time.time() > began + PATIENCE:
            raise TimeoutError(f"nothing was seen in {PATIENCE:g} s")
        stack.check()
        time.sleep(0.2)
    return time.time() - began


def delivered(stack: DemoStack, alert: str, named: str) -> Delivery:
    """Return the seconds of each stage of a fault that begins now."""
    began = time.time()

    def queried(expr: str) -> float:
        return since(began, stack, lambda: stack.prometheus.query(expr))

    def texts() -> list[str]:
        return [text for one in stack.receiver.of("slack") if alert in (text := str(one.payload))]

    names = queried(named)
    fires = queried(f'ALERTS{{alertname="{alert}",run="{RUN}",alertstate="firing"}}')
    return Delivery(alert, names, fires, since(began, stack, texts), texts()[0])


def deliveries(state: Path) -> Iterator[Delivery]:
    """Yield what a slow rank took, and then what a stopped rank took. The files of all programs are in `state`."""
    trainer = ("--steps", "100000", "--checkpoint-every", "100000", "--step-floor", str(STEP_FLOOR))
    with DemoStack(state, pace=1.0, push_interval=PUSH, trainer=trainer, run=RUN, ledger=True) as stack:
        steps = f'max({m.TRAINING_STEPS_TOTAL}{{run="{RUN}"}}) > 10'
        since(time.time(), stack, lambda: stack.prometheus.query(steps))
        time.sleep(WARM_UP)
        stack.control(slow={str(SLOW_RANK): 0.3})
        yield delivered(stack, "TrainingStraggler", f'{m.RUN_STRAGGLER_INFO}{{run="{RUN}",rank="{SLOW_RANK}"}}')
        os.kill(stack.rank_pid(STOPPED_RANK), signal.SIGSTOP)
        for gpu in range(stack.ranks):
            stack.node.load(gpu, 0.0)  # the simulated GPUs do not run the job
        yield delivered(stack, "TrainingHang", f'{m.RUN_HANG_SUSPECT_RATIO}{{run="{RUN}",rank="{STOPPED_RANK}"}}')


def main() -> None:
    """Print the seconds of both faults."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for one in deliveries(Path(folder)):
            print(one, flush=True)


if __name__ == "__main__":
    main()
