"""Recording of a training script that does not call flopwatch itself, through PyTorch's hooks (docs/run.md).

A step ends with the step() of the main optimizer, if a backward pass ran since the last step. The main optimizer is the
first one seen, until another makes TURNS steps without it. If no backward pass is ever seen (torch.func), each step()
of the main optimizer but the first counts. The run begins with the first optimizer. None begins if a script makes one.
https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.register_step_post_hook.html
"""

import atexit
import contextlib
import functools
import itertools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flopwatch import catalogue
from flopwatch.training.autolog.batches import Loaders, Tokens
from flopwatch.training.autolog.loop import LoopState, Settings
from flopwatch.training.autolog.models import ModelFinder
from flopwatch.training.run import Run
from flopwatch.training.terminal import Terminal
from flopwatch.training.torch.checkpoints import Checkpoints, commit_pending, install, whole
from flopwatch.training.torch.waits import Replaced

log = logging.getLogger("flopwatch")

TOP_SECONDS = 1.0  # between two updates of the terminal, and two pushes
TURNS = 20  # steps of another optimizer without one of the main optimizer
STEPS_TO_SEE_MODELS = 5  # training steps after which no model is looked for
MAX_STATES = 1000  # parameters whose step counts are read from an optimizer's state


class Attachment:
    """Hooks on the optimizers and backward passes of this process, and the state of the open step."""

    def __init__(self, settings: Settings, checkpoints: Checkpoints) -> None:
        self.status = "failed"  # reported at the interpreter's exit, unless `flopwatch run` sets another
        self.ended_by = ""
        self._loop = loop = LoopState(settings, checkpoints, self.step_back)
        self._armed = False
        self._handles: list[Any] = []  # of hooks, and of what was replaced
        self._loaders = Loaders(loop)
        self._models = ModelFinder(loop, self._loaders.settle)
        self._in_backward = self._in_step = self._step_is_due = False
        self._first: weakref.ref[torch.optim.Optimizer] | None = None
        self._turns: dict[int, int] = {}  # steps of other optimizers since the main one's last
        self._loaded: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._blind_steps = 0  # of the main optimizer, while no backward pass was seen
        self._backwards = 0  # since the last step's end
        self._without_step = 0  # backward passes since any optimizer's step
        self._tokens: list[Tokens | None] = []  # of the open step
        self._replace(torch.optim.Optimizer, "__init__", self._making_optimizer(torch.optim.Optimizer.__init__))

    @property
    def run(self) -> Run | None:
        """Return this process's run, None before it is made."""
        return self._loop.run

    def _replace(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        self._handles.append(Replaced(owner, name, functools.wraps(getattr(owner, name))(ours)))

    def _arm(self) -> None:
        """Install all other hooks when the first optimizer is made, because torch._dynamo is imported by then."""
        self._armed = True
        disable: Any = torch.compiler.disable  # recursive=False still compiles the callees
        before = disable(lambda optimizer, *_: self._loop.call(self._before_step, optimizer))
        after = disable(lambda optimizer, *_: self._loop.call(self._after_step, optimizer))
        self._handles += [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        for owner, name, around in (
            (torch.autograd, "backward", self._running_backward),
            (torch.optim.Optimizer, "zero_grad", self._zeroing),
            (torch.utils.data.DataLoader, "__iter__", self._loaders.around_iter),
            (torch.utils.data.dataloader._BaseDataLoaderIter, "__next__", self._loaders.around_next),
        ):
            self._replace(owner, name, disable(around(getattr(owner, name)), recursive=False))
        self._models.look()

    def step_back(self) -> None:
        """Remove all hooks, except from functions that other code has replaced since."""
        self._loop.over = True
        self._models.look_no_more()
        for handle in self._handles:
            handle.remove()
        checkpoints, run = self._loop.checkpoints, self._loop.run
        # Otherwise a run of the script's own uses them.
        if checkpoints.recorder in (None, None if run is None else run.recorder):
            checkpoints.uninstall()

    def _begin(self, surely: bool) -> Run | None:
        """Return the run, made now if this process `surely` trains, or has its rank and does not import Run itself."""
        loop = self._loop
        if loop.run is not None or loop.over:
            return loop.active_run()
        if Run._newest is not None:
            log.info("the script has a Run of its own; `flopwatch run` removes its hooks")
            self.step_back()
            return None
        distributed: Any = torch.distributed
        alone = os.environ.get("WORLD_SIZE", "1") in ("", "0", "1")
        together = alone or (distributed.is_available() and distributed.is_initialized())
        if not surely and (_uses_flopwatch() or not together):
            return None
        loop.pid = os.getpid()
        same = ("name", "flops_per_token", "convention", "dtype", "peak_flops", "peak_source")
        settings = {name: getattr(loop.settings, name) for name in same}
        interval = TOP_SECONDS if loop.settings.top else None
        run = Run(**settings, step_source="optimizer", push_interval=interval, before=loop.checkpoints.before)
        if not run.alive:
            self.step_back()
            return None
        loop.run = run
        if run.rank == 0:
            run.recorder.add(catalogue.TRAINING_DISCARDED_BACKWARD_TOTAL, 0)
            run.terminal = Terminal(run.name) if loop.settings.top else None
        loop.checkpoints.report_to(run.recorder)
        atexit.register(self._at_exit)  # registered after the pusher's, so called before it
        return run

    def _at_exit(self) -> None:
        run = self._loop.active_run()
        if run is None or os.getpid() != self._loop.pid:
            return
        if self.status in ("completed", "preempted"):  # Ctrl-C may have interrupted between two files
            commit_pending(run.recorder, self.status)
        self._give_up_gradients(run)
        run.ended_by = self.ended_by
        run.finish(self.status)

    def _making_optimizer(self, original: Callable[..., None]) -> Callable[..., None]:
        def __init__(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if not self._loop.over:
                self._loop.call(self._made, optimizer)

        return __init__

    def _made(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._armed:
            self._arm()
        with contextlib.suppress(AttributeError):  # old releases of PyTorch lack the method
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
        if self._loop.active_run() is None or self._first is None:
            return
        self._without_step = 0
        if not self._backwards:
            if self._loop.seen_backward or optimizer is not self._first():
                return
            self._blind_steps += 1
            if self._blind_steps == 1:
                return  # torch.distributed.checkpoint calls step() once to create the optimizer's state
        if optimizer is not self._first():
            turns = self._turns[id(optimizer)] = self._turns.get(id(optimizer), 0) + 1
            if turns < TURNS:
                return
            self._first = weakref.ref(optimizer)
        self._in_step = False
        self._turns.clear()
        if self._in_backward:
            self._step_is_due = True  # the pass goes on, and other optimizers may step
        else:
            self._end_step(optimizer)

    def _end_step(self, optimizer: torch.optim.Optimizer | None) -> None:
        run = self._loop.active_run()
        if run is None:
            return
        self._step_is_due = False
        self._loop.checkpoints.training_goes_on()
        if not run.recorder.steps_taken:
            self._find_position(run, optimizer)
        tokens, self._tokens = self._tokens, []
        self._backwards = 0
        if self._loop.settings.tokens_per_step is not None:
            run.step(self._loop.settings.tokens_per_step)
        elif not tokens or None in tokens:
            run.step()
            if run.recorder.steps_taken == STEPS_TO_SEE_MODELS and run.rank == 0:
                log.warning("no token count found in the batches; pass --tokens-from KEY or --tokens-per-step N")
        else:
            known = [batch for batch in tokens if batch is not None]
            by_length = hasattr(self._loop.settings.flops_per_token, "flops")
            squared = sum(batch.sum_len_squared for batch in known) if by_length else None
            run.step(sum(batch.count for batch in known), sum_len_squared=squared)
        if run.recorder.steps_taken >= STEPS_TO_SEE_MODELS:
            self._models.look_no_more()

    def _find_position(self, run: Run, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is None or optimizer not in self._loaded:
            return
        step = self._loop.checkpoints.loaded_step
        if self._loop.settings.step_from is None:
            # Adam and most others count their steps themselves, and have just counted this one.
            states = itertools.islice(optimizer.state.values(), MAX_STATES)
            counts = (whole(state.get("step")) for state in states if isinstance(state, Mapping))
            counted = max((count for count in counts if count is not None), default=0)
            step = counted - 1 if counted > 0 else step
        run.restored(step)

    def _zeroing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self._without_step and not self._in_step:
                self._loop.call(self._zeroed, optimizer)
            return original(optimizer, *args, **kwargs)

        return zero_grad

    def _zeroed(self, optimizer: torch.optim.Optimizer) -> None:
        run = self._loop.active_run()
        if run is not None and self._first is not None and optimizer is self._first():
            self._give_up_gradients(run)

    def _give_up_gradients(self, run: Run) -> None:
        if run.rank == 0 and self._without_step:
            run.recorder.add(catalogue.TRAINING_DISCARDED_BACKWARD_TOTAL, self._without_step)
        self._without_step = 0

    def _running_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            if not self._loop.call(self._backward_begins):
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                self._loop.call(self._backward_ends)

        return backward

    def _backward_begins(self) -> bool:
        """Record the begin of a backward pass. Return False if it is nested or not on the loop's thread."""
        if self._loop.over or self._in_backward or not self._loop.on_this_thread():
            return False
        if (run := self._begin(surely=True)) is None:
            return False
        self._loop.thread = threading.get_ident()
        self._loop.seen_backward = self._in_backward = True
        self._backwards += 1
        self._without_step += 1
        self._loop.checkpoints.training_goes_on()
        self._tokens += self._loaders.training(run.recorder)
        return True

    def _backward_ends(self) -> None:
        self._in_backward = False
        if self._step_is_due:
            self._end_step(None if self._first is None else self._first())


def to_process(settings: Settings) -> Attachment:
    """Attach flopwatch's hooks to this process, which has just imported torch."""
    return Attachment(settings, install(settings.step_from))


def _uses_flopwatch() -> bool:
    """Return whether code outside flopwatch has imported Run, and so may soon make one."""
    modules = list(sys.modules.items())
    if any(name.startswith("flopwatch.training.frameworks.") for name, _ in modules):
        return True
    others = (module for name, module in modules if not name.startswith("flopwatch."))
    return any(getattr(module, "__dict__", {}).get("Run") is Run for module in others)
