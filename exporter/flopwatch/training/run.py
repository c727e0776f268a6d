"""`Run`: what a training loop tells flopwatch, recorded by one append each and pushed by a thread of its own.

A step costs a few hundred nanoseconds: it reads the clock and appends to a deque; no lock, no device synchronisation,
no system call. What was recorded is added up in the thread that pushes (books.py, timeline.py); what the loop enters
and leaves is in contexts.py, what the end of a process says in pusher.py, ranks and attempts in identity.py.

No method raises, whatever it is given: errors are counted in training_hook_errors_total and logged once. Calls are to
come from the training loop's thread; an activity on another thread is not the loop's time and is ignored.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from flopwatch import catalogue
from flopwatch.catalogue import Metric
from flopwatch.flops import peaks
from flopwatch.training import context_managers
from flopwatch.training.context_managers import CHECK_BACKLOG
from flopwatch.training.process import exit_reason, identity, launcher, parallel
from flopwatch.training.process.stuck_frames import Standstill
from flopwatch.training.timeline import DECLARED
from flopwatch.training.totals import DURATION_BOUNDS, Books, Entry, Mark, PackedFlops, Work, amount, number

if TYPE_CHECKING:
    from flopwatch.training.push.pusher import Pusher

log = logging.getLogger("flopwatch")


def _signed(record: logging.LogRecord) -> bool:
    """Say who speaks where the job has set up no logging, and messages are printed bare."""
    if not logging.getLogger().handlers and not log.handlers:
        record.msg = f"flopwatch: {record.msg}"
    return True


log.addFilter(_signed)

STATUSES = ("completed", "stopped", "preempted", "resized", "failed")

# Entries the loop records at most until it adds them up itself, because the thread that should is held up elsewhere.
BACKLOG = 1 << 20  # some 100 MB, after hours of that
SLICE = 1 << 13  # entries it adds up at a time then, some 15 ms: more than come until it looks again

# Phases and waits are measured this often, in seconds: hooks take some 50 us in a step that is, so 0.01 % of the time.
MEASURED_EVERY = 0.5

# Looked up once: this is what a step pays for.
_STEP, _WAITS, _GOT = Books.step, Books.waits_for_batch, Books.got_batch

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")
DIFFERENT_ERRORS = 5  # of one kind from one method, that are logged
_logged: dict[tuple[str, type[BaseException]], set[str]] = {}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one push says: OTLP resource attributes, points by family, and (bounds, counts, sum) of step durations."""

    resource: dict[str, str | int | float]
    points: dict[Metric, list[tuple[dict[str, str], float]]]
    step_durations: tuple[tuple[float, ...], list[int], float] | None


def _guarded(
    otherwise: Callable[[], _R],
) -> Callable[[Callable[Concatenate[Any, _P], _R]], Callable[Concatenate[Any, _P], _R]]:
    """Let no error of the method, wrong arguments included, reach the training loop; return `otherwise()` instead."""

    def decorate(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
        @functools.wraps(method)
        def guarded(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self.failed(method.__name__, error)
                return otherwise()

        return guarded

    return decorate


def _nothing() -> None:
    return None


def _nowhere() -> str | None:
    return None


def _empty() -> AbstractContextManager[None]:
    return nullcontext()


def _ignored(_: Entry) -> None:
    return None


def _said(thing: object) -> str:
    """Return the text of an exception or an argument, and its type's name if even that fails."""
    try:
        return str(thing)
    except BaseException:
        return type(thing).__name__


class Run:
    """One rank of a training run; make it once, after torch.distributed.init_process_group if there is one.

    name             the run, the same in all its restarts; else FLOPWATCH_RUN, else the scheduler's job
    flops_per_token  model FLOPs of one token, forward and backward, or a `Transformer` if samples are packed
    convention       how those were counted: causal, full or palm (see flops/); a label
    hardware_flops_per_token   with recomputation, for HFU; from the declared policy
    dtype            of the matrix multiplications; the card's peak is looked up for it, unless `peak_flops` (FLOP/s
                     of this rank's card) is given, with `peak_source` saying where from; its label says "override"
    replica_ranks    ranks that share one model replica (tensor x pipeline x context parallel; expert parallel does
                     not count); known by itself for one rank, DDP, FSDP and DTensor
    parallel         this rank's coordinates: a torch DeviceMesh, or {"dp": (rank, size), "tp": ..., "pp", "cp", "ep"};
                     found by itself where Megatron set them up
    model            the model, whose waits for other ranks and phases are measured: DDP, FSDP2, or any module
    gpu_uuid         this rank's GPU; else FLOPWATCH_GPU_UUID, else torch's current CUDA device
    owner, team      who runs it, for alerts; else FLOPWATCH_OWNER, FLOPWATCH_TEAM, else the scheduler's
    page             "always" if its alerts may page though it is small; else FLOPWATCH_PAGE
    submitted_at     when the run was submitted, as Unix time; else FLOPWATCH_SUBMITTED_AT; without it there is no ETTR
    endpoint         the node's exporter; else FLOPWATCH_ENDPOINT, else http://127.0.0.1:4318
    step_source      who tells of steps: manual, optimizer or trainer; a label
    clock, process   monotonic seconds, and what the kernel knows of this process
    before           activities of this process before there was a run: name, begin and end on the clock

    The rest is found out: rank, world_size, local_rank and attempt from the launcher (launcher.py); tenant from
    FLOPWATCH_TENANT, else Slurm's account or the pod's namespace; push_interval (seconds) from
    FLOPWATCH_PUSH_INTERVAL, a bearer token from FLOPWATCH_TOKEN_FILE, other headers from FLOPWATCH_HEADERS and
    FLOPWATCH_HEADERS_FILE, the authority of an https endpoint from FLOPWATCH_CA_FILE, the host's name from
    FLOPWATCH_HOST. FLOPWATCH_DISABLE=1 turns the pushing off. A newer Run in the same process takes over
    from the older.
    """

    _newest: Run | None = None  # which pushes
    # What the methods need, should __init__ itself fail: they then do nothing.
    clock: Callable[[], float] = staticmethod(time.monotonic)
    mark: Callable[[], Mark] = staticmethod(time.monotonic)
    _record: Callable[[Entry], None] = staticmethod(_ignored)
    _books = Books(0.0, lambda what, error: None)
    _activities: Mapping[str, AbstractContextManager[None]] = {}
    _errors = 0
    _taken = 0  # steps
    # The step restored, None if nobody knows it, and the steps taken before that; one object, as any thread reads it.
    _origin: tuple[int | None, int] | None = None
    _check_at = 1  # the step at which to look after what need not be looked after at every step
    _pusher: Pusher | None = None
    _finished = False
    _ending: str | None = None  # what the first finish() was given
    _place: parallel.Parallel | None = None
    rank = 0
    world_size = 1
    measuring = True  # phases and waits in the open step, which is so every `measure_every` steps
    _measure_every = 1
    _measures_by_time = True
    _instruments: tuple[Any, ...] = ()  # with remove(), of all that PyTorch tells; none until it is in use
    _watched: Mapping[int, tuple[Any, ...]] = {}  # the same, of each model by its id
    _watches_checkpoints = False
    ended_by = ""  # where that is known better than Python tells at the end
    in_wait = False  # in the loop's thread: a wait inside another counts once

    @_guarded(_nothing)
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
        self._process = launcher.this_process() if process is None else process
        start = clock() - self._process.age
        self._books = books = Books(start, self.failed)
        self._start, self._start_unix = start, time.time() - self._process.age
        self._lock = threading.Lock()  # of the books; the loop never waits for it
        self._polls: list[Callable[[], None]] = []
        self._standstill = Standstill()
        self._set: dict[tuple[Metric, tuple[tuple[str, str], ...]], float] = {}
        self._no_peak_because: str | None = None
        self._dtype, self._step_source, self._flops_source = dtype, step_source, "declared"
        books.convention = self._one_of(("causal", "full", "palm"), convention=convention) or "unknown"
        if hasattr(flops_per_token, "flops"):
            # By an unknown convention they cannot be counted.
            books.packed_flops = flops_per_token if books.convention != "unknown" else None
        else:
            books.flops_per_token = self._checked(flops_per_token=flops_per_token)
        books.hardware_flops_per_token = self._checked(hardware_flops_per_token=hardware_flops_per_token)
        self._peak = self._checked(peak_flops=peak_flops)
        self._peak_source = "" if self._peak is None else peaks.override(self._peak, peak_source or "").source
        if peak_source is not None and peak_flops is None:
            self.failed("__init__", ValueError("peak_source= is ignored: it goes with peak_flops="))
        if submitted_at is None:
            submitted_at = self._unix_time(environ.get("FLOPWATCH_SUBMITTED_AT"))
        self._submitted_at = self._checked(submitted_at=submitted_at)

        def text(argument: str | None, variable: str) -> str:
            return environ.get(variable, "") if argument is None else str(argument)

        self._environ = environ
        self._gpu_uuid = text(gpu_uuid, "FLOPWATCH_GPU_UUID")
        self._page = self._one_of(("always", ""), page=text(page, "FLOPWATCH_PAGE")) or ""
        self._host = text(None, "FLOPWATCH_HOST") or socket.gethostname()
        launch = launcher.launch(environ, self._host, self._process)
        self._tenant = launcher.clean(launch.tenant if tenant is None else str(tenant))
        self._owner = launch.owner if owner is None else str(owner)
        self._team = launch.team if team is None else str(team)
        who = identity.settle(
            launch,
            self._host,
            self._start_unix,
            name=text(name, "FLOPWATCH_RUN"),
            attempt=attempt,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
        )
        self.name, self.attempt = who.name, who.attempt
        self.rank, self.world_size, self.local_rank = who.rank, who.world_size, who.local_rank
        self._submission = launcher.Submission(environ)
        books.world_size = self.world_size
        books.replica_ranks = self._checked(replica_ranks=replica_ranks)
        if books.replica_ranks is not None and self.world_size % books.replica_ranks != 0:
            self.failed(
                "__init__",
                ValueError(
                    f"replica_ranks={replica_ranks!r} is ignored: {self.world_size} ranks "
                    "are no whole number of replicas of so many"
                ),
            )
            books.replica_ranks = None
        self._find_place(parallel)
        if books.replica_ranks is None and self.world_size == 1:
            books.replica_ranks = 1
        self._activities = {name: context_managers.Activity(self, name) for name in DECLARED}
        self.clock = self.mark = clock
        self._record = books.entries.append
        for activity, began, ended in before:
            self.enter(activity, at=began)
            self.leave(activity, at=ended)
        self._take_over()
        self._find_card(expected=False)
        self._follow_device()
        if model is not None:
            self.watch(model)
        self._start_pushing(
            text(endpoint, "FLOPWATCH_ENDPOINT") or "http://127.0.0.1:4318",
            text(None, "FLOPWATCH_PUSH_INTERVAL") or "5" if push_interval is None else push_interval,
            text(None, "FLOPWATCH_HEADERS"),
            text(None, "FLOPWATCH_DISABLE"),
            *(text(None, name) for name in ("FLOPWATCH_TOKEN_FILE", "FLOPWATCH_HEADERS_FILE", "FLOPWATCH_CA_FILE")),
        )
        if self._pusher is not None:
            self._instrument(None)

    # What the training loop calls.

    if TYPE_CHECKING:

        def step(
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
        # Not the arguments one by one: most loops give the tokens alone, and this is what they pay for at every step.
        def step(self, tokens=None, *extra, **more):
            """Count one optimizer step; call it once per update, after it.

            tokens           unpadded tokens this rank's model replica consumed, all micro-batches together
            global_tokens    in its place: those of all ranks
            sum_len_squared  for packed samples: the sum of their squared lengths, of the same tokens
            flops            in place of tokens x flops_per_token: what the whole replica needed
            samples          samples the replica consumed
            loss, grad_norm  Python floats, to be shown; those that are not finite are counted
            """
            try:
                now = self.mark()
                self._taken = taken = self._taken + 1
                if not more and tokens.__class__ is int and tokens >= 0:
                    self._record((_STEP, now, tokens))
                else:
                    self._record((_STEP, now, self._work(tokens, more)))
                if taken >= self._check_at or extra:
                    self._look_after(taken, extra)
            except Exception as error:
                self.failed("step", error)

    def batches(self, loader: Iterable[_T]) -> context_managers.Batches[_T]:
        """Return the loader, with the time in which the loop waits for its batches told apart."""
        return context_managers.Batches(self, loader)

    def waiting_for_batch(self) -> None:
        """Tell that the loop asks for its next batch; `batches` does this."""
        try:
            self._record((_WAITS, self.mark(), get_ident()))
        except Exception as error:
            self.failed("batches", error)

    def got_batch(self) -> None:
        """Tell that the batch is there; `batches` does this."""
        try:
            self._record((_GOT, self.mark(), get_ident()))
        except Exception as error:
            self.failed("batches", error)

    def end_of_batches(self) -> None:
        """Tell that the loop over batches was left; `batches` does this."""
        self._note("batches", Books.end_of_batches, get_ident())

    def activity(self, name: str = "", *extra: object) -> AbstractContextManager[None]:
        """Return a context whose time is that activity's: one of timeline.DECLARED."""
        try:
            if not extra:
                return self._activities[name]
        except Exception:
            pass  # a name that is none, or cannot be one
        self.failed("activity", ValueError(f"{_said(name)} counts as other; write one of {', '.join(DECLARED)}"))
        return self._activities.get("other", nullcontext())

    @_guarded(_empty)
    def checkpoint(self, step: int | None = None) -> AbstractContextManager[None]:
        """Return a context around what blocks the loop to save a checkpoint of `step`, by default the last one.

        The checkpoint counts as committed when the context is left without an exception: what was written must be
        durable then. For one that goes on in the background use activity("checkpoint_save") around what blocks; then
        checkpoint_goes_on(), or background_save() around the rest and checkpoint_committed() at its end.
        """
        return context_managers.Checkpoint(self, None if step is None else int(amount("step", step)))

    @_guarded(_empty)
    def host_to_device(self) -> AbstractContextManager[None]:
        """Return a context around what copies a batch to the device, on the stream that copies it: a phase."""
        return context_managers.Copy(self)

    @_guarded(_empty)
    def background_save(self) -> AbstractContextManager[None]:
        """Return a context, for any thread, around what saves a checkpoint while training goes on."""
        return context_managers.Background(self)

    @_guarded(_empty)
    def collective_wait(self) -> AbstractContextManager[None]:
        """Return a context around what waits for other ranks, for frameworks that `watch` does not know.

        Every rank has to measure the same waits, or the one that measures fewer looks late.
        """
        return context_managers.Wait(self)

    @_guarded(_nothing)
    def restored(self, step: int | None, tokens: float | None = None) -> None:
        """Tell the step, and the replica's tokens, that a checkpoint restored; the next step is the one after it.

        Without a step nobody knows where the run is: its positions are absent, and there is no goodput.
        """
        position = None if step is None else int(amount("step", step))
        self._origin = position, self._taken
        self._record((Books.restored, 0.0, position, None if tokens is None else amount("tokens", tokens)))

    @_guarded(_nothing)
    def checkpoint_committed(self, step: int) -> None:
        """Tell that the checkpoint of this step is durable: a restart could begin from it."""
        self._record((Books.commit, 0.0, int(amount("step", step))))

    @_guarded(_nothing)
    def checkpoint_goes_on(self, future: Future[Any], step: int | None) -> None:
        """Tell that a checkpoint of this step is saved in the background, and durable if this future has no error.

        Without a step nothing is durable: no restart could tell where it begins.
        """
        position, background = None if step is None else int(amount("step", step)), self.background_save()

        def done(future: Future[Any]) -> None:
            background.__exit__(None, None, None)
            if not future.cancelled() and future.exception() is None and position is not None:
                self.checkpoint_committed(position)

        background.__enter__()
        future.add_done_callback(done)

    @_guarded(_nothing)
    def logged(self, *, loss: float | None = None, grad_norm: float | None = None) -> None:
        """Tell loss and grad_norm after their step was counted, as a trainer does that logs them later."""
        self._record((Books.logged, 0.0, self._work(None, {"loss": loss, "grad_norm": grad_norm})))

    @_guarded(_nothing)
    def watch(self, model: object) -> None:
        """Measure how long this model waits for other ranks, and the phases of its steps; anew if it was watched."""
        if self._finished:
            return
        from flopwatch.training import torch as torch_hook

        if self._books.replica_ranks is None:
            self._books.replica_ranks = torch_hook.replica_ranks(model)
        self._remove(*self._watched.get(id(model), ()))
        self._watched = {**self._watched, id(model): (torch_hook.watch(self, model),)}
        self._instrument(model)
        if self._place is not None and self._place.cp is not None and self._place.cp[1] > 1:
            self.uncountable("each rank has a part of the sequence, and attention reaches beyond it")
        elif not self.has_flops and isinstance(model, sys.modules["torch"].nn.Module):
            from flopwatch.training.flop_counter import count as counted

            self._watched = {**self._watched, id(model): (*self._watched[id(model)], counted.attach(self, model))}

    @_guarded(_nothing)
    def watch_checkpoints(self) -> None:
        """Tell by itself of what PyTorch saves and loads, as `flopwatch run` does, in place of `checkpoint`."""
        from flopwatch.training.autolog import attach

        attach.attach(self)
        self._watches_checkpoints = True

    @_guarded(_nothing)
    def finish(self, status: str = "completed") -> None:
        """Push a last time and say how the attempt ended: completed, stopped, preempted, resized or failed.

        `completed` and `stopped` end the run, the others this attempt only. Takes at most pusher.LAST_PUSH seconds.
        """
        if self._process.pid != os.getpid():
            return  # in a forked child: nothing to say about its parent, and locks that no thread will release
        if status not in STATUSES:
            raise ValueError(f"finish({status!r}) was ignored; write one of {', '.join(STATUSES)}")
        if self._finished or self._ending is not None:
            raise RuntimeError("finish() was called before; only the first call counts")
        self._ending = status
        if self._watches_checkpoints:
            self._last_words(status)
        self._end()
        self._push_last(status)

    def _push_last(self, status: str) -> None:
        if self._pusher is not None:
            last = self.snapshot(last=True)
            last.resource["flopwatch.status"] = status
            if status != "completed" and (by := self.ended_by or exit_reason.now()):
                last.resource["flopwatch.ended_by"] = by
            self._pusher.stop(last)

    @property
    def position(self) -> int | None:
        """Return the steps of the run completed, restored ones included; None before the first if none were told."""
        if self._origin is None:
            return self._taken or None
        restored, taken_before = self._origin
        return None if restored is None else restored + self._taken - taken_before

    # What instruments call, from any thread: torch/ and frameworks/.

    @property
    def place(self) -> parallel.Parallel | None:
        """Return this rank's coordinates; None if nobody told them."""
        return self._place

    @property
    def measure_every(self) -> int:
        """Return every how many steps phases and waits are measured: a power of 2, such that it is twice a second.

        All ranks take as long for a step, so they choose alike, and measure the same steps. It may be set for good.
        """
        return self._measure_every

    @measure_every.setter
    def measure_every(self, steps: int) -> None:
        self._measure_every, self._check_at = max(1, steps), 0
        self._measures_by_time = False

    def _choose_steps(self, seconds: float) -> None:
        """Choose which steps to measure, from what a step takes."""
        every = 1
        while seconds > 0 and 2 * every * seconds <= MEASURED_EVERY:
            every *= 2
        if self._measures_by_time and every != self._measure_every:
            self._measure_every, self._check_at = every, 0

    @property
    def alive(self) -> bool:
        """Return whether what is recorded will be told."""
        return self._pusher is not None and not self._finished

    def phase(self, name: str, began: Mark, ended: Mark) -> None:
        """Record a phase of the open step, one of catalogue.PHASES."""
        self._record((Books.phase, ended, name, began, ended))

    def waited(self, began: Mark, ended: Mark) -> None:
        """Record that this rank waited for others in the open step, which is thereby measured."""
        self._record((Books.waited, ended, began, ended))

    def measures_wait(self) -> None:
        """Tell that `waited` will be called in every measured step; one without it is not measured then."""
        self._books.measures_wait = True

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter of the catalogue."""
        self._record((Books.add, 0.0, metric, tuple(labels.items()), float(amount)))

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Set a gauge of the catalogue, or a counter to its total; at once, for in a hang it is the evidence."""
        self._set[metric, tuple(labels.items())] = float(value)

    def poll(self, callback: Callable[[], None]) -> None:
        """Have this called in the pushing thread before every snapshot but the last."""
        self._polls.append(callback)

    def enter(self, name: str, thread: int | None = None, at: Mark | None = None) -> None:
        """Begin an activity, one of timeline.DECLARED, on this thread or on behalf of another; now or a moment ago."""
        self._note("activity", Books.enter, name, get_ident() if thread is None else thread, at=at)

    def leave(self, name: str, thread: int | None = None, at: Mark | None = None) -> None:
        """End the innermost activity of this name, and all that was begun inside it."""
        self._note("activity", Books.leave, name, get_ident() if thread is None else thread, at=at)

    def batch_came(self, began: Mark, ended: Mark) -> None:
        """Tell, once it is known that it was for training, that this thread waited for a batch."""
        self._note("batches", Books.waits_for_batch, get_ident(), at=began)
        self._note("batches", Books.got_batch, get_ident(), at=ended)

    @property
    def steps_taken(self) -> int:
        """Return the steps since the process started."""
        return self._taken

    @property
    def loop_thread(self) -> int | None:
        """Return the thread that makes the steps; None before the first."""
        return self._books.loop_thread

    def counted(self, flops: float) -> None:
        """Record FLOPs counted in the open step, of this rank's pipeline stage; they stand in for declared ones.

        The other stages are taken to need as many; over all stages that comes out right.
        """
        self._flops_source = "counted"
        stages = self._place.pp[1] if self._place is not None and self._place.pp is not None else 1
        self._record((Books.found_flops, 0.0, flops * stages))

    def uncountable(self, reason: str) -> None:
        """Tell why FLOPs cannot be counted; without declared ones there is no MFU then."""
        if not self.has_flops:
            log.warning(
                "no MFU: FLOPs cannot be counted: %s; pass %s",
                reason,
                "--config or --flops-per-token" if self._step_source == "optimizer" else "Run(flops_per_token=...)",
            )
        self._books.uncountable = True

    def set_flops(self, *, convention: str, source: str, per_token: float | PackedFlops | None = None) -> None:
        """Tell late what the FLOPs per token are, and by which convention and from what they were found."""
        books = self._books
        books.convention, self._flops_source = convention, source
        if hasattr(per_token, "flops"):
            books.packed_flops = per_token
        elif per_token is not None:
            books.flops_per_token = self._checked(flops_per_token=per_token)

    @property
    def has_flops(self) -> bool:
        """Return whether the loop said what a token costs."""
        return self._books.flops_per_token is not None or self._books.packed_flops is not None

    def failed(self, what: str, error: BaseException) -> None:
        """Count an error that the training loop must not see, and log the first few that say something else."""
        self._errors += 1
        try:
            said, logged = _said(error), _logged.setdefault((what, type(error)), set())
            if said not in logged and len(logged) < DIFFERENT_ERRORS:
                logged.add(said)
                usage = isinstance(error, (TypeError, ValueError, RuntimeError))
                log.warning(
                    "run.%s: %s (training goes on; this is logged once)", what, said, exc_info=None if usage else error
                )
        except Exception:
            pass  # a log handler of the job's own that fails; the error is counted

    # What those are made of.

    def _note(self, what: str, kind: Callable[..., None], *arguments: object, at: Mark | None = None) -> None:
        try:
            self._record((kind, self.mark() if at is None else at, *arguments))
        except Exception as error:
            self.failed(what, error)

    def _work(self, tokens: object, more: Mapping[str, object]) -> Work:
        """Return what of a step's arguments can be counted; complain of the rest."""
        fine: dict[str, float] = {}
        for name, value in {"tokens": tokens, **more}.items():
            try:
                if name not in (known := Work.__dataclass_fields__):
                    raise ValueError(f"{name}= is no argument of step(); it takes {', '.join(known)}")
                if value is not None:
                    fine[name] = (number if name in ("loss", "grad_norm") else amount)(name, value)
            except ValueError as error:
                self.failed("step", error)
        if "sum_len_squared" in fine and self._books.packed_flops is None:
            self.failed(
                "step", ValueError("sum_len_squared= needs Run(flops_per_token=Transformer(...)) in place of a number")
            )
        return Work(**fine)

    def _look_after(self, taken: int, extra: tuple[object, ...]) -> None:
        """Do what is not for every step."""
        if extra:
            self.failed("step", TypeError("step() takes tokens, and all else by name"))
        if self._record is _ignored:
            self._check_at = sys.maxsize
            return
        if taken == 1:
            self._books.loop_thread = get_ident()
            self._find_card(expected=True)
            self._find_place(None)
            self._follow_device()
        self._check_backlog()
        if taken == 1 and self._pusher is not None:
            self._instrument(None)
        every = self._measure_every
        self.measuring = taken % every == 0 and not self._finished
        until = every - taken % every if every > 1 and not self.measuring else 1 if every > 1 else CHECK_BACKLOG
        self._check_at = taken + min(until, CHECK_BACKLOG)

    def _check_backlog(self) -> None:
        # Without a pusher (FLOPWATCH_DISABLE) nobody is told, but how long a step takes decides which are measured.
        told = self._pusher is not None
        if len(self._books.entries) <= (BACKLOG if told or not self._watched else CHECK_BACKLOG):
            return
        if self._lock.acquire(blocking=False):
            try:
                if told or self._watched:
                    self._books.take(all_of_them=True, most=SLICE)
                    self._choose_steps(self._books.step_seconds)
                else:
                    self._books.entries.clear()
            finally:
                self._lock.release()

    @_guarded(_nothing)
    def _at_exit(self, status: str) -> None:
        """Finish as the interpreter ends; or go on with a finish() in which a signal came whose handler exits."""
        if self._ending is None:
            self.finish(status)
        elif self._process.pid == os.getpid():
            if not self._finished:
                self._end()
            self._push_last(self._ending)

    @_guarded(_nothing)
    def _last_words(self, status: str) -> None:
        from flopwatch.training.autolog import attach

        attach.last_words(self, status)

    def _end(self) -> None:
        """Record nothing from now on, and complain of steps."""
        self._finished = True

        def late(entry: Entry) -> None:
            if entry[0] is _STEP:
                self.failed("step", RuntimeError("a step after finish() is not counted; call finish() last"))

        self._record, self.measuring = late, False
        self._remove(*self._instruments, *itertools.chain.from_iterable(self._watched.values()))

    def _remove(self, *instruments: Any) -> None:
        for instrument in instruments:
            try:
                instrument.remove()
            except Exception as error:
                self.failed("remove", error)

    def _find_card(self, expected: bool) -> None:
        """Look up the card's peak and UUID; at the first step it is expected: CUDA is initialised if it is used."""
        card = None
        try:
            if "torch" in sys.modules:
                from flopwatch.training import torch as torch_hook

                card = torch_hook.card()
            if card is not None and not self._gpu_uuid:
                self._gpu_uuid = card.uuid
            if self._peak is None and (card is not None or expected):
                if card is None:
                    raise peaks.UnknownPeak("no CUDA device is in use")
                peak = peaks.peak(card.name, self._dtype)
                self._peak, self._peak_source = peak.flops_per_second, peak.source
        except peaks.UnknownPeak as error:
            self._no_peak_because = "unknown_peak"
            # Every rank has the series; one line in the job's log will do, and each node may have other cards.
            log.log(
                logging.WARNING if self.local_rank == 0 else logging.DEBUG,
                "no MFU: %s; pass %s",
                error,
                "--peak-flops and --peak-source"
                if self._step_source == "optimizer"
                else "Run(peak_flops=..., peak_source=...)",
            )
        except Exception as error:
            self._no_peak_because = "unknown_peak" if self._peak is None else None
            self.failed("step", error)

    def _find_place(self, given: object) -> None:
        """Settle the coordinates: those given or, where Megatron has set them up, its own."""
        from_megatron = parallel.megatron() if given is None and self._place is None else None
        if given is None and from_megatron is None:
            return
        try:
            self._place = parallel.parallel(from_megatron if given is None else given, self.world_size)
        except Exception as error:
            self.failed("parallel", error)
            return
        if self._books.replica_ranks is None:
            self._books.replica_ranks = self._place.replica_ranks

    def _follow_device(self) -> None:
        """Let marks be moments of the CUDA device once it is in use."""
        if "torch" in sys.modules and self.mark is self.clock:
            from flopwatch.training.torch import device

            if (moments := device.moments(self.clock, self.failed)) is not None:
                self.mark = moments.mark

    def _instrument(self, model: object) -> None:
        """Measure what PyTorch tells: phases of the steps and, where it is pushed, compilation, memory, collectives."""
        if "torch" not in sys.modules or self._finished:
            return
        from flopwatch.training.torch import collectives, phases, runtime

        if model is not None or not self._instruments:
            measured = phases.attach(self, model)
            if not self._instruments:
                self._instruments = (measured, runtime.attach(self))
                collectives.watch(self)

    @property
    def _tells_loss(self) -> bool:
        """Return whether this is the one rank that speaks for the run's loss: of a pipeline the last stage has it."""
        if self._place is None or self._place.pp is None or self._place.pp[1] == 1:
            return self.rank == 0
        others = (self._place.dp, self._place.tp, self._place.cp)
        return self._place.pp[0] == self._place.pp[1] - 1 and not any(group and group[0] for group in others)

    def _checked(self, **argument: object) -> float | None:
        """Return an optional argument as a number above 0; None, and a complaint, if it is none."""
        ((name, value),) = argument.items()
        try:
            if value is None or (checked := amount(name, value)) > 0:
                return None if value is None else checked
            raise ValueError(f"{name}=0 is ignored; leave it out if it is unknown")
        except ValueError as error:
            self.failed("__init__", error)
            return None

    def _one_of(self, known: tuple[str, ...], **argument: object) -> str | None:
        """Return an argument that is one of these words; None, and a complaint, if it is none."""
        ((name, value),) = argument.items()
        if value in known:
            return str(value)
        self.failed(
            "__init__", ValueError(f"{name}={_said(value)!r} is ignored; write {' or '.join(filter(len, known))}")
        )
        return None

    def _unix_time(self, text: str | None) -> float | None:
        try:
            return float(text) if text else None
        except ValueError:
            self.failed(
                "__init__",
                ValueError(f"FLOPWATCH_SUBMITTED_AT={text!r} is ignored; write Unix time, as date +%s prints it"),
            )
            return None

    # What is pushed.

    def _take_over(self) -> None:
        """End the run before in this process; first, so that what it has put somewhere is not around ours."""
        older, Run._newest = Run._newest, self
        if older is not None and older._pusher is not None and not older._finished:
            log.warning("a newer Run in this process takes over from %s; call finish() on the older one", older.name)
            older._end()
            older._pusher.stop(None)

    def _start_pushing(self, endpoint: str, interval: float | str, headers: str, disable: str, *files: str) -> None:
        if disable not in ("", "0"):
            return
        # Imported here, so that a broken opentelemetry or protobuf costs the metrics and not the training.
        from flopwatch.training.process.stacks import Stacks
        from flopwatch.training.push.otlp import Wire
        from flopwatch.training.push.pusher import Pusher

        self.poll(Stacks(lambda: f"run {self.name} attempt {self.attempt} rank {self.rank} on {self._host}").poll)
        try:
            seconds = max(0.1, float(interval))
        except ValueError:
            raise ValueError(f"push interval {interval!r}: write seconds, for example 5; nothing is pushed") from None
        token, more_headers, ca = (Path(file) if file else None for file in files)
        wire = Wire(endpoint, self._start_unix, token, headers, more_headers, ca)
        self._pusher = Pusher(wire, seconds, self.snapshot, self._at_exit, functools.partial(self.failed, "push"))
        self._pusher.start()

    def snapshot(self, *, last: bool = False) -> Snapshot:
        """Return everything counted so far, at one instant of the loop."""
        for callback in () if last else tuple(self._polls):
            try:
                callback()
            except Exception as error:
                self.failed("poll", error)
        if self._submitted_at is None and self.rank == 0 and not last:
            self._submitted_at = self._submission()
        with self._lock:
            books = self._books
            books.take(all_of_them=last)
            self._choose_steps(books.step_seconds)
            now = books.instant(self.clock())
            seconds, open_step_seconds = books.timeline.seconds(now), books.timeline.open_step_seconds(now)
            points = self._points(books, seconds)
            if not last and (at := self._stands_still(books, now)) is not None:
                points[catalogue.TRAINING_STANDSTILL_INFO] = [({"at": at}, 1.0)]
            return Snapshot(
                self._resource(books.restored_step, open_step_seconds),
                points,
                (DURATION_BOUNDS, books.durations.copy(), books.duration_sum) if self.rank == 0 else None,
            )

    @_guarded(_nowhere)
    def _stands_still(self, books: Books, now: float) -> str | None:
        return self._standstill.look(books.loop_thread, *books.timeline.open, now, books.step_seconds)

    def _resource(self, restored: int | None, open_step_seconds: float) -> dict[str, str | int | float]:
        resource: dict[str, str | int | float | None] = {
            "flopwatch.schema": 1,
            "flopwatch.run": self.name,
            "flopwatch.tenant": self._tenant,
            "flopwatch.attempt": self.attempt,
            "flopwatch.rank": self.rank,
            "flopwatch.host": self._host,
            "flopwatch.pid": self._process.pid,
            "flopwatch.pid_namespace": self._process.pid_namespace,
            "flopwatch.start_unix": self._start_unix,
            "flopwatch.pid_start_ticks": self._process.start_ticks,
            "flopwatch.submitted_unix": self._submitted_at,
            "flopwatch.restored_step": restored,
            "flopwatch.open_step_seconds": open_step_seconds,
            "flopwatch.gpu_uuid": self._gpu_uuid,
        }
        return {key: value for key, value in resource.items() if value is not None}

    def _points(self, books: Books, seconds: dict[str, float]) -> dict[Metric, list[tuple[dict[str, str], float]]]:
        c = catalogue
        flops_known = books.no_flops_because is None
        plain: dict[Metric, float | None] = {
            c.TRAINING_STEPS: books.steps,
            c.TRAINING_TOKENS: books.tokens if books.tokens_known else None,
            c.TRAINING_SAMPLES: books.samples if books.samples_known else None,
            c.TRAINING_MODEL_FLOPS: books.flops if flops_known else None,
            c.TRAINING_HARDWARE_FLOPS: (
                books.hardware_flops if flops_known and books.hardware_flops_per_token is not None else None
            ),
            c.TRAINING_POSITION_STEPS: books.position,
            c.TRAINING_POSITION_TOKENS: None if books.position is None else books.position_tokens,
            c.TRAINING_COMMITTED_STEPS: books.committed,
            c.TRAINING_CHECKPOINT_BACKGROUND_SECONDS: books.background if books.saves_in_background else None,
            c.TRAINING_LAST_STEP_TIMESTAMP: (
                None if books.last_step is None else self._start_unix + books.last_step - self._start
            ),
            c.TRAINING_HOOK_ERRORS: self._errors,
        }
        if self._peak is not None:
            plain[c.TRAINING_PEAK_FLOPS] = self._peak
            plain[c.TRAINING_CAPACITY_FLOPS] = self._peak * (seconds["step"] + seconds["data_stall"])
        if books.measures_wait:
            plain[c.TRAINING_COLLECTIVE_WAIT] = books.wait
        if books.measures_wait or books.phases:
            plain[c.TRAINING_MEASURED_STEP_SECONDS] = books.measured_seconds
            plain[c.TRAINING_MEASURED_STEPS] = books.measured_steps
        if self.rank == 0:
            plain[c.TRAINING_WORLD_SIZE] = self.world_size
            plain[c.TRAINING_MEASURED_EVERY_STEPS] = self.measure_every if books.measures_wait or books.phases else None
        if self._tells_loss:
            plain[c.TRAINING_LOSS], plain[c.TRAINING_GRAD_NORM] = books.loss, books.grad_norm
            plain[c.TRAINING_LOSS_SPIKES] = None if books.spikes is None else books.spikes.count
        points: dict[Metric, list[tuple[dict[str, str], float]]] = {
            metric: [({}, float(value))] for metric, value in plain.items() if value is not None
        }
        points |= {
            metric: [(dict(labels), value) for labels, value in samples.items()]
            for metric, samples in books.others.items()
        }
        for (metric, labels), value in tuple(self._set.items()):
            points.setdefault(metric, []).append((dict(labels), value))
        points[c.TRAINING_PHASE_SECONDS] = [({"phase": name}, s) for name, s in books.phases.items()]
        if self._tells_loss:
            points[c.TRAINING_NONFINITE] = [({"value": name}, float(n)) for name, n in books.nonfinite.items()]
        points[c.TRAINING_ACTIVITY_SECONDS] = [({"activity": name}, s) for name, s in seconds.items()]
        reasons = (self._no_peak_because, books.no_flops_because)
        points[c.TRAINING_MFU_UNAVAILABLE] = [({"reason": r}, 1.0) for r in reasons if r is not None]
        points[c.TRAINING_RANK_INFO] = [
            (
                {
                    "host": self._host,
                    "uuid": self._gpu_uuid,
                    "local_rank": str(self.local_rank),
                    "attempt": self.attempt,
                    **(self._place or parallel.Parallel()).labels(),
                },
                1.0,
            )
        ]
        if self.rank == 0:
            torch = sys.modules.get("torch")
            points[c.TRAINING_RUN_INFO] = [
                (
                    {
                        "tenant": self._tenant,
                        "attempt": self.attempt,
                        "convention": books.convention,
                        "dtype": self._dtype,
                        "flops_source": self._flops_source,
                        "peak_source": self._peak_source,
                        "step_source": self._step_source,
                        # Another thread may be amid importing it.
                        "framework": f"torch {version}" if (version := getattr(torch, "__version__", "")) else "",
                        "owner": self._owner,
                        "team": self._team,
                        "page": self._page,
                        "external_id": launcher.external_id(self._environ, sys.modules),
                    },
                    1.0,
                )
            ]
        return points


def _silence() -> None:
    """Let a forked child, a DataLoader's worker, record nothing: no thread would ever add it up."""
    run = Run._newest
    if run is not None:
        run._finished, run._record = True, _ignored


os.register_at_fork(after_in_child=_silence)
