"""Overheads of PyTorch itself: compilation by torch.compile, the CUDA memory allocator (docs/phases.md), collectives.

Dynamo calls back when the first compilation begins and when the last open one ends, on any thread. Only those of the
loop's thread and of a backward pass count as `compile`. A frame that was compiled before is a recompilation.
https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.memory_stats.html
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._dynamo.callback
import torch.distributed

from flopwatch import catalogue as m
from flopwatch.training.recorder import Recorder
from flopwatch.training.torch.groups import Groups
from flopwatch.training.totals import MAX_GROUPS


class Runtime:
    """Callbacks of one run that record Dynamo's compilations and the statistics of the CUDA allocator."""

    def __init__(self, recorder: Recorder, memory: Callable[[], list[Mapping[str, Any]]]) -> None:
        self._recorder = recorder
        self._memory = memory
        self._loop_thread = threading.get_ident()
        self._removed = False
        self._compiling = False

    def listen(self) -> None:
        """Register the callbacks with Dynamo, unless they are registered."""
        for callbacks, ours in self._callbacks():
            if ours not in callbacks:
                callbacks.append(ours)

    def remove(self) -> None:
        """Remove the callbacks."""
        self._removed = True
        for callbacks, ours in self._callbacks():
            if ours in callbacks:
                callbacks.remove(ours)

    def _callbacks(self) -> tuple[tuple[list[Any], Callable[[Any], None]], ...]:
        handler = torch._dynamo.callback.callback_handler
        return (handler.start_callbacks, self._begins), (handler.end_callbacks, self._ends)

    def poll(self) -> None:
        """Record the allocator's statistics, and register again if torch._dynamo.reset() removed the callbacks."""
        if self._removed:
            return
        self.listen()
        devices = self._memory()
        for metric, values in (
            (m.TRAINING_ALLOCATOR_RETRIES_TOTAL, [_number(device, "num_alloc_retries") for device in devices]),
            (m.TRAINING_OUT_OF_MEMORY_TOTAL, [_number(device, "num_ooms") for device in devices]),
            (m.TRAINING_ALLOCATOR_UNUSED_BYTES, [_unused(device) for device in devices]),
        ):
            if numbers := [value for value in values if value is not None]:
                self._recorder.set(metric, sum(numbers))

    def _begins(self, arguments: Any = None) -> None:
        with self._recorder.reporting("runtime"):
            self._recorder.add(m.TRAINING_RECOMPILATIONS_TOTAL, _recompiles(arguments))
            in_backward = torch._C._current_graph_task_id() != -1
            if in_backward or threading.get_ident() == self._loop_thread:
                self._compiling = True
                self._recorder.enter("compile", self._loop_thread)

    def _ends(self, _: Any = None) -> None:
        with self._recorder.reporting("runtime"):
            # If compilations overlap, another thread may end what the loop's thread began.
            if self._compiling:
                self._compiling = False
                self._recorder.leave("compile", self._loop_thread)


def cuda_memory() -> list[Mapping[str, Any]]:
    """Return the allocator's statistics for each CUDA device that this process uses."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    uses = getattr(torch._C, "_cuda_hasPrimaryContext", lambda index: True)  # statistics cost 0.3 ms a device
    return [torch.cuda.memory_stats_as_nested_dict(index) for index in range(torch.cuda.device_count()) if uses(index)]


def attach(recorder: Recorder, memory: Callable[[], list[Mapping[str, Any]]] = cuda_memory) -> Runtime:
    """Record compilations and the allocator's statistics. Call it on the training loop's thread."""
    runtime = Runtime(recorder, memory)
    with recorder.reporting("runtime"):
        runtime.listen()
        recorder.poll(runtime.poll)
    return runtime


def watch_collectives(recorder: Recorder) -> None:
    """Record before each push how many collectives this rank has started in each process group.

    Gloo and NCCL keep the number on the host and raise it as a collective starts. In a hang, the rank with the lowest
    number has not reached the collective that the others wait in. Reading it needs no collective and no device.
    https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
    """
    groups = Groups(recorder)
    without: set[str] = set()  # backends without sequence numbers, such as fake ones

    def number(group: Any) -> int | None:
        if (backend := torch.distributed.get_backend(group)) in without:
            return None
        try:
            return int(group._get_sequence_number_for_group())
        except RuntimeError:
            without.add(backend)
            return None

    def poll() -> None:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        c10d: Any = torch.distributed.distributed_c10d
        default = c10d._get_default_group()
        if (of_job := number(default)) is not None:
            recorder.set(m.TRAINING_COLLECTIVE_SEQUENCE_NUMBER, float(of_job))
        numbers: dict[tuple[tuple[str, str], ...], float] = {}
        for group in list(c10d._world.pg_map):
            known = None if group is default else groups.of_group(group)
            if known is not None and len(numbers) < MAX_GROUPS and (called := number(group)) is not None:
                kind, ranks = known
                numbers[("group", kind), ("ranks", ranks)] = called
        for (kind, ranks), called in list(recorder.messages.items())[: MAX_GROUPS - len(numbers)]:
            numbers[("group", kind), ("ranks", ranks)] = called
        recorder.replace(m.TRAINING_GROUP_SEQUENCE_NUMBER, numbers)

    recorder.poll(poll)


def _recompiles(arguments: Any) -> bool:
    trigger = getattr(arguments, "callback_trigger", None)
    if getattr(trigger, "name", None) != "DYNAMO":
        return False  # a backward pass is compiled after its forward pass, with the same id
    frame, _, times = str(arguments.compile_id).rpartition("/")  # the times that the frame was compiled before
    return frame != "" and times.isdecimal() and int(times) > 0


def _number(device: Mapping[str, Any], *keys: str) -> int | None:
    value: Any = device
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, int) else None


def _unused(device: Mapping[str, Any]) -> int | None:
    reserved = _number(device, "reserved_bytes", "all", "current")
    allocated = _number(device, "allocated_bytes", "all", "current")
    return None if reserved is None or allocated is None else reserved - allocated
