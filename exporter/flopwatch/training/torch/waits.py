"""Waits of this rank for other ranks: in DDP's reducer, in FSDP2's gathers and reductions, and on the host.

DDP: two callbacks on the autograd engine bracket the reducer's own. The first is queued from a hook on a parameter, and
queues the second when it runs. https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design
Host (gloo): `Work.wait` and `wait_tensor` are replaced by functions that read the clock before and after.
FSDP2 on CUDA: marks on the compute stream bracket its waits, in private parts of PyTorch. If one is missing, the wait
is not measured, and a warning is logged. docs/waits.md lists what is absent.
"""

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
from flopwatch.training.torch.groups import Groups, functional_collectives
from flopwatch.training.totals import CapturedMark, Group, Mark

log = logging.getLogger("flopwatch")

# About how many parameters have a hook. One is not enough, because a step may leave out its part of the model.
WATCHED_PARAMETERS = 4
STEPS_TO_BE_SURE = 2  # steps without a wait after which a warning is logged
MEASURED_STEPS_TO_BE_SURE = 10  # the same for a model that had waits before
_queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


class Unmeasured(Exception):
    """Error raised when the wait for other ranks cannot be measured. `reason` is the label of its series."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Watch:
    """Hooks of one run that measure waits for other ranks."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.groups = Groups(recorder)
        self._seen = self._captured = self._removed = False
        self._first_position: int | None = None
        self.handles: list[Any] = []  # of hooks, and of what was replaced

    def remove(self) -> None:
        """Remove all hooks on parameters, and restore the replaced methods of FSDP2 and torch.distributed."""
        self._removed = True
        while self.handles:
            self.handles.pop().remove()

    def begins(self) -> Mark | None:
        """Return the begin of a wait. None in an unmeasured step, in another wait or in a CUDA graph's capture."""
        recorder = self.recorder
        try:
            if not recorder.measuring or recorder.in_wait:
                return None
            began = recorder.mark()
            if type(began) is CapturedMark or (recorder.mark is recorder.clock and _captures()):
                self._captured = True
                return None
            recorder.in_wait = True
            return began
        except Exception as error:
            recorder.failed("watch", error)
            return None

    def ends(self, began: Mark | None, group: Group | None = None) -> None:
        """Record a wait in a process group from `began` until now, unless that is None."""
        recorder = self.recorder
        with recorder.reporting("watch"):
            if began is not None:
                recorder.in_wait = False
                if not recorder.totals.measures_wait:
                    recorder.measures_wait()
                self._seen = True
                recorder.waited(began, recorder.mark_after(began), group)

    def check(self) -> None:
        """Report that the model's first steps had no wait for other ranks, or that waits ended. Called at each push."""
        recorder, position = self.recorder, self.recorder.position
        if self._removed or recorder.no_wait_because is not None or position is None:
            return
        if not self._seen:
            if self._first_position is None:
                self._first_position = position
            elif position >= self._first_position + STEPS_TO_BE_SURE:
                refuse(recorder, Unmeasured("no_wait", "no wait was seen in the model's first steps"))
        elif recorder.steps_taken - recorder.waited_at > MEASURED_STEPS_TO_BE_SURE * recorder.measure_every:
            # From now on, steps without a wait are measured, so that the run keeps its phases.
            recorder.totals.measures_wait = False
            if self._captured:
                why = Unmeasured("cuda_graph", "the model was captured into a CUDA graph, whose replays run no hooks")
            else:
                why = Unmeasured("waits_ended", "the model waits no more, for example because a CUDA graph replaces it")
            refuse(recorder, why)


def _captures() -> bool:
    """Return whether a CUDA graph is captured on this thread's current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def refuse(recorder: Recorder, why: Unmeasured) -> None:
    """Log why the wait for other ranks is not measured, and set the reason of its series."""
    recorder.no_wait_because = why.reason
    log.warning("the wait for other ranks is not measured: %s", why)


def watch(recorder: Recorder, model: object = None) -> Watch:
    """Record a model's waits for other ranks, or the host's if None, or log why not. Pass the model as wrapped."""
    watched = Watch(recorder)
    try:
        _watch(watched, model)
    except Unmeasured as why:
        refuse(recorder, why)
    return watched


def _watch(watched: Watch, model: object) -> None:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return  # a single rank never waits
    while _replaced:  # by the previous watch
        _replaced.pop().remove()
    _replace(watched, *watched.groups.counters())
    place = watched.recorder.parallel
    of_rank = {name: getattr(place, name, None) for name in ("tp", "pp", "cp", "ep")}  # apart from data parallelism
    others = {name for name, group in of_rank.items() if group is not None and group[1] > 1}
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    if not isinstance(model, torch.nn.Module):
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise Unmeasured("no_model", "on cuda the device waits, not the host; pass Run(model=...)")
        _watch_host(watched)
        return
    reducers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    groups = list(fsdp_groups(model))
    # Not the parameters' alone: FSDP2 may keep its shards on the host and compute elsewhere.
    devices = {group.device.type for group in groups} or {parameter.device.type for parameter in model.parameters()}
    names = ", ".join(sorted(devices))
    if devices <= {"cpu"}:
        _watch_host(watched)
    elif "pp" in others:
        raise Unmeasured("pipeline", f"on {names} the sends and receives of a pipeline's stages are not seen")
    elif others or any(_tensor_parallel(group) for group in groups):
        raise Unmeasured(
            "other_groups",
            f"on {names} the waits in other groups than the data-parallel ones are not "
            "seen, and without them another rank of the straggler's group would be blamed",
        )
    elif not reducers and not groups:
        kind = type(model).__name__
        raise Unmeasured(
            "other_model", f"on {names} the device waits, not the host, and a {kind} is neither DDP nor FSDP2"
        )
    else:
        for group in groups:
            _watch_group(watched, group)
    for reducer in reducers:
        parameters = [parameter for parameter in reducer.parameters() if parameter.requires_grad]
        bracket = _Bracket(watched, reducer)
        for parameter in parameters[:: max(1, len(parameters) // WATCHED_PARAMETERS)]:
            watched.handles.append(parameter.register_hook(bracket.backward))  # type: ignore[no-untyped-call]
    if reducers or groups:
        watched.recorder.poll(watched.check)


def _tensor_parallel(group: Any) -> bool:
    """Return whether the parameters of an FSDP2 group are sharded along more than FSDP2's own dimensions."""
    return any(parameter.sharded_param.device_mesh.ndim > group.mesh_info.mesh.ndim for parameter in group.fsdp_params)


class Replaced:
    """Replaced method or function of an object, a class or a module."""

    def __init__(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        # A weak reference, so that the run does not keep a deleted model alive.
        self._owner, self._name, self._ours = weakref.ref(owner), name, weakref.ref(ours)
        self._original = vars(owner).get(name)  # None: it is the class's
        setattr(owner, name, ours)

    def remove(self) -> None:
        """Restore the original, unless other code has replaced it since."""
        owner, ours = self._owner(), self._ours()
        if owner is None or ours is None or vars(owner).get(self._name) is not ours:
            return
        if self._original is None:
            delattr(owner, self._name)
        else:
            setattr(owner, self._name, self._original)


class _Bracket:
    """Callbacks around the reducer's wait in every backward pass of a DDP model."""

    def __init__(self, watched: Watch, model: DistributedDataParallel) -> None:
        self._watch = watched
        self._model = model
        # Checkpointed segments may have passes of their own inside the outer one.
        self._passes: set[int] = set()

    @torch.utils.hooks.unserializable_hook  # type: ignore[untyped-decorator]
    def backward(self, _: torch.Tensor) -> None:
        """Queue the first callback, once per backward pass. PyTorch calls this before it adds a gradient."""
        try:
            if torch.compiler.is_compiling():
                return  # compiled autograd does not run these callbacks
            this = torch._C._current_graph_task_id()
            self._watch.recorder.in_wait = False  # an exception may have ended the last pass inside one
            if this not in self._passes and self._model.require_backward_grad_sync:
                self._passes.add(this)
                _queue(functools.partial(self._before_reducer, this))
        except Exception as error:
            self._watch.recorder.failed("watch", error)

    def _before_reducer(self, this: int) -> None:
        with self._watch.recorder.reporting("watch"):
            self._passes.discard(this)
            if (began := self._watch.begins()) is not None:
                group = self._watch.groups.of_group(self._model.process_group)
                _queue(functools.partial(self._watch.ends, began, group))


def fsdp_groups(model: torch.nn.Module) -> Iterator[Any]:
    """Yield FSDP2's parameter groups of this model. Raises Unmeasured for an unknown release of PyTorch."""
    # Looked up, not imported: a sharded model has imported it. The second one has it in torch 2.4 and 2.5.
    places = [sys.modules.get("torch.distributed." + name) for name in ("fsdp", "_composable.fsdp")]
    module_type = next((kind for place in places if (kind := getattr(place, "FSDPModule", None)) is not None), None)
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
                raise Unmeasured("unknown_pytorch", f"this PyTorch's FSDP2 is not as expected: {error}") from error
            for group in groups:
                if group is not None and id(group) not in seen:
                    seen.add(id(group))
                    yield group


def _watch_group(watched: Watch, group: Any) -> None:
    """Bracket the compute stream's waits for one FSDP2 parameter group. Raises Unmeasured."""
    try:
        wait_for_unshard, post_backward, reshard = group.wait_for_unshard, group.post_backward, group.reshard
        wait_for_post_backward, finalize_backward = group._wait_for_post_backward, group.finalize_backward
    except AttributeError as error:
        raise Unmeasured("unknown_pytorch", f"this PyTorch's FSDP2 is not as expected: {error}") from error
    in_post_backward = False
    reducing: Mark | None = None  # since when the stream may wait for an earlier reduce-scatter

    def timed_post_backward(*unused: object) -> None:
        nonlocal in_post_backward, reducing
        in_post_backward = True
        if not getattr(group, "reshard_after_backward", True):
            reducing = watched.begins()
        try:
            post_backward(*unused)
        finally:
            in_post_backward = False
            if reducing is not None:  # there was nothing to reduce
                reducing, watched.recorder.in_wait = None, False

    def timed_reshard() -> None:
        # Called by post_backward after its casts of gradients, and right before its wait.
        nonlocal reducing
        reshard()
        if in_post_backward and reducing is None:
            reducing = watched.begins()

    def timed_wait_for_post_backward() -> None:
        nonlocal reducing
        wait_for_post_backward()
        began, reducing = reducing, None
        watched.ends(began)

    def timed_finalize_backward() -> None:
        # Since torch 2.11 the first group's finalize_backward waits for all groups.
        pending = getattr(group.comm_ctx, "_last_post_reduce_events", True)
        began = watched.begins() if pending else None
        try:
            finalize_backward()
        finally:
            watched.ends(began)

    for ours in (
        _timed_wait_for_unshard(watched, group, wait_for_unshard),
        timed_post_backward,
        timed_reshard,
        timed_wait_for_post_backward,
        timed_finalize_backward,
    ):
        name = ours.__name__.removeprefix("timed_")
        watched.handles.append(Replaced(group, "_" + name if name == "wait_for_post_backward" else name, ours))


def _timed_wait_for_unshard(watched: Watch, group: Any, wait_for_unshard: Callable[[], None]) -> Callable[[], None]:
    current_stream = getattr(group, "device_handle", torch.cuda).current_stream

    def timed_wait_for_unshard() -> None:
        # The wait with which the original method begins, so that the copy after it does not count.
        began = None
        with watched.recorder.reporting("watch"):
            result = group._all_gather_result
            if result is not None and (began := watched.begins()) is not None:
                if result.all_gather_event is not None:
                    current_stream().wait_event(result.all_gather_event)
                if result.all_gather_work is not None:
                    result.all_gather_work.wait()
        watched.ends(began)
        wait_for_unshard()

    return timed_wait_for_unshard


_replaced: list[Replaced] = []


def _replace(watched: Watch, *functions: tuple[Any, str, Callable[..., Any]]) -> None:
    """Replace functions by owner and name until this watch or the next one removes them."""
    for function in functions:
        _replaced.append(Replaced(*function))
        watched.handles.append(_replaced[-1])


def _watch_host(watched: Watch) -> None:
    """Record this thread's waits in collectives called from Python."""
    groups, work, functional = watched.groups, torch.distributed.Work, functional_collectives()
    wait = work, "wait", _timed(watched, work.wait, groups.of_work)
    wait_tensor = functional, "wait_tensor", _timed(watched, functional.wait_tensor, groups.of_tensor)
    _replace(watched, wait, wait_tensor, *groups.replacements())


def _timed(watched: Watch, original: Callable[..., Any], group_of: Callable[[Any], Group | None]) -> Callable[..., Any]:
    thread = threading.get_ident()

    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        # Other threads save checkpoints or gather metrics while the loop runs.
        if torch.compiler.is_compiling() or threading.get_ident() != thread:
            return original(*args, **kwargs)
        group, began = None, watched.begins()
        if began is not None and args:
            with watched.recorder.reporting("watch"):
                group = group_of(args[0])
        try:
            return original(*args, **kwargs)
        finally:
            watched.ends(began, group)

    return timed
