"""A child process, with a deadline, around anything that calls a driver.

A driver call can hang for ever (https://github.com/NVIDIA/gpu-monitoring-tools/issues/46), and a read of sysfs is a
firmware command. So each source is read in a child that answers one request at a time: a hung call costs that source,
and when the hang ends, the child answers again by itself. Killing a reader in the middle of a call has been seen to
make a sick driver worse (https://github.com/NVIDIA/dcgm-exporter/issues/84), so that comes late, and SIGKILL last.

Child: `python -m flopwatch.node.reader FACTORY ARGUMENTS`. A request is a line on its stdin, the answer one line of
JSON on its stdout; it ends when its stdin does, which is also when the parent dies.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flopwatch.catalogue import BY_NAME, Sample
from flopwatch.node.collectors import Collector, StartAfresh, Unsupported
from flopwatch.settings import ExporterSettings

log = logging.getLogger(__name__)

# Longest pause, in seconds, before a child that died is replaced.
LONGEST_BACKOFF = 60.0
# Seconds a child gets to end its read after its stdin was closed.
PARTING = 1.0


@dataclass(frozen=True, slots=True)
class Reading:
    """What one request brought.

    `reason` is why it is not ok: deadline, exited, or the error's text; where the source is not supported, why not.
    `duration` is the read's, in seconds; `at` the Unix time it ended.
    """

    samples: list[Sample] = field(default_factory=list)
    ok: bool = True
    reason: str = ""
    supported: bool = True
    duration: float = 0.0
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Spec:
    """How the child makes its collector: `package.module:function` and the keyword arguments of that function."""

    factory: str
    arguments: Mapping[str, str]


class Reader:
    """One source, read in a child process.

    A child hung for `kill_after` seconds is sent SIGTERM, `grace` seconds later SIGKILL, and if not even that ends it
    (a call in uninterruptible sleep), it is abandoned and replaced, as long as it is the only abandoned one. A child
    that died is replaced after `backoff` seconds, twice as many with each death in a row.
    """

    def __init__(
        self, name: str, spec: Spec, kill_after: float = 60.0, grace: float = 5.0, backoff: float = 1.0
    ) -> None:
        self.name = name
        self._spec = spec
        self._kill_after = kill_after
        self._grace = grace
        self._backoff = backoff
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._abandoned: _Child | None = None
        self._deaths = 0
        self._start_at = 0.0

    def ask(self, deadline: float) -> Reading:
        """Return a reading within `deadline` seconds. Never raises for what the child does; safe in any thread."""
        started = time.monotonic()
        if not self._lock.acquire(timeout=deadline):
            return Reading(ok=False, reason="deadline", duration=time.monotonic() - started)
        try:
            return self._ask(started, started + deadline)
        except _Exited:
            self._bury()
            return Reading(ok=False, reason="exited", duration=time.monotonic() - started)
        finally:
            self._lock.release()

    def _ask(self, started: float, until: float) -> Reading:
        if self._child is None:
            if started < self._start_at:
                return Reading(ok=False, reason="exited")
            self._child = _Child(self._spec)
        child = self._child
        # The answer to a request that missed its deadline. It may be old by now, so ask again while there is time.
        late = child.answer(until) if child.asked_at is not None else None
        fresh = child.answer(until) if child.request() else None
        answer = fresh if fresh is not None else late
        if answer is None:
            self._end(child)
            return Reading(ok=False, reason="deadline", duration=time.monotonic() - started)
        self._deaths = 0
        return _reading(answer)

    def _end(self, child: _Child) -> None:
        """Get rid of a child that has been hanging for too long."""
        assert child.asked_at is not None
        hanging = time.monotonic() - child.asked_at - self._kill_after
        if hanging >= self._grace:
            child.process.kill()
        elif hanging >= 0:
            child.process.terminate()
        if hanging >= 2 * self._grace and (self._abandoned is None or self._abandoned.process.poll() is not None):
            if self._abandoned is not None:
                self._abandoned.close()
            self._abandoned, self._child = child, None

    def _bury(self) -> None:
        """Release a child that ended, and decide when the next one starts."""
        if self._child is not None:
            self._child.close()
            self._child = None
        self._start_at = time.monotonic() + min(self._backoff * 2**self._deaths, LONGEST_BACKOFF)
        self._deaths += 1

    def close(self) -> None:
        """End the children; one that no signal ends is left to the kernel."""
        with self._lock:
            for child in (self._child, self._abandoned):
                if child is not None:
                    child.close()
            self._child = self._abandoned = None


class _Exited(Exception):
    """The child has ended."""


class _Child:
    """The parent's side of one child process, with at most one request outstanding."""

    def __init__(self, spec: Spec) -> None:
        # The child finds this package, and a test's collectors, where this process found them.
        search = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flopwatch.node.reader", spec.factory, json.dumps(dict(spec.arguments))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
            env=dict(os.environ, PYTHONPATH=search, PYTHONSAFEPATH="1"),
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._requests, self._answers = self.process.stdin, self.process.stdout
        self.asked_at: float | None = None
        self._buffer = b""

    def request(self) -> bool:
        """Ask for a read, and return True; False if the last request is still outstanding."""
        if self.asked_at is not None:
            return False
        try:
            self._requests.write(b"\n")
        except OSError as error:
            raise _Exited from error
        self.asked_at = time.monotonic()
        return True

    def answer(self, until: float) -> dict[str, Any] | None:
        """Return the answer to the outstanding request, None if it has not come by `until`. Raises _Exited."""
        answers = self._answers.fileno()
        ready = select.poll()
        ready.register(answers, select.POLLIN)
        while b"\n" not in self._buffer:
            if not ready.poll(max(0.0, until - time.monotonic()) * 1000):
                return None
            data = os.read(answers, 1 << 16)
            if not data:
                raise _Exited
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        self.asked_at = None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process, first by closing its stdin, then with SIGTERM, then with SIGKILL."""
        self._requests.close()
        for end in (self.process.poll, self.process.terminate, self.process.kill):
            end()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(PARTING)
                break
        self._answers.close()


def _reading(answer: Mapping[str, Any]) -> Reading:
    """Return what a child's answer says."""
    samples = [(BY_NAME[name], tuple(labels), number) for name, labels, number in answer["samples"]]
    return Reading(
        samples, answer["reason"] == "", answer["reason"], answer["supported"], answer["duration"], answer["at"]
    )


def gpu_inventory(settings: ExporterSettings) -> Path:
    """Return the file in which the NVML source keeps this node's GPUs."""
    return _state(settings) / "gpus.json"


def simulated_node(settings: ExporterSettings) -> Path:
    """Return the folder of the simulated node that --simulate asks for."""
    return settings.state.absolute() / "simulated"


def _state(settings: ExporterSettings) -> Path:
    # Simulated parts must not be missed when the same folder serves real hardware later.
    return settings.state.absolute() if settings.simulate is None else simulated_node(settings)


def hardware(settings: ExporterSettings) -> list[Reader]:
    """Return the readers of this node's hardware, or of the simulated node's."""
    state, gpus = str(_state(settings)), str(gpu_inventory(settings))
    sysfs, kmsg, simulated = settings.sysfs, settings.kmsg, ""
    if settings.simulate is not None:
        simulated = str(simulated_node(settings))
        sysfs, kmsg = simulated_node(settings) / "sys", simulated_node(settings) / "kmsg"
    collectors = "flopwatch.node.collectors"
    return [
        Reader("nvml", Spec(f"{collectors}.nvml:build", {
            "host": settings.host, "inventory": gpus, "simulated": simulated})),
        Reader("infiniband", Spec(f"{collectors}.infiniband:build", {
            "host": settings.host, "inventory": f"{state}/ports.json", "sysfs": str(sysfs.absolute())})),
        Reader("xid", Spec(f"{collectors}.xid:build", {
            "gpus": gpus, "state": f"{state}/xid.json", "kmsg": str(kmsg.absolute())})),
    ]


# The child's side.


def _listen(requests: queue.SimpleQueue[bool]) -> None:
    """Pass requests on; when stdin ends, end this process, whatever the main thread hangs in."""
    while data := os.read(0, 4096):
        for _ in data:
            requests.put(True)
    requests.put(False)
    time.sleep(PARTING)
    os._exit(0)


def _build(factory: str, arguments: Mapping[str, str]) -> Collector:
    module, _, function = factory.partition(":")
    collector: Collector = getattr(importlib.import_module(module), function)(**arguments)
    return collector


def main() -> None:
    """Answer requests until stdin ends."""
    factory, arguments = sys.argv[1], json.loads(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # What a driver library prints on stdout must not end up among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    collector: Collector | None = None
    last_reason = ""
    while requests.get():
        started = time.monotonic()
        samples: list[Sample] = []
        reason, supported, afresh = "", True, False
        try:
            if collector is None:
                collector = _build(factory, arguments)
            samples = collector.read()
        except Unsupported as error:
            reason, supported = str(error), False
        except Exception as error:
            # The edge of the process: Scrape, on the other side, gets the text and this log the traceback.
            reason = f"{type(error).__name__}: {error}"
            afresh = isinstance(error, StartAfresh)
            if reason != last_reason:
                log.exception("read failed")
        last_reason = reason
        answer = {
            "samples": [(row.name, labels, number) for row, labels, number in samples],
            "reason": reason, "supported": supported, "duration": time.monotonic() - started, "at": time.time(),
        }
        print(json.dumps(answer), file=answers, flush=True)
        if afresh:
            return


if __name__ == "__main__":
    main()
