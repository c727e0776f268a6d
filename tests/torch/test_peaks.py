"""Test that peaks are looked up by exact card name, and that anything doubtful is refused with the reason."""

from __future__ import annotations

import csv
import ctypes
import json
import subprocess
import sys
from functools import partial
from math import prod
from typing import Any

import pytest

from flopwatch.__main__ import main
from flopwatch.flops.peaks import DTYPES, Peak, UnknownPeak, peak
from flopwatch.training import Run
from tests.support import ROOT, TESTS

# Figures from data sheets, including the names that must be refused.
REFERENCE = list(csv.DictReader((TESTS / "captures/peak_flops_reference.csv").read_text(encoding="utf-8").splitlines()))


def expected(row: dict[str, str], dtype: str) -> float | None:
    """Return the FLOP/s in a row of the reference, None if the name must be refused."""
    column = {"fp16": "bf16_tflops", "int8": "int8_tops"}.get(dtype, f"{dtype}_tflops")
    text = row[column]
    if text.startswith("fp16 "):  # tensor cores without bf16
        text = text.removeprefix("fp16 ") if dtype == "fp16" else ""
    return float(text) * 1e12 if text else None


@pytest.mark.parametrize("row", REFERENCE, ids=[row["nvml_name"] for row in REFERENCE])
def test_every_name_of_the_reference_answers_its_row_or_refuses(row: dict[str, str]) -> None:
    answers: dict[str, float | None] = {}
    for dtype in DTYPES:
        try:
            answers[dtype] = peak(row["nvml_name"], dtype).flops_per_second
        except UnknownPeak:
            answers[dtype] = None
    assert answers == pytest.approx({dtype: expected(row, dtype) for dtype in DTYPES})


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "fp8", 1978.9),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H20", "bf16", 148),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA B200", "fp4", 9000),
        ("NVIDIA GB200", "bf16", 2500),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA PG509-210", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "int8", 624),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-SXM3-32GB", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
        ("NVIDIA H100 80GB HBM2e", "bf16", 756),
        ("NVIDIA B100", "fp4", 7000),
        ("NVIDIA GB10", "fp4", 500),
        ("NVIDIA A2", "bf16", 18),
        ("NVIDIA GeForce RTX 5080", "fp8", 225.1),
        ("Quadro RTX 6000", "fp16", 130.5),
    ],
)
def test_a_known_card_has_its_dense_peak(name: str, dtype: str, tflops: float) -> None:
    assert peak(name, dtype).flops_per_second == tflops * 1e12


def test_a_peak_has_its_source() -> None:
    assert peak("NVIDIA B200", "bf16") == Peak(2250e12, "NVIDIA DGX B200 datasheet / 8")


@pytest.mark.parametrize(("source", "label"), [(None, "override"), ("measured", "override: measured")])
def test_a_peak_that_is_passed_is_labelled_as_an_override(source: str | None, label: str) -> None:
    run = Run("llama", peak_flops=7e14, peak_source=source, environ={"FLOPWATCH_DISABLE": "1"})
    run.finish()
    assert (run._info.peak, run._info.peak_source) == (7e14, label)


# SMs x FLOP per clock and SM x boost clock of the data sheet.
@pytest.mark.parametrize(
    ("name", "sms", "flops_per_clock", "gigahertz"),
    [
        ("NVIDIA H100 80GB HBM3", 132, 4096, 1.83),
        ("NVIDIA A100-SXM4-80GB", 108, 2048, 1.41),
        ("NVIDIA H100 PCIe", 114, 4096, 1.62),
        ("NVIDIA GeForce RTX 4090", 128, 512, 2.52),
        ("NVIDIA GeForce RTX 4080", 76, 512, 2.505),
        ("NVIDIA GeForce RTX 3090 Ti", 84, 512, 1.86),
        ("NVIDIA GeForce RTX 3080", 68, 512, 1.71),
        ("NVIDIA RTX 5000 Ada Generation", 100, 1024, 2.55),
    ],
)
def test_peaks_agree_with_the_silicon(name: str, sms: int, flops_per_clock: int, gigahertz: float) -> None:
    assert peak(name, "bf16").flops_per_second == pytest.approx(sms * flops_per_clock * gigahertz * 1e9, rel=2e-3)


# By a name that the table does not have: the names in it that this one is a part of.
PARTS = {
    "H100 80GB HBM3": "NVIDIA H100 80GB HBM3",
    "nvidia h100 pcie": "NVIDIA H100 PCIe",
    "NVIDIA H200 ": "NVIDIA H200, NVIDIA H200 NVL",
}


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("NVIDIA H100", "bf16", "'NVIDIA H100' is ambiguous: the name does not tell the form factor (SXM or PCIe)"),
        (
            "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
            "bf16",
            "'NVIDIA H100 80GB HBM3 MIG 1g.10gb' is a MIG slice, a fraction of a card",
        ),
        (
            "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
            "bf16",
            "'NVIDIA A100-SXM4-80GB MIG 1g.10gb' is a MIG slice, a fraction of a card",
        ),
        (
            "NVIDIA A100-SXM4-80GB MIG 1c.3g.40gb",
            "bf16",
            "'NVIDIA A100-SXM4-80GB MIG 1c.3g.40gb' is a MIG slice, a fraction of a card",
        ),
        (
            "NVIDIA RTX A1000",
            "bf16",
            "'NVIDIA RTX A1000' is not in the table of peaks; give the name as nvidia-smi prints it",
        ),
        (
            "NVIDIA RTX A4000",
            "bf16",
            "'NVIDIA RTX A4000' is not in the table of peaks; give the name as nvidia-smi prints it",
        ),
        (
            "NVIDIA H20 NVL16",
            "bf16",
            "'NVIDIA H20 NVL16' is not in the table of peaks; give the name as nvidia-smi prints it",
        ),
        (
            "NVIDIA GeForce RTX 4090 D",
            "bf16",
            "'NVIDIA GeForce RTX 4090 D' is not in the table of peaks; give the name as nvidia-smi prints it",
        ),
        (
            "NVIDIA GeForce RTX 4090 Laptop GPU",
            "bf16",
            "'NVIDIA GeForce RTX 4090 Laptop GPU' is not in the table of peaks; give the name as nvidia-smi prints it",
        ),
        ("GRID A100D-80C", "bf16", "'GRID A100D-80C' is a virtual GPU, a share of a card"),
        ("NVIDIA A100-40C", "bf16", "'NVIDIA A100-40C' is a virtual GPU, a share of a card"),
        (
            "NVIDIA A100-SXM-64GB",
            "bf16",
            "'NVIDIA A100-SXM-64GB' is ambiguous: a custom A100 with more multiprocessors, for which NVIDIA prints no "
            "peak",
        ),
        (
            "H100 80GB HBM3",
            "bf16",
            "'H100 80GB HBM3' is not in the table of peaks; give the name as nvidia-smi prints it",
        ),
        (
            "nvidia h100 pcie",
            "bf16",
            "'nvidia h100 pcie' is not in the table of peaks; give the name as nvidia-smi prints it",
        ),
        ("NVIDIA H200 ", "bf16", "'NVIDIA H200 ' is not in the table of peaks; give the name as nvidia-smi prints it"),
        ("", "bf16", "'' is not in the table of peaks; give the name as nvidia-smi prints it"),
        ("Tesla V100-SXM2-16GB", "bf16", "'Tesla V100-SXM2-16GB' has no bf16 peak in the table"),
        ("NVIDIA A100-SXM4-80GB", "fp8", "'NVIDIA A100-SXM4-80GB' has no fp8 peak in the table"),
        (
            "NVIDIA H100 80GB HBM3",
            "fp32",
            "no peaks are known for dtype 'fp32', only for fp16, bf16, tf32, fp8, fp4, int8",
        ),
        (
            "NVIDIA H100 80GB HBM3",
            "basis",
            "no peaks are known for dtype 'basis', only for fp16, bf16, tf32, fp8, fp4, int8",
        ),
    ],
)
def test_a_doubtful_card_is_refused_with_the_reason(
    name: str, dtype: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnknownPeak) as refusal:
        peak(name, dtype)
    assert str(refusal.value) == reason
    if name in PARTS:
        reason += f"; of this name it has {PARTS[name]}"
    for form in ([], ["--json"]):
        assert main(["peak", name, "--dtype", dtype, *form]) == 1
        assert capsys.readouterr() == ("", f"flopwatch: {reason}\n")


def test_the_command_prints_peak_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peak", "NVIDIA H200", "--dtype", "bf16"]) == 0
    assert capsys.readouterr().out == (
        "NVIDIA H200 bf16: 989.4 TFLOP/s, dense (NVIDIA H100 datasheet (halved), architecture paper)\n"
    )
    assert main(["peak", "NVIDIA A100-SXM4-80GB", "--dtype", "int8"]) == 0
    assert capsys.readouterr().out == "NVIDIA A100-SXM4-80GB int8: 624 TOP/s, dense (NVIDIA A100 datasheet)\n"
    assert main(["peak", "NVIDIA L40S", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "name": "NVIDIA L40S",
        "dtype": "bf16",
        "flops_per_second": 362e12,
        "source": "NVIDIA L40S datasheet",
    }


class Driver:
    """Fake of CUDA's driver library, as ctypes presents it."""

    def __init__(self, name: bytes, devices: int = 1) -> None:
        self.name, self.devices = name, devices

    def __call__(self, file: str) -> Driver:
        assert file == "libcuda.so.1"
        return self

    def cuInit(self, flags: int) -> int:
        return 0 if self.devices else 100  # CUDA_ERROR_NO_DEVICE

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = 41 + ordinal
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: ctypes.c_int) -> int:
        assert (size, device.value) == (256, 41)
        name.value = self.name
        return 0


def test_without_a_name_it_is_the_card_at_hand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", Driver(b"NVIDIA H20"))
    assert main(["peak", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["flops_per_second"] == 148e12
    monkeypatch.setattr(ctypes, "CDLL", Driver(b"NVIDIA A100-SXM4-80GB MIG 1g.10gb"))
    assert main(["peak"]) == 1
    assert "is a MIG slice" in capsys.readouterr().err


def test_without_a_name_and_a_card_it_asks_for_the_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_driver(file: str) -> Driver:
        raise OSError(f"{file}: cannot open shared object file")

    for library, reason in (
        (no_driver, "flopwatch: there is no NVIDIA driver here; give the card's name, as nvidia-smi prints it\n"),
        (Driver(b"", devices=0), "flopwatch: CUDA's driver shows no card (error 100); give the card's name\n"),
    ):
        monkeypatch.setattr(ctypes, "CDLL", library)
        assert main(["peak"]) == 1
        assert capsys.readouterr() == ("", reason)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["NVIDIA H200", "--measure"], "--measure is for the device of this machine; leave the name out"),
        (["NVIDIA H200", "--seconds", "3"], "--seconds is how long --measure takes; give both or neither"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["peak", *arguments]) == 1
    assert capsys.readouterr().err == f"flopwatch: {reason}\n"


def test_measuring_without_torch_names_what_is_missing() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from flopwatch.__main__ import main; "
        "sys.exit(main(['peak', '--measure']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "exporter")}, text=True, capture_output=True
    )
    assert (done.returncode, done.stderr) == (1, "flopwatch: --measure needs PyTorch, which is not installed here\n")


# The sweep, on this CPU.


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_a_sweep_reports_the_best_shape_and_what_it_reached(dtype: str) -> None:
    import torch

    from flopwatch.training.torch.peak import sweep

    precision = torch.get_float32_matmul_precision()
    achieved = sweep(dtype, 0.1, ((32, 64, 32), (64, 64, 64)), torch.device("cpu"))
    assert achieved.dtype == dtype
    assert achieved.shape in ((32, 64, 32), (64, 64, 64))
    assert 1e6 < achieved.flops_per_second < 1e14
    assert torch.get_float32_matmul_precision() == precision


@pytest.mark.torch
def test_seconds_come_from_the_devices_events_and_the_best_shape_wins() -> None:
    import torch

    from flopwatch.training.torch.peak import event_timer, sweep

    class Event:
        """CUDA event of a fake device that takes 4 ms for the third shape and 1 ms for anything else."""

        recorded = 0

        def record(self) -> None:
            Event.recorded += 1
            self.number = Event.recorded

        def synchronize(self) -> None:
            assert self.number == Event.recorded

        def elapsed_time(self, end: Event) -> float:
            assert end.number == self.number + 1
            return 4.0 if end.number > 8 else 1.0

    achieved = sweep(
        "fp16", 0.003, ((8, 8, 8), (16, 16, 16), (16, 32, 16)), torch.device("cpu"), partial(event_timer, event=Event)
    )
    assert (achieved.shape, achieved.flops_per_second) == ((16, 16, 16), 2 * 16**3 / 1e-3)


@pytest.mark.torch
def test_the_shapes_of_a_card_are_measured_from_the_largest_on() -> None:
    from flopwatch.training.torch.peak import CUDA_SHAPES

    sizes = [prod(shape) for shape in CUDA_SHAPES]
    assert sizes == sorted(sizes, reverse=True)
    assert 2 * sizes[0] > 1e15 / 100  # 10 ms or more at 1 PFLOP/s, so that power is limited soon


@pytest.mark.torch
def test_fp8_is_measured_with_the_fast_accumulation_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from flopwatch.training.torch.peak import sweep

    calls: list[dict[str, Any]] = []

    def multiply(left: torch.Tensor, right: torch.Tensor, *scales: torch.Tensor, **options: Any) -> None:
        kinds = {left.dtype, right.dtype}
        calls.append({"sizes": (*left.shape, *right.shape), "by columns": right.stride(0) == 1, **options})
        assert (kinds, len(scales)) == ({torch.float8_e4m3fn}, 2)

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    sweep("fp8", 0.001, ((32, 64, 16),), torch.device("cpu"))
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    assert calls == [{"sizes": (32, 16, 16, 64), "by columns": True, **options}] * len(calls)
    assert len(calls) >= 3


@pytest.mark.torch
@pytest.mark.parametrize(
    ("dtype", "reason"),
    [
        ("fp4", "'fp4' is not measured, only fp16, bf16, tf32, fp8, int8"),
        ("fp32", "'fp32' is not measured, only fp16, bf16, tf32, fp8, int8"),
        ("tf32", "tf32 needs an NVIDIA card of the Ampere generation or newer"),
    ],
)
def test_what_cannot_be_measured_has_a_reason(dtype: str, reason: str) -> None:
    import torch

    from flopwatch.training.torch.peak import Unmeasurable, sweep

    with pytest.raises(Unmeasurable) as refusal:
        sweep(dtype, 0.1, device=torch.device("cpu"))
    assert str(refusal.value) == reason


@pytest.mark.torch
def test_a_device_that_cannot_multiply_is_an_error_of_one_line() -> None:
    import torch

    from flopwatch.training.torch.peak import Unmeasurable, sweep

    with pytest.raises(Unmeasurable, match=r"^torch \S+ cannot multiply int8 on cpu: .+$"):
        sweep("int8", 0.1, ((-1, 8, 8),), torch.device("cpu"))


@pytest.mark.torch
def test_the_command_measures_and_shows_the_data_sheets_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peak", "--measure", "--dtype", "bf16", "--seconds", "0.2"]) == 0
    first, measured, sheet = capsys.readouterr().out.splitlines()
    assert first.endswith(" bf16")
    assert measured.startswith("  measured    ")
    assert measured.endswith(" (m x n x k)")
    assert sheet.startswith("  data sheet  ")
    assert main(["peak", "--measure", "--seconds", "0.2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["achievable_flops_per_second"] > 1e6
    assert len(printed["shape"]) == 3
    assert (printed["flops_per_second"] is None) == ("refused" in printed)
    assert main(["peak", "--measure", "--dtype", "fp4"]) == 1
