"""Test what `flopwatch run` records of unmodified training loops, with real PyTorch on the CPU."""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.loops import SECONDS, Seen, Slow, flat, fresh, seen_by

WITHOUT_STEP = "training_discarded_backward_total"

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """Return what was recorded of each loop. One process runs all, because importing torch takes seconds."""
    return seen_by(__file__, tmp_path_factory.mktemp("loops"))


def counted(seen: Seen) -> tuple[float | None, float | None, float | None]:
    """Return steps, tokens, and backward passes without a step. Check that the hook had no error."""
    assert seen["training_hook_errors_total"] == 0
    return seen.get("training_steps_total"), seen.get("training_tokens_total"), seen.get(WITHOUT_STEP)


def activity(seen: Seen, name: str) -> float:
    return float(seen.get(f"{SECONDS}{{activity={name}}}", 0.0))


def evaluation_agrees(seen: Seen) -> bool:
    """Return whether an evaluation was recorded with the duration that the loop measured."""
    measured = seen["truth"]["evaluation"]
    return activity(seen, "evaluation") == pytest.approx(measured, rel=0.1, abs=0.01)


def differing(both: Seen) -> list[str]:
    """Return the activities whose recorded duration differs from the one in the loop's own run."""
    keys = {
        name: f"{SECONDS}{{activity={name}}}"
        for name in ("step", "data_stall", "evaluation", "checkpoint_save", "startup")
    }
    return [name for name, key in keys.items() if both[key] != pytest.approx(both["truth"][key], rel=0.02, abs=0.002)]


def seconds_agree(name: str, seen: Seen) -> bool:
    """Return whether both clocks of a loop that is timed twice agree. Other work may come between them."""
    if name.startswith("evaluation_"):
        return evaluation_agrees(seen)
    return name != "both" or not differing(seen)


# Steps.


def test_accumulated_gradients_make_one_step(seen: dict[str, Seen]) -> None:
    assert counted(seen["accumulation"]) == (4, 4 * 3 * 4 * 8, 0)


def test_two_optimizers_of_one_loss_make_one_step(seen: dict[str, Seen]) -> None:
    assert counted(seen["two_optimizers"]) == (5, 5 * 4 * 8, 0)


def test_a_gan_makes_one_step_when_its_first_optimizer_does(seen: dict[str, Seen]) -> None:
    assert counted(seen["gan"])[0] == 5
    assert counted(seen["gan"])[2] == 0


def test_optimizers_inside_the_backward_pass_make_one_step(seen: dict[str, Seen]) -> None:
    assert counted(seen["optimizer_in_backward"]) == (5, 5 * 4 * 8, 0)


def test_zero_counts_once_and_not_again_for_the_optimizer_inside(seen: dict[str, Seen]) -> None:
    assert counted(seen["zero"]) == (5, 5 * 4 * 8, 0)


def test_a_closure_that_runs_many_backward_passes_makes_one_step(seen: dict[str, Seen]) -> None:
    assert counted(seen["lbfgs"])[0] == 3
    assert counted(seen["lbfgs"])[2] == 0


def test_a_step_that_the_gradient_scaler_skips_does_not_count(seen: dict[str, Seen]) -> None:
    assert counted(seen["scaler"]) == (4, 6 * 4 * 8, 2)  # the tokens were trained on


def test_a_scheduler_alone_makes_no_step(seen: dict[str, Seen]) -> None:
    assert counted(seen["scheduler"])[0] == 0


def test_gradients_thrown_away_are_backward_passes_without_a_step(seen: dict[str, Seen]) -> None:
    assert counted(seen["thrown_away"]) == (3, 4 * 4 * 8, 2)  # no step came after the last


def test_a_step_that_only_makes_the_optimizers_state_does_not_count(seen: dict[str, Seen]) -> None:
    assert counted(seen["state_made"])[0] == 5


def test_where_no_backward_pass_is_seen_all_steps_but_the_first_count(seen: dict[str, Seen]) -> None:
    assert counted(seen["functional"])[0] == 4


@pytest.mark.parametrize("how", ["optimizer_replaced", "optimizer_dormant"])
def test_another_optimizer_takes_the_first_ones_place(seen: dict[str, Seen], how: str) -> None:
    missed = {"optimizer_replaced": 0, "optimizer_dormant": 19}[how]
    assert counted(seen[how])[0] == 3 + 25 - missed


def test_a_reentrant_backward_pass_is_part_of_the_outer_one(seen: dict[str, Seen]) -> None:
    assert counted(seen["reentrant"]) == (5, 5 * 4 * 8, 0)


# Batches and tokens.


def test_workers_of_a_data_loader_push_nothing_of_their_own(seen: dict[str, Seen]) -> None:
    assert counted(seen["workers"]) == (10, 10 * 4 * 8, 0)


def test_masked_tokens_are_not_counted(seen: dict[str, Seen]) -> None:
    assert counted(seen["masked"])[1] == 5 * 4 * 6


@pytest.mark.parametrize(("loop", "tokens"), [("a_key", 5 * 4 * 8), ("a_place", 5 * 4 * 8), ("a_number", 5 * 1000.0)])
def test_a_flag_names_where_the_tokens_are(seen: dict[str, Seen], loop: str, tokens: float) -> None:
    assert counted(seen[loop])[1] == tokens


@pytest.mark.parametrize("loop", ["unnamed_tokens", "no_loader", "no_integers"])
def test_tokens_are_absent_where_the_batches_have_none(seen: dict[str, Seen], loop: str) -> None:
    assert counted(seen[loop]) == (5, None, 0)


def test_batches_that_a_resumed_loop_skips_are_not_trained_on(seen: dict[str, Seen]) -> None:
    assert counted(seen["skipping"]) == (5, 5 * 4 * 8, 0)
    assert activity(seen["skipping"], "evaluation") == 0


def test_batches_of_a_step_that_are_fetched_before_it_all_count(seen: dict[str, Seen]) -> None:
    assert counted(seen["fetched_before"]) == (4, 12 * 4 * 8, 0)
    assert counted(seen["trainer"]) == (6, 16 * 4 * 8, 0)


def test_accelerates_loader_that_fetches_ahead_gives_every_step_its_own_tokens(seen: dict[str, Seen]) -> None:
    assert counted(seen["accelerate"]) == (5, 5 * 4 * 8, 0)
    assert seen["accelerate"]["truth"] == [32, 64, 96, 128, 160]


# Activities.


@pytest.mark.parametrize(
    "how",
    [
        "no_grad_around",
        "no_grad_inside",
        "inference_mode",
        "one_batch",
        "left_early",
        "new_loader_every_time",
        "on_the_training_data",
    ],
)
def test_an_evaluation_inside_training_is_distinguished_from_it(seen: dict[str, Seen], how: str) -> None:
    evaluation = seen[f"evaluation_{how}"]
    assert counted(evaluation) == (12, 12 * 4 * 8, 0)
    assert evaluation_agrees(evaluation)


def test_an_evaluation_before_training_is_one_too(seen: dict[str, Seen]) -> None:
    first = seen["evaluation_first"]
    assert counted(first) == (5, 5 * 4 * 8, 0)
    assert evaluation_agrees(first)


def test_the_same_is_seen_as_by_a_run_in_the_loop(seen: dict[str, Seen]) -> None:
    both = seen["both"]
    own = both["truth"]
    assert counted(both) == (own["training_steps_total"], own["training_tokens_total"], 0) == (36, 36 * 4 * 8, 0)
    for name in ("training_position_steps", "training_committed_steps", "training_model_flops_total"):
        assert both[name] == own[name]
    assert differing(both) == []
    phases = {key for key in own if key.startswith("training_phase_seconds")}
    assert phases == {key for key in both if key.startswith("training_phase_seconds")}


# torch.compile.


def test_a_compiled_model_is_compiled_as_often_as_without_us(seen: dict[str, Seen]) -> None:
    compiled = seen["compiled"]
    assert counted(compiled) == (6, 6 * 4 * 8, 0)
    assert compiled["truth"]["with"] == compiled["truth"]["without"]


def test_steps_of_a_compiled_optimizer_are_seen(seen: dict[str, Seen]) -> None:
    assert counted(seen["compiled_optimizer"]) == (5, 5 * 4 * 8, 0)
    assert seen["compiled_optimizer"]["truth"]["with"] == seen["compiled_optimizer"]["truth"]["without"]


def test_steps_of_a_compiled_training_function_are_seen(seen: dict[str, Seen]) -> None:
    assert counted(seen["compiled_function"])[0] == 5


# Resuming.


@pytest.mark.parametrize(
    ("how", "position"),
    [
        ("adam_counts", 7 + 3),
        ("step_of_the_file", 70 + 3),
        ("step_of_a_flag", 5 + 3),
        ("only_weights", 3),
        ("no_step", None),
    ],
)
def test_a_resumed_run_goes_on_where_it_was(seen: dict[str, Seen], how: str, position: int | None) -> None:
    resumed = seen[f"resumed_{how}"]
    assert counted(resumed)[0] == 3
    assert resumed.get("training_position_steps") == position
    assert activity(resumed, "checkpoint_restore") > 0.04


# Attaching and detaching.


def test_it_steps_back_where_the_script_has_a_run_of_its_own(seen: dict[str, Seen]) -> None:
    own = seen["own_run"]["truth"]
    assert own == {"before": [5, None, True], "after": [5, 0, True]}


def test_it_leaves_everything_as_it_was(seen: dict[str, Seen]) -> None:
    assert seen["left_behind"]["truth"] == []


def test_an_error_of_ours_is_counted_and_not_seen_by_the_loop(seen: dict[str, Seen]) -> None:
    assert seen["errors"]["training_hook_errors_total"] > 0
    assert seen["errors"]["truth"] == 5


def test_a_process_without_an_optimizer_pushes_nothing(seen: dict[str, Seen]) -> None:
    assert seen["no_optimizer"] == {"truth": None}


def test_samples_laid_end_to_end_have_a_length_each() -> None:
    import torch

    from flopwatch.training.autolog.batches import Tokens, tokens_of

    packed = {
        "input_ids": torch.zeros(1, 9, dtype=torch.long),
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]]),
    }
    assert tokens_of(packed) == Tokens(9, 4**2 + 2**2 + 3**2)


# The process in which the loops run.


def main() -> None:
    import contextlib

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    from flopwatch.training import Run
    from flopwatch.training.torch.checkpoints import commit_pending

    class Samples(Dataset[Any]):
        """Dataset of samples of 8 tokens, with the last `padding` of them masked."""

        def __init__(self, count: int, form: str = "input_ids", pause: float = 0.0, padding: int = 0) -> None:
            self.count, self.form, self.pause, self.padding = count, form, pause, padding

        def __len__(self) -> int:
            return self.count

        def __getitem__(self, index: int) -> Any:
            time.sleep(self.pause)
            ids = torch.full((8,), index % 16)
            if self.form == "tuple":
                return ids, ids
            if self.form == "floats":
                return {"input_ids": ids.float()}
            mask = torch.ones(8, dtype=torch.long)
            mask[8 - self.padding :] = 0
            return {self.form: ids, "attention_mask": mask}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.embedding(ids)).square().mean()
            return out

    def ids(batch: Any) -> Any:
        if isinstance(batch, dict):
            return next(iter(batch.values())).long()
        return batch[0] if isinstance(batch, list) else batch

    def loader(steps: int, form: str = "input_ids", pause: float = 0.0, padding: int = 0, **how: Any) -> Any:
        return DataLoader(Samples(4 * steps, form, pause, padding), batch_size=4, **how)

    def backward(loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def train(batches: Any, model: Any = None, optimizer: Any = None, pause: float = 0.0) -> None:
        model = Model() if model is None else model
        optimizer = torch.optim.AdamW(model.parameters()) if optimizer is None else optimizer
        for batch in batches:
            backward(model(ids(batch)))
            time.sleep(pause)
            optimizer.step()
            optimizer.zero_grad()

    # Steps.

    def accumulation() -> None:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number, batch in enumerate(loader(12), 1):
            backward(model(ids(batch)) / 3)
            if number % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()

    def two_optimizers() -> None:
        model = Model()
        optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (model.embedding, model.head)]
        for batch in loader(5):
            for optimizer in optimizers:
                optimizer.zero_grad()
            backward(model(ids(batch)))
            for optimizer in optimizers:
                optimizer.step()

    def gan() -> None:
        judge, maker = nn.Linear(4, 1), nn.Linear(4, 4)
        of_judge, of_maker = (torch.optim.Adam(model.parameters()) for model in (judge, maker))
        for _ in range(5):
            of_judge.zero_grad()
            backward(judge(torch.randn(8, 4)).mean())
            backward(-judge(maker(torch.randn(8, 4)).detach()).mean())
            of_judge.step()
            of_maker.zero_grad()
            backward(judge(maker(torch.randn(8, 4))).mean())
            of_maker.step()

    def optimizer_in_backward() -> None:
        model = Model()
        optimizers = {parameter: torch.optim.SGD([parameter], 0.1) for parameter in model.parameters()}

        def apply(parameter: Any) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(apply)  # type: ignore[no-untyped-call]
        for batch in loader(5):
            backward(model(ids(batch)))

    def zero() -> None:
        import torch.distributed
        from torch.distributed.optim import ZeroRedundancyOptimizer

        dist: Any = torch.distributed
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            model = Model()
            train(loader(5), model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam))
        finally:
            dist.destroy_process_group()

    def lbfgs() -> None:
        model = Model()
        optimizer: Any = torch.optim.LBFGS(model.parameters(), max_iter=3)
        for batch in loader(3):

            def closure(batch: Any = batch) -> Any:
                optimizer.zero_grad()
                loss = model(ids(batch))
                backward(loss)
                return loss

            optimizer.step(closure)

    def scaler() -> None:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaling = torch.amp.GradScaler("cpu")
        for number, batch in enumerate(loader(6)):
            optimizer.zero_grad()
            backward(scaling.scale(model(ids(batch)) * (float("inf") if number in (1, 3) else 1)))
            scaling.step(optimizer)
            scaling.update()

    def scheduler() -> None:
        optimizer = torch.optim.SGD(Model().parameters(), 0.1)
        plan = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        optimizer.step()  # otherwise the scheduler warns
        for _ in range(5):
            plan.step()

    def thrown_away() -> None:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number, batch in enumerate(loader(5)):
            backward(model(ids(batch)))
            if number not in (1, 4):
                optimizer.step()
            optimizer.zero_grad()

    def state_made() -> None:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        model = Model()
        optimizer = torch.optim.AdamW(model.parameters())
        get_optimizer_state_dict(model, optimizer)
        train(loader(5), model, optimizer)

    def functional() -> None:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in loader(5):
            parameters = dict(model.named_parameters())
            gradients = torch.func.grad(lambda p, b: torch.func.functional_call(model, p, ids(b)))(parameters, batch)
            for name, parameter in parameters.items():
                parameter.grad = gradients[name].detach()
            optimizer.step()

    def optimizer_replaced() -> None:
        model = Model()
        train(loader(3), model)
        train(loader(25), model)

    def optimizer_dormant() -> None:
        model = Model()
        first = torch.optim.SGD(model.parameters(), 0.1)
        train(loader(3), model, first)
        train(loader(25), model, torch.optim.SGD(model.parameters(), 0.1))

    def reentrant() -> None:
        from torch.utils.checkpoint import checkpoint

        model = Model()
        train(
            loader(5),
            lambda ids: checkpoint(lambda x: model.head(x).square().mean(), model.embedding(ids), use_reentrant=True),
            torch.optim.SGD(model.parameters(), 0.1),
        )

    # Batches and tokens.

    def no_loader() -> None:
        train([torch.zeros(4, 8, dtype=torch.long)] * 5)

    def skipping() -> None:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number, batch in enumerate(loader(12)):
            if number >= 7:
                backward(model(ids(batch)))
                optimizer.step()
                optimizer.zero_grad()

    def fetched_before() -> None:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        batches = iter(loader(12))
        for _ in range(4):
            for batch in [next(batches) for _ in range(3)]:
                backward(model(ids(batch)) / 3)
            optimizer.step()
            optimizer.zero_grad()

    def trainer() -> None:
        transformers: Any = importlib.import_module("transformers")

        class LossInDict(Model):
            def forward(self, input_ids: torch.Tensor) -> Any:
                return {"loss": super().forward(input_ids)}

        with tempfile.TemporaryDirectory() as folder:
            # Eight batches an epoch: steps of 3, 3 and 2.
            arguments = transformers.TrainingArguments(
                folder,
                use_cpu=True,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=3,
                num_train_epochs=2,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
            )
            trains = transformers.Trainer(LossInDict(), arguments, train_dataset=Samples(32, "input_ids", 0.0, 0))
            trains.remove_callback(transformers.PrinterCallback)
            trains.train()

    def accelerate() -> list[float]:
        prepare_data_loader: Any = importlib.import_module("accelerate.data_loader").prepare_data_loader
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        counts = []
        for batch in prepare_data_loader(loader(5), num_processes=1, process_index=0):
            backward(model(ids(batch)))
            optimizer.step()
            counts.append(flat(Run._newest)["training_tokens_total"])
        return counts

    # Activities.

    def evaluation(how: str, first: bool = False) -> Callable[[], dict[str, float]]:
        def loop() -> dict[str, float]:
            model = Model()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            training, kept = loader(4), loader(1 if how == "one_batch" else 3, pause=0.002 * slower)
            spent = 0.0

            def look(batch: Any) -> None:
                time.sleep(0.02 * slower)
                with torch.no_grad():
                    model(ids(batch))

            def evaluate() -> None:
                nonlocal spent
                model.eval()
                began = time.monotonic()
                batches = {
                    "new_loader_every_time": lambda: loader(3, pause=0.002 * slower),
                    "on_the_training_data": lambda: training,
                }.get(how, lambda: kept)()
                around: Any = {
                    "no_grad_around": torch.no_grad,
                    "inference_mode": torch.inference_mode,
                    "on_the_training_data": torch.no_grad,
                }.get(how, contextlib.nullcontext)
                with around():
                    for number, batch in enumerate(batches):
                        look(batch)
                        if how == "left_early" and number == 1:
                            break
                    # A loop that is left by `break` ends when its iterator is dropped, together with the loop's
                    # variable.
                spent += time.monotonic() - began
                model.train()

            if first:
                evaluate()
            for _ in range(1 if first else 3):
                for number, batch in enumerate(loader(5) if first else training):
                    backward(model(ids(batch)))
                    time.sleep(0.005)
                    optimizer.step()
                    optimizer.zero_grad()
                    if number == 2 and not first:
                        evaluate()
            return {"evaluation": spent}

        return loop

    def both() -> dict[str, float]:
        """Record one loop with an attachment and with its own run at once, so that noise affects both alike."""
        Run._newest = None
        model = Model()
        own = Run("own", flops_per_token=6.0, peak_flops=1e9, model=model, environ={"FLOPWATCH_DISABLE": "1"})
        Run._newest = None  # otherwise the attachment would step back
        optimizer = torch.optim.AdamW(model.parameters())
        kept = loader(3, pause=0.005 * slower)
        for _ in range(3):
            for number, batch in enumerate(own.batches(loader(12, pause=0.004 * slower))):
                backward(model(ids(batch)))
                time.sleep(0.02 * slower)
                optimizer.step()
                optimizer.zero_grad()
                own.step(tokens=ids(batch).numel())
                if number == 5:
                    with own.activity("evaluation"), torch.no_grad():
                        for other in kept:
                            model(ids(other))
                            time.sleep(0.02 * slower)
            with own.checkpoint():
                torch.save({"model": model.state_dict(), "slow": Slow()}, "both.pt")
        commit_pending(attachment.run.recorder, "completed")
        return flat(own)

    # torch.compile.

    def graphs(loop: Callable[[Any], None]) -> int:
        from torch._dynamo.testing import CompileCounter

        torch._dynamo.reset()
        counter = CompileCounter()
        loop(counter)
        return int(counter.frame_count)

    def unwatched(loop: Callable[[Any], None]) -> int:
        attachment.step_back()
        return graphs(loop)

    def compare(loop: Callable[[Any], None]) -> Callable[[], dict[str, int]]:
        return lambda: {"with": graphs(loop), "without": -1}

    def compiled(backend: Any) -> None:
        train(loader(6), torch.compile(Model(), backend=backend))

    def compiled_optimizer(backend: Any) -> None:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = torch.compile(optimizer.step, backend=backend)
        for batch in loader(5):
            backward(model(ids(batch)))
            step()
            optimizer.zero_grad()

    def compiled_function(backend: Any) -> None:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        @torch.compile(backend=backend)
        def step(batch: torch.Tensor) -> None:
            loss = model(batch)
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        for batch in loader(5):
            step(ids(batch))

    # Resuming.

    def resumed(kind: Any, **state_items: Any) -> Callable[[], None]:
        def loop() -> None:
            model = Model()
            if "weights" in state_items:
                slow_load(Path("resumed.pt"), {"model": model.state_dict(), "step": 900})
                train(loader(3), model)
                return
            made = kind(model.parameters())
            for _ in range(7):
                backward(model(torch.zeros(4, 8, dtype=torch.long)))
                made.step()
            state = slow_load(Path("resumed.pt"), {"optimizer": made.state_dict(), **state_items})
            del made
            again(**current)
            optimizer = kind(model.parameters())
            optimizer.load_state_dict(slow_load(Path("resumed.pt"), state)["optimizer"])
            train(loader(3), model, optimizer)

        return loop

    def slow_load(path: Path, state: Any) -> Any:
        state["slow"] = Slow()
        torch.save(state, path)
        return torch.load(path, weights_only=False)

    # Coming and going.

    def own_run() -> dict[str, Any]:
        def points_of(run: Run) -> list[Any]:
            samples = flat(run)
            return [samples["training_steps_total"], samples.get("training_hook_errors_total"), attachment._loop.over]

        def loop(run: Run, optimizer: Any, model: Any) -> None:
            for batch in run.batches(loader(5)):
                backward(model(ids(batch)))
                optimizer.step()
                run.step()

        model = Model()
        run = Run("own")
        loop(run, torch.optim.SGD(model.parameters(), 0.1), model)
        before = points_of(run)
        run.finish()
        again()
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        assert attachment.run is not None
        run = Run("own")
        loop(run, optimizer, model)
        after = points_of(run)
        run.finish()
        return {"before": [before[0], None, before[2]], "after": after}

    def places() -> dict[str, Any]:
        dcp: Any = importlib.import_module("torch.distributed.checkpoint")
        return {
            "save": torch.save,
            "load": torch.load,
            "serialization": torch.serialization.save,
            "dcp": dcp.save,
            "async": dcp.async_save,
            "optimizer": torch.optim.Optimizer.__init__,
            "zero_grad": torch.optim.Optimizer.zero_grad,
            "backward": torch.autograd.backward,
            "next": torch.utils.data.dataloader._BaseDataLoaderIter.__next__,
            "call": nn.Module.__call__,
            "hooks": [
                len(getattr(sys.modules["torch.optim.optimizer"], f"_global_optimizer_{when}_hooks"))
                for when in ("pre", "post")
            ],
        }

    def left_behind() -> list[str]:
        train(loader(2))
        during = places()
        attachment.step_back()
        after = places()
        assert after.pop("hooks") == [count - 1 for count in during["hooks"]]
        return [name for name, place in after.items() if place != original[name]]

    def errors() -> int:
        def broken(*_: Any) -> Any:
            raise RuntimeError("of ours")

        attachment._loaders._came = broken
        attachment._find_position = broken
        attachment._zeroed = attachment._backward_ends = broken
        steps = 0
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in loader(5):
            backward(model(ids(batch)))
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        return steps

    def no_optimizer() -> None:
        for batch in loader(3):
            Model()(ids(batch))

    # Running the loops.

    attachment: Any = None
    current: dict[str, Any] = {}
    slower = 1  # factor for the loops that are timed twice: in a longer loop other work on the machine weighs less

    def again(**settings: Any) -> None:
        nonlocal attachment
        attachment = fresh(attachment, **settings)

    original = places()
    loops: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
        loop.__name__: (loop, {})
        for loop in (
            accumulation,
            two_optimizers,
            gan,
            optimizer_in_backward,
            zero,
            lbfgs,
            scaler,
            scheduler,
            thrown_away,
            state_made,
            functional,
            optimizer_replaced,
            optimizer_dormant,
            reentrant,
            no_loader,
            skipping,
            fetched_before,
            accelerate,
            trainer,
            own_run,
            left_behind,
            errors,
            no_optimizer,
        )
    }
    loops |= {
        "workers": (lambda: train(loader(10, num_workers=2)), {}),
        "masked": (lambda: train(loader(5, padding=2)), {}),
        "a_key": (lambda: train(loader(5, form="text")), {"tokens_from": "text"}),
        "a_place": (lambda: train(loader(5, form="tuple")), {"tokens_from": "0"}),
        "a_number": (lambda: train(loader(5, form="tuple")), {"tokens_per_step": 1000}),
        "unnamed_tokens": (lambda: train(loader(5, form="text")), {}),
        "no_integers": (lambda: train(loader(5, form="floats")), {}),
        "evaluation_first": (evaluation("no_grad_around", first=True), {}),
        "both": (both, {"flops_per_token": 6.0}),
        **{
            f"evaluation_{how}": (evaluation(how), {})
            for how in (
                "no_grad_around",
                "no_grad_inside",
                "inference_mode",
                "one_batch",
                "left_early",
                "new_loader_every_time",
                "on_the_training_data",
            )
        },
        "compiled": (compare(compiled), {}),
        "compiled_optimizer": (compare(compiled_optimizer), {}),
        "compiled_function": (compare(compiled_function), {}),
        "resumed_adam_counts": (resumed(torch.optim.AdamW, step=3), {}),
        "resumed_step_of_the_file": (resumed(lambda p: torch.optim.SGD(p, 0.1), step=70), {}),
        "resumed_step_of_a_flag": (
            resumed(torch.optim.AdamW, trainer={"updates": 5}),
            {"step_from": "trainer.updates"},
        ),
        "resumed_only_weights": (resumed(None, weights=True), {}),
        "resumed_no_step": (resumed(lambda p: torch.optim.SGD(p, 0.1)), {}),
    }

    def recorded(loop: Callable[[], Any]) -> Seen:
        again(**current)
        truth = loop()
        samples = {} if attachment.run is None else flat(attachment.run)
        return {**samples, "truth": truth}

    results: dict[str, Any] = {}
    for name, (loop, settings) in loops.items():
        if len(sys.argv) > 1 and name not in sys.argv[1:]:
            continue
        current, slower = settings, 1
        results[name] = recorded(loop)
        while not seconds_agree(name, results[name]) and slower < 8:
            slower *= 2
            results[name] = recorded(loop)
        if name.startswith("compiled"):
            results[name]["truth"]["without"] = unwatched(
                {
                    "compiled": compiled,
                    "compiled_optimizer": compiled_optimizer,
                    "compiled_function": compiled_function,
                }[name]
            )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
