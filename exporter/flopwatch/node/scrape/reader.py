"""Reader processes with a deadline around blocking driver calls.

A driver call can hang for ever (https://github.com/NVIDIA/gpu-monitoring-tools/issues/46), so each source is read in a
child process (`flopwatch.node.scrape.child`). A child is signalled late, because killing it within a call can make a
failing driver worse (https://github.com/NVIDIA/dcgm-exporter/issues/84).
"""

import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partialmethod
from pathlib import Path
from typing import Any, NamedTuple

from flopwatch.catalogue import BY_NAME, Metric, Sample
from flopwatch.node.scrape.child import EXIT_GRACE, answer_requests
from flopwatch.settings import ExporterSettings, dcgm_fields

log = logging.getLogger(__name__)

MAX_BACKOFF = 60.0  # seconds before a child that died is replaced
# A child with more resident bytes is replaced, at most once in RECYCLE_AFTER seconds: a driver may need that much.
RESIDENT_LIMIT = 192 << 20
RECYCLE_AFTER = 600.0

RESTARTS = ("exited", "hung", "memory", "afresh")  # why a child was replaced


@dataclass(frozen=True, slots=True)
class Reading:
    """Result of one read of a source. `duration` and `age` are in seconds, `at` is the Unix time of the read's end.

    A failed reading (`ok` is False) has a `kind`: deadline, exited, error, released, or blind (access was lost).
    `reason` is the kind, an error, or why the source is unsupported. `restarts` has the reason for each new child.
    """

    samples: list[Sample] = field(default_factory=list)
    ok: bool = True
    reason: str = ""
    supported: bool = True
    duration: float = 0.0
    at: float = 0.0
    age: float = 0.0
    kind: str = ""
    restarts: tuple[str, ...] = ()


def failure(kind: str, reason: str = "", duration: float = 0.0) -> Reading:
    """Return a failed reading, with `kind` as its reason unless one is given."""
    return Reading(ok=False, kind=kind, reason=reason or kind, duration=duration)


@dataclass(frozen=True, slots=True)
class Spec:
    """Factory of a collector, `package.module:function`, and its keyword arguments."""

    factory: str
    arguments: Mapping[str, str]


class Reader:
    """Reader of one source in a child process, which is replaced after it died, hung or grew too large.

    A source with `driver` opens driver handles. Samples of a `secondary` source are used only for rows of a GPU or port
    that no source before it has. A child that hangs for `kill_after` seconds is sent SIGTERM, and SIGKILL `grace`
    seconds later. One child that survives both is abandoned and replaced. A dead child is replaced after `backoff`
    seconds, doubled with each death in a row. Answers older than `stale_after` seconds are ignored.
    """

    def __init__(
        self,
        name: str,
        spec: Spec,
        kill_after: float = 60.0,
        grace: float = 5.0,
        backoff: float = 1.0,
        *,
        driver: bool = False,
        secondary: bool = False,
        stale_after: float = 30.0,
        resident_limit: int = RESIDENT_LIMIT,
    ) -> None:
        self.name, self.spec = name, spec
        self.driver, self.secondary = driver, secondary
        self._kill_after, self._grace, self._backoff = kill_after, grace, backoff
        self._stale_after, self._resident_limit = stale_after, resident_limit
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._leaving: list[_Child] = []  # asked to end, still running
        self._deaths, self._start_at, self._recycle_at = 0, 0.0, 0.0
        self._released = False
        self._restarts: list[str] = []

    def fork(self) -> None:
        """Start the child as a copy of this process, which must have no other thread, to share its memory."""
        with suppress(OSError):  # else the first read starts it
            self._child = _Child(self.spec, _Fork)

    def ask(self, deadline: float) -> Reading:
        """Return a reading within `deadline` seconds, whatever the child does. Thread-safe."""
        started = time.monotonic()
        if not self._lock.acquire(timeout=deadline):
            return failure("deadline", duration=time.monotonic() - started)
        try:
            reading = self._ask(started, started + deadline)
        except _Exited as error:
            self._bury()
            reading = failure("exited", str(error), time.monotonic() - started)
        finally:
            restarts, self._restarts = tuple(self._restarts), []
            self._lock.release()
        return replace(reading, restarts=restarts) if restarts else reading

    def _ask(self, started: float, until: float) -> Reading:
        if self._released:
            return failure("released")
        self._reap()
        if self._child is None:
            if started < self._start_at or len(self._leaving) > 1:
                return failure("exited")
            try:
                self._child = _Child(self.spec)
            except OSError as error:  # out of memory or processes, or the interpreter is being replaced
                raise _Exited(f"no process can be started: {error}") from error
        child = self._child
        # The answer to an earlier request, which missed its deadline. It may be old, so ask again while there is time.
        late = child.answer(until) if child.asked_at is not None else None
        fresh = child.answer(until) if child.request() else None
        answer = fresh if fresh is not None else late
        if answer is None or answer.reading.age > self._stale_after:
            if child.asked_at is not None:
                self._end(child)
            return failure("deadline", duration=time.monotonic() - started)
        self._deaths = 0
        if answer.last:
            self._dismiss(child, "afresh")
            self._start_at = time.monotonic() + self._backoff
        elif answer.resident > self._resident_limit and started >= self._recycle_at and child.asked_at is None:
            log.info("reader replaced source=%s reason=memory mib=%d", self.name, answer.resident >> 20)
            self._dismiss(child, "memory")
            self._recycle_at = started + RECYCLE_AFTER
        return answer.reading

    def _end(self, child: "_Child") -> None:
        """Send SIGTERM or SIGKILL to a child that hangs for too long, or abandon it."""
        assert child.asked_at is not None
        hanging = time.monotonic() - child.asked_at - self._kill_after
        if hanging >= self._grace:
            child.process.kill()
        elif hanging >= 0:
            child.process.terminate()
        if hanging >= 0:
            child.fate = "hung"
        if hanging >= 2 * self._grace and not self._leaving:
            self._leaving.append(child)
            self._child = None
            self._restarts.append("hung")

    def _dismiss(self, child: "_Child", why: str) -> None:
        child.dismiss()
        self._leaving.append(child)
        self._child = None
        self._restarts.append(why)

    def _reap(self) -> None:
        """Close children that have ended, and signal dismissed children that are overdue."""
        for child in self._leaving:
            if child.dismissed_at is not None:
                overdue = time.monotonic() - child.dismissed_at - EXIT_GRACE
                if overdue >= self._grace:
                    child.process.kill()
                elif overdue >= 0:
                    child.process.terminate()
        for child in [child for child in self._leaving if child.process.poll() is not None]:
            child.close()
            self._leaving.remove(child)

    def _bury(self) -> None:
        """Close the child that died, and set the earliest start of the next one."""
        if self._child is not None:
            self._restarts.append(self._child.fate)
            self._child.close()
            self._child = None
        self._start_at = time.monotonic() + min(self._backoff * 2**self._deaths, MAX_BACKOFF)
        self._deaths += 1

    def release(self) -> bool:
        """End all child processes, and start none until `resume`. Return whether all have ended."""
        with self._lock:
            self._released = True
            if self._child is not None:
                self._leaving.append(self._child)
                self._child = None
            self._leaving = [child for child in self._leaving if not child.close()]
            return not self._leaving

    def resume(self) -> None:
        """Allow reads again after `release`."""
        with self._lock:
            self._released = False
            self._start_at = 0.0

    def close(self) -> None:
        """End all child processes, except one that survives SIGKILL."""
        self.release()


class _Exited(Exception):
    """Raised if the child process has ended, or its answer cannot be decoded."""


class _Answer(NamedTuple):
    """Answer of a child process: the reading, its resident bytes, and whether it ends after this answer."""

    reading: Reading
    resident: int
    last: bool


def _executed(spec: Spec) -> subprocess.Popen[bytes]:
    # The child imports from where this process did, which includes the collectors of tests.
    search = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-m", "flopwatch.node.scrape.child", spec.factory, json.dumps(dict(spec.arguments))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env=dict(os.environ, PYTHONPATH=search, PYTHONSAFEPATH="1", MALLOC_ARENA_MAX="1"),  # see one_heap()
    )


class _Fork:
    """Reader process that begins as a copy of this process, with the methods of a Popen that a reader uses."""

    def __init__(self, spec: Spec) -> None:
        (requests, stdin), (stdout, answers) = os.pipe(), os.pipe()
        self._pid, self._ended = os.fork(), False
        if self._pid == 0:
            try:
                os.dup2(requests, 0)
                os.dup2(answers, 1)
                for file in os.listdir("/proc/self/fd"):  # listeners, and the lock of the state
                    if int(file) > 2:
                        with suppress(OSError):
                            os.close(int(file))
                answer_requests(spec.factory, spec.arguments)
            except Exception:
                log.exception("reader failed factory=%s", spec.factory)
            finally:
                os._exit(0)
        os.close(requests)
        os.close(answers)
        self.stdin, self.stdout = os.fdopen(stdin, "wb", 0), os.fdopen(stdout, "rb", 0)

    def poll(self) -> int | None:
        try:
            self._ended = self._ended or os.waitpid(self._pid, os.WNOHANG)[0] != 0
        except ChildProcessError:  # SIGCHLD is ignored, so the kernel has reaped it
            self._ended = True
        return 0 if self._ended else None

    def wait(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() >= until:
                raise subprocess.TimeoutExpired("reader", timeout)
            time.sleep(0.005)

    def _send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self._pid, number)

    terminate, kill = partialmethod(_send, signal.SIGTERM), partialmethod(_send, signal.SIGKILL)


class _Child:
    """The reader's side of one child process, with at most one unanswered request."""

    def __init__(self, spec: Spec, start: Callable[[Spec], subprocess.Popen[bytes] | _Fork] = _executed) -> None:
        self.process = start(spec)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._requests, self._answers = self.process.stdin, self.process.stdout
        self.asked_at: float | None = None
        self.dismissed_at: float | None = None
        self.fate = "exited"
        # Reused: an allocation of this size at every read would fragment the heap, which would grow.
        self._buffer = bytearray(1 << 16)
        self._filled = 0
        self._keys: list[tuple[Metric, tuple[str, ...]]] = []

    def request(self) -> bool:
        """Request a read. Return False, without a new request, while the last one is unanswered."""
        if self.asked_at is not None:
            return False
        try:
            self._requests.write(b"\n")
        except OSError as error:
            raise _Exited from error
        self.asked_at = time.monotonic()
        return True

    def answer(self, until: float) -> _Answer | None:
        """Return the answer to the request, or None if none arrives by `until` (monotonic time). Raises _Exited."""
        answers = self._answers.fileno()
        ready = select.poll()
        ready.register(answers, select.POLLIN)
        while self._buffer[self._filled - 1 : self._filled] != b"\n":
            if not ready.poll(max(0.0, until - time.monotonic()) * 1000):
                return None
            if self._filled == len(self._buffer):
                self._buffer += bytes(len(self._buffer))
            with memoryview(self._buffer) as view:
                read = os.readv(answers, [view[self._filled :]])
            if not read:
                raise _Exited
            self._filled += read
        line, self._filled = self._buffer[: self._filled], 0
        self.asked_at = None
        try:
            return self._decoded(json.loads(line))
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            # For example the child of another release that was installed under this process.
            raise _Exited(f"the answer cannot be decoded: {type(error).__name__}: {error}") from error

    def _decoded(self, answer: Mapping[str, Any]) -> _Answer:
        """Decode an answer. Its rows and labels are those of the answer before, unless it contains new ones."""
        if "keys" in answer:
            self._keys = [(BY_NAME[name], tuple(labels)) for name, labels in answer["keys"]]
        samples: list[Sample] = []
        if "values" in answer:
            keyed = zip(self._keys, answer["values"], strict=True)
            samples = [(row, labels, number) for (row, labels), number in keyed]
        kind = answer.get("kind", "")
        supported = kind != "unsupported"
        reason, took, at = answer.get("reason", ""), answer["duration"], answer["at"]
        age = max(0.0, time.monotonic() - answer["ended"])
        reading = Reading(samples, not kind, reason, supported, took, at, age, kind if supported else "")
        return _Answer(reading, answer["resident"], answer.get("last", False))

    def dismiss(self) -> None:
        self.dismissed_at = time.monotonic()
        self._requests.close()

    def close(self) -> bool:
        """End the process by closing stdin, then SIGTERM, then SIGKILL, and return whether it has ended."""
        self._requests.close()
        for end in (self.process.poll, self.process.terminate, self.process.kill):
            end()
            with suppress(subprocess.TimeoutExpired):
                # Half a second more than the child takes at most, so that it can end without a signal.
                self.process.wait(EXIT_GRACE + 0.5)
                break
        else:
            return False
        self._answers.close()
        return True


def gpu_inventory(settings: ExporterSettings) -> Path:
    """Return the file in which the NVML source keeps the GPUs that this host has or had."""
    return _state(settings) / "gpus.json"


def gpu_runtime(settings: ExporterSettings) -> Path:
    """Return the file in which the NVML source keeps each GPU's MIG slices, processes and links."""
    return _state(settings) / "gpu_runtime.json"


def simulated_node(settings: ExporterSettings) -> Path:
    """Return the folder with the files of the host that --simulate simulates."""
    return settings.state.absolute() / "simulated"


def _state(settings: ExporterSettings) -> Path:
    # A separate folder: simulated GPUs must not be reported missing when the state later serves real hardware.
    return settings.state.absolute() if settings.simulate is None else simulated_node(settings)


@dataclass(frozen=True, slots=True)
class HostSources:
    """Sources that the readers of a host read: files, and the factories of the collectors `nvml` and `xid`.

    `state` has inventories and counts. `kmsg` is a file, or `unix:` with a socket path. `kubelet` may be empty. `tick`
    advances a simulated host to a Unix time, and is called once a second.
    """

    state: Path
    sysfs: Path
    kmsg: str
    kubelet: str
    proc: Path = Path("/proc")
    nvml: Spec = Spec("flopwatch.node.collectors.nvml:build", {})
    xid: Spec = Spec("flopwatch.node.collectors.xid:build", {})
    tick: Callable[[float], None] | None = None


SourcesFactory = Callable[[ExporterSettings], HostSources]


def host_sources(settings: ExporterSettings) -> HostSources:
    """Return the sources of the real hardware of this host."""
    kmsg = str(settings.kmsg)
    kmsg = kmsg if kmsg.startswith("unix:") else str(Path(kmsg).absolute())
    return HostSources(_state(settings), settings.sysfs.absolute(), kmsg, str(settings.kubelet_socket))


def amd_smi(sysfs: Path) -> str | None:
    """Return the path of amd-smi on a host with AMD GPUs, "" if it is missing there, None elsewhere."""
    try:  # a CPU has the number 0
        numbers = [int(file.read_text()) for file in sysfs.glob("class/kfd/kfd/topology/nodes/*/gpu_id")]
    except (OSError, ValueError):
        return None
    return (shutil.which("amd-smi") or shutil.which("amd-smi", path="/opt/rocm/bin") or "") if any(numbers) else None


def hardware(settings: ExporterSettings, sources: HostSources) -> list[Reader]:
    """Return one reader per source of hardware. The first, `nvml`, finds the GPUs that the others refer to."""
    state, sysfs = str(sources.state), str(sources.sysfs)
    gpus, runtime, ports = f"{state}/gpus.json", f"{state}/gpu_runtime.json", f"{state}/port_history.json"
    host, jobs = settings.host, str(settings.job_mapping or "")
    names: dict[str, Any] = {"complete": "1"} if "node" in settings.expose.split(",") else {}
    owners: dict[str, Any] = {"kubelet": sources.kubelet, "job_mapping": jobs, "topology": settings.topology}

    def reader(
        name: str, spec: Spec | None = None, driver: bool = False, secondary: bool = False, **more: str
    ) -> Reader:
        spec = Spec(f"flopwatch.node.collectors.{name}:build", {}) if spec is None else spec
        spec = replace(spec, arguments={**more, **spec.arguments})
        return Reader(name, spec, driver=driver, secondary=secondary, stale_after=settings.stale_after)

    readers = [
        reader("nvml", sources.nvml, True, host=host, inventory=gpus, runtime=runtime, sysfs=sysfs),
        reader("infiniband", host=host, inventory=f"{state}/ports.json", sysfs=sysfs, gpus=gpus, state=ports, **names),
        reader("xid", sources.xid, True, kmsg=sources.kmsg, gpus=gpus, state=f"{state}/xid.json", nvml="events"),
        reader("identity", host=host, gpus=gpus, runtime=runtime, proc=str(sources.proc), **owners),
    ]
    if settings.dcgm:
        ids = ",".join(map(str, sorted(dcgm_fields(settings.dcgm_fields))))
        dcgm = reader("dcgm", driver=True, secondary=True, address=settings.dcgm, gpus=gpus, profiling=ids)
        readers.insert(1, dcgm)
    if program := amd_smi(sources.sysfs):
        readers.append(reader("amd", driver=True, program=program, host=host, inventory=f"{state}/amd_gpus.json"))
    return readers
