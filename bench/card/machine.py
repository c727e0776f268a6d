"""GPUs of this machine, or of a simulated node: driver, clock, nvidia-smi and work for a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.card.report import Unavailable
from flopwatch.node.capture.recorder import Recorder
from flopwatch.node.collectors import cgroup
from flopwatch.node.collectors.nvml import Nvml
from flopwatch.node.scrape.reader import Spec

ROOT = Path(__file__).resolve().parents[2]
SMI_SECONDS = 30.0
START_SECONDS = 90.0  # until work runs on the GPU: PyTorch's import and the first kernels
MATMUL, COPY, DEVICE_COPY, HOLD = "matmul", "copy", "device_copy", "hold"  # kinds of work


@dataclass
class Work:
    """Work that runs on a GPU: its process, bytes of GPU memory in use. `units` and `seconds` are known at its end."""

    pid: int = 0
    memory: int = 0
    units: float = 0.0  # FLOPs, bytes copied to the GPU, or bytes read and written in its memory
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """GPU with its NVML index, handle, uuid and name."""

    index: int
    handle: Any
    uuid: str
    name: str


@dataclass
class Machine:
    """Hardware of this machine. `activity` has the lowest and highest share of each GPM metric during MATMUL."""

    library: Any
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")
    sysfs: Path = Path("/sys")
    kmsg: Path = Path("/dev/kmsg")
    simulated: Path | None = None
    smi_command: tuple[str, ...] = ("nvidia-smi",)
    work_flags: tuple[str, ...] = ()
    activity: Mapping[int, tuple[float, float]] = field(
        default_factory=lambda: {2: (0.9, 1.01), 5: (0.7, 1.01), 10: (0.0, 0.4)}
    )
    recorder: Recorder = field(init=False)

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.library)

    def gpus(self) -> list[Gpu]:
        """Return the GPUs that answer. Raises NVMLError if the driver does not."""
        nvml = self.recorder
        nvml.nvmlInit()
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            with contextlib.suppress(self.library.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                found.append(
                    Gpu(index, handle, str(nvml.nvmlDeviceGetUUID(handle)), str(nvml.nvmlDeviceGetName(handle)))
                )
        return found

    def owner(self) -> str:
        """Return the owner of this process and of its work, as the label of GPU processes has it."""
        text = (self.proc / "self" / "cgroup").read_text(errors="replace")
        return cgroup.parse(text) or f"user:{os.getuid()}"

    def collector(self, state: Path, library: Any = None) -> Nvml:
        """Return the exporter's NVML collector, with its inventory in the folder `state`."""
        library = self.recorder if library is None else library
        return Nvml(
            library, "card", state / "gpus.json", clock=self.clock, sysfs=self.sysfs, proc=self.proc, dev=self.dev
        )

    def reader_spec(self, state: Path) -> Spec:
        """Return the factory of that collector in a reader process."""
        own = {"host": "card", "inventory": f"{state}/gpus.json", "runtime": f"{state}/runtime.json"}
        return Spec("flopwatch.node.collectors.nvml:build", own | {"sysfs": str(self.sysfs)})

    def smi(self) -> str:
        """Return the XML of `nvidia-smi -q -x`. Raises Unavailable."""
        try:
            done = subprocess.run(
                [*self.smi_command, "-q", "-x"], capture_output=True, text=True, timeout=SMI_SECONDS, check=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise Unavailable(f"nvidia-smi -q -x: {error}") from error
        return done.stdout

    @contextlib.contextmanager
    def work(self, kind: str, gpu: Gpu) -> Iterator[Work]:
        """Keep a GPU busy with a kind of work during a `with` block, in another process. Raises Unavailable."""
        environ = dict(os.environ, CUDA_VISIBLE_DEVICES=gpu.uuid, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.card.work", kind, *self.work_flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environ,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            ready = _json_line(process)
            if "memory" not in ready:
                raise Unavailable(ready.get("error", f"no work on the GPU within {START_SECONDS:.0f} s"))
            work = Work(process.pid, int(ready["memory"]))
            process.stdin.write("go\n")
            process.stdin.flush()
            yield work
            process.stdin.close()
            ended = _json_line(process)
            work.units, work.seconds = float(ended.get("units", 0.0)), float(ended.get("seconds", 0.0))
        finally:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                with contextlib.suppress(OSError):
                    assert stream is not None
                    stream.close()


def _json_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the next line of a process as JSON, or its error."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], START_SECONDS)[0]:
        return {}
    try:
        line: dict[str, Any] = json.loads(process.stdout.readline())
    except ValueError:
        process.kill()
        errors = (process.stderr.read() if process.stderr is not None else "").strip().splitlines()
        return {"error": errors[-1] if errors else f"the work ended with status {process.returncode}"}
    return line


def real() -> Machine:
    """Return this machine. Raises Unavailable if the NVML bindings are not installed."""
    try:
        import pynvml
    except ImportError as error:
        raise Unavailable(f'{error}. Install them: pip install "flopwatch[exporter]"') from error
    return Machine(pynvml)
