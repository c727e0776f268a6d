"""Test the callback for the Hugging Face Trainer on the CPU: the exporter receives what was trained."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flopwatch.catalogue import BY_NAME
from tests.support.frameworks import BROKEN, Clock, accelerator, break_callback, forget_accelerators, ulysses
from tests.support.hook_server import HookServer, Push

pytestmark = pytest.mark.torch

LENGTHS = (5, 9, 16, 12)  # tokens of a sample, in turn; the rest of its 16 is padding


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "ACCELERATE_USE_CPU"):
            patch.setenv(variable, "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def samples(count: int) -> list[dict[str, list[int]]]:
    answer = []
    for index in range(count):
        length = LENGTHS[index % len(LENGTHS)]
        ids = [(7 * index + position) % 31 for position in range(length)]
        padding = [0] * (16 - length)
        answer.append(
            {
                "input_ids": ids + padding,
                "labels": ids + [-100] * len(padding),
                "attention_mask": [1] * length + padding,
            }
        )
    return answer


def model() -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=32,
            max_position_embeddings=16,
        )
    )


def train(
    out: Path, *callbacks: Any, resume: bool = False, count: int = 24, trained: Any = None, **arguments: Any
) -> Any:
    """Train on `count` samples, 2 a batch, in order, and return the trainer."""
    import transformers

    settings: dict[str, Any] = {
        "output_dir": str(out),
        "per_device_train_batch_size": 2,
        "max_steps": 6,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "learning_rate": 1e-2,
        "train_sampling_strategy": "sequential",
        **arguments,
    }
    trainer = transformers.Trainer(
        model=trained or model(),
        args=transformers.TrainingArguments(**settings),
        train_dataset=samples(count),
        eval_dataset=samples(8),
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=True if resume else None)
    return trainer


def callback(server: HookServer | None, **arguments: Any) -> Any:
    from flopwatch.training.frameworks.huggingface import FlopwatchCallback

    endpoint = "http://127.0.0.1:9" if server is None else server.url
    return FlopwatchCallback("llama", endpoint=endpoint, push_interval=0.1, **arguments)


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def flops(lengths: list[int]) -> int:
    """Return the model's FLOPs for these sequence lengths: 6 per weight and token, and half of all scores."""
    weights = 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32) + 32 * 16
    return sum(6 * weights * s + 6 * 2 * 2 * 8 * s * s for s in lengths)


def test_steps_tokens_samples_loss_and_flops_are_those_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with HookServer() as server:
        trainer = train(tmp_path, callback(server))
        last = server.last_word()
    lengths = [*LENGTHS] * 3
    assert " completed after 6 steps: MFU " in capsys.readouterr().err
    assert last.resource["flopwatch.status"] == "completed"
    assert last.samples["training_steps_total"] == last.samples["training_position_steps"] == 6
    assert last.samples["training_tokens_total"] == last.samples["training_position_tokens"] == sum(lengths) == 126
    assert last.samples["training_samples_total"] == 12
    assert last.samples["training_model_flops_total"] == flops(lengths)
    assert last.samples["training_loss"] == losses(trainer)[-1]
    assert last.samples["training_grad_norm"] == trainer.state.log_history[5]["grad_norm"]
    assert last.samples["training_hook_errors_total"] == 0
    (info,) = (sample for sample in last.samples if sample.startswith("training_run_info"))
    for label in ("step_source=trainer", "flops_source=config", "convention=causal", "dtype=fp32"):
        assert label in info


@pytest.mark.parametrize(
    ("bf16", "accelerates", "expected"),
    [(True, "fp8", "fp8"), (True, "bf16", "bf16"), (True, None, "bf16"), (False, "fp8", "fp8"), (False, "no", "fp32")],
)
def test_fp8_of_accelerate_is_the_dtype_whatever_the_arguments_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bf16: bool, accelerates: str | None, expected: str
) -> None:
    import transformers

    forget_accelerators()
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], bf16=bf16)
    assert args.device.type == "cpu"  # sets up accelerate's state of the process
    if accelerates is not None:
        accelerator(monkeypatch, accelerates)
    reporter = callback(None, environ={"FLOPWATCH_DISABLE": "1"})
    reporter.on_train_begin(args, transformers.TrainerState(), transformers.TrainerControl(), model=model())
    forget_accelerators()
    ((labels, _),) = reporter.run.snapshot().points[BY_NAME["training_run_info"]]
    assert labels["dtype"] == expected
    assert reporter.run.recorder.errors == 0


@pytest.mark.parametrize("seen", ["no", "all"])
def test_batches_that_ulysses_splits_among_ranks_are_not_a_ranks_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: str
) -> None:
    ulysses(monkeypatch)
    with HookServer() as server:
        train(tmp_path, callback(server), gradient_accumulation_steps=2, include_num_input_tokens_seen=seen)
        last = server.last_word()
    assert last.samples["training_steps_total"] == 6
    tokens = None if seen == "no" else 6 * 2 * 2 * 16  # the trainer's own count
    assert last.samples.get("training_tokens_total") == tokens
    assert "training_model_flops_total" not in last.samples
    assert last.samples["training_hook_errors_total"] == 0


def activities(push: Push) -> dict[str, float]:
    name = "training_activity_seconds_total{activity="
    return {sample[len(name) : -1]: value for sample, value in push.samples.items() if sample.startswith(name)}


def test_accumulation_evaluation_and_saving_are_distinguished(tmp_path: Path) -> None:
    import torch
    import transformers

    clock = Clock()
    llama: Any = transformers.LlamaForCausalLM

    class Slow(llama):  # type: ignore[misc]
        def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
            clock.passes(0.3)
            super().save_pretrained(*args, **kwargs)

    def batches(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
        clock.passes(0.05)
        return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}

    with HookServer() as server:
        reporter = callback(server, clock=clock)
        trainer = transformers.Trainer(
            model=Slow(model().config),
            data_collator=batches,
            train_dataset=samples(24),
            eval_dataset=samples(8),
            callbacks=[reporter],
            args=transformers.TrainingArguments(
                output_dir=str(tmp_path),
                per_device_train_batch_size=2,
                gradient_accumulation_steps=3,
                max_steps=4,
                per_device_eval_batch_size=2,
                eval_strategy="steps",
                eval_steps=2,
                save_steps=2,
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                train_sampling_strategy="sequential",
                eval_on_start=True,
            ),
        )
        trainer.train()
        last = server.last_word()
    assert last.samples["training_steps_total"] == last.samples["training_committed_steps"] == 4
    assert last.samples["training_tokens_total"] == sum(LENGTHS) * 6
    assert last.samples["training_samples_total"] == 24
    seconds = activities(last)
    assert {name: seconds[name] for name in ("data_stall", "evaluation", "checkpoint_save", "step")} == pytest.approx(
        {
            "data_stall": 11 * 0.05,  # of 12 batches: the first ended the startup
            "evaluation": 3 * 4 * 0.05,
            "checkpoint_save": 2 * 0.3,
            "step": 0.0,
        }
    )
    assert last.samples["training_hook_errors_total"] == 0


@pytest.mark.parametrize("broken", BROKEN)
def test_losses_are_those_without_the_callback_whatever_goes_wrong(
    tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
    alone = train(tmp_path / "alone", **settings)
    reporter = callback(None, **break_callback(broken, monkeypatch))
    watched = train(tmp_path / "watched", reporter, **settings)
    assert losses(watched) == losses(alone)
    assert all(math.isfinite(loss) for loss in losses(alone))
    errors = reporter.run.snapshot().points[BY_NAME["training_hook_errors_total"]][0][1]
    assert (errors == 0) == (broken == "no exporter")


def stop_after(step: int) -> Any:
    """Return a callback that stops the training after a step."""
    import transformers

    def on_step_end(callback: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == step

    return type("Stop", (transformers.TrainerCallback,), {"on_step_end": on_step_end})()


def test_a_resumed_run_goes_on_at_the_step_restored(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    with HookServer() as server:
        train(tmp_path / "parts", callback(server), stop_after(5), save_strategy="steps", save_steps=4)
        resumed = train(tmp_path / "parts", callback(server), resume=True, max_steps=6)
        first, second = server.last_words(2)
    assert first.samples["training_committed_steps"] == 4
    assert first.samples["training_position_steps"] == 5
    assert first.resource["flopwatch.restored_step"] == 0
    assert second.resource["flopwatch.restored_step"] == 4
    assert second.samples["training_position_steps"] == 6
    assert second.samples["training_steps_total"] == 2
    assert second.samples["training_tokens_total"] == sum(LENGTHS)  # 2 batches of 2 that follow the first 8 samples
    assert losses(resumed) == losses(whole)


def test_an_evaluation_on_the_data_trained_on_is_no_training(tmp_path: Path) -> None:
    import transformers

    data, clock = samples(24), Clock()

    def batches(rows: list[dict[str, list[int]]]) -> Any:
        clock.passes(0.05)
        return transformers.default_data_collator(rows)

    with HookServer() as server:
        trainer = transformers.Trainer(
            model=model(),
            train_dataset=data,
            eval_dataset=data,
            callbacks=[callback(server, clock=clock)],
            data_collator=batches,
            args=transformers.TrainingArguments(
                output_dir=str(tmp_path),
                per_device_train_batch_size=2,
                per_device_eval_batch_size=2,
                max_steps=18,
                eval_strategy="steps",
                eval_steps=3,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                train_sampling_strategy="sequential",
            ),
        )
        trainer.train()
        last = server.last_word()
    assert last.samples["training_steps_total"] == 18
    assert last.samples["training_tokens_total"] == sum(LENGTHS) * 9
    assert last.samples["training_samples_total"] == 36
    assert activities(last)["evaluation"] == pytest.approx(6 * 12 * 0.05)


@pytest.mark.long
def test_a_batch_size_that_is_too_large_starts_the_training_over(tmp_path: Path) -> None:
    import transformers

    trainer_class: Any = transformers.Trainer

    class Small(trainer_class):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
            if inputs["input_ids"].shape[0] > 2 and self.state.global_step == 2:
                raise RuntimeError("CUDA out of memory.")  # accelerate recognizes this text
            return super().training_step(model, inputs, *rest)

    with HookServer() as server:
        reporter = callback(server)
        trainer = Small(
            model=model(),
            train_dataset=samples(24),
            callbacks=[reporter],
            args=transformers.TrainingArguments(
                output_dir=str(tmp_path),
                per_device_train_batch_size=3,
                max_steps=6,
                auto_find_batch_size=True,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                train_sampling_strategy="sequential",
            ),
        )
        trainer.train()
        last = server.last_word()
    first_try = 5 + 9 + 16 + 12 + 5 + 9
    assert last.samples["training_steps_total"] == 2 + 6
    assert last.samples["training_position_steps"] == 6
    assert last.samples["training_tokens_total"] == first_try + sum(LENGTHS) * 3
    assert last.resource["flopwatch.restored_step"] == 0
    assert last.samples["training_hook_errors_total"] == 0


def test_a_stopped_run_reports_it_and_weights_alone_commit_nothing(tmp_path: Path) -> None:
    with HookServer() as server:
        train(
            tmp_path,
            callback(server, flops_per_token=1000),
            stop_after(3),
            save_strategy="steps",
            save_steps=2,
            save_only_model=True,
        )
        last = server.last_word()
    assert last.resource["flopwatch.status"] == "stopped"
    assert last.samples["training_steps_total"] == 3
    assert "training_committed_steps" not in last.samples
    assert last.samples["training_model_flops_total"] == 1000 * last.samples["training_tokens_total"]


def test_samples_laid_end_to_end_count_each_for_itself() -> None:
    import torch

    from flopwatch.training.frameworks.common import Batch, count

    packed = {
        "input_ids": torch.zeros(1, 9, dtype=torch.long),
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]]),
    }
    assert count(packed) == Batch(samples=1, tokens=9, lengths=[4, 2, 3])
    assert count({"input_ids": torch.zeros(2, 4, dtype=torch.long)}) == Batch(2, 8, [4, 4])
    masked = {"input_ids": torch.zeros(2, 4, dtype=torch.long), "attention_mask": torch.zeros(2, 1, 4, 4)}
    assert count(masked) == Batch(2, None, None)
    on_a_device = {
        "input_ids": torch.zeros(2, 4, dtype=torch.long, device="meta"),
        "attention_mask": torch.zeros(2, 4, device="meta"),
    }
    assert count(on_a_device) == Batch(2, None, None)
    assert count((torch.zeros(3, 5), torch.zeros(3))) == Batch(3)
    assert count({"input_ids": torch.zeros(2, 4)}) == Batch(2)
    assert count("text") == Batch()
