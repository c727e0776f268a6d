"""Files of NCCL Inspector: only new bytes are read, and no file can make the exporter wait or take too much of it."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from uuid import UUID

import pytest

from flopwatch.node.telemetry import inspector_files
from flopwatch.node.telemetry.inspector_files import TAIL, Files
from flopwatch.node.telemetry.inspector_formats import TimedBatch
from flopwatch.verdicts.waits import Communicator
from tests.support.nccl_inspector import CAPTURES, Operation, json_lines, means, uuid

GROUP = Communicator("tp", (0, 1))
PID = "pid:41000"


class Folder:
    def __init__(self, path: Path) -> None:
        self.path, self.counts = path, Counter[str]()
        self.files = Files(path, "h0", lambda outcome, by: self.counts.update({outcome: by}))
        self.log = path / "h0-pid41000.log"

    def write(self, *seconds: float, at: float = 100.0) -> None:
        with self.log.open("a") as log:
            log.writelines(f"{line}\n" for one in seconds for line in json_lines(Operation(0, GROUP, 1, one), at))

    def read(self, *processes: str) -> list[TimedBatch]:
        return self.files.read(processes or (PID,))

    def seconds(self) -> float:
        """Return the seconds of all operations that were read as new."""
        return sum(total[0] for batch in self.read() if not batch.begins for total in batch.sums.values())


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_what_was_written_before_the_first_look_only_begins(folder: Folder) -> None:
    folder.write(*[1.0] * 1000)
    (batch,) = folder.read()
    assert batch.begins
    assert batch.at == 100.0
    folder.write(2.0, 3.0, at=105.0)
    (batch,) = folder.read()
    assert (batch.begins, batch.at, [*batch.sums.values()]) == (False, 105.0, [[5.0, 2]])
    assert folder.read() == []


def test_a_line_that_is_not_yet_complete_is_read_later(folder: Folder) -> None:
    folder.write(1.0)
    folder.read()
    folder.write(2.0)
    whole = folder.log.read_bytes()
    folder.log.write_bytes(whole[:-40])
    assert folder.read() == []
    folder.log.write_bytes(whole)
    assert folder.seconds() == 2.0
    assert not folder.counts["malformed"]


def test_the_counts_of_a_dump_are_no_operation_and_not_malformed(folder: Folder) -> None:
    folder.write(1.0)
    folder.read()
    counts = json.loads(folder.log.read_text())
    del counts["coll_perf"]
    counts["dump_stats"] = {"coll_records": 1, "coll_dropped_total": 0, "p2p_records": 0}
    with folder.log.open("a") as log:
        log.write(json.dumps(counts) + "\n")
    folder.write(2.0)
    assert folder.seconds() == 2.0
    assert not folder.counts["malformed"]


@pytest.mark.parametrize("rotated", [True, False])
def test_a_rotated_or_truncated_file_begins_again(folder: Folder, rotated: bool) -> None:
    folder.write(*[1.0] * 10)
    folder.read()
    if rotated:
        folder.log.rename(folder.path / "old")
    else:
        folder.log.write_bytes(b"")
    folder.write(2.0)
    assert [batch.begins for batch in folder.read()] == [True]
    folder.write(3.0)
    assert folder.seconds() == 3.0


def test_a_flood_is_bounded_and_counted_and_each_second_look_reads_on(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspector_files, "MAX_READ", 2 * TAIL)
    folder.write(1.0)
    folder.read()
    seen = []
    for look in range(6):
        for part in range(40):
            folder.write(*[0.001] * 100, at=200.0 + look + part / 40)
        seen += [(batch.begins, sum(total[1] for total in batch.sums.values())) for batch in folder.read()]
    assert [begins for begins, _ in seen] == [True, False] * 3
    assert all(0 < count <= 2 * TAIL // 300 for _, count in seen), "bytes of a look are bounded"
    assert folder.counts["skipped"] > 1_000_000


def test_operations_of_a_dump_that_was_read_in_part_do_not_count(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspector_files, "MAX_READ", TAIL)
    folder.write(1.0)
    folder.read()
    folder.write(*[0.001] * 400)
    folder.read()  # skips
    folder.write(*[0.001] * 100, at=201.0)
    folder.write(*[0.001] * 400, at=202.0)
    (batch,) = folder.read()
    assert (batch.at, [count for _, count in batch.sums.values()]) == (201.0, [100])


def test_links_pipes_folders_and_foreign_files_are_not_read(folder: Folder, tmp_path: Path) -> None:
    folder.write(1.0)
    folder.log.rename(tmp_path / "secret")
    folder.log.symlink_to(tmp_path / "secret")
    assert folder.read() == []
    assert "h0-pid41000.log" in folder.files.problem
    folder.log.unlink()
    os.mkfifo(folder.log)
    assert folder.read() == []
    assert "not a regular file" in folder.files.problem
    folder.log.unlink()
    folder.log.mkdir()
    assert folder.read() == []
    folder.log.rmdir()
    folder.write(1.0)
    assert folder.read("pid:7") == []


def test_a_sparse_huge_file_and_garbage_are_bounded(folder: Folder) -> None:
    with folder.log.open("wb") as log:
        log.truncate(1 << 40)
    assert folder.read() == []
    with folder.log.open("ab") as log:
        log.write(b"\nrubbish\n" + b"\xff" * 100 + b"\n")
    folder.read()
    folder.write(1.0)
    folder.read()
    assert folder.counts["malformed"] >= 1


def test_of_two_hosts_with_one_pid_in_a_shared_folder_this_hosts_file_counts(folder: Folder) -> None:
    folder.write(1.0)
    other = folder.path / "h1-pid41000.log"
    other.write_bytes(folder.log.read_bytes())
    folder.read()
    folder.write(2.0)
    other.write_bytes(other.read_bytes() * 3)
    assert folder.seconds() == 2.0
    folder.log.rename(folder.path / "h2-pid41000.log")
    assert folder.read() == [], "neither of the two is this host's"


def test_a_folder_of_each_job_is_read_and_no_deeper_one(folder: Folder) -> None:
    job = folder.path / "nccl-inspector-77"
    (job / "deeper").mkdir(parents=True)
    folder.write(1.0)
    folder.log.rename(job / folder.log.name)
    (job / "deeper" / "h0-pid41001.log").write_bytes((job / folder.log.name).read_bytes())
    assert [batch.process for batch in folder.read(PID, "pid:41001")] == [PID]


def test_the_files_of_a_folder_are_bounded(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspector_files, "MAX_ENTRIES", 10)
    for number in range(20):
        (folder.path / f"x{number}").touch()
    folder.read()
    assert "more than 10 files" in folder.files.problem


@pytest.mark.parametrize("prefix", ["", "GPU-"])
def test_a_textfile_is_read_once_when_it_is_complete(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    file, now = folder.path / f"nccl_inspector_metrics_{prefix}{uuid(1)}.prom", [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])

    def rewrite(seconds: float) -> None:
        file.write_text("".join(f"{line}\n" for line in means([Operation(0, GROUP, 1, seconds)])) + "cut{")
        os.utime(file, (now[0], now[0]))

    rewrite(1.0)
    assert folder.read(uuid(1)) == [], "it may not be complete yet"
    now[0] += 2
    assert [batch.begins for batch in folder.read(uuid(1))] == [True]
    assert folder.read(uuid(1)) == []
    rewrite(2.0)
    now[0] += 2
    (batch,) = folder.read(uuid(1))
    assert (batch.process, batch.at, [*batch.sums.values()]) == (uuid(1), 1002.0, [[2.0, 1]])
    assert folder.counts["malformed"] == 2


def test_a_textfile_of_rccl_is_found_by_the_uuid_that_pytorch_has(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    # HIP's UUID is the serial number in ASCII, and both print its 16 bytes in hexadecimal.
    name = str(UUID(bytes=b"9f444a2fb30adeb0"))
    assert name == "39663434-3461-3266-6233-306164656230"
    file = folder.path / f"nccl_inspector_metrics_{name}.prom"
    file.write_bytes((CAPTURES / "rccl_inspector.prom").read_bytes())
    os.utime(file, (1000.0, 1000.0))
    monkeypatch.setattr("time.time", lambda: 1002.0)
    (batch,) = folder.read(name)
    assert (batch.process, batch.at) == (name, 1000.0)
    assert sorted(total[0] for total in batch.sums.values()) == pytest.approx([310e-6, 412e-6])
    assert folder.counts["malformed"] == 0


def test_a_missing_folder_is_a_problem_and_no_error(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "none")
    assert folder.read() == []
    assert "No such file" in folder.files.problem
