"""Peaks are looked up by exact card name; anything doubtful is refused with the reason."""

import pytest

from flopwatch.training.peaks import Peak, UnknownPeak, peak


@pytest.mark.parametrize(("name", "dtype", "tflops"), [
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
])
def test_a_known_card_has_its_dense_peak(name: str, dtype: str, tflops: float) -> None:
    assert peak(name, dtype).flops_per_second == pytest.approx(tflops * 1e12)


def test_a_peak_says_where_it_is_from() -> None:
    assert peak("NVIDIA B200", "bf16") == Peak(2250e12, "NVIDIA DGX B200 datasheet / 8")


# SMs x FLOP per clock and SM x boost clock of the data sheet.
@pytest.mark.parametrize(("name", "sms", "flops_per_clock", "gigahertz"), [
    ("NVIDIA H100 80GB HBM3", 132, 4096, 1.83),
    ("NVIDIA A100-SXM4-80GB", 108, 2048, 1.41),
    ("NVIDIA H100 PCIe", 114, 4096, 1.62),
    ("NVIDIA GeForce RTX 4090", 128, 512, 2.52),
])
def test_peaks_agree_with_the_silicon(name: str, sms: int, flops_per_clock: int, gigahertz: float) -> None:
    assert peak(name, "bf16").flops_per_second == pytest.approx(sms * flops_per_clock * gigahertz * 1e9, rel=2e-3)


@pytest.mark.parametrize(("name", "dtype", "reason"), [
    ("NVIDIA H100", "bf16", "'NVIDIA H100' is ambiguous: the name does not tell the form factor (SXM or PCIe)"),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16",
     "'NVIDIA H100 80GB HBM3 MIG 1g.10gb' is a MIG slice, a fraction of a card"),
    ("NVIDIA RTX A1000", "bf16", "'NVIDIA RTX A1000' is not in the table of peaks"),
    ("NVIDIA RTX A4000", "bf16", "'NVIDIA RTX A4000' is not in the table of peaks"),
    ("H100 80GB HBM3", "bf16", "'H100 80GB HBM3' is not in the table of peaks"),
    ("nvidia h100 pcie", "bf16", "'nvidia h100 pcie' is not in the table of peaks"),
    ("", "bf16", "'' is not in the table of peaks"),
    ("Tesla V100-SXM2-16GB", "bf16", "'Tesla V100-SXM2-16GB' has no bf16 peak in the table"),
    ("NVIDIA A100-SXM4-80GB", "fp8", "'NVIDIA A100-SXM4-80GB' has no fp8 peak in the table"),
    ("NVIDIA H100 80GB HBM3", "fp32",
     "no peaks are known for dtype 'fp32', only for fp16, bf16, tf32, fp8, fp4, int8"),
    ("NVIDIA H100 80GB HBM3", "basis",
     "no peaks are known for dtype 'basis', only for fp16, bf16, tf32, fp8, fp4, int8"),
])
def test_a_doubtful_card_is_refused_with_the_reason(name: str, dtype: str, reason: str) -> None:
    with pytest.raises(UnknownPeak) as refusal:
        peak(name, dtype)
    assert str(refusal.value) == reason
