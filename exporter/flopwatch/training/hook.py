"""`Run`: what a training loop tells flopwatch, counted by plain additions and pushed by a thread of its own.

A step costs a few microseconds: no lock, no device synchronisation, no system call but reading the clock. Where the
seconds go is in timeline.py, what the end of a process says in pusher.py, ranks and attempts in launcher.py.

The wait for other ranks counts as measured in a step only if nothing but the step happened in it and it took at most
twice the running mean: when one rank stops for a checkpoint of its own the others wait for it in the next all-reduce,
and it must not be blamed for that. All ranks see that long step, and all leave it out.

No method raises, whatever it is given: errors are counted in training_hook_errors_total and logged once. Calls are to
come from the training loop's thread; an activity on another thread is not the loop's time and is ignored.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import os
import socket
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from flopwatch import catalogue
from flopwatch.catalogue import Metric
from flopwatch.training import launcher, peaks
from flopwatch.training.timeline import DECLARED, Span, Timeline

if TYPE_CHECKING:
    from flopwatch.training.pusher import Pusher

log = logging.getLogger("flopwatch")

STATUSES = ("completed", "stopped", "preempted", "resized", "failed")
DURATION_BOUNDS = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 180.0)  # seconds

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")
_logged: set[tuple[str, type[Exception]]] = set()


class PackedFlops(Protocol):
    """What `flops_per_token` must be for packed samples: `flopwatch.training.flops.Transformer` is one."""

    def flops(self, tokens: int, sum_len_squared: int, convention: Any) -> float:
        """Return the FLOPs of samples with so many tokens and such a sum of squared lengths."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one push says: OTLP resource attributes, points by family, and (bounds, counts, sum) of step durations."""

    resource: dict[str, str | int | float]
    points: dict[Metric, list[tuple[dict[str, str], float]]]
    step_durations: tuple[tuple[float, ...], list[int], float] | None


@dataclass(slots=True)
class _Counts:
    """What the loop adds to; everything since the process started, except positions."""

    steps: int = 0
    tokens: float = 0.0
    flops: float = 0.0
    tokens_known: bool = True
    no_flops_because: str | None = None
    position: int | None = None  # None until it is known
    restored: int | None = None
    position_tokens: float | None = 0.0
    committed: int | None = None
    loss: float | None = None
    wait: float = 0.0
    measured_seconds: float = 0.0
    measured_steps: int = 0
    durations: list[int] = field(default_factory=lambda: [0] * (len(DURATION_BOUNDS) + 1))
    duration_sum: float = 0.0


class _Update:
    """`with update:` around what the loop changes; the version is odd meanwhile, see Run.snapshot."""

    __slots__ = ("version",)

    def __init__(self) -> None:
        self.version = 0

    def __enter__(self) -> None:
        self.version |= 1

    def __exit__(self, *_: object) -> None:
        self.version = (self.version | 1) + 1


class _Activity(Span):
    """`with run.activity(name):`"""

    __slots__ = ("_run",)

    def __init__(self, run: Run, activity: str) -> None:
        super().__init__(activity)
        self._run = run

    def __enter__(self) -> None:
        self._run._pass_time("activity", lambda timeline, now: timeline.enter(self, now))

    def __exit__(self, *_: object) -> None:
        self._run._pass_time("activity", lambda timeline, now: timeline.leave(self, now))


class _Wait:
    """`with run.collective_wait():`"""

    __slots__ = ("_began", "_run")

    def __init__(self, run: Run) -> None:
        self._run = run

    def __enter__(self) -> None:
        self._run._measures_wait = True
        self._began = self._run._clock()

    def __exit__(self, *_: object) -> None:
        self._run._waited(self._run._clock() - self._began)


class _Batches(Generic[_T]):
    """`run.batches(loader)`: the loader itself, timed; as often iterable as the loader is."""

    def __init__(self, run: Run, loader: Iterable[_T]) -> None:
        self._run = run
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a TypeError, as from the loader itself

    def __iter__(self) -> Iterator[_T]:
        pass_time, iterator = self._run._pass_time, None
        try:
            while True:
                pass_time("batches", Timeline.wait_for_batch)
                iterator = iter(self._loader) if iterator is None else iterator
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                pass_time("batches", Timeline.got_batch)
                yield batch
        finally:
            pass_time("batches", Timeline.end_of_batches)


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
                self._swallow(method.__name__, error)
                return otherwise()

        return guarded

    return decorate


def _nothing() -> None:
    return None


def _empty() -> AbstractContextManager[None]:
    return nullcontext()


def _number(name: str, value: object) -> float:
    if isinstance(value, Real):
        return float(value)
    # Not the value itself: a tensor's repr would wait for the device.
    raise ValueError(f"{name}= takes a Python number, not a {type(value).__name__}; reading a tensor would stop the "
                     "device, so pass what the CPU knows, such as numel()")


def _amount(name: str, value: object) -> float:
    number = _number(name, value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{name}={number!r}: counters only rise; pass a finite number of at least 0")
    return number


class Run:
    """One rank of a training run; make it once, after torch.distributed.init_process_group if there is one.

    name             the run, the same in all its restarts; else FLOPWATCH_RUN, else the scheduler's job
    flops_per_token  model FLOPs of one token, forward and backward, or a `Transformer` if samples are packed
    convention       how those were counted: causal, full or palm (see flops.py); a label
    dtype            of the matrix multiplications; the card's peak is looked up for it, unless `peak_flops` (FLOP/s
                     of this rank's card) is given, with `peak_source` saying where from (default `declared`)
    replica_ranks    ranks that share one model replica (tensor x pipeline x context parallel; expert parallel does
                     not count); known by itself for one rank, DDP and FSDP
    model            a DistributedDataParallel model, to measure how long it waits for other ranks
    gpu_uuid         this rank's GPU; else FLOPWATCH_GPU_UUID, else torch's current CUDA device
    owner, team      who runs it, for alerts; else FLOPWATCH_OWNER, FLOPWATCH_TEAM
    page             "always" if its alerts may page though it is small; else FLOPWATCH_PAGE
    submitted_at     when the run was submitted, as Unix time; else FLOPWATCH_SUBMITTED_AT; without it there is no ETTR
    endpoint         the node's exporter; else FLOPWATCH_ENDPOINT, else http://127.0.0.1:4318
    clock, process   monotonic seconds, and what the kernel knows of this process

    The rest is found out: rank, world_size, local_rank and attempt from the launcher (launcher.py); tenant from
    FLOPWATCH_TENANT, push_interval (seconds) from FLOPWATCH_PUSH_INTERVAL, a bearer token from FLOPWATCH_TOKEN_FILE,
    the host's name from FLOPWATCH_HOST. FLOPWATCH_DISABLE=1 turns the pushing off. A newer Run in the same process
    takes over from the older.
    """

    _newest: Run | None = None
    # What guarding needs, should __init__ itself fail.
    _clock: Callable[[], float] = staticmethod(time.monotonic)
    _errors = 0
    _wait: float | None = None  # seconds in the open step; None: not measured
    _pusher: Pusher | None = None
    _finished = False

    @_guarded(_nothing)
    def __init__(
        self, name: str | None = None, *, tenant: str | None = None, attempt: str | None = None,
        rank: int | None = None, world_size: int | None = None, local_rank: int | None = None,
        flops_per_token: float | PackedFlops | None = None, convention: str = "causal", dtype: str = "bf16",
        peak_flops: float | None = None, peak_source: str | None = None, replica_ranks: int | None = None,
        model: object = None, gpu_uuid: str | None = None, owner: str | None = None, team: str | None = None,
        page: str | None = None, submitted_at: float | None = None, endpoint: str | None = None,
        push_interval: float | None = None, environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic, process: launcher.Process | None = None,
    ) -> None:
        self._process = launcher.this_process() if process is None else process
        self._timeline = Timeline(clock() - self._process.age)
        self._clock = clock
        self._start_unix = time.time() - self._process.age
        self._update = _Update()
        self._counts = _Counts()
        self._loop_thread: int | None = None
        self._mean_duration = 0.0
        self._measures_wait = False
        self._no_peak_because: str | None = None
        self._convention, self._dtype = convention, dtype
        self._packed_flops: Any = flops_per_token if hasattr(flops_per_token, "flops") else None
        self._flops_per_token = self._checked(flops_per_token=None if self._packed_flops else flops_per_token)
        self._peak = self._checked(peak_flops=peak_flops)
        self._peak_source = "" if self._peak is None else peak_source or "declared"
        if submitted_at is None:
            submitted_at = self._unix_time(environ.get("FLOPWATCH_SUBMITTED_AT"))
        self._submitted_at = self._checked(submitted_at=submitted_at)

        def text(argument: str | None, variable: str) -> str:
            return environ.get(variable, "") if argument is None else str(argument)

        self._tenant = launcher.clean(text(tenant, "FLOPWATCH_TENANT"))
        self._gpu_uuid = text(gpu_uuid, "FLOPWATCH_GPU_UUID")
        self._owner, self._team = text(owner, "FLOPWATCH_OWNER"), text(team, "FLOPWATCH_TEAM")
        self._page = text(page, "FLOPWATCH_PAGE")
        self._host = text(None, "FLOPWATCH_HOST") or socket.gethostname()
        self._settle_identity(
            launcher.launch(environ, self._host, self._process),
            text(name, "FLOPWATCH_RUN"), attempt, rank, world_size, local_rank)
        self._replica_ranks = self._checked(replica_ranks=replica_ranks)
        if self._replica_ranks is None and self.world_size == 1:
            self._replica_ranks = 1
        self._find_card(expected=False)
        if model is not None:
            self.watch(model)
        self._start_pushing(
            text(endpoint, "FLOPWATCH_ENDPOINT") or "http://127.0.0.1:4318",
            text(None, "FLOPWATCH_PUSH_INTERVAL") or "5" if push_interval is None else push_interval,
            text(None, "FLOPWATCH_TOKEN_FILE"), text(None, "FLOPWATCH_DISABLE"))

    # What the training loop calls.

    @_guarded(_nothing)
    def step(
        self, tokens: float | None = None, *, global_tokens: float | None = None,
        sum_len_squared: float | None = None, flops: float | None = None, loss: float | None = None,
    ) -> None:
        """Count one optimizer step; call it once per update, after it.

        tokens           unpadded tokens this rank's model replica consumed, all micro-batches together
        global_tokens    in its place: those of all ranks
        sum_len_squared  for packed samples: the sum of their squared lengths, of the same tokens
        flops            in place of tokens x flops_per_token: what the whole replica needed
        loss             a Python float, to be shown
        """
        now = self._clock()
        if self._finished:
            raise RuntimeError("a step after finish() is not counted; call finish() last")
        self._loop_thread = threading.get_ident()
        counts = self._counts
        if counts.steps == 0:
            self._find_card(expected=True)
        with self._update:
            counts.steps += 1
            if counts.position is None:
                counts.position = counts.restored = 0
            counts.position += 1
            if (step := self._timeline.step(now)) is not None:
                self._time(*step)
            self._wait = None
            counts.tokens_known, counts.no_flops_because = False, "no_tokens"
            before = counts.flops
            self._work(tokens, global_tokens, sum_len_squared, flops)
            if step is None:  # its time was startup, which is no capacity: its FLOPs would flatter the MFU
                counts.flops = before
            if loss is not None:
                counts.loss = _number("loss", loss)

    def batches(self, loader: Iterable[_T]) -> _Batches[_T]:
        """Return the loader, with the time in which the loop waits for its batches told apart."""
        return _Batches(self, loader)

    @_guarded(_empty)
    def activity(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose time is that activity's: one of timeline.DECLARED."""
        if name not in DECLARED:
            self._swallow("activity", ValueError(f"{name!r} counts as other; write one of {', '.join(DECLARED)}"))
            name = "other"
        return _Activity(self, name)

    @_guarded(_empty)
    def collective_wait(self) -> AbstractContextManager[None]:
        """Return a context around what waits for other ranks, for frameworks that `watch` does not know.

        Every rank has to measure the same waits, or the one that measures fewer looks late.
        """
        return _Wait(self)

    @_guarded(_nothing)
    def restored(self, step: int, tokens: float | None = None) -> None:
        """Tell the step, and the replica's tokens, that a checkpoint restored; the next step is the one after it."""
        counts, position = self._counts, int(_amount("step", step))
        with self._update:
            counts.position = counts.restored = position
            counts.position_tokens = 0.0 if position == 0 else None
            if tokens is not None:
                counts.position_tokens = _amount("tokens", tokens)

    @_guarded(_nothing)
    def checkpoint_committed(self, step: int) -> None:
        """Tell that the checkpoint of this step is durable: a restart could begin from it."""
        self._counts.committed = int(_amount("step", step))

    @_guarded(_nothing)
    def watch(self, model: object) -> None:
        """Measure how long this DistributedDataParallel model waits for other ranks in its gradient all-reduce."""
        from flopwatch.training import torch as torch_hook

        if self._replica_ranks is None:
            self._replica_ranks = torch_hook.replica_ranks(model)
        try:
            torch_hook.watch(model, self._waited, self._clock, functools.partial(self._swallow, "watch"))
            self._measures_wait = True
        except torch_hook.Unmeasured as reason:
            log.warning("the wait for other ranks is not measured: %s", reason)

    @_guarded(_nothing)
    def finish(self, status: str = "completed") -> None:
        """Push a last time and say how the attempt ended: completed, stopped, preempted, resized or failed.

        `completed` and `stopped` end the run, the others this attempt only. Takes at most pusher.LAST_PUSH seconds.
        """
        if self._process.pid != os.getpid():
            return  # in a forked child: nothing to say about its parent, and locks that no thread will release
        if status not in STATUSES:
            raise ValueError(f"finish({status!r}) was ignored; write one of {', '.join(STATUSES)}")
        if self._finished:
            raise RuntimeError("finish() was called before; only the first call counts")
        self._finished = True
        if self._pusher is not None:
            last = self.snapshot()
            last.resource["flopwatch.status"] = status
            self._pusher.stop(last)

    # What those are made of.

    def _pass_time(self, what: str, change: Callable[[Timeline, float], None]) -> None:
        try:
            if self._loop_thread not in (None, threading.get_ident()):
                raise RuntimeError(f"{what}() on another thread is not the training loop's time, and is ignored")
            now = self._clock()
            with self._update:
                change(self._timeline, now)
        except Exception as error:
            self._swallow(what, error)

    def _waited(self, seconds: float) -> None:
        """Add to the wait of the open step, which is thereby measured."""
        self._wait = seconds if self._wait is None else self._wait + seconds

    def _time(self, duration: float, disturbed: bool) -> None:
        counts, mean = self._counts, self._mean_duration
        counts.durations[bisect_left(DURATION_BOUNDS, duration)] += 1
        counts.duration_sum += duration
        if self._wait is not None and not disturbed and 0 < duration <= 2 * mean:
            counts.wait += self._wait
            counts.measured_seconds += duration
            counts.measured_steps += 1
        # An outlier moves the mean a little, so that it follows when steps become longer for good.
        self._mean_duration += (min(duration, 2 * mean) - mean) / 8 if mean else duration

    def _work(
        self, tokens: float | None, global_tokens: float | None, sum_len_squared: float | None, flops: float | None,
    ) -> None:
        counts, replica = self._counts, self._replica_ranks
        among: float | None = replica
        if global_tokens is not None:
            tokens, among = global_tokens, self.world_size
        amount = None if tokens is None else _amount("tokens", tokens)
        if amount is not None and among is not None:
            counts.tokens += amount / among
            counts.tokens_known = True
        if counts.position_tokens is not None:
            counts.position_tokens = (None if amount is None or among is None or replica is None
                                      else counts.position_tokens + amount / among * replica)
        reason = None
        if flops is not None:
            if replica is None:
                reason = "unknown_replica"
            else:
                counts.flops += _amount("flops", flops) / replica
        elif amount is None:
            reason = "no_tokens"
        elif among is None:
            reason = "unknown_replica"
        elif self._packed_flops is not None:
            if sum_len_squared is None:
                reason = "no_sum_len_squared"
            else:
                squares = _amount("sum_len_squared", sum_len_squared)
                counts.flops += self._packed_flops.flops(int(amount), int(squares), self._convention) / among
        elif sum_len_squared is not None:
            raise ValueError("sum_len_squared= needs Run(flops_per_token=Transformer(...)) in place of a number")
        elif self._flops_per_token is None:
            reason = "no_flops_per_token"
        else:
            counts.flops += amount * self._flops_per_token / among
        counts.no_flops_because = reason

    def _settle_identity(
        self, launch: launcher.Launch, name: str, attempt: str | None, rank: int | None, world_size: int | None,
        local_rank: int | None,
    ) -> None:
        self.rank, self.world_size, one_node = launch.rank, launch.world_size, launch.one_node
        # Looked up, not imported: a process that uses torch.distributed has done that.
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is not None and not (distributed.is_available() and distributed.is_initialized()):
            distributed = None
        if distributed is not None and distributed.get_world_size() != self.world_size:
            self.rank, self.world_size, one_node = distributed.get_rank(), distributed.get_world_size(), False
        self.rank = self.rank if rank is None else int(rank)
        self.world_size = self.world_size if world_size is None else int(world_size)
        self.local_rank = launch.local_rank if local_rank is None else int(local_rank)
        if attempt is None and one_node:
            attempt = launch.attempt()
        elif attempt is None and distributed is not None:
            from flopwatch.training import torch as torch_hook

            attempt = torch_hook.agreed(launch.attempt(), self.rank, launch.restarts)
        self.attempt = launcher.clean(launch.attempt_without_launcher() if attempt is None else str(attempt))
        if not name and launch.name is None:
            place = launch.meeting_point.rpartition(":")[0]
            place = self._host if place in ("", "localhost", "127.0.0.1", "::1") else place
            name = f"{Path(sys.argv[0]).stem or 'python'}@{place}"
            log.warning("the run has no name and is called %s; pass Run(name) or set FLOPWATCH_RUN", name)
        self.name = launcher.clean(name or launch.name or "")
        if name and self.name != name:
            log.warning("the run %r is called %s; write names with A-Z a-z 0-9 . _ : / @ + - only", name, self.name)

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
            log.warning("no MFU: %s; pass Run(peak_flops=..., peak_source=...)", error)
        except Exception as error:
            self._no_peak_because = "unknown_peak" if self._peak is None else None
            self._swallow("step", error)

    def _checked(self, **argument: object) -> float | None:
        """Return an optional argument as a number above 0; None, and a complaint, if it is none."""
        ((name, value),) = argument.items()
        try:
            if value is None or (number := _amount(name, value)) > 0:
                return None if value is None else number
            raise ValueError(f"{name}=0 is ignored; leave it out if it is unknown")
        except ValueError as error:
            self._swallow("__init__", error)
            return None

    def _unix_time(self, text: str | None) -> float | None:
        try:
            return float(text) if text else None
        except ValueError:
            self._swallow("__init__", ValueError(
                f"FLOPWATCH_SUBMITTED_AT={text!r} is ignored; write Unix time, as date +%s prints it"))
            return None

    def _swallow(self, what: str, error: Exception) -> None:
        self._errors += 1
        if (what, type(error)) not in _logged:
            _logged.add((what, type(error)))
            usage = isinstance(error, (TypeError, ValueError, RuntimeError))
            log.warning("run.%s: %s (training goes on; this is logged once)", what, error, exc_info=not usage)

    # What is pushed.

    def _start_pushing(self, endpoint: str, interval: float | str, token_file: str, disable: str) -> None:
        older, Run._newest = Run._newest, self
        if older is not None and older._pusher is not None and not older._finished:
            log.warning("a newer Run in this process takes over from %s; call finish() on the older one", older.name)
            older._finished = True
            older._pusher.stop(None)
        if disable not in ("", "0"):
            return
        # Imported here, so that a broken opentelemetry or protobuf costs the metrics and not the training.
        from flopwatch.training.pusher import Pusher
        from flopwatch.training.wire import Wire

        try:
            seconds = max(0.1, float(interval))
        except ValueError:
            raise ValueError(f"push interval {interval!r}: write seconds, for example 5; nothing is pushed") from None
        wire = Wire(endpoint, self._start_unix, Path(token_file) if token_file else None)
        self._pusher = Pusher(wire, seconds, self.snapshot, self.finish, functools.partial(self._swallow, "push"))
        self._pusher.start()

    def snapshot(self) -> Snapshot:
        """Return everything counted so far, at one instant of the loop. Raises TimeoutError."""
        for _ in range(1000):
            # No lock, because the loop must never wait: a version that is even and stays the same says that the loop
            # changed nothing meanwhile.
            version = self._update.version
            counts = copy.copy(self._counts)
            counts.durations = counts.durations.copy()
            now = self._clock()
            seconds, open_step_seconds = self._timeline.seconds(now), self._timeline.open_step_seconds(now)
            if version == self._update.version and not version & 1:
                break
            time.sleep(0.001)
        else:
            raise TimeoutError("for a second the training loop was amid an update")
        return Snapshot(
            self._resource(counts.restored, open_step_seconds), self._points(counts, seconds),
            (DURATION_BOUNDS, counts.durations, counts.duration_sum) if self.rank == 0 else None)

    def _resource(self, restored: int | None, open_step_seconds: float) -> dict[str, str | int | float]:
        resource: dict[str, str | int | float | None] = {
            "flopwatch.schema": 1, "flopwatch.run": self.name, "flopwatch.tenant": self._tenant,
            "flopwatch.attempt": self.attempt, "flopwatch.rank": self.rank, "flopwatch.host": self._host,
            "flopwatch.pid": self._process.pid, "flopwatch.pid_namespace": self._process.pid_namespace,
            "flopwatch.start_unix": self._start_unix, "flopwatch.pid_start_ticks": self._process.start_ticks,
            "flopwatch.submitted_unix": self._submitted_at, "flopwatch.restored_step": restored,
            "flopwatch.open_step_seconds": open_step_seconds, "flopwatch.gpu_uuid": self._gpu_uuid,
        }
        return {key: value for key, value in resource.items() if value is not None}

    def _points(self, counts: _Counts, seconds: dict[str, float]) -> dict[Metric, list[tuple[dict[str, str], float]]]:
        plain: dict[Metric, float | None] = {
            catalogue.TRAINING_STEPS: counts.steps,
            catalogue.TRAINING_TOKENS: counts.tokens if counts.tokens_known else None,
            catalogue.TRAINING_MODEL_FLOPS: counts.flops if counts.no_flops_because is None else None,
            catalogue.TRAINING_POSITION_STEPS: counts.position,
            catalogue.TRAINING_POSITION_TOKENS: None if counts.position is None else counts.position_tokens,
            catalogue.TRAINING_COMMITTED_STEPS: counts.committed,
            catalogue.TRAINING_LOSS: counts.loss,
            catalogue.TRAINING_HOOK_ERRORS: self._errors,
        }
        if self._peak is not None:
            plain[catalogue.TRAINING_PEAK_FLOPS] = self._peak
            plain[catalogue.TRAINING_CAPACITY_FLOPS] = self._peak * (seconds["step"] + seconds["data_stall"])
        if self._measures_wait:
            plain[catalogue.TRAINING_COLLECTIVE_WAIT] = counts.wait
            plain[catalogue.TRAINING_MEASURED_STEP_SECONDS] = counts.measured_seconds
            plain[catalogue.TRAINING_MEASURED_STEPS] = counts.measured_steps
        if self.rank == 0:
            plain[catalogue.TRAINING_WORLD_SIZE] = self.world_size
        points: dict[Metric, list[tuple[dict[str, str], float]]] = {
            metric: [({}, float(value))] for metric, value in plain.items() if value is not None}
        points[catalogue.TRAINING_ACTIVITY_SECONDS] = [({"activity": name}, s) for name, s in seconds.items()]
        reasons = (self._no_peak_because, counts.no_flops_because)
        points[catalogue.TRAINING_MFU_UNAVAILABLE] = [({"reason": r}, 1.0) for r in reasons if r is not None]
        points[catalogue.TRAINING_RANK_INFO] = [({
            "host": self._host, "uuid": self._gpu_uuid, "local_rank": str(self.local_rank), "attempt": self.attempt,
        }, 1.0)]
        if self.rank == 0:
            torch = sys.modules.get("torch")
            points[catalogue.TRAINING_RUN_INFO] = [({
                "tenant": self._tenant, "attempt": self.attempt, "convention": self._convention, "dtype": self._dtype,
                "peak_source": self._peak_source, "framework": f"torch {torch.__version__}" if torch else "",
                "owner": self._owner, "team": self._team, "page": self._page,
            }, 1.0)]
        return points
