"""Sections `gpm`, `pcie`, `gaps`, `ncu` and `process`: activity, bytes and processes under work of a known size."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

from bench.card.fields import PCIE_BYTES, Answer, ask
from bench.card.machine import COPY, DEVICE_COPY, HOLD, MATMUL, ROOT, Gpu, Machine
from bench.card.plan import TOTAL
from bench.card.report import Report, Unavailable, text
from bench.card.smi import PIDS, by_series, parsed
from flopwatch import catalogue as m
from flopwatch.node.collectors.nvml import gpm
from flopwatch.node.collectors.nvml.fields import Key

NAMES = {1: "graphics", 2: "sm", 3: "occupancy", 5: "tensor", 10: "dram"}
IDLE = 0.02
STEP = 1.0  # seconds between two samples, as between two scrapes
SETTLE = 2.0  # seconds until the means are those of the work
# GPM counts packet headers too, as DCGM's fields of the same counters do:
# https://docs.nvidia.com/datacenter/dcgm/latest/user-guide/feature-overview.html#profiling-metrics
BYTES_SHARE = (0.95, 1.25)
MEMORY_SHARE, MEMORY_SLACK = 0.01, 64 << 20  # the driver's own pages change while a process starts
RECEIVED_FIELD = (198, 0)
REGISTER = 2**32  # bytes after which a register of 32 bits wraps
DRAM_MARGIN = (0.8, 1.25)  # of the computed share: cycles without data between reads and writes are active too
NCU_SECONDS = 60.0
NCU_REFUSED = "ERR_NVGPUCTRPERM"


def meter(machine: Machine, gpu: Gpu) -> gpm.Meter:
    """Return the exporter's meter of a GPU. Raises Unavailable if the GPU has no GPM."""
    nvml = machine.recorder
    try:
        if nvml.nvmlGpmQueryDeviceSupport(gpu.handle).isSupportedDevice == 0:
            raise Unavailable("this GPU has no GPM, as before Hopper")
    except machine.library.NVMLError as error:
        raise Unavailable(f"nvmlGpmQueryDeviceSupport: {error}") from error
    take = partial(nvml.nvmlGpmSampleGet, gpu.handle)
    metrics = (*gpm.WHOLE_GPU, *gpm.PIPES, *gpm.TRAFFIC)
    return gpm.Meter(nvml, take, metrics, gpm.GpmActivity(), machine.clock)


def shares(machine: Machine, gpu: Gpu, seconds: float) -> dict[int, float]:
    """Return the mean share of each activity over the next seconds. Raises Unavailable if samples are refused."""
    counter = meter(machine, gpu)
    try:
        advance(machine, counter)
        began = machine.clock()
        while machine.clock() - began < seconds:
            machine.sleep(STEP)
            advance(machine, counter)
        profiled = counter.activity.profiled
        if profiled == 0:
            raise Unavailable("GPM has no number in any metric")
        return {metric: value / profiled for metric, value in counter.activity.seconds.items()}
    finally:
        counter.close()


def advance(machine: Machine, counter: gpm.Meter) -> None:
    """Take a sample. Raises Unavailable if the driver refuses it."""
    try:
        counter.advance()
    except machine.library.NVMLError as error:
        raise Unavailable(f"nvmlGpmSampleGet: {error}") from error


def section(machine: Machine, gpu: Gpu, seconds: float, report: Report) -> None:
    """Compare activities with an idle GPU and with matrix products, and ask as another user."""
    machine.sleep(SETTLE)
    busy = others(machine, gpu)
    idle = shares(machine, gpu, seconds / 3)
    report.facts["idle"] = idle
    for metric in (2, 5, 10):
        value = idle.get(metric)
        if busy or value is None:
            report.info(f"idle_{NAMES[metric]}", f"{text(value)}, with {busy} processes on the GPU")
        else:
            report.within(f"idle_{NAMES[metric]}", value, 0, IDLE)
    with machine.work(MATMUL, gpu):
        machine.sleep(SETTLE)
        active = shares(machine, gpu, seconds / 3)
    report.facts["matmul"] = active
    for metric, (low, high) in machine.activity.items():
        report.within(f"matmul_{NAMES[metric]}", active.get(metric), low, high)
    report.info("pipes", ", ".join(f"{name} {text(active.get(metric))}" for metric, name in gpm.PIPES.items()))
    with machine.work(DEVICE_COPY, gpu) as work:
        machine.sleep(SETTLE)
        copying = shares(machine, gpu, seconds / 3)
    report.facts["copy"] = copying
    peak = dram_peak(machine, gpu)
    if peak is None or work.seconds == 0:
        report.info("copy_dram", f"{text(copying.get(10))}, of an unknown peak")
    else:
        computed = work.units / work.seconds / peak
        low, high = (computed * margin for margin in DRAM_MARGIN)
        report.within("copy_dram", copying.get(10), low, high)
    report.info("unprivileged", unprivileged(machine, gpu))


def dram_peak(machine: Machine, gpu: Gpu) -> float | None:
    """Return the bytes per second of the GPU's memory at its highest clock, None if the driver reports no bus width."""
    nvml = machine.recorder
    try:
        megahertz = float(nvml.nvmlDeviceGetMaxClockInfo(gpu.handle, machine.library.NVML_CLOCK_MEM))
        bits = float(nvml.nvmlDeviceGetMemoryBusWidth(gpu.handle))
    except machine.library.NVMLError:
        return None
    return 2e6 * megahertz * bits / 8  # two transfers a cycle


def others(machine: Machine, gpu: Gpu) -> int:
    """Return how many compute processes are on a GPU, 0 if that is unknown."""
    try:
        return len(machine.recorder.nvmlDeviceGetComputeRunningProcesses_v3(gpu.handle))
    except machine.library.NVMLError:
        return 0


def unprivileged(machine: Machine, gpu: Gpu) -> str:
    """Return the answer to a GPM sample of a user without capabilities, which needs root and setpriv."""
    if machine.simulated is not None:
        return "not asked on a simulated node"
    if os.geteuid() != 0 or (setpriv := shutil.which("setpriv")) is None:
        return "not asked: needs root and setpriv"
    script = (
        "import pynvml as n; n.nvmlInit(); s = n.nvmlGpmSampleAlloc(); "
        f"n.nvmlGpmSampleGet(n.nvmlDeviceGetHandleByIndex({gpu.index}), s); print('a sample')"
    )
    user = [setpriv, "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"]
    environ = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    try:
        done = subprocess.run(
            [*user, sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False, env=environ
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return ((done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["no answer"])[-1]


def pcie(machine: Machine, gpu: Gpu, seconds: float, report: Report) -> None:
    """Compare the bytes that GPM counts with bytes copied to the GPU, and report the raw byte fields."""
    counter = meter(machine, gpu)
    highest = 0.0
    try:
        with machine.work(COPY, gpu) as work:
            before = ask(machine, gpu, PCIE_BYTES)
            advance(machine, counter)
            began = machine.clock()
            while machine.clock() - began < seconds:
                machine.sleep(STEP)
                advance(machine, counter)
                highest = max(highest, *(answer.number or 0.0 for answer in ask(machine, gpu, PCIE_BYTES).values()))
        machine.sleep(STEP)
        advance(machine, counter)
        after = ask(machine, gpu, PCIE_BYTES)
    finally:
        counter.close()
    received = counter.activity.bytes.get(gpm.PCIE_RECEIVED)
    share = None if received is None or work.units == 0 else received / work.units
    report.facts.update(copied=work.units, seconds=work.seconds, received=received)
    report.within("received_share", share, *BYTES_SHARE)
    rate = work.units / work.seconds if work.seconds > 0 else None
    report.info("rate", f"{text(None if rate is None else rate / 1e9)} GB/s")
    for key, answer in before.items():
        report.info(f"field_{key[0]}", f"{answer}, {'below' if highest < REGISTER else 'above'} 2^32 at all times")
    field_delta(before, after, highest, work.units, report)


def field_delta(
    before: Mapping[Key, Answer], after: Mapping[Key, Answer], highest: float, copied: float, report: Report
) -> None:
    """Compare the rise of the field of received bytes with the bytes copied, unless its register has 32 bits."""
    first, last = before[RECEIVED_FIELD].number, after[RECEIVED_FIELD].number
    delta = None if first is None or last is None else last - first
    report.facts["field_198_delta"] = delta
    if delta is None or copied == 0 or highest < REGISTER:
        report.info("field_198_delta", f"{text(delta)} bytes in a register that wraps, {text(copied)} bytes copied")
    else:
        report.within("field_198_delta", delta / copied, *BYTES_SHARE, " of the bytes copied")


def gaps(machine: Machine, gpu: Gpu, seconds: float, report: Report) -> None:
    """Take a sample each second, and report how much of the time has no activity."""
    counter = meter(machine, gpu)
    refused: list[str] = []
    began = machine.clock()
    try:
        while machine.clock() - began < seconds:
            try:
                counter.advance()
            except machine.library.NVMLError as error:
                refused.append(f"{error} after {machine.clock() - began:.0f} s")
            machine.sleep(STEP)
        covered = counter.activity.profiled / max(machine.clock() - began - STEP, STEP)
    finally:
        counter.close()
    report.facts.update(refused=refused, covered=covered)
    # A driver may refuse samples after minutes, which the other sections need.
    measured = f"{covered:.3f} of {seconds:.0f} s, not of 3 min, because all sections have {TOTAL / 60:.0f} min"
    measured += f", {len(refused)} refused: {refused[0]}" if refused else ""
    report.check("covered", covered >= 0.95 and not refused, measured, "0.95 or more, no refused sample")


def ncu(machine: Machine, gpu: Gpu, seconds: float, report: Report) -> None:
    """Run Nsight Compute on a kernel while samples are taken. Both must work on Hopper and later."""
    if machine.simulated is not None or (program := shutil.which("ncu")) is None:
        raise Unavailable("there is no ncu on this machine")
    counter = meter(machine, gpu)
    environ = dict(os.environ, CUDA_VISIBLE_DEVICES=gpu.uuid, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    kernel = "import torch; a = torch.ones(512, 512, device='cuda'); print((a @ a).sum().item())"
    # By default, ncu locks the clocks while it profiles. A check changes no setting of a GPU.
    command = [program, "--clock-control", "none", "--launch-count", "1", sys.executable, "-c", kernel]
    refused: list[str] = []
    began = machine.clock()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environ
    ) as process:
        try:
            while process.poll() is None and machine.clock() - began < NCU_SECONDS:
                try:
                    counter.advance()
                except machine.library.NVMLError as error:
                    refused.append(str(error))
                machine.sleep(STEP / 4)
        finally:
            process.kill()
            printed = process.communicate()[0]
            counter.close()
    ncu_lines(process.returncode, printed, refused, counter.activity.profiled, report)


def ncu_lines(status: int, printed: str, refused: list[str], profiled: float, report: Report) -> None:
    """Report the end of ncu, and the samples that were taken meanwhile. Without permission ncu is INFO."""
    if NCU_REFUSED in printed:
        report.info("ncu", f"{NCU_REFUSED}: profiling needs root here")
    else:
        last = (printed.strip().splitlines() or ["no output"])[-1]
        report.check("ncu", status == 0, f"status {status}, {last}", "status 0")
    covered = f"{profiled:.1f} s of samples, {len(refused)} refused"
    report.check("samples", not refused and profiled > 0, covered, "no refused sample")


def process(machine: Machine, gpu: Gpu, seconds: float, report: Report) -> None:
    """Find a process that holds memory, and compare its memory and that of the GPU."""
    nvml = machine.recorder
    before = {one.pid for one in nvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu.handle)}
    with machine.work(HOLD, gpu) as work:
        machine.sleep(STEP)
        found = {one.pid: one.usedGpuMemory for one in nvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu.handle)}
        memory = nvml.nvmlDeviceGetMemoryInfo(gpu.handle, machine.library.nvmlMemory_v2)
        owners = owners_on(machine, gpu)
        try:
            listed = {
                int(one.findtext("pid", "0")): one.findtext("used_memory", "")
                for one in parsed(machine.smi(), gpu.uuid).iterfind(PIDS)
            }
        except (Unavailable, ValueError):
            listed = {}
    new = sorted(found.keys() - before)
    own = work.pid if work.pid in found else None
    report.facts.update(before=sorted(before), new=new, pid=work.pid)
    if own is None and new:
        report.info("pid", f"NVML reports {new} in place of pid {work.pid}, as in a container with its own pids")
        report.info("owner", f"{', '.join(owners)}, of processes that are not seen from here")
        own = new[0]
    else:
        report.check("owner", machine.owner() in owners, ", ".join(owners) or "no owner", machine.owner())
        report.check("pid", own is not None, f"pids {sorted(found)}", f"pid {work.pid}")
    smi = listed.get(own or 0, "").split(" ")[0]
    used = found.get(own or 0)
    if used is None or not smi.isdigit():
        report.info("memory", f"{used} bytes, nvidia-smi {smi or 'unknown'} MiB")
    else:
        report.near("memory", used / 2**20, float(smi), MEMORY_SHARE, " MiB")
    # Without the driver's reserve, which CUDA counts neither as used nor as part of the whole.
    margin = work.memory * MEMORY_SHARE + MEMORY_SLACK
    if work.memory == 0:
        report.info("gpu_memory", f"{memory.used} bytes")
    else:
        report.within("gpu_memory", memory.used, work.memory - margin, work.memory + margin, " bytes")


def owners_on(machine: Machine, gpu: Gpu) -> list[str]:
    """Return the owners of a GPU's processes as the exporter reads them."""
    with tempfile.TemporaryDirectory() as state, closing(machine.collector(Path(state))) as collector:
        return sorted(labels[0] for name, labels in by_series(collector.read(), gpu) if name == m.GPU_PROCESSES.name)
