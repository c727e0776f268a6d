"""Job of two ranks with DDP and a group of its own. It prints its loss, its process groups and their collectives.

With HOOK=1, a Run of flopwatch records it.
"""

import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 40


def main() -> None:
    """Train, and print the result as JSON."""
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1])
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run: Any = None
    if os.environ["HOOK"] == "1":
        from flopwatch.training import Run

        run = Run("counted", model=model, flops_per_token=100, peak_flops=1e9, push_interval=0.1)
    for _ in range(STEPS):
        loss = model(torch.rand(4, 8)).square().mean()
        loss.backward()
        dist.all_reduce(torch.ones(1), group=group)
        optimizer.step()
        optimizer.zero_grad()
        if run is not None:
            run.step(tokens=4, loss=loss.item())
    if run is not None:
        run.finish()
    groups: Any = dist.distributed_c10d._world.pg_map
    counted = sorted(one._get_sequence_number_for_group() for one in groups)
    print(json.dumps({"loss": loss.item(), "collectives": counted}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
