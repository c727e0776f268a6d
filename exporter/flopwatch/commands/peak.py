"""`flopwatch peak`: print the dense peak FLOP/s of a card from the table by NVML name, or measure it.

Without a name, the card is the first that CUDA's driver lists. Unlike NVML, it respects CUDA_VISIBLE_DEVICES and names
MIG slices: https://docs.nvidia.com/cuda/cuda-driver-api/index.html.
"""

import argparse
import ctypes
import json
from typing import TYPE_CHECKING

from flopwatch.commands import Commands, command, seconds
from flopwatch.settings import SettingsError

if TYPE_CHECKING:
    from flopwatch.flops.peaks import Peak

SECONDS = 10.0  # default of --seconds


def run(options: argparse.Namespace) -> int:
    """Print a card's peak and return the exit status. Raises SettingsError with the reason if there is none."""
    if options.measure:
        return _measure(options)
    if options.seconds is not None:
        raise SettingsError("--seconds is how long --measure takes; give both or neither")
    if options.list:
        return _list(options)
    name = present_card() if options.name is None else options.name
    peak = _table(name, options.dtype)
    if isinstance(peak, str):
        raise SettingsError(peak)
    if options.json:
        answer = {"name": name, "dtype": options.dtype, "flops_per_second": peak.flops_per_second}
        print(json.dumps({**answer, "source": peak.source}))
    else:
        print(f"{name} {options.dtype}: {_per_second(peak.flops_per_second, options.dtype)}, dense ({peak.source})")
    return 0


def _table(name: str, dtype: str) -> "Peak | str":
    """Return the peak in the table, or the reason why the table has none."""
    from flopwatch.flops.peaks import UnknownPeak, names, peak

    try:
        return peak(name, dtype)
    except UnknownPeak as refusal:
        part = name.strip().lower()
        like = [known for known in names() if part and part in known.lower()]
        return f"{refusal}; of this name it has {', '.join(like)}" if like and name not in like else str(refusal)


def _list(options: argparse.Namespace) -> int:
    """Print the peak of each card in the table for a dtype."""
    from flopwatch.flops.peaks import Peak, names

    if options.name is not None:
        raise SettingsError("--list prints all cards; leave the name out")
    found = {name: peak for name in names() if isinstance(peak := _table(name, options.dtype), Peak)}
    if not found:
        raise SettingsError(_table(next(iter(names())), options.dtype))
    if options.json:
        print(json.dumps({name: peak.flops_per_second for name, peak in found.items()}, indent=2))
        return 0
    width = max(map(len, found))
    for name, peak in found.items():
        print(f"{name:<{width}}  {_per_second(peak.flops_per_second, options.dtype):>14}")
    return 0


def _measure(options: argparse.Namespace) -> int:
    if options.name is not None:
        raise SettingsError("--measure is for the device of this machine; leave the name out")
    try:
        from flopwatch.training.torch.peak import Unmeasurable, sweep
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise SettingsError("--measure needs PyTorch, which is not installed here") from None
    try:
        achieved = sweep(options.dtype, SECONDS if options.seconds is None else options.seconds)
    except Unmeasurable as error:
        raise SettingsError(str(error)) from None
    peak = _table(achieved.device, options.dtype)
    measured = {"achievable_flops_per_second": achieved.flops_per_second, "shape": achieved.shape}
    rate, shape = _per_second(achieved.flops_per_second, options.dtype), " x ".join(map(str, achieved.shape))
    text = f"{achieved.device} {options.dtype}\n  measured    {rate}, best at {shape} (m x n x k)\n  data sheet  "
    if isinstance(peak, str):
        sheet: dict[str, object] = {"flops_per_second": None, "source": None, "refused": peak}
        text += f"none: {peak}"
    else:
        share = achieved.flops_per_second / peak.flops_per_second
        sheet = {"flops_per_second": peak.flops_per_second, "source": peak.source, "achieved_ratio": share}
        rate = _per_second(peak.flops_per_second, options.dtype)
        text += f"{rate}, dense ({peak.source}); {share:.1%} of it measured"
    answer = {"name": achieved.device, "dtype": options.dtype, **measured, **sheet}
    print(json.dumps(answer) if options.json else text)
    return 0


def _per_second(flops: float, dtype: str) -> str:
    unit = "OP/s" if dtype == "int8" else "FLOP/s"
    return f"{flops / 1e12:,.4g} T{unit}" if flops >= 1e11 else f"{flops / 1e9:,.4g} G{unit}"


def present_card() -> str:
    """Return the name of the first card that CUDA's driver lists. Raises SettingsError without a card."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise SettingsError("there is no NVIDIA driver here; give the card's name, as nvidia-smi prints it") from None
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    # Each call returns 0 or an error code: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html
    status = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0) or cuda.cuDeviceGetName(name, 256, device)
    if status != 0:
        raise SettingsError(f"CUDA's driver shows no card (error {status}); give the card's name")
    return name.value.decode(errors="replace")


def add(commands: Commands) -> None:
    """Register the command and its flags."""
    parser = command(commands, "peak", run, "print the dense peak FLOP/s of a card, or measure what one reaches")
    add = parser.add_argument
    add(
        "name",
        nargs="?",
        metavar="NAME",
        help="exact name, as nvidia-smi -L or PyTorch prints it (default: the card here)",
    )
    # No choices: an unknown dtype is refused like an unknown card, with the reason and status 1.
    add("--dtype", default="bf16", help="of the matrix multiplications: fp16, bf16 (default), tf32, fp8, fp4 or int8")
    add("--json", action="store_true", help="print JSON")
    add("--list", action="store_true", help="print the peaks of all cards in the table for this dtype")
    add("--measure", action="store_true", help="multiply matrices here, on the card or else the CPU; needs PyTorch")
    add("--seconds", type=seconds, metavar="SECONDS", help=f"how long --measure takes (default {SECONDS:g})")
