"""What `flopwatch run` sees of a training loop that does not know of it, and tells a Run.

Steps. A step ends at the step of the first optimizer seen, if a backward pass ran since the last one did: so gradient
accumulation, several optimizers, ZeRO's inner one and those that step inside the backward pass make one step each.
If another optimizer makes TURNS steps without the first, it takes its place. A step PyTorch skips (GradScaler) is none,
and gradients thrown away by zero_grad() are counted as backwards without a step. Where no backward pass is ever seen
(torch.func), every step of the optimizer but its first counts.
Read: torch.optim.optimizer.register_optimizer_step_{pre,post}_hook, Optimizer.zero_grad, torch.autograd.backward.
https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.register_step_post_hook.html

Batches. A data loader feeds training if a backward pass follows its batch, and evaluation if its next batch is fetched
without one, or under no_grad or inference_mode. That is settled for a dataset once; from then on its time is booked as
it passes. Read: DataLoader's __iter__ and its iterators' __next__. Other iterables are not seen.

Tokens. A batch's integer `input_ids`, less what its attention_mask masks if the CPU holds that, belong to the backward
pass that follows. Without them, and without a flag that tells, tokens are absent.

The run begins when the first optimizer is made: a process that makes none tells nothing. Where the script has a Run of
its own, this steps back for good. Not seen: steps replayed by a CUDA graph, and processes the script starts.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flopwatch import catalogue
from flopwatch.training.run import Run
from flopwatch.training.sequence_lengths import lengths
from flopwatch.training.torch.checkpoints import Checkpoints, whole

if TYPE_CHECKING:
    from flopwatch.training.totals import Mark, PackedFlops

_P = ParamSpec("_P")
_R = TypeVar("_R")

log = logging.getLogger("flopwatch")

TURNS = 20  # steps of another optimizer without the first
STEPS_TO_SEE_MODELS = 5  # after which no model is looked for
FRAMES = 20  # that are looked at to learn who fetches a batch
MOST_STATES = 1000  # of an optimizer's parameters that are asked for its steps

TRAINING, EVALUATION = "training", "evaluation"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the flags of `flopwatch run` say."""

    name: str | None = None
    tokens_from: str | None = None  # a key, an attribute or a place in the batch
    tokens_per_step: float | None = None
    step_from: str | None = None  # a key of a loaded checkpoint, with dots for mappings in mappings
    flops_per_token: float | PackedFlops | None = None
    convention: str = "causal"
    dtype: str = "bf16"
    peak_flops: float | None = None
    peak_source: str | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of one batch: how many, and the sum of the squared lengths of its samples."""

    count: int
    sum_len_squared: int


_checkpoints: Checkpoints | None = None


def attach(run: Run) -> None:
    """Tell a run that a script has made itself of what PyTorch saves and loads, without the script's help."""
    global _checkpoints
    if not run.alive:
        return
    if _checkpoints is None or not _checkpoints.installed:
        _checkpoints = Checkpoints(time.monotonic)
        _checkpoints.install()
    _checkpoints.tell(run)


def last_words(run: Run, status: str) -> None:
    """Commit what was saved last, as the run is about to finish and no more files are to come, unless it failed."""
    if _checkpoints is not None and _checkpoints.run is run and status != "failed":
        _checkpoints.training_goes_on()


def to_process(settings: Settings) -> Attachment:
    """Attach to this process, which has just imported torch."""
    global _checkpoints
    _checkpoints = Checkpoints(time.monotonic, settings.step_from)
    _checkpoints.install()
    return Attachment(settings, _checkpoints)


class Attachment:
    """The hooks in this process, and what they have seen so far."""

    def __init__(self, settings: Settings, checkpoints: Checkpoints) -> None:
        self.status = "failed"  # what the run is told at the interpreter's exit, unless the launcher knows better
        self.ended_by = ""
        self.run: Run | None = None
        self.settings = settings
        self.checkpoints = checkpoints
        self._pid = os.getpid()
        self._over = False
        self._armed = False
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._handles: list[Any] = []
        self.loaders = _Loaders(self)
        self._models = _Models(self)
        # The loop, as far as it is known.
        self.loop: int | None = None  # its thread
        self.seen_backward = False
        self._in_backward = self._in_step = self._step_is_due = False
        self._first: weakref.ref[torch.optim.Optimizer] | None = None
        self._turns: dict[int, int] = {}  # steps of other optimizers since the first one's last
        self._loaded: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._blind_steps = 0  # of the first optimizer, while no backward pass was seen
        self._backwards = 0  # since the last step's end
        self._without_step = 0  # backward passes since any optimizer's step
        self._tokens: list[Tokens | None] = []  # of the open step
        self._replace(torch.optim.Optimizer, "__init__", self._making_optimizer)

    # Coming and going.

    def _replace(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        ours = functools.wraps(original)(around(original))
        setattr(owner, name, ours)
        self._replaced.append((owner, name, original, ours))

    def _arm(self) -> None:
        """Take all the places; not before the first optimizer is made, whose making imports torch._dynamo.

        Dynamo skips what torch.compiler.disable marks; without `recursive` it still compiles what is called inside.
        """
        self._armed = True
        disable: Any = torch.compiler.disable
        self._handles = [
            register_optimizer_step_pre_hook(disable(lambda optimizer, *_: self.see(self._before_step, optimizer))),
            register_optimizer_step_post_hook(disable(lambda optimizer, *_: self.see(self._after_step, optimizer))),
        ]
        for owner, name, around in (
            (torch.autograd, "backward", self._running_backward),
            (torch.optim.Optimizer, "zero_grad", self._zeroing),
            (torch.utils.data.DataLoader, "__iter__", self.loaders.around_iter),
            (torch.utils.data.dataloader._BaseDataLoaderIter, "__next__", self.loaders.around_next),
        ):
            self._replace(owner, name, functools.partial(_skipped, disable, around))
        self._models.look()

    def step_back(self) -> None:
        """Leave the process as it was found, where nobody else took the places meanwhile."""
        self._over = True
        self._models.look_no_more()
        for owner, name, original, ours in self._replaced:
            if getattr(owner, name, None) is ours:
                setattr(owner, name, original)
        for handle in self._handles:
            handle.remove()
        if self.checkpoints.run in (None, self.run):  # else a run of the script's own is told of checkpoints
            self.checkpoints.uninstall()

    def telling(self) -> Run | None:
        """Return the run if there is one, it is still ours, and this is not a forked child."""
        run = self.run
        if run is None or self._over:
            return None
        if run.alive:
            return run
        if os.getpid() == self._pid:
            self.step_back()
        return None

    def _begin(self, surely: bool) -> Run | None:
        """Return the run; make it if this process trains, once its place among the ranks can be known."""
        if self.run is not None or self._over:
            return self.telling()
        if Run._newest is not None:
            log.info("the script has a Run of its own, and `flopwatch run` leaves it to that")
            self.step_back()
            return None
        distributed: Any = torch.distributed
        alone = os.environ.get("WORLD_SIZE", "1") in ("", "0", "1")
        together = alone or (distributed.is_available() and distributed.is_initialized())
        if not surely and (_uses_flopwatch() or not together):
            return None
        self._pid = os.getpid()
        run = Run(
            self.settings.name,
            flops_per_token=self.settings.flops_per_token,
            convention=self.settings.convention,
            dtype=self.settings.dtype,
            peak_flops=self.settings.peak_flops,
            peak_source=self.settings.peak_source,
            step_source="optimizer",
            before=self.checkpoints.before,
        )
        if not run.alive:
            self.step_back()
            return None
        self.run = run
        if run.rank == 0:
            run.add(catalogue.TRAINING_BACKWARDS_WITHOUT_STEP, 0)
        self.checkpoints.tell(run)
        atexit.register(self._at_exit)  # after the pusher's own, so it is called before that
        return run

    def _at_exit(self) -> None:
        run = self.telling()
        if run is None or os.getpid() != self._pid:
            return
        if self.status in ("completed", "preempted"):  # Ctrl-C may have come between two files
            last_words(run, self.status)
        self._give_up_gradients(run)
        run.ended_by = self.ended_by
        run.finish(self.status)

    def see(self, seen: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        """Call one of ours, whose errors the script must not see; return what it returns, None if it fails."""
        try:
            return seen(*args, **kwargs)
        except Exception as error:
            if self.run is not None:
                self.run.failed("attach", error)
            else:
                self._over = True
                log.warning("this process cannot be watched: %s (training goes on without it)", error, exc_info=error)
            return None

    # Optimizers.

    def _making_optimizer(self, original: Callable[..., None]) -> Callable[..., None]:
        def __init__(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if not self._over:
                self.see(self._made, optimizer)

        return __init__

    def _made(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._armed:
            self._arm()
        with contextlib.suppress(AttributeError):  # an older PyTorch has none
            optimizer.register_load_state_dict_post_hook(self._loaded.add)
        self._begin(surely=False)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._begin(surely=self._backwards > 0) is None:
            return
        first = None if self._first is None else self._first()
        if first is None:
            self._first, first = weakref.ref(optimizer), optimizer
            self._turns.clear()
        self._in_step = first is optimizer

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.telling() is None or self._first is None:
            return
        self._without_step = 0
        if not self._backwards:
            if self.seen_backward or optimizer is not self._first():
                return
            self._blind_steps += 1
            if self._blind_steps == 1:
                return  # of torch.distributed.checkpoint's making, which wants the state that a first step makes
        if optimizer is not self._first():
            turns = self._turns[id(optimizer)] = self._turns.get(id(optimizer), 0) + 1
            if turns < TURNS:
                return
            self._first = weakref.ref(optimizer)
        self._in_step = False
        self._turns.clear()
        if self._in_backward:
            self._step_is_due = True  # the pass goes on, and so do other optimizers
        else:
            self._end_step(optimizer)

    def _end_step(self, optimizer: torch.optim.Optimizer | None) -> None:
        run = self.telling()
        if run is None:
            return
        self._step_is_due = False
        self.checkpoints.training_goes_on()
        if not run.steps_taken:
            self._find_position(run, optimizer)
        tokens, self._tokens = self._tokens, []
        self._backwards = 0
        if self.settings.tokens_per_step is not None:
            run.step(self.settings.tokens_per_step)
        elif not tokens or None in tokens:
            run.step()
            if run.steps_taken == STEPS_TO_SEE_MODELS and run.rank == 0:
                log.warning(
                    "the batches say no tokens; name where they are with --tokens-from, or their number with "
                    "--tokens-per-step"
                )
        else:
            count = sum(batch.count for batch in tokens if batch is not None)
            if hasattr(self.settings.flops_per_token, "flops"):
                run.step(count, sum_len_squared=sum(batch.sum_len_squared for batch in tokens if batch is not None))
            else:
                run.step(count)
        if run.steps_taken >= STEPS_TO_SEE_MODELS:
            self._models.look_no_more()

    def _find_position(self, run: Run, optimizer: torch.optim.Optimizer | None) -> None:
        """Tell at which step the run was resumed, if it was: if the optimizer was given a state."""
        if optimizer is None or optimizer not in self._loaded:
            return
        step = self.checkpoints.loaded_step
        if self.settings.step_from is None:
            # Adam and most others count their steps themselves, and have just counted this one.
            states = itertools.islice(optimizer.state.values(), MOST_STATES)
            counts = (whole(state.get("step")) for state in states if isinstance(state, Mapping))
            counted = max((count for count in counts if count is not None), default=0)
            step = counted - 1 if counted > 0 else step
        run.restored(step)

    def _zeroing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self._without_step and not self._in_step:
                self.see(self._zeroed, optimizer)
            return original(optimizer, *args, **kwargs)

        return zero_grad

    def _zeroed(self, optimizer: torch.optim.Optimizer) -> None:
        run = self.telling()
        if run is not None and self._first is not None and optimizer is self._first():
            self._give_up_gradients(run)

    def _give_up_gradients(self, run: Run) -> None:
        if run.rank == 0 and self._without_step:
            run.add(catalogue.TRAINING_BACKWARDS_WITHOUT_STEP, self._without_step)
        self._without_step = 0

    # Backward passes.

    def _running_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            if not self.see(self._backward_begins):
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                self.see(self._backward_ends)

        return backward

    def _backward_begins(self) -> bool:
        """See a backward pass begin; return whether it is one of the loop, and not inside another."""
        if self._over or self._in_backward or self.loop not in (None, threading.get_ident()):
            return False
        if (run := self._begin(surely=True)) is None:
            return False
        self.loop = threading.get_ident()
        self.seen_backward = self._in_backward = True
        self._backwards += 1
        self._without_step += 1
        self.checkpoints.training_goes_on()
        self._tokens += self.loaders.training(run)
        return True

    def _backward_ends(self) -> None:
        self._in_backward = False
        if self._step_is_due:
            self._end_step(None if self._first is None else self._first())


class _Loaders:
    """Tells time spent on batches, for training or for evaluation, by what follows them."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._fetching = False
        self._made: tuple[int, Mark] | None = None  # the iterator made last, by its id, and when that began
        self._kinds: dict[int, str] = {}  # by the dataset's id
        self._always_training: set[int] = set()  # also under no_grad
        self._newest: int | None = None  # whose batch came last
        self._held: tuple[int, Mark, Mark] | None = None  # a batch whose purpose is not known yet: whose, begin, end
        self._evaluated: int | None = None  # what is being evaluated
        self._evaluated_batches = 0
        self._batches: dict[int, deque[Tokens | None]] = {}  # fetched and not yet trained on
        self._passed: dict[int, list[Tokens | None]] = {}  # older ones, until the loop fetches again
        self._iterating: dict[int, weakref.ref[Any]] = {}

    def around_iter(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return what takes the place of DataLoader.__iter__: starting workers is part of the wait for a batch."""
        see = self._attachment.see

        def __iter__(loader: Any) -> Any:
            run = see(self._attachment.telling)
            began = None if run is None else see(run.mark)
            iterator = original(loader)
            if began is not None:
                self._made = id(iterator), began
            return iterator

        return __iter__

    def around_next(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return what takes the place of the iterators' __next__."""
        see = self._attachment.see

        def __next__(iterator: Any) -> Any:
            begun = see(self._begins, iterator)
            if begun is None:
                return original(iterator)
            try:
                batch = original(iterator)
            except StopIteration:
                see(self._ends, iterator, *begun)
                raise
            finally:
                self._fetching = self._attachment.checkpoints.fetching = False
            see(self._came, iterator, batch, *begun)
            return batch

        return __next__

    def _begins(self, iterator: Any) -> tuple[Run, Mark] | None:
        run = self._attachment.telling()
        if run is None or self._fetching or self._attachment.loop not in (None, threading.get_ident()):
            return None
        self._fetching = self._attachment.checkpoints.fetching = True
        self._attachment.checkpoints.training_goes_on()
        made, self._made = self._made, None
        return run, run.mark() if made is None or made[0] != id(iterator) else made[1]

    def _came(self, iterator: Any, batch: Any, run: Run, began: Mark) -> None:
        ended = run.mark()
        dataset = self._newest = self._dataset(iterator)
        kind = self._kinds.get(dataset)
        if dataset not in self._always_training and (kind == EVALUATION or not torch.is_grad_enabled()):
            self._evaluate(run, dataset, began)
            return
        unused = self._batches.get(dataset)
        if unused is None:
            unused = self._batches[dataset] = deque(maxlen=1 + _fetches_ahead(sys._getframe(1)))
        if not unused:
            self._passed.pop(dataset, None)
        elif len(unused) == unused.maxlen:
            # Skipped by a loop that resumes, or the first of some that are fetched before any is trained on.
            self._passed.setdefault(dataset, []).append(unused[0])
        unused.append(None)  # should what follows fail
        unused[-1] = tokens_of(batch, self._attachment.settings.tokens_from)
        if kind == TRAINING:
            self._leave_evaluation(run, began)
            run.batch_came(began, ended)
        elif self._attachment.seen_backward and self._held is not None and self._held[0] == dataset:
            # Two in a row, and no backward pass between them.
            self._kinds[dataset] = EVALUATION
            self._evaluate(run, dataset, self._held[1])
        else:
            self._held = dataset, began, ended

    def _ends(self, iterator: Any, run: Run, began: Mark) -> None:
        """See that an iterator has no more batches."""
        dataset = self._dataset(iterator)
        if self._held is not None and self._held[0] == dataset and self._attachment.seen_backward:
            self._kinds[dataset] = EVALUATION
            self._evaluate(run, dataset, self._held[1])
        self._dropped(dataset, began)

    def _evaluate(self, run: Run, dataset: int, since: Mark) -> None:
        if self._evaluated is None:
            run.enter("evaluation", at=since)
            self._evaluated_batches = 0
        self._evaluated, self._held = dataset, None
        self._evaluated_batches += 1
        self._batches.pop(dataset, None)
        self._passed.pop(dataset, None)

    def _leave_evaluation(self, run: Run, now: Mark) -> None:
        if self._evaluated is not None:
            self._evaluated = None
            run.leave("evaluation", at=now)

    def settle(self, run: Run) -> None:
        """See that the newest batch is for training."""
        newest = self._newest
        if newest is None:
            return
        if self._evaluated is not None:
            if self._evaluated == newest and self._evaluated_batches == 1:
                self._always_training.add(newest)  # whoever fetches it does so under no_grad
                self._kinds[newest] = TRAINING
            self._leave_evaluation(run, run.mark())
        if self._held is not None:
            dataset, began, ended = self._held
            self._kinds[dataset], self._held = TRAINING, None
            run.batch_came(began, ended)

    def training(self, run: Run) -> list[Tokens | None]:
        """See a backward pass begin; return the tokens it is the first to use."""
        self.settle(run)
        tokens = [unused.popleft() for unused in self._batches.values() if unused]
        if not tokens:
            tokens = [passed.pop() for passed in self._passed.values() if passed]
        return tokens

    def _dataset(self, iterator: Any) -> int:
        """Return whose batch this is, and see the loop over it end when the iterator is dropped."""
        dataset = getattr(iterator, "_dataset", iterator)
        this = id(dataset)
        if self._iterating.get(this, _nothing)() is not iterator:
            self._iterating[this] = weakref.ref(iterator, lambda _: self._attachment.see(self._dropped, this, None))
            if this not in self._kinds:
                with contextlib.suppress(TypeError):  # from a list, say, which leaves no word
                    weakref.finalize(dataset, self._forget, this).atexit = False
        return this

    def _forget(self, dataset: int) -> None:
        for known in (self._kinds, self._batches, self._passed, self._iterating):
            known.pop(dataset, None)
        self._always_training.discard(dataset)

    def _dropped(self, dataset: int, at: Mark | None) -> None:
        """See that a loop over batches was left, as it ended or by `break`."""
        self._iterating.pop(dataset, None)
        run = self._attachment.telling()
        if run is None or self._attachment.loop not in (None, threading.get_ident()):
            return
        if self._evaluated == dataset:
            self._leave_evaluation(run, run.mark())
        elif self._kinds.get(dataset) == TRAINING and self._newest == dataset:
            if at is not None:
                run.batch_came(at, run.mark())  # it waited to hear that there is none
            run.end_of_batches()


def _nothing() -> None:
    return None


def _skipped(disable: Any, around: Callable[[Any], Any], original: Any) -> Any:
    return disable(around(original), recursive=False)


class _Models:
    """Finds the models: what is called outside any other module, with gradients, in the first steps.

    By taking the place of nn.Module.__call__, which is put back while such a call lasts: Dynamo, which compares it with
    the one it knows, never sees ours inside a model it compiles. A global forward hook would have it warn.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._original: Any = None
        self._ours: Any = None
        self._known: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def look(self) -> None:
        """Begin to look."""
        self._original = original = torch.nn.Module.__call__

        @functools.wraps(original)
        def __call__(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._ours is None:
                return original(module, *args, **kwargs)
            self._put(original)
            try:
                self._attachment.see(self._called, module)
                return original(module, *args, **kwargs)
            finally:
                if self._ours is not None:
                    self._put(__call__)

        self._ours = __call__
        self._put(__call__)

    def _put(self, function: Any) -> None:
        # Somebody else who took the place keeps it.
        if torch.nn.Module.__call__ in (self._ours, self._original):
            torch.nn.Module.__call__ = function  # type: ignore[method-assign]

    def look_no_more(self) -> None:
        """Put back what was there."""
        if self._ours is not None:
            self._put(self._original)
            self._ours = None

    def _called(self, module: torch.nn.Module) -> None:
        attachment = self._attachment
        if (
            module in self._known
            or not module.training
            or not torch.is_grad_enabled()
            or attachment.loop not in (None, threading.get_ident())
            or (run := attachment.telling()) is None
            or not any(parameter.requires_grad for parameter in module.parameters())
        ):
            return
        attachment.loaders.settle(run)
        parts = set(itertools.chain.from_iterable(known.modules() for known in self._known))
        self._known.add(module)
        if module in parts:
            return
        run.watch(module)


def tokens_of(batch: Any, place: str | None = None) -> Tokens | None:
    """Return the tokens of a batch of integers at this place, by default `input_ids`; None if there are none.

    What an `attention_mask` of their shape leaves out is no token; if that is on a device, nobody knows.
    """
    ids = _at(batch, "input_ids" if place is None else place)
    if (
        not isinstance(ids, torch.Tensor)
        or ids.dtype.is_floating_point
        or ids.dtype.is_complex
        or not ids.dim()
        or ids.dtype is torch.bool
    ):
        return None
    mask, positions = (
        value if isinstance(value, torch.Tensor) and value.shape == ids.shape else None
        for value in (_at(batch, "attention_mask"), _at(batch, "position_ids"))
    )
    known = lengths(ids, mask, positions)
    return None if known is None else Tokens(sum(known), sum(length * length for length in known))


def _at(batch: Any, place: str) -> Any:
    if isinstance(batch, Mapping):
        return batch.get(place)
    if isinstance(batch, Sequence) and not isinstance(batch, str) and place.lstrip("-").isdigit():
        return batch[int(place)] if -len(batch) <= int(place) < len(batch) else None
    return getattr(batch, place, None)


def _fetches_ahead(caller: Any) -> int:
    """Return how many batches the loop that fetches them is behind.

    Accelerate's loaders are one ahead of theirs, and transformers' Trainer fetches those of a step before it trains.
    """
    ahead = 0
    for _ in range(FRAMES):
        if caller is None:
            break
        name = caller.f_globals.get("__name__", "")
        if name == "accelerate.data_loader":
            ahead = 1
        elif name == "transformers.trainer" and caller.f_code.co_name == "get_batch_samples":
            several = caller.f_locals.get("num_batches")
            return ahead + (several - 1 if isinstance(several, int) and several > 0 else 0)
        elif not name.startswith(("flopwatch.", "torch.")):
            break
        caller = caller.f_back
    return ahead


def _uses_flopwatch() -> bool:
    """Return whether a module that is not ours has our Run, and so may be about to make one."""
    return any(
        name.startswith("flopwatch.training.frameworks.")
        if name.startswith("flopwatch.")
        else getattr(module, "__dict__", {}).get("Run") is Run
        for name, module in list(sys.modules.items())
    )
