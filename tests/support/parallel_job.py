"""Job of eight ranks with tensor, data and pipeline parallelism in which one rank may be late or stop.

Rank = tp + TP * (dp + DP * pp). Each microbatch passes forward, later backward, through all stages, with an all-reduce
of the tensor parallel group in each. The data parallel group adds up gradients at the end of a step. A rank computes by
sleeping, so that many ranks share two cores without disturbing each other.

With NCCL all ranks share one GPU. As in Megatron, the host waits for the GPU after each message, and after each step.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any, NamedTuple

SIZE, HOSTS = 8, 2
MICROBATCHES = 4
FORWARD, BACKWARD, OPTIMIZER = 0.03, 0.06, 0.04  # seconds that a rank computes
USUAL = 4  # steps before a rank stops
FOREVER = 1 << 30


class Layout(NamedTuple):
    """Sizes of the parallel groups."""

    tp: int
    dp: int
    pp: int

    def key(self, kind: str, rank: int) -> object:
        """Return the key of the group of a kind that a rank is in."""
        tp, dp, pp = rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp)
        return {"tp": (dp, pp), "dp": (tp, pp), "pp": (tp, dp)}[kind]

    def members(self, kind: str, rank: int) -> tuple[int, ...]:
        """Return the ranks of the group of a kind that a rank is in."""
        return tuple(one for one in range(SIZE) if self.key(kind, one) == self.key(kind, rank))


class Trial(NamedTuple):
    """One run of the job. `rank` is None in a healthy one.

    `where`: the rank is late in each microbatch (tp), before each message (pp) or before gradients are added up (dp),
    by `late` seconds of a step. If that is 0 it stops there, in microbatch `at` of the forward or the backward pass.
    """

    run: str
    rank: int | None = None
    where: str = ""
    late: float = 0.0
    at: int = 0  # below 2 * MICROBATCHES


def _nothing(*_: object) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Platform:
    """Backend and device of the ranks, and functions that each rank calls."""

    backend: str = "gloo"
    device: str = "cpu"
    rendezvous: str = ""  # URL, a file in the job's folder by default
    usual: int = USUAL  # steps before a rank stops
    # declare waits with run.collective_wait(), which the hook cannot measure itself
    declares_waits: bool = False
    prepare: Callable[[int], object] = _nothing  # of a rank before it imports PyTorch
    begun: Callable[[int, Mapping[str, Any]], object] = _nothing  # of a rank and its groups before the first trial
    ended: Callable[[int, Mapping[str, Any]], object] = _nothing  # the same after the last trial


GLOO = Platform()


class Control:
    """Memory that the ranks share with the process that started them, by trial."""

    def __init__(self, trials: int) -> None:
        self.steps = RawArray(ctypes.c_int, trials)  # that rank 0 has ended
        self.released = RawArray(ctypes.c_bool, trials)  # the rank that stands still
        self.last = RawArray(ctypes.c_int, [FOREVER] * trials)  # step that ends the trial

    def end(self, trial: int) -> None:
        """End a trial as soon as all ranks can end it in the same step."""
        self.last[trial] = self.steps[trial] + USUAL
        self.released[trial] = True


def start(
    folder: Path, layout: Layout, trials: Sequence[Trial], endpoints: Sequence[str], platform: Platform = GLOO
) -> tuple[Control, list[int]]:
    """Fork the ranks of a job that does these trials in turn, and return what controls it and their process ids.

    The ranks are spread over the exporters at `endpoints`. Raises OSError.
    """
    control, pids = Control(len(trials)), []
    for rank in range(SIZE):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives its parent
                platform.prepare(rank)
                _work(rank, folder, layout, trials, control, endpoints[rank * len(endpoints) // SIZE], platform)
                code = 0
            except Exception:
                traceback.print_exc()  # os._exit() prints nothing
            finally:
                os._exit(code)
        pids.append(pid)
    return control, pids


def stand_still(released: Callable[[], bool]) -> None:
    """Block like a read from a dead disk."""
    while not released():
        time.sleep(0.05)


def _work(
    rank: int,
    folder: Path,
    layout: Layout,
    trials: Sequence[Trial],
    control: Control,
    endpoint: str,
    platform: Platform,
) -> None:
    import torch
    import torch.distributed as dist

    from flopwatch.training import Run

    local = str(rank % (SIZE // HOSTS))
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(SIZE), "LOCAL_RANK": local, "GLOO_SOCKET_IFNAME": "lo"}
    os.environ["LOCAL_WORLD_SIZE"] = str(SIZE // HOSTS)
    if platform.device != "cpu":
        torch.cuda.set_device(0)
    place = platform.rendezvous or f"file://{folder / 'store'}"
    dist.init_process_group(platform.backend, init_method=place, rank=rank, world_size=SIZE)
    groups: dict[str, Any] = {}
    for kind in ("tp", "dp", "pp"):
        for ranks in dict.fromkeys(layout.members(kind, one) for one in range(SIZE)):
            group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
            if rank in ranks and group is not None:
                groups[kind] = group
    if platform.device != "cpu":  # NCCL makes a communicator at a group's first operation, which takes seconds
        dist.all_reduce(torch.ones(1, device=platform.device))
        _Step(rank, layout, groups, Trial(""), lambda: True, platform).run(stops=False)
    platform.begun(rank, groups)
    for number, trial in enumerate(trials):
        run = Run(
            trial.run,
            attempt=trial.run,
            parallel=groups,
            endpoint=endpoint,
            push_interval=1.0,
            flops_per_token=1.0,
            peak_flops=1e9,
        )
        run.watch(None)
        run.recorder.sample(1)
        step = _Step(rank, layout, groups, trial, partial(control.released.__getitem__, number), platform)
        if platform.declares_waits:
            step.waits = run.collective_wait
        taken = 0
        while taken < control.last[number]:
            step.run(stops=taken == platform.usual)
            run.step(tokens=1024)
            taken += 1
            if rank == 0:
                control.steps[number] = taken
        run.finish()
    platform.ended(rank, groups)
    dist.destroy_process_group()


class _Step:
    """A step of one rank in a trial."""

    def __init__(
        self,
        rank: int,
        layout: Layout,
        groups: dict[str, Any],
        trial: Trial,
        released: Callable[[], bool],
        platform: Platform,
    ) -> None:
        import torch

        self.waits: Callable[[Any], AbstractContextManager[None]] = lambda group: nullcontext()
        self.groups, self.trial, self.released = groups, trial, released
        self.mine, self.stage, self.stages = trial.rank == rank, rank // (layout.tp * layout.dp), layout.pp
        self.tensor, self.gradients = (torch.ones(size, device=platform.device) for size in (64, 4096))

    def run(self, *, stops: bool) -> None:
        """Pass all microbatches forward and backward, and add up gradients. `stops`: the rank of the trial stops."""
        stops = stops and self.mine and self.trial.late == 0
        for forward, seconds in ((True, FORWARD), (False, BACKWARD)):
            for number in range(MICROBATCHES):
                here = self.trial.where if stops and self.trial.at == number + MICROBATCHES * (not forward) else ""
                self._pass(forward, seconds, here)
        time.sleep(OPTIMIZER + self._late("dp", 1))
        if stops and self.trial.where == "dp":
            stand_still(self.released)
        self._reduce("dp", self.gradients)
        self.gradients[0].item()  # waits for the GPU

    def _pass(self, forward: bool, seconds: float, stops: str) -> None:
        """Pass a microbatch through this stage. `stops` is where the rank stops."""
        import torch.distributed as dist

        before, after = (self.stage - 1, self.stage + 1) if forward else (self.stage + 1, self.stage - 1)
        # The first stage of a pass stops before it sends, the others before they receive.
        if 0 <= before < self.stages:
            if stops == "pp":
                stand_still(self.released)
            with self.waits(self.groups["pp"]):
                dist.recv(self.tensor, group=self.groups["pp"], group_src=before)
            self.tensor[0].item()  # waits for the GPU
        time.sleep(seconds + self._late("tp", 2 * MICROBATCHES))
        if stops == "tp":
            stand_still(self.released)
        self._reduce("tp", self.tensor)
        if 0 <= after < self.stages:
            time.sleep(self._late("pp", MICROBATCHES))
            if stops == "pp" and not 0 <= before < self.stages:
                stand_still(self.released)
            dist.send(self.tensor, group=self.groups["pp"], group_dst=after)

    def _reduce(self, kind: str, tensor: Any) -> None:
        import torch.distributed as dist

        if kind in self.groups:
            with self.waits(self.groups[kind]):
                dist.all_reduce(tensor, group=self.groups[kind])

    def _late(self, where: str, times: int) -> float:
        return self.trial.late / times if self.mine and self.trial.where == where else 0.0
