"""Reader of the files of NCCL Inspector: only their new bytes, and at most MAX_READ of them in each look.

JSON lines are appended to `HOST-pidPID.log` and a textfile `nccl_inspector_metrics_UUID.prom` is rewritten, in the
folder or in a folder of a job below it. The UUID has no prefix `GPU-`. Links are not followed.
"""

import os
import re
import stat
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from flopwatch.node.telemetry.inspector_formats import MAX_LINE, TimedBatch, of_line, of_textfile

MAX_READ = 8 << 20  # bytes of all files in one look
TAIL = MAX_LINE
MAX_ENTRIES = 4096  # of all folders in one look
SETTLED = 1.0  # seconds since a textfile was written, after which it is complete
_LOG = re.compile(r"(.*)-pid(\d{1,9})\.log")
_TEXTFILE = re.compile(r"nccl_inspector_metrics_(?:GPU-)?(.+)\.prom")


@dataclass
class _File:
    inode: tuple[int, int] = (0, 0)
    offset: int = -1  # -1: never read
    written: int = 0  # time of a textfile's last change in nanoseconds
    skipped: bool = False


class Files:
    """Files of the live processes of this host in one folder."""

    def __init__(self, folder: Path, host: str, count: Callable[[str, int], None]) -> None:
        self._folder, self._host, self._count = folder, host.partition(".")[0], count
        self._files: dict[str, _File] = {}
        self.problem = ""

    def read(self, processes: Collection[str]) -> list[TimedBatch]:
        """Return what was written since the last call about processes as `TimedBatch` names them."""
        paths = self._find(processes)
        self._files = {path: self._files.get(path, _File()) for path in paths}
        most, batches = max(TAIL, MAX_READ // max(1, len(paths))), []
        for path, process in paths.items():
            try:
                batch = self._read(path, self._files[path], most, process)
            except OSError as error:
                self.problem = f"{path}: {error.strerror}"
                continue
            if batch is not None:
                batches.append(batch)
        return batches

    def _find(self, processes: Collection[str]) -> dict[str, str]:
        """Return the process of each file's path. Of two files for one pid, that of this host counts."""
        found: dict[str, list[tuple[str, str]]] = {}
        folders, entries, self.problem = [os.fspath(self._folder)], 0, ""
        for folder in folders:  # those found in the first are appended
            try:
                with os.scandir(folder) as scanned:
                    for entry in scanned:
                        entries += 1
                        if entries > MAX_ENTRIES:
                            self.problem = f"more than {MAX_ENTRIES} files in {self._folder}"
                            break
                        if match := _LOG.fullmatch(entry.name):
                            process, host = f"pid:{int(match[2])}", match[1].partition(".")[0]
                        elif match := _TEXTFILE.fullmatch(entry.name):
                            process, host = match[1], self._host
                        else:
                            if folder is folders[0] and entry.is_dir(follow_symlinks=False):
                                folders.append(entry.path)
                            continue
                        if process in processes:
                            found.setdefault(process, []).append((host, entry.path))
            except OSError as error:
                self.problem = f"{folder}: {error.strerror}"
        chosen: dict[str, str] = {}
        for process, files in found.items():
            own = [path for host, path in files if len(files) == 1 or host == self._host]
            if len(own) == 1 or not process.startswith("pid:"):
                chosen |= dict.fromkeys(own, process)
        return chosen

    def _read(self, path: str, file: _File, most: int, process: str) -> TimedBatch | None:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                self.problem = f"{path}: not a regular file"
                return None
            if path.endswith(".prom"):
                return self._textfile(descriptor, about, file, most, process)
            return self._log(descriptor, about, file, most, process)
        finally:
            os.close(descriptor)

    def _log(self, handle: int, about: os.stat_result, file: _File, most: int, process: str) -> TimedBatch | None:
        inode = about.st_dev, about.st_ino
        if file.inode != inode or about.st_size < file.offset:
            file.inode, file.offset, file.skipped = inode, -1, False
        new = about.st_size - max(0, file.offset)
        if new <= 0:
            return None
        batch = TimedBatch(process)
        if file.offset < 0 or (new > most and not file.skipped):
            # What was written before cannot be compared with the steps. In a flood, each second look reads on.
            batch.begins, file.skipped = True, file.offset >= 0
            start = max(0, about.st_size - TAIL)
            if file.offset >= 0:
                self._count("skipped", start - file.offset)
        else:
            file.skipped, start = False, file.offset
        data = os.pread(handle, min(most, about.st_size - start), start)
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) >= MAX_LINE:
            end = len(data)
        file.offset, operations = start + end, []
        for line in data[:end].splitlines():
            try:
                if (one := of_line(line)) is not None:
                    operations.append(one)
            except ValueError:
                if line.strip() and not (batch.begins and start):
                    self._count("malformed", 1)
        if operations and new > most and not batch.begins:  # the last lines were perhaps written with unread ones
            last = operations[-1].at
            operations = [one for one in operations if one.at != last]
            batch.begins, batch.at = not operations, 0.0 if operations else last
        self._count("limit", sum(not batch.add(one) for one in operations))
        return batch if batch.at > 0 else None

    def _textfile(self, handle: int, about: os.stat_result, file: _File, most: int, process: str) -> TimedBatch | None:
        if about.st_mtime_ns == file.written or time.time() - about.st_mtime < SETTLED:
            return None
        batch = TimedBatch(process, begins=file.written == 0)
        file.written = about.st_mtime_ns
        data = os.pread(handle, most, 0)
        if len(data) < about.st_size:
            self._count("skipped", about.st_size - len(data))
            batch.begins = True
        for line in data.decode(errors="replace").splitlines():
            if line and not line.startswith("#"):
                try:
                    if (operation := of_textfile(line, about.st_mtime)) is not None:
                        self._count("limit", not batch.add(operation))
                except ValueError:
                    self._count("malformed", 1)
        batch.at = about.st_mtime
        return batch
