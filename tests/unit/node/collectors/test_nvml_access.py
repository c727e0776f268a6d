"""A dead GPU and one that the exporter may not open, distinguished by device files and the driver's own list."""

from __future__ import annotations

from pathlib import Path

import pytest

from flopwatch.node.collectors.nvml.access import denied, driver_loaded, kernel_address

ADDRESS = "00000000:CA:00.0"
OTHERS, LISTED, ANOTHER_MINOR, NO_MINOR = "others", "Device Minor: \t 3\n", "Device Minor: \t 5\n", "Model: H100\n"


@pytest.mark.parametrize(
    ("list_of_gpus", "seen", "files", "expected"),
    [
        (LISTED, None, ["nvidia3"], False),
        (LISTED, None, ["nvidia5"], True),
        (ANOTHER_MINOR, 3, ["nvidia3"], True),
        (NO_MINOR, 3, [], True),
        (NO_MINOR, None, [], False),
        (OTHERS, 3, [], False),
        (None, 3, [], True),
        (None, 3, ["nvidia3"], False),
        (None, None, [], False),
    ],
    ids=[
        "there",
        "no file",
        "the driver's number counts",
        "NVML's number stands in",
        "no number",
        "gone from the list",
        "no list, no file",
        "no list",
        "nothing known",
    ],
)
def test_a_gpu_is_denied_where_it_is_known_to_be_there_and_its_device_file_cannot_be_opened(
    tmp_path: Path, list_of_gpus: str | None, seen: int | None, files: list[str], expected: bool
) -> None:
    proc, dev = tmp_path / "proc", tmp_path / "dev"
    dev.mkdir()
    for file in files:
        (dev / file).touch()
    if list_of_gpus is not None:
        folder = proc / "driver/nvidia/gpus" / ("0000:53:00.0" if list_of_gpus is OTHERS else "0000:ca:00.0")
        folder.mkdir(parents=True)
        (folder / "information").write_text(list_of_gpus)
    assert denied(ADDRESS, seen, proc, dev) is expected


@pytest.mark.parametrize(
    ("pci", "expected"),
    [(ADDRESS, "0000:ca:00.0"), ("00010000:3B:00.0", "10000:3b:00.0"), ("00000008:01:00.0", "0008:01:00.0")],
)
def test_an_address_is_written_as_the_kernel_writes_it(pci: str, expected: str) -> None:
    assert kernel_address(pci) == expected


def test_the_kernel_shows_whether_there_is_a_driver(tmp_path: Path) -> None:
    assert not driver_loaded(tmp_path)
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    (tmp_path / "driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  590.48.01\n")
    assert driver_loaded(tmp_path)
