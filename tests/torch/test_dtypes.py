"""The dtype whose peak is the denominator of MFU: right, or unknown and then without an MFU."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flopwatch.flops.peaks import DTYPES, UnknownPeak, peak
from flopwatch.training import torch as torch_hook
from flopwatch.training.frameworks import common
from flopwatch.training.frameworks.deepspeed import _facts as deepspeed_facts
from tests.support.hook import silent, value


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("torch.bfloat16", "bf16"),
        ("bf16-mixed", "bf16"),
        ("16-true", "fp16"),
        ("transformer-engine", "fp8"),
        ("fp8", "fp8"),
        ("nvfp4", "fp4"),
        ("64-true", "fp64"),
        ("torch.float8_e4m3fn", "float8_e4m3fn"),
        ("int8", "int8"),
        ("mxfp4", "mxfp4"),
        ("", ""),
    ],
)
def test_a_word_of_a_trainer_is_a_dtype_or_stays_unknown(precision: str, dtype: str) -> None:
    assert common.matmul_dtype(precision=precision) == dtype
    if dtype not in DTYPES:
        with pytest.raises(UnknownPeak, match="no peaks are known for dtype"):
            peak("NVIDIA B200", dtype)


@pytest.mark.parametrize("precision", ["32-true", "torch.float32", "no", "fp32"])
def test_float32_is_tf32_unless_pytorch_computes_exactly(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert common.matmul_dtype(precision=precision) == "fp32"
        torch.set_float32_matmul_precision("high")
        assert common.matmul_dtype(precision=precision) == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)


class Float8Linear(torch.nn.Linear):
    """A layer as torchao's, whose matmuls are in fp8."""


def model(layer: type[torch.nn.Linear]) -> torch.nn.Module:
    return torch.nn.Sequential(layer(4, 4), torch.nn.Linear(4, 4))


def test_a_model_with_float8_layers_has_the_dtype_fp8_unless_a_peak_is_given() -> None:
    runs = [silent(dtype="bf16"), silent(dtype="bf16", peak_flops=1e12), silent(dtype="fp4"), silent(dtype="bf16")]
    for run, layer in zip(runs, (Float8Linear, Float8Linear, Float8Linear, torch.nn.Linear), strict=True):
        run.watch(model(layer))
    assert [run._info.dtype for run in runs] == ["fp8", "bf16", "fp4", "bf16"]


class Fp8Linear(torch.nn.Linear):
    """A layer as Transformer Engine's, which stores in each forward pass whether it is under its autocast."""

    recipe: Any = None  # of the autocast around forward passes

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.fp8, self.fp8_meta = False, dict[str, Any]()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.fp8 = self.recipe is not None
        if self.fp8:
            self.fp8_meta["recipe"] = self.recipe
        return super().forward(input)


class DelayedScaling:
    """A recipe of Transformer Engine for fp8."""


class NVFP4BlockScaling:
    """A recipe of Transformer Engine for fp4."""


@pytest.mark.parametrize(
    ("recipe", "dtype", "peak_flops"),
    [(None, "bf16", 2250e12), (DelayedScaling(), "fp8", 4500e12), (NVFP4BlockScaling(), "fp4", 9000e12)],
)
def test_a_model_under_transformer_engines_autocast_has_its_dtype_from_the_first_step(
    recipe: object, dtype: str, peak_flops: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = threading.get_ident()
    own, others = (torch_hook.CudaCard(f"NVIDIA {name}", "") for name in ("B200", "T4"))
    # The thread that pushes has another current device.
    monkeypatch.setattr(torch_hook, "card", lambda: own if threading.get_ident() == loop else others)
    monkeypatch.setattr(Fp8Linear, "recipe", recipe)
    trained, run = model(Fp8Linear), silent(dtype="bf16")
    run.watch(trained)
    assert (run._info.dtype, run._info.peak) == ("bf16", 2250e12)
    trained(torch.ones(1, 4)).sum().backward()
    run.step(4)
    pushing = threading.Thread(target=run.snapshot)
    pushing.start()
    pushing.join()
    assert (run._info.dtype, run._info.peak) == (dtype, peak_flops)
    assert value(run.snapshot(), "training_hook_errors_total") == 0


def test_a_peak_of_ones_own_stays_under_transformer_engines_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fp8Linear, "recipe", DelayedScaling())
    trained, run = model(Fp8Linear), silent(dtype="bf16", peak_flops=1e12)
    run.watch(trained)
    trained(torch.ones(1, 4))
    run.snapshot()
    assert (run._info.dtype, run._info.peak) == ("bf16", 1e12)


def test_deepspeeds_autocast_is_its_dtype() -> None:
    engine: Any = SimpleNamespace(
        bfloat16_enabled=lambda: False,
        fp16_enabled=lambda: False,
        torch_autocast_enabled=lambda: True,
        torch_autocast_dtype=lambda: torch.bfloat16,
        mpu=None,
        dp_world_size=1,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "framework", lambda name: SimpleNamespace(get_world_size=lambda: 1))
        assert deepspeed_facts(engine)["dtype"] == "bf16"


@pytest.mark.parametrize(
    ("name", "uuid"), [("NVIDIA H100 80GB HBM3", "GPU-1234"), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "MIG-1234")]
)
def test_a_mig_slice_has_the_uuid_that_nvml_gives_it(name: str, uuid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name=name, uuid="1234"))
    assert torch_hook.card() == torch_hook.CudaCard(name, uuid)
