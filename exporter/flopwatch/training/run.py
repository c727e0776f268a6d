"""`Run`: the class through which a training loop reports its steps to flopwatch.

step() only records an event, in a few hundred nanoseconds, or some microseconds on CUDA. Another thread adds events up
and pushes totals (push/). No method raises: errors are counted in training_hook_errors_total and logged once. Call the
methods on the training loop's thread, because activities on other threads are ignored.
"""

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
from typing import TYPE_CHECKING, Any, TypeVar, cast

from flopwatch.training import context_managers as contexts
from flopwatch.training.instruments import Instruments
from flopwatch.training.process import exit_reason, identity, launcher
from flopwatch.training.push.snapshot import Snapshots
from flopwatch.training.recorder import STEP, Recorder, Snapshot, ignore, text_of
from flopwatch.training.run_info import Arguments, declare, declare_flops, declare_peak
from flopwatch.training.timeline import DECLARED
from flopwatch.training.totals import PackedFlops, Totals, Work, amount, number

if TYPE_CHECKING:
    from flopwatch.training.push.pusher import Pusher
    from flopwatch.training.terminal import Terminal

log = logging.getLogger("flopwatch")

STATUSES = ("completed", "stopped", "preempted", "resized", "failed")

_Method = TypeVar("_Method", bound=Callable[..., Any])
_T = TypeVar("_T")


def _guarded(fallback: Callable[[], object]) -> Callable[[_Method], _Method]:
    """Return a decorator for methods of Run that reports an exception and then returns `fallback()`."""

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def guarded(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self.recorder.failed(method.__name__, error)
                return fallback()

        return cast(_Method, guarded)

    return decorate


class Run:
    """Reporter of one rank of a run. Make it once, after torch.distributed.init_process_group if the job calls that.

    name             of the run, the same in all its restarts. Else FLOPWATCH_RUN, else the scheduler's job
    flops_per_token  model FLOPs of one token, forward and backward, or a `Transformer` if samples are packed
    convention       label for how these FLOPs were counted: causal, full or palm (see flops/)
    hardware_flops_per_token   FLOPs of one token including recomputation, for HFU
    dtype            of the matrix multiplications, for which the peak of this rank's card is looked up
    peak_flops       FLOP/s in place of that peak. `peak_source` is their origin, for a label that begins "override"
    replica_ranks    ranks that share a model replica: tensor x pipeline x context parallel. Detected for DDP and FSDP
    parallel         DeviceMesh, or {"dp": (rank, size), "tp": ..., "pp", "cp", "ep"}. Detected for Megatron
    model            DDP, FSDP2 or any module, whose waits for other ranks and phases are measured
    gpu_uuid         of this rank's GPU. Else FLOPWATCH_GPU_UUID, else torch's current CUDA device
    owner, team      of the run, for alerts. Else FLOPWATCH_OWNER, FLOPWATCH_TEAM, else the scheduler's
    page             "always" if alerts of a small run may page too. Else FLOPWATCH_PAGE
    submitted_at     Unix time at which the run was submitted, for ETTR. Else FLOPWATCH_SUBMITTED_AT, else Slurm's
    endpoint         URL of the node's exporter. Else FLOPWATCH_ENDPOINT, else http://127.0.0.1:4318
    push_interval    seconds between pushes. Else FLOPWATCH_PUSH_INTERVAL, else 5
    step_source      label for what calls step(): manual, optimizer or trainer
    clock, process   function that returns monotonic seconds, and this process as the kernel sees it
    before           (activity, begin, end) on `clock` of what this process did before the run was made

    The rest is detected (process/launcher.py) or set by FLOPWATCH_* variables, such as tokens (docs/training.md).
    FLOPWATCH_DISABLE=1 disables pushing. A new Run ends an earlier one in the same process.
    """

    _newest: "Run | None" = None  # the one that pushes
    # Defaults for the case that __init__ fails. The methods then do nothing.
    recorder = Recorder()
    name = attempt = ""
    rank, world_size, local_rank = 0, 1, 0
    ended_by = ""  # label of the reason for the end, if the caller sets it
    terminal: "Terminal | None" = None  # of `flopwatch run --top`, which shows each snapshot
    _activities: Mapping[str, AbstractContextManager[None]] = {}
    _instruments: Instruments | None = None
    _pusher: "Pusher | None" = None
    _ending: str | None = None  # status passed to the first finish()
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
        launch, host, name = self._info.launch, self._info.host, given.text(name, "FLOPWATCH_RUN")
        own = identity.settle(launch, host, start, _agree, name, attempt, rank, world_size, local_rank)
        self._info.identity = own
        self.name, self.attempt = own.name, own.attempt
        self.rank, self.world_size, self.local_rank = own.rank, own.world_size, own.local_rank
        recorder.rank, recorder.totals.world_size = own.rank, own.world_size
        self._begin(parallel, replica_ranks, before)
        if model is not None:
            self.watch(model)
        self._start_pushing(endpoint, push_interval)

    def _begin(self, parallel: object, replica_ranks: float | None, before: Iterable[tuple[str, float, float]]) -> None:
        """Start recording, and end an earlier Run of this process that still pushes."""
        recorder = self.recorder
        replica = self._arguments.number("replica_ranks", replica_ranks)
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
            # Before this run attaches to PyTorch, so that hooks of the earlier run never enclose those of this one.
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
        failed = functools.partial(recorder.failed, "push")
        self._pusher = Pusher(wire, seconds, self.snapshot, self._at_exit, failed, info.host)
        recorder.pushing = True
        self._pusher.start()
        if self._instruments is not None:
            self._instruments.attach(None)

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
        # Without named parameters: most loops pass only tokens, and parsing names costs time in every step.
        def step(self, tokens=None, *extra, **more):
            """Record one optimizer step. Call it once after each optimizer update.

            tokens           unpadded tokens that this rank's model replica consumed in all micro-batches together
            global_tokens    tokens of all ranks, in place of `tokens`
            sum_len_squared  for packed samples: sum of their squared lengths, for the same tokens
            flops            FLOPs of the whole replica, in place of tokens x flops_per_token
            samples          samples that the replica consumed
            loss, grad_norm  Python floats, shown as gauges. NaN and infinity are also counted
            """
            recorder = self.recorder
            try:
                now = recorder.step_mark()
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
        """Return an iterable over `loader` that records the time spent waiting for each batch as data stall."""
        return contexts.Batches(self.recorder, loader)

    def waiting_for_batch(self) -> None:
        """Record that the loop begins to wait for its next batch. Only needed without `batches()`."""
        self.recorder.note("batches", Totals.waits_for_batch, get_ident())

    def got_batch(self) -> None:
        """Record that the batch has arrived. Only needed without `batches()`."""
        self.recorder.note("batches", Totals.got_batch, get_ident())

    def end_of_batches(self) -> None:
        """Record that the loop over batches was left. Only needed without `batches()`."""
        self.recorder.note("batches", Totals.end_of_batches, get_ident())

    def activity(self, name: str = "", *extra: object) -> AbstractContextManager[None]:
        """Return a context manager whose time counts as the activity `name`, one of timeline.DECLARED, or `other`."""
        try:
            if not extra:
                return self._activities[name]
        except Exception:
            pass  # an unknown name, or one that cannot be a key
        known = ", ".join(DECLARED)
        self.recorder.failed("activity", ValueError(f"unknown {text_of(name)} counts as other; write one of {known}"))
        return self._activities.get("other", nullcontext())

    @_guarded(nullcontext)
    def checkpoint(self, step: int | None = None) -> AbstractContextManager[None]:
        """Return a context manager around a blocking save of the checkpoint of `step`, by default the last one.

        Unless the block raises, the checkpoint must be durable when it ends. For a save that goes on in the background,
        put activity("checkpoint_save") around its blocking part. Then call checkpoint_goes_on(), or put
        background_save() around the rest and call checkpoint_committed() at its end.
        """
        return contexts.Checkpoint(self.recorder, None if step is None else int(amount("step", step)))

    @_guarded(nullcontext)
    def host_to_device(self) -> AbstractContextManager[None]:
        """Return a context manager that records a batch's copy to the device as a phase, on the copying stream."""
        return contexts.Copy(self.recorder)

    @_guarded(nullcontext)
    def background_save(self) -> AbstractContextManager[None]:
        """Return a context manager, usable on any thread, around a checkpoint save that runs while training goes on."""
        return contexts.Background(self.recorder)

    # A rank that measures fewer waits than others looks like the straggler.
    @_guarded(nullcontext)
    def collective_wait(self, group: Any = None) -> AbstractContextManager[None]:
        """Return a context manager around a wait for other ranks that `watch()` misses. Use it on all ranks alike.

        `group` is the process group of those ranks, None for all ranks of the job.
        """
        instruments = self._instruments
        return contexts.Wait(self.recorder, None if instruments is None else instruments.of_group(group))

    @_guarded(lambda: None)
    def restored(self, step: int | None, tokens: float | None = None) -> None:
        """Report the step of a restored checkpoint, and the tokens its replica had consumed, before the next step.

        With step=None the position is unknown, and the run has no position series and no goodput.
        """
        position = None if step is None else int(amount("step", step))
        self.recorder.restored(position, None if tokens is None else amount("tokens", tokens))

    @_guarded(lambda: None)
    def checkpoint_committed(self, step: int) -> None:
        """Report that the checkpoint of `step` is durable, so that a restart could begin from it."""
        self.recorder.committed(int(amount("step", step)))

    @_guarded(lambda: None)
    def checkpoint_goes_on(self, future: Future[Any], step: int | None) -> None:
        """Report a background save of `step`. It is durable once `future` succeeds, but never if `step` is None."""
        contexts.commit_when_done(self.recorder, future, None if step is None else int(amount("step", step)))

    @_guarded(lambda: None)
    def logged(self, *, loss: float | None = None, grad_norm: float | None = None) -> None:
        """Report the last step's loss and gradient norm after step(), for trainers that log them later."""
        self.recorder.record((Totals.logged, 0.0, self._work(None, {"loss": loss, "grad_norm": grad_norm})))

    @_guarded(lambda: None)
    def watch(self, model: object) -> None:
        """Measure a model's waits for other ranks and its phases, and count its FLOPs unless they are declared."""
        if not self.recorder.finished and self._instruments is not None:
            self._instruments.watch(model)

    @_guarded(lambda: None)
    def watch_checkpoints(self) -> None:
        """Record checkpoints that PyTorch's own functions save and load. Use it instead of `checkpoint()`."""
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
            from flopwatch.training.torch import checkpoints

            with self.recorder.reporting("finish"):
                checkpoints.commit_pending(self.recorder, status)
        self._end()
        self._push_last(status)

    @property
    def position(self) -> int | None:
        """Return the run's completed steps, restored ones included. None if unknown, or before the first step."""
        return self.recorder.position

    @property
    def alive(self) -> bool:
        """Return whether recorded events will still be pushed."""
        return self.recorder.alive

    def snapshot(self, *, last: bool = False) -> Snapshot:
        """Return totals and gauges up to now as the content of one push. If `last`, do not wait for the device."""
        taken = self._snapshots.take(last=last)
        if self.terminal is not None:
            with self.recorder.reporting("top"):
                self.terminal.show(taken, last=last)
        return taken

    def _work(self, tokens: object, more: Mapping[str, object]) -> Work:
        """Return the valid arguments of step(), and report each invalid one."""
        recorder = self.recorder
        valid: dict[str, float] = {}
        for name, value in {"tokens": tokens, **more}.items():
            try:
                if name not in (known := Work._fields):
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
            if self.rank == 0 and self.recorder.step_source != "manual" and self.recorder.steps_taken:
                from flopwatch.training.progress import summary

                with self.recorder.reporting("summary"):
                    print(summary(self.name, status, last, self._pusher.url, self._pusher.delivered), file=sys.stderr)


def _agree(attempt: str, rank: int, started: float) -> str | None:
    """Return the attempt's name that rank 0 shares through torch's store. None if rank 0 does not share one in time."""
    from flopwatch.training import torch as torch_hook

    return torch_hook.agreed(attempt, rank, started)


def _silence_child() -> None:
    """Disable recording in forked children (DataLoader workers), because the push thread does not survive a fork."""
    if Run._newest is not None:
        recorder = Run._newest.recorder
        recorder.finished, recorder.record = True, ignore  # later steps are no errors


os.register_at_fork(after_in_child=_silence_child)
