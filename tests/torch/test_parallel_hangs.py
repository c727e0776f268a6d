"""Which rank the calls of process groups name when one of eight gloo ranks as TP2 x PP2 x DP2 stops."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from flopwatch.catalogue.ranks import ranks_of
from flopwatch.verdicts.hangs import RankState, judge
from flopwatch.verdicts.waits import Communicator
from tests.support import parallel_job, ranks
from tests.support.hook_server import HookServer, Push
from tests.support.machine import until

pytestmark = [pytest.mark.long, pytest.mark.torch, pytest.mark.timeout(600)]

STOPS = 6  # the rank that stops
HANGING = f"""
import sys, time, torch, torch.distributed as dist
from flopwatch.training import Run
from tests.support.parallel_job import MEMBERS, SIZE

dist.init_process_group("gloo")
rank, groups = dist.get_rank(), {{}}
for kind, key in MEMBERS.items():
    for one in dict.fromkeys(map(key, range(SIZE))):
        group = dist.new_group([member for member in range(SIZE) if key(member) == one])
        if key(rank) == one:
            groups[kind] = group
run, stage, tensor = Run("hangs", parallel=groups, push_interval=0.5), rank // 4, torch.ones(8)
for step in range(40):
    stops = sys.argv[1] if (step, rank) == (3, {STOPS}) else ""
    for first in (stage == 0, stage == 1):
        if stops == "pp":
            time.sleep(3600)
        if not first:
            dist.recv(tensor, group=groups["pp"], group_src=1 - stage)
        if stops == "tp":
            time.sleep(3600)
        dist.all_reduce(tensor, group=groups["tp"])
        if first:
            dist.send(tensor, group=groups["pp"], group_dst=1 - stage)
    if stops == "dp":
        time.sleep(3600)
    dist.all_reduce(tensor, group=groups["dp"])
    run.step()
"""


@pytest.fixture(params=["tp", "dp", "pp"])
def hanging(request: pytest.FixtureRequest) -> Iterator[tuple[str, HookServer]]:
    with HookServer() as server:
        processes = ranks.start(
            ["-c", HANGING, request.param], parallel_job.SIZE, FLOPWATCH_ENDPOINT=server.url, FLOPWATCH_DISABLE="0"
        )
        try:
            yield request.param, server
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def calls(push: Push) -> RankState:
    found = {}
    for name, value in push.samples.items():
        if name.startswith("training_group_sequence_number{"):
            labels = dict(re.findall(r"(\w+)=([^{}]*?)(?=,\w+=|\})", name))
            found[Communicator(labels["group"], ranks_of(labels["ranks"]))] = int(value)
    return RankState(called=found)


def test_the_rank_that_stops_is_named_in_its_group(hanging: tuple[str, HookServer]) -> None:
    kind, server = hanging

    def pushes(rank: int) -> list[Push]:
        return [push for push in list(server.pushes) if push.resource["flopwatch.rank"] == rank]

    def stands_still(rank: int) -> bool:
        """Return whether the last six pushes of a rank have the same steps and calls."""
        last = pushes(rank)[-6:]
        steps = {push.samples.get("training_steps_total", 0.0) for push in last}
        return len(last) == 6 and len(steps) == 1 and min(steps) >= 3 and len({str(calls(push)) for push in last}) == 1

    until(lambda: all(map(stands_still, range(parallel_job.SIZE))))
    verdict = judge({rank: calls(pushes(rank)[-1]) for rank in range(parallel_job.SIZE)})
    (named,) = verdict.suspects
    assert named.rank == STOPS
    # Its tensor parallel peer goes on to the next microbatch or step, and waits for it there.
    group = named.communicator
    assert group is not None
    assert group.kind in {"tp", kind} - {"pp"}
    key = parallel_job.MEMBERS[group.kind]
    assert group.ranks == tuple(rank for rank in range(parallel_job.SIZE) if key(rank) == key(STOPS))
