"""Section `trainers`: tokens that trainers' callbacks count, with padded and with packed samples.

Each training has gradient accumulation and a short last batch.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from bench.card.jobs import device_of, value
from bench.card.report import Report
from flopwatch.training import Run

LENGTHS = (5, 9, 16, 12)  # tokens of a sample, in turn; the rest of its 16 is padding
SAMPLES, BATCH, ACCUMULATED, STEPS = 45, 2, 3, 8  # the last step has batches of 2, 1 sample
TOKENS = sum(LENGTHS[index % 4] for index in range(SAMPLES))


def samples() -> list[dict[str, torch.Tensor]]:
    """Return padded samples with their masks and labels."""
    answer = []
    for index in range(SAMPLES):
        mask = torch.arange(16).lt(LENGTHS[index % 4]).long()
        ids = torch.arange(16).add(7 * index).remainder(31) * mask
        answer.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return answer


def packed(some: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Lay samples end to end in one row without padding, as transformers' DataCollatorWithFlattening does."""
    lengths = [int(sample["attention_mask"].sum()) for sample in some]
    batch = {
        name: torch.cat([sample[name][:length] for sample, length in zip(some, lengths, strict=True)])
        for name in ("input_ids", "labels")
    }
    batch["position_ids"] = torch.cat([torch.arange(length) for length in lengths])
    return {name: row[None] for name, row in batch.items()}


def section(device: str, seconds: float, report: Report) -> None:
    """Train one pass over the samples with each trainer that is installed."""
    on = device_of(device)
    os.environ.update(FLOPWATCH_DISABLE="1", HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    if on.type == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "1"
    trainers: dict[str, Callable[[torch.device, str, Any], Run]] = {
        "transformers": huggingface,
        "lightning": lightning,
        "accelerate": accelerate,
    }
    for name, train in trainers.items():
        try:
            importlib.import_module(name)
        except ImportError as error:
            report.info(name, error)
            continue
        for line, collate in ((name, None), (f"{name}_packed", packed)):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    run = train(on, folder, collate)
                except Exception as error:
                    report.check(line, False, f"{type(error).__name__}: {error}", "a training")
                    continue
            errors = value(run, "training_hook_errors_total")
            compare(line, value(run, "training_tokens_total"), value(run, "training_steps_total"), errors, report)


def compare(name: str, tokens: float, steps: float, errors: float, report: Report) -> None:
    """Report the tokens and steps that a callback counted, and the hook's errors."""
    measured = f"{tokens:.0f} tokens, {steps:.0f} steps, {errors:.0f} errors"
    ok = (tokens, steps, errors) == (TOKENS, STEPS, 0)
    report.check(name, ok, measured, f"{TOKENS} tokens, {STEPS} steps, 0 errors")


def newest() -> Run:
    """Return the run that a callback made last."""
    run = Run._newest
    if run is None:
        raise RuntimeError("the callback made no run")
    return run


def huggingface(device: torch.device, folder: str, collate: Any) -> Run:
    """Train a small Llama with the Hugging Face Trainer. `collate` makes a batch of samples, None stacks them."""
    transformers: Any = importlib.import_module("transformers")
    from flopwatch.training.frameworks.huggingface import FlopwatchCallback

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=32, max_position_embeddings=16)
    settings = transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATED,
        num_train_epochs=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=device.type == "cpu",
    )
    callback = FlopwatchCallback("card")
    model = transformers.LlamaForCausalLM(config)
    given = {"train_dataset": samples(), "data_collator": collate, "callbacks": [callback]}
    transformers.Trainer(model=model, args=settings, **given).train()
    return newest()


class Network(torch.nn.Module):
    """Language model of one layer, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the next tokens."""
        scores = self.head(self.embedding(ids))[:, :-1]
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())


def lightning(device: torch.device, folder: str, collate: Any) -> Run:
    """Train with Lightning. `collate` is as in `huggingface`."""
    framework: Any = importlib.import_module("lightning.pytorch")
    from flopwatch.training.frameworks.lightning import FlopwatchCallback

    class Model(framework.LightningModule):  # type: ignore[misc]  # known at run time
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss: torch.Tensor = self.network(batch["input_ids"])
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    loader: Any = torch.utils.data.DataLoader
    trainer = framework.Trainer(
        max_epochs=1,
        accumulate_grad_batches=ACCUMULATED,
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        callbacks=[FlopwatchCallback("card")],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), loader(samples(), batch_size=BATCH, collate_fn=collate))
    return newest()


def accelerate(device: torch.device, folder: str, collate: Any) -> Run:
    """Train a loop of Accelerate. `collate` is as in `huggingface`."""
    framework: Any = importlib.import_module("accelerate")
    from flopwatch.training.frameworks.accelerate import watch

    accelerator = framework.Accelerator(gradient_accumulation_steps=ACCUMULATED)
    model: Any = Network()
    loader: Any = torch.utils.data.DataLoader
    model, optimizer, batches = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), loader(samples(), batch_size=BATCH, collate_fn=collate)
    )
    run: Run = watch(accelerator, "card")
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch["input_ids"]))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()
    return run
