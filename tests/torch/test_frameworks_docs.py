"""Test the code blocks of docs/frameworks.md: each one runs, and has five lines at most."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flopwatch.catalogue import BY_NAME
from flopwatch.training import Run
from tests.support import ROOT
from tests.support.frameworks import engine

pytestmark = [
    pytest.mark.torch,
    # Warnings of Lightning 2.6 under torch 2.13, not ours.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]

DOCS = (ROOT / "docs/frameworks.md").read_text(encoding="utf-8")
BLOCKS = {
    title: (kind, code)
    for title, kind, code in re.findall(
        r"^## ([^\n]+)\n(?:(?!^## |^```).)*^```(\w+)\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL
    )
}


def value(run: Run, name: str) -> float:
    ((_, answer),) = run.snapshot(last=True).points[BY_NAME[name]]
    return answer


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("FLOPWATCH_DISABLE", "HF_HUB_OFFLINE", "ACCELERATE_USE_CPU"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.chdir(tmp_path)


def test_each_framework_takes_five_lines_at_most() -> None:
    assert list(BLOCKS) == ["Hugging Face Trainer", "Lightning", "Accelerate", "DeepSpeed", "torchtitan", "Megatron-LM"]
    for kind, code in BLOCKS.values():
        if kind != "diff":
            assert len([line for line in code.splitlines() if line]) <= 5


def test_the_hugging_face_block_runs(tmp_path: Path) -> None:
    import transformers

    names: dict[str, Any] = {
        "Trainer": transformers.Trainer,
        "model": transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
            )
        ),
        "args": transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no"
        ),
        "dataset": [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 16,
    }
    exec(BLOCKS["Hugging Face Trainer"][1], names)
    run = next(c.run for c in names["trainer"].callback_handler.callbacks if hasattr(c, "run"))
    assert value(run, "training_steps_total") == 2
    assert value(run, "training_tokens_total") == 48


def test_the_lightning_block_runs() -> None:
    import lightning.pytorch
    import torch

    class Model(lightning.pytorch.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(32, 8)

        def training_step(self, batch: dict[str, Any], _: int) -> Any:
            return self.embedding(batch["input_ids"]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    loader: Any = torch.utils.data.DataLoader
    names: dict[str, Any] = {
        "Trainer": lambda **arguments: lightning.pytorch.Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_epochs=1,
            **arguments,
        ),
        "module": Model(),
        "loader": loader([{"input_ids": torch.ones(3, dtype=torch.long)}] * 8, batch_size=2),
    }
    exec(BLOCKS["Lightning"][1], names)
    run = next(c.run for c in names["trainer"].callbacks if hasattr(c, "run"))
    assert value(run, "training_steps_total") == 4
    assert value(run, "training_tokens_total") == 24


def test_the_accelerate_block_runs() -> None:
    import torch

    accelerate: Any = importlib.import_module("accelerate")

    def train(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> None:
        for batch in loader:
            accelerator.backward(model(batch["input_ids"]).sum())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.end_training()

    model = torch.nn.Embedding(32, 8)
    dataset: Any = [{"input_ids": torch.ones(3, dtype=torch.long)}] * 8
    names: dict[str, Any] = {
        "accelerator": accelerate.Accelerator(cpu=True),
        "train": train,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "loader": torch.utils.data.DataLoader(dataset, batch_size=2),
    }
    exec(BLOCKS["Accelerate"][1], names)
    assert value(names["run"], "training_steps_total") == 4
    assert value(names["run"], "training_tokens_total") == 24


def test_the_deepspeed_block_runs_on_an_engine_as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 1)
    names: dict[str, Any] = {
        "deepspeed": SimpleNamespace(initialize=lambda **_: (engine(accumulate=1), None, None, None)),
        "model": None,
        "config": {},
        "train": lambda engine: [engine.step() for _ in range(3)],
    }
    exec(BLOCKS["DeepSpeed"][1], names)
    assert value(names["run"], "training_steps_total") == 3


def test_the_handler_that_torchtitans_variable_names_is_there() -> None:
    path = BLOCKS["torchtitan"][1].split("TITAN_STRUCT_LOGGER_HANDLERS=")[1].strip()
    module, _, function = path.rpartition(".")
    factory = getattr(importlib.import_module(module), function)
    inspect.signature(factory).bind(structured_logger=None, rank=0, source="training", output_dir="outputs")


def test_the_lines_of_megatrons_patch_call_what_there_is() -> None:
    megatron: Any = importlib.import_module("flopwatch.training.frameworks.megatron")
    added = [line[1:].strip() for line in BLOCKS["Megatron-LM"][1].splitlines() if re.match(r"\+[^+]", line)]
    assert len(added) == 11
    calls = [ast.parse(line).body[0] for line in added if line.startswith("flopwatch.")]
    assert {call.value.func.attr for call in calls} == {"begin", "step", "enter", "leave", "committed", "finish"}
    for call in calls:
        made: Any = call.value
        inspect.signature(getattr(megatron, made.func.attr)).bind(*made.args)


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"fp4": "e2m1", "fp8": None}, "fp4"),
        ({"fp4": None, "fp8": "hybrid"}, "fp8"),
        ({"fp8": None}, "bf16"),
        ({"bf16": False, "fp16": True}, "fp16"),
        ({"bf16": False}, "tf32"),
    ],
)
def test_megatrons_dtype_is_the_fastest_of_its_matmuls(settings: dict[str, Any], dtype: str) -> None:
    megatron: Any = importlib.import_module("flopwatch.training.frameworks.megatron")
    args = SimpleNamespace(**{"bf16": True, "fp16": False, "iteration": 0, **settings})
    megatron.begin(args, name="gpt", world_size=1, rank=0)
    labels = megatron.run.snapshot().points[BY_NAME["training_run_info"]][0][0]
    megatron.finish()
    assert labels["dtype"] == dtype


def test_megatrons_weight_sharding_counts_among_the_replicas() -> None:
    megatron: Any = importlib.import_module("flopwatch.training.frameworks.megatron")
    args = SimpleNamespace(
        bf16=True, fp16=False, iteration=0, seq_length=16, data_parallel_size=2, gtp_weight_remat_size=2
    )
    megatron.begin(args, name="gpt", world_size=8, rank=0, replica_ranks=2)
    for _ in range(2):
        megatron.step(args, 8, 4000.0)
    assert value(megatron.run, "training_samples_total") == 2 * 8 / 8
    assert value(megatron.run, "training_model_flops_total") == 4000 / 8  # the first was startup
    megatron.finish()


def test_megatrons_iterations_are_steps_of_all_replicas() -> None:
    megatron: Any = importlib.import_module("flopwatch.training.frameworks.megatron")
    args = SimpleNamespace(
        bf16=True, fp16=False, fp8=None, iteration=10, consumed_train_samples=80, seq_length=16, data_parallel_size=4
    )
    megatron.begin(args, name="gpt", world_size=8, rank=0, replica_ranks=2)
    megatron.step(args, 8, 4000.0)
    megatron.step(args, 8, 4000.0, 100.0)
    megatron.enter("checkpoint_save")
    megatron.leave("checkpoint_save")
    megatron.committed(12)
    megatron.step(SimpleNamespace(), 8, 4000.0)  # arguments of another version
    run = megatron.run
    assert run.snapshot().resource["flopwatch.restored_step"] == 10
    assert value(run, "training_position_steps") == value(run, "training_committed_steps") == 12
    assert value(run, "training_tokens_total") == (8 * 16 + 100) / 8
    assert value(run, "training_position_tokens") == 80 * 16 / 4 + (8 * 16 + 100) / 4
    assert value(run, "training_samples_total") == 2 * 8 / 8
    assert value(run, "training_model_flops_total") == 4000 / 8  # the first was startup
    assert value(run, "training_hook_errors_total") == 1
    megatron.finish()
    assert not run.alive
