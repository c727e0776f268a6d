"""Job of eight gloo ranks as TP2 x PP2 x DP2 with real process groups, in which one rank may be late.

Rank = tp + 2 * (dp + 2 * pp). Each microbatch passes forward and backward through both stages, with an all-reduce of
the tensor parallel group. The data parallel group adds up gradients at the end of a step. A rank computes by sleeping,
so that eight ranks share two cores without disturbing each other.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

SIZE = 8
MEMBERS: dict[str, Callable[[int], object]] = {  # key of the group of each kind that a rank is in
    "tp": lambda rank: rank // 2,
    "dp": lambda rank: (rank % 2, rank // 4),
    "pp": lambda rank: rank % 4,
}
MICROBATCHES = 4
FORWARD, BACKWARD, OPTIMIZER = 0.006, 0.012, 0.008  # seconds that a rank computes
STEPS = 6  # of an interval
WARM_UP = 4  # steps


def main(trials: list[dict[str, Any]]) -> Iterator[list[list[Any]]]:
    """Yield the rank's totals after each interval of each trial, as in the field `waits` of a ledger's record.

    A trial has its number of `intervals`. It may have a `late` rank, `where` it is late (`tp`: in each microbatch,
    `pp`: before each send, `dp`: before gradients are added up), and `by` how many seconds of a step.
    """
    import torch
    import torch.distributed as dist

    from flopwatch.training import Run

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups: dict[str, Any] = {}
    for kind, key in MEMBERS.items():
        for one in dict.fromkeys(map(key, range(SIZE))):
            group = dist.new_group([member for member in range(SIZE) if key(member) == one])
            if key(rank) == one:
                groups[kind] = group
    stage = rank // 4
    tensor, gradients = torch.ones(64), torch.ones(4096)

    def step(delay: dict[str, float]) -> None:
        for direction, seconds in (("forward", FORWARD), ("backward", BACKWARD)):
            first = stage == (0 if direction == "forward" else 1)
            for _ in range(MICROBATCHES):
                if not first:
                    dist.recv(tensor, group=groups["pp"], group_src=1 - stage)
                time.sleep(seconds + delay.get("tp", 0.0) / (2 * MICROBATCHES))
                dist.all_reduce(tensor, group=groups["tp"])
                if first:
                    time.sleep(delay.get("pp", 0.0) / MICROBATCHES)
                    dist.send(tensor, group=groups["pp"], group_dst=1 - stage)
        time.sleep(OPTIMIZER + delay.get("dp", 0.0))
        dist.all_reduce(gradients, group=groups["dp"])

    for trial in trials:
        run = Run("parallel", parallel=groups)
        run.watch(None)
        run.recorder.sample(1)
        delay = {trial["where"]: trial["by"]} if trial.get("late") == rank else {}
        for _ in range(WARM_UP):
            step(delay)
            run.step(tokens=1024)
        yield [_row(rank, run.snapshot().points)]
        for _ in range(trial["intervals"]):
            for _ in range(STEPS):
                step(delay)
                run.step(tokens=1024)
            yield [_row(rank, run.snapshot().points)]
        run.finish()
    dist.destroy_process_group()


def _row(rank: int, points: Any) -> list[Any]:
    samples = {row.name: found for row, found in points.items()}
    steps, seconds, wait, tokens = (
        samples[f"training_{name}_total"][0][1]
        for name in ("measured_steps", "measured_step_seconds", "collective_wait_seconds", "tokens")
    )
    groups = [
        [labels["group"], labels["ranks"], value]
        for labels, value in samples.get("training_group_wait_seconds_total", [])
    ]
    return [rank, "", 0.0, steps, seconds, wait, tokens, groups]


if __name__ == "__main__":
    print(json.dumps(list(main(json.loads(sys.argv[1])))))
