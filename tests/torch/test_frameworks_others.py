"""Test DeepSpeed and torchtitan, which need GPUs, against fakes written from their documentation."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from flopwatch.catalogue import BY_NAME
from flopwatch.training import Run
from tests.support import ROOT
from tests.support.frameworks import engine

pytestmark = pytest.mark.torch

SILENT: dict[str, Any] = {"environ": {"FLOPWATCH_DISABLE": "1"}}


def value(run: Run, name: str) -> float | None:
    """Return the only sample of a family, None if there is none."""
    points = run.snapshot().points.get(BY_NAME[name], [])
    assert len(points) <= 1
    return points[0][1] if points else None


def seconds(run: Run, activity: str) -> float:
    return {
        labels["activity"]: value for labels, value in run.snapshot().points[BY_NAME["training_activity_seconds_total"]]
    }[activity]


# DeepSpeed. https://deepspeed.readthedocs.io/en/latest/training.html


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed always initialises torch.distributed. The hook only asks for its world size."""
    import torch.distributed

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 1)


@pytest.mark.usefixtures("one_rank")
def test_deepspeed_steps_at_the_boundary_with_the_batches_since_the_last() -> None:
    import torch

    from flopwatch.training.frameworks.deepspeed import watch

    trained = engine(accumulate=2)
    run = watch(trained, "llama", flops_per_token=10, **SILENT)
    loader: Any = torch.utils.data.DataLoader([{"input_ids": torch.zeros(7, dtype=torch.long)}] * 12, batch_size=2)  # type: ignore[arg-type]
    for _ in loader:
        trained.step()
    trained.save_checkpoint("out")
    assert trained.global_steps == value(run, "training_steps_total") == value(run, "training_committed_steps") == 3
    assert value(run, "training_tokens_total") == 84
    assert value(run, "training_samples_total") == 12
    assert value(run, "training_grad_norm") == 0.5
    # The first step was startup until its first batch came, and counts.
    assert value(run, "training_model_flops_total") == 840
    assert value(run, "training_hook_errors_total") == 0
    info = run.snapshot().points[BY_NAME["training_run_info"]][0][0]
    assert (info["step_source"], info["dtype"]) == ("trainer", "bf16")


@pytest.mark.usefixtures("one_rank")
def test_deepspeed_restores_its_step_and_commits_when_a_decoupled_checkpoint_is_written() -> None:
    from flopwatch.training.frameworks.deepspeed import watch

    trained = engine(accumulate=1, decoupled=True)
    run = watch(trained, "llama", tokens_per_step=100, **SILENT)
    trained.load_checkpoint("out")
    trained.step()
    trained.save_checkpoint("out")
    assert value(run, "training_position_steps") == 41
    assert value(run, "training_committed_steps") is None
    trained.step()
    assert value(run, "training_committed_steps") == 41
    assert value(run, "training_tokens_total") == 200
    assert value(run, "training_hook_errors_total") == 0


@pytest.mark.usefixtures("one_rank")
def test_a_deepspeed_engine_of_another_kind_trains_all_the_same() -> None:
    from flopwatch.training.frameworks.deepspeed import watch

    class Engine:
        global_steps = 0

        def step(self) -> str:
            return "stepped"

    trained = Engine()
    run = watch(trained, "llama", **SILENT)
    assert trained.step() == "stepped"
    assert value(run, "training_hook_errors_total") == 1


# torchtitan. https://github.com/pytorch/torchtitan/blob/main/torchtitan/observability/structured_logger/README.md


class Mesh(SimpleNamespace):
    def get_local_rank(self) -> int:
        return int(self.rank)

    def size(self) -> int:
        return int(self.ranks)


class Checkpointer:
    """Fake that saves every second step, in the background."""

    enable, last_save_model_only = True, True

    def __init__(self) -> None:
        self.save_future: Future[None] | None = None
        self.written: list[Future[None]] = []

    def _should_save(self, step: int, last_step: bool = False) -> bool:
        return step % 2 == 0 or last_step

    def save(self, step: int, last_step: bool = False) -> bool:
        if not self._should_save(step, last_step):
            return False
        if not last_step:
            self.save_future = Future()
            self.written.append(self.save_future)
        return True


class Trainer:
    """Part of torchtitan's Trainer that logs to its structured logger, with the same events as its train()."""

    def __init__(self, logger: logging.Logger, steps: int, loaded: int = 0) -> None:
        import torch

        self._log = logger
        self.step, self._loaded, self.ntokens_seen = 0, loaded, 0
        self.config = SimpleNamespace(
            training=SimpleNamespace(steps=steps, dtype="float32", mixed_precision_param="bfloat16")
        )
        meshes = {"batch": Mesh(rank=0, ranks=1)}
        self.parallel_dims: Any = SimpleNamespace(
            get_optional_mesh=meshes.get, non_data_parallel_size=1, fsdp_enabled=False
        )
        self.logged: list[tuple[dict[str, float], int]] = []
        outer = self

        class Logger:
            def log(self, metrics: dict[str, float], step: int) -> None:
                outer.logged.append((metrics, step))

        self.metrics_processor = SimpleNamespace(logger=Logger(), num_flops_per_token=1000, has_quantization=False)
        self.checkpointer: Any = Checkpointer()
        self.model_parts = [torch.nn.Linear(1, 1)]

    tokens = 0  # of each step, with masked ones and on this rank of a context parallel group

    def event(self, name: str, event_name: str | None = None, value: float | None = None) -> None:
        self._log.info(
            name,
            extra={
                "log_type": "event",
                "log_type_name": name,
                "event_name": event_name,
                "value": value,
                "step": self.step or None,
                "relative_step": None,
                "task_name": None,
            },
        )

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        self.event(f"{name}_start")
        try:
            yield
        except Exception:
            self.event(f"{name}_error")
            raise
        finally:
            self.event(f"{name}_end")

    def train(self, fails_at: int | None = None) -> None:
        self.event("training_start")
        with self.span("checkpoint_load"):
            self.step = self._loaded
        while self.step < self.config.training.steps:
            self.step += 1
            with self.span("step"):
                for _ in range(2):
                    with self.span("fetching_batch"):
                        pass
                self.event("metric_value", "local_valid_tokens", 96)
                with self.span("fwd_bwd"):
                    self.ntokens_seen += self.tokens
                with self.span("optim"):
                    if self.step == fails_at:
                        raise ValueError("injected")
                self.metrics_processor.logger.log(
                    {"loss_metrics/global_avg_loss": 1 / self.step, "grad_norm": 2.0}, self.step
                )
                self.checkpointer.save(self.step, last_step=self.step == self.config.training.steps)
                with self.span("eval"):
                    pass


@pytest.fixture
def structured_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("torchtitan.structured_logger")
    logger.propagate, logger.level = False, logging.INFO
    yield logger
    logger.handlers.clear()


def register(logger: logging.Logger) -> Any:
    """Do what init_structured_logger does with TITAN_STRUCT_LOGGER_HANDLERS; return the handler."""
    path, _, function = "flopwatch.training.frameworks.torchtitan.register".rpartition(".")
    getattr(importlib.import_module(path), function)(
        structured_logger=logger, rank=0, source="training", output_dir="outputs", run={"name": "llama", **SILENT}
    )
    (handler,) = (handler for handler in logger.handlers if type(handler).__module__ == path)  # pytest has its own
    return handler


def test_torchtitan_steps_tokens_flops_loss_and_checkpoints_are_the_trainers(structured_logger: logging.Logger) -> None:
    handler = register(structured_logger)
    trainer = Trainer(structured_logger, steps=7, loaded=2)
    trainer.train()
    run: Run = handler.run
    assert value(run, "training_position_steps") == 7
    assert run.snapshot().resource["flopwatch.restored_step"] == 2
    assert value(run, "training_steps_total") == 5
    assert value(run, "training_tokens_total") == 480
    assert value(run, "training_model_flops_total") == 480_000
    assert value(run, "training_loss") == 1 / 7
    assert value(run, "training_grad_norm") == 2.0
    assert [step for _, step in trainer.logged] == [3, 4, 5, 6, 7]
    assert value(run, "training_committed_steps") is None
    trainer.checkpointer.written[0].set_result(None)
    assert value(run, "training_committed_steps") == 4
    trainer.checkpointer.written[1].set_exception(OSError("disk full"))
    assert value(run, "training_committed_steps") == 4  # and not 7, which was weights alone
    assert seconds(run, "evaluation") > 0
    assert seconds(run, "checkpoint_restore") > 0
    info = run.snapshot().points[BY_NAME["training_run_info"]][0][0]
    assert (info["step_source"], info["convention"], info["dtype"]) == ("trainer", "full", "bf16")
    assert value(run, "training_hook_errors_total") == 0
    trainer.event("torch_distributed_teardown_start")
    assert not run.alive


@pytest.mark.parametrize("cp", [1, 4])
def test_tokens_that_torchtitan_masks_in_the_loss_count_as_computed(structured_logger: logging.Logger, cp: int) -> None:
    handler = register(structured_logger)
    trainer = Trainer(structured_logger, steps=5)
    trainer.tokens, trainer.parallel_dims.cp = 128 // cp, cp  # 96 of the 128 are not masked
    trainer.train()
    assert value(handler.run, "training_tokens_total") == 5 * 128
    assert value(handler.run, "training_model_flops_total") == 5 * 128_000


def test_a_torchtitan_trainer_that_fails_or_is_unlike_this_one_is_not_disturbed(
    structured_logger: logging.Logger,
) -> None:
    handler = register(structured_logger)
    trainer = Trainer(structured_logger, steps=7)
    trainer.parallel_dims = object()
    trainer.checkpointer._should_save = lambda *_: 1 / 0
    trainer.checkpointer.save = lambda *_, **__: True
    with pytest.raises(ValueError, match="injected"):
        trainer.train(fails_at=3)
    assert value(handler.run, "training_steps_total") == 2
    assert value(handler.run, "training_tokens_total") == 192
    assert value(handler.run, "training_model_flops_total") is None
    assert value(handler.run, "training_hook_errors_total") == 2


# Frameworks that are not installed.


@pytest.mark.parametrize(
    ("module", "packages", "sentence"),
    [
        ("huggingface", ["transformers"], "this needs transformers, which is not installed: pip install transformers"),
        ("accelerate", ["accelerate"], "this needs accelerate, which is not installed: pip install accelerate"),
        (
            "lightning",
            ["lightning", "pytorch_lightning"],
            "this needs lightning or pytorch_lightning, which is not installed: pip install lightning",
        ),
    ],
)
def test_a_framework_that_is_not_installed_is_named(module: str, packages: list[str], sentence: str) -> None:
    blocked = (
        "import sys\n"
        "class Blocked:\n"
        f"    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {packages!r}:\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Blocked())\n"
        f"import flopwatch.training.frameworks.{module}"
    )
    done = subprocess.run(
        [sys.executable, "-c", blocked],
        env={"PYTHONPATH": str(ROOT / "exporter")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr.splitlines()[-1] == f"ImportError: {sentence}"
