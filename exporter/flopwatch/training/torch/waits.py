"""How long this rank waits for others: in DDP's reducer, in FSDP2's gathers and reductions, in what the host waits for.

DDP. The reducer starts an all-reduce as soon as a bucket's gradients are there, and queues a callback on the autograd
engine that waits for all of them once the last one is. Two callbacks of ours bracket it: the first is queued from a
hook on a parameter, so before that gradient, and with it the last one, is the reducer's; when it runs it queues the
second, so behind the reducer's. The time between is what this rank waited after its own gradients were done. Never a
DDP communication hook: only one can be registered, and it changes the order of additions and so the loss. Hooks on
parameters, not on modules, because they run however the forward pass was compiled.
https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design

The host. On CPU (gloo) a rank waits in `Work.wait()`, which every collective called from Python ends in: those of FSDP
and ZeRO, a pipeline's receives, a loop's own all_reduce. That method is replaced by one that reads the clock before and
after. The functional collectives of DTensor end in `wait_tensor`, which is treated alike.
https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.Work

FSDP2 on CUDA. The host does not wait there; the compute stream does: for the all-gather before a module's parameters
are used, for a reduce-scatter before its buffer is reused, and for the last one. Marks on that stream bracket each.
These are private parts of PyTorch: where one is missing the wait is unmeasured, and the log says so.

Absent with NCCL: FSDP1, and the groups of tensor, pipeline, context and expert parallelism; docs/stragglers.md says
why. A step under no_sync() has no wait, and is not measured. Nothing is marked while a CUDA graph is captured.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from flopwatch.training.recorder import Recorder
from flopwatch.training.totals import Mark

log = logging.getLogger("flopwatch")

# How many parameters tell of a backward pass, about: one alone may be in a part that a step leaves out.
WATCHED_PARAMETERS = 4

# After so many steps without a wait the log says that there is none.
STEPS_TO_BE_SURE = 2


class Unmeasured(Exception):
    """The wait for other ranks can't be measured; the message says why."""


def watch(recorder: Recorder, model: object = None) -> Watch:
    """Tell the run of this model's waits for other ranks and of those of the host; log why where it can't be done.

    To be called in the loop's thread, after the model was wrapped. The wait counts as measured once one was seen.
    """
    told = Watch(recorder)
    try:
        _watch(told, model)
    except Unmeasured as reason:
        log.warning("the wait for other ranks is not measured: %s", reason)
    return told


def _watch(told: Watch, model: object) -> None:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return  # one rank waits for nobody
    if "pp" in (others := _others(told.recorder)):
        raise Unmeasured("a pipeline's stages wait for one another whether a rank is late or not")
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    if not isinstance(model, torch.nn.Module):
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise Unmeasured("on cuda the device waits, not the host; pass Run(model=...)")
        _watch_host(told)
        return
    reducers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    groups = list(_fsdp_groups(model))
    # Not the parameters' alone: FSDP2 may keep its shards on the host and compute elsewhere.
    devices = {group.device.type for group in groups} or {parameter.device.type for parameter in model.parameters()}
    if devices <= {"cpu"}:
        _watch_host(told)
    elif others or any(_tensor_parallel(group) for group in groups):
        raise Unmeasured(
            f"on {', '.join(sorted(devices))} the waits in groups beside the data-parallel ones are not "
            "seen, and without them another rank of the late one's group would be blamed"
        )
    elif groups:
        for group in groups:
            _watch_group(told, group)
    elif not reducers:
        raise Unmeasured(
            f"on {', '.join(sorted(devices))} the device waits, not the host, and a "
            f"{type(model).__name__} is neither DDP nor FSDP2"
        )
    for reducer in reducers:
        _watch_reducer(told, reducer)
    if reducers or groups:
        told.recorder.poll(told.check)


def _others(recorder: Recorder) -> set[str]:
    """Return in which groups of several ranks, data parallelism's aside, this rank is known to be."""
    place = recorder.parallel
    groups = {} if place is None else {"tp": place.tp, "pp": place.pp, "cp": place.cp, "ep": place.ep}
    return {name for name, group in groups.items() if group is not None and group[1] > 1}


def _tensor_parallel(group: Any) -> bool:
    """Return whether the parameters of one of FSDP2's groups are sharded along more than FSDP2's own dimensions."""
    return any(parameter.sharded_param.device_mesh.ndim > group.mesh_info.mesh.ndim for parameter in group.fsdp_params)


class Watch:
    """What a recorder is told of its waits; `remove()` ends that."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._seen = False
        self._first_position: int | None = None
        self.handles: list[Any] = []  # of hooks, and of what was replaced

    def remove(self) -> None:
        """Take all of it off."""
        self._seen = True  # and nothing more to say
        while self.handles:
            self.handles.pop().remove()

    def begins(self) -> Mark | None:
        """Return now; None if this step is not measured, or inside another wait, or amid a CUDA graph's capture."""
        recorder = self.recorder
        if not recorder.measuring or recorder.in_wait:
            return None
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            return None
        recorder.in_wait = True
        return recorder.mark()

    def ends(self, began: Mark) -> None:
        """Tell of a wait that ends now."""
        recorder = self.recorder
        recorder.in_wait = False
        if not self._seen:
            self._seen = True
            recorder.measures_wait()
        recorder.waited(began, recorder.mark())

    def failed(self, error: Exception) -> None:
        """Tell of an error that the model must not see."""
        self.recorder.failed("watch", error)

    def check(self) -> None:
        """Say once if steps are made and no wait is seen in them; called before each push."""
        position = self.recorder.position
        if self._seen or position is None:
            return
        if self._first_position is None:
            self._first_position = position
        elif position >= self._first_position + STEPS_TO_BE_SURE:
            self._seen = True
            log.warning("the wait for other ranks is not measured: the model made steps and none was seen in them")


class _Replaced:
    """A method in whose place ours is; `remove()` puts it back, unless somebody else took the place meanwhile."""

    def __init__(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        # Not the owner itself: a run that goes on should not keep a model that is gone.
        self._owner, self._name, self._ours = weakref.ref(owner), name, weakref.ref(ours)
        self._original = vars(owner).get(name)  # None: it is the class's
        setattr(owner, name, ours)

    def remove(self) -> None:
        """Put back what was there."""
        owner, ours = self._owner(), self._ours()
        if owner is None or ours is None or vars(owner).get(self._name) is not ours:
            return
        if self._original is None:
            delattr(owner, self._name)
        else:
            setattr(owner, self._name, self._original)


# DDP.


def _watch_reducer(told: Watch, model: DistributedDataParallel) -> None:
    """Bracket what the reducer of this model waits for."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    bracket = _Bracket(told, model)
    for parameter in parameters[:: max(1, len(parameters) // WATCHED_PARAMETERS)]:
        told.handles.append(parameter.register_hook(bracket.backward))  # type: ignore[no-untyped-call]


class _Bracket:
    """Brackets the reducer's wait in every backward pass of a DDP model that has one."""

    def __init__(self, told: Watch, model: DistributedDataParallel) -> None:
        self._told = told
        self._model = model
        # Checkpointed segments may have passes of their own inside the outer one.
        self._passes: set[int] = set()

    @torch.utils.hooks.unserializable_hook  # type: ignore[untyped-decorator]
    def backward(self, _: torch.Tensor) -> None:
        """Queue the first callback, once a pass; a hook on a parameter, called before its gradient is accumulated."""
        try:
            if torch.compiler.is_compiling():
                return  # compiled autograd runs no callbacks of ours
            this = torch._C._current_graph_task_id()
            self._told.recorder.in_wait = False  # an exception may have ended the last pass inside one
            if this not in self._passes and self._model.require_backward_grad_sync:
                self._passes.add(this)
                _queue(functools.partial(self._before_reducer, this))
        except Exception as error:
            self._told.failed(error)

    def _before_reducer(self, this: int) -> None:
        try:
            self._passes.discard(this)
            if (began := self._told.begins()) is not None:
                _queue(functools.partial(self._behind_reducer, began))
        except Exception as error:
            self._told.failed(error)

    def _behind_reducer(self, began: Mark) -> None:
        try:
            self._told.ends(began)
        except Exception as error:
            self._told.failed(error)


def _queue(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# FSDP2 where the device waits.


def _fsdp_groups(model: torch.nn.Module) -> Iterator[Any]:
    """Yield FSDP2's parameter groups of this model. Raises Unmeasured."""
    # Looked up, not imported: a model that is sharded has done that.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    module_type = getattr(fsdp, "FSDPModule", None)
    if module_type is None:
        return
    seen = set()
    for module in model.modules():
        if isinstance(module, module_type):
            try:
                state = module._get_fsdp_state()
                # One group a module until torch 2.10.
                groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
            except AttributeError as error:
                raise Unmeasured(f"this PyTorch's FSDP2 is not as expected: {error}") from error
            for group in groups:
                if group is not None and id(group) not in seen:
                    seen.add(id(group))
                    yield group


def _watch_group(told: Watch, group: Any) -> None:
    """Bracket what the compute stream waits for on behalf of one of FSDP2's parameter groups. Raises Unmeasured."""
    try:
        wait_for_unshard, post_backward = group.wait_for_unshard, group.post_backward
        wait_for_post_backward, finalize_backward = group._wait_for_post_backward, group.finalize_backward
    except AttributeError as error:
        raise Unmeasured(f"this PyTorch's FSDP2 is not as expected: {error}") from error
    in_post_backward: Mark | None = None

    def begins() -> Mark | None:
        try:
            return told.begins()
        except Exception as error:
            told.failed(error)
            return None

    def ends(began: Mark | None) -> None:
        try:
            if began is not None:
                told.ends(began)
        except Exception as error:
            told.failed(error)

    def timed_wait_for_unshard() -> None:
        # The same wait as at the beginning of the method, so that its copying is not taken for waiting.
        began = None
        try:
            result = group._all_gather_result
            if result is not None and (began := told.begins()) is not None:
                if result.all_gather_event is not None:
                    group.device_handle.current_stream().wait_event(result.all_gather_event)
                if result.all_gather_work is not None:
                    result.all_gather_work.wait()
        except Exception as error:
            told.failed(error)
        ends(began)
        wait_for_unshard()

    def timed_post_backward(*unused: object) -> None:
        nonlocal in_post_backward
        in_post_backward = begins()
        try:
            post_backward(*unused)
        finally:
            if in_post_backward is not None:  # there was nothing to reduce
                in_post_backward, told.recorder.in_wait = None, False

    def timed_wait_for_post_backward() -> None:
        # Between the beginning of post_backward and here the stream waits for an earlier reduce-scatter.
        nonlocal in_post_backward
        wait_for_post_backward()
        began, in_post_backward = in_post_backward, None
        ends(began)

    def timed_finalize_backward() -> None:
        # Since torch 2.11 the first group's waits for all of them.
        pending = getattr(group.comm_ctx, "_last_post_reduce_events", True)
        began = begins() if pending else None
        try:
            finalize_backward()
        finally:
            ends(began)

    told.handles += [
        _Replaced(group, "wait_for_unshard", timed_wait_for_unshard),
        _Replaced(group, "post_backward", timed_post_backward),
        _Replaced(group, "_wait_for_post_backward", timed_wait_for_post_backward),
        _Replaced(group, "finalize_backward", timed_finalize_backward),
    ]


# What the host waits for.


_replaced: list[_Replaced] = []


def _watch_host(told: Watch) -> None:
    """Tell the run of what this thread waits for in collectives called from Python, in place of the watch before."""
    while _replaced:
        _replaced.pop().remove()
    for owner, name in ((torch.distributed.Work, "wait"), (torch.distributed._functional_collectives, "wait_tensor")):
        _replaced.append(_Replaced(owner, name, _timed(told, getattr(owner, name))))
    told.handles += _replaced


def _timed(told: Watch, original: Callable[..., Any]) -> Callable[..., Any]:
    thread = threading.get_ident()

    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        # Other threads save checkpoints or gather metrics beside the loop.
        if torch.compiler.is_compiling() or threading.get_ident() != thread:
            return original(*args, **kwargs)
        began = None
        try:
            began = told.begins()
        except Exception as error:
            told.failed(error)
        try:
            return original(*args, **kwargs)
        finally:
            try:
                if began is not None:
                    told.ends(began)
            except Exception as error:
                told.failed(error)

    return timed
