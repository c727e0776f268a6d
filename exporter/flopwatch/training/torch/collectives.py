"""Evidence for hangs: how many collectives this rank has started in the default process group.

The number is the group's own count, kept on the host by gloo and NCCL alike; it rises as a collective is started, so
of ranks that hang the one with the lowest has not come to the collective that the others wait in. Reading it takes no
collective and asks no device. Groups of tensor or pipeline parallelism count for themselves and are not read.
With NCCL the host runs ahead: ranks whose devices hang, and not their hosts, may have the same number.
https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html tells what each one was.
"""

from __future__ import annotations

from typing import Any

import torch.distributed

from flopwatch import catalogue
from flopwatch.training.recorder import Recorder


def collectives() -> int | None:
    """Return how many collectives this rank has started in the default group; None without one."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    group: Any = torch.distributed.distributed_c10d._get_default_group()
    return int(group._get_sequence_number_for_group())


def watch(recorder: Recorder) -> None:
    """Tell the run of that number before each push."""

    def poll() -> None:
        if (number := collectives()) is not None:
            recorder.set(catalogue.TRAINING_COLLECTIVE_SEQUENCE, float(number))

    recorder.poll(poll)
