"""Sequence number of the collectives this rank has started in the default process group, as evidence for hangs.

Gloo and NCCL keep the number on the host and raise it as a collective starts. In a hang, the rank with the lowest
number has not reached the collective that the others wait in. Reading it needs no collective and no device.
https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

from typing import Any

import torch.distributed

from flopwatch import catalogue
from flopwatch.training.recorder import Recorder


def collectives() -> int | None:
    """Return how many collectives this rank has started in the default process group, None without a group."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    group: Any = torch.distributed.distributed_c10d._get_default_group()
    return int(group._get_sequence_number_for_group())


def watch(recorder: Recorder) -> None:
    """Record before each push how many collectives this rank has started."""

    def poll() -> None:
        if (number := collectives()) is not None:
            recorder.set(catalogue.TRAINING_COLLECTIVE_SEQUENCE_NUMBER, float(number))

    recorder.poll(poll)
