"""Reader process: creates one collector, and reads it on request.

`python -m flopwatch.node.scrape.child FACTORY ARGUMENTS_AS_JSON` answers each byte on stdin with a line of JSON on
stdout. It ends when stdin is closed, as by its parent's death, also if it is stopped then. A later one of a
source is a new process, so this module imports little. The first one is a copy of the exporter's process.
"""

import ctypes
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from operator import attrgetter
from typing import IO

from flopwatch.catalogue import Metric, Sample
from flopwatch.node.collectors import AccessLost, Collector, RestartReader, Unsupported

EXIT_GRACE = 1.0  # seconds that a read may take after stdin was closed
_SET_PDEATHSIG, _SET_NAME = 1, 15  # PR_SET_PDEATHSIG and PR_SET_NAME in linux/prctl.h

log = logging.getLogger(__name__)


def _end_with_stdin() -> None:
    """End this process after stdin is closed, even if the main thread hangs. Requests do not wake this thread."""
    closed = select.poll()
    closed.register(0, 0)  # no events but POLLHUP and POLLERR, which are always reported
    closed.poll()
    time.sleep(EXIT_GRACE)
    os._exit(0)


def _serve(factory: str, arguments: Mapping[str, str], pipe: IO[bytes]) -> None:
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    statm, page = os.open("/proc/self/statm", os.O_RDONLY), os.sysconf("SC_PAGE_SIZE")
    sent: list[tuple[Metric, tuple[str, ...]]] | None = None  # rows and labels of the last answer
    collector: Collector | None = None
    last_reason = ""
    while os.read(0, 1):
        started = time.monotonic()
        samples: list[Sample] = []
        kind, reason, line, last = "", "", "", False
        try:
            if collector is None:
                module, _, function = factory.partition(":")
                collector = attrgetter(function)(import_module(module))(**arguments)
            samples = collector.read()
        except Unsupported as error:
            kind, reason = "unsupported", str(error)
        except AccessLost as error:
            kind, reason, samples = "blind", f"{type(error).__name__}: {error}", error.samples
        except Exception as error:
            # The boundary of the process: the text goes to Scrape in the parent, the traceback into the log.
            kind, reason = "error", f"{type(error).__name__}: {error}"
            last = isinstance(error, RestartReader)
            if reason != last_reason:
                log.exception("read failed")
        ended = time.monotonic()
        resident = int(os.pread(statm, 100, 0).split()[1]) * page  # bytes: proc(5)
        header = {"duration": ended - started, "ended": ended, "at": time.time(), "resident": resident}
        failed = {"kind": kind, "reason": reason, "last": last} if kind else {}
        if samples or not kind:
            try:
                keys = [(row, labels) for row, labels, _ in samples]
                news = {} if keys == sent else {"keys": [(row.name, labels) for row, labels in keys]}
                line = json.dumps({**header, **failed, "values": [number for _, _, number in samples], **news})
                sent = keys
            except (TypeError, ValueError) as error:
                reason = f"no samples: {type(error).__name__}: {error}"
                failed = {"kind": "error", "reason": reason, "last": last}
        last_reason = reason
        if not line:
            line = json.dumps(header | failed)
        pipe.write(f"{line}\n".encode())
        pipe.flush()
        if last:
            break
    close = getattr(collector, "close", None)
    if close is not None:
        close()


def answer_requests(factory: str, arguments: Mapping[str, str]) -> None:
    """Answer requests on stdin until it is closed."""
    for number in (signal.SIGINT, signal.SIGUSR1):  # Ctrl-C and --release are the parent's to handle
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    # A stopped process cannot see that stdin was closed. Its parent's death continues it.
    with suppress(OSError, AttributeError):
        prctl = ctypes.CDLL(None).prctl
        prctl(_SET_PDEATHSIG, signal.SIGCONT)
        prctl(_SET_NAME, factory.removesuffix(":build").replace(":", ".").rpartition(".")[2].encode())  # as in `ps -e`
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # A driver library may print on stdout, which must not mix with the answers.
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _serve(factory, arguments, pipe)


if __name__ == "__main__":
    answer_requests(sys.argv[1], json.loads(sys.argv[2]))
