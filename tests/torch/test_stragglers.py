"""Test straggler detection on four ranks.

A rank that is 15 % slower is named by the verdicts of the ledger, and no rank is named in healthy steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from flopwatch.verdicts.stragglers import judge
from flopwatch.verdicts.waits import Communicator
from tests.support import ranks
from tests.support.waits import interval_of

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.torch, pytest.mark.timeout(900)]

WORLD_SIZE = 4
WINDOW = 20  # steps
WARM_UP = 4  # steps; the first one has no mean to compare with
WINDOWS = 6
HEALTHY_STEPS = 1000
HEALTHY_WINDOW = 100
SLOWER = 0.15
WORK = 0.02  # seconds of a step in which every rank is busy
# Multiples of that, tried in order until the result is right. Other work on the machine costs every step some
# milliseconds. That is more than 15 % of a short step and much less of a long one.
LATE_SCALES, HEALTHY_SCALES = (1, 3, 9), (1, 3, 3)
VARIANTS = ("sleeping", "burning", "loading", "fsdp2")

Window = list[float]  # each rank's wait as a share of its measured step time


@pytest.fixture(scope="module")
def windows() -> dict[str, list[Window]]:
    """Return the wait shares of each window by scenario. One launch runs all, because importing torch takes seconds."""
    answers = ranks.answers(__file__, WORLD_SIZE, 800)
    return {
        name: [list(window) for window in zip(*(answer[name] for answer in answers), strict=True)]
        for name in answers[0]
    }


def named(windows: list[Window]) -> set[int]:
    """Return the ranks that the ledger names after these windows."""
    group = Communicator("world", tuple(range(WORLD_SIZE)))
    intervals = [
        interval_of(WINDOW, 1.0, {rank: {group: share} for rank, share in enumerate(window)}, {}) for window in windows
    ]
    return {suspect.rank for suspect in judge(intervals).suspects}


def ever_named(windows: list[Window]) -> set[int]:
    """Return the ranks that are named after any of the windows."""
    return set().union(*(named(windows[: at + 1]) for at in range(len(windows))))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("slow", range(WORLD_SIZE))
def test_a_rank_slower_by_15_percent_is_named(windows: dict[str, list[Window]], variant: str, slow: int) -> None:
    assert ever_named(windows[f"{variant} {slow}"]) == {slow}


@pytest.mark.parametrize("model", ["ddp", "fsdp2"])
def test_no_rank_is_named_in_healthy_steps(windows: dict[str, list[Window]], model: str) -> None:
    assert ever_named(windows[f"healthy {model}"]) == set()


def main() -> dict[str, list[float]]:
    """Train as one of the ranks. Return its wait shares of the windows of each scenario."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from flopwatch.catalogue import TRAINING_COLLECTIVE_WAIT_SECONDS_TOTAL, TRAINING_MEASURED_STEP_SECONDS_TOTAL
    from flopwatch.training import Run

    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def train(
        model: Any, windows: int, window: int, work: float, extra: float = 0.0, how: str = ""
    ) -> tuple[list[float], float]:
        """Return the wait shares of the windows, and the mean step time of the last one."""
        run = Run("late", model=model)
        run.recorder.sample(1)  # needed in windows this short; in two minutes two steps a second are enough
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def batches() -> Any:
            while True:
                time.sleep(extra if how == "loading" else 0)
                yield torch.ones(4, 32)

        def totals() -> tuple[float, float]:
            points = run.snapshot().points
            return points[TRAINING_COLLECTIVE_WAIT_SECONDS_TOTAL][0][1], points[TRAINING_MEASURED_STEP_SECONDS_TOTAL][
                0
            ][1]

        shares, then, began = [], (0.0, 0.0), 0.0
        loader = iter(run.batches(batches()))
        for step in range(WARM_UP + windows * window):
            batch = next(loader)
            time.sleep(work + (extra if how in ("sleeping", "fsdp2") else 0))
            until = time.perf_counter() + (extra if how == "burning" else 0)
            while time.perf_counter() < until:
                pass
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
            if step >= WARM_UP - 1 and (step - WARM_UP + 1) % window == 0:
                now = totals()
                if step >= WARM_UP:
                    shares.append((now[0] - then[0]) / (now[1] - then[1]))
                    duration = (time.perf_counter() - began) / window
                then, began = now, time.perf_counter()
        return shares, duration

    def ddp() -> Any:
        return DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4))))

    def fsdp2() -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
        fully_shard(model[0])
        return fully_shard(model)

    def of_all(mine: list[float]) -> list[Window]:
        """Return the windows of all ranks, so that all ranks make the same decision to continue."""
        gathered: list[Any] = [None] * WORLD_SIZE
        dist.all_gather_object(gathered, mine)
        return [list(window) for window in zip(*gathered, strict=True)]

    def healthy(make: Callable[[], Any], windows: int, window: int, work: float) -> tuple[list[float], float]:
        """Return the wait shares, and the duration of a step without the work."""
        for times in HEALTHY_SCALES:
            shares_of_windows, step = train(make(), windows, window, times * work)
            if not ever_named(of_all(shares_of_windows)):
                break
        return shares_of_windows, step - times * work

    def late(make: Callable[[], Any], slow: int, overhead: float, how: str) -> list[float]:
        for times in LATE_SCALES:
            work = times * WORK
            extra = SLOWER * (work + overhead) if rank == slow else 0.0
            shares_of_windows, _ = train(make(), WINDOWS, WINDOW, work, extra, how)
            if ever_named(of_all(shares_of_windows)) == {slow}:
                break
        return shares_of_windows

    shares: dict[str, list[float]] = {}
    shares["healthy ddp"], of_ddp = healthy(ddp, HEALTHY_STEPS // HEALTHY_WINDOW, HEALTHY_WINDOW, WORK / 2)
    shares["healthy fsdp2"], of_fsdp2 = healthy(fsdp2, WINDOWS, WINDOW, WORK)
    for how in VARIANTS:
        make, overhead = (fsdp2, of_fsdp2) if how == "fsdp2" else (ddp, of_ddp)
        for slow in range(WORLD_SIZE):
            shares[f"{how} {slow}"] = late(make, slow, overhead, how)
    dist.barrier()
    dist.destroy_process_group()
    return shares


if __name__ == "__main__":
    print(json.dumps(main()))
