"""`Run`: what a training loop calls to report its steps to flopwatch.

A step costs a few hundred nanoseconds. Events go to the recorder (recorder.py), which a thread of its own adds up and
pushes (push/). No method raises into the loop, whatever its arguments: errors are counted in
training_hook_errors_total and logged once. Call the methods from the training loop's thread; activities on another
thread are ignored.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from flopwatch.training import context_managers as contexts
from flopwatch.training.instruments import Instruments
from flopwatch.training.process import exit_reason, identity, launcher
from flopwatch.training.push.snapshot import Snapshots
from flopwatch.training.recorder import STEP, Recorder, Snapshot, ignore, silence, text_of
from flopwatch.training.run_info import Arguments, declare, declare_flops, declare_peak
from flopwatch.training.timeline import DECLARED
from flopwatch.training.totals import PackedFlops, Totals, Work, amount, number

if TYPE_CHECKING:
    from flopwatch.training.push.pusher import Pusher

log = logging.getLogger("flopwatch")

STATUSES = ("completed", "stopped", "preempted", "resized", "failed")

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")


def _guarded(
    fallback: Callable[[], _R],
) -> Callable[[Callable[Concatenate[Any, _P], _R]], Callable[Concatenate[Any, _P], _R]]:
    """Catch every exception of a method of Run, report it, and return `fallback()` instead."""

    def decorate(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
        @functools.wraps(method)
        def guarded(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self.recorder.failed(method.__name__, error)
                return fallback()

        return guarded

    return decorate


def _empty() -> AbstractContextManager[None]:
    return nullcontext()


class Run:
    """One rank of a training run; make it once, after torch.distributed.init_process_group if there is one.

    name             the run, the same in all its restarts; else FLOPWATCH_RUN, else the scheduler's job
    flops_per_token  model FLOPs of one token, forward and backward, or a `Transformer` if samples are packed
    convention       how those were counted: causal, full or palm (see flops/); a label
    hardware_flops_per_token   with recomputation, for HFU; from the declared policy
    dtype            of the matrix multiplications; the card's peak is looked up for it, unless `peak_flops` (FLOP/s
                     of this rank's card) is given, with its origin in `peak_source`; the label then begins "override"
    replica_ranks    ranks that share one model replica (tensor x pipeline x context parallel; expert parallel does
                     not count); detected for one rank, DDP, FSDP and DTensor
    parallel         this rank's coordinates: a torch DeviceMesh, or {"dp": (rank, size), "tp": ..., "pp", "cp", "ep"};
                     detected where Megatron set them up
    model            the model, whose waits for other ranks and phases are measured: DDP, FSDP2, or any module
    gpu_uuid         this rank's GPU; else FLOPWATCH_GPU_UUID, else torch's current CUDA device
    owner, team      owner of the run, for alerts; else FLOPWATCH_OWNER, FLOPWATCH_TEAM, else the scheduler's
    page             "always" if its alerts may page though it is small; else FLOPWATCH_PAGE
    submitted_at     when the run was submitted, as Unix time; else FLOPWATCH_SUBMITTED_AT; without it there is no ETTR
    endpoint         the node's exporter; else FLOPWATCH_ENDPOINT, else http://127.0.0.1:4318
    step_source      what calls step(): manual, optimizer or trainer; a label
    clock, process   monotonic seconds, and what the kernel knows of this process
    before           activities of this process before there was a run: name, begin and end on the clock

    The rest is detected: rank, world_size, local_rank and attempt from the launcher (launcher.py); tenant from
    FLOPWATCH_TENANT, else Slurm's account or the pod's namespace; push_interval (seconds) from
    FLOPWATCH_PUSH_INTERVAL, a bearer token from FLOPWATCH_TOKEN_FILE, other headers from FLOPWATCH_HEADERS and
    FLOPWATCH_HEADERS_FILE, the authority of an https endpoint from FLOPWATCH_CA_FILE, the host's name from
    FLOPWATCH_HOST. FLOPWATCH_DISABLE=1 disables pushing. A newer Run in the same process takes over from the older.
    """

    _newest: Run | None = None  # the one that pushes
    # Defaults in case __init__ itself fails: the methods then do nothing.
    recorder = Recorder()
    name = attempt = ""
    rank, world_size, local_rank = 0, 1, 0
    ended_by = ""  # reason of the end, where the caller knows it better than Python
    _activities: Mapping[str, AbstractContextManager[None]] = {}
    _instruments: Instruments | None = None
    _pusher: Pusher | None = None
    _ending: str | None = None  # the status that the first finish() was given
    _watches_checkpoints = False

    @_guarded(lambda: None)
    def __init__(
        self,
        name: str | None = None,
        *,
        tenant: str | None = None,
        attempt: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        local_rank: int | None = None,
        flops_per_token: float | PackedFlops | None = None,
        convention: str = "causal",
        hardware_flops_per_token: float | None = None,
        dtype: str = "bf16",
        peak_flops: float | None = None,
        peak_source: str | None = None,
        replica_ranks: int | None = None,
        parallel: object = None,
        model: object = None,
        gpu_uuid: str | None = None,
        owner: str | None = None,
        team: str | None = None,
        page: str | None = None,
        submitted_at: float | None = None,
        endpoint: str | None = None,
        push_interval: float | None = None,
        step_source: str = "manual",
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        process: launcher.Process | None = None,
        before: Iterable[tuple[str, float, float]] = (),
    ) -> None:
        process = launcher.this_process() if process is None else process
        self.recorder = recorder = Recorder(clock, clock() - process.age)
        recorder.step_source = step_source
        self._arguments = given = Arguments(environ, recorder.failed)
        facts = {"tenant": tenant, "gpu_uuid": gpu_uuid, "owner": owner, "team": team, "page": page}
        start = time.time() - process.age
        self._info = declare(given, process, start, dtype, submitted_at, **facts)
        declare_peak(given, self._info, peak_flops, peak_source)
        declare_flops(given, recorder.totals, flops_per_token, convention, hardware_flops_per_token)
        self._identify(given.text(name, "FLOPWATCH_RUN"), attempt, rank, world_size, local_rank)
        self._begin(parallel, replica_ranks, before)
        if model is not None:
            self.watch(model)
        self._start_pushing(endpoint, push_interval)

    def _identify(
        self, name: str, attempt: str | None, rank: int | None, world_size: int | None, local_rank: int | None
    ) -> None:
        """Find out the run, the attempt and the rank of this process."""
        info, recorder = self._info, self.recorder
        start = info.start_unix
        own = identity.settle(info.launch, info.host, start, _agree, name, attempt, rank, world_size, local_rank)
        info.identity = own
        self.name, self.attempt = own.name, own.attempt
        self.rank, self.world_size, self.local_rank = own.rank, own.world_size, own.local_rank
        recorder.rank, recorder.world_size = own.rank, own.world_size
        recorder.totals.world_size = own.world_size

    def _begin(self, parallel: object, replica_ranks: float | None, before: Iterable[tuple[str, float, float]]) -> None:
        """Start recording, and take over from an older run of this process."""
        recorder = self.recorder
        replica = self._arguments.number(replica_ranks=replica_ranks)
        if replica is not None and self.world_size % replica != 0:
            self._arguments.refuse(
                f"replica_ranks={replica_ranks!r} is ignored: it does not divide the {self.world_size} ranks"
            )
            replica = None
        recorder.totals.replica_ranks = replica
        instruments = Instruments(recorder, self._info)
        instruments.find_parallel(parallel)
        if recorder.totals.replica_ranks is None and self.world_size == 1:
            recorder.totals.replica_ranks = 1
        self._snapshots = Snapshots(recorder, self._info)
        self._activities = {name: contexts.Activity(recorder, name) for name in DECLARED}
        self._instruments = instruments
        recorder.begin()
        for activity, began, ended in before:
            recorder.enter(activity, at=began)
            recorder.leave(activity, at=ended)
        older, Run._newest = Run._newest, self
        if older is not None and older._pusher is not None and not older.recorder.finished:
            # Before anything else is attached to PyTorch, so that the older run's hooks are not around ours.
            log.warning("a newer Run in this process takes over from %s; call finish() on the older one", older.name)
            older._end()
            older._pusher.stop(None)
        instruments.find_card(expected=False)
        instruments.follow_device()

    def _start_pushing(self, endpoint: str | None, interval: float | None) -> None:
        given = self._arguments
        if given.text(None, "FLOPWATCH_DISABLE") not in ("", "0"):
            return
        # Imported here, so that a broken opentelemetry or protobuf costs the metrics and not the training.
        from flopwatch.training.process.stacks import Stacks
        from flopwatch.training.push.otlp import Wire
        from flopwatch.training.push.pusher import Pusher

        recorder, info = self.recorder, self._info
        recorder.poll(Stacks(lambda: f"run {self.name} attempt {self.attempt} rank {self.rank} on {info.host}").poll)
        text = given.text(None, "FLOPWATCH_PUSH_INTERVAL") or "5" if interval is None else interval
        try:
            seconds = max(0.1, float(text))
        except ValueError:
            raise ValueError(f"push interval {text!r}: write seconds, for example 5; nothing is pushed") from None
        token, headers, ca = (
            Path(file) if (file := given.text(None, variable)) else None
            for variable in ("FLOPWATCH_TOKEN_FILE", "FLOPWATCH_HEADERS_FILE", "FLOPWATCH_CA_FILE")
        )
        url = given.text(endpoint, "FLOPWATCH_ENDPOINT") or "http://127.0.0.1:4318"
        wire = Wire(url, info.start_unix, token, given.text(None, "FLOPWATCH_HEADERS"), headers, ca)
        self._pusher = Pusher(wire, seconds, self.snapshot, self._at_exit, functools.partial(recorder.failed, "push"))
        recorder.pushing = True
        self._pusher.start()
        if self._instruments is not None:
            self._instruments.attach(None)

    # What the training loop calls.

    if TYPE_CHECKING:

        def step(  # noqa: D102 -- the docstring is below, where help() finds it
            self,
            tokens: float | None = None,
            *,
            global_tokens: float | None = None,
            sum_len_squared: float | None = None,
            flops: float | None = None,
            samples: float | None = None,
            loss: float | None = None,
            grad_norm: float | None = None,
        ) -> None: ...

    else:
        # Without named arguments: most loops pass the tokens alone, and parsing names costs time in every step.
        def step(self, tokens=None, *extra, **more):
            """Record one optimizer step. Call it once after each optimizer update.

            tokens           unpadded tokens this rank's model replica consumed, all micro-batches together
            global_tokens    in its place: those of all ranks
            sum_len_squared  for packed samples: the sum of their squared lengths, of the same tokens
            flops            in place of tokens x flops_per_token: what the whole replica needed
            samples          samples the replica consumed
            loss, grad_norm  Python floats, shown as gauges; those that are not finite are counted
            """
            recorder = self.recorder
            try:
                now = recorder.mark()
                recorder.steps_taken = taken = recorder.steps_taken + 1
                if not more and tokens.__class__ is int and tokens >= 0:
                    recorder.record((STEP, now, tokens))
                else:
                    recorder.record((STEP, now, self._work(tokens, more)))
                if taken >= recorder.check_at or extra:
                    self._look_after(taken, extra)
            except Exception as error:
                recorder.failed("step", error)

    def batches(self, loader: Iterable[_T]) -> contexts.Batches[_T]:
        """Wrap `loader` so that time spent waiting for a batch is recorded as data stall."""
        return contexts.Batches(self.recorder, loader)

    def waiting_for_batch(self) -> None:
        """Record that the loop asks for its next batch; `batches` does this."""
        self.recorder.note("batches", Totals.waits_for_batch, get_ident())

    def got_batch(self) -> None:
        """Record that the batch has arrived; `batches` does this."""
        self.recorder.note("batches", Totals.got_batch, get_ident())

    def end_of_batches(self) -> None:
        """Record that the loop over batches was left; `batches` does this."""
        self.recorder.note("batches", Totals.end_of_batches, get_ident())

    def activity(self, name: str = "", *extra: object) -> AbstractContextManager[None]:
        """Return a context manager whose time counts as this activity, one of timeline.DECLARED."""
        try:
            if not extra:
                return self._activities[name]
        except Exception:
            pass  # an unknown name, or one that cannot be a key
        known = ", ".join(DECLARED)
        self.recorder.failed("activity", ValueError(f"{text_of(name)} counts as other; write one of {known}"))
        return self._activities.get("other", nullcontext())

    @_guarded(_empty)
    def checkpoint(self, step: int | None = None) -> AbstractContextManager[None]:
        """Return a context manager around a blocking save of the checkpoint of `step`, by default the last one.

        The checkpoint counts as committed when the context is left without an exception: it must be durable then. If
        the save continues in the background, use activity("checkpoint_save") around the blocking part, and then
        checkpoint_goes_on(), or background_save() around the rest and checkpoint_committed() at its end.
        """
        return contexts.Checkpoint(self.recorder, None if step is None else int(amount("step", step)))

    @_guarded(_empty)
    def host_to_device(self) -> AbstractContextManager[None]:
        """Return a context manager around the copy of a batch to the device, on the stream that copies it: a phase."""
        return contexts.Copy(self.recorder)

    @_guarded(_empty)
    def background_save(self) -> AbstractContextManager[None]:
        """Return a context manager, for any thread, around a checkpoint save while training goes on."""
        return contexts.Background(self.recorder)

    @_guarded(_empty)
    def collective_wait(self) -> AbstractContextManager[None]:
        """Return a context manager around a wait for other ranks, for frameworks that `watch` does not know.

        Every rank must measure the same waits, or the one that measures fewer looks late.
        """
        return contexts.Wait(self.recorder)

    @_guarded(lambda: None)
    def restored(self, step: int | None, tokens: float | None = None) -> None:
        """Report the step, and the replica's tokens, that a checkpoint restored; the next step follows it.

        With step=None the position is unknown: there are no position series and no goodput.
        """
        position = None if step is None else int(amount("step", step))
        self.recorder.restored(position, None if tokens is None else amount("tokens", tokens))

    @_guarded(lambda: None)
    def checkpoint_committed(self, step: int) -> None:
        """Report that the checkpoint of this step is durable: a restart could begin from it."""
        self.recorder.committed(int(amount("step", step)))

    @_guarded(lambda: None)
    def checkpoint_goes_on(self, future: Future[Any], step: int | None) -> None:
        """Report a background save of this step that is durable once `future` is done without an error.

        With step=None it is never durable, because a restart would not know its step.
        """
        contexts.commit_when_done(self.recorder, future, None if step is None else int(amount("step", step)))

    @_guarded(lambda: None)
    def logged(self, *, loss: float | None = None, grad_norm: float | None = None) -> None:
        """Report loss and grad_norm after their step was recorded, as trainers do that log them later."""
        self.recorder.record((Totals.logged, 0.0, self._work(None, {"loss": loss, "grad_norm": grad_norm})))

    @_guarded(lambda: None)
    def watch(self, model: object) -> None:
        """Measure how long this model waits for other ranks, and the phases of its steps; may be repeated."""
        if not self.recorder.finished and self._instruments is not None:
            self._instruments.watch(model)

    @_guarded(lambda: None)
    def watch_checkpoints(self) -> None:
        """Detect PyTorch checkpoint saves and loads automatically; use instead of `checkpoint()`."""
        from flopwatch.training.torch import checkpoints

        checkpoints.attach(self.recorder)
        self._watches_checkpoints = True

    @_guarded(lambda: None)
    def finish(self, status: str = "completed") -> None:
        """Push a last time and report how the attempt ended: completed, stopped, preempted, resized or failed.

        `completed` and `stopped` end the run, the others only this attempt. Takes at most pusher.LAST_PUSH seconds.
        """
        if self._info.process.pid != os.getpid():
            return  # in a forked child, whose locks no thread will release
        if status not in STATUSES:
            raise ValueError(f"finish({status!r}) was ignored; write one of {', '.join(STATUSES)}")
        if self.recorder.finished or self._ending is not None:
            raise RuntimeError("finish() was called before; only the first call counts")
        self._ending = status
        if self._watches_checkpoints:
            self._commit_pending(status)
        self._end()
        self._push_last(status)

    @property
    def position(self) -> int | None:
        """Return the completed steps of the run, restored ones included; None before the first step, or if unknown."""
        return self.recorder.position

    @property
    def alive(self) -> bool:
        """Return whether recorded events will still be pushed."""
        return self.recorder.alive

    def snapshot(self, *, last: bool = False) -> Snapshot:
        """Return everything counted up to now."""
        return self._snapshots.take(last=last)

    def _work(self, tokens: object, more: Mapping[str, object]) -> Work:
        """Return the valid arguments of a step; report the others."""
        recorder = self.recorder
        valid: dict[str, float] = {}
        for name, value in {"tokens": tokens, **more}.items():
            try:
                if name not in (known := Work.__dataclass_fields__):
                    raise ValueError(f"{name}= is not an argument of step(); it takes {', '.join(known)}")
                if value is not None:
                    valid[name] = (number if name in ("loss", "grad_norm") else amount)(name, value)
            except ValueError as error:
                recorder.failed("step", error)
        if "sum_len_squared" in valid and recorder.totals.packed_flops is None:
            reason = "sum_len_squared= needs Run(flops_per_token=Transformer(...)) in place of a number"
            recorder.failed("step", ValueError(reason))
        return Work(**valid)

    def _look_after(self, taken: int, extra: tuple[object, ...]) -> None:
        """Do what only some steps need: the first step's set-up, the backlog, the choice of measured steps."""
        recorder = self.recorder
        if extra:
            recorder.failed("step", TypeError("step() takes tokens, and everything else by name"))
        if recorder.record is ignore:
            recorder.check_at = sys.maxsize
            return
        if taken == 1 and self._instruments is not None:
            recorder.totals.loop_thread = get_ident()
            self._instruments.first_step()
        recorder.check_backlog()
        recorder.schedule(taken)

    @_guarded(lambda: None)
    def _at_exit(self, status: str) -> None:
        """Finish as the interpreter ends, or complete a finish() that a signal handler's exit interrupted."""
        if self._ending is None:
            self.finish(status)
        elif self._info.process.pid == os.getpid():
            if not self.recorder.finished:
                self._end()
            self._push_last(self._ending)

    @_guarded(lambda: None)
    def _commit_pending(self, status: str) -> None:
        from flopwatch.training.torch import checkpoints

        checkpoints.commit_pending(self.recorder, status)

    def _end(self) -> None:
        self.recorder.end()
        if self._instruments is not None:
            self._instruments.remove()

    def _push_last(self, status: str) -> None:
        if self._pusher is not None:
            last = self.snapshot(last=True)
            last.resource["flopwatch.status"] = status
            if status != "completed" and (reason := self.ended_by or exit_reason.now()):
                last.resource["flopwatch.ended_by"] = reason
            self._pusher.stop(last)


def _agree(attempt: str, rank: int, started: float) -> str | None:
    """Return rank 0's name of the attempt through torch's store; None if rank 0 does not set it."""
    from flopwatch.training import torch as torch_hook

    return torch_hook.agreed(attempt, rank, started)


def _silence_child() -> None:
    """Disable recording in forked children (DataLoader workers): the push thread does not survive a fork."""
    if Run._newest is not None:
        silence(Run._newest.recorder)


os.register_at_fork(after_in_child=_silence_child)
