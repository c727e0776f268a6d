"""Test the callback for Lightning on the CPU, under both its names: the exporter receives what was trained."""

from __future__ import annotations

import importlib
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flopwatch.catalogue import BY_NAME
from tests.support.frameworks import BROKEN, Clock, break_callback
from tests.support.hook_server import HookServer, Push
from tests.support.machine import PATIENCE

pytestmark = [
    pytest.mark.torch,
    # Warnings of Lightning 2.6 under torch 2.13, not ours.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]

LENGTHS = (5, 9, 16, 12)  # tokens of a sample, in turn; the rest of its 16 is padding


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def samples(count: int) -> list[dict[str, Any]]:
    import torch

    answer = []
    for index in range(count):
        length = LENGTHS[index % len(LENGTHS)]
        ids = torch.arange(16).add(7 * index).remainder(31)
        mask = torch.arange(16).lt(length).long()
        answer.append({"input_ids": ids * mask, "attention_mask": mask})
    return answer


def nothing() -> None:
    """Return at once."""


def module(lightning: Any, optimizers: int = 1, judge: Callable[[], None] = nothing) -> Any:
    """Return a language model of one layer. With two optimizers it optimizes manually."""
    import torch

    class Model(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = torch.nn.Embedding(32, 8)
            self.head = torch.nn.Linear(8, 32)
            self.automatic_optimization = optimizers == 1
            self.losses: list[float] = []

        def loss(self, batch: dict[str, Any]) -> Any:
            scores = self.head(self.embedding(batch["input_ids"]))
            return torch.nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())

        def training_step(self, batch: dict[str, Any], _: int) -> Any:
            loss = self.loss(batch)
            self.losses.append(float(loss.item()))
            self.log("loss", loss)
            if optimizers == 1:
                return loss
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
            return None

        def validation_step(self, batch: dict[str, Any], _: int) -> None:
            judge()
            self.log("val_loss", self.loss(batch))

        def configure_optimizers(self) -> Any:
            parts = [self.embedding, self.head] if optimizers == 2 else [self]
            return [torch.optim.SGD(part.parameters(), 0.5) for part in parts]

    return Model()


def fit(
    name: str,
    out: Path,
    *callbacks: Any,
    model: Any = None,
    resume: Path | None = None,
    fetch: Callable[[], None] = nothing,
    **arguments: Any,
) -> Any:
    """Train on 24 samples, 2 a batch, in order, and return the trainer."""
    import torch

    lightning: Any = importlib.import_module(name)

    def batches(rows: list[dict[str, Any]]) -> dict[str, Any]:
        fetch()
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}

    def loader(count: int) -> Any:
        return torch.utils.data.DataLoader(samples(count), batch_size=2, collate_fn=batches)  # type: ignore[arg-type]

    settings: dict[str, Any] = {
        "max_steps": 6,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "default_root_dir": str(out),
        "log_every_n_steps": 1,
        "limit_val_batches": 0,
        **arguments,
    }
    trainer = lightning.Trainer(callbacks=list(callbacks), **settings)
    trainer.fit(model or module(lightning), loader(24), loader(8), ckpt_path=resume)
    return trainer


def callback(server: HookServer | None, **arguments: Any) -> Any:
    from flopwatch.training.frameworks.lightning import FlopwatchCallback

    endpoint = "http://127.0.0.1:9" if server is None else server.url
    return FlopwatchCallback("lm", endpoint=endpoint, push_interval=0.1, **arguments)


def checkpoints(name: str, out: Path, every: int, **arguments: Any) -> Any:
    module: Any = importlib.import_module(f"{name}.callbacks")
    return module.ModelCheckpoint(dirpath=out, every_n_train_steps=every, save_top_k=-1, filename="{step}", **arguments)


def activities(push: Push) -> dict[str, float]:
    name = "training_activity_seconds_total{activity="
    return {sample[len(name) : -1]: value for sample, value in push.samples.items() if sample.startswith(name)}


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_steps_tokens_samples_and_loss_are_those_trained(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    loggers: Any = importlib.import_module(f"{name}.loggers")
    with HookServer() as server:
        trainer = fit(
            name,
            tmp_path,
            callback(server, flops_per_token=100),
            logger=loggers.CSVLogger(str(tmp_path), flush_logs_every_n_steps=100),
        )
        last = server.last_word()
    assert " completed after 6 steps: MFU " in capsys.readouterr().err
    assert last.resource["flopwatch.status"] == "completed"
    assert last.samples["training_steps_total"] == last.samples["training_position_steps"] == trainer.global_step == 6
    assert last.samples["training_tokens_total"] == sum(LENGTHS) * 3
    assert last.samples["training_samples_total"] == 12
    assert last.samples["training_model_flops_total"] == sum(LENGTHS) * 3 * 100
    assert last.samples["training_loss"] == trainer.model.losses[-1]
    assert last.samples["training_hook_errors_total"] == 0
    (info,) = (sample for sample in last.samples if sample.startswith("training_run_info"))
    assert "step_source=trainer" in info
    assert "dtype=fp32" in info


def test_accumulation_evaluation_and_saving_are_distinguished(tmp_path: Path) -> None:
    import lightning.pytorch

    clock = Clock()

    class SlowIO(lightning.pytorch.plugins.io.TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            clock.passes(0.3)
            super().save_checkpoint(*args, **kwargs)

    def batch() -> None:
        clock.passes(0.05)

    with HookServer() as server:
        fit(
            "lightning.pytorch",
            tmp_path,
            callback(server, clock=clock),
            checkpoints("lightning.pytorch", tmp_path, every=2),
            model=module(lightning.pytorch, judge=batch),
            plugins=[SlowIO()],
            accumulate_grad_batches=3,
            max_steps=4,
            enable_checkpointing=True,
            limit_val_batches=1.0,
            val_check_interval=6,
            num_sanity_val_steps=1,
            fetch=batch,
        )
        last = server.last_word()
    assert last.samples["training_steps_total"] == last.samples["training_committed_steps"] == 4
    assert last.samples["training_tokens_total"] == sum(LENGTHS) * 6
    assert last.samples["training_samples_total"] == 24
    seconds = activities(last)
    assert {name: seconds[name] for name in ("data_stall", "evaluation", "checkpoint_save", "step")} == pytest.approx(
        {
            "data_stall": 11 * 0.05,  # of 12 batches: the first ended the startup
            "evaluation": (1 + 2 * 4) * 2 * 0.05,  # each as slow to load as to evaluate
            "checkpoint_save": 2 * 0.3,
            "step": 0.0,
        }
    )
    assert last.samples["training_hook_errors_total"] == 0


@pytest.mark.parametrize("broken", BROKEN)
def test_losses_are_those_without_the_callback_whatever_goes_wrong(
    tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "lightning.pytorch"
    alone = fit(name, tmp_path / "alone", checkpoints(name, tmp_path / "alone", every=3), enable_checkpointing=True)
    reporter = callback(None, **break_callback(broken, monkeypatch))
    watched = fit(
        name,
        tmp_path / "watched",
        reporter,
        checkpoints(name, tmp_path / "watched", every=3),
        enable_checkpointing=True,
    )
    assert watched.model.losses == alone.model.losses
    assert len(watched.model.losses) == 6
    errors = reporter.run.snapshot().points[BY_NAME["training_hook_errors_total"]][0][1]
    assert (errors == 0) == (broken == "no exporter")


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty", "ignore:You're resuming from a checkpoint")
def test_a_resumed_run_goes_on_at_the_step_and_tokens_restored(tmp_path: Path) -> None:
    name = "lightning.pytorch"
    whole = fit(name, tmp_path, max_steps=12)
    with HookServer() as server:
        for resume in (None, tmp_path / "step=4.ckpt"):
            last = fit(
                name,
                tmp_path,
                callback(server),
                checkpoints(name, tmp_path, every=4),
                resume=resume,
                enable_checkpointing=True,
                max_steps=5 if resume is None else 12,
            )
        first, second = server.last_words(2)
    assert first.samples["training_committed_steps"] == 4
    assert first.samples["training_position_steps"] == 5
    assert second.resource["flopwatch.restored_step"] == 4
    assert second.samples["training_position_steps"] == 12
    assert second.samples["training_steps_total"] == 8
    # Lightning begins the epoch again, as its loader has no state.
    assert second.samples["training_tokens_total"] == sum(LENGTHS) * 4
    assert second.samples["training_position_tokens"] == sum(LENGTHS) * 2 + sum(LENGTHS) * 4
    assert activities(second)["checkpoint_restore"] > 0
    assert len(last.model.losses) == 8
    assert last.model.losses[0] != whole.model.losses[0]


def test_a_checkpoint_written_in_the_background_is_committed_when_it_is_written(tmp_path: Path) -> None:
    import lightning.pytorch
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

    begun, released, clock = threading.Event(), threading.Event(), Clock()

    class Held(TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            begun.set()
            assert released.wait(PATIENCE)
            super().save_checkpoint(*args, **kwargs)

    class Release(lightning.pytorch.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 5:
                assert begun.wait(PATIENCE)
                clock.passes(0.3)
                server.wait_for(lambda push: push.samples.get("training_position_steps") == 5)
                released.set()

    with HookServer() as server:
        fit(
            "lightning.pytorch",
            tmp_path,
            callback(server, clock=clock),
            Release(),
            checkpoints("lightning.pytorch", tmp_path, every=4),
            plugins=[AsyncCheckpointIO(Held())],
            enable_checkpointing=True,
        )
        last = server.last_word()
    waiting = [push for push in server.pushes if push.samples.get("training_position_steps") == 5]
    assert waiting
    assert all("training_committed_steps" not in push.samples for push in waiting[:1])
    assert last.samples["training_committed_steps"] == 4
    assert last.samples["training_checkpoint_background_seconds_total"] == pytest.approx(0.3)
    assert activities(last)["checkpoint_save"] == 0


def test_two_optimizers_in_one_batch_are_one_step(tmp_path: Path) -> None:
    import lightning.pytorch

    with HookServer() as server:
        trainer = fit(
            "lightning.pytorch", tmp_path, callback(server), max_steps=12, model=module(lightning.pytorch, optimizers=2)
        )
        last = server.last_word()
    assert trainer.global_step == 12
    assert last.samples["training_steps_total"] == 6
    assert last.samples["training_tokens_total"] == sum(LENGTHS) * 3


def test_the_callback_and_what_it_wrapped_can_be_sent_to_another_process(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    reporter, logger = callback(None), CSVLogger(str(tmp_path))
    fit("lightning.pytorch", tmp_path, reporter, logger=logger)
    assert reporter.run is not None
    assert "run" not in reporter.__getstate__()
    assert type(logger.log_metrics).__name__ == "MethodWrapper"
    sent = pickle.loads(pickle.dumps(logger))
    assert sent.log_metrics.__self__ is sent


@pytest.mark.parametrize(("raised", "status"), [(ValueError, "failed"), (KeyboardInterrupt, "stopped")])
def test_an_exception_ends_the_run(tmp_path: Path, raised: type[BaseException], status: str) -> None:
    import lightning.pytorch

    class Raise(lightning.pytorch.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                raise raised

    # At Ctrl-C Lightning ends the process, and ignores another one.
    handler = signal.getsignal(signal.SIGINT)
    try:
        with HookServer() as server:
            with pytest.raises((raised, SystemExit)):
                fit("lightning.pytorch", tmp_path, callback(server), Raise())
            last = server.last_word()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert last.resource["flopwatch.status"] == status
    assert last.samples["training_steps_total"] == 3
