"""Test Accelerate on the CPU, watched: the exporter receives what the loop did."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flopwatch.catalogue import BY_NAME
from tests.support.frameworks import BROKEN, Clock, accelerator, break_callback, forget_accelerators, ulysses
from tests.support.hook_server import HookServer, Push

pytestmark = pytest.mark.torch

LENGTHS = (5, 9, 16, 12)  # tokens of a sample, in turn; the rest of its 16 is padding


@pytest.fixture(autouse=True)
def one_accelerator_at_a_time() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        forget_accelerators()
        yield
    forget_accelerators()


def samples(count: int) -> list[dict[str, Any]]:
    import torch

    answer = []
    for index in range(count):
        length = LENGTHS[index % len(LENGTHS)]
        mask = torch.arange(16).lt(length).long()
        answer.append({"input_ids": torch.arange(16).add(7 * index).remainder(31) * mask, "attention_mask": mask})
    return answer


class Loop:
    """Training script with Accelerate, on 24 samples, 2 a batch."""

    def __init__(
        self,
        *,
        accumulate: int = 1,
        adam: bool = True,
        dispatch: bool = False,
        fetch: Callable[[], None] = lambda: None,
    ) -> None:
        import torch

        accelerate: Any = importlib.import_module("accelerate")

        def batches(rows: list[dict[str, Any]]) -> dict[str, Any]:
            fetch()
            return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32))
        kind: Any = torch.optim.Adam if adam else torch.optim.SGD
        loader: Any = torch.utils.data.DataLoader
        self.accelerator = accelerate.Accelerator(
            gradient_accumulation_steps=accumulate,
            dataloader_config=accelerate.utils.DataLoaderConfiguration(dispatch_batches=dispatch),
        )
        self.model, self.optimizer, self.train_loader, self.eval_loader = self.accelerator.prepare(
            model,
            kind(model.parameters(), 0.1),
            loader(samples(24), batch_size=2, collate_fn=batches),
            loader(samples(8), batch_size=2, collate_fn=batches),
        )
        self.losses: list[float] = []

    def watch(self, server: HookServer | None, **arguments: Any) -> Any:
        from flopwatch.training.frameworks.accelerate import watch

        endpoint = "http://127.0.0.1:9" if server is None else server.url
        return watch(self.accelerator, "lm", endpoint=endpoint, push_interval=0.1, **arguments)

    def loss(self, batch: dict[str, Any]) -> Any:
        import torch

        ids = batch["input_ids"]
        return torch.nn.functional.cross_entropy(self.model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def train(self, steps: int = 10**9, skip: int = 0) -> None:
        self.model.train()
        loader = self.accelerator.skip_first_batches(self.train_loader, skip) if skip else self.train_loader
        for batch in loader:
            with self.accelerator.accumulate(self.model):
                loss = self.loss(batch)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.losses.append(float(loss.item()))
            self.accelerator.log({"loss": self.losses[-1]})
            if len(self.losses) >= steps:
                break

    def evaluate(self) -> None:
        import torch

        self.model.eval()
        with torch.no_grad():
            for batch in self.eval_loader:
                self.loss(batch)


def activities(push: Push) -> dict[str, float]:
    name = "training_activity_seconds_total{activity="
    return {sample[len(name) : -1]: value for sample, value in push.samples.items() if sample.startswith(name)}


@pytest.mark.parametrize("dispatch", [False, True])
def test_steps_tokens_samples_and_loss_are_those_trained(dispatch: bool) -> None:
    loop = Loop(dispatch=dispatch)
    with HookServer() as server:
        loop.watch(server, flops_per_token=100)
        loop.train(steps=6)
        loop.accelerator.end_training()
        last = server.last_word()
    assert last.resource["flopwatch.status"] == "completed"
    assert last.samples["training_steps_total"] == last.samples["training_position_steps"] == 6
    assert last.samples["training_tokens_total"] == last.samples["training_position_tokens"] == sum(LENGTHS) * 3
    assert last.samples["training_samples_total"] == 12
    assert last.samples["training_model_flops_total"] == sum(LENGTHS) * 3 * 100
    assert last.samples["training_loss"] == loop.losses[-1]
    assert last.samples["training_hook_errors_total"] == 0
    (info,) = (sample for sample in last.samples if sample.startswith("training_run_info"))
    assert "step_source=trainer" in info
    assert "dtype=fp32" in info


@pytest.mark.parametrize(("precision", "expected"), [("no", "fp32"), ("bf16", "bf16"), ("fp8", "fp8")])
def test_the_precision_of_an_accelerator_is_the_dtype_of_the_run(
    monkeypatch: pytest.MonkeyPatch, precision: str, expected: str
) -> None:
    from flopwatch.training.frameworks import common
    from flopwatch.training.frameworks.accelerate import _facts

    assert common.accelerate_precision() == ""
    prepared = accelerator(monkeypatch, precision)
    assert common.accelerate_precision() == precision
    assert _facts(prepared)["dtype"] == expected


def test_batches_that_ulysses_splits_among_ranks_are_not_a_ranks_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    ulysses(monkeypatch)
    loop = Loop()
    with HookServer() as server:
        loop.watch(server, flops_per_token=100)
        loop.train(steps=6)
        loop.accelerator.end_training()
        last = server.last_word()
    assert last.samples["training_steps_total"] == 6
    assert not {"training_tokens_total", "training_model_flops_total"} & last.samples.keys()
    assert last.samples["training_hook_errors_total"] == 0


def test_accumulation_evaluation_and_saving_are_distinguished(tmp_path: Path) -> None:
    clock = Clock()
    loop = Loop(accumulate=3, fetch=lambda: clock.passes(0.05))
    loop.accelerator.register_save_state_pre_hook(lambda *_: clock.passes(0.3))
    with HookServer() as server:
        run = loop.watch(server, clock=clock)
        for _ in range(2):
            loop.train()
            loop.evaluate()
            loop.accelerator.save_state(str(tmp_path))
        run.finish()
        last = server.last_word()
    assert last.samples["training_steps_total"] == last.samples["training_committed_steps"] == 8
    assert last.samples["training_tokens_total"] == sum(LENGTHS) * 12
    assert last.samples["training_samples_total"] == 48
    seconds = activities(last)
    assert {name: seconds[name] for name in ("data_stall", "evaluation", "checkpoint_save", "step")} == pytest.approx(
        {
            "data_stall": 23 * 0.05,  # of 24 batches: the first ended the startup
            "evaluation": 2 * 4 * 0.05,
            "checkpoint_save": 2 * 0.3,
            "step": 0.0,
        }
    )
    assert last.samples["training_hook_errors_total"] == 0


def test_a_run_that_another_takes_over_from_or_that_ended_sees_no_more_steps() -> None:
    with HookServer() as server:
        loop = Loop()
        older, newer = loop.watch(server), loop.watch(server)
        loop.train()
        assert (older.position, newer.position) == (None, 12)
        loop.accelerator.end_training()
        loop.optimizer.step()
        for run in (older, newer):
            assert run.snapshot(last=True).points[BY_NAME["training_hook_errors_total"]] == [({}, 0.0)]


@pytest.mark.parametrize("broken", BROKEN)
def test_losses_are_those_of_a_loop_unwatched_whatever_goes_wrong(
    tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(loop: Loop, out: Path) -> list[float]:
        loop.train()
        loop.evaluate()
        loop.accelerator.save_state(str(out))
        loop.accelerator.load_state(str(out))
        loop.train()
        loop.accelerator.end_training()
        return loop.losses

    alone = trained(Loop(), tmp_path / "alone")
    forget_accelerators()
    watched = Loop()
    run = watched.watch(None, **break_callback(broken, monkeypatch))
    assert trained(watched, tmp_path / "watched") == alone
    assert all(math.isfinite(loss) for loss in alone)
    assert len(alone) == 24
    errors = run.snapshot().points[BY_NAME["training_hook_errors_total"]][0][1]
    assert (errors == 0) == (broken == "no exporter")


@pytest.mark.parametrize("optimizer", ["Adam", "Adam, and no file of ours", "SGD", "SGD, and no file of ours"])
def test_a_resumed_run_goes_on_at_the_step_restored(tmp_path: Path, optimizer: str) -> None:
    adam = optimizer.startswith("Adam")
    first = Loop(adam=adam)
    with HookServer() as server:
        run = first.watch(server)
        first.train(steps=4)
        first.accelerator.save_state(str(tmp_path))
        first.train(steps=5)
        run.finish("preempted")
        assert server.last_word().samples["training_committed_steps"] == 4
    if "no file" in optimizer:
        (tmp_path / "flopwatch.json").unlink()
    forget_accelerators()
    second = Loop(adam=adam)
    with HookServer() as server:
        run = second.watch(server)
        second.accelerator.load_state(str(tmp_path))
        if optimizer == "SGD, and no file of ours":
            run.restored(step=4)  # as the log asks for
        second.train(skip=4)
        run.finish()
        last = server.last_word()
    assert last.resource["flopwatch.restored_step"] == 4
    assert last.samples["training_position_steps"] == 12
    assert last.samples["training_steps_total"] == 8
    assert last.samples["training_tokens_total"] == sum(LENGTHS) * 4
    assert activities(last)["checkpoint_restore"] > 0


def test_watching_before_prepare_is_logged_and_changes_nothing() -> None:
    from flopwatch.training.frameworks.accelerate import watch

    accelerate: Any = importlib.import_module("accelerate")
    run = watch(accelerate.Accelerator(), "lm", environ={"FLOPWATCH_DISABLE": "1"})
    assert run.snapshot().points[BY_NAME["training_hook_errors_total"]][0][1] == 1
