"""Test phases of real steps on the CPU, with a clock that only sleeps advance, and on a simulated device."""

from __future__ import annotations

import copy
import gc
import pickle
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

from flopwatch.catalogue import BY_NAME
from flopwatch.training import Run
from flopwatch.training.torch import phases
from tests.support.simulated_cuda import SimulatedCuda

pytestmark = pytest.mark.torch

FORWARD, BACKWARD, OPTIMIZER = 0.02, 0.03, 0.01  # seconds that each part sleeps in tests with a fake clock

Seconds = dict[str, float]


class SleepyGradient(torch.autograd.Function):
    """Identity function whose gradient calls `does`."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, does: Callable[[], None]) -> torch.Tensor:
        ctx.does = does
        return tensor * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.does()
        return gradient, None


@dataclass
class Output:
    logits: torch.Tensor
    unused: None = None


class Model(torch.nn.Module):
    """Tiny model that calls functions in its passes."""

    def __init__(
        self,
        forward: Callable[[], None] = lambda: None,
        backward: Callable[[], None] = lambda: None,
        form: str = "tensor",
    ) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.does, self.form = (forward, backward), form

    def forward(self, x: torch.Tensor) -> Any:
        self.does[0]()
        y = SleepyGradient.apply(self.inner(x), self.does[1])  # type: ignore[no-untyped-call]
        return {"tensor": y, "dict": {"loss": y}, "nested": (None, [y]), "dataclass": Output(y)}[self.form]


class Sgd(torch.optim.Optimizer):
    """Plain gradient descent that calls `does` in its step.

    It is not a subclass of torch's optimizer, because another test's hooks on torch's optimizers would also apply to
    it.
    """

    does: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        self.does()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad, alpha=-group["lr"])
        return loss


class Clock:
    """Fake clock that only `sleep` advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


clock = Clock()


def sleep(seconds: float) -> Callable[[], None]:
    def sleeps() -> None:
        clock.now += seconds

    return sleeps


def sleepy_model(form: str = "tensor") -> Model:
    return Model(sleep(FORWARD), sleep(BACKWARD), form)


def sleepy_optimizer(model: torch.nn.Module) -> Sgd:
    optimizer = Sgd(model.parameters(), lr=0.1)
    optimizer.does = sleep(OPTIMIZER)
    return optimizer


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run("tiny", clock=clock, environ={"FLOPWATCH_DISABLE": "1"})
    made.recorder.sample(1)
    yield made
    phases.attach(made.recorder).remove()


def totals(run: Run) -> Seconds:
    """Return the seconds of each phase, the measured step seconds and steps, and the number of errors so far."""
    points = run.snapshot().points
    return {
        **{labels["phase"]: seconds for labels, seconds in points[BY_NAME["training_phase_seconds_total"]]},
        **{
            name: points.get(BY_NAME[family], [({}, 0.0)])[0][1]
            for name, family in (
                ("seconds", "training_measured_step_seconds_total"),
                ("steps", "training_measured_steps_total"),
                ("errors", "training_hook_errors_total"),
            )
        },
    }


def each_step(run: Run, step: Callable[[], object], steps: int = 6) -> Seconds:
    """Make steps and return the median of each value over the measured ones."""
    measured = measured_steps(run, step, steps)
    return (
        {name: statistics.median(one.get(name, 0.0) for one in measured) for name in measured[-1]} if measured else {}
    )


def measured_steps(run: Run, step: Callable[[], object], steps: int) -> list[Seconds]:
    """Make steps and return the values of each measured one."""
    measured: list[Seconds] = []
    before = totals(run)
    for _ in range(steps):
        step()
        run.step()
        after = totals(run)
        if after["steps"] > before["steps"]:
            measured.append({name: seconds - before.get(name, 0.0) for name, seconds in after.items()})
        before = after
    return measured


def train(model: torch.nn.Module, *optimizers: torch.optim.Optimizer, micro_batches: int = 1) -> Callable[[], None]:
    def step() -> None:
        for _ in range(micro_batches):
            output = model(torch.ones(2, 4))
            loss: torch.Tensor = (
                output
                if isinstance(output, torch.Tensor)
                else output["loss"]
                if isinstance(output, dict)
                else output[1][0]
                if isinstance(output, tuple)
                else output.logits
            ).sum()
            loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


@pytest.mark.parametrize("form", ["tensor", "dict", "nested", "dataclass"])
def test_what_was_planted_in_a_phase_is_found_in_it(run: Run, form: str) -> None:
    model = sleepy_model(form)
    phases.attach(run.recorder, model)
    measured = each_step(run, train(model, sleepy_optimizer(model)))
    assert measured["forward"] == pytest.approx(FORWARD)
    assert measured["backward"] == pytest.approx(BACKWARD)
    assert measured["optimizer"] == pytest.approx(OPTIMIZER)
    assert measured["seconds"] == pytest.approx(FORWARD + BACKWARD + OPTIMIZER)
    assert totals(run)["errors"] == 0


def test_by_a_real_clock_phases_are_as_long_as_what_is_in_them_and_together_no_longer_than_the_step() -> None:
    real = Run("tiny", environ={"FLOPWATCH_DISABLE": "1"})
    real.recorder.sample(1)
    model = Model(lambda: time.sleep(FORWARD), lambda: time.sleep(BACKWARD))
    optimizer = Sgd(model.parameters(), lr=0.1)
    optimizer.does = lambda: time.sleep(OPTIMIZER)
    attached = phases.attach(real.recorder, model)
    measured = measured_steps(real, train(model, optimizer), steps=8)
    attached.remove()
    assert len(measured) >= 3  # a step that other work made twice as long is left out
    for one in measured:
        assert one["forward"] >= FORWARD - 1e-6  # rounding, as these are differences of sums
        assert one["backward"] >= BACKWARD - 1e-6
        assert one["optimizer"] >= OPTIMIZER - 1e-6
        assert one["forward"] + one["backward"] + one["optimizer"] <= one["seconds"] + 1e-6


def test_micro_batches_add_up(run: Run) -> None:
    model = sleepy_model()
    phases.attach(run.recorder, model)
    measured = each_step(run, train(model, sleepy_optimizer(model), micro_batches=3))
    assert measured["forward"] == pytest.approx(3 * FORWARD)
    assert measured["backward"] == pytest.approx(3 * BACKWARD)
    assert measured["optimizer"] == pytest.approx(OPTIMIZER)


def test_two_optimizers_add_up_and_one_inside_another_counts_once(run: Run) -> None:
    model = sleepy_model()
    first, second = sleepy_optimizer(model), sleepy_optimizer(model)
    inner = sleepy_optimizer(model)
    second.does = inner.step
    phases.attach(run.recorder, model)
    assert each_step(run, train(model, first, second))["optimizer"] == pytest.approx(2 * OPTIMIZER)


def test_an_optimizer_whose_step_ends_the_training_step_is_in_that_step(run: Run) -> None:
    model = sleepy_model()
    ends = register_optimizer_step_post_hook(lambda *_: run.step())
    run.recorder.sample(2)
    phases.attach(run.recorder, model)
    step = train(model, sleepy_optimizer(model))
    for _ in range(9):
        step()
    measured = totals(run)
    assert (measured["steps"], measured["errors"]) == (4, 0)
    assert measured["optimizer"] == pytest.approx(4 * OPTIMIZER)
    ends.remove()


def test_a_step_that_is_given_a_closure_is_no_optimizers_work_alone(run: Run) -> None:
    model = sleepy_model()
    phases.attach(run.recorder)
    optimizer = sleepy_optimizer(model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(1, 4)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for given in ((closure,), ()):
        for _ in range(3):
            optimizer.step(*given)
            run.step()
        assert ("optimizer" in totals(run)) == (given == ())


def test_two_models_are_measured_as_one_inside_the_other_is_not(run: Run) -> None:
    generator, critic = sleepy_model(), sleepy_model()
    phases.attach(run.recorder, generator)
    phases.attach(run.recorder, critic)
    phases.attach(run.recorder, critic)
    phases.attach(run.recorder, critic.inner)

    def step() -> None:
        critic(generator(torch.ones(2, 4))).sum().backward()

    measured = each_step(run, step)
    assert measured["forward"] == pytest.approx(2 * FORWARD)
    assert measured["backward"] == pytest.approx(2 * BACKWARD)


def test_a_pass_without_gradients_and_a_recomputed_one_are_no_forward_phase(run: Run) -> None:
    model = sleepy_model()
    phases.attach(run.recorder, model)

    def step() -> None:
        with torch.no_grad():
            model(torch.ones(2, 4))
        checkpoint(model, torch.ones(2, 4, requires_grad=True), use_reentrant=False).sum().backward()

    measured = each_step(run, step)
    assert measured["forward"] == pytest.approx(FORWARD)
    # The gradient of a checkpointed model's output arrives before it is recomputed.
    assert measured["backward"] == pytest.approx(FORWARD + BACKWARD)


def test_what_the_engine_waits_for_at_the_end_of_a_pass_is_not_backward(run: Run) -> None:
    """DDP's reducer and FSDP2 wait for other ranks in this way: in a callback queued from a hook on a parameter."""
    model = sleepy_model()
    phases.attach(run.recorder, model)
    model.inner.weight.register_hook(  # type: ignore[no-untyped-call]
        lambda _: torch.autograd.Variable._execution_engine.queue_callback(sleep(0.05))
    )
    measured = each_step(run, train(model))
    assert measured["backward"] == pytest.approx(BACKWARD)
    assert measured["seconds"] == pytest.approx(FORWARD + BACKWARD + 0.05)


def test_an_exception_in_any_phase_leaves_the_next_step_whole(run: Run) -> None:
    def fails() -> None:
        raise MemoryError

    model = sleepy_model()
    optimizer, other = sleepy_optimizer(model), sleepy_optimizer(model)
    phases.attach(run.recorder, model)
    fine = model.does
    for broken in ((fails, fine[1]), (fine[0], fails)):
        model.does = broken
        with suppress(MemoryError):
            train(model)()
    model.does, other.does = fine, fails
    with suppress(MemoryError):
        other.step()
    measured = each_step(run, train(model, optimizer))
    assert [measured["forward"], measured["backward"], measured["optimizer"]] == pytest.approx(
        [FORWARD, BACKWARD, OPTIMIZER]
    )


def test_a_step_that_calls_the_model_is_not_counted_twice(run: Run) -> None:
    model = sleepy_model()
    phases.attach(run.recorder, model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return float(loss.detach())

    measured = each_step(run, lambda: optimizer.step(closure))  # type: ignore[no-untyped-call]
    assert measured["forward"] == pytest.approx(FORWARD)
    assert "optimizer" not in measured


def test_what_a_collection_of_garbage_takes_is_a_phase(run: Run) -> None:
    class Slow:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            clock.now += 0.02

    def step() -> None:
        Slow()
        gc.collect(0)

    phases.attach(run.recorder)
    assert each_step(run, step)["garbage_collection"] == pytest.approx(0.02)


def test_only_every_kth_step_is_measured(run: Run) -> None:
    model = Model(sleep(0.005))
    run.recorder.sample(3)
    phases.attach(run.recorder, model)
    for _ in range(12):
        train(model)()
        gc.collect(0)
        run.step()
    assert totals(run)["steps"] in (3, 4)  # of 12; the first has no mean to compare with
    points = run.snapshot().points
    assert points[BY_NAME["training_sampled_every_steps"]] == [({}, 3.0)]


def test_no_bit_of_the_training_changes(run: Run) -> None:
    losses = []
    for attached in (False, True):
        torch.manual_seed(0)
        model = Model()
        if attached:
            phases.attach(run.recorder, model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).square().sum()
            loss.backward()
            optimizer.step()
            clock.now += 0.01
            run.step()
            losses.append(loss.item())
    assert losses[:5] == losses[5:]
    assert "forward" in totals(run)


def test_marks_that_fail_stop_no_training(run: Run) -> None:
    def fails() -> float:
        raise OSError("broken")

    model = Model()
    phases.attach(run.recorder, model)
    run.recorder.mark = fails
    before = model.inner.weight.clone()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))()
    assert not torch.equal(before, model.inner.weight)
    assert totals(run)["errors"] == 2  # at the begin of the forward pass, and at the optimizer's step


def test_removed_hooks_measure_nothing(run: Run) -> None:
    model = sleepy_model()
    callbacks = len(gc.callbacks)
    phases.attach(run.recorder, model).remove()
    assert each_step(run, train(model, sleepy_optimizer(model)), steps=3) == {}
    assert len(gc.callbacks) == callbacks
    assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == (0, 0)


def test_a_copy_of_the_model_is_not_measured_and_a_pickle_needs_no_flopwatch(run: Run) -> None:
    model = torch.nn.Linear(4, 4)
    phases.attach(run.recorder, model)
    pickled = pickle.dumps(model)
    assert b"flopwatch" not in pickled
    slow = sleepy_optimizer(model)
    for other in (copy.deepcopy(model), pickle.loads(pickled)):
        each_step(run, train(other, slow), steps=3)
    assert "optimizer" in totals(run)
    assert "forward" not in totals(run)
    assert "forward" in each_step(run, train(model, slow))
    assert totals(run)["errors"] == 0


Compile = Callable[[torch.nn.Module, Any, Callable[[torch.nn.Module], None]], Callable[[torch.Tensor], torch.Tensor]]


def attached_first(model: torch.nn.Module, backend: Any, attach: Callable[[torch.nn.Module], None]) -> Any:
    attach(model)
    return torch.compile(model, backend=backend, fullgraph=True)


def attached_after(model: torch.nn.Module, backend: Any, attach: Callable[[torch.nn.Module], None]) -> Any:
    compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
    attach(compiled)
    return compiled


def in_place(model: torch.nn.Module, backend: Any, attach: Callable[[torch.nn.Module], None]) -> Any:
    model.compile(backend=backend)
    attach(model)
    return model


def the_function_around_it(model: torch.nn.Module, backend: Any, attach: Callable[[torch.nn.Module], None]) -> Any:
    attach(model)
    return torch.compile(lambda x: model(x) * 2, backend=backend, fullgraph=True)


class Layers(torch.nn.Module):
    """Model that Dynamo compiles whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(torch.relu(self.first(x)))
        return y


def compiled_training(how: Compile, attach: Callable[[torch.nn.Module], None]) -> tuple[Any, ...]:
    """Train a compiled model with a compiled optimizer. Return Dynamo's counters and the losses."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = Layers()
    backend = CompileCounterWithBackend("aot_eager")
    forward = how(model, backend, attach)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend=backend)
    losses = []
    for size in (4, 4, 4, 5, 6, 6, 6):
        optimizer.zero_grad()
        loss = forward(torch.randn(size, 4)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        step()
        losses.append(loss.item())
    return (
        counters["frames"]["total"],
        backend.frame_count,
        backend.op_count,
        dict(counters["graph_break"]),
        dict(counters["stats"]),
        losses,
    )


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.long
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # PyTorch's own
@pytest.mark.parametrize(
    ("how", "measured"),
    [(attached_first, True), (attached_after, True), (in_place, True), (the_function_around_it, False)],
)
def test_compiled_training_has_no_more_frames_breaks_or_recompilations(run: Run, how: Compile, measured: bool) -> None:
    compiled_training(how, lambda model: None)  # the first one in a process compiles a little more
    attempts_without, *without = compiled_training(how, lambda model: None)

    def attach(model: torch.nn.Module) -> None:
        phases.attach(run.recorder, model)

    attempts, *counts = compiled_training(how, attach)
    assert counts == without
    assert attempts <= attempts_without
    compiled = how(Layers(), "aot_eager", attach)
    for _ in range(5):
        compiled(torch.ones(4, 4)).sum().backward()  # type: ignore[no-untyped-call]
        clock.now += 0.01
        run.step()
    assert {name for name in totals(run) if name in ("forward", "backward")} == (
        {"forward", "backward"} if measured else set()
    )
    assert totals(run)["errors"] == 0


def test_on_a_device_that_is_behind_the_phases_are_its_own() -> None:
    cuda = SimulatedCuda()
    run = Run("tiny", clock=lambda: cuda.now, environ={"FLOPWATCH_DISABLE": "1"})
    run.recorder.sample(1)
    run.recorder.mark = run.recorder.step_mark = cuda.moments().mark
    model = Model(lambda: cuda.current.work(0.1), lambda: cuda.current.work(0.2))
    optimizer = Sgd(model.parameters(), lr=0.1)
    optimizer.does = lambda: cuda.current.work(0.05)
    attached = phases.attach(run.recorder, model)
    step = train(model, optimizer, micro_batches=2)
    for _ in range(10):
        step()
        cuda.now += 0.001  # all that the host takes, while the device takes 650 ms
        run.step()
    assert totals(run)["steps"] == 0  # the device has not finished the first step
    cuda.finish()
    measured = totals(run)
    assert measured["steps"] == 8  # all but the first two, before which there is no mean
    assert measured["seconds"] == pytest.approx(8 * 0.65, abs=1e-5)
    assert [measured[phase] for phase in ("forward", "backward", "optimizer")] == pytest.approx(
        [8 * 0.2, 8 * 0.4, 8 * 0.05], abs=1e-5
    )
    assert cuda.errors == []
    attached.remove()


def test_a_pause_of_the_host_is_as_long_though_the_device_is_behind() -> None:
    cuda = SimulatedCuda()
    run = Run("tiny", clock=lambda: cuda.now, environ={"FLOPWATCH_DISABLE": "1"})
    run.recorder.sample(1)
    run.recorder.mark = cuda.moments().mark
    attached = phases.attach(run.recorder)
    for _ in range(4):
        cuda.current.work(0.5)
        with run.host_to_device():
            cuda.current.work(0.25)
        attached._collected("start", {})
        cuda.now += 0.01
        attached._collected("stop", {})
        run.step()
    cuda.finish()
    phase = totals(run)
    assert phase["steps"] == 2
    assert phase["garbage_collection"] == pytest.approx(2 * 0.01)
    assert phase["host_to_device"] == pytest.approx(2 * 0.25, abs=1e-5)
    attached.remove()


def test_a_copy_to_the_device_is_a_phase_of_measured_steps_only(run: Run) -> None:
    run.recorder.sample(2)
    phases.attach(run.recorder)

    def step() -> None:
        with run.host_to_device():
            clock.now += 0.01

    assert each_step(run, step)["host_to_device"] == pytest.approx(0.01)
    assert totals(run)["host_to_device"] == pytest.approx(0.02)  # of six steps; the first two have no mean
